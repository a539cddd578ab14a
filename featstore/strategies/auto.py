"""``Auto``: record an epoch's accesses, measure the machine, take the strategy that is estimated to be cheapest."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore.cache.base import StaticPolicy, get_policy
from featstore.errors import BudgetError, PerformanceWarning
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.choice import Choice, chosen_mask, observe
from featstore.estimate.copies import copy_speed
from featstore.estimate.cost import DEGREE, ONLINE, PLANNED, STATIC, Machine, OnDisk, Workload
from featstore.estimate.length import Planning, at_least
from featstore.estimate.misses import UNKNOWN, MissCurves
from featstore.estimate.sharing import count_planned, count_static, shared_there
from featstore.estimate.tablespeed import table_speed
from featstore.pack.layout import LayoutOptions, find_layouts, fitting, layout_bytes
from featstore.pack.makelayout import layout_sizes
from featstore.pack.nodedata import carried_bytes
from featstore.pack.offline import Pack
from featstore.pack.packgraph import Graph
from featstore.plan.trace import Trace
from featstore.sampling.sampledbatches import SampledBatches
from featstore.storage.calls import CANNOT_WRITE
from featstore.storage.drive import drive_speed
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.context import Chosen, Context
from featstore.strategies.devicechoice import DEVICE_POLICY
from featstore.strategies.devicefill import SIZED_LATER, FilledLater
from featstore.strategies.estimates import choose, foreseen_lengths, made_with
from featstore.strategies.lists import AS_THEY_ARE, Lists, keep_lists, may_keep_lists
from featstore.strategies.lookahead import rows_in_memory
from featstore.strategies.memory import AHEAD, FRACTIONS, ask
from featstore.strategies.ondemand import OnDemand, are_cached
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, EPOCHS, PACK, RUN_DIR, option
from featstore.strategies.packed import batches_of, packed_length, size_for_pack
from featstore.strategies.profile import DISK_DIVISOR, Profile, pack_trace, profile_batches
from featstore.strategies.registry import find_strategy, register_strategy
from featstore.strategies.superbatch import Superbatch, plan_ahead
from featstore.strategies.superbatchepoch import ahead_bytes

__all__ = ["Auto"]

EDGES = "caches of edge features"  # while it is estimated


@register_strategy("auto")
@dataclass(frozen=True)
class Auto(Strategy):
    """Take whichever strategy, with whichever policy, is estimated to take least time for the epochs to come.

    ``loader.stats()["auto"]`` says which was taken, and why. Strategies of other packages are among the candidates where they
    estimate themselves (:meth:`featstore.Strategy.estimate`). Nothing is estimated where all rows fit in memory, or the features
    have caches that :class:`~featstore.OnDemand` would keep to: it is taken. Before rows, neighbour lists get memory, on
    loan, where ``g.cache_neighbors`` made no cache of them: all of them, or the best ones.

    Parameters
    ----------
    epochs : int
        Epochs to come, 10 unless given: what is done once is spread over them.
    cache : int, str, float or None
        As of :class:`~featstore.OnDemand`.
    pack : Pack, path-like or None
        Run the batches of a pack, packed or as if they were sampled anew.
    disk, run_dir
        As of :class:`~featstore.Superbatch`; with a pack also most bytes of a layout.
    edge_cache : int, str, float or None
        As of :class:`~featstore.OnDemand`, by the default policy of the strategy that is taken.
    """

    epochs: int = option(10, EPOCHS, "epochs to come: what is done once is spread over them")
    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    pack: Pack | str | os.PathLike[str] | None = option(None, PACK, "run the samples of a pack, in its batches")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")
    edge_cache: int | float | str | None = option(None, EDGE_CACHE, EDGE_CACHE_HELP)

    takes_history: ClassVar[bool] = True

    def batches(
        self, graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> SampledBatches | None:
        """See :class:`~featstore.Strategy`."""
        if self.pack is None:
            return None
        return batches_of(self.pack, graph, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        pack, cache, lists = context.pack, self.cache, AS_THEY_ARE
        if pack is None and cache == "auto" and are_cached(context):
            if may_keep_lists(context):
                context, _ = ask(context)
                lists = keep_lists(context, 0, self.epochs)
            decision = _taken("ondemand", None, "the features have caches")
            return AutoRunner(made_with(OnDemand, {"edge_cache": self.edge_cache}).run(context), decision, lists)
        of_edges = context.edges.sizes(self.edge_cache, None)
        context.drop_caches(edges=bool(of_edges))
        context, memory = ask(context, caches=sum(of_edges.values()))
        planning = plan_ahead(context, PLANNED, "auto", self.disk, self.run_dir)
        if not memory.suffices:  # what is taken then says what does
            decision = _default(context, planning, 0, "no memory for two batches")
            return AutoRunner(self._chosen(decision, cache, pack).run(context), decision, lists)
        if may_keep_lists(context):
            of_nodes = {} if cache == "auto" else context.nodes.sizes(cache, get_policy(PLANNED))
            lists = keep_lists(context, sum(of_nodes.values()), self.epochs)
        with context.budget.reserve(EDGES, sum(of_edges.values())):  # what the strategy's caches of edge features will take
            if pack is not None and cache == "auto":
                cache = size_for_pack(context, memory, pack)
            with context.watch.time("auto"):
                rows = rows_in_memory(context, memory, cache)
                if pack is None and context.features and rows >= context.nodes.n:
                    decision = _taken("ondemand", DEGREE, "all rows fit in memory")
                else:
                    options = {"cache": cache, "disk": self.disk, "run_dir": self.run_dir}
                    options["edge_cache"] = self.edge_cache if any(of_edges.values()) else None
                    decision = decide(context, planning, options, capacity=rows, epochs=self.epochs, lists=lists)
        profile = decision.profile
        try:
            if decision.lists_bytes is not None:
                lists = lists.resized(decision.lists_bytes, context)
            chosen = self._chosen(decision, cache, pack)
            told = Chosen(self.cache == "auto", decision.misses, _disk_bytes(profile))
            return AutoRunner(chosen.run(replace(context, chosen=told)), decision, lists)
        except BaseException:
            if profile is not None:
                profile.close()
            raise

    def _chosen(self, decision: Decision, cache: int | float | str | None, pack: Pack | None) -> Strategy:
        """Return the strategy that was decided on, with this one's options, as far as it has them."""
        cls, policy = find_strategy(decision.strategy), decision.policy
        given: dict[str, Any] = {"policy": policy, "pack": pack, "disk": self.disk, "run_dir": self.run_dir}
        given = {name: each for name, each in given.items() if each is not None}
        given["cache"] = None if policy is None else cache  # None is not its default everywhere
        is_static = policy is not None and isinstance(get_policy(policy), StaticPolicy)
        if self.edge_cache is not None and not (is_static and issubclass(cls, Superbatch)):  # it plans rows of edges, too
            given["edge_cache"] = self.edge_cache
        return made_with(cls, given)


