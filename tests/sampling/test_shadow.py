"""Induced subgraphs against those of plain Python; what layers get of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore import NeighborSampler, ShadowSampler
from featstore.errors import CorruptionError
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.support.refusing import refuses


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


@settings(max_examples=150, deadline=None)
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
