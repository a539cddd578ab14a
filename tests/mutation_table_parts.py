"""The mutations of partitions and their batches; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["PARTS"]

BEYOND = ("tests/test_nearby_lists.py::test_what_comes_from_the_file_is_what_is_beyond_the_macro_batch",)
FENNEL = "featstore/partitioning/fennel.py"
TWO_LEVELS = ("tests/test_partitioning.py::test_two_levels_of_a_larger_graph_are_brute_force",)

PARTS: tuple[Mutation, ...] = (
    Mutation(
        "stale parts used",
        "partitions",
        "featstore/graph/savedparts.py",
        """    if entry.get("made_of") != made_of(catalog):
        raise StaleError(""",
        """    if entry.get("made_of") is None:
        raise StaleError(""",
        ("tests/test_kept_parts.py::test_parts_of_another_adjacency_are_stale",),
    ),
    Mutation(
        "groups divided by each other's edges",
        "partitions",
        FENNEL,
        "second, members, inside, trained, group)",
        "second, members, inside[::-1], trained, group)",
        TWO_LEVELS,
    ),
    Mutation(
        "groups divided by each other's training nodes",
        "partitions",
        FENNEL,
        "second, members, inside, trained, group)",
        "second, members, inside, trained[::-1], group)",
        TWO_LEVELS,
    ),
    Mutation(
        "the same macro-batches in every epoch",
        "partition batches",
        "featstore/sampling/partitionbatches.py",
        "parts = generator.permutation(len(parts))",
        "parts = parts.copy()",
        ("tests/test_partition_batches.py::test_epochs_are_functions_of_seed_and_epoch",),
    ),
    Mutation(
        "a batch of few parts by default",
        "partition batches",
        "featstore/sampling/partitionbatches.py",
        "    if of_a_batch >= LEAST_PARTS:\n",
        "    if of_a_batch >= 2:\n",
        ("tests/test_partition_batches.py::test_a_macro_batch_is_one_batch_of_seeds_where_these_are_of_many_parts",),
    ),
    Mutation(
        "one batch stands for all that differ",
        "partition batches",
        "featstore/strategies/batchsize.py",
        "return size if batches.together == 1 else _upper(graph, batches, size)",
        "return size",
        ("tests/test_partition_batches.py::test_several_batches_are_measured",),
    ),
    Mutation(
        "lists of the macro-batch before",
        "lists of macro-batches",
        "featstore/sampling/macrolists.py",
        "slot = _Slot(self._lists.load(order.parts_of(macro), memory), memory)",
        "slot = _Slot(self._lists.load(order.parts_of(max(0, macro - 1)), memory), memory)",
        BEYOND,
    ),
    Mutation(
        "lists of epoch 0 in every epoch",
        "lists of macro-batches",
        "featstore/sampling/macrolists.py",
        "macro = order.macro_of(position)\n",
        "epoch, macro = 0, order.macro_of(position)\n",
        BEYOND,
    ),
    Mutation(
        "memory of lists in use given away",
        "lists of macro-batches",
        "featstore/sampling/macrolists.py",
        "            if not slot.n_users:\n                del self._slots[key]",
        "            if slot:\n                del self._slots[key]",
        ("tests/test_nearby_lists.py::test_memory_is_on_loan_and_comes_back",),
    ),
)
