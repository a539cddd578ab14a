"""Sampled batches on disk: 32-bit ids and sources where they fit, one count a destination. Ids stay in memory until planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.blocks import count_destinations, expand, narrow
from featstore.budget import KEPT_COST, Budget, Reservation
from featstore.errors import CorruptionError, PluginError
from featstore.gather.buffers import BufferPool
from featstore.sampling.batch import EDGE_ARRAYS, HISTORY_ARRAYS, Block, HistoryRows, NodeCopies, SampledBatch
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["KeptIds", "SampleFile", "SampleWriter", "sample_bytes"]

KIND = "samples"
HOLDER = "sampled ids"  # in the budget's report
FREE_FRACTION = 1 / 8  # of the memory, left free beside kept ids
SECTION_BYTES = 32  # an entry of the index, one for each array
HEAD = 5  # index, epoch, seeds, hops, form of the blocks; then n_src, n_dst of each block
PLAIN = 2  # form of blocks without optional arrays; each adds a bit
NO_FORM = PLAIN + (1 << len(EDGE_ARRAYS))
WITH_HISTORY = 1 << 16  # in the form: each batch ends with its step and HISTORY_ARRAYS
WITH_COPIES = 1 << 17  # each batch has a subgraph for each seed, and ends with the two arrays of NodeCopies
N_COPIES = 2

Int64s = npt.NDArray[np.int64]


def _to32(values: Int64s) -> npt.NDArray[np.int32]:
    out = np.empty(len(values), np.int32)
    narrow(values, out)
    return out


def _form_of(arrays: Iterable[str]) -> int:
    """Return the form of blocks with these optional arrays."""
    return PLAIN + sum(1 << list(EDGE_ARRAYS).index(name) for name in arrays)


def _arrays_of(form: int) -> list[str]:
    """Return the optional arrays of blocks of a form, in the order in which they are stored."""
    return [name for bit, name in enumerate(EDGE_ARRAYS) if form - PLAIN >> bit & 1]


def sample_bytes(batch: SampledBatch, num_nodes: int) -> int:
    """Return the bytes that a batch takes in a file of samples."""
    n_sections = 2
    found = 8 * (HEAD + 2 * len(batch.blocks)) + (4 if num_nodes < 2**31 else 8) * len(batch.input_ids)
    if batch.history is not None:
        n_sections += 1 + len(HISTORY_ARRAYS)
        found += 8 + sum(4 * len(values) for values in batch.history.tensors)
    if batch.copies is not None:
        n_sections += N_COPIES
        found += 4 * N_COPIES * batch.n_nodes
    for block in batch.blocks:
        arrays = block.edge_arrays
        n_sections += 2 + len(arrays)
        found += 4 * block.n_dst + 4 * len(block.src) + sum(values.nbytes for values in arrays.values())
    return found + SECTION_BYTES * n_sections


def _described(n_blocks: int, forms: set[int]) -> str:
    arrays = [" and ".join(_arrays_of(form)) or "neither edge_pos nor weight" for form in sorted(forms)]
    more = " and a history" * any(form & WITH_HISTORY for form in forms)
    more += " and a subgraph for each seed" * any(form & WITH_COPIES for form in forms)
    return f"{n_blocks} blocks with {', some with '.join(arrays)}{more}"


class KeptIds:
    """Input ids of a superbatch's first batches, kept in free memory, on loan, until the superbatch is planned.

    Planning passes over the ids several times. Ids that are not kept, or were taken back, are read from the file of samples.
    One thread appends, any number read. Planning reserves the ids of one batch itself, so an array in use may be taken back.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._arrays: list[npt.NDArray[Any]] = []
        self._held: list[Reservation] = []
        self._is_over = False
        self._lock = threading.Lock()
        self._loan = budget.lend(self._lent_bytes, self._give_back, cost=KEPT_COST, of=HOLDER)

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Keep the ids of the next batch. If they do not fit, keep none of that batch or of later ones."""
        with self._lock:
            if self._is_over:
                return
            room = self._budget.available - int(self._budget.total * FREE_FRACTION)
            held = self._budget.try_reserve(HOLDER, ids.nbytes) if ids.nbytes <= room else None
            if held is None:
                self._is_over = True
                return
            ids.flags.writeable = False
            if not self._held:
                self._loan.renew()
            self._held.append(held)
            self._arrays.append(ids)

    def get(self, number: int) -> npt.NDArray[Any] | None:
        """Return a batch's ids, read-only, if they are kept, else None."""
        arrays = self._arrays
        return arrays[number] if number < len(arrays) else None

    def drop(self) -> None:
        """Drop all ids, and keep none from now on; may be called again."""
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
    """Write the batches of one superbatch, in order. All have ``n_hops`` blocks, with the same optional arrays.

    With ``keep``, ids also stay in free memory of that budget until :meth:`SampleFile.forget`.
    """

    def __init__(
        self, path: str | os.PathLike[str], num_nodes: int, disk: DiskQuota | None = None, keep: Budget | None = None
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

    def add(self, batch: SampledBatch) -> npt.NDArray[Any]:
        """Append a batch; return its input ids in the dtype in which they are stored.

        OSError: the disk is full; the file is gone. PluginError: the batch differs from the first in its number of blocks, in
        the arrays of :data:`EDGE_ARRAYS` that they have, or in having a history or copies. ValueError: it has 2³¹ nodes or more.
        """
        more = WITH_HISTORY * (batch.history is not None) + WITH_COPIES * (batch.copies is not None)
        forms = {_form_of(block.edge_arrays) + more for block in batch.blocks} or {PLAIN + more}
        shape = (len(batch.blocks), max(forms))
        self._shape = self._shape or shape
        if shape != self._shape or len(forms) > 1:
            raise PluginError(
                f"a sampler returned a batch of {_described(shape[0], forms)}, after one of "
                f"{_described(self._shape[0], {self._shape[1]})}: all blocks of all batches have the same arrays"
            )
        if batch.n_nodes >= 2**31:
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
            for values in block.edge_arrays.values():
                self.append(values.numpy())
        if batch.history is not None:
            self.append(np.array([batch.history.step], np.int64))
            for values in batch.history.tensors:
                self.append(_to32(values.numpy()))
        if batch.copies is not None:
            for values in batch.copies.tensors:
                self.append(_to32(values.numpy()))
        return stored

    def finish_samples(self) -> SampleFile:
        """Close the file and open it for reading."""
        try:
            return SampleFile(self.finish(), self._kept)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Delete the unfinished file, and drop the kept ids."""
        super().abort()
        if self._kept is not None:
            self._kept.drop()


def _are_nodes(copies: NodeCopies, batch: SampledBatch) -> bool:
    """Tell whether copies name rows and subgraphs that a batch has, and are as many as its blocks have nodes."""
    n = len(copies.rows)
    if len(copies.batch) != n or any(block.n_src != n for block in batch.blocks[:1]):
        return False
    ends = ((copies.rows, len(batch.input_ids)), (copies.batch, batch.n_seeds))
    return n == 0 or all(0 <= int(values.min()) <= int(values.max()) < limit for values, limit in ends)


class SampleFile:
    """Batches of one superbatch, by number; every array is checked when it is read."""

    def __init__(self, file: SectionFile, kept: KeptIds | None = None) -> None:
        self._file = file
        self._kept = kept
        self.n_hops, form = 0, PLAIN
        if len(file):
            head = file[0]
            self.n_hops, form = head[3:HEAD].tolist() if head.dtype == np.int64 and len(head) >= HEAD else (-1, PLAIN)
        self._has_history, self._has_copies = bool(form & WITH_HISTORY), bool(form & WITH_COPIES)
        form &= ~(WITH_HISTORY | WITH_COPIES)
        self._arrays = _arrays_of(form)
        self._block_stride = 2 + len(self._arrays)
        self._stride = 2 + self._block_stride * self.n_hops + self._has_history * (1 + len(HISTORY_ARRAYS))
        self._stride += self._has_copies * N_COPIES
        if self.n_hops < 0 or not PLAIN <= form < NO_FORM or len(file) % self._stride:
            raise CorruptionError(f"{len(file)} arrays do not make up batches of {self.n_hops} blocks", file.path)
        self.lengths: Int64s = file.lengths[1 :: self._stride]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> npt.NDArray[Any]:
        """Return the input ids of a batch, int32 or int64: the kept ones, or a copy in memory of ``array(n, dtype)``."""
        kept = None if self._kept is None else self._kept.get(number)
        return kept if kept is not None else self._stored_ids(number, array)

    def _stored_ids(self, number: int, array: Callable[..., npt.NDArray[Any]]) -> npt.NDArray[Any]:
        ids = self._file.read(number * self._stride + 1, array)
        if ids.dtype not in (np.int32, np.int64):
            raise CorruptionError(f"the ids of batch {number} are {ids.dtype}", self._file.path)
        return ids

    def batch(self, number: int, pool: BufferPool) -> SampledBatch:
        """Return a batch as it was sampled, in pooled memory."""
        first = number * self._stride
        stored = self._file[first]
        if stored.dtype != np.int64 or len(stored) != HEAD + 2 * self.n_hops:
            raise CorruptionError(f"the head of batch {number} is not of {self.n_hops} blocks", self._file.path)
        head = stored.tolist()
        ids = self._stored_ids(number, pool.array)
        if not 0 <= head[2] <= len(ids):
            raise CorruptionError(f"batch {number} of {len(ids)} nodes has {head[2]} seeds", self._file.path)
        input_ids = pool.tensor((len(ids),), torch.int64)
        input_ids.numpy()[:] = ids
        blocks = []
        for hop in range(self.n_hops):
            n_src, n_dst = head[HEAD + 2 * hop : HEAD + 2 * hop + 2]
            at = first + 2 + self._block_stride * hop
            counts, sources = self._file.run(at, 2, pool.array)
            edges = pool.tensor((2, len(sources)), torch.int64)  # one array, so that it is an edge_index without a copy
            src, dst = edges[0], edges[1]
            is_narrow = counts.dtype == sources.dtype == np.int32
            if not is_narrow or len(counts) != n_dst or not expand(counts, sources, n_src, dst.numpy(), src.numpy()):
                raise CorruptionError(f"block {hop} of batch {number} does not fit its counts", self._file.path)
            arrays = {name: self._edge_array(at + 2 + i, name, len(sources), pool) for i, name in enumerate(self._arrays)}
            blocks.append(Block(src, dst, n_src, n_dst, **arrays))
        history = self._history(first + 2 + self._block_stride * self.n_hops, pool) if self._has_history else None
        copies = self._copies(first + self._stride - N_COPIES, pool) if self._has_copies else None
        batch = SampledBatch(head[0], head[1], input_ids, head[2], tuple(blocks), history, copies)
        if copies is not None and not _are_nodes(copies, batch):
            raise CorruptionError(f"the copies of nodes in batch {number} are not of its nodes and blocks", self._file.path)
        return batch

    def _wide(self, number: int, pool: BufferPool) -> torch.Tensor:
        stored = self._file.read(number, pool.array)
        values = pool.tensor((len(stored),), torch.int64)
        values.numpy()[:] = stored
        return values

    def _copies(self, number: int, pool: BufferPool) -> NodeCopies:
        return NodeCopies(self._wide(number, pool), self._wide(number + 1, pool))

    def _history(self, number: int, pool: BufferPool) -> HistoryRows:
        step = self._file[number].tolist()
        found = [self._wide(number + 1 + i, pool) for i in range(len(HISTORY_ARRAYS))]
        if len(step) != 1 or len(found[0]) != len(found[1]) or len(found[2]) != len(found[3]):
            raise CorruptionError("positions and slots of a batch's history do not fit each other", self._file.path)
        return HistoryRows(step[0], *found)

    def _edge_array(self, number: int, name: str, n_edges: int, pool: BufferPool) -> torch.Tensor:
        stored = self._file.read(number, pool.array)
        dtype = torch.from_numpy(stored[:0]).dtype
        if len(stored) != n_edges or dtype not in EDGE_ARRAYS[name]:
            what = f"{len(stored)} entries of {dtype}, for {n_edges} edges"
            raise CorruptionError(f"a block's {name} has {what}", self._file.path)
        values = pool.tensor((n_edges,), dtype)
        values.numpy()[:] = stored
        return values

    def forget(self) -> None:
        """Drop the ids kept in memory; may be called again."""
        if self._kept is not None:
            self._kept.drop()

    def remove(self) -> None:
        self.forget()
        self._file.remove()
