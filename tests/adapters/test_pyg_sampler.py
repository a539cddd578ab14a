"""The library's samplers under PyG's loaders: nodes and links, repeated seeds, negative edges, what is not there."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.pyg import (
    GraphSAGE,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    NodeSamplerInput,
    SAGEConv,
    SamplerOutput,
    data_of,
    trim_to_layer,
)
from tests.support.refusing import refuses

from featstore.adapters.pyg import Sampler, stores  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling  # isort: skip


@pytest.fixture(scope="module")
def whole(small: SimpleNamespace) -> Any:
    data = data_of(small.indptr, small.indices)
    data.x = torch.from_numpy(small.x)
    return data


def ask(sampler: Any, nodes: Any) -> SamplerOutput:
    return sampler.sample_from_nodes(NodeSamplerInput(torch.arange(len(nodes)), torch.as_tensor(nodes)))


def neighbours(out: SamplerOutput, place: int) -> list[int]:
    return sorted(out.node[out.row[out.col == place]].tolist())


def test_an_output_is_what_pyg_expects(small, g) -> None:
    sampler = Sampler(featstore.NeighborSampler(g, [-1, -1], redraw=False))
    out = ask(sampler, small.train_idx[:20])
    assert isinstance(out, SamplerOutput)
    assert out.node[:20].tolist() == small.train_idx[:20].tolist()
    assert out.num_sampled_nodes[0] == 20
    assert sum(out.num_sampled_nodes) == len(out.node)
    assert sum(out.num_sampled_edges) == len(out.row) == len(out.col)
    assert out.edge is None
    assert out.batch is None
    assert out.metadata[0].tolist() == list(range(20))
    for place in range(sum(out.num_sampled_nodes[:2])):
        node = int(out.node[place])
        assert neighbours(out, place) == small.indices[small.indptr[node] : small.indptr[node + 1]].tolist()
    assert sampler.edge_permutation is None
    assert sampler.num_nodes == 1000
    assert "fanouts=[-1, -1]" in repr(sampler)


def test_sampling_by_layers(small, g) -> None:
    """Seeds take some of their own neighbours, and PyG's loader trims its layers as usual."""
    sampler = Sampler(featstore.LaborSampler(g, [3, 2], redraw=False))
    loader = NodeLoader(stores(g, ["x"]), sampler, torch.from_numpy(small.train_idx), batch_size=50)
    n_edges = 0
    for batch in loader:
        assert torch.equal(batch.x, torch.from_numpy(small.x)[batch.n_id])
        assert sum(batch.num_sampled_edges) == batch.edge_index.shape[1]
        for place in range(batch.batch_size):
            node = int(batch.n_id[place])
            own = small.indices[small.indptr[node] : small.indptr[node + 1]].tolist()
            drawn = batch.n_id[batch.edge_index[0][batch.edge_index[1] == place]].tolist()
            assert drawn == own if len(own) <= 3 else set(drawn) <= set(own)
            n_edges += len(drawn)
    assert n_edges > 0


