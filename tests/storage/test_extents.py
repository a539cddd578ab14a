"""Extents: what batched packing wrote is what was asked for, byte for byte; read as one stream, verified; faults are named."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore._core.packer import Packer
from featstore.budget import Budget
from featstore.config import Options
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.gather.sources import ExtentSource
from featstore.storage.extents import ExtentMap, ExtentWriter, episodes
from featstore.storage.format import sums_seed
from featstore.storage.layout import PAGE_BYTES, RowLayout, choose_layout
from featstore.storage.pagestream import PageStream, least_window
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.rundir import DiskQuota
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.testing.faults import random_flips, sweep
from tests.support.programs import run_in_fork
from tests.support.rowfiles import check_sums
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("_program_server")

WIDTHS = [1, 4, 100, 400, 512, 3072, 4095, 4096, 4097, 5732, 65536, 1 << 20, (1 << 20) + 12]


def make_reader(backend: str = "auto", memory: int = 64 << 20, verify: str = "always") -> Reader:
    options = Options.resolve(memory, backend, verify)
    return Reader(options, Budget(options.memory))


def open_file(reader: Reader, folder: Path, record: FileRecord) -> RowFile:
    seed = record.seed
    return reader.open(folder / record.name, layout=record.layout, n_rows=record.n_rows, seed=seed, sums_seed=sums_seed(seed))


def write_base(folder: Path, rows: np.ndarray) -> FileRecord:
    with RowFileWriter(folder, "base.rows", choose_layout(rows.shape[1]), kind="feature", dtype="uint8") as writer:
        writer.write(rows)
        return writer.commit()


def draw_batches(rng: np.random.Generator, n: int, count: int, dtype: type) -> list[np.ndarray]:
    sizes = rng.integers(0, n + 1, count)
    sizes[rng.random(count) < 0.2] = 0
    return [np.sort(rng.permutation(n)[:size]).astype(dtype) for size in sizes]


def fill(folder: Path, reader: Reader, base: RowFile, batches: list[np.ndarray], n_bytes: int, **options: Any) -> FileRecord:
    extents = ExtentMap(np.array([len(batch) for batch in batches]), base.row_bytes)
    with ExtentWriter(folder / "extents.rows", extents) as writer:
        writer.fill(base, lambda b: batches[b], n_bytes, **options)
        return writer.finish()


@pytest.mark.parametrize(("width", "backend"), covering(WIDTHS, ["io_uring", "pread"]))
def test_every_width(tmp_path: Path, width: int, backend: str) -> None:
    rng = np.random.default_rng(width)
    n = max(5, min(5000, (6 << 20) // width))
    rows = rng.integers(0, 256, (n, width), dtype=np.uint8)
    record = write_base(tmp_path, rows)
    batches = draw_batches(rng, n, 7, np.int32)
    reader = make_reader(backend)
    base = open_file(reader, tmp_path, record)
    scanned = []
    made = fill(tmp_path, reader, base, batches, 16 << 20, progress=scanned.append)
    check_sums(tmp_path, made)
    extents = ExtentMap(np.array([len(batch) for batch in batches]), width)
    assert made.n_bytes == PAGE_BYTES * (1 + extents.total_pages)
    assert sum(scanned) >= extents.total_pages * PAGE_BYTES
    file = open_file(reader, tmp_path, made)
    for window in (least_window(), 3 * PAGE_BYTES, 5 << 20):
        order = rng.permutation(len(batches))
        source = ExtentSource(file, extents, order, window)
        for b in order:
            out = np.zeros((len(batches[b]) + 3, width), np.uint8)
            positions = rng.permutation(len(out))[: len(batches[b])].astype(rng.choice([np.int32, np.int64]))
            if len(batches[b]):
                if b % 3 == 0:  # in order
                    source.gather(np.arange(len(batches[b])), out, None)
                    positions = np.arange(len(batches[b]))
                else:
                    source.gather(np.arange(len(batches[b])), out, positions)
                assert (out[positions] == rows[batches[b]]).all()
        assert source.stats.rows == extents.n_rows.sum()
        assert source.stats.bytes_read == extents.total_pages * PAGE_BYTES
        source.close()
    file.close()
    base.close()
    reader.close()
    assert reader.budget.used == 0


@settings(max_examples=40)
@given(st.data())
def test_episodes_and_sparse_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any number of batches, in memory that takes them in one pass or in as many as there are."""
    folder = tmp_path_factory.mktemp("extents")
    seed = data.draw(st.integers(0, 2**32 - 1))
    width = data.draw(st.sampled_from([1, 24, 400, 512, 4100, 9000]))
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 3000))
    rows = rng.integers(0, 256, (n, width), dtype=np.uint8)
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    batches = draw_batches(rng, min(n, data.draw(st.sampled_from([3, 60, 3000]))), data.draw(st.integers(1, 12)), dtype)
    extents = ExtentMap(np.array([len(batch) for batch in batches]), width)
    reader = make_reader(data.draw(st.sampled_from(["io_uring", "pread"])))
    base = open_file(reader, folder, write_base(folder, rows))
    n_bytes = data.draw(st.sampled_from([200_000, 600_000, 2_000_000, 20_000_000]))
    try:
        plan = episodes(extents, n_bytes, 8)
    except BudgetError as error:
        assert error.needed > n_bytes
        n_bytes = error.needed
        try:
            plan = episodes(extents, n_bytes, 8)
        except BudgetError:  # a later batch is larger
            n_bytes = 50_000_000
            plan = episodes(extents, n_bytes, 8)
    assert [e.begin for e in plan] == [0, *(e.end for e in plan[:-1])]
    assert plan[-1].end == len(batches)
    ends: list[int] = []
    kept = np.flatnonzero(rng.random(n) < data.draw(st.sampled_from([0, 0.01, 0.5, 1])))
    in_memory = np.zeros((len(kept) + 1, width), np.uint8)
    made = fill(folder, reader, base, batches, n_bytes, done=ends.append, kept=(kept, in_memory) if len(kept) else None)
    assert ends == [e.end for e in plan]
    assert (in_memory[:-1] == rows[kept]).all()
    assert not in_memory[-1].any()
    file = open_file(reader, folder, made)
    source = ExtentSource(file, extents, np.arange(len(batches)), 1 << 20)
    for batch in batches:
        out = np.zeros((len(batch), width), np.uint8)
        if len(batch):
            source.gather(np.arange(len(batch)), out, None)
        assert (out == rows[batch]).all()
    source.close()
    for each in (file, base, reader):
        each.close()


