"""Rows of a batch's edges: gathered for all of its blocks at once, and cut into one tensor a block."""

from __future__ import annotations

import numpy as np
import torch

from featstore.errors import PluginError
from featstore.gather.buffers import BufferPool
from featstore.gather.executor import Tally
from featstore.graph.feature import FeatureStore
from featstore.sampling.batch import Block

__all__ = ["edge_rows", "gather_edges"]


def edge_rows(blocks: tuple[Block, ...]) -> int:
    """Return how many rows of an edge feature :func:`gather_edges` reads into memory for these blocks."""
    sizes = [len(block.src) for block in blocks]
    return max(sizes, default=0) if _is_one_array(blocks) else sum(sizes)


def _is_one_array(blocks: tuple[Block, ...]) -> bool:
    """Whether each block begins with the edges of the next inner one, in the same memory: nodes draw once."""
    first = None if not blocks or blocks[0].edge_pos is None else blocks[0].edge_pos.data_ptr()
    return first is not None and all(block.edge_pos is not None and block.edge_pos.data_ptr() == first for block in blocks)


def gather_edges(store: FeatureStore, blocks: tuple[Block, ...], pool: BufferPool, tally: Tally) -> tuple[torch.Tensor, ...]:
    """Return the rows of each block's edges, in their order.

    Parameters
    ----------
    store : FeatureStore
        Of one row an edge.
    blocks : tuple of Block
        With ``edge_pos``.
    pool : BufferPool
        Holds the numbers of all edges meanwhile.
    tally : Tally
        Gets what was read.

    Raises
    ------
    PluginError
        A block has no ``edge_pos``, or one that is no edge's number.
    CorruptionError, OSError, BudgetError, ClosedError
        See :meth:`FeatureStore.gather`.

    Notes
    -----
    One gather: a page that edges of several blocks share is read once. The tensors share memory.
    """
    positions = [block.edge_pos for block in blocks if block.edge_pos is not None]
    if len(positions) < len(blocks):
        raise PluginError(
            f"edge feature {store.name!r} needs the numbers of edges, and the sampler gave no edge_pos: make it with edges=True"
        )
    if not positions:
        return ()
    if _is_one_array(blocks):
        ids = positions[0]
    else:
        ids = pool.tensor((sum(map(len, positions)),), torch.int64)
        np.concatenate([each.numpy() for each in positions], out=ids.numpy())
    array = ids.numpy()
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= len(store)):
        raise PluginError(f"a sampler returned an edge_pos beyond the {len(store)} edges of the graph")
    rows = store.gather(ids, tally=tally)
    if _is_one_array(blocks):
        return tuple(rows[: len(each)] for each in positions)
    ends = np.cumsum([len(each) for each in positions]).tolist()
    return tuple(rows[end - len(each) : end] for each, end in zip(positions, ends, strict=True))
