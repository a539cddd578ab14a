"""A subgraph for each seed: the batch of a graph of so many disjoint copies, over the lists and rows of one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core import sampler as core
from featstore.sampling.batch import SampledBatch
from featstore.sampling.neighbor import NeighborSampler
from tests.support.array_graphs import ArrayGraph, graphs, random_graph
from tests.support.refusing import refuses
from tests.support.typed import academic, random_types, reached

FANOUTS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 17]), min_size=1, max_size=3)


def copies_of(g: ArrayGraph, k: int) -> ArrayGraph:
    """The graph ``k`` times, side by side."""
    n, e = g.num_nodes, len(g.indices)
    indptr = np.concatenate([g.indptr[:-1] + i * e for i in range(k)] + [[k * e]]).astype(np.int64)
    return ArrayGraph(indptr, np.concatenate([g.indices.astype(np.int64) + i * n for i in range(k)]))


def check(batch: SampledBatch, side_by_side: SampledBatch, n: int, n_edges: int = 0) -> None:
    """Compare with the batch of the copies, bit for bit."""
    assert batch.copies is not None
    ids = batch.input_ids.numpy()
    assert len(np.unique(ids)) == len(ids)
    assert torch.equal(batch.copies.batch * n + batch.nodes, side_by_side.input_ids)
    assert batch.n_seeds == side_by_side.n_seeds
    for mine, other in zip(batch.blocks, side_by_side.blocks, strict=True):
        assert torch.equal(mine.src, other.src)
        assert torch.equal(mine.dst, other.dst)
        assert (mine.n_src, mine.n_dst) == (other.n_src, other.n_dst)
        if mine.edge_pos is not None and other.edge_pos is not None:
            assert torch.equal(mine.edge_pos, other.edge_pos % max(1, n_edges))


@given(data=st.data(), g=graphs(), fanouts=FANOUTS, replace=st.booleans(), redraw=st.booleans(), index=st.integers(0, 2**64 - 1))
def test_it_is_the_batch_of_copies_side_by_side_whatever_is_cached(data, g, fanouts, replace, redraw, index) -> None:
    seeds = np.array(data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True, max_size=6)), np.int64)
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    options: dict[str, Any] = {"replace": replace, "redraw": redraw, "seed": 5}
    of_all = copies_of(g, max(1, len(seeds)))
    expected = NeighborSampler(of_all, fanouts, **options).sample(np.arange(len(seeds)) * g.num_nodes + seeds, 3, index)
    for variant in (g, g.cached(), g.cached(n_ids)):
        sampler = NeighborSampler(variant, fanouts, disjoint=True, **options)
        for _ in range(2):  # also in scratch that a batch has used
            check(sampler.sample(seeds, 3, index), expected, g.num_nodes)


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("edges", [False, True])
def test_a_larger_graph(id_bytes: int, edges: bool) -> None:
    """More nodes than the scratch begins with, many of them in several subgraphs."""
    g = random_graph(3000, 12, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(3000, 60, replace=False)
    of_all = copies_of(g, 60)
    for variant in (g, g.cached(), g.cached(len(g.indices) // 3)):
        sampler = NeighborSampler(variant, [10, 10, 10], edges=edges, disjoint=True)
        batch = sampler.sample(seeds, 1, 2)
        assert batch.n_nodes > 2 * len(batch.input_ids)
        side_by_side = NeighborSampler(of_all, [10, 10, 10], edges=edges).sample(np.arange(60) * 3000 + seeds, 1, 2)
        check(batch, side_by_side, 3000, len(g.indices))
        assert sampler.trim() is False
        assert sampler.stats()["nodes"] == len(batch.input_ids)


def test_subgraphs_draw_for_themselves() -> None:
    """All seeds have the one neighbour, which has ten: how often each is drawn fits a uniform draw, by chi-square."""
    n = 2000
    hub, leaves = n, np.arange(n + 1, n + 11)
    indptr = np.concatenate([np.arange(n + 1), [n + 10], np.full(10, n + 10)])
    g = ArrayGraph(indptr.astype(np.int64), np.concatenate([np.full(n, hub), leaves]).astype(np.int32))
    batch = NeighborSampler(g, [1, 1], redraw=False, disjoint=True).sample(torch.arange(n))
    drawn = np.bincount(batch.nodes[2 * n :].numpy() - leaves[0], minlength=10)
    assert drawn.sum() == n
    assert ((drawn - n / 10) ** 2 / (n / 10)).sum() < 27.9  # one in a thousand, for 9 degrees of freedom


@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_of_a_stored_graph(topology: str, tmp_path: Path) -> None:
    """Each subgraph is what its seed alone reaches, with the numbers of its edges, in both topologies."""
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, 300, (2, 2400))
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, 300, topology=topology) as g:
        seeds = torch.from_numpy(rng.choice(300, 20, replace=False))
        sampler = NeighborSampler(g, [-1, -1], edges=True, disjoint=True)
        alone = NeighborSampler(g, [-1, -1], edges=True)
        batch = sampler.sample(seeds)
        assert batch.copies is not None
        for number, seed in enumerate(seeds):
            own, mine = alone.sample(seed.reshape(1)), batch.copies.batch == number
            assert sorted(batch.nodes[mine].tolist()) == sorted(own.input_ids.tolist())
            for block, other in zip(batch.blocks, own.blocks, strict=True):
                assert torch.equal(batch.copies.batch[block.src], batch.copies.batch[block.dst])
                assert block.edge_pos is not None
                assert other.edge_pos is not None
                in_mine = mine[block.src]
                assert sorted(block.edge_pos[in_mine].tolist()) == sorted(other.edge_pos.tolist())
                ends = batch.nodes[torch.stack([block.src, block.dst])[:, in_mine]].numpy()
                assert np.array_equal(pairs[:, block.edge_pos[in_mine].numpy()], ends)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_of_several_types(seed: int, topology: str, tmp_path: Path) -> None:
    """Each subgraph has the nodes and edges of every type that its seed reaches."""
    graph = random_types(seed)
    with graph.create(tmp_path / "g", topology=topology) as g:
        kind = g.types.nodes["t0"]
        seeds = np.random.default_rng(seed).permutation(kind.n)[:5]
        batch = NeighborSampler(g, [-1, -1], edges=True, disjoint=True).sample(seeds + kind.first)
        assert batch.copies is not None
        nodes, numbers, k = batch.nodes.numpy(), batch.copies.batch.numpy(), len(graph.edges)
        hops = [batch.blocks[i : i + k] for i in range(0, len(batch.blocks), k)][::-1]
        for number, node in enumerate(seeds):
            expected = reached(graph, "t0", np.array([node]), 2)
            for hop, found in zip(hops, expected, strict=True):
                for block, (key, edges) in zip(hop, found.items(), strict=True):
                    of_type, mine = g.types.edges[key], numbers[block.src.numpy()] == number
                    assert np.array_equal(numbers[block.src.numpy()], numbers[block.dst.numpy()])
                    assert block.edge_pos is not None
                    src, dst = nodes[block.src.numpy()][mine], nodes[block.dst.numpy()][mine]
                    places = block.edge_pos.numpy()[mine] - of_type.first_edge
                    triples = zip(src - of_type.src.first, dst - of_type.dst.first, places, strict=True)
                    assert sorted(triples) == sorted(edges)


def test_subgraphs_of_several_types_draw_for_themselves(tmp_path: Path) -> None:
    with academic(papers=400).create(tmp_path / "g") as g:
        seeds = torch.arange(40)
        batch = NeighborSampler(g, [3, 3], disjoint=True).sample(seeds)
        first = NeighborSampler(g, [3, 3]).sample(seeds[:1])
        assert batch.copies is not None
        assert set(first.input_ids.tolist()) == set(batch.nodes[batch.copies.batch == 0].tolist())  # subgraph 0 draws as it does
        drawn: dict[int, set[tuple[int, ...]]] = {}
        block = batch.blocks[2]  # of the last hop: papers that cite papers
        owners, sources = batch.nodes[block.dst].numpy(), batch.nodes[block.src].numpy()
        for at in np.unique(block.dst.numpy()):
            mine = block.dst.numpy() == at
            drawn.setdefault(int(owners[mine][0]), set()).add(tuple(sorted(sources[mine].tolist())))
        assert max(map(len, drawn.values())) > 1  # a paper in several subgraphs draws other neighbours


def test_bad_seeds_and_options() -> None:
    g = random_graph(100, 3)
    sampler = NeighborSampler(g, [2], disjoint=True)
    refuses(ValueError, "seeds must be distinct: 7 is at positions 0 and 2", lambda: sampler.sample([7, 1, 7]))
    refuses(IndexError, "seed 100 at position 1 is out of range for 100 nodes", lambda: sampler.sample([7, 100]))
    refuses(TypeError, "disjoint", lambda: NeighborSampler(g, [2], disjoint=1))
    assert sampler.sample([]).n_nodes == 0
    assert sampler.sample([99]).n_nodes >= 1
    assert repr(sampler).endswith("disjoint=True)")
    again = pickle.loads(pickle.dumps(sampler.__reduce__()[1][1:]))
    assert again[-2] is True


def test_offsets_of_the_kernel() -> None:
    """Ids of a list and its offset make an id of the batch; too few offsets are refused."""
    refuses(ValueError, "num_nodes", lambda: core.Hops(2**40, False, copies=2**30))
    refuses(ValueError, "num_nodes", lambda: core.Hops(2**31, True, copies=4))
    hops = core.Hops(2**33, False, copies=2**20)
    arrays = [np.zeros(64, np.int64) for _ in range(3)]
    hops.attach(*arrays, np.zeros(256, np.uint64))
    offset = 3 * 2**33
    assert hops.begin(np.array([5 + offset])) == (-1, -1)
    none, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
    src, dst = np.zeros(3, np.int64), np.zeros(3, np.int64)
    records = np.array([2**32 + 1, 1, 5])
    hops.expand_lists(one, one, np.array([3]))
    start = (1, -1, False, 0, records, 8, src, dst, none, none, none)
    refuses(ValueError, "0 offsets, for 1 lists", lambda: hops.start(*start, offsets=none))
    hops.start(*start, offsets=np.array([offset]))
    assert hops.number()
    assert src.tolist() == [1, 2, 0]
    assert arrays[0][:3].tolist() == [5 + offset, 2**32 + 1 + offset, 1 + offset]


@pytest.mark.parametrize("id_bytes", [4, 8])
def test_copies_whose_ids_end_in_the_same_32_bits(id_bytes: int) -> None:
    """Lists in memory have 32-bit ids, and ids of the batch more: two that end alike, and have one slot, are two nodes."""
    n, size = 2**20, 256
    multiplier, shift = core.absorb(n, 0) | 1, 64 - 8

    def slot(node: int) -> int:
        return (node * multiplier & 2**64 - 1) >> shift

    copies = next(k for k in range(1, 2**14) if slot(7 + k * 2**32) == slot(7)) * 2**12  # so many are 2**32 ids
    hops = core.Hops(n, False, copies=2**40)
    arrays = [np.zeros(64, np.int64) for _ in range(3)]
    hops.attach(*arrays, np.zeros(size, np.uint64))
    offsets = np.array([0, copies * n])
    assert hops.begin(np.array([3, 4]) + offsets) == (-1, -1)
    none, src, dst = np.zeros(0, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    records = np.array([7, 7], np.int32 if id_bytes == 4 else np.int64)
    hops.expand_lists(np.array([0, 1]), np.array([0, 1]), np.array([1, 1]))
    hops.start(2, -1, False, 0, records, id_bytes, src, dst, none, none, none, offsets=offsets)
    assert hops.number()
    assert src.tolist() == [2, 3]
    assert arrays[0][2:4].tolist() == [7, 7 + copies * n]
