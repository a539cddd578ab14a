"""Readers: the right bytes for any width, order and backend; no page twice; every fault named."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.io import Engine
from featstore.budget import Budget
from featstore.config import Options
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.storage.calls import close_quietly, open_regular
from featstore.storage.layout import PAGE_BYTES, RowLayout, choose_layout
from featstore.storage.reader import MIN_ARENA_BYTES, PREAD_THREADS, Reader
from featstore.storage.rowfile import RowFile
from tests.support.kernel_counts import agree_with_the_kernel
from tests.support.refusing import refuses
from tests.support.written_rows import open_record, opened, write_rows

BACKENDS = ["io_uring", "pread"]
WIDTHS = [1, 4, 400, 512, 3072, 4095, 4096, 4097, 5732, 65536, 1 << 20]


def pages_of(layout: RowLayout, rows: np.ndarray) -> int:
    """Distinct pages that ``rows`` touch, counted one row at a time."""
    pages: set[int] = set()
    for row in rows.tolist():
        start = layout.offset(row)
        pages.update(range(start // PAGE_BYTES, (start + layout.row_bytes - 1) // PAGE_BYTES + 1))
    return len(pages)


@given(st.one_of(st.integers(1, 9000), st.integers(1, 1 << 20)))
def test_layout_is_the_smallest_group_with_little_padding(width: int) -> None:
    n_rows, n_pages = next((n, k) for k in range(1, 1000) if (n := k * 4096 // width) and 32 * (k * 4096 - n * width) <= k * 4096)
    layout = choose_layout(width)
    assert layout.block == (n_rows, n_pages)
    assert layout.is_dense == (n_rows * width == n_pages * 4096)


@pytest.mark.parametrize("width", WIDTHS)
def test_random_rows_touch_no_more_pages_than_dense_ones(width: int) -> None:
    layout, dense = choose_layout(width), RowLayout(width, 1, width)
    rows = np.arange(4096 if width < PAGE_BYTES else 64)
    touched, without = (sum(pages_of(each, rows[i : i + 1]) for i in range(len(rows))) for each in (layout, dense))
    assert touched <= without


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_matches_numpy(tmp_path: Path, width: int, backend: str) -> None:
    n = 20_000 if width <= 4 else 700 if width < 65536 else 40 if width < 1 << 20 else 9
    rng = np.random.default_rng(width)
    rows = rng.integers(0, 256, (n, width), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, backend=backend) as (file, _):
        assert np.array_equal(file.read(0, n), rows)
        assert np.array_equal(file.read(n // 3, n // 2), rows[n // 3 : n // 3 + n // 2])
        assert file.read(n, 0).shape == (0, width)
        for k in (0, 1, 2, 255, 256, 257):
            ids = rng.integers(0, n, min(k, 8 * n))
            ids[:2] = [0, n - 1][: len(ids)]  # first and last row
            for gap in (0, PAGE_BYTES, 1 << 30):
                out = np.full((len(ids), width), 0xAA, np.uint8)
                file.gather(ids, out, None, gap)
                assert np.array_equal(out, rows[ids])
        ids = rng.integers(0, n, 50)
        places = rng.permutation(60)[:50]
        out = np.full((60, width), 0xAA, np.uint8)
        file.gather(ids, out, places)
        assert np.array_equal(out[places], rows[ids])
        untouched = np.setdiff1d(np.arange(60), places)
        assert (out[untouched] == 0xAA).all()


@given(data=st.data())
def test_no_page_is_read_twice(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, 3, 400, 512, 4095, 4097, 5732, 20_000]))
    n = data.draw(st.integers(1, 400))
    ids = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=200)), np.int64)
    layout = data.draw(st.sampled_from([choose_layout(width), RowLayout(width, 1, width)]))
    path = tmp_path_factory.mktemp("rows")
    rows = np.random.default_rng(n).integers(0, 256, (n, width), dtype=np.uint8)
    record = write_rows(path, rows, layout)
    with opened(path, record, backend="pread", memory=1 << 20) as (file, _):
        before = file.stats.bytes_read
        out = np.zeros((len(ids), width), np.uint8)
        file.gather(ids, out, None, 0)
        assert np.array_equal(out, rows[ids])
        assert file.stats.bytes_read - before == pages_of(layout, ids) * PAGE_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", [0, 1, 2, 7])
def test_gaps_up_to_the_stated_one_are_read_over(tmp_path: Path, backend: str, gap: int) -> None:
    """Reads and bytes are those of runs of pages, joined wherever no more than the gap lies between them."""
    rows = np.random.default_rng(0).integers(0, 256, (3000, PAGE_BYTES), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    # The steps between wanted pages: gaps of 0, 1, 2 … pages, and at most a few pages a read, well below its limit.
    pages = np.cumsum(np.tile([1, 2, 1, 3, 4, 8, 9, 150], 14))
    with opened(tmp_path, record, backend=backend) as (file, _):
        before = file.stats.reads, file.stats.bytes_read
        out = np.zeros((len(pages), PAGE_BYTES), np.uint8)
        ids = np.random.default_rng(1).permutation(pages)
        file.gather(ids, out, None, gap * PAGE_BYTES)
        assert np.array_equal(out, rows[ids])
        between = np.diff(pages) - 1
        assert file.stats.reads - before[0] == 1 + np.count_nonzero(between > gap)
        assert file.stats.bytes_read - before[1] == (len(pages) + int(between[between <= gap].sum())) * PAGE_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_agree_with_the_kernel(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (20_000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, backend=backend) as (file, _):
        assert file.mode == "direct", "this test needs a file system with direct I/O"
        ids = np.random.default_rng(1).integers(0, 20_000, 3000)
        out = np.zeros((3000, 512), np.uint8)
        assert agree_with_the_kernel(file, lambda: file.gather(ids, out, None, 0)) == pages_of(record.layout, ids) * PAGE_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [512, 70_000])
def test_a_checksum_table_over_the_budgets_share_is_paged(tmp_path: Path, backend: str, width: int) -> None:
    n = 12_000_000 // width * 4
    rows = np.random.default_rng(0).integers(0, 256, (n, width), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, memory=6 * MIN_ARENA_BYTES, backend=backend) as (file, reader):
        assert file._paged is not None
        assert reader.budget.report()["checksum tables"] < record.n_sums_bytes
        rng = np.random.default_rng(1)
        for _ in range(3):
            ids = rng.integers(0, n, 500)
            out = np.zeros((500, width), np.uint8)
            agree_with_the_kernel(file, lambda: file.gather(ids, out, None, 0))  # pages of sums are counted too
            assert np.array_equal(out, rows[ids])
        assert np.array_equal(file.read(n - 300, 300), rows[-300:])
    with open(tmp_path / "rows.bin.sums", "r+b") as sums:  # the last page of sums, after open
        with opened(tmp_path, record, memory=6 * MIN_ARENA_BYTES, backend=backend) as (file, _):
            sums.seek(-4096 + 17, os.SEEK_END)
            byte = sums.read(1)[0]
            sums.seek(-1, os.SEEK_CUR)
            sums.write(bytes([byte ^ 1]))
            sums.flush()
            refuses(CorruptionError, "checksums is damaged", lambda: file.read(n - 1, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flipped_bit_is_found(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (100, 400), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    path = tmp_path / "rows.bin"
    data = bytearray(path.read_bytes())
    data[PAGE_BYTES + record.layout.offset(55) + 3] ^= 4
    path.write_bytes(data)
    ids = np.array([1, 55, 99])
    with opened(tmp_path, record, backend=backend) as (file, _):
        out = np.zeros((3, 400), np.uint8)
        for call in (lambda: file.gather(ids, out), lambda: file.read(0, 100)):
            caught = refuses(CorruptionError, "", call)
            assert caught.value.path == str(path)
            assert caught.value.offset == (PAGE_BYTES + record.layout.offset(55)) // PAGE_BYTES * PAGE_BYTES
        file.gather(np.array([1, 99]), out[:2])  # the next correct call works
        assert np.array_equal(out[:2], rows[[1, 99]])
    with pytest.raises(CorruptionError):
        with opened(tmp_path, record, backend=backend, verify="open"):
            pass
    with opened(tmp_path, record, backend=backend, verify="off") as (file, _):  # the control: unverified, it is not found
        file.gather(ids, out)
        assert (out[1] != rows[55]).sum() == 1


@pytest.mark.parametrize("at", [0, 8 * 7 + 3, 8 * 511 - 1, 8 * 511, PAGE_BYTES - 1])
def test_a_flipped_bit_in_the_table_of_checksums_is_the_tables(tmp_path: Path, at: int) -> None:
    """It is found when the file is opened, in entries of pages, unused ones and the table's own sum; no page is blamed for it."""
    rows = np.random.default_rng(0).integers(0, 256, (100, 400), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    path = tmp_path / "rows.bin.sums"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    for verify in ("always", "open"):
        with pytest.raises(CorruptionError, match="table of checksums") as caught:
            with opened(tmp_path, record, verify=verify):
                pass
        assert (caught.value.path, caught.value.offset) == (str(path), 0)


def test_the_table_of_checksums_is_counted(tmp_path: Path) -> None:
    record = write_rows(tmp_path, np.zeros((5000, 4096), np.uint8))
    for verify, n_pages in (("always", 10), ("open", 0), ("off", 0)):
        with opened(tmp_path, record, verify=verify) as (_, reader):
            held = n_pages * PAGE_BYTES + 8 * (n_pages + 1) * bool(n_pages)  # and the core's pointers
            assert reader.budget.report().get("checksum tables", 0) == held


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_shrunk_while_open_is_an_error_not_a_loop(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (1000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, backend=backend, verify="off") as (file, _):
        os.truncate(tmp_path / "rows.bin", 20 * PAGE_BYTES + 100)
        out = np.zeros((2, 512), np.uint8)
        refuses(CorruptionError, "ends before", lambda: file.gather(np.array([3, 900]), out))
        file.gather(np.array([3, 5]), out)
        assert np.array_equal(out, rows[[3, 5]])


def test_an_unlinked_file_goes_on(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (100, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record) as (file, _):
        (tmp_path / "rows.bin").unlink()
        assert np.array_equal(file.read(0, 100), rows)


def borrow(reader: Reader) -> Engine:
    """The one queue that exists."""
    with reader.engine() as engine:
        return engine


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("letter", "siza")
def test_distorted_completions_are_continued(tmp_path: Path, backend: str, letter: str) -> None:
    """Short reads, EINTR, EAGAIN and a stray end of file, at each place in turn until a run meets none."""
    rows = np.random.default_rng(0).integers(0, 256, (3000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    ids = np.arange(0, 3000, 40)
    with opened(tmp_path, record, backend=backend) as (file, reader):
        engine = borrow(reader)
        for k in range(len(ids) + 2):
            engine.inject(b"r" * k + letter.encode() * 2)
            out = np.zeros((len(ids), 512), np.uint8)
            file.gather(ids, out, None, 0)
            assert np.array_equal(out, rows[ids])
        engine.inject(None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_error_at_any_read(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    ids = np.arange(0, 3000, 40)
    failed = 0
    with opened(tmp_path, record, backend=backend) as (file, reader):
        engine = borrow(reader)
        for k in range(len(ids) + 3):
            engine.inject(b"r" * k + b"E")
            out = np.zeros((len(ids), 512), np.uint8)
            error: OSError | None = None
            try:
                file.gather(ids, out, None, 0)
            except OSError as caught:
                error = caught
            if error is None:
                assert np.array_equal(out, rows[ids])
            else:
                assert (error.errno, error.filename) == (errno.EIO, str(tmp_path / "rows.bin"))
                failed += 1
            engine.inject(None)
            file.gather(ids, out, None, 0)  # the next call works
            assert np.array_equal(out, rows[ids])
    assert failed == len(ids)  # each fault fired, and the last runs met none


@pytest.mark.parametrize("backend", BACKENDS)
def test_endless_end_of_file_ends(tmp_path: Path, backend: str) -> None:
    record = write_rows(tmp_path, np.zeros((100, 512), np.uint8))
    with opened(tmp_path, record, backend=backend) as (file, reader):
        borrow(reader).inject(b"z" * 100)
        refuses(CorruptionError, "ends before", lambda: file.read(0, 100))


def test_rows_out_of_range(tmp_path: Path) -> None:
    record = write_rows(tmp_path, np.zeros((100, 512), np.uint8))
    with opened(tmp_path, record) as (file, _):
        out = np.zeros((3, 512), np.uint8)
        refuses(IndexError, "row 100 at position 1", lambda: file.gather(np.array([1, 100, 3]), out))
        refuses(IndexError, "row -1 at position 2", lambda: file.gather(np.array([1, 2, -1]), out))
        for bad in (3, -1, 2**62):
            with pytest.raises(IndexError, match="out of range for 3 rows of out"):
                file.gather(np.array([1, 2, 3]), out, np.array([0, 1, bad]))
        for first, n in ((0, 101), (101, 0), (50, 51)):
            refuses(IndexError, "", lambda: file.read(first, n))


def test_backend_by_name_is_a_demand_and_auto_says_why(tmp_path: Path) -> None:
    refuses(ValueError, "no backend", lambda: Engine("threads", 8, 1 << 20))
    reader = Reader(Options(memory=1 << 30, backend="auto"), Budget(1 << 30))
    assert (reader.backend, reader.reason) == ("io_uring", "the kernel allows it")
    reader.close()


def test_threads_share_a_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    failures: list[BaseException] = []
    with opened(tmp_path, record) as (file, _):

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(30):
                    ids = rng.integers(0, 5000, 300)
                    out = np.zeros((300, 512), np.uint8)
                    file.gather(ids, out)
                    assert np.array_equal(out, rows[ids])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_drains_and_later_calls_are_refused(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    budget = Budget(1 << 30)
    reader = Reader(Options(memory=1 << 30, backend=backend), budget)
    file = open_record(reader, tmp_path, record)
    started = threading.Event()
    outcomes: list[str] = []

    def work() -> None:
        while True:
            out = np.zeros((3000, 512), np.uint8)
            started.set()
            try:
                file.gather(np.arange(3000)[::-1].copy(), out, None, 0)
            except ClosedError:
                outcomes.append("closed")
                return
            assert np.array_equal(out, rows[2999::-1])
            outcomes.append("right")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    file.close()
    reader.close()
    for thread in threads:
        thread.join()
    assert outcomes.count("closed") == 3
    assert budget.used == 0
    refuses(ClosedError, "", lambda: file.read(0, 1))
    file.close()
    reader.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_reads_with_queues_of_its_own(tmp_path: Path, backend: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, backend=backend) as (file, _):
        stop = threading.Event()

        def keep_reading() -> None:
            while not stop.is_set():
                file.read(0, 5000)

        thread = threading.Thread(target=keep_reading)  # so that the fork finds locks held and reads in flight
        thread.start()
        try:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    signal.alarm(60)
                    ids = np.random.default_rng(1).integers(0, 5000, 500)
                    out = np.zeros((500, 512), np.uint8)
                    file.gather(ids, out)
                    os._exit(0 if np.array_equal(out, rows[ids]) else 1)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            thread.join()
        assert np.array_equal(file.read(0, 5000), rows)


def gather_until_interrupted(file: RowFile, ids: np.ndarray, out: np.ndarray) -> None:
    for _ in range(1000):
        file.gather(ids, out, None, 0)


def test_ctrl_c_stops_a_long_gather(tmp_path: Path) -> None:
    rows = np.zeros((200_000, 512), np.uint8)
    record = write_rows(tmp_path, rows)
    ids = np.random.default_rng(0).permutation(200_000)
    for backend in BACKENDS:
        with opened(tmp_path, record, backend=backend) as (file, _):
            out = np.zeros((200_000, 512), np.uint8)
            previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0.002)  # may go off at once, on a busy machine
                    gather_until_interrupted(file, ids, out)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
            file.gather(ids[:10], out[:10])  # usable


def test_the_budget_names_the_least_that_works(tmp_path: Path) -> None:
    record = write_rows(tmp_path, np.zeros((100, 512), np.uint8))
    caught = refuses(BudgetError, "", lambda: Reader(Options(memory=100_000), Budget(100_000)))
    assert caught.value.needed == MIN_ARENA_BYTES >= PREAD_THREADS * PAGE_BYTES
    with opened(tmp_path, record, memory=2 * MIN_ARENA_BYTES) as (file, reader):
        big = np.zeros((50_000, 512), np.uint8)
        file.gather(np.zeros(50_000, np.int64), big)  # sorted in stretches
        assert reader.budget.peak <= 2 * MIN_ARENA_BYTES


class ReadsBefore:
    """Lends all of its memory, and gives it back when a thread that reads with the same queues is done."""

    def __init__(self, budget: Budget, file: RowFile) -> None:
        self.file, self.n_given = file, 0
        self.held = budget.reserve("epoch", budget.available - 200_000)  # of which a short read has enough
        self.loan = budget.lend(self.lent, self.give_back, cost=0, of=self.held, waits=True)

    def lent(self) -> int:
        return self.held.n_bytes

    def give_back(self, n_bytes: int) -> int:
        reads = threading.Thread(target=self.file.gather, args=(np.arange(2), np.zeros((2, 512), np.uint8)), daemon=True)
        reads.start()
        reads.join(60)
        assert not reads.is_alive(), "it waits for the queue of the thread that asks"
        self.n_given += 1
        freed = self.held.n_bytes
        self.held.release()
        return freed


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_waits_for_a_read_is_taken_back_for_a_read(tmp_path: Path, backend: str) -> None:
    """With one queue, which the thread that asks has given back before."""
    rows = np.random.default_rng(0).integers(0, 256, (60_000, 512), dtype=np.uint8)
    record = write_rows(tmp_path, rows)
    with opened(tmp_path, record, backend=backend, memory=64 << 20) as (file, reader):
        reader.bound(0, 1)
        lender = ReadsBefore(reader.budget, file)
        ids = np.random.default_rng(1).permutation(60_000)
        out = np.zeros((60_000, 512), np.uint8)
        cost = file.gather(ids, out, None, 0)
        assert np.array_equal(out, rows[ids])
        assert lender.n_given == 1
        assert cost.reads <= 60_000 * 512 // PAGE_BYTES  # each page once: there was memory to sort all rows


def test_descriptors_block(tmp_path: Path) -> None:
    """With O_NONBLOCK, which keeps a FIFO from being waited for, some kernels end reads of io_uring with EAGAIN."""
    record = write_rows(tmp_path, np.zeros((10, 512), np.uint8))
    fds = [open_regular(tmp_path / record.name)[0]]
    with opened(tmp_path, record) as (file, _):
        fds.append(file.duplicate())
    try:
        assert not any(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK for fd in fds)
    finally:
        for fd in fds:
            close_quietly(fd)


def test_memory_files_are_buffered(tmp_path: Path) -> None:
    """O_DIRECT opens on tmpfs, and means nothing there."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    folder = next(Path(point) for _, point, kind, *_ in mounts if kind == "tmpfs" and os.access(point, os.W_OK))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        record = write_rows(Path(name), np.zeros((10, 512), np.uint8))
        with opened(Path(name), record) as (file, _):
            assert file.mode == "buffered: the file system has no direct I/O"
            file.read(0, 10)


def test_a_child_closes_what_a_thread_of_its_parent_held(tmp_path: Path) -> None:
    """Locks that another thread held at the fork belong to nobody in the child."""
    record = write_rows(tmp_path, np.zeros((10, 512), np.uint8))
    with opened(tmp_path, record) as (file, reader):
        file.gather(np.array([1]), np.zeros((1, 512), np.uint8))
        with file._lock, reader._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                file.close()
                reader.close()
                os._exit(0 if reader.budget.used == 0 else 1)
        assert os.waitpid(pid, 0)[1] == 0
