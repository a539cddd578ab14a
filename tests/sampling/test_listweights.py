"""Sampling by weight: against plain Python, whatever is in memory, in each form of the adjacency; what is refused."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import EpochSampler, LaborSampler, Loader, NeighborSampler, ShadowSampler
from featstore.errors import BudgetError, FeatstoreWarning
from featstore.sampling import listweights
from featstore.sampling.listweights import EDGE_WEIGHTS, ListWeights
from tests.sampling.test_neighbor import same
from tests.support.reference_sampling import Blocks, check_batch, grown
from tests.support.reference_weighted import splitmix, weighted_positions
from tests.support.typed import academic

N, MEAN = 400, 30


class Arrays:
    """A graph whose edges are given in any order, with weights, some of them 0; its lists as they are stored."""

    def __init__(self, seed: int = 0, n: int = N, mean: int = MEAN) -> None:
        rng = np.random.default_rng(seed)
        n_edges = n * mean
        self.n, self.edges = n, np.stack([rng.integers(0, n, n_edges), (n * rng.random(n_edges) ** 3).astype(np.int64)])
        self.weights = np.where(rng.random(n_edges) < 0.2, 0, rng.pareto(1.0, n_edges)).astype(np.float32)
        order = np.lexsort((self.edges[0], self.edges[1]))
        self.numbers, self.indices = order, self.edges[0][order]
        self.indptr = np.searchsorted(self.edges[1][order], np.arange(n + 1))

    def create(self, path: Path, **options: Any) -> Path:
        features = {"w": self.weights, "column": self.weights[:, None], "wide": self.weights.astype(np.float64)}
        whole = np.nan_to_num(np.round(self.weights)).clip(0, 1000)
        features |= {"half": whole.astype(np.float16), "count": whole.astype(np.int64), "two": np.stack([self.weights] * 2, 1)}
        x = np.random.default_rng(1).standard_normal((self.n, 4)).astype(np.float32)
        featstore.OutOfCoreGraph.from_edge_index(
            path, self.edges, self.n, features={"x": x}, edge_features=features, progress=False, **options
        ).close()
        return path

    def list_weights(self, node: int) -> list[float]:
        return self.weights[self.numbers[self.indptr[node] : self.indptr[node + 1]]].astype(np.float64).tolist()

    def expected(
        self, seeds: list[int], fanouts: list[int], keys: tuple[int, int, int], replace: bool = False, redraw: bool = True
    ) -> tuple[list[int], Blocks]:
        def drawn(hop: int, nodes: list[int]) -> Iterator[tuple[int, int]]:
            key = 0
            for word in (*keys, hop):
                key = splitmix(key, word)
            for place, node in enumerate(nodes):
                for position in weighted_positions(splitmix(key, node), self.list_weights(node), fanouts[hop], replace):
                    yield place, int(self.indices[self.indptr[node] + position])

        return grown(seeds, len(fanouts), drawn, redraw)


ARRAYS = Arrays()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The graph in both forms; and with its edges in the order of the lists, so that there are no edge ids."""
    folder = tmp_path_factory.mktemp("weights")
    ordered = Arrays()
    ordered.edges, ordered.weights = ordered.edges[:, ordered.numbers], ordered.weights[ordered.numbers]
    return {
        "csc": ARRAYS.create(folder / "csc"),
        "chunked": ARRAYS.create(folder / "chunked", topology="chunked", chunk_bytes=4096),
        "ordered": ordered.create(folder / "ordered"),
    }


def not_in_memory(sampler: NeighborSampler) -> None:
    """Let the budget take the weights back."""
    assert sampler._weights is not None
    sampler._weights._give_back(0)
    assert not sampler._weights.in_memory


def variants(path: Path, fanouts: list[int], **options: Any) -> Iterator[tuple[featstore.OutOfCoreGraph, NeighborSampler]]:
    """Yield samplers with weights and lists in memory, or some, or none."""
    for lists in (None, 0.3, 1.0):
        for edges in (False, True):
            with featstore.open(path, memory="64MiB", threads=1) as g:
                if lists:
                    n_bytes = 8 * g.num_nodes + 4096 + int(lists * 3 * g.topology.nbytes)
                    g.cache_neighbors(n_bytes, edges=edges)
                for where in ("memory", "tables", "as given"):
                    sampler = NeighborSampler(g, fanouts, edges=edges, weight="w", **options)
                    assert sampler._weights is not None
                    if where != "memory":
                        not_in_memory(sampler)
                        sampler._weights._tables.clear()
                        sampler._weights._may_make = where == "tables"
                    yield g, sampler
                    assert bool(sampler._weights._tables) == (where == "tables")


@pytest.mark.parametrize("form", ["csc", "chunked", "ordered"])
@pytest.mark.parametrize("replace", [False, True])
def test_equal_the_oracle_whatever_is_in_memory(stored: dict[str, Path], form: str, replace: bool) -> None:
    seeds = np.random.default_rng(2).choice(N, 20, replace=False).tolist()
    fanouts = [5, 12, 70]
    for redraw in (True, False):
        expected = ARRAYS.expected(seeds, fanouts, (3, 1, 4), replace, redraw)
        for _, sampler in variants(stored[form], fanouts, replace=replace, seed=3, redraw=redraw):
            batch = sampler.sample(torch.tensor(seeds), 1, 4)
            check_batch(batch, expected, len(seeds), 1, 4)
            if sampler.edges:
                weights = ARRAYS.weights if form != "ordered" else ARRAYS.weights[ARRAYS.numbers]
                ends = ARRAYS.edges if form != "ordered" else ARRAYS.edges[:, ARRAYS.numbers]
                for block in batch.blocks:
                    numbers = block.edge_pos.numpy()
                    assert (weights[numbers] > 0).all()
                    assert np.array_equal(ends[0][numbers], batch.input_ids[block.src].numpy())
                    assert np.array_equal(ends[1][numbers], batch.input_ids[block.dst].numpy())


@given(
    seeds=st.lists(st.integers(0, N - 1), unique=True, max_size=6),
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 2, 5, 17, 65]), min_size=1, max_size=2),
    replace=st.booleans(),
    keys=st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
)
def test_any_options_equal_the_oracle(small_weighted, seeds, fanouts, replace, keys) -> None:
    sampler = NeighborSampler(small_weighted, fanouts, replace=replace, seed=keys[0], weight="w")
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), *keys[1:])
    check_batch(batch, ARRAYS.expected(seeds, fanouts, keys, replace), len(seeds), *keys[1:])


@pytest.fixture(scope="module")
def small_weighted(stored: dict[str, Path]) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(stored["csc"], memory="64MiB", threads=1) as g:
        yield g


def test_lists_are_taken_whole_but_for_weights_of_zero(small_weighted: featstore.OutOfCoreGraph) -> None:
    batch = NeighborSampler(small_weighted, [-1], edges=True, weight="w").sample(torch.arange(N))
    numbers = np.sort(batch.blocks[0].edge_pos.numpy())
    assert np.array_equal(numbers, np.flatnonzero(ARRAYS.weights > 0))
    positive = np.bincount(ARRAYS.edges[1], ARRAYS.weights > 0, N)
    block = NeighborSampler(small_weighted, [20], weight="w").sample(torch.arange(N)).blocks[0]
    assert np.array_equal(np.bincount(block.dst, minlength=N), np.minimum(positive, 20))
    assert (positive < 20).any()


def test_shapes_and_dtypes_of_a_weight(small_weighted: featstore.OutOfCoreGraph) -> None:
    g, seeds = small_weighted, torch.arange(0, N, 7)
    expected = NeighborSampler(g, [5, 5], weight="w").sample(seeds)
    for name in ("column", "wide"):
        assert same(NeighborSampler(g, [5, 5], weight=name).sample(seeds), expected)
    half, count = (NeighborSampler(g, [5, 5], weight=name) for name in ("half", "count"))
    expected = half.sample(seeds)
    assert same(count.sample(seeds), expected)
    not_in_memory(count)
    assert same(count.sample(seeds), expected)
    half = NeighborSampler(g, [-1], edges=True, weight="half")
    for in_memory in (True, False):
        if not in_memory:
            not_in_memory(half)
        numbers = half.sample(torch.arange(N)).blocks[0].edge_pos.numpy()
        assert np.array_equal(np.sort(numbers), np.flatnonzero(np.round(ARRAYS.weights)))


