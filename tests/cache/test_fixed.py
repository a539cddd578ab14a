"""A static policy under superbatches: its rows stay from the first batch to the last."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.base import PolicyContext
from featstore.cache.degree import Degree
from featstore.cache.fixed import FixedRows
from featstore.cache.planned import Horizon
from featstore.pack import packing
from featstore.pack.packing import RunPacker
from featstore.strategies.domain import Domain
from tests.support.graphs import make_graph
from tests.support.taking import take_back

N, BATCH, LENGTH, SHARE = 3000, 50, 5, 0.1
STRATEGIES = [featstore.Superbatch, featstore.Ginex, featstore.Streamed]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    indptr, indices = make_graph(N, 10.0)
    rng = np.random.default_rng(1)
    features = {
        "x": rng.standard_normal((N, 64)).astype(np.float32),
        "z": rng.integers(0, 256, (N, 7), dtype=np.uint8),
    }
    path = tmp_path_factory.mktemp("fixed") / "g"
    data = {"y": rng.integers(0, 5, N), "train_idx": rng.permutation(N)[:1000]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, data, progress=False).close()
    return path


@pytest.fixture
def g(dataset: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(dataset, memory="64MB") as graph:
        yield graph


def loader(g: featstore.OutOfCoreGraph, strategy: featstore.Strategy | str = "ondemand", **options: object) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    return featstore.Loader(g, sampler, g.node_data["train_idx"], BATCH, strategy=strategy, seed=3, **options)


@pytest.mark.parametrize("policy", ["degree", "frequency", "random"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_rows_are_right_and_misses_are_those_of_the_fixed_rows(
    g: featstore.OutOfCoreGraph, kind: type[featstore.Superbatch], policy: str
) -> None:
    plain = [(batch.input_ids.clone(), batch.x.clone()) for batch in loader(g)]
    with loader(g, featstore.OnDemand(cache=SHARE, policy=policy)) as other:
        list(other)
        cache = g.features["x"].cache
        fixed = {row for row in range(N) if cache.map.lookup(np.array([row]))[0] >= 0}
    assert len(fixed) == round(SHARE * N)
    with loader(g, kind(cache=SHARE, policy=policy, length=LENGTH)) as made:
        for epoch in range(2):
            made.set_epoch(0)
            before = made.stats()["hits"]
            for batch, (ids, x) in zip(made, plain, strict=True):
                assert torch.equal(batch.input_ids, ids)
                assert torch.equal(batch.x, x)
            hits = {tier: n - before[tier] for tier, n in made.stats()["hits"].items() if tier in before}
            missed = sum(len(set(ids.tolist()) - fixed) for ids, _ in plain)
            assert hits["host"] == sum(len(ids) for ids, _ in plain) - missed
            filled = g.features["x"].cache.stats()["fill_rows"]  # type: ignore[union-attr]
            # Rows are read once, but where the neighbour cache had their memory.
            times = 4 * (epoch + 1) if kind is featstore.Ginex else 1
            assert filled == times * len(fixed)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_caches_that_are_cut_and_made_anew(g: featstore.OutOfCoreGraph, kind: type[featstore.Superbatch]) -> None:
    plain = [batch.features["z"].clone() for batch in loader(g, features=["x", "z"])]
    with loader(g, kind(cache="auto", policy="degree", length=LENGTH), features=["x", "z"]) as made:
        for _ in range(3):
            made.set_epoch(0)
            held = None
            for batch, z in zip(made, plain, strict=True):
                assert torch.equal(batch.features["z"], z)
                if batch.index == 7:
                    held = take_back(g.budget, 2)
                if batch.index == 13 and held is not None:
                    held.release()


@pytest.mark.parametrize("kind", [featstore.Superbatch, featstore.Streamed])
@pytest.mark.parametrize("policy", ["degree", "belady"])
def test_rows_that_stay_are_planned_before_the_next_superbatch_is_sampled(
    g: featstore.OutOfCoreGraph, kind: type[featstore.Superbatch], policy: str
) -> None:
    """Sampling stops at the second superbatch until a batch has come, where no plan waits for it."""
    came = threading.Event()
    waited = []

    class Stopping:
        fanouts = (4, 3)
        real = featstore.NeighborSampler(g, [4, 3], seed=1)

        def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
            if index >= LENGTH:
                waited.append(came.wait(0.5 if policy == "belady" else 30))
            return self.real.sample(seeds, epoch=epoch, index=index)

    strategy = kind(cache=SHARE, policy=policy, length=LENGTH)
    with featstore.Loader(g, Stopping(), g.node_data["train_idx"], BATCH, strategy=strategy, seed=3) as made:
        for _ in made:
            came.set()
    assert waited[0] == (policy == "degree")


@pytest.fixture
def read_apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows that each call reads into a cache, without a pass that is made anyway."""
    rows: list[int] = []

    def read(self: Domain, name: str, some: Any, *others: Any) -> None:
        rows.append(len(some))
        real(self, name, some, *others)

    real = Domain.read
    monkeypatch.setattr(Domain, "read", read)
    return rows


