"""An epoch in superbatches: samples and plans are made beside the loop, and batches are gathered by these plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import PlannedPolicy
from featstore.cache.sizes import in_proportion
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory, Use
from featstore.estimate.length import Planning
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.prefetchrows import RowPrefetcher
from featstore.gather.sources import MemorySource, RowSource, gather_of
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.edgeplans import EdgePlanner
from featstore.plan.overlapped import PackSuperbatch
from featstore.plan.rowplans import RowPlanner
from featstore.plan.superbatches import SuperbatchInspector
from featstore.sampling.edgenumbers import blocks_of
from featstore.sampling.sampledbatches import EpochBatches
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.cachefilling import CacheFilling
from featstore.strategies.caches import ClaimedCaches
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
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

    They are at most 1 GiB and a quarter of the features. With more, the drive would read every other page in any case.
    """
    return most_ahead(context.nodes.n_bytes)


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
        packer: Callable[[int, RunDirectory, DiskQuota, CacheFilling], PackSuperbatch | None],
        fixed: Sequence[Int64s | None],
        filled: dict[str, FeatureCache],
        edge_caches: ClaimedCaches,
        edge_claim: Use,
    ) -> None:
        graph, parts = context.graph, context.nodes.each
        self._context, self._order = context, order
        self._caches, self._edge_caches = caches, edge_caches
        self._claims = claim, edge_claim  # last as long as this epoch
        self._switch = switch = caches if isinstance(caches, CacheSwitch) else None
        self._runs: RunDirectory | None = None
        self._ahead: dict[str, RowPrefetcher] = {}  # by feature; features with the same rows share one
        self._overlaps = planning.overlap
        self._memory, self._use = memory, use
        planner = memory[PLANNER]
        self._beginning = threading.RLock()
        self._has_begun = False
        try:
            filling = CacheFilling(context, filled)
            capacities = [self._capacity(part) for part in parts]
            residents = [None if rows is None else rows[:n] for rows, n in zip(fixed, capacities, strict=True)]
            if switch is None:
                residents = [filling.begin(part, rows) for part, rows in zip(parts, residents, strict=True)]
            else:
                residents = [None if rows is None else np.sort(rows) for rows in residents]
            self._runs = RunDirectory(planning.run_dir)
            disk = DiskQuota(planning.disk)
            if switch is not None:
                switch.begin(self._runs, disk, planner)
            time = context.timer.time
            plans = partial(CachePlanner, runs=self._runs, disk=disk, room=room, pool=graph.pool, time=time)
            planners, packed = [], False
            for at, part in enumerate(parts):
                pack = packer(at, self._runs, disk, filling)
                packed = packed or pack is not None
                if pack is None:
                    filling.finish(part.stores)
                policy = planning.policies[at]
                assert isinstance(policy, PlannedPolicy)
                of_part = plans(policy, part.n, capacities[at], memory=planner, label=f"{at}-" if at else "")
                # Rows that a device gets later are left out of plans made after that, so these are made as late as may be.
                alone = {"begins_anew": not planning.overlap, "is_alone": len(parts) == 1, "at_once": context.on_device is None}
                planners.append(RowPlanner(part.stores, of_part, part.rows, pack=pack, residents=residents[at], **alone))
            self._inspector = SuperbatchInspector(
                order.sample,
                start=start,
                stop=len(order),
                size=max(1, int(planning.superbatch)),  # 0 for an epoch without batches
                planners=planners,
                runs=self._runs,
                disk=disk,
                budget=graph.budget,
                pool=graph.pool,
                num_nodes=graph.num_nodes,
                threads=threads,
                time=time,
                # Without features there is no cache to switch, but the schedule is still serial.
                switch=switch if switch is not None or planning.overlap else NoSwitch(),
                tiers=lambda: context.tiers,
                edges=self._edge_planners(planning, plans),
            )
            if context.features and not packed:
                # In the serial schedule, planning and reading ahead take turns, and share one memory.
                n_bytes = planner.n_bytes - sum(each.nbytes for each in planners)
                if planning.overlap:
                    n_bytes = memory[AHEAD].n_bytes
                n_bytes = max(0, min(n_bytes, ahead_bytes(context)))
                each_bytes = in_proportion(n_bytes, [part.n_bytes for part in parts])
                for at, (part, of_part_bytes) in enumerate(zip(parts, each_bytes, strict=True)):
                    if of_part_bytes:
                        read = {name: gather_of(store.source) for name, store in part.stores.items()}
                        misses, said = partial(self._inspector.misses, at), context.nodes.reads.add
                        ahead = RowPrefetcher(misses, read, part.row_bytes, start, len(order), of_part_bytes, said)
                        self._ahead |= dict.fromkeys(part.stores, ahead)
        except BaseException:
            if self._runs is not None:
                self._runs.close()
            raise

    def _capacity(self, part: Domain) -> int:
        """Get the number of rows that the cache of each of a part's features has room for."""
        if self._switch is not None:
            return self._switch.capacity(part.stores)
        return min((0 if store.cache is None else store.cache.capacity for store in part.stores.values()), default=0)

    @property
    def _readers(self) -> list[RowPrefetcher]:
        return list({id(ahead): ahead for ahead in self._ahead.values()}.values())

    def _edge_planners(self, planning: Planning, plans: Callable[..., CachePlanner]) -> list[EdgePlanner]:
        """Make the planners of the caches of edge features, and empty these; none if edges are not planned."""
        if not planning.edge_rows:
            return []
        context, found = self._context, []
        for name in context.edges.stores:
            context.edges.cache_of(name).clear()
        for at, (part, policy) in enumerate(zip(context.edges.each, planning.edge_policies, strict=True)):
            names, rows = list(part.stores), min(planning.edge_rows.get(name, 0) for name in part.stores)
            label = f"edges-{at}-" if at else "edges-"
            planner = plans(policy, part.n, rows, memory=self._memory[EDGE_PLANNER], label=label)
            of_type = {"blocks_of": partial(blocks_of, context.graph.types, names[0])} if context.has_types else {}
            found.append(EdgePlanner(names, planner, **of_type))
        return found

    @property
    def threads(self) -> int:
        return self._context.threads  # several: a read of samples or plans may wait behind reads of features

    def _begin(self) -> None:
        """Start the threads, when the first batch is asked for: the caller then closes this epoch, even after Ctrl-C."""
        with self._beginning:
            if not self._has_begun:
                self._has_begun = True
                self._inspector.begin()
                for ahead in self._readers:
                    ahead.begin()

    def batch(self, position: int) -> Batch:
        self._begin()
        sampled, of_parts = self._inspector.batch(position)
        plans = {name: plan for planner, _, plan in of_parts for name in planner.names}
        batch = Batch(position, sampled, plans, self._inspector.edges(position))
        batch.rows.update((planner.rows, rows) for planner, rows, _ in of_parts if planner.rows.kinds)
        return batch

    def may_begin(self, position: int) -> bool:
        return self._inspector.may_begin(position)

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan, Mapping[Tier, RowSource]]:
        assert batch.plans is not None
        plan, position = batch.plans[name], batch.position
        rows = self._ahead[name].take(position, name) if name in self._ahead else None
        if rows is not None:
            return plan.read_ahead(len(rows)), {Tier.AHEAD: MemorySource(rows, self._context.copy_threads)}
        packed = self._inspector.source(position, name)
        return plan, {} if packed is None else {Tier.PACKED: packed}

    def passed(self, position: int) -> None:
        for ahead in self._readers:
            ahead.passed(position)
        self._inspector.passed(position)

    def release(self) -> bool:
        freed = self._inspector.pause()
        # In the serial schedule the memory stays reserved: the planner uses it again.
        if self._overlaps and sum(ahead.give_back() for ahead in self._readers):
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
            for ahead in self._readers:
                ahead.close()
            self._inspector.close()
            self._order.close()
            self._caches.release()
            self._edge_caches.release()
            if self._switch is not None:
                self._switch.end()
            if self._runs is not None:
                self._runs.close()
            self._memory.end(self._use)