def small_set(tmp_path: Path, n: int = 4000) -> tuple[np.ndarray, Reader, FileRecord, RowFile, list[np.ndarray]]:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (n, 512), dtype=np.uint8)
    reader = make_reader()
    record = write_base(tmp_path, rows)
    return rows, reader, record, open_file(reader, tmp_path, record), draw_batches(rng, n, 9, np.int64)


def test_damage_is_found(tmp_path: Path) -> None:
    rows, reader, record, base, batches = small_set(tmp_path)
    extents = ExtentMap(np.array([len(batch) for batch in batches]), 512)
    made = fill(tmp_path, reader, base, batches, 16 << 20)

    def read() -> None:
        file = open_file(reader, tmp_path, made)
        try:
            source = ExtentSource(file, extents, np.arange(len(batches)), 1 << 20)
            try:
                for batch in batches:
                    out = np.zeros((len(batch), 512), np.uint8)
                    if len(batch):
                        source.gather(np.arange(len(batch)), out, None)
                    assert (out == rows[batch]).all()
            finally:
                source.close()
        finally:
            file.close()

    read()
    for name in ("extents.rows", "extents.rows.sums"):
        found = 0
        for _ in random_flips(tmp_path / name, 40, seed=2):
            try:
                read()
            except CorruptionError as error:
                assert error.path.startswith(str(tmp_path / "extents.rows"))
                found += 1
        assert found >= 35  # the header page is whoever opens the file's to check
    with pytest.raises(ValueError, match="comes next"):
        file = open_file(reader, tmp_path, made)
        source = ExtentSource(file, extents, np.arange(len(batches)), 1 << 20)
        try:
            source.gather(np.arange(1), np.zeros((1, 512), np.uint8), None)
        finally:
            source.close()
            file.close()
    base.close()
    for _ in random_flips(tmp_path / "base.rows", 10, seed=3):  # packing verifies what it copies
        with pytest.raises(CorruptionError):
            base = open_file(reader, tmp_path, record)
            try:
                fill(tmp_path, reader, base, [np.arange(len(rows))], 16 << 20)
            finally:
                base.close()
    reader.close()


