"""Pooled output buffers: a fresh large tensor costs more in page faults than the copy that fills it."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.buffers import Arena, Borrowed, populate
from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError, ClosedError
from featstore.gather.pinned import PinnedArena

__all__ = [
    "HOLDER",
    "SMALL_BYTES",
    "BufferPool",
    "as_bytes",
    "carve",
    "empty_tensor",
    "huge_array",
    "memory_errors",
    "private_array",
    "size_class",
    "take_pages",
    "taking_pages",
    "working_beside",
]

HOLDER = "batch buffers"
SMALL_BYTES = 64 << 10  # below this malloc is as good
# malloc keeps freed arrays, in an arena per thread, and no budget counts them. If little of the budget is left, the pool trims
# the heap: below this fraction of the budget, and after this many seconds at least, since each trim takes milliseconds.
HEAP_PART, HEAP_S = 16, 0.25
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep little
LEAST_TAKEN = 64 << 20  # less memory is filled before a thread has begun
PAGE_BYTES = 4096
POPULATE_BYTES = 8 << 20  # per call: the kernel locks the whole address space meanwhile


def huge_array(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate ``n_bytes`` of zeroed private memory, in huge pages where the kernel has them; freed with the last view of it.

    Pages are taken as they are touched; never more than ``n_bytes`` rounded up to 4 KiB.
    """
    if n_bytes < PAGE_BYTES:
        return np.zeros(n_bytes, np.uint8)
    return np.frombuffer(Arena(-(-n_bytes // PAGE_BYTES) * PAGE_BYTES), np.uint8)[:n_bytes]


def private_array(name: str, n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocate an array by :func:`huge_array`, in the form of :data:`~featstore.gather.sharedmemory.Allocate`."""
    return huge_array(n * np.dtype(dtype).itemsize).view(dtype)


def take_pages(memory: npt.NDArray[np.uint8], go_on: Callable[[], bool] = lambda: True) -> bool:
    """Take the pages of ``memory``, shape (n,), from the system now, the last ones first, until ``go_on()`` is false.

    The pages' content stays. Fresh pages can cost far more than filling them, most of all in a virtual machine, whose host may
    have to find them first. Returns False if ``go_on()`` stopped it, or if the kernel cannot (before Linux 5.14): pages are then
    taken as they are touched.
    """
    pieces = reversed(range(0, len(memory), POPULATE_BYTES))
    return all(go_on() and populate(memory[first : first + POPULATE_BYTES]) for first in pieces)


@contextmanager
def working_beside(work: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Run ``work(go_on)`` in a thread beside the ``with`` block, until it ends or, after the block, ``go_on()`` is false."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(lambda: not is_over.is_set(),), name="featstore-pages", daemon=True)
    try:
        thread.start()
        yield
    finally:
        is_over.set()
        if thread.is_alive():  # Ctrl-C may have come before it began
            thread.join()


def taking_pages(memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
    """Take the pages of ``memory`` in a thread while the ``with`` block fills it from the beginning; see :func:`take_pages`."""
    return nullcontext() if len(memory) < LEAST_TAKEN else working_beside(partial(take_pages, memory))


def size_class(n_bytes: int) -> int:
    """Round up to a size class: a multiple of an eighth of a power of two, in whole pages, so that similar sizes share arenas."""
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
    """Find the NumPy dtype for ``dtype`` and False; if NumPy has none, integers of the same width and True."""
    none = torch.empty(0, dtype=dtype, device="cpu")
    try:
        return none.numpy().dtype, False
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}"), True


def _tensor_of(array: npt.NDArray[Any], dtype: torch.dtype, is_other: bool) -> torch.Tensor:
    if not array.size:  # NumPy's strides of an empty array do not suit a tensor
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if is_other else tensor


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised contiguous CPU tensor in ordinary memory.

    MemoryError if there is no memory; torch's own allocator would raise RuntimeError.
    """
    kind, is_other = _kind(dtype)
    return _tensor_of(np.empty(shape, kind), dtype, is_other)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError in place of torch's RuntimeError for a CPU tensor without memory."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def carve(memory: npt.NDArray[np.uint8]) -> Callable[[int, npt.DTypeLike], npt.NDArray[Any]]:
    """Make ``array(n, dtype)``, which cuts arrays off ``memory``, at multiples of 8 bytes; it raises ValueError at the end."""
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
    arenas count in the budget, under the name ``HOLDER``. Tensors under 64 KiB are ordinary memory and do not count. Idle arenas
    are on loan: other reservations get their memory. The pool calls ``reclaim`` if the budget is short, so that other holders
    give back unused memory. ``owner`` names the closed object in ClosedError.
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
        """Give this thread page-locked memory inside the ``with`` block if ``device`` is a CUDA device, given with its number.

        Copies from page-locked memory run beside computing, and may still read the memory after the call that began them. The
        borrower therefore keeps the memory until they are complete: afterwards its arena may serve another tensor. An arena is
        locked once, stays locked while it is pooled, and counts in the budget as any arena. All other memory is ordinary.
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
        self._idle: list[Arena] = []
        self._held: dict[int, Reservation] = {}
        # Arenas come back from destructors, which may run inside any of our own calls: only this queue is safe there.
        self._returned: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        self._trimmed = 0.0

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            # Idle arenas are dropped; the child shares the pages of the parent's tensors until it writes to them.
            held = list(self._held.values())
            self._start()
            for reservation in held:
                reservation.release()

    def borrow(self, n_bytes: int) -> Borrowed:
        """Borrow ``n_bytes`` of writable memory, contents undefined, at least 4 KiB-aligned.

        Raises
        ------
        BudgetError
            Neither the pool nor the budget has ``n_bytes``.
        """
        self._leave_parent()
        size, device = size_class(n_bytes), getattr(self._copied, "to", None)
        arena = self._idle_arena(size, device is not None)
        if arena is None:
            arena = self._new_arena(size, device)
        self._trim_heap()
        return Borrowed(arena, n_bytes, self._returned.put)

    def _trim_heap(self) -> None:
        """Let malloc give freed memory back to the system, at most every ``HEAP_S``, if little of the budget is left."""
        now = time.monotonic()
        if now - self._trimmed < HEAP_S or _malloc_trim is None:
            return
        self._trimmed = now
        if self.budget.available < self.budget.total // HEAP_PART:
            _malloc_trim(0)

    def _idle_arena(self, size: int, pinned: bool) -> Arena | None:
        """Take the smallest idle arena of ``size`` to 1.25 ``size`` bytes, page-locked if ``pinned``, ordinary otherwise."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._owner} is closed")
            self._collect()
            fitting = [arena for arena in self._idle if size <= arena.nbytes <= size + size // 4]
            alike = [arena for arena in fitting if isinstance(arena, PinnedArena) == pinned]
            if not alike:
                return None
            arena = min(alike, key=lambda candidate: candidate.nbytes)
            self._idle.remove(arena)
            return arena

    def _new_arena(self, size: int, device: torch.device | None) -> Arena:
        reservation = self.budget.try_reserve(HOLDER, size)
        while reservation is None and self._drop_one():
            reservation = self.budget.try_reserve(HOLDER, size)
        if reservation is None:
            if self._reclaim is not None:
                self._reclaim()
            # Not under the lock: taking loans back waits for gathers. If it fails, the error names the holders.
            reservation = self.budget.reserve(HOLDER, size)
        with reservation.kept():
            arena = Arena(size) if device is None else PinnedArena(size, device)
            with self._lock:
                if self._closed:
                    raise ClosedError(f"{self._owner} is closed")
                self._held[id(arena)] = reservation
        return arena

    def _drop_one(self) -> int:
        """Give an idle arena back; return its bytes, 0 if there was none."""
        with self._lock:
            self._collect()
            if not self._idle:
                return 0
            arena = self._idle.pop(0)
            self._drop(arena)
            return int(arena.nbytes)

    def _drop(self, arena: Arena) -> None:
        reservation = self._held.pop(id(arena), None)
        if reservation is not None:  # else the pool was closed meanwhile, and has released it
            reservation.release()

    def _collect(self) -> None:
        """Move returned arenas to the idle list. It only appends to the list, so it needs no lock."""
        while True:
            try:
                arena = self._returned.get_nowait()
            except queue.Empty:
                return
            if not self._idle:
                self._loan.renew()
            self._idle.append(arena)

    def _idle_bytes(self) -> int:
        self._leave_parent()
        self._collect()
        return sum(arena.nbytes for arena in self._idle.copy())

    def _give_back(self, n_bytes: int) -> int:
        freed = 0
        while freed < n_bytes and (dropped := self._drop_one()):
            freed += dropped
        return freed

    def prepare(self, n_bytes: int, n_arenas: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Prepare ``n_arenas`` idle arenas of ``n_bytes``, their pages taken, within half of the memory left in the budget.

        Stops if ``go_on()`` is false.
        """
        held = []
        most = self.budget.available // 2
        try:
            for k in range(n_arenas):
                if (k + 1) * size_class(n_bytes) > most or not go_on():
                    break
                held.append(self.borrow(n_bytes))
                if not take_pages(np.frombuffer(held[-1], np.uint8), go_on):
                    break
        except (BudgetError, ClosedError):  # batches took the memory, and come first; or the pool was closed
            return

    def trim(self) -> None:
        """Give idle arenas back to the system and the budget, and let malloc give back its freed memory."""
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
        return np.ndarray(shape, dtype, self.borrow(n_bytes))

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
        memory = np.ndarray((n, row_bytes), np.uint8, self.borrow(n_bytes) if n_bytes >= SMALL_BYTES else None)
        return _tensor_of(np.ndarray(shape, kind, memory), dtype, is_other), memory

    def close(self) -> None:
        """Give idle arenas back; arenas in use follow their tensors, and leave the budget now."""
        self.trim()
        self._loan.end()
        with self._lock:
            self._closed = True
            for reservation in self._held.values():
                reservation.release()
            self._held.clear()
            self._idle.clear()  # what came back since it was trimmed
            self._returned = queue.SimpleQueue()  # the old queue, and arenas returned to it, die with the last arena in use
