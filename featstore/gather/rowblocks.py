"""All rows of a source in order, block by block: of a row file through a stream of its pages, which is read ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool, size_class
from featstore.gather.doublebuffer import double_buffer
from featstore.gather.patchedrows import PatchedRows
from featstore.gather.sources import RowSource, SourceRange
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.pagestream import MOST_WINDOW_BYTES, PageStream, least_window
from featstore.storage.rowfile import RowFile

__all__ = ["row_blocks"]

Uint8s = npt.NDArray[np.uint8]
Read = Callable[[int, int, Uint8s], object]  # the first row, the number of rows, and where they go

PIECE_BYTES: Final = 8 << 20  # of the rows that are copied out of the stream at once
LEAST_BYTES: Final = 256 << 10  # of a piece; the pool does not count much smaller ones
HELD: Final = 3  # pieces in memory: the one that the loop still has, the one that it gets, the one that is being filled
FRACTION: Final = 1 / (2 * (HELD + 1))  # of the free memory, that a piece takes at most, and the stream, too
PAGES: Final = 256  # copied at once where rows do not follow each other in the pages


def row_blocks(
    source: RowSource, pool: BufferPool, row_shape: tuple[int, ...], dtype: torch.dtype, rows: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the rows of each block of ``rows`` rows, in order; the last block may have fewer.

    Blocks are views of pieces: pooled tensors of several blocks, or of one that is larger. By default a block is a piece, of as
    many rows as the free memory suggests. A thread fills the next piece while the loop has one. See :meth:`FeatureStore.blocks`.
    """
    unit, first = rows or 1, 0
    least = unit * max(1, min(PIECE_BYTES, LEAST_BYTES) // (unit * source.row_bytes))
    n = max(least, min(PIECE_BYTES, int(_free(pool.budget) * FRACTION)) // source.row_bytes // unit * unit)
    if rows is None and n > PAGE_BYTES:
        n -= n % PAGE_BYTES  # so many rows begin with a page, whatever their width
    while first < source.n_rows:
        pid, pieces = os.getpid(), _pieces(source, pool, row_shape, dtype, first, n)
        try:
            for piece in pieces:
                step = rows or len(piece)
                for low in range(0, len(piece), step):
                    yield first + low, piece[low : low + step]
                first += len(piece)
                del piece
                if os.getpid() != pid:
                    break  # a forked child, which lacks the threads, begins anew from here
        except BudgetError:
            if n == least:
                raise
            n = max(least, n // 2 // unit * unit)
        finally:
            pieces.close()


def _free(budget: Budget) -> int:
    return budget.available + budget.on_loan


def _pieces(
    source: RowSource, pool: BufferPool, row_shape: tuple[int, ...], dtype: torch.dtype, first: int, n: int
) -> Generator[torch.Tensor, None, None]:
    """Yield the rows from ``first`` on, ``n`` at a time.

    BudgetError names memory that suffices for as many pieces as are held at once, if none was yielded yet.
    """
    tensors: deque[torch.Tensor] = deque()
    piece_bytes, n_made = size_class(n * source.row_bytes), 0

    def places() -> Iterator[tuple[int, Uint8s]]:
        nonlocal n_made
        for begin in range(first, source.n_rows, n):
            count = min(n, source.n_rows - begin)
            tensor, memory = pool.rows(count, source.row_bytes, (count, *row_shape), dtype)
            tensors.append(tensor)
            n_made += 1
            yield begin, memory

    try:
        with _reading(source, pool.budget, first, n, HELD * piece_bytes) as read:
            for _ in double_buffer(read, places()):
                yield tensors.popleft()
    except BudgetError as error:
        raise BudgetError(error.reason, (error.needed or 0) + max(0, HELD - 1 - n_made) * piece_bytes) from None


@contextmanager
def _reading(source: RowSource, budget: Budget, first: int, n: int, held_bytes: int) -> Iterator[Read]:
    """Make a function that reads the rows from ``first`` on, in order, ``n`` at a time.

    ``held_bytes`` are left free, beside what reading takes.
    """
    file, at = (source.whole, source.first) if isinstance(source, SourceRange) else (source, 0)
    if not isinstance(file, (RowFile, PatchedRows)) or (isinstance(file, PatchedRows) and not file.has_long_runs):

        def gather(begin: int, count: int, out: Uint8s) -> None:
            source.gather(range(begin, begin + count), out)

        yield gather
        return
    begins = np.arange(first, source.n_rows, n, dtype=np.int64)
    runs = _pages(file.layout, at + begins, at + np.minimum(begins + n, source.n_rows))
    most = int(_free(budget) * FRACTION)
    left = _free(budget) - held_bytes
    scratch_bytes = max(PAGE_BYTES, file.layout.group_bytes, min(PAGES * PAGE_BYTES, most, left // 4))
    window = max(least_window(), min(MOST_WINDOW_BYTES, most, (left - scratch_bytes) // 2))
    with budget.reserve("reader buffers", window + scratch_bytes):
        pid = os.getpid()
        stream = file.stream(runs, window)
        try:
            yield _StreamedRows(file, at, stream, np.empty(scratch_bytes, np.uint8)).read
        finally:
            if os.getpid() == pid:  # a forked child must not wait for threads that it lacks
                stream.close()


def _pages(layout: RowLayout, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Compute the first page and the number of pages of consecutive rows; two runs may share a page, which both have."""
    if layout.is_dense:
        low = begins * layout.row_bytes // PAGE_BYTES
        high = -(-ends * layout.row_bytes // PAGE_BYTES)
    else:
        low = begins // layout.group_rows * (layout.group_bytes // PAGE_BYTES)
        groups, rows = np.divmod(ends - 1, layout.group_rows)  # a file ends with its last row, maybe within a group
        high = -(-(groups * layout.group_bytes + (rows + 1) * layout.row_bytes) // PAGE_BYTES)
    return np.stack([1 + low, high - low], axis=1)


class _StreamedRows:
    """Rows that come out of a stream of a file's pages, run after run. ``at`` is added to their numbers."""

    def __init__(self, file: RowFile | PatchedRows, at: int, stream: PageStream, scratch: Uint8s) -> None:
        self._file, self._at, self._stream, self._scratch = file, at, stream, scratch
        self._n_pages = 0  # taken out of the stream

    def _take(self, n_pages: int, out: Uint8s) -> None:
        self._n_pages += n_pages
        self._stream.feed(self._stream.pieces_before(self._n_pages))
        self._stream.core.scatter(len(out), None, out)

    def read(self, first: int, count: int, out: Uint8s) -> None:
        """Read the rows of the next run: ``count`` rows from ``first`` on."""
        self._file.check_open()
        layout, begin = self._file.layout, self._at + first
        ((_, n_pages),) = _pages(layout, np.array([begin]), np.array([begin + count])).tolist()
        if layout.is_dense and begin * layout.row_bytes % PAGE_BYTES == 0:
            self._take(n_pages, out)
        elif layout.is_dense:
            self._take_bytes(n_pages, begin * layout.row_bytes % PAGE_BYTES, out.reshape(-1))
        else:
            self._take_groups(n_pages, begin % layout.group_rows, out)
        self._file.count(count, 0, 0)

    def _take_bytes(self, n_pages: int, skipped: int, out: Uint8s) -> None:
        """Copy bytes that begin ``skipped`` bytes after a page does."""
        done, step = 0, len(self._scratch) // PAGE_BYTES
        for page in range(0, n_pages, step):
            pages = self._scratch[: min(step, n_pages - page) * PAGE_BYTES].reshape(-1, PAGE_BYTES)
            self._take(len(pages), pages)
            found = pages.reshape(-1)[skipped:][: len(out) - done]
            out[done : done + len(found)] = found
            done, skipped = done + len(found), 0

    def _take_groups(self, n_pages: int, skipped: int, out: Uint8s) -> None:
        """Copy rows out of groups, without the padding behind each; the first group begins with ``skipped`` other rows."""
        layout, done = self._file.layout, 0
        n_each = layout.group_bytes // PAGE_BYTES
        step = len(self._scratch) // layout.group_bytes * n_each
        for page in range(0, n_pages, step):
            n = min(step, n_pages - page)
            self._take(n, self._scratch[: n * PAGE_BYTES].reshape(-1, PAGE_BYTES))
            groups = self._scratch[: -(-n // n_each) * layout.group_bytes].reshape(-1, layout.group_bytes)
            rows = groups[:, : layout.group_rows * layout.row_bytes]
            k = min(len(groups) * layout.group_rows - skipped, len(out) - done)
            into = out[done : done + k]
            if skipped or k < len(groups) * layout.group_rows:
                into[:] = rows.reshape(-1, layout.row_bytes)[skipped : skipped + k]
            else:
                into.reshape(len(groups), -1)[:] = rows
            done, skipped = done + k, 0
