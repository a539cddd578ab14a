"""Batches of graphs of several types: the edges and rows that there are, the same from every strategy and form."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore import (
    BudgetError,
    Ginex,
    HeteroMiniBatch,
    LaborSampler,
    Loader,
    NeighborSampler,
    OnDemand,
    OptionError,
    Streamed,
    Superbatch,
)
from featstore.gather.prefetchrows import RowPrefetcher
from tests.support.sampled import covering, one_in
from tests.support.typed import TypedArrays, academic, check_batch, random_types, reached

pytestmark = pytest.mark.shares_resources


def drawn(batch: HeteroMiniBatch) -> list[dict[Any, set[tuple[int, int, int]]]]:
    """Name the edges of each hop, the seeds' own first, by ids within their types and numbers within their type of edges."""
    return [
        {
            key: set(
                zip(
                    batch.input_ids[key[0]][block.src].tolist(),
                    batch.input_ids[key[2]][block.dst].tolist(),
                    block.edge_pos.tolist(),
                    strict=True,
                )
            )
            for key, block in hop.items()
        }
        for hop in reversed(batch.blocks)
    ]


def tensors(batch: HeteroMiniBatch) -> list[torch.Tensor]:
    of_blocks = [each for hop in batch.blocks for block in hop.values() for each in block.tensors]
    of_rows = [rows for of_types in batch.features.values() for rows in of_types.values()]
    of_edges = [rows for hops in batch.edge_features.values() for hop in hops for rows in hop.values()]
    return [*batch.input_ids.values(), *of_blocks, *of_rows, *of_edges, *batch.labels.values(), batch.seed_index]


def same(one: list[HeteroMiniBatch], other: list[HeteroMiniBatch]) -> bool:
    one, other = (sorted(each, key=lambda batch: batch.index) for each in (one, other))
    return len(one) == len(other) and all(
        len(tensors(a)) == len(tensors(b)) and all(map(torch.equal, tensors(a), tensors(b)))
        for a, b in zip(one, other, strict=True)
    )


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3), st.sampled_from([NeighborSampler, LaborSampler]))
def test_whole_lists_reach_what_sets_reach(tmp_path_factory: Any, seed: int, redraw: bool, depth: int, make: Any) -> None:
    graph = random_types(seed)
    kind = next(kind for kind, n in graph.n.items() if n)
    with graph.create(tmp_path_factory.mktemp("g") / "g") as g:
        sampler = make(g, [-1] * depth, edges=True, redraw=redraw)
        ids = np.random.default_rng(seed).permutation(graph.n[kind])[:5]
        with Loader(g, sampler, (kind, ids), 3, strategy="ondemand", edge_features="w", shuffle=False) as loader:
            for batch in loader:
                check_batch(graph, batch, edges=True)
                assert drawn(batch) == reached(graph, kind, batch.seeds.numpy(), depth)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_fanouts_are_kept_a_type(tmp_path_factory: Any, seed: int, redraw: bool, replace: bool) -> None:
    graph = random_types(seed, most=12)
    rng = np.random.default_rng(seed)
    fanouts = {key: rng.integers(-1, 4, 2).tolist() for key in graph.edges if rng.random() < 0.7} or None
    if fanouts is None:
        return
    kind = max(graph.n, key=lambda each: graph.n[each])
    with graph.create(tmp_path_factory.mktemp("g") / "g") as g:
        sampler = NeighborSampler(g, fanouts, replace=replace, redraw=redraw, edges=True)
        with Loader(g, sampler, (kind, np.arange(graph.n[kind])), 4, strategy="ondemand") as loader:
            for batch in loader:
                check_batch(graph, batch, edges=True)
                for number, hop in enumerate(reversed(batch.blocks)):
                    for key, block in hop.items():
                        fanout = fanouts.get(key, [0, 0])[number]
                        degree = np.bincount(graph.edges[key][1], minlength=graph.n[key[2]])
                        ids = batch.input_ids[key[2]][: block.n_dst].numpy()
                        least = np.where(degree[ids] > 0, fanout, 0) if replace else np.minimum(degree[ids], fanout)
                        expected = degree[ids] if fanout < 0 else least
                        got = np.bincount(block.dst.numpy(), minlength=block.n_dst)
                        if redraw or number == 0:
                            assert np.array_equal(got, expected)
                        if not replace and number == 0:
                            assert len(np.unique(block.edge_pos.numpy())) == len(block.edge_pos)


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    return academic()