class AutoRunner(Runner):
    """The runner of the strategy that was decided on, and why it was."""

    def __init__(self, chosen: Runner, decision: Decision, lists: Lists) -> None:
        super().__init__(chosen.context, chosen.memory)
        self._lists = lists
        self._chosen, self._decision, self.prefetch = chosen, decision, chosen.prefetch

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """See :class:`~featstore.Runner`."""
        return self._chosen.prepare(epoch, start)

    def stats(self) -> dict[str, Any]:
        """Return ``auto``: what was taken, why, all estimates, and where neighbour ``lists`` are."""
        return {**self._chosen.stats(), "auto": {**self._decision.record, "lists": self._lists.text}}

    def close(self, failed: bool = False) -> None:
        """Close the strategy and what was sampled to choose it."""
        self._chosen.close(failed)
        if self._decision.profile is not None:
            self._decision.profile.close()


@dataclass(frozen=True)
class Decision:
    """What was decided for a loader.

    Parameters
    ----------
    strategy : str
    policy : str or None
        None: no cache.
    record : dict
        What ``loader.stats()["auto"]`` says: estimates, what was taken, and why.
    profile : Profile, optional
        Batches that were sampled to find out; the run uses them.
    misses : MissCurves
        Of a batch's rows, those that its cache will lack.
    lists_bytes : int, optional
        What neighbour lists are to have instead of the memory that they have now.
    """

    strategy: str
    policy: str | None
    record: dict[str, Any]
    profile: Profile | None = None
    misses: MissCurves = UNKNOWN
    lists_bytes: int | None = None


