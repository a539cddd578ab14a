"""Speeds of a dataset's drive, measured once and kept in the dataset's catalog."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from featstore._core.io import direct_mode
from featstore.errors import BusyError
from featstore.storage.calls import close_fd, naming
from featstore.storage.catalog import Catalog, current_catalog
from featstore.storage.extents import WRITERS
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.pagestream import MOST_WINDOW_BYTES, least_window
from featstore.storage.reader import MEASURE_MIN_BYTES, DeviceSpeed
from featstore.storage.rowfile import RowFile
from featstore.storage.rundir import RunDirectory
from featstore.storage.update import Update

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["device_speed", "doubted", "forget_speed"]

KEY = "device/speed"
METHOD = 4  # of measuring; what another one found is measured again
STREAM_BYTES = 256 << 20  # shorter runs are over before the drive is at speed
RANDOM_READS = 8192  # a deep queue's rate, not that of filling and draining it
SCRATCH_BYTES = 64 << 20
LEAST_SCRATCH_BYTES = 1 << 20
MOST_AGE_S = 24 * 3600.0  # others used the drive then, or it has aged; measuring again takes a second
SAME = 1.5  # rates that differ by less, one measured because the other was doubted, confirm each other
CHUNK_BYTES = 1 << 20
GATHER_BYTES, CLUSTER_BYTES = 64 << 20, 2 << 20  # dense parts of the file whose rows are gathered
GATHER_SHARE = 0.3  # of those parts' pages: the others are read over
_CANNOT_WRITE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NUMBERS = ("iops", "bandwidth", "write_bandwidth", "gather_bandwidth")


def device_speed(
    g: OutOfCoreGraph, run_dir: str | os.PathLike[str] | None = None, disk: int | None = None, *, again: bool = False
) -> DeviceSpeed:
    """Return what the drive under a dataset does: from its catalog, or measured now and kept there.

    Parameters
    ----------
    g : OutOfCoreGraph
    run_dir : path-like, optional
        Where run files go; a scratch file is written there, of at most 64 MiB, and removed. ``<dataset>.runs`` by default.
    disk : int, optional
        Most bytes of the scratch file; at least 1 MiB is written.
    again : bool
        Measure in any case.

    Raises
    ------
    OSError
        The drive cannot be written or read.
    BudgetError
        No memory for what is read meanwhile.

    Notes
    -----
    About a second: 256 MiB read as extents are, twice, 8,192 random reads, rows gathered out of 64 MiB, twice, 64 MiB written.
    Reads are timed on the largest feature, on the scratch file where all are small. What was measured more than a day ago, on
    another machine, on another drive, through another backend or in another way is not used: what was measured while others used
    the drive is soon forgotten. Neither is what an epoch made doubtful (:func:`doubted`). A dataset that may not be written, or
    that somebody is writing, keeps nothing, and is measured again.
    """
    where = {"machine": platform.node(), "device": os.stat(g.path).st_dev, "backend": g.reader.backend, "method": METHOD}
    known = g.reader.device
    if known is not None and known.write_bandwidth and not again:
        return known
    kept = current_catalog(g.path).extra.get(KEY)
    found = None if again else _saved(kept, where)
    if found is None:
        found = _measure(g, f"{g.path}.runs" if run_dir is None else os.fspath(run_dir), disk)
        entry = {"where": where, "when": time.time(), **{name: getattr(found, name) for name in _NUMBERS}}
        if kept is not None and kept.get("doubted"):
            earlier = _saved({**kept, "doubted": False}, where)
            entry["confirmed"] = earlier is not None and _same(earlier, found)
        try:
            with Update(g.path) as update:
                update.add([], extra={KEY: entry})
                update.commit()
        except BusyError:
            pass  # it is measured again next time
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
    g.reader.device = found
    return found


def doubted(catalog: Catalog) -> dict[str, dict[str, Any]]:
    """Return the entry of a dataset's catalog with the drive's rates, marked so that they are measured again.

    None where there are no rates, and where those there are confirmed others that had been doubted: then it is not the drive that
    an epoch differs by, and measuring after every epoch would not help.
    """
    entry = catalog.extra.get(KEY)
    return {} if entry is None or entry.get("confirmed") else {KEY: {**entry, "doubted": True}}


def forget_speed(g: OutOfCoreGraph) -> None:
    """Let :func:`device_speed` look into the catalog again; until then reads are merged as before."""
    known = g.reader.device
    if known is not None:
        g.reader.device = replace(known, write_bandwidth=0.0)


def _same(one: DeviceSpeed, other: DeviceSpeed) -> bool:
    return all(1 / SAME <= getattr(one, name) / getattr(other, name) <= SAME for name in _NUMBERS)


def _saved(entry: dict[str, Any] | None, where: dict[str, Any]) -> DeviceSpeed | None:
    if entry is None or entry.get("where") != where or entry.get("doubted"):
        return None
    when = entry.get("when")
    if not isinstance(when, (int, float)) or not 0 <= time.time() - when <= MOST_AGE_S:
        return None
    numbers = [entry.get(name) for name in _NUMBERS]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        return None
    return DeviceSpeed(**{name: float(number) for name, number in zip(_NUMBERS, numbers, strict=True) if number is not None})


def _measure(g: OutOfCoreGraph, run_dir: str, disk: int | None) -> DeviceSpeed:
    n_bytes = max(LEAST_SCRATCH_BYTES, min(SCRATCH_BYTES, SCRATCH_BYTES if disk is None else disk) // CHUNK_BYTES * CHUNK_BYTES)
    runs = RunDirectory(run_dir)
    scratch = None
    try:
        path = runs.file("scratch")
        write_bandwidth = _time_writes(path, n_bytes)
        sources = (store.source for store in g.features.values())
        file = max((source for source in sources if isinstance(source, RowFile)), key=lambda file: file.n_bytes, default=None)
        if file is None or file.n_bytes < MEASURE_MIN_BYTES:
            pages = RowLayout(PAGE_BYTES, 1, PAGE_BYTES)
            file = scratch = g.reader.open(path, layout=pages, n_rows=n_bytes // PAGE_BYTES - 1, verify="off")
        with file.in_use() as core:
            reads = g.reader.measure(core, max(PAGE_BYTES, min(RANDOM_READS * PAGE_BYTES, g.budget.available // 4)), RANDOM_READS)
        bandwidth = max(_time_stream(g, file) for _ in range(2))  # others may use the device meanwhile
        gathers = max(_time_gather(g, file, reads.iops, bandwidth) for _ in range(2))
        return DeviceSpeed(reads.iops, bandwidth, write_bandwidth, gathers)
    finally:
        if scratch is not None:
            scratch.close()
        runs.close()


def _time_gather(g: OutOfCoreGraph, file: RowFile, iops: float, bandwidth: float) -> float:
    """Gather rows so dense that reads merge, and return bytes a second beside what the operations take; ``bandwidth`` at most."""
    unit = max(PAGE_BYTES, file.row_bytes)
    n_units, size = max(1, file.n_bytes // unit), max(4, CLUSTER_BYTES // unit)
    room = min(GATHER_BYTES, g.budget.available // 4)
    rng = np.random.default_rng()
    blocks = rng.permutation(max(1, n_units // size))[: max(1, room // (size * unit))]
    units = np.concatenate([block * size + np.flatnonzero(rng.random(size) < GATHER_SHARE) for block in np.sort(blocks)])
    units = units[units < n_units]
    rows = np.unique(units * file.n_rows // n_units)
    if not len(rows):
        return bandwidth
    with g.budget.reserve("reader buffers", len(rows) * file.row_bytes):
        out = np.zeros((len(rows), file.row_bytes), np.uint8)
        start = time.perf_counter()
        done = file.gather(rows, out, gap_bytes=DeviceSpeed(iops, bandwidth).gap_bytes)
        seconds = time.perf_counter() - start
    beyond, aside = done.bytes_read - done.reads * PAGE_BYTES, seconds - done.reads / iops
    return min(bandwidth, beyond / aside) if beyond > 0 and aside > 0 else bandwidth


def _time_stream(g: OutOfCoreGraph, file: RowFile) -> float:
    """Read a part of a file as extents are read, a batch's rows copied out at a time, and return bytes a second."""
    n_pages = min(STREAM_BYTES, file.n_bytes) // PAGE_BYTES
    first = int(np.random.default_rng().integers(0, file.n_bytes // PAGE_BYTES - n_pages + 1))  # other pages each time
    window_bytes = min(MOST_WINDOW_BYTES, max(least_window(), g.budget.available // 8))
    n_batch = max(1, min(window_bytes // PAGE_BYTES, n_pages))
    with g.budget.reserve("reader buffers", window_bytes + n_batch * PAGE_BYTES):
        out = np.zeros((n_batch, PAGE_BYTES), np.uint8)
        start = time.perf_counter()
        with file.stream(np.array([[first, n_pages]], np.int64), window_bytes) as stream:
            done = 0
            while done < n_pages:
                n = min(n_batch, n_pages - done)
                done += n
                stream.feed(stream.pieces_before(done))
                stream.core.scatter(n, None, out[:n])
            return n_pages * PAGE_BYTES / (time.perf_counter() - start)


def _time_writes(path: str, n_bytes: int) -> float:
    """Write a file as packing does, past the page cache where that can be, and return bytes a second."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with naming(path):
            os.posix_fallocate(fd, 0, n_bytes)
        direct_mode(fd)
        with mmap.mmap(-1, CHUNK_BYTES) as chunk:  # aligned as direct writes want it
            chunk.write(os.urandom(PAGE_BYTES) * (CHUNK_BYTES // PAGE_BYTES))

            def write(offset: int) -> None:
                done = 0
                with memoryview(chunk) as view:
                    while done < CHUNK_BYTES:
                        with view[done:] as rest, naming(path):
                            done += os.pwrite(fd, rest, offset + done)

            start = time.perf_counter()
            with ThreadPoolExecutor(WRITERS, thread_name_prefix="featstore-measure") as pool:
                list(pool.map(write, range(0, n_bytes, CHUNK_BYTES)))
            with naming(path):
                os.fdatasync(fd)
            return n_bytes / (time.perf_counter() - start)
    finally:
        close_fd(fd, path)
