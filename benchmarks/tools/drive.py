"""Rates of the drive itself: direct reads of a few threads, the library's reads in sequence, and fio's, where it is installed."""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tools.harness import PAGE_BYTES

RANDOM_DEPTHS = (256, 512)  # reads in flight that fio is tried with; the reader's default is 512
SCAN_DEPTHS = (16, 32)  # the same in reads of 1 MiB; extents are read through a window of 32


# -- the drive without fio -----------------------------------------------------------------------------------------------------


def direct_rate(path: Path, block_bytes: int = 1 << 20, readers: int = 4, n_random: int = 0, most_bytes: int = 2 << 30) -> float:
    """Bytes a second of direct reads by a few threads.

    Parameters
    ----------
    path : path
    block_bytes : int
        A multiple of what the drive's direct reads are aligned to; OSError (EINVAL) otherwise.
    readers : int
        Threads, each with one read in flight.
    n_random : int
        So many reads at random places; 0: all blocks in sequence.
    most_bytes : int
        Of a sequence, at most so much.
    """
    size = path.stat().st_size
    n_blocks = max(1, min(size, most_bytes) // block_bytes if not n_random else size // block_bytes)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:

        def read(first: int) -> None:
            numbers: Iterable[int] = range(first, n_blocks, readers)
            if n_random:
                numbers = random.Random(first).choices(range(n_blocks), k=-(-n_random // readers))
            with mmap.mmap(-1, block_bytes) as block:
                for number in numbers:
                    os.preadv(fd, [block], number * block_bytes)

        begin = time.perf_counter()
        with ThreadPoolExecutor(readers) as threads:
            list(threads.map(read, range(readers)))
        n_bytes = -(-n_random // readers) * readers * block_bytes if n_random else min(n_blocks * block_bytes, size)
        return n_bytes / (time.perf_counter() - begin)
    finally:
        os.close(fd)


def sequential_rate(g: Any, name: str = "x") -> float:
    """Bytes a second at which the library reads a feature of an open graph in sequence, checked, nothing done with it."""
    import numpy as np

    source, n = g.features[name].source, g.num_nodes
    step = max(1, (32 << 20) // source.row_bytes)
    rows = np.empty((step, source.row_bytes), np.uint8)
    begin = time.perf_counter()
    for first in range(0, n, step):
        count = min(step, n - first)
        source.gather(range(first, first + count), rows)
    return float(n * source.row_bytes / (time.perf_counter() - begin))


# -- fio -----------------------------------------------------------------------------------------------------------------------


@functools.cache
def have_fio() -> bool:
    """Whether fio is installed; the first call says on stderr that it is not."""
    if shutil.which("fio") is None:
        print("fio is not installed: figures that refer to fio have no ratio", file=sys.stderr)
        return False
    return True


def fio(
    path: Path,
    *,
    pattern: str,
    block_bytes: int,
    depth: int,
    n_blocks: int | None = None,
    max_seconds: float = 30,
    offset: int = 0,
) -> float:
    """Read a file with fio (io_uring, O_DIRECT, one job) and return bytes a second.

    Parameters
    ----------
    path : path
        An existing file; only read.
    pattern : str
        ``"randread"`` (uniform, repeats allowed) or ``"read"``.
    block_bytes, depth : int
        Size of one read, or that of a smaller file; reads in flight.
    n_blocks : int, optional
        Reads in all; the whole file once where absent.
    max_seconds : float
        Stop then at the latest.
    offset : int
        First byte of the file that may be read.
    """
    size = path.stat().st_size - offset
    block_bytes = max(PAGE_BYTES, min(block_bytes, size // PAGE_BYTES * PAGE_BYTES)) if block_bytes > PAGE_BYTES else block_bytes
    size = size // block_bytes * block_bytes
    command = ["fio", "--name=reference", f"--filename={path}", "--readonly", "--ioengine=io_uring", "--direct=1", "--thread"]
    command += [f"--rw={pattern}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--offset={offset}", f"--size={size}"]
    command += ["--norandommap", "--randrepeat=0", "--gtod_reduce=1", f"--runtime={max_seconds}", "--output-format=json"]
    if n_blocks is not None:
        command += [f"--number_ios={n_blocks}", f"--io_size={n_blocks * block_bytes}"]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(result["io_bytes"]) / (float(result["runtime"]) / 1e3)


def fio_random_iops(path: Path, n_blocks: int, depths: Sequence[int] = RANDOM_DEPTHS, block_bytes: int = PAGE_BYTES) -> float:
    """Random reads of a block a second, at the best of these depths."""
    rates = [fio(path, pattern="randread", block_bytes=block_bytes, depth=depth, n_blocks=n_blocks) for depth in depths]
    return max(rates) / block_bytes


def fio_scan_bandwidth(path: Path, max_seconds: float = 10, depths: Sequence[int] = SCAN_DEPTHS) -> float:
    """Sequential bytes a second in 1 MiB reads, at the best of these depths."""
    return max(fio(path, pattern="read", block_bytes=1 << 20, depth=depth, max_seconds=max_seconds) for depth in depths)


@contextmanager
def fio_beside(path: Path, depth: int = SCAN_DEPTHS[-1]) -> Iterator[Callable[[], int]]:
    """Let fio read a file over and over in 1 MiB reads meanwhile; the context is a call that returns the bytes read so far.

    They are the kernel's count.
    """
    command = [
        "fio",
        "--name=beside",
        f"--filename={path}",
        "--readonly",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--rw=read",
    ]
    command += ["--bs=1M", f"--iodepth={depth}", "--gtod_reduce=1", "--time_based", "--runtime=600"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:

        def n_bytes() -> int:
            lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

        try:
            first = n_bytes()
            while n_bytes() < first + (64 << 20) and process.poll() is None:  # until it is under way
                time.sleep(0.01)
            yield n_bytes
        finally:
            process.terminate()
