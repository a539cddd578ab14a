"""Superbatches: the batches of on-demand loading, bit for bit; the loads of Belady; nothing left behind."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon, PlannedBatch
from featstore.plan import cacheplans, planmemory, samples
from featstore.plan.samples import SampleFile
from featstore.plan.simulate import simulate
from featstore.plan.trace import record
from featstore.storage.sections import SectionFile
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.refusing import refuses
from tests.support.sampled import covering

N = 3000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    indptr, indices = make_graph(N, 8.0)
    rng = np.random.default_rng(0)
    features = {"x": rng.standard_normal((N, 33)).astype(np.float32), "z": rng.integers(0, 256, (N, 7), dtype=np.uint8)}
    path = tmp_path_factory.mktemp("data") / "g"
    labels = {"y": rng.integers(0, 5, N), "train_idx": rng.permutation(N)[:1000]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, labels, progress=False).close()
    return path


def batches(
    dataset: Path, memory: str = "64MB", epochs: int = 2, backend: str = "auto", **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    with featstore.open(dataset, memory=memory, backend=backend) as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with make_loader(g, sampler, g.node_data["train_idx"], batch_size=40, features=["x", "z"], seed=3, **options) as loader:
            found = []
            for _ in range(epochs):
                for batch in loader:
                    blocks = [(b.src.clone(), b.dst.clone(), b.n_src, b.n_dst) for b in batch.blocks]
                    tensors = [batch.input_ids, batch.seeds, batch.y, batch.x, batch.features["z"]]
                    found.append((batch.index, [t.clone() for t in tensors], blocks))
            stats = loader.stats()
        assert g.budget.peak <= g.budget.total
        return found, stats


def same(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    for (i, tensors, blocks), (j, others, other_blocks) in zip(a, b, strict=True):
        if i != j or not all(torch.equal(t, u) and t.dtype == u.dtype for t, u in zip(tensors, others, strict=True)):
            return False
        for block, other in zip(blocks, other_blocks, strict=True):
            if block[2:] != other[2:] or not (torch.equal(block[0], other[0]) and torch.equal(block[1], other[1])):
                return False
    return True


@pytest.fixture(scope="module")
def ondemand(dataset: Path) -> list[Any]:
    return batches(dataset, strategy="ondemand")[0]


# Beyond the epoch's end is the whole epoch.
@pytest.mark.parametrize(("cache", "size"), covering([0.1, 0, 0.0004, 1.0], [3, 1, 25, 10**9, "auto"]))
@pytest.mark.parametrize("strategy", ["superbatch", "ginex"])
def test_the_same_batches(dataset: Path, ondemand: list[Any], cache: int | float, size: int | str, strategy: str) -> None:
    backend = "pread" if size == 3 else "auto"
    options = {"backend": backend, "strategy": strategy, "length": size}
    assert same(batches(dataset, cache=cache, **options)[0], ondemand)
    assert not os.path.exists(f"{dataset}.runs")


def test_loads_are_beladys(dataset: Path) -> None:
    """One superbatch: what brute-force-tested simulation says. Several: at S = 5 look-ahead comes close, never below."""
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(g, sampler, g.node_data["train_idx"], batch_size=40, features=["x", "z"], seed=3) as loader:
            seeds = [batch.seeds for batch in loader]
        trace = record(sampler, seeds, N)
    best = int(simulate(trace, round(0.1 * N), "belady").sum())
    loads = {}
    for size in (25, 12, 5):
        _, stats = batches(dataset, epochs=1, strategy="superbatch", length=size, cache=0.1)
        loads[size] = stats["rows_loaded"] / 2  # two features
    assert loads[25] == best
    assert best <= loads[12] <= loads[5] <= 1.2 * best
    _, stats = batches(dataset, epochs=1, cache=0.1, policy="frequency")
    assert best < stats["rows_loaded"] / 2 + round(0.1 * N)  # its fill counted
    seconds = batches(dataset, epochs=1, strategy="superbatch")[1]["seconds"]
    assert {"sample", "plan", "load", "gather", "update"} <= seconds.keys()


class Noting(Belady):
    """Belady, which notes each window that it has planned: batches planned, batches looked ahead to."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[tuple[int, int]] = []
        self.changed = threading.Condition()

    def plan(self, window: Horizon) -> Iterator[PlannedBatch]:
        yield from super().plan(window)
        with self.changed:
            self.windows.append((window.n_planned, window.n_batches - window.n_planned))
            self.changed.notify_all()


