"""Batches that wait for the loop: what a growing look-ahead has made is on loan, and comes back the same bits."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool
from featstore.load.minibatch import MiniBatch
from featstore.load.stages import Stages
from featstore.load.waiting import Waiting
from tests.conftest import make_graph
from tests.loaders import make_loader
from tests.taking import take_back
from tests.test_overlap import until

N, MEMORY, GROWN = 3_000, 24 << 20, 6
STRATEGIES: dict[str, dict[str, Any]] = {
    "on demand": {},
    "lru": {"policy": "lru", "feature_cache": 0.05},
    "belady": {"strategy": "superbatch", "superbatch": 10, "feature_cache": 0.05},
    "streamed": {"strategy": "streamed", "superbatch": 10, "feature_cache": 0.05},
    "device": {"device_cache": 0.1},
}
pytestmark = pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")


@pytest.fixture(scope="module")
def arrays() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    x, h = rng.standard_normal((N, 256), dtype=np.float32), rng.integers(-100, 100, (N, 800)).astype(np.int8)
    return {"x": torch.from_numpy(x), "h": torch.from_numpy(h)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, torch.Tensor]) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "g"
    indptr, indices = make_graph(N, 8.0)
    features = {name: rows.numpy() for name, rows in arrays.items()}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False).close()
    return path


def loader(g: featstore.OutOfCoreGraph, options: dict[str, Any], name: str = "on demand") -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [5, 4], seed=1)
    common: dict[str, Any] = {"features": ["x", "h"], "labels": None, "prefetch": "auto", "threads": 1}
    return make_loader(g, sampler, np.arange(0, N, 2), 60, **(common | STRATEGIES[name] | options))


def running(made: featstore.Loader) -> Any:
    (epoch,) = made._iterators
    return epoch


def grow(made: featstore.Loader) -> None:
    """Let the look-ahead grow, as waiting for batches would, and wait until as many are there and no thread is at work."""
    pipeline, inspector = running(made)._pipeline, getattr(running(made)._run, "_inspector", None)

    def rests() -> bool:
        with pipeline._lock:
            is_full = pipeline._done.qsize() == GROWN and len(pipeline._ready) == 1 and not pipeline._active
        return is_full and (inspector is None or len(inspector._ready) == 2)

    with pipeline._lock:
        pipeline._depth = GROWN
        pipeline._changed.notify_all()
    until(rests)


def everything(g: featstore.OutOfCoreGraph) -> Reservation:
    """Take all bytes that may be had now, loans included."""
    g.pool.trim()
    return take_back(g.budget, 1)


def check(batch: MiniBatch, arrays: dict[str, torch.Tensor]) -> None:
    assert list(batch.features) == ["x", "h"]
    for name, rows in batch.features.items():
        assert torch.equal(rows, arrays[name][batch.input_ids])


@pytest.mark.parametrize("name", STRATEGIES)
def test_another_gets_what_was_made_ahead(dataset: Path, arrays: dict[str, torch.Tensor], name: str) -> None:
    with featstore.open(dataset, memory=MEMORY) as g, loader(g, {}, name) as made:
        seen = []
        for batch in made:
            check(batch, arrays)
            seen.append(batch.index)
            if len(seen) == 2:
                del batch
                grow(made)
                waiting = running(made)._waiting
                lent = sum(rows.nbytes for each in waiting._batches[2:] for rows in each.features.values())
                assert waiting._lent_bytes() == lent > 0
                assert len(waiting._batches) == GROWN
                first = [dict(each.features) for each in waiting._batches[:2]]
                with everything(g):
                    assert [bool(each.features) for each in waiting._batches] == [True, True, *[False] * (GROWN - 2)]
                    assert waiting._lent_bytes() == 0
                assert [each.features for each in waiting._batches[:2]] == first
                del first
            elif len(seen) == 3:
                assert running(made).depth == 2
        assert sorted(seen) == list(range(len(made)))
        assert g.budget.peak <= MEMORY


def test_without_the_loan_another_is_refused(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same validation loop, in the memory that the first test's training leaves."""

    def validate(lends: bool) -> int:
        with featstore.open(dataset, memory=MEMORY) as g, loader(g, {}) as made, monkeypatch.context() as patch:
            if not lends:
                patch.setattr(Stages, "waiting", lambda self, run, least: None)
            batches = iter(made)
            next(batches)
            grow(made)
            for idle in (g.pool, g.reader):
                idle.trim()
            with g.budget.reserve("a cache", g.budget.available - (1 << 16)):
                held_out = featstore.NeighborSampler(g, [5, 4], seed=2)
                with featstore.Loader(
                    g, held_out, np.arange(1, 121, 2), 60, features=["x", "h"], labels=None, prefetch=0, threads=1
                ) as other:
                    return sum(len(batch.seeds) for batch in other)

    assert validate(lends=True) == 60
    with pytest.raises(BudgetError):
        validate(lends=False)


