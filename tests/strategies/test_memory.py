"""The memory of loaders beside each other; batches that are measured; see tests/memory for what is promised."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.config import parse_size
from featstore.sampling.neighbor import NeighborSampler
from tests.support.loaders import make_loader

N = 30_000
OPTIONS: dict[str, dict[str, Any]] = {
    "on demand, in one thread": {"prefetch": 0, "threads": 1},
    "on demand, cache": {"cache": 0.05, "labels": "y"},
    "superbatch, two threads, cache, labels": {"strategy": "superbatch", "threads": 2, "cache": 0.05, "labels": "y"},
    "superbatch of four": {"strategy": "superbatch", "length": 4, "features": ["x", "z"], "prefetch": 0},
    "serial": {"strategy": "ginex", "cache": "500KB"},
    "streamed, one thread, cache, labels": {"strategy": "streamed", "threads": 1, "cache": "500KB", "labels": "y"},
    "streamed of four": {"strategy": "streamed", "length": 4, "features": ["x", "z"], "prefetch": 0},
    "auto": {"strategy": "auto"},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needs") / "g"
    rng = np.random.default_rng(0)
    degrees = rng.poisson(12, N)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = (N * rng.random(int(indptr[-1])) ** 2).astype(np.int64)
    features = {"x": rng.standard_normal((N, 32), dtype=np.float32), "z": rng.integers(0, 256, (N, 7), dtype=np.uint8)}
    data = {"y": rng.integers(0, 9, N), "train_idx": rng.permutation(N)[:2400]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features=features, node_data=data, progress=False).close()
    return path


@pytest.mark.parametrize("name", OPTIONS)
def test_a_closed_loader_asks_for_nothing(dataset: Path, name: str) -> None:
    """Though its variable lives; but for the batches that are held, which are memory. The next loader has what it would alone."""

    def ginex(g: featstore.OutOfCoreGraph) -> tuple[dict[str, Any], list[int]]:
        sampler = NeighborSampler(g, [10, 5], seed=1)
        with featstore.Loader(
            g, sampler, g.node_data["train_idx"], 200, labels=None, strategy=featstore.Ginex(cache="10%")
        ) as loader:
            held = g.memory_report()
            return loader.stats()["superbatch"], [held["planner"], held["superbatch caches (features)"]]

    options = {"labels": None, **OPTIONS[name]}
    memory = 24 << 20
    with featstore.open(dataset, memory=memory) as g:
        alone = ginex(g)
    with featstore.open(dataset, memory=memory) as g:
        sampler = NeighborSampler(g, [10, 5], seed=1)
        loader = make_loader(g, sampler, g.node_data["train_idx"], 200, **options)
        sum(1 for _ in loader)
        running = iter(loader)
        last = next(running)
        running.close()  # type: ignore[attr-defined]
        assert g.budget.required(idle=False) < 2 * last.nbytes < 2 * g.budget.required(idle=False)
        n_bytes, last = last.nbytes, None
        assert g.budget.required(idle=True) > 2 * n_bytes  # the loop's and the next one
        last = next(iter(loader))
        loader.close()
        assert last.nbytes <= g.budget.required(idle=False) == g.budget.required(idle=True) < 2 * last.nbytes
        del last
        assert g.budget.required(idle=False) == g.budget.required(idle=True) == 0
        assert not {"planner", "loader order", "read ahead", "packing", "epoch samples"} & g.memory_report().keys()
        assert ginex(g) == alone
        assert "closed" in repr(loader)


@pytest.mark.parametrize(
    ("strategy", "memory"), [(featstore.Superbatch, "18MiB"), (featstore.Ginex, "18MiB"), (featstore.OnDemand, "12MiB")]
)
def test_loaders_that_rest_need_room_for_the_largest(dataset: Path, strategy: Any, memory: str) -> None:
    """They take turns: planner and cache get beside three of them what they get beside the one of the largest batches."""

    def beside(*batch_sizes: int) -> tuple[int, int]:
        resting, orders = [], 0
        with featstore.open(dataset, memory=memory) as g:
            sampler, seeds = NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
            for batch_size in batch_sizes:
                uncached = featstore.OnDemand(cache=None)
                resting.append(featstore.Loader(g, sampler, seeds, batch_size, labels=None, prefetch=0, strategy=uncached))
                sum(1 for _ in resting[-1])
            g.pool.trim()
            orders = g.memory_report()["loader order"]
            with featstore.Loader(g, sampler, seeds, 200, labels=None, strategy=strategy(cache="auto")):
                held = g.memory_report()
            for each in resting:
                each.close()
        return sum(held[name] for name in held if "cache" in name or name == "planner"), orders

    (alone, order), (some, orders) = beside(400), beside(200, 400, 300)
    assert 0 < alone - 2 * (orders - order) <= some <= alone  # each has seeds in an order of its own, and no more


def test_the_parts_that_a_refusal_lists_add_up(dataset: Path) -> None:
    """Also beside another loader, which rests, and whose batches need their room; and with what reading holds."""
    found = []
    for kib in range(5_000, 15_000, 500):
        with featstore.open(dataset, memory=kib << 10) as g, contextlib.suppress(featstore.BudgetError):
            sampler, seeds = NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
            resting = featstore.Loader(g, sampler, seeds, 300, labels=None, prefetch=0, strategy=featstore.OnDemand(cache=None))
            with resting:
                next(iter(resting))
                try:
                    featstore.Loader(g, sampler, seeds, 200, labels=None, strategy=featstore.Ginex(cache=0.05)).close()
                except featstore.BudgetError as error:
                    refusal = re.search(
                        r"is too small: (\S+ \w+) are asked for \((.*)\); smaller batches need less; at least", str(error)
                    )
                    if refusal is not None:  # else there was no memory to sample the first batch
                        found.append((refusal, kib << 10, error.needed))
                except featstore.PerformanceWarning:
                    break  # it fits
    assert found
    for refusal, memory, needed in found:
        parts = {name: parse_size(size) for name, size in re.findall(r"([a-z' ]+?) ([\d.]+ \w+)(?:, |$)", refusal[2])}
        assert {"what is held already", "two batches", "other loaders' batches", "caches", "reading"} <= parts.keys()
        asked = parse_size(refusal[1])
        assert abs(sum(parts.values()) - asked) <= asked / 100  # sizes are rounded where they are printed
        assert memory < 1.01 * asked < 1.02 * needed


@pytest.mark.parametrize(
    "strategy",
    [
        featstore.OnDemand(cache=0.05),
        featstore.OnDemand(cache="auto", policy="sieve"),
        featstore.Superbatch(length=4),
        featstore.Ginex(length=4),
        featstore.Streamed(),
        featstore.Auto(),
    ],
    ids=lambda strategy: strategy.name,
)
def test_the_first_batch_is_sampled_once(dataset: Path, strategy: featstore.Strategy) -> None:
    """It is sampled when the loader is made, to see how large batches are, and kept for the epoch."""
    with featstore.open(dataset, memory="64MB") as g:
        sampler, drawn = NeighborSampler(g, [10, 5], seed=1), []
        sample = sampler.sample

        def counted(seeds: Any, epoch: int = 0, index: int = 0) -> Any:
            drawn.append((epoch, index))
            return sample(seeds, epoch, index)

        sampler.sample = counted  # type: ignore[method-assign]
        with featstore.Loader(g, sampler, g.node_data["train_idx"], 200, labels=None, strategy=strategy) as loader:
            assert drawn[0] == (0, 0)
            assert len(list(loader)) == 12
            assert sorted(drawn) == [(0, index) for index in range(12)]
            loader.set_epoch(0)
            assert len(list(loader)) == 12
            assert drawn.count((0, 0)) == (1 if strategy.name == "streamed" else 2)  # it has it in a file


def test_a_batch_that_was_kept_goes_where_memory_is_short(dataset: Path) -> None:
    with featstore.open(dataset, memory="8MB") as g:
        sampler, seeds = NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
        with featstore.Loader(g, sampler, seeds, 200, labels=None, strategy=featstore.OnDemand(cache=0.01)) as loader:
            kept = g.budget.on_loan
            assert kept > 8 * 8000
            with g.budget.reserve("others", g.budget.available + kept // 2):
                assert not g.budget.on_loan
            assert sum(1 for _ in loader) == 12


def test_scratch_of_threads_that_rest(dataset: Path) -> None:
    """It is given back where memory is short, but for one thread's, which then samples first."""
    with featstore.open(dataset, memory="64MB") as g:
        sampler, seeds = NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
        want = [sampler.sample(seeds[200 * k : 200 * k + 200], index=k).input_ids for k in range(2)]
        one = g.memory_report()["sampler scratch"]
        assert not sampler.trim()
        first, second = sampler._idle.pop(), sampler._idle.pop() if len(sampler._idle) > 1 else None
        assert second is None
        again = sampler.sample(seeds[:200], index=0).input_ids  # with another's scratch, as a second thread
        sampler._idle.append(first)
        assert g.memory_report()["sampler scratch"] == 2 * one
        assert sampler.trim()
        assert g.memory_report()["sampler scratch"] == one
        assert not sampler.trim()
        held = sampler._idle.pop()
        assert held is first
        third = sampler.sample(seeds[200:400], index=1).input_ids  # with what was given back, which grows anew
        assert sampler.stats()["batches"] == 4
        assert again.tolist() == want[0].tolist()
        assert third.tolist() == want[1].tolist()


