"""Neighbour lists that lie in memory while many batches are sampled: which of them are worth it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.plan.samples import sample_bytes
from featstore.sampling.hops import HopSampler
from featstore.sampling.sampledbatches import Drawn
from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import Topology, huge_bytes

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["lists_kept", "table_bytes", "worth_keeping"]

_MOST: Final = 7 / 8  # most of the memory left that lists get
_LEAST: Final = 1 / 8  # fewer than this part of all lists are not worth keeping
_FEWEST: Final = 4  # batches, of which one is drawn twice
_SAMPLING: Final = 4  # bytes of sampling a batch, over those of the batch


def table_bytes(topology: Topology) -> int:
    """Count the bytes of the table of lists in memory, unless all are."""
    return huge_bytes(8 * topology.num_lists)


def worth_keeping(whole: int, table: int, room: int, n_lists: int, *, in_sequence: bool = False) -> tuple[int, str]:
    """Compute the bytes of neighbour lists that are worth keeping in ``room`` bytes for ``n_lists`` reads of one.

    ``whole`` are the bytes of all lists, ``table`` those of the table of a part of them.

    Returns
    -------
    int
        The bytes: all lists if they fit, else the best ones; 0 if sampling would read less than that.
    str
        Why there are none; empty otherwise.
    """
    n_bytes = min(whole, int(_MOST * max(0, room)))
    beside = f"they take {format_size(whole)}, and {format_size(max(0, room))} are left"
    if n_bytes < whole and in_sequence:
        return 0, f"on the drive, read in sequence: {beside}"
    if n_bytes < whole and n_bytes - table < _LEAST * whole:
        return 0, f"on the drive: {beside}"
    if n_lists * PAGE_BYTES < n_bytes:
        return 0, f"on the drive: less is read of them than the {format_size(n_bytes)} that they would take"
    return n_bytes, ""


@contextmanager
def lists_kept(g: OutOfCoreGraph, drawn: Drawn, epochs: int, at_once: int) -> Iterator[None]:
    """Keep neighbour lists in memory, on loan, while the batches of all epochs are drawn, ``at_once`` at a time.

    None are kept if the graph has a cache of lists, if these are read in sequence, for few batches, or if they are not worth it:
    one batch is drawn to see.
    """
    sampler = drawn.sampler
    needless = g.neighbor_cache is not None or epochs * len(drawn) < _FEWEST
    if needless or drawn.lists is not None or not isinstance(sampler, HopSampler):
        yield
        return
    with closing(drawn.epoch(0).windowed(0)) as order:
        sampled = order.sample(0)
    n_lists = epochs * len(drawn) * sum(block.n_dst for block in sampled.blocks)
    beside = _SAMPLING * (at_once + 2) * sample_bytes(sampled, g.num_nodes)
    del sampled
    lists = g.neighbor_lists
    whole, table = lists.most_bytes(sampler.edges), table_bytes(g.topology)
    n_bytes, _ = worth_keeping(whole, table, g.budget.available - beside, n_lists)
    is_ours = False
    try:
        with g.locked():
            is_free = lists.cache is None  # another thread may sample a pack, too
            if n_bytes and is_free:
                with suppress(BudgetError):  # another holder took the memory: the lists stay on the drive
                    g.cache_neighbors(n_bytes, edges=sampler.edges)
                    is_ours = True
                    lists.lend(passing=True)
        yield
    finally:
        if is_ours:
            lists.drop_passing()
