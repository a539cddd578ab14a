"""Owners of rows: every row of a gather is asked of who has it, under its number there; claims that do not add up are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.distributed.owners import Claim, Owners


def claim(rank: int, first: int | None, n: int, same: str = "") -> Claim:
    return Claim(rank, f"host-{rank}", n, first, same)


@st.composite
def divisions(draw: Any) -> tuple[int, list[Any]]:
    """Rows of 1 to 4 ranks: consecutive ids or lists, some ranks without rows, some with the same as another."""
    cuts = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    bounds = [0, *cuts]
    ids: list[Any] = [range(a, b) for a, b in itertools.pairwise(bounds)]
    n = bounds[-1]
    form = draw(st.sampled_from(["ranges", "lists", "both"]))
    if form == "both":
        ids = [np.arange(each.start, each.stop)[::-1] if draw(st.booleans()) else each for each in ids]
    elif form == "lists":
        drawn = np.array(draw(st.permutations(range(n))), np.int64)
        ids = [drawn[each.start : each.stop] for each in ids]
    order = draw(st.permutations(range(len(ids))))
    ids = [ids[k] for k in order]
    if draw(st.booleans()):
        ids.append(ids[draw(st.integers(0, len(ids) - 1))])
    return n, ids


def made(n: int, ids: list[Any]) -> Owners:
    texts: dict[int, str] = {}
    claims = []
    for rank, each in enumerate(ids):
        same = texts.setdefault(id(each), f"rows {rank}")
        first = each.start if isinstance(each, range) else None
        claims.append(claim(rank, first, len(each), same))
    owners = Owners(claims, n)
    if owners.is_listed:
        for owner, (first_claim, *_) in enumerate(owners.claims):
            array = np.asarray(ids[first_claim.rank], np.int64)
            for done in range(0, len(array), 3):
                owners.learn(owner, done, array[done : done + 3])
        owners.check()
    return owners


@given(divisions(), st.data())
def test_rows_are_asked_of_who_has_them(division: tuple[int, list[Any]], data: Any) -> None:
    n, ids = division
    owners = made(n, ids)
    for rank, each in enumerate(ids):
        owner = owners.of_rank(rank)
        assert (owner is None) == (len(each) == 0)
        assert owner is None or rank in [found.rank for found in owners.claims[owner]]
    x = np.random.default_rng(0).integers(0, 256, (max(n, 1), 3), np.uint8)[:n]
    rows: Any = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=60) if n else st.just([])), np.int64)
    if data.draw(st.booleans()):
        rows = rows.astype(np.int32)
    if data.draw(st.booleans()) and n:
        begin = data.draw(st.integers(0, n - 1))
        rows = range(begin, data.draw(st.integers(begin, n)))
    k = len(rows)
    positions = np.random.default_rng(1).permutation(k + 2)[:k] if data.draw(st.booleans()) else None
    out = np.zeros((k + 2, 3), np.uint8)
    want = out.copy()
    want[slice(k) if positions is None else positions] = x[np.asarray(rows, np.int64)]
    shares = list(owners.split(rows, out, positions))
    assert len({share.owner for share in shares}) == len(shares)
    for share in shares:
        has = x[np.asarray(ids[owners.claims[share.owner][0].rank], np.int64)]
        step = data.draw(st.integers(1, 20))
        for begin in range(0, len(share.rows), step):
            piece = share.cut(begin, begin + step)
            found = np.asarray(piece.rows)
            assert (np.diff(found) >= 0).all()
            piece.out[slice(len(found)) if piece.positions is None else piece.positions] = has[found]
    assert np.array_equal(out, want)


@pytest.mark.parametrize("rows", [[-1], [0, 10], range(8, 11), range(-1, 2), np.array([1 << 40])])
def test_rows_out_of_range(rows: Any) -> None:
    owners = Owners([claim(0, 0, 4), claim(1, 4, 6)], 10)
    with pytest.raises(IndexError, match="is out of range for 10 rows"):
        list(owners.split(rows if isinstance(rows, range) else np.array(rows), np.zeros((9, 1), np.uint8), None))


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([claim(0, 0, 4), claim(1, 5, 5)], "rows 4 to 4 are on no rank"),
        ([claim(0, 1, 4), claim(1, 5, 5)], "rows 0 to 0 are on no rank"),
        ([claim(0, 0, 4), claim(1, 4, 5)], "rows 9 to 9 are on no rank"),
        ([claim(0, 0, 0), claim(1, None, 0)], "rows 0 to 9 are on no rank"),
        ([claim(0, 0, 6), claim(1, 4, 6)], r"row 4 is on rank 0 \(host-0\) and on rank 1 \(host-1\), which have different rows"),
        ([claim(0, 0, 10), claim(1, 0, 10)], r"row 0 is on rank 0 .* and on rank 1"),
        ([claim(0, 0, 10, "a"), claim(1, 0, 10, "b")], r"row 0 is on rank 0 .* and on rank 1"),
        ([claim(0, 0, 8), claim(1, 2, 2), claim(2, 8, 2)], r"row 2 is on rank 0 .* and on rank 1"),
        ([claim(0, None, 4), claim(1, 4, 5)], "1 of the 10 rows are on no rank"),
    ],
)
def test_claims_that_do_not_add_up(claims: list[Claim], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Owners(claims, 10)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, 2, 2], range(3, 6)], r"row 2 is on rank 0 \(host-0\) twice"),
        ([[0, 1, 2, 0], range(3, 6)], r"row 0 is on rank 0 \(host-0\) twice"),
        ([[0, 1, 4], range(3, 6)], r"row 4 is on rank (0|1) .* and on rank (0|1) .*, which have different rows"),
        ([[0, 1, 7], range(3, 6)], r"id 7 of rank 0 \(host-0\) is out of range for 6 rows"),
        ([[0, 1, -1], range(3, 6)], r"id -1 of rank 0"),
    ],
)
def test_lists_that_do_not_add_up(ids: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(6, ids)


def test_ranks_with_the_same_rows_are_one_owner() -> None:
    owners = Owners([claim(0, 0, 4, "a"), claim(1, 4, 6, "b"), claim(2, 0, 4, "a"), claim(3, 4, 6, "b"), claim(4, 0, 0)], 10)
    assert [[each.rank for each in same] for same in owners.claims] == [[0, 2], [1, 3]]
    assert [owners.of_rank(rank) for rank in range(5)] == [0, 1, 0, 1, None]
    assert owners.n_bytes == 0
