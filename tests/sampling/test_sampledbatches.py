"""Epochs of sampled batches: alone, about in order, reordered, and with batches that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.historical import PushTimes
from featstore.sampling.sampledbatches import Drawn, Memo
from tests.support.graphs import skewed_dataset

N, BATCH = 300, 20
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "neighbor": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1),
    "epoch": lambda g: featstore.EpochSampler(g, [4, 3], seed=1),
    "windows": lambda g: featstore.EpochSampler(g, [4, 3], seed=1, window=4),
    "another's": lambda g: checked_sampler(featstore.NeighborSampler(g, [4, 3], seed=1).sample, N),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("sampled") / "g", N, 5)


@pytest.fixture
def g(path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(path, memory="32MiB") as graph:
        yield graph


def batches() -> featstore.RandomBatches:
    return featstore.RandomBatches(np.arange(N), BATCH, seed=3)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda g: featstore.NeighborSampler(g, [4, 3], seed=1),
        lambda g: featstore.NeighborSampler(g, [4, 3], replace=True, redraw=False, edges=True),
        lambda g: featstore.LaborSampler(g, [4, 3], batch_dependency=2, layer_dependency=True, edges=True),
    ],
)
def test_batches_drawn_at_once_are_the_same(g: featstore.OutOfCoreGraph, tmp_path: Path, sampler: Callable[[Any], Any]) -> None:
    alone = Drawn(sampler(g), batches())
    kept = Kept(9, [2])
    alone.remember(kept)
    at_once = alone.at_once(str(tmp_path))
    assert at_once is not None
    assert at_once.digest() == alone.digest()
    assert at_once.order is alone.order
    assert at_once.sampler.edges == alone.sampler.edges
    assert alone.ahead_bytes() == (0, 0) != at_once.ahead_bytes()
    for epoch in range(2):
        with closing(at_once.epoch(epoch).windowed(0)) as taken:
            for position in range(len(alone)):
                one, other = taken.sample(position), alone.epoch(epoch).sample(position)
                assert (
                    (one.epoch, one.index)
                    == (other.epoch, other.index)
                    == (9 if not epoch and position == 2 else epoch, position)
                )
                assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    at_once.close()
    assert at_once.sampler.stats()["windows"] > 0


@pytest.mark.parametrize(
    "sampler",
    [
        lambda g: featstore.NeighborSampler(g, [4, 3], disjoint=True),
        lambda g: featstore.LaborSampler(g, [4, 3], importance_sampling=2),
        lambda g: type("Mine", (featstore.NeighborSampler,), {})(g, [4, 3]),
        SAMPLERS["epoch"],
        SAMPLERS["another's"],
    ],
)
def test_some_batches_are_only_drawn_alone(g: featstore.OutOfCoreGraph, tmp_path: Path, sampler: Callable[[Any], Any]) -> None:
    assert Drawn(sampler(g), batches()).at_once(str(tmp_path)) is None


def test_what_is_drawn_alone_is_drawn_at_once_as_it_was_given(g: featstore.OutOfCoreGraph) -> None:
    sampler = featstore.EpochSampler(g, [4, 3], seed=1, disk="8MiB")
    given = Drawn(sampler, batches())
    alone = given.alone()
    assert alone.sampler is sampler.hops
    assert alone.ahead_bytes() == (0, 0) != given.ahead_bytes()
    assert given.alone().digest() == given.digest()
    at_once = alone.at_once(None)
    assert at_once is not None
    assert at_once.sampler is sampler
    assert at_once.ahead_bytes() == given.ahead_bytes()
    assert Drawn(sampler.hops, batches()).at_once(None) is None


class Kept(Memo):
    """Batches that are told from those that are sampled by the epoch that they name."""

    def __init__(self, mark: int, positions: list[int], once: bool = False) -> None:
        self.mark, self.positions, self.once = mark, positions, once
        self.asked: list[int] = []
        self.log: list[str] = []

    def batch(self, position: int) -> featstore.SampledBatch | None:
        self.asked.append(position)
        if position not in self.positions:
            return None
        if self.once:
            self.positions.remove(position)
        return featstore.SampledBatch(position, self.mark, torch.tensor([0]), 1, ())

    def trim(self) -> None:
        self.log.append("trim")

    def forget(self) -> None:
        self.log.append("forget")


def marks(order: featstore.EpochBatches) -> list[int]:
    return [order.sample(position).epoch for position in range(len(order))]


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_that_are_there_are_not_sampled(g: featstore.OutOfCoreGraph, name: str) -> None:
    """Alone and in turn, from the start or from later on; the latest memo is asked first; one that has none is passed."""
    drawn = Drawn(SAMPLERS[name](g), batches())
    n, want = len(drawn), [batch.input_ids.tolist() for batch in map(drawn.epoch(0).sample, range(len(drawn)))]
    drawn.remember(Kept(8, [0, 2, 9]))
    drawn.remember(Kept(9, [2], once=True))
    expected = [8, 0, 9, *[0] * 6, 8, *[0] * (n - 10)]
    with closing(drawn.epoch(0).windowed(0)) as order:
        assert marks(order) == expected
    expected[2] = 8  # the other was there once
    assert marks(drawn.epoch(0)) == expected
    with closing(drawn.epoch(0).windowed(3)) as order:
        found = [order.sample(position) for position in range(3, n)]
    assert [batch.epoch for batch in found] == expected[3:]
    assert [batch.input_ids.tolist() for batch in found if not batch.epoch] == [want[k] for k in range(3, n) if not expected[k]]
    assert marks(drawn.sampled(0)) == [0] * n


def test_a_memo_is_told_of_later_epochs_and_of_short_memory(g: featstore.OutOfCoreGraph) -> None:
    drawn = Drawn(SAMPLERS["neighbor"](g), batches())
    kept = Kept(9, [0, 1])
    drawn.remember(kept)
    drawn.epoch(0)
    assert not kept.log
    assert marks(drawn.epoch(1)) == [1] * len(drawn)
    assert not kept.asked
    drawn.trim()
    assert kept.log == ["forget", "trim"]


def test_with_a_history_no_batch_is_there_already(g: featstore.OutOfCoreGraph) -> None:
    """The pulls of a batch depend on the batches before it."""
    times = PushTimes(3)
    times.nodes, times.pushed = np.arange(10), np.full(10, -1)
    drawn = Drawn(SAMPLERS["neighbor"](g), batches(), None, times)
    drawn.remember(Kept(9, [0, 1, 2]))
    assert marks(drawn.epoch(0)) == [0] * len(drawn)
    with closing(drawn.epoch(0).windowed(0)) as order:
        found = [order.sample(position) for position in range(len(order))]
    assert [batch.history.step for batch in found] == list(range(len(drawn)))
    assert "history decisions" not in g.memory_report()


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_order(g: featstore.OutOfCoreGraph, name: str) -> None:
    """Each batch keeps its index and its content; what is remembered of an order is by that order's positions."""
    drawn = Drawn(SAMPLERS[name](g), batches())
    n, seen = len(drawn), list[int]()

    def backwards(sampled: featstore.EpochBatches) -> Callable[[int], int]:
        seen.append(len(sampled))
        return lambda position: n - 1 - position

    turned = drawn.reordered(backwards, "backwards")
    assert (len(turned), turned.batch_size, turned.fanouts, turned.run_length) == (n, BATCH, drawn.fanouts, 1)
    assert turned.nbytes == drawn.nbytes > 0
    assert turned.digest() != drawn.digest()
    for epoch in range(2):
        want = [batch.input_ids.tolist() for batch in map(drawn.epoch(epoch).sample, range(n))]
        with closing(turned.epoch(epoch).windowed(0)) as order:
            found = [order.sample(position) for position in range(n)]
        assert [batch.index for batch in found] == list(range(n))[::-1]
        assert [batch.input_ids.tolist() for batch in found] == want[::-1]
    assert seen == [n, n]
    turned.remember(Kept(9, [1]))
    drawn.remember(below := Kept(8, [n - 2, n - 3]))
    assert marks(turned.epoch(0)) == [0, 9, 8, *[0] * (n - 3)]
    turned.trim()
    turned.epoch(1)
    assert below.log == ["trim", "forget"]


def test_what_is_declared_of_samplers(g: featstore.OutOfCoreGraph) -> None:
    """Another library's sampler says its fan-outs at the most; one that draws many batches at once what that takes."""

    class Another:
        fanouts: Any = (4, 3)

        def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
            raise NotImplementedError

    drawn = {name: Drawn(make(g), batches()) for name, make in SAMPLERS.items()}
    assert [each.fanouts for each in drawn.values()] == [(4, 3), (4, 3), (4, 3), None]
    assert {name for name, each in drawn.items() if each.ahead_bytes() != (0, 0)} == {"epoch", "windows"}
    assert {name for name, each in drawn.items() if each.windows(1 << 20, (100, 100)) is not None} == {"epoch"}
    another = Another()
    assert Drawn(checked_sampler(another, N), batches()).fanouts == (4, 3)
    another.fanouts = {"cites": 3}
    assert Drawn(checked_sampler(another, N), batches()).fanouts is None
