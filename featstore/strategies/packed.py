"""``Packed``: frozen samples and extents of a pack, run as often as wanted (DiskGNN)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, OptionError
from featstore.gather.buffers import block_bytes
from featstore.gather.plan import Tier
from featstore.pack.batches import PackBatches
from featstore.pack.fingerprint import digest_of, same_scores
from featstore.pack.layout import Layout, LayoutOptions, PackedFeature, check_disk, fill_step, find_layouts
from featstore.pack.makelayout import make_layout
from featstore.pack.nodedata import NodeData
from featstore.pack.offline import Pack
from featstore.pack.packgraph import PackedGraph
from featstore.plan.cost import Estimate, Machine, Workload
from featstore.plan.planmemory import planning_bytes
from featstore.sampling.drawn import SampledBatches
from featstore.storage.extents import least_memory
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import MOST_WINDOW_BYTES, least_window
from featstore.strategies.base import EpochRun, Runner, Strategy
from featstore.strategies.batchsize import KEPT_BYTES, larger, measure
from featstore.strategies.caches import (
    LeasedCaches,
    cache_bytes,
    make_online_edge_caches,
    make_room,
    online_edge_bytes,
    size_caches,
)
from featstore.strategies.holdings import Holdings
from featstore.strategies.memory import Memory, too_small
from featstore.strategies.options import CACHE, DISK, EDGE_CACHE, EDGE_CACHE_HELP, LENGTH, PACK, check_managed, option, policy_of
from featstore.strategies.packedepoch import PackedEpoch, fill_from_extents
from featstore.strategies.packedestimate import by_frequency, by_plan
from featstore.strategies.registry import register_strategy
from featstore.strategies.setup import OnDevice, Setup
from featstore.strategies.superbatch import plan_ahead

__all__ = ["Packed", "PackedRunner", "batches_of", "packed_length", "size_for_pack"]

Int64s = npt.NDArray[np.int64]
MOST_AUTO_BATCHES = 200
WINDOW_SHARE = 16  # extents of all features are read ahead into one part of so many of what is available


def packed_length(length: int | str, n_batches: int) -> int:
    """Return how many of an epoch's batches a planned policy plans together."""
    return max(1, min(MOST_AUTO_BATCHES if isinstance(length, str) else length, n_batches))


def batches_of(
    pack: Pack | str | os.PathLike[str], graph: Any, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
) -> PackBatches:
    """Return a pack's batches for a loader; ValueError where it asks for others."""
    found = PackBatches(pack, graph.pool, shuffle, seed)
    try:
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


