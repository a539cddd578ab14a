"""Neighbour lists of a CSC file in its order: only the pages that hold lists which are wanted, as one stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.sampler import first_bad_id
from featstore.errors import CorruptionError
from featstore.graph.listblocks import NodeLists
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
    def num_nodes(self) -> int: ...
    @property
    def num_edges(self) -> int: ...
    @property
    def id_bytes(self) -> int: ...
    @property
    def id_dtype(self) -> np.dtype[Any]: ...
    @property
    def indices(self) -> PagedRows: ...
    def offsets(self, ids: Int64s) -> tuple[Int64s, Int64s]: ...
    def bad_id(self, position: int, found: int) -> CorruptionError: ...


def stream_bytes(block_bytes: int = LIST_BYTES) -> int:
    """Return the memory that :func:`stream_lists` holds, but for some of each node that is asked for."""
    return arena_bytes(WINDOW_SHARE * block_bytes) + block_bytes // 2


def list_runs(begins: Int64s, ends: Int64s, width: int) -> tuple[Int64s, Int64s]:
    """Return first page and end of each run of pages that is read for lists, and the first list of each.

    Lists lie behind each other and are not empty: edges ``begins[i] … ends[i] - 1``, of ``width`` bytes each.
    """
    first = begins * width // PAGE_BYTES
    last = -(-ends * width // PAGE_BYTES)
    lists = np.concatenate([[0], np.flatnonzero(first[1:] > last[:-1] + GAP_PAGES) + 1])
    return np.stack([first[lists], last[np.concatenate([lists[1:] - 1, [len(last) - 1]])]], axis=1), lists


def stream_lists(topology: Lists, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[NodeLists]:
    """Yield the lists of ``nodes``, in the order of the file: as many at once as fit, and one that does not in pieces.

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
    where = np.flatnonzero(degrees > 0)
    if not len(where):
        return
    begins, degrees = starts[where], degrees[where]
    del starts
    page_ids = PAGE_BYTES // topology.id_bytes
    runs, lists = list_runs(begins, begins + degrees, topology.id_bytes)
    lists = np.append(lists, len(where))
    most = max(1, block_bytes // 2 // PAGE_BYTES)
    pages = np.empty((most, PAGE_BYTES), np.uint8)
    counts = runs[:, 1] - runs[:, 0]
    ends = np.cumsum(counts)
    fed = 0

    counted = np.stack([1 + runs[:, 0], counts], axis=1)  # page 0 is the header
    with topology.indices.stream(counted, WINDOW_SHARE * block_bytes) as stream:

        def take(n: int, places: Int64s, edges: Int64s) -> npt.NDArray[Any]:
            """Return the ids of the next ``n`` pages, in which runs that begin with ``edges`` lie at ``places``."""
            nonlocal fed
            fed += n
            stream.feed(stream.pieces_before(fed))
            stream.core.scatter(n, None, pages[:n])
            beyond = edges[-1] + n * page_ids - places[-1] - topology.num_edges
            ids = pages[:n].reshape(-1).view(topology.id_dtype)[: n * page_ids - max(0, int(beyond))]
            bad = first_bad_id(ids, topology.id_bytes, topology.num_nodes)
            if bad >= 0:
                run = int(np.searchsorted(places, bad, side="right")) - 1
                raise topology.bad_id(int(edges[run] + bad - places[run]), int(ids[bad]))
            return ids

        run = 0
        while run < len(runs):
            before = int(ends[run] - counts[run])
            stop = int(np.searchsorted(ends, before + most, side="right"))
            if stop > run:
                edges, places = runs[run:stop, 0] * page_ids, (ends[run:stop] - counts[run:stop] - before) * page_ids
                ids = take(int(ends[stop - 1]) - before, places, edges)
                within = slice(int(lists[run]), int(lists[stop]))
                at = begins[within] + np.repeat(places - edges, np.diff(lists[run : stop + 1]))
                yield NodeLists(where[within], at, degrees[within], ids)
                run = stop
                continue
            first, stop = int(lists[run]), int(lists[run + 1])
            for page in range(int(runs[run, 0]), int(runs[run, 1]), most):
                edge = page * page_ids
                ids = take(min(most, int(runs[run, 1]) - page), np.zeros(1, np.int64), np.array([edge]))
                low = first + int(np.searchsorted(begins[first:stop] + degrees[first:stop], edge, "right"))
                high = first + int(np.searchsorted(begins[first:stop], edge + len(ids)))
                if low < high:
                    yield NodeLists(where[low:high], begins[low:high] - edge, degrees[low:high], ids)
            run += 1
