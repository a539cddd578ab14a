"""The check of a trace's batches against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.distinct import first_bad
from featstore.cache.belady import Belady
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">i8"]


def expected(rows: npt.NDArray[Any], n: int, repeats: bool) -> int:
    """The first row that is out of range or, where ``repeats`` count, there before."""
    again = np.ones(len(rows), bool)
    again[np.unique(rows, return_index=True)[1]] = False
    bad = np.flatnonzero((rows < 0) | (rows >= n) | (again & repeats))
    return int(bad[0]) if len(bad) else -1


@given(
    rows=st.lists(st.integers(-2, 300), max_size=400),
    n=st.sampled_from([0, 1, 64, 65, 299, 301]),
    kind=st.sampled_from([np.int32, np.int64]),
    narrows=st.booleans(),
    repeats=st.booleans(),
    is_distinct=st.booleans(),
)
def test_first_bad_is_that_of_numpy(
    rows: list[int], n: int, kind: type[Any], narrows: bool, repeats: bool, is_distinct: bool
) -> None:
    given_rows = np.array(list(dict.fromkeys(rows)) if is_distinct else rows, kind)
    narrowed = np.full(len(given_rows), -7, np.int32) if narrows else None
    bits = np.zeros((n // 64 + 1) * repeats, np.uint64)
    bad = first_bad(given_rows, n, narrowed, bits)
    assert bad == expected(given_rows, n, repeats)
    assert not bits.any()  # for the next batch
    if narrowed is not None:
        good = len(given_rows) if bad < 0 else bad
        assert np.array_equal(narrowed[:good], given_rows[:good])


def test_too_little_room_is_refused() -> None:
    rows = np.arange(3)
    with pytest.raises(ValueError, match="bits"):
        first_bad(rows, 65, None, np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="room"):
        first_bad(rows, 65, np.empty(2, np.int32), np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="room"):
        first_bad(rows, 2**31, np.empty(3, np.int32), np.empty(0, np.uint64))


@given(
    rows=st.lists(st.integers(0, 127), unique=True, max_size=100),
    dtype=st.sampled_from(DTYPES),
    n=st.sampled_from([None, 128, 2**20, 2**31, 2**40]),
    every_other=st.booleans(),
)
def test_batches_of_every_dtype_are_narrowed(rows: list[int], dtype: str, n: int | None, every_other: bool) -> None:
    array = np.array(rows, dtype)
    if every_other:
        array = np.repeat(array, 2)[::2]  # not contiguous
    trace = Trace([array, array], n)
    assert [batch.tolist() for batch in trace] == [rows, rows]
    assert {batch.dtype for batch in trace} == {np.dtype(np.int32 if n is None or n < 2**31 else np.int64)}
    if rows and dtype[0] != ">" and np.dtype(dtype) != np.uint8:  # of torch's uint8 nobody knows whether it is a mask
        assert [batch.tolist() for batch in Trace([torch.from_numpy(np.ascontiguousarray(array))], n)] == [rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [100, 2**20])
def test_bad_batches_of_every_dtype_are_named(dtype: str, n: int) -> None:
    largest = int(np.iinfo(dtype).max)
    if largest >= n:
        with pytest.raises(IndexError, match=f"row {largest} at position 2: out of range for {n} rows"):
            Trace([np.array([1, 2, largest, n // 2 % 100], dtype)], n)
    if np.dtype(dtype).kind == "i":
        with pytest.raises(IndexError, match="row -1 at position 1: rows are numbered from 0"):
            Trace([np.array([1, -1, -2], dtype)], n)
    for counted in (n, 10**12):  # by bits, and by sorting
        with pytest.raises(ValueError, match="batch 1 names a row twice"):
            Trace([np.array([5, 6], dtype), np.array([6, 5, 6], dtype)], counted)


class Plugin(Belady):
    """Checked, so that all of its plans are made."""


@given(st.lists(st.lists(st.integers(0, 30), unique=True, max_size=20), max_size=8), st.integers(1, 12))
def test_misses_that_are_announced_are_those_of_whole_plans(batches: list[list[int]], capacity: int) -> None:
    whole = simulate(batches, capacity, Plugin(), n=31).tolist()
    policy = Belady()
    for _ in range(2):  # a plan that was left does not spoil the next one
        assert simulate(batches, capacity, policy, n=31).tolist() == whole
