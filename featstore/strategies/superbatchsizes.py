"""How long superbatches are and what planning them holds, by the size of a batch, before any is sampled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from featstore.cache.devicetier import REST_BYTES
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.cost import LOAD_TABLE_BYTES, ROW_TABLE_BYTES
from featstore.estimate.length import Length, Passes, Planning, choose_size, judge_length, least_size, planner_bytes
from featstore.plan.planfile import STORED_PER_ACCESS
from featstore.plan.planmemory import PLANNER_DIVISOR
from featstore.strategies.context import Context
from featstore.strategies.memory import AHEAD, EDGE_PLANNER, PLANNER, Memory
from featstore.strategies.superbatchepoch import ahead_bytes

__all__ = ["SuperbatchSizes"]

SPREAD = 32  # batches differ: four superbatches are taken to be larger by one part of so many
EDGE_BYTES = 24  # an edge whose rows are cached: its number, its place, its plan


class SuperbatchSizes:
    """What superbatches hold, by holder, and how long they are.

    Parameters
    ----------
    context : Context
    planning : Planning
    """

    def __init__(self, context: Context, planning: Planning) -> None:
        self.context, self.planning = context, planning
        self._graph, self._n_batches = context.graph, len(context.batches)
        self._shortest = least_size(planning, self._n_batches)
        self._cached = 0  # rows that caches which size themselves get at the least

    def needs(self, batch: BatchSize) -> dict[str, tuple[int, int]]:
        """Count bytes by holder: the planner, at the least with next positions on disk, and buffers of misses read ahead."""
        planning, length = self.planning, self.length(batch)
        by_size = partial(self._planner_bytes, batch.n_rows)
        needs = {PLANNER: (by_size(self._shortest, spilled=True, least=True), self._whole_or_spilled(by_size, length))}
        if planning.overlap:
            needs[AHEAD] = 0, ahead_bytes(self.context)
        if planning.edge_capacity:
            of_edges = self._edge_planner(batch)
            needs[EDGE_PLANNER] = of_edges(self._shortest, spilled=True), self._whole_or_spilled(of_edges, length)
        return needs

    def divide(self, memory: Memory, spare: int = 0) -> None:
        """Divide the memory that batches leave, but for ``spare`` bytes that caches get.

        A planner that cannot have all positions in memory has them on disk.
        """
        memory.divide(spare)
        length = self.length(memory.batch)
        planners: dict[str, Callable[..., int]] = {PLANNER: partial(self._planner_bytes, memory.batch.n_rows)}
        if EDGE_PLANNER in memory.needs:
            planners[EDGE_PLANNER] = self._edge_planner(memory.batch)
        for holder, by_size in planners.items():
            least, useful = memory.needs[holder]
            if memory.granted[holder] < useful:
                memory.granted[holder] = max(least, min(memory.granted[holder], by_size(length, spilled=True)))

    def length(self, batch: BatchSize) -> int:
        """Return the batches of a superbatch that disk and memory allow."""
        passes = self.passes(batch.n_rows)
        return choose_size(self.planning, self._graph, self._n_batches, batch.n_rows, self._stored(batch), passes)

    def granted_length(self, memory: Memory) -> tuple[int, int]:
        """Return the batches of a superbatch that can be planned in what was granted, and what planning it takes at the least.

        Where less was granted than asked for, nothing is left for caches.
        """
        batch, granted = memory.batch, memory.granted[PLANNER]
        needed = partial(self._planner_bytes, batch.n_rows, spilled=True, least=True)
        size = self.length(batch)
        if needed(size) > granted:
            size = max(self._shortest, bisect_right(range(1, size), granted, key=needed))
        if self.planning.edge_capacity:
            of_edges = partial(self._edge_planner(batch), spilled=True)
            if of_edges(size) > memory.granted[EDGE_PLANNER]:
                size = max(self._shortest, bisect_right(range(1, size), memory.granted[EDGE_PLANNER], key=of_edges))
        return size, min(granted, needed(size))

    def judged(self, batch: BatchSize, size: int) -> Length:
        """Judge superbatches of ``size`` batches."""
        passes = self.passes(batch.n_rows)
        return judge_length(self.planning, self._graph, self._n_batches, batch.n_rows, self._stored(batch), passes, size)

    def foreseen(self, memory: Memory) -> Length:
        """Judge the superbatches of a run in the memory that it was granted."""
        nodes, rows = self.context.nodes, self.planning.capacity
        if rows is None:
            rows = min(nodes.n, memory.foreseen_for_caches(self.context.prefetch) // max(1, nodes.width))
        return replace(self.judged(memory.batch, self.granted_length(memory)[0]), rows=rows)

    def passes(self, n_accesses: int) -> Passes | None:
        """Return the cost of a pass over the features for every superbatch; None where there is none."""
        return None

    def packed_bytes(self, n_accesses: int) -> int:
        """Return the bytes of copied rows that a batch has on disk, beside its samples and plan."""
        return 0

    def _stored(self, batch: BatchSize) -> int:
        """Return the bytes of a batch on disk: its samples, its plan, and rows that are copied."""
        width = 4 if self._graph.num_nodes < 2**31 else 8
        edges = EDGE_BYTES * batch.n_edges if self.planning.edge_capacity else 0
        plan = STORED_PER_ACCESS if self.planning.looks_ahead else ROW_TABLE_BYTES + LOAD_TABLE_BYTES * self._miss_share
        stored = int(batch.n_rows * (width + plan)) + 4 * batch.n_stored + edges + self.packed_bytes(batch.n_rows)
        return stored + stored // SPREAD

    @property
    def _miss_share(self) -> float:
        """Of a batch's rows, those that its cache is taken to lack."""
        return 1.0

    def _planner_bytes(self, n_accesses: int, size: int, *, spilled: bool, least: bool = False) -> int:
        """Count the bytes reserved for the planner, and for whoever shares them.

        Where caches have what others leave: at the least for what they are sure of, else for as many rows as there could be.
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
        """Make the function from the length of superbatches, and ``spilled=``, to the bytes of planning their edges."""
        planning, n = self.planning, self._graph.num_edges
        return partial(planner_bytes, planning, n, self._n_batches, batch.n_edges, capacity=planning.edge_capacity)

    def _whole_or_spilled(self, by_size: Callable[..., int], length: int) -> int:
        """Count the bytes that a planner has use for: all next positions in memory, unless they take too much of it."""
        whole = by_size(length, spilled=False)
        return whole if whole <= self._graph.budget.total // PLANNER_DIVISOR else by_size(length, spilled=True)
