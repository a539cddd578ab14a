"""Batches with a subgraph for each seed: rows are gathered once a node of the graph, and delivered to each of its copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.rows import copy_rows
from featstore.gather.buffers import BufferPool, as_bytes
from featstore.sampling.batch import SampledBatch
from featstore.topology.noderows import NodeRows, by_type

__all__ = ["batch_nodes", "delivered", "places_of"]

Int64s = npt.NDArray[np.int64]


def batch_nodes(sampled: SampledBatch, pool: BufferPool) -> torch.Tensor:
    """Get the ids of the nodes that the blocks have, as :attr:`SampledBatch.nodes`, in pooled memory."""
    if sampled.copies is None:
        return sampled.input_ids
    nodes = pool.tensor((sampled.n_nodes,), torch.int64)
    np.take(sampled.input_ids.numpy(), sampled.copies.rows.numpy(), out=nodes.numpy(), mode="clip")
    return nodes


def places_of(rows: NodeRows, sampled: SampledBatch, pool: BufferPool) -> torch.Tensor | None:
    """Find the place of each row that is delivered among the gathered ones, in pooled memory; None: they are the same rows."""
    if sampled.copies is None:
        return None
    if not rows.kinds:
        return sampled.copies.rows
    ids, copied = sampled.input_ids.numpy(), sampled.copies.rows.numpy()
    place = pool.array((len(ids),), np.int64)
    gathered = np.concatenate(by_type(ids, rows.kinds))
    place[gathered] = np.arange(len(gathered))
    nodes = np.concatenate(by_type(batch_nodes(sampled, pool).numpy(), rows.kinds))
    found = pool.tensor((len(nodes),), torch.int64)
    np.take(place, copied[nodes], out=found.numpy(), mode="clip")
    return found


def delivered(rows: torch.Tensor, places: torch.Tensor, pool: BufferPool, threads: int = 1) -> torch.Tensor:
    """Make the rows that are delivered: row ``k`` is ``rows[places[k]]``. On the CPU they take pooled memory."""
    if rows.device.type != "cpu":
        return rows.index_select(0, places.to(rows.device))
    out = pool.tensor((len(places), *rows.shape[1:]), rows.dtype)
    width = out.nbytes // max(1, len(places))
    if width:
        copy_rows(as_bytes(rows, width), places.numpy(), as_bytes(out, width), None, threads)
    return out