FORMS = ["csc", "chunked"]


@pytest.fixture(scope="module", params=FORMS)
def g(request: pytest.FixtureRequest, tmp_path_factory: Any, graph: TypedArrays) -> Any:
    with graph.create(tmp_path_factory.mktemp("mag") / "mag", topology=request.param, memory="64MiB") as opened:
        yield opened


def epochs(g: Any, strategy: Any, n: int = 2, **options: Any) -> list[HeteroMiniBatch]:
    sampler = NeighborSampler(g, options.pop("fanouts", [5, 5]), edges=True, redraw=options.pop("redraw", True))
    ids = np.arange(0, 3000, 3)
    with Loader(g, sampler, ("paper", ids), 100, strategy=strategy, **options) as loader:
        return [batch for _ in range(n) for batch in sorted(loader, key=lambda each: each.index)]


STRATEGIES = {
    "ondemand": "ondemand",
    "auto": "auto",
    "online": OnDemand(cache="100KiB", policy="lru"),
    "frequency": OnDemand(cache=0.1, policy="frequency"),
    "none": OnDemand(cache=None),
    "superbatch": Superbatch(length=3, cache="20KiB"),
    "fixed": Superbatch(length=4, cache=0.2, policy="degree"),
    "ginex": Ginex(length=4, cache="50KiB"),
    "streamed": Streamed(length=4, cache=0.1),
}


@pytest.mark.parametrize(("name", "g"), covering(STRATEGIES, FORMS), indirect=["g"])
def test_strategies_give_the_same_batches(g: Any, graph: TypedArrays, name: str) -> None:
    found = epochs(g, STRATEGIES[name])
    for batch in found:
        check_batch(graph, batch, edges=True)
    assert same(found, epochs(g, OnDemand(cache=None)))


def test_forms_give_the_same_batches(graph: TypedArrays, tmp_path: Path) -> None:
    with graph.create(tmp_path / "a") as a, graph.create(tmp_path / "b", topology="chunked", chunk_bytes="4KiB") as b:
        assert same(epochs(a, "ondemand"), epochs(b, "ondemand"))


@pytest.mark.parametrize(("budget", "edges", "g"), covering(["120KiB", "8MiB"], [False, True], FORMS), indirect=["g"])
def test_a_neighbour_cache_gives_the_same_batches(g: Any, graph: TypedArrays, budget: str, edges: bool) -> None:
    before = epochs(g, "ondemand")
    g.cache_neighbors(budget, edges=edges, progress=False)
    try:
        n_lists = g.topology.num_lists
        assert (g.neighbor_cache.n_cached == n_lists) == (budget == "8MiB")
        assert g.neighbor_cache.n_cached
        assert same(before, epochs(g, "ondemand"))
    finally:
        g.cache_neighbors(0)


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("options", [{}, {"importance_sampling": -1}, {"layer_dependency": True, "batch_dependency": 4}])
def test_layer_neighbour_sampling(g: Any, graph: TypedArrays, redraw: bool, options: dict[str, Any]) -> None:
    """Sources are drawn for all destinations of a type of edges together: about the fan-out of each, and fewer in all."""
    fanouts = {("paper", "cites", "paper"): [4, 2], ("author", "writes", "paper"): [1, 0]}
    sampler = LaborSampler(g, fanouts, edges=True, redraw=redraw, **options)
    with Loader(g, sampler, ("paper", np.arange(0, 3000, 2)), 500, strategy="ondemand") as loader:
        batches = list(loader)
    for batch in batches:
        check_batch(graph, batch, edges=True)
    own = [batch.blocks[-1] for batch in batches]
    for key, fanout in (("paper", "cites", "paper"), 4), (("author", "writes", "paper"), 1):
        degree = np.bincount(graph.edges[key][1], minlength=3000)[::2]
        drawn = sum(len(hop[key].src) for hop in own)
        expected = np.minimum(degree, fanout).sum()
        assert 0.95 * expected < drawn
        assert drawn < (1.05 if not options.get("importance_sampling") else 3) * expected
    assert not sum(len(batch.blocks[0]["institution", "employs", "author"].src) for batch in batches)


