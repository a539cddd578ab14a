"""The beginning of an epoch: with the first batch that is asked for, under every strategy, and not with ``iter(loader)``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from tests.load.test_forked_loops import BATCH, SEED, X, dataset, in_child
from tests.support.loaders import make_loader

__all__ = ["dataset"]  # a fixture

AHEAD: dict[str, dict[str, Any]] = {
    "superbatch": {"strategy": "superbatch", "length": 3},
    "serial": {"strategy": "ginex", "length": 3},
    "streamed": {"strategy": "streamed", "length": 3},
    "streamed, its length chosen": {"strategy": "streamed"},
    "packed": {"strategy": "packed", "length": 3},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "on demand": {"policy": "lru"},
    **AHEAD,
    "auto": {"strategy": "auto"},
}
Make = Callable[..., featstore.Loader]


@pytest.fixture
def make(dataset: Path) -> Iterator[Make]:
    """Loaders of one graph, by strategy, closed at the end."""
    loaders = []
    with featstore.open(dataset, memory="64MB", threads=2) as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)

        def made(strategy: str) -> featstore.Loader:
            options: dict[str, Any] = {"labels": None, "cache": 0.1, "seed": SEED, **STRATEGIES[strategy]}
            if options.get("strategy") == "packed":
                loader = make_loader(g, pack=f"{dataset}.pack", shuffle=False, **options)
            else:
                loader = make_loader(g, sampler, g.node_data["train_idx"], BATCH, **options)
            loaders.append(loader)
            return loader

        yield made
        for loader in loaders:
            loader.close()


def no_memory(*_: Any) -> Any:
    raise featstore.BudgetError("none is left", 1)


def ids(batches: Iterator[featstore.MiniBatch] | featstore.Loader) -> list[list[int]]:
    """Return the input ids of batches, whose rows are right."""
    found = []
    for batch in batches:
        assert torch.equal(batch.x, X[batch.input_ids])
        found.append(batch.input_ids.tolist())
    return found


@pytest.fixture(scope="module")
def epochs(dataset: Path) -> list[list[list[int]]]:
    """Return the input ids of three epochs, as an on-demand loader delivers them, and every other one."""
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(g, sampler, g.node_data["train_idx"], BATCH, labels=None, seed=SEED) as loader:
            return [ids(loader) for _ in range(3)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_set_between_iter_and_the_first_batch_counts(make: Make, epochs: list[list[list[int]]], strategy: str) -> None:
    loader = make(strategy)
    batches = iter(loader)
    loader.set_epoch(2)
    assert ids(batches) == epochs[2]
    loader.set_epoch(1)
    for _ in zip(range(2), loader, strict=False):
        pass
    position = loader.state_dict()
    loader.set_epoch(0)
    batches = iter(loader)
    loader.load_state_dict(position)
    assert loader.state_dict() == position
    assert ids(batches) == epochs[1][2:]


@pytest.mark.parametrize("strategy", ["on demand", "streamed", "packed"])
def test_batches_that_were_taken_ahead_of_the_training_come_again(make: Make, strategy: str) -> None:
    """Those that were delivered since the epoch began, or went on, and no others."""
    loader = make(strategy)
    whole = ids(loader)
    loader.set_epoch(0)
    for _ in zip(range(3), loader, strict=False):
        pass
    states = [loader.state_dict(ahead=ahead) for ahead in (0, 1, 3, 4)]
    assert [(state["epoch"], state["batch"]) for state in states] == [(0, 3), (0, 2), (0, 0), (0, 0)]
    loader.load_state_dict(states[1])
    running = iter(loader)
    assert ids(iter([next(running)])) == whole[2:3]
    assert loader.state_dict(ahead=2)["batch"] == 2
    assert ids(running) == whole[3:]
    assert loader.state_dict(ahead=1)["batch"] == len(loader) - 1
    with pytest.raises(ValueError, match="ahead must be at least 0"):
        loader.state_dict(ahead=-1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_beside_an_iterator_never_begun(make: Make, strategy: str) -> None:
    loader = make(strategy)
    running = iter(loader)
    next(running)
    other = iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 1)
    del other
    next(running)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closing_before_the_first_batch(make: Make, epochs: list[list[list[int]]], strategy: str) -> None:
    loader = make(strategy)
    closed, batches = iter(loader), iter(loader)
    closed.close()  # type: ignore[attr-defined]
    closed.close()  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(featstore.ClosedError, match="iterator was closed"):
            next(closed)
    assert ids(batches) == epochs[0]
    late = iter(loader)
    loader.close()
    for _ in range(2):
        with pytest.raises(featstore.ClosedError, match="loader is closed"):
            next(late)


@pytest.mark.parametrize("strategy", AHEAD)
def test_an_epoch_that_could_not_begin_begins_later(
    make: Make, epochs: list[list[list[int]]], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(strategy)
    waiting = iter(loader)
    for _ in range(2):
        with monkeypatch.context() as lacking:
            lacking.setattr(loader._runner, "prepare", no_memory)
            with pytest.raises(featstore.BudgetError, match="none is left"):
                next(waiting)
    assert ids(waiting) == epochs[0]


@pytest.mark.parametrize("strategy", AHEAD)
def test_an_epoch_begins_beside_another(make: Make, epochs: list[list[list[int]]], strategy: str) -> None:
    loader = make(strategy)
    running, beside = iter(loader), iter(loader)
    next(running)
    assert ids(beside) == epochs[1]
    assert ids(running) == epochs[0][1:]
    assert loader.stats()["epochs_beside"] == 1


@pytest.mark.shares_resources  # a child's copies of threads and descriptors are none of ours
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fork_before_the_first_batch(make: Make, epochs: list[list[list[int]]], strategy: str) -> None:
    loader = make(strategy)
    batches = iter(loader)

    def child() -> None:
        with pytest.raises(featstore.ClosedError, match="parent process"):
            next(batches)
        with pytest.raises(featstore.ClosedError, match="parent process"):
            iter(loader)

    in_child(child)
    assert ids(batches) == epochs[0]


class Attempts:
    """A loader's lock that tells how many threads have asked for it."""

    def __init__(self) -> None:
        self._lock, self._asked = threading.RLock(), threading.Semaphore(0)

    def wait_for(self, n: int) -> bool:
        return all(self._asked.acquire(timeout=60) for _ in range(n))

    def __enter__(self) -> None:
        self._asked.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_iterators_that_begin_at_once_have_an_epoch_each(make: Make, epochs: list[list[list[int]]]) -> None:
    loader = make("on demand")
    loader._beginning = attempts = Attempts()  # type: ignore[assignment]
    prepare, both = loader._runner.prepare, []

    def slowly(epoch: int, start: int) -> Any:
        if not both:
            both.append(attempts.wait_for(2))  # the other thread is beginning, too
        return prepare(epoch, start)

    loader._runner.prepare = slowly  # type: ignore[method-assign]
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(ids(iter(loader)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both == [True]
    assert sorted(found) == sorted(epochs[:2])
