"""Several loaders at once, on one graph, on two opens of one dataset, in two processes: batches as alone, counts their own."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import Tier
from featstore.testing.faults import forked
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.programs import run_beside

N, BATCH = 2000, 40
COUNTS = ("batches", "rows", "hits", "rows_loaded", "reads", "bytes_requested", "bytes_read")
SUPERBATCH = {"strategy": "superbatch", "length": 4, "cache": 0.1}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    indptr, indices = make_graph(N, 8.0)
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "g"
    data = {"y": rng.integers(0, 5, N), "train_idx": rng.permutation(N)[:800]}
    features = {"x": rng.standard_normal((N, 33)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, data, progress=False).close()
    return path


def loader(g: featstore.OutOfCoreGraph, seed: int, **options: Any) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=seed)
    return make_loader(g, sampler, g.node_data["train_idx"], BATCH, seed=seed, **options)


def rows_of(batch: featstore.MiniBatch) -> tuple[int, bytes, bytes, bytes]:
    return batch.index, batch.input_ids.numpy().tobytes(), batch.x.numpy().tobytes(), batch.y.numpy().tobytes()


def counts(made: featstore.Loader) -> dict[str, Any]:
    stats = made.stats()
    assert sum(stats["hits"].values()) == stats["rows"]
    assert stats["hits"]["base"] == stats["rows_loaded"]
    # How many batches' misses are read ahead together, and share pages, is a matter of timing.
    by_timing = {"reads", "bytes_read"} if "plan" in stats["seconds"] else set()
    return {name: stats[name] for name in COUNTS if name not in by_timing}


def alone(dataset: Path, seed: int, backend: str = "auto", **options: Any) -> tuple[list[Any], dict[str, Any]]:
    with featstore.open(dataset, memory="32MB", backend=backend) as g, loader(g, seed, **options) as made:
        return [rows_of(batch) for batch in made], counts(made)


def in_turns(*loaders: featstore.Loader) -> Iterator[list[featstore.MiniBatch]]:
    for both in zip(*loaders, strict=True):
        yield list(both)


def test_on_one_graph(dataset: Path) -> None:
    """Gathers overlap, and other users read too: counts are those of each loader alone."""
    want = [alone(dataset, seed) for seed in (0, 1)]
    with featstore.open(dataset, memory="32MB") as g, loader(g, 0) as a, loader(g, 1) as b:
        got: list[list[Any]] = [[], []]
        for pair in in_turns(a, b):
            g.features["x"][:50]
            g.features["x"].take(np.arange(100))
            for found, batch in zip(got, pair, strict=True):
                found.append(rows_of(batch))
        assert [(found, counts(made)) for found, made in zip(got, (a, b), strict=True)] == want


def test_reads_of_others_in_the_middle_of_a_gather(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = alone(dataset, 0)
    with featstore.open(dataset, memory="32MB") as g, loader(g, 0) as made:
        store = g.features["x"]
        take = store.take

        def with_company(*args: Any, **options: Any) -> Any:
            take(np.arange(100))
            return take(*args, **options)

        monkeypatch.setattr(store, "take", with_company)
        assert ([rows_of(batch) for batch in made], counts(made)) == want


@pytest.mark.shares_resources
def test_a_child_needs_no_memory_for_its_parents_loaders(dataset: Path) -> None:
    with featstore.open(dataset, memory="32MB", backend="pread") as g, loader(g, 1, threads=1) as made:
        running = iter(made)
        next(running)
        assert g.budget.required() > 0

        def child() -> None:
            assert g.budget.required() == g.budget.required(idle=True) == 0
            with loader(g, 0) as own:
                of_child = iter(own)
                next(of_child)
                assert g.budget.required() > 0

        assert forked(child) is None
        assert g.budget.required() > 0
        assert sum(1 for _ in running) == 19


def test_on_one_graph_through_one_static_cache(dataset: Path) -> None:
    want = [alone(dataset, seed, policy="degree", cache=0.2) for seed in (0, 1)]
    assert 0 < want[0][1]["hits"]["host"] != want[1][1]["hits"]["host"]
    with featstore.open(dataset, memory="32MB") as g:
        with loader(g, 0, policy="degree", cache=0.2) as a, loader(g, 1) as b:  # the second uses the first one's cache
            pairs = [[rows_of(batch) for batch in pair] for pair in in_turns(a, b)]
            assert [pair[0] for pair in pairs] == want[0][0]
            assert [pair[1] for pair in pairs] == want[1][0]
            assert [counts(a), counts(b)] == [want[0][1], want[1][1]]


def test_a_superbatch_loader_beside_another(dataset: Path) -> None:
    """Evaluation reads through the cache that the plans change: the plans' own hits and loads stay what they are alone."""
    want = alone(dataset, 0, **SUPERBATCH)
    plain = alone(dataset, 1)
    with featstore.open(dataset, memory="32MB") as g, loader(g, 0, **SUPERBATCH) as a, loader(g, 1) as b:
        pairs = [[rows_of(batch) for batch in pair] for pair in in_turns(a, b)]
        assert ([pair[0] for pair in pairs], counts(a)) == want
        assert [pair[1] for pair in pairs] == plain[0]
        assert counts(b)["rows"] == plain[1]["rows"]
        assert counts(b)["rows_loaded"] <= plain[1]["rows_loaded"]


