"""The row map: against NumPy and a walk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core import cache as _core
from featstore.cache.table import RowMap
from featstore.testing.strategies import row_ids
from tests.support.refusing import refuses


@given(st.data())
def test_split_and_lookup_equal_numpy(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 200))
    rows = RowMap(n)
    cached = data.draw(row_ids(n, max_size=n, unique=True))
    rows.assign(cached, np.arange(len(cached), dtype=np.int32))
    absent = np.setdiff1d(np.arange(n), cached)
    held = absent[::3].copy()
    rows.hold(held, np.arange(len(held), dtype=np.int32))
    ids = data.draw(row_ids(n, max_size=150))
    expected = np.full(n, -1)
    expected[cached] = np.arange(len(cached))
    positions, slots, misses, missed = rows.split(ids)
    assert np.array_equal(missed, ids[misses])
    assert (rows.lookup(ids) == expected[ids]).all()
    assert (positions == np.flatnonzero(expected[ids] >= 0)).all()
    assert (slots == expected[ids][positions]).all()
    assert (misses == np.flatnonzero(expected[ids] < 0)).all()
    rows.release(cached)
    assert (rows.lookup(ids) == -1).all()


@pytest.mark.usefixtures("small_pieces")
def test_rows_of_a_slot_and_all_later_ones_are_released() -> None:
    n, rng = 1000, np.random.default_rng(0)
    slots = rng.permutation(n).astype(np.int32)
    for first in (0, 1, 400, 999, 1000):
        rows = RowMap(n)
        rows.assign(np.arange(n), slots)
        rows.release_from(first)
        assert np.array_equal(rows.lookup(np.arange(n)), np.where(slots < first, slots, -1))


@pytest.mark.parametrize("wrong", [-1, 10, 2**63 - 1, -(2**63), 2**40])
@pytest.mark.parametrize("at", [0, 40, 99])
def test_ids_out_of_range_are_named(wrong: int, at: int) -> None:
    rows = RowMap(10)
    ids = np.zeros(100, np.int64)
    ids[at] = wrong
    slots = np.zeros(100, np.int32)
    for call in (
        lambda: rows.split(ids),
        lambda: rows.lookup(ids),
        lambda: rows.assign(ids, slots),
        lambda: rows.release(ids),
        lambda: rows.claim(ids, np.arange(100), 100),
    ):
        refuses(IndexError, f"row {wrong} at position {at} is out of range for 10 rows", call)
    refuses(IndexError, "", lambda: RowMap(0).split(ids))
    refuses(IndexError, "", lambda: RowMap(0).lookup(ids))


def test_large_maps_and_arrays_are_whole() -> None:
    n = 3_000_001  # huge pages and a tail
    rows = RowMap(n)
    assert rows.nbytes == 4 * n
    assert len(rows) == n
    assert (rows.slot_of_row == -1).all()
    rows.assign(np.array([0, n - 1]), np.array([5, 6], np.int32))
    assert rows.lookup(np.array([n - 1, 0, 1])).tolist() == [6, 5, -1]


@given(st.data())
def test_claim_equals_a_walk(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    rows = RowMap(n)
    state = data.draw(st.lists(st.sampled_from(["absent", "cached", "held"]), min_size=n, max_size=n))
    for row, what in enumerate(state):
        if what != "absent":
            (rows.assign if what == "cached" else rows.hold)(np.array([row]), np.array([row], np.int32))
    before = rows.slot_of_row.copy()
    ids = data.draw(row_ids(n, max_size=60))
    positions = np.arange(len(ids))[::-1].copy()
    limit = data.draw(st.integers(0, 20))
    new, held = [], []
    for row, position in zip(ids.tolist(), positions.tolist(), strict=True):
        if state[row] == "absent" and row not in [r for r, _ in new] and len(new) < limit:
            new.append((row, position))
        elif state[row] == "held":
            held.append((row, position, row))
    got = rows.claim(ids, positions, limit)
    assert list(zip(*(array.tolist() for array in got[:2]), strict=True)) == new
    assert list(zip(*(array.tolist() for array in got[2:]), strict=True)) == held
    assert (rows.slot_of_row == before).all()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("held", [np.int32, np.int64])
def test_check_hits_against_numpy(kind: type, held: type) -> None:
    """The first slot that is not -1 and does not hold its row, whatever the numbers."""
    rng = np.random.default_rng(6)
    for n_slots in (0, 1, 5, 300):
        table = rng.permutation(1000)[:n_slots].astype(held)
        table[rng.random(n_slots) < 0.2] = -1
        for k in (0, 1, 4, 70):
            for n_wrong in (0, 0, 1, 3):
                slots = rng.integers(0, max(1, n_slots), k).astype(np.int32)
                slots[rng.random(k) < 0.3 if n_slots else slice(None)] = -1
                slots[(slots >= 0) & (table[slots] < 0) if n_slots else slice(0)] = -1
                rows = np.where(slots >= 0, table[slots] if n_slots else 0, 2000).astype(kind)
                for at in rng.integers(0, max(1, k), n_wrong if k else 0):
                    slots[at] = rng.choice([-2, -(2**31), n_slots, 2**31 - 1, rng.integers(0, max(1, n_slots))])
                wrong = [i for i, s in enumerate(slots) if s != -1 and not (0 <= s < n_slots and table[s] == rows[i])]
                assert _core.check_hits(rows, slots, table) == (wrong[0] if wrong else -1)
    refuses(ValueError, "length", lambda: _core.check_hits(np.zeros(2, kind), np.zeros(1, np.int32), np.zeros(1, held)))


def test_divided_rows_fit_their_outputs() -> None:
    rows = np.arange(4)

    def divide(n_slots: int, n_hits: int, n_positions: int, n_missed: int) -> None:
        slots = np.array([3, -1, 7, -1], np.int32)[:n_slots].copy()
        _core.divide(rows, slots, *(np.zeros(k, np.int64) for k in (n_hits, n_positions, n_missed)))

    divide(4, 3, 3, 3)
    refuses(ValueError, "differ in length", lambda: divide(3, 3, 3, 3))
    for short in ((2, 3, 3), (3, 2, 3), (3, 3, 2), (0, 0, 0)):
        refuses(ValueError, "an output is too short", lambda: divide(4, *short))
