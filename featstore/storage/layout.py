"""The place of row ``i`` in a file: one formula for dense, page-grouped and padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

__all__ = ["PAGE_BYTES", "RowLayout", "choose_layout"]

PAGE_BYTES = 4096


@dataclass(frozen=True)
class RowLayout:
    """Row ``i`` starts ``(i // group_rows) * group_bytes + (i % group_rows) * row_bytes`` bytes after the header page.

    Dense rows have ``group_rows == 1`` and ``group_bytes == row_bytes``. Page-grouped rows have several rows in a group of
    4 KiB. Padded rows have one row in a group of whole pages.
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

    def mean_pages(self) -> float:
        """Compute the mean number of 4 KiB pages that a uniformly drawn row touches."""
        if self.group_bytes % PAGE_BYTES == 0 and self.group_rows == 1:
            return float(-(-self.row_bytes // PAGE_BYTES))
        if not self.is_dense:
            return 1.0
        step = gcd(self.row_bytes, PAGE_BYTES)  # rows start evenly at the multiples of step within a page
        return (self.row_bytes - step) / PAGE_BYTES + 1


def choose_layout(row_bytes: int) -> RowLayout:
    """Choose the layout whose random rows touch the fewest 4 KiB pages; of equals, the one with the smallest file."""
    if row_bytes < 1:
        raise ValueError(f"a row has at least 1 byte, not {row_bytes}")
    dense = RowLayout(row_bytes, 1, row_bytes)
    if row_bytes <= PAGE_BYTES:
        aligned = RowLayout(row_bytes, PAGE_BYTES // row_bytes, PAGE_BYTES)
    else:
        aligned = RowLayout(row_bytes, 1, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return aligned if aligned.mean_pages() < dense.mean_pages() else dense
