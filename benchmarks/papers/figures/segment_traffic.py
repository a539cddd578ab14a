"""Bytes of segments of one length on disk, and of an epoch's reads of them: counted, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featstore.pack.segments import THRESHOLD, segments, stored_bytes
from featstore.storage.layout import PAGE_BYTES


@dataclass(frozen=True)
class Traffic:
    """Bytes that a segmented disk cache takes, and that an epoch reads of it.

    Attributes
    ----------
    length, threshold : int
    n_accesses, row_bytes : int
        Rows asked of it, all batches together, and the bytes of one.
    cached_rows, packed_rows : int
        Rows in the segments' caches; copies in extents.
    extent_pages, cache_pages : int
        Pages of both on disk; extents are read whole.
    pages_read, runs_read : int
        Pages of caches that batches read, and the reads that they are.
    """

    length: int
    threshold: int
    n_accesses: int
    row_bytes: int
    cached_rows: int
    packed_rows: int
    extent_pages: int
    cache_pages: int
    pages_read: int
    runs_read: int

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, headers and checksums included."""
        return stored_bytes(self.extent_pages) + (stored_bytes(self.cache_pages) if self.cache_pages else 0)

    @property
    def bytes_read(self) -> int:
        """Bytes that an epoch reads, in whole pages."""
        return PAGE_BYTES * (self.extent_pages + self.pages_read)

    @property
    def amplification(self) -> float:
        """Bytes read for each byte asked for."""
        return self.bytes_read / max(1, self.n_accesses * self.row_bytes)


def traffic(
    batches: Sequence[np.ndarray], n: int, length: int, row_bytes: int, threshold: int = THRESHOLD, **options: Any
) -> Traffic:
    """Count what :func:`featstore.pack.segments.segments` takes and reads, with the same parameters."""

    def pages(n_rows: Any) -> Any:
        return -(-n_rows * row_bytes // PAGE_BYTES)

    accesses = cached = packed = extent_pages = cache_pages = pages_read = runs_read = 0
    for segment in segments(batches, n, length, row_bytes, threshold=threshold, **options):
        accesses += segment.accesses
        cached += len(segment.rows)
        packed += int(segment.packed.sum())
        extent_pages += int(pages(segment.packed).sum())
        cache_pages += int(pages(len(segment.rows)))
        pages_read += int(segment.pages.sum())
        runs_read += int(segment.runs.sum())
    return Traffic(length, threshold, accesses, row_bytes, cached, packed, extent_pages, cache_pages, pages_read, runs_read)