@pytest.mark.parametrize("name", STRATEGIES)
def test_others_take_and_give_back_beside_the_loop(dataset: Path, arrays: dict[str, torch.Tensor], name: str) -> None:
    over = threading.Event()
    failures: list[BaseException] = []

    def take(g: featstore.OutOfCoreGraph) -> None:
        draw = random.Random(0)
        try:
            while not over.is_set():
                lent = g.budget.on_loan
                try:
                    with g.budget.reserve("another", draw.randrange(1 + lent)):
                        pass
                except BudgetError:
                    pass  # what was on loan went to batches meanwhile
        except BaseException as error:
            failures.append(error)

    with featstore.open(dataset, memory=MEMORY) as g, loader(g, {}, name) as made:
        thread = threading.Thread(target=take, args=(g,))
        thread.start()
        try:
            for _ in range(2):
                for k, batch in enumerate(made):
                    check(batch, arrays)
                    if k == 1:
                        pipeline = running(made)._pipeline
                        with pipeline._lock:
                            pipeline._depth = GROWN
                            pipeline._changed.notify_all()
        finally:
            over.set()
            thread.join()
        assert not failures
        assert g.budget.peak <= MEMORY


@pytest.mark.parametrize("how", ["break", "close", "drop", "interrupt", "damage"])
def test_an_end_while_it_has_grown(dataset: Path, arrays: dict[str, torch.Tensor], how: str, monkeypatch: Any) -> None:
    """All memory comes back, whether or not rows were given back; the next epoch is right."""
    for is_emptied in (False, True):
        with featstore.open(dataset, memory=MEMORY) as g:
            made = loader(g, {})
            n_threads = threading.active_count()

            def leave(made: featstore.Loader, g: Any = g, is_emptied: bool = is_emptied) -> Iterator[MiniBatch]:
                batches = iter(made)
                next(batches)
                grow(made)
                if is_emptied:
                    everything(g).release()
                if how == "interrupt":
                    raise KeyboardInterrupt
                if how == "damage" and is_emptied:
                    with monkeypatch.context() as patch:
                        patch.setattr(Stages, "_refill", lambda self, run, batch: 1 / 0)
                        running(made)._waiting._refill = lambda batch: 1 / 0
                        next(batches)
                if how == "close":
                    made.close()
                return batches

            try:
                batches = leave(made)
                del batches
            except (KeyboardInterrupt, ZeroDivisionError) as error:
                assert how in ("interrupt", "damage")
                error.__traceback__ = None
            if how == "drop":
                del made
            gc.collect()
            g.pool.trim()
            assert g.memory_report().get("batch buffers", 0) == 0
            assert g.budget.on_loan <= g.budget.used
            assert threading.active_count() == n_threads
            if how not in ("close", "drop"):
                for batch in made:
                    check(batch, arrays)
                made.close()


def test_the_first_keep_their_rows_and_small_ones_are_not_lent() -> None:
    budget = Budget(8 << 20)
    pool = BufferPool(budget)
    filled: list[int] = []
    waiting = Waiting(budget, pool, 1, lambda batch: filled.append(batch.index))
    none = torch.zeros(0, dtype=torch.int64)

    def made(index: int, n_rows: int) -> MiniBatch:
        return MiniBatch(none, none, (), {"x": pool.tensor((n_rows, 1024), torch.uint8)}, {}, index)

    stage = waiting.after(made)
    first, small, large, last = (stage(index, n_rows) for index, n_rows in enumerate([1024, 10, 1024, 1024]))
    assert budget.on_loan == 2 << 20
    assert waiting._give_back(1) == 1 << 20
    assert [bool(batch.features) for batch in (first, small, large, last)] == [True, True, True, False]
    assert (waiting.n_emptied(), waiting.n_emptied(), budget.on_loan) == (1, 0, 1 << 20)
    waiting.take(first)  # so that the next two wait first and second
    waiting.take(small)
    assert (filled, budget.on_loan) == ([0, 1], 0)
    waiting.close()
    waiting.close()
    assert budget.on_loan == 0
    del first, small, large, last
    pool.close()
    assert budget.used == 0
