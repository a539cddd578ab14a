"""``Packed``: frozen samples and extents of a pack, run as often as wanted (DiskGNN)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory
from featstore.errors import BudgetError, BusyError, OptionError
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.cost import Estimate, Machine, Workload
from featstore.estimate.length import Planning
from featstore.estimate.packedcost import by_frequency, by_plan
from featstore.gather.plan import Tier
from featstore.pack.batches import PackBatches
from featstore.pack.fingerprint import digest_bytes, digest_of, same_scores
from featstore.pack.layout import (
    Layout,
    LayoutOptions,
    PackedFeature,
    check_disk,
    fill_step,
    find_layouts,
    fitting,
    layout_rows,
)
from featstore.pack.makelayout import make_layout
from featstore.pack.nodedata import data_of
from featstore.pack.offline import Pack
from featstore.pack.packgraph import Graph, PackedGraph
from featstore.sampling.sampledbatches import SampledBatches
from featstore.storage.pagestream import MOST_WINDOW_BYTES, least_window
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.caches import (
    ClaimedCaches,
    make_online_edge_caches,
    online_edge_bytes,
    room_for_caches,
)
from featstore.strategies.context import Context, OnDevice
from featstore.strategies.memory import WINDOWS, Memory, ask
from featstore.strategies.ondemand import stand_in
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, LENGTH, PACK, check_managed, option, policy_of
from featstore.strategies.packedepoch import PackedEpoch, fill_from_extents
from featstore.strategies.registry import register_strategy
from featstore.strategies.superbatch import plan_ahead

__all__ = ["Packed", "PackedRunner", "batches_of", "packed_length", "size_for_pack"]

Int64s = npt.NDArray[np.int64]
MOST_AUTO_BATCHES = 200
TABLES = "layout tables"  # holder
MAKING_BYTES = 80  # a row: most bytes of scoring rows for a layout, for the number in an error


def packed_length(length: int | str, n_batches: int) -> int:
    """Compute the number of batches that a planned policy plans together, at most an epoch's ``n_batches``."""
    return max(1, min(MOST_AUTO_BATCHES if isinstance(length, str) else length, n_batches))


def batches_of(
    pack: Pack | str | os.PathLike[str], graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
) -> PackBatches:
    """Return a pack's batches for a loader; ValueError if the arguments ask for other batches, StaleError for another graph."""
    found = PackBatches(pack, graph.pool, shuffle, seed)
    try:
        found.pack.check(graph)
        made = found.pack.record["batch_size"]
        if batch_size not in (None, made):
            what = "those of the sampler that it was made with" if made is None else f"of {made} seeds"
            raise ValueError(f"batch_size={batch_size}: the batches of {found.pack.path} are {what}; leave batch_size out")
        if drop_last and not found.pack.record["drop_last"]:
            raise ValueError(
                f"drop_last=True: {found.pack.path} has its last batches; make it with sample_offline(..., drop_last=True)"
            )
    except BaseException:
        found.close()
        raise
    return found


def size_for_pack(context: Context, memory: Memory, pack: Pack, beside: int = 0) -> int | float:
    """Choose the size of the feature caches for a pack: a share of the rows, or bytes for all caches.

    It is the largest size of the pack's layouts that fits, or, without such a layout, half of the memory that is left.
    ``beside``: bytes that other caches will take.
    """
    n, n_device, kind = context.nodes.n, context.device_rows or 0, layout_rows(context.nodes.rows)
    room, claimed = room_for_caches(context)
    spare, _ = memory.left_for_caches(room, context.prefetch, claimed)
    spare -= beside + sum(memory.leasts.values())
    there = [
        each.capacity
        for each in find_layouts(pack)
        if sorted(each.features) == sorted(context.features) and (each.device_rows, each.rows) == (n_device, kind)
    ]
    least = {rows: sum(context.nodes.bytes_of(rows).values()) for rows in {1, *there}}
    fitting = [rows for rows in there if least[rows] <= max(0, spare)]
    if fitting:
        rows = max(fitting)
        return rows / n if rows else 0
    return spare // 2 if spare // 2 >= least[1] else 0  # the rest is for packing, and for reading extents ahead


