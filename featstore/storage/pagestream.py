"""A row file's pages in a given order as one continuous, verified stream, read ahead by threads of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore._core.stream import Stream
from featstore.distinct import distinct
from featstore.storage.calls import close_quietly
from featstore.storage.layout import PAGE_BYTES, RowLayout

__all__ = [
    "MOST_WINDOW_BYTES",
    "PIECE_BYTES",
    "Arenas",
    "PageFile",
    "PageStream",
    "PagedRows",
    "arena_bytes",
    "file_of",
    "least_window",
    "rows_in_file",
]

Int64s = npt.NDArray[np.int64]

PIECE_BYTES = 1 << 20
MOST_PIECES = 32  # pieces read ahead; a drive reaches its bandwidth with about 16
MOST_WINDOW_BYTES = MOST_PIECES * PIECE_BYTES
MOST_SHORT = 64  # pieces read ahead if runs are short; a drive reaches its operations a second with about as many
_STEP = 64  # pieces whose pages of sums are loaded at once
_SUMS = 511


def least_window() -> int:
    return 2 * PAGE_BYTES


def _buffers(window_bytes: int, run_bytes: int = PIECE_BYTES) -> tuple[int, int]:
    """Choose the number of buffers of a window, and the bytes of each, for runs of about ``run_bytes``."""
    piece = PIECE_BYTES
    while piece > PAGE_BYTES and piece >= 2 * run_bytes:
        piece //= 2
    n_buffers = min(MOST_PIECES if piece == PIECE_BYTES else MOST_SHORT, max(2, window_bytes // piece))
    return n_buffers, min(piece, window_bytes // n_buffers // PAGE_BYTES * PAGE_BYTES)


def arena_bytes(window_bytes: int) -> int:
    """Count the bytes of a stream's buffers."""
    n_buffers, buffer_bytes = _buffers(window_bytes)
    return n_buffers * buffer_bytes


