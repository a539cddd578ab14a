"""How an epoch's batches come about: the seam where inspectors plug in.

A strategy says what each batch of an epoch holds and where its rows are; the loader owns threads, order, memory and statistics,
the same for all. ``ondemand`` samples when asked and lets the store plan each gather. A strategy that looks ahead samples in
:meth:`prepare` (or in a thread of its own), plans, and answers :meth:`EpochRun.batch` from its run files, with a plan a
feature.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from featstore.cache.base import PolicyContext
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Reservation
from featstore.errors import BusyError
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan
from featstore.partition.batcher import EpochOrder, RandomBatcher
from featstore.plan.superbatch import SuperbatchInspector, planning_bytes
from featstore.run.prefetch import Stopwatch
from featstore.sampling.batch import SampledBatch, Sampler
from featstore.storage.rundir import DiskBudget, RunDirectory

__all__ = ["STRATEGIES", "EpochRun", "OnDemand", "Planning", "Prepared", "Setup", "Strategy", "Superbatch"]

MOST_AUTO_BATCHES = 200


@dataclass(frozen=True)
class Planning:
    """What a strategy that looks ahead may use.

    Parameters
    ----------
    policy : PlannedPolicy
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Where run directories are made.
    """

    policy: PlannedPolicy
    superbatch: int | str
    disk: int | None
    run_dir: str


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
    planning : Planning, optional
        For strategies that look ahead.
    """

    graph: Any
    sampler: Sampler
    batcher: RandomBatcher
    features: tuple[str, ...]
    threads: int
    watch: Stopwatch
    planning: Planning | None = None


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

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor:
        """Return the rows of feature ``name`` for the batch, counted in ``tally``; called in order, by one thread."""
        ...

    def close(self) -> None:
        """Let go of threads, files and memory; may be called again."""
        ...


