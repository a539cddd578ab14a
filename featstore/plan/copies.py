"""Rates at which rows are copied within memory: timed with the executor's own copy, and kept in a dataset's catalog for a day."""

from __future__ import annotations

import platform
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.budget import Budget
from featstore.cache.rowmap import huge_array
from featstore.storage.catalog import Catalog
from featstore.storage.drive import kept_or_measured

__all__ = ["CopySpeed", "copy_speed", "kept_copies"]

KEY = "copy/speed"
METHOD = 1  # of measuring; what another one found is measured again
COPY_BYTES = 64 << 20
STREAM_SHARE = 8  # the part of the array that is copied in sequence beside a batch, again and again

Uint8s = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CopySpeed:
    """What copying rows from memory to memory was measured to do, in bytes of rows a second.

    Parameters
    ----------
    copy_bandwidth : float
        Scattered rows into a sequence, nothing beside it.
    batch_bandwidth : float
        Scattered rows to scattered places, as a batch plan says, beside a thread that copies in sequence.
    fresh_bandwidth : float
        Scattered rows into a sequence of memory that was never touched.
    """

    copy_bandwidth: float
    batch_bandwidth: float
    fresh_bandwidth: float


def copy_speed(dataset: str, row_bytes: int, n_threads: int, budget: Budget, *, again: bool = False) -> CopySpeed:
    """Return what copies of rows of a width do: from the dataset's catalog, or measured now and kept there.

    Parameters
    ----------
    dataset : str
        The dataset's directory.
    row_bytes : int
    n_threads : int
        That copy.
    budget : Budget
        Pays for what is copied.
    again : bool
        Measure in any case.

    Raises
    ------
    BudgetError
        No memory for what is copied.

    Notes
    -----
    The catalog has the rates of one width and number of threads. What was measured more than a day ago, on another machine, of
    another width or in another way is not used. A dataset that may not be written, or that somebody is writing, keeps nothing.
    """
    where = {"machine": platform.node(), "row_bytes": row_bytes, "threads": n_threads, "method": METHOD}
    return kept_or_measured(dataset, KEY, where, CopySpeed, lambda: _measure(row_bytes, n_threads, budget), again)


def kept_copies(catalog: Catalog) -> dict[str, Any] | None:
    """Return the entry of a catalog with the rates of copies; None where there is none."""
    return catalog.extra.get(KEY)


def _measure(row_bytes: int, n_threads: int, budget: Budget) -> CopySpeed:
    row_bytes = max(1, row_bytes)
    n = max(16, min(COPY_BYTES, budget.available // 8) // row_bytes)
    n_out, n_stream = max(4, n // 4), max(1, n // STREAM_SHARE)
    with budget.reserve("measuring copies", (n + 2 * n_out + n_stream) * row_bytes + 16 * n):
        # Huge pages, as caches and pools have; written before, because pages that never were are all one page.
        array = _touched(n, row_bytes)
        out = _touched(n_out, row_bytes)
        # Other rows each time: those just copied lie in the processor's cache, which a host tier is much larger than.
        rng = np.random.default_rng(0)
        rows = rng.permutation(n).astype(np.int32)
        parts = [rows[first : first + n_out] for first in range(0, n - n_out + 1, n_out)]
        plain = max(_time_copy(array, part, out, None, n_threads) for part in parts)
        half = max(1, n_out // 2)
        untouched = [huge_array(half * row_bytes).reshape(half, row_bytes) for _ in range(2)]
        fresh = max(_time_copy(array, part[:half], pages, None, n_threads) for part, pages in zip(parts, untouched, strict=False))
        places = rng.permutation(n_out)
        with _Streaming(array[:n_stream], _touched(n_stream, row_bytes)):
            # Not the best: that one ran while the other thread had no core.
            batch = statistics.median(_time_copy(array, part, out, places, n_threads) for part in parts)
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


class _Streaming:
    """A thread that copies rows in sequence until it is left, as reading and checking moves bytes beside a batch's copy."""

    def __init__(self, source: Uint8s, out: Uint8s) -> None:
        self._source, self._out = source, out
        self._stop, self._runs = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="featstore-measure")

    def __enter__(self) -> _Streaming:
        self._thread.start()
        self._runs.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._runs.set()
                copy_rows(self._source, None, self._out, None, 1)
        except BaseException as error:
            self._error = error
        finally:
            self._runs.set()