def test_injected_results_of_reads(tmp_path: Path) -> None:
    _, reader, _, base, batches = small_set(tmp_path, n=9000)
    extents = ExtentMap(np.array([len(batch) for batch in batches]), 512)
    made = fill(tmp_path, reader, base, batches, 16 << 20)
    base.close()
    reader.close()
    for backend in ("io_uring", "pread"):
        reader = make_reader(backend)
        file = open_file(reader, tmp_path, made)
        for script, wrong in [(b"rirasrr", None), (b"ssssss", None), (b"rrE", OSError), (b"z" * 40, CorruptionError)]:
            stream = PageStream(file, np.array([[1, extents.total_pages]]), 4 << 20)
            stream.core.inject(script)
            stream.feed(stream.n_pieces)
            out = np.zeros((extents.total_pages, PAGE_BYTES), np.uint8)
            try:
                if wrong is None:
                    stream.core.scatter(len(out), np.arange(len(out)), out)
                    assert out.tobytes() == (tmp_path / made.name).read_bytes()[PAGE_BYTES:]
                else:
                    with pytest.raises(wrong) as caught:
                        stream.core.scatter(len(out), np.arange(len(out)), out)
                    assert caught.value.filename == str(tmp_path / made.name)
            finally:
                stream.close()
            with pytest.raises(ClosedError):
                stream.core.scatter(1, np.arange(1), out)
        file.close()
        reader.close()


def test_bad_rows_and_positions(tmp_path: Path) -> None:
    _, reader, _, base, _ = small_set(tmp_path)
    with pytest.raises(ValueError, match="rows for an extent"):
        extents = ExtentMap(np.array([3]), 512)
        with ExtentWriter(tmp_path / "e", extents) as writer:
            writer.fill(base, lambda b: np.arange(4), 16 << 20)
    made = fill(tmp_path, reader, base, [np.arange(10)], 16 << 20)
    file = open_file(reader, tmp_path, made)
    for positions, n_out in ((np.arange(1, 11), 10), (np.arange(-1, 9), 10), (np.arange(1, 11, dtype=np.int32), 10), (None, 9)):
        source = ExtentSource(file, ExtentMap(np.array([10]), 512), np.arange(1), 1 << 20)
        with pytest.raises(IndexError, match="position"):
            source.gather(np.arange(10), np.zeros((n_out, 512), np.uint8), positions)
        source.close()
    for each in (file, base, reader):
        each.close()
    assert sorted(os.listdir(tmp_path)) == ["base.rows", "base.rows.sums", "extents.rows", "extents.rows.sums"]


def test_a_gather_in_order_takes_no_memory(tmp_path: Path) -> None:
    """Positions that are 0, 1, … are never made: they were 4 bytes a row, beside the budget, as much again as such rows are."""
    n = 1 << 20
    rows = np.random.default_rng(0).integers(0, 256, (n, 4), dtype=np.uint8)
    reader = make_reader()
    with contextlib.closing(reader), contextlib.closing(open_file(reader, tmp_path, write_base(tmp_path, rows))) as base:
        made = fill(tmp_path, reader, base, [np.arange(n)], 32 << 20)
        out, addresses = np.zeros((n, 4), np.uint8), range(n)
        with contextlib.closing(open_file(reader, tmp_path, made)) as file:
            source = ExtentSource(file, ExtentMap(np.array([n]), 4), np.arange(1), 1 << 20)
            tracemalloc.start()
            try:
                source.gather(addresses, out, None)
                assert tracemalloc.get_traced_memory()[1] < 1 << 20  # NumPy's arrays are traced
            finally:
                tracemalloc.stop()
                source.close()
        assert (out == rows).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_that_do_not_ascend_are_refused(tmp_path: Path, dtype: type) -> None:
    width, n = 1000, 4000  # a few pieces, and rows that lie across two
    rows = np.random.default_rng(0).integers(0, 256, (n, width), dtype=np.uint8)
    reader = make_reader()
    base = RowFileWriter(tmp_path, "base.rows", RowLayout(width, 1, width), kind="feature", dtype="uint8")
    base.write(rows)
    file = open_file(reader, tmp_path, base.commit())
    cut = ((1 << 20) - PAGE_BYTES) // width
    for bad in ([n - 1, 0], [cut, cut], [5, 5], [7, 6], [0, n - 1, cut]):
        extents = ExtentMap(np.array([len(bad)]), width)
        with ExtentWriter(tmp_path / "e", extents) as writer, pytest.raises(ValueError, match="do not ascend"):
            writer.fill(file, lambda b, bad=bad: np.array(bad, dtype), 16 << 20)  # type: ignore[misc]
    file.close()
    reader.close()
    assert sorted(os.listdir(tmp_path)) == ["base.rows", "base.rows.sums"]