def test_a_queue_keeps_scratch_for_few_rows(dataset: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        rows = g.features["x"][np.arange(20_000)[::-1].copy()]
        before = g.memory_report()["reader buffers"]
        g.reader.trim()
        assert g.memory_report()["reader buffers"] <= before - 16 * 15_000
        assert (g.features["x"][np.arange(20_000)[::-1].copy()] == rows).all()


def test_a_serial_epoch_without_a_cache_says_what_it_lacks(dataset: Path) -> None:
    """Read ahead is the planner's memory there: nothing of it can be given back for batches that the loop holds."""
    needed, tries = 1 << 20, 0
    while True:
        tries += 1
        with featstore.open(dataset, memory=needed) as g:
            sampler, held = NeighborSampler(g, [10, 5], seed=1), []
            try:
                strategy = featstore.Ginex(cache=None, length=4)
                with featstore.Loader(
                    g, sampler, g.node_data["train_idx"], batch_size=200, labels=None, strategy=strategy
                ) as loader:
                    for batch in loader:
                        held.append(batch)
                    break
            except featstore.BudgetError as error:
                assert error.needed is not None
                needed = max(error.needed, needed * 9 // 8)
            finally:
                held.clear()
    assert tries > 1


def test_an_error_names_what_is_needed_once(dataset: Path) -> None:
    """However often it is taken on, its message is one reason and one size."""
    with featstore.open(dataset, memory="1MB") as g, pytest.raises(featstore.BudgetError) as caught:
        featstore.Loader(g, NeighborSampler(g, [10, 5]), g.node_data["train_idx"], 200, labels=None, strategy="superbatch")
    error = caught.value
    assert str(error).startswith(f"{error.reason}; at least {error.needed} bytes (")
    assert str(error).count("at least") == 1
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.needed) == (str(error), error.reason, error.needed)
    assert str(featstore.BudgetError("no memory")) == "no memory"


@dataclass(frozen=True)
class Estimating(featstore.Streamed):
    """Estimate the length before it runs."""

    def run(self, context: featstore.Context) -> featstore.Runner:
        ESTIMATED.append(self.estimate_length(context).n_batches)
        return super().run(context)


ESTIMATED: list[int] = []


@pytest.mark.filterwarnings("ignore:strategy 'Estimating|strategy '(superbatch|ginex|streamed)':featstore.PerformanceWarning")
def test_superbatches_are_estimated_as_they_run(dataset: Path) -> None:
    """And the shorter, the less memory others leave."""
    lengths = []
    for more in (1, 1_900_000, 2_100_000):
        with featstore.open(dataset, memory="4MB") as g, g.budget.reserve("others", more):
            sampler, seeds = NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
            with featstore.Loader(g, sampler, seeds, 20, labels=None, strategy=Estimating(cache=None)) as loader:
                lengths.append(loader.stats()["superbatch"]["batches"])
    assert lengths == ESTIMATED
    assert lengths[0] > lengths[1] > lengths[2] > 1
