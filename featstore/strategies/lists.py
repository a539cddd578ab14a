"""Neighbour lists that a loader keeps in memory unasked, before rows of features get what is left."""

from __future__ import annotations

from contextlib import suppress

from featstore.errors import BudgetError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.neighborcache import NeighborCache
from featstore.graph.topology import huge_bytes
from featstore.sampling.drawn import Drawn
from featstore.sampling.epochwide import EpochSampler
from featstore.sampling.hops import HopSampler
from featstore.storage.layout import PAGE_BYTES
from featstore.strategies.caches import room_for_caches
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory

__all__ = ["keep_lists", "may_keep_lists"]

WHOLE_SHARE = 7 / 8  # of what caches may take: all lists, if they take no more; sampling then reads nothing
PART_SHARE, LEAST_PART = 1 / 2, 1 / 8  # some of them otherwise, if they are so many of all


def may_keep_lists(context: Context) -> bool:
    """Return whether batches are drawn from lists that the graph does not keep in memory."""
    graph, batches = context.graph, context.batches
    if not isinstance(graph, OutOfCoreGraph) or graph.neighbor_cache is not None or context.has_history:
        return False
    return isinstance(batches, Drawn) and isinstance(batches.sampler, (HopSampler, EpochSampler))


def keep_lists(context: Context, memory: Memory, epochs: int) -> None:
    """Keep neighbour lists in memory, on loan, where sampling would read more than they are; see :func:`may_keep_lists`.

    All of them, if they fit beside batches; else those that the default policy scores highest, but not where lists are read in
    sequence. A list costs a read of a page for every batch that draws from it, and is smaller than the rows that it
    leads to: lists come first.

    Parameters
    ----------
    context : Context
    memory : Memory
        Of whose batches a size is known; it has divided nothing yet.
    epochs : int
        To come.
    """
    graph, batches = context.graph, context.batches
    assert isinstance(graph, OutOfCoreGraph)
    assert isinstance(batches, Drawn)
    assert isinstance(batches.sampler, (HopSampler, EpochSampler))
    topology, numbered = graph.topology, batches.sampler.edges
    room = memory.left_for_caches(room_for_caches(context)[0], context.prefetch)[0]
    whole, table = NeighborCache.whole_bytes(topology, numbered), huge_bytes(8 * graph.num_nodes)
    n_bytes = whole if whole <= WHOLE_SHARE * room else int(PART_SHARE * room)
    in_sequence = isinstance(batches.sampler, EpochSampler) or batches.lists is not None
    if n_bytes < whole and (in_sequence or n_bytes - table < LEAST_PART * whole):
        return
    widest = max(batches.fanouts or [-1])
    n_lists = memory.batch.n_edges // widest if widest > 0 else memory.batch.n_rows // 4
    if epochs * len(batches) * n_lists * PAGE_BYTES < n_bytes:
        return
    with context.watch.time("cache"), suppress(BudgetError):  # others were quicker: lists are read from the file
        graph.cache_neighbors(n_bytes, edges=numbered)
        graph.lend_neighbors()
