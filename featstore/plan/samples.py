"""Sampled batches on disk: 32-bit ids and sources where they fit, one count a destination; their ids in memory until planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.blocks import count_destinations, expand, narrow
from featstore.budget import Budget, Reservation
from featstore.errors import CorruptionError, PluginError
from featstore.gather.buffers import BufferPool
from featstore.sampling.batch import Block, SampledBatch
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["KeptIds", "SampleFile", "SampleWriter", "sample_bytes"]

KIND = "samples"
KEPT_COST = 5  # kept ids are taken back before anything else: reading them again is cheap
FREE_SHARE = 8  # this part of the memory is left free beside kept ids
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


class KeptIds:
    """Input ids of a superbatch's first batches: in memory that nobody else wants, and on loan, until the superbatch is planned.

    Planning passes over the ids several times. What is not kept, or was taken back, is read from the file of samples.

    Notes
    -----
    One thread appends, any number read. Whoever still uses an array when it is taken back counts it as a batch being planned.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._arrays: list[npt.NDArray[Any]] = []
        self._held: list[Reservation] = []
        self._is_over = False
        self._lock = threading.Lock()
        self._loan = budget.lend(self._lent_bytes, self._give_back, cost=KEPT_COST)

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Keep the next batch's ids; those of later batches neither where there is no room for them."""
        with self._lock:
            if self._is_over:
                return
            room = self._budget.available - self._budget.total // FREE_SHARE
            held = self._budget.try_reserve("sampled ids", ids.nbytes) if ids.nbytes <= room else None
            if held is None:
                self._is_over = True
                return
            ids.flags.writeable = False
            self._held.append(held)
            self._arrays.append(ids)

    def get(self, number: int) -> npt.NDArray[Any] | None:
        """Return a batch's ids, read-only, where they are kept."""
        arrays = self._arrays
        return arrays[number] if number < len(arrays) else None

    def drop(self) -> None:
        """Keep nothing any more; may be called again."""
        with self._lock:
            self._drop()
        self._loan.end()

    def _drop(self) -> None:
        self._is_over, self._arrays = True, []
        while self._held:
            self._held.pop().release()

    def _lent_bytes(self) -> int:
        return sum(held.n_bytes for held in self._held.copy())

    def _give_back(self, n_bytes: int) -> int:
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            given = self._lent_bytes()
            self._drop()
            return given
        finally:
            self._lock.release()


class SampleWriter(SectionWriter):
    """Write batches of one superbatch, in order. All have as many blocks as the first, and edge positions where it has.

    Parameters
    ----------
    path : path-like
    num_nodes : int
    disk : DiskBudget, optional
    keep : Budget, optional
        Ids stay in what is free of this memory, too, until :meth:`SampleFile.forget`.

    Attributes
    ----------
    n_hops : int
        Blocks of each batch, once one was added; else 0.
    """

    def __init__(
        self, path: str | os.PathLike[str], num_nodes: int, disk: DiskBudget | None = None, keep: Budget | None = None
    ) -> None:
        self._kept: KeptIds | None = None
        super().__init__(path, KIND, disk)
        if keep is not None:
            self._kept = KeptIds(keep)
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
        stored = _to32(ids) if self._is_narrow else ids
        self.append(stored)
        if self._kept is not None:
            self._kept.append(stored if self._is_narrow else stored.copy())
        for block in batch.blocks:
            counts = np.empty(block.n_dst, np.int32)
            count_destinations(block.dst.numpy(), counts)
            self.append(counts)
            self.append(_to32(block.src.numpy()))
            if block.edge_pos is not None:
                self.append(block.edge_pos.numpy())

    def finish_samples(self) -> SampleFile:
        """Close the file and open it for reading."""
        try:
            return SampleFile(self.finish(), self._kept)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up; see :class:`~featstore.storage.sections.SectionWriter`."""
        super().abort()
        if self._kept is not None:
            self._kept.drop()


class SampleFile:
    """Batches of one superbatch, by number; every array is checked when it is read.

    Raises
    ------
    CorruptionError
        The first batch's head is damaged, or the file has not as many arrays as it says.
    """

    def __init__(self, file: SectionFile, kept: KeptIds | None = None) -> None:
        self._file = file
        self._kept = kept
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
        """Return the input ids of a batch, int32 or int64: kept ones, or in memory that ``array(n, dtype)`` makes."""
        kept = None if self._kept is None else self._kept.get(number)
        return kept if kept is not None else self._file.read(number * self._stride + 1, array)

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

    def forget(self) -> None:
        """Keep no ids in memory any more; may be called again."""
        if self._kept is not None:
            self._kept.drop()

    def remove(self) -> None:
        """Delete the file."""
        self.forget()
        self._file.remove()
