"""Numbers for the rows that a trace requests, and a sample of rows, which predicts a cache's hits in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.plan.trace import Trace

__all__ = ["NUMBERED_BYTES", "RowSample", "numbered"]

Int64s = npt.NDArray[np.int64]

SPREAD = 0x9E3779B1  # odd, so that multiplying permutes; its multiples are spread evenly
PIECE_ROWS = 1 << 16
NUMBERED_BYTES = 12  # per access: its place and its id


class RowSample:
    """A sample of one row in ``2 ** halvings``, spread evenly over the rows. Sampled rows get new numbers.

    A cache reduced to the same fraction serves the same share of the sample's accesses (Waldspurger et al., SHARDS, FAST 2015).
    The sample has ``n`` numbers; some belong to no row, unless the rows are a power of two. With 0 halvings all rows are taken,
    with new numbers, too.
    """

    def __init__(self, n: int, halvings: int) -> None:
        bits = max(halvings, max(1, n - 1).bit_length())
        self._n, self._modulus, self.n = n, 1 << bits, 1 << (bits - halvings)

    def trace(self, trace: Trace) -> Trace:
        """Make the trace of the requests for sampled rows, in memory: 4 bytes an access (8 from 2³¹ rows on)."""
        batches = []
        for ids in trace:
            spread = ids.astype(np.uint64) * np.uint64(SPREAD) & np.uint64(self._modulus - 1)
            batches.append(spread[spread < self.n].astype(ids.dtype))
        return Trace.reading(batches.__getitem__, np.array([len(ids) for ids in batches], np.int64), self.n)

    def rows(self, numbers: Int64s) -> Int64s:
        """Find the rows of these numbers."""
        back = np.uint64(pow(SPREAD, -1, self._modulus))
        found: Int64s = (numbers.astype(np.uint64) * back & np.uint64(self._modulus - 1)).astype(np.int64)
        return found

    def values(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the values of ``array`` for the sampled rows, in its dtype; 0 for a number without a row."""
        found = np.zeros(self.n, array.dtype)
        for first in range(0, self.n, PIECE_ROWS):
            rows = self.rows(np.arange(first, min(first + PIECE_ROWS, self.n)))
            is_row = rows < self._n
            found[first : first + len(rows)][is_row] = array[rows[is_row]]
        return found


def numbered(trace: Trace) -> tuple[Int64s, Trace]:
    """Number the rows that a trace requests; return the rows, ascending, and the trace with each row's number in its place.

    Counting the new trace takes memory for its accesses, not for all rows of the field. Both results are in memory,
    ``NUMBERED_BYTES`` an access at the most. Takes a byte for each row of the field meanwhile.
    """
    is_asked = np.zeros(trace.n, bool)
    for ids in trace:
        is_asked.put(ids, True)
    rows = np.flatnonzero(is_asked)
    del is_asked
    kind = np.int32 if len(rows) < 2**31 else np.int64
    batches: list[npt.NDArray[Any]] = [np.searchsorted(rows, ids).astype(kind) for ids in trace]
    return rows, Trace.reading(batches.__getitem__, trace.lengths, len(rows))
