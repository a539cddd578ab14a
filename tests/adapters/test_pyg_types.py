"""Graphs of several types, one of them real, against PyG's own loader over ``HeteroData`` in memory; seeds that repeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import NeighborSampler
from featstore.strategies.registry import available_strategies, find_strategy
from tests.adapters.test_pyg_hetero import whole_of
from tests.support.flights import flights
from tests.support.pyg import LinkNeighborLoader, NeighborLoader, torch_geometric, use_stand_in
from tests.support.sampled import covering
from tests.support.typed import TypedArrays, academic, random_types

from featstore.adapters.pyg import NeighborLoader as OwnLoader  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings
from featstore.adapters.pyg import Sampler, stores  # isort: skip

pytestmark = [
    pytest.mark.shares_resources,
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker"),  # on one core
]

GRAPHS = {"academic": lambda: academic(papers=300), "random": lambda: random_types(25), "flights": flights}
SEEDS = {"academic": "paper", "random": "t0", "flights": "plane"}
STRATEGIES = {
    "ondemand": featstore.OnDemand(cache=None),
    "cached": "ondemand",
    "superbatch": featstore.Superbatch(cache=0.1, length=2),
    "ginex": featstore.Ginex(cache=0.1, length=2),
    "streamed": featstore.Streamed(cache=0.1, length=2),
    "auto": "auto",
}


@pytest.fixture(scope="module", params=list(GRAPHS))
def case(request: Any, tmp_path_factory: Any) -> Any:
    """A graph, as PyG holds it in memory and as a dataset in both forms, and seeds of which some repeat."""
    arrays = GRAPHS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    kind = SEEDS[request.param]
    seeds = np.random.default_rng(0).integers(0, arrays.n[kind], 40)
    forms = {form: arrays.create(folder / form, topology=form, memory="128MiB") for form in ("csc", "chunked")}
    yield SimpleNamespace(name=request.param, arrays=arrays, kind=kind, seeds=seeds, forms=forms)
    for g in forms.values():
        g.close()


def fanouts_of(arrays: TypedArrays, depth: int = 2) -> dict[Any, list[int]]:
    return {key: [-1] * depth for key in arrays.edges}


def memory(arrays: TypedArrays) -> Any:
    """Make PyG's data of the graph, with ``x`` where the dataset has one."""
    data = whole_of(arrays)
    for kind in arrays.n:
        if kind not in arrays.features:
            del data[kind].x
    return data


def per_hop(values: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])


def check_same(mine: Any, its: Any, arrays: TypedArrays, kind: str, *, ordered: bool = False) -> None:
    """Check that batches have the same seeds in order and, hop by hop, the same nodes and edges; rows, labels and numbers.

    PyG goes through a list in the order of the input, the library by source: the order within a hop is no part of what must be
    equal, unless the input is in this order. torch-sparse does not say where a hop ends: its nodes and edges are divided as the
    library's, in the same order of hops.
    """
    n = its[kind].batch_size
    assert mine[kind].batch_size == n
    assert mine[kind].n_id[:n].equal(its[kind].n_id[:n])
    assert mine[kind].input_id.equal(its[kind].input_id)
    assert mine.validate()
    for name in arrays.n:
        own, other = mine[name], its[name]
        sizes = list(own.num_sampled_nodes)
        assert not is_counted(its) or sizes == list(other.num_sampled_nodes), name
        assert own.num_nodes == len(own.n_id) == len(other.n_id) == sum(sizes)
        for a, b in zip(*(per_hop(each.n_id.numpy(), sizes) for each in (own, other)), strict=True):
            assert np.array_equal(a if ordered else np.sort(a), b if ordered else np.sort(b)), name
        if name in arrays.features:
            for each in (own, other):
                assert np.array_equal(each.x.numpy(), arrays.features[name]["x"][each.n_id.numpy()])
        if name in arrays.data and name == kind:
            for each in (own, other):
                assert np.array_equal(each.y[:n].numpy(), arrays.data[name]["y"][each.n_id[:n].numpy()])
    for key, pairs in arrays.edges.items():
        sizes, hops = list(mine[key].num_sampled_edges), []
        assert not is_counted(its) or sizes == list(its[key].num_sampled_edges), key
        assert mine[key].edge_index.shape[1] == its[key].edge_index.shape[1] == sum(sizes), key
        for each in (mine, its):
            local, numbers = each[key].edge_index.numpy(), each[key].e_id.numpy()
            ends = np.stack([each[key[0]].n_id.numpy()[local[0]], each[key[2]].n_id.numpy()[local[1]]])
            assert np.array_equal(pairs[:, numbers], ends), key
            # Of a seed that repeats, each has its edges: the place of the destination tells them apart.
            found = np.stack([numbers, np.where(local[1] < n, local[1], -1) if key[2] == kind else -np.ones_like(numbers)])
            hops.append([hop if ordered else hop[:, np.lexsort(hop)] for hop in _split(found, sizes)])
        assert all(np.array_equal(a, b) for a, b in zip(*hops, strict=True)), key