class Strategy(Protocol):
    """Made once a loader."""

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` at batch number ``start``."""
        ...

    def close(self) -> None:
        """Give back what the strategy holds between epochs; may be called again."""
        ...


class OnDemand:
    """Sample when a batch is asked for, read what the host cache lacks."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

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

    def batch(self, position: int) -> Prepared:
        with self._setup.watch.time("sample"):
            seeds = self._order.seeds(position)
            return Prepared(self._setup.sampler.sample(seeds, epoch=self._order.epoch, index=position))

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor:
        rows: torch.Tensor = self._setup.graph.features[name].take(prepared.sampled.input_ids, tally=tally)
        return rows

    def close(self) -> None:
        pass


class Superbatch:
    """Sample many batches ahead, plan the cache over them, run the plans (Ginex, with look-ahead into the next superbatch)."""

    def __init__(self, setup: Setup) -> None:
        if setup.planning is None:
            raise ValueError("superbatches need a planned policy")
        self._setup = setup
        self._running: weakref.ref[_SuperbatchEpoch] | None = None
        graph, order = setup.graph, setup.batcher.epoch(0)
        n_accesses = stored = 0
        if len(order):
            sampled = setup.sampler.sample(order.seeds(0), epoch=0, index=0)
            n_accesses = len(sampled.input_ids)
            width = 4 if graph.num_nodes < 2**31 else 8
            stored = n_accesses * (width + 12) + sum(4 * (len(block.src) + block.n_dst) for block in sampled.blocks)
        self._planning = replace(setup.planning, superbatch=_choose_size(setup, n_accesses, stored))
        # Batches differ in size by a few percent, and a window is two superbatches.
        expected = 2 * int(self._planning.superbatch) * n_accesses * 9 // 8
        self._memory = graph.budget.reserve("planner", planning_bytes(graph.num_nodes, expected))
        self._finalizer = weakref.finalize(self, self._memory.release)

    def close(self) -> None:
        """Give the planner's memory back; may be called again."""
        self._finalizer()

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` with an empty cache; sampling starts now, in the background.

        Raises
        ------
        BusyError
            Another epoch of this loader is running: both would change one cache.
        """
        running = None if self._running is None else self._running()
        if running is not None and not running.closed:
            raise BusyError("another epoch of this loader is running; superbatches have one cache, so end or drop it first")
        run = _SuperbatchEpoch(self._setup, self._planning, self._setup.batcher.epoch(epoch), start, self._memory)
        self._running = weakref.ref(run)
        return run


def _choose_size(setup: Setup, n_accesses: int, stored: int) -> int:
    """As many batches as the disk and an eighth of the memory allow, by the rows and stored bytes of one sampled batch."""
    planning, graph = setup.planning, setup.graph
    assert planning is not None
    if not isinstance(planning.superbatch, str):
        return planning.superbatch
    disk = planning.disk
    if disk is None:
        disk = shutil.disk_usage(os.path.dirname(planning.run_dir) or ".").free // 4
    by_disk = disk // (4 * stored + 1)  # four superbatches lie on disk at once
    spare = max(0, graph.budget.total // 8 - planning_bytes(graph.num_nodes, 0))
    by_memory = spare // (2 * planning_bytes(0, n_accesses) + 1)
    return int(max(1, min(by_disk, by_memory, MOST_AUTO_BATCHES, len(setup.batcher))))


class _SuperbatchEpoch:
    def __init__(self, setup: Setup, planning: Planning, order: EpochOrder, start: int, memory: Reservation) -> None:
        graph = setup.graph
        self._setup = setup
        self.closed = False
        self._ran: dict[str, int] = {}  # the last batch whose plan ran, a feature
        caches = [graph.features[name].cache for name in setup.features]
        capacity = min((0 if cache is None else cache.capacity for cache in caches), default=0)
        self._caches: list[FeatureCache] = [cache for cache in caches if cache is not None]
        self._runs: RunDirectory | None = None
        try:
            planning.policy.start(capacity, PolicyContext(graph.num_nodes, 1))
            self._runs = RunDirectory(planning.run_dir)
            self._inspector = SuperbatchInspector(
                lambda position: setup.sampler.sample(order.seeds(position), epoch=order.epoch, index=position),
                start=start,
                stop=len(order),
                size=int(planning.superbatch),
                n_hops=len(getattr(setup.sampler, "fanouts", ())),
                n_rows=graph.num_nodes,
                policy=planning.policy,
                runs=self._runs,
                disk=DiskBudget(planning.disk),
                memory=memory,
                pool=graph.pool,
                threads=setup.threads,
                time=setup.watch.time,
            )
            for cache in self._caches:
                cache.clear()
                cache.in_use = True
        except BaseException:
            if self._runs is not None:
                self._runs.close()
            raise

    @property
    def threads(self) -> int:
        return 1  # reading samples back is quick; the sampling threads are the inspector's

    def batch(self, position: int) -> Prepared:
        sampled, plan = self._inspector.batch(position)
        return Prepared(sampled, dict.fromkeys(self._setup.features, plan))

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor:
        assert prepared.plans is not None
        store, position = self._setup.graph.features[name], prepared.sampled.index
        rows: torch.Tensor
        if self._ran.get(name, -1) < position:
            rows = store.run_plan(prepared.plans[name], tally)
            self._ran[name] = position
        else:
            # Asked again, because memory was short after the plan had run: its changes are made, so the rows are looked up.
            rows = store.take(prepared.sampled.input_ids, tally=tally)
        if min(self._ran.get(each, -1) for each in self._setup.features) >= position:
            self._inspector.passed(position)
        return rows

    def close(self) -> None:
        if not self.closed:
            for cache in self._caches:
                cache.in_use = False
            self._inspector.close()
            if self._runs is not None:
                self._runs.close()
            self.closed = True


STRATEGIES: Mapping[str, Callable[[Setup], Strategy]] = {"ondemand": OnDemand, "superbatch": Superbatch}
