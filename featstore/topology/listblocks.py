"""Edges of a graph as they are read, and the nodes whose neighbours they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ListBlock", "NodeLists"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Consecutive edges, and whose they are.

    ``offsets[i] … offsets[i + 1]`` are the edges of node ``first_node + i``: numbers within the graph, which may reach beyond
    this block on both sides. Every node whose list is not empty and overlaps the block is among the nodes. ``ids`` are the
    edges ``first_edge …``: neighbour ids, checked to be nodes.
    """

    first_node: int
    offsets: npt.NDArray[np.int64]
    first_edge: int
    ids: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NodeLists:
    """Lists of some of the nodes that were asked for.

    ``where``, int64 ``[k]``, are their positions in what was asked for, ascending. ``at`` and ``degree`` say where in ``ids``
    each list begins, and its length. A list may reach beyond ``ids`` on both sides: what comes before or after is in other
    pieces. ``ids`` are checked to be nodes; also those of lists that nobody asked for are there.
    """

    where: Int64s
    at: Int64s
    degree: Int64s
    ids: npt.NDArray[Any]

    def spread(self, positions: Int64s | None = None) -> tuple[int, Int64s, Int64s]:
        """Take a first position, and ``at`` and ``degree`` of all from there on; in between are lists of no edge.

        ``positions``, ascending, are those that ``where`` stands for; by default the same.
        """
        where = self.where if positions is None else positions[self.where]
        first, n = int(where[0]), int(where[-1] - where[0]) + 1
        if n == len(where):
            return first, self.at, self.degree
        at, degree = np.zeros(n, np.int64), np.zeros(n, np.int64)
        at[where - first], degree[where - first] = self.at, self.degree
        return first, at, degree
