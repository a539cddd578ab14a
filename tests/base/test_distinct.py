"""Distinct values, beside NumPy's."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from featstore.distinct import distinct

INTEGERS = st.sampled_from([np.int64, np.int32, np.uint32, np.uint8])


@given(INTEGERS.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=30))))
def test_distinct_is_what_unique_finds(values: npt.NDArray[Any]) -> None:
    before = values.copy()
    found = distinct(values)
    wanted = np.unique(values)
    assert found.dtype == wanted.dtype
    assert found.tolist() == wanted.tolist()
    assert np.array_equal(values, before)
