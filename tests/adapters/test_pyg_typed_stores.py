"""Stores and samplers of PyG over a graph of several types: attributes, layouts, samples of nodes and links, refusals."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import LaborSampler, NeighborSampler, OptionError
from tests.adapters.test_pyg_hetero import whole_of
from tests.support.pyg import (
    HeteroSamplerOutput,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    NodeSamplerInput,
    use_stand_in,
)
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import CITES, EMPLOYS, WRITES, TypedArrays, academic, reached

from featstore.adapters.pyg import NeighborLoader as OwnLoader  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings
from featstore.adapters.pyg import Sampler, stores  # isort: skip
from featstore.adapters.pyg.sampler import fanouts_of  # isort: skip
from torch_geometric.sampler import EdgeSamplerInput, NumNeighbors  # isort: skip

pytestmark = [pytest.mark.usefixtures("small_pieces"), pytest.mark.shares_resources]


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    made = academic(papers=400)
    made.features["paper"]["z"] = np.arange(400, dtype=np.float32).reshape(-1, 1)
    made.data["paper"]["train_idx"] = np.arange(7)
    made.edges["author", "rev_employs", "institution"] = made.edges[EMPLOYS][::-1].copy()
    made.edges["paper", "quotes", "paper"] = np.empty((2, 0), np.int64)
    return made


@pytest.fixture(scope="module", params=["csc", "chunked"])
def g(request: Any, graph: TypedArrays, tmp_path_factory: Any) -> Any:
    with graph.create(tmp_path_factory.mktemp("g") / "g", topology=request.param, memory="64MiB") as opened:
        yield opened


def ask(sampler: Sampler, kind: str | None, nodes: Any) -> HeteroSamplerOutput:
    ids = torch.as_tensor(nodes)
    return sampler.sample_from_nodes(NodeSamplerInput(torch.arange(len(ids)), ids, input_type=kind))


# -- stores ----------------------------------------------------------------------------------------------------------------------


def test_attributes_of_types(g: Any, graph: TypedArrays) -> None:
    store, _ = stores(g)
    found = [(attr.group_name, attr.attr_name) for attr in store.get_all_tensor_attrs()]
    assert found == [("paper", "x"), ("paper", "y"), ("author", "y"), ("institution", "n_id")]
    x, ids = torch.from_numpy(graph.features["paper"]["x"]), torch.tensor([399, 0, 5, 5])
    for index in (ids, ids.numpy(), slice(3, 9), None, torch.arange(400) % 3 == 0):
        assert store["paper", "x", index].equal(x if index is None else x[index])
    assert store["paper", "z", ids].flatten().tolist() == ids.tolist()  # no part of a batch, but there
    assert store["author", "y", [4, 2]].equal(torch.from_numpy(graph.data["author"]["y"])[[4, 2]])
    assert store["institution", "n_id", [4, 2]].tolist() == [4, 2]
    assert store.get_tensor_size("institution", "n_id", None) == (20,)
    assert store.get_tensor_size("paper", "x", None) == (400, 16)
    assert store.view("paper").x[ids].equal(x[ids])
    assert len(store) == 4
    assert "paper/x" in repr(store)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["x"], [("paper", "x"), ("author", "n_id"), ("institution", "n_id")]),
        (["y", "z"], [("paper", "y"), ("paper", "z"), ("author", "y"), ("institution", "n_id")]),
        ({"paper": ["z"], "author": []}, [("paper", "z"), ("author", "n_id"), ("institution", "n_id")]),
    ],
)
def test_attributes_that_are_named(g: Any, given: Any, expected: Any) -> None:
    store, _ = stores(g, given)
    assert [(attr.group_name, attr.attr_name) for attr in store.get_all_tensor_attrs()] == expected
    with pytest.raises(KeyError, match="no attribute 'w' of 'paper'"):
        store.get_tensor("paper", "w", None)


def test_attributes_that_are_not_there(g: Any, small: Any) -> None:
    store, _ = stores(g)
    refuses(KeyError, "the types of nodes are 'paper', 'author', 'institution'", lambda: store["venue", "x", None])
    refuses(KeyError, "no attribute 'x' of 'author'; there is 'y'", lambda: store["author", "x", [1]])
    refuses(KeyError, "no attribute 'n_id' of 'author'", lambda: store["author", "n_id", [1]])
    refuses(KeyError, "give a type of nodes", lambda: store[None, "x", [1]])
    for name in ("x", "y"):
        refuses(IndexError, "", lambda: store["paper", name, [400]])
    refuses(IndexError, "", lambda: store["institution", "n_id", [20]])
    refuses(KeyError, "no type has a feature or node data 'w'", lambda: stores(g, ["w"]))
    refuses(KeyError, "no node type 'venue'", lambda: stores(g, {"venue": ["x"]}))
    refuses(KeyError, "author/x", lambda: stores(g, {"author": ["x"]}))
    refuses(ValueError, "'paper/train_idx' of shape", lambda: stores(g, ["train_idx"]))
    with featstore.open(small.path, memory="64MiB") as one:
        refuses(KeyError, "no node type 'paper'; give a sequence of names", lambda: stores(one, {"paper": ["x"]}))


def test_a_type_with_features_of_which_none_is_x(tmp_path: Any) -> None:
    features = {"a": {"p": np.zeros((3, 1), np.float32), "q": np.zeros((3, 1), np.float32)}}
    made = TypedArrays({"a": 3}, {("a", "to", "a"): np.array([[0], [1]])}, features)
    with made.create(tmp_path / "g") as g:
        refuses(OptionError, "there is no feature 'x'", lambda: stores(g))
        assert len(stores(g, ["p"])[0]) == 1


def test_layouts_of_types(g: Any, graph: TypedArrays) -> None:
    _, store = stores(g)
    attrs = store.get_all_edge_attrs()
    assert [attr.edge_type for attr in attrs] == list(graph.edges)
    for (key, pairs), attr in zip(graph.edges.items(), attrs, strict=True):
        size = graph.n[key[0]], graph.n[key[2]]
        assert attr.size == size
        assert torch.stack(store[key, "coo"]).numpy().tolist() == pairs.tolist()  # in the order of the input
        ordered = pairs[:, np.lexsort(pairs)]
        row, colptr = store.get_edge_index(key, "csc", True, size)
        assert row.tolist() == ordered[0].tolist()
        assert colptr.tolist() == np.searchsorted(ordered[1], np.arange(size[1] + 1)).tolist()
        assert torch.stack(store.get_edge_index(key, "coo", True)).tolist() == ordered.tolist()
        by_row, by_col, perm = (each[key] for each in store.csr([key]))
        assert np.array_equal(ordered[:, perm.numpy()][1], by_col.numpy())
        assert len(by_row) == size[0] + 1
    for key, layout, size in (
        (WRITES, "csr", None),
        (WRITES, "csc", (3, 3)),
        (("a", "to", "b"), "csc", None),
        (None, "csc", None),
    ):
        with pytest.raises(KeyError, match=r"not found: (CSC and COO forms|its size is \(200, 400\)|the types of edges are)"):
            store.get_edge_index(key, layout, size=size)


def test_pygs_own_sampler_takes_its_arrays_from_the_stores(g: Any, graph: TypedArrays, monkeypatch: Any) -> None:
    """PyG's loader without a sampler of the library: its own reads the lists from the graph store, whole."""
    use_stand_in(monkeypatch)
    fanouts = {key: [-1, -1] for key in graph.edges}
    options = {"num_neighbors": fanouts, "input_nodes": ("paper", torch.arange(9, 300, 7)), "batch_size": 16}
    data = whole_of(graph)
    for batch, its in zip(NeighborLoader(stores(g), **options), NeighborLoader(data, **options), strict=True):
        for kind in graph.n:
            assert batch[kind].n_id.sort().values.equal(its[kind].n_id.sort().values)
        assert batch["paper"].x.equal(data["paper"].x[batch["paper"].n_id])
        assert batch["author"].y.equal(data["author"].y[batch["author"].n_id])
        for key, pairs in graph.edges.items():
            ends = [batch[kind].n_id[nodes] for kind, nodes in zip(key[::2], batch[key].edge_index, strict=True)]
            there = torch.from_numpy(pairs)[:, its[key].e_id]
            assert sorted(zip(*map(torch.Tensor.tolist, ends), strict=True)) == sorted(map(tuple, there.T.tolist()))
    assert len(next(iter(NeighborLoader(stores(g), fanouts, "author", batch_size=7)))["author"].input_id) == 7


