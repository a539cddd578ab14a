"""Neighbour sampling against a brute-force oracle, statistics of the draws, and independence of caches and threads."""

from __future__ import annotations

import math
import pickle
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore._core import sampler as core
from featstore.config import Budget
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.graph.topology import NeighborCache, Topology, _Prefix, huge_bytes
from featstore.sampling.batch import SampledBatch
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.rng import batch_key

Int64s = npt.NDArray[np.int64]
M64 = 2**64 - 1


# ---------------------------------------------------------------- a graph without a disk


class ArrayFile:
    """A row file of ids in memory that counts what is asked of it."""

    path = "indices.bin"

    def __init__(self, ids: npt.NDArray[Any]) -> None:
        self.rows = ids.view(np.uint8).reshape(len(ids), ids.itemsize)
        self.n_gathers = self.n_gathered = self.n_read = 0

    def read(self, first: int, n: int, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        assert first >= 0
        assert first + n <= len(self.rows)
        out = np.empty((n, self.rows.shape[1]), np.uint8) if out is None else out
        out[:] = self.rows[first : first + n]
        self.n_read += n
        return out

    def gather(
        self, rows: Int64s, out: npt.NDArray[np.uint8], positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> None:
        assert positions is None
        assert rows.min() >= 0
        out[:] = self.rows[rows]
        self.n_gathers += 1
        self.n_gathered += len(rows)


class PlainPool:
    """Unpooled memory, filled with what must not be relied on."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -99, dtype=dtype)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.full(shape, -99, dtype)


@dataclass
class ArrayGraph:
    """What a sampler needs of a graph."""

    indptr: Int64s
    indices: npt.NDArray[Any]
    neighbor_cache: NeighborCache | None = None
    budget: Budget = field(default_factory=lambda: Budget(1 << 30))
    pool: PlainPool = field(default_factory=PlainPool)

    def __post_init__(self) -> None:
        self.num_nodes = len(self.indptr) - 1
        self.file = ArrayFile(self.indices)
        self.topology = Topology(self.num_nodes, len(self.indices), self.indptr, self.file, self.indices.itemsize)

    def cached(self, n_ids: int | None = None, seed: int = 0) -> ArrayGraph:
        """The same graph with a whole cache, or a partial one of random nodes with room for ``n_ids`` ids of records."""
        g = ArrayGraph(self.indptr, self.indices)
        if n_ids is None:
            g.neighbor_cache = NeighborCache.build(g.topology, g.budget)
            assert g.neighbor_cache.whole
            return g
        scores = np.random.default_rng(seed).random(self.num_nodes)
        chosen = np.zeros(self.num_nodes, bool)
        spent = 0
        offset_of_node = np.full(self.num_nodes, -1)
        records: list[int] = []
        for node in np.argsort(-scores):
            degree = int(self.indptr[node + 1] - self.indptr[node])
            spent += degree + 1
            if spent > n_ids:
                break
            chosen[node] = True
        for node in np.flatnonzero(chosen):
            offset_of_node[node] = len(records)
            neighbours = self.indices[self.indptr[node] : self.indptr[node + 1]].tolist()
            records += [len(neighbours), *neighbours]
        arrays = {"records": np.array(records, g.topology.id_dtype), "offset_of_node": offset_of_node}
        g.neighbor_cache = NeighborCache.from_arrays(g.topology, arrays)
        return g


def graph_of(lists: list[list[int]], id_bytes: int = 4) -> ArrayGraph:
    indptr = np.r_[0, np.cumsum([len(neighbours) for neighbours in lists])].astype(np.int64)
    ids = np.array([v for neighbours in lists for v in neighbours], np.int32 if id_bytes == 4 else np.int64)
    return ArrayGraph(indptr, ids)


def random_graph(n: int, mean_degree: float, seed: int = 0, id_bytes: int = 4) -> ArrayGraph:
    """Heavy-tailed degrees, isolated nodes, self-loops and repeated edges."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.pareto(1.2, n) * mean_degree / 3, 4 * n).astype(np.int64)
    degrees[rng.random(n) < 0.1] = 0
    indptr = np.r_[0, np.cumsum(degrees)].astype(np.int64)
    ids = np.concatenate([np.sort((rng.random(d) ** 2 * n).astype(np.int64)) for d in degrees] or [np.zeros(0, np.int64)])
    return ArrayGraph(indptr, ids.astype(np.int32 if id_bytes == 4 else np.int64))


# ---------------------------------------------------------------- the oracle: one node at a time, Python integers


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
) -> tuple[list[int], list[tuple[list[int], list[int], int, int]]]:
    nodes = list(seeds)
    number = {node: i for i, node in enumerate(nodes)}
    blocks = []
    for hop, fanout in enumerate(fanouts):
        key = splitmix(splitmix(splitmix(splitmix(0, seed), epoch), index), hop)
        n_dst, src, dst = len(nodes), [], []
        for i in range(n_dst):
            start, end = int(indptr[nodes[i]]), int(indptr[nodes[i] + 1])
            for position in oracle_positions(splitmix(key, nodes[i]), end - start, fanout, replace):
                neighbour = int(indices[start + position])
                if neighbour not in number:
                    number[neighbour] = len(nodes)
                    nodes.append(neighbour)
                src.append(number[neighbour])
                dst.append(i)
        blocks.append((src, dst, len(nodes), n_dst))
    return nodes, blocks[::-1]


def check_against_oracle(
    g: ArrayGraph, seeds: list[int], fanouts: list[int], replace: bool, seed: int, epoch: int, index: int
) -> None:
    sampler = NeighborSampler(g, fanouts, replace=replace, seed=seed)
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), epoch, index)
    nodes, blocks = oracle(g.indptr, g.indices, seeds, fanouts, replace, seed, epoch, index)
    assert batch.input_ids.tolist() == nodes
    assert (batch.index, batch.epoch, batch.n_seeds) == (index, epoch, len(seeds))
    assert [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks] == blocks


