"""An epoch of a pack: its samples and plans are read from the pack's files, the extents of each feature as one stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Reservation
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory, Use
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.sources import ExtentSource, RowSource
from featstore.pack.batches import PackBatches
from featstore.pack.layout import Layout
from featstore.pack.offline import Pack
from featstore.storage.pagestream import least_window
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.caches import ClaimedCaches
from featstore.strategies.context import Context

__all__ = ["PackedEpoch", "fill_from_extents"]

Int64s = npt.NDArray[np.int64]


def fill_from_extents(context: Context, source: ExtentSource, rows: Int64s, out: npt.NDArray[np.uint8]) -> None:
    """Read the rows that a tier starts with from their extent, and count the reads."""
    context.nodes.reads.add(source.gather(rows, out, None))


class PackedEpoch(EpochRun):
    """Run batches of a pack, in an order, with extents and tiers of layouts.

    ``layouts`` are those of the features, by name; one of several features has the same rows of each. Features without one have
    no rows. Layouts plan as many batches together.
    """

    def __init__(
        self,
        context: Context,
        pack: Pack,
        layouts: Mapping[str, Layout],
        epoch: int,
        start: int,
        caches: ClaimedCaches,
        claim: Use,
        filled: dict[str, FeatureCache],
        window: Reservation | None,
        memory: EpochMemory,
        use: Use,
    ) -> None:
        self._context, self._pack, self._layouts, self._filled = context, pack, layouts, filled
        self._caches, self._window, self._memory, self._use = caches, window, memory, use
        self._claim = claim  # lasts as long as this epoch
        self._group = max((layout.group for layout in layouts.values()), default=1)
        assert isinstance(context.batches, PackBatches)
        self._order, self._base = context.batches.numbers(epoch)
        # Plans of a group change one cache in turn: a run that begins within a group first runs the group's earlier plans.
        self._start = start
        self._first = self._group_begin(start) if any(each.options.superbatch for each in layouts.values()) else start
        self._behind = dict.fromkeys(context.features, self._first)
        self._sources: dict[str, ExtentSource] = {}
        self._tiers: dict[str, dict[Tier, RowSource]] = {}
        try:
            for name, layout in layouts.items():
                self._ready(name, layout, 0 if window is None else window.n_bytes // len(layouts))
        except BaseException:
            self.close()
            raise

    def _group_begin(self, position: int) -> int:
        """Return the first position of the group that ``position`` is in."""
        if position >= len(self._order):
            return position
        return position - int(self._order[position]) % self._group

    def _ready(self, name: str, layout: Layout, window_bytes: int) -> None:
        """Fill the cache with the layout's first rows, and begin to read the extents of the first batches."""
        cache, rows = self._context.nodes.cache_of(name), layout.tables.fill_rows
        if len(rows) and self._filled.get(name) is not cache:
            cache.clear()
            if cache.is_lent:  # the cache may have fewer rows than the layout, and an extent is read whole
                cache.preload(rows, partial(self._context.nodes.read, name))
            else:
                source = layout.fill(name, Tier.HOST, window_bytes)
                try:
                    cache.preload(rows, partial(fill_from_extents, self._context, source))
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
        return self._context.threads  # samples and plans are read in any order

    def batch(self, position: int) -> Batch:
        index = int(self._order[position])
        with self._context.timer.time("load"):
            pool, plans = self._context.graph.pool, dict[str, BatchPlan]()
            batch = Batch(position, self._pack.batch(self._base + index, pool), plans if self._layouts else None)
            for part in self._context.nodes.each:
                layout = self._layouts.get(next(iter(part.stores), ""))
                if layout is not None:
                    plan = layout.tables.plan(self._base + index, batch.rows_of(part.rows, pool), pool.array)
                    plans |= dict.fromkeys(part.stores, plan)
            return batch

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan | None, Mapping[Tier, RowSource]]:
        store, pool = self._context.nodes.stores[name], self._context.graph.pool
        if name not in self._layouts:
            return None, {}
        for position in range(self._behind.get(name, self._start), self._start):
            # Gather the group's earlier batches, so that the cache is as their plans leave it.
            earlier = self.batch(position)
            rows = torch.from_numpy(earlier.rows_of(self._context.nodes.rows_of(name), pool))
            store.gather(rows, *self._plan(name, earlier), GatherCounts(read=batch.counts.read))
            self._behind[name] = position + 1
        return self._plan(name, batch)

    def _plan(self, name: str, batch: Batch) -> tuple[BatchPlan, Mapping[Tier, RowSource]]:
        assert batch.plans is not None
        if self._layouts[name].options.superbatch and self._order[batch.position] % self._group == 0:
            self._context.nodes.cache_of(name).clear()
        return batch.plans[name], self._tiers[name]

    def release(self) -> bool:
        least = least_window() * len(self._sources)
        if self._window is None or self._window.n_bytes <= least:
            return False
        for source in self._sources.values():
            self._context.nodes.reads.add(source.narrow(least_window()))
        self._window.resize(least)
        return True

    def close(self) -> None:
        if self._memory.is_of(self._use):
            for source in self._sources.values():
                self._context.nodes.reads.add(source.close())
            self._caches.release()
            self._memory.end(self._use)
