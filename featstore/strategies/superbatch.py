"""``Superbatch``: many batches sampled ahead, the cache planned over them (Ginex), with look-ahead into the next superbatch."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from featstore.cache.base import Policy, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Reservation, parse_disk
from featstore.errors import BudgetError, BusyError
from featstore.gather.ahead import ReadAhead
from featstore.gather.executor import Tally
from featstore.gather.plan import Tier
from featstore.graph.topology import NeighborCache
from featstore.plan.overlapped import Pack
from featstore.plan.planmemory import PLANNER_SHARE, planning_bytes
from featstore.plan.superbatches import SuperbatchInspector
from featstore.sampling.drawn import SampledEpoch
from featstore.storage.rundir import DiskBudget, RunDirectory, finalize_here
from featstore.strategies.base import EpochRun, Prepared, Runner, Strategy
from featstore.strategies.leases import Claim, OwnCaches, make_room
from featstore.strategies.options import CACHE, DISK, LENGTH, RUN_DIR, option, policy_of
from featstore.strategies.registry import register_strategy
from featstore.strategies.requests import BatchSize
from featstore.strategies.setup import Planning, Setup
from featstore.strategies.sizing import ask, hold_share, size_caches
from featstore.strategies.switch import CacheSwitch, NoSwitch

__all__ = ["Superbatch", "SuperbatchRunner", "ahead_bytes", "choose_size", "least_size", "plan_ahead", "run_planned"]

MOST_AUTO_BATCHES = 200
MOST_AHEAD_BYTES = 1 << 30
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


class SuperbatchRunner(Runner):
    """Sample many batches ahead, plan the cache over them, run the plans.

    Rolling: the next superbatch is sampled before one is planned, both beside the loop. Serial (``overlap=False``): one
    superbatch after the other, planned alone, and one memory for neighbour and feature caches.
    """

    plans = True

    def __init__(self, setup: Setup) -> None:
        if setup.planning is None:
            raise ValueError("superbatches need a planned policy")
        super().__init__(setup)
        self._setup = setup
        self._running: weakref.ref[_SuperbatchEpoch] | None = None
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
            finalize_here(self, self._switch.close)

    def _cache_room(self) -> int:
        """Return the bytes that caches may take, made anew."""
        setup = self._setup
        assert setup.needs is not None
        setup.graph.pool.trim()
        return setup.needs.left_for_cache(setup.graph.budget.available, setup.prefetch)[0]

    def close(self, failed: bool = False) -> None:
        """Give the planner's memory back, that of reading ahead, and in the serial schedule the caches'; may be called again."""
        self._loan.end()
        if self._switch is not None:
            self._switch.close()
        self._finalizer()

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
            run = _SuperbatchEpoch(
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


def ahead_bytes(setup: Setup, n_bytes: int) -> int:
    """Return the memory that misses are read ahead into.

    Of ``n_bytes`` no more than a quarter of the features, beyond which every other page is wanted anyhow.
    """
    features = setup.graph.features
    n_bytes = min(n_bytes, sum(features[name].nbytes for name in setup.features) // 4, MOST_AHEAD_BYTES)
    return n_bytes // 4096 * 4096


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


class _SuperbatchEpoch(EpochRun):
    def __init__(
        self,
        setup: Setup,
        planning: Planning,
        order: SampledEpoch,
        start: int,
        *,
        memory: Reservation,
        ahead: Reservation,
        caches: OwnCaches | CacheSwitch,
        claim: Claim,
        packer: Callable[[RunDirectory, DiskBudget], Pack | None],
    ) -> None:
        graph = setup.graph
        assert isinstance(planning.policy, PlannedPolicy)
        self._setup = setup
        self._caches, self._claim = caches, claim
        self._switch = switch = caches if isinstance(caches, CacheSwitch) else None
        self.closed = False
        self._ran: dict[str, int] = {}  # the last batch whose plan ran, a feature
        stores = [graph.features[name] for name in setup.features]
        if switch is None:
            capacity = min((0 if store.cache is None else store.cache.capacity for store in stores), default=0)
        else:
            capacity = switch.capacity
        self._runs: RunDirectory | None = None
        self._ahead: ReadAhead | None = None
        self._ahead_memory = ahead
        self._beginning = threading.RLock()
        self._has_begun = False
        try:
            for store in stores:
                if store.cache is not None:
                    store.cache.clear()
            self._runs = RunDirectory(planning.run_dir)
            disk = DiskBudget(planning.disk)
            if switch is not None:
                switch.begin(self._runs, disk)
            pack = packer(self._runs, disk)
            self._inspector = SuperbatchInspector(
                order.sample,
                start=start,
                stop=len(order),
                size=int(planning.superbatch),
                n_rows=graph.num_nodes,
                policy=planning.policy,
                capacity=capacity,
                runs=self._runs,
                disk=disk,
                memory=memory,
                pool=graph.pool,
                threads=setup.threads if setup.needs is None else setup.needs.samplers(setup.threads),
                time=setup.watch.time,
                # Without features there is no cache to switch, but the schedule is the one that was asked for.
                switch=switch if switch is not None or planning.overlap else NoSwitch(),
                pack=pack,
            )
            if setup.features and pack is None:
                if planning.overlap and not ahead.n_bytes:  # given back by an earlier epoch
                    assert setup.needs is not None
                    with suppress(BudgetError):  # others were quicker: misses are then read when they are needed
                        ahead.resize(ahead_bytes(setup, min(graph.budget.total // 16, setup.needs.unused())))
                widths = {name: store.nbytes // max(1, len(store)) for name, store in zip(setup.features, stores, strict=True)}
                read = {name: store.read_rows for name, store in zip(setup.features, stores, strict=True)}
                # In the serial schedule plans are made while nothing is read ahead, and the other way round: one memory for both.
                idle = min(memory.n_bytes - CheckedPolicy(planning.policy).nbytes, graph.budget.total // 8)
                n_bytes = ahead.n_bytes if switch is None else ahead_bytes(setup, max(0, idle))
                if n_bytes:
                    self._ahead = ReadAhead(self._inspector.misses, read, widths, start, len(order), n_bytes, setup.reads.add)
        except BaseException:
            if self._runs is not None:
                self._runs.close()
            raise

    @property
    def threads(self) -> int:
        return self._setup.threads  # a read of samples or plans waits behind those of features

    def _begin(self) -> None:
        """Start the threads, with the first batch asked for: whoever asks then closes this epoch, whatever Ctrl-C interrupts."""
        with self._beginning:
            if not self._has_begun:
                self._has_begun = True
                self._inspector.begin()
                if self._ahead is not None:
                    self._ahead.begin()

    def batch(self, position: int) -> Prepared:
        self._begin()
        sampled, plan = self._inspector.batch(position)
        return Prepared(position, sampled, dict.fromkeys(self._setup.features, plan))

    def may_begin(self, position: int) -> bool:
        return self._inspector.may_begin(position)

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor:
        assert prepared.plans is not None
        store, position = self._setup.graph.features[name], prepared.position
        rows: torch.Tensor
        if self._ran.get(name, -1) < position:
            ahead = None if self._ahead is None else self._ahead.take(position, name)
            packed = self._inspector.source(position, name)
            before = 0.0 if packed is None else packed.waited_s
            rows = store.run_plan(
                prepared.plans[name],
                prepared.sampled.input_ids.numpy(),
                tally,
                ahead,
                None if packed is None else {Tier.PACKED: packed},
            )
            if packed is not None:
                self._setup.watch.add("read", packed.waited_s - before)
            self._ran[name] = position
        else:
            # Asked again, because memory was short after the plan had run: its changes are made, so the rows are looked up.
            rows = store.take(prepared.sampled.input_ids, tally=tally)
        return rows

    def passed(self, position: int) -> None:
        if self._ahead is not None:
            self._ahead.passed(position)
        self._inspector.passed(position)

    def spare(self) -> bool:
        freed = self._inspector.pause()
        if self._ahead is not None and self._switch is None and self._ahead.give_back():
            # In the serial schedule the memory is the planner's, whose turn comes again.
            self._ahead_memory.resize(0)
            freed = True
        if freed:
            self._inspector.freed()
        return freed

    def stop(self) -> None:
        self._inspector.stop()

    def close(self) -> None:
        if not self.closed:
            self._inspector.stop()
            if self._ahead is not None:
                self._ahead.close()
            self._inspector.close()
            self._caches.release()
            if self._switch is not None:
                self._switch.end()
            if self._runs is not None:
                self._runs.close()
            self.closed = True