def same(a: SampledBatch, b: SampledBatch) -> bool:
    return (
        torch.equal(a.input_ids, b.input_ids)
        and (a.index, a.epoch, a.n_seeds, len(a.blocks)) == (b.index, b.epoch, b.n_seeds, len(b.blocks))
        and all(
            torch.equal(x.src, y.src) and torch.equal(x.dst, y.dst) and (x.n_src, x.n_dst) == (y.n_src, y.n_dst)
            for x, y in zip(a.blocks, b.blocks, strict=True)
        )
    )


@st.composite
def graphs(draw: st.DrawFn) -> ArrayGraph:
    n = draw(st.integers(1, 24))
    neighbours = st.lists(st.integers(0, n - 1), max_size=draw(st.sampled_from([0, 2, 6, 40])))
    return graph_of(draw(st.lists(neighbours, min_size=n, max_size=n)), draw(st.sampled_from([4, 8])))


FANOUTS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 10, 16, 17, 33]), min_size=1, max_size=3)
WORDS = st.one_of(st.integers(0, 3), st.integers(0, M64))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), g=graphs(), fanouts=FANOUTS, replace=st.booleans(), seed=WORDS, epoch=WORDS, index=WORDS)
def test_small_graphs_equal_the_oracle_whatever_is_cached(
    data: st.DataObject, g: ArrayGraph, fanouts: list[int], replace: bool, seed: int, epoch: int, index: int
) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    check_against_oracle(g, seeds, fanouts, replace, seed, epoch, index)
    check_against_oracle(g.cached(), seeds, fanouts, replace, seed, epoch, index)
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    check_against_oracle(g.cached(n_ids), seeds, fanouts, replace, seed, epoch, index)


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


# ---------------------------------------------------------------- randomness


