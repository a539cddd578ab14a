"""Division of the memory that is left for caches between rows of features and historical embeddings (OUTRE)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.fixed import FixedRows
from featstore.cache.planned import PlannedPolicy
from featstore.cache.select import top_rows
from featstore.cache.sizes import cache_bytes, rows_within
from featstore.errors import BudgetError
from featstore.estimate.rowsample import RowSample
from featstore.estimate.savedio import SavedIO, Split, best_split, prefix_sums
from featstore.gather.sources import gather_of
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.neighborlists import NEIGHBOR_POLICY
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.load.history import History
from featstore.plan.planmemory import planning_bytes
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace
from featstore.sampling.batch import SampledBatch
from featstore.sampling.historical import SeedsOf
from featstore.sampling.hops import HopSampler
from featstore.sampling.sampledbatches import Drawn
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.topology.base import huge_bytes
from featstore.topology.partlists import NearbyLists

__all__ = ["HOLDER", "HistorySplit", "measured_beta", "profile"]

HOLDER = "saved I/O"
SORTING_BYTES = 48  # a node, beside its counts, while orders and sums are computed
GATHERED = 8  # batches whose rows are read to time reading
PIECE_BYTES = 8 << 20  # one read
REPLAYED = 1 << 18  # accesses of an epoch that are replayed: more of them change the hits by less than 1 %
SIZES = 10  # sizes of a cache that are simulated; savings between them are interpolated
ONLINE_BYTES = 64  # an access of the longest batch, while an online policy is simulated

Int64s = npt.NDArray[np.int64]
Outside = Callable[[Int64s], npt.NDArray[np.bool_]]
EMPTY = np.zeros(0, np.int64)


class HistorySplit:
    """Choose a history's nodes once a strategy knows the memory that is left for caches.

    Parameters
    ----------
    history : History
    drawn : Drawn
        The loader's own batches.
    """

    def __init__(self, history: History, drawn: Drawn) -> None:
        self._history, self._drawn = history, drawn
        self.is_done = False

    def divide(
        self, context: Context, memory: Memory, cache: int | float | str | None, policy: Policy, *, serial: bool = False
    ) -> None:
        """Sample an epoch, choose the nodes, and take their memory; does nothing the second time.

        If memory is too short for the choice, no embedding is kept, and the loader runs as without a history.

        Parameters
        ----------
        context : Context
        memory : Memory
            The loader's memory, divided already; the strategy holds its granted bytes.
        cache : int, float, "auto" or None
            Size of the features' caches. Caches of a given size keep it, and embeddings get as much of the rest as is of use.
        policy : Policy
            The policy of these caches.
        serial : bool
            Sampling and training take turns: neighbour lists have the caches' memory while batches are sampled.
        """
        if self.is_done:
            return
        self.is_done = True
        graph = context.graph
        assert isinstance(graph, OutOfCoreGraph)  # a history goes with a sampler
        with context.timer.time("split"):
            try:
                nodes, found = self._choose(context, memory, cache, policy, serial=serial)
                graph.pool.trim()
                self._history.keep(nodes, graph, context.device, found.to_dict())
            except BudgetError as error:
                graph.pool.trim()
                why = f"no memory to judge: {error}"
                self._history.keep(EMPTY, graph, context.device, {"alpha": 0.0, "nodes": 0, "why": why})

    def _choose(
        self, context: Context, memory: Memory, cache: int | float | str | None, policy: Policy, *, serial: bool
    ) -> tuple[Int64s, Split]:
        graph, n = context.graph, context.graph.num_nodes
        assert isinstance(graph, OutOfCoreGraph)
        is_auto = cache == "auto" and bool(context.features)
        policy = policy.static if isinstance(policy, FixedRows) else policy
        n_accesses = memory.batch.n_rows * len(self._drawn)
        halvings = max(0, math.ceil(math.log2(max(1, n_accesses) / REPLAYED)))
        part = None if isinstance(policy, StaticPolicy) or not is_auto else RowSample(n, halvings)
        replayed = 0 if part is None else 2 * 8 * min(n_accesses, 2 * REPLAYED)
        with graph.budget.reserve(HOLDER, (SavedIO.BYTES + SORTING_BYTES) * n + replayed) as held:
            counted, seconds, trace = profile(self._drawn, graph, self._history.staleness, part)
            gathered_s, n_gathered = _gathered(context, self._drawn) if context.features else (0.0, 0)
            beta = measured_beta(seconds, counted.n_edges, gathered_s, n_gathered)
            for idle in (self._drawn, graph.pool):
                idle.trim()
            # The memory of the counts is free again when memory is divided.
            room = graph.budget.available + held.n_bytes
            room = memory.left_for_caches(room, context.prefetch, held.n_bytes)[0]
            if cache is not None and cache != "auto" and context.features:
                given = cache_bytes(cache, n, context.nodes.row_bytes, policy, context.graph.budget, 1 << 62)
                room = max(0, room - sum(given.values()))
            if not context.features:
                counted.rows[:] = 0  # no rows are read
            features = _nothing if not is_auto else _saved_by_rows(context, counted, trace, policy, room)
            # Lists use the caches' memory in turn only if there are caches, and the graph has no neighbour cache of its own.
            has_lists = serial and cache is not None and bool(context.features) and graph.neighbor_cache is None
            more = _more_while_sampling(memory, room, held.n_bytes)
            lists = _saved_by_lists(graph, counted, beta, more, alone=not is_auto) if has_lists else _nothing
            scores = counted.embeddings(beta)
            found = best_split(room, scores, self._history.node_bytes, features, lists, beta)
            return top_rows(scores, found.nodes[found.taken]), found


def profile(
    drawn: Drawn, graph: OutOfCoreGraph, staleness: int, part: RowSample | None = None
) -> tuple[SavedIO, float, Trace | None]:
    """Sample a whole epoch; return the I/O that its nodes would save, the seconds of sampling, and the accesses of ``part``.

    Raises
    ------
    BudgetError, CorruptionError, OSError
        From sampling.
    """
    assert isinstance(drawn.sampler, HopSampler)
    counted, seeds_of = SavedIO(graph.num_nodes, staleness), drawn.seeds_of(0)
    seconds, kept = 0.0, list[npt.NDArray[Any]]()
    for position in range(len(drawn)):
        begin = time.perf_counter()
        sampled, is_outside = _sampled(drawn.sampler, graph, seeds_of, position)
        seconds += time.perf_counter() - begin
        counted.add(sampled, is_outside)
        if part is not None:
            ids = sampled.input_ids.numpy()
            one = Trace.reading([ids].__getitem__, np.array([len(ids)]), part.n)
            kept.append(part.trace(one)[0].astype(np.int32 if part.n < 2**31 else np.int64))
        del sampled  # else the next batch would have to fit beside it
    if part is None:
        return counted, seconds, None
    lengths = np.array([len(ids) for ids in kept], np.int64)
    return counted, seconds, Trace.reading(kept.__getitem__, lengths, part.n)


def _sampled(sampler: HopSampler, graph: OutOfCoreGraph, seeds_of: SeedsOf, position: int) -> tuple[SampledBatch, Outside]:
    """Sample a batch of epoch 0; return it, and a function that marks its nodes whose lists were not in memory."""
    with seeds_of(position) as (number, seeds, lists):
        sampled = sampler.sample(seeds, 0, number, lists)
        outside = _outside(graph, sampled.input_ids.numpy(), lists)  # at once: the next macro-batch replaces the lists
    return sampled, lambda ids: outside


def _outside(graph: OutOfCoreGraph, ids: Int64s, lists: NearbyLists | None) -> npt.NDArray[np.bool_]:
    with graph.neighbor_lists.using() as cache:
        offsets = None if cache is None else cache.offset_of_node
        if cache is not None and offsets is None:  # all lists are in memory
            return np.zeros(len(ids), bool)
        found = np.ones(len(ids), bool) if offsets is None else offsets[ids] < 0
    if lists is not None:
        place = np.full(len(ids), -1, np.int64)  # ~position in the file
        lists.locate(np.ascontiguousarray(ids), place)
        found &= ~place < graph.topology.num_edges
    return found


def _gathered(context: Context, drawn: Drawn) -> tuple[float, int]:
    """Read the rows of a few batches, spread over the epoch, without a cache; return the seconds, and the number of rows."""
    graph, order, seconds, n_rows = context.graph, drawn.whole(0), 0.0, 0
    step = max(1, PIECE_BYTES // max(1, max(context.nodes.row_bytes.values())))
    for position in range(0, len(order), max(1, len(order) // GATHERED)):
        ids = order.sample(position).input_ids.numpy().copy()
        graph.pool.trim()
        for first in range(0, len(ids), step):
            rows = ids[first : first + step]
            for name, width in context.nodes.row_bytes.items():
                out = graph.pool.tensor((len(rows), width), torch.uint8)
                begin = time.perf_counter()
                gather_of(context.nodes.stores[name].source)(rows, out.numpy())
                seconds += time.perf_counter() - begin
                del out
        n_rows += len(ids)
    return seconds, n_rows


def measured_beta(sample_s: float, n_edges: int, gather_s: float, n_rows: int) -> float:
    """Compute the cost of a sampled edge, in reads of a row (equation 3), from measured seconds; 1 if no rows are read."""
    if not n_rows or not gather_s:
        return 1.0
    return (sample_s / max(1, n_edges)) / (gather_s / n_rows)


def _nothing(n_bytes: int) -> float:
    return 0.0


def _saved_by_rows(context: Context, counted: SavedIO, trace: Trace | None, policy: Policy, room: int) -> Callable[[int], float]:
    """Make the function from bytes of the features' caches to reads that they save.

    For a static policy the function adds up accesses in the order of the scores; for another one it replays the trace.
    """
    n, widths = int(context.graph.num_nodes), list(context.nodes.row_bytes.values())

    def rows_of(n_bytes: int) -> int:
        return rows_within(n_bytes, n, widths, policy)

    if isinstance(policy, StaticPolicy):
        accesses = counted.accesses
        with context.graph.policy_inputs(context.nodes.width, accesses) as inputs:
            scores = inputs.scores(policy)
            order = np.argsort(-scores.astype(np.float64), kind="stable")
        sums = prefix_sums(accesses, order)
        return lambda n_bytes: float(sums[rows_of(n_bytes)])
    assert trace is not None
    assert isinstance(policy, (PlannedPolicy, OnlinePolicy))
    budget, most = context.graph.budget, rows_of(room)
    sizes = np.unique(np.linspace(0, most, SIZES + 1).astype(np.int64))
    saved, share = np.zeros(len(sizes)), trace.n_accesses / max(1, counted.n_rows)
    needed = planning_bytes(trace.n, trace.n_accesses, longest=trace.longest) + ONLINE_BYTES * trace.longest
    with budget.reserve(HOLDER, needed):
        for k, rows in enumerate(sizes.tolist()):
            capacity = round(rows * trace.n / max(1, counted.n)) if rows < counted.n else trace.n
            loads = int(simulate(trace, min(capacity, trace.n), policy).sum()) if capacity else trace.n_accesses
            saved[k] = (trace.n_accesses - loads) / max(share, 1e-12)
    return lambda n_bytes: float(np.interp(rows_of(n_bytes), sizes, saved))


def _more_while_sampling(memory: Memory, room: int, returned: int) -> int:
    """Compute the bytes that neighbour lists get beside the ``room`` of the caches, while nothing is gathered."""
    return max(0, memory.left_while_sampling(returned) - room)


def _saved_by_lists(graph: OutOfCoreGraph, counted: SavedIO, beta: float, more: int, *, alone: bool) -> Callable[[int], float]:
    """Make the function from bytes of neighbour lists, chosen as Ginex chooses them, to reads that they save.

    ``more``: bytes that lists get in addition. ``alone``: whether lists are kept in these bytes alone.
    """
    topology, n, policy = graph.topology, graph.num_nodes, get_policy(NEIGHBOR_POLICY)
    assert isinstance(policy, StaticPolicy)
    with graph.policy_inputs(topology.id_bytes) as inputs:
        order = np.argsort(-inputs.scores(policy, of_lists=True), kind="stable")
        ends = np.cumsum(topology.id_bytes * (inputs.context.in_degree[order] + 1))
    sums, table, whole = beta * prefix_sums(counted.drawn, order), huge_bytes(8 * n), NeighborCache.whole_bytes(topology)

    def saved(n_bytes: int) -> float:
        left = n_bytes + more - table
        if left <= 0 or not (n_bytes or alone):
            return 0.0
        # All lists together need no table of offsets.
        return float(sums[-1] if n_bytes + more >= whole else sums[int(np.searchsorted(ends, left, "right"))])

    return saved
