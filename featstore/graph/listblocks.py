"""Consecutive edges of a graph, and the nodes whose neighbours they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ListBlock"]


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Consecutive edges, and whose they are.

    Parameters
    ----------
    first_node : int
    offsets : int64 array, shape (k + 1,)
        ``offsets[i] … offsets[i + 1]`` are the edges of node ``first_node + i``: numbers within the graph, which may reach beyond
        this block on both sides. Every node whose list is not empty and overlaps the block is among the nodes.
    first_edge : int
    ids : int32 or int64 array, shape (n,)
        The edges ``first_edge …``: neighbour ids, checked to be nodes.
    """

    first_node: int
    offsets: npt.NDArray[np.int64]
    first_edge: int
    ids: npt.NDArray[Any]
