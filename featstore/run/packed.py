"""``strategy="packed"``: frozen samples and extents of a pack, run as often as wanted."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Reservation
from featstore.errors import BusyError
from featstore.gather.device import DeviceTier
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.sources import ExtentSource, RowSource
from featstore.graph.feature import FeatureStore
from featstore.graph.policyinputs import Given
from featstore.partition.batcher import RandomBatcher
from featstore.plan.identity import digest_of, same_scores
from featstore.plan.layout import Layout, LayoutOptions, Source, check_disk, fill_step, find_layouts
from featstore.plan.makelayout import make_layout
from featstore.plan.nodedata import NodeData
from featstore.plan.offline import Pack
from featstore.plan.packgraph import PackedGraph
from featstore.run.owncaches import Claim, OwnCaches
from featstore.run.strategy import EpochRun, Planning, Prepared, Setup
from featstore.run.streamed import window_for
from featstore.storage.pagestream import least_window

__all__ = ["Packed", "packed_superbatch"]

Int64s = npt.NDArray[np.int64]
MOST_AUTO_BATCHES = 200
SAMPLE_BYTES = 128  # a row of a batch, of its sample and plan: a generous guess


def packed_superbatch(planning: Planning, pack: Pack) -> int:
    """Return how many batches of a pack a planned policy plans together."""
    size = planning.superbatch
    return max(1, min(MOST_AUTO_BATCHES if isinstance(size, str) else size, pack.n_batches))


class Packed:
    """Run a pack's batches from the layout that fits the loader's options; the first run makes it."""

    def __init__(self, setup: Setup) -> None:
        planning, pack = setup.planning, setup.pack
        if planning is None or pack is None:
            raise ValueError("strategy 'packed' needs pack=, the offline samples to run")
        self._setup, self._planning, self._pack = setup, planning, pack
        graph = setup.graph
        pack.check(graph)
        self._sources = {
            name: Source(
                graph.features[name].pages,
                str(graph.features[name].dtype).removeprefix("torch."),
                tuple(graph.features[name].shape),
            )
            for name in setup.features
        }
        self._layout: Layout | None = None
        self.made_layout: str | None = None  # its name, where it was made here: not by others before, nor meanwhile
        self._caches = OwnCaches(graph, setup.features)
        self._filled: dict[str, FeatureCache] = {}  # caches that hold what the layout starts with, and do not change
        self._devices: dict[str, DeviceTier] = {}
        self._running: weakref.ref[_PackedEpoch] | None = None
        self._held: list[Reservation] = []
        self._window_bytes = 0
        self._is_lent = False
        weakref.finalize(self, _release, self._held, self._devices)

    @property
    def group(self) -> int:
        """How many consecutive batches run together, whatever the order of the others."""
        return 1 if self._layout is None else self._layout.group

    def make_caches(self, sizes: Mapping[str, int], policy: str | Policy | type[Policy], counts: Given, *, on_loan: bool) -> None:
        """See :class:`~featstore.run.strategy.Strategy`; makes the layout first, where the pack has none for these caches."""
        n = self._setup.graph.num_nodes
        capacity = min(
            FeatureCache.capacity_for(n_bytes, self._sources[name].file.row_bytes, n, None) for name, n_bytes in sizes.items()
        )
        # What a cache has given back is read from the features' own file, which a pack without its dataset lacks.
        self._is_lent = on_loan and not isinstance(self._setup.graph, PackedGraph)
        self._use(get_policy(policy), capacity)

    def use_existing(self) -> None:
        """Take the one layout of the pack that has these features and this policy."""
        setup, policy = self._setup, self._planning.policy
        if not setup.features:
            return
        digest = self._digest(policy)
        size = None  # of superbatches, where it was asked for
        if isinstance(policy, PlannedPolicy) and self._planning.superbatch != "auto":
            size = packed_superbatch(self._planning, self._pack)
        fitting = [
            found
            for found in self._layouts(policy, digest)
            if setup.device_rows in (None, found.device_rows) and size in (None, found.superbatch)
        ]
        if len(fitting) != 1:
            raise ValueError(
                f"{self._pack.path} has {len(fitting)} layouts of {list(setup.features)} with policy {policy.name!r}"
                f"{' that decides as this one' if digest else ''}; feature_cache= says which to take, or to make"
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
        superbatch = packed_superbatch(self._planning, pack) if isinstance(policy, PlannedPolicy) else 0
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
        return NodeData(name, graph.node_data[name], graph.identity()[f"node/_/{name}"])

    def _open(self, options: LayoutOptions) -> None:
        graph = self._setup.graph
        layout = self._layout = Layout(self._pack, options, graph.reader)
        weakref.finalize(self, layout.close)
        layout.check(self._sources)
        self._held.append(graph.budget.reserve("layout tables", layout.tables.nbytes))
        room = self._cache_room if self._is_lent else None
        self._caches.make(dict.fromkeys(self._setup.features, options.capacity), room)
        self._window_bytes = window_for(graph.budget.available, len(self._setup.features))
        self._ahead = graph.budget.reserve("extents read ahead", self._window_bytes * len(self._setup.features))
        self._held.append(self._ahead)
        rows = layout.tables.device_rows
        for name in self._setup.features if len(rows) else ():
            store, device = graph.features[name], self._setup.device
            shape = tuple(store.shape[1:])
            self._devices[name] = DeviceTier(
                len(rows), shape, store.dtype, device, graph.pool, graph.budget, graph.options.threads
            )
            source = layout.fill(name, Tier.DEVICE, self._window_bytes)
            try:
                self._devices[name].fill(rows, fill_step(store.row_bytes, Tier.DEVICE), partial(_fill, self._setup, source))
            finally:
                source.close()

    def _cache_room(self) -> int:
        """Return the bytes that caches may take, made anew: what two batches leave."""
        graph, longest = self._setup.graph, int(self._pack.lengths.max(initial=0))
        graph.pool.trim()
        widths = sum(source.file.row_bytes for source in self._sources.values())
        left: int = graph.budget.available - 2 * longest * (widths + SAMPLE_BYTES)
        return max(0, left)

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

    def close(self) -> None:
        """Close the layout and give the memory back; may be called again."""
        _release(self._held, self._devices)
        if self._layout is not None:
            self._layout.close()

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``: the samples of the pack's epoch ``epoch`` modulo how many it has.

        Raises
        ------
        BusyError
            Another epoch that follows plans is running, of this loader or of another one: both would change one cache.
        BudgetError
            Another loader has taken the cache's place since, and there is no memory to make it anew.
        """
        running = None if self._running is None else self._running()
        if running is not None and not running.closed:
            raise BusyError("another epoch of this loader is running; packs have one cache, so end or drop it first")
        claim = self._caches.claim()
        try:
            run = _PackedEpoch(
                self._setup, self._pack, self._layout, epoch, start, self._caches, claim, self._filled, self._devices, self
            )
        except BaseException:
            self._caches.release()
            raise
        self._running = weakref.ref(run)
        return run