@pytest.mark.parametrize("strategy", ["superbatch", "streamed"])
def test_the_next_superbatch_is_planned_while_one_runs(dataset: Path, strategy: str) -> None:
    """While the loop holds the first batch, two superbatches get planned and four sampled; no more, whatever time passes."""
    policy, sampled = Noting(), set[int]()
    with featstore.open(dataset, memory="64MB") as g:
        inner = featstore.NeighborSampler(g, [4, 3], seed=1)

        class Sampling:
            fanouts = (4, 3)

            def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
                sampled.add(index)
                with policy.changed:
                    policy.changed.notify_all()
                return inner.sample(seeds, epoch, index)

        with make_loader(
            g, Sampling(), g.node_data["train_idx"], 40, strategy=strategy, length=4, policy=policy, prefetch=0, threads=1
        ) as loader:
            iterator = iter(loader)
            for size in range(1, 7):
                next(iterator)  # the first batch of a superbatch
                with policy.changed:
                    # The limit on the wait is for a loader that is broken.
                    assert policy.changed.wait_for(lambda n=size: len(policy.windows) >= min(n + 1, 7), timeout=60)
                    # Superbatch 7 is a single batch. Each window looks ahead to the superbatch that follows it.
                    assert policy.windows == [(4, 4)] * min(size + 1, 5) + [(4, 1), (1, 0)][: max(0, size - 4)]
                    all_of_four = set(range(min(25, 4 * (size + 3))))
                    assert policy.changed.wait_for(lambda want=all_of_four: sampled >= want, timeout=60)
                assert sampled == all_of_four
                for _ in range(3):
                    next(iterator)
            next(iterator)
            assert next(iterator, None) is None


