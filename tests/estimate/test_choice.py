"""An epoch as a recorded trace tells it: accesses, hits and loads, extrapolated from a part of its batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache.select import top_rows
from featstore.estimate import choice as choice_module
from featstore.estimate.choice import MISS_MARGIN, expected_hits, extrapolated, observe, top_sum
from featstore.plan.trace import Trace
from tests.support.sampled import covering


def skewed(n: int, n_batches: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.unique((n * rng.random(size) ** 3).astype(np.int64)) for _ in range(n_batches)]


def test_static_hits_are_judged_on_other_batches_than_those_that_chose_the_rows() -> None:
    """Hits of rows chosen on one epoch in another, against counting it on another; in sample all would be hits."""
    n, n_batches, size = 20_000, 30, 600
    rng = np.random.default_rng(3)

    def epoch() -> list[np.ndarray]:
        return [np.unique((n * rng.random(size) ** 3).astype(np.int64)) for _ in range(n_batches)]

    chosen, others = (Trace(epoch(), n) for _ in range(2))
    counts = np.bincount(np.concatenate(list(chosen)), minlength=n)
    for capacity in (100, 1000, int((counts > 0).sum()), n // 2, n):
        kept = np.zeros(n, bool)
        kept[top_rows(counts, capacity)] = True
        fresh = sum(int(kept[ids].sum()) for ids in others)
        own = sum(int(kept[ids].sum()) for ids in chosen)
        found = expected_hits(np.bincount(counts), capacity, n_batches)
        assert found == pytest.approx(fresh, rel=0.1)
        if capacity == int((counts > 0).sum()):
            assert own == chosen.n_accesses  # the mistake: all of them, where a fifth is missed
            assert found < 0.9 * own
    assert expected_hits(np.bincount(counts), 0, n_batches) == 0


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 45))
def test_top_sum(counts: list[int], capacity: int) -> None:
    assert top_sum(np.bincount(np.array(counts, np.int64)), capacity) == sum(sorted(counts, reverse=True)[:capacity])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 40), st.integers(1, 9))
def test_expected_hits_grow_with_the_cache(counts: list[int], capacity: int, n_batches: int) -> None:
    array = np.array(counts, np.int64)
    n_batches = max(n_batches, int(array.max()))
    few, more = (expected_hits(np.bincount(array), k, n_batches) for k in (capacity, capacity + 1))
    assert 0 <= few <= more + 1e-9 <= array.sum() + 2e-9


def test_observing_reserves_for_the_longest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []
    real = choice_module.planning_bytes

    def spying(*sizes: int, **more: Any) -> int:
        asked.append(more)
        return real(*sizes, **more)

    monkeypatch.setattr(choice_module, "planning_bytes", spying)
    trace = Trace([[0], [1, 2, 3], [4, 5]], 10)
    budget = Budget(1 << 20)
    observe(trace, row_bytes=8, capacity=2, budget=budget)
    assert [more["longest"] for more in asked] == [3]


def test_observed_is_what_is_simulated() -> None:
    trace = Trace(skewed(500, 12, 200), 500)
    w = observe(trace, row_bytes=8, capacity=50, budget=Budget(1 << 24), sample_s=2.0)
    frequency = np.sort(np.bincount(np.concatenate(list(trace)), minlength=500))[::-1]
    assert w.loads == featstore.simulate(trace, 50, "belady").sum()
    assert w.n_top == frequency[:50].sum()
    assert (w.n_rows, w.n_batches, w.n_accesses, w.superbatch, w.sample_s) == (500, 12, trace.n_accesses, 12, 2.0)
    assert w.n_degree is None
    degree = np.arange(500)[::-1]
    by_degree = observe(trace, row_bytes=8, capacity=50, budget=Budget(1 << 24), out_degree=degree)
    assert by_degree.n_degree == sum(int((ids < 50).sum()) for ids in trace)
    twice = observe(trace, row_bytes=8, capacity=50, budget=Budget(1 << 24), n_batches=24, sample_s=2.0)
    assert (twice.n_accesses, twice.sample_s) == (2 * w.n_accesses, 4.0)
    assert twice.loads == pytest.approx(2 * w.loads, rel=0.1)  # no warming up in the second half
    assert twice.n_static == 2 * (w.n_static or 0)
    assert twice.n_top == twice.n_static  # rows that a part of the batches chose are not judged by that part
    assert observe(trace, row_bytes=8, capacity=0, budget=Budget(1 << 24)).n_top == 0
    assert observe(trace, row_bytes=8, capacity=600, budget=Budget(1 << 24)).loads == len(np.unique(np.concatenate(list(trace))))
    small = Budget(1000)
    with pytest.raises(featstore.BudgetError):
        observe(trace, row_bytes=8, capacity=50, budget=small)
    assert small.used == 0


def test_the_share_that_is_missed_is_that_of_a_full_cache() -> None:
    """The first batches find an empty one: only the last quarter counts."""
    first, rest = [np.arange(10 * k, 10 * k + 10) for k in range(6)], [np.arange(10)] * 2
    assert observe(Trace([*first, *rest], 60), row_bytes=8, capacity=60, budget=Budget(1 << 24)).misses.planned.share(60) == 0.0
    new = [np.concatenate([np.arange(4, 10), np.arange(60 + 4 * k, 64 + 4 * k)]) for k in range(2)]
    w = observe(Trace([*first, *new], 68), row_bytes=8, capacity=68, budget=Budget(1 << 24))
    assert w.misses.planned.share(w.capacity) == pytest.approx(MISS_MARGIN * 0.4)  # 4 of 10 rows


@pytest.mark.parametrize("held", [0.1, 0.5, 0.9])
def test_an_epoch_misses_less_than_its_first_batches(held: float) -> None:
    """Nearly all rows of the first batches are new; what the whole epoch loads is estimated, at each size of the cache."""
    n, n_batches = 20_000, 100
    whole = skewed(n, n_batches, 2000)
    w = observe(Trace(whole[:8], n), row_bytes=8, capacity=int(held * n), budget=Budget(1 << 26), n_batches=n_batches)
    n_accesses = sum(map(len, whole))
    for share in (0.25, 0.5, 1):
        rows = int(share * held * n)
        loads = featstore.simulate(Trace(whole, n), rows, "belady").sum()
        assert w.misses.planned.of_epoch(rows) * n_accesses == pytest.approx(loads, rel=0.3)
    assert w.misses.planned.of_epoch(w.capacity) == pytest.approx(w.loads / w.n_accesses, rel=1e-4)
    assert w.misses.planned.share(w.capacity) > (2 if held > 0.4 else 1) * w.misses.planned.of_epoch(w.capacity)


def test_what_an_online_policy_loads_is_simulated() -> None:
    trace = Trace(skewed(500, 12, 200), 500)
    options: dict[str, Any] = {"row_bytes": 8, "capacity": 50, "budget": Budget(1 << 24)}
    w = observe(trace, online="sieve", **options)
    loaded = featstore.simulate(trace, 50, "sieve")
    assert w.online_loads == loaded.sum()
    assert w.online_again == pytest.approx(12 * loaded[6:].mean(), abs=1)  # a full cache goes on as it did
    assert observe(trace, **options).online_loads is None
    assert observe(trace, online="sieve", **{**options, "capacity": 0}).online_loads is None
    whole = observe(trace, online="sieve", **{**options, "capacity": 500})
    assert whole.online_loads == len(np.unique(np.concatenate(list(trace))))
    assert whole.online_again < whole.online_loads
    again = list(trace) * 2
    actual = featstore.simulate(again, 50, "sieve", n=500)
    assert w.online_again == pytest.approx(int(actual[12:].sum()), rel=0.1)


def test_seconds_of_planning_grow_with_the_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds that planning takes for any number of batches are not taken once more for each."""
    clock = [0.0]
    real = choice_module.simulate

    def slow(trace: Trace, capacity: int, policy: str) -> Any:
        clock[0] += 1.0 + 0.25 * len(trace)
        return real(trace, capacity, policy)

    monkeypatch.setattr(choice_module, "simulate", slow)
    monkeypatch.setattr(choice_module.time, "perf_counter", lambda: clock[0])
    trace = Trace(skewed(500, 8, 100), 500)
    for total, expected in ((8, 3.0), (60, 16.0), (800, 201.0)):
        w = observe(trace, row_bytes=8, capacity=50, budget=Budget(1 << 24), n_batches=total)
        assert w.plan_s == pytest.approx(expected)


