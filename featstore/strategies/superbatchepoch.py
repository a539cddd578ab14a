"""An epoch in superbatches: samples and plans are made beside the loop, and batches are gathered by these plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory, Use
from featstore.estimate.length import Planning
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.readahead import ReadAhead
from featstore.gather.sources import MemorySource, RowSource
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.edgeplans import EdgePlanner
from featstore.plan.overlapped import PackSuperbatch
from featstore.plan.superbatches import SuperbatchInspector
from featstore.sampling.sampledbatches import EpochBatches
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.cachefilling import CacheFilling
from featstore.strategies.caches import ClaimedCaches
from featstore.strategies.context import Context
from featstore.strategies.memory import AHEAD, EDGE_PLANNER, PLANNER
from featstore.strategies.switch import CacheSwitch, NoSwitch

__all__ = ["SuperbatchEpoch", "ahead_bytes", "most_ahead"]

Int64s = npt.NDArray[np.int64]

MOST_AHEAD_BYTES = 1 << 30


def most_ahead(n_bytes: int) -> int:
    """Compute :func:`ahead_bytes` for features of ``n_bytes``."""
    return min(n_bytes // 4, MOST_AHEAD_BYTES) // 4096 * 4096


def ahead_bytes(context: Context) -> int:
    """Compute the most bytes of memory into which misses are read ahead.

    They are at most 1 GiB, and at most a quarter of the features: with more, every other page is wanted in any case.
    """
    return most_ahead(sum(int(store.nbytes) for store in context.nodes.stores.values()))


class SuperbatchEpoch(EpochRun):
    """Run the batches of an inspector that looks ahead: samples and plans come from run files."""

    def __init__(
        self,
        context: Context,
        planning: Planning,
        order: EpochBatches,
        start: int,
        *,
        threads: int,
        room: Callable[[], int],
        memory: EpochMemory,
        use: Use,
        caches: ClaimedCaches | CacheSwitch,
        claim: Use,
        packer: Callable[[RunDirectory, DiskQuota, CacheFilling], PackSuperbatch | None],
        fixed: Int64s | None,
        filled: dict[str, FeatureCache],
        edge_caches: ClaimedCaches,
        edge_claim: Use,
    ) -> None:
        graph = context.graph
        assert isinstance(planning.policy, PlannedPolicy)
        self._context, self._order = context, order
        self._caches, self._edge_caches = caches, edge_caches
        self._claims = claim, edge_claim  # last as long as this epoch
        self._switch = switch = caches if isinstance(caches, CacheSwitch) else None
        stores = list(context.nodes.stores.values())
        if switch is None:
            capacity = min((0 if store.cache is None else store.cache.capacity for store in stores), default=0)
        else:
            capacity = switch.capacity
        self._runs: RunDirectory | None = None
        self._ahead: ReadAhead | None = None
        self._overlaps = planning.overlap
        self._memory, self._use = memory, use
        planner = memory[PLANNER]
        self._beginning = threading.RLock()
        self._has_begun = False
        try:
            residents = None if fixed is None else fixed[:capacity]
            filling = CacheFilling(context, filled)
            if switch is None:
                residents = filling.begin(residents)
            elif residents is not None:
                residents = np.sort(residents)
            self._runs = RunDirectory(planning.run_dir)
            disk = DiskQuota(planning.disk)
            if switch is not None:
                switch.begin(self._runs, disk, planner)
            pack = packer(self._runs, disk, filling)
            if pack is None:
                filling.finish()
            plans = partial(CachePlanner, runs=self._runs, disk=disk, room=room, pool=graph.pool)
            self._inspector = SuperbatchInspector(
                order.sample,
                start=start,
                stop=len(order),
                size=max(1, int(planning.superbatch)),  # 0 for an epoch without batches
                planner=plans(planning.policy, context.nodes.n, capacity, memory=planner),
                rows=context.nodes.rows,
                num_nodes=graph.num_nodes,
                threads=threads,
                time=context.watch.time,
                # Without features there is no cache to switch, but the schedule is still serial.
                switch=switch if switch is not None or planning.overlap else NoSwitch(),
                pack=pack,
                residents=residents,
                tier=lambda: context.tier,
                edges=self._edge_planner(planning, plans),
            )
            if context.features and pack is None:
                widths = context.nodes.row_bytes
                read = {name: store.source.gather for name, store in zip(context.features, stores, strict=True)}
                # In the serial schedule, planning and reading ahead take turns, and share one memory.
                n_bytes = planner.n_bytes - CheckedPolicy(planning.policy).nbytes
                if planning.overlap:
                    n_bytes = memory[AHEAD].n_bytes
                n_bytes = max(0, min(n_bytes, ahead_bytes(context)))
                if n_bytes:
                    said = context.nodes.reads.add
                    self._ahead = ReadAhead(self._inspector.misses, read, widths, start, len(order), n_bytes, said)
        except BaseException:
            if self._runs is not None:
                self._runs.close()
            raise

    def _edge_planner(self, planning: Planning, plans: Callable[..., CachePlanner]) -> EdgePlanner | None:
        """Make the planner of the caches of edge features, and empty these; None if edges are not planned."""
        policy, edges, memory = planning.edge_policy, self._context.edges, self._memory
        if policy is None or not planning.edge_capacity:
            return None
        for name in edges.stores:
            edges.clear_cache(name)
        return EdgePlanner(plans(policy, edges.n, planning.edge_capacity, memory=memory[EDGE_PLANNER], label="edges-"))

    @property
    def threads(self) -> int:
        return self._context.threads  # several: a read of samples or plans may wait behind reads of features

    def _begin(self) -> None:
        """Start the threads, when the first batch is asked for: the caller then closes this epoch, even after Ctrl-C."""
        with self._beginning:
            if not self._has_begun:
                self._has_begun = True
                self._inspector.begin()
                if self._ahead is not None:
                    self._ahead.begin()

    def batch(self, position: int) -> Batch:
        self._begin()
        sampled, plan = self._inspector.batch(position)
        return Batch(position, sampled, dict.fromkeys(self._context.features, plan), self._inspector.edges(position))

    def may_begin(self, position: int) -> bool:
        return self._inspector.may_begin(position)

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan, Mapping[Tier, RowSource]]:
        assert batch.plans is not None
        plan, position = batch.plans[name], batch.position
        rows = None if self._ahead is None else self._ahead.take(position, name)
        if rows is not None:
            return plan.read_ahead(len(rows)), {Tier.AHEAD: MemorySource(rows, self._context.copy_threads)}
        packed = self._inspector.source(position, name)
        return plan, {} if packed is None else {Tier.PACKED: packed}

    def passed(self, position: int) -> None:
        if self._ahead is not None:
            self._ahead.passed(position)
        self._inspector.passed(position)

    def release(self) -> bool:
        freed = self._inspector.pause()
        # In the serial schedule the memory stays reserved: the planner uses it again.
        if self._ahead is not None and self._overlaps and self._ahead.give_back():
            self._memory[AHEAD].resize(0)
            freed = True
        if freed:
            self._inspector.freed()
        return freed

    def stop(self) -> None:
        self._order.stop()
        self._inspector.stop()

    def close(self) -> None:
        if self._memory.is_of(self._use):
            self.stop()
            if self._ahead is not None:
                self._ahead.close()
            self._inspector.close()
            self._order.close()
            self._caches.release()
            self._edge_caches.release()
            if self._switch is not None:
                self._switch.end()
            if self._runs is not None:
                self._runs.close()
            self._memory.end(self._use)