def test_an_adjacency_beyond_the_budget(tmp_path: Any) -> None:
    pairs = np.stack([np.zeros(3_000_000, np.int64), np.repeat(np.arange(100_000), 30)])
    made = TypedArrays({"a": 1, "b": 100_000}, {("a", "to", "b"): pairs})
    with made.create(tmp_path / "g", memory="64MiB"):
        pass
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        refuses(featstore.BudgetError, r"the whole adjacency in memory: .*adapters\.pyg\.Sampler", lambda: stores(g)[1].csc())


# -- samples ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "redraw", "kind"),
    covering([NeighborSampler, LaborSampler], [False, True], ["paper", "author", "institution"], together=2),
)
def test_an_output_has_whole_lists(g: Any, graph: TypedArrays, make: Any, redraw: bool, kind: str) -> None:
    seeds = np.random.default_rng(1).permutation(graph.n[kind])[[0, 1, 2, 1, 3, 4, 5, 0, 6, 7, 8, 1]]
    out = ask(Sampler(make(g, [-1, -1], redraw=redraw, edges=True)), kind, seeds)
    assert isinstance(out, HeteroSamplerOutput)
    assert out.batch is None
    assert out.metadata[0].tolist() == list(range(12))
    assert list(out.node) == list(graph.n)
    assert list(out.row) == list(out.col) == list(out.edge) == list(graph.edges)
    assert out.node[kind][:12].tolist() == seeds.tolist()
    degrees = {}
    for key, hops in ((key, [hop[key] for hop in reached(graph, kind, seeds, 2)]) for key in graph.edges):
        row, col, edge = out.row[key], out.col[key], out.edge[key]
        ends = torch.stack([out.node[key[0]][row], out.node[key[2]][col]])
        assert np.array_equal(graph.edges[key][:, edge], ends)
        first = out.num_sampled_edges[key][0]
        assert {int(number) for number in edge[:first]} == {number for _, _, number in hops[0]}
        assert set(edge.tolist()) == {number for _, _, number in hops[1]}
        assert sum(out.num_sampled_edges[key]) == len(row)
        if key[2] == kind:
            degrees[key] = np.bincount(graph.edges[key][1], minlength=graph.n[kind])[seeds]
            assert torch.bincount(col[:first], minlength=12).tolist() == degrees[key].tolist()
    assert degrees
    for name, n_nodes in out.num_sampled_nodes.items():
        assert n_nodes[0] == (12 if name == kind else 0)
        assert sum(n_nodes) == len(out.node[name])
        others = out.node[name][n_nodes[0] :].tolist()
        assert len(set(others)) == len(others)
        assert name != kind or not set(others) & set(seeds.tolist())


