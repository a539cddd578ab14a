"""Samples of cases for the ordinary run: the other cases are marked ``stress``, so that no case is left out by both.

Tests whose examples take long draw a share of the run's, which is a larger number with ``HYPOTHESIS_EXPLORE=1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["covering", "fewer_examples", "one_in"]


def covering(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """Return the product of the values of several parameters, for :func:`pytest.mark.parametrize`.

    The ordinary run has each value of each parameter; with ``together=2``, each pair of values of two parameters.
    """
    values = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in values)))
    places = list(combinations(range(len(values)), together))
    wanted = {(place, tuple(case[k] for k in place)) for case in cases for place in places}
    chosen = set()
    while wanted:
        covers = {case: wanted & {(place, tuple(case[k] for k in place)) for place in places} for case in cases}
        best = max(cases, key=lambda case: len(covers[case]))  # the first of equals: the same each time
        wanted -= covers[best]
        chosen.add(best)
    return [_case([axis[k] for axis, k in zip(values, case, strict=True)], case in chosen) for case in cases]


def one_in(n: int, cases: Sequence[Any], names: int = 1) -> list[Any]:
    """Return the values of one parameter, or of several ``names`` that are given as tuples, for :func:`pytest.mark.parametrize`.

    The ordinary run has the first of every ``n``.
    """
    return [_case([case] if names == 1 else case, number % n == 0) for number, case in enumerate(cases)]


def fewer_examples(share: float) -> settings:
    """Return Hypothesis's settings with this share of the run's examples: for a test whose examples each make a dataset, say."""
    return settings(max_examples=round(share * settings().max_examples))


def _case(values: Sequence[Any], is_chosen: bool) -> Any:
    return pytest.param(*values, marks=() if is_chosen else pytest.mark.stress)
