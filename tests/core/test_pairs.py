"""Records divided among buckets and keys sorted by radix, beside NumPy's stable sorts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.pairs import divide, sort_keys


@given(
    st.sampled_from(["<i4", "<i8"]),
    st.sampled_from([None, "<i4", "<i8"]),
    st.sampled_from(["dst", "src"]),
    st.integers(0, 300),
    st.integers(1, 300),
    st.sampled_from([0, 7, 1 << 20, (1 << 31) - 90_000, 1 << 40]),
    st.integers(1, 300),
    st.integers(0, 2**32),
)
def test_records_by_buckets(node: str, edge: str | None, of: str, n: int, buckets: int, low: int, width: int, seed: int) -> None:
    if node == "<i4" and low >= 1 << 31:
        low = 0
    dtype = np.dtype([("dst", node), ("src", node)] + ([] if edge is None else [("edge", edge)]))
    rng = np.random.default_rng(seed)
    records = np.zeros(n, dtype)
    for name in dtype.names or ():
        records[name] = low + rng.integers(0, buckets * width, n)
    begins, out = np.empty(buckets, np.int64), np.empty_like(records)
    kind, at = (dtype.fields or {})[of][:2]
    places = np.empty(n, np.uint16)
    divide(records.view(np.uint8), dtype.itemsize, at, kind.itemsize, low, width, places, begins, out.view(np.uint8))
    bucket = (records[of].astype(np.int64) - low) // width
    np.testing.assert_array_equal(out, records[np.argsort(bucket, kind="stable")])
    np.testing.assert_array_equal(begins, np.searchsorted(np.sort(bucket), np.arange(buckets)))


@pytest.mark.parametrize("number", [-(2**31), -1, 9, 40, 2**31 - 1])
@pytest.mark.parametrize("wide", [False, True])
def test_a_number_that_no_bucket_has(number: int, wide: bool) -> None:
    records = np.full(6, 20, np.int64 if wide else np.int32)
    records[4] = number
    places, begins = np.empty(3, np.uint16), np.empty(3, np.int64)
    out = np.zeros(records.nbytes, np.uint8)
    with pytest.raises(ValueError, match="no bucket has the number of record 2"):
        divide(records.view(np.uint8), records.nbytes // 3, 0, records.itemsize, 10, 10, places, begins, out)
    assert not out.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"record_bytes": 28},
        {"number_bytes": 2},
        {"at": 8},
        {"at": 2},
        {"at": -4},
        {"width": 0},
        {"begins": np.empty(0, np.int64)},
        {"bucket": np.empty(2, np.uint16)},
        {"out": np.empty(16, np.uint8)},
        {"records": np.zeros(25, np.uint8)},
        {"records": np.zeros(25, np.uint8)[1:]},
    ],
)
def test_wrong_arguments_of_divide(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "records": np.zeros(24, np.uint8),
        "record_bytes": 8,
        "at": 4,
        "number_bytes": 4,
        "low": 0,
        "width": 1,
        "bucket": np.empty(3, np.uint16),
        "begins": np.empty(1, np.int64),
        "out": np.empty(24, np.uint8),
    }
    divide(**right)
    with pytest.raises(ValueError, match=r"records|buckets|place"):
        divide(**right | wrong)


@given(st.integers(0, 3000), st.integers(0, 64), st.integers(0, 64), st.integers(0, 2**32))
def test_keys_by_some_of_their_bits(n: int, low: int, high: int, seed: int) -> None:
    low, high = sorted((low, high))
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n, endpoint=True)
    spare = np.empty_like(keys)
    digits = keys.view(np.uint64) >> np.uint64(low) if low < 64 else np.zeros(n, np.uint64)
    digits &= np.uint64((1 << (high - low)) - 1)
    expected = keys[np.argsort(digits, kind="stable")]
    found = spare if sort_keys(keys, spare, low, high) else keys
    np.testing.assert_array_equal(found, expected)


def test_wrong_arguments_of_sort_keys() -> None:
    keys = np.arange(4)
    with pytest.raises(ValueError, match="as much spare room"):
        sort_keys(keys, keys[:3].copy(), 0, 8)
    for low, high in ((-1, 8), (9, 8), (0, 65)):
        with pytest.raises(ValueError, match="the bits must be of 64"):
            sort_keys(keys, np.empty_like(keys), low, high)
