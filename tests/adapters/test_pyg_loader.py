"""The library's loader as PyG's: batches against PyG's own over arrays in memory, models that trim, keywords, life."""

from __future__ import annotations

import copy
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import MissingExtraError, OptionError
from featstore.load import seedlabels
from tests.support.programs import FORGET_FEATSTORE, run_program
from tests.support.pyg import Data, GATConv, GCNConv, GraphConv, NodeLoader, SAGEConv, data_of, trim_to_layer, whole_lists
from tests.support.refusing import refuses

from featstore.adapters.pyg import NeighborLoader, Sampler, stores, to_data  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings


@pytest.fixture(scope="module")
def whole(small: SimpleNamespace) -> Any:
    """The whole graph in memory, as PyG holds it."""
    data = data_of(small.indptr, small.indices)
    data.x, data.y = torch.from_numpy(small.x), torch.from_numpy(small.y)
    return data


class Net(torch.nn.Module):
    """Three layers of one kind; trims its input to each layer where the batch says how."""

    def __init__(self, conv: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [25, 16, 16, 5]
        self.layers = torch.nn.ModuleList(conv(a, b, **options) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, nodes: Any = None, edges: Any = None) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if nodes is not None:
                x, edge_index, _ = trim_to_layer(i, nodes, edges, x, edge_index)
            x = layer(x, edge_index).relu()
        return x


MODELS = [
    pytest.param(SAGEConv, {}, id="SAGE"),
    pytest.param(SAGEConv, {"aggr": "max"}, id="SAGE max"),
    pytest.param(GraphConv, {}, id="sum"),
    pytest.param(GATConv, {"heads": 2, "concat": False}, id="GAT"),
]


def trimmed(model: Net, batch: Any) -> torch.Tensor:
    return model(batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)[: batch.batch_size]


def test_seeds_that_repeat_are_nodes_of_their_own_as_in_pyg(small, g, whole) -> None:
    """Against the library's sampler under PyG's own loader, which gives every seed a node."""
    seeds = torch.from_numpy(small.train_idx)[torch.randint(40, (300,), generator=torch.Generator().manual_seed(1))]
    rows = torch.arange(300) * 3
    sampler = featstore.NeighborSampler(g, [-1, -1, -1], redraw=False, edges=True)
    want = NodeLoader(whole, Sampler(sampler), seeds, batch_size=64)
    model = Net(SAGEConv)
    with NeighborLoader(g, [-1, -1, -1], seeds, batch_size=64, edges=True, labels={"y": rows, "z": -rows}) as loader:
        for number, (mine, its) in enumerate(zip(loader, want, strict=True)):
            assert mine.validate()
            at = slice(64 * number, 64 * (number + 1))
            assert torch.equal(mine.n_id[: mine.batch_size], seeds[at])
            assert torch.equal(mine.y, rows[at])
            assert torch.equal(mine.z, -rows[at])
            for name in ("n_id", "edge_index", "e_id", "x", "input_id", "batch_size", "num_sampled_nodes", "num_sampled_edges"):
                found, expected = mine[name], its[name]
                assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected, name
            out = trimmed(model, mine)
            once = NeighborLoader(g, [-1, -1, -1], seeds[at].unique(), batch_size=64)
            (plain,) = once
            once.close()
            where = torch.searchsorted(plain.n_id[: plain.batch_size], seeds[at])
            torch.testing.assert_close(out, trimmed(model, plain)[where])


def test_a_sampler_that_sorts_seeds_that_repeat_has_their_edges(small, g, whole) -> None:
    inner = featstore.NeighborSampler(g, [-1, -1], redraw=False)
    seeds = torch.tensor([9, 3, 9, 5, 3])
    with NeighborLoader(
        g, neighbor_sampler=lambda each: inner.sample(each.sort().values), input_nodes=seeds, batch_size=5
    ) as loader:
        (batch,) = loader
    there = set(map(tuple, whole.edge_index.T.tolist()))
    assert {tuple(pair) for pair in batch.n_id[batch.edge_index].T.tolist()} <= there
    assert torch.equal(seeds[batch.input_id], batch.n_id[:5])
    degrees = np.diff(small.indptr)[batch.n_id[:5]]
    assert torch.bincount(batch.edge_index[1], minlength=5)[:5].tolist() == degrees.tolist()


def test_a_sampler_of_other_seeds_has_no_input_id(g) -> None:
    inner = featstore.NeighborSampler(g, [2])
    with NeighborLoader(
        g, neighbor_sampler=lambda each: inner.sample(each + 5), input_nodes=torch.arange(5), batch_size=5
    ) as loader:
        refuses(featstore.PluginError, "seeds that are not in input_nodes", lambda: next(iter(loader)))


def test_whole_neighbourhoods_are_the_batches_of_pyg(small, g, whole) -> None:
    seeds = torch.from_numpy(small.train_idx)
    want = NodeLoader(whole, whole_lists(whole, small.indptr, small.indices, 3), seeds, batch_size=64)
    with NeighborLoader(g, [-1, -1, -1], seeds, batch_size=64, features="x") as loader:
        assert len(loader) == len(want) == 5
        for mine, its in zip(loader, want, strict=True):
            assert isinstance(mine, Data)
            assert mine.validate()
            for name in ("n_id", "x", "edge_index", "input_id"):
                assert torch.equal(mine[name], its[name]), name
            assert torch.equal(mine.y[: mine.batch_size], its.y[: its.batch_size])
            counts = ("num_sampled_nodes", "num_sampled_edges") if "num_sampled_nodes" in its else ()  # torch-sparse counts none
            for name in ("batch_size", "num_nodes", *counts):
                assert getattr(mine, name) == getattr(its, name), name


@pytest.mark.parametrize(("conv", "options"), MODELS)
@pytest.mark.parametrize("redraw", [False, True])
@torch.no_grad()
def test_models_that_trim_compute_what_they_compute_on_the_whole_graph(small, g, whole, conv, options, redraw) -> None:
    model = Net(conv, **options)
    want = model(whole.x, whole.edge_index)
    sampler = featstore.NeighborSampler(g, [-1, -1, -1], redraw=redraw)
    with NeighborLoader(g, None, small.train_idx, neighbor_sampler=sampler, batch_size=100) as loader:
        for batch in loader:
            assert len(batch.num_sampled_nodes) == 4
            torch.testing.assert_close(trimmed(model, batch), want[batch.n_id[: batch.batch_size]])
            torch.testing.assert_close(model(batch.x, batch.edge_index)[: batch.batch_size], trimmed(model, batch))


@torch.no_grad()
def test_a_gcn_on_one_more_hop_computes_what_it_computes_on_the_whole_graph(small, g, whole) -> None:
    """GCN divides by the sources' degrees, which only a further hop makes whole, so nothing is trimmed."""
    model = Net(GCNConv)
    want = model(whole.x, whole.edge_index)
    with NeighborLoader(g, [-1] * 4, small.train_idx, batch_size=100) as loader:
        for batch in loader:
            got = model(batch.x, batch.edge_index)[: batch.batch_size]
            torch.testing.assert_close(got, want[batch.n_id[: batch.batch_size]])


def check_sample(batch: Any, small: SimpleNamespace, fanouts: list[int], is_reached: bool = True) -> None:
    """Check a drawn batch edge by edge: edges of the graph; nodes before the last hop have their fan-out's share, once."""
    n_id, (src, dst) = batch.n_id.numpy(), batch.edge_index.numpy()
    assert len(np.unique(n_id)) == len(n_id)
    degree = np.diff(small.indptr)
    ends = np.cumsum(batch.num_sampled_nodes)
    assert ends[-1] == len(n_id)
    assert sum(batch.num_sampled_edges) == len(src)
    first = 0
    for hop, (fanout, n_edges) in enumerate(zip(fanouts, batch.num_sampled_edges, strict=True)):
        s, d = src[first : first + n_edges], dst[first : first + n_edges]
        first += n_edges
        new = np.arange(ends[hop] - batch.num_sampled_nodes[hop], ends[hop])
        most = degree[n_id[new]] if fanout < 0 else np.minimum(degree[n_id[new]], fanout)
        assert np.array_equal(np.bincount(d, minlength=ends[hop])[new], most)
        assert (np.diff(d) >= 0).all()
        assert set(d) <= set(new)
        assert not len(s) or s.max() < ends[hop + 1]
        if is_reached:
            assert set(range(ends[hop], ends[hop + 1])) <= set(s)
        for node in new[:20]:
            there = small.indices[small.indptr[n_id[node]] : small.indptr[n_id[node] + 1]].tolist()
            for source in n_id[s[d == node]]:
                there.remove(source)  # a repeated edge may be drawn as often as it is there


@pytest.mark.parametrize("redraw", [False, True])
def test_drawn_batches_are_samples_of_the_graph(small, g, redraw) -> None:
    fanouts = [5, 3, 2]
    sampler = featstore.NeighborSampler(g, fanouts, seed=4, redraw=redraw)
    model = Net(SAGEConv)
    with featstore.Loader(g, sampler, small.train_idx, 40, features=["x"]) as loader:
        for batch in loader:
            data = batch.to_pyg()
            check_sample(data, small, fanouts, is_reached=not redraw)
            whole_batch = model(data.x, data.edge_index)[: data.batch_size]
            torch.testing.assert_close(trimmed(model, data), whole_batch)


def test_tensors_are_not_copied(small, g) -> None:
    sampler = featstore.NeighborSampler(g, [5, 5], redraw=False)
    with featstore.Loader(g, sampler, small.train_idx, 100, features=["x", "h"]) as loader:
        for batch in loader:
            data = to_data(batch)
            for mine, its in [(data.x, batch.x), (data.h, batch.features["h"]), (data.y, batch.y), (data.n_id, batch.input_ids)]:
                assert mine is its
            outer = batch.blocks[0]
            assert data.edge_index.data_ptr() == outer.src.data_ptr()
            assert data.edge_index[1].data_ptr() == outer.dst.data_ptr()
            assert torch.equal(data.edge_index, torch.stack((outer.src, outer.dst)))


def test_a_pack_brings_its_batches(small, g, tmp_path) -> None:
    sampler = featstore.NeighborSampler(g, [4, 3], redraw=False)
    pack = tmp_path / "pack"
    featstore.sample_offline(g, sampler, small.train_idx, 32, path=pack, progress=False).close()
    with NeighborLoader(g, strategy=featstore.Packed(pack, cache="10%")) as loader:
        for batch in loader:
            check_sample(batch, small, [4, 3])
            assert torch.equal(batch.x, torch.from_numpy(small.x)[batch.n_id])
            assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])
    with pytest.raises(ValueError, match="takes no sampler and no seeds"):
        NeighborLoader(g, [4, 3], batch_size=32, strategy=featstore.Packed(pack, cache="10%"))


