"""What a dataset's drive does, measured once and kept in the dataset's catalog."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from featstore._core.io import File, direct_mode
from featstore.errors import BusyError
from featstore.storage.catalog import read_catalog
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.reader import MEASURE_MIN_BYTES, DeviceSpeed
from featstore.storage.rundir import RunDirectory
from featstore.storage.update import Update

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["device_speed"]

KEY = "device/speed"
SCRATCH_BYTES = 64 << 20
LEAST_SCRATCH_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
WRITERS = 3  # as many as pack extents
_CANNOT_WRITE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NUMBERS = ("iops", "bandwidth", "write_bandwidth")


def device_speed(g: OutOfCoreGraph, run_dir: str | os.PathLike[str] | None = None, disk: int | None = None) -> DeviceSpeed:
    """Return what the drive under a dataset does: from its catalog, or measured now and kept there.

    Parameters
    ----------
    g : OutOfCoreGraph
    run_dir : path-like, optional
        Where run files go; a scratch file is written there, of at most 64 MiB, and removed. ``<dataset>.runs`` by default.
    disk : int, optional
        Most bytes of the scratch file; at least 1 MiB is written.

    Raises
    ------
    OSError
        The drive cannot be written or read.
    BudgetError
        No memory for what is read meanwhile.

    Notes
    -----
    A fraction of a second. Reads are timed on the largest feature, on the scratch file where all are small. What was measured on
    another machine, on another drive or through another backend is not used. A dataset that may not be written, or that somebody
    is writing, keeps nothing, and is measured again.
    """
    where = {"machine": platform.node(), "device": os.stat(g.path).st_dev, "backend": g.reader.backend}
    known = g.reader.device
    if known is not None and known.write_bandwidth:
        return known
    found = _saved(read_catalog(g.path).extra.get(KEY), where)
    if found is None:
        found = _measure(g, f"{g.path}.runs" if run_dir is None else os.fspath(run_dir), disk)
        entry = {"where": where, **{name: getattr(found, name) for name in _NUMBERS}}
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


def _saved(entry: dict[str, Any] | None, where: dict[str, Any]) -> DeviceSpeed | None:
    if entry is None or entry.get("where") != where:
        return None
    numbers = [entry.get(name) for name in _NUMBERS]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        return None
    return DeviceSpeed(*(float(number) for number in numbers if number is not None))


def _measure(g: OutOfCoreGraph, run_dir: str, disk: int | None) -> DeviceSpeed:
    n_bytes = max(LEAST_SCRATCH_BYTES, min(SCRATCH_BYTES, SCRATCH_BYTES if disk is None else disk) // CHUNK_BYTES * CHUNK_BYTES)
    run_bytes = max(PAGE_BYTES, min(n_bytes, g.budget.available // 4))
    runs = RunDirectory(run_dir)
    try:
        path = runs.file("scratch")
        write_bandwidth = _time_writes(path, n_bytes)
        largest = max((store.file for store in g.features.values()), key=lambda file: file.n_bytes, default=None)
        if largest is not None and largest.n_bytes >= MEASURE_MIN_BYTES:
            reads = largest.measure(run_bytes)
        else:
            file = File(path, PAGE_BYTES, 1, PAGE_BYTES, n_bytes // PAGE_BYTES, 0, n_bytes)
            try:
                reads = g.reader.measure(file, run_bytes)
            finally:
                file.close()
    finally:
        runs.close()
    return replace(reads, write_bandwidth=write_bandwidth)


def _time_writes(path: str, n_bytes: int) -> float:
    """Write a file as packing does, past the page cache where that can be, and return bytes a second."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
        direct_mode(fd)
        with mmap.mmap(-1, CHUNK_BYTES) as chunk:  # aligned as direct writes want it
            chunk.write(os.urandom(PAGE_BYTES) * (CHUNK_BYTES // PAGE_BYTES))

            def write(offset: int) -> None:
                done = 0
                with memoryview(chunk) as view:
                    while done < CHUNK_BYTES:
                        with view[done:] as rest:
                            done += os.pwrite(fd, rest, offset + done)

            start = time.perf_counter()
            with ThreadPoolExecutor(WRITERS, thread_name_prefix="featstore-measure") as pool:
                list(pool.map(write, range(0, n_bytes, CHUNK_BYTES)))
            os.fdatasync(fd)
            return n_bytes / (time.perf_counter() - start)
    finally:
        os.close(fd)