class Arenas:
    """Memory that streams and packers reuse one after the other, because fresh pages can cost more than the work on them.

    At most ``most_bytes``, which the caller has reserved, are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: list[Arena] = []

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._kept)

    def of(self, *sizes: int) -> list[Arena] | list[None]:
        """Provide arenas of these sizes, and keep them until other sizes are requested; Nones if they exceed ``most_bytes``."""
        if [arena.nbytes for arena in self._kept] != list(sizes):
            self.drop()
            if sum(sizes) > self._most_bytes:
                return [None for _ in sizes]
            self._kept = [Arena(n_bytes, forked=False) for n_bytes in sizes]
        return list(self._kept)

    def keep(self, most_bytes: int) -> None:
        """Keep at most ``most_bytes`` from now on."""
        if self.nbytes > most_bytes:
            self.drop()
        self._most_bytes = most_bytes

    def drop(self) -> None:
        self._kept = []


def _merge(runs: Int64s) -> tuple[Int64s, Int64s]:
    """Join runs that follow each other; return the first page and the end (last page + 1) of each."""
    runs = runs[runs[:, 1] > 0]
    first, end = runs[:, 0], runs[:, 0] + runs[:, 1]
    if not len(runs):
        return first, end
    begins = np.concatenate([[True], first[1:] != end[:-1]])
    return first[begins], end[np.concatenate([begins[1:], [True]])]


def _cut(first: Int64s, end: Int64s, most: int) -> tuple[Int64s, npt.NDArray[np.uint32], Int64s]:
    """Cut runs of pages into pieces of up to ``most`` pages; also return the run that each piece is of."""
    n = -(-(end - first) // most)
    within = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
    pages = np.repeat(first, n) + within * most
    counts = np.minimum(np.repeat(end, n) - pages, most)
    return pages, counts.astype(np.uint32), np.repeat(np.arange(len(n)), n)


Place = Callable[[Int64s, Int64s], tuple[Int64s, Int64s, npt.NDArray[np.uint32], Int64s]]


class PageFile(Protocol):
    """A file as a stream needs it: the way it is opened and read, and the checksums of its pages."""

    @property
    def path(self) -> str: ...
    @property
    def stream_threads(self) -> int: ...
    @property
    def is_direct(self) -> bool: ...
    @property
    def verifies(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def n_sums_pages(self) -> int: ...
    @property
    def holds_sums(self) -> bool: ...
    def duplicate(self) -> int: ...
    def with_backend(self, make: Callable[[str], Stream]) -> Stream: ...
    def sums_pages(self, first: int, n: int) -> Sequence[npt.NDArray[np.uint64]]: ...
    def count(self, rows: int, reads: int, n_bytes: int) -> object: ...


class PageStream:
    """Pages of a file, in large reads that go on while the consumer works; a context manager, for one consumer.

    Leaving the stream waits for reads under way. Pages are verified as in other reads of the file. The file, which stays open,
    counts them when the stream is closed. ``runs``, int64 ``[n, 2]``, are the first page and the number of pages of each run,
    in the order of delivery; page 0 is the file's header. ``window_bytes``, at least :func:`least_window`, are the buffers for
    reading ahead. The caller has reserved them, and may pass them as an ``arena`` of :func:`arena_bytes`. Pages may be those
    of several ``files`` in one order, whose checksums are numbered through all of them: ``place(first, end)`` divides runs of
    pages among them. It returns the first page and the page behind the last of each piece, the number of its file, and its first
    page there.
    """

    _threads: Sequence[threading.Thread] = ()

    def __init__(
        self,
        file: PageFile,
        runs: Int64s,
        window_bytes: int,
        arena: Arena | None = None,
        files: Sequence[PageFile] = (),
        place: Place | None = None,
    ) -> None:
        self.file = file
        n_buffers, buffer_bytes = _buffers(window_bytes)
        if arena is None and len(runs):  # short runs would leave most of a large buffer empty
            n_buffers, buffer_bytes = _buffers(window_bytes, int(runs[:, 1].sum()) * PAGE_BYTES // len(runs))
        first, end = _merge(runs)
        if place is not None:
            first, end, file_of, at = place(first, end)
            shorter = _buffers(window_bytes, int((end - first).sum()) * PAGE_BYTES // max(1, len(first)))
            if arena is None or shorter[0] * shorter[1] <= arena.nbytes:
                n_buffers, buffer_bytes = shorter
        pages, self._counts, run = _cut(first, end, buffer_bytes // PAGE_BYTES)
        self._pages = pages.astype(np.uint64)
        self._first_sums = pages // _SUMS  # of each piece
        self._last_sums = (pages + self._counts.astype(np.int64) - 1) // _SUMS
        self._ends = np.cumsum(self._counts, dtype=np.int64)
        self._n_buffers = n_buffers
        self._fed = 0
        # Pages of sums in use, by groups: the end of the pieces that need a group, and its pages by number.
        self._groups: deque[tuple[int, set[int]]] = deque()
        self._in_use: dict[int, npt.NDArray[np.uint64]] = {}
        self.core = file.with_backend(
            lambda backend: Stream(
                file.duplicate(),
                file.is_direct,
                file.path,
                backend,
                self._pages,
                self._counts,
                n_buffers,
                buffer_bytes,
                arena,
            )
        )
        self._makes_ready = file.verifies
        if place is not None:
            self._divide(files, file.verifies, file_of[run], (at - first)[run] + pages)
        if self._makes_ready:
            if place is None:
                self.core.use_sums(file.seed, file.n_sums_pages)
            if file.holds_sums:
                self._hold_sums()
                self._makes_ready = False
        # A ring has one thread, even if the kernel has refused other rings since.
        n_threads = 1 if self.core.backend == "io_uring" else file.stream_threads
        started = list[threading.Thread]()
        self._threads = started
        try:
            for k in range(n_threads):
                thread = threading.Thread(target=self.core.read, name=f"featstore-stream-{k}", daemon=True)
                thread.start()
                started.append(thread)
        except BaseException:
            self.close()
            raise

    def _divide(self, files: Sequence[PageFile], verifies: bool, file_of: npt.NDArray[np.uint32], at: Int64s) -> None:
        """Read each piece from page ``at`` on of its file."""
        n_sums = [each.n_sums_pages for each in files]
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(n_sums, dtype=np.int64)])[file_of]
        self._first_sums = before + at // _SUMS
        self._last_sums = before + (at + self._counts.astype(np.int64) - 1) // _SUMS
        seeds = [each.seed for each in files] if verifies else None
        fds: list[int] = []
        try:
            for each in files[1:]:
                fds.append(each.duplicate())
            self.core.over(fds, [each.path for each in files], at.astype(np.uint64), file_of, seeds, n_sums)
        except BaseException:
            for fd in fds:
                close_quietly(fd)
            self.core.close()
            raise

    @property
    def n_pieces(self) -> int:
        """Number of pieces, each read at once."""
        return len(self._pages)

    @property
    def total_bytes(self) -> int:
        return int(self._ends[-1]) * PAGE_BYTES if len(self._ends) else 0

    def pieces_before(self, n_pages: int) -> int:
        """Count the pieces that hold the stream's first ``n_pages`` pages."""
        return int(np.searchsorted(self._ends, n_pages)) + 1 if n_pages else 0

    def feed(self, n_pieces: int) -> None:
        """Allow the first ``n_pieces`` to be read, and as many more as fit the window."""
        wanted = min(self.n_pieces, n_pieces + self._n_buffers)
        while self._fed < wanted:
            end = min(self._fed + _STEP, self.n_pieces)
            if self._makes_ready:
                self._forget()
                self._ready_sums(self._fed, end)
            self.core.allow(end)
            self._fed = end

    def _hold_sums(self) -> None:
        """Load the checksums of all pieces at once; used if the file holds its checksums in memory."""
        if not len(self._pages):
            return
        first, last = int(self._first_sums.min()), int(self._last_sums.max())
        for pages in self.file.sums_pages(first, last + 1 - first):
            self._in_use[first] = pages
            self.core.set_sums_pages(first, pages)
            first += len(pages)

    def _ready_sums(self, begin: int, end: int) -> None:
        first, last = self._first_sums[begin:end], self._last_sums[begin:end]
        numbers = distinct(np.concatenate([np.arange(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]))
        # A page that is in use stays the one it is: a thread may be looking at it.
        missing = np.array([number for number in numbers.tolist() if number not in self._in_use], np.int64)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1) if len(missing) else ():
            first_of_run = int(run[0])
            for pages in self.file.sums_pages(first_of_run, len(run)):
                self.core.set_sums_pages(first_of_run, pages)
                self._in_use |= dict.fromkeys(range(first_of_run, first_of_run + len(pages)), pages)
                first_of_run += len(pages)
        self._groups.append((end, set(numbers.tolist())))

    def _forget(self) -> None:
        while self._groups and self._groups[0][0] <= self.core.consumed:
            for number in self._groups.popleft()[1]:
                if not any(number in group for _, group in self._groups):
                    self.core.drop_sums_page(number)
                    del self._in_use[number]

    def close(self) -> None:
        """Wait for reads under way and free the buffers; may be called again."""
        self.core.stop()
        for thread in self._threads:
            thread.join()
        self.core.close()
        if self._threads:
            self._threads = ()
            self.file.count(0, self.core.n_reads, self.core.read_bytes)

    def __del__(self) -> None:
        if self._threads:  # Ctrl-C came before the block that closes it: the threads end, and with them what they hold
            self.core.stop()

    def __enter__(self) -> PageStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PagedRows(Protocol):
    """Rows whose pages can be read in sequence, as packing does: row files, and sources with the same layout.

    A source whose rows have other numbers in the file that it reads has that ``file``, and ``in_file(rows)`` finds them there;
    see :func:`rows_in_file`.
    """

    @property
    def n_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def layout(self) -> RowLayout: ...
    @property
    def fingerprint(self) -> str: ...

    def stream(self, runs: Int64s, window_bytes: int, arena: Arena | None = None) -> PageStream:
        """Open a stream of the pages of ``runs`` (see :class:`PageStream`)."""
        ...


def rows_in_file(base: PagedRows, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Find the numbers that rows have in the layout of the file that holds them; of ascending ones they ascend."""
    found: npt.NDArray[Any] = base.in_file(rows) if hasattr(base, "in_file") else rows
    return found


def file_of(base: PagedRows) -> PagedRows:
    """Get the file that holds the rows, with as many rows as its layout has."""
    found: PagedRows = base.file if hasattr(base, "in_file") and hasattr(base, "file") else base
    return found