@pytest.mark.parametrize("kept", [[3, 3], [5, 2], [-1], [4000]])
def test_rows_that_cannot_be_kept_are_refused(tmp_path: Path, kept: list[int]) -> None:
    _, reader, _, base, batches = small_set(tmp_path)
    out = np.zeros((len(kept), 512), np.uint8)
    with pytest.raises((ValueError, IndexError), match=r"do not ascend|lies outside|ended before a row that is kept"):
        fill(tmp_path, reader, base, batches, 16 << 20, kept=(np.array(kept), out))
    for narrow in (out[:, :-1].copy(), out[:0]):
        with pytest.raises(ValueError, match="no room"):
            fill(tmp_path, reader, base, batches, 16 << 20, kept=(np.array([7]), narrow))
    base.close()
    reader.close()
    assert sorted(os.listdir(tmp_path)) == ["base.rows", "base.rows.sums"]


def test_an_extent_beyond_the_table_of_sums_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.touch()
    sums = np.zeros((4, 512), np.uint64)
    rows, bounds = np.arange(8), np.array([0, 8])
    fd = os.open(path, os.O_RDWR)
    offsets = np.array([511 * PAGE_BYTES])  # of what is taken for a table of one page
    packer = Packer(fd, str(path), 1, sums[:1], rows, bounds, offsets, (PAGE_BYTES, 512, 1, 512), 3, 1 << 16)
    packer.append(0, b"x" * 100)
    writer = threading.Thread(target=packer.write)
    writer.start()
    try:
        with pytest.raises(OSError, match="large") as caught:
            packer.finish()
        assert caught.value.errno == errno.EFBIG
    finally:
        packer.stop()
        writer.join()
        os.close(fd)
    assert not sums.any()
    assert path.stat().st_size == 0


def test_disk_budget_and_interruption(tmp_path: Path) -> None:
    _, reader, _, base, batches = small_set(tmp_path)
    extents = ExtentMap(np.array([len(batch) for batch in batches]), 512)
    disk = DiskQuota(extents.disk_bytes - 1)
    with pytest.raises(OSError, match="disk budget") as caught:
        ExtentWriter(tmp_path / "e", extents, disk)
    assert caught.value.errno == errno.ENOSPC
    assert disk.used == 0

    def check() -> None:
        raise KeyboardInterrupt

    disk = DiskQuota(extents.disk_bytes)
    with pytest.raises(KeyboardInterrupt):
        with ExtentWriter(tmp_path / "e", extents, disk) as writer:
            assert disk.used == extents.disk_bytes
            writer.fill(base, lambda b: batches[b], 16 << 20, check=check)
    assert disk.used == 0
    base.close()
    reader.close()
    assert sorted(os.listdir(tmp_path)) == ["base.rows", "base.rows.sums"]


def test_a_full_drive_is_met_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    disk = DiskQuota(None)
    with pytest.raises(OSError, match=r"full: the extents take 12\.\d* KiB, \d.* are free") as caught:
        ExtentWriter(tmp_path / "e", ExtentMap(np.array([8, 8]), 512), disk)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "e.tmp"))
    assert (disk.used, os.listdir(tmp_path)) == (0, [])


