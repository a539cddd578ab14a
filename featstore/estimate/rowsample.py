"""The rows that a trace asks for, numbered; or a part of them, which predicts the hits of a cache as all do, in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.plan.trace import Trace

__all__ = ["NUMBERED_BYTES", "RowSample", "numbered"]

Int64s = npt.NDArray[np.int64]

SPREAD = 0x9E3779B1  # odd, so that multiplying permutes; its multiples are spread evenly
PIECE_ROWS = 1 << 16
NUMBERED_BYTES = 12  # an access: its place, and its id


class RowSample:
    """One row of ``2 ** halvings``, in whatever order rows are numbered. Those that are taken get numbers of their own.

    A cache of as small a part of its rows serves as large a part of a trace's accesses (Waldspurger et al., SHARDS, FAST 2015).
    ``n`` numbers are taken; some are no row's, where the rows are no power of two. With 0 halvings all rows are, and their
    numbers change all the same.
    """

    def __init__(self, n: int, halvings: int) -> None:
        bits = max(halvings, max(1, n - 1).bit_length())
        self._n, self._modulus, self.n = n, 1 << bits, 1 << (bits - halvings)

    def trace(self, trace: Trace) -> Trace:
        """Return a trace's requests for the rows that are taken, in memory: 4 bytes an access (8 from 2³¹ rows on)."""
        batches = []
        for ids in trace:
            spread = ids.astype(np.uint64) * np.uint64(SPREAD) & np.uint64(self._modulus - 1)
            batches.append(spread[spread < self.n].astype(ids.dtype))
        return Trace.reading(batches.__getitem__, np.array([len(ids) for ids in batches], np.int64), self.n)

    def rows(self, numbers: Int64s) -> Int64s:
        """Return the rows that have these numbers."""
        back = np.uint64(pow(SPREAD, -1, self._modulus))
        found: Int64s = (numbers.astype(np.uint64) * back & np.uint64(self._modulus - 1)).astype(np.int64)
        return found

    def values(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers that ``array`` has of the rows that are taken, in its type; 0 for what is no row."""
        found = np.zeros(self.n, array.dtype)
        for first in range(0, self.n, PIECE_ROWS):
            rows = self.rows(np.arange(first, min(first + PIECE_ROWS, self.n)))
            is_row = rows < self._n
            found[first : first + len(rows)][is_row] = array[rows[is_row]]
        return found


def numbered(trace: Trace) -> tuple[Int64s, Trace]:
    """Return the ids that a trace has, ascending, and the trace with their places among these in their stead.

    What is counted of it then takes memory for accesses, however many rows there are. Both are held in memory,
    ``NUMBERED_BYTES`` an access at the most; a byte for each row of the field meanwhile.
    """
    is_asked = np.zeros(trace.n, bool)
    for ids in trace:
        is_asked.put(ids, True)
    rows = np.flatnonzero(is_asked)
    del is_asked
    kind = np.int32 if len(rows) < 2**31 else np.int64
    batches: list[npt.NDArray[Any]] = [np.searchsorted(rows, ids).astype(kind) for ids in trace]
    return rows, Trace.reading(batches.__getitem__, trace.lengths, len(rows))
