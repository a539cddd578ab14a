"""Caches of features that ranks share: the rows of one of their own, filled once, a share charged to each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.cache.sharedrows import SharedCache
from featstore.errors import BudgetError, CorruptionError, PluginError
from featstore.gather import sharedmemory
from tests.support.refusing import refuses
from tests.support.typed import academic

pytestmark = pytest.mark.usefixtures("small_pieces", "_program_server")

_FORKS = multiprocessing.get_context("forkserver")
IDS = np.random.default_rng(1).integers(0, 1000, 5000)
LEAST = 4 * 1000 + 200 * 100  # bytes of a cache of 200 rows of "x"


class LowestRows(StaticPolicy):
    """The lowest rows; a policy of a user's own."""

    def scores(self, context: PolicyContext) -> Any:
        return -np.arange(context.n)


POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "degree": ("degree", {}),
    "random": ("random", {"seed": 3}),
    "frequency": ("frequency", {"counts": np.arange(1000) % 7}),
    "parts": ("cross_partition", {"parts": np.arange(1000) % 5}),
    "own": (LowestRows, {}),
}


@contextlib.contextmanager
def opened(path: Any, n: int, **options: Any) -> Iterator[list[Any]]:
    """Open the dataset once for each of ``n`` ranks, all in this process."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(featstore.open(path, **{"memory": "64MiB", **options})) for _ in range(n)]


def cached_rows(g: Any, name: str = "x") -> list[int]:
    return list(np.flatnonzero(g.features[name].cache.map.slot_of_row >= 0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
def test_as_a_cache_of_its_own(small: SimpleNamespace, shared_memory: Path, policy: str, n: int) -> None:
    """The same rows are cached, hit and returned, whoever filled the cache; the budget counts a share of it."""
    chosen, options = POLICIES[policy]
    with opened(small.path, n + 1) as (own, *ranks):
        own.cache("x", "20%", chosen, **options)
        for g in ranks:
            g.cache("x", "20%", chosen, **options, shared=n)
        assert not os.listdir(shared_memory)
        of_each = []
        for g in (own, *ranks):
            assert np.array_equal(g.features["x"][IDS].numpy(), small.x[IDS])
            assert cached_rows(g) == cached_rows(own)
            g.features["x"].cache._check()
            of_each.append(g.features["x"].stats()["cache"])
        assert [each.pop("fill_rows") for each in of_each] == [200, 200] + [0] * (n - 1)
        assert all(each == of_each[0] for each in of_each)
        for g in ranks:
            assert g.memory_report()["cache of 'x'"] == -(-LEAST // n) == g.features["x"].cache.nbytes
            assert not g.features["x"].cache.array.flags.writeable
            g.cache("x", 0)
            assert "cache of 'x'" not in g.memory_report()


def _rank(path: str, folder: str, ranks: int, link: Any) -> None:
    sharedmemory.DIRECTORY = folder
    os.environ.update(MASTER_PORT="1", LOCAL_WORLD_SIZE=str(ranks))
    with featstore.open(path, memory="64MiB") as g:
        g.cache("x", "20%", shared=True)
        loader = featstore.Loader(g, featstore.NeighborSampler(g, [3, 2]), np.arange(400), 50, strategy="ondemand")
        link.send(g.features["x"].stats()["cache"]["fill_rows"])
        link.recv()
        with loader:
            link.send([(batch.input_ids.numpy(), batch.x.numpy()) for batch in loader])
        link.send((g.memory_report()["cache of 'x'"], g.features["x"].stats()["cache"]["hits"]))
        link.recv()


@pytest.mark.parametrize("n", [2, 4])
def test_processes(small: SimpleNamespace, shared_memory: Path, n: int) -> None:
    """Ranks of LOCAL_WORLD_SIZE train on the right rows from one copy; a killed one harms no other."""
    links, ranks = [], []
    for _ in range(n):
        link, there = _FORKS.Pipe()
        ranks.append(_FORKS.Process(target=_rank, args=(str(small.path), str(shared_memory), n, there)))
        ranks[-1].start()
        there.close()
        links.append(link)
    try:
        assert sorted(link.recv() for link in links) == [0] * (n - 1) + [200]
        assert not os.listdir(shared_memory)
        ranks[0].kill()
        ranks[0].join()
        for link in links[1:]:
            link.send(None)
        for link in links[1:]:
            for ids, rows in link.recv():
                assert np.array_equal(rows, small.x[ids])
            charged, hits = link.recv()
            assert charged == -(-LEAST // n)
            assert hits > 0
            link.send(None)
        for rank in ranks[1:]:
            rank.join(60)
            assert rank.exitcode == 0
    finally:
        for rank, link in zip(ranks, links, strict=True):
            rank.kill()
            rank.join()
            rank.close()
            link.close()


def test_what_decides_differently_is_apart(small: SimpleNamespace, shared_memory: Path) -> None:
    """Policies, seeds, counts, parts, sizes and features: each has a copy; a callable's counts are the first rank's."""
    calls = list[int]()

    def counts() -> Any:
        calls.append(1)
        return np.arange(1000)

    ways: list[tuple[Any, dict[str, Any]]] = [
        *POLICIES.values(),
        ("random", {"seed": 4}),
        ("frequency", {"counts": np.arange(1000) % 8}),
        ("frequency", {"counts": counts}),
        ("cross_partition", {"parts": torch.arange(1000) % 6}),
        ("degree", {"budget": "10%"}),
        ("degree", {"name": "h"}),
    ]
    for number, (policy, options) in enumerate(ways):
        with opened(small.path, 2) as (first, second):
            for g in (first, second):
                g.cache(**{"name": "x", "budget": "20%", "policy": policy, "shared": 3, **options})
            assert len(os.listdir(shared_memory)) == 1
            name = options.get("name", "x")
            assert second.features[name].stats()["cache"]["fill_rows"] == 0
            found = os.listdir(shared_memory)[0]
            assert found not in ways[:number]
            ways[number] = found  # type: ignore[call-overload]
    assert len(set(map(str, ways))) == len(ways)
    assert calls == [1]


def test_kept_parts_and_several_features(small: SimpleNamespace, tmp_path: Path, shared_memory: Path) -> None:
    shutil.copytree(small.path, tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        featstore.partition(g, 4, method="ranges", name="four", progress=False)
        featstore.partition(g, 5, method="ranges", name="five", progress=False)
    with opened(tmp_path / "g", 3) as (one, other, third):
        one.cache("x", "20%", "cross_partition", shared=2)
        other.cache("x", "20%", "cross_partition", parts="five", shared=2)  # the latest, which is the default
        third.cache("x", "20%", "cross_partition", parts="four", shared=2)
        assert [g.features["x"].stats()["cache"]["fill_rows"] for g in (one, other, third)] == [200, 0, 200]
        assert len(os.listdir(shared_memory)) == 1
    with opened(small.path, 2) as ranks:
        for g in ranks:
            with g.budget.reserve("other", g.budget.available - 400_000):
                g.cache(budget="600KB", shared=2)  # of rows of 100 and 600 bytes
            report = g.memory_report()
            assert 290_000 < report["cache of 'x'"] + report["cache of 'h'"] <= 300_000
            assert np.array_equal(g.features["h"][IDS].numpy(), small.h[IDS])
        assert not os.listdir(shared_memory)


def test_types_that_share_rows(tmp_path: Path, shared_memory: Path) -> None:
    graph = academic(papers=300)
    with graph.create(tmp_path / "g"), opened(tmp_path / "g", 2) as ranks:
        for g in ranks:
            g.cache(budget="50%", shared=2)
            for kind, features in graph.features.items():
                for name, rows in features.items():
                    assert np.array_equal(g[kind].features[name][:].numpy(), rows)
        assert not os.listdir(shared_memory)


def test_a_dataset_that_was_replaced(small: SimpleNamespace, tmp_path: Path, shared_memory: Path) -> None:
    """Handles of the old and the new one each share their own rows."""
    arrays: Any = [small.indptr, small.indices]
    with featstore.OutOfCoreGraph.create(tmp_path / "g", *arrays, {"x": small.x}, progress=False) as old:
        old.cache("x", "20%", shared=2)
        with featstore.OutOfCoreGraph.create(
            tmp_path / "g", *arrays, {"x": -small.x}, overwrite=True, progress=False, memory="64MiB"
        ) as new:
            new.cache("x", "20%", shared=2)
            assert len(os.listdir(shared_memory)) == 2
            assert np.array_equal(new.features["x"][IDS].numpy(), -small.x[IDS])
        assert np.array_equal(old.features["x"][IDS].numpy(), small.x[IDS])


def test_refused(g: Any, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(ValueError, "policy 'lru' is an online one", lambda: g.cache("x", "10%", "lru", shared=2))
    refuses(ValueError, "policy 'belady' is a planned one", lambda: g.cache("x", "10%", "belady", shared=2))
    refuses(ValueError, "by its name or class", lambda: g.cache("x", "10%", LowestRows(), shared=2))
    refuses(ValueError, "must agree on its size", lambda: g.cache("x", shared=2))
    refuses(ValueError, "shared must be at least 1", lambda: g.cache("x", "10%", shared=0))
    refuses(TypeError, "shared must be an integer", lambda: g.cache("x", "10%", shared="2"))
    monkeypatch.setattr(sharedmemory, "DIRECTORY", str(shared_memory / "absent"))
    refuses(FileNotFoundError, "absent", lambda: g.cache("x", "10%", shared=2))
    g.cache("x", 0, shared=2)  # no cache, so nothing to share
    assert g.features["x"].cache is None or not g.features["x"].cache.capacity
    assert not os.listdir(shared_memory)


class Failing(StaticPolicy):
    def scores(self, context: PolicyContext) -> Any:
        raise KeyError("no scores")


def test_errors_leave_nothing(small: SimpleNamespace, tmp_path: Path, shared_memory: Path) -> None:
    """A budget too small for the share, a policy that fails, damaged rows: the rank has no cache, and none is left behind."""
    shutil.copytree(small.path, tmp_path / "g")
    (damaged,) = (tmp_path / "g").glob("node.x.*.rows")
    data = damaged.read_bytes()
    damaged.write_bytes(data[:4096] + bytes(len(data) - 4096))
    with featstore.open(small.path, memory="8MiB") as g:
        g.features["x"][:10]
        left = g.budget.available
        with g.budget.reserve("other", left - 8_000):
            refuses(BudgetError, "cache of 'x' needs", lambda: g.cache("x", "20%", shared=2))
        refuses(PluginError, "no scores", lambda: g.cache("x", "20%", Failing, shared=2))
        assert g.budget.available == left
        with g.budget.reserve("other", left - 500_000):  # enough for the share, not for the cache of 604 kB
            g.cache("h", "100%", shared=4)
            assert isinstance(g.features["h"].cache, SharedCache)
        assert np.array_equal(g.features["h"][IDS].numpy(), small.h[IDS])
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        refuses(CorruptionError, "", lambda: g.cache("x", "20%", shared=2))
        assert g.features["x"].cache is None
        assert "cache of 'x'" not in g.memory_report()
    assert not os.listdir(shared_memory)


def test_forks_and_closing(small: SimpleNamespace, shared_memory: Path) -> None:
    with opened(small.path, 2) as (first, second):
        for g in (first, second):
            g.cache("x", "20%", shared=2)
        child = os.fork()
        if not child:
            same = np.array_equal(first.features["x"][IDS].numpy(), small.x[IDS])
            os._exit(not (same and first.features["x"].stats()["cache"]["hits"] > 0))
        assert os.waitpid(child, 0)[1] == 0
        first.close()
        assert np.array_equal(second.features["x"][IDS].numpy(), small.x[IDS])
        second.cache("x", "20%", "lru")  # in place of the shared one
        assert second.memory_report()["cache of 'x'"] > LEAST
    assert not os.listdir(shared_memory)