def is_counted(data: Any) -> bool:
    """Tell whether PyG's kernel counted the nodes and edges of each hop; torch-sparse alone does not."""
    counted = all("num_sampled_nodes" in data[kind] for kind in data.node_types)
    assert counted or torch_geometric.typing.WITH_TORCH_SPARSE
    return counted


def _split(values: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1], axis=1)


@pytest.mark.parametrize(("workers", "repeats"), covering([0, 2], [False, True]))
def test_the_batches_are_those_of_pyg(case: Any, workers: int, repeats: bool, monkeypatch: Any) -> None:
    """Of three loaders: the library's, PyG's over its stores, and PyG's over data in memory, which is what they must give."""
    use_stand_in(monkeypatch)
    arrays, kind, g = case.arrays, case.kind, case.forms["csc"]
    seeds = torch.from_numpy(case.seeds if repeats else np.unique(case.seeds))
    assert repeats == (len(seeds.unique()) < len(seeds))
    options = {"num_neighbors": fanouts_of(arrays), "input_nodes": (kind, seeds), "batch_size": 15}
    in_memory = NeighborLoader(memory(arrays), **options, num_workers=workers)
    sampler = Sampler(NeighborSampler(g, fanouts_of(arrays), redraw=False, edges=True))
    over_stores = NeighborLoader(stores(g), **options, num_workers=workers, neighbor_sampler=sampler)
    with OwnLoader(g, **options, num_workers=workers, edges=True, strategy="ondemand", edge_features=[]) as own:
        assert len(own) == len(over_stores) == len(in_memory) > 1
        for mine, through, its in zip(own, over_stores, in_memory, strict=True):
            check_same(mine, its, arrays, kind)
            check_same(through, its, arrays, kind)


def test_the_order_is_pygs_where_the_edges_come_in_the_order_of_lists(tmp_path: Any, monkeypatch: Any) -> None:
    use_stand_in(monkeypatch)
    arrays = academic(papers=200)
    # The types of edges in the order of their names, in which torch-sparse takes them.
    arrays.edges = {key: np.ascontiguousarray(pairs[:, np.lexsort(pairs)]) for key, pairs in sorted(arrays.edges.items())}
    options = {"num_neighbors": fanouts_of(arrays, 3), "input_nodes": ("author", torch.tensor([4, 99, 0, 17])), "batch_size": 4}
    with arrays.create(tmp_path / "g", memory="64MiB") as g:
        (its,) = NeighborLoader(memory(arrays), **options, is_sorted=True)  # else PyG sorts, and may swap edges of a list
        with OwnLoader(g, **options, edges=True, strategy="ondemand") as own:
            (mine,) = own
        check_same(mine, its, arrays, "author", ordered=True)
        assert all(mine[key].edge_index.equal(its[key].edge_index) for key in arrays.edges)


