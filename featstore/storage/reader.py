"""Readers: which backend runs, the queues it owns, and verified access to the rows of a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.io import MAX_SORTED_ROWS, PAGE_BYTES, SUMS_PER_PAGE, Engine, File
from featstore.config import Budget, Options, Reservation
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.storage.layout import RowLayout
from featstore.storage.pagedsums import MIN_ARENA_BYTES, PagedSums

__all__ = ["DeviceSpeed", "ReadStats", "Reader", "RowFile"]

MAX_ARENA_BYTES = 8 << 20
PREAD_THREADS = 64
MAX_ENGINES = 4
RESIDENT_SUMS_SHARE = 0.05  # a checksum table over this share of the budget is cached by pages
SCRATCH_STEP = 4096  # rows; scratch to sort them grows by so many
DEFAULT_GAP_BYTES = 12 << 10  # until the device is measured
SCAN_BYTES = 4 << 20  # of one read where all pages are checked
MEASURE_RUN_BYTES = 8 << 20
MEASURE_READS = 1024
MEASURE_MIN_BYTES = 64 << 20  # smaller files say little of the device
MEASURE_MIN_ROWS = 4096  # smaller gathers gain less than measuring costs


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device was measured to do with this reader's queue.

    Parameters
    ----------
    iops : float
        Random reads of 4 KiB a second.
    bandwidth : float
        Bytes a second in large sequential reads.
    write_bandwidth : float
        Bytes a second in large sequential writes; 0: not measured.
    gather_bandwidth : float
        Bytes a second that a gather of scattered rows reads and checks where it reads more than a page at once; 0: not measured.
    """

    iops: float
    bandwidth: float
    write_bandwidth: float = 0.0
    gather_bandwidth: float = 0.0

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that cost about as much as another read: beyond them reads are kept apart."""
        return int(min(max(0.75 * self.bandwidth / self.iops, PAGE_BYTES), 256 << 10))


class Reader:
    """The queues of one dataset's reads. Thread-safe; after a fork the child makes its own.

    Parameters
    ----------
    options : Options
    budget : Budget
        Pays for buffers, sorting scratch and checksum tables.
    """

    def __init__(self, options: Options, budget: Budget) -> None:
        self.options = options
        self.budget = budget
        self.device: DeviceSpeed | None = None
        self._arena_bytes = min(MAX_ARENA_BYTES, max(MIN_ARENA_BYTES, budget.total // 32 // PAGE_BYTES * PAGE_BYTES))
        self._closed = False
        self._may_measure = True
        self._start()
        first, self.backend, self.reason = self._probe()
        self._idle.append(first)

    def _start(self) -> None:
        self._pid = os.getpid()
        # Taken itself, not by way of the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._measuring = threading.Lock()
        self._idle: list[Engine] = []
        self._held: dict[int, Reservation] = {}

    def _probe(self) -> tuple[Engine, str, str]:
        wanted = self.options.backend
        if wanted == "pread":
            return self._make("pread"), "pread", "asked for"
        try:
            return self._make("io_uring"), "io_uring", "asked for" if wanted == "io_uring" else "the kernel allows it"
        except OSError as error:
            if wanted == "io_uring":
                raise
            return self._make("pread"), "pread", f"io_uring was refused: {error.strerror}"

    def _make(self, backend: str) -> Engine:
        reservation = self.budget.reserve("reader buffers", self._arena_bytes)
        try:
            depth = min(self.options.queue_depth if backend == "io_uring" else PREAD_THREADS, self._arena_bytes // PAGE_BYTES)
            engine = Engine(backend, depth, self._arena_bytes)
        except BaseException:
            reservation.release()
            raise
        self._held[id(engine)] = reservation
        return engine

    @contextmanager
    def engine(self, n_rows: int = 0) -> Iterator[Engine]:
        """Borrow a queue, with scratch to sort ``n_rows`` where the budget allows."""
        self._leave_parent()
        engine: Engine | None = None
        try:
            with self._lock:
                self._wait_for_engine()
                engine = self._idle[-1]
                del self._idle[-1]  # not by pop(): between its return and the assignment Ctrl-C may come
            self._fit_scratch(engine, min(n_rows, MAX_SORTED_ROWS))
            yield engine
        finally:
            if engine is not None:
                self._give_back(engine)

    def _wait_for_engine(self) -> None:
        """Wait until there is an idle queue, or make one; the lock is held."""
        self._check_open()
        while not self._idle:
            if len(self._held) < MAX_ENGINES:
                try:
                    self._idle.append(self._make(self.backend))
                    break
                except (BudgetError, OSError):
                    if not self._held:
                        raise
            self._changed.wait()
            self._check_open()

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            # The parent's queues are the parent's; dropping them here closes only this process's descriptors.
            held = list(self._held.values())
            self._start()
            for reservation in held:
                reservation.release()

    def _give_back(self, engine: Engine) -> None:
        with self._lock:
            if self._closed:
                self._drop(engine)
            else:
                self._idle.append(engine)
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the dataset is closed")

    def _fit_scratch(self, engine: Engine, n_rows: int) -> None:
        n_rows = -(-n_rows // SCRATCH_STEP) * SCRATCH_STEP
        reservation = self._held[id(engine)]
        while 16 * n_rows + engine.arena_bytes > engine.nbytes:
            try:
                reservation.resize(engine.arena_bytes + 16 * n_rows)
                engine.set_scratch(n_rows)
                return
            except BudgetError:
                if n_rows <= SCRATCH_STEP:
                    if engine.nbytes == engine.arena_bytes:
                        raise
                    return
                n_rows = -(-(n_rows // 2) // SCRATCH_STEP) * SCRATCH_STEP  # sort in more stretches

    def trim(self) -> None:
        """Give idle queues back to the system and to the budget, all but the last queue."""
        self._leave_parent()
        with self._lock:
            while self._idle and len(self._held) > 1:
                self._drop(self._idle.pop(0))

    def _drop(self, engine: Engine) -> None:
        engine.close()
        self._held.pop(id(engine)).release()

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        layout: RowLayout,
        n_rows: int,
        seed: int = 0,
        sums_seed: int = 0,
        verify: str | None = None,
        n_bytes: int | None = None,
    ) -> RowFile:
        """Open a row file and, unless ``verify`` is ``"off"``, its table of checksums (``<path>.sums``).

        ``n_bytes`` is the file's size where more follows the rows.

        Raises
        ------
        CorruptionError
            A file is not as long as it must be, or the table is damaged; with ``verify="open"``, any page is.
        """
        return RowFile(self, path, layout, n_rows, seed, sums_seed, verify or self.options.verify, n_bytes)

    def gap_for(self, file: File, n_rows: int) -> int:
        """Return the gap worth reading over, from the device; measured at the first large gather (about 50 ms)."""
        worth_it = n_rows >= MEASURE_MIN_ROWS and file.direct and file.size >= MEASURE_MIN_BYTES
        if self.device is None and worth_it and self._may_measure and self._measuring.acquire(blocking=False):
            try:
                self.device = self.measure(file)
            except BudgetError:
                pass  # for want of memory now; perhaps later
            except OSError:
                self._may_measure = False  # a page that nobody asked for cannot be read: no failure of this gather
            finally:
                self._measuring.release()
        return DEFAULT_GAP_BYTES if self.device is None else self.device.gap_bytes

    def measure(self, file: File, run_bytes: int = MEASURE_RUN_BYTES, n_random: int = MEASURE_READS) -> DeviceSpeed:
        """Time rounds of random page reads, and ``run_bytes`` in sequence, on an open file; nothing is verified."""
        n_run = max(1, min(run_bytes, file.size) // PAGE_BYTES)
        n_random = min(n_random, n_run)
        held = self.budget.reserve("reader buffers", n_run * PAGE_BYTES)
        pages = file.pages()
        out = np.empty((n_run, PAGE_BYTES), np.uint8)
        rng = np.random.default_rng()  # other pages each time, which no cache below holds
        iops = bandwidth = 0.0
        try:
            with self.engine(n_random) as engine:
                for _ in range(3):  # the best of three: others may use the device meanwhile
                    rows = rng.integers(0, pages.n_rows, n_random)
                    start = time.perf_counter()
                    engine.gather(pages, rows, out, None, 0)
                    middle = time.perf_counter()
                    engine.read(pages, int(rng.integers(0, pages.n_rows - n_run + 1)), n_run, out)
                    end = time.perf_counter()
                    iops = max(iops, n_random / (middle - start))
                    bandwidth = max(bandwidth, out.nbytes / (end - middle))
        finally:
            pages.close()
            held.release()
        return DeviceSpeed(iops, bandwidth)

    def close(self) -> None:
        """Wait for reads under way, then give everything back; may be called again."""
        self._leave_parent()
        with self._lock:
            self._closed = True
            for engine in self._idle:
                self._drop(engine)
            self._idle.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held)


@dataclass
class ReadStats:
    """What was asked of a file and what it cost.

    Parameters
    ----------
    rows, reads : int
        Rows delivered and read operations.
    bytes_requested, bytes_read : int
        Bytes of those rows, and bytes that the operations moved (checksum pages included).
    """

    rows: int = 0
    reads: int = 0
    bytes_requested: int = 0
    bytes_read: int = 0

    def add(self, other: ReadStats) -> None:
        """Add what another read cost."""
        self.rows += other.rows
        self.reads += other.reads
        self.bytes_requested += other.bytes_requested
        self.bytes_read += other.bytes_read


class RowFile:
    """Rows of one file, by number. Thread-safe.

    ``mode`` says whether reads are direct or buffered, and why; ``stats`` what was read so far.
    """

    def __init__(
        self,
        reader: Reader,
        path: str | os.PathLike[str],
        layout: RowLayout,
        n_rows: int,
        seed: int,
        sums_seed: int,
        verify: str,
        n_bytes: int | None = None,
    ) -> None:
        self._reader = reader
        self.layout = layout
        self.n_rows = n_rows
        self.row_bytes = layout.row_bytes
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
        self._file = File(path, layout.row_bytes, layout.group_rows, layout.group_bytes, n_rows, PAGE_BYTES, size)
        try:
            if verify != "off":
                self._load_sums(seed, sums_seed)
            if verify == "open":
                self._scan()
                self._forget_sums()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The file."""
        return str(self._file.path)

    @property
    def mode(self) -> str:
        """``"direct"`` or ``"buffered: …"`` with the reason."""
        return self._file.mode

    def measure(self, run_bytes: int = MEASURE_RUN_BYTES, n_random: int = MEASURE_READS) -> DeviceSpeed:
        """See :meth:`Reader.measure`."""
        with self._in_use():
            return self._reader.measure(self._file, run_bytes, n_random)

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.size

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self._file.direct

    @property
    def verifies(self) -> bool:
        """Whether every page that is read is checked."""
        return self._sums_pages is not None or self._paged is not None

    @property
    def n_sums_pages(self) -> int:
        """Pages of the table of checksums."""
        return -(-(self._file.size // PAGE_BYTES) // SUMS_PER_PAGE)

    def duplicate(self) -> int:
        """Return another descriptor of the open file, the caller's to close."""
        with self._in_use():
            return os.dup(self._file.fd_number)

    def sums_pages(self, first: int, n: int) -> list[npt.NDArray[np.uint64]]:
        """Return pages of the table of checksums, checked, each uint64 [512]; from memory where the table is there.

        Raises
        ------
        CorruptionError, OSError
            The table is damaged or cannot be read.
        """
        with self._in_use():
            if self._sums_pages is not None:
                return [self._sums_pages[number].view(np.uint64) for number in range(first, first + n)]
            assert self._paged is not None, "nothing is verified"
            pages = self._paged.table_pages(first, n)
            self._count(0, 1, pages.nbytes)
        for number in range(n):
            self._check_sums_page(first + number, pages[number], self._sums_seed)
        return [page.view(np.uint64) for page in pages]

    def _load_sums(self, seed: int, sums_seed: int) -> None:
        n_pages = -(-(self._file.size // PAGE_BYTES) // SUMS_PER_PAGE)
        table = File(f"{self.path}.sums", PAGE_BYTES, 1, PAGE_BYTES, n_pages, 0, n_pages * PAGE_BYTES)
        self._file.use_sums(seed)
        budget = self._reader.budget
        if n_pages * PAGE_BYTES > max(16 * PAGE_BYTES, RESIDENT_SUMS_SHARE * budget.total):
            self._paged = PagedSums(
                self._file,
                table,
                self.row_bytes,
                int(RESIDENT_SUMS_SHARE * budget.total) // PAGE_BYTES,
                set_page=lambda number, page: self._set_sums_page(number, page, sums_seed),
                engine=self._reader.engine,
                backend=self._reader.backend,
                budget=budget,
            )
            return
        self._reservation = budget.reserve("checksum tables", n_pages * PAGE_BYTES)
        pages = np.empty((n_pages, PAGE_BYTES), np.uint8)
        with self._reader.engine() as engine:
            engine.read(table, 0, n_pages, pages)
        table.close()
        self._sums_pages = pages  # the core keeps pointers into it
        for number in range(n_pages):
            self._set_sums_page(number, pages[number], sums_seed)

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
        if self._pid != os.getpid():  # a lock of the parent's may have been held when it forked
            self._new_lock()
            self._users, self._pid = 0, os.getpid()
            if self._paged is not None:
                self._paged.lock = threading.Lock()

    def _new_lock(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def check_open(self) -> None:
        """Raise ClosedError where the file was closed."""
        if self._is_closing or self._file.fd_number < 0:
            raise ClosedError(f"{self.path} is closed")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._leave_parent()
        users = 0
        try:
            with self._lock:
                self.check_open()
                self._users += 1
                users = 1
            yield
        finally:
            with self._lock:
                self._users -= users
                self._changed.notify_all()

    def _count(self, rows: int, reads: int, n_bytes: int) -> ReadStats:
        cost = ReadStats(rows, reads, rows * self.row_bytes, n_bytes)
        with self._lock:
            self.stats.add(cost)
        return cost

    def read(self, first: int, n: int, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Read rows ``first … first + n - 1`` in large sequential reads.

        Parameters
        ----------
        first, n : int
        out : uint8 array, shape (n, row_bytes), C-contiguous, optional

        Returns
        -------
        uint8 array, shape (n, row_bytes)

        Raises
        ------
        CorruptionError
            A page's checksum differs or the file is short; ``out`` is then undefined.
        OSError
            The device failed.
        """
        if out is None:
            out = np.empty((n, self.row_bytes), np.uint8)
        with self._in_use():
            if self._paged is None:
                with self._reader.engine() as engine:
                    reads, n_bytes = engine.read(self._file, first, n, out)
            else:
                reads, n_bytes = self._paged.read(first, n, out)
            self._count(n, reads, n_bytes)
        return out

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64] | None = None,
        gap_bytes: int | None = None,
    ) -> ReadStats:
        """Read scattered rows: sorted, deduplicated by page, neighbours coalesced, the queue kept full.

        Parameters
        ----------
        rows : int64 array, shape (k,)
            Row numbers in ``[0, n_rows)``; any order, repeats allowed.
        out : uint8 array, shape (m, row_bytes), C-contiguous
        positions : int64 array, shape (k,), optional
            Row of ``out`` that each row goes to; ``0 … k-1`` if absent.
        gap_bytes : int, optional
            Unwanted bytes that are read rather than starting another read; 0 = none. From the device if absent.

        Returns
        -------
        ReadStats
            What this call cost; ``stats`` has it too.

        Raises
        ------
        IndexError, CorruptionError, OSError
            ``out`` is then undefined.

        Notes
        -----
        Each 4 KiB page is read at most once per 2 million rows. Releases the GIL.
        """
        with self._in_use():
            gap = self._reader.gap_for(self._file, len(rows)) if gap_bytes is None else gap_bytes
            if self._paged is None:
                with self._reader.engine(len(rows)) as engine:
                    reads, n_bytes = engine.gather(self._file, rows, out, positions, gap)
            else:
                reads, n_bytes = self._paged.gather(rows, out, positions, gap)
            return self._count(len(rows), reads, n_bytes)

    def close(self) -> None:
        """Wait for reads under way and close the file; may be called again."""
        self._leave_parent()
        with self._lock:
            self._is_closing = True  # or readers that come while others go would keep it open
            self._changed.wait_for(lambda: self._users == 0)
            self._file.close()
        self._forget_sums()