def _release(held: list[Reservation], devices: dict[str, DeviceTier]) -> None:
    while held:
        held.pop().release()
    while devices:
        devices.popitem()[1].close()


def _fill(setup: Setup, source: ExtentSource, rows: Int64s, out: npt.NDArray[np.uint8]) -> None:
    setup.reads.add(source.gather(rows, out, None))


def _fill_from(setup: Setup, store: FeatureStore, rows: Int64s, out: npt.NDArray[np.uint8]) -> None:
    setup.reads.add(store.source.gather(rows, out))


def _order(n: int, group: int, batcher: RandomBatcher, epoch: int) -> Int64s:
    """Order the batches of an epoch: groups of consecutive batches shuffled, each in its order."""
    groups = [np.arange(first, min(first + group, n)) for first in range(0, n, group)]
    if batcher.shuffle and len(groups) > 1:
        shuffled = RandomBatcher(torch.arange(len(groups)), 1, seed=batcher.seed).epoch(epoch)
        groups = [groups[int(shuffled.seeds(k)[0])] for k in range(len(groups))]
    return np.concatenate(groups) if groups else np.empty(0, np.int64)


class _PackedEpoch:
    def __init__(
        self,
        setup: Setup,
        pack: Pack,
        layout: Layout | None,
        epoch: int,
        start: int,
        caches: OwnCaches,
        claim: Claim,
        filled: dict[str, FeatureCache],
        devices: Mapping[str, DeviceTier],
        strategy: Packed,
    ) -> None:
        self._setup, self._pack, self._layout, self._filled, self._devices = setup, pack, layout, filled, devices
        self._caches, self._claim, self._strategy, self.closed = caches, claim, strategy, False
        n = pack.n_batches
        self._group = n or 1 if layout is None else layout.group
        self._order = _order(n, self._group, setup.batcher, epoch)
        self._position_of = np.argsort(self._order)
        self._base = epoch % pack.epochs * n
        # Plans change a cache that others of the group filled: a run that begins within a group begins with the group.
        self._start = start
        self._first = start if layout is None or not layout.options.superbatch else self._group_begin(start)
        self._behind = dict.fromkeys(setup.features, self._first)
        self._sources: dict[str, ExtentSource] = {}
        self._tiers: dict[str, dict[Tier, RowSource]] = {}
        try:
            for name in setup.features:
                self._ready(name, strategy.window_bytes)
        except BaseException:
            self.close()
            raise

    def _group_begin(self, position: int) -> int:
        """Return the first position of the group that ``position`` is in."""
        if position >= len(self._order):
            return position
        return position - int(self._order[position]) % self._group

    def _ready(self, name: str, window_bytes: int) -> None:
        """Put what the layout starts with into the cache, and begin to read the first batches' extents."""
        layout, store = self._layout, self._setup.graph.features[name]
        assert layout is not None
        cache, rows = store.cache, layout.tables.fill_rows
        assert cache is not None
        if len(rows) and self._filled.get(name) is not cache:
            cache.clear()
            if cache.is_lent:  # it may have fewer rows than the layout, whose extents are read whole
                cache.preload(rows, partial(_fill_from, self._setup, store))
            else:
                source = layout.fill(name, Tier.HOST, window_bytes)
                try:
                    cache.preload(rows, partial(_fill, self._setup, source))
                finally:
                    source.close()
            self._filled[name] = cache
        elif not len(rows):
            cache.clear()
        source = self._sources[name] = layout.batches(name, self._base + self._order[self._first :], window_bytes)
        shared = layout.shared(name)
        self._tiers[name] = {Tier.PACKED: source} if shared is None else {Tier.PACKED: source, Tier.DISK_CACHE: shared}

    @property
    def threads(self) -> int:
        return self._setup.threads  # samples and plans are read in any order

    def batch(self, position: int) -> Prepared:
        index = int(self._order[position])
        with self._setup.watch.time("load"):
            sampled = self._pack.batch(self._base + index, self._setup.graph.pool)
            if self._layout is None:
                return Prepared(sampled, {})
            plan = self._layout.tables.plan(self._base + index, sampled.input_ids.numpy(), self._setup.graph.pool.array)
            return Prepared(sampled, dict.fromkeys(self._setup.features, plan))

    @property
    def devices(self) -> Mapping[str, DeviceTier]:
        return self._devices

    def may_begin(self, position: int) -> bool:
        return True

    def plan(self, name: str, prepared: Prepared, tally: Tally) -> tuple[BatchPlan, Mapping[Tier, RowSource]]:
        store = self._setup.graph.features[name]
        for position in range(self._behind.get(name, self._start), self._start):
            # The batches of the group before the one that is asked for, so that the cache is as their plans leave it.
            earlier = self.batch(position)
            store.gather(earlier.sampled.input_ids, *self._plan(name, position, earlier), Tally(read=tally.read))
            self._behind[name] = position + 1
        return self._plan(name, int(self._position_of[prepared.sampled.index]), prepared)

    def _plan(self, name: str, position: int, prepared: Prepared) -> tuple[BatchPlan, Mapping[Tier, RowSource]]:
        assert prepared.plans is not None
        layout = self._layout
        if layout is not None and layout.options.superbatch and self._order[position] % self._group == 0:
            self._setup.graph.features[name].cache.clear()
        return prepared.plans[name], self._tiers[name]

    def passed(self, position: int) -> None:
        pass

    def spare(self) -> bool:
        if not self._strategy.read_less_ahead():
            return False
        for source in self._sources.values():
            self._setup.reads.add(source.narrow(self._strategy.window_bytes))
        self._strategy.give_window_back()
        return True

    def stop(self) -> None:
        pass  # reads of extents end by themselves

    def close(self) -> None:
        if not self.closed:
            for source in self._sources.values():
                self._setup.reads.add(source.close())
            self._caches.release()
            self.closed = True