@pytest.mark.parametrize(("strategy", "form"), covering(STRATEGIES, ["csc", "chunked"]))
def test_all_strategies_and_both_forms_give_the_same_batches(case: Any, strategy: str, form: str) -> None:
    """Each strategy that takes types; the reference reads the batches' rows from the CSC form, without a cache."""
    takes = {name for name in available_strategies() if find_strategy(name).takes_types}
    listed = {str(getattr(each, "name", each)) for each in STRATEGIES.values()}
    assert takes == listed | {"packed"}, "packs are compared below"
    arrays, kind = case.arrays, case.kind

    def batches(g: Any, how: Any) -> list[Any]:
        options = {"num_neighbors": fanouts_of(arrays), "input_nodes": (kind, case.seeds), "batch_size": 10, "shuffle": True}
        with OwnLoader(g, **options, edges=True, features="x", strategy=how, seed=3) as loader:
            return [batch for _ in range(2) for batch in loader]

    want = batches(case.forms["csc"], STRATEGIES["ondemand"])
    found = batches(case.forms[form], STRATEGIES[strategy])
    assert len(found) == len(want) == 8
    check_equal(found, want)


def check_equal(found: list[Any], want: list[Any]) -> None:
    for mine, its in zip(found, want, strict=True):
        assert mine.metadata() == its.metadata()
        for name, store in zip([*its.node_types, *its.edge_types], its.stores[1:], strict=True):
            assert set(mine[name].keys()) == set(store.keys())
            for field, value in store.items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert same(mine[name][field], value), (name, field)


@pytest.mark.parametrize(("form", "policy"), covering(["csc", "chunked"], ["belady", "frequency"]))
def test_packs_give_the_same_batches(case: Any, form: str, policy: str, tmp_path: Any) -> None:
    """As on demand, without a cache, from the CSC form; packs take each seed once."""
    seeds, options = (case.kind, np.unique(case.seeds)), {"batch_size": 10, "seed": 3}
    fanouts = fanouts_of(case.arrays)
    g = case.forms[form]
    with featstore.sample_offline(
        g, NeighborSampler(g, fanouts), seeds, epochs=2, path=tmp_path / "p", progress=False, **options
    ) as pack:
        strategy = featstore.Packed(pack, cache=0.1, policy=policy)
        with featstore.Loader(g, strategy=strategy, features="x", shuffle=policy == "frequency") as loader:
            found = {(epoch, batch.index): batch.to_pyg() for epoch in range(2) for batch in loader}
    whole = case.forms["csc"]
    plain = featstore.Loader(
        whole, NeighborSampler(whole, fanouts), seeds, **options, shuffle=True, features="x", strategy=STRATEGIES["ondemand"]
    )
    with plain as loader:
        want = {(epoch, batch.index): batch.to_pyg() for epoch in range(2) for batch in loader}
    assert len(want) > 2
    check_equal([found[key] for key in want], list(want.values()))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_subgraph_for_each_seed(case: Any, repeats: bool, monkeypatch: Any) -> None:
    """Each has the nodes and edges of the batch that PyG's own loader makes of its seed alone; links have none, by name."""
    use_stand_in(monkeypatch)
    arrays, kind, g = case.arrays, case.kind, case.forms["csc"]
    seeds = torch.from_numpy(case.seeds[:9] if repeats else np.unique(case.seeds)[:9])
    seeds = torch.cat([seeds, seeds[:2]]) if repeats else seeds
    options = {"num_neighbors": fanouts_of(arrays), "input_nodes": (kind, seeds)}
    alone = list(NeighborLoader(memory(arrays), **options, batch_size=1))
    sampler = Sampler(NeighborSampler(g, fanouts_of(arrays), redraw=False, edges=True, disjoint=True))
    (through,) = NeighborLoader(stores(g), **options, batch_size=len(seeds), neighbor_sampler=sampler)
    with OwnLoader(g, **options, batch_size=len(seeds), edges=True, disjoint=True, strategy="ondemand", edge_features=[]) as own:
        (mine,) = own
    distinct = torch.from_numpy(seeds.numpy()[np.sort(np.unique(seeds, return_index=True)[1])])
    for found in (mine, through):
        assert found.validate()
        assert distinct[found[kind].batch[: len(seeds)]].equal(seeds)
        for number, seed in enumerate(distinct):
            its = alone[int((seeds == seed).nonzero()[0])]
            for name in arrays.n:
                ids = found[name].n_id[found[name].batch == number]
                assert sorted(set(ids.tolist())) == sorted(its[name].n_id.tolist())
                assert repeats or len(ids) == len(its[name].n_id)
            for key in arrays.edges:
                of = found[key[0]].batch[found[key].edge_index[0]]
                assert of.equal(found[key[2]].batch[found[key].edge_index[1]])
                edges = found[key].e_id[of == number]
                assert sorted(set(edges.tolist())) == sorted(set(its[key].e_id.tolist()))
                assert repeats or len(edges) == len(its[key].e_id)
    links = LinkNeighborLoader(
        stores(g), [], edge_label_index=(next(iter(arrays.edges)), torch.zeros(2, 1, dtype=torch.int64)), neighbor_sampler=sampler
    )
    with pytest.raises(NotImplementedError, match="disjoint samples of links"):
        next(iter(links))


