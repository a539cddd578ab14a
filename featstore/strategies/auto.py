"""``Auto``: sample a few batches, measure the machine, and take the strategy that is estimated to be fastest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore.cache.base import StaticPolicy, get_policy
from featstore.errors import BudgetError, PerformanceWarning, warn
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.choice import Choice, chosen_mask, observe
from featstore.estimate.copies import copy_speed
from featstore.estimate.cost import DEGREE, ONLINE, PLANNED, STATIC, Machine, OnDisk, Workload
from featstore.estimate.length import Planning, at_least
from featstore.estimate.misses import UNKNOWN, MissCurves
from featstore.estimate.tablespeed import table_speed
from featstore.pack.layout import layout_bytes, layout_rows
from featstore.pack.nodedata import carried_bytes
from featstore.pack.offline import Pack
from featstore.pack.packgraph import Graph
from featstore.plan.trace import Trace
from featstore.sampling.sampledbatches import SampledBatches
from featstore.storage.calls import NO_SPACE
from featstore.storage.drive import drive_speed
from featstore.storage.rundir import has_no_room
from featstore.storage.writer import is_drive_full
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.context import Chosen, Context
from featstore.strategies.devicefill import DEVICE_POLICY, SIZED_LATER, FilledLater
from featstore.strategies.domain import Domain
from featstore.strategies.estimates import choose, estimate_lengths, made_with
from featstore.strategies.lists import AS_THEY_ARE, EXPECTED, Lists, keep_lists, may_keep_lists
from featstore.strategies.lookahead import degree_bytes, rows_in_memory, rows_in_use
from featstore.strategies.memory import AHEAD, FRACTIONS, ask
from featstore.strategies.ondemand import OnDemand, are_cached
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, EPOCHS, PACK, RUN_DIR, option
from featstore.strategies.packed import batches_of
from featstore.strategies.packlayouts import PackLayouts, agreed_rows, layouts_on_disk, rows_for_pack, rows_of_size
from featstore.strategies.profile import DISK_FRACTION, Profile, pack_trace, profile_batches
from featstore.strategies.registry import find_strategy, register_strategy
from featstore.strategies.superbatch import Superbatch, plan_ahead
from featstore.strategies.superbatchepoch import ahead_bytes

__all__ = ["Auto"]

EDGES = "caches of edge features"  # while it is estimated
WORTH_WAITING = 1 / 5  # the part of an epoch that drawing at once must save: its first batch comes when all are drawn
AT_ONCE = 2  # drawing at once takes so many times the computing of drawing alone: lists are sorted, draws are logged and read


@register_strategy("auto")
@dataclass(frozen=True)
class Auto(Strategy):
    """Take the strategy and the policy that are estimated to need least time for the epochs to come.

    ``loader.stats()["auto"]`` names the choice and its reason. In a process group rank 0 chooses for all ranks, which make their
    loaders alike. Strategies of other packages are candidates if they estimate themselves (:meth:`featstore.Strategy.estimate`).

    Two strategies are taken without an estimate. :class:`~featstore.OnDemand` is, if all rows fit in memory, or if the features
    have caches that it would keep. Otherwise :class:`~featstore.Superbatch` is, if rows are in no file, as those on other
    machines.

    Neighbour lists, all or the best ones, get memory before rows do, on loan, unless ``g.cache_neighbors`` made a cache of them.
    Instead, batches of :class:`~featstore.NeighborSampler` and :class:`~featstore.LaborSampler` are drawn many at once, as
    :class:`~featstore.EpochSampler` draws them, if that saves a fifth of the time. The run files for this take a quarter of the
    free disk at most.

    Parameters
    ----------
    epochs : int
        Epochs to come, 10 by default. The costs of work that is done once are spread over them.
    cache : int, str, float or None
        As of :class:`~featstore.OnDemand`.
    pack : Pack, path-like or None
        Run the batches of a pack, packed or as if they were sampled anew.
    disk, run_dir
        As of :class:`~featstore.Superbatch`; with a pack also most bytes of a layout.
    edge_cache : int, str, float or None
        As of :class:`~featstore.OnDemand`, by the default policy of the strategy that is taken.
    """

    epochs: int = option(EXPECTED, EPOCHS, "epochs to come: what is done once is spread over them")
    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    pack: Pack | str | os.PathLike[str] | None = option(None, PACK, "run the samples of a pack, in its batches")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")
    edge_cache: int | float | str | None = option(None, EDGE_CACHE, EDGE_CACHE_HELP)

    takes_history: ClassVar[bool] = True
    takes_types: ClassVar[bool] = True
    takes_mixed: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

    def batches(
        self, graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> SampledBatches | None:
        """See :class:`~featstore.Strategy`."""
        if self.pack is None:
            return None
        return batches_of(self.pack, graph, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        pack, cache, lists, first = context.pack, self.cache, AS_THEY_ARE, context.first
        keeps_caches = are_cached(context) if first.choice is None else first.choice.keeps_caches
        if pack is None and cache == "auto" and keeps_caches:
            if may_keep_lists(context):
                context, _ = ask(context)
                lists = keep_lists(context, 0, self.epochs)
            context = lists.drawn(context)
            decision = replace(_taken("ondemand", None, "the features have caches"), keeps_caches=True)
            decision = decision if first.choice is None else _of_first(first.choice)
            first.give(decision)
            return AutoRunner(made_with(OnDemand, {"edge_cache": self.edge_cache}).run(context), decision)
        of_edges = context.edges.sizes(self.edge_cache, None)
        context.drop_caches(edges=bool(of_edges))
        context, memory = ask(context, caches=sum(of_edges.values()))
        planning = plan_ahead(context, PLANNED, "auto", self.disk, self.run_dir)
        if not memory.suffices:  # the strategy that is taken raises, and names a memory that suffices
            decision = _default(context, planning, 0, (), "no memory for two batches")
            return AutoRunner(self._chosen(decision, cache, pack).run(context), decision)
        if may_keep_lists(context):
            of_nodes = {} if cache == "auto" else context.nodes.sizes(cache, get_policy(PLANNED), context.batch)
            lists = keep_lists(context, sum(of_nodes.values()), self.epochs)
        context, memory = ask(lists.drawn(context), caches=sum(of_edges.values()))
        with context.budget.reserve(EDGES, sum(of_edges.values())):  # for the strategy's caches of edge features
            pack_rows: tuple[int, ...] = ()
            if pack is not None and cache == "auto":
                of_first = None if first.choice is None else first.choice.pack_rows
                pack_rows = agreed_rows(context.nodes, rows_for_pack(context, memory, pack, 0), of_first)
                cache = _size_of(context.nodes, pack_rows)
            elif pack is not None:
                pack_rows = rows_of_size(context.nodes, cache)
            with context.timer.time("auto"):
                rows = rows_in_memory(context, memory, cache)
                if first.choice is not None:
                    decision = _of_first(first.choice)
                elif pack is None and context.features and rows >= rows_in_use(context):
                    decision = _taken("ondemand", DEGREE, "all rows fit in memory")
                elif pack is None and context.features and not context.nodes.is_in_pages:
                    reason = "rows lie elsewhere: it asks for fewest of them, and ahead of their use"
                    decision = _taken("superbatch", PLANNED, reason)
                else:
                    options = {"cache": cache, "disk": self.disk, "run_dir": self.run_dir}
                    options["edge_cache"] = self.edge_cache if any(of_edges.values()) else None
                    decision = decide(
                        context, planning, options, capacity=rows, pack_rows=pack_rows, epochs=self.epochs, lists=lists
                    )
        profile = decision.profile
        try:
            first.give(replace(decision, profile=None, pack_rows=pack_rows))
            if decision.at_once:
                context = lists.at_once(context, planning.run_dir) or context
            if decision.lists_bytes is not None and decision.lists_bytes <= lists.held:
                lists = lists.resized(decision.lists_bytes, context)
            chosen = self._chosen(decision, cache, pack)
            told = Chosen(self.cache == "auto", decision.misses, _disk_bytes(profile), pack_rows=pack_rows)
            return AutoRunner(chosen.run(replace(context, chosen=told, lists=lists.text)), decision)
        except BaseException:
            if profile is not None:
                profile.close()
            raise

    def _chosen(self, decision: Decision, cache: int | float | str | None, pack: Pack | None) -> Strategy:
        """Make the chosen strategy, with those options of this one that it has."""
        cls, policy = find_strategy(decision.strategy), decision.policy
        given: dict[str, Any] = {"policy": policy, "pack": pack, "disk": self.disk, "run_dir": self.run_dir}
        given = {name: each for name, each in given.items() if each is not None}
        given["cache"] = None if policy is None else cache  # not every strategy's default is None
        if pack is not None and given["cache"] is None:
            given["cache"] = 0  # to a pack None would say: as many rows as a layout has
        is_static = policy is not None and isinstance(get_policy(policy), StaticPolicy)
        if self.edge_cache is not None and not (is_static and issubclass(cls, Superbatch)):  # a static policy plans no edges
            given["edge_cache"] = self.edge_cache
        return made_with(cls, given)


class AutoRunner(Runner):
    """The runner of the chosen strategy, with the decision."""

    def __init__(self, chosen: Runner, decision: Decision) -> None:
        super().__init__(chosen.context, chosen.memory)
        self._chosen, self._decision, self.prefetch = chosen, decision, chosen.prefetch

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """See :class:`~featstore.Runner`."""
        return self._chosen.prepare(epoch, start)

    def stats(self) -> dict[str, Any]:
        """Return the strategy's entries, and ``auto``: the choice, its reason, all estimates."""
        return {**self._chosen.stats(), "auto": self._decision.record}

    def close(self, failed: bool = False) -> None:
        """Close the strategy and the profile that it was chosen by."""
        self._chosen.close(failed)
        if self._decision.profile is not None:
            self._decision.profile.close()


