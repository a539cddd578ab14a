"""Plans for the caches of edge features: the edges of a superbatch's batches, planned as rows of nodes are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.cache.base import PolicyContext
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, PlannedPolicy, Window
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import EdgePlan
from featstore.plan.edgetrace import DistinctEdges, EdgeTraceWriter, distinct_edges
from featstore.plan.planfile import PlanFile, write_bytes, write_plan
from featstore.plan.planmemory import Spill, must_spill
from featstore.plan.sampledsuperbatch import SampledSuperbatch
from featstore.sampling.batch import SampledBatch
from featstore.storage.rundir import DiskBudget, RunDirectory
from featstore.storage.sections import SectionWriter

__all__ = ["EdgePlanner"]

Ints = npt.NDArray[np.int32 | np.int64]


class EdgePlanner:
    """Plan an epoch's caches of edge features, superbatch by superbatch; one thread plans.

    ``policy`` is its own, not the one that plans rows of nodes; ``capacity`` rows are empty at first. ``memory`` grows by up to
    ``room()`` where a window is larger than was expected, see :func:`~featstore.plan.planmemory.must_spill`.
    """

    def __init__(
        self,
        policy: PlannedPolicy,
        n_edges: int,
        capacity: int,
        *,
        runs: RunDirectory,
        disk: DiskBudget,
        memory: Reservation,
        room: Callable[[], int],
        pool: BufferPool,
    ) -> None:
        self._policy, self._n_edges, self._capacity = CheckedPolicy(policy), n_edges, capacity
        self._runs, self._disk, self._memory, self._room, self._pool = runs, disk, memory, room, pool
        self._policy.keep_memory(False)
        self._policy.start(capacity, PolicyContext(n_edges, 1), NO_ROWS)

    def distinct(self, batch: SampledBatch) -> DistinctEdges:
        """Return the distinct edges of a batch. Thread-safe."""
        return distinct_edges(batch, self._n_edges, self._memory.budget)

    def writer(self, k: int) -> EdgeTraceWriter:
        """Open the file that takes the edges of superbatch ``k``."""
        return EdgeTraceWriter(self._runs.file(f"edges-{k}"), self._disk)

    def plan(
        self, k: int, superbatch: SampledSuperbatch, ahead: SampledSuperbatch | None, first: int, check: Callable[[], None]
    ) -> None:
        """Plan superbatch ``k``, whose first batch is number ``first``; next uses in the one ``ahead`` of it count."""
        traces = [each.edges for each in (superbatch, ahead) if each is not None and each.edges is not None]
        lengths, n = np.concatenate([trace.lengths for trace in traces]), len(traces[0])
        spills: list[Spill] = []

        def ids(b: int) -> Ints:
            return traces[0].ids(b) if b < n else traces[1].ids(b - n)

        def spill(_: int) -> Spill:
            spills.append(Spill(self._runs.file(f"next-edges-{k}"), self._disk))
            return spills[-1]

        checked = self._policy.is_checked
        spilled = must_spill(self._memory, self._pool, self._room, self._n_edges, lengths, n, self._capacity, checked)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        window = Window(self._n_edges, offsets, ids, n, spill if spilled else None)
        writes = write_bytes(int(lengths.max(initial=0)))
        try:
            with SectionWriter(self._runs.file(f"edge-plan-{k}"), "plan", self._disk, writes) as writer:
                for planned in self._policy.plan(window, first):
                    write_plan(writer.append, planned)
                    check()
                superbatch.edge_plans = PlanFile(writer.finish())
        finally:
            for each in spills:
                each.remove()

    def of(self, superbatch: SampledSuperbatch, number: int) -> EdgePlan:
        """Return the plan that gathers the rows of a batch's edges, in pooled memory; a BudgetError may be tried again."""
        trace, plans, array = superbatch.edges, superbatch.edge_plans, self._pool.array
        assert trace is not None
        assert plans is not None
        stored, places = trace.ids(number, array), trace.places(number, array)
        ids: npt.NDArray[np.int64] = array(len(stored), np.int64)
        ids[:] = stored
        return EdgePlan(ids, places, plans.plan(number, ids, array))
