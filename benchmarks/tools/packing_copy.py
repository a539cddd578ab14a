"""Copying an epoch's rows in memory, the processor's part of a bound of epochs.packing.

An epoch of a pack copies hits from a cache of ``capacity`` rows, and misses from buffers of the stream of extents, a window that
the processor's last cache may hold. Both are copied so here, into outputs that are used again. Of what an epoch must do in memory
besides, rows that the cache admits are copied where that is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.tools.harness import alternate
from featstore._core.rows import copy_rows

WINDOW_BYTES = 32 << 20  # of extents, while they are read
N_OUTPUTS = 3  # which batches in flight take in turn

Int32s = npt.NDArray[np.int32]
Copy = Callable[[npt.NDArray[np.float32], Int32s, npt.NDArray[np.float32]], None]


def _copy(rows: npt.NDArray[np.float32], ids: Int32s, out: npt.NDArray[np.float32], n_threads: int) -> None:
    """Copy rows with the library's kernel."""
    if len(ids):
        copy_rows(rows.view(np.uint8), ids, out.view(np.uint8), None, n_threads)


class EpochCopy:
    """The copies of an epoch, without its reads and plans.

    Parameters
    ----------
    n_hits, n_missed, n_admitted : int64 array, shape (n_batches,)
        Rows of each batch from the cache and from extents, and of the latter those that the cache then admits.
    capacity : int
        Rows of the cache.
    row_bytes : int
        A multiple of 4.
    """

    def __init__(
        self,
        n_hits: npt.NDArray[np.int64],
        n_missed: npt.NDArray[np.int64],
        n_admitted: npt.NDArray[np.int64],
        capacity: int,
        row_bytes: int,
    ) -> None:
        assert int(n_hits.max()) <= capacity, "a batch hits more rows than the cache holds"
        rng = np.random.default_rng(0)
        dim = row_bytes // 4
        window = max(1, WINDOW_BYTES // row_bytes)
        # NumPy asks for huge pages, as the library does for its caches and outputs.
        self._cache, self._window = (np.ones((rows, dim), np.float32) for rows in (max(1, capacity), window))
        self._outputs = [np.ones((int((n_hits + n_missed).max()), dim), np.float32) for _ in range(N_OUTPUTS)]
        self._batches: list[tuple[Int32s, Int32s, Int32s]] = []
        at = 0
        for hits, missed, admitted in zip(n_hits.tolist(), n_missed.tolist(), n_admitted.tolist(), strict=True):
            slots = rng.permutation(capacity).astype(np.int32)
            places = ((at + np.arange(missed)) % window).astype(np.int32)
            self._batches.append((slots[:hits], places, slots[len(slots) - admitted :]))
            at += missed

    def _seconds(self, copy: Copy, admit: Copy | None = None) -> float:
        """Seconds of one pass over the epoch."""
        begin = time.perf_counter()
        for number, (slots, places, freed) in enumerate(self._batches):
            out, middle = self._outputs[number % N_OUTPUTS], len(slots)
            copy(self._cache, slots, out[:middle])
            copy(self._window, places, out[middle : middle + len(places)])
            if admit is not None:
                admit(out[middle:], freed, self._cache)
        return time.perf_counter() - begin

    def seconds_with_admissions(self) -> float:
        """Return the seconds of the copies, admitted rows' to the cache among them, by the library's kernel with all threads."""
        n_threads = len(os.sched_getaffinity(0))

        def admit(out: npt.NDArray[np.float32], slots: Int32s, cache: npt.NDArray[np.float32]) -> None:
            if len(slots):
                copy_rows(out[: len(slots)].view(np.uint8), None, cache.view(np.uint8), slots, n_threads)

        return self._seconds(lambda rows, ids, out: _copy(rows, ids, out, n_threads), admit)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the library's kernel and of ``index_select(out=)``, with one thread and with all.

        Each is a pass of its own after a pause, so that none shares a core with the spinning threads of the one before.
        """
        n_all = len(os.sched_getaffinity(0))

        def ours(n_threads: int) -> float:
            return self._seconds(lambda rows, ids, out: _copy(rows, ids, out, n_threads))

        def theirs(n_threads: int) -> float:
            before = torch.get_num_threads()
            torch.set_num_threads(n_threads)
            try:
                return self._seconds(
                    lambda rows, ids, out: torch.index_select(
                        torch.from_numpy(rows), 0, torch.from_numpy(ids), out=torch.from_numpy(out)
                    )
                )
            finally:
                torch.set_num_threads(before)

        sides: dict[str, Callable[[], float]] = {}
        for n_threads in dict.fromkeys((1, n_all)):
            sides[f"copy_rows, {n_threads}"] = lambda n_threads=n_threads: ours(n_threads)
            sides[f"index_select, {n_threads}"] = lambda n_threads=n_threads: theirs(n_threads)
        return {name: found[0] for name, found in alternate(1, sides).items()}
