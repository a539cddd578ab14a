"""The segmented disk cache (DiskGNN): consecutive batches share rows on disk if a copy for each batch takes too much space.

A *segment* is a run of ``length`` consecutive batches. Rows that more than ``threshold`` of its batches need are stored once, in
the segment's cache, ordered so that rows needed together lie together. Other rows are copied into the extent of each batch that
needs them. This module only counts: no row is read or moved.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget, Reservation
from featstore.config import format_size
from featstore.storage.format import file_bytes, sums_bytes
from featstore.storage.layout import PAGE_BYTES, RowLayout

__all__ = ["Segment", "Segmentation", "Stored", "segments", "shortest_segments", "stored_bytes", "stored_rows"]

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Batches = Sequence[Ints]
Order = Literal["minhash", "row"]

THRESHOLD = 1  # rows that two batches or more need are shared: DiskGNN's m
HASHES = 8
NO_ROWS = np.empty(0, np.int64)
UNBOUNDED = 1 << 62  # bytes
_PAGES = RowLayout(PAGE_BYTES, 1, PAGE_BYTES)


def stored_bytes(n_pages: int) -> int:
    """Count the bytes on disk of a file of ``n_pages`` data pages, header page and checksums included."""
    n_bytes = file_bytes(_PAGES, n_pages)
    return n_bytes + sums_bytes(n_bytes)


def _pages(n_rows: Int64s | int, row_bytes: int) -> Any:
    return -(-n_rows * row_bytes // PAGE_BYTES)


@dataclass(frozen=True)
class Segment:
    """One segment's rows, and the reads of its batches ``first … stop - 1``.

    ``rows`` are the rows of the segment's cache, in the order of the file. ``accesses`` is the number of rows that its batches
    request, all together. For each batch, ``packed`` counts the rows in the batch's own extent, ``pages`` the distinct pages of
    the cache that the batch touches, and ``runs`` the runs of adjacent pages, which are the reads.
    """

    first: int
    stop: int
    rows: Int64s
    accesses: int
    packed: Int64s
    pages: Int64s
    runs: Int64s


def _reserve(budget: Budget | None, n_bytes: int) -> Reservation:
    """Reserve memory for a search; without a budget it is not counted."""
    return (budget or Budget(UNBOUNDED)).reserve("segment search", n_bytes)


def stored_rows(batches: Batches, n: int, *, budget: Budget | None = None) -> Int64s:
    """Count the rows that the disk must hold, for every length of segments; rows used twice or more in a segment are shared.

    Entry ``s`` is for segments of ``s`` batches; entries 0 and 1: a copy for every access. Batches, of distinct rows in ``[0,
    n)``, may lie on disk: each is read once.

    With the threshold of 1 each segment that needs a row stores it once, in an extent or in the cache. So an access adds a row
    unless the previous batch that needed the row lies in the same segment. For each batch, a histogram of these previous batches
    gives the count for all lengths at once. Time is linear in the accesses, plus the square of the batches. Memory: 4 bytes a
    row, and a batch's ids eight times.
    """
    n_batches = len(batches)
    lengths = np.arange(1, n_batches + 1)
    shared = np.zeros(n_batches + 1, np.int64)
    total = 0
    fixed = 4 * n + 64 * (n_batches + 2)
    with _reserve(budget, fixed) as held:
        last = np.full(n, -1, np.int32)
        for b in range(n_batches):
            ids = batches[b]
            held.resize(fixed + 32 * len(ids))
            before = np.bincount(last.take(ids) + 1, minlength=b + 2)  # entry 0: needed for the first time
            since = before[::-1].cumsum()[::-1]  # entry a + 1: rows whose previous batch is a or later
            shared[1:] += since[b // lengths * lengths + 1]
            last.put(ids, b)
            total += len(ids)
    stored: Int64s = total - shared
    return stored


@dataclass(frozen=True)
class Segmentation:
    """The segments that fit a disk.

    ``length`` batches a segment; 1: nothing is shared, every batch has all its rows in its extent. ``rows`` on disk, shared and
    copied, take exactly ``disk_bytes``.
    """

    length: int
    rows: int
    disk_bytes: int


@dataclass(frozen=True)
class Stored:
    """Rows on disk with segments of one length: in each batch's extent (``packed``), and in each segment's cache (``cached``).

    ``shared``: accesses of all batches to rows of the caches.
    """

    length: int
    packed: Int64s
    cached: Int64s
    shared: int


def _count(batches: Batches, n: int, length: int, row_bytes: int, budget: Budget | None) -> Stored:
    found = [
        (each.packed, len(each.rows), each.accesses - int(each.packed.sum()))
        for each in segments(batches, n, length, row_bytes, order=None, budget=budget)
    ]
    packed = np.concatenate([NO_ROWS, *(each[0] for each in found)])
    return Stored(length, packed, np.array([each[1] for each in found], np.int64), sum(each[2] for each in found))


def shortest_segments(
    batches: Batches,
    n: int,
    row_bytes: int,
    disk_bytes: int,
    *,
    takes: Callable[[Stored], int] | None = None,
    budget: Budget | None = None,
) -> Segmentation:
    """Find the shortest segments with which the rows of all batches fit a disk; shorter segments read less in vain.

    The field, or several fields stored alike together, has ``n`` rows of ``row_bytes``. Extents, caches and checksums may take
    ``disk_bytes``. ``takes(stored)`` returns the exact bytes on disk, not less than those of the rows; by default those of a file
    of extents and one of caches. OSError (ENOSPC): not even one segment of all batches fits; the message has the bytes needed.

    One pass counts the rows for every length (:func:`stored_rows`), and two more passes count the chosen length to the page. A
    longer length may take more disk: longer segments may separate batches that shorter ones join (Liu et al., DiskGNN, SIGMOD
    2025, section 5.1).
    """

    def exactly(length: int) -> int:
        stored = _count(batches, n, length, row_bytes, budget)
        if takes is not None:
            return takes(stored)
        caches = int(_pages(stored.cached, row_bytes).sum())
        return stored_bytes(int(_pages(stored.packed, row_bytes).sum())) + (stored_bytes(caches) if caches else 0)

    rows = stored_rows(batches, n, budget=budget)
    n_batches = len(batches)
    for length in range(1, max(1, n_batches) + 1):
        stored = int(rows[length]) if n_batches else 0
        if stored_bytes(_pages(stored, row_bytes)) > disk_bytes:
            continue
        # Each extent and cache begins on a new page; the exact bytes are counted only if the length may fit.
        exact = exactly(length)
        if exact <= disk_bytes:
            return Segmentation(length, stored, exact)
    least = exactly(max(1, n_batches))
    raise OSError(
        errno.ENOSPC,
        f"the batches' rows, shared by all, take {format_size(least)} ({least} bytes) on disk, of which "
        f"{format_size(disk_bytes)} may be used",
    )


def segments(
    batches: Batches,
    n: int,
    length: int,
    row_bytes: int,
    *,
    threshold: int = THRESHOLD,
    order: Order | None = "minhash",
    n_hashes: int = HASHES,
    seed: int = 0,
    budget: Budget | None = None,
) -> Iterator[Segment]:
    """Lay out the disk cache of each segment of ``length`` batches in turn; each batch is read four times, or three.

    Only MinHashes need the fourth time.

    Rows that more than ``threshold`` batches of the segment need are in its cache. ``order="minhash"`` sorts them by the batches
    that need them, ``"row"`` by number. None: by number, and pages are not counted (they are 0). Rows are sorted by ``n_hashes``
    MinHashes, each of which breaks the ties of the earlier ones.

    A MinHash of a row is the first place of its batches in a random order of the segment's batches. Rows needed by the same
    batches have equal MinHashes; for other rows equality is more likely the more batches they share. In Liu et al. (DiskGNN,
    SIGMOD 2025, algorithm 1) the least over all hash functions is one key, which is the MinHash of a single, coarser function.
    Memory: 4 bytes a row of the field, and about 50 a cached row.
    """
    if length < 1 or threshold < 0 or n_hashes < 1:
        raise ValueError(f"length and n_hashes must be at least 1, threshold at least 0: {length}, {n_hashes}, {threshold}")
    with _reserve(budget, 4 * n) as held:
        state = np.zeros(n, np.int32)  # batches of the segment that need a row; then -1 - its place in the cache
        for first in range(0, len(batches), length):
            stop = min(first + length, len(batches))
            found: list[Int64s] = []
            n_cached = longest = accesses = 0
            for b in range(first, stop):
                ids = batches[b]
                accesses += len(ids)
                longest = max(longest, len(ids))
                held.resize(4 * n + 32 * longest + 16 * n_cached)
                counts = state.take(ids) + 1
                state.put(ids, counts)
                found.append(ids[counts == threshold + 1].astype(np.int64))
                n_cached += len(found[-1])
            held.resize(4 * n + 32 * longest + (32 + 4 * n_hashes) * n_cached)
            rows = np.sort(np.concatenate(found))
            del found
            state[rows] = -1 - np.arange(len(rows), dtype=np.int32)

            if order == "minhash" and len(rows):
                ranks = _minhash_ranks(batches, first, stop, state, len(rows), n_hashes, seed)
                ordered = np.empty_like(rows)
                ordered.put(ranks, rows)
                rows = ordered
                state[rows] = -1 - np.arange(len(rows), dtype=np.int32)
            packed, pages, runs = np.zeros((3, stop - first), np.int64)
            touched = np.zeros(int(_pages(len(rows), row_bytes)), bool)
            for b in range(first, stop):
                places = _places(batches[b], state)
                packed[b - first] = len(batches[b]) - len(places)
                if order is not None and len(places):
                    pages[b - first], runs[b - first] = _touch(touched, places, row_bytes)
            for b in range(first, stop):
                state.put(batches[b], 0)
            yield Segment(first, stop, rows, accesses, packed, pages, runs)


def _places(ids: Ints, state: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Find the places of a batch's cached rows in the cache."""
    places = state.take(ids)
    return -1 - places[places < 0]


