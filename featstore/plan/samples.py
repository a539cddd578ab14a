"""Sampled batches on disk: 32-bit ids and sources where they fit, one count a destination."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.blocks import count_destinations, expand, narrow
from featstore.errors import CorruptionError, PluginError
from featstore.gather.buffers import BufferPool
from featstore.sampling.batch import Block, SampledBatch
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["SampleFile", "SampleWriter", "sample_bytes"]

KIND = "samples"
SECTION_BYTES = 32  # of an array's entry in the index
HEAD = 5  # index, epoch, seeds, hops, arrays of a block; then n_src, n_dst of each block

Int64s = npt.NDArray[np.int64]


def _to32(values: Int64s) -> npt.NDArray[np.int32]:
    out = np.empty(len(values), np.int32)
    narrow(values, out)
    return out


def sample_bytes(batch: SampledBatch, num_nodes: int) -> int:
    """Return the bytes that a batch takes in a file of samples."""
    with_positions = any(block.edge_pos is not None for block in batch.blocks)
    n_sections = 2 + (3 if with_positions else 2) * len(batch.blocks)
    found = 8 * (HEAD + 2 * len(batch.blocks)) + (4 if num_nodes < 2**31 else 8) * len(batch.input_ids)
    for block in batch.blocks:
        found += 4 * block.n_dst + (12 if with_positions else 4) * len(block.src)
    return found + SECTION_BYTES * n_sections


class SampleWriter(SectionWriter):
    """Write batches of one superbatch, in order. All have as many blocks as the first, and edge positions where it has.

    Parameters
    ----------
    path : path-like
    num_nodes : int
    disk : DiskBudget, optional

    Attributes
    ----------
    n_hops : int
        Blocks of each batch, once one was added; else 0.
    """

    def __init__(self, path: str | os.PathLike[str], num_nodes: int, disk: DiskBudget | None = None) -> None:
        super().__init__(path, KIND, disk)
        self._is_narrow = num_nodes < 2**31
        self._shape: tuple[int, int] | None = None

    @property
    def n_hops(self) -> int:
        return 0 if self._shape is None else self._shape[0]

    def add(self, batch: SampledBatch) -> None:
        """Append a batch.

        Raises
        ------
        OSError
            The disk or its budget is full; the file is gone.
        PluginError
            It has not as many blocks as the first, or edge positions where that has none, or the other way round.
        ValueError
            It has 2³¹ nodes or more.
        """
        n_with = sum(block.edge_pos is not None for block in batch.blocks)
        shape = (len(batch.blocks), 3 if n_with else 2)
        self._shape = self._shape or shape
        if shape != self._shape or 0 < n_with < len(batch.blocks):
            first = f"{self._shape[0]} blocks, {self._shape[0] if self._shape[1] == 3 else 0} of them with edge positions"
            raise PluginError(
                f"a sampler returned a batch of {shape[0]} blocks, {n_with} of them with edge positions, after one of {first}"
            )
        if len(batch.input_ids) >= 2**31:
            raise ValueError("a batch of 2^31 nodes or more cannot be stored")
        head = [batch.index, batch.epoch, batch.n_seeds, *shape]
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
            if block.edge_pos is not None:
                self.append(block.edge_pos.numpy())

    def finish_samples(self) -> SampleFile:
        """Close the file and open it for reading."""
        return SampleFile(self.finish())


class SampleFile:
    """Batches of one superbatch, by number; every array is checked when it is read.

    Raises
    ------
    CorruptionError
        The first batch's head is damaged, or the file has not as many arrays as it says.
    """

    def __init__(self, file: SectionFile) -> None:
        self._file = file
        self.n_hops, self._n_arrays = 0, 2
        if len(file):
            head = file[0].tolist()
            self.n_hops, self._n_arrays = head[3:HEAD] if len(head) >= HEAD else (-1, 0)
        self._stride = 2 + self._n_arrays * self.n_hops
        if self.n_hops < 0 or self._n_arrays not in (2, 3) or len(file) % self._stride:
            raise CorruptionError(f"{len(file)} arrays do not make up batches of {self.n_hops} blocks", file.path)
        self.lengths: Int64s = file.lengths[1 :: self._stride]

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> npt.NDArray[Any]:
        """Return the input ids of a batch, int32 or int64, in memory that ``array(n, dtype)`` makes."""
        return self._file.read(number * self._stride + 1, array)

    def batch(self, number: int, pool: BufferPool) -> SampledBatch:
        """Return a batch as it was sampled, in pooled memory."""
        first = number * self._stride
        head = self._file[first].tolist()
        ids = self._file.read(first + 1, pool.array)
        input_ids = pool.tensor((len(ids),), torch.int64)
        input_ids.numpy()[:] = ids
        blocks = []
        for hop in range(self.n_hops):
            n_src, n_dst = head[HEAD + 2 * hop : HEAD + 2 * hop + 2]
            at = first + 2 + self._n_arrays * hop
            counts, sources = self._file.run(at, 2, pool.array)
            edges = pool.tensor((2, len(sources)), torch.int64)  # in one array, which is an edge_index without a copy
            src, dst = edges[0], edges[1]
            if len(counts) != n_dst or not expand(counts, sources, n_src, dst.numpy(), src.numpy()):
                raise CorruptionError(f"block {hop} of batch {number} does not fit its counts", self._file.path)
            edge_pos = None
            if self._n_arrays == 3:
                positions = self._file.read(at + 2, pool.array)
                if len(positions) != len(sources):
                    raise CorruptionError(f"block {hop} of batch {number} does not fit its edge positions", self._file.path)
                edge_pos = pool.tensor((len(positions),), torch.int64)
                edge_pos.numpy()[:] = positions
            blocks.append(Block(src, dst, n_src, n_dst, edge_pos))
        return SampledBatch(head[0], head[1], input_ids, head[2], tuple(blocks))

    def remove(self) -> None:
        """Delete the file."""
        self._file.remove()
