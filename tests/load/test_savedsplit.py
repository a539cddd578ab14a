"""``History(nodes="auto")``: nodes that a loader chooses by what they save of its I/O, and what the run is then."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.base import POLICIES, PolicyContext, get_policy
from featstore.cache.lru import LRU
from featstore.estimate.misscurve import miss_curve
from featstore.estimate.savedio import best_split
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.load import savedsplit
from featstore.load.savedsplit import profile
from featstore.plan.trace import record
from featstore.sampling.sampledbatches import Drawn
from featstore.strategies.switch import CacheSwitch
from featstore.topology.base import huge_bytes
from tests.support.whole_graph import skewed_graph

N, BATCH, DIM = 2000, 20, 16
SEEDS = np.arange(600)
STRATEGIES: dict[str, Any] = {
    "no cache": featstore.OnDemand(cache=None),
    "degree": featstore.OnDemand(cache="auto"),
    "frequency": featstore.OnDemand(cache="auto", policy="frequency"),
    "lru": featstore.OnDemand(cache="auto", policy="lru"),
    "given": featstore.OnDemand(cache=0.1, policy="lru"),
    "superbatch": featstore.Superbatch(),
    "stays": featstore.Superbatch(policy="degree"),
    "ginex": featstore.Ginex(),
    "streamed": featstore.Streamed(),
    "auto": featstore.Auto(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "g"
    indptr, indices = skewed_graph(N, 6, hubs=[5, 9], hub_degree=90, seed=1)
    rng = np.random.default_rng(4)
    features = {"x": rng.standard_normal((N, 100)).astype(np.float32), "narrow": rng.standard_normal((N, 1)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, {"y": rng.integers(0, 3, N)}, progress=False).close()
    return path


@pytest.fixture
def g(path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(path, memory="1600KiB") as graph:
        yield graph


def make(g: featstore.OutOfCoreGraph, history: Any, strategy: Any = STRATEGIES["no cache"], **options: Any) -> featstore.Loader:
    options = {"features": "x", "seed": 7, **options}
    return featstore.Loader(
        g, featstore.NeighborSampler(g, [4, 3], seed=1), SEEDS, BATCH, history=history, strategy=strategy, **options
    )


Batches = list[tuple[list[int], list[int], float]]


def run(loader: featstore.Loader, epochs: int = 2) -> Batches:
    """Train; return what every batch had, with its features and the embeddings that were pulled in one number."""
    found: Batches = []
    for _ in range(epochs):
        for batch in loader:
            n = batch.blocks[-2].n_dst
            h = batch.x[:n, :1].double().expand(n, DIM).float()
            merged = h if batch.history is None else batch.history.merge(h)
            found.append((batch.input_ids.tolist(), batch.seeds.tolist(), float(merged.double().sum())))
    return found


@pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_are_those_of_the_same_nodes(path: Path, strategy: str) -> None:
    """In the memory that there is, with the split's part of it counted; the curve says what was chosen and why."""
    with featstore.open(path, memory="1600KiB") as g:
        history = featstore.History(DIM, "auto", 50)
        assert "nodes='auto'" in repr(history)
        with make(g, history, STRATEGIES[strategy]) as loader:
            assert g.memory_report().get("saved I/O", 0) == 0  # judging is over
            found, stats = run(loader), loader.stats()
        split, nodes = stats["history"]["split"], history.times.nodes
        assert 0 < split["nodes"] == stats["history"]["nodes"] == len(nodes) < N
        assert split["alpha"] > 0
        assert split["nodes"] * (2 * 4 * DIM + 24) <= split["alpha"] * split["bytes"] <= split["bytes"]
        assert stats["history"]["pulled"] > 0
        assert stats["seconds"]["split"] > 0
        curve = split["curve"]
        assert curve["alpha"] == [k / 100 for k in range(101)]
        sums = [sum(each) for each in zip(curve["embeddings"], curve["features"], curve["lists"], strict=True)]
        assert curve["saved"] == pytest.approx(sums)
        assert split["alpha"] == curve["alpha"][int(np.argmax(curve["saved"]))]
        assert any(curve["features"]) == (strategy not in ("no cache", "given"))
        assert any(curve["lists"]) == (strategy == "ginex")
        assert g.budget.peak <= g.budget.total
    with featstore.open(path, memory="32MiB") as g, make(g, featstore.History(DIM, nodes, 50)) as loader:
        assert run(loader) == found
        assert "split" not in loader.stats()["history"]


