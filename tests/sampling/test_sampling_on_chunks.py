"""The tests of sampling, run on chunks of 4 KiB: with their oracles, and against the same graph in CSC form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.graph import test_neighborcache as test_neighbor_cache
from tests.sampling import test_labor
from tests.sampling import test_neighbor as test_sampler
from tests.support.array_graphs import ArrayGraph

# They count what is asked of a CSC file and of the budget, or are of the CSC form itself.
OF_CSC = {
    "test_a_list_of_millions",
    "test_a_node_without_neighbours_is_never_read",
    "test_a_topology_loads_its_offsets",
    "test_a_whole_cache_is_counted",
    "test_an_id_in_the_file_that_is_no_node",
    "test_offsets_that_do_not_ascend",
    "test_repr_pickle_and_stats",
    "test_scratch_is_counted_and_given_back",
    "test_what_choosing_nodes_holds_is_counted",
    "test_the_sampler_reads_only_lists_that_are_not_in_the_cache",
}


@pytest.fixture(autouse=True, scope="module")
def on_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayGraph, "chunk_bytes", 4096)
        yield


# Of the core alone, or of lists that lie in a whole cache, which others make of chunks; or they make chunks themselves.
OF_NEITHER = {
    "test_a_loader_samples_from_the_graphs_neighbor_cache",
    "test_a_repeated_edge_is_taken_twice_or_not_at_all",
    "test_a_subclass_is_asked_for_all_scores_at_once",
    "test_batches_share_sources_the_more_they_depend",
    "test_blocks_nest",
    "test_destinations_that_agree_on_more_than_was_expected",
    "test_every_vector_form_draws_the_same",
    "test_every_vector_form_takes_the_same",
    "test_ids_beyond_32_bits_are_told_apart",
    "test_large_frontiers_are_read_in_turns_that_fit",
    "test_layers_share_sources_where_they_depend",
    "test_neighbours_are_taken_with_equal_probabilities",
    "test_seeds_of_every_integer_kind",
    "test_the_core_refuses_arrays_that_are_too_short",
    "test_the_mean_fanout_is_kept_and_nodes_are_shared",
    "test_the_table_outlives_its_numbers",
    "test_what_lists_of_some_nodes_hold_is_counted",
}

for module in (test_sampler, test_labor, test_neighbor_cache):
    for name, test in vars(module).copy().items():
        if name.startswith("test_") and callable(test) and name not in OF_CSC | OF_NEITHER:
            globals()[f"{name}_of_{module.__name__.removeprefix('tests.test_')}"] = test
