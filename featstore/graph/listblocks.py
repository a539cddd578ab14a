"""Neighbour lists in the order of the file: only the parts of it that hold lists which are wanted, as one stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import PagedRows, arena_bytes

__all__ = ["BLOCK_BYTES", "WINDOW_BYTES", "ListBlock", "stream_bytes", "stream_lists"]

Int64s = npt.NDArray[np.int64]

BLOCK_BYTES = 1 << 20  # ids at once: they stay in a processor's cache while many draw from them
WINDOW_BYTES = 4 << 20  # read ahead
GAP_PAGES = 8  # read over rather than to begin another read: as long as a drive takes for that


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Consecutive edges, and whose they are.

    Parameters
    ----------
    first_node : int
    offsets : int64 array, shape (k + 1,)
        Edges ``offsets[i] … offsets[i + 1] - 1`` are those of node ``first_node + i``; they may begin before the block, and end
        behind it. Every node that was asked for and has edges in the block is among them.
    first_edge : int
    ids : array of the topology's ``id_dtype``
        The edges ``first_edge …``, checked to lead to nodes.
    """

    first_node: int
    offsets: Int64s
    first_edge: int
    ids: npt.NDArray[Any]


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


def stream_bytes(block_bytes: int = BLOCK_BYTES) -> int:
    """Return the memory that :func:`stream_lists` holds, but for some of each node that is asked for."""
    return arena_bytes(_window_bytes(block_bytes)) + block_bytes


def _window_bytes(block_bytes: int) -> int:
    return WINDOW_BYTES // BLOCK_BYTES * block_bytes


def stream_lists(topology: Lists, nodes: Int64s, block_bytes: int = BLOCK_BYTES) -> Iterator[ListBlock]:
    """Yield the blocks that together hold all edges of ``nodes``, in the order of the file.

    Parameters
    ----------
    topology : Topology
    nodes : int64 array, shape (k,)
        Ascending, distinct.
    block_bytes : int
        At most so many at once, whole pages. A block's memory is valid until the next one is asked for.

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
    first = starts * width // PAGE_BYTES
    last = -(-ends * width // PAGE_BYTES)
    begins = np.concatenate([[0], np.flatnonzero(first[1:] > last[:-1] + GAP_PAGES) + 1])
    runs = np.stack([first[begins], last[np.concatenate([begins[1:] - 1, [len(last) - 1]])]], axis=1)
    most = max(1, block_bytes // PAGE_BYTES)
    pages = np.empty((most, PAGE_BYTES), np.uint8)
    counted = np.stack([1 + runs[:, 0], runs[:, 1] - runs[:, 0]], axis=1)  # page 0 is the header
    fed = 0
    with topology.indices.stream(counted, _window_bytes(block_bytes)) as stream:
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