def test_rows_that_a_device_has(g: Any) -> None:
    before = epochs(g, OnDemand(cache=None))
    for strategy in (OnDemand(cache="30KiB"), Superbatch(length=3, cache="20KiB")):
        assert same(before, epochs(g, strategy, device_cache=0.2))


@pytest.mark.parametrize("redraw", [False, True])
def test_a_type_that_is_not_named_is_not_drawn_from(g: Any, graph: TypedArrays, redraw: bool) -> None:
    only = ("paper", "cites", "paper")
    for batch in epochs(g, "ondemand", 1, fanouts={only: [3, 2]}, redraw=redraw):
        check_batch(graph, batch, edges=True)
        assert {key for hop in batch.blocks for key, block in hop.items() if len(block.src)} == {only}
        assert not len(batch.input_ids["author"])


def test_seeds_of_another_type_and_repeated_ones(g: Any, graph: TypedArrays) -> None:
    sampler = NeighborSampler(g, [3, 3])
    table = np.array([5, 7, 5, 9, 7, 5])
    rows = np.arange(6) * 1.5
    with Loader(g, sampler, ("author", table), 4, labels=rows, strategy="ondemand", shuffle=False) as loader:
        first, second = loader
    assert first.seeds.tolist() == [5, 7, 9]
    assert first.seed_index.tolist() == [0, 1, 0, 2]
    assert first.y.tolist() == [0, 1.5, 3, 4.5]
    assert second.y.tolist() == [6, 7.5]
    assert first.seed_type == "author"


def test_labels_are_those_of_the_seeds_type(g: Any, graph: TypedArrays) -> None:
    with Loader(g, NeighborSampler(g, [3]), ("author", np.arange(9, 200)), 70, strategy="ondemand") as loader:
        for batch in loader:
            assert list(batch.labels) == ["y"]
            check_batch(graph, batch, edges=False)


def test_labels_that_some_lack(tmp_path: Path) -> None:
    """Labels as numbers, NaN where there is none, as MAG240M has them."""
    graph = academic(papers=200)
    graph.data["paper"] = {"y": np.where(np.arange(200) % 3, np.nan, np.arange(200.0))}
    with (
        graph.create(tmp_path / "g") as g,
        Loader(g, NeighborSampler(g, [2]), ("paper", np.arange(200)), 50, strategy="superbatch") as loader,
    ):
        for batch in loader:
            assert batch.y.dtype == torch.float64
            assert np.array_equal(batch.y.numpy(), graph.data["paper"]["y"][batch.seeds.numpy()], equal_nan=True)


@pytest.mark.parametrize("make", [NeighborSampler, LaborSampler])
def test_relations_that_differ_in_their_name_alone(tmp_path: Path, make: Any) -> None:
    """Each draws for itself in the one sampler; in the other they share the numbers of their sources, and draw the same."""
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, 300, 6000), rng.integers(0, 100, 6000)])
    graph = TypedArrays({"a": 300, "b": 100}, {("a", "one", "b"): pairs, ("a", "two", "b"): pairs.copy()})
    with graph.create(tmp_path / "g") as g:
        with Loader(g, make(g, [4], edges=True), ("b", np.arange(100)), 100, features=[], strategy="ondemand") as loader:
            (batch,) = loader
        check_batch(graph, batch, edges=True)
        one, two = (set(block.edge_pos.tolist()) for block in batch.blocks[0].values())
        if make is NeighborSampler:
            assert len(one) == len(two) == 400
            assert len(one & two) < 120  # of lists of 60, by chance 27
        else:
            assert one == two


def test_a_mask_is_of_the_type(g: Any) -> None:
    mask = np.zeros(1500, bool)
    mask[[3, 8]] = True
    with Loader(g, NeighborSampler(g, [2]), ("author", mask), 10, strategy="ondemand") as loader:
        (batch,) = loader
    assert sorted(batch.seeds.tolist()) == [3, 8]


@pytest.fixture(scope="module")
def widths() -> TypedArrays:
    """Rows of papers and authors of different widths, and authors with a second feature."""
    graph = academic().draw("x", 3, author=5)
    graph.features["author"]["age"] = np.random.default_rng(3).integers(0, 9, (1500, 1))
    return graph


