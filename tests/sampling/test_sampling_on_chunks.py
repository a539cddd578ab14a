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
    "test_scratch_is_counted",
    "test_scratch_is_counted_and_given_back",
    "test_what_choosing_nodes_holds_is_counted",
    "test_the_sampler_reads_only_lists_that_are_not_in_the_cache",
}


@pytest.fixture(autouse=True, scope="module")
def on_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayGraph, "chunk_bytes", 4096)
        yield


for module in (test_sampler, test_labor, test_neighbor_cache):
    for name, test in vars(module).copy().items():
        if name.startswith("test_") and callable(test) and name not in OF_CSC:
            globals()[f"{name}_of_{module.__name__.removeprefix('tests.test_')}"] = test