def test_draws_follow_the_seed_of_torch(small, g) -> None:
    sampler = Sampler(featstore.NeighborSampler(g, [2, 2], redraw=False))
    loader = NodeLoader(stores(g, ["x"]), sampler, torch.from_numpy(small.train_idx), batch_size=100)
    torch.manual_seed(1)
    first, second = ([batch.n_id for batch in loader] for _ in range(2))
    first, second = list(first), list(second)
    torch.manual_seed(1)
    assert all(torch.equal(a, batch.n_id) for a, batch in zip(first, loader, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("redraw", [False, True])
def test_seeds_given_more_than_once_have_their_neighbours_each_time(small, g, redraw) -> None:
    seeds = [7, 900, 7, 3, 900, 900, 12]
    out = ask(Sampler(featstore.NeighborSampler(g, [-1, -1], redraw=redraw)), seeds)
    assert out.node[:7].tolist() == seeds
    assert len(out.node[7:].unique()) == len(out.node) - 7
    assert not set(out.node[7:].tolist()) & set(seeds)
    assert out.num_sampled_nodes[0] == 7
    assert sum(out.num_sampled_edges) == len(out.row)
    assert int(out.col[: out.num_sampled_edges[0]].max()) < 7
    for place in range(sum(out.num_sampled_nodes[:2])):
        node = int(out.node[place])
        assert neighbours(out, place) == small.indices[small.indptr[node] : small.indptr[node + 1]].tolist()


@pytest.mark.parametrize("seeds", [[900, 7, 3, 12], [7, 900, 7, 3, 900, 900, 12]])
@pytest.mark.parametrize("redraw", [False, True])
def test_seeds_that_a_sampler_sorts_stand_where_they_were_given(small, g, seeds, redraw) -> None:
    own = featstore.NeighborSampler(g, [-1, -1], redraw=redraw)
    out = ask(Sampler(lambda seeds: own.sample(seeds.sort().values), 1000), seeds)
    n = len(seeds)
    assert out.node[:n].tolist() == seeds
    assert len(set(out.node[n:].tolist()) - set(seeds)) == len(out.node) - n
    assert out.num_sampled_nodes[0] == n
    assert sum(out.num_sampled_edges) == len(out.row)
    for place in range(sum(out.num_sampled_nodes[:2])):
        node = int(out.node[place])
        assert neighbours(out, place) == small.indices[small.indptr[node] : small.indptr[node + 1]].tolist()


def test_other_seeds_than_were_asked_for_are_refused(g) -> None:
    own = featstore.NeighborSampler(g, [2])
    for other in (lambda seeds: seeds[1:], lambda seeds: seeds + 1, lambda seeds: torch.cat([seeds, seeds + 10])):
        sampler = Sampler(lambda seeds, other=other: own.sample(other(seeds)), 1000)
        refuses(
            featstore.PluginError, "other seeds than the 2 that it was given", lambda sampler=sampler: ask(sampler, [5, 8, 5])
        )


class WithPositions:
    """Gives every edge its position in the graph."""

    num_nodes = 1000

    def __init__(self, g: Any) -> None:
        self.sampler, self.indptr = featstore.NeighborSampler(g, [-1]), g.topology.indptr.copy()

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        batch = self.sampler.sample(seeds, epoch, index)
        (block,) = batch.blocks
        positions = np.concatenate([np.arange(self.indptr[node], self.indptr[node + 1]) for node in seeds.tolist()])
        with_positions = featstore.Block(block.src, block.dst, block.n_src, block.n_dst, torch.from_numpy(positions))
        return featstore.SampledBatch(index, epoch, batch.input_ids, len(seeds), (with_positions,))


def test_positions_of_edges(small, g, whole) -> None:
    whole.edge_attr = torch.arange(whole.num_edges)
    sampler = WithPositions(g)
    for seeds, own in itertools.product(
        (small.train_idx[:50], np.array([5, 900, 900, 5, 30])), (sampler, lambda seeds: sampler.sample(seeds.sort().values))
    ):
        loader = NodeLoader(whole, Sampler(own, 1000), torch.from_numpy(seeds), batch_size=len(seeds))
        (batch,) = loader
        assert torch.equal(batch.n_id[: len(seeds)], torch.from_numpy(seeds))
        assert torch.equal(batch.e_id, batch.edge_attr)
        assert torch.equal(batch.n_id[batch.edge_index], whole.edge_index[:, batch.e_id])
    del whole.edge_attr


@pytest.mark.parametrize("redraw", [True, False])
def test_weights_are_handed_over_where_there_is_a_place_for_them(small, g, redraw) -> None:
    own = featstore.NeighborSampler(g, [4, 3], redraw=redraw)

    def weighted(seeds: torch.Tensor) -> Any:
        batch = own.sample(seeds)
        blocks = (replace(b, weight=(b.src + 100 * b.dst).double()) for b in batch.blocks)
        return replace(batch, blocks=tuple(blocks))

    with featstore.Loader(g, weighted, small.train_idx[:30], batch_size=30, features="x") as loader:
        (batch,) = loader
        data = batch.to_pyg()
    assert data.edge_weight.dtype == torch.float64
    assert torch.equal(data.edge_weight, (data.edge_index[0] + 100 * data.edge_index[1]).double())
    with pytest.raises(NotImplementedError, match=r"has no weights: use MiniBatch\.to_pyg"):
        next(iter(NodeLoader(data_of(small.indptr, small.indices), Sampler(weighted, 1000), torch.arange(5))))


@torch.no_grad()
@pytest.mark.parametrize("data", ["stores", "memory"])
def test_a_model_that_trims_under_pyg_computes_what_it_computes_on_the_whole_graph(small, g, whole, data) -> None:
    torch.manual_seed(0)
    layers = [SAGEConv(25, 8), SAGEConv(8, 8)]
    want = layers[1](layers[0](whole.x, whole.edge_index).relu(), whole.edge_index)
    seeds = torch.cat([torch.from_numpy(small.train_idx), torch.from_numpy(small.train_idx[:5])])
    sampler = Sampler(featstore.NeighborSampler(g, [-1, -1], redraw=False))
    for batch in NodeLoader(stores(g) if data == "stores" else whole, sampler, seeds, batch_size=61):
        x, edge_index = batch.x, batch.edge_index
        for i, layer in enumerate(layers):
            x, edge_index, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
            x = layer(x, edge_index).relu() if i == 0 else layer(x, edge_index)
        torch.testing.assert_close(x[: batch.batch_size], want[seeds[batch.input_id]])


@pytest.mark.parametrize("amount", [1, 2.5])
def test_binary_negative_sampling(small, g, whole, amount) -> None:
    pairs, sampler = whole.edge_index[:, ::40], Sampler(featstore.NeighborSampler(g, [3, 3], redraw=False))
    loader = LinkNeighborLoader(
        stores(g), [], (None, pairs), neighbor_sampler=sampler, neg_sampling={"mode": "binary", "amount": amount}, batch_size=48
    )
    done = 0
    for batch in loader:
        n = int((batch.edge_label > 0).sum())
        assert len(batch.edge_label) == n + -int(-n * amount // 1) == batch.edge_label_index.shape[1]
        assert torch.equal(batch.n_id[batch.edge_label_index[:, :n]], pairs[:, done : done + n])
        assert torch.equal(batch.input_id, torch.arange(done, done + n))
        assert torch.equal(batch.x, whole.x[batch.n_id])
        assert batch.num_sampled_nodes[0] == len(batch.edge_label_index.unique())
        done += n
    assert done == pairs.shape[1]


def test_triplet_negative_sampling(small, g, whole) -> None:
    pairs, sampler = whole.edge_index[:, ::40], Sampler(featstore.NeighborSampler(g, [3], redraw=False))
    negative = NegativeSampling("triplet", 2, dst_weight=torch.arange(1000.0))
    loader = LinkNeighborLoader(stores(g), [], (None, pairs), neighbor_sampler=sampler, neg_sampling=negative, batch_size=50)
    for batch in loader:
        n = len(batch.input_id)
        assert batch.dst_neg_index.shape == (n, 2)
        assert torch.equal(batch.n_id[torch.stack([batch.src_index, batch.dst_pos_index])], pairs[:, batch.input_id])
        assert 0 not in batch.n_id[batch.dst_neg_index]  # of weight 0


class Counted:
    """Draws nothing, and knows no graph."""

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return featstore.SampledBatch(index, epoch, seeds, len(seeds), ())


def test_any_sampler_of_the_library(g) -> None:
    refuses(TypeError, "num_nodes must be given: Counted", lambda: Sampler(Counted()))
    refuses(TypeError, "", lambda: Sampler(Counted(), num_nodes=2.5))
    refuses(TypeError, "int does neither", lambda: Sampler(3, num_nodes=5))
    out = ask(Sampler(Counted(), num_nodes=1000), [3, 1, 3])
    assert (out.node.tolist(), out.num_sampled_nodes, out.num_sampled_edges) == ([3, 1, 3], [3], [])
    refuses(featstore.PluginError, "sampler .Counted.: it returned node 12", lambda: ask(Sampler(Counted(), num_nodes=10), [12]))


@torch.no_grad()
def test_pygs_inference_asks_for_the_number_of_neighbours(small, g, whole) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(25, 8, num_layers=2, out_channels=3).eval()
    for sampler in (featstore.NeighborSampler(g, [-1], redraw=False), featstore.LaborSampler(g, [-1], redraw=False)):
        loader = NeighborLoader(whole, [-1], batch_size=64, neighbor_sampler=Sampler(sampler))
        torch.testing.assert_close(model.inference(loader), model(whole.x, whole.edge_index))
    assert Sampler(featstore.NeighborSampler(g, [3, -1])).num_neighbors == [3, -1]
    of_layers = Sampler(featstore.LayerSampler(g, [5]))
    assert not hasattr(of_layers, "num_neighbors")
    with pytest.raises(AttributeError, match=r"LayerSampler.* has no fan-outs"):
        _ = of_layers.num_neighbors


def test_bad_seeds(g) -> None:
    sampler = Sampler(featstore.NeighborSampler(g, [2]))
    for bad in ([0, 1000], [-1]):
        refuses(IndexError, "is out of range for 1000 nodes", lambda: ask(sampler, bad))
    with pytest.raises(IndexError, match="is out of range"):
        sampler.sample_from_edges(EdgeSamplerInput(None, torch.tensor([0]), torch.tensor([1000])))
    out = ask(sampler, torch.tensor([], dtype=torch.int64))
    assert (len(out.node), len(out.row), out.num_sampled_nodes, out.num_sampled_edges) == (0, 0, [0, 0], [0])


def test_types_and_times(g) -> None:
    sampler, ids = Sampler(featstore.NeighborSampler(g, [2])), torch.tensor([1])
    with pytest.raises(NotImplementedError, match="there is no 'paper'"):
        sampler.sample_from_nodes(NodeSamplerInput(None, ids, input_type="paper"))
    refuses(NotImplementedError, "sampling by time", lambda: sampler.sample_from_nodes(NodeSamplerInput(None, ids, time=ids)))
    with pytest.raises(NotImplementedError, match="there is no"):
        sampler.sample_from_edges(EdgeSamplerInput(None, ids, ids, input_type=("a", "to", "b")))
    with pytest.raises(NotImplementedError, match="sampling by time"):
        sampler.sample_from_edges(EdgeSamplerInput(None, ids, ids, time=ids))


def test_it_travels(g) -> None:
    sampler = Sampler(featstore.NeighborSampler(g, [-1, -1], redraw=False))
    again = pickle.loads(pickle.dumps(sampler))
    one, other = ask(sampler, [5, 6]), ask(again, [5, 6])
    assert torch.equal(one.node, other.node)
    assert torch.equal(one.row, other.row)
    again.sampler.graph.close()
