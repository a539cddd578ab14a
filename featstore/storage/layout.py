"""The place of row ``i`` in a file: one formula for dense rows and for groups of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import gcd

__all__ = ["PAGE_BYTES", "RowLayout", "choose_layout"]

PAGE_BYTES = 4096
PADDING_FRACTION = 1 / 32  # of a file, that padding takes at most


@dataclass(frozen=True)
class RowLayout:
    """Row ``i`` starts ``(i // group_rows) * group_bytes + (i % group_rows) * row_bytes`` bytes after the header page.

    Dense rows have ``group_rows == 1`` and ``group_bytes == row_bytes``. Otherwise a group is a number of whole pages, with one
    row or several, and zeros after them.
    """

    row_bytes: int
    group_rows: int
    group_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether no padding lies between rows."""
        return self.group_rows * self.row_bytes == self.group_bytes

    @property
    def block(self) -> tuple[int, int]:
        """The fewest rows that fill whole pages without cutting a row or a group, and the number of these pages."""
        step = gcd(self.group_bytes, PAGE_BYTES)
        return self.group_rows * (PAGE_BYTES // step), self.group_bytes // step

    def offset(self, row: int) -> int:
        """Compute the first byte of ``row``, counted from the end of the header page."""
        return row // self.group_rows * self.group_bytes + row % self.group_rows * self.row_bytes

    def data_bytes(self, n_rows: int) -> int:
        """Count the bytes of ``n_rows`` rows, rounded up to whole pages."""
        if n_rows == 0:
            return 0
        end = self.offset(n_rows - 1) + self.row_bytes
        return -(-end // PAGE_BYTES) * PAGE_BYTES


def choose_layout(row_bytes: int) -> RowLayout:
    """Choose the smallest group of whole pages of which padding takes a 32nd at most; rows are dense if it has none.

    Up to half of the rows then lie in a page more than they must, and each is one read all the same. To pad until none does would
    take up to half of the disk, and of each pass over the rows.
    """
    if row_bytes < 1:
        raise ValueError(f"a row has at least 1 byte, not {row_bytes}")
    for n_pages in itertools.count(-(-row_bytes // PAGE_BYTES)):
        group_bytes = n_pages * PAGE_BYTES
        padding = group_bytes % row_bytes
        if padding <= PADDING_FRACTION * group_bytes:
            break
    return RowLayout(row_bytes, group_bytes // row_bytes, group_bytes) if padding else RowLayout(row_bytes, 1, row_bytes)
