"""Induced subgraphs against those of plain Python; what layers get of them."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore import NeighborSampler, ShadowSampler
from featstore.errors import CorruptionError
from tests.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.refusing import refuses
from tests.test_sampler import FANOUTS, WORDS, same


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
    monkeypatch.setattr("featstore.sampling.pieces._LEAST", 41)
    monkeypatch.setattr("featstore.sampling.pieces._MOST", 41)
    for variant in (g, g.cached(), g.cached(9_000)):
        check(variant, seeds, fanouts, 3)


def test_no_nodes_no_seeds_no_neighbours() -> None:
    empty = ArrayGraph(np.zeros(1, np.int64), np.zeros(0, np.int32))
    assert [b.n_src for b in ShadowSampler(empty, [3], layers=2).sample([]).blocks] == [0, 0]
    batch = ShadowSampler(graph_of([[], [], [0]]), [-1, -1], layers=3).sample([1, 0])
    assert batch.input_ids.tolist() == [1, 0]
    assert [len(block.src) for block in batch.blocks] == [0, 0, 0]
    assert len(ShadowSampler(graph_of([[1], [0]]), [1, 1]).sample([0]).blocks) == 2  # a layer a hop unless it is told


def test_what_is_refused() -> None:
    g = random_graph(20, 3)
    for fanouts, layers, error, match in (
        ([], None, ValueError, "fanouts is empty"),
        ([-2], None, ValueError, "a fan-out is -1"),
        ([3], 0, ValueError, "layers"),
        ([3], 1.5, TypeError, "layers"),
        (["3"], None, TypeError, "integer"),
    ):
        refuses(error, match, lambda: ShadowSampler(g, fanouts, layers))
    sampler = ShadowSampler(g, [2])
    refuses(IndexError, "seed 20 at position 1", lambda: sampler.sample([3, 20]))
    refuses(ValueError, "distinct", lambda: sampler.sample([3, 4, 3]))


def test_a_damaged_list_is_found_where_it_was_not_drawn_from() -> None:
    """Nodes of the last hop draw nothing; their lists are read for the edges alone."""
    g = graph_of([[1], [2, 2, 2, 2], [0]])
    sampler = ShadowSampler(g, [1])
    expected = sampler.sample([0])
    g.indices[3] = 3
    refuses(CorruptionError, "", lambda: sampler.sample([0]))
    g.indices[3] = 2
    assert same(sampler.sample([0]), expected)


def test_threads_pickles_and_caches_change_nothing(small: Any) -> None:
    seeds = torch.from_numpy(small.train_idx[:60])
    with featstore.open(small.path, memory="64MB") as g:
        sampler = ShadowSampler(g, [4, 3], layers=3, seed=7)
        assert repr(sampler) == "ShadowSampler(fanouts=[4, 3], layers=3, replace=False, seed=7)"
        expected = [sampler.sample(seeds, 1, index) for index in range(8)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda index: sampler.sample(seeds, 1, index), range(8)))
        assert all(map(same, found, expected))
        assert sampler.stats()["batches"] == 16
        again = pickle.loads(pickle.dumps(sampler))
        assert same(again.sample(seeds, 1, 3), expected[3])
        again.graph.close()
        g.cache_neighbors("40KiB")
        assert same(sampler.sample(seeds, 1, 5), expected[5])
