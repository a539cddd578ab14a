"""The mutations of the compiled modules, which are built anew for each; see :mod:`tests.mutation_table`."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["COMPILED"]

CORE = "src_cython/featstore/_core/"

COMPILED: tuple[Mutation, ...] = (
    Mutation(
        "ties to the highest part",
        "partitions",
        CORE + "partition.h",
        "(score == most && part < best)",
        "(score == most && part > best)",
        ("tests/test_partitioning.py::test_fennel_is_brute_force",),
    ),
    Mutation(
        "a match not played",
        "partitions",
        CORE + "partition.h",
        "if (won == winner[i] && won != own)",
        "if (won == winner[i])",
        ("tests/test_partitioning.py::test_fennel_is_brute_force",),
    ),
    Mutation(
        "edges into other parts counted at the wrong end",
        "partitions",
        CORE + "partition.h",
        "((int32_t *)counts)[source] += is_cut;",
        "((int32_t *)counts)[node] += is_cut;",
        ("tests/test_cross_partition.py::test_the_kernel_is_brute_force",),
    ),
    Mutation(
        "lists at hand before those of the neighbour cache",
        "lists of macro-batches",
        CORE + "nearby.h",
        "if (place[i] >= 0)\n            continue;",
        "if (place[i] == INT64_MAX)\n            continue;",
        ("tests/test_nearby_lists.py::test_lists_at_hand_by_brute_force",),
    ),
    Mutation(
        "rows beyond the end of a file",
        "hostile sizes",
        CORE + "io.pyx",
        "if end > expected_bytes:",
        "if end < 0:",
        ("tests/test_core_views.py::test_rows_beyond_the_end_of_a_file_are_refused",),
    ),
    Mutation(
        "gaps never read over",
        "gap merging",
        CORE + "rowio.h",
        "if (a - p1 > job->gap_pages || end > limit || j < k) break;",
        "if (a - p1 > 0 || end > limit || j < k) break;",
        ("tests/test_reader.py::test_gaps_up_to_the_stated_one_are_read_over",),
    ),
    Mutation(
        "gaps always read over",
        "gap merging",
        CORE + "rowio.h",
        "if (a - p1 > job->gap_pages || end > limit || j < k) break;",
        "if (end > limit || j < k) break;",
        ("tests/test_reader.py::test_gaps_up_to_the_stated_one_are_read_over",),
    ),
    Mutation(
        "ring refilled when empty",
        "ring refill",
        CORE + "backends.h",
        "while (!atomic_load_explicit(&job->stop, memory_order_relaxed) && in_flight < u->depth && head - tail < FS_WINDOW) {",
        "for (const int begins = !in_flight; begins && in_flight < u->depth && head - tail < FS_WINDOW;) {",
        ("tests/test_ring_refill.py",),
    ),
    Mutation(
        "ring half full",
        "ring refill",
        CORE + "backends.h",
        "in_flight < u->depth && head - tail < FS_WINDOW) {",
        "in_flight < u->depth / 2 && head - tail < FS_WINDOW) {",
        ("tests/test_ring_refill.py",),
    ),
    Mutation(
        "short reads not continued",
        "short reads",
        CORE + "backends.h",
        "            done += (uint64_t)res;\n",
        "            done = res > 0 ? len : done;\n",
        ("tests/test_faults.py::test_pread_gather_meets_errors_and_short_reads",),
    ),
    Mutation(
        "pages of scattered rows unchecked",
        "checksums: features",
        CORE + "rowio.h",
        "for (p = p > checked ? p : checked; p <= last; p++)",
        "for (p = last + 1; p <= last; p++)",
        ("tests/test_reader.py::test_a_flipped_bit_is_found",),
    ),
    Mutation(
        "pages of sequential reads unchecked",
        "checksums: topology, node data and saved caches, which are read in sequence",
        CORE + "rowio.h",
        "for (; checked < op->page1; checked++)",
        "for (; checked < op->page0; checked++)",
        ("tests/test_graph_caches.py::test_a_saved_neighbour_cache_is_loaded_again", "tests/test_damaged_dataset.py"),
    ),
    Mutation(
        "extents unchecked",
        "checksums: extents",
        CORE + "pagestream.h",
        "    if (s->job.sums)\n        for (uint64_t p = 0;",
        "    if (0)\n        for (uint64_t p = 0;",
        ("tests/test_extents.py::test_damage_is_found",),
    ),
    Mutation(
        "a list that goes on in the next turn begins anew",
        "numbers of layer-neighbour sampling",
        CORE + "labor.h",
        "        if (position == 0)\n            counts[i] = 0;",
        "        counts[i] = 0;",
        ("tests/test_labor.py::test_a_larger_graph_equals_the_oracle",),
    ),
    Mutation(
        "what was logged before a spill is logged again",
        "logs that spill",
        CORE + "epochs.h",
        "        *done += count;",
        "        *done += 0 * count;",
        ("tests/test_epoch_sampler.py::test_what_does_not_fit_the_memory_is_spilled",),
    ),
    Mutation(
        "draws never take the last neighbour",
        "draws' key",
        CORE + "draws.h",
        "    return (uint64_t)(((unsigned __int128)word * n) >> 64);",
        "    return (uint64_t)(((unsigned __int128)word * (n > 1 ? n - 1 : n)) >> 64);",
        ("tests/test_sampler.py::test_a_larger_graph_equals_the_oracle", "tests/test_draws.py"),
    ),
)
