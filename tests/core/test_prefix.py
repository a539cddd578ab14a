"""The kernels that choose neighbour lists: keys order as scores do, weights are sums, and bad input is refused."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from featstore._core import lists, prefix

DEGREES = st.lists(st.integers(0, 5), min_size=1, max_size=40)
SCORES = st.one_of(st.floats(allow_nan=False), st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, 5e-324]))


def key(score: float) -> int:
    """Return the place of a number among all, as the bits of IEEE 754 tell it."""
    bits = int(np.float64(score + 0.0).view(np.uint64))
    return bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63


def offsets(degrees: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *degrees])


@given(data=st.data(), degrees=DEGREES, id_bytes=st.sampled_from([4, 8]), bits=st.sampled_from([1, 8, 16]))
def test_weights_are_sums_over_a_digit(data: st.DataObject, degrees: list[int], id_bytes: int, bits: int) -> None:
    entry_bytes = id_bytes + data.draw(st.sampled_from([0, 4, 8]))
    scores = np.array(data.draw(st.lists(SCORES, min_size=len(degrees), max_size=len(degrees))))
    shift = data.draw(st.integers(0, 64 - bits))
    like = key(float(data.draw(st.sampled_from(scores.tolist()))))
    known = like >> shift + bits
    first = data.draw(st.integers(0, len(degrees) - 1))
    weights = np.ones(1 << bits)
    want = np.ones(1 << bits)
    for node in range(first, len(degrees)):
        if key(scores[node]) >> shift + bits == known:
            want[key(scores[node]) >> shift & (1 << bits) - 1] += (degrees[node] + 1) * entry_bytes
    assert prefix.weigh(scores[first:], offsets(degrees), first, id_bytes, entry_bytes, shift, known, weights) == -1
    assert weights.tolist() == want.tolist()


@given(data=st.data(), degrees=DEGREES, id_bytes=st.sampled_from([4, 8]), left=st.integers(0, 200))
def test_places_follow_each_other(data: st.DataObject, degrees: list[int], id_bytes: int, left: int) -> None:
    """Cut anywhere, the nodes get the places that plain Python gives them."""
    entry_bytes = id_bytes + data.draw(st.sampled_from([0, 4, 8]))
    scores = np.array(data.draw(st.lists(st.sampled_from([-1.0, 0.0, -0.0, 2.0]), min_size=len(degrees), max_size=len(degrees))))
    threshold = key(data.draw(st.sampled_from([-1.0, 0.0, 2.0])))
    end, rest, want = 0, float(left), []
    for score, degree in zip(scores, degrees, strict=True):
        cost = (degree + 1) * entry_bytes
        chosen = key(score) > threshold or (key(score) == threshold and cost <= rest)
        if key(score) == threshold:
            rest = rest - cost if chosen else -1.0
        want.append(end if chosen else -1)
        end += degree + 1 if chosen else 0
    at = data.draw(st.integers(0, len(degrees)))
    found = np.zeros(len(degrees), np.int64)
    indptr = offsets(degrees)
    half = prefix.place(scores[:at], indptr, 0, id_bytes, entry_bytes, threshold, float(left), 0, found[:at])
    assert prefix.place(scores[at:], indptr, at, id_bytes, entry_bytes, threshold, *half, found[at:]) == (rest, end)
    assert found.tolist() == want


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n_ids", range(1, 7))
def test_records_are_filled_block_by_block(dtype: Any, n_ids: int) -> None:
    """Each list after its length, whatever blocks its ids come in."""
    degrees, places = [3, 0, 2, 0, 1], np.array([3, -1, 0, 7, -1])
    ids, indptr, records, node = np.arange(10, 16, dtype=dtype), offsets(degrees), np.zeros(9, dtype), 0
    for first in range(0, len(ids), n_ids):
        block = ids[first : first + n_ids]
        node = lists.fill_records(block, first, indptr, places, node, records, ids.itemsize)
    assert records.tolist() == [2, 13, 14, 3, 10, 11, 12, 0, 0]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(0, 15), st.integers(5, 20))
def test_the_first_offset_that_does_not_ascend_is_found(offsets: list[int], least: int, most: int) -> None:
    before = [least, *offsets[:-1]]
    bad = [i for i, (a, b) in enumerate(zip(before, offsets, strict=True)) if not a <= b <= most]
    assert lists.first_bad_offset(np.array(offsets, np.int64), least, most) == (bad[0] if bad else -1)


def test_a_list_too_long_for_its_record_is_never_affordable() -> None:
    weights = np.zeros(2)
    indptr = np.array([0, 2**31, 2**31 + 2**31 - 1])
    prefix.weigh(np.array([1.0, -1.0]), indptr, 0, 4, 4, 63, 0, weights)
    assert weights.tolist() == [2.0**33, 2.0**50]
    prefix.weigh(np.array([1.0, -1.0]), indptr, 0, 8, 8, 63, 0, weights)
    assert weights.tolist() == [2.0**33 + 2.0**34, 2.0**50 + 2.0**34 + 8]


def test_a_score_that_is_no_number_is_found() -> None:
    assert prefix.weigh(np.array([1.0, np.nan]), offsets([1, 1]), 0, 4, 4, 56, 0, np.zeros(256)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: prefix.weigh(np.zeros(3), offsets([1, 1]), 0, 4, 4, 56, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 1, 4, 4, 56, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(1), offsets([1, 1]), -1, 4, 4, 56, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 5, 5, 56, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 8, 4, 56, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 4, 4, 57, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 4, 4, -1, 0, np.zeros(256)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 4, 4, 56, 0, np.zeros(255)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 4, 4, 56, 0, np.zeros(1)),
        lambda: prefix.weigh(np.zeros(2), offsets([1, 1]), 0, 4, 4, 56, 0, np.zeros(0)),
        lambda: prefix.place(np.zeros(2), offsets([1, 1]), 0, 4, 4, 0, 0.0, 0, np.zeros(1, np.int64)),
        lambda: prefix.place(np.zeros(3), offsets([1, 1]), 0, 4, 4, 0, 0.0, 0, np.zeros(3, np.int64)),
    ],
)
def test_what_does_not_fit_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()