@pytest.fixture(scope="module")
def of_widths(tmp_path_factory: Any, widths: TypedArrays) -> Any:
    with widths.create(tmp_path_factory.mktemp("widths") / "g", memory="64MiB") as opened:
        yield opened


NAMED: dict[str, tuple[Any, set[str]]] = {  # what a loader is asked for, and what its batches have
    "x": ("x", {"x"}),
    "both": (["x", "age"], {"x", "age"}),
    "one each": ({"paper": "x", "author": ["age"]}, {"x", "age"}),
    "author": ({"author": ["x", "age"]}, {"x", "age"}),
    "none": ([], set()),
}


@pytest.mark.parametrize(("name", "named"), covering(STRATEGIES, NAMED))
def test_features_of_different_types(of_widths: Any, widths: TypedArrays, name: str, named: str) -> None:
    features, names = NAMED[named]
    found = epochs(of_widths, STRATEGIES[name], features=features)
    for batch in found:
        check_batch(widths, batch, edges=True)
        assert set(batch.features) == names
    assert same(found, epochs(of_widths, OnDemand(cache=None), features=features))


@pytest.mark.parametrize("make", [Superbatch, Ginex, Streamed])
@pytest.mark.parametrize("policy", ["belady", "degree"])
def test_each_width_has_a_cache_and_plans(of_widths: Any, make: Any, policy: str) -> None:
    """A cache of a share of the rows holds that share of each type's, and its hits are planned."""
    sampler = NeighborSampler(of_widths, [5, 5])
    with Loader(of_widths, sampler, ("paper", np.arange(3000)), 100, strategy=make(length=8, cache=0.5, policy=policy)) as loader:
        held = {"paper/x": 0, "author/x": 0}
        for _ in loader:  # under Ginex, neighbour lists have the memory in between
            held = {store: max(most, of_widths.columns[store].cache.capacity) for store, most in held.items()}
        assert held == {"paper/x": 1500, "author/x": 750}
        stats = loader.stats()
    assert stats["hits"]["host"] > stats["rows"] // 3
    whole = 0
    with Loader(of_widths, sampler, ("paper", np.arange(3000)), 100, strategy=OnDemand(cache=None)) as loader:
        for batch in loader:
            whole += sum(len(rows) for of_types in batch.features.values() for rows in of_types.values())
    assert stats["rows"] == sum(stats["hits"].values()) == whole


STRATEGIES_OF_MANY = [
    "ondemand",
    "auto",
    Superbatch(length=2, cache=0.2),
    Ginex(length=2, cache=0.2),
    Streamed(length=2, cache=0.2),
]


def test_three_hundred_types_of_edges(tmp_path: Path) -> None:
    """Whole lists reach what sets reach; all strategies and a pack give the same batches."""
    rng, n = np.random.default_rng(5), {"a": 90, "b": 40}
    kinds = [("a", "b")[i % 2] for i in range(300)]
    edges = {
        (kind, f"relation {i}", "a"): np.stack([rng.integers(0, n[kind], 30), rng.integers(0, 90, 30)])
        for i, kind in enumerate(kinds)
    }
    graph = TypedArrays(n, edges).draw("x", 6, a=8, b=16)
    seeds = "a", np.arange(40)
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        sampler = NeighborSampler(g, [-1, 2], edges=True)
        with Loader(g, sampler, seeds, 10, strategy=OnDemand(cache=None), features="x") as loader:
            want = list(loader)
        for batch in want:
            check_batch(graph, batch, edges=True)
            (hop,) = reached(graph, "a", batch.seeds.numpy(), 1)
            assert {key: len(block.src) for key, block in batch.blocks[-1].items()} == {key: len(hop[key]) for key in edges}
        for strategy in STRATEGIES_OF_MANY:
            with Loader(g, sampler, seeds, 10, strategy=strategy, features="x") as loader:
                assert same(list(loader), want)
        with featstore.sample_offline(g, sampler, seeds, 10, path=tmp_path / "p", progress=False) as pack:
            with Loader(g, strategy=featstore.Packed(pack, cache=0.2), features="x") as loader:
                assert same(sorted(loader, key=lambda batch: batch.index), want)


