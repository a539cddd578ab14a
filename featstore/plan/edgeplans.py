"""Plans of the caches of edge features, made over the edges of a superbatch's batches as plans of node rows are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import PlannedBatch
from featstore.gather.plan import EdgePlan
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.edgetrace import DistinctEdges, EdgeTraceWriter, distinct_edges
from featstore.plan.planfile import PlanFile, write_plan
from featstore.plan.sampledsuperbatch import SampledSuperbatch
from featstore.sampling.batch import SampledBatch
from featstore.storage.sections import SectionWriter

__all__ = ["EdgePlanner"]

Ints = npt.NDArray[np.int32 | np.int64]


class EdgePlanner:
    """Plan the caches of edge features for one epoch, which they begin empty.

    Parameters
    ----------
    planner : CachePlanner
        The planner of the domain of edges.
    """

    def __init__(self, planner: CachePlanner) -> None:
        self._planner = planner
        planner.start(keeps_memory=False)

    def distinct(self, batch: SampledBatch) -> DistinctEdges:
        """Compute the distinct edges of a batch; see :func:`~featstore.plan.edgetrace.distinct_edges`. Thread-safe."""
        return distinct_edges(batch, self._planner.n, self._planner.memory.budget)

    def writer(self, k: int) -> EdgeTraceWriter:
        """Open the file that takes the edges of superbatch ``k``."""
        return EdgeTraceWriter(self._planner.runs.file(f"edges-{k}"), self._planner.disk)

    def plan(
        self, k: int, superbatch: SampledSuperbatch, ahead: SampledSuperbatch | None, first: int, check: Callable[[], None]
    ) -> None:
        """Plan superbatch ``k``, whose first batch is number ``first``. Edges of the next one, ``ahead``, count as next uses."""
        traces = [each.edges for each in (superbatch, ahead) if each is not None and each.edges is not None]
        lengths, n = np.concatenate([trace.lengths for trace in traces]), len(traces[0])

        def ids(b: int) -> Ints:
            return traces[0].ids(b) if b < n else traces[1].ids(b - n)

        def write(writer: SectionWriter, number: int, planned: PlannedBatch) -> None:
            write_plan(writer.append, planned)
            check()

        superbatch.edge_plans = PlanFile(self._planner.plan(k, lengths, ids, n, first, write))

    def of(self, superbatch: SampledSuperbatch, number: int) -> EdgePlan:
        """Read the plan for the edge rows of a batch into pooled memory. After a BudgetError the call may be repeated."""
        trace, plans, array = superbatch.edges, superbatch.edge_plans, self._planner.pool.array
        assert trace is not None
        assert plans is not None
        stored, places = trace.ids(number, array), trace.places(number, array)
        ids: npt.NDArray[np.int64] = array(len(stored), np.int64)
        ids[:] = stored
        return EdgePlan(ids, places, plans.plan(number, ids, array))
