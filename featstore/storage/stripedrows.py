"""Striped rows: rows in several files, on several drives; each file holds consecutive rows and is read through its own queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore._core.io import MAX_SORTED_ROWS
from featstore.budget import Budget
from featstore.errors import BudgetError, FormatError
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile

__all__ = ["StripedRows", "dividing"]

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

_LEAST_ROWS = 1 << 16  # divided at once, even if the budget has no room
_DIVIDING_BYTES = 32  # for each row: its file, its number there, and its place in the output


class StripedRows:
    """Dense rows of several files, by number, as of one :class:`~featstore.storage.rowfile.RowFile`. Thread-safe.

    Each file begins with a row whose number is a multiple of ``unit_rows``; ``unit_rows`` rows fill whole pages. ``first_rows``
    are the first rows of the files, in order. ``lengths`` are the numbers of rows that count in each file, all by default.
    ``budget`` pays, as ``reader buffers``, for dividing the rows of a gather by file. One call reads its files side by side, with
    a thread for each. So a slow drive delays only calls that read rows of it.
    """

    def __init__(self, files: Sequence[RowFile], unit_rows: int, budget: Budget, lengths: Sequence[int] | None = None) -> None:
        self.files = list(files)
        self.lengths = [file.n_rows for file in files] if lengths is None else list(lengths)
        self._budget = budget
        self.row_bytes = files[0].row_bytes
        n_rows = np.cumsum([0, *self.lengths])
        self.n_rows, self.first_rows = int(n_rows[-1]), n_rows[:-1]
        for file, first in zip(self.files, self.first_rows.tolist(), strict=True):
            if (first % unit_rows and first != self.n_rows) or not file.layout.is_dense or file.row_bytes != self.row_bytes:
                raise FormatError(f"{file.path}: it cannot hold row {first} and those that follow", file.path)

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self.files[0].path

    @property
    def gap_bytes(self) -> int:
        """Bytes of the largest gap that any of the files reads over."""
        return max(file.gap_bytes for file in self.files)

    def file_of(self, rows: Int64s) -> Int64s:
        """Find the number of the file that holds each row; the first or the last file for rows out of range."""
        return np.searchsorted(self.first_rows[1:], rows, side="right")

    def place(self, row: int) -> tuple[RowFile, int]:
        """Find the file that holds a row, and the row's number in that file."""
        number, row = self._place(row)
        return self.files[number], row

    def _place(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.first_rows[1:], row, side="right"))
        return number, row - int(self.first_rows[number])

    def read(self, first: int, n: int, out: UInt8s | None = None) -> UInt8s:
        """Read consecutive rows, from one file after the other; see :meth:`RowFile.read`."""
        if out is None:
            out = np.empty((n, self.row_bytes), np.uint8)
        done = 0
        while done < n:
            number, row = self._place(first + done)
            k = min(n - done, self.lengths[number] - row)
            if k <= 0:
                raise IndexError(f"row {first + done} is out of range for {self.n_rows} rows")
            self.files[number].read(row, k, out[done : done + k])
            done += k
        return out

    def gather(self, rows: Int64s, out: UInt8s) -> None:
        """Read scattered rows as :meth:`RowFile.gather` does; if memory is short, each page at most once per 65,536 rows."""
        with dividing(self._budget, min(len(rows), MAX_SORTED_ROWS)) as n:
            for begin in range(0, len(rows), n):
                part, into = rows[begin : begin + n], out[begin : begin + n]
                file_of = self.file_of(part)
                calls: list[Callable[[], object]] = []
                for number in range(len(self.files)):
                    at = np.flatnonzero(file_of == number)
                    if len(at):
                        calls.append(partial(self.files[number].gather, part[at] - self.first_rows[number], into, at))
                _side_by_side(calls)

    def read_pages(self, numbers: Int64s, out: UInt8s) -> None:
        """Read scattered pages as :meth:`RowFile.read_pages` does; pages are numbered through all files, behind one header."""
        first_pages = self.first_rows * self.row_bytes // PAGE_BYTES
        ends = [*np.searchsorted(numbers, 1 + first_pages[1:]).tolist(), len(numbers)]
        calls: list[Callable[[], object]] = []
        begin = 0
        for number, end in enumerate(ends):
            if begin < end:
                pages = numbers[begin:end] - first_pages[number]
                calls.append(partial(self.files[number].read_pages, pages, out[begin:end]))
            begin = end
        _side_by_side(calls)


@contextmanager
def dividing(budget: Budget, n_rows: int) -> Iterator[int]:
    """Reserve the memory to divide ``n_rows`` of a gather at once, or as many as there is room for; yield their number."""
    while n_rows > _LEAST_ROWS:
        try:
            held = budget.reserve("reader buffers", _DIVIDING_BYTES * n_rows)
        except BudgetError:
            n_rows = max(_LEAST_ROWS, n_rows // 2)
            continue
        with held:
            yield n_rows
        return
    yield _LEAST_ROWS


def _side_by_side(calls: list[Callable[[], object]]) -> None:
    """Run calls at once, each in its own thread, and wait for all of them."""
    if len(calls) < 2:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(len(calls) - 1, thread_name_prefix="featstore-stripe") as threads:
        others = [threads.submit(call) for call in calls[1:]]
        calls[0]()
    for other in others:
        other.result()
