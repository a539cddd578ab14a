"""Saved I/O: counts of an epoch and equation 5, against plain loops over the sampled batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import featstore
from featstore.estimate.savedio import SavedIO, Split, best_split, edges_drawn
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.load.savedsplit import measured_beta, profile
from featstore.sampling.macrolists import macro_lists
from featstore.sampling.sampledbatches import Drawn
from featstore.topology.base import huge_bytes
from tests.support.reference_history import Replay
from tests.support.whole_graph import skewed_graph

N, BATCH = 120, 7
PAGE = 4096
SAMPLERS: dict[str, Any] = {
    "two hops": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1),
    "three hops": lambda g: featstore.NeighborSampler(g, [3, 2, 2], seed=1),
    "with replacement": lambda g: featstore.NeighborSampler(g, [3, 2, 4], replace=True, seed=1),
    "labor": lambda g: featstore.LaborSampler(g, [4, 3], seed=1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "g"
    indptr, indices = skewed_graph(N, 4, hubs=[5, 9], hub_degree=50, seed=1)
    x = np.random.default_rng(4).standard_normal((N, 5)).astype(np.float32)
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    return path


@pytest.fixture(scope="module")
def g(path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(path, memory="32MiB") as graph:
        yield graph


class Enumerated:
    """The reads that each node saves in an epoch, by loops and dictionaries."""

    def __init__(self, sampler: Any, order: Any, staleness: int, outside: set[int]) -> None:
        self.accesses, self.edges, self.rows, self.drawn = (Counter[int]() for _ in range(4))
        self.n_edges = 0
        last_push: dict[int, int] = {}
        for step in range(len(order)):
            seeds = order.seeds(step)
            sampled = sampler.sample(seeds, epoch=0, index=step)
            ids, blocks = sampled.input_ids.tolist(), sampled.blocks[::-1]
            parent: dict[int, int] = {}
            edges_of: Counter[int] = Counter()
            n_known = blocks[0].n_src
            for hop, block in enumerate(blocks):
                for source, destination in zip(block.src.tolist(), block.dst.tolist(), strict=True):
                    self.n_edges += 1
                    node = ids[destination]
                    if node in outside:
                        self.drawn[node] += 1
                        edges_of[destination] += hop > 0
                    if source >= n_known and source not in parent:
                        parent[source] = destination

            def top(number: int, parent: dict[int, int] = parent) -> int:
                while number in parent:
                    number = parent[number]
                return number

            tops = [top(number) for number in range(len(ids))]
            self.accesses.update(ids)
            for number in range(n_known):
                node = ids[number]
                recent = node in last_push and step - last_push[node] <= staleness
                if recent and number >= len(seeds):
                    below = [each for each, of in enumerate(tops) if of == number]
                    self.rows[node] += len(below)
                    self.edges[node] += sum(edges_of[each] for each in below)
                else:
                    last_push[node] = step


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("staleness", [0, 1, 4, 1000])
def test_counts_are_those_of_loops(g: featstore.OutOfCoreGraph, sampler: str, staleness: int) -> None:
    drawn = Drawn(SAMPLERS[sampler](g), featstore.RandomBatches(range(100), BATCH, seed=3))
    expected = Enumerated(drawn.sampler, drawn.batches.epoch(0), staleness, set(range(N)))
    counted, seconds, _ = profile(drawn, g, staleness)
    for name in ("accesses", "edges", "rows", "drawn"):
        assert getattr(counted, name).tolist() == [getattr(expected, name)[node] for node in range(N)], name
    assert (counted.n_edges, counted.n_rows, counted.n_batches) == (expected.n_edges, sum(expected.accesses.values()), 15)
    assert seconds > 0
    assert bool(counted.rows.any()) == (staleness > 0)


def test_lists_in_memory_cost_nothing(path: Path) -> None:
    """Those of a neighbour cache, and of a whole one."""
    with featstore.open(path, memory="32MiB") as g:
        drawn = Drawn(SAMPLERS["three hops"](g), featstore.RandomBatches(range(100), BATCH, seed=3))
        topology, rng = g.topology, np.random.default_rng(1)
        indptr, indices = skewed_graph(N, 4, hubs=[5, 9], hub_degree=50, seed=1)
        places, records = np.full(N, -1, np.int64), list[int]()
        for node in np.flatnonzero(rng.random(N) < 0.4).tolist():
            places[node] = len(records)
            neighbors = sorted(indices[indptr[node] : indptr[node + 1]].tolist())
            records += [len(neighbors), *neighbors]
        arrays = {"records": np.array(records, topology.id_dtype), "offset_of_node": places}
        g.neighbor_cache = NeighborCache.from_arrays(topology, arrays)
        expected = Enumerated(drawn.sampler, drawn.batches.epoch(0), 5, set(np.flatnonzero(places < 0).tolist()))
        counted, _, _ = profile(drawn, g, 5)
        assert counted.edges.tolist() == [expected.edges[node] for node in range(N)]
        assert counted.drawn.tolist() == [expected.drawn[node] for node in range(N)]
        assert 0 < counted.drawn.sum() < counted.n_edges == expected.n_edges
        g.cache_neighbors("1MiB")
        assert g.neighbor_cache.whole
        counted, _, _ = profile(drawn, g, 5)
        assert not counted.edges.any()
        assert counted.n_edges == expected.n_edges


def test_lists_at_hand_cost_nothing(path: Path, tmp_path: Path) -> None:
    indptr, indices = skewed_graph(N, 4, hubs=[5, 9], hub_degree=50, seed=1)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, progress=False).close()
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        parts = featstore.partition(g, 6, train_idx=range(100), keep_lists=True, progress=False).numpy()
        order = featstore.PartitionBatches(g, range(100), BATCH, macro=2)
        sampler = SAMPLERS["three hops"](g)
        lists = macro_lists(g, sampler, order)
        assert lists is not None
        drawn = Drawn(sampler, order, lists)
        lists.use(lists.useful_bytes)
        counted, _, _ = profile(drawn, g, 5)
        drawn_outside = np.zeros(N, np.int64)
        epoch = order.epoch(0)
        for k in range(len(epoch)):
            near = np.isin(parts, epoch.parts_of(epoch.macro_of(k)))
            sampled = sampler.sample(epoch.seeds(k), epoch=0, index=k)
            for block in sampled.blocks:
                nodes = sampled.input_ids[block.dst].numpy()
                np.add.at(drawn_outside, nodes[~near[nodes]], 1)
        assert counted.drawn.tolist() == drawn_outside.tolist()
        assert 0 < counted.drawn.sum() < counted.n_edges
        drawn.close()


LISTS = {**SAMPLERS, "epoch": lambda g: featstore.EpochSampler(g, [4, 3], seed=1)}


@pytest.mark.parametrize("sampler", LISTS)
def test_lists_are_chosen_by_the_edges_drawn_for_their_bytes(tmp_path: Path, sampler: str) -> None:
    """The policy of neighbour caches: counts by loops, then the longest prefix of the lists that save most for a byte."""
    n = 900
    indptr, indices = skewed_graph(n, 4, hubs=[5, 9], hub_degree=50, seed=1)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, memory="32MiB", progress=False) as g:
        made, order = LISTS[sampler](g), featstore.RandomBatches(range(100), BATCH, seed=3)
        expected: Counter[int] = Counter()
        for k, epoch in ((k, order.epoch(2)) for k in range(len(order))):
            sampled = made.sample(epoch.seeds(k), 2, k)
            for block in sampled.blocks:
                expected.update(sampled.input_ids[block.dst].tolist())
        counts = edges_drawn(made, order, n, 2)
        assert counts.tolist() == [expected[node] for node in range(n)]
        degree = g.topology.degrees()
        best = sorted(range(n), key=lambda node: (-expected[node] / (degree[node] + 1), node))
        assert best != sorted(range(n), key=lambda node: (-expected[node], node))
        table = huge_bytes(8 * n)
        assert 4 * (degree + 1).sum() > PAGE
        g.cache_neighbors(f"{table + PAGE}B", "saved_io", counts=counts, progress=False)
        kept, left = set[int](), PAGE
        for node in best:
            left -= 4 * (int(degree[node]) + 1)
            if left < 0:
                break
            kept.add(node)
        assert set(np.flatnonzero(g.neighbor_cache.offset_of_node >= 0).tolist()) == kept
        assert 0 < len(kept) < n
        with pytest.raises(ValueError, match="the policy needs counts"):
            g.cache_neighbors(f"{table + PAGE}B", "saved_io", progress=False)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_set_of_nodes_saves_more_than_its_sum(g: featstore.OutOfCoreGraph, sampler: str) -> None:
    """By a replay that prunes batches: a node alone saves at most what it is credited with, which is what it alone brings."""
    made, order = SAMPLERS[sampler](g), featstore.RandomBatches(range(100), BATCH, seed=3)
    counted, _, _ = profile(Drawn(made, order), g, 4)
    rng = np.random.default_rng(0)
    best = np.argsort(-counted.rows)[:3]
    for nodes in (*best[:, None], best, np.flatnonzero(rng.random(N) < 0.3), np.arange(N)):
        replay, epoch = Replay(made, nodes, 4), order.epoch(0)
        pruned = sum(len(replay.batch(epoch.seeds(k), 0, k).ids) for k in range(len(epoch)))
        saved = counted.n_rows - pruned
        assert 0 < saved <= counted.rows[nodes].sum()


numbers = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(numbers, numbers, numbers, st.integers(1, 40), st.integers(1, 40), st.integers(0, 60), st.integers(0, 2000), st.booleans())
@example([0.0, 3.0, 0.0], [1.0], [1.0], 1, 1, 0, 100, False)
def test_the_split_is_that_of_enumeration(
    embeddings: list[float],
    features: list[float],
    lists: list[float],
    embedding_bytes: int,
    row_bytes: int,
    table_bytes: int,
    n_bytes: int,
    has_lists: bool,
) -> None:
    def top(values: list[float], n_rows: int) -> float:
        return sum(sorted(values, reverse=True)[: max(0, n_rows)])

    def of_features(n: int) -> float:
        return top(features, (n - table_bytes) // row_bytes)

    def of_lists(n: int) -> float:
        return top(lists, n // row_bytes) if has_lists else 0.0

    found = best_split(n_bytes, np.array(embeddings), embedding_bytes, of_features, of_lists)
    best = (-1.0, 0)
    for k in range(101):
        n = n_bytes * k // 100
        kept = min(n // embedding_bytes, sum(each > 0 for each in embeddings))
        saved = top(embeddings, kept) + of_features(n_bytes - n) + of_lists(n_bytes - n)
        assert found.benefits[k] == pytest.approx(saved)
        assert found.nodes[k] == kept
        best = max(best, (found.benefits[k], -k))
    assert found.alpha == -best[1] / 100
    assert found.to_dict()["nodes"] == found.nodes[found.taken]
    assert Split.from_dict(found.to_dict()) == found
    assert f"*{found.alpha:>6.2f}" in found.table()


def test_beta_is_the_ratio_of_measured_seconds() -> None:
    assert measured_beta(6.0, 3_000, 2.0, 500) == pytest.approx(0.5)
    assert measured_beta(6.0, 0, 2.0, 500) == pytest.approx(1500)
    assert measured_beta(6.0, 10, 0.0, 0) == 1.0  # no features: edges are all that can be saved


def test_nothing_is_saved_where_nothing_was_sampled() -> None:
    counted = SavedIO(10, 3)
    assert not counted.embeddings(2.0).any()
    found = best_split(1000, counted.embeddings(2.0), 10, lambda n_bytes: 0.0)
    assert (found.alpha, found.nodes[found.taken]) == (0.0, 0)
