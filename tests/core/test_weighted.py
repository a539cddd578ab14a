"""Draws by weight: bit for bit against plain Python, in each vector form; the frequency of each set against its probability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core import weighted as core
from featstore._core.sampler import Hops
from tests.support.reference_weighted import (
    alias_table,
    exponential,
    set_probabilities,
    shares_of,
    splitmix,
    weighted_positions,
)

Int64s = npt.NDArray[np.int64]
EMPTY = np.zeros(0, np.int64)
KEY = 0x1234567890ABCDEF


def drawn(
    lists: Sequence[Sequence[float]], fanout: int, replace: bool = False, key: int = KEY, level: int = 2
) -> list[list[int]]:
    """Draw positions of lists of these weights; the neighbours of list ``i`` lie at ``10_000 * i`` in memory."""
    degree = np.array([len(each) for each in lists], np.int64)
    hops = Hops(10**6, True)
    hops.expand_lists(np.arange(len(lists)), 10_000 * np.arange(len(lists)), degree)
    offsets, columns = np.r_[0, np.cumsum(degree)], np.array([w for each in lists for w in each], np.float64)
    assert core.make_columns(columns, offsets) == -1
    n, _, _ = hops.count(len(lists), fanout, replace)
    src, dst, words = (np.full(size, -1, np.int64) for size in (n, n, max(1, min(fanout, n))))
    options = len(lists), fanout, replace, key, columns, offsets[:-1]
    n_edges, n_missing = core.draw(hops, 0, *options, src, dst, 0, words, level=level)
    assert n_missing == 0
    positions, ends = src[:n_edges] - 10_000 * dst[:n_edges], np.cumsum(np.bincount(dst[:n_edges], minlength=len(lists)))
    assert (np.diff(dst[:n_edges]) >= 0).all()
    return [each.tolist() for each in np.split(positions, ends[:-1])]


def drawn_by_columns(
    lists: Sequence[Sequence[float]], fanout: int, replace: bool, key: int, level: int, room: int, all_positive: bool
) -> tuple[list[list[int]], int, int]:
    """Draw as :func:`drawn` does, with columns that are looked up; return also lists that lacked some, and columns read."""
    degree = np.array([len(each) for each in lists], np.int64)
    starts, table = np.cumsum(degree) - degree, np.array([w for each in lists for w in each], np.float64)
    core.make_columns(table, np.r_[starts, len(table)])
    hops, n_dst = Hops(10**6, True), len(lists)
    hops.expand_lists(np.arange(n_dst), 10_000 * np.arange(n_dst), degree)
    n, _, _ = hops.count(n_dst, fanout, replace)
    src, dst, words = (np.full(size, -1, np.int64) for size in (n, n, max(1, min(fanout, n))))
    n_trials, first = core.sparse_trials(fanout, replace), np.empty(n_dst, np.int64)
    begin = n_edges = n_lacking = n_columns = 0
    while begin < n_dst:
        options = hops, begin, n_dst, fanout, replace, key, all_positive, starts, room, first
        stop, n = core.turn(*options, EMPTY, n_trials)
        positions = np.empty(n, np.int64)
        assert core.turn(*options, positions, n_trials) == (stop, n)
        columns = table[positions]
        assert n <= room or ((first != -1) & (degree > 0))[begin:stop].sum() == 1
        if n_trials:
            stop, more = core.lacking(hops, begin, stop, fanout, replace, key, columns, first, room, n_trials)
            n_lacking += int(((first >= n) & (degree > 0))[begin:stop].sum())
            positions = np.empty(more, np.int64)
            core.place_lacking(hops, begin, stop, n, starts, first, positions)
            columns = np.r_[columns, table[positions]]
        chosen = hops, begin, stop, fanout, replace, key, columns, first, src, dst
        n_edges, _ = core.draw(*chosen, n_edges, words, n_trials, level)
        n_columns += len(columns)
        begin = stop
    ends = np.cumsum(np.bincount(dst[:n_edges], minlength=n_dst))
    positions = src[:n_edges] - 10_000 * dst[:n_edges]
    return [each.tolist() for each in np.split(positions, ends[:-1])], n_lacking, n_columns


WEIGHTS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 1e30, 1e-30]), st.floats(0, 10, width=32), st.floats(0, 2.0**100, width=32))


@given(
    lists=st.lists(st.lists(WEIGHTS, max_size=70), min_size=1, max_size=6),
    fanout=st.sampled_from([-1, 0, 1, 2, 3, 5, 10, 17, 33, 65]),
    replace=st.booleans(),
    key=st.integers(0, 2**64 - 1),
)
def test_equal_the_oracle_in_each_form(lists, fanout, replace, key) -> None:
    expected = [weighted_positions(splitmix(key, i), each, fanout, replace) for i, each in enumerate(lists)]
    for level in (0, 1, 2):
        assert drawn(lists, fanout, replace, key, level) == expected


@given(
    lists=st.lists(st.tuples(st.lists(WEIGHTS, max_size=9), st.integers(0, 40)), min_size=1, max_size=9),
    fanout=st.sampled_from([-1, 0, 1, 2, 3, 5, 10, 17]),
    replace=st.booleans(),
    key=st.integers(0, 2**64 - 1),
    room=st.sampled_from([1, 60, 10_000]),
)
def test_columns_that_are_looked_up_draw_the_same(lists, fanout, replace, key, room) -> None:
    weights = [some * times for some, times in lists]
    expected = [weighted_positions(splitmix(key, i), each, fanout, replace) for i, each in enumerate(weights)]
    all_positive = not replace and all(w > 0 for each in weights for w in each)
    for level in (0, 1, 2):
        assert drawn_by_columns(weights, fanout, replace, key, level, room, all_positive)[0] == expected


@pytest.mark.parametrize("replace", [False, True])
def test_few_columns_of_long_lists_are_looked_up(replace: bool) -> None:
    rng = np.random.default_rng(1)
    lists = [*rng.exponential(size=(200, 3000)), *rng.pareto(0.5, (100, 500)), *np.zeros((9, 300))]
    expected = [weighted_positions(splitmix(KEY, i), each.tolist(), 10, replace) for i, each in enumerate(lists)]
    found, n_lacking, n_columns = drawn_by_columns([each.tolist() for each in lists], 10, replace, KEY, 2, 10**6, False)
    assert found == expected
    n_trials = core.sparse_trials(10, replace)
    if replace:
        assert (n_trials, n_lacking, n_columns) == (10, 0, 309 * 10)
    else:
        assert n_trials == 16
        assert 20 < n_lacking < 110
        assert n_columns < 309 * 16 + 110 * 500
    assert [core.sparse_trials(k, replace) for k in (-1, 0, 65)] == [0, 0, 0]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [10, 64, 100])
def test_long_lists_equal_the_oracle(fanout: int, replace: bool) -> None:
    rng, n = np.random.default_rng(0), 3000
    kinds = [rng.random(n), rng.pareto(0.3, n), rng.random(n) < 0.01, np.r_[1e30, rng.random(n - 1)], np.ones(n), rng.random(600)]
    lists = [kind.astype(np.float64).tolist() for kind in kinds]
    expected = [weighted_positions(splitmix(KEY, i), each, fanout, replace) for i, each in enumerate(lists)]
    for level in (0, 1, 2):
        assert drawn(lists, fanout, replace, level=level) == expected
    if not replace:
        assert [len(each) for each in expected] == [fanout, fanout, min(fanout, int(sum(lists[2]))), *[fanout] * 3]


def test_weights_of_any_scale() -> None:
    lists = [[1e308] * 50, [5e-324] * 50, [5e-324, 1e308] * 25, [0.0] * 49 + [5e-324], [1e-300, 1.0] * 30]
    for fanout in (5, 30, 40):
        for replace in (False, True):
            expected = [weighted_positions(splitmix(KEY, i), each, fanout, replace) for i, each in enumerate(lists)]
            assert drawn(lists, fanout, replace) == expected
    assert [len(each) for each in drawn(lists, 40)] == [40, 40, 40, 1, 40]  # the smallest weights are there, if rarely drawn


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=200))
def test_columns_hold_the_weights(weights: list[float]) -> None:
    columns = np.array(weights)
    core.make_columns(columns, np.array([0, len(weights)]))
    found = columns.view(np.dtype([("least", "f4"), ("other", "i4")]))
    assert list(zip(found["least"].tolist(), found["other"].tolist(), strict=True)) == alias_table(weights)
    if max(weights):
        of_edges, n = found["least"].astype(np.float64), len(weights)
        rest = 1 - of_edges
        for i, other in enumerate(found["other"].tolist()):
            of_edges[~other if other < 0 else other] += rest[i]
        expected = np.array(weights) / max(weights)
        expected *= n / expected.sum()
        assert np.allclose(of_edges, expected, rtol=1e-5 if n < 50 else 1e-4, atol=1e-37)
        assert (of_edges[np.array(weights) > 0] > 0).all()
        assert (of_edges[np.array(weights) == 0] == 0).all()
        assert np.allclose(shares_of(alias_table(weights)), of_edges, rtol=1e-9, atol=1e-12)


def test_exponentials_are_logarithms() -> None:
    for v in [0.0, 2.0**-52, 2.0**-30, 0.2, 0.29, 0.2928932188134524, 0.3, 0.5, 0.9, 1 - 2.0**-52]:
        multiple = int(v * 2**52) / 2**52  # as uniform numbers are
        assert math.isclose(exponential(multiple), -math.log1p(-multiple), rel_tol=4e-15, abs_tol=0)


@pytest.mark.parametrize(
    ("weights", "k"),
    [
        ([1, 2, 3, 4], 2),
        ([5, 0, 1, 1, 0.25], 3),
        ([1, 1, 1, 1, 1, 8], 5),
        ([3, 1, 2, 0.5], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8], 2),
        ([1, 0, 1, 1, 2, 1, 1, 1, 1, 0, 1, 3], 3),
        ([60, 1, 2, 3, 1, 2, 3, 4], 2),  # trials often do not suffice
        ([3000, 1, 2, 0.5, 1000, 2], 4),
        ([500, 1, 0, 2, 1, 1, 30, 1, 1, 1, 1, 0.5], 3),
    ],
)
def test_each_set_has_its_probability(weights: list[float], k: int) -> None:
    n, expected = 60_000, set_probabilities(weights, k)
    counts = Counter(frozenset(each) for each in drawn([weights] * n, k))
    assert set(counts) <= set(expected)
    assert math.isclose(sum(expected.values()), 1)
    rare = sum(p for p in expected.values() if p * n < 8)
    cells = [(counts[drawn_], p) for drawn_, p in expected.items() if p * n >= 8]
    if rare:
        cells.append((n - sum(count for count, _ in cells), rare))
    cells = [(count, p) for count, p in cells if p * n >= 1]
    chi2, df = sum((count - n * p) ** 2 / (n * p) for count, p in cells), len(cells) - 1
    assert abs(chi2 - df) < 4 * math.sqrt(2 * df), (chi2, df)


@pytest.mark.parametrize("weights", [[1, 2, 3], [4, 1, 1, 1, 1, 1, 1, 1, 9, 0, 0, 2], [1000, 1, 0, 1, 1, 1, 1, 1, 1, 1]])
def test_each_draw_with_replacement_has_its_probability(weights: list[float]) -> None:
    n, k = 20_000, 3
    found = drawn([weights] * n, k, replace=True)
    assert all(len(each) == k for each in found)
    counts, total = Counter(at for each in found for at in each), sum(weights)
    cells = [(counts[i], n * k * w / total) for i, w in enumerate(weights) if w]
    assert sum(count for count, _ in cells) == n * k
    chi2, df = sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1
    assert abs(chi2 - df) < 4 * math.sqrt(2 * df), (chi2, df)


def test_turns_cover_the_lists() -> None:
    degree = np.array([3, 0, 5, 2, 9, 1], np.int64)
    hops = Hops(100, True)
    hops.expand_lists(np.arange(6), ~np.arange(6), degree)
    starts, first, begin, found = np.cumsum(degree) - degree + 7, np.empty(6, np.int64), 0, []
    while begin < 6:
        stop, n = core.turn(hops, begin, 6, 2, False, KEY, False, starts, 6, first, EMPTY)
        positions = np.empty(n, np.int64)
        assert core.turn(hops, begin, 6, 2, False, KEY, False, starts, 6, first, positions) == (stop, n)
        found.append((stop, positions.tolist(), first[begin:stop].tolist()))
        begin = stop
    assert [each[0] for each in found] == [2, 3, 4, 5, 6]
    assert [position for each in found for position in each[1]] == list(range(7, 27))
    assert [place for each in found for place in each[2]] == [0, 3, 0, 0, 0, 0]
    stop, n = core.turn(hops, 0, 6, 2, False, KEY, True, starts, 100, first, EMPTY)
    assert (stop, n, first.tolist()) == (6, 17, [0, -1, 3, -1, 8, -1])
    assert core.turn(hops, 0, 6, -1, False, KEY, True, starts, 100, first, EMPTY) == (6, 0)
    with pytest.raises(ValueError, match="positions has room for 4 only"):
        core.turn(hops, 0, 6, 2, False, KEY, False, starts, 100, first, np.empty(4, np.int64))
    with pytest.raises(ValueError, match="more destinations"):
        core.turn(hops, 0, 7, 2, False, KEY, False, starts, 100, first, EMPTY)


def test_what_does_not_fit_is_refused() -> None:
    hops = Hops(100, True)
    hops.expand_lists(np.arange(2), np.arange(2), np.array([3, 4]))
    columns, first, src, words = np.ones(7), np.array([0, 3]), np.empty(4, np.int64), np.empty(2, np.int64)
    core.make_columns(columns, np.array([0, 3, 7]))
    assert core.draw(hops, 0, 2, 2, False, 0, columns, first, src, src.copy(), 0, words) == (4, 0)
    for bad, message in (
        ((2, 2, False, 0, columns[:-1], first, src, src, 0, words), "columns of list 1 are not there"),
        ((2, 2, False, 0, columns, np.array([0, -1]), src, src, 0, words), "columns of list 1 are not there"),
        ((3, 2, False, 0, columns, first, src, src, 0, words), "more destinations"),
        ((2, 2, False, 0, columns, first, src[:3], src, 0, words), "src has room for 3"),
        ((2, 2, False, 0, columns, first, src, src[:3], 0, words), "dst has room for 3"),
        ((2, 2, False, 0, columns, first, src, src, 0, words[:1]), "scratch has room for 1"),
    ):
        with pytest.raises(ValueError, match=message):
            core.draw(hops, 0, *bad)
    for sparse, n_trials, message in (
        ([0, -5], 4, "columns of list 1 are not there"),  # it begins at 3, and has 4
        ([0, -2], 0, "columns of list 1 are not there"),
        ([0, -2], 3, "n_trials is of another fan-out"),
        ([0, -(2**62)], 4, "columns of list 1 are not there"),
    ):
        few = columns[:6], np.array(sparse)
        with pytest.raises(ValueError, match=message):
            core.draw(hops, 0, 2, 2, False, 0, *few, src, src.copy(), 0, words, n_trials)
        with pytest.raises(ValueError, match=message):
            core.lacking(hops, 0, 2, 2, False, 0, *few, 100, n_trials)
    with pytest.raises(ValueError, match="more destinations"):
        core.lacking(hops, 0, 3, 2, False, 0, columns, first, 100, 4)
    with pytest.raises(ValueError, match="more destinations"):
        core.place_lacking(hops, 0, 3, 0, first, first, np.empty(7, np.int64))
    with pytest.raises(ValueError, match="positions has room for 6 only"):
        core.place_lacking(hops, 0, 2, 0, first, first, np.empty(6, np.int64))
    with pytest.raises(ValueError, match="weights of list 1 are not there"):
        core.make_columns_of(hops, 0, 2, first, np.ones(6))
    with pytest.raises(ValueError, match="more destinations"):
        core.make_columns_of(hops, 0, 3, first, np.ones(6))
    for offsets in ([0, 8], [-1, 2], [2, 1]):
        with pytest.raises(ValueError, match="offsets do not lie"):
            core.make_columns(np.ones(7), np.array(offsets))


def test_hops_refuse_edges_of_no_list() -> None:
    hops, src, dst = Hops(100, True), np.zeros(2, np.int64), np.array([0, 2])
    hops.expand_lists(np.arange(2), np.arange(2), np.array([3, 4]))
    with pytest.raises(ValueError, match="edge 1 is of list 2, and the hop goes from 2"):
        hops.start(2, 2, False, 0, np.zeros(9, np.int32), 4, src, dst, EMPTY, EMPTY, EMPTY, drawn=True)


def test_checks_and_moves_of_weights() -> None:
    rng = np.random.default_rng(0)
    weights = np.where(rng.random(1000) < 0.2, 0, rng.random(1000))
    assert core.first_bad_weight(weights) == (-1, int((weights == 0).sum()))
    assert core.first_bad_weight(weights[:0]) == (-1, 0)
    for bad in (-1e-30, math.nan, math.inf, -math.inf):
        changed = weights.copy()
        changed[[700, 900]] = bad
        assert core.first_bad_weight(changed)[0] == 700
    for dtype in (np.int32, np.int64):
        ids, out = rng.permutation(1000).astype(dtype), np.full(1000, -1.0)
        for first in range(0, 1000, 300):
            core.place_weights(weights[first : first + 300], first, ids, out)
        assert np.array_equal(out, weights[ids])
