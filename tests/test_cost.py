"""The cost model: seconds from an epoch's accesses and what the machine does."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache.select import top_rows
from featstore.plan import choice as choice_module
from featstore.plan import copies as copies_module
from featstore.plan.choice import choose, expected_hits, extrapolated, observe, top_sum
from featstore.plan.copies import copy_speed
from featstore.plan.cost import (
    CANDIDATES,
    TIE,
    Estimate,
    Machine,
    OnDisk,
    Workload,
    cheapest,
    estimate_all,
    random_read_s,
)
from featstore.plan.trace import Trace
from featstore.storage.drive import DriveSpeed
from featstore.storage.lock import WRITER_LOCK, FileLock
from tests.conftest import skewed_dataset
from tests.loaders import ESTIMATED as STRATEGIES

SKETCH = DriveSpeed(87_000, 2.5e9, 3.2e9)  # of the design's break-even points
FREE_COPIES = Machine(SKETCH, 1e15)
N = 4_000_000


def workload(**changes: Any) -> Workload:
    return replace(Workload(N, 512, 200, 35_000_000, 400_000, 28_000_000, 5_000_000, 1.5, 0.5, 200, disk_bytes=None), **changes)


def by_name(w: Workload, m: Machine) -> dict[tuple[str, str], Estimate]:
    return {(each.strategy, each.policy): each for each in estimate_all(w, m)}


# -- formulas


def streamed_or_superbatch(row_bytes: int, share: float) -> str:
    """What is taken where nothing but the drive costs, and gathers are so many that pages are seldom shared."""
    loads = int(share * N)
    w = workload(row_bytes=row_bytes, n_batches=20_000, superbatch=20_000, loads=loads, n_accesses=loads, n_top=0)
    found = by_name(replace(w, sample_s=0.0, plan_s=0.0), FREE_COPIES)
    return cheapest([found["streamed", "belady"], found["superbatch", "belady"]], 1)[0].strategy


@pytest.mark.parametrize(("row_bytes", "share"), [(512, 0.018), (4096, 0.19)])
def test_streaming_wins_from_the_designs_break_even_point_on(row_bytes: int, share: float) -> None:
    assert streamed_or_superbatch(row_bytes, 0.93 * share) == "superbatch"
    assert streamed_or_superbatch(row_bytes, 1.07 * share) == "streamed"


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_streaming_never_wins_with_rows_of_16_kib(share: float) -> None:
    assert streamed_or_superbatch(16_384, share) == "superbatch"


def test_few_epochs_stream_and_many_are_packed() -> None:
    slow = Machine(SKETCH, 8e9)
    for epochs in (1, 20):
        assert cheapest(estimate_all(workload(), slow), epochs)[0].strategy == "streamed"
    assert cheapest(estimate_all(workload(has_pack=True, sample_s=0.0), slow), 20)[0].strategy == "packed"
    in_memory = workload(has_pack=True, sample_s=0.0, capacity=10_000, n_top=35_000_000, loads=1_700_000)
    assert cheapest(estimate_all(in_memory, slow), 1)[0].strategy == "ondemand"  # nothing is left to be packed
    one, many = (choose(workload(has_pack=True, epochs=epochs), slow) for epochs in (1, 20))
    for choice in (one, many):
        assert choice.taken.total_s(choice.workload.epochs) <= (1 + TIE) * min(
            each.total_s(choice.workload.epochs) for each in choice.estimates if not each.impossible
        )
    frozen = by_name(workload(has_pack=True), slow)["packed", "belady"]
    assert frozen.epoch_s < by_name(workload(), slow)["streamed", "belady"].epoch_s < frozen.total_s(1) + 5


def test_of_equal_estimates_the_one_is_taken_whose_epochs_are_shorter() -> None:
    def found(name: str, epoch_s: float, once_s: float, **more: Any) -> Estimate:
        return Estimate(name, "belady", epoch_s, once_s, 0, parts={"read": 1.0}, **more)

    streamed = found("streamed", 3.82, 0.0)
    for once_s, expected in ((2.4, "packed"), (2.65, "packed"), (2.75, "streamed")):
        taken, reason = cheapest([streamed, found("packed", 1.3, once_s)], 1)
        assert taken.strategy == expected
        assert "next is " + ("streamed" if expected == "packed" else "packed") in reason
    assert cheapest([streamed, found("packed", 1.3, 2.4, impossible="no")], 1)[0] is streamed


def test_a_table_with_nothing_to_miss_reads_on_demand_or_plans() -> None:
    w = workload(capacity=N, n_top=35_000_000, loads=1_700_000, n_accesses=35_000_000, epochs=50)
    assert cheapest(estimate_all(w, Machine(SKETCH, 8e9)), 50)[0].strategy == "ondemand"


LOADS = st.integers(0, N)


@given(LOADS, LOADS, st.integers(1, 500), st.sampled_from([1, 100, 512, 4096, 5000, 16_384]))
def test_random_reads_cost_more_the_more_rows_are_read(a: int, b: int, gathers: int, row_bytes: int) -> None:
    few, many = sorted((a, b))
    low, high = (random_read_s(loads, gathers, N, row_bytes, SKETCH) for loads in (few, many))
    assert 0 <= low <= high * 1.1 + 1e-9  # beyond the density where reads merge, fewer are needed for more rows
    assert high <= gathers * max(1.05 * N * row_bytes / SKETCH.bandwidth, 1 / SKETCH.iops) + many / SKETCH.iops


@given(LOADS, st.floats(1.0, 20.0), st.sampled_from([("iops", 1), ("bandwidth", 1), ("write_bandwidth", 1)]))
def test_a_faster_drive_never_takes_longer(loads: int, factor: float, which: tuple[str, int]) -> None:
    if which[0] == "iops":  # the gap that is worth reading over depends on the ratio: faster operations change what is read
        assert (
            random_read_s(loads, 10, N, 512, replace(SKETCH, iops=SKETCH.iops * factor))
            <= random_read_s(loads, 10, N, 512, SKETCH) * 1.2 + 1e-9
        )
        return
    fast = Machine(replace(SKETCH, **{which[0]: getattr(SKETCH, which[0]) * factor}), 8e9)
    slow = Machine(SKETCH, 8e9)
    w = workload(loads=loads, has_pack=True)
    for name in (("streamed", "belady"), ("packed", "belady"), ("packed", "frequency")):
        assert by_name(w, fast)[name].total_s(3) <= by_name(w, slow)[name].total_s(3) + 1e-9


@given(LOADS, LOADS)
def test_more_misses_never_take_less(a: int, b: int) -> None:
    few, many = sorted((a, b))
    for name in (("streamed", "belady"), ("packed", "belady")):
        low, high = (by_name(workload(loads=loads), Machine(SKETCH, 8e9))[name] for loads in (few, many))
        assert low.epoch_s <= high.epoch_s + 1e-9
        assert low.once_s <= high.once_s + 1e-9


@pytest.mark.parametrize(
    ("n_loads", "seconds"), [(8192, 0.115), (30_000, 0.395), (100_000, 1.16), (175_000, 1.77), (400_000, 2.9)]
)
def test_gathers_take_what_they_were_measured_to_take(n_loads: int, seconds: float) -> None:
    """On R22, of 4,194,304 rows: they read at 0.77 GB/s beside their operations, where a stream reads 2.1 GB/s."""
    drive = DriveSpeed(80_000, 2.1e9, 2.2e9, 0.77e9)
    assert random_read_s(n_loads, 1, 1 << 22, 512, drive) == pytest.approx(seconds, rel=0.2)
    assert random_read_s(400_000, 1, 1 << 22, 512, replace(drive, gather_bandwidth=0.0)) < 0.4 * 2.9  # as it was thought to be


def test_units() -> None:
    """A second of each resource is a second."""
    w = workload(n_rows=10**6, row_bytes=4096, n_batches=1000, superbatch=1000, loads=1000, n_accesses=0, n_top=0)
    machine = Machine(DriveSpeed(1000.0, 4096e6, 4096e3), 4096e3)
    parts = by_name(w, machine)["streamed", "belady"].parts
    assert by_name(w, machine)["superbatch", "belady"].parts["read"] == pytest.approx(1.0, rel=1e-3)
    assert parts["scan"] < 0.5  # few of the pieces are wanted
    assert by_name(replace(w, loads=10**6), machine)["streamed", "belady"].parts["scan"] == pytest.approx(1.0, rel=0.02)
    assert parts["write"] == pytest.approx(1.0)
    assert parts["copy"] == pytest.approx(1.0)  # into the cache; nothing is asked for


def test_disk_decides_what_is_possible() -> None:
    machine = Machine(SKETCH, 8e9)
    free, tight = (by_name(workload(disk_bytes=disk, has_pack=False), machine) for disk in (None, 10**9))
    assert not free["streamed", "belady"].impossible
    assert "of a disk of 953.67 MiB" in tight["streamed", "belady"].impossible
    assert not by_name(workload(disk_bytes=10**9, superbatch=20), machine)["streamed", "belady"].impossible
    pack = by_name(workload(disk_bytes=2_900_000_000, has_pack=True), machine)
    assert not pack["packed", "belady"].impossible  # 5 M rows of 512 B, and tables
    assert "of a disk of" in pack["packed", "frequency"].impossible  # 7 M rows
    two = by_name(workload(disk_bytes=2_900_000_000, has_pack=True, pack_epochs=2), machine)
    assert "of a disk of" in two["packed", "belady"].impossible
    with pytest.raises(ValueError, match="packed"):
        cheapest([two["packed", "belady"], two["packed", "frequency"]], 1)


def test_where_batches_share_rows_they_are_read_in_their_turn() -> None:
    """Extents are read ahead, beside copying; shared rows are not."""
    shared = OnDisk(2_000_000_000, 3_000_000, 1_000_000, length=5, reads=87_000, n_bytes=87_000 * 4096 + 2_500_000_000)
    w = workload(has_pack=True, disk_bytes=2_100_000_000, on_disk={"frequency": shared})
    found, machine = by_name(w, FREE_COPIES)["packed", "frequency"], FREE_COPIES
    assert not found.impossible
    assert found.disk_bytes == 2_000_000_000
    assert found.parts["shared"] == pytest.approx(2.0)  # a second of reads, one of their other pages
    assert found.epoch_s == pytest.approx(2.0 + 1_000_000 * 512 / 2.5e9)
    assert found.moved_bytes == 1_000_000 * 512 + shared.n_bytes
    assert found.once_s < by_name(replace(w, on_disk={}), machine)["packed", "frequency"].once_s  # less is written
    assert by_name(replace(w, disk_bytes=1_900_000_000), machine)["packed", "frequency"].impossible
    assert (
        "too small"
        in by_name(replace(w, on_disk={"frequency": replace(shared, fails="too small")}), machine)[
            "packed", "frequency"
        ].impossible
    )
    there = replace(w, layouts={"frequency": 2_200_000_000})
    assert "the layout that is there takes 2.05 GiB" in by_name(there, machine)["packed", "frequency"].impossible


def test_rows_on_the_device_are_not_copied_by_the_host() -> None:
    machine = Machine(SKETCH, 8e9, batch_bandwidth=4e9)
    w = workload(has_pack=True, sample_s=0.0, n_device=20_000_000, device_rows=100_000, loads=3_000_000)
    w = replace(w, n_top=8_000_000, device_on_host=False)
    found = by_name(w, machine)
    plain = by_name(replace(w, n_device=0, device_rows=0), machine)
    for policy, updates in (("belady", 3_000_000), ("frequency", 0)):
        assert found["packed", policy].parts["copy"] == pytest.approx(15_000_000 * 512 / 4e9 + updates * 512 / 8e9)
        assert plain["packed", policy].parts["copy"] == pytest.approx(35_000_000 * 512 / 4e9 + updates * 512 / 8e9)
    assert found["packed", "belady"].once_s > plain["packed", "belady"].once_s  # its rows are packed, and read at the start
    for name, each in found.items():
        assert bool(each.impossible) == (name[0] != "packed")
    on_host = by_name(replace(w, device_on_host=True), machine)["packed", "belady"]
    assert on_host.parts["copy"] > plain["packed", "belady"].parts["copy"]  # what stands in for a device copies more, not less


def test_an_online_policy_starts_with_nothing() -> None:
    w = workload(online_loads=9_000_000, online_again=7_000_000, capacity=400_000)
    found = by_name(w, FREE_COPIES)["ondemand", "sieve"]
    cold, warm = (random_read_s(loads, 200, N, 512, SKETCH) for loads in (9_000_000, 7_000_000))
    assert found.epoch_s == pytest.approx(warm)
    assert found.total_s(3) == pytest.approx(cold + 2 * warm)
    assert found.rows_loaded == 7_000_000
    assert "not known" in by_name(workload(), FREE_COPIES)["ondemand", "sieve"].impossible
    copying = by_name(w, Machine(SKETCH, 1e9, batch_bandwidth=0.5e9))["ondemand", "sieve"]
    assert copying.parts["copy"] == pytest.approx((28_000_000 + 7_000_000) * 512 / 0.5e9)  # hits out, what is loaded in


def test_the_table_is_one_mapping() -> None:
    assert {strategy for strategy, _ in CANDIDATES} == set(STRATEGIES)
    for name, estimator in CANDIDATES.items():
        found = estimator(workload(), FREE_COPIES)
        assert (found.strategy, found.policy) == name


# -- what is observed and measured


def skewed(n: int, n_batches: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.unique((n * rng.random(size) ** 3).astype(np.int64)) for _ in range(n_batches)]


def test_filling_a_cache_is_paid_once() -> None:
    """R22 at a half was filled in 2.4 to 3.7 s, where one scan takes 1.0 s and gathers read 0.86 to 0.99 GB/s."""
    machine = Machine(DriveSpeed(75_000, 2.2e9, 1.6e9, 0.9e9), 16e9, 8e9, 16e9 / 12)
    found = by_name(workload(capacity=N // 2, n_degree=30_000_000), machine)
    assert found["ondemand", "degree"].once_s == pytest.approx(3.1, rel=0.1)
    assert found["ondemand", "frequency"].once_s == pytest.approx(found["ondemand", "degree"].once_s + 1.5)  # counts are sampled
    none = by_name(workload(capacity=0, n_degree=0), machine)
    buffers = none["ondemand", "degree"].once_s  # nothing is filled, but the first epoch's buffers are new memory
    assert 0 < buffers < 0.3
    assert none["streamed", "belady"].once_s == 0  # which takes it while the drive is busy
    assert none["superbatch", "belady"].once_s == buffers
    packed = found["packed", "belady"].once_s - none["packed", "belady"].once_s  # the cache is new memory, too
    assert packed == pytest.approx(11 * (N // 2) * 512 / 16e9)


def test_static_hits_are_judged_on_other_batches_than_those_that_chose_the_rows() -> None:
    """What rows chosen on one epoch serve of another, against counting it on another; in sample all would be hits."""
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


def test_packing_by_frequency_pays_for_the_rows_that_its_host_tier_starts_with() -> None:
    """Their extents are written once and read at the start; both are spread over the epochs."""
    w = workload(has_pack=True, n_top=35_000_000)  # nothing is missed: what is left is the fill
    found = by_name(w, FREE_COPIES)["packed", "frequency"]
    fill = w.capacity * w.row_bytes
    assert found.epoch_s == pytest.approx(35_000_000 * 512 / 1e15)
    assert found.disk_bytes == fill + 4 * 35_000_000  # and the batches' tables
    least = fill / SKETCH.bandwidth + fill / SKETCH.write_bandwidth + fill / SKETCH.bandwidth  # read, written, read again
    assert found.once_s >= 0.99 * least
    assert found.total_s(20) == pytest.approx(found.once_s + 20 * found.epoch_s)
    there = by_name(replace(w, layouts={"frequency": fill}), FREE_COPIES)
    assert there["packed", "frequency"].once_s == pytest.approx(fill / SKETCH.bandwidth, rel=1e-3)
    in_turns = replace(FREE_COPIES, drive=replace(SKETCH, fill_bandwidth=1e9))
    by_turns = by_name(replace(w, layouts={"frequency": fill}), in_turns)["packed", "frequency"]
    assert by_turns.once_s == pytest.approx(fill / 1e9, rel=1e-3)
    assert there["packed", "belady"].once_s == by_name(w, FREE_COPIES)["packed", "belady"].once_s


def test_reading_ahead_merges_the_misses_of_several_batches() -> None:
    """R22 at a tenth of the rows: 36 to 44 s an epoch were measured, where misses / iops is 57 s."""
    alone = by_name(workload(), FREE_COPIES)["superbatch", "belady"].parts["read"]
    ahead = by_name(workload(ahead_bytes=192 << 20), FREE_COPIES)["superbatch", "belady"].parts["read"]
    assert ahead < 0.7 * alone
    assert by_name(workload(ahead_bytes=1), FREE_COPIES)["superbatch", "belady"].parts["read"] == alone
    everything = by_name(workload(ahead_bytes=1 << 40), FREE_COPIES)["superbatch", "belady"].parts["read"]
    assert everything <= 1.05 * N * 512 / SKETCH.bandwidth  # one scan


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
    """What planning takes however few they are is not taken once more for each."""
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
    assert extrapolated(loaded, loaded, 9, 14.5, 30) == 14.5
    assert extrapolated(loaded[:1], loaded[:1], 4, 20, 30) == 20
    assert extrapolated(np.array([4, 4]), np.array([4, 0]), 5, 4, 30) == 20  # a full cache: four a batch
    assert extrapolated(loaded, loaded, 9, 16, 12) == 20  # it will be full: 16 distinct ones at least, 25 at the rate of now
    assert extrapolated(loaded, loaded, 9, 16, 12, 18) == pytest.approx((16 * 18) ** 0.5)
    assert extrapolated(loaded, loaded, 9, 16, 12, 10) == 16


def test_copies_are_measured_within_the_budget() -> None:
    for row_bytes in (4, 512, 20_000):
        budget = Budget(2 << 20)
        found = copies_module._measure(row_bytes, 1, budget)
        assert 1e5 < found.fresh_bandwidth <= found.copy_bandwidth
        assert 1e5 < found.batch_bandwidth <= found.copy_bandwidth
        assert budget.used == 0
        assert budget.peak <= 2 << 20


def test_copies_are_measured_of_rows_that_no_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied a moment ago comes from the processor's cache, one and a half times as fast."""
    asked: list[int] = []
    time_copy = copies_module._time_copy

    def noted(array: Any, rows: Any, out: Any, places: Any, n_threads: int) -> float:
        if places is None and out.flags.writeable:
            asked.append(int(rows[0]))
        return time_copy(array, rows, out, places, n_threads)

    monkeypatch.setattr(copies_module, "_time_copy", noted)
    copies_module._measure(512, 1, Budget(64 << 20))
    assert len(set(asked[:4])) == 4  # other parts each time


