"""The mutations of samplers that share draws or passes, and of stripes; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["SAMPLING"]

SAMPLING: tuple[Mutation, ...] = (
    # -- layer-neighbour sampling
    Mutation(
        "one source changes for all",
        "numbers of layer-neighbour sampling",
        "featstore/sampling/rng.py",
        "<< 32) // batch_dependency)",
        "<< 32) // batch_dependency) % 2",
        ("tests/test_labor.py::test_a_larger_graph_equals_the_oracle",),
    ),
    Mutation(
        "layers share their numbers unasked",
        "numbers of layer-neighbour sampling",
        "featstore/sampling/labor.py",
        "0 if self.layer_dependency else hop",
        "0",
        ("tests/test_labor.py::test_a_larger_graph_equals_the_oracle",),
    ),
    Mutation(
        "turns of any length",
        "budget counting",
        "featstore/sampling/labor.py",
        "n_read = min(layer.n_missing, max(layer.n_expected, _LEAST_READ))",
        "n_read = layer.n_missing",
        ("tests/test_labor.py::test_large_frontiers_are_read_in_turns_that_fit", "tests/test_labor.py::test_a_list_of_millions"),
    ),
    # -- layer-wise sampling
    Mutation(
        "weights of nodes that are drawn once",
        "unbiased sums of layer-wise sampling",
        "src_cython/featstore/_core/layerwise.h",
        "upto[drawn[i]]++;",
        "upto[drawn[i]] = 1;",
        ("tests/test_layer_sampler.py::test_weighted_sums_have_no_bias",),
    ),
    Mutation(
        "the undecided one always goes on",
        "unbiased sums of layer-wise sampling",
        "src_cython/featstore/_core/layerwise.h",
        "if (u * sum >= carried)",
        "if (u * sum >= 1)",
        ("tests/test_layer_sampler.py::test_nodes_are_taken_as_often_as_their_importance_says",),
    ),
    Mutation(
        "lists of several pieces are not numbered again",
        "layer-wise sampling in pieces",
        "featstore/sampling/layer.py",
        "if pieces.is_one:",
        "if pieces:",
        ("tests/test_layer_sampler.py::test_a_larger_graph_in_pieces_equals_the_oracle",),
    ),
    # -- epoch-wide sampling
    Mutation(
        "what was drawn is filled in at the next word",
        "ids drawn before they are read",
        "src_cython/featstore/_core/epochs.h",
        "/ (logs_wide ? 8 : 4) + j;",
        "/ (logs_wide ? 8 : 4) + j + (j > FS_DRAWN_HEAD);",
        ("tests/test_epoch_access.py::test_a_long_list_is_not_passed_over",),
    ),
    Mutation(
        "lists are passed over whatever it costs",
        "ids drawn before they are read",
        "featstore/sampling/access.py",
        "        if cost >= whole:\n            return False\n    return True",
        "        if cost >= whole:\n            return False\n    return False",
        ("tests/test_epoch_access.py::test_what_costs_less_is_chosen",),
    ),
    Mutation(
        "nodes draw in the hop after they joined alone",
        "draws of later hops in one pass",
        "featstore/sampling/window.py",
        "end = len(self._fanouts) if self._sampler.redraw else hop + 1",
        "end = hop + 1",
        ("tests/test_epoch_sampler.py::test_nodes_of_one_batch_draw_under_its_key_alone",),
    ),
    Mutation(
        "cached lists draw from the file, too",
        "lists that are in memory",
        "featstore/sampling/window.py",
        "            wanted = nodes[missing]",
        "            wanted, missing = nodes, None",
        ("tests/test_epoch_sampler.py::test_small_graphs_equal_batches_sampled_alone",),
    ),
    Mutation(
        "the next window waits until it is asked for",
        "look-ahead",
        "featstore/sampling/turns.py",
        "            if self._next < self._stop:\n                self._begin(plan)\n            elif",
        "            if",
        ("tests/test_epoch_turns.py::test_the_next_window_is_drawn_while_this_one_is_taken",),
    ),
    Mutation(
        "batches of a window share their numbers",
        "numbers of layer-neighbour sampling",
        "src_cython/featstore/_core/epochs.h",
        "pass->keys + FS_KEY_WORDS * log;",
        "pass->keys + FS_KEY_WORDS * hop * pass->n_batches;",
        ("tests/test_epoch_labor.py::test_batches_do_not_depend_on_threads",),
    ),
    Mutation(
        "logs that were spilled unchecked",
        "checksums: samples, plans, traces (sections)",
        "featstore/storage/sections.py",
        "if _sum(memory, self._seed, number) != expected:",
        "if _sum(memory, self._seed, number) < 0:",
        (
            "tests/test_runfiles.py::test_arrays_are_read_while_the_file_is_written",
            "tests/test_epoch_memory.py::test_damage_to_what_was_spilled_is_found",
        ),
    ),
    Mutation(
        "a run file each time that logs are full",
        "logs that spill",
        "featstore/sampling/logs.py",
        "        if file is None:\n            file = self._files[worker]",
        "        if True:\n            file = self._files[worker]",
        ("tests/test_epoch_memory.py::test_a_worker_spills_into_one_file_however_often",),
    ),
    # -- stripes
    Mutation(
        "workers wait for one file",
        "turns of several files",
        "featstore/sampling/fileturns.py",
        "(busy.count(file), -len(self._left[file]))",
        "-len(self._left[file])",
        ("tests/test_striped_reads.py::test_a_slow_file_holds_up_no_other",),
    ),
    Mutation(
        "a copy removes the stripes of the original",
        "ownership of stripes",
        "featstore/storage/stripes.py",
        "(len(entries) > 0 and _mark(link) not in marks)",
        "False",
        ("tests/test_stripes.py::test_a_copy_reads_stripes_and_leaves_them",),
    ),
    Mutation(
        "a replaced dataset leaves its stripes",
        "ownership of stripes",
        "featstore/storage/directory.py",
        "                remove_stripes(path)  # first: nothing but the links in it says where they are\n",
        "",
        ("tests/test_stripes.py::test_a_replaced_dataset_takes_its_stripes_with_it",),
    ),
    Mutation(
        "stripe not flushed",
        "fsync: stripes",
        "featstore/storage/stripes.py",
        "        fsync_directory(directory)\n",
        "",
        ("tests/test_stripes.py::test_names_are_durable_before_what_needs_them",),
    ),
    Mutation(
        "link of a stripe not flushed",
        "fsync: stripes",
        "featstore/storage/stripes.py",
        "        fsync_directory(root)\n",
        "",
        ("tests/test_stripes.py::test_names_are_durable_before_what_needs_them",),
    ),
)