def decide(
    context: Context,
    planning: Planning,
    options: Mapping[str, Any],
    *,
    capacity: int,
    epochs: int,
    lists: Lists = AS_THEY_ARE,
) -> Decision:
    """Choose strategy and policy for a loader. ``options``: of the strategies, each of which has those that it knows.

    And how many of the ``lists`` stay in memory: an epoch is estimated with fewer of them, too, and the memory of the others.

    Notes
    -----
    Looks at an eighth of the batches of epoch 0, eight at least and 32 at most: samples them, for the run to use, and simulates
    their cache. Where the memory or the disk does not suffice for that, rows are read on demand. With a history these batches are
    decided on from a copy of its state, and are not used: the run's own depend on what is merged until then. A history that is to
    choose its nodes does so in the memory of the strategy that is taken, and strategies are judged by whole batches.
    """
    if not len(context.batches) or not context.features:
        return _default(context, planning, capacity, "nothing is to be gathered")
    try:
        return _estimated(context, planning, options, capacity, epochs, lists)
    except BudgetError as error:
        needed = max(error.needed or 0, context.graph.budget.total * 9 // 8)
        _warn(f"no memory to estimate: {error.reason}", f"memory='{at_least(needed)}' or more")
        return _default(context, planning, capacity, f"no memory to estimate: {error}")
    except OSError as error:
        if error.errno == errno.ENOSPC and planning.disk is not None:
            reason, more = f"no disk to estimate: {error.strerror}", f"disk='{at_least(_profile_disk(context))}' or more"
        elif error.errno in CANNOT_WRITE and options.get("run_dir") is None:
            reason, more = f"no disk to estimate: {error}", "run_dir=, a directory where run files can be written"
        else:
            raise
        _warn(reason, more)
        return _default(context, planning, capacity, reason)


def _estimated(
    context: Context, planning: Planning, options: Mapping[str, Any], capacity: int, epochs: int, lists: Lists
) -> Decision:
    """Choose by estimates."""
    graph, pack, widths = context.graph, context.pack, list(context.nodes.row_bytes.values())
    with ExitStack() as held:
        profile = None
        if pack is None:
            profile = held.enter_context(closing(Profile(context, planning.run_dir, planning.disk)))
            trace, sample_s = profile.trace(), profile.sample_s
        else:
            trace, sample_s = pack_trace(pack), _reading_s(pack, graph)
        left = None if planning.disk is None or profile is None else planning.disk - profile.n_bytes
        sources = [store.source for store in graph.features.values()]
        speed = drive_speed(graph.reader, graph.path, sources, planning.run_dir, left)
        layouts, counted = ({}, {}) if pack is None else _packs(context, planning, capacity, widths, speed.gap_bytes)
        with _on_device(context, capacity * sum(widths)) as (n_device, on_device):
            copies = copy_speed(graph.path, sum(widths), graph.options.threads, graph.budget)
            machine = Machine(speed, **asdict(copies), **asdict(table_speed(graph.path, graph.num_nodes, graph.budget)))
            look = partial(
                observe,
                row_bytes=sum(widths),
                budget=graph.budget,
                n_batches=len(context.batches),
                passes_s=0.0 if profile is None else profile.passes_s,
                epochs=epochs,
                disk_bytes=planning.disk,
                has_pack=pack is not None,
                pack_epochs=1 if pack is None else pack.epochs,
                layouts=layouts,
                device_rows=n_device,
                on_device=on_device,
                device_on_host=context.device.type == "cpu",
                online=ONLINE,
                ahead_bytes=min(ahead_bytes(context), int(graph.budget.total * FRACTIONS[AHEAD])),
                out_degree=graph.short_degrees() if capacity else None,
            )
            trial = _Trial(context, options, capacity, machine, lists, profile, trace, sample_s, look, counted)
            choices = {n_bytes: trial.choose(n_bytes) for n_bytes in (lists.held, *lists.fewer(context))}
        kept = min(choices, key=lambda n_bytes: choices[n_bytes].taken.total_s(epochs))
        choice = choices[kept]
        if _is_filled_later(context):
            choice = replace(choice, note=SIZED_LATER)
        held.pop_all()  # the run has the profile
    policy = None if choice.taken.policy == "none" else choice.taken.policy
    lists_bytes = None if kept == lists.held else kept
    seen = choice.workload
    return Decision(choice.taken.strategy, policy, choice.to_dict(), profile, seen.misses, lists_bytes)


@contextmanager
def _on_device(context: Context, cache_bytes: int) -> Iterator[tuple[int, npt.NDArray[np.bool_] | None]]:
    """Find how many rows the device will have beside a host cache of so many bytes, and which, where that is known.

    What they are told from is counted until the block is left, beside what a host cache is estimated from.
    """
    graph, tier, later = context.graph, context.tier, context.on_device
    n_device = (context.device_rows or 0) if later is None else later.expected_rows(context, cache_bytes)
    by_degree = isinstance(later, FilledLater) and tier is None and n_device > 0 and later.policy.name == DEVICE_POLICY
    with graph.budget.reserve("cost model", (2 + by_degree) * graph.num_nodes + 8 * by_degree * n_device):
        if by_degree:
            yield n_device, chosen_mask(graph.short_degrees(), n_device)
        else:
            yield n_device, None if tier is None or tier.map is None else tier.map.slot_of_row >= 0


def _is_filled_later(context: Context) -> bool:
    return context.tier is None and isinstance(context.on_device, FilledLater)


@dataclass(frozen=True)
class _Trial:
    """An epoch that is estimated with more or fewer neighbour lists in memory, from batches that were looked at.

    Parameters
    ----------
    context, options, capacity, lists
        As of :func:`decide`.
    machine : Machine
    profile : Profile or None
        None: a pack has the batches.
    trace : Trace
        The batches' rows.
    sample_s : float
        Seconds that the batches took.
    look : callable (trace, ...) -> Workload
        :func:`~featstore.estimate.choice.observe`, told what lists do not change.
    counted : dict
        What was counted of a pack's layouts, by policy.
    """

    context: Context
    options: Mapping[str, Any]
    capacity: int
    machine: Machine
    lists: Lists
    profile: Profile | None
    trace: Trace
    sample_s: float
    look: Callable[..., Workload]
    counted: dict[str, OnDisk]

    def choose(self, n_bytes: int) -> Choice:
        """Choose with so many bytes of lists in memory, and other rows in the rest of what they have now."""
        context, lists = self.context, self.lists
        batch, speed, n = context.batch or BatchSize(0), self.machine.drive, len(context.batches)
        told = Chosen(profile_bytes=_disk_bytes(self.profile), freed=lists.held - n_bytes)
        rows, more_s = self.capacity, 0.0
        if n_bytes != lists.held:
            freer = replace(context, chosen=told)
            rows = rows_in_memory(freer, ask(freer)[1], self.options["cache"])
            more_s = lists.more_read_s(n_bytes, context, batch, speed)
        workload = self.look(
            self.trace,
            capacity=rows,
            sample_s=self.sample_s + len(self.trace) * more_s,
            sample_read_s=n * (lists.sample_read_s(context, batch, speed) + more_s),
        )
        workload = replace(workload, on_disk=self.counted)
        lengths = foreseen_lengths(replace(context, chosen=replace(told, misses=workload.misses)), self.options)
        return choose(workload, self.machine, lengths, has_history=context.has_history)


def _reading_s(pack: Pack, graph: Graph) -> float:
    """Time reading a pack's first batches, as many as are looked at."""
    begin = time.perf_counter()
    for number in range(profile_batches(pack.n_batches, pack.together)):
        pack.batch(number, graph.pool)
    return time.perf_counter() - begin


def _warn(reason: str, more: str) -> None:
    warnings.warn(
        f"strategy 'auto': {reason}; so what needs least is taken, which may be slow: give {more}",
        PerformanceWarning,
        stacklevel=2,
    )


def _profile_disk(context: Context) -> int:
    """Return the disk of which the part for a profile holds the batches that are looked at."""
    batch = context.batch
    stored = 0 if batch is None else 8 * batch.n_rows + 4 * batch.n_stored
    return DISK_DIVISOR * profile_batches(len(context.batches)) * max(4096, stored)


def _disk_bytes(profile: Profile | None) -> int:
    return 0 if profile is None else profile.n_bytes


def _default(context: Context, planning: Planning, capacity: int, reason: str) -> Decision:
    """What needs least: rows read on demand; packed ones where the layout is there, or where the device is to have some."""
    strategy, policy = "ondemand", STATIC if capacity else None
    if context.pack is not None:
        there, disk = _there(context, planning, capacity), planning.disk
        found = [name for name, folder in there.items() if disk is None or layout_bytes(folder) <= disk]
        if found or context.device_rows:
            strategy, policy = "packed", (found or [STATIC])[0]
    return _taken(strategy, policy, reason)


def _taken(strategy: str, policy: str | None, reason: str) -> Decision:
    """Return the decision for a strategy that nothing was estimated for."""
    taken = {"strategy": strategy, "policy": policy or "none"}
    return Decision(strategy, policy, {"taken": taken, "reason": reason, "estimates": []})


def _layout(context: Context, planning: Planning, policy: str, capacity: int) -> LayoutOptions:
    """Return the options of the layout that strategy ``"packed"`` would run."""
    assert context.pack is not None
    superbatch = packed_length(planning.superbatch, context.pack.n_batches) if policy == PLANNED else 0
    return LayoutOptions(context.features, policy, capacity, superbatch, context.device_rows or 0)


def _there(context: Context, planning: Planning, capacity: int) -> dict[str, str]:
    """Return the folders of the layouts that a pack has for a loader's features and tiers, by policy.

    Beside a static policy's that takes too much disk another one is made.
    """
    assert context.pack is not None
    there, found = find_layouts(context.pack), {}
    for policy in (STATIC, PLANNED):
        name = _layout(context, planning, policy, capacity).name
        disk = planning.disk if policy == STATIC else None
        layout = fitting(context.pack, (each for each in there if replace(each, disk=0).name == name), disk)
        if layout is not None:
            found[policy] = context.pack.file(layout.name)
    return found


def _packs(
    context: Context, planning: Planning, capacity: int, widths: Sequence[int], gap_bytes: int
) -> tuple[dict[str, int], dict[str, OnDisk]]:
    """Return the bytes of the layouts that the pack has for these features and tiers, and what was counted of layouts."""
    pack, budget, n_device = context.pack, context.graph.budget, context.device_rows or 0
    assert pack is not None
    layouts, counted = {}, {}
    there = _there(context, planning, capacity)
    # A little is left for what is known only when a layout is made.
    disk = (
        None
        if planning.disk is None
        else planning.disk - planning.disk // 64 - carried_bytes(pack, context.graph, context.labels)
    )
    at_most = (sum(widths) + 20) * (int(pack.lengths.sum()) + capacity + n_device) + 4 * 4096 * len(pack)
    for policy in (STATIC, PLANNED):
        if policy in there:
            layouts[policy] = layout_bytes(there[policy])
            shared = shared_there(there[policy], pack, widths, gap_bytes, layouts[policy])
            if shared is not None:
                counted[policy] = shared
        elif disk is not None and at_most > disk:
            sizes = layout_sizes(_layout(context, planning, policy, capacity), widths, budget)
            try:
                if policy == PLANNED:
                    counted[policy] = count_planned(pack, sizes, budget)
                else:
                    with budget.reserve("cost model", 8 * pack.num_nodes):
                        counted[policy] = count_static(pack, sizes, pack.counts(), widths, gap_bytes, budget, disk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                counted[policy] = OnDisk(at_most, 0, 0, fails=str(error.strerror))
    return layouts, counted