@pytest.mark.parametrize("seeds", [[], np.empty(0, np.int64)])
def test_seeds_of_a_type_without_nodes(tmp_path: Path, seeds: Any) -> None:
    graph = academic(papers=200)
    graph.n["tag"] = 0
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        with Loader(g, NeighborSampler(g, [2]), ("tag", seeds), 5, strategy="ondemand") as loader:
            assert (len(loader), list(loader)) == (0, [])
        with pytest.raises(IndexError, match="seed 0 at position 0 is not a node: the graph has none"):
            Loader(g, NeighborSampler(g, [2]), ("tag", [0]), 5, strategy="ondemand")


MADE: list[tuple[Any, dict[str, Any]]] = [
    (OnDemand, {}),
    (OnDemand, {"policy": "lru"}),
    *((each, {"length": 8}) for each in (Superbatch, Ginex, Streamed)),
    (Streamed, {}),
]
SIZED = [*((*each, "auto") for each in MADE[:-1]), *((*each, "2MiB") for each in MADE)]


@pytest.fixture(scope="module")
def many_papers(tmp_path_factory: pytest.TempPathFactory) -> tuple[TypedArrays, Path]:
    graph, path = academic(papers=20_000).draw("x", 4, paper=128, institution=64), tmp_path_factory.mktemp("many") / "g"
    graph.create(path).close()
    return graph, path


@pytest.mark.parametrize(("make", "options", "size"), one_in(2, SIZED, 3))
def test_memory_goes_where_it_is_asked_for(
    many_papers: tuple[TypedArrays, Path], make: Any, options: dict[str, Any], size: str
) -> None:
    """Of institutions, which are few and in every batch, a larger share is in memory than of papers; bytes given are kept."""
    strategy = make(cache=size, **options)
    graph, path = many_papers
    with featstore.open(path, memory="10MiB" if size == "auto" else "64MiB") as g:
        sampler, shares = NeighborSampler(g, [4, 4, 2]), dict[str, float]()
        with Loader(g, sampler, ("paper", np.arange(400)), 10, strategy=strategy) as loader:
            for batch in loader:
                check_batch(graph, batch, edges=False)
                caches = {name: store.cache for name, store in g.columns.items()}
                if None in caches.values():  # Ginex has neighbour lists in their place by turns
                    continue
                found = {name: cache.capacity / cache.n for name, cache in caches.items()}
                shares = {name: max(shares.get(name, 0.0), share) for name, share in found.items()}
                held = sum(cache.nbytes for cache in caches.values())
                assert size == "auto" or held <= 2 << 20
            assert 0 < 1.5 * shares["paper/x"] < shares["institution/x"]


