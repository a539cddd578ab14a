"""Mutations of features made of others: aggregated features and outputs of layers; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["MADE"]

MADE: tuple[Mutation, ...] = (
    Mutation(
        "files of replaced features stay",
        "features made of others",
        "featstore/graph/snapshot.py",
        "            if is_superseded:\n",
        "            if False:\n",
        ("tests/test_made_features.py::test_files_of_replaced_features_go_with_the_last_handle",),
    ),
    Mutation(
        "leftovers stay while somebody reads",
        "locks",
        "featstore/storage/update.py",
        "return is_read and rows is not None and int(rows[1]) <= catalog.generation",
        "return is_read",
        ("tests/test_locks.py::test_what_dead_writers_left_goes_at_once_and_old_files_when_nobody_reads",),
    ),
    Mutation(
        "files that are read are swept",
        "locks",
        "featstore/storage/update.py",
        "return is_read and rows is not None and int(rows[1]) <= catalog.generation",
        "return False",
        ("tests/test_locks.py::test_what_dead_writers_left_goes_at_once_and_old_files_when_nobody_reads",),
    ),
    Mutation(
        "what was left of another recipe used",
        "features made of others",
        "featstore/graph/making.py",
        "            if others:\n",
        "            if False:\n",
        (
            "tests/test_aggregate.py::test_what_was_left_of_something_else_is_not_used",
            "tests/test_infer_resume.py::test_what_a_named_run_left_of_something_else_is_removed_and_said",
        ),
    ),
    Mutation(
        "infer goes on without a name",
        "features made of others",
        "featstore/inference/infer.py",
        "    if resume is not None:\n        recipe",
        "    if True:\n        recipe",
        ("tests/test_infer_resume.py::test_without_a_name_nothing_is_gone_on_with",),
    ),
    Mutation(
        "modes of modules not compared",
        "features made of others",
        "featstore/inference/layers.py",
        """        digest.update(f"{[each.training for each in value.modules()]};".encode())\n""",
        "",
        (
            "tests/test_infer_resume.py::test_what_a_named_run_left_of_something_else_is_removed_and_said",
            "tests/test_infer_resume.py::test_weights_are_compared_where_a_layer_is_bound_to_a_module",
        ),
    ),
    Mutation(
        "defaults of a layer's function not compared",
        "features made of others",
        "featstore/inference/layers.py",
        "    found = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]\n",
        "    found = []\n",
        ("tests/test_infer_resume.py::test_weights_are_compared_where_a_layer_is_bound_to_a_module",),
    ),
    Mutation(
        "what nobody can go on with stays",
        "features made of others",
        "featstore/graph/making.py",
        "                if not is_usable:\n",
        "                if False:\n",
        ("tests/test_infer_resume.py::test_what_nobody_can_go_on_with_is_removed_by_the_next_that_makes_a_feature",),
    ),
    Mutation(
        "rows recorded before they are flushed",
        "features made of others",
        "featstore/storage/writer.py",
        "            for number, fd in enumerate(self._fds):",
        "            for number, fd in enumerate(self._fds[1:], 1):",
        ("tests/test_resumed_writer.py::test_what_a_state_says_is_on_the_drive",),
    ),
    Mutation(
        "sums divided by the wrong node's list",
        "features made of others",
        "featstore/graph/passes.py",
        "factors = np.maximum(degrees, 1)",
        "factors = np.maximum(degrees[::-1], 1)",
        ("tests/test_aggregate.py::test_the_dtype_is_the_features_own_or_float64",),
    ),
    Mutation(
        "a node added to its own long list at the end",
        "features made of others",
        "featstore/graph/passes.py",
        "if not has_self and (n_left == 0 or (len(ids) and ids[-1] > node)):",
        "if not has_self and n_left == 0:",
        ("tests/test_passes.py::test_blocks_are_as_many_as_the_memory_makes_them",),
    ),
    Mutation(
        "a buffer filled while it is being written",
        "features made of others",
        "featstore/storage/direct.py",
        "        self._filling, self._other = self._other, self._filling\n",
        "",
        ("tests/test_direct.py::test_a_buffer_that_is_being_written_is_not_filled",),
    ),
    Mutation(
        "an earlier write's error dropped",
        "features made of others",
        "featstore/storage/direct.py",
        "            pending.result()",
        "            pending.exception()",
        ("tests/test_direct.py::test_a_failed_write_leaves_nothing",),
    ),
)
