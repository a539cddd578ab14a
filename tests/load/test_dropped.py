"""A loader that is dropped, without being closed, in the middle of an epoch: its sampler, plans and memory go with it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import featstore
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies import packed
from featstore.strategies.base import Runner
from featstore.strategies.memory import WINDOWS
from tests.support.frozen import SAMPLERS, STRATEGIES, THREADS, make_dataset, make_loader_of, make_pack
from tests.support.sampled import covering

pytestmark = pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("dropped") / "graph", 3_000, 24, edge_dim=4)


def begin(g: featstore.OutOfCoreGraph, sampler: str, strategy: featstore.Strategy, n: int, **options: Any) -> None:
    """Take ``n`` batches of a loader that nothing refers to afterwards."""
    loader = make_loader_of(g, sampler, strategy, **options)
    for _, _ in zip(range(n), loader, strict=False):
        pass


@pytest.mark.parametrize(("strategy", "sampler"), covering(STRATEGIES, SAMPLERS))
def test_nothing_is_kept(dataset: Path, tmp_path: Path, strategy: str, sampler: str) -> None:
    pack = make_pack(tmp_path / "pack", dataset, sampler) if strategy == "packed" else None
    with featstore.open(dataset, memory="256MB", threads=THREADS) as g:
        for n in (0, 2):
            begin(g, sampler, STRATEGIES[strategy](pack), n)
            gc.collect()
            alive = [each for each in gc.get_objects() if isinstance(each, (SampledBatches, Runner, featstore.Loader))]
            assert not alive
            assert "sampler scratch" not in g.memory_report()


def test_rows_reach_the_device_after_others_took_the_memory_on_loan(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows that a pack is read through are on loan until the device's rows are read."""
    pack = make_pack(tmp_path / "pack", dataset, "neighbor")
    with featstore.open(dataset, memory="64MB", threads=THREADS) as g:
        taken = list[int]()

        class Taking(packed.Layout):
            def check(self, sources: Any) -> None:
                super().check(sources)
                before = g.memory_report()[WINDOWS]
                g.budget.reserve("another", g.budget.available + 1).release()
                taken.append(before - g.memory_report().get(WINDOWS, 0))

        monkeypatch.setattr(packed, "Layout", Taking)
        begin(g, "neighbor", featstore.Packed(pack, cache="auto"), 3, device_cache=0.1)
        assert taken[0] > 0


def test_collected_in_a_thread_that_samples_ahead(dataset: Path) -> None:
    """An epoch in a cycle, whose finaliser the collector runs in one of its own threads, which it may not wait for."""
    dropped, collected = threading.Event(), threading.Event()

    class Collecting:
        def __init__(self, g: featstore.OutOfCoreGraph) -> None:
            self.inner = featstore.NeighborSampler(g, [3, 3])
            self.fanouts = self.inner.fanouts

        def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
            if index >= 8 and not collected.is_set():  # of the third superbatch
                assert dropped.wait(60)
                gc.collect()
                collected.set()
            return self.inner.sample(seeds, epoch, index)

    before = {*threading.enumerate()}
    with featstore.open(dataset, memory="64MB", threads=1) as g:
        gc.disable()
        try:
            strategy = featstore.Superbatch(cache=0.1, length=4)
            iterator: Any = iter(featstore.Loader(g, Collecting(g), g.node_data["train_idx"], batch_size=20, strategy=strategy))
            next(iterator)
            holder = {"iterator": iterator}
            holder["self"] = holder
            del iterator, holder
            dropped.set()
            for thread in {*threading.enumerate()} - before:
                thread.join(60)
                assert not thread.is_alive(), thread
        finally:
            gc.enable()
        assert collected.is_set()
