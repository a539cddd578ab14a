"""The measured rates of the drive: timed once, kept for a day, never in a gather's way."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.estimate.sharing import merged_reads
from featstore.storage import drive as drive_module
from featstore.storage import keptrates, rowfile
from featstore.storage import reader as reader_module
from featstore.storage.catalog import read_catalog
from featstore.storage.drive import DriveSpeed, drive_speed
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.lock import WRITER_LOCK, FileLock
from featstore.storage.rowfile import ReadStats
from featstore.storage.writer import FileRecord
from tests.support.cases import each
from tests.support.graphs import skewed_dataset
from tests.support.written_rows import opened, write_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("made") / "g", 3000, 40, narrow=3)


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, in which nothing that was measured is kept."""
    return Path(shutil.copytree(made, tmp_path / "g"))


def sources_of(g: featstore.OutOfCoreGraph) -> list[object]:
    return [store.source for store in g.features.values()]


def speed_of(g: featstore.OutOfCoreGraph, **options: Any) -> DriveSpeed:
    return drive_speed(g.reader, g.path, sources_of(g), **options)


def test_the_drive_is_measured_once_and_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(data, memory="64MiB") as g:
        found = speed_of(g)
        assert min(found.iops, found.bandwidth, found.write_bandwidth) > 0
        assert 0 < found.gather_bandwidth <= found.bandwidth
        assert 0 < found.fill_bandwidth <= found.bandwidth
        assert 0 <= found.write_overlap <= 1
        assert speed_of(g) is found
        assert g.budget.report().keys() <= {"reader buffers", "checksum tables", "node data"}
    assert not (data.parent / "g.runs").exists()
    generation = read_catalog(data).generation
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: pytest.fail("measured again"))
    with featstore.open(data, memory="64MiB") as g:
        assert speed_of(g) == found
        g.verify(progress=False)
    assert read_catalog(data).generation == generation


def test_sequential_reads_are_timed_on_a_long_stream(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few MiB are over before a drive is at speed: extents were then read at 2.7 times what had been measured."""
    monkeypatch.setattr(drive_module, "TIMED_MIN_BYTES", 1)
    seen: list[tuple[int, int]] = []

    class Spy(rowfile.PageStream):
        def __init__(self, file: Any, runs: Any, window_bytes: int, arena: Any) -> None:
            seen.append((int(runs[:, 1].sum()), file.n_bytes))
            super().__init__(file, runs, window_bytes, arena)

    monkeypatch.setattr(rowfile, "PageStream", Spy)
    with featstore.open(data, memory="64MiB") as g:
        drive_module.measure_drive(g.reader, f"{g.path}.runs", sources_of(g))
        held = g.budget.used
        monkeypatch.setattr(drive_module, "STREAM_BYTES", 64 << 10)
        drive_module.measure_drive(g.reader, f"{g.path}.runs", sources_of(g))
        assert g.budget.used == held
        size = g.features["x"].source.n_bytes
    long = [n_pages for n_pages, n_bytes in seen if n_bytes == size]
    assert len(long) == len(seen)
    assert long[0] == size // 4096  # the rate of reads in sequence
    assert 16 in long
    assert drive_module.METHOD > 1  # what was measured otherwise is not used


class Clock:
    """A clock that runs while something is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "expected", "n_slices"),
    [
        ([9.0, 1.0, 1.0, 1.0, 9.0], 1.0, 4),  # stable, whatever the first request took
        ([1.0, 1.05, 1.09, 7.0], 1 / 1.05, 3),
        ([1.0, 2.0, 4.0, 8.0, 9.0], 1 / 4, 5),  # never stable: until its time is over
        ([30.0, 1.0, 1.0], 1.0, 2),  # of two the one that was not the first
        ([30.0, 40.0, 1.0], 1 / 30, 2),
    ],
)
def test_a_probe_ends_when_it_is_stable_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], expected: float, n_slices: int
) -> None:
    clock, left = Clock(monkeypatch, drive_module), list(seconds)

    def probe() -> float:
        taken = left.pop(0)
        clock.now += taken
        return 1 / taken

    assert drive_module.settled(probe, 20.0) == pytest.approx(expected)
    assert len(left) == len(seconds) - n_slices
    left[:] = [5.0, 1.0]
    assert drive_module.settled(probe, 1e9, 1) == 1 / 5.0  # there is nothing more to write


