"""How an epoch's batches come about: the seam where inspectors plug in.

A strategy says what each batch of an epoch holds and where its rows are; the loader owns threads, order, memory and statistics,
the same for all. ``ondemand`` samples when asked and lets the store plan each gather. A strategy that looks ahead samples in
:meth:`prepare` (or in a thread of its own), plans, and answers :meth:`EpochRun.batch` from its run files, with a plan a
feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from featstore.cache.base import Policy, get_policy
from featstore.errors import BudgetError
from featstore.gather.device import DeviceTier
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.sources import RowSource
from featstore.graph.policyinputs import Given
from featstore.partition.batcher import EpochOrder, RandomBatcher
from featstore.plan.offline import Pack
from featstore.run.prefetch import ReadCounts, Stopwatch
from featstore.sampling.batch import SampledBatch

if TYPE_CHECKING:
    from featstore.run.needs import BatchSize, Needs

__all__ = ["EpochRun", "OnDemand", "Planning", "Prepared", "Setup", "Strategy"]


@dataclass(frozen=True)
class Planning:
    """What a strategy that looks ahead may use.

    Parameters
    ----------
    policy : Policy
        A planned one; for packs also a static one.
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Where run directories are made.
    overlap : bool
        Sample and plan while earlier batches are gathered and trained on; otherwise one after the other.
    miss_share : float
        Of a batch's rows, those that the cache will lack, as far as is known: how much is packed of each.
    """

    policy: Policy
    superbatch: int | str
    disk: int | None
    run_dir: str
    overlap: bool = True
    miss_share: float = 1.0


@dataclass(frozen=True)
class Setup:
    """What a strategy may use.

    Parameters
    ----------
    graph : OutOfCoreGraph
    sampler : Sampler
    batcher : RandomBatcher
        Which seeds form which batch.
    features : tuple of str
    threads : int
    watch : Stopwatch
        Measures the stages.
    reads : ReadCounts
        Gets what is read of features outside gathers.
    planning : Planning, optional
        For strategies that look ahead.
    pack : Pack, optional
        For those that run offline samples; there are then no sampler and no seeds, and ``batcher`` orders batch numbers.
    device : torch.device
        Where batches are delivered.
    device_rows : int, optional
        Rows of the device's tier; None: as many as a layout that is there has.
    labels : str, optional
        Node data that the loader delivers.
    prefetch : int
        Batches made ahead of the one that the loop holds, while memory suffices.
    needs : Needs, optional
        What all stages need at the least: what a strategy takes beyond its part must not be another's.
    """

    graph: Any
    sampler: Any
    batcher: RandomBatcher
    features: tuple[str, ...]
    threads: int
    watch: Stopwatch
    reads: ReadCounts
    planning: Planning | None = None
    pack: Pack | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    device_rows: int | None = None
    labels: str | None = None
    prefetch: int = 0
    needs: Needs | None = None


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
    def devices(self) -> Mapping[str, DeviceTier]:
        """The rows that the device holds, by feature: such batches are still put together when they are handed over."""
        ...

    def batch(self, position: int) -> Prepared:
        """Return the batch that runs as number ``position``; pure, so that it may be asked for again where memory was short."""
        ...

    def may_begin(self, position: int) -> bool:
        """Whether :meth:`batch` need not wait until earlier batches were gathered; waits for nobody."""
        ...

    def plan(self, name: str, prepared: Prepared, tally: Tally) -> tuple[BatchPlan | None, Mapping[Tier, RowSource]]:
        """Return by which plan feature ``name`` is gathered for the batch now, and tiers that the plan names.

        Called in order, by one thread, which then gathers; again for the same batch where memory was short for that. No plan: the
        store makes one. ``tally`` gets what is read before.
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
        """Hear that the epoch is over: whoever waits in :meth:`batch` or :meth:`plan` is sent away. Waits for nobody."""
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


class OnDemand:
    """Sample when a batch is asked for, read what the host cache lacks."""

    plans = False

    @staticmethod
    def least_bytes(setup: Setup, batch: BatchSize) -> int:
        """Nothing is held."""
        return 0

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def make_caches(self, sizes: Mapping[str, int], policy: str | Policy | type[Policy], counts: Given, *, on_loan: bool) -> None:
        """See :class:`Strategy`."""
        graph = self._setup.graph
        for name, n_bytes in sizes.items():
            left = n_bytes
            while left > 0:
                try:
                    graph.make_cache(name, left, get_policy(policy), counts=counts, on_loan=on_loan)
                    break
                except BudgetError as error:
                    # Choosing the rows takes memory, too: less for a cache whose size is the loader's choice, or none.
                    if not on_loan:
                        raise
                    left -= max(n_bytes // 8, (error.needed or 0) - graph.budget.total)

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``; nothing is done ahead."""
        return _OnDemandEpoch(self._setup, self._setup.batcher.epoch(epoch))

    def close(self) -> None:
        """Nothing is held."""


class _OnDemandEpoch:
    def __init__(self, setup: Setup, order: EpochOrder) -> None:
        self._setup = setup
        self._order = order

    @property
    def threads(self) -> int:
        return self._setup.threads

    devices: Mapping[str, DeviceTier] = MappingProxyType({})

    def batch(self, position: int) -> Prepared:
        with self._setup.watch.time("sample"):
            seeds = self._order.seeds(position)
            return Prepared(self._setup.sampler.sample(seeds, epoch=self._order.epoch, index=position))

    def may_begin(self, position: int) -> bool:
        return True

    def plan(self, name: str, prepared: Prepared, tally: Tally) -> tuple[None, Mapping[Tier, RowSource]]:
        return None, {}

    def passed(self, position: int) -> None:
        pass

    def spare(self) -> bool:
        return False

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass
