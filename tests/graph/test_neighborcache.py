"""The neighbour cache: which lists it holds, what making it costs, and what it refuses."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache.base import PolicyContext, StaticPolicy, get_policy
from featstore.cache.in_out_ratio import InOutRatio
from featstore.config import format_size
from featstore.errors import BudgetError, PluginError
from featstore.graph.neighbors.listscores import scores_by_degrees, scoring_bytes
from featstore.graph.neighbors.neighborcache import NeighborCache, lists_block_bytes
from featstore.sampling.batch import SampledBatch
from featstore.sampling.neighbor import NeighborSampler
from featstore.storage.pagestream import arena_bytes
from featstore.storage.rowfile import RowFile
from featstore.topology.base import huge_bytes
from featstore.topology.edgeids import EdgeIds
from featstore.topology.liststream import WINDOW_FACTOR
from featstore.topology.prefix import write_prefix
from tests.storage.test_sections import altered
from tests.support.array_graphs import ArrayFile, ArrayGraph, graph_of, graphs, random_graph
from tests.support.refusing import refuses
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("small_pieces")


@given(data=st.data(), g=graphs())
def test_the_cache_holds_the_longest_prefix(data: st.DataObject, g: ArrayGraph) -> None:
    """Radix selection against a sort of all nodes."""
    kind = data.draw(st.sampled_from(["float", "int", "ties"]))
    number = {
        "float": st.floats(allow_nan=False),
        "int": st.integers(-(2**62), 2**62),
        "ties": st.sampled_from([0.0, -0.0, 1.0]),
    }[kind]
    scores = np.array(data.draw(st.lists(number, min_size=g.num_nodes, max_size=g.num_nodes)))
    n_bytes = data.draw(st.integers(0, (len(g.indices) + g.num_nodes) * g.topology.id_bytes + 8))
    offset_of_node = np.zeros(g.num_nodes, np.int64)
    n_records = write_prefix(g.topology, scores, n_bytes, g.topology.id_bytes, offset_of_node)
    chosen = prefix_of(g, scores, n_bytes)
    assert set(np.flatnonzero(offset_of_node >= 0).tolist()) == chosen
    lengths = {node: int(g.indptr[node + 1] - g.indptr[node]) + 1 for node in sorted(chosen)}
    starts = np.cumsum([0, *lengths.values()])
    assert n_records == starts[-1]
    assert offset_of_node[sorted(chosen)].tolist() == starts[:-1].tolist()


def prefix_of(g: ArrayGraph, scores: npt.NDArray[Any], n_bytes: int) -> set[int]:
    order = np.lexsort((np.arange(g.num_nodes), -scores.astype(np.float64)))
    ends = np.cumsum((np.diff(g.indptr)[order] + 1) * g.topology.id_bytes)
    return set(order[: np.searchsorted(ends, n_bytes, side="right")].tolist())


@pytest.mark.parametrize(("share", "id_bytes"), covering([0.0, 0.01, 0.1, 0.5, 0.8], [4, 8]))
def test_a_partial_cache_holds_what_the_scores_say(share: float, id_bytes: int) -> None:
    g = random_graph(20_000, 12, seed=8, id_bytes=id_bytes)
    rng = np.random.default_rng(0)
    for scores in (rng.random(20_000), rng.integers(0, 4, 20_000), np.zeros(20_000), -rng.pareto(1, 20_000)):
        table = huge_bytes(8 * 20_000)
        n_bytes = table + int(share * g.topology.nbytes) // 4096 * 4096
        budget = Budget(n_bytes)
        cache = NeighborCache.build(g.topology, budget, scores, scratch=Budget(1 << 20))
        assert cache.offset_of_node is not None
        assert budget.used <= n_bytes
        chosen = prefix_of(g, scores, n_bytes - table)
        assert set(np.flatnonzero(cache.offset_of_node >= 0).tolist()) == chosen
        for node in sorted(chosen)[:: max(1, len(chosen) // 200)]:
            offset = int(cache.offset_of_node[node])
            neighbours = g.indices[g.indptr[node] : g.indptr[node + 1]]
            assert int(cache.records[offset]) == len(neighbours)
            assert np.array_equal(cache.records[offset + 1 : offset + 1 + len(neighbours)], neighbours)
        nodes = rng.permutation(20_000)
        place, degree = np.empty((2, 20_000), np.int64)
        cache.locate(nodes, place, degree)
        assert np.array_equal(degree, np.diff(g.indptr)[nodes])
        is_here = cache.offset_of_node[nodes] >= 0
        assert np.array_equal(place, np.where(is_here, cache.offset_of_node[nodes] + 1, ~g.indptr[nodes]))
        again = NeighborCache.from_arrays(g.topology, {name: array.copy() for name, array in cache.to_arrays().items()})
        assert repr(again) == repr(cache)
        cache.close()
        assert budget.used == 0


def test_lists_longer_than_a_block_are_cached_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.graph.neighbors.neighborcache.BLOCK_BYTES", 64)
    g = random_graph(300, 40, seed=9)
    n_bytes = 4096 + g.topology.nbytes // 8192 * 4096
    cache = NeighborCache.build(g.topology, Budget(n_bytes), np.arange(300), scratch=Budget(1 << 20))
    assert not cache.whole
    assert NeighborCache.from_arrays(g.topology, cache.to_arrays()).n_cached == cache.n_cached > 0
    for node in np.flatnonzero(cache.offset_of_node >= 0):
        offset = int(cache.offset_of_node[node])
        assert np.array_equal(
            cache.records[offset : offset + 1 + int(cache.records[offset])],
            np.r_[g.indptr[node + 1] - g.indptr[node], g.indices[g.indptr[node] : g.indptr[node + 1]]],
        )


def edges_of_absent_lists(g: Any, cache: NeighborCache | None, batch: SampledBatch) -> int:
    """Count the sampled edges whose destination's list is not in the cache."""
    if cache is not None and cache.offset_of_node is None:
        return 0
    absent = np.ones(g.num_nodes, bool) if cache is None else cache.offset_of_node < 0
    return sum(int(absent[batch.input_ids[block.dst].numpy()].sum()) for block in batch.blocks)


@pytest.mark.parametrize("fanouts", [[5, 5], [-1, 3]])
@pytest.mark.parametrize("replace", [False, True])
def test_the_sampler_reads_only_lists_that_are_not_in_the_cache(fanouts: list[int], replace: bool) -> None:
    """The file is asked for exactly the edges of absent lists: all of them, some of them, or none."""
    g = random_graph(5000, 15, seed=3)
    read = []
    for variant in (g, g.cached(len(g.indices) // 2), g.cached()):
        sampler = NeighborSampler(variant, fanouts, replace)
        before = variant.file.n_gathered
        expected = 0
        for index in range(5):
            batch = sampler.sample(torch.arange(100 * index, 100 * index + 100), index=index)
            expected += edges_of_absent_lists(variant, variant.neighbor_cache, batch)
        assert variant.file.n_gathered - before == sampler.stats()["edge_rows_read"] == expected
        read.append(expected)
    assert read[0] == sampler.stats()["edges"] > read[1] > read[2] == 0


@pytest.mark.usefixtures("no_kept_lists")
def test_a_loader_samples_from_the_graphs_neighbor_cache(small: SimpleNamespace) -> None:
    """In an epoch too: fewer ids are read with a partial cache, and none with a whole one."""
    read = []
    with featstore.open(small.path, memory="64MiB") as g:
        for n_bytes in (None, huge_bytes(8 * small.num_nodes) + 8192, "1MB"):
            if n_bytes is not None:
                g.cache_neighbors(n_bytes)
            sampler = featstore.NeighborSampler(g, [4, 3])
            with featstore.Loader(g, sampler, small.train_idx, batch_size=40, features=[], strategy="ondemand") as loader:
                expected = sum(edges_of_absent_lists(g, g.neighbor_cache, batch) for batch in loader)
            assert sampler.stats()["edge_rows_read"] == expected
            read.append(expected)
        assert sampler.stats()["edges"] == read[0] > read[1] > read[2] == 0


def test_a_cache_is_shown_without_a_pass_over_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    g = random_graph(3000, 10, seed=1)
    cache = g.cached(len(g.indices) // 2).neighbor_cache
    assert 0 < cache.n_cached == np.count_nonzero(cache.offset_of_node >= 0) < 3000
    monkeypatch.setattr(np, "count_nonzero", None)
    assert repr(cache) == f"NeighborCache({cache.n_cached:,} of 3,000 nodes, {format_size(cache.nbytes)})"


def test_a_whole_cache_is_counted() -> None:
    g = random_graph(3000, 10, seed=1)
    budget = Budget(1 << 20)
    cache = NeighborCache.build(g.topology, budget)
    assert cache.whole
    assert budget.report() == {"neighbor cache": huge_bytes(g.topology.nbytes)}
    cache.close()
    assert budget.used == 0


def test_a_node_without_neighbours_is_never_read() -> None:
    g = graph_of([[], [], [0, 1]])
    NeighborSampler(g, [2, 2]).sample(torch.tensor([0, 1]))
    assert g.file.n_gathers == 0


def test_cache_errors() -> None:
    g = random_graph(3000, 10, seed=1)
    scratch = Budget(1 << 20)
    with pytest.raises(BudgetError, match="at least 24576 bytes") as caught:
        NeighborCache.build(g.topology, Budget(20_000), np.ones(3000), scratch=scratch)
    assert caught.value.needed == 24576
    refuses(ValueError, "scores are needed", lambda: NeighborCache.build(g.topology, Budget(30_000), scratch=scratch))
    for scores in (np.ones(2999), np.ones((3000, 1)), np.ones(3000, complex)):
        refuses(ValueError, "scores", lambda: NeighborCache.build(g.topology, Budget(30_000), scores, scratch=scratch))
    scores = np.ones(3000)
    scores[1234] = np.nan
    refuses(ValueError, "node 1234 is NaN", lambda: NeighborCache.build(g.topology, Budget(30_000), scores, scratch=scratch))
    assert scratch.used == 0
    refuses(BudgetError, "", lambda: NeighborCache.build(g.topology, Budget(30_000), np.ones(3000), scratch=Budget(1000)))


@given(data=st.data(), g=graphs(), policy=st.sampled_from(["in_out_ratio", "degree"]))
def test_scores_written_into_the_table_choose_the_same_lists(data: st.DataObject, g: ArrayGraph, policy: str) -> None:
    """Made piece by piece of degrees, in memory that places overwrite, against scores of all nodes at once."""
    chosen, n = cast(StaticPolicy, get_policy(policy)), g.num_nodes
    out_degrees = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), np.int64)
    n_bytes = huge_bytes(8 * n) + data.draw(st.integers(0, g.topology.nbytes + 4096))
    context = PolicyContext(n, g.topology.id_bytes, g.topology.degrees, lambda: out_degrees)
    told: list[int] = []
    write = scores_by_degrees(chosen, g.topology, cast(RowFile, ArrayFile(out_degrees)), g.types, told.append)
    whole = NeighborCache.whole_bytes(g.topology) <= n_bytes
    one, other = (
        NeighborCache.build(g.topology, g.budget, scores, n_bytes, Budget(1 << 20))
        for scores in (write, chosen.list_scores(context))
    )
    assert sum(told) == (0 if whole else 24 * n)
    for name, array in one.to_arrays().items():
        assert np.array_equal(array, other.to_arrays()[name]), name


def test_scores_of_several_blocks_are_those_of_all_nodes() -> None:
    n = 20_000
    g, out_degrees = random_graph(n, 3, seed=5), np.random.default_rng(6).integers(0, 99, n)
    file, policy = ArrayFile(out_degrees), cast(StaticPolicy, get_policy("in_out_ratio"))
    scores = np.empty(n)
    tracemalloc.start()
    try:
        scores_by_degrees(policy, g.topology, cast(RowFile, file), g.types)(scores)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < scoring_bytes(n) + 20_000 < 16 * n
    context = PolicyContext(n, 4, g.topology.degrees, lambda: out_degrees)
    assert np.array_equal(scores, policy.list_scores(context))
    assert file.n_read == 40 * 512


def test_a_subclass_is_asked_for_all_scores_at_once() -> None:
    class Ranks(InOutRatio):
        def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
            return np.argsort(np.argsort(super().scores(context)))

    assert InOutRatio().goes_by_degrees
    assert not Ranks().goes_by_degrees


def test_a_policy_that_fails_on_a_piece_is_named() -> None:
    class Fails(StaticPolicy):
        from_degrees = True

        def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
            return np.full(context.n, np.nan)

    g = random_graph(3000, 10, seed=5)
    held, scratch = g.budget.used, Budget(1 << 20)
    write = scores_by_degrees(Fails(), g.topology, cast(RowFile, ArrayFile(np.ones(3000, np.int64))), g.types)
    refuses(PluginError, r"Fails.*is NaN", lambda: NeighborCache.build(g.topology, g.budget, write, 30_000, scratch))
    assert (g.budget.used, scratch.used) == (held, 0)


@pytest.mark.parametrize("block_bytes", [2 * 4096, 64 * 4096])
@pytest.mark.parametrize(("share", "id_bytes"), covering([0.0, 0.1, 0.5, 1.0], [4, 8]))
def test_lists_of_some_nodes_alone(share: float, id_bytes: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the allowed nodes with the best scores, one of them longer than a block; no other list is asked for."""
    lists = random_graph(3000, 12, seed=8, id_bytes=id_bytes)
    rng, long = np.random.default_rng(1), 1234
    indices = np.insert(lists.indices, lists.indptr[long], rng.integers(0, 3000, 5000))
    indptr = lists.indptr.copy()
    indptr[long + 1 :] += 5000
    g = ArrayGraph(indptr, indices.astype(lists.indices.dtype))
    g.topology.edge_ids = EdgeIds(cast(RowFile, ArrayFile(rng.permutation(len(indices)).astype(np.int32))))
    allowed, scores = rng.random(3000) < 0.4, rng.random(3000)
    allowed[long], scores[long] = True, 2
    scores[~allowed] = -np.inf
    asked, real = [], g.topology.lists
    monkeypatch.setattr(g.topology, "lists", lambda nodes, n_bytes: (asked.append(nodes), real(nodes, block_bytes))[1])
    for edges in (False, True):
        entry = id_bytes + 4 * edges
        n_bytes = huge_bytes(8 * 3000) + 3 * 4096 + int(share * entry * (indptr[1:] - indptr[:-1] + 1)[allowed].sum())
        cache = NeighborCache.build(
            g.topology, Budget(n_bytes), scores, scratch=Budget(1 << 20), edges=edges, only=lambda a, b: allowed[a:b]
        )
        assert cache.offset_of_node is not None
        kept = np.flatnonzero(cache.offset_of_node >= 0)
        assert allowed[kept].all()
        assert len(kept) == cache.n_cached
        assert share < 1 or len(kept) == allowed.sum()
        assert not len(kept) or scores[kept].min() >= scores[np.setdiff1d(np.flatnonzero(allowed), kept)].max(initial=-np.inf)
        assert (share >= 0.5) == (long in kept)
        for node in kept.tolist():
            at, own = int(cache.offset_of_node[node]), slice(int(indptr[node]), int(indptr[node + 1]))
            assert cache.records[at] == own.stop - own.start
            np.testing.assert_array_equal(cache.records[at + 1 : at + 1 + cache.records[at]], indices[own])
            if edges:
                assert cache.edge_ids is not None
                numbers = np.empty(own.stop - own.start, np.int32)
                g.topology.edge_ids.read(own.start, numbers)
                np.testing.assert_array_equal(cache.edge_ids[at + 1 : at + 1 + len(numbers)], numbers)
    assert allowed[np.concatenate([np.empty(0, np.int64), *asked])].all()


@pytest.mark.parametrize("topology", ["csc", "chunked"])
@pytest.mark.parametrize("n", [3000, 100_000])
def test_what_lists_of_some_nodes_hold_is_counted(n: int, topology: str, tmp_path: Path) -> None:
    """As above, of files: beside arrays that tracemalloc sees, there is the window of a stream."""
    made = random_graph(n, 30, seed=4)
    scores, counts = np.random.default_rng(1).integers(0, 9, n), np.random.default_rng(2).random(n) < 0.5
    path, options = tmp_path / "g", {"chunk_bytes": 1 << 16} if topology == "chunked" else {}
    featstore.OutOfCoreGraph.create(path, made.indptr, made.indices, topology=topology, **options, progress=False).close()
    with featstore.open(path, memory="64MiB") as g:
        in_memory = g.topology.resident_offsets is not None
        scratch_bytes = NeighborCache.scratch_bytes(n, g.topology.nbytes, in_memory=in_memory)
        n_bytes = huge_bytes(8 * n) + g.topology.nbytes // 2
        budget, scratch = Budget(n_bytes), Budget(scratch_bytes)
        tracemalloc.start()
        try:
            cache = NeighborCache.build(g.topology, budget, scores, scratch=scratch, only=lambda a, b: counts[a:b])
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        window = arena_bytes(WINDOW_FACTOR * lists_block_bytes(g.topology))
        assert held + window < scratch_bytes + 20_000
        assert 0 < cache.n_cached < n
        cache.close()


@pytest.mark.parametrize("n", [3000, 100_000])
def test_what_choosing_nodes_holds_is_counted(n: int) -> None:
    """Beside the cache's arrays, which are mapped memory, as tracemalloc sees it; in one budget, or in one of its own."""
    g = random_graph(n, 30, seed=4)
    scores = np.random.default_rng(1).integers(0, 9, n)
    scratch_bytes = NeighborCache.scratch_bytes(n, g.topology.nbytes, in_memory=True)
    assert scratch_bytes < g.topology.nbytes // 4
    n_bytes = huge_bytes(8 * n) + g.topology.nbytes // 2
    least = huge_bytes(8 * n) + scratch_bytes
    caught = refuses(BudgetError, f"at least {least} bytes", lambda: NeighborCache.build(g.topology, Budget(least - 1), scores))
    assert caught.value.needed == least
    for budget, scratch in ((Budget(n_bytes + scratch_bytes), None), (Budget(n_bytes), Budget(scratch_bytes))):
        tracemalloc.start()
        try:
            cache = NeighborCache.build(g.topology, budget, scores, scratch=scratch)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 0.4 * scratch_bytes < held < scratch_bytes + 20_000
        assert not cache.whole
        assert n_bytes - 4096 * 4 < cache.nbytes <= budget.used <= n_bytes
        assert budget.peak <= budget.total
        assert scratch is None or (scratch.peak, scratch.used) == (scratch_bytes, 0)


def test_a_cache_of_another_topology_is_refused() -> None:
    g = random_graph(200, 6, seed=2)
    arrays = g.cached(500).neighbor_cache.to_arrays()  # type: ignore[union-attr]
    offsets, records = arrays["offset_of_node"], arrays["records"]
    node = int(np.flatnonzero(offsets >= 0)[-1])
    changed = {"id": records.copy(), "degree": records.copy(), "offset": offsets.copy(), "beyond": offsets.copy()}
    last = int(offsets[node])
    changed["degree"][last] += 1
    with_neighbours = next(v for v in np.flatnonzero(offsets >= 0) if records[offsets[v]])
    changed["id"][offsets[with_neighbours] + 1] = 200
    with pytest.raises(ValueError, match=f"node {with_neighbours}"):
        NeighborCache.from_arrays(g.topology, {"records": changed["id"], "offset_of_node": offsets})
    changed["offset"][node] = -2
    changed["beyond"][node] = len(records)
    for name in ("degree", "offset", "beyond"):
        bad = {"records": records, "offset_of_node": offsets}
        bad["records" if name == "degree" else "offset_of_node"] = changed[name]
        refuses(ValueError, f"node {node}", lambda: NeighborCache.from_arrays(g.topology, bad))
    whole = g.cached().neighbor_cache.to_arrays()["records"].copy()  # type: ignore[union-attr]
    for bad_records in (whole[:-1], whole.astype(np.int64), np.where(np.arange(len(whole)) == 5, 200, whole).astype(np.int32)):
        refuses(ValueError, "records", lambda: NeighborCache.from_arrays(g.topology, {"records": bad_records}))
    with pytest.raises(ValueError, match="offset_of_node"):
        NeighborCache.from_arrays(g.topology, {"records": records, "offset_of_node": offsets[:-1]})


@settings(deadline=None)
@given(data=st.data())
def test_any_arrays_are_refused_or_safe(data: st.DataObject) -> None:
    """Whatever a file says under a right checksum, no batch names what is no node."""
    g = random_graph(20, 4, seed=3)
    given = g.cached(40).neighbor_cache.to_arrays()  # type: ignore[union-attr]
    arrays = dict(zip(given, altered(data, list(given.values())), strict=True))
    try:
        g.neighbor_cache = NeighborCache.from_arrays(g.topology, arrays)
    except ValueError:
        return
    batch = NeighborSampler(g, [3, -1]).sample(torch.arange(20))
    assert batch.input_ids.tolist() == list(range(20))


def test_threads_that_cache_lists_at_once_leave_one_cache(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB", threads=1) as g:
        g.cache_neighbors(progress=False)
        assert g.neighbor_cache is not None
        assert g.neighbor_cache.reservation is not None
        alone = g.neighbor_cache.reservation.n_bytes
        for _ in range(3):
            with ThreadPoolExecutor(3) as threads:
                for future in [threads.submit(g.cache_neighbors, progress=False) for _ in range(6)]:
                    future.result()
            assert g.memory_report()["neighbor cache"] == alone