@pytest.mark.parametrize("share", [1e9, 0.0])
@pytest.mark.parametrize("n_bytes", [1 << 40, 65 << 20, 1 << 20])
def test_a_stream_is_timed_once_it_flows(monkeypatch: pytest.MonkeyPatch, share: float, n_bytes: int) -> None:
    """Its first batch waits for threads and memory; the others come in bursts, every second one out of memory."""
    clock, size, window = Clock(monkeypatch, drive_module), 16 << 20, drive_module.MOST_WINDOW_BYTES
    pace, told = itertools.chain([3.0], itertools.cycle([0.001, 0.019])), list[int]()

    def read(_: Any, __: Any, most: int, is_over: Any) -> tuple[int, float]:
        while sum(told) < min(most, n_bytes):
            told.append(min(size, min(most, n_bytes) - sum(told)))
            clock.now += next(pace)
            if is_over(told[-1]):
                break
        return sum(told), clock.now

    monkeypatch.setattr(drive_module, "_read_part", read)
    monkeypatch.setattr(drive_module, "CALIBRATION_S", share)
    nothing: Any = None
    found = drive_module._time_stream(nothing, SimpleNamespace(n_bytes=n_bytes))
    if n_bytes == 1 << 40:
        assert found == pytest.approx(size / 0.01, rel=0.15)
        assert sum(told) - size >= window
        assert sum(told) <= (drive_module.STREAM_BYTES - window if share else size + window)  # the end comes out of memory
    elif n_bytes > size:
        assert found == pytest.approx((sum(told) - size) / (clock.now - 3.0))
    else:
        assert found == n_bytes / 3.0  # there was nothing more