@pytest.mark.parametrize("options", [{}, {"policy": "lru", "cache": 0.1}, SUPERBATCH], ids=["plain", "lru", "superbatch"])
def test_on_two_opens(dataset: Path, options: dict[str, Any]) -> None:
    """Each with its own budget, cache and, looking ahead, run files in one place."""
    want = [alone(dataset, 0, **options), alone(dataset, 1, "pread", **options)]
    with featstore.open(dataset, memory="32MB") as g, featstore.open(dataset, memory="32MB", backend="pread") as h:
        with loader(g, 0, **options) as a, loader(h, 1, **options) as b:
            got: list[list[Any]] = [[], []]
            for pair in in_turns(a, b):
                if options is SUPERBATCH:
                    assert len(glob.glob(f"{dataset}.runs/*")) == 2
                for found, batch in zip(got, pair, strict=True):
                    found.append(rows_of(batch))
            assert [(found, counts(made)) for found, made in zip(got, (a, b), strict=True)] == want
    assert not os.path.exists(f"{dataset}.runs")


def train_beside(link: Any, path: Path, options: dict[str, Any]) -> None:
    with featstore.open(path, memory="32MB") as g, loader(g, 1, **options) as made:
        found = []
        for batch in made:
            found.append(rows_of(batch))
            if batch.index == 2:
                link.send("under way")
                link.recv()
        link.send((found, counts(made)))
    link.send("closed")


@pytest.mark.usefixtures("_program_server")
def test_in_two_processes(dataset: Path, tmp_path: Path) -> None:
    """A neighbour trains on the same dataset with run files in the same directory: both get what they would get alone."""
    options = {**SUPERBATCH, "run_dir": str(tmp_path / "runs")}
    want = [alone(dataset, seed, **options) for seed in (0, 1)]
    with run_beside(train_beside, dataset, options) as (link, _):
        assert link.recv() == "under way"
        got = []
        with featstore.open(dataset, memory="32MB") as g, loader(g, 0, **options) as made:
            for batch in made:  # begins, sweeping what dead processes left, while the neighbour is in mid-epoch
                got.append(rows_of(batch))
                if batch.index == 2:
                    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 2
                    link.send("go on")
            assert (got, counts(made)) == want[0]
        assert link.recv() == want[1]
        assert link.recv() == "closed"
    assert not os.path.exists(tmp_path / "runs")


def test_a_failed_gather_counts_what_it_read(dataset: Path) -> None:
    """Rows that reached nobody are no hits; what was read for them was read."""
    with featstore.open(dataset, memory="32MB") as g:
        store = g.features["x"]
        counts = GatherCounts()
        with pytest.raises(IndexError):
            store.gather(torch.tensor([0, N]), counts=counts)
        assert (counts.rows, counts.read.reads) == ({}, 0)
        store.gather(torch.tensor([0, 5]), counts=counts)
        store.gather(torch.tensor([5, 5, 7]), counts=counts)
        assert counts.rows == {Tier.BASE: 5}
        assert counts.read.rows == 5
        assert counts.update_s == 0
        g.cache("x", "64KB", "lru")
        store.gather(torch.tensor([1, 2]), counts=counts)
        store.gather(torch.tensor([2, 3]), counts=counts)
        assert counts.rows == {Tier.BASE: 8, Tier.HOST: 1}
        assert counts.update_s > 0


def test_the_update_is_not_the_gather(dataset: Path) -> None:
    with featstore.open(dataset, memory="32MB") as g:
        for options, updates in ({}, False), ({"policy": "degree", "cache": 0.1}, False), (SUPERBATCH, True):
            with loader(g, 0, **options) as made:
                sum(1 for _ in made)
                seconds = made.stats()["seconds"]
            assert seconds["gather"] > 0
            assert ("update" in seconds) is updates