@pytest.mark.parametrize("make", [Superbatch, Streamed])
def test_estimating_a_length_leaves_the_caches(of_widths: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a run replaces caches: an estimate of bytes that are divided by what a batch asks for drops none."""
    run = make.run

    def estimating(self: Any, context: Any) -> Any:
        held = {name: store.cache for name, store in of_widths.columns.items()}
        assert self.estimate_length(context).n_batches >= 1
        assert all(each is not None and of_widths.columns[name].cache is each for name, each in held.items())
        return run(self, context)

    of_widths.cache(None, 0.2)
    monkeypatch.setattr(make, "run", estimating)
    epochs(of_widths, make(cache="64KiB"))
    of_widths.cache(None, 0)


@pytest.mark.parametrize("features", [{"paper": "x"}, {"author": "x"}, "x"])
def test_auto_counts_the_rows_of_all_features(tmp_path: Path, features: Any) -> None:
    """Its estimates, of batches of a sample, are of as many rows as an epoch without a cache asks for."""
    graph = academic(papers=8000).draw("x", 4, paper=128, author=32, institution=64)
    with graph.create(tmp_path / "g", memory="24MiB") as g:
        strategy = featstore.Auto(cache=None)
        with Loader(
            g, NeighborSampler(g, [4, 4]), ("paper", np.arange(2000)), 50, strategy=strategy, features=features
        ) as loader:
            asked = sum(len(rows) for batch in loader for of_types in batch.features.values() for rows in of_types.values())
            estimates = loader.stats()["auto"]["estimates"]
    loaded = [each["rows_loaded"] for each in estimates if each["strategy"] == "ondemand"]
    assert len(loaded) == 3
    assert all(0.97 * asked < rows < 1.03 * asked for rows in loaded)


def test_misses_of_each_width_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = academic(papers=12_000).draw("x", 3, author=24)
    taken: dict[str, int] = {}
    take = RowPrefetcher.take

    def counting(self: RowPrefetcher, position: int, name: str) -> Any:
        rows = take(self, position, name)
        taken[name] = taken.get(name, 0) + (0 if rows is None else len(rows))
        return rows

    monkeypatch.setattr(RowPrefetcher, "take", counting)
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        sampler, strategy = NeighborSampler(g, [5, 5], edges=True), Superbatch(length=20, cache="60KiB")
        with Loader(g, sampler, ("paper", np.arange(1000)), 10, strategy=strategy) as loader:
            for batch in loader:
                check_batch(graph, batch, edges=True)
    assert min(taken["paper/x"], taken["author/x"]) > 1000


EDGE_CACHES = {
    "ondemand": OnDemand(edge_cache=0.3),
    "lru": OnDemand(edge_cache="400KiB", edge_policy="lru"),
    "superbatch": Superbatch(length=4, edge_cache=0.3),
    "small": Superbatch(length=3, cache=None, edge_cache="300KiB"),
    "ginex": Ginex(length=4, edge_cache=0.3),
    "streamed": Streamed(length=4, edge_cache=0.3),
    "auto": featstore.Auto(edge_cache=0.3),
}


@pytest.mark.parametrize(("name", "redraw"), covering(EDGE_CACHES, [True, False]))
def test_caches_of_edge_features(tmp_path: Path, name: str, redraw: bool) -> None:
    """Each type of edges has a cache of its own, whose plans are over the numbers of its edges."""
    graph, rng = academic(), np.random.default_rng(5)
    for key, names in {("author", "writes", "paper"): ["w", "t"], ("paper", "cites", "paper"): ["w"]}.items():
        n = graph.edges[key].shape[1]
        graph.edge_features[key] = {each: rng.standard_normal((n, 1 + len(names))).astype(np.float32) for each in names}
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        sampler, ids = NeighborSampler(g, [6, 6], edges=True, redraw=redraw), np.arange(0, 3000, 3)
        plain = epochs(g, OnDemand(cache=None), fanouts=[6, 6], redraw=redraw, edge_features=["w", "t"])
        assert all(store.cache is None for store in g.edge_features.values())
        with Loader(g, sampler, ("paper", ids), 100, strategy=EDGE_CACHES[name], edge_features=["w", "t"]) as loader:
            found = [batch for _ in range(2) for batch in sorted(loader, key=lambda each: each.index)]
            n_loaded = loader.stats()["edge_features"]["rows_loaded"]
        caches = [store.cache for store in g.edge_features.values()]
        assert all(cache.capacity for cache in caches)
        assert len({cache.capacity for cache in caches}) == 2  # one a type of edges
        for batch in found:
            check_batch(graph, batch, edges=True)
            assert list(batch.edge_features) == ["w", "t"]
        assert same(found, plain)
        rows = (rows for batch in found for hops in batch.edge_features.values() for hop in hops for rows in hop.values())
        assert n_loaded < sum(map(len, rows))


def test_what_serves_one_width_says_so(of_widths: Any) -> None:
    with pytest.raises(OptionError, match="an instance plans caches of the same rows"):
        epochs(of_widths, Superbatch(policy=featstore.get_policy("belady")))
    for strategy in OnDemand(cache="200B"), Superbatch(cache="200B"):
        with pytest.raises(BudgetError, match=r"one row takes \d+ bytes, not 200; at least"):
            epochs(of_widths, strategy)


@pytest.mark.parametrize("name", one_in(3, [*STRATEGIES]))
def test_a_feature_that_types_share_is_one_column(tmp_path: Path, name: str) -> None:
    """Types whose ``x`` has one form lie in one file: one plan and one cache serve all of them, or some."""
    graph = academic().draw("x", 3, np.float16, institution=16, author=16)
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        assert list(g.columns) == ["paper,author,institution/x"]
        assert list(g.features) == ["paper/x", "author/x", "institution/x"]
        for kind in graph.n:
            store, rows = g[kind].features["x"], graph.features[kind]["x"]
            assert len(store) == graph.n[kind]
            assert np.array_equal(store[[3, 0, -1]].numpy(), rows[[3, 0, -1]])
            assert np.array_equal(store[:].numpy(), rows)
            with pytest.raises(IndexError):
                store[graph.n[kind]]
            assert np.array_equal(pickle.loads(pickle.dumps(store))[[2]].numpy(), rows[[2]])
        for features in ("x", {"paper": "x", "institution": "x"}):
            found = epochs(g, STRATEGIES[name], features=features)
            for batch in found:
                check_batch(graph, batch, edges=True)
                assert list(batch.x) == ["paper", "author", "institution"] if features == "x" else ["paper", "institution"]
            assert same(found, epochs(g, OnDemand(cache=None), features=features))
        g.verify(progress=False)


def test_caches_of_features(tmp_path: Path) -> None:
    graph = academic()
    graph.features["institution"] = {"x": np.ones((150, 16), np.float16), "z": np.ones((150, 3))}
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        for size, name in ("40KiB", "institution/x"), (0.3, "paper/x"), ("90KiB", None), (0.5, None), ("auto", None):
            g.cache(name, size)
            caches = {column: store.cache for column, store in g.columns.items()}
            assert caches["paper,institution/x"].capacity
            assert (caches["institution/z"] is not None) == (name is None)
            assert np.array_equal(g.columns["paper,institution/x"][:3000].numpy(), graph.features["paper"]["x"])
            g.cache(None, 0)
        with pytest.raises(KeyError, match="no feature 'author/x'"):
            g.cache("author/x", 0.5)


def test_copies_of_a_batch(g: Any, graph: TypedArrays) -> None:
    batch = epochs(g, "ondemand", 1)[0]
    copied = batch.to("cpu")
    assert all(map(torch.equal, tensors(batch), tensors(copied)))
    assert batch.nbytes == copied.nbytes > 0
    assert "paper=" in repr(batch)
    assert batch.to("meta").x["paper"].is_meta
    assert batch.x["paper"].dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"seeds": np.arange(3)}, TypeError, r"\(type, ids\)"),
        ({"seeds": ("venue", [1])}, ValueError, "no node type 'venue'"),
        ({"seeds": ("author", [1500])}, IndexError, "seed 1500 at position 0"),
        ({"seeds": ("author", np.zeros(7, bool))}, ValueError, r"one entry a node \(1500\)"),
        ({"seeds": ("author", np.arange(1500).astype(np.uint8) % 2)}, ValueError, "look like a mask"),
        ({"seeds": ("author", None)}, TypeError, r"names no nodes; all of the type are \('author', np.arange\(1500\)\)"),
        ({"seeds": ("author", 3)}, ValueError, r"one-dimensional, not of shape \(\)"),
        ({"seeds": ("author", np.empty((0, 2), np.int64))}, ValueError, r"one-dimensional, not of shape \(0, 2\)"),
        ({"features": "z"}, ValueError, "no type has 'z'"),
        ({"features": {"author": "x"}}, ValueError, "'author' has no 'x'"),
        ({"features": {"venue": "x"}}, ValueError, "no node type 'venue'"),
        ({"features": ["x", "x"]}, ValueError, "twice"),
        ({"labels": "z"}, ValueError, "no 'z'; it has"),
        ({"history": featstore.History(4)}, NotImplementedError, "history"),
        ({"sampler": lambda seeds: None}, NotImplementedError, "several types of edges"),
    ],
)
def test_arguments_that_do_not_fit(g: Any, change: dict[str, Any], error: type[Exception], text: str) -> None:
    options = {"sampler": NeighborSampler(g, [2, 2]), "seeds": ("paper", np.arange(9)), "strategy": "ondemand", **change}
    with pytest.raises(error, match=text):
        Loader(g, options.pop("sampler"), options.pop("seeds"), 3, **options)


def test_a_sampler_that_draws_one_type_says_so(g: Any) -> None:
    with pytest.raises(NotImplementedError, match="LayerSampler does not sample several types of edges"):
        featstore.LayerSampler(g, [3, 3])


def test_a_loader_goes_on_where_it_stood(g: Any) -> None:
    def loader() -> Loader:
        return Loader(g, NeighborSampler(g, [3, 3]), ("paper", np.arange(900)), 100, strategy="ondemand")

    with loader() as one:
        whole = list(one)
    with loader() as one:
        it = iter(one)
        first = [next(it) for _ in range(4)]
        state = one.state_dict()
        it.close()
    with loader() as one:
        one.load_state_dict(state)
        assert same(whole, first + list(one))
