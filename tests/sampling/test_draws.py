"""Draws of neighbour sampling: uniform and independent, by chi-square, for every fan-out and form of the loop."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from featstore._core import sampler as core
from featstore.sampling.rng import batch_key
from tests.support.sampled import covering


def chi_square_limit(freedom: int) -> float:
    """Value that chi-square exceeds with a probability of about 10⁻⁵ (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def draws(degree: int, fanout: int, n_lists: int, replace: bool, key: int) -> npt.NDArray[np.int64]:
    """Positions that ``n_lists`` nodes draw, int64 [n_lists, fanout]; they share one list, so a million draws cost little."""
    hops = core.Hops(n_lists, True)
    nodes, place, degrees = np.zeros(n_lists + 1, np.int64), np.zeros(n_lists + 1, np.int64), np.full(n_lists + 1, degree)
    hops.attach(nodes, place, degrees, np.zeros(1 << n_lists.bit_length(), np.uint64))
    assert hops.begin(np.arange(n_lists)) == (-1, -1)  # a node's number is its id
    src, dst, empty = np.zeros(n_lists * fanout, np.int64), np.zeros(n_lists * fanout, np.int64), np.zeros(0, np.int64)
    records = np.arange(degree, dtype=np.int32)
    hops.start(n_lists, fanout, replace, key, records, 4, src, dst, np.zeros(4096, np.int64), empty, empty)
    assert hops.number()
    return src.reshape(n_lists, fanout)


def chi_square_of_a_million(degree: int, fanout: int, replace: bool) -> float:
    """Of the counts of each position; without replacement they are correlated, which scales it by (d - 1) / (d - k)."""
    n_lists = max(-(-1_000_000 // fanout), degree)
    counts = np.bincount(draws(degree, fanout, n_lists, replace, key=degree * fanout).ravel(), minlength=degree)
    expected = n_lists * fanout / degree
    return float(((counts - expected) ** 2).sum() / expected) * (1.0 if replace else (degree - 1) / (degree - fanout))


@pytest.mark.parametrize(("degrees", "replace"), covering([range(k, k + 7, 2) for k in range(2, 51, 7)], [False, True]))
def test_a_million_draws_are_uniform(degrees: range, replace: bool) -> None:
    for degree in degrees:
        # Each fan-out with every other degree: degrees of a range differ by two.
        fanouts = [fanout for fanout in range(1, 16) if (replace or fanout < degree) and (fanout + degree // 2) % 2 == 0]
        total = 0.0
        for fanout in fanouts:
            chi_square = chi_square_of_a_million(degree, fanout, replace)
            assert chi_square < chi_square_limit(degree - 1), (degree, fanout)
            total += chi_square
        # All fan-outs together, from both sides: counts that are too even are wrong, too.
        freedom = (degree - 1) * len(fanouts)
        assert total < chi_square_limit(freedom)
        assert total > freedom - 4.265 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("degree", "fanout"), [(90, 70), (20_000, 100), (100, 64), (100, 65)])
@pytest.mark.parametrize("replace", [False, True])
def test_a_million_draws_of_large_fanouts_are_uniform(degree: int, fanout: int, replace: bool) -> None:
    assert chi_square_of_a_million(degree, fanout, replace) < chi_square_limit(degree - 1)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 3), (9, 4), (12, 10), (17, 2), (8, 7)])
def test_every_subset_is_equally_likely(degree: int, fanout: int) -> None:
    subsets = {subset: i for i, subset in enumerate(combinations(range(degree), fanout))}
    drawn = draws(degree, fanout, 1_000_000 // fanout, False, key=degree * fanout)
    number = np.zeros(1 << degree, np.int64)
    for subset, i in subsets.items():
        number[sum(1 << position for position in subset)] = i
    counts = np.bincount(number[(1 << drawn).sum(axis=1)], minlength=len(subsets))
    expected = len(drawn) / len(subsets)
    assert float(((counts - expected) ** 2).sum() / expected) < chi_square_limit(len(subsets) - 1)


def test_draws_of_neighbouring_keys_are_independent() -> None:
    """Pairs of draws under keys that differ by one in seed, epoch, batch, hop or node are uniform over all pairs."""
    degree, n = 16, 100_000
    key = batch_key(0, 0, 0)
    for shift in range(5):
        first, second = [], []
        for i in range(n // 10):
            arguments = [i, 1, 2]
            near = [i, 1, 2]
            if shift < 3:
                near[shift] += 1
            a, b = batch_key(*arguments), batch_key(*near)
            if shift == 3:
                a, b = core.absorb(a, 0), core.absorb(a, 1)
            elif shift == 4:
                a, b = core.absorb(key, i), core.absorb(key, i + 1)
            first.append(core.absorb(a, 0) >> 60)
            second.append(core.absorb(b, 0) >> 60)
        counts = np.bincount(np.array(first) * degree + np.array(second), minlength=degree**2)
        expected = len(first) / degree**2
        assert float(((counts - expected) ** 2).sum() / expected) < chi_square_limit(degree**2 - 1), shift
