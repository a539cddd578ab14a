"""Counts of every node's out-edges into other parts, made in one pass over the adjacency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore._core.partition import cross_edges
from featstore.budget import Budget
from featstore.storage.scan import scan_bytes
from featstore.topology.base import Topology
from featstore.topology.listblocks import ListBlock

__all__ = ["blocks_in", "count_cross_edges", "counts_dtype"]

_LEAST_BLOCK_BYTES: Final = 1 << 16
_MOST_BLOCK_BYTES: Final = 8 << 20
_BLOCK_FRACTION: Final = 1 / 16  # of the available memory, for a block


def blocks_in(topology: Topology, budget: Budget, holder: str, most_bytes: int = _MOST_BLOCK_BYTES) -> Iterator[ListBlock]:
    """Read the adjacency once, see :meth:`Topology.blocks`; ``budget`` counts the blocks, which are small if memory is short."""
    n_bytes = max(_LEAST_BLOCK_BYTES, min(most_bytes, int(budget.available * _BLOCK_FRACTION)))
    with budget.reserve(holder, scan_bytes(topology.nbytes, n_bytes)):
        yield from topology.blocks(n_bytes)


def counts_dtype(num_edges: int) -> np.dtype[Any]:
    """Choose the dtype of a number of edges."""
    return np.dtype(np.int32 if num_edges < 2**31 else np.int64)


def count_cross_edges(
    topology: Topology,
    parts: npt.NDArray[np.int32],
    budget: Budget,
    holder: str,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> npt.NDArray[Any]:
    """Count the out-edges of each node into other parts: int32 ``[num_nodes]``, int64 from 2³¹ edges on.

    ``budget`` counts the block that is read, as ``holder``; the caller counts the result. ``progress`` gets the bytes of each
    block. Lists hold in-neighbours: a node occurs in the list of every node to which its out-edges lead. The cost is one pass in
    sequence, with two look-ups an edge.
    """
    counts = np.zeros(topology.num_nodes, counts_dtype(topology.num_edges))
    for block in blocks_in(topology, budget, holder):
        ids = block.ids
        cross_edges(block.offsets, block.first_node, parts, ids, ids.itemsize, block.first_edge, counts)
        progress(ids.nbytes)
    return counts