@pytest.mark.parametrize("strategy", ["ondemand", "streamed"])
def test_a_loader_asks_for_memory_to_read_the_weights_of_the_longest_list(tmp_path: Path, strategy: str) -> None:
    """Node 0, a seed of the last batch, has 100,000 in-edges: the first batches say nothing of it."""
    n = 100_000
    edges = np.concatenate([np.stack([np.arange(n), np.zeros(n, np.int64)]), np.stack([np.arange(2000), np.arange(2000) + 1])], 1)
    features: dict[str, Any] = {"features": {"x": np.ones((n, 1), np.float32)}, "progress": False}
    w = {"w": np.ones(edges.shape[1], np.float32)}
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, n, edge_features=w, **features).close()
    seeds = torch.cat([torch.arange(1, 2000), torch.tensor([0])])

    made = featstore.OnDemand(cache=None) if strategy == "ondemand" else featstore.Streamed(cache=None)
    delivered = []

    def run(memory: int) -> None:
        with featstore.open(tmp_path / "g", memory=memory, threads=1) as g:
            sampler = NeighborSampler(g, [5], weight="w")
            not_in_memory(sampler)
            with Loader(g, sampler, seeds, 200, features=["x"], shuffle=False, strategy=made) as loader:
                delivered.extend(len(batch.seeds) for batch in loader)

    with pytest.raises(BudgetError) as caught:
        run(3 << 20)
    assert not delivered
    run(caught.value.needed)
    assert sum(delivered) == 2000


@pytest.mark.parametrize("fanouts", [[-1], [60], [3], [2, -1], [-1, 2]])
def test_positive_weights_on_the_drive_are_not_needed_for_whole_lists(tmp_path: Path, fanouts: list[int]) -> None:
    """Lists of 40 to 0 edges, without a weight of 0: turns in which all lists are taken whole, some, or none."""
    degrees = [40, 3, 0, 1, 7]
    ends = np.repeat(np.arange(5), degrees)
    edges = np.stack([np.arange(len(ends)) % 45, ends])
    w = np.random.default_rng(4).exponential(size=len(ends)).astype(np.float32)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 45, edge_features={"w": w}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        for replace in (False, True):
            sampler = NeighborSampler(g, fanouts, replace=replace, edges=True, weight="w")
            kept = sampler.sample(torch.arange(5))
            not_in_memory(sampler)
            assert same(sampler.sample(torch.arange(5)), kept)
            if fanouts in ([-1], [60]) and not replace:
                assert kept.blocks[0].edge_pos.sort().values.equal(torch.arange(len(ends)))