def _minhash_ranks(
    batches: Batches, first: int, stop: int, state: npt.NDArray[np.int32], n_rows: int, n_hashes: int, seed: int
) -> npt.NDArray[np.int32]:
    """Rank a cache's rows by their MinHashes; ties keep their order."""
    size = stop - first
    rng = np.random.default_rng([seed, first])
    dtype = np.uint16 if size < 2**16 else np.int32  # 16 bits are sorted by radix
    hashes = [rng.permutation(size).astype(dtype) for _ in range(n_hashes)]
    least = np.full((n_hashes, n_rows), size, dtype)
    for b in range(first, stop):
        places = _places(batches[b], state)
        for known, values in zip(least, hashes, strict=True):
            known.put(places, np.minimum(known.take(places), values[b - first]))
    ranks = np.empty(n_rows, np.int32)
    ranks[np.lexsort(least[::-1])] = np.arange(n_rows, dtype=np.int32)
    return ranks


def _touch(touched: npt.NDArray[np.bool_], places: npt.NDArray[np.int32], row_bytes: int) -> tuple[int, int]:
    """Count the distinct pages that rows lie on, and their runs; ``touched`` is all False, before and after."""
    begin = places.astype(np.int64) * row_bytes
    last = (begin + row_bytes - 1) // PAGE_BYTES
    page = begin // PAGE_BYTES
    for _ in range(1 + -(-row_bytes // PAGE_BYTES)):
        touched[page] = True
        page = np.minimum(page + 1, last)
    n_pages = int(np.count_nonzero(touched))
    n_runs = int(touched[0]) + int(np.count_nonzero(touched[1:] > touched[:-1]))
    touched[:] = False
    return n_pages, n_runs
