"""Mutations of how arguments are checked, and of what errors say."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["ARGUMENTS"]

INPUT_EDGES = "featstore/graph/inputedges.py"
LEAST = "featstore/storage/leastmemory.py"
EDGES, LEAST_MEMORY = "edges that are given", "the least memory of a dataset"

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
    Mutation(
        "the least memory is only that of its first step",
        LEAST_MEMORY,
        LEAST,
        "            total = needed\n",
        "            return needed\n",
        ("tests/test_least_memory.py::test_it_is_the_least",),
    ),
    Mutation(
        "a table that would be kept is not looked for",
        LEAST_MEMORY,
        LEAST,
        "(*sorted(step for step in steps if step > total), None)",
        "(None,)",
        ("tests/test_least_memory.py::test_it_is_the_least",),
    ),
    Mutation(
        "scratch of one check stays for the next",
        LEAST_MEMORY,
        "featstore/storage/reader.py",
        "            self.trim()  # checking may have grown scratch, in memory that the next file needs\n",
        "            pass\n",
        ("tests/test_least_memory.py::test_the_first_error_names_what_suffices",),
    ),
)
