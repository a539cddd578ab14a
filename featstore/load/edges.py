"""Rows of a batch's edges: gathered for all of its blocks at once, and cut into one tensor a block."""

from __future__ import annotations

import numpy as np
import torch

from featstore._core.rows import copy_rows
from featstore.gather.buffers import BufferPool, as_bytes
from featstore.gather.executor import Tally
from featstore.gather.plan import EdgePlan
from featstore.graph.feature import FeatureStore
from featstore.sampling.batch import Block
from featstore.sampling.numbered import are_one_array, edge_numbers

__all__ = ["gather_edges"]


def gather_edges(
    store: FeatureStore, blocks: tuple[Block, ...], pool: BufferPool, tally: Tally, planned: EdgePlan | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the rows of each block's edges, in their order.

    Parameters
    ----------
    store : FeatureStore
        Of one row an edge.
    blocks : tuple of Block
        With ``edge_pos``.
    pool : BufferPool
        Holds the numbers of all edges meanwhile, and the rows of distinct ones where a plan has others in their place.
    tally : Tally
        Gets what was read.
    planned : EdgePlan, optional
        By which plan; without, the store makes one.

    Raises
    ------
    PluginError
        A block has no ``edge_pos``, or one that is no edge's number.
    CorruptionError, OSError, BudgetError, ClosedError
        See :meth:`FeatureStore.gather`. After a BudgetError without a plan the call may be repeated.

    Notes
    -----
    One gather: a page that edges of several blocks share is read once. The tensors share memory.
    """
    if not blocks:
        return ()
    if planned is None:
        ids = edge_numbers(blocks, len(store), pool.array)
        rows = store.gather(torch.from_numpy(ids), tally=tally)
    elif not len(planned.places):
        rows = store.gather(torch.from_numpy(planned.ids), planned.plan, tally=tally)
    else:
        rows = pool.tensor((len(planned.places), *store.shape[1:]), store.dtype)  # before the plan has run: it runs once
        found = store.gather(torch.from_numpy(planned.ids), planned.plan, tally=tally)
        copy_rows(as_bytes(found, store.row_bytes), planned.places, as_bytes(rows, store.row_bytes), None)
    sizes = [len(block.src) for block in blocks]
    if planned is None and are_one_array(blocks):
        return tuple(rows[:size] for size in sizes)
    ends = np.cumsum(sizes).tolist()
    return tuple(rows[end - size : end] for end, size in zip(ends, sizes, strict=True))