def test_input_id_is_the_position_among_the_seeds(small, g) -> None:
    seeds = torch.from_numpy(np.random.default_rng(0).permutation(small.train_idx))
    mask = np.zeros(small.num_nodes, bool)
    mask[small.train_idx] = True
    for given in (seeds, seeds.numpy(), seeds.tolist(), seeds.int()):
        with NeighborLoader(g, [2], given, batch_size=64, shuffle=True) as loader:
            for batch in loader:
                assert torch.equal(seeds[batch.input_id], batch.n_id[: batch.batch_size])
    for given in (mask, torch.from_numpy(mask), featstore.RandomBatches(seeds, 64), None):
        with NeighborLoader(g, [2], given, batch_size=None if isinstance(given, featstore.RandomBatches) else 64) as loader:
            seen = []
            for batch in loader:
                assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])
                seen += batch.input_id.tolist()
            assert sorted(seen) == (list(range(small.num_nodes)) if given is None else small.train_idx.tolist())


class Fixed:
    """Gives the blocks that it was made with."""

    def __init__(self, nodes: list[int], *blocks: Any) -> None:
        self.nodes, self.blocks = torch.tensor(nodes), blocks

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return featstore.SampledBatch(index, epoch, self.nodes, len(seeds), self.blocks)


def test_other_samplers_blocks(g) -> None:
    ids = torch.tensor
    inner = featstore.Block(ids([1, 2]), ids([0, 0]), 3, 1, ids([70, 71]))
    outer = featstore.Block(ids([2, 3, 0, 3]), ids([0, 0, 1, 2]), 4, 3, ids([71, 72, 80, 90]))  # node 0 draws anew
    with NeighborLoader(g, None, [5], neighbor_sampler=Fixed([5, 6, 7, 8], outer, inner), features=[]) as loader:
        (batch,) = loader
    assert batch.edge_index.tolist() == [[1, 2, 0, 3], [0, 0, 1, 2]]
    assert batch.e_id.tolist() == [70, 71, 80, 90]
    assert (batch.num_sampled_nodes, batch.num_sampled_edges, batch.num_nodes) == ([1, 2, 1], [2, 2], 4)
    assert "x" not in batch
    nested = featstore.Block(ids([1, 2, 3]), ids([0, 0, 2]), 4, 3, ids([70, 71, 90]))
    with NeighborLoader(g, None, [5], neighbor_sampler=Fixed([5, 6, 7, 8], nested, inner)) as loader:
        (batch,) = loader
    assert batch.edge_index.tolist() == [[1, 2, 3], [0, 0, 2]]
    assert (batch.e_id.tolist(), batch.num_sampled_edges) == ([70, 71, 90], [2, 1])
    with NeighborLoader(g, None, [5], neighbor_sampler=Fixed([5, 6])) as loader:
        (batch,) = loader
    assert (batch.num_sampled_nodes, batch.num_sampled_edges, batch.batch_size) == ([2], [], 1)
    assert batch.edge_index.shape == (2, 0)


