"""Mutations of how arguments are checked, of what errors say, and of what is left of a user's."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["ARGUMENTS"]

INPUT_EDGES = "featstore/graph/inputedges.py"
RUN_DIRECTORIES = "featstore/storage/rundir.py"
EDGES, LEAST_MEMORY, RUN_PARENTS = "edges that are given", "the least memory of a dataset", "parents of run directories"

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
        "            done += n\n",
        "            done = 0\n",
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
        "a pair that two blocks share stays twice",
        EDGES,
        "featstore/graph/cleaning.py",
        "is_new[0] = (int(dst[0]), int(src[0])) != last",
        "is_new[0] = True",
        ("tests/test_cleaning.py::test_one_pair_more_often_than_memory_holds",),
    ),
    Mutation(
        "lists that blocks cut count whole",
        EDGES,
        "featstore/graph/storededges.py",
        "ends = np.clip(block.offsets[begin : begin + _PIECE + 1] - block.first_edge, 0, len(block.ids))",
        "ends = np.minimum(block.offsets[begin : begin + _PIECE + 1] - block.offsets[0], len(block.ids))",
        ("tests/test_stored_edges.py::test_many_blocks_and_a_long_list",),
    ),
    Mutation(
        "the memory of opening is that of its first step",
        LEAST_MEMORY,
        "featstore/graph/snapshot.py",
        "        while (more := needed(total)) > total:  # both grow with the memory\n            total = more\n",
        "        total = needed(total)\n",
        ("tests/test_opening_memory.py::test_the_first_error_names_what_suffices",),
    ),
    Mutation(
        "scratch of one check stays for the next",
        LEAST_MEMORY,
        "featstore/storage/reader.py",
        "            self.trim()  # checking may have grown scratch, in memory that the next file needs\n",
        "            pass\n",
        ("tests/test_opening_memory.py::test_the_first_error_names_what_suffices",),
    ),
    Mutation(
        "a parent that was there is removed",
        RUN_PARENTS,
        RUN_DIRECTORIES,
        "            raise\n        return\n    try:\n        _mark(path)",
        "            raise\n    try:\n        _mark(path)",
        ("tests/test_runfiles.py::test_only_a_parent_that_was_made_for_run_directories_is_removed",),
    ),
    Mutation(
        "a parent that could not be removed is not marked again",
        RUN_PARENTS,
        RUN_DIRECTORIES,
        "                    _mark(path)\n                raise\n",
        "                    pass\n                raise\n",
        ("tests/test_runfiles.py::test_a_parent_that_gets_another_run_directory_while_it_is_removed",),
    ),
)
