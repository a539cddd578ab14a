"""Sizes of superbatches: their length, and the memory to plan them, computed from the size of a batch before sampling."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from featstore.cache.devicetier import REST_BYTES
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.cost import LOAD_TABLE_BYTES, ROW_TABLE_BYTES
from featstore.estimate.length import Length, PackingPasses, Planning, choose_size, judge_length, least_size, planner_bytes
from featstore.plan.planfile import STORED_PER_ACCESS
from featstore.plan.planmemory import PLANNER_FRACTION
from featstore.strategies.context import Context
from featstore.strategies.memory import AHEAD, EDGE_PLANNER, PLANNER, Memory
from featstore.strategies.superbatchepoch import ahead_bytes

__all__ = ["SuperbatchSizes"]

SPREAD = 32  # batches differ in size: a superbatch on disk is taken to be larger by this part
EDGE_BYTES = 24  # an edge whose rows are cached: its number, its position, its plan


class SuperbatchSizes:
    """Compute the length of superbatches, and the memory that each holder needs for them.

    Parameters
    ----------
    context : Context
    planning : Planning
    """

    def __init__(self, context: Context, planning: Planning) -> None:
        self.context, self.planning = context, planning
        self._graph, self._n_batches = context.graph, len(context.batches)
        self._shortest = least_size(planning, self._n_batches)
        self._cached = 0  # least rows of caches that size themselves

    def needs(self, batch: BatchSize) -> dict[str, tuple[int, int]]:
        """Compute the least and the useful bytes of each holder: the planners, and the buffers of misses read ahead.

        A planner's least is with next positions on disk.
        """
        planning, length = self.planning, self.length(batch)
        by_size = partial(self._planner_bytes, self._accesses(batch))
        needs = {PLANNER: (by_size(self._shortest, spilled=True, least=True), self._whole_or_spilled(by_size, length))}
        if planning.overlap:
            needs[AHEAD] = 0, ahead_bytes(self.context)
        if planning.edge_rows:
            of_edges = self._edge_planner(batch)
            needs[EDGE_PLANNER] = of_edges(self._shortest, spilled=True), self._whole_or_spilled(of_edges, length)
        return needs

    def divide(self, memory: Memory, for_caches: int = 0) -> None:
        """Divide the memory that batches leave, except ``for_caches`` bytes for caches.

        A planner whose next positions do not all fit in memory has them on disk.
        """
        memory.divide(for_caches)
        length = self.length(memory.batch)
        planners: dict[str, Callable[..., int]] = {PLANNER: partial(self._planner_bytes, self._accesses(memory.batch))}
        if EDGE_PLANNER in memory.needs:
            planners[EDGE_PLANNER] = self._edge_planner(memory.batch)
        for holder, by_size in planners.items():
            least, useful = memory.needs[holder]
            if memory.granted[holder] < useful:
                memory.granted[holder] = max(least, min(memory.granted[holder], by_size(length, spilled=True)))

    def length(self, batch: BatchSize) -> int:
        """Compute the number of batches of a superbatch that disk and memory allow."""
        n, passes = self._accesses(batch), self.passes(batch)
        return choose_size(self.planning, self._n_batches, n, self._stored(batch), passes)

    def granted_length(self, memory: Memory) -> tuple[int, int]:
        """Compute the number of batches of a superbatch that the granted memory can plan, and the least bytes to plan them.

        If less was granted than asked for, nothing is left for caches that size themselves.
        """
        batch, granted = memory.batch, memory.granted[PLANNER]
        needed = partial(self._planner_bytes, self._accesses(batch), spilled=True, least=True)
        size = self.length(batch)
        if needed(size) > granted:
            size = max(self._shortest, bisect_right(range(1, size), granted, key=needed))
        if self.planning.edge_rows:
            of_edges = partial(self._edge_planner(batch), spilled=True)
            if of_edges(size) > memory.granted[EDGE_PLANNER]:
                size = max(self._shortest, bisect_right(range(1, size), memory.granted[EDGE_PLANNER], key=of_edges))
        return size, min(granted, needed(size))

    def judged(self, batch: BatchSize, size: int) -> Length:
        """Judge superbatches of ``size`` batches: their passes over the features, and advice if they are too short."""
        n, passes = self._accesses(batch), self.passes(batch)
        return judge_length(self.planning, self._n_batches, n, self._stored(batch), passes, size)

    def estimate_length(self, memory: Memory) -> Length:
        """Judge the superbatches of a run in its granted memory; adds the rows of each cache."""
        nodes, rows = self.context.nodes, self.planning.capacity
        if rows is None:
            rows = min(nodes.n, memory.left_for_caches_after_grants(self.context.prefetch) // max(1, nodes.width))
        return replace(self.judged(memory.batch, self.granted_length(memory)[0]), rows=rows)

    def _accesses(self, batch: BatchSize) -> int:
        """Count the rows of a batch that are planned."""
        return self.context.nodes.accesses(batch)

    def passes(self, batch: BatchSize) -> PackingPasses | None:
        """Return the cost of a pass over the features for every superbatch; None if there are no passes."""
        return None

    def packed_bytes(self, batch: BatchSize) -> int:
        """Compute the bytes of rows in extents that a batch has on disk, beside its samples and plan."""
        return 0

    def _stored(self, batch: BatchSize) -> int:
        """Compute the bytes of a batch on disk: its samples, its plan, and its rows in extents."""
        width = 4 if self._graph.num_nodes < 2**31 else 8
        edges = EDGE_BYTES * batch.n_edges if self.planning.edge_rows else 0
        plan = STORED_PER_ACCESS if self.planning.looks_ahead else ROW_TABLE_BYTES + LOAD_TABLE_BYTES * self._miss_share
        planned = int(batch.n_rows * width + self._accesses(batch) * plan)
        stored = planned + 4 * batch.n_stored + edges + self.packed_bytes(batch)
        return stored + stored // SPREAD

    @property
    def _miss_share(self) -> float:
        """The share of a batch's rows that its cache is taken to lack."""
        return 1.0

    def _planner_bytes(self, n_accesses: int, size: int, *, spilled: bool, least: bool = False) -> int:
        """Compute the bytes to reserve for the planner, and for other uses of its memory.

        Caches that size themselves count with the most rows that could fit; with ``least``, with their least rows.
        """
        graph, planning, nodes = self._graph, self.planning, self.context.nodes
        capacity = planning.capacity
        if capacity is None:
            most = graph.budget.total // max(1, nodes.width)
            capacity = self._cached if least or not nodes.stores else min(nodes.n, most)
        needed = planner_bytes(planning, nodes.n, self._n_batches, n_accesses, size, spilled=spilled, capacity=capacity)
        if self.context.on_device is not None:
            needed += REST_BYTES * n_accesses
        return needed if planning.overlap else max(needed, graph.neighbor_lists.choosing_bytes())

    def _edge_planner(self, batch: BatchSize) -> Callable[..., int]:
        """Make the function from the length of superbatches, and ``spilled=``, to the bytes for planning their edges."""
        planning, edges = self.planning, self.context.edges
        rows = sum(max((planning.edge_rows.get(name, 0) for name in part.stores), default=0) for part in edges.each)
        return partial(planner_bytes, planning, edges.n, self._n_batches, batch.n_edges, capacity=rows)

    def _whole_or_spilled(self, by_size: Callable[..., int], length: int) -> int:
        """Compute the useful bytes of a planner: all next positions are in memory, unless they take too much of it."""
        whole = by_size(length, spilled=False)
        return whole if whole <= int(self._graph.budget.total * PLANNER_FRACTION) else by_size(length, spilled=True)