def test_the_pass_that_packs_fills_the_cache(g: featstore.OutOfCoreGraph, read_apart: list[int]) -> None:
    plain = [batch.features["z"].clone() for batch in loader(g, features=["x", "z"])]
    strategy = featstore.Streamed(cache=SHARE, policy="degree", length=LENGTH)
    with loader(g, strategy, features=["x", "z"]) as made:
        left = iter(made)  # an epoch that ends before anything is packed
        del left
        for _ in range(2):
            made.set_epoch(0)
            for batch, z in zip(made, plain, strict=True):
                assert torch.equal(batch.features["z"], z)
        for name in ("x", "z"):
            cache = g.features[name].cache
            assert cache is not None
            assert cache.stats()["fill_rows"] == round(SHARE * N)
            row = cache.planned_rows[7]
            assert torch.equal(g[name][[int(row)]][0].view(torch.uint8), torch.from_numpy(cache.array[7]))
    assert not read_apart


@pytest.mark.filterwarnings("ignore:strategy 'streamed'. the disk has no room:featstore.PerformanceWarning")
def test_where_nothing_is_packed_the_cache_is_filled_alone(
    g: featstore.OutOfCoreGraph, read_apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [batch.x.clone() for batch in loader(g)]
    monkeypatch.setattr(RunPacker, "fits", lambda *_: False)
    with loader(g, featstore.Streamed(cache="auto", policy="degree")) as made:
        for batch, x in zip(made, plain, strict=True):
            assert torch.equal(batch.x, x)
        assert made.stats()["superbatch"]["unpacked"] > 0
        assert made.stats()["hits"]["host"] > 0
    assert sum(read_apart) == g.features["x"].cache.stats()["fill_rows"]  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["packing", "reading"])
def test_after_an_error_the_cache_is_filled_anew(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    plain = [batch.x.clone() for batch in loader(g)]
    failing = [True]

    def fail(real: Any, *args: Any, **options: Any) -> Any:
        if failing:
            failing.pop()
            raise OSError(errno.EIO, "the drive failed")
        return real(*args, **options)

    strategy = featstore.Streamed(cache=SHARE, policy="degree", length=LENGTH)
    if when == "packing":
        monkeypatch.setattr(packing, "fill_extents", partial(fail, packing.fill_extents))
    else:
        strategy = featstore.Superbatch(cache=SHARE, policy="degree", length=LENGTH)  # type: ignore[assignment]
        real = Domain.read
        monkeypatch.setattr(Domain, "read", lambda *args: fail(real, *args))
    with loader(g, strategy) as made:
        with pytest.raises(OSError, match="the drive failed"):
            list(made)
        made.set_epoch(0)
        for batch, x in zip(made, plain, strict=True):
            assert torch.equal(batch.x, x)
        assert made.stats()["hits"]["host"] > 0


def test_best_rows_come_first() -> None:
    scores = np.array([3.0, 9.0, 1.0, 9.0, 5.0])
    assert sorted(FixedRows.best(scores, 2).tolist()) == [1, 3]
    assert FixedRows.best(scores, 3).tolist()[-1] == 4
    assert FixedRows.best(scores, 0).tolist() == []


def test_plans_have_no_changes() -> None:
    policy = FixedRows(Degree())
    policy.start(3, PolicyContext(10, 1), np.array([1, 4, 7]))
    horizon = Horizon(10, np.array([0, 2, 5]), [np.array([7, 2]), np.array([1, 9, 4])].__getitem__, 2)
    planned = list(policy.plan(horizon))
    assert [each.slots.tolist() for each in planned] == [[2, -1], [0, -1, 1]]
    assert all(len(each.changes.in_rows) == len(each.changes.out_rows) == 0 for each in planned)
    assert policy.nbytes == 16
    policy.start(3, PolicyContext(10, 1), np.array([7, 1, 4]))
    assert [each.slots.tolist() for each in policy.plan(horizon)] == [[0, -1], [1, -1, 2]]
    policy.keep_memory(False)
    assert policy.nbytes == 0
