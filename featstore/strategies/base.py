"""How an epoch's batches come about: the seam where inspectors plug in.

A strategy says what each batch of an epoch holds and where its rows are; the loader owns threads, order, memory and statistics,
the same for all. ``ondemand`` samples when asked and lets the store plan each gather. A strategy that looks ahead samples in
:meth:`prepare` (or in a thread of its own), plans, and answers :meth:`EpochRun.batch` from its run files, with a plan a
feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from featstore.cache.base import Policy
from featstore.gather.device import Apart
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan
from featstore.graph.policyinputs import Given
from featstore.sampling.batch import SampledBatch

__all__ = ["EpochRun", "Prepared", "Strategy"]


@dataclass(frozen=True)
class Prepared:
    """A batch before its gather: its sample, and a plan a feature; without plans the store plans on the fly."""

    sampled: SampledBatch
    plans: Mapping[str, BatchPlan] | None = None


class EpochRun(Protocol):
    """One epoch under way."""

    @property
    def threads(self) -> int:
        """How many threads may call :meth:`batch` at once."""
        ...

    @property
    def has_device_tier(self) -> bool:
        """Whether the device holds rows, so that batches are still put together when they are handed over."""
        ...

    def batch(self, position: int) -> Prepared:
        """Return the batch that runs as number ``position``; pure, so that it may be asked for again where memory was short."""
        ...

    def may_begin(self, position: int) -> bool:
        """Whether :meth:`batch` need not wait until earlier batches were gathered; waits for nobody."""
        ...

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor | Apart:
        """Return the rows of feature ``name`` for the batch, counted in ``tally``; called in order, by one thread.

        Where the device holds some of them: what another thread then puts together there.
        """
        ...

    def passed(self, position: int) -> None:
        """Hear that batch ``position`` has all its features, as have those before it."""
        ...

    def spare(self) -> bool:
        """Give back memory that only makes the epoch faster, as a batch does not fit; return whether there was some.

        Called by the thread that works on the batch, while nothing else is gathered.
        """
        ...

    def stop(self) -> None:
        """Hear that the epoch is over: whoever waits in :meth:`batch` or :meth:`gather` is sent away. Waits for nobody."""
        ...

    def close(self) -> None:
        """Let go of threads, files and memory; may be called again."""
        ...


class Strategy(Protocol):
    """Made once a loader."""

    def make_caches(self, sizes: Mapping[str, int], policy: str | Policy | type[Policy], counts: Given, *, on_loan: bool) -> None:
        """Make the host caches that the loader was asked for; called once at most, before the first epoch.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes of each feature's cache, for the same rows of all.
        policy : str, Policy or class
        counts : Given
            Accesses of each row, for policies that ask for them.
        on_loan : bool
            The loader chose the sizes itself: the budget may take the memory back.
        """
        ...

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` at batch number ``start``."""
        ...

    def close(self) -> None:
        """Give back what the strategy holds between epochs; may be called again."""
        ...