def chi_square_limit(freedom: int) -> float:
    """Value that chi-square exceeds with a probability of about 10⁻⁵ (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def draws(degree: int, fanout: int, n_lists: int, replace: bool, key: int) -> npt.NDArray[np.int64]:
    """Positions that ``n_lists`` nodes draw, int64 [n_lists, fanout]; they share one list, so a million draws cost little."""
    hops = core.Hops(n_lists, True)
    nodes, place, degrees = np.zeros(n_lists + 1, np.int64), np.zeros(n_lists + 1, np.int64), np.full(n_lists + 1, degree)
    hops.attach(nodes, place, degrees, np.zeros(1 << n_lists.bit_length(), np.uint64))
    assert hops.begin(np.arange(n_lists)) == (-1, -1)  # a node's number is its id
    src, dst, empty = np.zeros(n_lists * fanout, np.int64), np.zeros(n_lists * fanout, np.int64), np.zeros(0, np.int64)
    records = np.arange(degree, dtype=np.int32)
    hops.start(n_lists, fanout, replace, key, records, 4, src, dst, np.zeros(4096, np.int64), empty, empty)
    assert hops.number()
    return src.reshape(n_lists, fanout)


def chi_square_of_a_million(degree: int, fanout: int, replace: bool) -> float:
    """Of the counts of each position; without replacement they are correlated, which scales it by (d - 1) / (d - k)."""
    n_lists = max(-(-1_000_000 // fanout), degree)
    counts = np.bincount(draws(degree, fanout, n_lists, replace, key=degree * fanout).ravel(), minlength=degree)
    expected = n_lists * fanout / degree
    return float(((counts - expected) ** 2).sum() / expected) * (1.0 if replace else (degree - 1) / (degree - fanout))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("degrees", [range(first, first + 7) for first in range(2, 51, 7)], ids=str)
def test_a_million_draws_are_uniform(degrees: range, replace: bool) -> None:
    for degree in degrees:
        fanouts = [fanout for fanout in range(1, 16) if replace or fanout < degree]
        total = 0.0
        for fanout in fanouts:
            chi_square = chi_square_of_a_million(degree, fanout, replace)
            assert chi_square < chi_square_limit(degree - 1), (degree, fanout)
            total += chi_square
        # All fan-outs together, from both sides: counts that are too even are wrong, too.
        freedom = (degree - 1) * len(fanouts)
        assert total < chi_square_limit(freedom)
        assert total > freedom - 4.265 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("degree", "fanout"), [(90, 70), (20_000, 100), (100, 64), (100, 65)])
@pytest.mark.parametrize("replace", [False, True])
def test_a_million_draws_of_large_fanouts_are_uniform(degree: int, fanout: int, replace: bool) -> None:
    assert chi_square_of_a_million(degree, fanout, replace) < chi_square_limit(degree - 1)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 3), (9, 4), (12, 10), (17, 2), (8, 7)])
def test_every_subset_is_equally_likely(degree: int, fanout: int) -> None:
    subsets = {subset: i for i, subset in enumerate(combinations(range(degree), fanout))}
    drawn = draws(degree, fanout, 1_000_000 // fanout, False, key=degree * fanout)
    number = np.zeros(1 << degree, np.int64)
    for subset, i in subsets.items():
        number[sum(1 << position for position in subset)] = i
    counts = np.bincount(number[(1 << drawn).sum(axis=1)], minlength=len(subsets))
    expected = len(drawn) / len(subsets)
    assert float(((counts - expected) ** 2).sum() / expected) < chi_square_limit(len(subsets) - 1)


def test_draws_of_neighbouring_keys_are_independent() -> None:
    """Pairs of draws under keys that differ by one in seed, epoch, batch, hop or node are uniform over all pairs."""
    degree, n = 16, 100_000
    key = batch_key(0, 0, 0)
    for shift in range(5):
        first, second = [], []
        for i in range(n // 10):
            arguments = [i, 1, 2]
            near = [i, 1, 2]
            if shift < 3:
                near[shift] += 1
            a, b = batch_key(*arguments), batch_key(*near)
            if shift == 3:
                a, b = core.absorb(a, 0), core.absorb(a, 1)
            elif shift == 4:
                a, b = core.absorb(key, i), core.absorb(key, i + 1)
            first.append(core.absorb(a, 0) >> 60)
            second.append(core.absorb(b, 0) >> 60)
        counts = np.bincount(np.array(first) * degree + np.array(second), minlength=degree**2)
        expected = len(first) / degree**2
        assert float(((counts - expected) ** 2).sum() / expected) < chi_square_limit(degree**2 - 1), shift


# ---------------------------------------------------------------- independence of threads, order, history


def test_batches_do_not_depend_on_threads_or_order() -> None:
    g = random_graph(20_000, 10, seed=2)
    seeds = torch.randperm(g.num_nodes, generator=torch.Generator().manual_seed(0))[:1600].split(100)
    reference = [NeighborSampler(g, [5, 5], seed=3).sample(part, 1, i) for i, part in enumerate(seeds)]
    for variant in (g, g.cached(), g.cached(len(g.indices) // 4)):
        sampler = NeighborSampler(variant, [5, 5], seed=3)
        for n_threads in (1, 2, 7):
            barrier = threading.Barrier(n_threads)

            def work(
                first: int, sampler: NeighborSampler = sampler, n: int = n_threads, wait: threading.Barrier = barrier
            ) -> None:
                wait.wait()
                for i in reversed(range(first, len(seeds), n)):
                    assert same(sampler.sample(seeds[i], 1, i), reference[i])

            with ThreadPoolExecutor(n_threads) as pool:
                list(pool.map(work, range(n_threads)))
        assert len(sampler._all) <= 7


def test_a_batch_differs_by_seed_epoch_and_index_alone() -> None:
    g = random_graph(3000, 30, seed=4).cached()
    ids = torch.arange(50)
    batches = [NeighborSampler(g, [4, 4], seed=s).sample(ids, e, i) for s in (0, 1) for e in (0, 1) for i in (0, 1)]
    assert all(not same(a, b) for a, b in combinations(batches, 2))
    assert same(batches[0], NeighborSampler(g, (4, 4)).sample(ids))


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


# ---------------------------------------------------------------- edges of the contract


def test_empty_seeds_and_tiny_graphs() -> None:
    for g in (graph_of([]), graph_of([[]]), graph_of([[0, 0, 0]]), random_graph(50, 3)):
        for variant in (g, g.cached()):
            batch = NeighborSampler(variant, [3, -1]).sample(torch.zeros(0, dtype=torch.int64))
            assert batch.input_ids.shape == (0,)
            assert [(len(b.src), b.n_src, b.n_dst) for b in batch.blocks] == [(0, 0, 0)] * 2
    assert graph_of([[]]).cached().topology.num_edges == 0
    check_against_oracle(graph_of([[0, 0, 0]]), [0], [2, 2], False, 0, 0, 0)
    check_against_oracle(graph_of([[]]), [0], [2, 2], True, 0, 0, 0)


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


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, np.int16, np.uint64, ">i8", list, "strided"])
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


def test_wrong_seeds_are_named() -> None:
    g = random_graph(300, 5).cached()
    sampler = NeighborSampler(g, [3])
    before = sampler.sample(torch.arange(10))
    with pytest.raises(IndexError, match="seed 300 at position 2 is out of range for 300 nodes"):
        sampler.sample(torch.tensor([1, 299, 300, -1]))
    with pytest.raises(IndexError, match="seed -1 at position 0"):
        sampler.sample(torch.tensor([-1]))
    with pytest.raises(IndexError, match=f"seed {-(2**63)} at position 1"):
        sampler.sample(torch.tensor([0, -(2**63)]))
    with pytest.raises(IndexError, match=f"seed {2**63} at position 1"):
        sampler.sample(np.array([0, 2**63], np.uint64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="7 is at positions 1 and 3"):
        sampler.sample(torch.tensor([1, 7, 2, 7, 1]))
    with pytest.raises(TypeError, match="float32"):
        sampler.sample(torch.ones(3))
    with pytest.raises(TypeError, match="bool"):
        sampler.sample(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="1-D"):
        sampler.sample(torch.zeros((1, 1), dtype=torch.int64))
    with pytest.raises(ValueError, match="epoch"):
        sampler.sample(torch.arange(3), epoch=-1)
    assert same(before, sampler.sample(torch.arange(10)))


def test_wrong_options_are_named() -> None:
    g = graph_of([[0]])
    for fanouts in ([], [-2], [2**31]):
        with pytest.raises(ValueError, match="fan"):
            NeighborSampler(g, fanouts)
    with pytest.raises(TypeError):
        NeighborSampler(g, [1.5])  # type: ignore[list-item]
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            NeighborSampler(g, [1], seed=seed)


def test_repr_pickle_and_stats() -> None:
    g = random_graph(500, 5)
    sampler = NeighborSampler(g, [3, -1], replace=True, seed=5)
    assert repr(sampler) == "NeighborSampler(fanouts=[3, -1], replace=True, seed=5)"
    batch = sampler.sample(torch.arange(9), 1, 2)
    stats = sampler.stats()
    assert stats["batches"] == 1
    assert stats["nodes"] == len(batch.input_ids)
    assert stats["edges"] == stats["edge_rows_read"] == sum(len(block.src) for block in batch.blocks) == g.file.n_gathered
    assert stats["seconds"] > 0
    assert g.file.n_gathers == 2
    state = sampler.__reduce__()[1]
    assert pickle.loads(pickle.dumps(state[1:])) == ((3, -1), True, 5)
    assert same(NeighborSampler(*state).sample(torch.arange(9), 1, 2), batch)


def test_an_id_in_the_file_that_is_no_node() -> None:
    g = graph_of([[0, 1], [2, 1], [0, 3]])  # node 3 of 3
    sampler = NeighborSampler(g, [-1, -1])
    with pytest.raises(CorruptionError, match="edge 5 leads to node 3 of 3") as caught:
        sampler.sample(torch.tensor([1]))
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
    with pytest.raises(CorruptionError, match="node -1"):
        NeighborSampler(negative, [-1]).sample(torch.tensor([0]))


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
    with pytest.raises(BudgetError, match="sampler scratch"):
        sampler.sample(torch.arange(0, 30_000, 30))
    g.budget.total = 1 << 30
    assert same(sampler.sample(torch.arange(0, 30_000, 30)), reference)


def test_offsets_that_do_not_ascend() -> None:
    for indptr in ([1, 2], [0, 3], [0, 2, 1, 2], [0, 5, 2], [0, -1, 2]):
        with pytest.raises(CorruptionError, match="do not ascend"):
            Topology(len(indptr) - 1, 2, np.array(indptr), ArrayFile(np.zeros(2, np.int32)), 4)
    with pytest.raises(ValueError, match="shape"):
        Topology(3, 2, np.array([0, 2]), ArrayFile(np.zeros(2, np.int32)), 4)


def test_a_topology_loads_its_offsets() -> None:
    g = random_graph(5000, 4)
    budget = Budget(1 << 20)
    topology = Topology.load(5000, len(g.indices), ArrayFile(g.indptr), g.file, 4, budget)
    assert np.array_equal(topology.indptr, g.indptr)
    assert budget.report() == {"indptr": huge_bytes(5001 * 8)}
    topology.close()
    assert budget.used == 0
    with pytest.raises(ClosedError):
        topology.offsets(np.arange(3))
    with pytest.raises(BudgetError):
        Topology.load(5000, len(g.indices), ArrayFile(g.indptr), g.file, 4, Budget(100))
    bad = g.indptr.copy()
    bad[77] = 2**40
    with pytest.raises(CorruptionError, match="node 77"):
        Topology.load(5000, len(g.indices), ArrayFile(bad), g.file, 4, budget)
    assert budget.used == 0


# ---------------------------------------------------------------- the neighbour cache


@settings(max_examples=150, deadline=None)
@given(data=st.data(), g=graphs())
def test_the_cache_holds_the_longest_prefix(data: st.DataObject, g: ArrayGraph) -> None:
    """Radix selection against a sort of all nodes."""
    kind = data.draw(st.sampled_from(["float", "int", "ties"]))
    number = {
        "float": st.floats(allow_nan=False),
        "int": st.integers(-(2**62), 2**62),
        "ties": st.sampled_from([0.0, -0.0, 1.0]),
    }[kind]
    scores = np.array(data.draw(st.lists(number, min_size=g.num_nodes, max_size=g.num_nodes)))
    n_bytes = data.draw(st.integers(0, (len(g.indices) + g.num_nodes) * g.topology.id_bytes + 8))
    offset_of_node = np.zeros(g.num_nodes, np.int64)
    n_records = _Prefix(g.topology, scores, n_bytes).write_offsets(offset_of_node)
    chosen = prefix_of(g, scores, n_bytes)
    assert set(np.flatnonzero(offset_of_node >= 0).tolist()) == chosen
    lengths = {node: int(g.indptr[node + 1] - g.indptr[node]) + 1 for node in sorted(chosen)}
    starts = np.cumsum([0, *lengths.values()])
    assert n_records == starts[-1]
    assert offset_of_node[sorted(chosen)].tolist() == starts[:-1].tolist()


def prefix_of(g: ArrayGraph, scores: npt.NDArray[Any], n_bytes: int) -> set[int]:
    spare, chosen = n_bytes, set()
    for node in sorted(range(g.num_nodes), key=lambda v: (-float(scores[v]), v)):
        spare -= (int(g.indptr[node + 1] - g.indptr[node]) + 1) * g.topology.id_bytes
        if spare < 0:
            break
        chosen.add(node)
    return chosen


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.8])
@pytest.mark.parametrize("id_bytes", [4, 8])
def test_a_partial_cache_holds_what_the_scores_say(share: float, id_bytes: int) -> None:
    g = random_graph(20_000, 12, seed=8, id_bytes=id_bytes)
    rng = np.random.default_rng(0)
    for scores in (rng.random(20_000), rng.integers(0, 4, 20_000), np.zeros(20_000), -rng.pareto(1, 20_000)):
        table = huge_bytes(8 * 20_000)
        n_bytes = table + int(share * g.topology.nbytes) // 4096 * 4096
        budget = Budget(n_bytes)
        cache = NeighborCache.build(g.topology, budget, scores, scratch=Budget(1 << 20))
        assert cache.offset_of_node is not None
        assert budget.used <= n_bytes
        chosen = prefix_of(g, scores, n_bytes - table)
        assert set(np.flatnonzero(cache.offset_of_node >= 0).tolist()) == chosen
        for node in sorted(chosen)[:: max(1, len(chosen) // 200)]:
            offset = int(cache.offset_of_node[node])
            neighbours = g.indices[g.indptr[node] : g.indptr[node + 1]]
            assert int(cache.records[offset]) == len(neighbours)
            assert np.array_equal(cache.records[offset + 1 : offset + 1 + len(neighbours)], neighbours)
        again = NeighborCache.from_arrays(g.topology, {name: array.copy() for name, array in cache.to_arrays().items()})
        assert repr(again) == repr(cache)
        cache.close()
        assert budget.used == 0


def test_lists_longer_than_a_block_are_cached_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.graph.topology._BLOCK_BYTES", 64)
    g = random_graph(300, 40, seed=9)
    n_bytes = 4096 + g.topology.nbytes // 8192 * 4096
    cache = NeighborCache.build(g.topology, Budget(n_bytes), np.arange(300), scratch=Budget(1 << 20))
    assert not cache.whole
    assert NeighborCache.from_arrays(g.topology, cache.to_arrays()).n_cached == cache.n_cached > 0
    for node in np.flatnonzero(cache.offset_of_node >= 0):
        offset = int(cache.offset_of_node[node])
        assert np.array_equal(
            cache.records[offset : offset + 1 + int(cache.records[offset])],
            np.r_[g.indptr[node + 1] - g.indptr[node], g.indices[g.indptr[node] : g.indptr[node + 1]]],
        )


def test_a_node_without_neighbours_is_never_read() -> None:
    g = graph_of([[], [], [0, 1]])
    NeighborSampler(g, [2, 2]).sample(torch.tensor([0, 1]))
    assert g.file.n_gathers == 0


def test_cache_errors() -> None:
    g = random_graph(3000, 10, seed=1)
    scratch = Budget(1 << 20)
    with pytest.raises(BudgetError, match="at least 24576 bytes") as caught:
        NeighborCache.build(g.topology, Budget(20_000), np.ones(3000), scratch=scratch)
    assert caught.value.needed == 24576
    with pytest.raises(ValueError, match="scores are needed"):
        NeighborCache.build(g.topology, Budget(30_000), scratch=scratch)
    for scores in (np.ones(2999), np.ones((3000, 1)), np.ones(3000, complex)):
        with pytest.raises(ValueError, match="scores"):
            NeighborCache.build(g.topology, Budget(30_000), scores, scratch=scratch)
    scores = np.ones(3000)
    scores[1234] = np.nan
    with pytest.raises(ValueError, match="node 1234 is NaN"):
        NeighborCache.build(g.topology, Budget(30_000), scores, scratch=scratch)
    assert scratch.used == 0
    with pytest.raises(BudgetError):
        NeighborCache.build(g.topology, Budget(30_000), np.ones(3000), scratch=Budget(1000))


@pytest.mark.parametrize("n", [3000, 300_000])
def test_what_choosing_nodes_holds_is_counted(n: int) -> None:
    """Beside the cache's arrays, which are mapped memory, as tracemalloc sees it; in one budget, or in one of its own."""
    g = random_graph(n, 30, seed=4)
    scores = np.random.default_rng(1).integers(0, 9, n)
    scratch_bytes = NeighborCache.scratch_bytes(g.topology)
    assert scratch_bytes < g.topology.nbytes // 4
    n_bytes = huge_bytes(8 * n) + g.topology.nbytes // 2
    least = huge_bytes(8 * n) + scratch_bytes
    with pytest.raises(BudgetError, match=f"at least {least} bytes") as caught:
        NeighborCache.build(g.topology, Budget(least - 1), scores)
    assert caught.value.needed == least
    for budget, scratch in ((Budget(n_bytes + scratch_bytes), None), (Budget(n_bytes), Budget(scratch_bytes))):
        tracemalloc.start()
        try:
            cache = NeighborCache.build(g.topology, budget, scores, scratch=scratch)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 0.4 * scratch_bytes < held < scratch_bytes + 20_000
        assert not cache.whole
        assert n_bytes - 4096 * 4 < cache.nbytes <= budget.used <= n_bytes
        assert budget.peak <= budget.total
        assert scratch is None or (scratch.peak, scratch.used) == (scratch_bytes, 0)


