"""Rates of copying rows within memory: timed with the executor's own copy, and kept in a dataset's catalog for a day."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.budget import Budget
from featstore.gather.buffers import huge_array
from featstore.storage.drive import settled, share_end
from featstore.storage.keptrates import kept_or_measured

__all__ = ["KEY", "CopySpeed", "copy_speed"]

KEY = "copy/speed"
METHOD = 2  # version of the measurement; rates of another version are measured again
COPY_BYTES, SLICE_BYTES, SLICE_ROWS = 64 << 20, 4 << 20, 1 << 16
STREAM_FRACTION = 1 / 8  # this part of the array is copied in sequence, again and again, beside a batch

Uint8s = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CopySpeed:
    """Measured rates of copying rows within memory, in bytes of rows a second.

    ``copy_bandwidth``: scattered rows into a sequence, without other work. ``batch_bandwidth``: scattered rows to scattered
    places, as in a batch plan, beside a thread that copies in sequence. ``fresh_bandwidth``: scattered rows into a sequence of
    memory that was never touched.
    """

    copy_bandwidth: float
    batch_bandwidth: float
    fresh_bandwidth: float


def copy_speed(dataset: str, row_bytes: int, n_threads: int, budget: Budget, *, again: bool = False) -> CopySpeed:
    """Get the rates of copying rows of ``row_bytes`` by ``n_threads``: from the catalog, or measured now and kept there.

    ``again``: measure in any case. Each rate is the median of slices, copied until it is stable or its share of the time is
    over (:func:`featstore.storage.drive.share_end`). Rates that are older than a day, or of another machine, width, number of
    threads or method, are not used. A dataset that may not be written, or is being written, keeps nothing.
    """
    where = {"machine": platform.node(), "row_bytes": row_bytes, "threads": n_threads, "method": METHOD}
    return kept_or_measured(dataset, KEY, where, CopySpeed, lambda: _measure(row_bytes, n_threads, budget), again)


def _measure(row_bytes: int, n_threads: int, budget: Budget) -> CopySpeed:
    row_bytes = max(1, row_bytes)
    n = max(16, min(COPY_BYTES, budget.available // 8) // row_bytes)
    n_out, n_stream = max(4, n // 4), max(1, int(n * STREAM_FRACTION))
    n_slice = max(1, min(n_out // 4, SLICE_BYTES // row_bytes))
    with budget.reserve("measuring copies", (n + 2 * n_out + n_stream) * row_bytes + 24 * n_slice):
        # Huge pages, as caches and pools have; written first, because all untouched pages map to one zero page.
        array = _touched(n, row_bytes)
        out = _touched(n_out, row_bytes)
        rng = np.random.default_rng(0)
        rows, places = rng.integers(0, n, min(n_slice, SLICE_ROWS)), rng.permutation(min(n_slice, SLICE_ROWS))
        number, begin = 0, time.perf_counter()
        third = (share_end("copy") - begin) / 3

        def some(pages: Uint8s, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None = None) -> float:
            """Copy other rows each time, to another place: the rows just copied lie in the processor's cache."""
            nonlocal number
            first = number % (len(pages) // len(rows)) * len(rows)
            number += 1
            chosen = ((rows + number * len(rows)) % n).astype(np.int32)
            return _time_copy(array, chosen, pages[first : first + len(rows)], places, n_threads)

        plain = settled(lambda: some(out, rows), begin + third)
        untouched, number = huge_array(n_out * row_bytes).reshape(n_out, row_bytes), 0
        # Slices of several pages, however narrow rows are.
        fresh = settled(lambda: some(untouched, np.resize(rows, n_slice)), begin + 2 * third, n_out // n_slice)
        with _streaming(array[:n_stream], _touched(n_stream, row_bytes)):
            batch = settled(lambda: some(out, rows, places), begin + 3 * third)
    return CopySpeed(plain, min(plain, batch), min(plain, fresh))


def _touched(n: int, row_bytes: int) -> Uint8s:
    array = huge_array(n * row_bytes).reshape(n, row_bytes)
    array.fill(1)
    return array


def _time_copy(
    array: Uint8s, rows: npt.NDArray[np.int32], out: Uint8s, places: npt.NDArray[np.int64] | None, n_threads: int
) -> float:
    start = time.perf_counter()
    copy_rows(array, rows, out, places, n_threads)
    return out.nbytes / max(1e-9, time.perf_counter() - start)


@contextmanager
def _streaming(source: Uint8s, out: Uint8s) -> Iterator[None]:
    """Copy rows in sequence in a thread meanwhile, as reading and checking move bytes beside a batch's copy."""
    runs, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                runs.set()
                copy_rows(source, None, out, None, 1)
        except BaseException as error:
            errors.append(error)
        finally:
            runs.set()

    thread = threading.Thread(target=run, name="featstore-measure")
    thread.start()
    runs.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
