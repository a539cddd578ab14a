"""The adjacency in part order: whole neighbour lists, with the lists of a part next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore._core.partition import list_starts, move_lists
from featstore.budget import Budget
from featstore.topology.base import Topology
from featstore.topology.crossedges import blocks_in
from featstore.topology.partarrays import by_part

__all__ = ["PartOrder"]

Int64s = npt.NDArray[np.int64]

_LEAST_WINDOW_BYTES: Final = 1 << 16
_PIECE_NODES: Final = 1 << 16
_WINDOW_FRACTION: Final = 1 / 2  # of the available memory, for the window


class PartOrder:
    """Nodes by part, ascending within each, and their neighbour lists in that order.

    ``nodes`` are of the topology's ``id_dtype``. ``offsets``, int64 ``[2 * (n_parts + 1)]``, are the offsets of each part in
    ``nodes``, then the offsets of its lists in the ids. ``budget`` counts, as ``holder``, the window in which lists are put in
    order, and a block of the file. The caller counts the bytes of :meth:`nbytes`.
    """

    def __init__(self, topology: Topology, parts: npt.NDArray[np.int32], n_parts: int, budget: Budget, holder: str) -> None:
        self._topology, self._budget, self._holder = topology, budget, holder
        n = topology.num_lists
        self.offsets = np.empty(2 * (n_parts + 1), np.int64)
        with budget.reserve(holder, 8 * n):  # int64 nodes, before they are converted to the topology's width
            self.offsets[: n_parts + 1], nodes = by_part(parts, n_parts)
            self.nodes = nodes.astype(topology.id_dtype)
            del nodes
        self._starts = np.empty(n, np.int64)
        begins = self.offsets[n_parts + 1 :]
        begins[:] = 0
        for piece in self._pieces():
            list_starts(topology.degrees(piece.start, piece.stop), parts[piece], begins[1:])
        np.cumsum(begins, out=begins)
        following = begins[:-1].copy()
        for piece in self._pieces():
            list_starts(topology.degrees(piece.start, piece.stop), parts[piece], following, self._starts[piece])

    def _pieces(self) -> Iterator[slice]:
        """Yield all nodes in pieces; offsets are held for one piece at a time."""
        n = self._topology.num_lists
        for first in range(0, n, _PIECE_NODES):
            yield slice(first, min(first + _PIECE_NODES, n))

    @staticmethod
    def nbytes(topology: Topology, n_parts: int) -> int:
        """Count the bytes of the arrays, and of temporary arrays for a piece of the nodes."""
        n = topology.num_lists
        return (8 + topology.id_bytes) * n + 24 * (n_parts + 1) + 32 * min(n, _PIECE_NODES)

    def blocks(self, progress: Callable[[int], None]) -> Iterator[npt.NDArray[Any]]:
        """Yield the ids of all lists in part order, window by window; each window reuses the same array.

        A window takes half of the available memory. The whole adjacency is read in sequence for each window, so only once if it
        fits one window.
        """
        topology = self._topology
        n_bytes = max(_LEAST_WINDOW_BYTES, int(self._budget.available * _WINDOW_FRACTION))
        room = min(topology.num_edges, n_bytes // topology.id_bytes)
        with self._budget.reserve(self._holder, room * topology.id_bytes):
            window = np.empty(room, topology.id_dtype)
            for begin in range(0, topology.num_edges, max(1, room)):
                part = window[: min(room, topology.num_edges - begin)]
                self._fill(part, begin, progress)
                yield part

    def _fill(self, window: npt.NDArray[Any], begin: int, progress: Callable[[int], None]) -> None:
        """Read the adjacency, and copy the ids at positions ``begin …`` of the part order into ``window``."""
        topology, pieces = self._topology, self._pieces()
        piece, node, indptr = slice(0, 0), 0, np.zeros(1, np.int64)
        for block in blocks_in(topology, self._budget, self._holder):
            first, ids = block.first_edge, block.ids
            while True:
                node = move_lists(ids, first, indptr, self._starts[piece], node, window, begin, topology.id_bytes)
                if node < len(indptr) - 1 or piece.stop == topology.num_lists:
                    break
                piece, node = next(pieces), 0
                indptr = indptr[-1] + np.concatenate([[0], np.cumsum(topology.degrees(piece.start, piece.stop))])
            progress(ids.nbytes)
