"""Row files: verified access to the rows of one file, by number, through a reader's queues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.buffers import Arena
from featstore._core.checksum import page_sums
from featstore._core.io import PAGE_BYTES, SUMS_PER_PAGE, Engine, File
from featstore.budget import Budget, Reservation
from featstore.distinct import distinct
from featstore.errors import ClosedError, CorruptionError
from featstore.storage.calls import close_quietly, duplicate_fd
from featstore.storage.layout import RowLayout
from featstore.storage.pagedsums import PagedSums, is_kept, pages_cached, pointer_bytes, table_bytes
from featstore.storage.pagestream import PageStream

__all__ = ["Queues", "ReadStats", "RowFile"]

T = TypeVar("T")

SCAN_BYTES = 4 << 20  # of one read when all pages are checked


@dataclass
class ReadStats:
    """Statistics of a file's reads: requested rows and their bytes, read operations and their bytes (checksum pages included).

    A stream of pages counts no rows, and is counted once it is closed. ``waited_s`` are the seconds that a gather waited for
    rows that are read ahead.
    """

    rows: int = 0
    reads: int = 0
    bytes_requested: int = 0
    bytes_read: int = 0
    waited_s: float = 0.0

    def add(self, other: ReadStats) -> None:
        self.rows += other.rows
        self.reads += other.reads
        self.bytes_requested += other.bytes_requested
        self.bytes_read += other.bytes_read
        self.waited_s += other.waited_s


class Queues(Protocol):
    """The reader of a row file as the file needs it: queues, the budget that pays for them, and the gaps to read over."""

    budget: Budget
    direct: bool  # whether reads bypass the page cache if the file system allows
    sums_divisor: int  # of the budget, for a large table of checksums

    @property
    def stream_threads(self) -> int: ...
    def with_backend(self, make: Callable[[str], T]) -> T: ...
    def engine(self, n_rows: int = 0) -> AbstractContextManager[Engine]: ...
    def gap_for(self, file: File, n_rows: int) -> int: ...
    def trim(self) -> None: ...


class RowFile:
    """Rows of one file, by number (a :class:`~featstore.gather.sources.RowSource`). Thread-safe.

    ``fingerprint`` identifies the rows. ``mode`` says whether reads are direct or buffered, and why. ``stats`` counts the reads
    so far.
    """

    in_order = False

    def __init__(
        self,
        reader: Queues,
        path: str | os.PathLike[str],
        layout: RowLayout,
        n_rows: int,
        seed: int,
        sums_seed: int,
        verify: str,
        n_bytes: int | None = None,
        fds: tuple[int, int] = (-1, -1),
        fingerprint: str = "",
    ) -> None:
        self._reader, self._sums_divisor = reader, reader.sums_divisor
        self.layout = layout
        self.n_rows = n_rows
        self.row_bytes = layout.row_bytes
        self.fingerprint = fingerprint
        self.seed = seed
        self._sums_seed = sums_seed
        self.stats = ReadStats()
        self._new_lock()
        self._users = 0
        self._is_closing = False
        self._pid = os.getpid()
        self._reservation: Reservation | None = None
        self._paged: PagedSums | None = None
        self._sums_pages: npt.NDArray[np.uint8] | None = None
        size = PAGE_BYTES + layout.data_bytes(n_rows) if n_bytes is None else n_bytes
        fd, self._sums_fd = fds
        try:
            geometry = layout.row_bytes, layout.group_rows, layout.group_bytes, n_rows, PAGE_BYTES, size
            self._file = File(path, *geometry, reader.direct, fd)
        except BaseException:
            self._drop_sums_fd()
            raise
        try:
            if verify != "off":
                self._load_sums(seed, sums_seed)
            self._drop_sums_fd()
            if verify == "open":
                self._scan()
                self._forget_sums()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        return str(self._file.path)

    @property
    def mode(self) -> str:
        """``"direct"`` or ``"buffered: …"`` with the reason."""
        return self._file.mode

    def with_backend(self, make: Callable[[str], T]) -> T:
        """Make a queue or stream with the reader's backend, see :meth:`~featstore.storage.reader.Reader.with_backend`."""
        return self._reader.with_backend(make)

    @property
    def stream_threads(self) -> int:
        return self._reader.stream_threads

    def stream(self, runs: npt.NDArray[np.int64], window_bytes: int, arena: Arena | None = None) -> PageStream:
        """Open runs of pages as one stream, see :class:`PageStream`."""
        return PageStream(self, runs, window_bytes, arena)

    @property
    def n_bytes(self) -> int:
        return self._file.size

    @property
    def gap_bytes(self) -> int:
        """Bytes of the largest gap that is read over; a default until the drive is measured."""
        return self._reader.gap_for(self._file, 0)

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self._file.direct

    @property
    def verifies(self) -> bool:
        """Whether every page that is read is checked."""
        return self._sums_pages is not None or self._paged is not None

    @property
    def holds_sums(self) -> bool:
        """Whether the table of checksums is in memory."""
        return self._sums_pages is not None

    @property
    def n_sums_pages(self) -> int:
        """Number of pages of the table of checksums."""
        return -(-(self._file.size // PAGE_BYTES) // SUMS_PER_PAGE)

    def sums_bytes(self, total: int) -> int:
        """Count the bytes held for the table of checksums under a budget of ``total`` bytes."""
        if self._is_closing or not self.verifies:
            return 0
        return table_bytes(self.n_sums_pages * PAGE_BYTES, self.row_bytes, total, self._sums_divisor)

    def duplicate(self) -> int:
        """Duplicate the descriptor of the open file; the caller closes the duplicate."""
        with self.in_use():
            return duplicate_fd(self._file.fd_number, self.path)

    def sums_pages(self, first: int, n: int) -> list[npt.NDArray[np.uint64]]:
        """Get checked pages of the table of checksums, uint64 [n, 512] in one or more arrays; from memory if it is held."""
        with self.in_use():
            if self._sums_pages is not None:
                return [self._sums_pages[first : first + n].view(np.uint64)]
            assert self._paged is not None, "nothing is verified"
            pages = self._paged.table_pages(first, n)
            self.count(0, 1, pages.nbytes)
        for number in range(n):
            self._check_sums_page(first + number, pages[number], self._sums_seed)
        return [pages.view(np.uint64)]

    def _load_sums(self, seed: int, sums_seed: int) -> None:
        n_pages = self.n_sums_pages
        fd, self._sums_fd = self._sums_fd, -1
        table = File(f"{self.path}.sums", PAGE_BYTES, 1, PAGE_BYTES, n_pages, 0, n_pages * PAGE_BYTES, self._reader.direct, fd)
        self._file.use_sums(seed)
        budget = self._reader.budget
        if not is_kept(n_pages * PAGE_BYTES, budget.total, self._sums_divisor):
            self._paged = PagedSums(
                self._file,
                table,
                self.row_bytes,
                pages_cached(budget.total, self._sums_divisor),
                set_page=lambda number, page: self._set_sums_page(number, page, sums_seed),
                engine=self._reader.engine,
                with_backend=self._reader.with_backend,
                budget=budget,
            )
            return
        if n_pages * PAGE_BYTES + pointer_bytes(n_pages) > budget.available:
            self._reader.trim()  # scratch of idle queues is as large as the memory allowed
        self._reservation = budget.reserve("checksum tables", n_pages * PAGE_BYTES + pointer_bytes(n_pages), owner=self)
        pages = np.empty((n_pages, PAGE_BYTES), np.uint8)
        with self._reader.engine() as engine:
            engine.read(table, 0, n_pages, pages)
        table.close()
        self._sums_pages = pages  # the core keeps pointers into it
        for number in range(n_pages):
            self._set_sums_page(number, pages[number], sums_seed)

    def _drop_sums_fd(self) -> None:
        fd, self._sums_fd = self._sums_fd, -1
        if fd >= 0:
            close_quietly(fd)  # nothing was read from it

    def _check_sums_page(self, number: int, page: npt.NDArray[np.uint8], sums_seed: int) -> None:
        words = page.view(np.uint64)
        found = xxhash.xxh3_64_intdigest(page[: 8 * SUMS_PER_PAGE].data, (sums_seed + number) % 2**64)
        if found != int(words[SUMS_PER_PAGE].astype("<u8")):
            raise CorruptionError("the table of checksums is damaged", f"{self.path}.sums", number * PAGE_BYTES)

    def _set_sums_page(self, number: int, page: npt.NDArray[np.uint8], sums_seed: int) -> None:
        self._check_sums_page(number, page, sums_seed)
        self._file.set_sums_page(number, page.view(np.uint64))

    def _scan(self) -> None:
        budget = self._reader.budget
        n_bytes = max(self.row_bytes, min(SCAN_BYTES, budget.available // 2))
        with budget.reserve("reader buffers", n_bytes):
            step = n_bytes // self.row_bytes
            buffer = np.empty((step, self.row_bytes), np.uint8)
            for first in range(0, self.n_rows, step):
                n = min(step, self.n_rows - first)
                self.read(first, n, buffer[:n])

    def _forget_sums(self) -> None:
        self._file.drop_sums()
        self._sums_pages = None
        if self._paged is not None:
            self._paged.close()
            self._paged = None
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():  # the parent may have held the lock when it forked
            self._new_lock()
            self._users, self._pid = 0, os.getpid()
            if self._paged is not None:
                self._paged.lock = threading.Lock()

    def _new_lock(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def check_open(self) -> None:
        if self._is_closing or self._file.fd_number < 0:
            raise ClosedError(f"{self.path} is closed")

    @contextmanager
    def in_use(self) -> Iterator[File]:
        """Keep the file open during the ``with`` block, which may read it through the core."""
        self._leave_parent()
        users = 0
        try:
            with self._lock:
                self.check_open()
                self._users += 1
                users = 1
            yield self._file
        finally:
            with self._lock:
                self._users -= users
                if self._is_closing:
                    self._changed.notify_all()

    def _run(self, n_rows: int, read: Callable[[], tuple[int, int]]) -> ReadStats:
        """Call ``read()`` while the file is kept open, as by :meth:`in_use`, and count the reads and bytes that it returns."""
        self._leave_parent()
        users, cost = 0, None
        try:
            with self._lock:
                self.check_open()
                self._users += 1
                users = 1
            reads, n_bytes = read()
            cost = ReadStats(n_rows, reads, n_rows * self.row_bytes, n_bytes)
            return cost
        finally:
            with self._lock:
                self._users -= users
                if cost is not None:
                    self.stats.add(cost)
                if self._is_closing:
                    self._changed.notify_all()

    def count(self, rows: int, reads: int, n_bytes: int) -> ReadStats:
        """Add the cost of a read of rows, or of a stream of pages, to ``stats``."""
        cost = ReadStats(rows, reads, rows * self.row_bytes, n_bytes)
        self._leave_parent()
        with self._lock:
            self.stats.add(cost)
        return cost

    def read(self, first: int, n: int, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Read rows ``first … first + n - 1`` in large sequential reads, into ``out``, uint8 ``[n, row_bytes]``, if given.

        CorruptionError if a page's checksum differs or the file is short; OSError if the drive failed. ``out`` is then
        undefined.
        """
        if out is None:
            out = np.empty((n, self.row_bytes), np.uint8)
        self._read(first, n, out)
        return out

    def _read(self, first: int, n: int, out: npt.NDArray[np.uint8]) -> ReadStats:
        def read() -> tuple[int, int]:
            if self._paged is not None:
                return self._paged.read(first, n, out)
            with self._reader.engine() as engine:
                return engine.read(self._file, first, n, out)

        return self._run(n, read)

    def gather(
        self,
        rows: npt.NDArray[np.int64] | npt.NDArray[np.int32] | range,
        out: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64] | None = None,
        gap_bytes: int | None = None,
    ) -> ReadStats:
        """Read scattered rows: reads are sorted, deduplicated by page and joined with neighbours, and the queue is kept full.

        See :meth:`RowSource.gather <featstore.gather.sources.RowSource.gather>`. If ``gap_bytes`` is absent, it follows from the
        drive's speed. Each 4 KiB page is read at most once per 2 million rows. The GIL is released.
        """
        if isinstance(rows, range) and positions is None and rows:
            if rows.start < 0:
                raise IndexError(f"row {rows.start} of a run is out of range for {self.n_rows} rows")
            return self._read(rows.start, len(rows), out[: len(rows)])
        ids = np.asarray(rows, np.int64)

        def read() -> tuple[int, int]:
            gap = self._reader.gap_for(self._file, len(ids)) if gap_bytes is None else gap_bytes
            if self._paged is not None:
                return self._paged.gather(ids, out, positions, gap)
            with self._reader.engine(len(ids)) as engine:
                return engine.gather(self._file, ids, out, positions, gap)

        return self._run(len(ids), read)

    def read_pages(self, numbers: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Read scattered whole pages into ``out``, uint8 ``[k, 4096]``, for a caller that keeps pages of much smaller rows.

        ``numbers``, int64 ``[k]``, ascend; page 0 is the file's header. After an error ``out`` is undefined.
        """
        with self.in_use() as file, closing(file.pages()) as pages:
            gap = self._reader.gap_for(file, len(numbers))
            with self._reader.engine(len(numbers)) as engine:
                reads, n_bytes = engine.gather(pages, numbers, out, None, gap)
            self.count(0, reads, n_bytes)
        if self.verifies:
            table, entry = np.divmod(numbers, SUMS_PER_PAGE)
            found = np.empty(len(numbers), np.uint64)
            page_sums(out.reshape(-1), self.seed, found)
            for number in distinct(table):
                here = np.flatnonzero(table == number)
                bad = found[here] != self.sums_pages(int(number), 1)[0][0, entry[here]]
                if bad.any():
                    offset = int(numbers[here[int(bad.argmax())]]) * PAGE_BYTES
                    raise CorruptionError("checksum of a page differs", self.path, offset)

    def close(self) -> None:
        """Wait for reads under way and close the file; may be called again."""
        self._leave_parent()
        try:
            with self._lock:
                self._is_closing = True  # first, as new readers would otherwise keep the file open
                self._changed.wait_for(lambda: self._users == 0)
                self._file.close()
        finally:
            self._drop_sums_fd()
            self._forget_sums()
