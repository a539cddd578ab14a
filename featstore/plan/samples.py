"""Sampled batches on disk: 32-bit ids and sources where they fit, one count a destination."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.blocks import count_destinations, expand, narrow
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool
from featstore.sampling.batch import Block, SampledBatch
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["SampleFile", "SampleWriter"]

KIND = "samples"
HEAD = 4  # index, epoch, seeds, hops; then n_src, n_dst of each block

Int64s = npt.NDArray[np.int64]


def _to32(values: Int64s) -> npt.NDArray[np.int32]:
    out = np.empty(len(values), np.int32)
    narrow(values, out)
    return out


class SampleWriter(SectionWriter):
    """Write batches of one superbatch, in order.

    Parameters
    ----------
    path : path-like
    num_nodes : int
    n_hops : int
        Blocks a batch.
    disk : DiskBudget, optional
    """

    def __init__(self, path: str | os.PathLike[str], num_nodes: int, n_hops: int, disk: DiskBudget | None = None) -> None:
        super().__init__(path, KIND, disk)
        self._is_narrow = num_nodes < 2**31
        self._n_hops = n_hops

    def add(self, batch: SampledBatch) -> None:
        """Append a batch.

        Raises
        ------
        OSError
            The disk or its budget is full; the file is gone.
        ValueError
            It has another number of blocks than the file, carries edge positions, or 2³¹ nodes or more.
        """
        if len(batch.blocks) != self._n_hops or any(block.edge_pos is not None for block in batch.blocks):
            raise ValueError(f"batches of this file have {self._n_hops} blocks, without edge positions")
        if len(batch.input_ids) >= 2**31:
            raise ValueError("a batch of 2^31 nodes or more cannot be stored")
        head = [batch.index, batch.epoch, batch.n_seeds, self._n_hops]
        for block in batch.blocks:
            head += [block.n_src, block.n_dst]
        self.append(np.array(head, np.int64))
        ids = batch.input_ids.numpy()
        self.append(_to32(ids) if self._is_narrow else ids)
        for block in batch.blocks:
            counts = np.empty(block.n_dst, np.int32)
            count_destinations(block.dst.numpy(), counts)
            self.append(counts)
            self.append(_to32(block.src.numpy()))

    def finish_samples(self) -> SampleFile:
        """Close the file and open it for reading."""
        return SampleFile(self.finish(), self._n_hops)


class SampleFile:
    """Batches of one superbatch, by number; every array is checked when it is read."""

    def __init__(self, file: SectionFile, n_hops: int) -> None:
        self._file = file
        self._stride = 2 + 2 * n_hops
        self._n_hops = n_hops
        self.lengths: Int64s = file.lengths[1 :: self._stride]

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, number: int) -> npt.NDArray[Any]:
        """Return the input ids of a batch, int32 or int64."""
        return self._file[number * self._stride + 1]

    def batch(self, number: int, pool: BufferPool) -> SampledBatch:
        """Return a batch as it was sampled, in pooled memory."""
        first = number * self._stride
        head = self._file[first].tolist()
        ids = self._file[first + 1]
        input_ids = pool.tensor((len(ids),), torch.int64)
        input_ids.numpy()[:] = ids
        blocks = []
        for hop in range(self._n_hops):
            n_src, n_dst = head[HEAD + 2 * hop : HEAD + 2 * hop + 2]
            counts, sources = self._file[first + 2 + 2 * hop], self._file[first + 3 + 2 * hop]
            src, dst = pool.tensor((len(sources),), torch.int64), pool.tensor((len(sources),), torch.int64)
            if len(counts) != n_dst or not expand(counts, sources, n_src, dst.numpy(), src.numpy()):
                raise CorruptionError(f"block {hop} of batch {number} does not fit its counts", self._file.path)
            blocks.append(Block(src, dst, n_src, n_dst))
        return SampledBatch(head[0], head[1], input_ids, head[2], tuple(blocks))

    def remove(self) -> None:
        """Delete the file."""
        self._file.remove()