@pytest.mark.parametrize("n_batches", [20, 80])
def test_rows_on_the_device_leave_the_others_to_the_host(n_batches: int) -> None:
    n = 4000
    batches = skewed(n, n_batches, 500)
    looked_at = Trace(batches[:20], n)
    w = observe(looked_at, row_bytes=8, capacity=300, budget=Budget(1 << 24), n_batches=n_batches, device_rows=200)
    counts = np.bincount(np.concatenate(batches), minlength=n)
    order = np.argsort(-counts, kind="stable")
    device, host = np.zeros(n, bool), np.zeros(n, bool)
    device[order[:200]], host[order[200:500]] = True, True
    rest = [ids[~device[ids]] for ids in batches]
    loads = int(featstore.simulate(rest, 300, "belady", n=n).sum())
    exact = {"abs": 0} if n_batches == 20 else {"rel": 0.25}
    assert w.n_device == pytest.approx(sum(int(device[ids].sum()) for ids in batches), **exact)
    assert w.n_top == pytest.approx(sum(int(host[ids].sum()) for ids in batches), **exact)
    assert w.loads == pytest.approx(loads, **exact)
    assert w.device_rows == 200


@pytest.mark.parametrize(("n_batches", "given"), covering([12, 73, 131, 150], [True, False]))
def test_hits_are_no_more_than_accesses(n_batches: int, given: bool) -> None:
    """Of what a part of the batches comes to, in an epoch: a count each, no sum of which is more than the whole."""
    n = 3000
    looked_at, degrees = Trace(skewed(n, 12, 90), n), np.random.default_rng(1).permutation(n)
    for device_rows in range(0, 1500, 225):
        on_device = np.arange(n) < device_rows if given else None
        for capacity in (0, 150, 1400, n - device_rows, n):
            w = observe(
                looked_at,
                row_bytes=8,
                capacity=capacity,
                budget=Budget(1 << 26),
                n_batches=n_batches,
                device_rows=device_rows,
                on_device=on_device,
                online="lru",
                out_degree=degrees,
            )
            left = w.n_accesses - w.n_device
            assert w.n_device >= 0
            for hits in (w.n_top, w.n_static, w.n_degree):
                assert 0 <= hits <= left, (device_rows, capacity, w)
            if capacity == n:
                assert w.n_top == left


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_an_epochs_loads_follow_from_its_first_batches(share: float) -> None:
    """A full cache goes on as it did; one that never fills loads each distinct row once, ever fewer."""
    n, total, looked_at = 30_000, 160, 20
    batches = skewed(n, total, 900)
    capacity = int(share * n)
    actual = int(featstore.simulate(batches, capacity, "belady", n=n).sum())
    w = observe(Trace(batches[:looked_at], n), row_bytes=8, capacity=capacity, budget=Budget(1 << 26), n_batches=total)
    assert w.loads == pytest.approx(actual, rel=0.35)
    naive = int(featstore.simulate(batches[:looked_at], capacity, "belady", n=n).sum()) * total // looked_at
    assert abs(w.loads - actual) < abs(naive - actual)