def test_keywords_that_change_nothing_are_taken(small, g) -> None:
    options: dict[str, Any] = {"subgraph_type": "directional", "disjoint": False, "is_sorted": True, "filter_per_worker": True}
    options |= {"persistent_workers": True, "num_workers": 2, "pin_memory": False, "time_attr": None, "prefetch_factor": None}
    with NeighborLoader(g, [3], torch.from_numpy(small.train_idx), batch_size=50, **options) as loader:
        assert len(list(loader)) == len(loader) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbors": {("a", "to", "b"): [2]}}, "num_neighbors: the graph has one type of edges"),
        ({"num_neighbors": 5}, "num_neighbors: a list of integers"),
        ({"num_neighbors": [2.5]}, "num_neighbors: a list of integers"),
        ({"num_neighbors": []}, "fanouts is empty"),
        ({"num_neighbors": [-2]}, "a fan-out is -1"),
        ({"num_neighbors": None}, "needs a sampler and seeds"),
        ({"neighbor_sampler": Fixed([1])}, "neighbor_sampler: it has its own"),
        ({"input_nodes": "paper"}, "input_nodes: the graph has one type of nodes"),
        ({"input_nodes": ("paper", torch.arange(3))}, "input_nodes: the graph has one type of nodes"),
        ({"input_nodes": torch.ones(7, dtype=torch.bool)}, "a mask of seeds must have one entry a node"),
        ({"input_nodes": torch.tensor([1, 1])}, "seeds of 0 and 1 alone look like a mask"),
        ({"disjoint": True, "num_neighbors": None}, "disjoint: it goes with num_neighbors"),
        ({"subgraph_type": "induced"}, "subgraph_type: a batch has the edges that were sampled"),
        ({"time_attr": "time"}, "time_attr: sampling by time"),
        ({"weight_attr": "w", "num_neighbors": None, "neighbor_sampler": Fixed([1])}, "weight_attr: it goes with num_neighbors"),
        ({"pin_memory": True}, 'pin_memory: device="cuda"'),
        ({"prefetch_factor": 4}, "prefetch_factor: batches are made by threads"),
        ({"num_workers": 2, "threads": 3}, "num_workers: threads= says"),
        ({"timeout": True}, "timeout: batches are made by threads"),
        ({"features": ["nothing"]}, "the graph has no 'nothing'"),
        ({"labels": "train"}, "the graph has no 'train'"),
        ({"labels": "train_idx"}, "has 300 entries for 1000 nodes"),
    ],
)
def test_bad_values(small, g, options, message) -> None:
    given = {"num_neighbors": [2], "input_nodes": small.train_idx, "batch_size": 50} | options
    refuses(ValueError, message, lambda: NeighborLoader(g, **given))


