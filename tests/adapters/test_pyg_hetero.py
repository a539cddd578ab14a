"""Batches of several types as PyG's ``HeteroData``: a model gives for them what it gives for the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import LaborSampler, Loader, NeighborSampler, OptionError
from tests.support.pyg import HeteroConv, HeteroData, SAGEConv, to_hetero, trim_to_layer
from tests.support.typed import TypedArrays, academic

from featstore.adapters.pyg import NeighborLoader  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings

pytestmark = pytest.mark.shares_resources


def whole_of(graph: TypedArrays) -> Any:
    """Make PyG's data of a graph in memory; types without features get ones."""
    data = HeteroData()
    for kind, n in graph.n.items():
        data[kind].num_nodes = n
        data[kind].x = torch.ones(n, 1)
        for name, rows in graph.features.get(kind, {}).items():
            data[kind][name] = torch.from_numpy(rows)
        for name, rows in graph.data.get(kind, {}).items():
            data[kind][name] = torch.from_numpy(rows)
    for key, pairs in graph.edges.items():
        data[key].edge_index = torch.from_numpy(pairs)
        for name, rows in graph.edge_features.get(key, {}).items():
            data[key][name] = torch.from_numpy(rows)
    return data


class Relational(torch.nn.Module):
    """Two hops of a convolution a type of edges; trims its input to each hop where the batch says how."""

    def __init__(self, keys: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hops = torch.nn.ModuleList(HeteroConv({key: SAGEConv((-1, -1), 8) for key in keys}) for _ in range(2))

    def forward(self, data: Any, *, trims: bool = False) -> Any:
        x = {kind: data[kind].x.float() if "x" in data[kind] else torch.ones(data[kind].num_nodes, 1) for kind in data.node_types}
        edges = data.edge_index_dict
        for number, hop in enumerate(self.hops):
            if trims:
                nodes = {kind: data[kind].num_sampled_nodes for kind in data.node_types}
                added = {key: data[key].num_sampled_edges for key in data.edge_types}
                x, edges, _ = trim_to_layer(number, nodes, added, x, edges)
            x = {kind: rows.relu() for kind, rows in hop(x, edges).items()}
        return x


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    made = academic(papers=600)
    employs = made.edges["institution", "employs", "author"]
    made.edges["author", "rev_employs", "institution"] = employs[::-1].copy()  # else institutions have no second layer
    key = ("paper", "cites", "paper")
    made.edge_features[key] = {"w": np.random.default_rng(1).random((made.edges[key].shape[1], 3)).astype(np.float32)}
    return made


@pytest.fixture(scope="module")
def g(graph: TypedArrays, tmp_path_factory: Any) -> Any:
    with graph.create(tmp_path_factory.mktemp("g") / "g", memory="64MiB") as opened:
        yield opened


@pytest.fixture(scope="module")
def outputs(graph: TypedArrays) -> tuple[Relational, Any]:
    data, model = whole_of(graph), Relational(list(graph.edges))
    with torch.no_grad():
        return model, model(data)


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("kind", ["paper", "author", "institution"])
@pytest.mark.parametrize("make", [NeighborSampler, LaborSampler])
def test_a_model_gives_what_it_gives_for_the_whole_graph(g: Any, outputs: Any, redraw: bool, kind: str, make: Any) -> None:
    model, expected = outputs
    ids = np.random.default_rng(0).permutation(g[kind].num_nodes)[:40]
    with Loader(g, make(g, [-1, -1], redraw=redraw), (kind, ids), 15, strategy="ondemand") as loader, torch.no_grad():
        for batch in loader:
            data = batch.to_pyg()
            data.validate()
            n = data[kind].batch_size
            assert data[kind].input_id.equal(data[kind].n_id[:n])
            for trims in (False, True):
                torch.testing.assert_close(model(data, trims=trims)[kind][:n], expected[kind][data[kind].n_id[:n]])


class Sage(torch.nn.Module):
    """Two convolutions for a graph of one type, which ``to_hetero`` copies for each type of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 7)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


class Converted(torch.nn.Module):
    """``to_hetero``'s model, and rows to learn for nodes of types without features, by their ids."""

    def __init__(self, graph: TypedArrays) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = to_hetero(Sage(), (list(graph.n), list(graph.edges)))
        self.rows = torch.nn.ModuleDict(
            {kind: torch.nn.Embedding(graph.n[kind], 4) for kind in graph.n if kind not in graph.features}
        )

    def forward(self, data: Any) -> Any:
        x = {kind: self.rows[kind](data[kind].n_id) if kind in self.rows else data[kind].x.float() for kind in data.node_types}
        return self.model(x, data.edge_index_dict)


@pytest.mark.parametrize(
    "strategy", ["ondemand", featstore.Superbatch(length=3, cache=0.1), featstore.Streamed(length=3, cache=0.1)]
)
def test_a_model_that_to_hetero_made_trains_as_in_memory(g: Any, graph: TypedArrays, strategy: Any) -> None:
    """On whole lists: each batch's loss and gradients are those of the same seeds in PyG's data of the whole graph."""
    whole = whole_of(graph)
    for kind, n in graph.n.items():
        whole[kind].n_id = torch.arange(n)
    mine, its = Converted(graph), Converted(graph)
    with torch.no_grad():  # makes the lazy weights
        mine(whole)
    its.load_state_dict(mine.state_dict())
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, its)]
    n_steps = 0
    with Loader(g, NeighborSampler(g, [-1, -1]), ("paper", np.arange(300)), 50, labels="y", strategy=strategy) as loader:
        for batch in loader:
            data, n = batch.to_pyg(), len(batch.seeds)
            losses = [
                torch.nn.functional.cross_entropy(mine(data)["paper"][:n], data["paper"].y[:n]),
                torch.nn.functional.cross_entropy(its(whole)["paper"][batch.seeds], whole["paper"].y[batch.seeds]),
            ]
            torch.testing.assert_close(losses[0], losses[1])
            for step, loss in zip(steps, losses, strict=True):
                step.zero_grad()
                loss.backward()
                step.step()
            n_steps += 1
    assert n_steps == 6
    for one, other in zip(mine.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_batch_is_a_part_of_the_graph(g: Any, graph: TypedArrays) -> None:
    data = whole_of(graph)
    sampler = NeighborSampler(g, [4, 3], redraw=False, edges=True)
    with Loader(g, sampler, ("paper", np.arange(90)), 30, strategy="superbatch", edge_features="w") as loader:
        for batch in loader:
            found = batch.to_pyg()
            assert found["paper"].x.equal(data["paper"].x[found["paper"].n_id])
            assert found["paper"].y.equal(data["paper"].y[found["paper"].n_id[:30]])
            for key in graph.edges:
                store = found[key]
                ends = torch.stack([found[key[0]].n_id[store.edge_index[0]], found[key[2]].n_id[store.edge_index[1]]])
                assert ends.equal(data[key].edge_index[:, store.e_id])
                assert sum(store.num_sampled_edges) == len(store.e_id)
                if key == ("paper", "cites", "paper"):
                    assert store.w.equal(data[key].w[store.e_id])
            assert sum(found["author"].num_sampled_nodes) == found["author"].num_nodes


def test_three_hundred_types_of_edges(tmp_path: Any) -> None:
    """Each has its own edges, the batch's among the graph's; ids of edges are those of the type."""
    rng = np.random.default_rng(5)
    edges = {("a", f"relation {i}", "b"): rng.integers(0, 20, (2, 30)) for i in range(300)}
    graph = TypedArrays({"a": 20, "b": 20}, edges).draw("x", 6, a=8, b=16)
    with graph.create(tmp_path / "g", memory="64MiB") as g:
        with Loader(g, NeighborSampler(g, [-1], edges=True), ("b", [3, 7]), 2, strategy="ondemand") as loader:
            (data,) = (batch.to_pyg() for batch in loader)
    data.validate()
    assert data.edge_types == list(edges)
    for key, pairs in edges.items():
        assert sorted(data[key].e_id.tolist()) == np.flatnonzero(np.isin(pairs[1], [3, 7])).tolist()
        ends = torch.stack([data["a"].n_id[data[key].edge_index[0]], data["b"].n_id[data[key].edge_index[1]]])
        assert ends.equal(torch.from_numpy(pairs)[:, data[key].e_id])


@pytest.mark.parametrize("nodes", ["paper", ("paper", None), ("author", [5, 2, 9]), ("paper", np.arange(600) % 7 == 0)])
def test_the_loader_with_pygs_keywords(g: Any, graph: TypedArrays, outputs: Any, nodes: Any) -> None:
    model, expected = outputs
    fanouts = {key: [-1, -1] for key in graph.edges}
    kind = nodes if isinstance(nodes, str) else nodes[0]
    with NeighborLoader(g, fanouts, nodes, batch_size=200, features="x", strategy="ondemand") as loader, torch.no_grad():
        found = list(loader)
    for data in found:
        n = data[kind].batch_size
        torch.testing.assert_close(model(data, trims=True)[kind][:n], expected[kind][data[kind].n_id[:n]])
        assert len(data["paper", "cites", "paper"].w) == data["paper", "cites", "paper"].edge_index.shape[1]
    given = torch.arange(600) if not isinstance(nodes, tuple) or nodes[1] is None else torch.as_tensor(nodes[1])
    ids = torch.cat([data[kind].n_id[: data[kind].batch_size] for data in found])
    if given.dtype == torch.bool:
        assert ids.equal(given.nonzero().flatten())
    else:
        assert ids.equal(given)
        positions = torch.cat([data[kind].input_id for data in found])
        assert given[positions].equal(ids)


def test_keywords_that_do_not_fit(g: Any) -> None:
    for nodes in (None, [1, 2], "venue", ("venue", [1])):
        with pytest.raises(OptionError, match="input_nodes"):
            NeighborLoader(g, [2], nodes)
    with pytest.raises(ValueError, match="no edge type"):
        NeighborLoader(g, {("a", "b", "c"): [2]}, "paper")


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("kind", ["paper", "author", "institution"])
def test_seeds_that_repeat_are_nodes_of_their_own(g: Any, graph: TypedArrays, outputs: Any, kind: str, redraw: bool) -> None:
    """A model gives for each what it gives for the node in the whole graph, with rows of nodes and edges, and labels beside."""
    model, expected = outputs
    ids = torch.tensor([7, 2, 7, 9, 2, 7, 0])
    sampler = NeighborSampler(g, [-1, -1], redraw=redraw, edges=True)
    rows = torch.arange(7) * 3
    beside = {"edge_features": "w", "labels": {"y": rows, "z": -rows}}
    with Loader(g, sampler, (kind, ids), 7, shuffle=False, strategy="ondemand", **beside) as loader:
        (batch,) = loader
        data = batch.to_pyg()
    data.validate()
    assert data[kind].n_id[:7].equal(ids)
    assert data[kind].input_id.equal(ids)
    assert data[kind].batch_size == data[kind].num_sampled_nodes[0] == 7
    assert data[kind].y.equal(rows)
    assert data[kind].z.equal(-rows)
    assert data["paper"].x.equal(whole_of(graph)["paper"].x[data["paper"].n_id])
    for key, pairs in graph.edges.items():
        local, numbers = data[key].edge_index, data[key].e_id
        assert np.array_equal(torch.stack([data[key[0]].n_id[local[0]], data[key[2]].n_id[local[1]]]), pairs[:, numbers])
        assert sum(data[key].num_sampled_edges) == len(numbers)
    w = torch.from_numpy(graph.edge_features["paper", "cites", "paper"]["w"])
    assert data["paper", "cites", "paper"].w.equal(w[data["paper", "cites", "paper"].e_id])
    with torch.no_grad():
        for trims in (False, True):
            torch.testing.assert_close(model(data, trims=trims)[kind][:7], expected[kind][ids])


def test_names_that_are_taken_are_refused(tmp_path: Any) -> None:
    named = TypedArrays({"a": 3}, {("a", "to", "a"): np.array([[0], [1]])}, {"a": {"n_id": np.zeros((3, 1), np.float32)}})
    with named.create(tmp_path / "g") as other:
        with Loader(other, NeighborSampler(other, [2]), ("a", [0]), 1, features="n_id", strategy="ondemand") as loader:
            (batch,) = loader
            with pytest.raises(OptionError, match="n_id"):
                batch.to_pyg()


def test_from_pyg_and_back(graph: TypedArrays, tmp_path: Any) -> None:
    data = whole_of(graph)
    with featstore.OutOfCoreGraph.from_pyg(tmp_path / "g", data, progress=False) as g:
        assert g.node_types == data.node_types
        assert g.edge_types == data.edge_types
        with Loader(g, NeighborSampler(g, [-1]), ("paper", np.arange(600)), 600, shuffle=False, strategy="ondemand") as loader:
            (batch,) = loader
        found = batch.to_pyg()
        assert found["paper"].x.equal(data["paper"].x)
        assert found["paper"].y.equal(data["paper"].y)
        assert found["author"].x.equal(data["author"].x[found["author"].n_id])