def test_extrapolation_of_nothing_and_of_everything() -> None:
    loaded = np.array([5, 3, 2], np.int64)
    assert extrapolated(loaded, loaded, 3, 10, 30) == 10
    assert extrapolated(loaded, loaded, 2, 10, 30) == pytest.approx(20 / 3)
    assert extrapolated(loaded * 0, loaded, 9, 30, 30) == 0
    assert extrapolated(loaded, loaded, 9, 14.5, 12) == 14.5  # each distinct row once, at least
    assert extrapolated(loaded, loaded, 9, 14.5, 30) == 30
    assert extrapolated(loaded[:1], loaded[:1], 4, 20, 15) == 20
    assert extrapolated(np.array([4, 4]), np.array([4, 0]), 5, 4, 30) == 20  # a full cache: four a batch


@pytest.mark.parametrize("few", [False, True])
def test_misses_by_degree_are_counted_at_several_sizes(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By brute force, whether all rows are looked at, or those that are asked for."""
    n = 50_000 if few else 500
    trace = Trace(skewed(n, 12, 200), n)
    degrees = np.random.default_rng(1).permutation(n).astype(np.uint16 if n < 65_536 else np.int64)
    w = observe(trace, row_bytes=8, capacity=80, budget=Budget(1 << 24), out_degree=degrees, n_batches=24)
    assert w.misses.by_degree.capacities == (10, 20, 40, 80)
    for capacity, share in zip(w.misses.by_degree.capacities, w.misses.by_degree.shares, strict=True):
        kept = np.zeros(n, bool)
        kept[np.argsort(degrees)[n - capacity :]] = True
        missed = sum(int((~kept[ids]).sum()) for ids in trace)
        assert share == pytest.approx(missed / trace.n_accesses)
    assert w.n_degree == pytest.approx(w.n_accesses * (1 - w.misses.by_degree.shares[-1]), abs=1)
    assert observe(trace, row_bytes=8, capacity=80, budget=Budget(1 << 24)).misses.by_degree.capacities == ()
