"""Speeds of the drive under a dataset, timed on its files and kept in its catalog for a day."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore._core.descriptor import open_fd
from featstore._core.io import Engine, File, direct_mode
from featstore._core.rows import copy_rows
from featstore.distinct import distinct
from featstore.storage.calls import CANNOT_WRITE, close_fd, naming, pwrite_all
from featstore.storage.catalog import Catalog, current_catalog
from featstore.storage.extents import WRITERS
from featstore.storage.keptrates import MOST_AGE_S, keep, kept_rates
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.pagestream import MOST_WINDOW_BYTES, least_window
from featstore.storage.rowfile import Queues, RowFile
from featstore.storage.rundir import cannot_hold_runs, runs_directory

__all__ = [
    "TIMED_MIN_BYTES",
    "DriveSpeed",
    "drive_speed",
    "kept_speed",
    "measure_drive",
    "settled",
    "share_end",
    "time_reads",
]

KEY = "drive/speed"
METHOD = 8  # version of the measuring method; rates of another version are measured again
CALIBRATION_S = 0.8  # for all probes here and those of copies; each probe ends with its current slice
SHARES = {"write": 0.08, "random": 0.25, "stream": 0.17, "gather": 0.1, "fill": 0.12, "overlap": 0.18, "copy": 0.1}
# A probe also ends once its last STABLE_SLICES slices differ by at most the factor STABLE.
LEAST_SLICES, STABLE_SLICES, STABLE = 2, 3, 1.1
SLICE_BYTES = 16 << 20  # of a stream, and of writes
TIMED_MIN_BYTES = 64 << 20  # smaller files say little about the drive
STREAM_BYTES = 256 << 20  # shorter runs are over before the drive is at speed
RANDOM_READS = 8192  # enough for the rate of a deep queue, without that of filling and draining it
FIRST_READS = 256  # reads that tell how many random reads there is time for
FIRST_GATHER_S = 0.05  # to time reads when a gather first needs the ratio of their rates
SCRATCH_BYTES = 64 << 20
FILL_BYTES = 64 << 20  # bytes that are read at once and then copied into a cache
LEAST_SCRATCH_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
GATHER_BYTES, CLUSTER_BYTES = 64 << 20, 2 << 20  # gathered rows lie in dense clusters of the file
GATHER_SHARE = 0.3  # share of a cluster's pages (or larger rows) that are gathered; reads cover the others, too


@dataclass(frozen=True)
class DriveSpeed:
    """The measured speed of a drive with a reader's queue.

    Parameters
    ----------
    iops : float
        Random reads of 4 KiB a second.
    bandwidth : float
        Bytes a second in large sequential reads.
    write_bandwidth : float
        Bytes a second in large sequential writes; 0 if not measured.
    gather_bandwidth : float
        Bytes a second that a gather of scattered rows reads and checks beyond the first page of each read; 0 if not measured.
    fill_bandwidth : float
        Bytes a second when reading and checking alternate with copying into a cache; 0 if not measured.
    write_overlap : float
        Share of the shorter of reading and writing that overlaps with the longer one; 0 if they run one after the other.
    """

    iops: float
    bandwidth: float
    write_bandwidth: float = 0.0
    gather_bandwidth: float = 0.0
    fill_bandwidth: float = 0.0
    write_overlap: float = 0.0

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that cost about as much as another read; reads across larger gaps are kept apart."""
        return int(min(max(0.75 * self.bandwidth / self.iops, PAGE_BYTES), 256 << 10))


class DriveReader(Queues, Protocol):
    """A reader with the speed of its drive; None until it is measured."""

    drive: DriveSpeed | None
    backend: str


