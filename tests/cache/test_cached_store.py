"""Feature stores behind every policy: the same rows as without a cache, with threads, faulty plug-ins and small caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.rowmap import CLAIM_BYTES, RowMap
from featstore.gather.buffers import carve
from featstore.storage.rowfile import RowFile
from tests.cache.test_cache_faults import Faulty
from tests.support.sampled import covering

POLICIES = ["clock", "degree", "frequency", "in_out_ratio", "lru", "random", "s3fifo", "sieve"]


@pytest.mark.parametrize(("policy", "rows"), covering(POLICIES, [1, 30, 1000]))
def test_rows_are_those_of_the_store(small: SimpleNamespace, policy: str, rows: int) -> None:
    reference = torch.from_numpy(small.x)
    rng = np.random.default_rng(rows)
    with featstore.open(small.path, memory="50MB") as g:
        counts = rng.integers(0, 9, small.num_nodes) if policy == "frequency" else None
        g.cache("x", budget=4 * small.num_nodes + rows * 300, policy=policy, counts=counts)
        store = g.features["x"]
        for size in (0, 1, 5, 200, 999, 3000):  # from less than the cache to more, with repeats
            ids = torch.from_numpy((small.num_nodes * rng.random(size) ** 2).astype(np.int64))
            assert torch.equal(store[ids], reference[ids])
        assert torch.equal(store[:], reference)
        assert torch.equal(store[::-7], reference.flip(0)[::7])
        counted = store.stats()["cache"]
        assert counted["hits"] + counted["misses"] == 4205 + 1000 + 143
        assert counted["cached"] <= counted["capacity"] <= small.num_nodes


@pytest.mark.parametrize("policy", ["s3fifo", "degree"])
def test_the_plan_of_a_large_take_is_paid_for_or_made_in_parts(small: SimpleNamespace, policy: str) -> None:
    reference = torch.from_numpy(small.x)
    n = 300_000
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, small.num_nodes, n))
    out, wanted = torch.empty(n, *small.x.shape[1:]), reference[ids]
    with featstore.open(small.path, memory="64MB") as g:
        g.cache("x", budget=4 * small.num_nodes + 300 * 300, policy=policy)
        store, before = g.features["x"], g.budget.used
        store.take(ids, out=out)
        assert torch.equal(out, wanted)
        assert g.budget.peak - before >= 20 * n  # two arrays for all of them, and the misses, most of them, twice
        g.pool.trim()
        with g.budget.reserve("the rest", g.budget.total - g.budget.used - (3 << 20)):
            out.zero_()
            store.take(ids, out=out)
            assert g.budget.used <= g.budget.total
        assert torch.equal(out, wanted)
        counted = store.stats()["cache"]
        assert counted["hits"] + counted["misses"] == 2 * n


@pytest.mark.parametrize("policy", ["lru", "clock", "sieve", "s3fifo"])
def test_ids_that_change_during_a_gather_spoil_no_cache(
    small: SimpleNamespace, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of that gather are the caller's affair; the cache is everybody's."""
    ids = torch.arange(0, small.num_nodes, 2)
    gather = RowFile.gather

    def meanwhile(*args: Any) -> Any:
        cost = gather(*args)
        ids.add_(1)
        return cost

    with featstore.open(small.path, memory="50MB") as g:
        g.cache("x", budget="1MB", policy=policy)
        with monkeypatch.context() as patch:
            patch.setattr(RowFile, "gather", meanwhile)
            g.features["x"][ids]
        assert ids[0] == 1
        assert torch.equal(g.features["x"][:], torch.from_numpy(small.x))


@pytest.mark.parametrize("hook", ["hit", "victims", "insert"])
def test_a_faulty_plug_in_never_harms_the_rows(small: SimpleNamespace, hook: str) -> None:
    reference = torch.from_numpy(small.x)
    rng = np.random.default_rng(5)
    with featstore.open(small.path, memory="50MB") as g:
        g.cache("x", budget=8_000, policy=Faulty(hook, RuntimeError("boom")))
        store = g.features["x"]
        faults = 0
        for _ in range(20):
            ids = torch.from_numpy(rng.integers(0, 60, 20))
            out = torch.full((20, 25), torch.nan)
            try:
                store.take(ids, out=out)
            except featstore.PluginError as error:
                faults += 1
                assert "'Faulty'" in str(error)
                assert "boom" in str(error)
            assert torch.equal(out, reference[ids])  # also where it raised
        assert faults == 1
        assert store.stats()["cache"]["hits"] > 0


def test_a_fault_in_a_batch_that_only_hits_shows_at_once(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="50MB") as g:
        g.cache("x", budget=20_000, policy=Faulty("hit", RuntimeError("boom")))
        store = g.features["x"]
        first = store[[1, 2, 3]]
        with pytest.raises(featstore.PluginError, match="hit raised RuntimeError: boom"):
            store[[1, 2]]
        assert torch.equal(store[[1, 2, 3]], first)


def test_idle_queues_make_room_for_a_batch(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        store = g.features["x"]
        store[:1000]
        with g.reader.engine(), g.reader.engine(), g.reader.engine():
            pass
        held = g.memory_report()["reader buffers"]
        g.pool.trim()
        n = 20_000
        ids = np.arange(n) % small.num_nodes
        with g.budget.reserve("the rest", g.budget.available - 1000):
            rows = store[ids[: n // 4]]  # more than is left
            assert rows.nbytes > 64 << 10
        assert torch.equal(rows, torch.from_numpy(small.x[ids[: n // 4]]))
        assert g.memory_report()["reader buffers"] < held


@pytest.mark.parametrize("policy", ["lru", "degree"])
def test_what_is_chosen_from_lies_in_pooled_memory(small: SimpleNamespace, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of an admission, as those of a plan, are counted, and taken before anything has changed."""
    with featstore.open(small.path, memory="50MB") as g:
        g.cache("x", budget=4 * small.num_nodes + 100 * 300, policy=policy)
        store = g.features["x"]
        lent: list[np.ndarray] = []
        array, claim = store._pool.array, RowMap.claim
        claims = []

        def lend(shape: Any, dtype: Any) -> np.ndarray:
            lent.append(array(shape, dtype))
            return lent[-1]

        def spied(self: RowMap, rows: np.ndarray, *rest: Any) -> Any:
            found = claim(self, rows, *rest)
            claims.append(len(rows))
            assert all(not len(some) or any(np.shares_memory(some, other) for other in lent) for some in found)
            return found

        monkeypatch.setattr(store._pool, "array", lend)
        monkeypatch.setattr(RowMap, "claim", spied)
        ids = np.random.default_rng(1).permutation(small.num_nodes)
        assert np.array_equal(store[ids].numpy(), small.x[ids])
        assert claims == ([len(ids)] if policy == "lru" else [])
        assert sum(some.nbytes for some in lent) >= (CLAIM_BYTES * len(ids) if policy == "lru" else 0)


def test_carved_memory_ends() -> None:
    array = carve(np.empty(20, np.uint8))
    first, second = array(2, np.int64), array(1, np.int32)
    first[:], second[:] = 7, -1
    assert first.tolist() == [7, 7]
    assert len(array(0, np.int64)) == 0
    with pytest.raises(ValueError, match="4 bytes of 0"):
        array(1, np.int32)
