"""Loading beside computing: how far a loader looks ahead by itself, and what it says it hid."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore.gather.counters import Overlap, StageTimer
from featstore.graph.feature import FeatureStore
from featstore.load.loader import MOST_AHEAD
from featstore.load.pipeline import PATIENCE, Pipeline
from tests.strategies.test_devicecache import STRATEGIES, N, arrays, check, dataset, epoch

__all__ = ["arrays", "dataset"]  # fixtures

STOP = 200


def until(there: Any) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.001)


def made(first: Any, overlap: Overlap | None = None, **options: Any) -> Pipeline[Any, Any, Any]:
    pipeline: Pipeline[Any, Any, Any] = Pipeline(
        first, lambda i, a: a, start=0, stop=STOP, threads=1, depth=2, timer=StageTimer(), overlap=overlap, **options
    )
    pipeline.begin()
    return pipeline


def test_it_looks_further_ahead_while_the_loop_waits_and_less_far_while_the_queue_is_full() -> None:
    go_on = threading.Semaphore(0)
    pipeline = made(lambda i: (go_on.acquire(), i)[1], most=6)
    try:
        depths = []
        for k in range(8):  # nothing is there when the loop asks: it waits
            releasing = threading.Thread(target=lambda: (until(lambda: pipeline._waiting), go_on.release()))
            releasing.start()
            assert pipeline.get() == k
            releasing.join()
            depths.append(pipeline.depth)
        assert depths == [3, 4, 5, 6, 6, 6, 6, 6]
        for _ in range(STOP):
            go_on.release()
        for k in range(8, 8 + PATIENCE * (6 + 5 + 4 + 3)):  # all may be there when the loop asks
            until(lambda: pipeline._done.qsize() >= pipeline.depth)
            assert pipeline.get() == k
        assert pipeline.depth == 2
        until(lambda: pipeline._done.qsize() == 2)
    finally:
        go_on.release(STOP)
        pipeline.close()


def test_without_memory_it_looks_no_further() -> None:
    asked: list[int] = []
    pipeline = made(lambda i: i, most=6, may_grow=lambda: bool(asked.append(1)))
    assert [pipeline.get() for _ in range(STOP)] == list(range(STOP))
    pipeline.close()
    assert pipeline.depth == 2
    fixed = made(lambda i: i, may_grow=lambda: bool(asked.append(2)))
    assert [fixed.get() for _ in range(STOP)] == list(range(STOP))
    fixed.close()
    assert 2 not in asked


def test_without_memory_on_the_device_it_looks_no_further(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches wait on the device: four more must fit what torch may take there. Stand-ins for CUDA."""
    with featstore.open(dataset, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(g, sampler, torch.arange(0, N, 2), 40, features=["x"], labels=None, prefetch="auto") as loader:
            list(loader)
            stages = loader._stages
            needed = 4 * stages.memory.batch_bytes(stages.memory.batch.n_rows)
            assert stages.may_grow()
            monkeypatch.setattr(stages, "_context", replace(stages._context, device=torch.device("cuda", 1)))
            for free, reserved, allocated in ((needed, 500, 500), (0, needed + 500, 500), (needed - 200, 700, 500)):
                for name, said in {"memory_reserved": reserved, "memory_allocated": allocated}.items():
                    monkeypatch.setattr(torch.cuda, name, lambda device, said=said: said)
                for short in (0, 1):
                    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, left=free - short: (left, 0))
                    assert stages.may_grow() == (not short)


def test_what_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: stages beside each other count once."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    overlap = Overlap()
    assert overlap.hidden == 0.0
    with overlap:
        now = 4.0
        with overlap:
            now = 8.0
        now = 10.0
    now = 100.0  # nobody works, the loop computes
    assert overlap.hidden == 1.0
    overlap.waited(2.5)
    assert overlap.hidden == 0.75
    with overlap:
        now = 110.0
        assert overlap.hidden == 1 - 2.5 / 20
    overlap.waited(1000.0)
    assert overlap.hidden == 0.0


def test_a_loop_that_only_loads_hides_nothing_one_that_computes_hides_it(dataset, monkeypatch, device) -> None:
    """By a clock that gathers move, each by a second, when they are let."""
    now, n_begun, go_on, gather = 0.0, 0, threading.Semaphore(0), FeatureStore.gather

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal now, n_begun
        n_begun += 1
        go_on.acquire()
        now += 1.0
        return gather(*args, **kwargs)

    monkeypatch.setattr(FeatureStore, "gather", counted)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with featstore.open(dataset, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        common: dict[str, Any] = {"features": ["x"], "labels": None, "device": device}
        with featstore.Loader(g, sampler, torch.arange(0, N, 2), 40, prefetch=0, **common) as loader:
            go_on.release(len(loader))
            assert sum(1 for _ in loader) == len(loader) == n_begun
            assert loader.stats()["hidden"] == 0.0  # the caller's thread does all of it
        n_begun = 0
        with featstore.Loader(g, sampler, torch.arange(0, N, 2), 40, prefetch=2, **common) as loader:
            batches = iter(loader)
            try:
                go_on.release()
                next(batches)
                first = loader._stages.overlap._waited_s
                (running,) = loader._iterators
                for k in range(1, len(loader)):
                    go_on.release()
                    until(lambda k=k: running._pipeline._done.qsize() and n_begun == min(k + 2, len(loader)))  # which waits
                    next(batches)
            finally:
                go_on.release(len(loader))
            hidden = loader.stats()["hidden"]
        assert first <= 1.0
        assert hidden == pytest.approx(1 - first / len(loader))  # but for the first batch nothing is waited for


@pytest.mark.parametrize("name", ["on demand", "belady", "streamed"])
def test_batches_with_a_prefetch_that_adapts(dataset: Path, arrays: dict[str, torch.Tensor], name: str, device: str) -> None:
    for memory in ("64MiB", "712KiB"):
        with featstore.open(dataset, memory=memory) as g:
            options = {**STRATEGIES[name], "prefetch": "auto", "device_cache": 0.1, "device": device}
            batches, stats = epoch(g, options, epochs=1)
            check(batches[0], arrays, device)
            assert 1 <= stats["prefetch"] <= MOST_AHEAD
            assert g.budget.peak <= g.budget.total
