"""Layer-neighbour sampling against a sampler in plain Python, and what its numbers are like."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import LaborSampler, NeighborSampler
from featstore._core import labor as core
from featstore._core.sampler import Hops
from tests.sampling.test_draws import chi_square_limit
from tests.sampling.test_labor_numbers import chain, number_of, numbers, oracle_number
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.support.reference_sampling import Blocks, check_batch, grown
from tests.support.refusing import refuses

Int64s = npt.NDArray[np.int64]


def oracle(
    g: ArrayGraph,
    seeds: list[int],
    fanouts: list[int],
    dependency: int,
    seed: int,
    epoch: int,
    index: int,
    layer_dependency: bool = False,
    redraw: bool = True,
) -> tuple[list[int], Blocks]:
    def drawn(hop: int, nodes: list[int]) -> Iterator[tuple[int, int]]:
        fanout, turn = fanouts[hop], 0 if layer_dependency else hop
        for place, node in enumerate(nodes):
            neighbours = g.indices[int(g.indptr[node]) : int(g.indptr[node + 1])].tolist()
            d = len(neighbours)
            for source in neighbours:
                number = number_of(seed, epoch, index, turn, source, dependency)
                if fanout == -1 or (fanout > 0 and (d <= fanout or number < (fanout << 32) // d)):
                    yield place, source

    return grown(seeds, len(fanouts), drawn, redraw)


def check_against_oracle(g: ArrayGraph, seeds: list[int], fanouts: list[int], *options: Any, **more: Any) -> None:
    dependency, seed, epoch, index = options
    sampler = LaborSampler(g, fanouts, batch_dependency=dependency, seed=seed, **more)
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), epoch, index)
    check_batch(batch, oracle(g, seeds, fanouts, *options, **more), len(seeds), epoch, index)


DEPENDENCIES = st.sampled_from([1, 2, 3, 256, 2**32])


@given(
    data=st.data(),
    g=graphs(),
    fanouts=FANOUTS,
    dependency=DEPENDENCIES,
    seed=WORDS,
    epoch=WORDS,
    index=WORDS,
    layer_dependency=st.booleans(),
    redraw=st.booleans(),
)
def test_small_graphs_equal_the_oracle_whatever_is_cached(
    data: st.DataObject,
    g: ArrayGraph,
    fanouts: list[int],
    dependency: int,
    seed: int,
    epoch: int,
    index: int,
    layer_dependency: bool,
    redraw: bool,
) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check_against_oracle(
            variant, seeds, fanouts, dependency, seed, epoch, index, layer_dependency=layer_dependency, redraw=redraw
        )


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("fanouts", [[5, 5], [-1, 3], [100, 2], [0, 4]])
def test_a_larger_graph_equals_the_oracle(id_bytes: int, fanouts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scratch grows in the middle of a hop; lists are longer than a turn, and end at every place in a vector."""
    g = random_graph(6_000, 8, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(g.num_nodes, 60, replace=False).tolist()
    for variant in (g.cached(), g, g.cached(len(g.indices) // 3)):
        check_against_oracle(variant, seeds, fanouts, 4, 7, 2, 5)
        monkeypatch.setattr("featstore.sampling.labor._LEAST_READ", 50)
    check_against_oracle(g, seeds, fanouts, 1, 7, 2, 5, redraw=False)


def taken(sampler: LaborSampler, degree: int, n: int) -> npt.NDArray[np.bool_]:
    """Tell which of ``degree`` neighbours of node 0 are taken in each of ``n`` batches, bool [n, degree]."""
    found = np.zeros((n, degree), bool)
    for index in range(n):
        batch = sampler.sample(torch.tensor([0]), 0, index)
        found[index, batch.input_ids.numpy()[1:] - 1] = True
    return found


@pytest.mark.parametrize(("degree", "fanout"), [(8, 1), (20, 5), (40, 3), (17, 16)])
def test_neighbours_are_taken_with_equal_probabilities(degree: int, fanout: int) -> None:
    """Each with fanout / degree, independently of the others: counts are binomial, none at all among them."""
    n, p = 4000, fanout / degree
    g = graph_of([list(range(1, degree + 1)), *[[]] * degree]).cached()
    found = taken(LaborSampler(g, [fanout], seed=degree), degree, n)
    chi_square = float(((found.sum(axis=0) - n * p) ** 2).sum() / (n * p * (1 - p)))
    assert chi_square < chi_square_limit(degree)
    expected = np.array([n * math.comb(degree, k) * p**k * (1 - p) ** (degree - k) for k in range(degree + 1)])
    often = expected > 5
    counts = np.bincount(found.sum(axis=1), minlength=degree + 1)
    rest, rest_expected = counts[~often].sum(), expected[~often].sum()
    chi_square = float(
        ((counts[often] - expected[often]) ** 2 / expected[often]).sum() + (rest - rest_expected) ** 2 / rest_expected
    )
    assert chi_square < chi_square_limit(int(often.sum()))
    if expected[0] > 5:
        assert counts[0] > 0


def test_the_mean_fanout_is_kept_and_nodes_are_shared() -> None:
    g = random_graph(20_000, 20, seed=9).cached()
    parts = torch.randperm(20_000, generator=torch.Generator().manual_seed(0)).split(500)[:30]
    labor, neighbor = LaborSampler(g, [8, 8]), NeighborSampler(g, [8, 8])
    for index, part in enumerate(parts):
        labor.sample(part, 0, index)
        neighbor.sample(part, 0, index)
    ours, theirs = labor.stats(), neighbor.stats()
    assert ours["nodes"] < 0.95 * theirs["nodes"]
    once, other = LaborSampler(g, [8]), NeighborSampler(g, [8])
    for index, part in enumerate(parts):
        once.sample(part, 0, index)
        other.sample(part, 0, index)
    assert abs(once.stats()["edges"] / other.stats()["edges"] - 1) < 0.02


def test_batches_share_sources_the_more_they_depend() -> None:
    g = random_graph(20_000, 20, seed=9).cached()
    parts = torch.randperm(20_000, generator=torch.Generator().manual_seed(0)).split(400)[:20]

    def shared(dependency: int) -> float:
        sampler = LaborSampler(g, [5, 5], batch_dependency=dependency)
        ids = [sampler.sample(part, 0, index).input_ids.numpy() for index, part in enumerate(parts)]
        return sum(len(np.intersect1d(a, b)) / len(b) for a, b in itertools.pairwise(ids)) / (len(ids) - 1)

    alone, some, many = shared(1), shared(4), shared(64)
    assert alone < some < many
    assert many > 1.2 * alone


def test_layers_share_sources_where_they_depend() -> None:
    g = random_graph(20_000, 20, seed=9).cached()
    batch = LaborSampler(g, [5, 5], layer_dependency=True).sample(torch.arange(300))
    outer, inner = batch.blocks
    n = len(inner.src)
    assert torch.equal(outer.src[:n], inner.src)  # what the seeds take in the second hop is what they took in the first
    assert torch.equal(outer.dst[:n], inner.dst)
    fresh = LaborSampler(g, [5, 5]).sample(torch.arange(300))
    assert not torch.equal(fresh.blocks[0].src[: len(fresh.blocks[1].src)], fresh.blocks[1].src)


def test_a_repeated_edge_is_taken_twice_or_not_at_all() -> None:
    g = graph_of([[1, 1, 2, 3, 3, 3], [], [], []]).cached()
    sampler = LaborSampler(g, [2])
    seen = set()
    for index in range(100):
        batch = sampler.sample(torch.tensor([0]), 0, index)
        sources = batch.input_ids[batch.blocks[0].src].tolist()
        assert [sources.count(each) for each in (1, 2, 3)] == [n * (each in sources) for each, n in ((1, 2), (2, 1), (3, 3))]
        seen.add(tuple(sources))
    assert len(seen) == 8  # every subset, the empty one too


def test_destinations_that_agree_on_more_than_was_expected() -> None:
    """A source is taken by all of them or by none: the room for what is taken grows."""
    lists = [list(range(100))] * 3000
    g = graph_of(lists).cached()
    sampler = LaborSampler(g, [1])
    sizes = set()
    for index in range(8):
        batch = sampler.sample(torch.arange(3000), 0, index)
        assert len(batch.blocks[0].src) % 3000 == 0
        sizes.add(len(batch.blocks[0].src) // 3000)
        chosen = [each for each in range(100) if number_of(0, 0, index, 0, each) < 2**32 // 100]
        assert batch.blocks[0].src.tolist() == chosen * 3000
    assert max(sizes) >= 2


def test_a_list_of_millions() -> None:
    n = 2_000_000
    ids = np.sort(np.random.default_rng(0).integers(0, 1000, n)).astype(np.int32)
    g = ArrayGraph(np.r_[0, np.full(1000, n)].astype(np.int64), ids)
    want = ids[numbers(chain(0, 0, 0, 0), ids.astype(np.int64)) < (10_000 << 32) // n].tolist()
    for variant in (g, g.cached()):
        batch = LaborSampler(variant, [10_000]).sample(torch.tensor([0]))
        assert batch.input_ids[batch.blocks[0].src].tolist() == want
    assert g.file.n_gathers == -(-n // (1 << 16))  # so many ids at once, and no more


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("changes", [False, True])
def test_every_vector_form_takes_the_same(id_bytes: int, level: int, changes: bool) -> None:
    degrees = [*range(1, 70), 1023, 1024, 1025, 1040, 5000]
    n, fanout, keys = len(degrees), 3, (5, 6 if changes else 5, 7, 2**31)
    kind = np.dtype(np.int32 if id_bytes == 4 else np.int64)
    records = np.random.default_rng(2).integers(0, n if id_bytes == 4 else 2**40, sum(degrees)).astype(kind)
    hops = Hops(n if id_bytes == 4 else 2**40, id_bytes == 4)
    nodes, place, degree = (np.zeros(8192, np.int64) for _ in range(3))
    hops.attach(nodes, place, degree, np.zeros(16384, np.uint64))
    assert hops.begin(np.arange(n)) == (-1, -1)
    place[:n], degree[:n] = np.r_[0, np.cumsum(degrees)[:-1]], degrees
    layer = core.Layer(hops, n, fanout, *keys, records, id_bytes, level)
    chosen, counts = np.full(layer.n_ids + core.STEP, -99, kind), np.zeros(n, np.int64)
    assert layer.turn(np.zeros(0, np.int64)) == 0
    assert layer.choose(np.zeros(0, kind), chosen, counts)
    assert layer.done

    def number(source: int) -> int:
        late = changes and oracle_number(7, source) >= 2**31
        return oracle_number(6 if late else 5, source)

    want = [
        [each for each in records[at : at + d].tolist() if d <= fanout or number(each) < (fanout << 32) // d]
        for at, d in zip(place[:n].tolist(), degrees, strict=True)
    ]
    assert counts.tolist() == [len(each) for each in want]
    assert chosen[: layer.n_chosen].tolist() == [source for each in want for source in each]
    src, dst = (np.zeros(layer.n_chosen, np.int64) for _ in range(2))
    assert layer.number(chosen, counts, src, dst)
    assert nodes[: hops.n_nodes][src].tolist() == chosen[: layer.n_chosen].tolist()
    assert dst.tolist() == np.repeat(np.arange(n), counts).tolist()

    numbered = core.Layer(hops, n, fanout, *keys, records, id_bytes, level)
    again, edge_pos = np.full(len(chosen), -99, kind), np.full(len(chosen), -99, np.int64)
    assert numbered.turn(np.zeros(0, np.int64)) == 0
    assert numbered.choose(np.zeros(0, kind), again, counts, place[:n] + 2**33, edge_pos)
    assert again[: numbered.n_chosen].tolist() == chosen[: layer.n_chosen].tolist()
    taken = (
        at + each
        for at, d in zip(place[:n].tolist(), degrees, strict=True)
        for each in range(d)
        if d <= fanout or number(int(records[at + each])) < (fanout << 32) // d
    )
    assert (edge_pos[: numbered.n_chosen] - 2**33).tolist() == list(taken)


def test_repr_pickle_and_stats() -> None:
    g = random_graph(500, 5)
    sampler = LaborSampler(g, [3, -1], 16, seed=5)
    assert repr(sampler) == "LaborSampler(fanouts=[3, -1], batch_dependency=16, seed=5)"
    other = LaborSampler(g, [3], layer_dependency=True, redraw=False)
    assert repr(other) == "LaborSampler(fanouts=[3], batch_dependency=1, seed=0, layer_dependency=True, redraw=False)"
    batch = sampler.sample(torch.arange(9), 1, 2)
    stats = sampler.stats()
    assert (stats["batches"], stats["nodes"]) == (1, len(batch.input_ids))
    assert stats["edges"] == sum(len(block.src) for block in batch.blocks)
    degrees = np.diff(g.indptr)
    assert stats["edge_rows_read"] == g.file.n_gathered
    assert g.file.n_gathered == sum(
        degrees[batch.input_ids[: block.n_dst]].sum() for block in batch.blocks
    )  # lists are read whole
    state = sampler.__reduce__()[1]
    assert pickle.loads(pickle.dumps(state[1:])) == ((3, -1), 16, 5, False, True, 0, False)
    assert same(LaborSampler(*state).sample(torch.arange(9), 1, 2), batch)


def test_large_frontiers_are_read_in_turns_that_fit(tmp_path: Path) -> None:
    """Lists of 1.2 million ids, in a budget that has no room for a tenth of their positions."""
    rng = np.random.default_rng(4)
    n, degree = 1000, 1200
    indptr, indices = np.arange(0, n * degree + 1, degree), rng.integers(0, n, n * degree)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, progress=False).close()
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        reference = LaborSampler(g, [2, 2]).sample(torch.arange(n))
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        g.pool.trim()
        before = g.budget.used
        sampler = LaborSampler(g, [2, 2])
        batch = sampler.sample(torch.arange(n))
        assert same(batch, reference)
        assert sampler.stats()["edge_rows_read"] == 2 * n * degree
        assert g.budget.peak - before < 8_000_000


def test_the_core_refuses_arrays_that_are_too_short() -> None:
    hops = Hops(1000, True)
    nodes, place, degree = (np.zeros(16, np.int64) for _ in range(3))
    hops.attach(nodes, place, degree, np.zeros(32, np.uint64))
    assert hops.begin(np.arange(2)) == (-1, -1)
    records, none, two, six = np.zeros(3, np.int32), np.zeros(0, np.int64), np.zeros(2, np.int64), np.zeros(6, np.int64)
    keys = (1, 1, 0, 0)
    refuses(ValueError, "more destinations", lambda: core.Layer(hops, 3, 1, *keys, records, 4))
    refuses(ValueError, "4 or 8", lambda: core.Layer(hops, 2, 1, *keys, records, 2))
    refuses(ValueError, "4 bytes expected", lambda: core.Layer(hops, 2, 1, *keys, records.astype(np.int64), 4))
    degree[:2] = 3
    refuses(ValueError, "no records", lambda: core.Layer(hops, 2, 1, *keys, None, 4))
    place[:2] = -1
    layer = core.Layer(hops, 2, -1, *keys, None, 4)
    assert (layer.n_expected, layer.n_ids, layer.n_missing) == (6, 6, 6)
    refuses(ValueError, "no room", lambda: layer.turn(none))
    assert layer.turn(six[:5]) == 5
    found, chosen = np.arange(5, dtype=np.int32), np.zeros(40, np.int32)
    refuses(ValueError, "counts has 1", lambda: layer.choose(found, chosen, two[:1]))
    refuses(ValueError, "5 ids expected, not 4", lambda: layer.choose(found[:4], chosen, two))
    refuses(ValueError, "4 bytes expected", lambda: layer.choose(found, chosen.astype(np.int64), two))
    assert not layer.choose(found, chosen[:2], two)
    assert layer.choose(found, chosen, two)
    assert not layer.done
    refuses(ValueError, "left to go through", lambda: layer.number(chosen, two, six, six))
    assert layer.turn(six[:5]) == 1
    refuses(ValueError, "room for 2, not for 5", lambda: layer.choose(found[:1], chosen[:2], two))
    assert layer.choose(found[:1], chosen, two)
    refuses(ValueError, "6 edges", lambda: layer.number(chosen, two, six[:5], six))
    refuses(ValueError, "counts are not", lambda: layer.number(chosen, np.array([3, 4]), six, six.copy()))
    refuses(ValueError, "6 chosen ids", lambda: layer.number(chosen[:5], two, six, six.copy()))
    assert layer.number(chosen, two, six, six.copy())
    layer = core.Layer(hops, 2, -1, *keys, None, 4)
    assert hops.begin(np.arange(1)) == (-1, -1)
    refuses(ValueError, "another batch", lambda: layer.turn(six))
