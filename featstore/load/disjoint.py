"""Batches with a subgraph for each seed: rows are gathered once a node of the graph, and delivered to each of its copies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.rows import copy_rows
from featstore.gather.buffers import BufferPool, as_bytes
from featstore.sampling.batch import NodeCopies, SampledBatch
from featstore.topology.noderows import NodeRows, by_type

__all__ = ["Places", "batch_nodes", "places_of", "room_for"]

Int64s = npt.NDArray[np.int64]


def batch_nodes(sampled: SampledBatch, pool: BufferPool) -> torch.Tensor:
    """Get the ids of the nodes that the blocks have, as :attr:`SampledBatch.nodes`, in pooled memory."""
    if sampled.copies is None:
        return sampled.input_ids
    nodes = pool.tensor((sampled.n_nodes,), torch.int64)
    np.take(sampled.input_ids.numpy(), sampled.copies.rows.numpy(), out=nodes.numpy(), mode="clip")
    return nodes


def places_of(rows: NodeRows, sampled: SampledBatch, copies: NodeCopies, pool: BufferPool) -> torch.Tensor:
    """Find the place of each row that is delivered among the gathered ones, in pooled memory."""
    if not rows.kinds:
        return copies.rows
    ids, copied = sampled.input_ids.numpy(), copies.rows.numpy()
    place = pool.array((len(ids),), np.int64)
    n = 0
    for gathered in by_type(ids, rows.kinds):
        place[gathered] = np.arange(n, n + len(gathered))
        n += len(gathered)
    of_types = by_type(batch_nodes(sampled, pool).numpy(), rows.kinds)
    found, n = pool.tensor((sum(map(len, of_types)),), torch.int64), 0
    for nodes in of_types:
        np.take(place, copied[nodes], out=found.numpy()[n : n + len(nodes)], mode="clip")
        n += len(nodes)
    return found


class Places(NamedTuple):
    """Places of delivered rows among the gathered ones: row ``k`` at ``at[k]``. ``out``: their memory on the CPU."""

    at: torch.Tensor
    out: torch.Tensor | None

    def of(self, rows: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """Make the rows that are delivered; on another device than the CPU in memory of its own."""
        if self.out is None:
            return rows.index_select(0, self.at.to(rows.device))
        width = self.out.nbytes // max(1, len(self.at))
        if width:
            copy_rows(as_bytes(rows, width), self.at.numpy(), as_bytes(self.out, width), None, threads)
        return self.out


def room_for(rows: torch.Tensor, at: torch.Tensor, pool: BufferPool) -> torch.Tensor:
    """Take the memory of the rows at these places, on the CPU."""
    return pool.tensor((len(at), *rows.shape[1:]), rows.dtype)