def drive_speed(
    reader: DriveReader,
    dataset: str,
    sources: Iterable[object],
    run_dir: str | os.PathLike[str] | None = None,
    disk: int | None = None,
    *,
    again: bool = False,
) -> DriveSpeed:
    """Look up the speed of the drive under a dataset in its catalog, or measure and keep it; sets ``reader.drive``.

    Parameters
    ----------
    reader : Reader
    dataset : str
        The dataset's directory.
    sources : iterable of RowSource
        Sources of the dataset's features. Reads are timed on the largest row file, or on the scratch file if all are small.
    run_dir : path-like, optional
        Directory of run files, ``<dataset>.runs`` by default. A scratch file of at most 64 MiB, without a name, is written
        on its drive.
    disk : int, optional
        Most bytes of the scratch file; at least 1 MiB is written.
    again : bool
        Measure in any case.

    Notes
    -----
    Measuring takes at most ``CALIBRATION_S``, and the rest of the slice at which each probe's time ends. The probes read up to
    256 MiB, of all parts of the file, as extents are read, read random pages, and gather rows out of up to 64 MiB. They write as
    much, read and copy in turns, and write again, alone and beside a stream. A rate is the median of slices, so one slow request
    hardly changes it.

    Rates are not used if they were measured more than a day ago, on another machine, on another drive, through another backend
    or by another method, nor for longer than the file had been there. So rates measured while other programs used the drive, or
    right after the file was written, expire soon. A dataset that may not be written,
    or that another process is writing, keeps no rates, and is measured again.
    """
    backend = reader.backend if reader.direct else f"{reader.backend}, buffered"
    where = {"machine": platform.node(), "drive": os.stat(dataset).st_dev, "backend": backend, "method": METHOD}
    known = reader.drive
    if known is not None and known.write_bandwidth and not again:
        return known
    kept = current_catalog(dataset).extra.get(KEY)
    found = None if again else _saved(kept, where)
    if found is None:
        sources = [*sources]
        found, timed = measure_drive(reader, runs_directory(dataset, run_dir), sources, disk), _timed_file(sources)
        # What was just written may be read out of a cache of the drive, or of a virtual machine's host, for about as long again.
        lasts_s = MOST_AGE_S if timed is None else max(0.0, time.time() - os.stat(timed.path).st_ctime)
        keep(dataset, KEY, {"where": where, "when": time.time(), "lasts_s": lasts_s, **asdict(found)})
    reader.drive = found
    return found


def kept_speed(catalog: Catalog) -> dict[str, Any] | None:
    """Get the entry of a catalog with the drive's rates; None if there is none."""
    return catalog.extra.get(KEY)


def share_end(name: str) -> float:
    """Compute the time, by ``time.perf_counter``, at which a probe that begins now has used its share of ``CALIBRATION_S``."""
    return time.perf_counter() + CALIBRATION_S * SHARES[name]


def _slice_s(name: str) -> float:
    """Compute the seconds of one slice of a probe: its share of the time, divided by ``STABLE_SLICES``."""
    return CALIBRATION_S * SHARES[name] / STABLE_SLICES


def settled(probe: Callable[[], float], end: float, most: int | None = None) -> float:
    """Compute the median of repeated calls of ``probe``, which end once the values are stable or ``end`` is past.

    ``probe`` is called at least twice, and at most ``most`` times. Of two middle values the higher one counts, because a first
    slice is slow if the drive or memory was idle.
    """
    found: list[float] = []
    while len(found) != most and not _are_enough(found, end):
        found.append(probe())
    return statistics.median_high(found)


def _are_enough(found: Sequence[float], end: float) -> bool:
    last = found[-STABLE_SLICES:]
    is_stable = len(last) == STABLE_SLICES and max(last) <= STABLE * min(last)
    return is_stable or (len(found) >= LEAST_SLICES and time.perf_counter() >= end)