def test_measuring_is_bounded_by_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time for more, every probe ends after two slices, and what they are made of is the least there is."""
    monkeypatch.setattr(drive_module, "TIMED_MIN_BYTES", 1)
    monkeypatch.setattr(drive_module, "CALIBRATION_S", 0.0)
    assert sum(drive_module.SHARES.values()) == pytest.approx(1.0)
    slices: list[int] = []
    settled = drive_module.settled

    def counted(probe: Any, end: float, most: int | None = None) -> float:
        seen: list[float] = []
        rate = settled(lambda: (seen.append(probe()), seen[-1])[1], end, most)
        slices.append(len(seen))
        return rate

    monkeypatch.setattr(drive_module, "settled", counted)
    with featstore.open(data, memory="64MiB") as g:
        found = drive_module.measure_drive(g.reader, f"{g.path}.runs", sources_of(g))
    assert slices == [1, 2, 2, 2, 2]  # the scratch file is one slice; random reads, gathers, fills, overlap
    assert min(found.iops, found.bandwidth, found.write_bandwidth, found.gather_bandwidth, found.fill_bandwidth) > 0


@pytest.mark.parametrize(("both_s", "expected"), [(0.6, 0.0), (0.5, 0.5), (0.4, 1.0), (0.3, 1.0), (0.9, 0.0)])
def test_overlap_is_what_the_shorter_one_gains(monkeypatch: pytest.MonkeyPatch, both_s: float, expected: float) -> None:
    """Writing takes 0.4 s, reading 0.2 s, and both at once between the longer of them and their sum."""
    clock, first = Clock(monkeypatch, drive_module), threading.current_thread()
    beside: list[bool] = []

    def writes(path: str, n_bytes: int) -> float:
        beside.append(threading.current_thread() is not first)
        if not beside[-1]:
            clock.now += 0.4
        return 0.4

    def reads(reader: Any, file: Any, n_bytes: int) -> tuple[int, float]:
        seconds = 0.2 if len(beside) % 2 else both_s
        clock.now += seconds
        return n_bytes, seconds

    class Now:
        """A pool whose work is done when it is asked for, in another thread."""

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, work: Any, *args: Any) -> Any:
            thread = threading.Thread(target=work, args=args)
            thread.start()
            thread.join()
            return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr(drive_module, "_time_writes", writes)
    monkeypatch.setattr(drive_module, "_read_part", reads)
    monkeypatch.setattr(drive_module, "ThreadPoolExecutor", Now)
    nothing: Any = None
    assert drive_module._time_overlap(nothing, nothing, "unused", 1 << 26, 2e9, 1e9) == pytest.approx(expected)
    assert beside[:2] == [False, True]


def test_a_scratch_file_that_was_not_written_whole_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_module, "CALIBRATION_S", 0.0)
    monkeypatch.setattr(drive_module, "SCRATCH_BYTES", 8 << 20)
    monkeypatch.setattr(drive_module, "SLICE_BYTES", 1 << 20)
    with featstore.open(data, memory="64MiB") as g:
        assert speed_of(g).iops > 0


def test_a_slow_drive_is_written_no_longer_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB/s, after a first slice of 2 s, and 1 s to sync: two slices of four are written, and the rest is not there."""
    clock = Clock(monkeypatch, drive_module)
    size, took, seconds = 64 << 20, iter((2.0, 0.16)), 1.0

    @contextmanager
    def writing(path: str, n_bytes: int) -> Iterator[Any]:
        def write(first: int, stop: int) -> float:
            assert stop - first == drive_module.SLICE_BYTES
            each = next(took)
            clock.now += each
            return each

        yield write, lambda: seconds

    monkeypatch.setattr(drive_module, "_writing", writing)
    path = tmp_path / "scratch"
    path.write_bytes(b"")
    os.truncate(path, size)
    rate, n_bytes = drive_module._time_first_writes(str(path), size)
    assert n_bytes == path.stat().st_size == 32 << 20
    assert rate == pytest.approx(n_bytes / (2 * 0.16 + seconds))


def test_what_was_measured_is_forgotten_after_a_day(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that was busy when it was measured is not thought slow for ever."""
    clock, speeds = [1e9], iter(DriveSpeed(float(k), 2.0, 3.0, 7.0, 1.5, 0.5) for k in range(1, 9))
    monkeypatch.setattr(keptrates.time, "time", lambda: clock[0])
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: next(speeds))

    def iops(**options: Any) -> float:
        with featstore.open(data) as g:
            return speed_of(g, **options).iops

    assert iops() == 1
    for seconds, expected in ((23.9 * 3600, 1), (0.2 * 3600, 2), (3600, 2), (-2 * 3600, 3)):  # clocks are set back, too
        clock[0] += seconds
        assert iops() == expected
    assert iops(again=True) == 4
    assert iops() == 4
    with featstore.open(data) as g:
        assert [speed_of(g).iops, speed_of(g, again=True).iops, speed_of(g).iops] == [4, 5, 5]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOLCK, errno.EROFS])
def test_rates_that_cannot_be_kept_are_measured_again(data: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full drive, or one without locks, for instance; other errors are raised."""
    speeds = iter(DriveSpeed(float(k), 2.0, 3.0, 7.0, 1.5, 0.5) for k in range(1, 9))
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: next(speeds))
    codes = [code, code, errno.EIO]

    def fails(path: str) -> None:
        raise OSError(codes.pop(0), "as told")

    monkeypatch.setattr(keptrates, "Update", fails)
    with featstore.open(data) as g:
        assert [speed_of(g).iops, speed_of(g, again=True).iops] == [1, 2]
        with pytest.raises(OSError, match="as told"):
            speed_of(g, again=True)


