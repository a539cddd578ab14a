"""Blocks of edges as they are read from a graph, with the nodes to whose lists the edges belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ListBlock", "NodeLists"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Consecutive edges, and the offsets of their nodes' lists.

    The edges of node ``first_node + i`` are ``offsets[i] … offsets[i + 1] - 1``. These are numbers within the graph, and may
    reach beyond the block on both sides. The nodes include every node whose list overlaps the block. ``ids`` are the neighbour
    ids of the edges ``first_edge …``, checked to be nodes.
    """

    first_node: int
    offsets: npt.NDArray[np.int64]
    first_edge: int
    ids: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NodeLists:
    """Lists of some of the requested nodes.

    ``where``, int64 ``[k]``, are the positions of these nodes among the requested ones, ascending. ``at`` is the index in
    ``ids`` at which each list begins, and ``degree`` its length. A list may reach beyond ``ids`` on both sides: its other ids
    are in other pieces. ``ids`` are checked to be nodes, and include ids of lists that were not requested.
    """

    where: Int64s
    at: Int64s
    degree: Int64s
    ids: npt.NDArray[Any]

    def held(self) -> tuple[Int64s, Int64s]:
        """Count, of each list, the ids that come before those in ``ids``, and those that are in ``ids``."""
        low = np.maximum(self.at, 0)
        return low - self.at, np.minimum(self.at + self.degree, len(self.ids)) - low

    def spread(self, positions: Int64s | None = None) -> tuple[int, Int64s, Int64s]:
        """Expand the lists to consecutive positions: return the first position, and ``at`` and ``degree`` of all from it on.

        Positions without a list here get lists without edges. ``positions``, ascending, translate the entries of ``where``; by
        default the entries themselves are used.
        """
        where = self.where if positions is None else positions[self.where]
        first, n = int(where[0]), int(where[-1] - where[0]) + 1
        if n == len(where):
            return first, self.at, self.degree
        at, degree = np.zeros(n, np.int64), np.zeros(n, np.int64)
        at[where - first], degree[where - first] = self.at, self.degree
        return first, at, degree
