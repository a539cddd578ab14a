"""Samples of cases: each value, or pair of values, is in the ordinary run, and every case in one of the two."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampled import covering, fewer_examples, one_in


def ordinary(cases: list[Any]) -> list[tuple[Any, ...]]:
    """Return the values of those that are not marked."""
    assert all([mark.name for mark in case.marks] in ([], ["stress"]) for case in cases)
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_values_that_are_covered_together(together: int) -> None:
    axes = ["abcd", [1, 2, 3], [None], "xy"]
    cases = covering(*axes, together=together)
    assert [case.values for case in cases] == list(product(*axes))
    chosen = ordinary(cases)
    for places in combinations(range(4), together):
        assert {tuple(case[k] for k in places) for case in chosen} == set(product(*(axes[k] for k in places)))
    assert len(chosen) == {1: 4, 2: 12, 3: 24}[together]


def test_one_of_every_few() -> None:
    cases = one_in(3, "abcdefg")
    assert [case.values for case in cases] == [(letter,) for letter in "abcdefg"]
    assert ordinary(cases) == [("a",), ("d",), ("g",)]


def test_a_share_of_the_runs_examples() -> None:
    drawn = []

    @fewer_examples(0.2)
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    assert len(drawn) == settings().max_examples // 5
