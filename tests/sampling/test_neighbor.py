"""Neighbour sampling against a brute-force oracle; independence of caches and threads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore._core import lists
from featstore._core import sampler as core
from featstore.budget import Budget
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.batch import SampledBatch
from featstore.sampling.neighbor import NeighborSampler
from featstore.topology.base import CscTopology, huge_bytes
from tests.support.array_graphs import ArrayFile, ArrayGraph, graph_of, graphs, random_graph
from tests.support.reference_sampling import Blocks, check_batch, grown
from tests.support.refusing import refuses

Int64s = npt.NDArray[np.int64]
M64 = 2**64 - 1


def splitmix(state: int, output: int) -> int:
    """Output number ``output`` of SplitMix64, by stepping its published form."""
    z = (state + (output + 1) * 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def oracle_positions(key: int, degree: int, fanout: int, replace: bool) -> list[int]:
    if degree == 0:
        return []
    if fanout == -1 or (degree <= fanout and not replace):
        return list(range(degree))
    if replace:
        return sorted(splitmix(key, i) * degree >> 64 for i in range(fanout))
    drawn: set[int] = set()
    for i, last in enumerate(range(degree - fanout, degree)):
        t = splitmix(key, i) * (last + 1) >> 64
        drawn.add(last if t in drawn else t)
    return sorted(drawn)


def oracle(
    indptr: Int64s,
    indices: npt.NDArray[Any],
    seeds: list[int],
    fanouts: list[int],
    replace: bool,
    seed: int,
    epoch: int,
    index: int,
    redraw: bool = True,
) -> tuple[list[int], Blocks]:
    def drawn(hop: int, nodes: list[int]) -> Iterator[tuple[int, int]]:
        key = splitmix(splitmix(splitmix(splitmix(0, seed), epoch), index), hop)
        for place, node in enumerate(nodes):
            start, end = int(indptr[node]), int(indptr[node + 1])
            for position in oracle_positions(splitmix(key, node), end - start, fanouts[hop], replace):
                yield place, int(indices[start + position])

    return grown(seeds, len(fanouts), drawn, redraw)


def check_against_oracle(
    g: ArrayGraph, seeds: list[int], fanouts: list[int], replace: bool, seed: int, epoch: int, index: int, redraw: bool = True
) -> None:
    sampler = NeighborSampler(g, fanouts, replace=replace, seed=seed, redraw=redraw)
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), epoch, index)
    expected = oracle(g.indptr, g.indices, seeds, fanouts, replace, seed, epoch, index, redraw)
    check_batch(batch, expected, len(seeds), epoch, index)


def same(a: SampledBatch, b: SampledBatch) -> bool:
    return (
        torch.equal(a.input_ids, b.input_ids)
        and (a.index, a.epoch, a.n_seeds, len(a.blocks)) == (b.index, b.epoch, b.n_seeds, len(b.blocks))
        and all(
            torch.equal(x.src, y.src) and torch.equal(x.dst, y.dst) and (x.n_src, x.n_dst) == (y.n_src, y.n_dst)
            for x, y in zip(a.blocks, b.blocks, strict=True)
        )
    )


FANOUTS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 10, 16, 17, 33]), min_size=1, max_size=3)
WORDS = st.one_of(st.integers(0, 3), st.integers(0, M64))


@given(
    data=st.data(), g=graphs(), fanouts=FANOUTS, replace=st.booleans(), keys=st.tuples(WORDS, WORDS, WORDS), redraw=st.booleans()
)
def test_small_graphs_equal_the_oracle_whatever_is_cached(data, g, fanouts, replace, keys, redraw) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check_against_oracle(variant, seeds, fanouts, replace, *keys, redraw=redraw)


@pytest.mark.parametrize("id_bytes", [4, 8])
def test_nodes_that_draw_once_in_a_larger_graph(id_bytes: int) -> None:
    g = random_graph(3000, 12, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(3000, 40, replace=False).tolist()
    for fanouts in ([10, 10, 10], [-1, 3, 2], [100, 2]):
        for with_repeats in (False, True):
            check_against_oracle(g, seeds, fanouts, with_repeats, 7, 2, 5, redraw=False)  # grows its scratch between hops
    sampler = NeighborSampler(g, [4, 4], redraw=False)
    outer, inner = sampler.sample(torch.tensor(seeds)).blocks
    assert outer.src.data_ptr() == inner.src.data_ptr()
    assert sampler.stats()["edges"] == len(outer.src)
    everything = [NeighborSampler(g, [-1, -1], redraw=redraw).sample(torch.tensor(seeds)) for redraw in (False, True)]
    assert same(*everything)  # nothing is drawn, so nothing is drawn anew


@pytest.mark.parametrize("fanout", [1, 5, 15, 16, 63, 64, 65, 66, 200, 1000])
@pytest.mark.parametrize("replace", [False, True])
def test_one_list_of_every_length_equals_the_oracle(fanout: int, replace: bool) -> None:
    """Degrees on both sides of every border: all taken, lanes, one at a time, bitmap, hash set."""
    degrees = sorted(
        {1, 2, 15, 16, 17, fanout - 1, fanout, fanout + 1, 2 * fanout, 127 * fanout, 128 * fanout + 70, 300_000} - {0}
    )
    indptr = np.r_[0, np.cumsum(degrees)].astype(np.int64)
    n = len(degrees)
    ids = np.random.default_rng(fanout).integers(0, n, int(indptr[-1])).astype(np.int32)
    for g in (ArrayGraph(indptr, ids), ArrayGraph(indptr, ids).cached()):
        check_against_oracle(g, list(range(n)), [fanout], replace, 3, 1, 4)


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("fanouts", [[10, 10, 10], [-1, 3], [100, 2], [0], [5]])
def test_a_larger_graph_equals_the_oracle(id_bytes: int, fanouts: list[int]) -> None:
    """More nodes than the scratch begins with: it grows in the middle of a hop."""
    g = random_graph(30_000, 8, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(g.num_nodes, 150, replace=False).tolist()
    for variant in (g, g.cached(), g.cached(len(g.indices) // 3)):
        check_against_oracle(variant, seeds, fanouts, False, 7, 2, 5)
    check_against_oracle(g.cached(), seeds, fanouts, True, 7, 2, 5)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_vector_form_draws_the_same(level: int) -> None:
    g = random_graph(2000, 30, seed=5).cached()
    sampler = NeighborSampler(g, [10, 64, 3], seed=1)
    reference = sampler.sample(torch.arange(100))
    other = NeighborSampler(g, [10, 64, 3], seed=1)
    other.sample(torch.arange(5))
    scratch = other._idle[0]
    scratch.hops = core.Hops(g.num_nodes, True, level)
    scratch.room, room = 0, scratch.room
    scratch.need(room)
    assert same(reference, other.sample(torch.arange(100)))


def test_the_table_outlives_its_numbers() -> None:
    """Entries of earlier batches count as empty, also after the base has gone round 32 bits."""
    g = random_graph(200, 5, seed=6).cached()
    hops = core.Hops(200, True)
    table = np.zeros(256, np.uint64)
    hops.attach(*(np.zeros(201, np.int64) for _ in range(3)), table)
    assert hops.begin(np.arange(200)) == (-1, -1)
    assert hops.begin(np.arange(100)[::-1].copy()) == (-1, -1)
    assert hops.n_nodes == 100
    sampler = NeighborSampler(g, [5, 5])
    reference = sampler.sample(torch.arange(20))
    for _ in range(50):
        sampler.sample(torch.randperm(200)[:77])
    assert same(reference, sampler.sample(torch.arange(20)))


def test_ids_beyond_32_bits_are_told_apart() -> None:
    """Ids that agree in their low halves, through a table that holds only those."""
    n, step = 2**40, 2**32
    records = np.array([7 + step * (i % 50) for i in range(300)] + [8 + step * i for i in range(100)], np.int64)
    hops = core.Hops(n, False)
    nodes, place, degree = (np.zeros(512, np.int64) for _ in range(3))
    hops.attach(nodes, place, degree, np.zeros(1024, np.uint64))
    assert hops.begin(np.array([5, 7 + step, 5 + step])) == (-1, -1)
    place[:3], degree[:3] = [0, 200, 250], [200, 50, 150]
    src, dst, empty = np.zeros(400, np.int64), np.zeros(400, np.int64), np.zeros(0, np.int64)
    hops.start(3, -1, False, 1, records, 8, src, dst, empty, empty, empty)
    assert hops.number()
    assert np.array_equal(nodes[: hops.n_nodes][src], np.r_[records[:200], records[200:250], records[250:]])
    assert len(set(nodes[: hops.n_nodes].tolist())) == hops.n_nodes == 3 + 49 + 100


def test_blocks_nest() -> None:
    g = random_graph(5000, 10).cached()
    batch = NeighborSampler(g, [4, 3, 2]).sample(torch.arange(64))
    assert torch.equal(batch.seeds, torch.arange(64))
    assert batch.blocks[0].n_src == len(batch.input_ids)
    assert batch.blocks[-1].n_dst == 64
    for outer, inner in zip(batch.blocks, batch.blocks[1:], strict=False):
        assert outer.n_dst == inner.n_src
    for block, fanout in zip(batch.blocks, [2, 3, 4], strict=True):
        assert block.src.dtype == block.dst.dtype == torch.int64
        assert bool((block.dst.diff() >= 0).all())
        assert int(block.dst.bincount().max()) <= fanout
        assert int(block.src.max()) < block.n_src


@pytest.mark.parametrize("kind", [torch.int32, np.uint8, np.int16, np.uint64, ">i8", list, "strided"])
def test_seeds_of_every_integer_kind(kind: Any) -> None:
    g = random_graph(300, 5).cached()
    sampler = NeighborSampler(g, [3])
    plain = np.arange(3, 203, 2)
    if kind is list:
        seeds: Any = plain.tolist()
    elif kind == "strided":
        seeds = torch.arange(3, 203)[::2]
    else:
        seeds = torch.from_numpy(plain).to(kind) if isinstance(kind, torch.dtype) else plain.astype(kind)
    assert same(sampler.sample(seeds), sampler.sample(torch.from_numpy(plain)))


def test_repr_pickle_and_stats() -> None:
    g = random_graph(500, 5)
    sampler = NeighborSampler(g, [3, -1], replace=True, seed=5)
    assert repr(sampler) == "NeighborSampler(fanouts=[3, -1], replace=True, seed=5)"
    assert repr(NeighborSampler(g, [3], redraw=False)) == "NeighborSampler(fanouts=[3], replace=False, seed=0, redraw=False)"
    batch = sampler.sample(torch.arange(9), 1, 2)
    outer, inner = batch.blocks
    assert repr(inner) == f"Block(edges={len(inner.src)}, n_src={inner.n_src}, n_dst=9)"
    head = f"index=2, epoch=1, seeds=9, nodes={len(batch.input_ids)}"
    assert repr(batch) == f"SampledBatch({head}, blocks=[{outer}, {inner}])"
    numbered = NeighborSampler(random_graph(500, 5), [3], edges=True).sample(torch.arange(9))
    assert repr(numbered.blocks[0]).endswith("n_dst=9, edge_pos)")
    stats = sampler.stats()
    assert (stats["batches"], stats["nodes"]) == (1, len(batch.input_ids))
    assert stats["edges"] == stats["edge_rows_read"] == sum(len(block.src) for block in batch.blocks) == g.file.n_gathered
    assert stats["seconds"] > 0
    assert g.file.n_gathers == 2
    state = sampler.__reduce__()[1]
    assert pickle.loads(pickle.dumps(state[1:])) == ((3, -1), True, 5, True, False, False, None)
    assert same(NeighborSampler(*state).sample(torch.arange(9), 1, 2), batch)


def test_an_id_in_the_file_that_is_no_node() -> None:
    g = graph_of([[0, 1], [2, 1], [0, 3]])  # node 3 of 3
    sampler = NeighborSampler(g, [-1, -1])
    caught = refuses(CorruptionError, "edge 5 leads to node 3 of 3", lambda: sampler.sample(torch.tensor([1])))
    assert (caught.value.path, caught.value.offset) == ("indices.bin", 4096)
    assert sampler.sample(torch.tensor([0]), 0, 0).input_ids.tolist() == [0, 1, 2]
    larger = random_graph(3000, 10)
    larger.indices[5555] = 3000
    budget = Budget(1 << 20)
    for n_bytes in (None, 3000 * 8 + 4096):
        with pytest.raises(CorruptionError, match="edge 5555 leads to node 3000") as caught:
            NeighborCache.build(larger.topology, budget, np.ones(3000), n_bytes)
        assert caught.value.offset == 4096 + 5555 * 4 // 4096 * 4096
        assert budget.used == 0
    negative = graph_of([[0, -1]])
    refuses(CorruptionError, "node -1", lambda: NeighborSampler(negative, [-1]).sample(torch.tensor([0])))


def test_scratch_is_counted_and_given_back() -> None:
    g = random_graph(30_000, 20, seed=3).cached()
    cache_bytes = g.budget.used
    sampler = NeighborSampler(g, [10, 10])
    reference = sampler.sample(torch.arange(0, 30_000, 30))
    used = g.budget.report()["sampler scratch"]
    room = sampler._all[0].room
    assert used >= 3 * 8 * room
    sampler.sample(torch.arange(10))
    assert g.budget.report()["sampler scratch"] == used
    del sampler
    assert g.budget.used == cache_bytes

    g.budget.total = cache_bytes + used // 3
    sampler = NeighborSampler(g, [10, 10])
    refuses(BudgetError, "sampler scratch", lambda: sampler.sample(torch.arange(0, 30_000, 30)))
    g.budget.total = 1 << 30
    assert same(sampler.sample(torch.arange(0, 30_000, 30)), reference)


def test_offsets_that_do_not_ascend() -> None:
    for indptr in ([1, 2], [0, 3], [0, 2, 1, 2], [0, 5, 2], [0, -1, 2]):
        with pytest.raises(CorruptionError, match="do not ascend"):
            CscTopology(len(indptr) - 1, 2, np.array(indptr), ArrayFile(np.zeros(2, np.int32)), 4)
    refuses(ValueError, "shape", lambda: CscTopology(3, 2, np.array([0, 2]), ArrayFile(np.zeros(2, np.int32)), 4))


def test_a_topology_loads_its_offsets() -> None:
    g = random_graph(5000, 4)
    budget = Budget(1 << 20)
    topology = CscTopology.load(5000, len(g.indices), ArrayFile(g.indptr), g.file, 4, budget)
    assert np.array_equal(topology.indptr, g.indptr)
    assert budget.report() == {"indptr": huge_bytes(5001 * 8)}
    topology.close()
    assert budget.used == 0
    refuses(ClosedError, "", lambda: topology.offsets(np.arange(3)))
    refuses(BudgetError, "", lambda: CscTopology.load(5000, len(g.indices), ArrayFile(g.indptr), g.file, 4, Budget(100)))
    bad = g.indptr.copy()
    bad[77] = 2**40
    refuses(CorruptionError, "node 77", lambda: CscTopology.load(5000, len(g.indices), ArrayFile(bad), g.file, 4, budget))
    assert budget.used == 0


def test_the_core_refuses_arrays_that_are_too_short() -> None:
    empty = np.zeros(0, np.int64)
    refuses(ValueError, "num_nodes", lambda: core.Hops(-1, True))
    hops = core.Hops(1000, True)
    refuses(ValueError, "room", lambda: hops.begin(np.arange(3)))
    arrays = [np.zeros(16, np.int64) for _ in range(3)]
    for table in (np.zeros(16, np.uint64), np.zeros(33, np.uint64)):
        refuses(ValueError, "power of two", lambda: hops.attach(*arrays, table))
    refuses(ValueError, "one length", lambda: hops.attach(arrays[0], arrays[1], empty, np.zeros(32, np.uint64)))
    hops.attach(*arrays, np.zeros(32, np.uint64))
    refuses(ValueError, "room", lambda: hops.begin(np.arange(17)))
    assert hops.begin(np.arange(2)) == (-1, -1)
    refuses(ValueError, "no hop", lambda: hops.number())
    refuses(ValueError, "more destinations", lambda: hops.count(3, 1, False))
    arrays[2][:2] = 3
    records, two, six = np.zeros(3, np.int32), np.zeros(2, np.int64), np.zeros(6, np.int64)
    refuses(ValueError, "6 edges", lambda: hops.start(2, -1, False, 0, records, 4, two, six, empty, empty, empty))
    refuses(ValueError, "4 or 8", lambda: hops.start(2, -1, False, 0, records, 2, six, six, empty, empty, empty))
    refuses(ValueError, "no records", lambda: hops.start(2, -1, False, 0, None, 4, six, six, empty, empty, empty))
    refuses(ValueError, "4 bytes expected", lambda: hops.start(2, -1, False, 0, np.zeros(3), 4, six, six, empty, empty, empty))
    arrays[2][:2], many = 200, np.zeros(200, np.int64)
    refuses(ValueError, "scratch", lambda: hops.start(2, 100, False, 0, records, 4, many, many, empty, empty, empty))
    arrays[1][:2], arrays[2][:2] = -1, 3
    refuses(ValueError, "lacks 6", lambda: hops.start(2, -1, False, 0, None, 4, six, six, empty, two, two))
    hops.start(2, -1, False, 0, None, 4, six, six.copy(), empty, six.copy(), six.copy())
    refuses(ValueError, "6 ids", lambda: hops.fill(records, 4))
    assert hops.fill(np.array([1, 2, 3, 4, 1000, 5], np.int32), 4) == 4
    refuses(ValueError, "no hop", lambda: hops.number())
    refuses(ValueError, "starts", lambda: lists.offsets(np.zeros(3, np.int64), two, empty, two))
    refuses(ValueError, "missing", lambda: lists.lookup(two, records, 4, two, two.copy(), two.copy(), two.copy()))
