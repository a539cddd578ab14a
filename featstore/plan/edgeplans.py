"""Plans of the caches of edge features, made over the edges of a superbatch's batches as plans of node rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from featstore.gather.plan import EdgePlan
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.edgetrace import DistinctEdges, EdgeTraceWriter, distinct_edges
from featstore.plan.planfile import PlanFile
from featstore.plan.sampledsuperbatch import PlannedEdges
from featstore.sampling.batch import Block, SampledBatch

__all__ = ["EdgePlanner"]


def _all(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    return blocks


class EdgePlanner:
    """Plan the caches of edge features of one type of edges, for one epoch, which they begin empty.

    Parameters
    ----------
    names : iterable of str
        The features.
    planner : CachePlanner
        The planner of the domain of these edges.
    blocks_of : callable, optional
        Selects the blocks of this type of edges among those of a batch, numbered within the type.
    """

    def __init__(
        self,
        names: Iterable[str],
        planner: CachePlanner,
        blocks_of: Callable[[tuple[Block, ...]], tuple[Block, ...]] = _all,
    ) -> None:
        self.names, self._planner, self._blocks_of = tuple(names), planner, blocks_of
        planner.start(keeps_memory=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the planner's memory that are held between superbatches."""
        return self._planner.nbytes

    def distinct(self, batch: SampledBatch) -> DistinctEdges:
        """Compute the distinct edges of a batch; see :func:`~featstore.plan.edgetrace.distinct_edges`. Thread-safe."""
        return distinct_edges(self._blocks_of(batch.blocks), self._planner.n, self._planner.memory.budget)

    def writer(self, k: int) -> EdgeTraceWriter:
        """Open the file that takes the edges of superbatch ``k``."""
        return EdgeTraceWriter(self._planner.runs.file(f"{self._planner.label}{k}"), self._planner.disk)

    def plan(
        self, k: int, edges: PlannedEdges, ahead: PlannedEdges | None, first: int, check: Callable[[], None], beside: int = 0
    ) -> None:
        """Plan superbatch ``k``, whose first batch is number ``first``. Edges of the next one, ``ahead``, count as next uses.

        ``check`` and ``beside`` are those of :meth:`CachePlanner.plan`.
        """
        next_uses = None if ahead is None else ahead.trace
        edges.plans = PlanFile(self._planner.plan(k, edges.trace, next_uses, first, check, beside=beside))

    def of(self, edges: PlannedEdges, number: int) -> EdgePlan:
        """Read the plan for the edge rows of a batch into pooled memory. After a BudgetError the call may be repeated."""
        trace, plans, array = edges.trace, edges.plans, self._planner.pool.array
        assert plans is not None
        stored, places = trace.ids(number, array), trace.places(number, array)
        ids: npt.NDArray[np.int64] = array(len(stored), np.int64)
        ids[:] = stored
        return EdgePlan(ids, places, plans.plan(number, ids, array))
