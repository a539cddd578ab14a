"""Pooled output buffers: a fresh large tensor costs more in page faults than the copy that fills it."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.buffers import Block, Lease, populate
from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError, ClosedError
from featstore.gather.pinned import PinnedBlock

__all__ = [
    "HOLDER",
    "SMALL_BYTES",
    "BufferPool",
    "as_bytes",
    "block_bytes",
    "carve",
    "empty_tensor",
    "memory_errors",
    "take_pages",
    "taking_pages",
]

HOLDER = "batch buffers"
SMALL_BYTES = 64 << 10  # below this malloc is as good
# What malloc keeps of freed arrays, an arena a thread, is in no budget: where little of it is left, it goes back to the system.
HEAP_PART, HEAP_S = 16, 0.25  # of the budget, one part of so many; seconds between two times, each of which takes milliseconds
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep little
LEAST_TAKEN = 64 << 20  # less is filled before a thread has begun
POPULATE_BYTES = 8 << 20  # at once: the kernel holds a lock of the whole address space meanwhile


def take_pages(memory: npt.NDArray[np.uint8], go_on: Callable[[], bool] = lambda: True) -> bool:
    """Take the pages of ``memory``, shape (n,), from the system now, the last ones first, until ``go_on()`` is false.

    What is in them stays. Fresh pages can cost far more than filling them, most of all in a virtual machine, whose host may have
    to find them first. Returns False where it stopped early, or where the kernel cannot (before Linux 5.14): pages then come as
    they are touched.
    """
    pieces = reversed(range(0, len(memory), POPULATE_BYTES))
    return all(go_on() and populate(memory[first : first + POPULATE_BYTES]) for first in pieces)


@contextmanager
def taking_pages(memory: npt.NDArray[np.uint8]) -> Iterator[None]:
    """Take the pages of ``memory`` by a thread, beside whoever fills it from its beginning on; see :func:`take_pages`."""
    if len(memory) < LEAST_TAKEN:
        yield
        return
    is_over = threading.Event()
    taken = (memory, lambda: not is_over.is_set())
    thread = threading.Thread(target=take_pages, args=taken, name="featstore-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def block_bytes(n_bytes: int) -> int:
    """Round up to the bytes of a block: up to an eighth of a power of two, whole pages, so that similar ones share."""
    step = max(4096, 1 << max(0, n_bytes.bit_length() - 4))
    return -(-n_bytes // step) * step


def as_bytes(rows: torch.Tensor, row_bytes: int) -> npt.NDArray[np.uint8]:
    """View a contiguous CPU tensor as rows of bytes, shape (n, row_bytes)."""
    if rows.dtype != torch.bfloat16 and rows.numel() != 1:
        return rows.numpy().reshape(-1).view(np.uint8).reshape(-1, row_bytes)  # for a single row, half the time
    flat = rows.as_strided((rows.numel(),), (1,))  # a single element may have any stride, which reshape() keeps
    return np.asarray(flat.view(torch.uint8).numpy()).reshape(-1, row_bytes)


@cache
def _kind(dtype: torch.dtype) -> tuple[np.dtype[Any], bool]:
    """Find the NumPy dtype of which torch makes ``dtype``; for one that NumPy lacks, integers as wide, and True."""
    none = torch.empty(0, dtype=dtype, device="cpu")
    try:
        return none.numpy().dtype, False
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}"), True


def _tensor_of(array: npt.NDArray[Any], dtype: torch.dtype, is_other: bool) -> torch.Tensor:
    if not array.size:  # whose strides in NumPy are no tensor's
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if is_other else tensor


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised contiguous CPU tensor in ordinary memory.

    MemoryError where there is none; of torch's own allocator it would be a RuntimeError.
    """
    kind, is_other = _kind(dtype)
    return _tensor_of(np.empty(shape, kind), dtype, is_other)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch's operations have no memory for a CPU tensor, for which torch raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def carve(memory: npt.NDArray[np.uint8]) -> Callable[[int, npt.DTypeLike], npt.NDArray[Any]]:
    """Make ``array(n, dtype)``, which cuts arrays off ``memory``, each at a multiple of 8 bytes; ValueError where it ends."""
    left = memory

    def array(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal left
        n_bytes = n * np.dtype(dtype).itemsize
        if n_bytes > len(left):
            raise ValueError(f"{n_bytes} bytes of {len(left)} that are left")
        cut, left = left[:n_bytes].view(dtype), left[-(-n_bytes // 8) * 8 :]
        return cut

    return array


class BufferPool:
    """Memory for the tensors that the library hands out. Thread-safe.

    A tensor's memory comes back when the tensor and all its views, NumPy arrays included, have died. Handed-out and pooled
    blocks count in the budget, under the name ``HOLDER``; tensors under 64 KiB are ordinary memory and do not. Pooled blocks
    that nobody uses are on loan: whatever else reserves gets their memory. ``reclaim`` is called where the budget is short, to
    give back what others hold and do not use; ``owner`` is what ClosedError says is closed.
    """

    def __init__(self, budget: Budget, reclaim: Callable[[], None] | None = None, owner: str = "the dataset") -> None:
        self.budget = budget
        self._owner = owner
        self._reclaim = reclaim
        self._closed = False
        self._copied = threading.local()  # .to: the CUDA device that a thread's memory is copied to
        self._start()
        self._loan = budget.lend(self._idle_bytes, self._give_back, cost=0, of=HOLDER)  # first of all: nothing is lost

    @contextmanager
    def copied_to(self, device: torch.device) -> Iterator[None]:
        """Lock the pages of what this thread takes meanwhile where it is to be copied to a CUDA ``device``, one with a number.

        Copies from such memory run beside computing, and may still read it when the call that began them has returned: whoever
        takes it keeps it until they are complete, since its block may then be another tensor's. All other memory is ordinary. A
        block is locked once, and stays so while it is pooled; bytes are counted in the budget as those of any block.
        """
        before = getattr(self._copied, "to", None)
        self._copied.to = device if device.type == "cuda" else None
        try:
            yield
        finally:
            self._copied.to = before

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._held: dict[int, Reservation] = {}
        # Blocks come back from destructors, which may run inside any of our own calls: only this queue is safe there.
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._trimmed = 0.0

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            # Idle blocks are dropped; tensors of the parent's are pages that the child shares until it writes to them.
            held = list(self._held.values())
            self._start()
            for reservation in held:
                reservation.release()

    def lease(self, n_bytes: int) -> Lease:
        """Borrow ``n_bytes`` of writable memory, contents undefined, at least 4 KiB-aligned.

        Raises
        ------
        BudgetError
            Neither the pool nor the budget has them.
        """
        self._leave_parent()
        size, device = block_bytes(n_bytes), getattr(self._copied, "to", None)
        block = self._idle_block(size, device is not None)
        if block is None:
            block = self._new_block(size, device)
        self._trim_heap()
        return Lease(block, n_bytes, self._returned.put)

    def _trim_heap(self) -> None:
        """Have malloc give back what it keeps, now and then, while the budget has little left."""
        now = time.monotonic()
        if now - self._trimmed < HEAP_S or _malloc_trim is None:
            return
        self._trimmed = now
        if self.budget.available < self.budget.total // HEAP_PART:
            _malloc_trim(0)

    def _idle_block(self, size: int, pinned: bool) -> Block | None:
        """Take an idle block of ``size`` bytes, or a little more, of those that are pinned or of the others."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._owner} is closed")
            self._collect()
            fitting = [block for block in self._idle if size <= block.nbytes <= size + size // 4]
            alike = [block for block in fitting if isinstance(block, PinnedBlock) == pinned]
            if not alike:
                return None
            block = min(alike, key=lambda candidate: candidate.nbytes)
            self._idle.remove(block)
            return block

    def _new_block(self, size: int, device: torch.device | None) -> Block:
        reservation = self.budget.try_reserve(HOLDER, size)
        while reservation is None and self._drop_one():
            reservation = self.budget.try_reserve(HOLDER, size)
        if reservation is None:
            if self._reclaim is not None:
                self._reclaim()
            # Not under the lock: loans may be taken back, which waits for gathers. It raises, naming who holds what.
            reservation = self.budget.reserve(HOLDER, size)
        with reservation.kept():
            block = Block(size) if device is None else PinnedBlock(size, device)
            with self._lock:
                if self._closed:
                    raise ClosedError(f"{self._owner} is closed")
                self._held[id(block)] = reservation
        return block

    def _drop_one(self) -> int:
        """Give an idle block back; return its bytes, 0 where there was none."""
        with self._lock:
            self._collect()
            if not self._idle:
                return 0
            block = self._idle.pop(0)
            self._drop(block)
            return int(block.nbytes)

    def _drop(self, block: Block) -> None:
        self._held.pop(id(block)).release()

    def _collect(self) -> None:
        """Make blocks that came back idle ones. Adds to the list alone, so it needs no lock."""
        while True:
            try:
                block = self._returned.get_nowait()
            except queue.Empty:
                return
            if not self._idle:
                self._loan.renew()
            self._idle.append(block)

    def _idle_bytes(self) -> int:
        self._leave_parent()
        self._collect()
        return sum(block.nbytes for block in self._idle.copy())

    def _give_back(self, n_bytes: int) -> int:
        freed = 0
        while freed < n_bytes and (dropped := self._drop_one()):
            freed += dropped
        return freed

    def prepare(self, n_bytes: int, n_blocks: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Have ``n_blocks`` idle blocks of ``n_bytes``, their pages taken, as far as half of what the budget has left suffices.

        Stops where ``go_on()`` is false.
        """
        held = []
        most = self.budget.available // 2
        try:
            for k in range(n_blocks):
                if (k + 1) * block_bytes(n_bytes) > most or not go_on():
                    break
                held.append(self.lease(n_bytes))
                if not take_pages(np.frombuffer(held[-1], np.uint8), go_on):
                    break
        except (BudgetError, ClosedError):  # others were quicker, and their batches come first; or nobody wants them any more
            return

    def trim(self) -> None:
        """Give idle blocks back to the system and to the budget, and to the system what malloc keeps."""
        self._leave_parent()
        with self._lock:
            self._collect()
            while self._idle:
                self._drop(self._idle.pop())
        if _malloc_trim is not None:
            _malloc_trim(0)

    def array(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Make an uninitialised C-contiguous array in pooled memory."""
        n_bytes = (shape if isinstance(shape, int) else math.prod(shape)) * np.dtype(dtype).itemsize
        if n_bytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self.lease(n_bytes))

    def tensor(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialised contiguous CPU tensor in pooled memory; after a BudgetError nothing is held."""
        kind, is_other = _kind(dtype)
        return _tensor_of(self.array(shape, kind), dtype, is_other)

    def rows(
        self, n: int, row_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, npt.NDArray[np.uint8]]:
        """Make a tensor of ``shape`` as :meth:`tensor` does; return it and its bytes, shape (n, row_bytes)."""
        kind, is_other = _kind(dtype)
        n_bytes = n * row_bytes
        memory = np.ndarray((n, row_bytes), np.uint8, self.lease(n_bytes) if n_bytes >= SMALL_BYTES else None)
        return _tensor_of(np.ndarray(shape, kind, memory), dtype, is_other), memory

    def close(self) -> None:
        """Give idle blocks back; blocks in use follow their tensors, and leave the budget now."""
        self.trim()
        self._loan.end()
        with self._lock:
            self._closed = True
            for reservation in self._held.values():
                reservation.release()
            self._held.clear()
            self._returned = queue.SimpleQueue()  # the old one, and what comes back to it, goes with the last block in use
