"""``Packed``: frozen samples and extents of a pack, run as often as wanted (DiskGNN)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from featstore.budget import Reservation
from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory
from featstore.errors import BudgetError, BusyError, OptionError
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.cost import Estimate, Machine, Workload
from featstore.estimate.packedcost import by_frequency, by_plan
from featstore.gather.plan import Tier
from featstore.pack.batches import PackBatches
from featstore.pack.layout import Layout, LayoutOptions, fill_step, find_layouts
from featstore.pack.offline import Pack
from featstore.pack.packgraph import Graph, PackedGraph
from featstore.sampling.sampledbatches import SampledBatches
from featstore.storage.pagestream import MOST_WINDOW_BYTES, least_window
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.caches import (
    ClaimedCaches,
    make_online_edge_caches,
    online_edge_bytes,
)
from featstore.strategies.context import Context, OnDevice
from featstore.strategies.domain import Domain
from featstore.strategies.memory import WINDOWS, Memory, ask
from featstore.strategies.ondemand import stand_in
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, LENGTH, PACK, check_managed, option, policy_of
from featstore.strategies.packedepoch import PackedEpoch, fill_from_extents
from featstore.strategies.packlayouts import Layouts, PackLayouts, PartLayouts, agreed_rows, rows_for_pack
from featstore.strategies.registry import register_strategy
from featstore.strategies.superbatch import plan_ahead

__all__ = ["Packed", "PackedRunner", "batches_of"]

TABLES = "layout tables"  # holder
MAKING_BYTES = 80  # a row: most bytes of scoring rows for a layout, for the number in an error


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


@register_strategy("packed")
@dataclass(frozen=True)
class Packed(Strategy):
    """Run the samples of a pack from extents that are made once (DiskGNN with ``policy="frequency"``).

    The sampler and the seeds are the pack's. Epoch ``e`` runs the pack's epoch ``e`` modulo its number of epochs. With
    ``shuffle`` batches run in a new order each epoch; with a planned policy, the batches of a superbatch stay together.

    Features of types that do not share a file have a layout for each file, over the same batches.

    Parameters
    ----------
    pack : Pack, path-like or None
        A pack that :func:`~featstore.sample_offline` made; None with a :class:`~featstore.PackedGraph`, which is a pack.
    cache : int, str, float or None
        Host tier: bytes (``"1GiB"``), or a share of the rows (``"10%"`` or ``0.1``). ``"auto"``: the size of the largest of the
        pack's layouts that fits, or, if none does, half of the memory that batches leave. None, the default: the size of the
        one layout that the pack has, or ``"auto"`` if the pack has no layout. Bytes are divided among features of different
        types as by other strategies: each gets the same share of its rows.
    policy : str, Policy or class
        A planned or a static policy.
    length : int or "auto"
        Batches that a planned policy plans together. ``"auto"``, the default: 200 at most.
    disk : int, str or None
        Most bytes of the layout that is made or run, with the labels that are copied into the pack; None: no bound. With a
        static policy, if an extent for each batch takes more, batches of a segment share rows. If there are several layouts,
        of all of them.
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
    takes_mixed: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

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
            layouts = PackLayouts(context, plan_ahead(context, self.policy, self.length, self.disk, None))
        except BudgetError as error:  # from scoring rows, which tells the policy from others of its name
            raise Memory(context, caches=_making_bytes(context), plans=True).too_small(error) from None
        lacks = not find_layouts(layouts.pack) or layouts.are_of_other_shares()
        if self.cache is None and lacks and not isinstance(context.graph, PackedGraph):
            return replace(self, cache="auto").run(context)
        if self.cache != "auto":
            context.first.give(None)
        context, memory, chosen = self._ask(layouts, of_edges)
        made = [False] * len(chosen)
        with context.timer.time("cache"):
            if chosen and self.cache is None:
                layouts.check_disk(chosen)
            elif chosen:
                if self.cache == "auto":
                    own = rows_for_pack(context, memory, layouts.pack, sum(of_edges.values()))
                    rows = agreed_rows(context.nodes, own, context.first.choice)
                    context.first.give(rows)
                    chosen = layouts.larger(chosen, rows)
                try:
                    made = layouts.make(chosen)
                except BudgetError as error:
                    raise memory.too_small(error) from None
        make_online_edge_caches(context, of_edges, self.edge_policy)
        # Rows that a cache on loan gave back are read from the features' own files; a pack without its dataset lacks these.
        is_lent = (self.cache == "auto" or context.chosen.lends_caches) and not isinstance(context.graph, PackedGraph)
        return PackedRunner(context, memory, layouts, chosen, made=made, is_lent=is_lent)

    def _ask(self, layouts: PackLayouts, of_edges: Mapping[str, int]) -> tuple[Context, Memory, Layouts]:
        """Find the first suitable layouts that fit in memory; return them with their context and memory.

        Raises
        ------
        BudgetError
            No layouts fit; the error names a memory that suffices for some.
        """
        context = layouts.context
        if context.device.type == "meta" and self.cache != "auto":
            context = replace(context, batch=BatchSize(0))  # the layout is made for another machine: no batch runs here
        refused: list[BudgetError] = []
        for chosen in layouts.of_size(self.cache):
            asked, caches = context, sum(of_edges.values())
            n = sum(len(layout.features) for layout in chosen)
            needs = {WINDOWS: (n * least_window(), n * MOST_WINDOW_BYTES)}
            for part, layout in zip(layouts.parts, chosen, strict=bool(chosen)):
                on_host = layout.device_rows * part.part.width if context.device.type == "cpu" else 0
                caches += sum(part.part.bytes_of(layout.capacity).values()) + _tables_bytes(layout) + on_host
            if chosen:  # filled from the layouts
                asked = replace(context, on_device=OnDevice() if any(layout.device_rows for layout in chosen) else None)
            try:
                asked, memory = ask(asked, needs, caches, plans=True)
                memory.divide()
            except BudgetError as error:
                making = 0
                if not all(map(layouts.is_there, chosen)):
                    making = context.graph.budget.used + _making_bytes(context)
                refused.append(BudgetError(error.reason, max(error.needed or 0, making)))
            else:
                return asked, memory, chosen
        raise min(refused, key=lambda error: error.needed or 0)


