"""Layer-wise sampling against a sampler in plain Python; its sums and probabilities have no bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import LayerSampler
from featstore.sampling.rng import absorb, batch_key
from tests.sampling.test_draws import chi_square_limit
from tests.sampling.test_neighbor import WORDS, same
from tests.support.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.support.sampled import covering

Blocks = list[tuple[list[int], list[int], list[float], int, int]]


def unit(word: int) -> float:
    return (word >> 11) * 2.0**-53


def draw_distinct(importance: dict[int, float], size: int, key: int) -> dict[int, float]:
    """Return the factors of what is taken, by id; ``importance`` is in the order of first appearance."""
    if len(importance) <= size:
        return dict.fromkeys(importance, 1.0)
    factors: dict[int, float] = {}
    undecided = dict(importance)
    while True:
        total = 0.0
        for weight in undecided.values():
            total += weight
        scale = (size - len(factors)) / total
        certain = [id for id, weight in undecided.items() if weight >= 1 / scale]
        if not certain:
            break
        for id in certain:
            factors[id] = 1.0
            del undecided[id]
        if len(factors) >= size:
            return factors
    held, carried = -1, 0.0
    for id, weight in undecided.items():
        p = scale * weight
        if held < 0:
            held, carried = id, p
            continue
        u, both = unit(absorb(key, id)), carried + p
        if both < 1:
            held = id if u * both >= carried else held
            carried = both
        else:
            wins_held = u * (2 - both) < 1 - p
            winner, held = (held, id) if wins_held else (id, held)
            factors[winner] = 1 / (scale * importance[winner])
            carried = both - 1
    if carried >= 0.5:
        factors[held] = 1 / (scale * importance[held])
    return factors


def draw_again(importance: dict[int, float], size: int, key: int) -> dict[int, float]:
    if not importance:
        return {}
    upto, total = [], 0.0
    for weight in importance.values():
        total += weight
        upto.append(total)
    ids, times = list(importance), dict[int, int]()
    for i in range(size):
        at = unit(absorb(key, i)) * total
        id = ids[min(next((k for k, end in enumerate(upto) if end > at), len(ids) - 1), len(ids) - 1)]
        times[id] = times.get(id, 0) + 1
    return {id: n / (size * importance[id] / total) for id, n in times.items()}


def oracle(
    g: ArrayGraph, seeds: list[int], sizes: list[int], keys: tuple[int, int, int], skip: bool, replace: bool, op: str
) -> tuple[list[int], Blocks]:
    nodes = list(seeds)
    number = {node: i for i, node in enumerate(nodes)}
    blocks: Blocks = []
    for hop, size in enumerate(sizes):
        n_dst = len(nodes)
        lists = [g.indices[int(g.indptr[v]) : int(g.indptr[v + 1])].tolist() for v in nodes]
        importance: dict[int, float] = {}
        for neighbours in lists:
            share = 1.0 if op == "sum" else (1 / len(neighbours)) * (1 / len(neighbours)) if neighbours else 0.0
            for source in neighbours:
                importance[source] = importance.get(source, 0.0) + share
        own = dict.fromkeys((id for id in importance if skip and id in number), 1.0)
        others = {id: weight for id, weight in importance.items() if id not in own}
        key = absorb(batch_key(*keys), hop)
        factors = own | (draw_again if replace else draw_distinct)(others, size, key)
        src, dst, weights = [], [], []
        for i, neighbours in enumerate(lists):
            for source in neighbours:
                if source in factors:
                    if source not in number:
                        number[source] = len(nodes)
                        nodes.append(source)
                    src.append(number[source])
                    dst.append(i)
                    weights.append(float(np.float32(factors[source] / (len(neighbours) if op == "mean" else 1))))
        blocks.append((src, dst, weights, len(nodes), n_dst))
    return nodes, blocks[::-1]


def check_against_oracle(
    g: ArrayGraph, seeds: list[int], sizes: list[int], keys: tuple[int, int, int] = (0, 0, 0), **options: Any
) -> None:
    options = {"skip": False, "replace": False, "op": "sum", **options}
    seed, epoch, index = keys
    batch = LayerSampler(g, sizes, seed, **options).sample(torch.tensor(seeds, dtype=torch.int64), epoch, index)
    nodes, blocks = oracle(g, seeds, sizes, keys, **options)
    assert batch.input_ids.tolist() == nodes
    assert (batch.index, batch.epoch, batch.n_seeds) == (index, epoch, len(seeds))
    found = [(b.src.tolist(), b.dst.tolist(), weights_of(b).tolist(), b.n_src, b.n_dst) for b in batch.blocks]
    assert found == blocks


def weights_of(block: featstore.Block) -> torch.Tensor:
    assert block.weight.dtype == torch.float32
    return block.weight


def same_weighted(a: featstore.SampledBatch, b: featstore.SampledBatch) -> bool:
    return same(a, b) and all(torch.equal(weights_of(x), weights_of(y)) for x, y in zip(a.blocks, b.blocks, strict=True))


SIZES = st.lists(st.sampled_from([1, 2, 3, 5, 10, 33, 1000]), min_size=1, max_size=3)
OPTIONS = {"skip": st.booleans(), "replace": st.booleans(), "op": st.sampled_from(["sum", "mean"])}


@given(data=st.data(), g=graphs(), sizes=SIZES, keys=st.tuples(WORDS, WORDS, WORDS), options=st.fixed_dictionaries(OPTIONS))
def test_small_graphs_equal_the_oracle_whatever_is_cached(data, g, sizes, keys, options) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check_against_oracle(variant, seeds, sizes, keys, **options)


@pytest.mark.parametrize(
    ("id_bytes", "options"),
    covering([4, 8], [{}, {"skip": True}, {"replace": True, "op": "mean"}, {"op": "mean", "skip": True}]),
)
def test_a_larger_graph_in_pieces_equals_the_oracle(id_bytes, options, monkeypatch) -> None:
    """Scratch grows in the middle of a layer; pieces and turns end within lists."""
    g = random_graph(6_000, 8, id_bytes=id_bytes)
    seeds = list(range(0, 3_000, 3))
    check_against_oracle(g, seeds, [700, 2_000], **options)
    monkeypatch.setattr("featstore.sampling.wholelists._LEAST", 37)
    monkeypatch.setattr("featstore.sampling.wholelists._MOST", 37)
    for variant in (g, g.cached(), g.cached(20_000)):
        check_against_oracle(variant, seeds, [700, 2_000], **options)


LISTS = [[8, 9, 10, 11], [8, 8, 12], [], [9, 13, 14, 15, 16, 17, 18], [3, 8], [0, 4, 19], *([[]] * 14)]
SEEDS = torch.tensor([0, 1, 2, 3, 4, 5])
N_DRAWS = 3_000


@pytest.mark.parametrize(
    ("op", "replace", "skip", "size"), covering(["sum", "mean"], [False, True], [False, True], [1, 4], together=2)
)
def test_weighted_sums_have_no_bias(op: str, replace: bool, skip: bool, size: int) -> None:
    """The mean of many draws lies within 4 standard errors of the exact sum over all neighbours, for each destination."""
    g = graph_of(LISTS)
    x = np.random.default_rng(3).uniform(0.5, 2, len(LISTS))
    sampler = LayerSampler(g, [size], seed=1, skip=skip, replace=replace, op=op)
    sums = np.zeros((N_DRAWS, len(SEEDS)))
    for index in range(N_DRAWS):
        batch = sampler.sample(SEEDS, 0, index)
        (block,) = batch.blocks
        rows = x[batch.input_ids.numpy()[block.src.numpy()]]
        np.add.at(sums[index], block.dst.numpy(), weights_of(block).numpy() * rows)
    exact = np.array(
        [x[np.array(own, np.int64)].sum() / (len(own) if op == "mean" and own else 1) for own in LISTS[: len(SEEDS)]]
    )
    error = sums.std(0, ddof=1) / math.sqrt(N_DRAWS)
    assert (np.abs(sums.mean(0) - exact) <= 4 * error + 1e-6).all()
    assert (sums[:, 2] == 0).all()  # it has no neighbours


def test_nodes_are_taken_as_often_as_their_importance_says() -> None:
    """Chi-square of how often each of 100 nodes is among the 20 that are taken, of distinct importance."""
    rng = np.random.default_rng(0)
    lists = [rng.choice(np.arange(50, 150), rng.integers(5, 60), replace=False).tolist() for _ in range(50)] + [[]] * 100
    sampler, seeds, size = LayerSampler(graph_of(lists), [20], seed=4), torch.arange(50), 20
    importance = np.bincount(np.concatenate(lists).astype(np.int64), minlength=150)[50:]
    expected = size * importance / importance.sum()
    assert expected.max() < 1
    counts = np.zeros(100)
    for index in range(N_DRAWS):
        ids = sampler.sample(seeds, 0, index).input_ids.numpy()
        assert len(ids) == 70  # exactly as many as were asked for
        counts[ids[50:] - 50] += 1
    spread = (counts - N_DRAWS * expected) ** 2 / (N_DRAWS * expected * (1 - expected))
    assert spread.sum() < chi_square_limit(100)


def test_a_layer_larger_than_the_neighbourhood_is_all_of_it() -> None:
    g = random_graph(300, 6)
    batch = LayerSampler(g, [1000]).sample(torch.arange(10))
    (block,) = batch.blocks
    (whole,) = featstore.NeighborSampler(g, [-1]).sample(torch.arange(10)).blocks
    assert torch.equal(block.src, whole.src)
    assert torch.equal(block.dst, whole.dst)
    assert (weights_of(block) == 1).all()


def test_skip_connections_take_what_the_batch_has() -> None:
    g = random_graph(400, 20)
    seeds = torch.arange(60)
    plain, skipping = (LayerSampler(g, [15, 15], seed=2, skip=skip).sample(seeds) for skip in (False, True))
    for batch in (plain, skipping):
        assert len(batch.input_ids) <= 90
    outer = skipping.blocks[0]
    own = outer.src < outer.n_dst
    assert (weights_of(outer)[own] == 1).all()
    nodes = skipping.input_ids[: outer.n_dst].tolist()
    among = sum(int(np.isin(g.indices[g.indptr[v] : g.indptr[v + 1]], nodes).sum()) for v in nodes)
    assert int(own.sum()) == among
    assert len(outer.src) - among > 0
    assert outer.n_src - outer.n_dst == 15
