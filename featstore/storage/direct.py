"""Direct I/O: files that are written or read once bypass the page cache, which saves its pages and the time to copy."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore._core.io import direct_mode
from featstore.storage.calls import naming, pread_into, pwrite_all
from featstore.storage.layout import PAGE_BYTES

__all__ = ["DirectWriter", "pread_direct", "set_direct"]

Uint8s = npt.NDArray[np.uint8]


def set_direct(fd: int, on: bool) -> bool:
    """Switch direct I/O of a descriptor on or off; return whether it is on. It stays off if the file system lacks it."""
    if on:
        return direct_mode(fd).startswith("direct")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


class DirectWriter:
    """Append bytes to a file, in whole pages out of two buffers: one is written while the other is filled. One owner thread.

    The caller closes ``fd`` after :meth:`finish` or :meth:`abort`. Each buffer has ``n_bytes``, a multiple of a page, which the
    caller counts in the budget. The first byte goes to ``offset``, a multiple of a page; the file has nothing behind it.
    ``on_pages`` gets all pages in their order, before they are written. If the file system refuses direct I/O, when it is
    switched on or at a write, the same bytes go through the page cache.
    """

    def __init__(
        self, fd: int, path: str, n_bytes: int, offset: int = 0, on_pages: Callable[[Uint8s], None] = lambda pages: None
    ) -> None:
        if n_bytes < PAGE_BYTES or n_bytes % PAGE_BYTES:
            raise ValueError(f"buffers of {n_bytes} bytes are not of whole pages")
        self._fd = fd
        self._path = path
        self._on_pages = on_pages
        self._filling: Uint8s
        self._other: Uint8s
        self._filling, self._other = (np.frombuffer(Arena(n_bytes), np.uint8) for _ in range(2))
        self._n_filled = 0
        self.offset = offset  # file offset of the buffer that is being filled
        self._pending: Future[None] | None = None
        with naming(path):
            self._is_direct = set_direct(fd, True)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="featstore-write")
        # Start the thread while there is nothing to write: a thread that Ctrl-C hid from :meth:`abort` would go on writing.
        self._worker.submit(int).result()

    @property
    def tail(self) -> Uint8s:
        """Bytes appended behind :attr:`offset`; a view that is valid until the next append."""
        return self._filling[: self._n_filled]

    def append(self, data: memoryview | bytes | Uint8s) -> None:
        """Append bytes; OSError if a full buffer could not be written."""
        source = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        done = 0
        while done < len(source):
            n = min(len(source) - done, len(self._filling) - self._n_filled)
            self._filling[self._n_filled : self._n_filled + n] = source[done : done + n]
            self._n_filled += n
            done += n
            if self._n_filled == len(self._filling):
                self._write_behind(self._n_filled)

    def flush(self) -> None:
        """Write the whole pages of the appended bytes, and wait for the writes; raises OSError."""
        whole = self._n_filled // PAGE_BYTES * PAGE_BYTES
        if whole:
            tail = self.tail[whole:].copy()
            self._write_behind(whole)
            self._filling[: len(tail)] = tail
            self._n_filled = len(tail)
        self._wait()

    def _write_behind(self, n_bytes: int) -> None:
        pages = self._filling[:n_bytes]
        self._on_pages(pages)
        self._wait()
        self._pending = self._worker.submit(self._write, pages, self.offset)
        self._filling, self._other = self._other, self._filling
        self.offset += n_bytes
        self._n_filled = 0

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                del pending  # it has the error, whose traceback has this frame: a cycle, which would keep all that frames hold

    def _write(self, data: Uint8s, offset: int) -> None:
        try:
            pwrite_all(self._fd, data.data, offset, self._path)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._is_direct = set_direct(self._fd, False)  # coarser pages than ours, or a short write
            pwrite_all(self._fd, data.data, offset, self._path)

    def finish(self) -> None:
        """Write the remaining bytes; the file then ends with the last appended byte, and direct I/O is off."""
        size = self.offset + self._n_filled
        padded = -(-self._n_filled // PAGE_BYTES) * PAGE_BYTES
        self._filling[self._n_filled : padded] = 0
        self._wait()
        if padded:
            self._on_pages(self._filling[:padded])
            self._write(self._filling[:padded], self.offset)
        self._worker.shutdown()
        if padded != self._n_filled:
            with naming(self._path):
                os.ftruncate(self._fd, size)
        set_direct(self._fd, False)

    def abort(self) -> None:
        """Wait for a write under way, and ignore its result; may be called again."""
        self._worker.shutdown()
        self._pending = None


def pread_direct(
    fd: int, n_bytes: int, offset: int, path: str, array: Callable[..., npt.NDArray[np.uint8]] = np.empty
) -> memoryview:
    """Read bytes of a descriptor whose direct I/O is on; switch direct I/O off if the drive needs coarser pages.

    ``array(n, dtype)`` allocates the memory: up to three pages more than ``n_bytes``. Raises as :func:`~.calls.pread_into`.
    """
    first = offset // PAGE_BYTES * PAGE_BYTES
    length = -(-(offset + n_bytes - first) // PAGE_BYTES) * PAGE_BYTES
    memory = array(length + PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES
    view = memory[begin : begin + length].data
    needed = offset + n_bytes - first
    try:
        pread_into(fd, view, first, path, needed, PAGE_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise
        set_direct(fd, False)
        pread_into(fd, view, first, path, needed, PAGE_BYTES)
    return view[offset - first : needed]
