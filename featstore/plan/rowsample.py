"""A part of a trace's rows, which predicts the hits of a cache as the whole trace does, in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.plan.trace import Trace

__all__ = ["RowSample"]

SPREAD = 0x9E3779B1  # odd, so that multiplying permutes; its multiples are spread evenly


class RowSample:
    """One row of ``2 ** halvings``, in whatever order rows are numbered. Those that are taken get numbers of their own.

    A cache of as small a part of its rows serves as large a part of a trace's accesses.

    Parameters
    ----------
    n : int
        Rows.
    halvings : int
        0: all rows, whose numbers change all the same.

    Attributes
    ----------
    n : int
        Numbers of rows that are taken; some are no row's, where ``n`` rows are no power of two.

    References
    ----------
    Waldspurger et al., Efficient MRC construction with SHARDS, FAST 2015.
    """

    def __init__(self, n: int, halvings: int) -> None:
        bits = max(halvings, max(1, n - 1).bit_length())
        self._n, self._modulus, self.n = n, 1 << bits, 1 << (bits - halvings)

    def trace(self, trace: Trace) -> Trace:
        """Return what a trace asks of the rows that are taken; held in memory, 4 bytes an access (8 from 2³¹ rows on)."""
        batches = []
        for ids in trace:
            spread = ids.astype(np.uint64) * np.uint64(SPREAD) & np.uint64(self._modulus - 1)
            batches.append(spread[spread < self.n].astype(ids.dtype))
        return Trace.reading(batches.__getitem__, np.array([len(ids) for ids in batches], np.int64), self.n)

    def values(self, array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the numbers that ``array`` has of the rows that are taken, -1 for what is no row."""
        back = np.uint64(pow(SPREAD, -1, self._modulus))
        rows = np.arange(self.n, dtype=np.uint64) * back & np.uint64(self._modulus - 1)
        found = np.full(self.n, -1, np.int64)
        is_row = rows < self._n
        found[is_row] = array[rows[is_row]]
        return found