def _making_bytes(context: Context) -> int:
    """Bound the bytes of making a layout: of scoring rows, and of counts that are of all nodes, not of rows alone."""
    return MAKING_BYTES * context.nodes.n + 8 * context.graph.num_nodes * bool(context.nodes.rows.kinds)


def _tables_bytes(layout: LayoutOptions) -> int:
    """Compute the bytes of the numbers of the rows that the host cache and the device start with."""
    return 16 * (layout.device_rows + (0 if layout.superbatch else layout.capacity))


class PackedRunner(Runner):
    """Run a pack's batches from existing layouts, or without a layout if nothing is to be gathered."""

    def __init__(
        self, context: Context, memory: Memory, layouts: PackLayouts, chosen: Layouts, *, made: Sequence[bool], is_lent: bool
    ) -> None:
        super().__init__(context, memory)
        self._pack, self._made = layouts.pack, made
        self._layouts: list[Layout] = []
        self._caches = ClaimedCaches(context.nodes)
        self._filled: dict[str, FeatureCache] = {}  # caches that hold the layout's first rows, and do not change
        self._tiers: list[DeviceTier] = []  # one a layout, if the device holds rows of it
        self._memory = EpochMemory(context.graph.budget, memory.held, _nothing)
        self._tables = context.graph.budget.reserve(TABLES, 0)
        self._on_death: list[weakref.finalize[..., Any]] = [weakref.finalize(self, _close, self._tiers, self._tables)]
        try:
            if chosen:
                self._open(chosen, layouts.parts, is_lent=is_lent)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, Any]:
        """Return ``layout``: its name, and whether it was made for this loader. Of several ``layouts``, a list of these."""
        each = zip(self._layouts, self._made, strict=bool(self._layouts))
        said = [{"name": layout.options.name, "made": made} for layout, made in each]
        return {"layout": said[0]} if len(said) == 1 else {"layouts": said} if said else {}

    def _open(self, chosen: Layouts, parts: Sequence[PartLayouts], *, is_lent: bool) -> None:
        capacities: dict[str, int] = {}
        for options, part in zip(chosen, parts, strict=True):
            layout = Layout(self._pack, options, self.context.graph.reader)
            self._layouts.append(layout)
            self._on_death.append(weakref.finalize(self, layout.close))
            layout.check(part.sources)
            capacities |= dict.fromkeys(part.sources, options.capacity)
        assert isinstance(self.context.batches, PackBatches)
        self.context = replace(self.context, batches=self.context.batches.grouped(self._layouts[0].group))
        self._tables.resize(sum(layout.tables.nbytes for layout in self._layouts))
        self._caches.make(capacities, self._cache_room if is_lent else None)
        if any(len(layout.tables.device_rows) for layout in self._layouts):
            self._fill_device()

    def _fill_device(self) -> None:
        """Copy the layouts' device rows to the device."""
        graph, context, found = self.context.graph, self.context, list[DeviceTier | None]()
        fills = list[tuple[DeviceTier, Layout, Domain]]()
        for part in context.nodes.each:
            layout = next((each for each in self._layouts if set(each.options.features) == set(part.stores)), None)
            if layout is None or not len(layout.tables.device_rows):
                found.append(None)
                continue
            shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in part.stores.items()}
            tier = DeviceTier(layout.tables.device_rows, shapes, context.device, graph.pool, n_threads=context.copy_threads)
            self._tiers.append(tier)
            found.append(tier)
            fills.append((tier, layout, part))
        use = self._memory.begin("packs")  # the windows' memory is on loan until then
        try:
            window = self._memory[WINDOWS].n_bytes // sum(len(layout.options.features) for layout in self._layouts)
            for tier, layout, part in fills:
                for name, store in part.stores.items():
                    source = layout.fill(name, Tier.DEVICE, window)
                    try:
                        tier.fill(name, fill_step(store.row_bytes, Tier.DEVICE), partial(fill_from_extents, context, source))
                    finally:
                        source.close()
        finally:
            self._memory.end(use)
        self.context = replace(context, on_device=OnDevice(found))

    def _cache_room(self) -> int:
        """Compute the bytes that caches may take when they are made anew."""
        graph = self.context.graph
        graph.pool.trim()
        return self.memory.left_for_caches(graph.budget.available, self.context.prefetch)[0]

    def close(self, failed: bool = False) -> None:
        """Close the layouts and give the memory back; may be called again."""
        self._memory.close()
        _close(self._tiers, self._tables)
        for layout in self._layouts:
            layout.close()
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
            layouts = {name: layout for layout in self._layouts for name in layout.options.features}
            run = PackedEpoch(
                self.context, self._pack, layouts, epoch, start, self._caches, claim, self._filled, window, self._memory, use
            )
            undo.pop_all()
        return run


def _nothing() -> None:
    pass


def _close(tiers: list[DeviceTier], tables: Reservation) -> None:
    while tiers:
        tiers.pop().close()
    tables.release()
