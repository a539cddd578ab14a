"""Hypothesis strategies: row ids and traces of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

__all__ = ["row_ids", "traces"]

Int64s = npt.NDArray[np.int64]


def row_ids(n: int, *, min_size: int = 0, max_size: int = 64, unique: bool = False) -> st.SearchStrategy[Int64s]:
    """Make a strategy for int64 arrays of rows in ``[0, n)``; any order, repeated unless ``unique``."""
    if n == 0:
        return st.just(np.empty(0, np.int64))
    most = min(max_size, n) if unique else max_size
    return hnp.arrays(np.int64, st.integers(min_size, most), elements=st.integers(0, n - 1), unique=unique)


@st.composite
def traces(
    draw: Any, *, max_rows: int = 40, max_batches: int = 12, max_batch: int = 16, unique: bool = True
) -> tuple[int, list[Int64s]]:
    """Draw ``(n, batches)``: a number of rows and the ids of each batch; skewed, so that some rows return often.

    ``unique``: the ids of a batch are distinct, as a sampler's are.
    """
    n = draw(st.integers(1, max_rows))
    hot = st.integers(0, min(n - 1, 3))
    element = st.one_of(hot, st.integers(0, n - 1))
    batch = st.lists(element, max_size=min(max_batch, n) if unique else max_batch, unique=unique)
    return n, [np.array(ids, np.int64) for ids in draw(st.lists(batch, min_size=1, max_size=max_batches))]
