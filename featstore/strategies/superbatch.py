"""``Superbatch``: many batches sampled ahead, the cache planned over them (Ginex), with look-ahead into the next superbatch."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from featstore.cache.base import Policy, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Reservation, parse_disk
from featstore.errors import BudgetError, BusyError
from featstore.graph.topology import NeighborCache
from featstore.plan.overlapped import Pack
from featstore.plan.planmemory import PLANNER_SHARE, planning_bytes
from featstore.storage.rundir import DiskBudget, RunDirectory, finalize_here
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.leases import OwnCaches, make_room
from featstore.strategies.options import CACHE, DISK, LENGTH, RUN_DIR, option, policy_of
from featstore.strategies.registry import register_strategy
from featstore.strategies.requests import BatchSize
from featstore.strategies.setup import Planning, Setup
from featstore.strategies.sizing import ask, hold_share, size_caches
from featstore.strategies.superbatchepoch import SuperbatchEpoch, ahead_bytes
from featstore.strategies.switch import CacheSwitch

__all__ = ["Superbatch", "SuperbatchRunner", "choose_size", "least_size", "plan_ahead", "run_planned"]

MOST_AUTO_BATCHES = 200
IDLE_COST = 10  # what rests between epochs is taken back before a cache is
SCORING_BYTES = 24  # a node: two degrees and a score, while a neighbour cache is chosen


@register_strategy("superbatch")
@dataclass(frozen=True)
class Superbatch(Strategy):
    """Sample many batches ahead to disk, plan the cache over them, then gather (Ginex), and look one superbatch further.

    The next superbatch is sampled before one is planned, both beside the loop, and the cache survives from one to the next.

    Parameters
    ----------
    cache : int, str, float or None
        Host cache of the features: bytes (``"1GiB"``), a share of the rows (``"10%"`` or ``0.1``), ``"auto"`` for what batches
        leave of the memory, None for no cache.
    policy : str, Policy or class
        A planned one.
    length : int or "auto"
        Batches a superbatch; ``"auto"`` takes as many as the disk and an eighth of the memory allow, 200 at most.
    disk : int, str or None
        Most bytes of run files at once (about four superbatches' samples and plans), or a multiple of the features that are
        loaded (``"1.5x"``); None: a quarter of the free disk.
    run_dir : path-like or None
        Where run files go, in a directory of their own that is removed afterwards, and after a crash by the next run; None:
        ``<dataset>.runs`` beside the dataset.

    References
    ----------
    Park et al., Ginex, VLDB 2022, sections 3 and 4.
    """

    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    policy: str | Policy | type[Policy] = option("belady", policy_of(PlannedPolicy), "which rows stay in memory")
    length: int | str = option("auto", LENGTH, "batches a superbatch")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")

    def run(self, setup: Setup) -> Runner:
        """See :class:`~featstore.Strategy`."""
        planning = plan_ahead(setup, self.policy, self.length, self.disk, self.run_dir)
        return run_planned(replace(setup, planning=planning), SuperbatchRunner, self.cache)


def plan_ahead(
    setup: Setup,
    policy: str | Policy | type[Policy],
    length: int | str,
    disk: int | str | None,
    run_dir: str | os.PathLike[str] | None,
    *,
    overlap: bool = True,
) -> Planning:
    """Return what a strategy that looks ahead may use; arguments as of :class:`Superbatch`."""
    graph = setup.graph
    n_bytes = None if disk is None else parse_disk(disk, graph.num_nodes * sum(setup.row_bytes.values()))
    left = None if n_bytes is None else n_bytes - setup.profile_bytes
    where = f"{graph.path}.runs" if run_dir is None else os.fsdecode(run_dir)
    return Planning(get_policy(policy), length, left, where, overlap, setup.miss_share)


RunnerType = TypeVar("RunnerType", bound="SuperbatchRunner")


def run_planned(setup: Setup, kind: type[RunnerType], cache: int | float | str | None) -> RunnerType:
    """Make a runner and its caches, in the place of the caches that the features have."""
    assert setup.planning is not None
    make_room(setup.graph, setup.features)
    if setup.needs is None:
        setup = ask(setup, kind, cache, setup.planning.policy)
    runner = kind(setup)
    try:
        runner.make_caches(cache)
    except BaseException:
        runner.close()
        raise
    return runner


class SuperbatchRunner:
    """Sample many batches ahead, plan the cache over them, run the plans.

    Rolling: the next superbatch is sampled before one is planned, both beside the loop. Serial (``overlap=False``): one
    superbatch after the other, planned alone, and one memory for neighbour and feature caches.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.planning is None:
            raise ValueError("superbatches need a planned policy")
        self.setup = self._setup = setup
        self.prefetch = setup.prefetch
        self._on_death: list[weakref.finalize[..., Any]] = []
        self._running: weakref.ref[SuperbatchEpoch] | None = None
        graph, n_batches = setup.graph, len(setup.batches)
        needs = setup.needs
        assert needs is not None
        batch = needs.batch
        n_accesses = self._n_accesses = batch.n_rows
        width = 4 if graph.num_nodes < 2**31 else 8
        stored = n_accesses * (width + 12) + 4 * batch.n_stored + self._packed_bytes(n_accesses)
        self._planning = replace(setup.planning, superbatch=choose_size(setup.planning, graph, n_batches, n_accesses, stored))
        planned = _planner_bytes(setup, n_accesses, int(self._planning.superbatch), spilled=False)
        spilled = _planner_bytes(setup, n_accesses, int(self._planning.superbatch), spilled=True)
        beside = self.least_bytes(setup, batch)
        least = _planner_bytes(setup, n_accesses, least_size(setup), spilled=True)
        room = least + needs.spare()
        self._memory = graph.budget.reserve(
            "planner", planned if planned <= min(room, graph.budget.total // PLANNER_SHARE) else spilled
        )
        self._ahead = graph.budget.reserve("read ahead", 0)
        assert isinstance(self._planning.policy, PlannedPolicy)
        self._finalizer = weakref.finalize(self, _release, self._planning.policy, self._memory, self._ahead)
        if setup.planning.overlap:
            self._ahead.resize(ahead_bytes(setup, min(graph.budget.total // 16, needs.spare(beside - least))))
        self._switch: CacheSwitch | None = None
        self._caches = OwnCaches(graph, setup.features)
        # Between epochs all but the least is on loan.
        self._least, self._useful = least, self._memory.n_bytes
        self._idle = threading.Lock()  # held while an epoch begins
        self._loan = graph.budget.lend(self._idle_bytes, self._give_back, cost=IDLE_COST)

    plans = True

    @property
    def _is_running(self) -> bool:
        running = None if self._running is None else self._running()
        return running is not None and not running.closed

    def _idle_bytes(self) -> int:
        """Return the bytes that the next epoch can do without."""
        if self._is_running or self._idle.locked():
            return 0
        lent: int = max(0, self._memory.n_bytes - self._least) + self._ahead.n_bytes
        return lent

    def _give_back(self, n_bytes: int) -> int:
        """Keep the least between epochs."""
        if not self._idle.acquire(blocking=False):
            return 0
        try:
            return 0 if self._is_running else self._shrink()
        finally:
            self._idle.release()

    def _shrink(self) -> int:
        held: int = self._memory.n_bytes + self._ahead.n_bytes
        assert isinstance(self._planning.policy, PlannedPolicy)
        CheckedPolicy(self._planning.policy).keep_memory(False)
        self._memory.resize(min(self._memory.n_bytes, self._least))
        self._ahead.resize(0)
        left: int = self._memory.n_bytes + self._ahead.n_bytes
        return held - left

    def _grow(self) -> None:
        """Have for an epoch what was given back, as far as it can be had."""
        if self._memory.n_bytes < self._useful:
            # Without it next positions are spilled; but in the serial schedule a neighbour cache is chosen in this memory, too.
            with suppress(*() if self._switch is not None else (BudgetError,)):
                self._memory.resize(self._useful)

    @classmethod
    def least_bytes(cls, setup: Setup, batch: BatchSize) -> int:
        """Return what the strategy holds at the least for as long as it runs: the planner, next positions on disk."""
        return _planner_bytes(setup, batch.n_rows, least_size(setup), spilled=True)

    def _packed_bytes(self, n_accesses: int) -> int:
        """Return the bytes of copied rows that a batch has on disk, beside its samples and plan."""
        return 0

    def _packer(self, runs: RunDirectory, disk: DiskBudget) -> Pack | None:
        """Return what copies the rows that an epoch's caches will lack into extents."""
        return None

    def make_caches(self, size: int | float | str | None) -> None:
        """Make the host caches, empty; in the serial schedule the neighbour cache has the same bytes."""
        setup = self._setup
        if size is None:
            return
        sizes, self.prefetch = size_caches(setup, size, self._planning.policy)
        if sizes:
            with setup.watch.time("cache"):
                self._make_caches(sizes, on_loan=size == "auto" or setup.lends_caches)
            hold_share(setup, sizes)

    def _make_caches(self, sizes: Mapping[str, int], *, on_loan: bool) -> None:
        setup = self._setup
        widths = {name: store.nbytes // len(store) for name, store in setup.graph.features.items()}
        n = setup.graph.num_nodes
        capacities = {name: FeatureCache.capacity_for(n_bytes, widths[name], n, None) for name, n_bytes in sizes.items()}
        if self._planning.overlap:
            self._caches.make(capacities, self._cache_room if on_loan else None)
        else:
            n_bytes = sum(FeatureCache.least_bytes(capacity, widths[name], n, None) for name, capacity in capacities.items())
            room = self._cache_room if on_loan else None
            self._switch = CacheSwitch(setup.graph, capacities, n_bytes, self._memory.n_bytes, setup.reads, room)
            self._on_death.append(finalize_here(self, self._switch.close))

    def _cache_room(self) -> int:
        """Return the bytes that caches may take, made anew."""
        setup = self._setup
        assert setup.needs is not None
        setup.graph.pool.trim()
        return setup.needs.left_for_cache(setup.graph.budget.available, setup.prefetch)[0]

    def stats(self) -> dict[str, Any]:
        """Nothing beyond what a loader says."""
        return {}

    def close(self, failed: bool = False) -> None:
        """Give the planner's memory back, that of reading ahead, and in the serial schedule the caches'; may be called again."""
        self._loan.end()
        if self._switch is not None:
            self._switch.close()
        self._finalizer()
        for finalizer in self._on_death:
            finalizer.detach()  # so that Ctrl-C is not lost in it

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` with an empty cache; sampling starts with the first batch asked for, in the background.

        Raises
        ------
        BusyError
            Another epoch that follows plans is running, of this loader or of another one: both would change one cache.
        BudgetError
            Another loader has taken the cache's place since, and there is no memory to make it anew.
        """
        if self._is_running:
            raise BusyError("another epoch of this loader is running; superbatches have one cache, so end or drop it first")
        with self._idle:
            return self._begin(epoch, start)

    def _begin(self, epoch: int, start: int) -> EpochRun:
        self._grow()
        order = self._setup.batches.epoch(epoch)
        caches = self._caches if self._switch is None else self._switch
        claim = caches.claim()
        try:
            run = SuperbatchEpoch(
                self._setup,
                self._planning,
                order,
                start,
                memory=self._memory,
                ahead=self._ahead,
                caches=caches,
                claim=claim,
                packer=self._packer,
            )
        except BaseException:
            caches.release()
            raise
        self._running = weakref.ref(run)
        return run


def _is_checked(planning: Planning) -> bool:
    """Return whether the policy's plans are checked, which takes memory."""
    return isinstance(planning.policy, PlannedPolicy) and CheckedPolicy(planning.policy).is_checked


def least_size(setup: Setup) -> int:
    """Return the batches of the smallest superbatch that the loader allows."""
    assert setup.planning is not None
    size = setup.planning.superbatch
    return 1 if isinstance(size, str) else min(size, max(1, len(setup.batches)))


def _planner_bytes(setup: Setup, n_accesses: int, size: int, *, spilled: bool) -> int:
    """Return what planning superbatches of ``size`` batches holds, by the rows of one."""
    graph, planning = setup.graph, setup.planning
    assert planning is not None
    # Batches differ in size by a few percent, and a window is two superbatches.
    longest = n_accesses * 9 // 8
    planned = size * longest
    accesses = planned * (2 if planning.overlap else 1)
    needed = planning_bytes(graph.num_nodes, accesses, planned, longest, spilled=spilled, checked=_is_checked(planning))
    if not planning.overlap:
        needed = max(needed, SCORING_BYTES * graph.num_nodes + NeighborCache.scratch_bytes(graph.topology))
    return needed


def _release(policy: PlannedPolicy, *held: Reservation) -> None:
    for reservation in held:
        reservation.release()
    CheckedPolicy(policy).keep_memory(False)


def choose_size(planning: Planning, graph: Any, n_batches: int, n_accesses: int, stored: int) -> int:
    """As many batches as disk and the planner's share of memory allow, by the rows and stored bytes of one sampled batch."""
    if not isinstance(planning.superbatch, str):
        return min(planning.superbatch, max(1, n_batches))
    disk = planning.disk
    if disk is None:
        disk = shutil.disk_usage(os.path.dirname(planning.run_dir) or ".").free // 4
    # Four superbatches lie on disk at once; in the serial schedule one, and a neighbour cache in a quarter of the disk.
    by_disk = disk // (4 * stored + 1) if planning.overlap else disk // 4 * 3 // (stored + 1)
    fixed = planning_bytes(graph.num_nodes, 0, longest=n_accesses, checked=_is_checked(planning))
    spare = max(0, graph.budget.total // PLANNER_SHARE - fixed)
    by_memory = spare // (planning_bytes(0, n_accesses * (2 if planning.overlap else 1), n_accesses) + 1)
    return int(max(1, min(by_disk, by_memory, MOST_AUTO_BATCHES, n_batches)))
