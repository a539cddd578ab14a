"""Readers: the backend of a dataset's reads, and the queues that run them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from featstore._core.io import MAX_SORTED_ROWS, PAGE_BYTES, Engine, File
from featstore.budget import Budget, Living, Reservation
from featstore.config import Options
from featstore.errors import BudgetError, ClosedError
from featstore.storage.drive import TIMED_MIN_BYTES, DriveSpeed, time_reads
from featstore.storage.layout import RowLayout
from featstore.storage.pagedsums import DIVISOR, MIN_ARENA_BYTES, divisor_for
from featstore.storage.rowfile import RowFile

__all__ = ["Reader", "least_queue_bytes"]

T = TypeVar("T")

MAX_ARENA_BYTES = 8 << 20
PREAD_THREADS = 64
STREAM_THREADS = 4  # with pread
MAX_ENGINES = 4
SCRATCH_STEP = 4096  # rows; the step by which scratch for sorting grows
DEFAULT_GAP_BYTES = 12 << 10  # until the drive is measured
MEASURE_RUN_BYTES = 8 << 20
MEASURE_READS = 1024
MEASURE_MIN_ROWS = 4096  # smaller gathers gain less than measuring costs


def _arena_bytes(total: int) -> int:
    return min(MAX_ARENA_BYTES, max(MIN_ARENA_BYTES, total // 32 // PAGE_BYTES * PAGE_BYTES))


def least_queue_bytes(total: int) -> int:
    """Count the bytes of one queue with the least scratch, which reads need at least under a budget of ``total`` bytes."""
    return _arena_bytes(total) + 16 * SCRATCH_STEP


class _Queue(NamedTuple):
    """A queue of reads, its memory, and its reads in flight."""

    engine: Engine
    reservation: Reservation
    depth: int

    @property
    def n_bytes(self) -> int:
        return self.reservation.n_bytes


class Reader:
    """The queues of one dataset's reads. Thread-safe; after a fork the child makes its own queues.

    ``budget`` pays for buffers, sorting scratch and checksum tables. ``owner`` names the closed object in a ClosedError.
    """

    def __init__(self, options: Options, budget: Budget, owner: str = "the dataset") -> None:
        self.options = options
        self._owner = owner
        self.budget = budget
        self.drive: DriveSpeed | None = None
        self._arena_bytes = _arena_bytes(budget.total)
        self._files: Living[RowFile] = Living()
        self.sums_divisor = DIVISOR
        self._bounds: dict[int, int] = {}
        self._n_bound: int | None = None  # the least bound
        self._closed = False
        self._may_measure = True
        self._start()
        self.backend = "pread" if options.backend == "pread" else "io_uring"
        self.direct = options.backend != "buffered"
        self.reason = "asked for" if options.backend == self.backend else "the kernel allows it"
        self.with_backend(self._make)

    def _start(self) -> None:
        self._pid = os.getpid()
        # Used directly, not through the condition: Ctrl-C in Condition.__enter__ may leave the lock taken for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._measuring = threading.Lock()
        # Idle are those held that are not borrowed: so Ctrl-C between two steps loses no queue, for which closing would wait.
        self._held: dict[int, _Queue] = {}
        self._borrowed: dict[int, object] = {}  # a token of the borrower
        self._n_short = 0  # calls of make_do() that are in force

    @property
    def _idle(self) -> list[Engine]:
        """The queues that nobody has borrowed; the lock is held."""
        return [queue.engine for key, queue in self._held.items() if key not in self._borrowed]

    def with_backend(self, make: Callable[[str], T]) -> T:
        """Call ``make(backend)``, which makes a queue or a stream, and return its result.

        If the kernel refuses a ring, the reader changes to pread for this call and all later ones. OSError if the options ask
        for io_uring by name, or if pread fails.
        """
        backend = self.backend
        try:
            return make(backend)
        except OSError as error:
            if backend == "pread":
                raise
            if self.options.backend == "io_uring":
                raise OSError(error.errno, f"io_uring was refused: {error.strerror}; featstore doctor says why") from error
            made = make("pread")
            with self._lock:
                self.backend, self.reason = "pread", f"io_uring was refused: {error.strerror}; featstore doctor says why"
            return made

    def why(self, mode: str) -> str:
        """Say why reads of a file of ``mode`` go through this backend and, if they were to bypass it, through the page cache."""
        is_refused = self.direct and mode.startswith("buffered")
        return f"{self.reason}; direct I/O was refused: featstore doctor says why" if is_refused else self.reason

    def _make(self, backend: str, n_rows: int = 0) -> Engine:
        """Make a queue, with scratch to sort ``n_rows``."""
        with self.budget.awaited(), self.budget.reserve("reader buffers", self._arena_bytes + 16 * n_rows).kept() as reservation:
            return self._make_in(reservation, backend, n_rows)

    def _make_in(self, reservation: Reservation, backend: str, n_rows: int) -> Engine:
        depth = self._depth(backend)
        engine = Engine(backend, depth, self._arena_bytes)
        if n_rows:
            engine.set_scratch(n_rows)
        self._held[id(engine)] = _Queue(engine, reservation, depth)
        return engine

    # -- threads that read ----------------------------------------------------------------------------------------------------

    def bound(self, key: int, n_threads: int) -> None:
        """Limit reading to ``n_threads`` threads at once, until :meth:`unbound` of the same ``key``; the least bound holds.

        With io_uring there are at most ``n_threads`` queues, each driven by a thread. With pread there is one queue of
        ``n_threads`` threads. A stream (:class:`~featstore.storage.pagestream.PageStream`) has threads of its own: one, or with
        pread up to ``n_threads``, at most four. Reads under way are not affected. A second and any further queue is made only
        if the budget has room for its buffers, or takes it back from cheap loans.
        """
        self._leave_parent()
        with self._lock:
            self._bounds[key] = n_threads
            self._n_bound = min(self._bounds.values())
            while len(self._held) > self._most_queues and (idle := self._idle):
                self._drop(idle[0])
            self._changed.notify_all()

    def unbound(self, key: int) -> None:
        """Remove the limit that :meth:`bound` set; may be called again."""
        with self._lock:
            self._bounds.pop(key, None)
            self._n_bound = min(self._bounds.values(), default=None)
            self._changed.notify_all()

    @property
    def _most_queues(self) -> int:
        """Number of queues that may be held at once."""
        n_bound = self._n_bound
        if self._n_short or (n_bound is not None and self.backend == "pread"):
            return 1
        return MAX_ENGINES if n_bound is None else n_bound

    def _depth(self, backend: str) -> int:
        """Choose the number of reads that a queue has in flight: the depth of a ring, or the number of pread threads."""
        n_bound = self._n_bound
        depth = self.options.queue_depth if backend == "io_uring" else PREAD_THREADS if n_bound is None else n_bound
        return min(depth, self._arena_bytes // PAGE_BYTES)

    @property
    def stream_threads(self) -> int:
        if self.backend == "io_uring":
            return 1
        n_bound = self._n_bound
        return STREAM_THREADS if n_bound is None else min(STREAM_THREADS, n_bound)

    # -- queues ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def engine(self, n_rows: int = 0) -> Iterator[Engine]:
        """Borrow a queue, with scratch to sort ``n_rows`` if the budget allows."""
        self._leave_parent()
        engine: Engine | None = None
        has_asked = False
        n_rows = -(-min(n_rows, MAX_SORTED_ROWS) // SCRATCH_STEP) * SCRATCH_STEP
        token = object()  # returning it does nothing where Ctrl-C came before the queue was ours
        try:
            while engine is None:
                with self._lock:
                    engine = self._next_idle()
                    self._borrowed[id(engine)] = token
                more = 16 * n_rows + engine.arena_bytes - engine.nbytes
                if more > 0 and not has_asked and more > self.budget.available:
                    has_asked = True
                    self._return(engine, token)  # first: whoever lends may wait for a thread that needs it
                    engine = None
                    with suppress(BudgetError):
                        self.budget.reserve("reader buffers", more).release()
                    continue
                try:
                    self._fit_scratch(engine, n_rows)
                except BudgetError:
                    with self._lock:
                        if len(self._held) == 1:
                            raise
                        self._drop(engine)  # the others have scratch
                        engine = None
                        self._changed.notify_all()
            yield engine
        finally:
            if engine is not None:
                try:
                    self._return(engine, token)
                except BaseException:  # Ctrl-C came before or after it; else threads would wait for a lost queue for ever
                    self._return(engine, token)
                    raise

    def _next_idle(self) -> Engine:
        """Wait until there is an idle queue, or make one, and return it with the current depth; the lock is held."""
        self._check_open()
        while not (idle := self._idle):
            if not self._held:
                return self.with_backend(self._make)
            if len(self._held) < self._most_queues:
                try:
                    # A further queue gets its scratch now, so that no read fails later for lack of that memory.
                    return self._make(self.backend, SCRATCH_STEP)
                except (BudgetError, OSError):
                    pass  # the existing queues suffice
            self._changed.wait()
            self._check_open()
        engine = idle[-1]
        return engine if self._held[id(engine)].depth == self._depth(self.backend) else self._renew(engine)

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            # The queues belong to the parent; dropping them here closes only this process's descriptors.
            held = list(self._held.values())
            self._start()
            self._bounds.clear()  # of the parent's loaders
            self._n_bound = None
            for queue in held:
                queue.reservation.release()

    def _return(self, engine: Engine, token: object) -> None:
        """Return a borrowed queue; do nothing unless the borrower of ``token`` has it."""
        with self._lock:
            if self._borrowed.get(id(engine)) is token:
                if self._closed or len(self._held) > self._most_queues:
                    self._drop(engine)
                self._borrowed.pop(id(engine), None)
            self._changed.notify_all()

    def _renew(self, engine: Engine) -> Engine:
        """Replace an idle queue by one of the current depth, in the same memory; the lock is held."""
        n_rows, reservation = (engine.nbytes - engine.arena_bytes) // 16, self._held[id(engine)].reservation
        try:
            del self._held[id(engine)]
            engine.close()
            return self.with_backend(lambda backend: self._make_in(reservation, backend, n_rows))
        except BaseException:
            reservation.release()
            self._changed.notify_all()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._owner} is closed")

    def _fit_scratch(self, engine: Engine, n_rows: int) -> None:
        reservation = self._held[id(engine)].reservation
        while 16 * n_rows + engine.arena_bytes > engine.nbytes:
            try:
                with self.budget.awaited():
                    reservation.resize(engine.arena_bytes + 16 * n_rows)
                engine.set_scratch(n_rows)
                return
            except BudgetError:
                if n_rows <= SCRATCH_STEP:
                    if engine.nbytes == engine.arena_bytes:
                        raise
                    return
                n_rows = -(-(n_rows // 2) // SCRATCH_STEP) * SCRATCH_STEP  # sort in more stretches

    @property
    def held_bytes(self) -> int:
        """Bytes held by queues, and by the checksum tables of open files."""
        with self._lock:
            queues = sum(queue.n_bytes for queue in self._held.values())
        return queues + self._tables_bytes(self.budget.total)

    def least_bytes(self, total: int) -> int:
        """Count the least bytes that a reader holds once rows are read, under a budget of ``total`` bytes."""
        return least_queue_bytes(total) + self._tables_bytes(total)

    def _tables_bytes(self, total: int) -> int:
        return sum(file.sums_bytes(total) for file in self._files)

    def trim(self) -> None:
        """Free idle queues, except the last queue of the reader; idle queues that remain keep the least scratch."""
        self._leave_parent()
        with self._lock:
            while len(self._held) > 1 and (idle := self._idle):
                self._drop(idle[0])
            for engine in self._idle:
                if engine.nbytes > engine.arena_bytes + 16 * SCRATCH_STEP:
                    engine.drop_scratch()
                    engine.set_scratch(SCRATCH_STEP)
                    self._held[id(engine)].reservation.resize(engine.arena_bytes + 16 * SCRATCH_STEP)

    def make_do(self) -> None:
        """Limit the reader to one queue until :meth:`made_do`, and wait until the other queues are given back.

        A caller uses this if it lacks memory that the queues of other reads may hold. It must not borrow a queue itself.
        """
        self._leave_parent()
        with self._lock:
            self._n_short += 1
            self.trim()
            self._changed.wait_for(lambda: len(self._held) <= 1 or self._closed)

    def made_do(self) -> None:
        """End the limit of one :meth:`make_do`."""
        with self._lock:
            self._n_short = max(0, self._n_short - 1)
            self._changed.notify_all()

    def _drop(self, engine: Engine) -> None:
        """Free a queue; may be called again, after Ctrl-C. The lock is held."""
        queue = self._held.get(id(engine))
        if queue is not None:
            queue.reservation.release()
            del self._held[id(engine)]
        self._borrowed.pop(id(engine), None)
        engine.close()

    def expect(self, tables: Iterable[int]) -> None:
        """Set each large checksum table's share of the budget; ``tables`` are the bytes of tables to be opened next."""
        here = [PAGE_BYTES * file.n_sums_pages for file in self._files if file.verifies]
        self.sums_divisor = divisor_for([*here, *tables])

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
        fds: tuple[int, int] = (-1, -1),
        fingerprint: str = "",
    ) -> RowFile:
        """Open a row file and, unless ``verify`` is ``"off"``, its table of checksums (``<path>.sums``).

        ``n_bytes`` is the file's size if more follows the rows. ``fds`` are descriptors of file and table, which this method
        takes over, even if it raises. CorruptionError if a file has a wrong length or the table is damaged; with
        ``verify="open"``, also if any page is damaged.
        """
        verify = verify or self.options.verify
        file = RowFile(self, path, layout, n_rows, seed, sums_seed, verify, n_bytes, fds, fingerprint)
        self._files.add(file)
        if verify == "open":
            self.trim()  # checking may have grown scratch, in memory that the next file needs
        return file

    def gap_for(self, file: File, n_rows: int) -> int:
        """Choose the largest gap to read over, from the drive's speed, which the first large gather measures (about 50 ms)."""
        worth_it = n_rows >= MEASURE_MIN_ROWS and file.direct and file.size >= TIMED_MIN_BYTES
        if self.drive is None and worth_it and self._may_measure and self._measuring.acquire(blocking=False):
            try:
                self.drive = time_reads(self, file, MEASURE_RUN_BYTES, MEASURE_READS)
            except BudgetError:
                pass  # memory is short now; a later gather may measure
            except OSError:
                self._may_measure = False  # the unreadable page belongs to the measurement, so this gather does not fail
            finally:
                self._measuring.release()
        return DEFAULT_GAP_BYTES if self.drive is None else self.drive.gap_bytes

    def close(self) -> None:
        """Wait for reads under way, then free all queues; may be called again."""
        self._leave_parent()
        with self._lock:
            self._closed = True
            for engine in self._idle:
                self._drop(engine)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held)
