"""Importance probabilities of layer-neighbour sampling against the iteration in plain Python, and what is taken with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import LaborSampler
from featstore._core import labor as core
from featstore._core.sampler import Hops
from featstore.errors import BudgetError
from tests.sampling.test_draws import chi_square_limit
from tests.sampling.test_labor import DEPENDENCIES
from tests.sampling.test_labor_numbers import number_of
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.support.reference_sampling import Blocks, check_batch, grown

STEPS = st.sampled_from([1, 2, 5, -1])


def expected_sources(probability: dict[int, float], scale: list[float], lists: list[list[int]]) -> float:
    most = dict.fromkeys(probability, 0.0)
    for neighbours, c in zip(lists, scale, strict=True):
        for t in neighbours:
            most[t] = max(most[t], c * probability[t])
    return math.fsum(most.values())


def scales(probability: dict[int, float], lists: list[list[int]], k: int) -> list[float]:
    """Scale each mean to the variance of ``k`` uniform draws: 1/d² Σ 1/(c p) - 1/d = 1/k - 1/d; no more than 1."""
    found = []
    for neighbours in lists:
        d = len(neighbours)
        found.append(1.0 if d <= k else min(1.0, k / d**2 * math.fsum(1 / probability[t] for t in neighbours)))
    return found


def iterated(lists: list[list[int]], k: int, steps: int) -> tuple[dict[int, float], list[float], list[float]]:
    """Probabilities of sources, scales of destinations, and the expected number of sources before each step."""
    probability = dict.fromkeys(itertools.chain.from_iterable(lists), 1.0)
    expected: list[float] = []
    while probability and len(expected) != steps:
        scale = scales(probability, lists, k)
        expected.append(expected_sources(probability, scale, lists))
        most = dict.fromkeys(probability, 0.0)
        for neighbours, c in zip(lists, scale, strict=True):
            for t in neighbours:
                most[t] = max(most[t], c)
        probability = {t: p * most[t] for t, p in probability.items()}
        if steps < 0 and len(expected) > 1 and expected[-2] - expected[-1] < 1e-4 * expected[-2]:
            break
    return probability, scales(probability, lists, k), expected


def oracle(
    g: ArrayGraph,
    seeds: list[int],
    fanouts: list[int],
    steps: int,
    dependency: int,
    key: tuple[int, int, int],
    layer_dependency: bool = False,
    redraw: bool = True,
) -> tuple[list[int], Blocks]:
    def drawn(hop: int, nodes: list[int]) -> Iterator[tuple[int, int]]:
        lists = [g.indices[int(g.indptr[v]) : int(g.indptr[v + 1])].tolist() for v in nodes]
        k = max(map(len, lists), default=0) if fanouts[hop] == -1 else fanouts[hop]
        probability, scale, _ = iterated(lists, k, steps) if k else ({}, [0.0] * len(lists), [])
        for place, (neighbours, c) in enumerate(zip(lists, scale, strict=True)):
            for t in neighbours if k else []:
                if number_of(*key, 0 if layer_dependency else hop, t, dependency) / 2**32 < c * probability[t]:
                    yield place, t

    return grown(seeds, len(fanouts), drawn, redraw)


def check_against_oracle(
    g: ArrayGraph, seeds: list[int], fanouts: list[int], steps: int, dependency: int, key: tuple[int, int, int], **more: Any
) -> None:
    sampler = LaborSampler(g, fanouts, dependency, key[0], importance_sampling=steps, **more)
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), *key[1:])
    check_batch(batch, oracle(g, seeds, fanouts, steps, dependency, key, **more), len(seeds), *key[1:])


@given(
    data=st.data(),
    g=graphs(),
    fanouts=FANOUTS,
    steps=STEPS,
    dependency=DEPENDENCIES,
    key=st.tuples(WORDS, WORDS, WORDS),
    layer_dependency=st.booleans(),
    redraw=st.booleans(),
)
def test_small_graphs_equal_the_oracle_whatever_is_cached(
    data: st.DataObject,
    g: ArrayGraph,
    fanouts: list[int],
    steps: int,
    dependency: int,
    key: tuple[int, int, int],
    layer_dependency: bool,
    redraw: bool,
) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check_against_oracle(variant, seeds, fanouts, steps, dependency, key, layer_dependency=layer_dependency, redraw=redraw)


@pytest.mark.parametrize("id_bytes", [4, 8])
def test_a_larger_graph_equals_the_oracle(id_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for nodes and for sources grows in the middle of a hop; lists are longer than a turn."""
    g = random_graph(30_000, 8, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(g.num_nodes, 300, replace=False).tolist()
    for variant in (g.cached(), g, g.cached(len(g.indices) // 3)):
        check_against_oracle(variant, seeds, [5, 5], 2, 4, (7, 2, 5))
        monkeypatch.setattr("featstore.sampling.labor._LEAST_READ", 50)


def weighed(lists: list[list[int]], k: int, steps: int, least: float = 1e-4) -> tuple[npt.NDArray[np.float64], Any, list[float]]:
    """Weights of the sources in order, their ids, and the expected numbers, of one hop in the core."""
    n = 1 + max(itertools.chain.from_iterable(lists), default=0) + len(lists)
    hops, sources = Hops(n, True), Hops(n, True)
    arrays = [[np.zeros(n + 1, np.int64) for _ in range(3)] for _ in range(2)]
    table = 1 << max(1, (2 * n + 2).bit_length())
    for each, own in zip((hops, sources), arrays, strict=True):
        each.attach(*own, np.zeros(table, np.uint64))
    hops.begin(np.arange(len(lists)))
    sources.begin(np.zeros(0, np.int64))
    degrees = [len(each) for each in lists]
    arrays[0][1][: len(lists)], arrays[0][2][: len(lists)] = np.cumsum([0, *degrees])[:-1], degrees
    records = np.array(list(itertools.chain.from_iterable(lists)), np.int32)
    layer = core.Layer(hops, len(lists), -1, 1, 1, 0, 0, records, 4)
    listed, counts = np.zeros(layer.n_ids + core.STEP, np.int32), np.zeros(len(lists), np.int64)
    layer.turn(np.zeros(0, np.int64))
    assert layer.choose(np.zeros(0, np.int32), listed, counts)
    importance = core.Importance(layer, sources, k, listed, counts)
    assert importance.number()
    weights = np.zeros((importance.n_sources, 2))
    expected = importance.weigh(weights, steps, least)
    return weights[:, 0], arrays[1][0][: importance.n_sources], expected


@given(
    lists=st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=20),
    k=st.integers(1, 8),
    steps=st.integers(1, 12),
)
def test_probabilities_are_those_of_the_iteration_and_the_expected_number_never_grows(
    lists: list[list[int]], k: int, steps: int
) -> None:
    weights, ids, expected = weighed(lists, k, steps)
    probability, scale, numbers = iterated(lists, k, steps)
    assert ids.tolist() == list(probability)
    np.testing.assert_allclose(1 / weights, list(probability.values()), rtol=1e-12)
    np.testing.assert_allclose(expected, numbers, rtol=1e-12)
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(expected))
    for neighbours, c in zip(lists, scale, strict=True):  # the variance of k uniform draws, and no more
        if len(neighbours) > k:
            found = math.fsum(1 / (c * probability[t]) for t in neighbours) / len(neighbours) ** 2
            assert found == pytest.approx(1 / k, rel=1e-9)
    if probability:
        assert max(probability.values()) <= 1
        alone = [max(min(1, k / len(each)) for each in lists if t in each) for t in probability]  # without importance
        assert expected[0] == pytest.approx(math.fsum(alone), rel=1e-12)


def test_steps_end_where_the_expected_number_has_converged() -> None:
    g = random_graph(3_000, 20, seed=3)
    lists = [each.tolist() for each in np.split(g.indices, g.indptr[1:-1])[:400]]
    *_, expected = weighed(lists, 5, -1)
    falls = [1 - after / before for before, after in itertools.pairwise(expected)]
    assert 3 < len(expected) < 100
    assert falls[-1] < 1e-4
    assert all(fall >= 1e-4 for fall in falls[:-1])
    *_, further = weighed(lists, 5, 10 * len(expected))
    assert further[-1] > 0.99 * expected[-1]


def test_what_is_taken_has_these_probabilities() -> None:
    """By chi-squared, of each destination and of all sources: one destination takes its neighbours independently."""
    rng = np.random.default_rng(5)
    lists = [sorted((40 + rng.choice(40, d, replace=False)).tolist()) for d in (3, 12, 20, 30, 40, 40)]
    g = graph_of([*lists, *[[]] * (80 - len(lists))]).cached()
    probability, scale, _ = iterated(lists, 4, 3)
    sampler, n, seeds = LaborSampler(g, [4], seed=9, importance_sampling=3), 4000, torch.arange(len(lists))
    edges, sources = np.zeros((len(lists), 80)), np.zeros(80)
    for index in range(n):
        batch = sampler.sample(seeds, 0, index)
        block = batch.blocks[0]
        ids = batch.input_ids.numpy()
        edges[block.dst.numpy(), ids[block.src.numpy()]] += 1
        sources[ids[len(lists) :]] += 1

    def check(counts: Any, p: Any) -> None:
        sure = p > 1 - 1e-12
        assert (counts[sure] == n).all()
        counts, p = counts[~sure], p[~sure]
        assert float(((counts - n * p) ** 2 / (n * p * (1 - p))).sum()) < chi_square_limit(max(1, len(p)))

    assert len({round(p, 3) for p in probability.values()}) > 3
    for s, (neighbours, c) in enumerate(zip(lists, scale, strict=True)):
        check(edges[s, neighbours], np.array([c * probability[t] for t in neighbours]))
        assert edges[s].sum() == edges[s, neighbours].sum()
    most = [max(c * probability[t] for each, c in zip(lists, scale, strict=True) if t in each) for t in probability]
    check(sources[list(probability)], np.array(most))


def test_fewer_sources_are_taken_with_every_step() -> None:
    g = random_graph(20_000, 20, seed=9).cached()
    parts = torch.randperm(20_000, generator=torch.Generator().manual_seed(0)).split(500)[:20]

    def nodes(steps: int) -> float:
        sampler = LaborSampler(g, [8], importance_sampling=steps)
        for index, part in enumerate(parts):
            sampler.sample(part, 0, index)
        return sampler.stats()["nodes"]

    none, one, all_of_them = nodes(0), nodes(1), nodes(-1)
    seeds = sum(map(len, parts))
    assert all_of_them < one
    assert one - seeds < 0.97 * (none - seeds)


def test_lists_that_are_taken_whole_need_no_probabilities() -> None:
    g = random_graph(2_000, 6, seed=1)
    for fanouts in ([-1, -1], [int(np.diff(g.indptr).max()), -1], [0, 0]):
        want = LaborSampler(g, fanouts).sample(torch.arange(100))
        assert same(want, LaborSampler(g, fanouts, importance_sampling=2).sample(torch.arange(100)))


def test_batches_do_not_depend_on_threads_order_or_where_lists_are(tmp_path: Path) -> None:
    g = random_graph(8_000, 10, seed=2)
    parts = torch.randperm(g.num_nodes, generator=torch.Generator().manual_seed(0))[:600].split(50)
    options: dict[str, Any] = {"batch_dependency": 3, "seed": 3, "importance_sampling": -1}
    reference = [LaborSampler(g, [5, 5], **options).sample(part, 1, i) for i, part in enumerate(parts)]
    featstore.OutOfCoreGraph.create(tmp_path / "g", g.indptr, g.indices, progress=False).close()
    with featstore.open(tmp_path / "g", memory="64MiB") as stored:
        for variant in (g, g.cached(), g.cached(len(g.indices) // 4), stored):
            sampler = LaborSampler(variant, [5, 5], **options)
            with ThreadPoolExecutor(3) as pool:
                batches = list(pool.map(lambda i, s=sampler: s.sample(parts[i], 1, i), reversed(range(len(parts)))))
            assert all(same(a, b) for a, b in zip(reversed(batches), reference, strict=True))
            sampler.trim()
            assert same(sampler.sample(parts[2], 1, 2), reference[2])


def test_options_repr_and_state() -> None:
    g = random_graph(500, 5)
    sampler = LaborSampler(g, [3, 2], 16, seed=5, importance_sampling=-1)
    assert repr(sampler) == "LaborSampler(fanouts=[3, 2], batch_dependency=16, seed=5, importance_sampling=-1)"
    kind, state = sampler.__reduce__()
    assert same(kind(*state).sample(torch.arange(9), 1, 2), sampler.sample(torch.arange(9), 1, 2))
    with pytest.raises(ValueError, match="importance_sampling"):
        LaborSampler(g, [1], importance_sampling=-2)
    with pytest.raises(TypeError, match="importance_sampling"):
        LaborSampler(g, [1], importance_sampling=1.5)  # type: ignore[arg-type]


def test_memory_is_counted() -> None:
    g = random_graph(30_000, 20, seed=3).cached()
    sampler = LaborSampler(g, [10, 10], importance_sampling=1)
    sampler.sample(torch.arange(0, 30_000, 30))
    with_sources = g.budget.report()["sampler scratch"]
    sampler = LaborSampler(h := random_graph(30_000, 20, seed=3).cached(), [10, 10])
    sampler.sample(torch.arange(0, 30_000, 30))
    assert with_sources > 1.2 * h.budget.report()["sampler scratch"]
    g.budget.total = g.budget.used + 1000
    with pytest.raises(BudgetError):
        LaborSampler(g, [10, 10], importance_sampling=1).sample(torch.arange(0, 30_000, 30))


def test_the_core_refuses_what_does_not_fit() -> None:
    hops, sources = Hops(1000, True), Hops(1000, True)
    nodes, place, degree = (np.zeros(16, np.int64) for _ in range(3))
    hops.attach(nodes, place, degree, np.zeros(32, np.uint64))
    hops.begin(np.arange(2))
    degree[:2] = 3
    records, none, counts = np.arange(3, dtype=np.int32), np.zeros(0, np.int64), np.zeros(2, np.int64)
    layer = core.Layer(hops, 2, -1, 1, 1, 0, 0, records, 4)
    listed = np.zeros(layer.n_ids + core.STEP, np.int32)
    with pytest.raises(ValueError, match="hops of their own"):
        core.Importance(layer, sources, 1, listed, counts)  # no room yet
    sources.attach(*(np.zeros(300, np.int64) for _ in range(3)), np.zeros(1024, np.uint64))
    with pytest.raises(ValueError, match="hops of their own"):
        core.Importance(layer, hops, 1, listed, counts)
    with pytest.raises(ValueError, match="gone through first"):
        core.Importance(layer, sources, 1, listed, counts)
    layer.turn(none)
    assert layer.choose(np.zeros(0, np.int32), listed, counts)
    with pytest.raises(ValueError, match="fan-out"):
        core.Importance(layer, sources, 0, listed, counts)
    with pytest.raises(ValueError, match="counts has 1"):
        core.Importance(layer, sources, 1, listed, counts[:1])
    for wrong in ([3, 4], [-1, 7], [3, 2]):
        with pytest.raises(ValueError, match="counts are not"):
            core.Importance(layer, sources, 1, listed, np.array(wrong))
    with pytest.raises(ValueError, match="6 listed ids"):
        core.Importance(layer, sources, 1, listed[:5].copy(), counts)
    with pytest.raises(ValueError, match="4 bytes expected"):
        core.Importance(layer, sources, 1, listed.astype(np.int64), counts)
    importance = core.Importance(layer, sources, 1, listed, counts)
    with pytest.raises(ValueError, match="left to number"):
        importance.weigh(np.zeros((3, 2)), 1, 0)
    assert importance.number()
    assert importance.n_sources == 3
    with pytest.raises(ValueError, match="no probabilities"):
        importance.keep()
    for shape in ((2, 2), (3, 1)):
        with pytest.raises(ValueError, match="shape"):
            importance.weigh(np.zeros(shape), 1, 0)
    assert importance.weigh(np.zeros((3, 2)), 1, 0) == [pytest.approx(1)]
    sources.begin(np.arange(1))
    with pytest.raises(ValueError, match="sources are gone"):
        importance.weigh(np.zeros((1, 2)), 1, 0)
    with pytest.raises(ValueError, match="sources are gone"):
        importance.keep()
    sources.begin(none)
    importance = core.Importance(layer, sources, 1, listed, counts)
    assert importance.number()
    importance.weigh(np.zeros((importance.n_sources, 2)), 1, 0)
    importance.keep()
    assert counts.sum() == layer.n_chosen
    for again in (importance.keep, importance.number):
        with pytest.raises(ValueError, match="kept already"):
            again()