@pytest.mark.parametrize(("features", "row_s"), [("x", 4.0), (["x", "narrow"], 5.0), ([], None)])
@pytest.mark.parametrize("batch", [7, 64, 600])
def test_beta_is_what_an_edge_costs_in_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch, features: Any, row_s: float | None, batch: int
) -> None:
    """By a clock that runs while edges are drawn and rows are read alone: the same β, however many batches there are."""
    clock, sample = [0.0], featstore.NeighborSampler.sample
    monkeypatch.setattr(savedsplit, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def timed(*args: Any, **options: Any) -> Any:
        sampled = sample(*args, **options)
        clock[0] += 3.0 * sum(len(block.dst) for block in sampled.blocks)
        return sampled

    monkeypatch.setattr(featstore.NeighborSampler, "sample", timed)
    with featstore.open(path, memory="8MiB") as g:
        for name, seconds in (("x", 4.0), ("narrow", 1.0)):
            gather = g.features[name].source.gather

            def read(rows: Any, out: Any, gather: Any = gather, seconds: float = seconds) -> Any:
                clock[0] += seconds * len(rows)
                return gather(rows, out)

            monkeypatch.setattr(g.features[name].source, "gather", read)
        history, sampler = featstore.History(DIM, "auto", 50), featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(
            g, sampler, SEEDS, batch, features=features, history=history, strategy=STRATEGIES["no cache"]
        ) as loader:
            split = loader.stats()["history"]["split"]
    assert split["beta"] == pytest.approx(1.0 if row_s is None else 3.0 / row_s)


@pytest.mark.parametrize(("policy", "strategy"), [("frequency", "ondemand"), ("degree", "ondemand"), ("belady", "superbatch")])
def test_the_choice_is_equation_5_by_enumeration(path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, strategy: str) -> None:
    """Sums by score, or what replaying the epoch loads; β fixed, as seconds are not the same twice."""
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)
    monkeypatch.setattr(savedsplit, "SIZES", 100)
    with featstore.open(path, memory="1600KiB") as g:
        history = featstore.History(DIM, "auto", 50)
        cache = {"cache": "auto", "policy": policy}
        made = featstore.OnDemand(**cache) if strategy == "ondemand" else featstore.Superbatch(**cache)
        with make(g, history, made) as loader:
            split = loader.stats()["history"]["split"]
        assert split["beta"] == 0.25
        sampler, order = featstore.NeighborSampler(g, [4, 3], seed=1), featstore.RandomBatches(SEEDS, BATCH, seed=7)
        g.pool.trim()
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        counted, _, _ = profile(Drawn(sampler, order), g, 50)
        trace = record(sampler, [order.epoch(0).seeds(k) for k in range(len(order))], N)
        with g.policy_inputs(400) as inputs:
            order_of = {"frequency": counted.accesses, "degree": inputs.context.out_degree.copy()}.get(policy)

        def rows_of(n_bytes: int) -> int:
            each = 400 + (8 if policy == "belady" else 0)
            return max(0, min(N, (n_bytes - 4 * N) // each))

        def saved(n_bytes: int) -> float:
            rows = rows_of(n_bytes)
            if order_of is not None:
                best = sorted(range(N), key=lambda node: (-order_of[node], node))[:rows]
                return float(sum(counted.accesses[best]))
            loads = miss_curve(trace, [rows], [policy]).curves[0].rows_loaded[0] if rows else trace.n_accesses
            return float(trace.n_accesses - loads)

        expected = best_split(split["bytes"], counted.embeddings(0.25), 2 * 4 * DIM + 24, saved)
    slack = 0.01 * max(expected.benefits) if policy == "belady" else 1e-6  # rows of a line between two sizes
    assert split["curve"]["saved"] == pytest.approx(expected.benefits, abs=slack)
    assert expected.benefits[round(100 * split["alpha"])] >= max(expected.benefits) - slack
    if policy != "belady":
        assert split["alpha"] == expected.alpha
        best = np.argsort(-counted.embeddings(0.25), kind="stable")[: split["nodes"]]
        assert history.times.nodes.tolist() == sorted(best.tolist())


@pytest.mark.parametrize("cache", ["auto", 0.1])
def test_lists_join_the_choice_where_they_have_the_caches_memory_in_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch, cache: Any
) -> None:
    """Of each α, the lists that Ginex would choose for what embeddings leave, and as much more as it has while it samples."""
    more = 9_000
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)
    monkeypatch.setattr(savedsplit, "_more_while_sampling", lambda *_: more)
    with featstore.open(path, memory="1600KiB") as g:
        with make(g, featstore.History(DIM, "auto", 50), featstore.Ginex(cache=cache)) as loader:
            split = loader.stats()["history"]["split"]
    with featstore.open(path, memory="64MiB") as g:
        sampler, order = featstore.NeighborSampler(g, [4, 3], seed=1), featstore.RandomBatches(SEEDS, BATCH, seed=7)
        counted, _, _ = profile(Drawn(sampler, order), g, 50)
        with g.policy_inputs(4) as inputs:
            degree, scores = inputs.context.in_degree.copy(), inputs.scores(get_policy("in_out_ratio")).copy()
        whole_bytes = huge_bytes(4 * g.num_edges)
    order_of_lists = sorted(range(N), key=lambda node: (-scores[node], node))
    expected = []
    for alpha in range(101):
        room = split["bytes"] - split["bytes"] * alpha // 100
        left, saved = room + more - huge_bytes(8 * N), 0.0
        for node in order_of_lists if room or cache != "auto" else []:
            left -= 4 * (int(degree[node]) + 1)
            if left < 0:
                break
            saved += 0.25 * int(counted.drawn[node])
        expected.append(0.25 * int(counted.drawn.sum()) if (room or cache != "auto") and room + more >= whole_bytes else saved)
    assert split["curve"]["lists"] == pytest.approx(expected)
    assert 0 < len(set(expected)) > 3


