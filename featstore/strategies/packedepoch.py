"""An epoch of a pack: samples, plans and rows from its files, read as one stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.table import FeatureCache
from featstore.gather.device import Apart, DeviceTier
from featstore.gather.executor import Source as TierSource
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan, Tier
from featstore.graph.feature import FeatureStore
from featstore.pack.batches import PackEpoch
from featstore.pack.layout import Layout
from featstore.pack.offline import Pack
from featstore.sampling.batch import SampledBatch
from featstore.storage.extents import ExtentSource
from featstore.strategies.base import EpochRun, Prepared
from featstore.strategies.leases import Claim, OwnCaches
from featstore.strategies.setup import Setup

__all__ = ["PackedEpoch", "Windows", "fill_from_extents"]

Int64s = npt.NDArray[np.int64]


class Windows(Protocol):
    """The memory that extents are read ahead into."""

    @property
    def window_bytes(self) -> int:
        """Bytes that each feature's extents are read ahead into."""
        ...

    def read_less_ahead(self) -> bool:
        """Make the window of streams to come the least there is; return whether it was more."""
        ...

    def give_window_back(self) -> None:
        """Give back what the window has become less by, once no stream has it any more."""
        ...


def fill_from_extents(setup: Setup, source: ExtentSource, rows: Int64s, out: npt.NDArray[np.uint8]) -> None:
    """Read what a tier starts with, and count it."""
    setup.reads.add(source.gather(rows, out, None))


def _fill_from(setup: Setup, store: FeatureStore, rows: Int64s, out: npt.NDArray[np.uint8]) -> None:
    setup.reads.add(store.read_rows(rows, out))


def _host_ids(plan: BatchPlan, sampled: SampledBatch) -> Int64s:
    """Return the rows that the host assembles of a batch."""
    ids: Int64s = sampled.input_ids.numpy()
    return ids if plan.device is None else ids[plan.device.others]


class PackedEpoch(EpochRun):
    """Batches of a pack, in an order, from the layout's extents and tiers."""

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
        strategy: Windows,
    ) -> None:
        self._setup, self._pack, self._layout, self._filled, self._devices = setup, pack, layout, filled, devices
        self._caches, self._claim, self._strategy, self.closed = caches, claim, strategy, False
        self._group = 1 if layout is None else layout.group
        batches = setup.batches.epoch(epoch)
        assert isinstance(batches, PackEpoch)
        self._batches, self._order, self._base = batches, batches.order, batches.base
        # Plans change a cache that others of the group filled: a run that begins within a group begins with the group.
        self._start = start
        self._first = start if layout is None or not layout.options.superbatch else self._group_begin(start)
        self._ran: dict[str, int] = {}
        self._kept: dict[str, tuple[torch.Tensor | Apart, Tally]] = {}
        self._sources: dict[str, ExtentSource] = {}
        self._tiers: dict[str, dict[Tier, TierSource]] = {}
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
        cache, reader, rows = store.cache, self._setup.graph.reader, layout.tables.fill_rows
        assert cache is not None
        if len(rows) and self._filled.get(name) is not cache:
            cache.clear()
            if cache.is_lent:  # it may have fewer rows than the layout, whose extents are read whole
                cache.preload(rows, partial(_fill_from, self._setup, store))
            else:
                source = layout.fill(name, reader, Tier.HOST, window_bytes)
                try:
                    cache.preload(rows, partial(fill_from_extents, self._setup, source))
                finally:
                    source.close()
            self._filled[name] = cache
        elif not len(rows):
            cache.clear()
        self._read(name, self._first, window_bytes)

    def _read(self, name: str, position: int, window_bytes: int) -> None:
        """Begin to read the extents of the batches from ``position`` on."""
        layout = self._layout
        assert layout is not None
        source = layout.batches(name, self._setup.graph.reader, self._base + self._order[position:], window_bytes)
        shared = layout.shared(name)
        self._sources[name] = source
        self._tiers[name] = {Tier.PACKED: source} if shared is None else {Tier.PACKED: source, Tier.DISK_CACHE: shared}

    @property
    def threads(self) -> int:
        return self._setup.threads  # samples and plans are read in any order

    def batch(self, position: int) -> Prepared:
        index = int(self._order[position])
        with self._setup.watch.time("load"):
            sampled = self._batches.sample(position)
            if self._layout is None:
                return Prepared(position, sampled, {})
            plan = self._layout.tables.plan(self._base + index, sampled.input_ids.numpy(), self._setup.graph.pool.array)
            return Prepared(position, sampled, dict.fromkeys(self._setup.features, plan))

    @property
    def has_device_tier(self) -> bool:
        return bool(self._devices)

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor | Apart:
        assert prepared.plans is not None
        position = prepared.position
        if self._first < self._start and self._ran.get(name, -1) < self._first:
            self._catch_up(name, tally)
        if self._ran.get(name, -1) < position:  # else asked again, because memory was short for another feature
            part, mine = prepared.plans[name].device, Tally(read=tally.read)
            if part is None:
                self._kept[name] = self._run(name, position, prepared, mine), mine
            else:
                tier = self._devices[name]
                whole = tier.memory_for(part)  # before anything has run
                self._kept[name] = Apart(tier, part, self._run(name, position, prepared, mine), whole), mine
                mine.count(Tier.DEVICE, len(part.slots))
            tally.update_s += mine.update_s
        rows, counted = self._kept[name]
        for each, n in counted.rows.items():
            tally.count(each, n)
        return rows

    def _run(self, name: str, position: int, prepared: Prepared, tally: Tally) -> torch.Tensor:
        assert prepared.plans is not None
        store, source = self._setup.graph.features[name], self._sources[name]
        layout = self._layout
        if layout is not None and layout.options.superbatch and self._order[position] % self._group == 0:
            store.cache.clear()
        plan, before = prepared.plans[name], source.waited_s
        rows: torch.Tensor = store.run_plan(plan, _host_ids(plan, prepared.sampled), tally, sources=self._tiers[name])
        self._setup.watch.add("read", source.waited_s - before)
        self._ran[name] = position
        return rows

    def _catch_up(self, name: str, tally: Tally) -> None:
        """Run the batches of the group before the one that is asked for, so that the cache is as their plans leave it."""
        for position in range(max(self._first, self._ran.get(name, -1) + 1), self._start):
            self._run(name, position, self.batch(position), Tally(read=tally.read))

    def passed(self, position: int) -> None:
        self._kept.clear()

    def spare(self) -> bool:
        if not self._strategy.read_less_ahead():
            return False
        for name, source in self._sources.items():
            self._setup.reads.add(source.close())
            self._read(name, self._ran.get(name, self._first - 1) + 1, self._strategy.window_bytes)
        self._strategy.give_window_back()
        return True

    def close(self) -> None:
        if not self.closed:
            for source in self._sources.values():
                self._setup.reads.add(source.close())
            self._caches.release()
            self._kept.clear()
            self.closed = True