@pytest.mark.parametrize("age_s", [60.0, 1e6])
def test_rates_of_a_file_that_was_just_written_last_as_long_as_it_was_there(
    data: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """A cache of the drive, or of a virtual machine's host, may still have it."""
    monkeypatch.setattr(drive_module, "TIMED_MIN_BYTES", 1)
    clock, speeds = [0.0], iter(DriveSpeed(float(k), 2.0, 3.0, 7.0, 1.5, 0.5) for k in range(1, 9))
    monkeypatch.setattr(keptrates.time, "time", lambda: clock[0])
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: next(speeds))

    def iops_after(seconds: float) -> float:
        with featstore.open(data) as g:
            clock[0] = Path(g.features["x"].source.path).stat().st_ctime + seconds
            return speed_of(g).iops

    lasts_s = min(age_s, 24 * 3600)
    found = [iops_after(age_s + share * lasts_s) for share in (0.0, 0.9, 1.1, 2.0)]
    assert found == [1, 1, 2, 2]


@pytest.mark.parametrize("n_pages", [1, 5, 4096, 12_345, 10_000_000])
@pytest.mark.parametrize("n_read", [1, 3, 4096, 9_000, 65_536])
def test_reads_are_spread_over_the_file(n_pages: int, n_read: int) -> None:
    """One run in each of equal parts: a part that a cache holds counts by its share of the file."""
    n_read = min(n_pages, n_read)
    runs = drive_module._spread(n_pages, n_read)
    runs = runs[np.argsort(runs[:, 0])]
    k, part = len(runs), n_pages / len(runs)
    assert k == max(1, n_read // 4096)
    assert n_read - k < runs[:, 1].sum() <= n_read
    for number, (first, n) in enumerate(runs.tolist()):
        assert int(number * part) <= first
        assert first + n <= min(n_pages, (number + 1) * part + 1)
    assert (runs[:-1].sum(axis=1) <= runs[1:, 0] + 1).all()


@pytest.mark.parametrize("row_bytes", [4, 512, 4096, 16_384])
@pytest.mark.parametrize("n_bytes", [1 << 20, 1 << 30])
def test_gathers_are_timed_beside_their_operations(
    data: Path, monkeypatch: pytest.MonkeyPatch, row_bytes: int, n_bytes: int
) -> None:
    """A file of which rows are read at 100 MB/s, and 1,000 reads a second: found are the former, and rows that lie in it."""
    clock, asked, rng = [0.0], [], np.random.default_rng(7)

    class File:
        def __init__(self) -> None:
            self.row_bytes, self.n_bytes, self.n_rows = row_bytes, n_bytes, n_bytes // row_bytes

        def gather(self, rows: np.ndarray, out: np.ndarray, gap_bytes: int) -> ReadStats:
            assert rows.min() >= 0
            assert rows.max() < self.n_rows
            assert len(rows) == len(np.unique(rows)) == len(out)
            asked.append(len(rows))
            reads, n_read = merged_reads(rows, row_bytes, gap_bytes)
            clock[0] += reads / 1000 + (n_read - reads * 4096) / 1e8
            return ReadStats(rows=len(rows), reads=reads, bytes_read=n_read)

    monkeypatch.setattr(drive_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(drive_module.np.random, "default_rng", lambda: rng)  # of 64 rows a draw may take any number
    with featstore.open(data, memory="256MiB") as g:
        held = g.budget.used
        file: Any = File()
        assert drive_module._time_gather(g.reader, file, 1000.0, 2e9) == pytest.approx(1e8, rel=1e-6)
        assert drive_module._time_gather(g.reader, file, 1000.0, 5e7) == 5e7
        assert g.budget.used == held
    assert 10 <= min(asked) <= max(asked) <= 0.35 * (64 << 20) / 4096


@pytest.mark.parametrize("what", ["another machine", "through the page cache"])
def test_another_machine_is_measured_anew(data: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    fixed = DriveSpeed(1.0, 2.0, 3.0, 7.0, 1.5, 0.5)
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: fixed)
    with featstore.open(data) as g:
        assert speed_of(g) == fixed
    if what == "another machine":
        monkeypatch.setattr(drive_module.platform, "node", lambda: "elsewhere")
    other = DriveSpeed(4.0, 5.0, 6.0, 7.0, 4.5, 0.0)
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: other)
    with featstore.open(data, backend="buffered" if what == "through the page cache" else "auto") as g:
        assert speed_of(g) == other


BAD: dict[str, list[Any]] = {
    "iops": ["fast", -1.0],
    "bandwidth": [None],
    "fill_bandwidth": [0.0],
    "write_overlap": [-0.1, 1.1],
    "when": [None, "today"],
    "where": [{"machine": "b"}],
}


@pytest.mark.parametrize(("name", "bad"), each(BAD))
def test_a_record_that_is_none_is_not_used(name: str, bad: Any) -> None:
    good = {"where": {}, "when": time.time(), "iops": 1.0, "bandwidth": 2.0, "write_bandwidth": 3.0, "gather_bandwidth": 7.0}
    good |= {"fill_bandwidth": 1.5, "write_overlap": 0.5}
    assert drive_module._saved(good, {}) == DriveSpeed(1.0, 2.0, 3.0, 7.0, 1.5, 0.5)
    for record in (good | {name: bad}, {"where": {}}):
        assert drive_module._saved(record, {}) is None
    assert drive_module._saved(None, {}) is None


def test_a_dataset_that_is_being_written_keeps_nothing(data: Path) -> None:
    with featstore.open(data) as g, FileLock(os.path.join(data, WRITER_LOCK), exclusive=True):
        assert speed_of(g).iops > 0
    assert drive_module.KEY not in read_catalog(data).extra


def test_a_full_disk_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with featstore.open(data) as g:
        with pytest.raises(OSError, match="full"):
            speed_of(g)
        assert not (data.parent / "g.runs").exists()


def test_the_measured_drive_sets_the_gap() -> None:
    assert DriveSpeed(100_000, 1.2e9).gap_bytes == 9000
    assert DriveSpeed(1e9, 1e9).gap_bytes == PAGE_BYTES
    assert DriveSpeed(100, 2e9).gap_bytes == 256 << 10


@pytest.fixture
def measurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FileRecord, np.ndarray]:
    """A small file whose drive is measured at the first gather all the same."""
    monkeypatch.setattr(reader_module, "MEASURE_RUN_BYTES", 4 << 20)
    monkeypatch.setattr(reader_module, "TIMED_MIN_BYTES", 4 << 20)
    monkeypatch.setattr(reader_module, "MEASURE_MIN_ROWS", 3)
    rows = np.random.default_rng(0).integers(0, 256, (1100, 4096), dtype=np.uint8)
    return write_rows(tmp_path, rows), rows


