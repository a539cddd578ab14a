"""The places of extents in their file, and the extents that are filled in one pass over the base file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.stream import mark_pieces
from featstore.errors import BudgetError
from featstore.storage.format import file_bytes, sums_bytes
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.pagestream import PIECE_BYTES, PagedRows, least_window

__all__ = [
    "PAGES",
    "SPARE_BUFFERS",
    "WINDOW_BYTES",
    "Episode",
    "ExtentMap",
    "episodes",
    "least_memory",
    "most_memory",
    "needed_runs",
    "whole_memory",
]

Int64s = npt.NDArray[np.int64]

PAGES = RowLayout(PAGE_BYTES, 1, PAGE_BYTES)
MOST_BUFFER, LEAST_BUFFER = 512 << 10, 128 << 10
SPARE_BUFFERS = 16  # full buffers on their way to the drive
WINDOW_BYTES = 16 * PIECE_BYTES
PROGRESS_BYTES = 512  # of a checkpoint, beside the sums and the rows


class ExtentMap:
    """The places of a file's extents, computed from the number of rows of each.

    ``n_pages`` and ``first_page``, int64 ``[n]``, are each extent's number of pages and its first page; page 0 is the file's
    header.
    """

    def __init__(self, n_rows: Int64s, row_bytes: int) -> None:
        self.n_rows = np.asarray(n_rows, np.int64)
        self.row_bytes = row_bytes
        self.n_pages: Int64s = -(-self.n_rows * row_bytes // PAGE_BYTES)
        self.first_page: Int64s = 1 + np.cumsum(self.n_pages) - self.n_pages

    @property
    def total_pages(self) -> int:
        return int(self.n_pages.sum())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file and its side file."""
        n_bytes = file_bytes(PAGES, self.total_pages)
        return n_bytes + sums_bytes(n_bytes)

    @property
    def progress_bytes(self) -> int:
        """Bytes of a checkpoint and of its successor, which exist together while one replaces the other."""
        return 2 * (sums_bytes(file_bytes(PAGES, self.total_pages)) + 8 * len(self.n_rows) + PROGRESS_BYTES)


class Episode:
    """Extents ``begin … end - 1``, filled in one pass with write buffers of ``buffer_bytes``."""

    def __init__(self, begin: int, end: int, buffer_bytes: int) -> None:
        self.begin, self.end, self.buffer_bytes = begin, end, buffer_bytes


def least_memory(row_bytes: int, n_rows: int, id_bytes: int = 8) -> int:
    """Count the least bytes to fill extents of ``n_rows`` rows one at a time."""
    buffer = min(LEAST_BUFFER, -(-n_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return (2 * buffer + id_bytes * n_rows + least_window()) * 4 // 3 + PAGE_BYTES


def most_memory(row_bytes: int, n_rows: int, n_extents: int) -> int:
    """Count the bytes beyond which filling ``n_extents`` extents of ``n_rows`` rows gains nothing."""
    buffer = min(MOST_BUFFER, -(-n_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return (n_extents + SPARE_BUFFERS) * buffer + 8 * n_rows * n_extents + 2 * WINDOW_BYTES


def whole_memory(extents: ExtentMap, id_bytes: int) -> int:
    """Count the bytes with which :func:`episodes` puts all extents into one episode."""
    n, longest = len(extents.n_rows), int(extents.n_pages.max(initial=1)) * PAGE_BYTES
    room = id_bytes * int(extents.n_rows.sum()) + (n + min(n, SPARE_BUFFERS)) * min(LEAST_BUFFER, max(longest, PAGE_BYTES))
    return room + max(least_window(), room // 3 + 1)


def episodes(extents: ExtentMap, n_bytes: int, id_bytes: int, first: int = 0) -> list[Episode]:
    """Group consecutive extents, from ``first`` on, so that a group's buffers, rows and reads fit in ``n_bytes``.

    BudgetError, with the bytes needed, if one extent alone does not fit.
    """
    found: list[Episode] = []
    begin, n = first, len(extents.n_rows)
    while begin < n:
        room = n_bytes - min(WINDOW_BYTES, max(least_window(), n_bytes // 4))
        ids = np.cumsum(extents.n_rows[begin:]) * id_bytes
        longest = int(extents.n_pages[begin:].max()) * PAGE_BYTES
        buffer = min(MOST_BUFFER, max(longest, PAGE_BYTES))
        while True:
            count = np.arange(1, n - begin + 1)
            fits = int(np.searchsorted(ids + (count + np.minimum(count, SPARE_BUFFERS)) * buffer, room, side="right"))
            if fits == n - begin or buffer <= LEAST_BUFFER:
                break
            buffer = max(LEAST_BUFFER, buffer // 2 // PAGE_BYTES * PAGE_BYTES)
        if not fits:
            buffer = min(buffer, int(extents.n_pages[begin]) * PAGE_BYTES)
            needed = least_memory(extents.row_bytes, int(extents.n_rows[begin]), id_bytes)
            if needed > n_bytes:
                raise BudgetError(f"packing one batch does not fit {n_bytes} bytes", needed)
            fits = 1
        found.append(Episode(begin, begin + fits, max(buffer, PAGE_BYTES)))
        begin += fits
    return found


def needed_runs(base: PagedRows, rows: Sequence[npt.NDArray[Any]]) -> Int64s:
    """Find the runs of pages to scan: the blocks of the base file, 1 MiB each, that hold any of the rows."""
    layout, size = base.layout, PAGE_BYTES + base.layout.data_bytes(base.n_rows)
    wanted = np.zeros(-(-size // PIECE_BYTES), np.uint8)
    for ids in rows:
        mark_pieces(ids, (PAGE_BYTES, layout.row_bytes, layout.group_rows, layout.group_bytes), PIECE_BYTES, wanted)
    blocks = np.flatnonzero(wanted)
    first = blocks * (PIECE_BYTES // PAGE_BYTES)
    count = np.minimum(PIECE_BYTES // PAGE_BYTES, size // PAGE_BYTES - first)
    return np.stack([first, count], axis=1)