EMPTIES = {
    "a type without nodes": "tag",
    "all of its nodes": ("tag", None),
    "no ids": ("paper", torch.empty(0, dtype=torch.int64)),
    "an empty list": ("paper", []),
    "no ids of a type without nodes": ("tag", torch.empty(0, dtype=torch.int64)),
    "a mask of no True": ("paper", torch.zeros(60, dtype=torch.bool)),
    "a mask of a type without nodes": ("tag", torch.empty(0, dtype=torch.bool)),
}


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: Any) -> Any:
    """Papers and a type without nodes, with edges of types that have none."""
    arrays = academic(papers=60)
    arrays.n["tag"] = 0
    arrays.edges |= {key: np.empty((2, 0), np.int64) for key in (("tag", "of", "paper"), ("paper", "has", "tag"))}
    arrays.data["tag"] = {"y": np.empty(0, np.int64)}
    with arrays.draw("x", 1, tag=3).create(tmp_path_factory.mktemp("tagged") / "g", memory="64MiB") as g:
        yield arrays, g


@pytest.mark.parametrize("strategy", ["ondemand", "streamed", "auto"])
@pytest.mark.parametrize("nodes", EMPTIES.values(), ids=EMPTIES)
def test_no_seeds_make_an_epoch_without_batches(tagged: Any, nodes: Any, strategy: str, monkeypatch: Any) -> None:
    """As PyG's own loader, but that torch's refuses to shuffle nothing; with each option of batches, and epoch after epoch."""
    use_stand_in(monkeypatch)
    arrays, g = tagged
    options = {"num_neighbors": fanouts_of(arrays), "input_nodes": nodes, "batch_size": 2}
    assert list(NeighborLoader(memory(arrays), **options)) == []
    for more in ({}, {"shuffle": True, "drop_last": True}, {"edges": True, "num_workers": 2}, {"disjoint": True}):
        with OwnLoader(g, **options, **more, strategy=strategy) as own:
            assert [len(own), list(own), list(own)] == [0, [], []]


def test_a_type_without_nodes_in_batches(tagged: Any, monkeypatch: Any) -> None:
    """It has rows and edges of length 0, as PyG's; a node of it is none of the graph's."""
    use_stand_in(monkeypatch)
    arrays, g = tagged
    options = {"num_neighbors": fanouts_of(arrays), "input_nodes": ("paper", torch.tensor([7, 3])), "batch_size": 2}
    (its,) = NeighborLoader(memory(arrays), **options)
    with OwnLoader(g, **options, edges=True, strategy="ondemand") as own:
        (mine,) = own
    check_same(mine, its, arrays, "paper")
    assert mine["tag"].x.shape == its["tag"].x.shape == (0, 3)
    assert mine["tag", "of", "paper"].edge_index.shape == (2, 0)
    options["input_nodes"] = "tag", torch.tensor([0])
    with pytest.raises(IndexError, match="seed 0 at position 0 is not a node: the graph has none"):
        OwnLoader(g, **options)


def test_flights_have_what_their_tables_say() -> None:
    """The graph is the real one: flights of a plane share its tail number, and New York has three airports."""
    arrays = flights()
    assert arrays.n == {"flight": 336776, "plane": 3322, "airport": 1458, "weather": 26115}
    assert len(np.unique(arrays.edges["flight", "leaves", "airport"][1])) == 3
    for key, pairs in arrays.edges.items():
        assert pairs[0].max() < arrays.n[key[0]]
        assert pairs[1].max() < arrays.n[key[2]]
    degree = np.bincount(arrays.edges["flight", "leaves", "airport"][0])
    assert (degree == 1).all()
    assert (arrays.data["flight"]["y"] == 1).sum() > 50_000
