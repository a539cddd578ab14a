"""Slot table and feature cache: against a dict, with many threads, through forks and small budgets."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.budget import Budget
from featstore.cache import table
from featstore.cache.base import Int64s, PolicyContext, StaticPolicy, get_policy
from featstore.cache.gate import Gate
from featstore.cache.select import top_rows
from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, ClosedError, PluginError
from featstore.gather.plan import Changeset, Tier
from featstore.testing.policies import gathered, missing
from featstore.testing.strategies import row_ids
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("small_pieces")

ONLINE = ["lru", "clock", "sieve", "s3fifo"]
WIDTHS = [1, 2, 4, 8, 16, 25, 400, 512, 4095, 4097, 65536]


def store(n: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), dtype=np.uint8)


def make(capacity: int, data: np.ndarray, policy: Any, **options: Any) -> FeatureCache:
    n, row_bytes = data.shape
    return FeatureCache(capacity, row_bytes, n, None if policy is None else get_policy(policy), **options)


def batch(cache: FeatureCache, data: np.ndarray, ids: Int64s) -> np.ndarray:
    with cache.pinned():
        plan = cache.plan(ids)
        out = gathered(cache, data, plan)
    cache.apply(cache.admit(*missing(plan)), out)
    return out


# -- online caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "row_bytes"), covering(ONLINE, WIDTHS))
def test_rows_of_any_width_come_back(policy: str, row_bytes: int) -> None:
    data = store(60, row_bytes)
    cache = make(17, data, policy)
    rng = np.random.default_rng(1)
    for _ in range(12):
        ids = rng.integers(0, 60, rng.integers(0, 40))
        assert (batch(cache, data, ids) == data[ids]).all()
        cache._check()
    assert cache.stats()["hits"] > 0
    assert cache.stats()["evicted"] > 0


def test_a_row_of_a_mebibyte() -> None:
    data = store(5, 1 << 20)
    cache = make(2, data, "lru")
    for ids in ([0, 1], [1, 2], [2, 4, 2], [0, 4]):
        ids = np.array(ids)
        assert (batch(cache, data, ids) == data[ids]).all()


@pytest.mark.parametrize("policy", ONLINE)
@given(
    n=st.integers(1, 40),
    capacity=st.integers(0, 45),
    data=st.data(),
)
def test_any_batches_any_capacity(policy: str, n: int, capacity: int, data: st.DataObject) -> None:
    values = store(n, 4)
    cache = make(capacity, values, policy)
    cached: set[int] = set()
    requests = 0
    for ids in data.draw(st.lists(row_ids(n, max_size=60), max_size=6)):
        plan = cache.plan(ids)
        hits = sum(len(part.addresses) for part in plan.parts if part.tier == Tier.HOST)
        assert hits == sum(row in cached for row in ids.tolist())  # each request counts
        covered = [range(len(ids)) if part.positions is None else part.positions.tolist() for part in plan.parts]
        assert sorted(p for positions in covered for p in positions) == list(range(len(ids)))
        out = gathered(cache, values, plan)
        assert (out == values[ids]).all()
        changes = cache.admit(*missing(plan))
        new = list(dict.fromkeys(row for row in ids.tolist() if row not in cached))
        admitted = [] if changes is None else changes.in_rows.tolist()
        # The first ones, in the batch's order; the excess passes by, and so do those that leave for later ones.
        assert admitted == [row for row in new[:capacity] if policy == "lru" or row in set(admitted)]
        assert bool(admitted) == bool(new[:capacity])
        if changes is not None:
            assert (out[changes.in_positions] == values[changes.in_rows]).all()
            assert set(changes.out_rows.tolist()) <= cached
            cached = cached - set(changes.out_rows.tolist()) | set(admitted)
        cache.apply(changes, out)
        cache._check()
        requests += len(ids)
        assert set(np.flatnonzero(cache.map.slot_of_row >= 0).tolist()) == cached
        assert len(cached) <= capacity
    stats = cache.stats()
    assert stats["hits"] + stats["misses"] == requests
    assert stats["admitted"] - stats["evicted"] == stats["cached"] == len(cached)


def test_capacity_is_at_most_n_and_zero_is_no_cache() -> None:
    data = store(10, 4)
    assert make(100, data, "lru").capacity == 10
    none = make(0, data, "lru")
    assert none.nbytes == 0
    ids = np.array([1, 1, 9])
    assert (batch(none, data, ids) == data[ids]).all()
    assert none.stats() == {"hits": 0, "misses": 3, "admitted": 0, "evicted": 0, "fill_rows": 0, "capacity": 0, "cached": 0}
    assert make(5, store(0, 4), "lru").plan(np.empty(0, np.int64)).parts == ()


def test_bytes_that_never_came_are_no_hit() -> None:
    data = store(10, 4)
    cache = make(4, data, "lru")
    ids = np.array([1, 2, 3])
    lost = cache.admit(*missing(cache.plan(ids)))  # a crash between admit and apply
    assert [part.tier for part in cache.plan(ids).parts] == [Tier.BASE]
    again = cache.admit(ids)
    assert again.in_slots.tolist() == lost.in_slots.tolist()  # not chosen twice
    cache.apply(again, data[ids])
    assert (batch(cache, data, ids) == data[ids]).all()
    assert cache.stats()["hits"] == 3
    assert cache.stats()["admitted"] == 3
    cache._check()


def test_rows_that_came_in_meanwhile_are_filtered() -> None:
    data = store(10, 4)
    cache = make(4, data, "lru")
    one, two = cache.plan(np.array([0, 1])), cache.plan(np.array([1, 2]))
    cache.apply(cache.admit(*missing(one)), data[[0, 1]])
    changes = cache.admit(*missing(two))
    assert changes.in_rows.tolist() == [2]
    cache.apply(changes, data[[1, 2]])
    cache._check()


@pytest.mark.parametrize("policy", ONLINE)
def test_threads_share_a_cache(policy: str) -> None:
    share_a_cache(policy, 150)


@pytest.mark.stress
@pytest.mark.parametrize("policy", ONLINE)
def test_threads_share_a_cache_for_long(policy: str) -> None:
    share_a_cache(policy, 20_000)


def share_a_cache(policy: str, n_batches: int) -> None:
    data = store(300, 64)
    cache = make(60, data, policy)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(n_batches):
                ids = (300 * rng.random(rng.integers(1, 80)) ** 2).astype(np.int64)
                if not (batch(cache, data, ids) == data[ids]).all():
                    wrong.append(ids)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache._check()
    assert (cache.map.slot_of_row >= -1).all()
    slots = cache.map.lookup(np.arange(300))
    assert (cache.array[slots[slots >= 0]] == data[slots >= 0]).all()


def test_apply_inside_pinned_is_an_error_not_a_hang() -> None:
    data = store(10, 4)
    cache = make(2, data, "lru")
    with cache.pinned(), cache.pinned():
        changes = cache.admit(*missing(cache.plan(np.array([1]))))
        with pytest.raises(RuntimeError, match="pinned"):
            cache.apply(changes, data[[1]])
    cache.apply(changes, data[[1]])
    assert cache.plan(np.array([1])).parts[0].tier == Tier.HOST


def test_apply_waits_for_readers() -> None:
    data = store(10, 4)
    cache = make(1, data, "lru")
    batch(cache, data, np.array([0]))
    with cache.pinned():
        plan = cache.plan(np.array([0]))
        other = threading.Thread(target=batch, args=(cache, data, np.array([1])))
        other.start()
        # Whatever the other thread has done by now, it has not overwritten the slot that this plan names.
        while cache._gate._n_writers_waiting == 0:
            assert other.is_alive()
        assert (gathered(cache, data, plan) == data[[0]]).all()
    other.join()
    assert (batch(cache, data, np.array([1])) == data[[1]]).all()


@pytest.mark.parametrize("has_entered", [False, True])
def test_ctrl_c_while_slots_are_pinned_leaves_nobody_inside(monkeypatch: pytest.MonkeyPatch, has_entered: bool) -> None:
    """It strikes before a gather has come in, or when it has and the call has not returned; with and without an outer one."""
    data = store(10, 4)
    cache = make(2, data, "lru")
    enter = Gate.enter

    def interrupted(self: Gate) -> None:
        if has_entered:
            enter(self)
        raise KeyboardInterrupt

    for outer in (nullcontext, cache.pinned):
        with outer():
            before = cache._gate._n_readers
            monkeypatch.setattr(Gate, "enter", interrupted)
            with pytest.raises(KeyboardInterrupt), cache.pinned():
                pass
            monkeypatch.undo()
            assert cache._gate._n_readers == before
            assert cache._gate.is_mine == bool(before)
    assert (batch(cache, data, np.array([1, 2])) == data[[1, 2]]).all()  # waits for nobody


def test_apply_checks_the_output() -> None:
    data = store(10, 4)
    cache = make(3, data, "lru")
    changes = cache.admit(np.array([4, 5]))
    with pytest.raises(ValueError, match="width"):
        cache.apply(changes, np.zeros((2, 5), np.uint8))
    with pytest.raises(IndexError):
        cache.apply(changes, np.zeros((1, 4), np.uint8))
    cache.apply(changes, data[[4, 5]])
    assert (batch(cache, data, np.array([5, 4])) == data[[5, 4]]).all()


# -- static caches ---------------------------------------------------------------------------------------------------------------


class Given(StaticPolicy):
    def __init__(self, scores: Any) -> None:
        self.given = scores

    def scores(self, context: PolicyContext) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def reader(data: np.ndarray, seen: list[Int64s]) -> Any:
    def read(rows: Int64s, out: np.ndarray) -> None:
        seen.append(rows)
        out[:] = data[rows]

    return read


@given(scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40), capacity=st.integers(0, 45))
def test_static_rows_are_the_best_of_equals_the_lowest(scores: list[int], capacity: int) -> None:
    data = store(len(scores), 8)
    cache = make(capacity, data, Given(np.array(scores)))
    seen: list[Int64s] = []
    n_filled = cache.fill(reader(data, seen))
    best = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:capacity]
    assert n_filled == len(best)
    assert [row for rows in seen for row in rows.tolist()] == sorted(best)  # one ascending pass
    ids = np.arange(len(scores))
    plan = cache.plan(ids)
    assert (gathered(cache, data, plan) == data).all()
    assert cache.admit(*missing(plan)) is None
    cache.apply(None, data)
    cache._check()
    assert cache.stats()["fill_rows"] == cache.stats()["hits"] == len(best)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_the_best_of_many_rows(dtype: Any) -> None:
    rng, n = np.random.default_rng(0), 1000
    scores = np.asarray(rng.normal(0, 30, n) if dtype is not bool else rng.random(n) < 0.4).astype(dtype)
    order = np.lexsort((np.arange(n), -scores.astype(np.float64)))
    for k in (1, 61, 62, 500, 999):
        assert np.array_equal(top_rows(scores, k), np.sort(order[:k]))
    if np.issubdtype(dtype, np.floating):
        scores[[700, 900]] = np.nan
        with pytest.raises(ValueError, match="the score of row 700 is NaN"):
            top_rows(scores, 5)


def test_static_fill_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.cache.table.FILL_BYTES", 100)
    data = store(50, 30)
    cache = make(20, data, Given(np.arange(50.0)))
    seen: list[Int64s] = []
    cache.fill(reader(data, seen))
    assert [len(rows) for rows in seen] == [3, 3, 3, 3, 3, 3, 2]
    assert (batch(cache, data, np.arange(50)) == data).all()
    with pytest.raises(RuntimeError, match="filled already"):
        cache.fill(reader(data, seen))


def test_a_failed_fill_leaves_an_empty_cache_that_can_be_filled() -> None:
    data = store(10, 4)
    cache = make(5, data, Given(np.arange(10)))

    def fail(rows: Int64s, out: np.ndarray) -> None:
        out[:] = 0
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        cache.fill(fail)
    assert (batch(cache, data, np.arange(10)) == data).all()
    assert cache.stats()["hits"] == 0
    cache.fill(reader(data, []))
    assert (batch(cache, data, np.arange(10)) == data).all()
    assert cache.stats()["hits"] == 5


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (RuntimeError("boom"), "RuntimeError: boom"),
        (np.zeros(9), r"must be 10 real numbers.*, not float64 of shape \(9,\)"),
        (None, r"shape"),
        (np.zeros((10, 1)), r"shape"),
        (np.array([0.0] * 9 + [np.nan]), "row 9 is NaN"),
        (np.array(["a"] * 10), "must be 10 real numbers"),
        (np.zeros(10, complex), "must be 10 real numbers"),
    ],
)
def test_faulty_static_policies(scores: Any, message: str) -> None:
    data = store(10, 4)
    cache = make(5, data, Given(scores))
    with pytest.raises(PluginError, match=message) as caught:
        cache.fill(reader(data, []))
    assert "Given" in str(caught.value)
    assert (batch(cache, data, np.arange(10)) == data).all()


# -- planned from outside --------------------------------------------------------------------------------------------------------


def changeset(in_rows: list[int], in_positions: list[int], in_slots: list[int], out_rows: list[int]) -> Changeset:
    return Changeset(
        np.array(in_rows, np.int64), np.array(in_positions, np.int64), np.array(in_slots, np.int32), np.array(out_rows, np.int64)
    )


def test_changesets_from_a_planner() -> None:
    data = store(20, 4)
    cache = make(3, data, None)
    assert cache.admit(np.array([1])) is None
    cache.apply(changeset([4, 5], [1, 0], [2, 0], []), data[[5, 4]])
    cache._check()
    assert (batch(cache, data, np.array([4, 5, 6])) == data[[4, 5, 6]]).all()
    cache.apply(changeset([6, 7], [0, 1], [2, 1], [4]), data[[6, 7]])
    cache.apply(changeset([], [], [], [5]), data[:0])  # a row that is never used again makes room for none
    cache._check()
    assert sorted(np.flatnonzero(cache.map.slot_of_row >= 0).tolist()) == [6, 7]
    assert (batch(cache, data, np.arange(20)) == data).all()
    assert cache.stats()["admitted"] == 4
    assert cache.stats()["evicted"] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        changeset([1], [0], [0], []),  # slot taken
        changeset([1], [0], [3], []),
        changeset([1], [0], [-1], []),
        changeset([4], [0], [1], []),  # cached
        changeset([1, 1], [0, 1], [1, 2], []),
        changeset([1, 2], [0, 1], [1, 1], []),
        changeset([1], [0], [1], [9]),  # not cached
        changeset([1], [5], [1], []),  # position
        changeset([20], [0], [1], []),
    ],
)
def test_a_wrong_changeset_never_gives_wrong_data(wrong: Changeset) -> None:
    data = store(20, 4)
    cache = make(3, data, None)
    cache.apply(changeset([4], [0], [0], []), data[[4]])
    with pytest.raises((PluginError, IndexError)):
        cache.apply(wrong, data[[1, 2]])
    cache._check()
    assert cache.stats()["cached"] == 0
    assert (batch(cache, data, np.arange(20)) == data).all()


# -- budget, life and death ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*ONLINE, "random", None])
def test_the_budget_is_kept(policy: str | None) -> None:
    n, row_bytes = 1000, 100
    made = None if policy is None else get_policy(policy)
    for n_bytes in (4 * n + 200, 10_000, 50_000, 10**6):
        capacity = FeatureCache.capacity_for(n_bytes, row_bytes, n, made)
        assert 1 <= capacity <= n
        budget = Budget(n_bytes + 64)
        cache = FeatureCache(capacity, row_bytes, n, made, budget=budget)
        assert cache.nbytes == budget.used == sum(budget.report().values()) <= n_bytes + 64
        assert capacity == n or budget.available < 64 + 2 * row_bytes + 10 * capacity  # little is left unused
        cache.close()
        cache.close()
        assert budget.used == 0
        with pytest.raises(ClosedError):
            cache.plan(np.array([1]))
    assert FeatureCache.capacity_for(0, row_bytes, n, made) == 0
    assert FeatureCache.capacity_for(10**9, row_bytes, n, made) == n
    with pytest.raises(BudgetError) as caught:
        FeatureCache.capacity_for(4 * n, row_bytes, n, made)
    assert FeatureCache.capacity_for(caught.value.needed or 0, row_bytes, n, made) == 1


def test_memory_is_reserved_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, counted = Budget(10**6), []
    take = table.huge_array
    monkeypatch.setattr(table, "huge_array", lambda n_bytes: (counted.append(budget.used - n_bytes), take(n_bytes))[1])
    FeatureCache(100, 100, 1000, get_policy("lru"), budget=budget).close()
    assert counted
    assert min(counted) >= 4 * 1000  # the row map is reserved too


def test_a_cache_that_nobody_closes_is_released() -> None:
    """As that of a feature that was replaced, which dies with its loader."""
    budget = Budget(10**6)
    cache = FeatureCache(100, 100, 1000, None, budget=budget)
    cache.lend()
    assert budget.used == cache.nbytes
    del cache
    assert (budget.report(), budget.used) == ({}, 0)


def test_scores_count_while_they_are_used() -> None:
    n = 10_000
    peaks = {}
    for policy, capacity in [("random", 10), ("random", n), ("in_out_ratio", 10), ("degree", 10)]:
        budget = Budget(10**7)
        degrees = np.arange(n)
        context = PolicyContext(n, 20, lambda degrees=degrees: degrees, lambda degrees=degrees: degrees)
        cache = FeatureCache(capacity, 20, n, get_policy(policy), context, budget)
        cache.fill(lambda rows, out: None)
        assert budget.used == cache.nbytes
        peaks[policy, capacity] = budget.peak - cache.nbytes
    assert peaks == {("random", 10): 8 * n - 200, ("random", n): 0, ("in_out_ratio", 10): 9 * n - 200, ("degree", 10): 0}
    small = Budget(4 * n + 300)
    cache = FeatureCache(10, 20, n, get_policy("random"), None, small)
    with pytest.raises(BudgetError, match="scores of policy 'random' needs"):
        cache.fill(lambda rows, out: None)
    assert small.used == cache.nbytes


def test_over_budget_nothing_is_kept() -> None:
    budget = Budget(5000)
    with pytest.raises(BudgetError):
        FeatureCache(10, 100, 1000, get_policy("lru"), budget=budget)
    assert budget.used == 0


def test_what_cannot_be_is_refused() -> None:
    for capacity, row_bytes, n in [(-1, 4, 4), (1, 0, 4), (1, 4, -1)]:
        with pytest.raises(ValueError, match="a cache cannot have"):
            FeatureCache(capacity, row_bytes, n, None)
    with pytest.raises(ValueError, match="at most"):
        FeatureCache(2**31, 1, 2**31, None)
    with pytest.raises(TypeError, match="neither"):
        FeatureCache(1, 4, 4, "lru")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["lru", "random", None])
def test_a_forked_child_reads_right_and_leaves_its_parent_alone(policy: str | None) -> None:
    data = store(2000, 4096)  # 8 MB: the array is a mapping of its own
    cache = make(1000, data, policy)
    cache.fill(reader(data, []))
    ids = np.arange(800)
    batch(cache, data, ids)
    cache._lock.acquire()  # as if another thread held it at the fork
    child = os.fork()
    if child == 0:
        status = 1
        try:
            other = np.arange(1200, 2000)
            right = (batch(cache, data, other) == data[other]).all() and (batch(cache, data, other) == data[other]).all()
            cache.array[:] = 0
            status = 0 if right else 2
        finally:
            os._exit(status)
    cache._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (batch(cache, data, ids) == data[ids]).all()
    cache._check()


def test_a_forked_child_has_no_row_of_an_admission_that_was_under_way() -> None:
    """At the fork another thread has taken a row's slot away, and not yet its place in the map: the slot has other bytes."""
    data = store(200, 64)
    cache = make(50, data, "lru")
    batch(cache, data, np.arange(50))
    slots = cache._slots
    assert slots is not None
    slots.row_of_slot[7] = -1
    cache.array[7] = 0
    cache._pid = -1  # another process's
    assert (batch(cache, data, np.arange(50)) == data[:50]).all()
    assert (batch(cache, data, np.arange(50)) == data[:50]).all()
    cache._check()