def time_reads(reader: Queues, file: File, run_bytes: int, n_random: int) -> DriveSpeed:
    """Time rounds of ``n_random`` random page reads, and ``run_bytes`` in sequence, on an open file; nothing is verified."""
    n_run = max(1, min(run_bytes, file.size) // PAGE_BYTES)
    n_random = min(n_random, n_run)
    pages = file.pages()
    rng = np.random.default_rng()  # other pages each time, which no cache of the drive holds
    try:
        with reader.budget.reserve("reader buffers", n_run * PAGE_BYTES), reader.engine(n_random) as engine:
            out = np.empty((n_run, PAGE_BYTES), np.uint8)

            def run() -> float:
                begin = time.perf_counter()
                engine.read(pages, int(rng.integers(0, pages.n_rows - n_run + 1)), n_run, out)
                return out.nbytes / (time.perf_counter() - begin)

            begin, some = time.perf_counter(), partial(_random_rate, engine, pages, n_random, rng, out)
            return DriveSpeed(settled(some, begin + FIRST_GATHER_S / 2), settled(run, begin + FIRST_GATHER_S))
    finally:
        pages.close()


def _random_rate(engine: Engine, pages: File, n: int, rng: np.random.Generator, out: npt.NDArray[np.uint8]) -> float:
    """Read ``n`` random pages at once; return reads a second."""
    rows = rng.integers(0, pages.n_rows, n)
    begin = time.perf_counter()
    engine.gather(pages, rows, out, None, 0)
    return n / (time.perf_counter() - begin)


def _time_random(reader: Queues, file: File) -> float:
    """Measure random page reads a second, with as many reads at once as there is time for."""
    end, rng, pages = share_end("random"), np.random.default_rng(), file.pages()
    n = max(1, min(RANDOM_READS, pages.n_rows, reader.budget.available // 4 // PAGE_BYTES))
    try:
        with reader.budget.reserve("reader buffers", n * PAGE_BYTES), reader.engine(n) as engine:
            out = np.empty((n, PAGE_BYTES), np.uint8)

            first = min(n, FIRST_READS)
            n = min(n, max(first, int(_random_rate(engine, pages, first, rng, out) * _slice_s("random"))))
            return settled(partial(_random_rate, engine, pages, n, rng, out), end)
    finally:
        pages.close()


def _saved(entry: dict[str, Any] | None, where: dict[str, Any]) -> DriveSpeed | None:
    rates = kept_rates(entry, where, DriveSpeed)
    return None if rates is None else DriveSpeed(**rates)


def _timed_file(sources: Iterable[object]) -> RowFile | None:
    """Find the largest row file of ``sources``; None if all are small."""
    files = (source for source in sources if isinstance(source, RowFile) and source.n_bytes >= TIMED_MIN_BYTES)
    return max(files, key=lambda file: file.n_bytes, default=None)


def measure_drive(reader: DriveReader, run_dir: str, sources: Iterable[object] = (), disk: int | None = None) -> DriveSpeed:
    """Measure a drive, as :func:`drive_speed` says, and keep nothing.

    The scratch file lies where ``run_dir`` is, or is to be. It has no name, so that a killed process leaves nothing.
    """
    n_bytes = max(LEAST_SCRATCH_BYTES, min(SCRATCH_BYTES, SCRATCH_BYTES if disk is None else disk) // CHUNK_BYTES * CHUNK_BYTES)
    with _nameless(run_dir) as path:
        write_bandwidth, n_bytes = _time_first_writes(path, n_bytes)
        file = _timed_file(sources)
        scratch = None
        if file is None:
            fds = open_fd(path, os.O_RDONLY | os.O_CLOEXEC), -1
            file = scratch = RowFile(
                reader, path, RowLayout(PAGE_BYTES, 1, PAGE_BYTES), n_bytes // PAGE_BYTES - 1, 0, 0, "off", fds=fds
            )
        try:
            with file.in_use() as core:
                iops = _time_random(reader, core)
            bandwidth = _time_stream(reader, file)
            gathers = _time_gather(reader, file, iops, bandwidth)
            fill = _time_fill(reader, file, bandwidth)
            overlap = _time_overlap(reader, file, path, n_bytes, bandwidth, write_bandwidth)
            return DriveSpeed(iops, bandwidth, write_bandwidth, gathers, min(bandwidth, fill), overlap)
        finally:
            if scratch is not None:
                scratch.close()


@contextmanager
def _nameless(run_dir: str) -> Iterator[str]:
    """Make a file without a name on the drive of ``run_dir``; yield a path by which this process opens it again.

    Errors of the file name ``run_dir``.
    """
    place = os.path.abspath(run_dir)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    path = ""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            path = f"/proc/self/fd/{file.fileno()}"
            yield path
    except OSError as error:
        if error.errno in CANNOT_WRITE and not path:
            raise cannot_hold_runs(error, run_dir) from None
        if error.errno is not None and error.filename in (None, path, place):
            raise OSError(error.errno, error.strerror, run_dir) from None
        raise


def _time_gather(reader: Queues, file: RowFile, iops: float, bandwidth: float) -> float:
    """Gather rows so dense that reads merge; return bytes a second beyond each read's first page, at most ``bandwidth``."""
    end = share_end("gather")
    unit = max(PAGE_BYTES, file.row_bytes)
    n_units, size = max(1, file.n_bytes // unit), max(4, CLUSTER_BYTES // unit)
    room = int(min(GATHER_BYTES, reader.budget.available // 4, bandwidth * _slice_s("gather")))
    rng = np.random.default_rng()

    def drawn() -> npt.NDArray[np.int64]:
        blocks = rng.permutation(max(1, n_units // size))[: max(1, room // (size * unit))]
        units = np.concatenate([block * size + np.flatnonzero(rng.random(size) < GATHER_SHARE) for block in np.sort(blocks)])
        return distinct(units[units < n_units] * file.n_rows // n_units)

    def gather() -> float:
        rows = drawn()
        if not len(rows):
            return bandwidth
        with reader.budget.reserve("reader buffers", len(rows) * file.row_bytes):
            out = np.zeros((len(rows), file.row_bytes), np.uint8)
            begin = time.perf_counter()
            done = file.gather(rows, out, gap_bytes=DriveSpeed(iops, bandwidth).gap_bytes)
            seconds = time.perf_counter() - begin
        beyond, aside = done.bytes_read - done.reads * PAGE_BYTES, seconds - done.reads / iops
        return min(bandwidth, beyond / aside) if beyond > 0 and aside > 0 else bandwidth

    return settled(gather, end)


def _time_fill(reader: Queues, file: RowFile, bandwidth: float) -> float:
    """Read and check a part of a file, then copy it as into a cache; return bytes a second."""
    room = int(min(FILL_BYTES, file.n_bytes, reader.budget.available // 4, max(CHUNK_BYTES, bandwidth * _slice_s("fill") / 2)))
    n_bytes = room // PAGE_BYTES * PAGE_BYTES
    with reader.budget.reserve("reader buffers", 2 * n_bytes):
        rows, cache = (np.ones((n_bytes // PAGE_BYTES, PAGE_BYTES), np.uint8) for _ in range(2))
        end = share_end("fill")

        def fill() -> float:
            done, read_s = _read_part(reader, file, n_bytes, lambda _: time.perf_counter() >= end)
            begin = time.perf_counter()
            copy_rows(rows[: done // PAGE_BYTES], None, cache[: done // PAGE_BYTES], None)
            return done / (read_s + time.perf_counter() - begin)

        return settled(fill, end)


def _time_overlap(reader: Queues, file: RowFile, path: str, n_bytes: int, bandwidth: float, write_bandwidth: float) -> float:
    """Measure ``write_overlap``: overwrite a file alone, and beside a stream that takes about as long."""
    end = share_end("overlap")
    room = int(write_bandwidth * _slice_s("overlap") / 3)  # a round has three parts: a write, a read, and both at once
    n_bytes = min(n_bytes, max(CHUNK_BYTES, room // CHUNK_BYTES * CHUNK_BYTES))

    def overlap() -> float:
        write_s = _time_writes(path, n_bytes)
        n_read = max(PAGE_BYTES, min(int(bandwidth * write_s), STREAM_BYTES))
        begin = time.perf_counter()
        _read_part(reader, file, n_read)
        middle = time.perf_counter()
        with ThreadPoolExecutor(1, thread_name_prefix="featstore-measure") as pool:
            writing = pool.submit(_time_writes, path, n_bytes)
            _read_part(reader, file, n_read)
            writing.result()
        read_s, both_s = middle - begin, time.perf_counter() - middle
        return min(1.0, max(0.0, (read_s + write_s - both_s) / min(read_s, write_s)))

    return settled(overlap, end)


def _time_stream(reader: Queues, file: RowFile) -> float:
    """Measure bytes a second of a stream once it flows, without its start (threads, memory) and its end, which reads nothing.

    The rate is that of the whole flow, not of slices, because pages that were read ahead arrive in bursts.
    """
    end, done = share_end("stream"), 0
    most = min(STREAM_BYTES, file.n_bytes) - MOST_WINDOW_BYTES
    marks: list[tuple[int, float]] = []  # bytes so far, and the time

    def is_over(n_bytes: int) -> bool:
        nonlocal done
        done += n_bytes
        marks.append((done, time.perf_counter()))
        (first, _), (last, now) = marks[0], marks[-1]
        return last >= most or (now >= end and last - first >= MOST_WINDOW_BYTES)

    n_bytes, seconds = _read_part(reader, file, STREAM_BYTES, is_over)
    (first, begin), (last, now) = marks[0], marks[-1]
    return (last - first) / (now - begin) if last > first else n_bytes / seconds


def _read_part(
    reader: Queues, file: RowFile, n_bytes: int, is_over: Callable[[int], bool] = lambda n_bytes: False
) -> tuple[int, float]:
    """Read parts of a file as extents are read, copying one batch's rows at a time; return their bytes and the seconds.

    ``is_over`` gets the bytes of each batch, and ends the reading by returning True.
    """
    runs = _spread(file.n_bytes // PAGE_BYTES, max(1, min(n_bytes, file.n_bytes) // PAGE_BYTES))
    n_pages = int(runs[:, 1].sum())
    window_bytes = min(MOST_WINDOW_BYTES, max(least_window(), reader.budget.available // 8))
    n_batch = max(1, min(window_bytes // PAGE_BYTES, SLICE_BYTES // PAGE_BYTES, n_pages))
    with reader.budget.reserve("reader buffers", window_bytes + n_batch * PAGE_BYTES):
        out = np.zeros((n_batch, PAGE_BYTES), np.uint8)
        begin = time.perf_counter()
        with file.stream(runs, window_bytes) as stream:
            done = 0
            while done < n_pages:
                n = min(n_batch, n_pages - done)
                done += n
                stream.feed(stream.pieces_before(done))
                stream.core.scatter(n, None, out[:n])
                if is_over(n * PAGE_BYTES):
                    break
            return done * PAGE_BYTES, time.perf_counter() - begin


def _spread(n_pages: int, n_read: int) -> npt.NDArray[np.int64]:
    """Choose runs of pages to read, int64 ``[k, 2]``: one at a random place in each of k equal parts of a file, in any order.

    So the parts of a file that a cache of the drive, or of a virtual machine's host, still holds count by their share.
    """
    k, rng = max(1, n_read * PAGE_BYTES // SLICE_BYTES), np.random.default_rng()
    each, part = n_read // k, n_pages / k
    first = ((np.arange(k) + rng.random(k) * (1 - each / part)) * part).astype(np.int64)
    return np.stack([rng.permutation(first), np.full(k, each)], axis=1)


@contextmanager
def _writing(path: str, n_bytes: int) -> Iterator[tuple[Callable[[int, int], float], Callable[[], float]]]:
    """Open a file as packing does, with direct I/O if possible; yield two functions: one writes a part, one syncs the file.

    Both return their seconds.
    """
    fd = open_fd(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with naming(path):
            os.posix_fallocate(fd, 0, n_bytes)
            direct_mode(fd)
        chunk = np.frombuffer(Arena(CHUNK_BYTES), np.uint8)  # aligned as direct writes require
        chunk.reshape(-1, PAGE_BYTES)[:] = np.frombuffer(os.urandom(PAGE_BYTES), np.uint8)
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="featstore-measure") as pool:

            def write(first: int, stop: int) -> float:
                begin = time.perf_counter()
                list(pool.map(lambda offset: pwrite_all(fd, chunk.data, offset, path), range(first, stop, CHUNK_BYTES)))
                return time.perf_counter() - begin

            def sync() -> float:
                begin = time.perf_counter()
                with naming(path):
                    os.fdatasync(fd)
                return time.perf_counter() - begin

            yield write, sync
    finally:
        close_fd(fd, path)


def _time_first_writes(path: str, n_bytes: int) -> tuple[float, int]:
    """Write an empty file of up to ``n_bytes``; return bytes a second, and the bytes of the file."""
    end, done = share_end("write"), 0
    with _writing(path, n_bytes) as (write, sync):

        def some() -> float:
            nonlocal done
            first, done = done, min(done + SLICE_BYTES, n_bytes)
            return (done - first) / write(first, done)

        rate = settled(some, end, -(-n_bytes // SLICE_BYTES))
        rate = done / (done / rate + sync())
    os.truncate(path, done)
    return rate, done


def _time_writes(path: str, n_bytes: int) -> float:
    """Overwrite the first bytes of an existing file; return the seconds."""
    with _writing(path, n_bytes) as (write, sync):
        return write(0, n_bytes) + sync()
