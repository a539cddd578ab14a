"""Ordered extents, whose rows lie in an order of their own: first filled in ascending order, then reordered in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.checksum import page_sums
from featstore._core.rows import copy_rows
from featstore.distinct import distinct
from featstore.errors import CorruptionError
from featstore.storage.calls import pwrite_all
from featstore.storage.format import SUMS_PER_PAGE
from featstore.storage.layout import PAGE_BYTES, RowLayout

__all__ = ["Ordered", "piece_layout"]

Ids = npt.NDArray[Any]
ID_BYTES = 48  # of each row of a piece while it is put in order: sorted numbers, places, and scratch for sorting them


def piece_layout(row_bytes: int, piece_bytes: int) -> RowLayout:
    """Lay out ordered rows in pieces of at least one row, each piece on pages of its own.

    Putting one piece in order takes up to twice ``piece_bytes``. Rows are dense within a piece. If ``piece_bytes`` is large
    enough, the rows of a piece fill whole pages, so that the file is dense throughout.
    """
    step = PAGE_BYTES // gcd(row_bytes, PAGE_BYTES)  # the least number of rows that fill whole pages
    n_rows = max(1, piece_bytes // (row_bytes + ID_BYTES // 2))
    if n_rows > step:
        n_rows -= n_rows % step
    return RowLayout(row_bytes, n_rows, -(-n_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES)


class Ordered:
    """The first ``n`` extents of a file, the pieces of a :func:`piece_layout`.

    ``rows_of(piece)`` returns a piece's rows in their final order; a row may occur twice.
    """

    def __init__(self, n: int, rows_of: Callable[[int], Ids], layout: RowLayout) -> None:
        self.n = n
        self._rows_of = rows_of
        self._layout = layout

    @property
    def nbytes(self) -> int:
        """Bytes held while a piece is put in order."""
        return (2 * self._layout.group_bytes + self._layout.group_rows * ID_BYTES) if self.n else 0

    def ascending(self, piece: int) -> Ids:
        """List a piece's distinct rows, ascending: packing puts them at the piece's beginning, before :meth:`settle`."""
        return distinct(self._rows_of(piece))

    def settle(self, piece: int, fd: int, path: str, first_page: int, seed: int, sums: npt.NDArray[np.uint64]) -> None:
        """Put a piece's rows in order, and update its page checksums.

        The piece begins at page ``first_page`` of the file, which ``fd`` reads and writes. ``sums``, uint64 ``[n, 512]``, are the
        file's checksums, in pages of 511 entries; ``seed`` is their seed.
        """
        rows, places = np.unique(self._rows_of(piece), return_inverse=True)
        row_bytes = self._layout.row_bytes
        found = _pages(-(-len(rows) * row_bytes // PAGE_BYTES))
        ordered = _pages(-(-len(places) * row_bytes // PAGE_BYTES))
        _read(fd, found, first_page * PAGE_BYTES, path)
        copy_rows(_rows(found, len(rows), row_bytes), places.astype(np.int64), _rows(ordered, len(places), row_bytes), None)
        pages = first_page + np.arange(len(ordered) // PAGE_BYTES)
        values = np.empty(len(pages), np.uint64)
        page_sums(ordered, seed, values)
        pwrite_all(fd, memoryview(ordered), first_page * PAGE_BYTES, path)
        sums[pages // SUMS_PER_PAGE, pages % SUMS_PER_PAGE] = values


def _pages(n: int) -> npt.NDArray[np.uint8]:
    """Allocate ``n`` pages of zeros, aligned as direct reads and writes require."""
    return np.frombuffer(mmap.mmap(-1, max(1, n) * PAGE_BYTES), np.uint8)[: n * PAGE_BYTES]


def _rows(data: npt.NDArray[np.uint8], n: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    return data[: n * row_bytes].reshape(n, row_bytes)


def _read(fd: int, out: npt.NDArray[np.uint8], offset: int, path: str) -> None:
    view, done = memoryview(out), 0
    while done < len(view):
        try:
            n = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        if not n:
            raise CorruptionError("the file ends within an extent that was written", path, offset + done)
        done += n
