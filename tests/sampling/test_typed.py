"""Fan-outs of several types of edges: how they are given, and how many neighbours a node draws at most."""

from __future__ import annotations

from typing import Any

import pytest

from featstore.sampling.typed import fanouts_of_types, most_drawn
from featstore.topology.types import Types
from tests.support.typed import CITES, EMPLOYS, WRITES

TYPES = Types.of({"paper": 5, "author": 3, "institution": 0}, {WRITES: 4, CITES: 9, EMPLOYS: 0})


def test_fanouts_by_type_and_for_all() -> None:
    assert fanouts_of_types(TYPES, [3, 2]) == {WRITES: (3, 2), CITES: (3, 2), EMPLOYS: (3, 2)}
    assert fanouts_of_types(TYPES, {CITES: [3, -1]}) == {WRITES: (0, 0), CITES: (3, -1), EMPLOYS: (0, 0)}
    assert list(fanouts_of_types(TYPES, {EMPLOYS: [1], WRITES: [2]})) == [WRITES, CITES, EMPLOYS]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({("a", "b", "c"): [1]}, ValueError, "no edge type"),
        ({"writes": [1]}, ValueError, "no edge type 'writes'"),
        ({WRITES: [1, 2], CITES: [1]}, ValueError, "as many hops"),
        ({WRITES: 3}, TypeError, "a sequence of integers"),
        ({WRITES: [1.5]}, TypeError, "a sequence of integers"),
        ({WRITES: [-2]}, ValueError, "-1"),
        ({WRITES: [2**31]}, ValueError, "2\\*\\*31"),
        ({}, ValueError, "no hop"),
        ([], ValueError, "no hop"),
        (7, TypeError, "sequence"),
    ],
)
def test_fanouts_that_cannot_be_used(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fanouts_of_types(TYPES, given)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ([3, 2], (6, 4)),  # papers draw from authors and from papers
        ({WRITES: [3, -1], CITES: [4, 2]}, (7, -1)),
        ({EMPLOYS: [5, 0], CITES: [1, 2]}, (5, 2)),
        ({WRITES: [2**31 - 1], CITES: [2**31 - 1]}, (2**31 - 1,)),
    ],
)
def test_the_most_that_a_node_draws(given: Any, most: tuple[int, ...]) -> None:
    assert most_drawn(TYPES, fanouts_of_types(TYPES, given)) == most
