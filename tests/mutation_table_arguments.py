"""Mutations of how arguments are checked, and of what errors say."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["ARGUMENTS"]

INPUT_EDGES = "featstore/graph/inputedges.py"
EDGES = "edges that are given"

ARGUMENTS: tuple[Mutation, ...] = (
    Mutation(
        "offsets are checked as lists are written",
        EDGES,
        INPUT_EDGES,
        "if not self._indptr.is_read_once:",
        "if False:",
        ("tests/test_create.py::test_bad_offsets_are_found_before_anything_is_made",),
    ),
    Mutation(
        "positions of ids count from their block",
        EDGES,
        INPUT_EDGES,
        "        self._done += n\n",
        "        self._done = 0\n",
        ("tests/test_create.py::test_the_first_wrong_entry_is_named",),
    ),
    Mutation(
        "an unsigned offset is shown as a negative one",
        EDGES,
        INPUT_EDGES,
        'self._is_uint64 = source.dtype == "uint64"',
        "self._is_uint64 = False",
        ("tests/test_create.py::test_bad_offsets_are_found_before_anything_is_made",),
    ),
)
