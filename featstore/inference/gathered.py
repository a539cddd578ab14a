"""Blocks of nodes with all their in-neighbours, for a layer of any kind: the sources' rows are gathered for each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.errors import BudgetError
from featstore.graph.passes import StoredRows
from featstore.sampling.batch import Block
from featstore.topology.base import Topology

__all__ = ["whole_blocks"]

Int64s = npt.NDArray[np.int64]

_EDGE_BYTES: Final = 80  # per edge of a block: its ends, their positions, and memory of sorting
_NODE_BYTES: Final = 64


def whole_blocks(
    topology: Topology, rows: StoredRows, item: int, first: int, budget: Budget, memory: int, holder: str
) -> Iterator[tuple[int, Block, npt.NDArray[np.uint8]]]:
    """Yield blocks of consecutive nodes from ``first`` on that fit ``memory`` bytes, reserved for ``holder`` meanwhile.

    Each item has the block's first node, all in-edges of its nodes, and the sources' rows as stored, shape (n_src, row_bytes).
    ``item`` is the bytes of a number as the layer gets it. The memory also counts one such row an edge, since layers commonly
    make these. BudgetError: a node with all its in-neighbours does not fit.
    """
    row_bytes, n = rows.file.row_bytes, topology.num_nodes
    given = row_bytes + item * rows.width
    per_edge, per_node = given + item * rows.width + _EDGE_BYTES, 2 * given + _NODE_BYTES
    while first < n:
        degrees = topology.degrees(first, min(n, first + max(1, memory // per_node)))
        cost = np.cumsum(degrees) * per_edge
        cost += np.arange(1, len(cost) + 1) * per_node
        fit = int(np.searchsorted(cost, memory, "right"))
        if not fit:
            needed = budget.total + int(cost[0]) - memory
            raise BudgetError(
                f"the {degrees[0]} in-neighbours of node {first} take {int(cost[0])} bytes in a block, and {memory} are left",
                needed,
            )
        with budget.reserve(holder, int(cost[fit - 1])):
            yield first, *_block(topology, rows, first, first + fit)
        first += fit


def _block(topology: Topology, rows: StoredRows, first: int, stop: int) -> tuple[Block, npt.NDArray[np.uint8]]:
    n_dst = stop - first
    starts, degrees = topology.offsets(np.arange(first, stop))
    ends = np.cumsum(degrees)
    positions = np.repeat(starts - ends + degrees, degrees)
    positions += np.arange(len(positions))
    found = np.empty(len(positions), topology.id_dtype)
    topology.read_edges(positions, found)
    topology.check_found(positions, found)
    ids = found.astype(np.int64)
    is_inside = (ids >= first) & (ids < stop)
    others: npt.NDArray[Any] = np.unique(ids[~is_inside])
    src = np.where(is_inside, ids - first, n_dst + np.searchsorted(others, ids))
    dst = np.repeat(np.arange(n_dst), degrees)
    out = np.empty((n_dst + len(others), rows.file.row_bytes), np.uint8)
    rows.file.read(first, n_dst, out[:n_dst])
    if len(others):
        rows.file.gather(others, out[n_dst:])
    return Block(torch.from_numpy(src), torch.from_numpy(dst), len(out), n_dst), out