def test_fanouts_by_type(g: Any, graph: TypedArrays) -> None:
    fanouts = {WRITES: [2, 0], CITES: [0, 3]}
    sampler = Sampler(NeighborSampler(g, fanouts, redraw=False))
    assert sampler.num_neighbors == {key: list(fanouts.get(key, (0, 0))) for key in graph.edges}
    assert sampler.num_nodes == graph.n
    out = ask(sampler, "paper", [3, 5, 8])
    assert out.num_sampled_edges[CITES] == [0, 0]  # papers are asked once: in the first hop, which takes none
    degree = np.bincount(graph.edges[WRITES][1], minlength=400)[[3, 5, 8]]
    assert torch.bincount(out.col[WRITES], minlength=3).tolist() == np.minimum(degree, 2).tolist()
    assert out.num_sampled_edges[WRITES] == [len(out.row[WRITES]), 0]
    assert all(edge is None for edge in out.edge.values())


def test_pygs_object_of_numbers(g: Any, graph: TypedArrays) -> None:
    """Its keys are texts, and it may have a default for types that it does not name."""
    numbers = NumNeighbors({WRITES: [1, 1]}, default=[0, 2])
    assert fanouts_of(numbers, g.types) == {key: [1, 1] if key == WRITES else [0, 2] for key in graph.edges}
    assert set(map(tuple, fanouts_of(NumNeighbors([3]), g.types).values())) == {(3,)}
    with OwnLoader(g, numbers, ("paper", [1, 2]), batch_size=2, features="x", strategy="ondemand") as loader:
        (batch,) = loader
    assert batch[CITES].num_sampled_edges == [0, 0]
    assert batch[WRITES].num_sampled_edges == [2, 0]