def test_a_cache_of_another_topology_is_refused() -> None:
    g = random_graph(200, 6, seed=2)
    arrays = g.cached(500).neighbor_cache.to_arrays()  # type: ignore[union-attr]
    offsets, records = arrays["offset_of_node"], arrays["records"]
    node = int(np.flatnonzero(offsets >= 0)[-1])
    changed = {
        "id": records.copy(),
        "degree": records.copy(),
        "offset": offsets.copy(),
        "beyond": offsets.copy(),
    }
    last = int(offsets[node])
    changed["degree"][last] += 1
    with_neighbours = next(v for v in np.flatnonzero(offsets >= 0) if records[offsets[v]])
    changed["id"][offsets[with_neighbours] + 1] = 200
    with pytest.raises(ValueError, match=f"node {with_neighbours}"):
        NeighborCache.from_arrays(g.topology, {"records": changed["id"], "offset_of_node": offsets})
    changed["offset"][node] = -2
    changed["beyond"][node] = len(records)
    for name in ("degree", "offset", "beyond"):
        bad = {"records": records, "offset_of_node": offsets}
        bad["records" if name == "degree" else "offset_of_node"] = changed[name]
        with pytest.raises(ValueError, match=f"node {node}"):
            NeighborCache.from_arrays(g.topology, bad)
    whole = g.cached().neighbor_cache.to_arrays()["records"].copy()  # type: ignore[union-attr]
    for bad_records in (whole[:-1], whole.astype(np.int64), np.where(np.arange(len(whole)) == 5, 200, whole).astype(np.int32)):
        with pytest.raises(ValueError, match="records"):
            NeighborCache.from_arrays(g.topology, {"records": bad_records})
    with pytest.raises(ValueError, match="offset_of_node"):
        NeighborCache.from_arrays(g.topology, {"records": records, "offset_of_node": offsets[:-1]})


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
@pytest.mark.parametrize("share", [None, 0.0, 0.2])
def test_batches_from_disk_are_those_from_memory(tmp_path: Path, backend: str, share: float | None) -> None:
    g = random_graph(20_000, 10, seed=11)
    parts = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:1200].split(150)
    # `create` sorts each list, and random_graph's are sorted: positions are the same.
    reference = [NeighborSampler(g.cached(), [6, 4], seed=2).sample(part, 0, i) for i, part in enumerate(parts)]
    featstore.OutOfCoreGraph.create(tmp_path / "g", g.indptr, g.indices, progress=False).close()
    with featstore.open(tmp_path / "g", memory="64MiB", backend=backend) as stored:
        if share is not None:
            stored.cache_neighbors(huge_bytes(8 * 20_000) + int(share * g.topology.nbytes))
        sampler = NeighborSampler(stored, [6, 4], seed=2)
        with ThreadPoolExecutor(3) as pool:
            batches = list(pool.map(lambda i: sampler.sample(parts[i], 0, i), range(len(parts))))
        assert all(same(a, b) for a, b in zip(batches, reference, strict=True))
        assert sampler.stats()["edge_rows_read"] > 0
        again = pickle.loads(pickle.dumps(sampler))
        assert same(again.sample(parts[3], 0, 3), reference[3])
        again._g.close()
    with pytest.raises(featstore.ClosedError):
        sampler.sample(parts[0])


