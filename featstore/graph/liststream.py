"""Neighbour lists of a CSC file in its order: only the pages that hold lists which are wanted, as one stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore.graph.listblocks import ListBlock
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import PagedRows, arena_bytes

__all__ = ["LIST_BYTES", "list_runs", "stream_bytes", "stream_lists"]

Int64s = npt.NDArray[np.int64]

LIST_BYTES = 2 << 20  # of two blocks together: ids stay in a processor's cache while many draw from them
WINDOW_SHARE = 2  # as much is read ahead
GAP_PAGES = 8  # read over rather than to begin another read: as long as a drive takes for that


class Lists(Protocol):
    """What is asked of a topology whose offsets are in memory."""

    @property
    def num_edges(self) -> int: ...
    @property
    def id_bytes(self) -> int: ...
    @property
    def id_dtype(self) -> np.dtype[Any]: ...
    @property
    def indices(self) -> PagedRows: ...
    @property
    def indptr(self) -> Int64s: ...
    def offsets(self, ids: Int64s) -> tuple[Int64s, Int64s]: ...
    def check_ids(self, first: int, ids: npt.NDArray[Any]) -> None: ...


def stream_bytes(block_bytes: int = LIST_BYTES) -> int:
    """Return the memory that :func:`stream_lists` holds, but for some of each node that is asked for."""
    return arena_bytes(WINDOW_SHARE * block_bytes) + block_bytes // 2


def list_runs(starts: Int64s, ends: Int64s, width: int) -> Int64s:
    """Return first page and end of each run of pages that is read for lists of so many edges, none empty, in their order."""
    first = starts * width // PAGE_BYTES
    last = -(-ends * width // PAGE_BYTES)
    begins = np.concatenate([[0], np.flatnonzero(first[1:] > last[:-1] + GAP_PAGES) + 1])
    return np.stack([first[begins], last[np.concatenate([begins[1:] - 1, [len(last) - 1]])]], axis=1)


def stream_lists(topology: Lists, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[ListBlock]:
    """Yield the blocks that together hold all edges of ``nodes``, in the order of the file.

    Parameters
    ----------
    topology : Topology
    nodes : int64 array, shape (k,)
        Ascending, distinct.
    block_bytes : int
        Two blocks together; a block is there until the next one is asked for.

    Raises
    ------
    CorruptionError, OSError
        A page is damaged, an id is no node's, or the drive failed.
    """
    starts, degrees = topology.offsets(nodes)
    has = degrees > 0
    nodes, starts = nodes[has], starts[has]
    ends = starts + degrees[has]
    if not len(nodes):
        return
    width, n_edges = topology.id_bytes, topology.num_edges
    runs = list_runs(starts, ends, width)
    most = max(1, block_bytes // 2 // PAGE_BYTES)
    pages = np.empty((most, PAGE_BYTES), np.uint8)
    counted = np.stack([1 + runs[:, 0], runs[:, 1] - runs[:, 0]], axis=1)  # page 0 is the header
    fed = 0
    with topology.indices.stream(counted, WINDOW_SHARE * block_bytes) as stream:
        for begin, end in runs.tolist():
            for page in range(begin, end, most):
                n = min(most, end - page)
                fed += n
                stream.feed(stream.pieces_before(fed))
                stream.core.scatter(n, None, pages[:n])
                edge = page * PAGE_BYTES // width
                n_ids = min(n * PAGE_BYTES // width, n_edges - edge)
                ids = pages[:n].reshape(-1).view(topology.id_dtype)[:n_ids]
                topology.check_ids(edge, ids)
                low, high = np.searchsorted(ends, edge, "right"), np.searchsorted(starts, edge + n_ids)
                if low < high:
                    node = int(nodes[low])
                    yield ListBlock(node, topology.indptr[node : int(nodes[high - 1]) + 2], edge, ids)