def test_disk_budget_and_errors(dataset: Path, tmp_path: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        make = lambda **options: make_loader(g, sampler, g.node_data["train_idx"], batch_size=40, **options)  # noqa: E731
        with make(strategy="superbatch", length=10, disk="20KB", run_dir=tmp_path / "runs") as loader:
            caught = refuses(OSError, "disk budget", lambda: list(loader))
            assert caught.value.errno == 28
        assert not os.path.exists(tmp_path / "runs")
        with make(strategy="superbatch", disk="1MB", run_dir=tmp_path / "runs") as loader:  # auto keeps to it
            assert len(list(loader)) == 25
        for options, words in [
            ({"strategy": "superbatch", "policy": "lru"}, "planned policy"),
            ({"strategy": "ondemand", "policy": "belady"}, "a static policy or an online policy"),
            ({"strategy": "superbatch", "length": 0}, "at least 1"),
            ({"strategy": "superbatch", "length": "many"}, "number of batches"),
        ]:
            refuses(ValueError, words, lambda: make(**options))
        refuses(ValueError, "plans ahead", lambda: g.cache("x", "1MB", "belady"))


def test_a_failing_sampler_is_the_loops_error(dataset: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        inner = featstore.NeighborSampler(g, [4, 3], seed=1)

        class Failing:
            fanouts = (4, 3)

            def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
                if index == 12:
                    raise ZeroDivisionError("batch 12")
                return inner.sample(seeds, epoch, index)

        with featstore.Loader(
            g, Failing(), g.node_data["train_idx"], batch_size=40, strategy=featstore.Superbatch(length=5)
        ) as loader:
            refuses(ZeroDivisionError, "batch 12", lambda: list(loader))
        assert not os.path.exists(f"{dataset}.runs")


@pytest.mark.parametrize("options", [{}, {"strategy": "ginex"}, {"length": 1}, {"threads": 3}])
def test_spilled_next_positions_give_the_same_batches(dataset, ondemand, tmp_path, monkeypatch, options) -> None:
    """Next positions in the run directory: same batches, same loads, nothing left."""
    options = {"strategy": "superbatch", "length": 7, "cache": 0.05, "run_dir": tmp_path / "runs"} | options
    _, in_memory = batches(dataset, **options)
    spills = []
    spill, decide = cacheplans.Spill.__init__, cacheplans.CachePlanner._must_spill
    monkeypatch.setattr(cacheplans.Spill, "__init__", lambda self, *given: (spills.append(given), spill(self, *given))[1])
    monkeypatch.setattr(cacheplans.CachePlanner, "_must_spill", lambda *given: (decide(*given), True)[1])
    found, stats = batches(dataset, **options)
    assert len(spills) == 2 * -(-25 // options["length"])
    assert same(found, ondemand)
    assert stats["rows_loaded"] == in_memory["rows_loaded"]
    assert not os.path.exists(tmp_path / "runs")


def test_a_window_beyond_the_planners_share_is_spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next positions that would take more than the planner's part of the memory go to disk, and the budget is kept."""
    spills = []
    spill = cacheplans.Spill.__init__
    monkeypatch.setattr(cacheplans.Spill, "__init__", lambda self, *given: (spills.append(given), spill(self, *given))[1])
    indptr, indices = make_graph(N, 40.0)
    features = {"z": np.random.default_rng(1).integers(0, 256, (N, 7), dtype=np.uint8)}
    dataset, labels = tmp_path / "dense", {"train_idx": np.arange(1000)}
    featstore.OutOfCoreGraph.create(dataset, indptr, indices, features, labels, progress=False).close()
    found = {}
    for memory in ("8MB", "700KB"):
        with featstore.open(dataset, memory=memory) as g:
            sampler = featstore.NeighborSampler(g, [10, 10], seed=1)
            options = {"batch_size": 10, "features": ["z"], "cache": 0.05, "prefetch": 1, "seed": 2, "labels": None}
            with make_loader(
                g, sampler, g.node_data["train_idx"], strategy="superbatch", length=50, run_dir=tmp_path / "runs", **options
            ) as loader:
                found[memory] = [(batch.input_ids.clone(), batch.features["z"].clone()) for batch in loader]
                lengths = np.array([len(ids) for ids, _ in found[memory]])
                size = (N, int(lengths.sum()), int(lengths[:50].sum()), int(lengths.max()))
                slots = round(0.05 * N)
                needed = planmemory.planning_bytes(*size, capacity=slots)
                is_spilled = planmemory.planning_bytes(*size, capacity=0) > int(g.budget.total * planmemory.PLANNER_FRACTION)
                held = g.memory_report()["planner"]
                assert (held < needed) == is_spilled
                assert held >= planmemory.planning_bytes(*size, capacity=slots, spilled=is_spilled)
            assert g.budget.peak <= g.budget.total
        assert len(spills) == (0 if memory == "8MB" else 2)
    assert is_spilled
    for (ids, rows), (other_ids, other_rows) in zip(*found.values(), strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(rows, other_rows)


def test_a_full_disk_in_a_spill_is_the_loops_error(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cacheplans.CachePlanner, "_must_spill", lambda *_: True)
    append = cacheplans.SectionWriter.append

    def full(self: Any, array: Any) -> int:
        if self.path.endswith("next-1"):
            self.abort()
            raise OSError(28, "No space left on device", self.path)
        return append(self, array)

    monkeypatch.setattr(cacheplans.SectionWriter, "append", full)
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(
            g,
            sampler,
            g.node_data["train_idx"],
            batch_size=40,
            strategy=featstore.Superbatch(length=5, run_dir=tmp_path / "runs"),
        ) as loader:
            caught = refuses(OSError, "next-1", lambda: list(loader))
            assert caught.value.errno == 28
        assert not os.path.exists(tmp_path / "runs")


@settings(deadline=None)
@given(st.lists(st.integers(-1, 40), max_size=60))
def test_slots_split_into_hits_and_misses(slots: list[int]) -> None:
    """Slots as the plan file keeps them, against NumPy."""
    from featstore._core.blocks import hits_of, missed_positions

    some = np.array(slots, np.int32)
    k = len(slots)
    positions, hit_slots, missed = np.empty(k, np.int64), np.empty(k, np.int32), np.empty(k, np.int32)
    n = hits_of(some, positions, hit_slots)
    assert positions[:n].tolist() == np.flatnonzero(some >= 0).tolist()
    assert hit_slots[:n].tolist() == some[some >= 0].tolist()
    assert missed_positions(some, missed) == k - n
    assert missed[: k - n].tolist() == np.flatnonzero(some < 0).tolist()
    longer = np.zeros(k + 1, np.int32)
    refuses(ValueError, "shorter", lambda: missed_positions(longer, missed))
    refuses(ValueError, "shorter", lambda: hits_of(longer, positions, hit_slots))


@pytest.mark.parametrize("kind", ["superbatch", "streamed", "spilled", "without memory"])
def test_ids_are_read_twice_at_most(dataset: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to read ahead and once to deliver: planning has those that sampling kept. More often only where no memory is free."""
    reads: Counter[tuple[str, int]] = Counter()
    files: list[SampleFile] = []
    run, make = SectionFile.run, SampleFile.__init__

    def counting(self: SectionFile, first: int, count: int, *array: Any) -> Any:
        reads.update((self.path, number) for number in range(first, first + count))
        return run(self, first, count, *array)

    def making(self: SampleFile, *given: Any) -> None:
        make(self, *given)
        files.append(self)

    monkeypatch.setattr(SectionFile, "run", counting)
    monkeypatch.setattr(SampleFile, "__init__", making)
    if kind == "spilled":
        monkeypatch.setattr(cacheplans.CachePlanner, "_must_spill", lambda *given: True)
    if kind == "without memory":
        monkeypatch.setattr(samples, "FREE_FRACTION", 1)
    strategy = "streamed" if kind == "streamed" else "superbatch"
    found, stats = batches(dataset, epochs=1, strategy=strategy, length=6, cache=0.1)
    times = [reads[file._file.path, number * file._stride + 1] for file in files for number in range(len(file))]
    assert len(times) == len(found) == 25
    # Kept nowhere, two windows number and link their rows, one plans changes; then they are read ahead and delivered.
    assert max(times) == {"streamed": 1, "without memory": 7}.get(kind, 2)
    if kind == "superbatch":
        assert stats["reads"] > 0


def test_kept_ids_are_taken_back_where_memory_is_short() -> None:
    budget = Budget(1 << 20)
    kept = samples.KeptIds(budget)
    kept.append(np.arange(100_000, dtype=np.int32))
    kept.append(np.arange(200_000, dtype=np.int32))  # no room beside what is left free
    kept.append(np.arange(10, dtype=np.int32))  # nor for those behind it
    first = kept.get(0)
    assert not first.flags.writeable
    assert (kept.get(1), kept.get(2)) == (None, None)
    assert budget.used == budget.on_loan == 400_000
    budget.reserve("another", 1 << 20)
    assert kept.get(0) is None
    assert budget.on_loan == 0
    kept.append(np.arange(10, dtype=np.int32))
    kept.drop()
    assert budget.used == 1 << 20
