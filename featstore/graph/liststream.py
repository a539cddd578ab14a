"""Neighbour lists of a CSC file in its order: only the pages that hold lists which are wanted, as one stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.listruns import count_runs, find_runs
from featstore._core.lists import first_bad_id
from featstore.errors import CorruptionError
from featstore.graph.listblocks import NodeLists
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import PagedRows, arena_bytes

__all__ = ["LIST_BYTES", "WINDOW_SHARE", "ListRuns", "pass_pages", "stream_bytes", "stream_lists"]

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
    def bad_id(self, position: int, found: int) -> CorruptionError: ...


def stream_bytes(block_bytes: int = LIST_BYTES) -> int:
    """Return the memory that :func:`stream_lists` holds, but for some of each node that is asked for."""
    return arena_bytes(WINDOW_SHARE * block_bytes) + block_bytes // 2


@dataclass(frozen=True, slots=True)
class ListRuns:
    """Where the lists of some nodes lie, and the pages that are read for them.

    Parameters
    ----------
    where, begins, degrees : int64 array, shape (n,)
        Of each list that is not empty: its node's position among those asked for, its first edge, and its length.
    runs : int64 array, shape (r, 2)
        First page of each run of pages, and the one after its last.
    first_lists : int64 array, shape (r,)
        The first list of each run.
    """

    where: Int64s
    begins: Int64s
    degrees: Int64s
    runs: Int64s
    first_lists: Int64s

    @classmethod
    def of(cls, indptr: Int64s, nodes: Int64s, id_bytes: int) -> ListRuns:
        """Find those of ``nodes``, ascending and distinct."""
        k = len(nodes)
        where, begins, degrees, first_lists = (np.empty(k, np.int64) for _ in range(4))
        runs = np.empty((k, 2), np.int64)
        n, n_runs = find_runs(indptr, nodes, id_bytes, GAP_PAGES, where, begins, degrees, runs, first_lists)
        return cls(where[:n], begins[:n], degrees[:n], runs[:n_runs].copy(), first_lists[:n_runs].copy())


def pass_pages(indptr: Int64s, nodes: Int64s, id_bytes: int) -> tuple[int, int]:
    """Return how many pages :func:`stream_lists` reads for ``nodes``, and in how many runs."""
    return count_runs(indptr, nodes, id_bytes, GAP_PAGES)


def stream_lists(topology: Lists, indptr: Int64s, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[NodeLists]:
    """Yield the lists of ``nodes``, in the order of the file: as many at once as fit, and one that does not in pieces.

    Parameters
    ----------
    topology : Topology
    indptr : int64 array, shape (N + 1,)
        Its offsets.
    nodes : int64 array, shape (k,)
        Ascending, distinct.
    block_bytes : int
        Two blocks together; a block is there until the next one is asked for.

    Raises
    ------
    CorruptionError, OSError
        A page is damaged, an id is no node's, or the drive failed.
    """
    found = ListRuns.of(indptr, nodes, topology.id_bytes)
    where, begins, degrees, runs = found.where, found.begins, found.degrees, found.runs
    if not len(where):
        return
    lists = np.append(found.first_lists, len(where))
    page_ids = PAGE_BYTES // topology.id_bytes
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
                low = first + max(0, int(np.searchsorted(begins[first:stop], edge, "right")) - 1)
                low += int(begins[low] + degrees[low] <= edge)
                high = first + int(np.searchsorted(begins[first:stop], edge + len(ids)))
                if low < high:
                    yield NodeLists(where[low:high], begins[low:high] - edge, degrees[low:high], ids)
            run += 1