def _window_for(available: int, n_features: int) -> int:
    """Return how many bytes each feature's extents are read ahead into."""
    return max(least_window(), min(MOST_WINDOW_BYTES, available // (WINDOW_SHARE * max(1, n_features))))


def size_for_pack(setup: Setup, memory: Memory, pack: Pack) -> int | float:
    """Return a feature cache's size, as a share of the rows or in bytes, for the layouts that a pack has, or for its first."""
    n, row_bytes, n_device = setup.graph.num_nodes, setup.row_bytes, setup.device_rows or 0
    spare, _ = memory.left_for_caches(setup.room, setup.prefetch)
    there = [
        each.capacity
        for each in find_layouts(pack)
        if sorted(each.features) == sorted(setup.features) and each.device_rows == n_device
    ]
    least = {rows: sum(FeatureCache.least_bytes(rows, each, n, None) for each in row_bytes.values()) for rows in {1, *there}}
    fitting = [rows for rows in there if rows == 0 or least[rows] <= spare]
    if fitting:
        rows = max(fitting)
        return rows / n if rows else 0
    return spare // 2 if spare // 2 >= least[1] else 0  # extents are read ahead, and packed, in the rest


@register_strategy("packed")
@dataclass(frozen=True)
class Packed(Strategy):
    """Run the samples of a pack from extents that are made once (DiskGNN with ``policy="frequency"``).

    The sampler and the seeds are the pack's; epoch ``e`` runs the pack's epoch ``e`` modulo how many it has. With ``shuffle``
    batches run in a new order each epoch, with a planned policy those of a superbatch together.

    Parameters
    ----------
    pack : Pack, path-like or None
        What :func:`~featstore.sample_offline` made; None with a :class:`~featstore.PackedGraph`, which is one.
    cache : int, str, float or None
        Host tier: bytes (``"1GiB"``), a share of the rows (``"10%"`` or ``0.1``); None takes that of the one layout that the pack
        has; ``"auto"`` the largest of its layouts that fits, or, where it has none, half of the memory that batches leave.
    policy : str, Policy or class
        A planned one, or a static one.
    length : int or "auto"
        Batches that a planned policy plans together; 200 at most, by default.
    disk : int, str or None
        Most bytes of the layout that is made, or run, with the labels that are brought beside it; None: no bound. With a static
        policy, segments of batches share rows where it is too small for an extent a batch.
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

    def batches(self, graph: Any, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool) -> SampledBatches | None:
        """See :class:`~featstore.Strategy`."""
        pack = self.pack if self.pack is not None else getattr(graph, "path", None) if isinstance(graph, PackedGraph) else None
        if pack is None:
            raise OptionError("pack", "needed: what sample_offline made (featstore pack on the command line)")
        return batches_of(pack, graph, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def run(self, setup: Setup) -> Runner:
        """See :class:`~featstore.Strategy`."""
        of_edges = online_edge_bytes(setup, self.edge_cache, self.edge_policy)
        make_room(setup.graph, setup.features, of_edges)
        runner = PackedRunner(replace(setup, planning=plan_ahead(setup, self.policy, self.length, self.disk, None)))
        try:
            if setup.refused is not None:
                raise setup.refused
            make_online_edge_caches(setup, of_edges, self.edge_policy)  # before the others, which may take what is left
            if self.cache is None:
                runner.use_existing()
            else:
                runner.make_caches(self.cache, self.policy)
        except BudgetError as error:
            runner.close()
            if setup.share is not None and setup.refused is None:
                raise  # names bytes of the share
            make_room(setup.graph, setup.features, of_edges)
            raise too_small(error, runner.least_total(self.cache, sum(of_edges.values()))) from None
        except BaseException:
            runner.close()
            raise
        return runner


class PackedRunner(Runner):
    """Run a pack's batches from the layout that fits the loader's options; the first run makes it."""

    def __init__(self, setup: Setup) -> None:
        planning, pack = setup.planning, setup.pack
        if planning is None or pack is None:
            raise ValueError("strategy 'packed' runs the samples of a pack")
        super().__init__(setup)
        self._setup, self._planning, self._pack = setup, planning, pack
        graph = setup.graph
        pack.check(graph)
        self._sources = {
            name: PackedFeature(
                graph.features[name].pages,
                str(graph.features[name].dtype).removeprefix("torch."),
                tuple(graph.features[name].shape),
            )
            for name in setup.features
        }
        self._layout: Layout | None = None
        self.made_layout: str | None = None  # its name, where it was made here: not by others before, nor meanwhile
        self._caches = LeasedCaches(graph, setup.features)
        self._filled: dict[str, FeatureCache] = {}  # caches that hold what the layout starts with, and do not change
        self._tiers: list[DeviceTier] = []  # one, where the device holds rows
        self._holdings = Holdings(graph.budget, self.memory)
        self._held: list[Reservation] = []
        self._window_bytes = 0
        self._is_lent = False
        self._on_death: list[weakref.finalize[..., Any]] = [weakref.finalize(self, _release, self._held, self._tiers)]

    def make_caches(self, size: int | float | str, policy: str | Policy | type[Policy]) -> None:
        """Make the host tier, and first the layout, where the pack has none for it."""
        setup, n = self._setup, self._setup.graph.num_nodes
        if not setup.features or not n:
            return
        on_loan = size == "auto" or setup.lends_caches
        batch = setup.batch or measure(setup.graph, setup.batches)[0]
        known = replace(setup, batch=batch)  # nothing is sampled here
        self.memory = Memory(known, batch)
        is_given = size != "auto"
        if not is_given:
            self.memory.divide()  # or say now that not even batches fit
            size = size_for_pack(setup, self.memory, self._pack)
        # Caches that follow plans, in any case.
        sizes, self.prefetch = size_caches(setup, self.memory, size, get_policy("belady"))
        # Before a layout is made for it; on "meta" it is made for another machine, which may have more memory.
        if is_given and setup.device.type != "meta":
            beside = sum(sizes.values()) + len(sizes) * least_window()
            Memory(known, batch, cache_bytes=beside).divide()
        capacity = min(
            FeatureCache.capacity_for(n_bytes, self._sources[name].file.row_bytes, n, None) for name, n_bytes in sizes.items()
        )
        # What a cache has given back is read from the features' own file, which a pack without its dataset lacks.
        self._is_lent = on_loan and not isinstance(setup.graph, PackedGraph)
        with setup.watch.time("cache"):
            self._use(get_policy(policy), capacity)
        setup.hold_share(sizes)

    def least_total(self, size: int | float | str | None, beside: int = 0) -> int:
        """Return a memory in which epochs run, beside other loaders, for a cache of ``size``; somewhat more than the least.

        ``beside``: the bytes of caches of edge features.
        """
        setup, graph, widths = self._setup, self._setup.graph, list(self._setup.row_bytes.values())
        policy, n_device = self._planning.policy, setup.device_rows or 0
        is_planned = isinstance(policy, PlannedPolicy)
        superbatch = packed_length(self._planning.superbatch, self._pack.n_batches) if is_planned else 0
        capacity = 0
        if size is not None and size != "auto" and widths and graph.num_nodes:
            sizes = cache_bytes(size, graph.num_nodes, setup.row_bytes, get_policy("belady"), graph.budget, 1 << 62)
            capacity = min(
                FeatureCache.capacity_for(sizes[name], width, graph.num_nodes, None) for name, width in setup.row_bytes.items()
            )
        there = [
            each
            for each in self._layouts(policy, None)
            if setup.device_rows in (None, each.device_rows)
            and (size is None or each.superbatch == superbatch)
            and (size in (None, "auto") or each.capacity == capacity)
        ]
        ways = [self._running_bytes(widths, each.capacity, each.device_rows) for each in there]
        if not there or size == "auto":
            made = self._making_bytes(widths, capacity, n_device, superbatch)
            ways.append(max(made, self._running_bytes(widths, capacity, n_device)))
        return self.memory.total_with(min(ways) + beside + setup.refused_bytes)

    def _running_bytes(self, widths: Sequence[int], capacity: int, n_device: int) -> int:
        """Return what an epoch takes of a layout that is there: its tiers and tables, and two of the largest batches."""
        setup, n, policy = self._setup, self._setup.graph.num_nodes, self._planning.policy
        longest = int(self._pack.lengths.max(initial=0))
        batch = block_bytes(longest * KEPT_BYTES) + sum(block_bytes(longest * width) for width in widths)
        two = max(2 * batch, self.memory.loop_bytes(larger(longest)))  # or what divides the memory would ask for more
        caches = sum(FeatureCache.least_bytes(capacity, width, n, None) for width in widths)
        device = n_device * sum(widths) if setup.device.type == "cpu" else 0
        tables = 16 * (n_device + (capacity if isinstance(policy, StaticPolicy) else 0))
        digest = policy.score_bytes * n if isinstance(policy, StaticPolicy) else 0  # before the others
        return max(digest, caches + device + tables + len(widths) * least_window() + two)

    def _making_bytes(self, widths: Sequence[int], capacity: int, n_device: int, superbatch: int) -> int:
        """Return what making a layout takes: its tables are made, then each feature's rows are copied."""
        pack, n, policy = self._pack, self._setup.graph.num_nodes, self._planning.policy
        longest = int(pack.lengths.max(initial=0))
        if isinstance(policy, PlannedPolicy):
            windows = [
                int(epoch[first : first + superbatch].sum())
                for epoch in pack.lengths.reshape(pack.epochs, pack.n_batches)
                for first in range(0, pack.n_batches, superbatch)
            ]
            checked = CheckedPolicy(policy).is_checked
            tables = planning_bytes(n, max(windows, default=0), longest=longest, checked=checked) + (16 * n if n_device else 0)
        else:
            assert isinstance(policy, StaticPolicy)
            # Scores of no bytes are an array that the policy looks at; others are worked out from two. One is made at a time.
            n_arrays = 4 if policy.score_bytes else 2
            tables = (16 + policy.score_bytes + 8 * n_arrays) * n + PAGE_BYTES
        n_filled = n_device + (capacity if isinstance(policy, StaticPolicy) else 0)
        n_rows = int(pack.lengths.sum()) + n_filled
        copying = [
            least_memory(width, max(longest, n_filled)) + 8 * (n_rows * width // PAGE_BYTES + 2 * len(pack) + 1024)
            for width in widths
        ]
        return max(tables, 16 * n_filled + max(copying, default=0))

    def stats(self) -> dict[str, Any]:
        """Return ``layout``: its name, and whether it was made for this loader."""
        made = self.made_layout is not None
        return {} if self._layout is None else {"layout": {"name": self._layout.options.name, "made": made}}

    def use_existing(self) -> None:
        """Take the one layout of the pack that has these features and this policy."""
        setup, policy = self._setup, self._planning.policy
        if not setup.features:
            return
        digest = self._digest(policy)
        size = None  # of superbatches, where it was asked for
        if isinstance(policy, PlannedPolicy) and self._planning.superbatch != "auto":
            size = packed_length(self._planning.superbatch, self._pack.n_batches)
        fitting = [
            found
            for found in self._layouts(policy, digest)
            if setup.device_rows in (None, found.device_rows) and size in (None, found.superbatch)
        ]
        if len(fitting) != 1:
            raise ValueError(
                f"{self._pack.path} has {len(fitting)} layouts of {list(setup.features)} with policy {policy.name!r}"
                f"{' that decides as this one' if digest else ''}; cache says which to take, or to make"
            )
        check_disk(self._pack.file(fitting[0].name), self._planning.disk)
        self._open(fitting[0])

    def _layouts(self, policy: Policy, digest: str | None) -> list[LayoutOptions]:
        """Return the layouts of these features and this policy; ``digest`` None: by its name."""
        features = sorted(self._setup.features)
        named = [each for each in find_layouts(self._pack) if sorted(each.features) == features and each.policy == policy.name]
        return named if digest is None else [each for each in named if each.digest == digest]

    def _digest(self, policy: Policy) -> str | None:
        """Return what tells this policy from others of its name; None where that needs what only the dataset has."""
        n_bytes = policy.score_bytes * self._pack.num_nodes if isinstance(policy, StaticPolicy) else 0
        with self._setup.graph.budget.reserve("packing", n_bytes):
            try:
                return digest_of(policy, self._scores)
            except FileNotFoundError:
                if isinstance(self._setup.graph, PackedGraph):
                    return None
                raise

    def _use(self, policy: Policy, capacity: int) -> None:
        setup, pack = self._setup, self._pack
        superbatch = packed_length(self._planning.superbatch, pack.n_batches) if isinstance(policy, PlannedPolicy) else 0
        digest = self._digest(policy)
        options = LayoutOptions(setup.features, policy.name, capacity, superbatch, setup.device_rows or 0, digest or "")
        if digest is None:
            there = [each for each in self._layouts(policy, None) if replace(each, digest="").name == options.name]
            options = there[0] if len(there) == 1 else options
        graph = setup.graph
        data = [] if setup.labels is None else [self._node_data(setup.labels)]
        with setup.watch.time("pack"):
            made = make_layout(
                pack,
                options,
                policy,
                same_scores(self._scores, options.digest),
                self._sources,
                graph.reader,
                graph.budget,
                node_data=data,
                disk=self._planning.disk,
            )
        self.made_layout = options.name if made else None
        self._open(options)

    def _scores(self, policy: StaticPolicy) -> npt.NDArray[Any]:
        graph = self._setup.graph
        row_bytes = sum(source.file.row_bytes for source in self._sources.values())
        with graph.policy_inputs(row_bytes, counts=self._pack.counts) as inputs:
            scores: npt.NDArray[Any] = inputs.scores(policy)
        return scores

    def _node_data(self, name: str) -> NodeData:
        graph = self._setup.graph
        return NodeData(name, graph.node_data[name], graph.fingerprint()[f"node/_/{name}"])

    def _open(self, options: LayoutOptions) -> None:
        graph = self._setup.graph
        layout = self._layout = Layout(self._pack, options, graph.reader)
        assert isinstance(self._setup.batches, PackBatches)
        self.setup = self._setup = replace(self._setup, batches=self._setup.batches.grouped(layout.group))
        self._on_death.append(weakref.finalize(self, layout.close))
        layout.check(self._sources)
        self._held.append(graph.budget.reserve("layout tables", layout.tables.nbytes))
        room = self._cache_room if self._is_lent else None
        self._caches.make(dict.fromkeys(self._setup.features, options.capacity), room)
        self._window_bytes = _window_for(graph.budget.available, len(self._setup.features))
        self._ahead = graph.budget.reserve("extents read ahead", self._window_bytes * len(self._setup.features))
        self._held.append(self._ahead)
        rows = layout.tables.device_rows
        if len(rows):
            self._fill_device(layout, rows)

    def _fill_device(self, layout: Layout, rows: Int64s) -> None:
        """Bring the layout's rows to the device."""
        graph, setup = self._setup.graph, self._setup
        stores = {name: graph.features[name] for name in setup.features}
        shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in stores.items()}
        tier = DeviceTier(rows, shapes, setup.device, graph.pool, graph.budget, n_threads=setup.n_copying)
        self._tiers.append(tier)
        for name, store in stores.items():
            source = layout.fill(name, Tier.DEVICE, self._window_bytes)
            try:
                tier.fill(name, fill_step(store.row_bytes, Tier.DEVICE), partial(fill_from_extents, setup, source))
            finally:
                source.close()
        self.setup = self._setup = replace(setup, on_device=OnDevice(tier))

    def _cache_room(self) -> int:
        """Return the bytes that caches may take, made anew."""
        graph = self._setup.graph
        graph.pool.trim()
        return self.memory.left_for_caches(graph.budget.available, self._setup.prefetch)[0]

    @property
    def window_bytes(self) -> int:
        """Bytes that each feature's extents are read ahead into."""
        return self._window_bytes

    def read_less_ahead(self) -> bool:
        """Make the window of streams to come the least there is; return whether it was more."""
        more = self._window_bytes > least_window()
        self._window_bytes = min(self._window_bytes, least_window())
        return more

    def give_window_back(self) -> None:
        """Give back what the window has become less by, once no stream has it any more."""
        self._ahead.resize(self._window_bytes * len(self._setup.features))

    def close(self, failed: bool = False) -> None:
        """Close the layout and give the memory back; may be called again."""
        self._holdings.close()
        _release(self._held, self._tiers)
        if self._layout is not None:
            self._layout.close()
        for finalizer in self._on_death:
            finalizer.detach()  # so that Ctrl-C is not lost in it

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``: the samples of the pack's epoch ``epoch`` modulo how many it has.

        Raises
        ------
        BusyError
            Another epoch that follows plans is running, of this loader or of another one: both would change one cache.
        BudgetError
            Another loader has taken the cache's place since, and there is no memory to make it anew.
        """
        with self._holdings.beginning("packs"):
            lease = self._caches.lease()
            try:
                run = PackedEpoch(self._setup, self._pack, self._layout, epoch, start, self._caches, lease, self._filled, self)
            except BaseException:
                self._caches.release()
                raise
            self._holdings.began(run)
            return run


def _release(held: list[Reservation], tiers: list[DeviceTier]) -> None:
    while held:
        held.pop().release()
    while tiers:
        tiers.pop().close()