def _failing(folder: str, step: int) -> None:
    path = Path(folder)
    _, reader, _, base, batches = small_set(path)
    (path / "out").mkdir()
    for operation, error in (("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EIO"), ("open", "EMFILE")):
        for fault in sweep(str(path / "out"), operation, error, step=step):
            with fault:
                try:
                    extents = ExtentMap(np.array([len(batch) for batch in batches]), 512)
                    with ExtentWriter(path / "out" / "extents.rows", extents) as writer:
                        writer.fill(base, lambda b: batches[b], 600_000)
                        writer.finish(durable=True)
                    for name in ("extents.rows", "extents.rows.sums"):
                        (path / "out" / name).unlink()
                except OSError as caught:
                    assert fault.fired, caught
                    assert caught.errno == getattr(errno, error), caught
            assert not os.listdir(path / "out"), (operation, os.listdir(path / "out"))
    base.close()
    reader.close()


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.stress)])
def test_a_failing_disk_leaves_nothing(tmp_path: Path, step: int) -> None:
    run_in_fork(_failing, str(tmp_path), step)


def test_checksum_tables_beyond_the_budget(tmp_path: Path) -> None:
    """Tables over 5 % of the budget are read along with what they cover, and checked."""
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 256, (80_000, 512), dtype=np.uint8)
    record = write_base(tmp_path, rows)
    reader = make_reader(memory=1 << 20)
    base = open_file(reader, tmp_path, record)
    batches = [np.sort(rng.permutation(len(rows))[:n]) for n in (70_000, 5, 9_000)]
    extents = ExtentMap(np.array([len(batch) for batch in batches]), 512)
    made = fill(tmp_path, reader, base, batches, 8 << 20)
    check_sums(tmp_path, made)
    file = open_file(reader, tmp_path, made)
    assert base.verifies
    assert file.verifies
    source = ExtentSource(file, extents, np.array([2, 0, 1]), 1 << 20)
    for b in (2, 0, 1):
        out = np.zeros((len(batches[b]), 512), np.uint8)
        source.gather(np.arange(len(out)), out, None)
        assert (out == rows[batches[b]]).all()
    source.close()
    damaged = tmp_path / "base.rows.sums"
    data = bytearray(damaged.read_bytes())
    data[PAGE_BYTES + 8] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CorruptionError, match="table of checksums"):
        fill(tmp_path, reader, base, batches, 8 << 20)
    for each in (file, base, reader):
        each.close()
    assert reader.budget.used == 0


def test_a_stream_without_its_block_ends_with_its_threads(tmp_path: Path) -> None:
    """As Ctrl-C may come before the block that closes it; and a thread may begin only once it is closed."""
    _, reader, _, base, batches = small_set(tmp_path)
    file = open_file(reader, tmp_path, fill(tmp_path, reader, base, batches, 16 << 20))
    before = sorted(os.listdir("/proc/self/fd"))
    stream = PageStream(file, np.array([[1, 8]]), 1 << 20)  # nothing was fed: its threads wait
    threads = list(stream._threads)
    assert all(each.is_alive() for each in threads)
    core = stream.core
    del stream
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    core.close()
    core.read()
    assert core.n_reads == 0
    assert sorted(os.listdir("/proc/self/fd")) == before
    for each in (file, base, reader):
        each.close()


def test_close_beside_a_gather(tmp_path: Path) -> None:
    """A consumer that waits for what never comes ends with ClosedError, and close() waits for it."""
    _, reader, _, base, batches = small_set(tmp_path)
    made = fill(tmp_path, reader, base, batches, 16 << 20)
    file = open_file(reader, tmp_path, made)
    stream = PageStream(file, np.array([[1, 8]]), 1 << 20)  # nothing was fed: nothing is read
    out = np.zeros((8, PAGE_BYTES), np.uint8)
    outcome: list[BaseException] = []

    def consume() -> None:
        try:
            while True:
                with contextlib.suppress(IndexError):  # not allowed yet
                    stream.core.scatter(8, np.arange(8), out)
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    stream.close()
    thread.join()
    assert outcome
    for each in (file, base, reader):
        each.close()
