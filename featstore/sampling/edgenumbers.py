"""Numbers of a batch's edges, over all of its blocks: the rows of edge features that the batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.errors import PluginError
from featstore.sampling.batch import Block
from featstore.topology.types import EdgeType, Types

__all__ = ["are_one_array", "blocks_of", "edge_numbers", "edge_type_of"]

Int64s = npt.NDArray[np.int64]


def are_one_array(blocks: tuple[Block, ...]) -> bool:
    """Tell whether each block begins with the next inner block's edges, in the same memory, as when nodes draw once."""
    first = None if not blocks or blocks[0].edge_pos is None else blocks[0].edge_pos.data_ptr()
    return first is not None and all(block.edge_pos is not None and block.edge_pos.data_ptr() == first for block in blocks)


def edge_numbers(
    blocks: tuple[Block, ...], n_edges: int, array: Callable[..., npt.NDArray[Any]] = np.empty, *, whole: bool = False
) -> Int64s:
    """Collect the numbers of the blocks' edges, one block after the other, repeats included.

    ``array(n, dtype)`` allocates the result. If the blocks are views of one array, that array is returned instead: it has each
    edge once. With ``whole`` the blocks come one after the other even then, as in a file of samples. PluginError: a block has no
    ``edge_pos``, or one beyond the graph's ``n_edges``.
    """
    positions = [block.edge_pos.numpy() for block in blocks if block.edge_pos is not None]
    if len(positions) < len(blocks):
        raise PluginError("edge features need edge ids, and the sampler gave no edge_pos: make it with edges=True")
    found: Int64s
    if are_one_array(blocks) and not whole:
        found = max(positions, key=len)
    else:
        found = array(sum(map(len, positions)), np.int64)
        if positions:
            np.concatenate(positions, out=found)
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= n_edges):
        raise PluginError(f"a sampler returned an edge_pos beyond the {n_edges} edges of the graph")
    return found


def blocks_of(types: Types, store: str, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Select the blocks of the type of edges that a store's feature is of, with edges numbered within the type."""
    found = edge_type_of(types, store)
    of_type = tuple(blocks[list(types.edges).index(found.key) :: len(types.edges)])
    positions = [block.edge_pos for block in of_type if block.edge_pos is not None]
    if not found.first_edge or len(positions) < len(of_type):
        return of_type
    if are_one_array(of_type):  # they stay one
        whole = max(positions, key=len) - found.first_edge
        return tuple(replace(block, edge_pos=whole[: len(each)]) for block, each in zip(of_type, positions, strict=True))
    return tuple(replace(block, edge_pos=each - found.first_edge) for block, each in zip(of_type, positions, strict=True))


def edge_type_of(types: Types, store: str) -> EdgeType:
    """Find the type of edges that a store's feature is of."""
    source, relation, destination = store.rpartition("/")[0].split(",")
    return types.edges[source, relation, destination]
