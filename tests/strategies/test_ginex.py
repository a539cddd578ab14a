"""The paper's serial schedule (``Ginex``): one memory for two caches, the initial prefetch, nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.base import PolicyContext
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon
from featstore.load.loader import Loader
from featstore.plan.trace import record
from featstore.strategies.memory import Memory
from featstore.strategies.switch import FEATURES, NEIGHBORS
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.refusing import refuses
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("small_pieces")

N = 4000
BATCH = 50
SHARE = 0.04


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of 1 KiB rows, so that a small share of them holds a good part of the adjacency."""
    indptr, indices = make_graph(N, 12.0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 256)).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "g"
    data = {"y": rng.integers(0, 5, N), "train_idx": rng.permutation(N)[:1000]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    return path


@pytest.fixture
def g(dataset: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(dataset, memory="64MB") as graph:
        yield graph


def serial(g: featstore.OutOfCoreGraph, **options: Any) -> Loader:
    options = {"length": 5, "cache": SHARE, "seed": 3} | options
    sampler = options.pop("sampler", None) or featstore.NeighborSampler(g, [4, 3], seed=1)
    return make_loader(g, sampler, g.node_data["train_idx"], BATCH, strategy="ginex", **options)


class Watched:
    """A sampler that notes what the ledger says while it samples."""

    fanouts = (4, 3)

    def __init__(self, g: featstore.OutOfCoreGraph) -> None:
        self.inner = featstore.NeighborSampler(g, self.fanouts, seed=1)
        self.graph = g
        self.reports: list[dict[str, int]] = []
        self.caches: list[Any] = []

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        self.reports.append(self.graph.memory_report())
        self.caches.append(self.graph.neighbor_cache)
        return self.inner.sample(seeds, epoch, index)


@pytest.mark.parametrize("more", [0, 5_000])
def test_one_memory_for_both_caches(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """While sampling the share is the neighbour cache's, and more; while gathering it is the feature cache's."""
    monkeypatch.setattr(Memory, "left_while_sampling", lambda _: more)
    sampler = Watched(g)
    with serial(g, sampler=sampler, prefetch=1, threads=1) as loader:
        share = loader._runner._switch.share  # type: ignore[attr-defined]
        held = g.memory_report()[FEATURES]
        assert held == share.total >= round(SHARE * N) * 1024
        sampler.reports.clear(), sampler.caches.clear()
        for batch in loader:
            # Of five batches: once the fifth is made, which is while the loop has the fourth, the next ones may be sampled.
            if batch.index % 5 < 3:
                report = g.memory_report()
                assert report[FEATURES] == held
                assert NEIGHBORS not in report
                assert share.report() == {"cache of 'x'": share.used}
                assert g.neighbor_cache is None
        assert len(sampler.reports) == len(loader) - 1 == 19  # the first was sampled when the loader was made
        for report, cache in zip(sampler.reports, sampler.caches, strict=True):
            assert held <= report[NEIGHBORS] <= held + more
            assert FEATURES not in report
            assert 0 < cache.n_cached < N
            assert held * (more > 0) < cache.nbytes <= report[NEIGHBORS]
        assert sampler.reports[0][NEIGHBORS] == held + more
        assert share.peak <= held + more
        # Loaded again from its run file each time but the last, when all is sampled: one for two superbatches, then one for each.
        assert len({id(cache) for cache in sampler.caches}) == 3
        stages = loader.stats()["seconds"]
        assert {"sample", "plan", "switch", "load", "gather", "update"} <= stages.keys()
    assert not {FEATURES, NEIGHBORS, "planner"} & g.memory_report().keys()
    assert g.features["x"].cache is None


def test_the_neighbor_cache_has_all_but_working_buffers(dataset: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = Watched(g)
        with serial(g, sampler=sampler) as loader:
            for batch in loader:
                if batch.index % 5 == 0:
                    assert loader._runner._switch.share.total < 200_000  # type: ignore[attr-defined]
        assert all(cache.n_cached == N for cache in sampler.caches[1:])


def test_a_superbatch_is_planned_while_the_next_one_is_sampled(g, monkeypatch) -> None:
    """Ginex, figure 9: by events, which never come if one waits for the other."""
    planning, sampling, plan = threading.Event(), threading.Event(), Belady.plan
    met: list[int] = []

    def planned(self: Belady, window: Horizon) -> Any:
        planning.set()
        assert sampling.wait(60)
        yield from plan(self, window)

    class Met(Watched):
        def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
            if index == 5:
                sampling.set()
                assert planning.wait(60)
            met.append(index)
            return super().sample(seeds, epoch, index)

    monkeypatch.setattr(Belady, "plan", planned)
    with serial(g, sampler=Met(g), prefetch=1) as loader:
        met.clear()
        batches = iter(loader)
        next(batches)
        assert sorted(met) == list(range(1, 10))  # of two superbatches, the first batch having been sampled before
        assert [batch.index for batch in batches] == list(range(1, 20))


def expected_loads(g: featstore.OutOfCoreGraph, size: int, capacity: int) -> tuple[int, int]:
    """Rows read ahead and rows missed, by sets: Belady over each superbatch alone, from its first rows."""
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    with Loader(g, sampler, g.node_data["train_idx"], BATCH, features=[], seed=3) as loader:
        seeds = [batch.seeds for batch in loader]
    trace = record(sampler, seeds, N)
    ids = [np.asarray(trace[b], np.int64) for b in range(len(trace))]
    ahead = missed = 0
    for first in range(0, len(ids), size):
        part = [rows.tolist() for rows in ids[first : first + size]]
        first_rows: list[int] = []
        for rows in part:
            first_rows += [row for row in rows if row not in set(first_rows)]
        cached = set(first_rows[:capacity])
        ahead += len(cached)
        sets = [set(rows) for rows in part]
        for i, rows in enumerate(part):
            missed += len(set(rows) - cached)
            uses = {row: next((j for j in range(i + 1, len(part)) if row in sets[j]), len(part)) for row in cached | set(rows)}
            kept = sorted((row for row in uses if uses[row] < len(part)), key=lambda row: (uses[row], row not in cached))
            cached = set(kept[:capacity])
    return ahead, missed


@pytest.mark.parametrize("capacity", [1, 40, 160, N])
def test_loads_are_those_of_the_initial_prefetch_and_belady(g: featstore.OutOfCoreGraph, capacity: int) -> None:
    ahead, missed = expected_loads(g, 5, capacity)
    with serial(g, cache=capacity / N) as loader:
        sum(1 for _ in loader)
        stats = loader.stats()
        assert stats["rows_loaded"] == ahead + missed
        assert stats["hits"]["base"] == missed
        assert stats["hits"]["base"] + stats["hits"]["host"] == stats["rows"]
        cache = g.features["x"].cache
        assert cache.stats()["fill_rows"] == ahead  # counts go on from cache to cache
        assert cache.stats()["misses"] == missed


def test_the_initial_content_is_what_the_superbatch_uses_first() -> None:
    batches = [np.array([5, 2], np.int32), np.array([2, 9, 1, 7], np.int32), np.array([0, 3], np.int32)]
    window = Horizon(10, np.array([0, 2, 6, 8]), batches.__getitem__, 3)
    assert window.first_rows(0).tolist() == []
    assert window.first_rows(1).tolist() == [5]
    assert window.first_rows(4).tolist() == [1, 2, 5, 9]
    assert window.first_rows(99).tolist() == [0, 1, 2, 3, 5, 7, 9]
    policy = Belady()
    policy.start(2, PolicyContext(10, 1), window.first_rows(2))
    found = [batch.slots.tolist() for batch in policy.plan(window)]
    assert found[0] == [1, 0]  # row 2 in slot 0, row 5 in slot 1
    assert found[1][0] == 0


def test_a_neighbor_cache_of_the_users_own_stays(g: featstore.OutOfCoreGraph) -> None:
    g.cache_neighbors("1MB")
    own = g.neighbor_cache
    sampler = Watched(g)
    with serial(g, sampler=sampler) as loader:
        sum(1 for _ in loader)
    assert {id(cache) for cache in sampler.caches} == {id(own)}
    assert g.neighbor_cache is own


def test_a_saved_neighbor_cache_is_loaded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(dataset, memory="64MB") as g, serial(g) as loader:
        size = loader._runner._switch.share.total  # type: ignore[attr-defined]
    with featstore.open(dataset, memory="64MB") as g:
        g.cache_neighbors(size, save=True)
    with featstore.open(dataset, memory="64MB") as g:
        monkeypatch.setattr(type(g), "policy_inputs", None)  # choosing nodes would fail
        with serial(g, run_dir=f"{dataset}.elsewhere") as loader:
            for _ in loader:
                assert not list(Path(f"{dataset}.elsewhere").rglob("neighbors"))


def state(g: featstore.OutOfCoreGraph) -> tuple[Any, ...]:
    g.pool.trim()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("featstore"))
    report = {name: n for name, n in g.memory_report().items() if name not in ("sampler scratch", "reader buffers")}
    return threads, report, os.path.exists(f"{g.path}.runs"), g.neighbor_cache, g.features["x"].cache


@pytest.mark.parametrize(("how", "stop"), covering(["break", "error", "interrupt", "close", "drop", "set_epoch"], [0, 4, 5, 11]))
def test_leaving_early_leaves_nothing(g: featstore.OutOfCoreGraph, how: str, stop: int) -> None:
    g.topology, g.node_data["y"], g.node_data["train_idx"]
    g.features["x"][[0]]
    before = state(g)
    loader = serial(g)
    resting = g.memory_report()[FEATURES]
    kinds = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}
    iterator = iter(loader)
    try:
        for batch in iterator:
            if batch.index == stop:
                if how in kinds:
                    raise kinds[how]
                break
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    del batch
    if how == "close":
        loader.close()
        refuses(featstore.ClosedError, "", lambda: next(iterator))
    elif how == "set_epoch":
        del iterator
        loader.set_epoch(0)
        assert [batch.index for batch in loader] == list(range(20))
    else:
        del iterator
        assert g.neighbor_cache is None
        assert not os.path.exists(f"{g.path}.runs")
        report = g.memory_report()
        assert NEIGHBORS not in report, "what it had beyond the feature caches is there for others"
        assert report[FEATURES] <= resting
    if how == "drop":
        del loader
    else:
        loader.close()
        loader.close()
    assert state(g) == before


def test_the_graph_may_be_closed_first(dataset: Path) -> None:
    g = featstore.open(dataset, memory="64MB")
    loader = serial(g)
    iterator = iter(loader)
    next(iterator)
    g.close()
    refuses((featstore.ClosedError, OSError), "", lambda: sum(1 for _ in iterator))
    loader.close()
    assert not g.memory_report().get(FEATURES)


def test_a_failing_switch_is_the_loops_error(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ahead fails: the loop gets the error, and the next epoch starts from nothing and is right."""
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    plain = [batch.x.clone() for batch in Loader(g, sampler, g.node_data["train_idx"], BATCH, seed=3)]
    with serial(g) as loader:
        loader.set_epoch(0)
        source = g.features["x"].source
        reads = source.gather

        def fails(rows: Any, out: Any, *_: Any) -> Any:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(source, "gather", fails)
        refuses(OSError, "broken", lambda: next(iter(loader)))
        monkeypatch.setattr(source, "gather", reads)
        loader.set_epoch(0)
        assert all(torch.equal(batch.x, x) for batch, x in zip(loader, plain, strict=True))


def test_leaving_while_the_next_superbatch_is_waited_for(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread.is_alive():
            waits.append(timeout)

    loader = serial(g, prefetch=4)
    iterator = iter(loader)
    next(iterator)
    run: Any = next(iter(loader._iterators))._run
    while not run._inspector._reached:  # a batch of the next superbatch is asked for ahead, and cannot be had yet
        next(iterator)
    monkeypatch.setattr(threading.Thread, "join", joined)
    loader.close()
    assert not waits  # no thread was still there when the patience with it had run out
