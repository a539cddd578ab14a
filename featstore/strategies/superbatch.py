"""``Superbatch``: many batches are sampled ahead, and the cache is planned over them and the next superbatch (Ginex)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.fixed import FixedRows
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import parse_disk
from featstore.epochmemory import EpochMemory
from featstore.errors import BusyError, OptionError, PerformanceWarning, warn
from featstore.estimate.cost import (
    PLANNED,
    SAMPLE_BYTES,
    Estimate,
    Machine,
    Workload,
    gathered_s,
    pipeline_s,
    put_together,
    random_read_s,
    random_reads,
)
from featstore.estimate.length import Length, Planning
from featstore.plan.overlapped import PackSuperbatch
from featstore.storage.rundir import DiskQuota, RunDirectory, finalize_here, runs_directory
from featstore.strategies.accesscounts import AccessCounts
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.cachefilling import CacheFilling
from featstore.strategies.caches import ClaimedCaches, size_caches
from featstore.strategies.context import Context
from featstore.strategies.lists import with_lists
from featstore.strategies.memory import PLANNER, SAMPLED_AHEAD, Memory, ask, ask_of_bytes
from featstore.strategies.ondemand import stand_in
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, LENGTH, RUN_DIR, option, policy_of
from featstore.strategies.registry import register_strategy
from featstore.strategies.superbatchepoch import SuperbatchEpoch
from featstore.strategies.superbatchsizes import SuperbatchSizes
from featstore.strategies.switch import CacheSwitch

__all__ = ["Asked", "Superbatch", "SuperbatchRunner", "plan_ahead", "run_asked", "run_planned"]

Int64s = npt.NDArray[np.int64]
Asked = tuple[Context, Memory, SuperbatchSizes]  # a batch is measured, and the memory divided


@register_strategy("superbatch")
@dataclass(frozen=True)
class Superbatch(Strategy):
    """Sample many batches ahead to disk, plan the cache over them and the next superbatch, then gather (Ginex).

    The next superbatch is sampled before one is planned, both beside the loop. The rows in the cache survive from one superbatch
    to the next.

    Parameters
    ----------
    cache : int, str, float or None
        Host cache of the features: bytes (``"1GiB"``), or a share of the rows (``"10%"`` or ``0.1``). ``"auto"``: the memory
        that batches leave. None: no cache.
    policy : str, Policy or class
        A planned policy; or a static one, whose rows stay from the first batch to the last (Ginex-PG and Ali+PG of the paper).
    length : int or "auto"
        Batches a superbatch. ``"auto"`` takes as many as the disk and an eighth of the memory allow, 200 at most; with a static
        policy, which plans nothing ahead, the whole epoch. Next positions go to disk if fewer than 50 batches would fit
        otherwise.
    disk : int, str or None
        Most bytes of run files at once (about four superbatches' samples and plans), or a multiple of the features that are
        loaded (``"1.5x"``). None: no limit; ``length="auto"`` is chosen for half of the free disk, divided among the ranks of a
        machine. It rests on estimates: if a superbatch takes more than a small disk, the epoch ends with OSError (ENOSPC); give a
        larger disk or a smaller length.
    run_dir : path-like or None
        Directory for run files. They lie in a subdirectory that is removed afterwards, or by the next run after a crash. None:
        ``<dataset>.runs`` beside the dataset, or the temporary directory if nothing can be written there.
    edge_cache : int, str, float or None
        Host cache of the edge features, planned by the same policy over the edges of the batches: bytes, or a share of the
        edges. None: no plans; edges are read through the cache that an edge feature has, if any.

    Raises
    ------
    OptionError
        A value cannot be used; an ``edge_cache`` is given with a static policy, or with an instance of a policy.

    References
    ----------
    Park et al., Ginex, VLDB 2022, sections 3 and 4.
    """

    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    policy: str | Policy | type[Policy] = option("belady", policy_of(PlannedPolicy, StaticPolicy), "which rows stay in memory")
    length: int | str = option("auto", LENGTH, "batches a superbatch")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")
    edge_cache: int | float | str | None = option(None, EDGE_CACHE, EDGE_CACHE_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.edge_cache:
            return
        if isinstance(self.planned_by, Policy):
            raise OptionError("edge_cache", "a policy instance plans one cache: give the policy's name or class")
        if not isinstance(get_policy(self.planned_by), PlannedPolicy):
            raise OptionError("edge_cache", "the scores of a static policy are of nodes: take a planned one, such as 'belady'")

    @property
    def planned_by(self) -> str | Policy | type[Policy]:
        """The policy that plans; the one that looks ahead if none is chosen yet."""
        return self.policy

    takes_history: ClassVar[bool] = True
    takes_types: ClassVar[bool] = True
    takes_mixed: ClassVar[bool] = True
    overlap: ClassVar[bool] = True  # sample and plan while earlier batches are gathered and trained on

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Estimate | None:
        """See :class:`~featstore.Strategy`."""
        w, m = workload, machine
        stored = w.n_accesses * SAMPLE_BYTES
        inspect = w.sample_s + w.plan_s + stored / m.drive.write_bandwidth
        at_once = max(1, w.ahead_bytes // 2 // w.row_bytes)  # one half is read while the other is delivered from
        gathers = max(1, min(w.n_batches, -(-w.loads // at_once)))
        read = random_read_s(w.loads, gathers, w.n_rows, w.row_bytes, m.drive)
        copied = w.n_accesses - w.n_device + put_together(w)
        copy = gathered_s(copied + 2 * w.loads, w, m)  # loaded rows are copied to the output, and into the cache
        parts = {"inspect": inspect, "read": read, "copy": copy}
        n = w.n_superbatches
        disk = stored * min(4, n) // n
        moved = int(random_reads(w.loads, gathers, w.n_rows, w.row_bytes, m.drive)[1])
        epoch = max(pipeline_s(inspect, max(read, copy), n), w.sample_read_s + read)  # the last: both read from one drive
        return Estimate("superbatch", PLANNED, epoch, 0.0, w.loads, disk, moved, parts)

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        context.nodes.drop_caches()  # others will replace them, and the first batch is measured in their memory
        context = ask_of_bytes(context, self.cache)
        return run_planned(self, context, self.planning(context))

    def runner(self) -> type[SuperbatchRunner]:
        """Return the class of the runner that each loader gets."""
        return SuperbatchRunner

    def sizes(self, context: Context, planning: Planning) -> SuperbatchSizes:
        """Make the object that computes the length of superbatches and their memory."""
        return SuperbatchSizes(context, planning)

    def asked(self, context: Context, planning: Planning) -> Asked:
        """Measure a batch, and divide the memory that batches leave; return the context, the memory and the sizes."""
        sizes = self.sizes(context, planning)
        context, memory = ask(context, sizes.needs, self.cache_bytes(context, planning), plans=True)
        sizes.divide(memory)
        return context, memory, sizes

    def cache_bytes(self, context: Context, planning: Planning) -> int:
        """Compute the bytes of the caches whose size was given, those of edge features included."""
        of_nodes = {} if self.cache == "auto" else context.nodes.sizes(self.cache, planning.policy, context.batch)
        return sum(of_nodes.values()) + sum(context.edges.bytes_of(planning.edge_rows).values())

    def estimate_length(self, context: Context) -> Length:
        """See :class:`~featstore.Strategy`."""
        context = ask_of_bytes(context, self.cache)
        _, memory, sizes = self.asked(context, self.planning(context))
        return sizes.estimate_length(memory)

    def planning(self, context: Context) -> Planning:
        """Collect the limits of planning: disk, length, policies."""
        if context.nodes.is_mixed and isinstance(self.planned_by, Policy):
            raise OptionError("policy", "an instance plans caches of the same rows: give its name or class for several types")
        policies = tuple(_planned(get_policy(self.planned_by)) for _ in context.nodes.each)
        planned = policies[0]
        planning = plan_ahead(context, planned, self.length, self.disk, self.run_dir, overlap=self.overlap)
        planning = replace(planning, policies=policies)
        if self.cache != "auto":
            sizes = context.nodes.sizes(self.cache, planned, context.batch)
            planning = replace(planning, capacity=context.nodes.capacity(sizes, planned))
        edge_sizes = context.edges.sizes(self.edge_cache, None)
        if not any(edge_sizes.values()):
            return planning
        of_edges = tuple(get_policy(self.planned_by) for _ in context.edges.each)
        return replace(planning, edge_policies=of_edges, edge_rows=context.edges.capacities(edge_sizes))


def _planned(policy: Policy) -> Policy:
    return FixedRows(policy) if isinstance(policy, StaticPolicy) else policy


def plan_ahead(
    context: Context,
    policy: str | Policy | type[Policy],
    length: int | str,
    disk: int | str | None,
    run_dir: str | os.PathLike[str] | None,
    *,
    overlap: bool = True,
) -> Planning:
    """Collect the limits of planning for a strategy that looks ahead; arguments as of :class:`Superbatch`."""
    graph = context.graph
    n_bytes = None if disk is None else parse_disk(disk, context.nodes.n_bytes)
    left = None if n_bytes is None else n_bytes - context.chosen.profile_bytes
    planned = get_policy(policy)
    misses = context.chosen.misses.of(not isinstance(planned, FixedRows))
    directory = runs_directory(graph.path, run_dir)
    return Planning((planned,), length, left, directory, context.nodes.n, graph.budget.total, overlap, misses)


def run_planned(strategy: Superbatch, context: Context, planning: Planning) -> SuperbatchRunner:
    """Make a runner and its caches, which replace the caches that the features have."""
    context.drop_caches(edges=bool(planning.edge_rows))
    if strategy.overlap:  # otherwise lists and rows use one memory in turn
        context = with_lists(context, strategy.cache_bytes(context, planning))
    return run_asked(strategy, strategy.asked(context, planning))


def run_asked(strategy: Superbatch, asked: Asked) -> SuperbatchRunner:
    """Make a runner in memory that is divided already, and its caches."""
    runner = strategy.runner()(*asked)
    try:
        runner.make_edge_caches()  # before the others, which may take all memory that is left
        runner.make_caches(strategy.cache)
        runner.judge_length()
    except BaseException:
        runner.close()
        raise
    return runner


class SuperbatchRunner(Runner):
    """Sample many batches ahead, plan the cache over them, and run the plans.

    In the rolling schedule, the next superbatch is sampled before one is planned, both beside the loop. In the serial schedule
    (``overlap=False``), superbatches are planned alone and run one after the other, and neighbour and feature caches use one
    memory in turn.
    """

    name: ClassVar[str] = "superbatch"

    def __init__(self, context: Context, memory: Memory, sizes: SuperbatchSizes) -> None:
        super().__init__(context, memory)
        planned = [each for each in (*sizes.planning.policies, *sizes.planning.edge_policies) if isinstance(each, PlannedPolicy)]
        self._on_death: list[weakref.finalize[..., Any]] = []
        self._said = set[str]()
        self._sizes = sizes
        size, least = sizes.granted_length(memory)
        self._planning = replace(sizes.planning, superbatch=size)
        self._drops: list[Callable[[], None]] = [
            partial(context.batches.keep_ahead, 0),
            *(partial(CheckedPolicy(each).keep_memory, False) for each in planned),
        ]
        held = memory.held | {PLANNER: (least, memory.granted[PLANNER])}
        self._memory = EpochMemory(context.graph.budget, held, partial(_drop, self._drops))
        self._switch: CacheSwitch | None = None
        self._caches = ClaimedCaches(context.nodes)
        # Without features, unless edges are planned: edges are else read through the caches that their features have.
        self._edge_caches = ClaimedCaches(context.edges.of(()))
        # For features with the same rows: how many stay, and which, the best first.
        self._fixed: list[Int64s | None] = [None] * len(context.nodes.each)
        self._n_fixed, self._beside = [0] * len(context.nodes.each), context.tiers
        self._filled: dict[str, FeatureCache] = {}  # caches that hold these rows

    def judge_length(self) -> None:
        """Advise more memory or disk if superbatches are so short that an epoch moves over twice the minimum."""
        advice = self._sizes.judged(self.memory.batch, int(self._planning.superbatch)).advice
        if advice is not None:
            self._warn("length", advice)

    def _warn(self, kind: str, text: str) -> None:
        """Warn once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            name = self.name if self._planning.overlap else "ginex"
            warn(f"strategy {name!r}: {text}", PerformanceWarning)

    def _packer(self, at: int, runs: RunDirectory, disk: DiskQuota, filling: CacheFilling) -> PackSuperbatch | None:
        """Make the packer of part ``at`` of the features, which copies an epoch's missed rows into extents.

        None, the default: rows are not packed.
        """
        return None

    def make_edge_caches(self) -> None:
        """Make the caches of edge features, empty, if they are planned."""
        edges, rows = self.context.edges, self._planning.edge_rows
        if rows:
            self._edge_caches = ClaimedCaches(edges)
            with self.context.timer.time("cache"):
                self._edge_caches.make({name: rows.get(name, 0) for name in edges.stores})

    def make_caches(self, size: int | float | str | None) -> None:
        """Make the host caches, empty; in the serial schedule the neighbour cache has the same bytes."""
        context = self.context
        if context.divide is not None:
            context.divide(context, self.memory, size, self._planning.policy, serial=not self._planning.overlap)
        sizes, self.prefetch = size_caches(context, self.memory, size, self._planning.policy)
        if sizes:
            with context.timer.time("cache"):
                self._make_caches(sizes, on_loan=size == "auto" or context.chosen.lends_caches)

    def _make_caches(self, sizes: Mapping[str, int], *, on_loan: bool) -> None:
        graph, nodes = self.context.graph, self.context.nodes
        capacities = nodes.capacities(sizes)
        if isinstance(self._planning.policy, FixedRows):
            self._n_fixed = [min((capacities.get(name, 0) for name in part.stores), default=0) for part in nodes.each]
            self._choose()
            held = graph.budget.reserve("rows that stay", sum(0 if rows is None else rows.nbytes for rows in self._fixed))
            self._on_death.append(finalize_here(self, held.release))
        room = partial(_cache_room, self.context, self.memory) if on_loan else None
        if self._planning.overlap:
            self._caches.make(capacities, room)
            return
        of_caches = nodes.bytes_of(capacities)
        n_bytes = sum(of_caches[name] for name in capacities)
        self._switch = CacheSwitch(nodes, capacities, n_bytes, self.memory.left_while_sampling, room)
        self._on_death.append(finalize_here(self, self._switch.close))

    def _choose(self) -> None:
        """Choose the rows that stay, before the caches take the memory that scoring needs."""
        graph, tiers = self.context.graph, self.context.tiers
        with AccessCounts(self.context) as counts:
            for at, part in enumerate(self.context.nodes.each):
                policy, n_rows = self._planning.policies[at], self._n_fixed[at]
                tier = tiers[at] if tiers else None
                assert isinstance(policy, FixedRows)
                if n_rows:
                    with graph.policy_inputs(part.width, counts, rows=part.rows) as inputs:
                        self._fixed[at] = policy.best(inputs.scores(policy.static), n_rows, None if tier is None else tier.map)
        self._beside = tiers

    def close(self, failed: bool = False) -> None:
        """Give back the memory of planning and reading ahead, in the serial schedule also the caches; may be called again."""
        if self._switch is not None:
            self._switch.close()
        self._memory.close()
        for finalizer in self._on_death:
            finalizer()

    def stats(self) -> dict[str, Any]:
        """Return ``superbatch``: its number of ``batches``, and that ``of`` an epoch."""
        return {"superbatch": {"batches": int(self._planning.superbatch), "of": len(self.context.batches)}}

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` with an empty cache, or one of rows that stay. Sampling starts when the first batch is asked for.

        The epoch is read on demand if the features' caches follow the plans of another epoch, of any loader.

        Raises
        ------
        BudgetError
            Another loader has replaced a cache, and there is no memory to make it anew.
        """
        try:
            self._caches.check_free()  # before memory is taken for an epoch with plans
            self._edge_caches.check_free()
            return self._begin(epoch, start)
        except BusyError:
            return stand_in(self.context, epoch, start)

    def _begin(self, epoch: int, start: int) -> EpochRun:
        policy = self._planning.policy
        if isinstance(policy, FixedRows) and any(self._n_fixed) and self._beside != self.context.tiers:
            self._choose()  # anew, among the rows that are not on the device
            self._filled.clear()
        caches = self._caches if self._switch is None else self._switch
        with ExitStack() as undo:
            use = self._memory.begin("superbatches")
            undo.callback(self._memory.end, use)
            claim = caches.claim()
            undo.callback(caches.release)
            edge_claim = self._edge_caches.claim()
            undo.callback(self._edge_caches.release)
            order = self.context.batches.epoch(epoch).windowed(start, self._memory.get(SAMPLED_AHEAD))
            undo.callback(order.close)
            run = SuperbatchEpoch(
                self.context,
                self._planning,
                order,
                start,
                threads=self.memory.samplers(),
                room=self.memory.unused,
                memory=self._memory,
                use=use,
                caches=caches,
                claim=claim,
                packer=self._packer,
                fixed=self._fixed,
                filled=self._filled,
                edge_caches=self._edge_caches,
                edge_claim=edge_claim,
            )
            undo.pop_all()
        return run


def _drop(drops: Sequence[Callable[[], None]]) -> None:
    for each in drops:
        each()


def _cache_room(context: Context, memory: Memory) -> int:
    """Compute the bytes that caches may take when they are made anew.

    A function, as the caches keep it: a method would keep the runner alive, whose death ends the caches.
    """
    context.graph.pool.trim()
    return memory.left_for_caches(context.graph.budget.available, context.prefetch)[0]
