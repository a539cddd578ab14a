"""How an epoch's batches come about: the seam where inspectors plug in.

A strategy says what each batch of an epoch holds and where its rows are; the loader owns threads, order, memory and statistics,
the same for all. ``ondemand`` samples when asked and lets the store plan each gather. A strategy that looks ahead samples in
:meth:`prepare` (or in a thread of its own), plans, and answers :meth:`EpochRun.batch` from its run files, with a plan a
feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from featstore.gather.plan import BatchPlan
from featstore.partition.batcher import EpochOrder, RandomBatcher
from featstore.sampling.batch import SampledBatch, Sampler

__all__ = ["STRATEGIES", "EpochRun", "OnDemand", "Prepared", "Setup", "Strategy"]


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
    """

    graph: Any
    sampler: Sampler
    batcher: RandomBatcher
    features: tuple[str, ...]
    threads: int


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

    def batch(self, position: int) -> Prepared:
        """Return the batch that runs as number ``position``; pure, so that it may be asked for again where memory was short."""
        ...

    def gather(self, name: str, prepared: Prepared) -> torch.Tensor:
        """Return the rows of feature ``name`` for the batch; called in order of positions, by one thread."""
        ...

    def close(self) -> None:
        """Let go of threads, files and memory; may be called again."""
        ...


class Strategy(Protocol):
    """Made once a loader."""

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` at batch number ``start``."""
        ...


class OnDemand:
    """Sample when a batch is asked for, read what the host cache lacks."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``; nothing is done ahead."""
        return _OnDemandEpoch(self._setup, self._setup.batcher.epoch(epoch))


class _OnDemandEpoch:
    def __init__(self, setup: Setup, order: EpochOrder) -> None:
        self._setup = setup
        self._order = order

    @property
    def threads(self) -> int:
        return self._setup.threads

    def batch(self, position: int) -> Prepared:
        seeds = self._order.seeds(position)
        return Prepared(self._setup.sampler.sample(seeds, epoch=self._order.epoch, index=position))

    def gather(self, name: str, prepared: Prepared) -> torch.Tensor:
        rows: torch.Tensor = self._setup.graph.features[name].take(prepared.sampled.input_ids)
        return rows

    def close(self) -> None:
        pass


STRATEGIES: Mapping[str, Callable[[Setup], Strategy]] = {"ondemand": OnDemand}