# ---------------------------------------------------------------- the compiled interface guards memory


def test_the_core_refuses_arrays_that_are_too_short() -> None:
    empty = np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="num_nodes"):
        core.Hops(-1, True)
    hops = core.Hops(1000, True)
    with pytest.raises(ValueError, match="room"):
        hops.begin(np.arange(3))
    arrays = [np.zeros(16, np.int64) for _ in range(3)]
    for table in (np.zeros(16, np.uint64), np.zeros(33, np.uint64)):
        with pytest.raises(ValueError, match="power of two"):
            hops.attach(*arrays, table)
    with pytest.raises(ValueError, match="one length"):
        hops.attach(arrays[0], arrays[1], empty, np.zeros(32, np.uint64))
    hops.attach(*arrays, np.zeros(32, np.uint64))
    with pytest.raises(ValueError, match="room"):
        hops.begin(np.arange(17))
    assert hops.begin(np.arange(2)) == (-1, -1)
    with pytest.raises(ValueError, match="no hop"):
        hops.number()
    with pytest.raises(ValueError, match="more destinations"):
        hops.count(3, 1, False)
    arrays[2][:2] = 3
    records = np.zeros(3, np.int32)
    two, six = np.zeros(2, np.int64), np.zeros(6, np.int64)
    with pytest.raises(ValueError, match="6 edges"):
        hops.start(2, -1, False, 0, records, 4, two, six, empty, empty, empty)
    with pytest.raises(ValueError, match="4 or 8"):
        hops.start(2, -1, False, 0, records, 2, six, six, empty, empty, empty)
    with pytest.raises(ValueError, match="no records"):
        hops.start(2, -1, False, 0, None, 4, six, six, empty, empty, empty)
    with pytest.raises(ValueError, match="4 bytes expected"):
        hops.start(2, -1, False, 0, np.zeros(3), 4, six, six, empty, empty, empty)
    arrays[2][:2] = 200
    many = np.zeros(200, np.int64)
    with pytest.raises(ValueError, match="scratch"):
        hops.start(2, 100, False, 0, records, 4, many, many, empty, empty, empty)
    arrays[1][:2], arrays[2][:2] = -1, 3
    with pytest.raises(ValueError, match="lacks 6"):
        hops.start(2, -1, False, 0, None, 4, six, six, empty, two, two)
    hops.start(2, -1, False, 0, None, 4, six, six.copy(), empty, six.copy(), six.copy())
    with pytest.raises(ValueError, match="6 ids"):
        hops.fill(records, 4)
    assert hops.fill(np.array([1, 2, 3, 4, 1000, 5], np.int32), 4) == 4
    with pytest.raises(ValueError, match="no hop"):
        hops.number()
    with pytest.raises(ValueError, match="starts"):
        core.offsets(np.zeros(3, np.int64), two, empty, two)
    with pytest.raises(ValueError, match="missing"):
        core.lookup(two, records, 4, two, two.copy(), two.copy(), two.copy())