def test_lists_are_judged_by_the_memory_that_they_get(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that an epoch loads lists into is what the choice took it for, but for what batches turn out to be."""
    judged, got = list[int](), list[int]()
    more_of, load = savedsplit._more_while_sampling, CacheSwitch._load_neighbors

    def more(*what: Any) -> int:
        judged.append(more_of(*what))
        return judged[-1]

    def loaded(switch: CacheSwitch, check: Any) -> Any:
        got.append(switch.share.total)
        return load(switch, check)

    monkeypatch.setattr(savedsplit, "_more_while_sampling", more)
    monkeypatch.setattr(CacheSwitch, "_load_neighbors", loaded)
    with featstore.open(path, memory="1600KiB") as g:
        monkeypatch.setattr(
            NeighborCache, "whole_bytes", lambda topology, edges=False: 1 << 40
        )  # else no more is taken than that
        with make(g, featstore.History(DIM, "auto", 50), featstore.Ginex()) as loader:
            run(loader, 1)
            split = loader.stats()["history"]["split"]
    expected = split["bytes"] - split["nodes"] * (2 * 4 * DIM + 24) + judged[0]
    assert got[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("why", ["a neighbour cache", "no cache", "no features"])
def test_lists_that_get_no_memory_are_not_counted(path: Path, why: str) -> None:
    with featstore.open(path, memory="1600KiB") as g:
        if why == "a neighbour cache":
            g.cache_neighbors("30KB")
        strategy = featstore.Ginex(cache=None if why == "no cache" else "auto")
        features = [] if why == "no features" else "x"
        with make(g, featstore.History(DIM, "auto", 50), strategy, features=features) as loader:
            assert not any(loader.stats()["history"]["split"]["curve"]["lists"])


@pytest.mark.parametrize("memory", ["900KiB", "1600KiB"])
@pytest.mark.parametrize("strategy", ["degree", "superbatch"])
def test_what_is_divided_is_there(path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, strategy: str) -> None:
    """For embeddings and the cache together; in the least memory it is less than counting takes."""
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)  # of a busy machine it may leave nothing to a cache
    with featstore.open(path, memory=memory) as g:
        history = featstore.History(DIM, "auto", 50)
        with make(g, history, STRATEGIES[strategy]) as loader:
            split, cached = loader.stats()["history"]["split"], g.memory_report()["cache of 'x'"]
    assert split["alpha"] < 1
    assert split["bytes"] == pytest.approx(cached + split["nodes"] * (2 * 4 * DIM + 24), abs=split["bytes"] // 100 + 404)


@pytest.mark.parametrize("cache", [0.05, "200KB"])
def test_a_cache_of_a_given_size_leaves_less_to_divide(path: Path, cache: Any) -> None:
    divided, cached = [], 0
    for size in (None, cache):
        with featstore.open(path, memory="1600KiB") as g:
            history = featstore.History(DIM, "auto", 50)
            with make(g, history, featstore.OnDemand(cache=size)) as loader:
                split = loader.stats()["history"]["split"]
                divided.append(split["bytes"])
                cached = g.memory_report().get("cache of 'x'", 0)
                assert split["nodes"] * history.node_bytes <= split["bytes"]
    assert divided[0] - divided[1] == cached > 0


class ReadyLRU(LRU):
    """Works with an option alone, so that another instance, of the defaults, cannot be what is judged."""

    def __init__(self, is_ready: bool = False) -> None:
        self.is_ready = is_ready

    def start(self, capacity: int, context: PolicyContext) -> None:
        assert self.is_ready
        super().start(capacity, context)


def test_a_policy_is_judged_with_its_options(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)
    monkeypatch.setitem(POLICIES.known, "lru", ReadyLRU)
    splits = []
    for policy in (LRU(), ReadyLRU(is_ready=True)):
        with featstore.open(path, memory="1600KiB") as g:
            with make(g, featstore.History(DIM, "auto", 50), featstore.OnDemand(cache="auto", policy=policy)) as loader:
                run(loader, 1)
                splits.append(loader.stats()["history"]["split"])
    assert splits[0] == splits[1]


@pytest.mark.parametrize(("policy", "slack"), [("lru", 0.1), ("belady", 0.1)])
def test_a_part_of_the_accesses_tells_of_all(path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, slack: float) -> None:
    """Of as many rows: a cache of the same share of fewer rows, and reads in proportion."""
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)
    curves = []
    for most in (savedsplit.REPLAYED, 4_000):
        monkeypatch.setattr(savedsplit, "REPLAYED", most)
        strategy = featstore.OnDemand(cache="auto", policy=policy) if policy == "lru" else featstore.Superbatch()
        with featstore.open(path, memory="1600KiB") as g:
            with make(g, featstore.History(DIM, "auto", 50), strategy) as loader:
                curves.append(np.array(loader.stats()["history"]["split"]["curve"]["features"]))
    whole, part = curves
    assert not np.array_equal(whole, part)
    assert np.abs(part - whole).max() <= slack * whole.max()


def test_without_features_edges_alone_are_saved(path: Path) -> None:
    """Each counts one, as there is no row to compare it with."""
    with featstore.open(path, memory="1600KiB") as g:
        with make(g, featstore.History(DIM, "auto", 50), features=[]) as loader:
            split = loader.stats()["history"]["split"]
    with featstore.open(path, memory="64MiB") as g:
        sampler, order = featstore.NeighborSampler(g, [4, 3], seed=1), featstore.RandomBatches(SEEDS, BATCH, seed=7)
        counted, _, _ = profile(Drawn(sampler, order), g, 50)
    best = sorted(counted.edges.tolist(), reverse=True)
    assert split["curve"]["embeddings"] == [sum(best[:n]) for n in split["curve"]["nodes"]]
    assert 0 < split["nodes"] == np.count_nonzero(counted.edges)


def test_rows_narrower_than_embeddings_may_leave_none(path: Path) -> None:
    """Then the loader runs as without a history, and the loop merges all the same."""
    with featstore.open(path, memory="32MiB") as g:
        with make(g, None, features="narrow") as loader:
            plain = run(loader)
        with make(g, featstore.History(DIM, "auto", 0), "superbatch", features="narrow") as loader:
            assert run(loader) == plain  # of no use: staleness 0
            stats = loader.stats()["history"]
            assert (stats["nodes"], stats["bytes"], stats["pulled"], stats["pushed"]) == (0, 0, 0, 0)
            assert stats["split"]["alpha"] == 0.0
            assert not any(stats["split"]["curve"]["embeddings"])
    wide = featstore.History(40_000, "auto", 50)
    with featstore.open(path, memory="1600KiB") as g, make(g, wide, featstore.OnDemand(cache="auto")) as loader:
        assert loader.stats()["history"]["split"]["alpha"] < 1
        for batch in loader:
            h = torch.zeros(batch.blocks[-2].n_dst, 40_000)
            assert batch.history.merge(h).shape == (batch.history.n_sources, 40_000)
            break


def test_memory_that_is_too_short_to_judge_keeps_none(path: Path) -> None:
    with featstore.open(path, memory="32MiB") as g:
        with make(g, None) as loader:
            plain = run(loader)
        g.cache_neighbors(0)
        held = g.budget.reserve("others", 0)
        choose = savedsplit.HistorySplit._choose

        def short(*args: Any, **more: Any) -> Any:
            held.resize(g.budget.available - 70 * N)  # less than what counting takes
            try:
                return choose(*args, **more)
            finally:
                held.release()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(savedsplit.HistorySplit, "_choose", short)
            loader = make(g, featstore.History(DIM, "auto", 50))
        with loader:
            assert run(loader) == plain
            split = loader.stats()["history"]["split"]
        assert split["why"].startswith("no memory to judge: saved I/O needs")
        assert split["nodes"] == 0


def test_the_nodes_stay(path: Path, g: featstore.OutOfCoreGraph) -> None:
    """With the next loader, with the state in another process's history; not where the loader could not be made."""
    history = featstore.History(DIM, "auto", 50)
    with pytest.raises(ValueError, match="no table yet"):
        history.state_dict()
    with make(g, history) as loader:
        run(loader, 1)
    nodes, state = history.times.nodes.copy(), copy.deepcopy(history.state_dict())
    with make(g, history, "superbatch", seed=8) as loader:
        assert np.array_equal(history.times.nodes, nodes)
        run(loader, 1)
    again = featstore.History(DIM, "auto", 50)
    again.load_state_dict(state)
    with featstore.open(path, memory="16MiB") as other, make(other, again) as loader:
        assert np.array_equal(again.times.nodes, nodes)
        assert "split" not in loader.stats()["history"]
    broken = featstore.History(DIM, "auto", 50)
    before = {name: n for name, n in g.memory_report().items() if "sampler" not in name}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("featstore.load.loader.Stages", lambda *args: 1 // 0)
        make(g, broken)
    assert len(broken) == 0
    assert {name: n for name, n in g.memory_report().items() if "sampler" not in name} == before
    with make(g, broken) as loader:
        run(loader, 1)
    assert len(broken) > 0


def test_what_is_refused(g: featstore.OutOfCoreGraph) -> None:
    with pytest.raises(featstore.OptionError, match="divides the host's memory, and on meta the table"):
        make(g, featstore.History(DIM, "auto"), device="meta")
    with pytest.raises(TypeError, match=r"a share such as 0\.2, ids, a mask or 'auto', not 'all'"):
        featstore.History(DIM, "all")