def test_rates_of_copies_are_those_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory that was never touched, by lists on both sides beside a stream, and plainly."""
    seen: list[tuple[bool, bool, bool]] = []

    def timed(array: Any, rows: Any, out: Any, places: Any, n_threads: int) -> float:
        touched = bool(out.any())
        beside = any(thread.name == "featstore-measure" for thread in threading.enumerate())
        seen.append((touched, places is not None, beside))
        return 1e9 if not touched else 3e9 if places is not None else 8e9

    monkeypatch.setattr(copies_module, "_time_copy", timed)
    found = copies_module._measure(512, 2, Budget(64 << 20))
    assert (found.copy_bandwidth, found.batch_bandwidth, found.fresh_bandwidth) == (8e9, 3e9, 1e9)
    assert set(seen) == {(True, False, False), (False, False, False), (True, True, True)}


def test_copies_are_kept_by_width_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(skewed_dataset(tmp_path / "g", 300, 40))
    measured: list[tuple[int, int]] = []

    def measure(row_bytes: int, n_threads: int, budget: Budget) -> copies_module.CopySpeed:
        measured.append((row_bytes, n_threads))
        return copies_module.CopySpeed(3.0, 2.0, float(len(measured)))

    monkeypatch.setattr(copies_module, "_measure", measure)
    budget = Budget(1 << 20)
    assert copy_speed(path, 40, 2, budget).fresh_bandwidth == 1
    assert copy_speed(path, 40, 2, budget).fresh_bandwidth == 1
    assert copy_speed(path, 40, 1, budget).fresh_bandwidth == 2
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 3
    assert copy_speed(path, 80, 1, budget, again=True).fresh_bandwidth == 4
    monkeypatch.setattr(copies_module, "METHOD", copies_module.METHOD + 1)
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 5
    with FileLock(os.path.join(path, WRITER_LOCK), exclusive=True):
        assert copy_speed(path, 8, 1, budget).fresh_bandwidth == 6
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 5


def test_streaming_packs_beside_planning_and_the_drive_does_both() -> None:
    """Packing begins after two of three passes; what the drive writes beside reads costs nothing."""
    w = workload(sample_s=2.0, plan_s=3.0)
    stored = 16 * 35_000_000 / 3.2e9
    plans = (4 * 35_000_000 + 16 * 5_000_000) / 3.2e9
    scan, write, read = N * 512 / 2.5e9, 5_000_000 * 512 / 3.2e9, 5_000_000 * 512 / 2.5e9
    for overlap in (0.0, 0.5, 1.0):
        found = by_name(w, replace(FREE_COPIES, drive=replace(SKETCH, write_overlap=overlap)))["streamed", "belady"]
        packed = scan + write - overlap * min(scan, write)
        expected = 2.0 + 2.0 + stored - plans + max(1.0 + plans, packed) + read
        assert found.epoch_s == pytest.approx(expected, rel=0.01)
    planned = by_name(replace(w, plan_s=300.0), FREE_COPIES)["streamed", "belady"].epoch_s
    assert planned == pytest.approx(302 + stored + read, rel=1e-3)  # packing is over long before


def test_bytes_moved_are_those_of_the_reads() -> None:
    w = workload(has_pack=True)
    found = by_name(w, FREE_COPIES)
    assert found["packed", "belady"].moved_bytes == 5_000_000 * 512
    pieces = -(-N * 512 // (1 << 20)) << 20
    assert found["streamed", "belady"].moved_bytes == pytest.approx(2 * 5_000_000 * 512 + pieces, rel=0.01)
    alone = by_name(workload(n_batches=10**6, n_accesses=30_000, n_top=20_000), FREE_COPIES)["ondemand", "frequency"]
    assert alone.moved_bytes == pytest.approx(10_000 * 4096, rel=0.01)  # a page each