@register_strategy("packed")
@dataclass(frozen=True)
class Packed(Strategy):
    """Run the samples of a pack from extents that are made once (DiskGNN with ``policy="frequency"``).

    The sampler and the seeds are the pack's. Epoch ``e`` runs the pack's epoch ``e`` modulo its number of epochs. With
    ``shuffle`` batches run in a new order each epoch; with a planned policy, the batches of a superbatch stay together.

    In a graph of several types the features are those that types share in one file; others are refused.

    Parameters
    ----------
    pack : Pack, path-like or None
        A pack that :func:`~featstore.sample_offline` made; None with a :class:`~featstore.PackedGraph`, which is a pack.
    cache : int, str, float or None
        Host tier: bytes (``"1GiB"``), or a share of the rows (``"10%"`` or ``0.1``). ``"auto"``: the size of the largest of the
        pack's layouts that fits, or, if none does, half of the memory that batches leave. None, the default: the size of the
        one layout that the pack has, or ``"auto"`` if the pack has no layout.
    policy : str, Policy or class
        A planned or a static policy.
    length : int or "auto"
        Batches that a planned policy plans together. ``"auto"``, the default: 200 at most.
    disk : int, str or None
        Most bytes of the layout that is made or run, with the labels that are copied into the pack; None: no bound. With a
        static policy, if an extent for each batch takes more, batches of a segment share rows.
    edge_cache, edge_policy
        As of :class:`~featstore.OnDemand`: rows of edges are not packed.

    References
    ----------
    Liu et al., DiskGNN, SIGMOD 2025, sections 3 to 5.
    """

    pack: Pack | str | os.PathLike[str] | None = option(None, PACK, "run the samples of a pack, in its batches")
    cache: int | float | str | None = option(None, CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    policy: str | Policy | type[Policy] = option("belady", policy_of(PlannedPolicy, StaticPolicy), "which rows stay in memory")
    length: int | str = option("auto", LENGTH, "batches that are planned together")
    disk: int | str | None = option(None, DISK, "most bytes of the layout, or a multiple of the features (1.5x)")
    edge_cache: int | float | str | None = option(None, EDGE_CACHE, EDGE_CACHE_HELP)
    edge_policy: str | Policy | type[Policy] = option("sieve", policy_of(OnlinePolicy), "which rows of edges stay in memory")

    takes_types: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_managed(self, "edge_policy", "edge_cache", "'10%'")
        policy = get_policy(self.policy)
        if self.length != "auto" and isinstance(policy, StaticPolicy):
            raise OptionError(
                "length", f"goes with a planned policy: with policy {policy.name!r} the rows in memory never change"
            )

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Sequence[Estimate]:
        """See :class:`~featstore.Strategy`."""
        return by_frequency(workload, machine), by_plan(workload, machine)

    def batches(
        self, graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> SampledBatches | None:
        """See :class:`~featstore.Strategy`."""
        pack = graph.path if self.pack is None and isinstance(graph, PackedGraph) else self.pack
        if pack is None:
            raise OptionError("pack", "needed: what sample_offline made (featstore pack on the command line)")
        return batches_of(pack, graph, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        of_edges = online_edge_bytes(context, self.edge_cache, self.edge_policy)
        context.drop_caches(edges=bool(of_edges))
        try:
            layouts = _Layouts(context, plan_ahead(context, self.policy, self.length, self.disk, None))
        except BudgetError as error:  # from scoring rows, which tells the policy from others of its name
            raise Memory(context, caches=_making_bytes(context), plans=True).too_small(error) from None
        if self.cache is None and not isinstance(context.graph, PackedGraph) and not find_layouts(layouts.pack):
            return replace(self, cache="auto").run(context)
        context, memory, layout = self._ask(layouts, of_edges)
        made = False
        with context.watch.time("cache"):
            if layout is not None and self.cache is None:
                check_disk(layouts.pack.file(layout.name), layouts.planning.disk)
            elif layout is not None:
                if self.cache == "auto":
                    larger = layouts.wanted(size_for_pack(context, memory, layouts.pack, sum(of_edges.values())))
                    if larger in layouts.there or layout not in layouts.there:
                        layout = larger
                try:
                    made = layouts.make(layout)
                except BudgetError as error:
                    raise memory.too_small(error) from None
        make_online_edge_caches(context, of_edges, self.edge_policy)
        # Rows that a cache on loan gave back are read from the features' own files; a pack without its dataset lacks these.
        is_lent = (self.cache == "auto" or context.chosen.lends_caches) and not isinstance(context.graph, PackedGraph)
        return PackedRunner(context, memory, layouts, layout, made=made, is_lent=is_lent)

    def _ask(self, layouts: _Layouts, of_edges: Mapping[str, int]) -> tuple[Context, Memory, LayoutOptions | None]:
        """Find the first suitable layout that fits in memory; return it with its context and memory.

        Raises
        ------
        BudgetError
            No layout fits; the error names a memory that suffices for one of them.
        """
        context = layouts.context
        if context.device.type == "meta" and self.cache != "auto":
            context = replace(context, batch=BatchSize(0))  # the layout is made for another machine: no batch runs here
        refused: list[BudgetError] = []
        for layout in layouts.of_size(self.cache):
            asked, caches = context, sum(of_edges.values())
            n = 0 if layout is None else len(context.features)
            needs = {WINDOWS: (n * least_window(), n * MOST_WINDOW_BYTES)}
            if layout is not None:
                on_host = layout.device_rows * context.nodes.width if context.device.type == "cpu" else 0
                caches += sum(context.nodes.bytes_of(layout.capacity).values()) + _tables_bytes(layout) + on_host
                asked = replace(context, on_device=OnDevice() if layout.device_rows else None)  # filled from the layout
            try:
                asked, memory = ask(asked, needs, caches, plans=True)
                memory.divide()
            except BudgetError as error:
                is_there = layout is None or os.path.exists(layouts.pack.file(layout.name))
                making = 0 if is_there else context.graph.budget.used + _making_bytes(context)
                refused.append(BudgetError(error.reason, max(error.needed or 0, making)))
            else:
                return asked, memory, layout
        raise min(refused, key=lambda error: error.needed or 0)


def _making_bytes(context: Context) -> int:
    """Bound the bytes of making a layout: of scoring rows, and of counts that are of all nodes, not of rows alone."""
    return MAKING_BYTES * context.nodes.n + 8 * context.graph.num_nodes * bool(context.nodes.rows.kinds)


def _tables_bytes(layout: LayoutOptions) -> int:
    """Compute the bytes of the numbers of the rows that the host cache and the device start with."""
    return 16 * (layout.device_rows + (0 if layout.superbatch else layout.capacity))


class _Layouts:
    """The layouts of a pack for a loader's features and policy: existing ones, and one that can be made.

    Attributes
    ----------
    context : Context
        The loader's.
    planning : Planning
    pack : Pack
    there : list of LayoutOptions
    sources : dict of str to PackedFeature
    """

    def __init__(self, context: Context, planning: Planning) -> None:
        pack = context.pack
        if pack is None:
            raise ValueError("strategy 'packed' runs the samples of a pack")
        graph, features = context.graph, sorted(context.features)
        self.pack, self._policy, self.planning = pack, planning.policy, planning
        stores = context.nodes.stores
        dtypes = {name: str(store.dtype).removeprefix("torch.") for name, store in stores.items()}
        self.sources = {name: PackedFeature(store.pages, dtypes[name], tuple(store.shape)) for name, store in stores.items()}
        self._rows = layout_rows(context.nodes.rows)
        kind = self._policy.name, self._rows
        self.there = [
            each for each in find_layouts(pack) if sorted(each.features) == features and (each.policy, each.rows) == kind
        ]
        self._superbatch = 0
        if isinstance(self._policy, PlannedPolicy):
            self._superbatch = packed_length(planning.superbatch, pack.n_batches)
        self.context, self._digest = context, None  # the digest of the policy's scores, None while it is not known
        try:
            if features:
                with graph.budget.reserve("packing", digest_bytes(self._policy, context.nodes.n)):
                    self._digest = digest_of(self._policy, self._scores)
        except FileNotFoundError:  # scores need a file of the dataset: the policy is then known by its name alone
            if not isinstance(graph, PackedGraph):
                raise
        if self._digest is not None:
            self.there = [each for each in self.there if each.digest == self._digest]

    def of_size(self, size: int | float | str | None) -> Sequence[LayoutOptions | None]:
        """Return the layouts to try for a cache of ``size``, in order; ``[None]`` if nothing is to be gathered."""
        context = self.context
        if not context.features or not context.nodes.n:
            return [None]
        if size is None:
            return [self._only()]
        kind = (self._superbatch, context.device_rows or 0)
        there = [each for each in self.there if size == "auto" and (each.superbatch, each.device_rows) == kind]
        there = [each for each in there if fitting(self.pack, [each], self.planning.disk)]
        return [*sorted(there, key=lambda each: each.capacity)[:1], self.wanted(size)]

    def _only(self) -> LayoutOptions:
        """Return the only layout that the pack has; ValueError if it has none, or several."""
        context, asked = self.context, self.planning.superbatch
        lengths = [each.superbatch for each in self.there] if isinstance(asked, str) else [self._superbatch]
        found = [each for each in self.there if context.device_rows in (None, each.device_rows) and each.superbatch in lengths]
        n_found = len({replace(each, disk=0).name for each in found})
        if n_found != 1:
            raise ValueError(
                f"{self.pack.path} has {n_found} layouts of {list(context.features)} with policy {self._policy.name!r}"
                f"{' that decides as this one' if self._digest else ''}; cache says which to take, or to make, "
                "as in Packed(pack, cache='10%')"
            )
        return fitting(self.pack, found, self.planning.disk) or found[0]

    def wanted(self, size: int | float | str) -> LayoutOptions:
        """Return the layout for a cache of ``size`` (``"auto"``: no rows): an existing layout, or one to be made."""
        context, capacity = self.context, 0
        if size != "auto":  # sized as a cache that follows plans, under any policy
            capacity = context.nodes.capacity(context.nodes.sizes(size, get_policy("belady")))
        options = LayoutOptions(
            context.features,
            self._policy.name,
            capacity,
            self._superbatch,
            context.device_rows or 0,
            self._digest or "",
            rows=self._rows,
        )
        there = [each for each in self.there if replace(each, digest=options.digest, disk=0).name == options.name]
        if len({each.digest for each in there}) != 1:
            return options
        found, disk = fitting(self.pack, there, self.planning.disk), self.planning.disk
        if found is None and disk is not None and not self._superbatch:  # a smaller one can be made: its segments share more rows
            found = replace(there[0], disk=disk)
        return found or there[0]

    def make(self, options: LayoutOptions) -> bool:
        """Make a layout unless the pack has it; return whether this call made it."""
        context, graph = self.context, self.context.graph
        data = data_of(self.pack, graph, context.labels)
        with context.watch.time("pack"):
            return make_layout(
                self.pack,
                options,
                self._policy,
                same_scores(self._scores, options.digest),
                self.sources,
                graph.reader,
                graph.budget,
                node_data=data,
                disk=self.planning.disk,
            )

    def _scores(self, policy: StaticPolicy) -> npt.NDArray[Any]:
        row_bytes = sum(source.file.row_bytes for source in self.sources.values())
        graph, rows = self.context.graph, self.context.nodes.rows
        # Counts are of all nodes, those without rows included.
        with graph.budget.reserve("packing", 8 * graph.num_nodes * bool(rows.kinds)):
            with graph.policy_inputs(row_bytes, counts=self.pack.counts, rows=rows) as inputs:
                scores: npt.NDArray[Any] = inputs.scores(policy)
            return scores


class PackedRunner(Runner):
    """Run a pack's batches from an existing layout, or without a layout if nothing is to be gathered."""

    def __init__(
        self, context: Context, memory: Memory, layouts: _Layouts, options: LayoutOptions | None, *, made: bool, is_lent: bool
    ) -> None:
        super().__init__(context, memory)
        self._pack, self._made = layouts.pack, made
        self._layout: Layout | None = None
        self._caches = ClaimedCaches(context.nodes)
        self._filled: dict[str, FeatureCache] = {}  # caches that hold the layout's first rows, and do not change
        self._tiers: list[DeviceTier] = []  # one tier, if the device holds rows
        self._memory = EpochMemory(context.graph.budget, memory.held, _nothing)
        self._tables = context.graph.budget.reserve(TABLES, 0)
        self._on_death: list[weakref.finalize[..., Any]] = [weakref.finalize(self, _close, self._tiers, self._tables)]
        try:
            if options is not None:
                self._open(options, layouts.sources, is_lent=is_lent)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, Any]:
        """Return ``layout``: the name of the layout, and whether it was made for this loader."""
        return {} if self._layout is None else {"layout": {"name": self._layout.options.name, "made": self._made}}

    def _open(self, options: LayoutOptions, sources: Mapping[str, PackedFeature], *, is_lent: bool) -> None:
        layout = self._layout = Layout(self._pack, options, self.context.graph.reader)
        assert isinstance(self.context.batches, PackBatches)
        self.context = replace(self.context, batches=self.context.batches.grouped(layout.group))
        self._on_death.append(weakref.finalize(self, layout.close))
        layout.check(sources)
        self._tables.resize(layout.tables.nbytes)
        room = self._cache_room if is_lent else None
        self._caches.make(dict.fromkeys(self.context.features, options.capacity), room)
        rows = layout.tables.device_rows
        if len(rows):
            self._fill_device(layout, rows)

    def _fill_device(self, layout: Layout, rows: Int64s) -> None:
        """Copy the layout's device rows to the device."""
        graph, context = self.context.graph, self.context
        stores = context.nodes.stores
        shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in stores.items()}
        tier = DeviceTier(rows, shapes, context.device, graph.pool, n_threads=context.copy_threads)
        self._tiers.append(tier)
        for name, store in stores.items():
            source = layout.fill(name, Tier.DEVICE, self._memory[WINDOWS].n_bytes // len(stores))
            try:
                tier.fill(name, fill_step(store.row_bytes, Tier.DEVICE), partial(fill_from_extents, context, source))
            finally:
                source.close()
        self.context = replace(context, on_device=OnDevice(tier))

    def _cache_room(self) -> int:
        """Compute the bytes that caches may take when they are made anew."""
        graph = self.context.graph
        graph.pool.trim()
        return self.memory.left_for_caches(graph.budget.available, self.context.prefetch)[0]

    def close(self, failed: bool = False) -> None:
        """Close the layout and give the memory back; may be called again."""
        self._memory.close()
        _close(self._tiers, self._tables)
        if self._layout is not None:
            self._layout.close()
        for finalizer in self._on_death:
            finalizer.detach()  # so that Ctrl-C is not lost in it

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``: the samples of the pack's epoch ``epoch`` modulo its number of epochs.

        The epoch is read on demand if the features' caches follow the plans of another epoch, of any loader.

        Raises
        ------
        BusyError
            The caches follow the plans of another epoch, and the pack is run without its dataset: no row can be read on demand.
        BudgetError
            Another loader has replaced a cache, and there is no memory to make it anew.
        """
        try:
            return self._begin(epoch, start)
        except BusyError:
            if isinstance(self.context.graph, PackedGraph):
                raise
            return stand_in(self.context, epoch, start)

    def _begin(self, epoch: int, start: int) -> EpochRun:
        self._caches.check_free()  # before memory is taken for an epoch with plans
        with ExitStack() as undo:
            use = self._memory.begin("packs")
            undo.callback(self._memory.end, use)
            claim = self._caches.claim()
            undo.callback(self._caches.release)
            window = self._memory.get(WINDOWS)
            run = PackedEpoch(
                self.context, self._pack, self._layout, epoch, start, self._caches, claim, self._filled, window, self._memory, use
            )
            undo.pop_all()
        return run


def _nothing() -> None:
    pass


def _close(tiers: list[DeviceTier], tables: Reservation) -> None:
    while tiers:
        tiers.pop().close()
    tables.release()