def test_what_is_no_weight_is_refused(small_weighted: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    for name, kind, message in (
        ("v", KeyError, "no edge feature 'v'; there is 'column', 'count'"),
        ("two", ValueError, "'two' has the shape \\[12000, 2\\]"),
        (3, TypeError, "weight is the name of an edge feature, not 3"),
    ):
        with pytest.raises(kind, match=message):
            NeighborSampler(small_weighted, [5], weight=name)  # type: ignore[arg-type]
    for number, bad in enumerate((-1.0, np.nan, np.inf)):
        graph = Arrays(1, 50, 4)
        graph.weights[[77, 99]] = bad
        with featstore.open(graph.create(tmp_path / str(number)), memory="64MiB") as g:
            with pytest.raises(ValueError, match=f"edge 77 has {bad} in edge feature 'w'; weights are finite"):
                NeighborSampler(g, [5], weight="w")
            assert EDGE_WEIGHTS not in g.memory_report()
    for sampler in (LaborSampler, EpochSampler):
        with pytest.raises(TypeError, match="weight"):
            sampler(small_weighted, [5], weight="w")


def test_samplers_of_a_graph_share_weights(stored: dict[str, Path]) -> None:
    with featstore.open(stored["csc"], memory="64MiB") as g:
        first, second = (NeighborSampler(g, fanouts, weight="w") for fanouts in ([5], [3, 3]))
        other = NeighborSampler(g, [5], weight="wide")
        assert first._weights is second._weights
        assert first._weights is not other._weights
        held = 4096 * -(-8 * g.num_edges // 4096)
        assert g.memory_report()[EDGE_WEIGHTS] == 2 * held
        again = pickle.loads(pickle.dumps(first))
        assert repr(again) == repr(first) == "NeighborSampler(fanouts=[5], replace=False, seed=0, weight='w')"
        assert same(again.sample(torch.arange(9)), first.sample(torch.arange(9)))
        again.graph.close()
        del first, second, other, again
        assert EDGE_WEIGHTS not in g.memory_report()


def test_threads_that_make_samplers_share_weights(stored: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, check = threading.Barrier(4), listweights._check

    def slow(of: Any) -> None:
        check(of)
        time.sleep(0.05)

    monkeypatch.setattr(listweights, "_check", slow)
    with featstore.open(stored["csc"], memory="64MiB") as g, ThreadPoolExecutor(4) as pool:

        def make(_: int) -> NeighborSampler:
            begun.wait(60)
            return NeighborSampler(g, [5], weight="w")

        samplers = [*pool.map(make, range(4))]
        assert all(each._weights is samplers[0]._weights for each in samplers)


def test_changed_weights_are_those_of_new_samplers(tmp_path: Path) -> None:
    graph, seeds = Arrays(3, 60, 20), torch.arange(60)
    changed = np.flatnonzero(graph.weights > 0)[::2]
    with featstore.open(graph.create(tmp_path / "g"), memory="64MiB") as g:
        before = NeighborSampler(g, [5], edges=True, weight="w")
        expected = before.sample(seeds)
        g.edge_features["w"].update(changed, np.zeros(len(changed), np.float32), progress=False)
        after = NeighborSampler(g, [5], edges=True, weight="w").sample(seeds)
        assert not np.isin(after.blocks[0].edge_pos, changed).any()
        assert same(before.sample(seeds), expected)
        not_in_memory(before)
        assert same(before.sample(seeds), expected)


def test_weights_are_given_back_and_not_kept_in_little_memory(stored: dict[str, Path]) -> None:
    seeds = torch.arange(0, N, 9)
    with featstore.open(stored["csc"], memory="64MiB", threads=1) as g:
        sampler = NeighborSampler(g, [5, 5], weight="w")
        expected = sampler.sample(seeds)
        assert g.memory_report().holders[EDGE_WEIGHTS].on_loan_bytes == g.memory_report()[EDGE_WEIGHTS]
        held = g.budget.reserve("another", g.budget.available + g.budget.on_loan)
        assert EDGE_WEIGHTS not in g.memory_report()
        held.release()
        assert same(sampler.sample(seeds), expected)
        assert ListWeights.of(g, "w", [("_", "_", "_")]) is sampler._weights
        assert sampler._weights is not None
        with sampler._weights._using():
            sampler._weights._keep()
            with pytest.raises(BudgetError):
                g.budget.reserve("another", g.budget.available + g.budget.on_loan)
        least = g.budget.used
    with featstore.open(stored["csc"], memory=least + (1 << 20), threads=1) as g:
        with g.budget.reserve("another", g.budget.available - 150_000):
            with pytest.warns(FeatstoreWarning, match="weight='w': .*no room for their alias tables.* needs .* more"):
                sampler = NeighborSampler(g, [5, 5], weight="w")
            assert sampler._weights is not None
            assert not sampler._weights.in_memory
        assert same(sampler.sample(seeds), expected)


def test_lists_longer_than_a_turn_and_weights_in_parts(
    stored: dict[str, Path], monkeypatch: pytest.MonkeyPatch, small_weighted: featstore.OutOfCoreGraph
) -> None:
    expected = NeighborSampler(small_weighted, [5, 20], weight="w").sample(torch.arange(N))
    for name, value in (("_LEAST", 50), ("_MOST", 50), ("_PIECE", 61)):
        monkeypatch.setattr(listweights, name, value)
    with featstore.open(stored["csc"], memory="64MiB", threads=1) as g:
        monkeypatch.setattr(listweights, "_KEPT_FRACTION", 1)
        with g.budget.reserve("another", g.budget.available - 120_000):
            sampler = NeighborSampler(g, [5, 20], weight="w")
            assert sampler._weights is not None
            assert sampler._weights.in_memory
        assert same(sampler.sample(torch.arange(N)), expected)
        not_in_memory(sampler)
        assert same(sampler.sample(torch.arange(N)), expected)


def test_columns_are_read_once_though_many_lists_lack_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, n, degree = np.random.default_rng(5), 300, 200
    edges = np.stack([np.tile(np.arange(degree), n), np.repeat(np.arange(n), degree)])
    w = {"w": rng.pareto(0.5, n * degree) + 1}
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, n, edge_features=w, progress=False).close()
    for name in ("_LEAST", "_MOST"):
        monkeypatch.setattr(listweights, name, 3000)
    with featstore.open(tmp_path / "g", memory="64MiB", threads=1) as g:
        sampler = NeighborSampler(g, [10], weight="w")
        expected = sampler.sample(torch.arange(n))
        not_in_memory(sampler)
        sampler.sample(torch.arange(1))
        assert sampler._weights is not None
        (tables,) = sampler._weights._tables.values()
        read, counts = tables.read, list[int]()

        def counting(positions: Any, *others: Any) -> Any:
            counts.append(len(positions))
            return read(positions, *others)

        monkeypatch.setattr(tables, "read", counting)
        assert same(sampler.sample(torch.arange(n)), expected)
        n_trials = listweights._core.sparse_trials(10, False)
        assert (sum(counts) - n * n_trials) % degree == 0
        assert n * n_trials + 50 * degree < sum(counts) <= n * (n_trials + degree)
        assert max(counts) <= 3000


def test_several_types(tmp_path: Path) -> None:
    graph = academic(papers=300)
    rng = np.random.default_rng(0)
    for key, pairs in graph.edges.items():
        weights = np.where(rng.random(pairs.shape[1]) < 0.3, 0, rng.random(pairs.shape[1])).astype(np.float32)
        graph.edge_features[key] = {"w": weights}
    batches = []
    with graph.create(tmp_path / "g") as g:
        for in_memory in (True, False):
            for disjoint in (False, True):
                sampler = NeighborSampler(g, [4, 3], edges=True, weight="w", disjoint=disjoint)
                if not in_memory:
                    not_in_memory(sampler)
                paper = g.types.nodes["paper"]
                batch = sampler.sample(torch.arange(paper.first, paper.first + 50))
                batches.append(batch)
                kinds = list(g.types.edges.values())
                for number, block in enumerate(batch.blocks):
                    kind = kinds[number % len(kinds)]
                    numbers = block.edge_pos.numpy() - kind.first_edge
                    assert (graph.edge_features[kind.key]["w"][numbers] > 0).all()
                    sources = batch.nodes[block.src].numpy() - kind.src.first
                    assert np.array_equal(graph.edges[kind.key][0][numbers], sources)
                    positive = np.bincount(graph.edges[kind.key][1], graph.edge_features[kind.key]["w"] > 0, kind.dst.n)
                    drawn, owners = np.bincount(block.dst, minlength=block.n_dst), batch.nodes[: block.n_dst].numpy()
                    of_type = (owners >= kind.dst.first) & (owners < kind.dst.stop)
                    fanout = [4, 3][::-1][number // len(kinds)]
                    assert np.array_equal(drawn[of_type], np.minimum(positive[owners[of_type] - kind.dst.first], fanout))
        assert same(batches[0], batches[2])
        assert same(batches[1], batches[3])
        only = {key: [3, 3] for key in list(graph.edges)[:1]}
        assert len(NeighborSampler(g, only, weight="w")._weights._of_types) == 1
        with pytest.raises(KeyError, match="no edge feature 'author,writes,paper/v'"):
            NeighborSampler(g, [3], weight="v")


def test_views_of_self_reliant_parts(tmp_path: Path) -> None:
    train = torch.arange(0, 200, 4)
    with featstore.open(Arrays(4, 200, 6).create(tmp_path / "g"), memory="64MiB", threads=1) as g:
        parts = featstore.partition(g, 2, "ldg", train, hops=2, progress=False)
        seeds = parts.part(0)
        expected = NeighborSampler(g, [3, 3], weight="w").sample(seeds)
        view = g.part(0, progress=False)
        for kind in (NeighborSampler, ShadowSampler):
            fanouts = [3, 3] if kind is NeighborSampler else [3]
            sampler = kind(view, fanouts, weight="w")
            batch = sampler.sample(seeds)
            not_in_memory(sampler)
            assert same(sampler.sample(seeds), batch)
            if kind is NeighborSampler:
                assert same(batch, expected)


def test_fanouts_of_nothing(tmp_path: Path) -> None:
    graph = academic(papers=60)
    for key, pairs in graph.edges.items():
        graph.edge_features[key] = {"w": np.ones(pairs.shape[1], np.float32)}
    with graph.create(tmp_path / "g") as g:
        batch = NeighborSampler(g, [0, 0], weight="w").sample(torch.arange(5))
        assert len(batch.input_ids) == 5


def test_subgraphs_of_weighted_draws(small_weighted: featstore.OutOfCoreGraph) -> None:
    g, seeds = small_weighted, torch.arange(0, N, 40)
    shadow = ShadowSampler(g, [4, 4], weight="w", seed=5)
    assert shadow.sample(seeds).input_ids.equal(
        NeighborSampler(g, [4, 4], seed=5, redraw=False, weight="w").sample(seeds).input_ids
    )
    assert repr(shadow).endswith("weight='w')")
    assert same(pickle.loads(pickle.dumps(shadow)).sample(seeds), shadow.sample(seeds))
    disjoint = NeighborSampler(g, [4, 4], disjoint=True, weight="w").sample(seeds)
    assert len(disjoint.nodes) > len(disjoint.input_ids)


WAYS = [(name, "seeds") for name in ("ondemand", "superbatch", "ginex", "streamed", "auto")] + [("superbatch", "of partitions")]


@pytest.mark.parametrize(("strategy", "of"), WAYS)
def test_loaders_deliver_the_sampled_batches(stored: dict[str, Path], strategy: str, of: str) -> None:
    with featstore.open(stored["chunked"], memory="64MiB", threads=2) as g:
        sampler = NeighborSampler(g, [5, 5], edges=True, weight="w", seed=2)
        given: Any = (torch.arange(N), 60)
        if of == "of partitions":
            given = (featstore.PartitionBatches(g, torch.arange(N), 60, np.arange(N) % 20),)
        with Loader(g, sampler, *given, features="x", edge_features=("w",), strategy=strategy, threads=2) as loader:
            n = 0
            for batch in loader:
                expected = sampler.sample(batch.seeds, 0, batch.index)
                assert batch.input_ids.equal(expected.input_ids)
                for rows, block in zip(batch.edge_features["w"], batch.blocks, strict=True):
                    assert (rows > 0).all()
                    assert np.array_equal(rows.numpy(), ARRAYS.weights[block.edge_pos.numpy()])
                n += 1
            assert n == 7


def test_packs_of_weighted_samples(stored: dict[str, Path], tmp_path: Path) -> None:
    with featstore.open(stored["csc"], memory="64MiB", threads=1) as g:
        sampler = NeighborSampler(g, [5, 5], weight="w", seed=2)
        pack = featstore.sample_offline(g, sampler, torch.arange(N), 100, path=tmp_path / "pack")
        with Loader(g, strategy=featstore.Packed(pack), features="x") as loader:
            for batch in loader:
                assert batch.input_ids.equal(sampler.sample(batch.seeds, 0, batch.index).input_ids)


def test_a_type_of_edges_without_the_weight_is_named_with_what_helps(tmp_path: Path) -> None:
    weighted, plain = ("a", "to", "b"), ("b", "to", "a")
    pairs = np.array([[0, 1, 1], [1, 0, 1]])
    g = featstore.OutOfCoreGraph.create(
        tmp_path / "g",
        nodes={"a": featstore.Nodes(2), "b": featstore.Nodes(2)},
        edges={weighted: featstore.Edges(pairs, features={"w": np.ones(3, np.float32)}), plain: pairs},
        progress=False,
    )
    with g:
        with pytest.raises(KeyError, match=r"each type in fanouts needs one: leave \('b', 'to', 'a'\) out"):
            NeighborSampler(g, [2], weight="w")
        assert NeighborSampler(g, {weighted: [2]}, weight="w").fanouts == (2,)