def test_bad_types(small, g, whole) -> None:
    for other in (whole, (1, 2), None):
        refuses(TypeError, r"g must be an OutOfCoreGraph, not .*from_pyg\(path, data\)", lambda: NeighborLoader(other, [2]))
    refuses(TypeError, "transform must be callable", lambda: NeighborLoader(g, [2], small.train_idx, transform="normalize"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_neighbours'"):
        NeighborLoader(g, None, small.train_idx, num_neighbours=[2])
    refuses(TypeError, "seeds must be integers", lambda: NeighborLoader(g, [2], torch.rand(3)))
    refuses(IndexError, "seed 1000 at position 1 is not a node", lambda: NeighborLoader(g, [2], torch.tensor([0, 1000])))


def test_several_labels(tmp_path) -> None:
    """``y`` is the first, others keep their names; a name that something else has is refused, by the loader or the batch."""
    x = np.eye(3, dtype=np.float32)
    labels = {"y": np.arange(3), "z": np.arange(6.0).reshape(3, 2), "n_id": np.arange(3)}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 1, 1, 1], [1], {"x": x}, labels, progress=False) as g:
        with NeighborLoader(g, [2], torch.tensor([2, 0]), batch_size=2, labels=["y", "z"]) as loader:
            (data,) = loader
        assert data.y.tolist() == [2, 0]
        assert data.z.tolist() == [[4.0, 5.0], [0.0, 1.0]]
        with NeighborLoader(g, [2], torch.tensor([2, 0]), batch_size=2, labels="z") as loader:
            (data,) = loader
        assert data.y.tolist() == [[4.0, 5.0], [0.0, 1.0]]
        assert "z" not in data
        for names in (["z", "y"], ["y", "n_id"]):
            with pytest.raises(OptionError, match=f"labels: a batch of PyG has an attribute '{names[1]}'"):
                NeighborLoader(g, [2], labels=names)
        with featstore.Loader(g, featstore.NeighborSampler(g, [1]), [0], labels=["z", "y"]) as loader:
            (batch,) = loader
        refuses(OptionError, "labels: a batch of PyG has an attribute 'y'", lambda: batch.to_pyg())
        refuses(ValueError, "labels: the graph has no 'w'", lambda: NeighborLoader(g, [2], labels=["y", "w"]))


