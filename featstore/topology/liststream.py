"""Neighbour lists of a CSC file in the order of the file: one stream of only the pages that hold requested lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.listruns import count_runs, find_runs
from featstore._core.lists import first_bad_id
from featstore.errors import CorruptionError
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import arena_bytes
from featstore.storage.rowfile import RowFile
from featstore.topology.listblocks import NodeLists

__all__ = ["LIST_BYTES", "WINDOW_FACTOR", "list_runs", "pass_pages", "stream_bytes", "stream_lists"]

Int64s = npt.NDArray[np.int64]

LIST_BYTES = 2 << 20  # of two blocks together: ids stay in a processor's cache while neighbours are drawn from them
WINDOW_FACTOR = 2  # the window for reading ahead has this multiple of the bytes of two blocks
GAP_PAGES = 8  # gaps up to this are read over, as starting another read takes a drive as long


def stream_bytes(block_bytes: int = LIST_BYTES) -> int:
    """Count the bytes that :func:`stream_lists` holds, except the arrays that have an entry for each requested node."""
    return arena_bytes(WINDOW_FACTOR * block_bytes) + block_bytes // 2


def list_runs(indptr: Int64s, nodes: Int64s, id_bytes: int) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Find the lists of ``nodes``, ascending and distinct, and the pages to read for them.

    Returns
    -------
    where, begins, degrees : int64 array, shape (n,)
        For each list that is not empty: its node's position in ``nodes``, its first edge, and its length.
    runs : int64 array, shape (r, 2)
        First page of each run of pages, and the page after its last.
    first_lists : int64 array, shape (r,)
        The first list of each run.
    """
    k = len(nodes)
    where, begins, degrees, first_lists = (np.empty(k, np.int64) for _ in range(4))
    runs = np.empty((k, 2), np.int64)
    n, n_runs = find_runs(indptr, nodes, id_bytes, GAP_PAGES, where, begins, degrees, runs, first_lists)
    return where[:n], begins[:n], degrees[:n], runs[:n_runs].copy(), first_lists[:n_runs].copy()


def pass_pages(indptr: Int64s, nodes: Int64s, id_bytes: int) -> tuple[int, int]:
    """Count the pages that :func:`stream_lists` reads for ``nodes``, and their runs."""
    return count_runs(indptr, nodes, id_bytes, GAP_PAGES)


def stream_lists(
    indices: RowFile,
    indptr: Int64s,
    nodes: Int64s,
    num_nodes: int,
    bad_id: Callable[[int, int], CorruptionError],
    block_bytes: int = LIST_BYTES,
) -> Iterator[NodeLists]:
    """Yield the lists of ``nodes``, in the order of the file: as many at once as fit, or a list that does not fit in pieces.

    Parameters
    ----------
    indices : RowFile
        The neighbour ids; ``indptr`` are their offsets, int64 ``[N + 1]``.
    nodes : int64 array, shape (k,)
        Ascending, distinct.
    num_nodes : int
        Neighbour ids are below it.
    bad_id : callable
        ``bad_id(edge, id)`` makes the error for an id that is no node.
    block_bytes : int
        Bytes of two blocks together; a block is valid until the next one is requested.
    """
    num_edges, id_bytes = indices.n_rows, indices.row_bytes
    where, begins, degrees, runs, first_lists = list_runs(indptr, nodes, id_bytes)
    if not len(where):
        return
    lists = np.append(first_lists, len(where))
    page_ids = PAGE_BYTES // id_bytes
    most = max(1, block_bytes // 2 // PAGE_BYTES)
    pages = np.empty((most, PAGE_BYTES), np.uint8)
    counts = runs[:, 1] - runs[:, 0]
    ends = np.cumsum(counts)
    fed = 0

    counted = np.stack([1 + runs[:, 0], counts], axis=1)  # page 0 is the header
    with indices.stream(counted, WINDOW_FACTOR * block_bytes) as stream:

        def take(n: int, places: Int64s, edges: Int64s) -> npt.NDArray[Any]:
            """Read and check the ids of the next ``n`` pages, in which runs that begin with ``edges`` lie at ``places``."""
            nonlocal fed
            fed += n
            stream.feed(stream.pieces_before(fed))
            stream.core.scatter(n, None, pages[:n])
            beyond = edges[-1] + n * page_ids - places[-1] - num_edges
            ids = pages[:n].reshape(-1).view(f"i{id_bytes}")[: n * page_ids - max(0, int(beyond))]
            bad = first_bad_id(ids, id_bytes, num_nodes)
            if bad >= 0:
                run = int(np.searchsorted(places, bad, side="right")) - 1
                raise bad_id(int(edges[run] + bad - places[run]), int(ids[bad]))
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
                low = first + max(0, int(np.searchsorted(begins[first:stop], edge, "right")) - 1)
                low += int(begins[low] + degrees[low] <= edge)
                high = first + int(np.searchsorted(begins[first:stop], edge + len(ids)))
                if low < high:
                    yield NodeLists(where[low:high], begins[low:high] - edge, degrees[low:high], ids)
            run += 1
