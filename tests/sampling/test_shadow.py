"""Induced subgraphs against those of plain Python; what layers get of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore import Loader, NeighborSampler, ShadowSampler
from featstore.errors import CorruptionError
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.support.refusing import refuses
from tests.support.typed import academic, check_batch, random_types


def induced(g: ArrayGraph, nodes: list[int]) -> tuple[list[int], list[int]]:
    number = {node: i for i, node in enumerate(nodes)}
    src, dst = [], []
    for i, node in enumerate(nodes):
        for source in g.indices[int(g.indptr[node]) : int(g.indptr[node + 1])].tolist():
            if source in number:
                src.append(number[source])
                dst.append(i)
    return src, dst


def check(
    g: ArrayGraph,
    seeds: list[int],
    fanouts: list[int],
    layers: int,
    keys: tuple[int, int, int] = (0, 0, 0),
    replace: bool = False,
) -> None:
    """The nodes are those of the neighbour sampler, which has an oracle of its own; edges are looked up one by one."""
    seed, *place = keys
    ids = torch.tensor(seeds, dtype=torch.int64)
    batch = ShadowSampler(g, fanouts, layers, replace, seed).sample(ids, *place)
    nodes = NeighborSampler(g, fanouts, replace, seed, redraw=False).sample(ids, *place).input_ids.tolist()
    assert batch.input_ids.tolist() == nodes
    assert ([batch.epoch, batch.index], batch.n_seeds, len(batch.blocks)) == (place, len(seeds), layers)
    src, dst = induced(g, nodes)
    n_own = sum(i < len(seeds) for i in dst)
    for number, block in enumerate(batch.blocks):
        is_last = number == layers - 1
        assert (block.n_src, block.n_dst) == (len(nodes), len(seeds) if is_last else len(nodes))
        assert block.src.tolist() == (src[:n_own] if is_last else src)
        assert block.dst.tolist() == (dst[:n_own] if is_last else dst)
        assert block.src.data_ptr() == batch.blocks[0].src.data_ptr()


@given(
    data=st.data(),
    g=graphs(),
    fanouts=FANOUTS,
    layers=st.integers(1, 4),
    keys=st.tuples(WORDS, WORDS, WORDS),
    replace=st.booleans(),
)
def test_small_graphs_whatever_is_cached(data, g, fanouts, layers, keys, replace) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check(variant, seeds, fanouts, layers, keys, replace)


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("fanouts", [[5, 5], [-1], [3, -1]])
def test_a_larger_graph_in_pieces(id_bytes: int, fanouts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    g = random_graph(3_000, 8, id_bytes=id_bytes)
    seeds = list(range(0, 900, 3))
    check(g, seeds, fanouts, 3)
    monkeypatch.setattr("featstore.sampling.wholelists._LEAST", 41)
    monkeypatch.setattr("featstore.sampling.wholelists._MOST", 41)
    for variant in (g, g.cached(), g.cached(9_000)):
        check(variant, seeds, fanouts, 3)


def test_a_damaged_list_is_found_where_it_was_not_drawn_from() -> None:
    """Nodes of the last hop draw nothing; their lists are read for the edges alone."""
    g = graph_of([[1], [2, 2, 2, 2], [0]])
    sampler = ShadowSampler(g, [1])
    expected = sampler.sample([0])
    g.indices[3] = 3
    refuses(CorruptionError, "", lambda: sampler.sample([0]))
    g.indices[3] = 2
    assert same(sampler.sample([0]), expected)


def test_a_layer_a_hop_unless_it_is_told() -> None:
    assert len(ShadowSampler(graph_of([[1], [0]]), [1, 1]).sample([0]).blocks) == 2


@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), replace=st.booleans(), layers=st.integers(1, 3))
def test_several_types(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int, replace: bool, layers: int
) -> None:
    """Nodes are those of the neighbour sampler; edges are all of their lists, of which those to other nodes are left out."""
    graph = random_types(seed, most=data.draw(st.sampled_from([4, 30])))
    rng = np.random.default_rng(seed)
    fanouts = {key: rng.integers(-1, 4, 2).tolist() for key in graph.edges if rng.random() < 0.7} or [2]
    named = data.draw(st.sampled_from([None, list(graph.edges)[1:], list(graph.edges)[:1]]))
    form = data.draw(st.sampled_from(["csc", "chunked"]))
    with graph.create(tmp_path_factory.mktemp("g") / "g", topology=form) as g:
        if data.draw(st.booleans()) and g.num_edges:
            g.cache_neighbors(data.draw(st.sampled_from(["5KiB", "1MiB"])), edges=data.draw(st.booleans()), progress=False)
        seeds = torch.from_numpy(rng.permutation(g.num_nodes)[:5])
        sampler = ShadowSampler(g, fanouts, layers, replace, seed, edges=True, edge_types=named)
        batch = sampler.sample(seeds, 1, 2)
        nodes = NeighborSampler(g, fanouts, replace, seed, redraw=False).sample(seeds, 1, 2).input_ids
        assert torch.equal(batch.input_ids, nodes)
        whole = NeighborSampler(g, [-1], edges=True).sample(nodes)
        n_types = len(graph.edges)
        assert len(batch.blocks) == layers * n_types
        for number, block in enumerate(batch.blocks):
            layer, of_type = divmod(number, n_types)
            n_dst = len(seeds) if layer == layers - 1 else len(nodes)
            assert (block.n_src, block.n_dst) == (len(nodes), n_dst)
            all_edges = whole.blocks[of_type]
            is_here = (all_edges.src < len(nodes)) & (all_edges.dst < n_dst)
            if named is not None and list(graph.edges)[of_type] not in named:
                is_here[:] = False
            assert torch.equal(block.src, all_edges.src[is_here])
            assert torch.equal(block.dst, all_edges.dst[is_here])
            assert torch.equal(block.edge_pos, all_edges.edge_pos[is_here])
            assert torch.equal(sampler_without_edges(sampler).sample(seeds, 1, 2).blocks[number].src, block.src)
        again = pickle.loads(pickle.dumps(sampler))
        assert repr(again) == repr(sampler)
        assert same(again.sample(seeds, 1, 2), batch)


def sampler_without_edges(sampler: ShadowSampler) -> ShadowSampler:
    options = sampler.layers, sampler.replace, sampler.seed
    return ShadowSampler(sampler.graph, sampler.given_fanouts, *options, edge_types=sampler.edge_types)


def test_types_that_cannot_be_named(tmp_path: Path) -> None:
    with academic(papers=40).create(tmp_path / "g") as g:
        for named, error, text in (
            ([("a", "b", "c")], ValueError, "no edge type"),
            ("cites", TypeError, "source, relation, destination"),
            (3, TypeError, "source, relation"),
            (["cites"], ValueError, "no edge type 'cites'; it has"),
        ):
            with pytest.raises(error, match=text):
                ShadowSampler(g, [2], edge_types=named)
    with pytest.raises(ValueError, match="leave the argument out"):
        ShadowSampler(graph_of([[0]]), [2], edge_types=[("a", "b", "a")])


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_loaders_of_several_types(tmp_path: Path, strategy: str) -> None:
    graph = academic(papers=400)
    cites = ("paper", "cites", "paper")
    graph.edge_features[cites] = {"w": np.arange(2 * graph.edges[cites].shape[1], dtype=np.float32).reshape(-1, 2)}
    with graph.create(tmp_path / "g") as g:
        sampler = ShadowSampler(g, [4, 3], layers=3, edges=True)
        with Loader(g, sampler, ("paper", np.arange(0, 400, 3)), 50, strategy=strategy, edge_features="w") as loader:
            for batch in loader:
                check_batch(graph, batch, edges=True)
                assert len(batch.blocks) == 3
                for key, block in batch.blocks[0].items():
                    ends = [np.isin(graph.edges[key][end], batch.input_ids[key[2 * end]].numpy()) for end in (0, 1)]
                    assert np.array_equal(np.sort(block.edge_pos.numpy()), np.flatnonzero(ends[0] & ends[1]))