def test_labels_are_converted_once(g, monkeypatch) -> None:
    made: list[str] = []
    really = seedlabels._checked
    monkeypatch.setattr(seedlabels, "_checked", lambda name, rows: made.append(name) or really(name, rows))
    with NeighborLoader(g, [2], torch.tensor([2, 0]), batch_size=2, labels={"y": [5, 6]}) as loader:
        (data,) = loader
    assert (made, data.y.tolist()) == (["y"], [5, 6])


def test_a_feature_named_like_a_part_of_the_batch(tmp_path) -> None:
    x = np.eye(3, dtype=np.float32)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 1, 1, 1], [1], {"x": x, "n_id": x}, progress=False) as g:
        with pytest.raises(OptionError, match="features: a batch of PyG has an attribute 'n_id'"):
            NeighborLoader(g, [2], features=["x", "n_id"])
        with featstore.Loader(g, featstore.NeighborSampler(g, [1]), [0], features=["n_id"], labels=None) as loader:
            (batch,) = loader
            refuses(OptionError, "'n_id'", lambda: batch.to_pyg())
        with NeighborLoader(g, [2], batch_size=3) as loader:
            (data,) = loader
    assert "y" not in data
    assert torch.equal(data.x, torch.eye(3))


def test_batches_get_x_alone_unless_features_are_named(small, tmp_path) -> None:
    shutil.copytree(small.path, tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        featstore.infer(g, [lambda h, block: h[: block.n_dst, :3]], out="scores", progress=False)
        before = g.features["scores"].stats()["reads"]
        batch = next(iter(NeighborLoader(g, [5], batch_size=4)))
        assert {"x", "y"} <= set(batch.keys())
        assert not {"h", "scores"} & set(batch.keys())
        assert g.features["scores"].stats()["reads"] == before
        batch = next(iter(NeighborLoader(g, [5], batch_size=4, features=["scores", "h"])))
        assert {"h", "scores"} <= set(batch.keys())


def test_the_feature_of_batches_is_the_only_one_or_named(tmp_path) -> None:
    one, two = {"pos": torch.rand(3, 2)}, {"pos": torch.rand(3, 2), "h": torch.rand(3, 2)}
    for number, features in enumerate(({}, one, two)):
        with featstore.OutOfCoreGraph.create(tmp_path / str(number), [0, 1, 1, 1], [2], features, progress=False) as g:
            if features is two:
                for option, make in (("features", lambda g=g: NeighborLoader(g, [2])), ("attributes", lambda g=g: stores(g))):
                    caught = refuses(OptionError, "no feature 'x': name some of 'h', 'pos'", make)
                    assert caught.value.option == option
                continue
            batch = next(iter(NeighborLoader(g, [2], batch_size=3)))
            assert set(batch.keys()) & {"x", "pos", "h"} == set(features)
            assert [attr.attr_name for attr in stores(g)[0].get_all_tensor_attrs()] == list(features)


def test_edges_are_numbered_on_request(small, g, whole) -> None:
    for strategy in ("ondemand", "superbatch"):
        for batch in NeighborLoader(g, [5, 3], small.train_idx, batch_size=100, strategy=strategy, edges=True):
            assert torch.equal(batch.n_id[batch.edge_index], whole.edge_index[:, batch.e_id])
    assert "e_id" not in next(iter(NeighborLoader(g, [5], batch_size=10)))
    refuses(TypeError, "edges must be True or False", lambda: NeighborLoader(g, [5], edges=1))
    with pytest.raises(OptionError, match="edges: it goes with num_neighbors"):
        NeighborLoader(g, neighbor_sampler=featstore.NeighborSampler(g, [5]), edges=True)


def test_no_seeds(g) -> None:
    with NeighborLoader(g, [2], torch.tensor([], dtype=torch.int64), shuffle=True) as loader:
        assert len(loader) == 0
        assert list(loader) == []


def test_epochs_states_and_transforms(small, g) -> None:
    def transform(data: Any) -> Any:
        data.doubled = 2 * data.x
        return data

    options = {"num_neighbors": [3, 2], "input_nodes": small.train_idx, "batch_size": 64, "shuffle": True, "transform": transform}
    with NeighborLoader(g, **options) as loader:
        batches = [list(loader) for _ in range(2)]
        assert torch.equal(batches[0][0].doubled, 2 * batches[0][0].x)
        loader.set_epoch(1)
        assert torch.equal(next(iter(loader)).n_id, batches[1][0].n_id)
        state = loader.state_dict()
        assert loader.stats()["batches"] >= 11
        assert repr(loader).splitlines()[0] == "NeighborLoader(5 batches)"
        assert "NeighborSampler(fanouts=[3, 2]" in loader._repr_html_()
    with NeighborLoader(g, **options) as again:
        again.load_state_dict(state)
        rest = list(again)
    assert [batch.n_id.tolist() for batch in rest] == [batch.n_id.tolist() for batch in batches[1][1:]]
    refuses(featstore.ClosedError, "the loader is closed", lambda: iter(again))


def test_a_graph_closed_in_the_middle(small, g) -> None:
    with NeighborLoader(g, [3, 2], small.train_idx, batch_size=10) as loader:
        batches = iter(loader)
        first = next(batches)
        g.close()
        refuses(featstore.ClosedError, "", lambda: list(batches))
        assert torch.equal(first.x, torch.from_numpy(small.x)[first.n_id])
    refuses(featstore.ClosedError, "", lambda: NeighborLoader(g, [3, 2], small.train_idx, batch_size=10))


def pickled(batch: Any) -> Any:
    return pickle.loads(pickle.dumps(batch))


def test_batches_that_are_kept_are_counted_and_their_copies_are_not(small) -> None:
    options: Any = {"batch_size": 15, "features": ["x", "h"], "prefetch": 0}
    with featstore.open(small.path, memory="2MiB") as g, NeighborLoader(g, [-1, -1], small.train_idx, **options) as loader:
        for keep in (copy.deepcopy, pickled):
            kept = [keep(batch) for batch in loader]
            assert len(kept) == len(loader)
            assert all(torch.equal(each.h, torch.from_numpy(small.h)[each.n_id]) for each in kept)
        for keep in (lambda batch: batch, copy.copy):
            with pytest.raises(featstore.BudgetError, match="earlier batches are held"):
                kept = [keep(batch) for batch in loader]


@pytest.mark.usefixtures("_program_server")
def test_pyg_is_imported_when_it_is_asked_for(tmp_path: Path) -> None:
    """That nothing else of the package imports it is a test of tests/cli/test_main.py."""
    code = f"{FORGET_FEATSTORE}sys.modules['torch_geometric'] = None\nfrom featstore.errors import MissingExtraError\n"
    code += "try:\n    import featstore.adapters.pyg\nexcept MissingExtraError as error:\n    print(error)"
    (tmp_path / "script.py").write_text(code)
    done = run_program("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert message.startswith("featstore.adapters.pyg needs torch_geometric")
    assert "pip install torch_geometric" in message
    assert issubclass(MissingExtraError, ImportError)


def test_neighbours_by_weight(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges, w = rng.integers(0, 50, (2, 900)), np.where(rng.random(900) < 0.5, 0, rng.random(900)).astype(np.float32)
    options = {"features": {"x": np.eye(50, dtype=np.float32)}, "edge_features": {"w": w}, "progress": False}
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 50, **options) as g:
        sampler = featstore.NeighborSampler(g, [4, 2], redraw=False, edges=True, weight="w")
        with NeighborLoader(g, [4, 2], torch.arange(50), batch_size=50, weight_attr="w") as loader:
            (batch,) = loader
        expected = sampler.sample(torch.arange(50))
        assert torch.equal(batch.n_id, expected.input_ids)
        assert torch.equal(batch.e_id, expected.blocks[0].edge_pos)
        assert (batch["w"] > 0).all()
