"""Mutations of work in pieces, from the second piece on; and of pages of offsets, counts and estimates."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["PIECES"]

TWO_LEVELS = ("tests/test_partitioning.py::test_two_levels_of_a_larger_graph_are_brute_force",)
KEYS = ("tests/test_edge_index.py::test_equal_pairs_keep_their_order_whatever_their_keys_take",)
NUMPY = ("tests/test_chunks.py::test_all_that_is_asked_equals_numpy",)
CLOCK = ("tests/test_offset_pages.py::test_pages_are_those_of_a_clock",)
COSTS = ("tests/test_offset_pages.py::test_costs_are_those_of_the_chunks_that_hold_edges",)
DRAWN = ("tests/test_cost.py::test_reads_are_those_of_rows_that_are_drawn",)

PIECES: tuple[Mutation, ...] = (
    Mutation(
        "training nodes of the first piece counted for all",
        "work in pieces",
        "featstore/partitioning/fennel.py",
        "piece[is_train[begin : begin + _PIECE] > 0]",
        "piece[is_train[: len(piece)] > 0]",
        TWO_LEVELS,
    ),
    Mutation(
        "each piece's nodes ranked anew",
        "work in pieces",
        "featstore/partitioning/ranges.py",
        "(seen[piece] + rank) * width",
        "rank * width",
        TWO_LEVELS,
    ),
    Mutation(
        "largest degree of the first piece",
        "work in pieces",
        "featstore/graph/topology.py",
        "for k in range(0, self.num_nodes, _PIECE)), default=0",
        "for k in range(0, min(1, self.num_nodes), _PIECE)), default=0",
        NUMPY,
    ),
    Mutation(
        "places of the last piece looked up into the first",
        "work in pieces",
        "featstore/graph/chunks.py",
        "self._look_up(self.directory, ids[part], starts[part], degrees[part])",
        "self._look_up(self.directory, ids[part], starts[: len(ids[part])], degrees[part])",
        NUMPY,
    ),
    Mutation(
        "only the last piece of positions put back",
        "work in pieces",
        "featstore/graph/chunks.py",
        "                n_moved = first + len(part)\n",
        "                n_moved = len(part)\n",
        NUMPY,
    ),
    Mutation(
        "rows released in the first piece of the map alone",
        "work in pieces",
        "featstore/cache/rowmap.py",
        "piece = self.slot_of_row[first : first + PIECE_ROWS]",
        "piece = self.slot_of_row[:PIECE_ROWS]",
        ("tests/test_rowmap.py::test_rows_of_a_slot_and_all_later_ones_are_released",),
    ),
    Mutation(
        "degrees of all pieces written into the first",
        "work in pieces",
        "featstore/graph/kept.py",
        "found[first : first + len(rows)] =",
        "found[: len(rows)] =",
        ("tests/test_graph_caches.py::test_out_degrees_in_16_bits_are_the_out_degrees_or_the_most",),
    ),
    Mutation(
        "numbers of edges counted from 0 in each block",
        "work in pieces",
        "featstore/graph/verify.py",
        "np.arange(row, row + len(ids))",
        "np.arange(len(ids))",
        ("tests/test_cached_edge_ids.py::test_they_are_saved_with_the_lists",),
    ),
    Mutation(
        "lists that fall where a block ends",
        "work in pieces",
        "featstore/graph/verify.py",
        "position, previous = end, int(ids[-1])",
        "position, previous = end, -1",
        ("tests/test_damaged_dataset.py::test_a_list_that_falls_where_one_piece_ends_is_found",),
    ),
    Mutation(
        "lists in the file looked up for the first piece's nodes",
        "work in pieces",
        "featstore/graph/neighborcache.py",
        "self.topology.offsets(ids[part][missing[:n]])",
        "self.topology.offsets(ids[missing[:n]])",
        ("tests/test_neighbor_cache.py::test_a_partial_cache_holds_what_the_scores_say",),
    ),
    Mutation(
        "draws of the first piece's nodes",
        "work in pieces",
        "featstore/sampling/access.py",
        "n_targets[part] * sum(",
        "n_targets[: len(degrees)] * sum(",
        ("tests/test_epoch_access.py::test_what_costs_less_is_chosen",),
    ),
    Mutation(
        "the best rows numbered from 0 in each piece",
        "work in pieces",
        "featstore/cache/select.py",
        "first, prefix, wanted, rows, filled)",
        "0, prefix, wanted, rows, filled)",
        ("tests/test_cache_table.py::test_the_best_of_many_rows",),
    ),
    # -- edges that are sorted
    Mutation(
        "a key of 64 bits in a signed word",
        "edges that are given",
        "featstore/graph/extsort.py",
        "    if key_bits <= 63:\n",
        "    if key_bits <= 64:\n",
        KEYS,
    ),
    Mutation(
        "a key and its place of 64 bits in a signed word",
        "edges that are given",
        "featstore/graph/extsort.py",
        "if key_bits + place_bits > 63:",
        "if key_bits + place_bits > 64:",
        KEYS,
    ),
    # -- pages that say where lists begin
    Mutation(
        "pages that are used again not marked",
        "offsets block by block",
        "featstore/graph/offsetpages.py",
        "            self._was_used[here] = True\n",
        "",
        CLOCK,
    ),
    Mutation(
        "a flood drives out all pages",
        "offsets block by block",
        "featstore/graph/offsetpages.py",
        "max(n_free, len(self._page_of_slot) // 2)",
        "len(self._page_of_slot)",
        CLOCK,
    ),
    # -- packs, counts and estimates
    Mutation(
        "verify takes rows from the superbatch before",
        "checks of plans",
        "featstore/pack/verify.py",
        "                held[:] = -1\n",
        "                pass\n",
        ("tests/test_verify_pack.py::test_a_superbatch_finds_nothing_of_the_one_before",),
    ),
    Mutation(
        "rows in extents counted as accesses to shared ones",
        "estimates of strategies",
        "featstore/pack/segments.py",
        "each.accesses - int(each.packed.sum())",
        "each.accesses",
        ("tests/test_segments.py::test_a_callers_own_count_is_told_what_is_stored",),
    ),
    Mutation(
        "reads of chunks begun for nothing",
        "estimates of strategies",
        "featstore/graph/chunks.py",
        "self.directory.chunk_bytes + self.gap_bytes * n_runs",
        "self.directory.chunk_bytes",
        COSTS,
    ),
    Mutation(
        "reads of looked-up nodes begun for nothing",
        "estimates of strategies",
        "featstore/graph/chunks.py",
        "return len(nodes) * (PAGE_BYTES + self.gap_bytes)",
        "return len(nodes) * PAGE_BYTES",
        COSTS,
    ),
    Mutation(
        "reads that are just near enough kept apart",
        "estimates of strategies",
        "featstore/plan/cost.py",
        "wanted * (1 - density) ** (gap + 1))",
        "wanted * (1 - density) ** gap)",
        DRAWN,
    ),
    Mutation(
        "the widest gaps read over for nothing",
        "estimates of strategies",
        "featstore/plan/cost.py",
        "for j in range(1, gap + 1))",
        "for j in range(1, gap))",
        DRAWN,
    ),
    Mutation(
        "rows of a device that is the host copied once",
        "estimates of strategies",
        "featstore/plan/cost.py",
        "return w.n_accesses + w.n_device if w.device_rows",
        "return w.n_accesses if w.device_rows",
        ("tests/test_cost.py::test_a_device_that_is_the_host_has_its_rows_copied_twice",),
    ),
    Mutation(
        "the share that is missed, of an empty cache too",
        "estimates of strategies",
        "featstore/plan/choice.py",
        "late = slice(recorded - max(1, recorded // 4), recorded)",
        "late = slice(0, recorded)",
        ("tests/test_observed.py::test_the_share_that_is_missed_is_that_of_a_full_cache",),
    ),
)