def test_draws_follow_the_seed_of_torch(g: Any) -> None:
    loader = NodeLoader(
        stores(g), Sampler(NeighborSampler(g, [2, 2], redraw=False)), ("paper", torch.arange(300)), batch_size=100
    )
    torch.manual_seed(1)
    first, second = ([batch["paper"].n_id for batch in loader] for _ in range(2))
    torch.manual_seed(1)
    assert all(a.equal(batch["paper"].n_id) for a, batch in zip(first, loader, strict=True))
    assert not any(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("key", [WRITES, CITES, ("paper", "unknown", "institution")])
@pytest.mark.parametrize("negative", [None, "binary", "triplet"])
def test_links(g: Any, graph: TypedArrays, key: Any, negative: Any) -> None:
    """Seeds of one type or of both ends', in a type of edges that there is or not."""
    rng = np.random.default_rng(2)
    pairs = torch.from_numpy(np.stack([rng.integers(0, graph.n[end], 60) for end in key[::2]]))
    sampler = Sampler(NeighborSampler(g, [-1], redraw=False, edges=True))
    loader = LinkNeighborLoader(
        stores(g), [], (key, pairs), neighbor_sampler=sampler, batch_size=25, neg_sampling=negative and {"mode": negative}
    )
    done = 0
    for batch in loader:
        ids = {kind: batch[kind].n_id for kind in graph.n}
        if negative == "triplet":
            n = len(batch[key[0]].src_index)
            ends = torch.stack([ids[key[0]][batch[key[0]].src_index], ids[key[2]][batch[key[2]].dst_pos_index]])
        else:
            n = len(batch[key].input_id)
            links = batch[key].edge_label_index
            assert links.shape == (2, n if negative is None else 2 * n)
            ends = torch.stack([ids[end][nodes[:n]] for end, nodes in zip(key[::2], links, strict=True)])
        assert ends.equal(pairs[:, done : done + n])
        done += n
        assert sum(n_nodes[0] > 0 for n_nodes in batch.num_sampled_nodes_dict.values()) == len({key[0], key[2]})
        for relation, there in graph.edges.items():
            local = batch[relation].edge_index
            found = torch.stack([ids[relation[0]][local[0]], ids[relation[2]][local[1]]])
            assert np.array_equal(found, there[:, batch[relation].e_id])
            n_seeds = batch[relation[2]].num_sampled_nodes[0]
            degree = np.bincount(there[1], minlength=graph.n[relation[2]])[ids[relation[2]][:n_seeds]]
            assert torch.bincount(local[1], minlength=n_seeds).tolist() == degree.tolist()
    assert done == 60


def test_what_a_sampler_refuses(g: Any) -> None:
    sampler = Sampler(NeighborSampler(g, [2]))
    ids = torch.tensor([1])
    refuses(ValueError, r"give \(type, ids\), of the types 'paper', .*not seeds of None", lambda: ask(sampler, None, [1]))
    refuses(ValueError, "not seeds of 'venue'", lambda: ask(sampler, "venue", [1]))
    for bad in (20, -1):
        refuses(
            IndexError,
            f"seed {bad} at position 1 is out of range for 20 nodes of 'institution'",
            lambda: ask(sampler, "institution", [0, bad]),
        )
    refuses(NotImplementedError, "by time", lambda: sampler.sample_from_nodes(NodeSamplerInput(None, ids, ids, "paper")))
    for key in (None, ("paper", "in", "venue")):
        edges = EdgeSamplerInput(None, ids, ids, input_type=key)
        refuses(ValueError, r"edge_label_index: give \(\(source, relation", lambda: sampler.sample_from_edges(edges))
    edges = EdgeSamplerInput(None, ids, ids, time=ids, input_type=CITES)
    refuses(NotImplementedError, "by time", lambda: sampler.sample_from_edges(edges))

    class Mine(NeighborSampler):
        pass

    refuses(
        NotImplementedError,
        "a Mine does not sample for PyG's loaders over a graph of several types",
        lambda: Sampler(Mine(g, [2])),
    )
    out = ask(sampler, "paper", torch.empty(0, dtype=torch.int64))
    assert (len(out.node["paper"]), out.num_sampled_nodes["paper"], out.num_sampled_edges[CITES]) == (0, [0, 0], [0])


def test_a_sampler_travels_with_its_stores(g: Any) -> None:
    sampler = Sampler(NeighborSampler(g, [-1, -1], redraw=False))
    again, (features, edges) = pickle.loads(pickle.dumps((sampler, stores(g))))
    one, other = ask(sampler, "author", [5, 6]), ask(again, "author", [5, 6])
    assert all(one.node[kind].equal(other.node[kind]) for kind in one.node)
    assert features["paper", "x", [3]].equal(stores(g)[0]["paper", "x", [3]])
    assert torch.stack(edges[CITES, "coo"]).equal(torch.stack(stores(g)[1][CITES, "coo"]))
    assert again.sampler.graph is features._g
    features._g.close()