@pytest.mark.parametrize("what", ["unlinked", "replaced"])
def test_measuring_reads_the_file_that_is_open(tmp_path: Path, measurable: tuple[FileRecord, np.ndarray], what: str) -> None:
    record, rows = measurable
    with opened(tmp_path, record) as (file, reader):
        assert file.mode.startswith("direct")
        (tmp_path / "rows.bin").unlink()
        if what == "replaced":
            (tmp_path / "rows.bin").write_bytes(b"another file")
        out = np.zeros((3, 4096), np.uint8)
        file.gather(np.array([7, 1000, 3]), out)
        assert np.array_equal(out, rows[[7, 1000, 3]])
        assert reader.drive is not None
        assert reader.budget.peak > 4 << 20


def test_measuring_never_fails_a_gather(tmp_path: Path, measurable: tuple[FileRecord, np.ndarray]) -> None:
    record, rows = measurable
    out = np.zeros((3, 4096), np.uint8)
    with opened(tmp_path, record) as (file, reader):
        with reader.engine() as engine:  # the one that there is
            engine.inject(b"E")  # of a page that nobody asked for
        file.gather(np.array([7, 1000, 3]), out)
        assert np.array_equal(out, rows[[7, 1000, 3]])
        assert reader.drive is None
    with opened(tmp_path, record, memory=4 << 20) as (file, reader):  # no memory for it
        file.gather(np.array([7, 1000, 3]), out)
        assert reader.drive is None