@dataclass(frozen=True)
class Decision:
    """The strategy and the policy chosen for a loader.

    Parameters
    ----------
    strategy : str
    policy : str or None
        None: no cache.
    record : dict
        The entry ``loader.stats()["auto"]``: the estimates, the choice, its reason.
    profile : Profile, optional
        Batches that were sampled for the estimates; the run uses them.
    misses : MissCurves
        The share of a batch's rows that a cache will lack.
    lists_bytes : int, optional
        Bytes that neighbour lists are to have from now on. None: they keep their memory.
    at_once : bool
        Batches are drawn many at once, in passes over the lists.
    pack_rows : tuple of int
        Rows of the caches for a pack, which rank 0 hands on.
    keeps_caches : bool
        The features have caches, which stay.
    """

    strategy: str
    policy: str | None
    record: dict[str, Any]
    profile: Profile | None = None
    misses: MissCurves = UNKNOWN
    lists_bytes: int | None = None
    at_once: bool = False
    pack_rows: tuple[int, ...] = ()
    keeps_caches: bool = False


def _of_first(choice: Decision) -> Decision:
    """Begin the reason of a choice with "rank 0", which made it."""
    return replace(choice, record={**choice.record, "reason": f"rank 0: {choice.record['reason']}"})


def decide(
    context: Context,
    planning: Planning,
    options: Mapping[str, Any],
    *,
    capacity: int,
    epochs: int,
    pack_rows: Sequence[int] = (),
    lists: Lists = AS_THEY_ARE,
) -> Decision:
    """Choose the strategy and the policy of a loader, and the bytes of neighbour ``lists`` that stay in memory.

    ``options`` are those of all strategies; each strategy gets the ones that it has. An epoch is also estimated with fewer
    lists, whose memory then holds rows. ``pack_rows`` are the rows in memory of a pack's layouts, one for each part of the
    features.

    Notes
    -----
    Samples an eighth of the batches of epoch 0, eight at least and 32 at most, for the run to use, and simulates caches over
    them. If memory or disk does not suffice for that, the strategy that needs least is taken, with a warning. With a history
    these batches are drawn with a copy of its state, and the run does not use them: its own depend on later merges. A history
    whose nodes are still to be chosen gets them in the memory of the chosen strategy; strategies are compared by whole batches.
    """
    if not len(context.batches) or not context.features:
        return _default(context, planning, capacity, pack_rows, "nothing is to be gathered")
    try:
        return _estimated(context, planning, options, capacity, pack_rows, epochs, lists)
    except BudgetError as error:
        needed = max(error.needed or 0, context.graph.budget.total * 9 // 8)
        _warn(f"no memory to estimate: {error.reason}", f"memory='{at_least(needed)}' or more")
        return _default(context, planning, capacity, pack_rows, f"no memory to estimate: {error}")
    except OSError as error:
        if error.errno in NO_SPACE:
            reason, more = f"no disk to estimate: {error.strerror}", "run_dir=, a directory on a drive with more room"
            if planning.disk is not None and not is_drive_full(error):
                more = f"disk='{at_least(_profile_disk(context))}' or more"
        elif has_no_room(error) and options.get("run_dir") is None and _is_of_runs(error, planning.run_dir):
            reason, more = f"no disk to estimate: {error}", "run_dir=, a directory where run files can be written"
        else:
            raise
        _warn(reason, more)
        return _default(context, planning, capacity, pack_rows, reason)


def _is_of_runs(error: OSError, run_dir: str) -> bool:
    """Tell whether an error is of run files: others may not be read, which needs another remedy."""
    return error.filename is not None and os.path.abspath(os.fsdecode(error.filename)).startswith(os.path.abspath(run_dir))


def _estimated(
    context: Context,
    planning: Planning,
    options: Mapping[str, Any],
    capacity: int,
    pack_rows: Sequence[int],
    epochs: int,
    lists: Lists,
) -> Decision:
    """Choose the strategy, the policy and the bytes of lists by estimates."""
    graph, pack, nodes = context.graph, context.pack, context.nodes
    width = nodes.mean_width(context.batch or BatchSize(0))
    with ExitStack() as held:
        profile = None
        if pack is None:
            profile = held.enter_context(closing(Profile(context, planning.run_dir, planning.disk)))
            trace, sample_s, computing_s = profile.trace(), profile.sample_s, profile.computing_s
        else:
            trace, sample_s = pack_trace(pack, layout_rows(context.nodes.rows)), _reading_s(pack, graph)
            computing_s = sample_s
        left = None if planning.disk is None or profile is None else planning.disk - profile.n_bytes
        sources = [store.source for store in graph.features.values()]
        speed = drive_speed(graph.reader, graph.path, sources, planning.run_dir, left)
        layouts, counted = layouts_on_disk(_layouts(context, planning), pack_rows, width, speed.gap_bytes)
        with _on_device(context, capacity * width) as (n_device, on_device):
            copies = copy_speed(graph.path, width, graph.options.threads, graph.budget)
            machine = Machine(speed, **asdict(copies), **asdict(table_speed(graph.path, nodes.n, graph.budget)))
            look = partial(
                observe,
                row_bytes=width,
                budget=graph.budget,
                n_batches=len(context.batches),
                passes_s=0.0 if profile is None else profile.passes_s,
                epochs=epochs,
                disk_bytes=_disk_of(context, planning),
                has_pack=pack is not None,
                pack_epochs=1 if pack is None else pack.epochs * context.batches.world_size,  # of this rank's length
                layouts=layouts,
                device_rows=n_device,
                on_device=on_device,
                device_on_host=context.device.type == "cpu",
                online=ONLINE,
                ahead_bytes=min(ahead_bytes(context), int(graph.budget.total * FRACTIONS[AHEAD])),
                out_degree=nodes.rows.select(graph.short_degrees()) if capacity else None,
            )
            trial = _Trial(context, options, capacity, machine, lists, profile, trace, sample_s, computing_s, look, counted)
            kept, choice, at_once = lists.held, trial.choose(lists.held, context), False
            for n_bytes in lists.fewer(context):
                best_s = choice.taken.total_s(epochs)
                if epochs * trial.sample_read_s(n_bytes, context) >= best_s:
                    continue  # reading lists alone takes as long
                other = trial.choose(n_bytes, context)
                if other.taken.total_s(epochs) < best_s:
                    kept, choice = n_bytes, other
            all_at_once = lists.at_once(context, planning.run_dir if options["disk"] is None else None)
            if all_at_once is not None and ask(all_at_once)[1].suffices:
                other = trial.choose(0, all_at_once)
                if other.taken.total_s(epochs) < (1 - WORTH_WAITING) * choice.taken.total_s(epochs):
                    kept, choice, at_once = 0, other, True
        if _is_filled_later(context):
            choice = replace(choice, note=SIZED_LATER)
        held.pop_all()  # the run has the profile
    policy = None if choice.taken.policy == "none" else choice.taken.policy
    lists_bytes = None if kept == lists.held and not at_once else kept
    seen = choice.workload
    return Decision(choice.taken.strategy, policy, choice.to_dict(), profile, seen.misses, lists_bytes, at_once)


@contextmanager
def _on_device(context: Context, cache_bytes: int) -> Iterator[tuple[int, npt.NDArray[np.bool_] | None]]:
    """Find the number of rows that the device will have beside a host cache of ``cache_bytes``, and their mask, if known.

    The budget counts the memory of the estimates until the block is left.
    """
    graph, nodes, later = context.graph, context.nodes, context.on_device
    rows = (context.device_rows or ()) if later is None else later.expected_rows(context, cache_bytes)
    n_device = sum(rows)
    by_degree = _is_filled_later(context) and n_device > 0
    by_degree = by_degree and isinstance(later, FilledLater) and later.policy.name == DEVICE_POLICY
    with graph.budget.reserve("cost model", degree_bytes(context) + by_degree * (nodes.n + 8 * n_device)):
        if by_degree:
            degrees = graph.short_degrees()
            masks = [chosen_mask(part.rows.select(degrees), n) for part, n in zip(nodes.each, rows, strict=True)]
        else:
            tiers = zip(nodes.each, context.tiers, strict=bool(context.tiers))
            masks = [
                np.zeros(part.n, bool) if tier is None or tier.map is None else tier.map.slot_of_row >= 0 for part, tier in tiers
            ]
        yield n_device, np.concatenate(masks) if masks else None


def _is_filled_later(context: Context) -> bool:
    return not context.tiers and isinstance(context.on_device, FilledLater)


def _size_of(nodes: Domain, pack_rows: Sequence[int]) -> int | float:
    """Compute the size of caches of these rows: a share of them, or, of several parts, the bytes of all."""
    if len(pack_rows) == 1:
        return pack_rows[0] / nodes.n if pack_rows[0] else 0
    return sum(sum(part.bytes_of(n).values()) for part, n in zip(nodes.each, pack_rows, strict=True))


@dataclass(frozen=True)
class _Trial:
    """Estimates of an epoch with more or fewer neighbour lists in memory, from a few sampled batches.

    Parameters
    ----------
    context, options, capacity, lists
        As of :func:`decide`.
    machine : Machine
    profile : Profile or None
        None: a pack has the batches.
    trace : Trace
        The rows of the sampled batches.
    sample_s, computing_s : float
        Seconds of sampling or reading these batches, and the part of them without waiting for reads.
    look : callable (trace, ...) -> Workload
        :func:`~featstore.estimate.choice.observe`, with all arguments that do not depend on lists.
    counted : dict of str to OnDisk
        The disk space counted for a pack's layouts, by policy.
    """

    context: Context
    options: Mapping[str, Any]
    capacity: int
    machine: Machine
    lists: Lists
    profile: Profile | None
    trace: Trace
    sample_s: float
    computing_s: float
    look: Callable[..., Workload]
    counted: dict[str, OnDisk]

    def sample_read_s(self, n_bytes: int, context: Context) -> float:
        """Estimate the seconds for which an epoch's sampling reads lists, with ``n_bytes`` of them in memory."""
        return len(context.batches) * sum(self._read_s(n_bytes, context))

    def _read_s(self, n_bytes: int, context: Context) -> tuple[float, float]:
        """Estimate the seconds of reading lists for a batch, with those that are in memory now, and how many more it takes."""
        lists, batch, speed = self.lists, context.batch or BatchSize(0), self.machine.drive
        more_s = 0.0
        if n_bytes != lists.held or context is not self.context:
            more_s = lists.more_read_s(n_bytes, self.context, context, batch, speed)
        return lists.sample_read_s(self.context, batch, speed), more_s

    def choose(self, n_bytes: int, context: Context) -> Choice:
        """Choose with ``n_bytes`` of lists in memory, and with rows in the rest of the memory that lists have now.

        ``context`` has batches that are drawn as now, or many at once.
        """
        lists, sample_s, rows = self.lists, self.sample_s, self.capacity
        read_s, more_s = self._read_s(n_bytes, context)
        told = Chosen(profile_bytes=_disk_bytes(self.profile), freed=lists.held - n_bytes)
        if n_bytes != lists.held or context is not self.context:
            freer = replace(context, chosen=told)
            rows = rows_in_memory(freer, ask(freer)[1], self.options["cache"])
        if context is not self.context:
            sample_s = AT_ONCE * self.computing_s + len(self.trace) * read_s
        workload = self.look(
            self.trace,
            capacity=rows,
            sample_s=max(0.0, sample_s + len(self.trace) * more_s),
            sample_read_s=self.sample_read_s(n_bytes, context),
        )
        workload = replace(workload, on_disk=self.counted)
        lengths = estimate_lengths(replace(context, chosen=replace(told, misses=workload.misses)), self.options)
        asked = {
            "has_history": context.has_history,
            "has_types": context.has_types,
            "is_mixed": context.nodes.is_mixed,
        }
        return choose(workload, self.machine, lengths, **asked)


def _reading_s(pack: Pack, graph: Graph) -> float:
    """Measure the seconds of reading the first batches of a pack, as many as estimates look at."""
    begin = time.perf_counter()
    for number in range(profile_batches(pack.n_batches, pack.run_length)):
        pack.batch(number, graph.pool)
    return time.perf_counter() - begin


def _warn(reason: str, more: str) -> None:
    warn(f"strategy 'auto': {reason}; so what needs least is taken, which may be slow: give {more}", PerformanceWarning)


def _profile_disk(context: Context) -> int:
    """Compute the disk that is large enough: a profile's fraction of it holds the batches that estimates look at."""
    batch = context.batch
    stored = 0 if batch is None else 8 * batch.n_rows + 4 * batch.n_stored
    return int(profile_batches(len(context.batches)) * max(4096, stored) / DISK_FRACTION)


def _disk_bytes(profile: Profile | None) -> int:
    return 0 if profile is None else profile.n_bytes


def _disk_of(context: Context, planning: Planning) -> int | None:
    """Compute the bytes of disk for the rows of a pack's layouts, or for run files."""
    if context.pack is None or planning.disk is None:
        return planning.disk
    return max(0, planning.disk - carried_bytes(context.pack, context.graph, context.labels))


def _layouts(context: Context, planning: Planning) -> dict[str, PackLayouts]:
    """Return the layouts of the loader's pack by the policies that are compared; empty without a pack."""
    if context.pack is None:
        return {}
    return {name: PackLayouts(context, replace(planning, policies=(get_policy(name),))) for name in (STATIC, PLANNED)}


def _default(context: Context, planning: Planning, capacity: int, pack_rows: Sequence[int], reason: str) -> Decision:
    """Choose the strategy that needs least: ``ondemand``, or ``packed`` if layouts are there or the device is to hold rows."""
    strategy, policy = "ondemand", DEGREE if capacity else None  # which samples nothing
    if context.pack is not None:
        policy = STATIC if capacity else None
        rows = pack_rows or (0,) * len(context.nodes.each)
        each_policy, found, disk = _layouts(context, planning), [], planning.disk
        for name, layouts in each_policy.items():
            wanted = layouts.wanted(rows)
            if wanted and layouts.are_there(wanted) and (disk is None or sum(map(layout_bytes, layouts.folders(wanted))) <= disk):
                found.append(name)
        if found or any(context.device_rows or ()):
            strategy, policy = "packed", (found or [STATIC])[0]
    return _taken(strategy, policy, reason)


def _taken(strategy: str, policy: str | None, reason: str) -> Decision:
    """Make the decision for a strategy that is taken without an estimate."""
    taken = {"strategy": strategy, "policy": policy or "none"}
    return Decision(strategy, policy, {"taken": taken, "reason": reason, "estimates": []})
