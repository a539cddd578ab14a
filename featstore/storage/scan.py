"""Sequential scans of all words of a file: a stream of its pages, with many reads in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import least_window
from featstore.storage.rowfile import RowFile

__all__ = ["SCAN_BYTES", "scan_bytes", "scan_words"]

SCAN_BYTES = 8 << 20
_BLOCK_FRACTION = 1 / 4  # of the memory, for a block: a small one stays in a processor's cache until its words are used


def scan_bytes(n_bytes: int, most_bytes: int = SCAN_BYTES) -> int:
    """Count the bytes that a scan of ``n_bytes`` holds: at most ``most_bytes``, but at least three pages."""
    return max(PAGE_BYTES + least_window(), min(most_bytes, -(-n_bytes // PAGE_BYTES) * PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES)


def scan_words(
    file: RowFile, n: int, dtype: np.dtype[Any], most_bytes: int = SCAN_BYTES
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the first ``n`` words of a file, block by block, and the number of each block's first word.

    A row of the file is a word of 1, 2, 4 or 8 bytes. A block is valid until the next one is requested. A scan holds the bytes
    that :func:`scan_bytes` counts: a quarter for the block, and the rest for reading ahead.
    """
    n_pages = -(-n * dtype.itemsize // PAGE_BYTES)
    if not n_pages:
        return
    held = scan_bytes(n * dtype.itemsize, most_bytes)
    pages = np.empty((max(1, int(held * _BLOCK_FRACTION) // PAGE_BYTES), PAGE_BYTES), np.uint8)
    with file.stream(np.array([[1, n_pages]]), held - pages.nbytes) as stream:  # page 0 is the header
        for page in range(0, n_pages, len(pages)):
            n_taken = min(len(pages), n_pages - page)
            stream.feed(stream.pieces_before(page + n_taken))
            stream.core.scatter(n_taken, None, pages)
            first = page * (PAGE_BYTES // dtype.itemsize)
            yield first, pages[:n_taken].reshape(-1).view(dtype)[: n - first]
