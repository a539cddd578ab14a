"""Rows of a batch's edges: gathered for all blocks at once, and split into one tensor a block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from featstore.gather.buffers import BufferPool
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import EdgePlan
from featstore.graph.feature import FeatureStore
from featstore.load.disjoint import Places
from featstore.sampling.batch import Block
from featstore.sampling.edgenumbers import are_one_array

__all__ = ["gather_edges"]

Int64s = npt.NDArray[np.int64]


def gather_edges(
    store: FeatureStore, blocks: tuple[Block, ...], pool: BufferPool, counts: GatherCounts, plan_or_ids: EdgePlan | Int64s
) -> tuple[torch.Tensor, ...]:
    """Gather the rows of each block's edges, in the order of the edges.

    Parameters
    ----------
    store : FeatureStore
        A feature of edges.
    blocks : tuple of Block
    pool : BufferPool
        Memory for the rows of all edges, if a plan gathers those of distinct edges alone.
    counts : GatherCounts
        Counts the reads.
    plan_or_ids : EdgePlan or int64 array
        The plan; or the edge ids, of :func:`~featstore.sampling.edgenumbers.edge_numbers`: the store then makes a
        plan.

    Raises
    ------
    CorruptionError, OSError, BudgetError, ClosedError
        See :meth:`FeatureStore.gather`. After a BudgetError without a plan the call may be repeated.

    Notes
    -----
    One gather: a page that edges of several blocks share is read once. The tensors share memory.
    """
    if not blocks:
        return ()
    sizes = [len(block.src) for block in blocks]
    if not isinstance(plan_or_ids, EdgePlan):
        rows = store.gather(torch.from_numpy(plan_or_ids), counts=counts)
        if are_one_array(blocks):
            return tuple(rows[:size] for size in sizes)
    else:
        ids, places = torch.from_numpy(plan_or_ids.ids), torch.from_numpy(plan_or_ids.places)
        if not len(places):
            rows = store.gather(ids, plan_or_ids.plan, counts=counts)
        else:
            room = pool.tensor((len(places), *store.shape[1:]), store.dtype)  # before the plan has run: it runs once
            rows = Places(places, room).of(store.gather(ids, plan_or_ids.plan, counts=counts))
    ends = np.cumsum(sizes).tolist()
    return tuple(rows[end - size : end] for end, size in zip(ends, sizes, strict=True))
