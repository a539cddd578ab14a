"""Belady against brute force; next accesses and simulation against what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core import distinct
from featstore.cache.base import PolicyContext, get_policy
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon, Int32s, PlannedBatch
from featstore.cache.table import FeatureCache
from featstore.errors import PluginError
from featstore.plan.planmemory import Spill, planning_bytes
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace
from featstore.storage.rundir import DiskQuota

pytestmark = pytest.mark.usefixtures("small_pieces")

NEVER = 10**9


def optimal_loads(batches: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Keep, after each batch, the rows with the nearest next use; every distance searched anew."""
    sets = [set(batch) for batch in batches]
    cached: set[int] = set()
    loads = []
    for i, wanted in enumerate(sets):
        loads.append(len(wanted - cached))

        def next_use(row: int, i: int = i) -> int:
            return next((j for j in range(i + 1, len(sets)) if row in sets[j]), NEVER)

        ranked = sorted((next_use(row), row not in cached, row) for row in cached | wanted)
        cached = {row for distance, _, row in ranked[:capacity] if distance < NEVER}
    return loads


def fewest_loads(batches: Sequence[Sequence[int]], capacity: int) -> int:
    """The least total over every possible schedule, by exhaustive search."""
    states = {frozenset[int](): 0}
    for batch in batches:
        wanted = frozenset(batch)
        reached: dict[frozenset[int], int] = {}
        for cached, cost in states.items():
            candidates = sorted(cached | wanted)
            for mask in range(1 << len(candidates)):
                kept = frozenset(row for k, row in enumerate(candidates) if mask >> k & 1)
                if len(kept) <= capacity:
                    reached[kept] = min(reached.get(kept, NEVER), cost + len(wanted - cached))
        states = reached
    return min(states.values())


@st.composite
def traces(draw: st.DrawFn, rows: int = 12, batches: int = 9) -> tuple[int, list[list[int]]]:
    n = draw(st.integers(1, rows))
    batch = st.lists(st.integers(0, n - 1), unique=True, max_size=n)
    return n, draw(st.lists(batch, max_size=batches))


def run_windows(n: int, batches: list[list[int]], capacity: int, size: int, ahead: int, dtype: Any = np.int32) -> list[int]:
    """Plan ``size`` batches at a time with ``ahead`` more in sight, replay every changeset on a dictionary, return the loads."""
    policy = Belady()
    policy.start(capacity, PolicyContext(n, 1))
    cached: dict[int, int] = {}
    loads = []
    for first in range(0, len(batches), size):
        seen = [np.array(batch, dtype) for batch in batches[first : first + size + ahead]]
        offsets = np.cumsum([0] + [len(batch) for batch in seen]).astype(np.int64)
        announced: list[list[int]] = []
        n_planned = min(size, len(batches) - first)

        def announce(batch: int, positions: Int32s, announced: list[list[int]] = announced) -> None:
            assert batch == len(announced)
            announced.append(positions.tolist())

        planned = []
        for plan in policy.plan(Horizon(n, offsets, seen.__getitem__, n_planned, announce=announce)):
            assert len(announced) == n_planned
            planned.append(plan)
        assert announced == [np.flatnonzero(plan.slots < 0).tolist() for plan in planned]
        for batch, plan in zip(batches[first : first + size], planned, strict=True):
            assert plan.slots.tolist() == [cached.get(row, -1) for row in batch]
            loads.append(int((plan.slots < 0).sum()))
            for row in plan.changes.out_rows.tolist():
                del cached[row]
            assert plan.changes.in_rows.tolist() == [batch[p] for p in plan.changes.in_positions.tolist()]
            for row, slot in zip(plan.changes.in_rows.tolist(), plan.changes.in_slots.tolist(), strict=True):
                assert row not in cached
                assert slot not in cached.values()
                assert 0 <= slot < capacity
                cached[row] = slot
    return loads


@given(trace=traces(), capacity=st.integers(0, 13), dtype=st.sampled_from([np.int32, np.int64]))
def test_loads_are_those_of_brute_force(trace: tuple[int, list[list[int]]], capacity: int, dtype: Any) -> None:
    n, batches = trace
    assert run_windows(n, batches, min(capacity, n), max(1, len(batches)), 0, dtype) == optimal_loads(batches, capacity)


@given(trace=traces(rows=5, batches=5), capacity=st.integers(0, 4))
def test_no_schedule_loads_fewer(trace: tuple[int, list[list[int]]], capacity: int) -> None:
    n, batches = trace
    assert sum(run_windows(n, batches, min(capacity, n), max(1, len(batches)), 0)) == fewest_loads(batches, capacity)


@given(trace=traces(rows=20, batches=14), capacity=st.integers(0, 15), size=st.integers(1, 5), ahead=st.integers(0, 6))
def test_rolling_windows_stay_consistent(trace: tuple[int, list[list[int]]], capacity: int, size: int, ahead: int) -> None:
    n, batches = trace
    capacity = min(capacity, n)
    best = sum(optimal_loads(batches, capacity))
    loads = run_windows(n, batches, capacity, size, ahead)
    assert sum(loads) >= best
    if ahead >= len(batches):
        assert sum(loads) == best


def test_slots_of_rows_that_a_new_horizon_drops_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were kept for batches beyond the horizon leave once more is in sight, which small random traces seldom show."""
    dropped: list[int] = []
    leave = Belady._leave
    monkeypatch.setattr(Belady, "_leave", lambda *given: (found := leave(*given), dropped.append(found[1]))[0])
    rng = np.random.default_rng(0)
    for _ in range(20):
        batches = [rng.permutation(24)[: rng.integers(3, 9)].tolist() for _ in range(40)]
        assert sum(run_windows(24, batches, 8, 2, 4)) >= sum(optimal_loads(batches, 8))
    assert sum(dropped) > 20


def test_seeing_further_does_not_load_more() -> None:
    rng = np.random.default_rng(1)
    batches = [np.unique((500 * rng.random(120) ** 3).astype(int)).tolist() for _ in range(60)]
    totals = [sum(run_windows(500, batches, 40, 10, ahead)) for ahead in (0, 10, 50)]
    assert totals[0] > totals[1] >= totals[2] == sum(optimal_loads(batches, 40))


def test_rows_hit_before_stay_first() -> None:
    """Rows 0 and 1 are used again in the same batch; 0 has been hit already, so keeping it inserts fewer."""
    policy = Belady()
    policy.start(1, PolicyContext(3, 1))
    batches = [np.array(b, np.int32) for b in ([0], [0, 1], [1, 0])]
    planned = list(policy.plan(Horizon(3, np.array([0, 1, 3, 5], np.int64), batches.__getitem__, 3)))
    assert sum(len(p.changes.in_rows) for p in planned) == 1
    assert [int((p.slots < 0).sum()) for p in planned] == [1, 1, 1]


def plans_of(n: int, batches: list[list[int]], capacity: int, size: int, ahead: int, dtype: Any) -> list[list[list[int]]]:
    """All that is planned, ``size`` batches at a time with ``ahead`` more in sight."""
    policy = Belady()
    policy.start(capacity, PolicyContext(n, 1))
    found = []
    for first in range(0, len(batches), size):
        seen = [np.array(batch, dtype) for batch in batches[first : first + size + ahead]]
        offsets = np.cumsum([0] + [len(batch) for batch in seen]).astype(np.int64)
        for planned in policy.plan(Horizon(n, offsets, seen.__getitem__, min(size, len(batches) - first))):
            change = planned.changes
            arrays = (planned.slots, change.in_rows, change.in_positions, change.in_slots, change.out_rows)
            found.append([array.tolist() for array in arrays])
    return found


@given(traces(), st.integers(1, 12), st.integers(1, 9), st.integers(0, 9), st.sampled_from([np.int32, np.int64]))
def test_a_larger_field_changes_no_plan(
    trace: tuple[int, list[list[int]]], capacity: int, size: int, ahead: int, dtype: Any
) -> None:
    """A field with more rows than a horizon accesses has these numbered; the plans are those of tables of all rows."""
    n, batches = trace
    capacity = min(capacity, n)
    assert plans_of(n, batches, capacity, size, ahead, dtype) == plans_of(n + 1000, batches, capacity, size, ahead, dtype)


@given(st.integers(1, 300), st.data())
def test_ranks_number_the_distinct_rows(n: int, data: st.DataObject) -> None:
    """A row's number is its place among the sorted distinct rows; -1 where it is not one of them."""
    batches = data.draw(st.lists(st.lists(st.integers(0, n - 1), unique=True), max_size=4))
    for kind in (np.int32, np.int64):
        ranks = distinct.Ranks(np.zeros(distinct.Ranks.words_for(n), np.uint64), n)
        for batch in batches:
            assert ranks.mark(np.array(batch, kind)) == -1
        wanted = np.unique(np.concatenate([np.array(batch, kind) for batch in [[], *batches]]))
        assert ranks.number() == ranks.count == len(wanted)
        rows = np.arange(n, dtype=kind)
        found = np.empty(n, kind)
        ranks.of(rows, found)
        assert found.tolist() == [int(np.searchsorted(wanted, row)) if row in wanted else -1 for row in rows]
        assert ranks.mark(np.array([0, n], kind)) == 1
        assert ranks.mark(np.array([-1], kind)) == 0
        with pytest.raises(IndexError, match=f"row {n} is out of range"):
            ranks.of(np.array([n], kind), found)


@given(st.lists(st.lists(st.integers(0, 200), max_size=12), max_size=5), st.sampled_from([201, 10**6, 10**12]))
def test_a_row_twice_in_a_batch_is_found(batches: list[list[int]], n: int) -> None:
    """Whichever way rows are compared; a row may well come again in another batch."""
    twice = [number for number, batch in enumerate(batches) if len(set(batch)) < len(batch)]
    if not twice:
        trace = Trace(batches, n)
        assert [batch.tolist() for batch in trace] == batches
        assert (trace.longest, trace.n_accesses) == (max(map(len, batches), default=0), sum(map(len, batches)))
        return
    with pytest.raises(ValueError, match=f"batch {twice[0]} names a row twice"):
        Trace(batches, n)


def test_memory_follows_the_accesses() -> None:
    """A field of a hundred million rows takes a quarter byte a row; all else is that of a small one."""
    rng = np.random.default_rng(5)
    n, capacity = 100_000_000, 2_000
    batches = [np.unique(rng.integers(0, n, 3000)).astype(np.int32) for _ in range(8)]
    offsets = np.cumsum([0] + [len(batch) for batch in batches]).astype(np.int64)
    policy = Belady()
    policy.start(capacity, PolicyContext(n, 1))
    for _ in policy.plan(Horizon(n, offsets, batches.__getitem__, 4)):
        held = policy.nbytes
        assert held <= planning_bytes(n, int(offsets[-1]), int(offsets[4]), 3000, capacity=capacity)
        assert n // 4 < held < n // 4 + 2_000_000


def test_what_is_held_is_what_is_reserved(tmp_path: Path) -> None:
    """Between horizons with look-ahead the planner keeps its arrays, or spills them: never more than the ledger was told."""
    rng = np.random.default_rng(7)
    n, capacity = 50_000, 5_000
    batches = [np.unique((n * rng.random(9000) ** 2).astype(np.int32)) for _ in range(12)]
    plans: dict[bool, list[Any]] = {False: [], True: []}
    for spilled, found in plans.items():
        policy = Belady()
        policy.start(capacity, PolicyContext(n, 1))
        disk = DiskQuota(None)
        files: list[Spill] = []

        def spill(k: int, files: list[Spill] = files, disk: DiskQuota = disk) -> Spill:
            files.append(Spill(str(tmp_path / f"next-{len(files)}"), disk))
            return files[-1]

        for first in (0, 4, 8):
            seen = batches[first : first + 8]
            offsets = np.cumsum([0] + [len(batch) for batch in seen]).astype(np.int64)
            for planned in policy.plan(Horizon(n, offsets, seen.__getitem__, 4, spill if spilled else None)):
                found.append((planned.slots.tolist(), planned.changes.in_slots.tolist()))
                size = (n, int(offsets[-1]), int(offsets[4]), max(map(len, seen)))
                assert policy.nbytes <= planning_bytes(*size, capacity=capacity, spilled=spilled)
                assert spilled or policy.nbytes > 4 * int(offsets[4])
        for file in files:
            file.remove()
        assert disk.used == 0
        assert (disk.peak > 4 * sum(map(len, batches))) == spilled
        assert disk.peak < 5 * sum(map(len, batches)), "of each horizon, only the planned batches are spilled"
        assert not list(tmp_path.iterdir())
        assert policy.nbytes == 8 * capacity  # the last horizon looked no further
        policy.keep_memory(False)
        assert policy.nbytes == 0
    assert plans[True] == plans[False]


def test_batches_of_very_different_size() -> None:
    """The far end of what stays jumps to and fro; the limit on what is entered changes nothing."""
    rng = np.random.default_rng(8)
    n = 400
    for _ in range(40):
        lengths = rng.choice([0, 1, 3, 40, 300], rng.integers(5, 60))
        batches = [rng.permutation(n)[:length].tolist() for length in lengths]
        capacity = int(rng.choice([1, 7, 60, 250, 399]))
        assert run_windows(n, batches, capacity, len(batches), 0) == optimal_loads(batches, capacity)


def test_positions_beyond_32_bits() -> None:
    """The wide form gives what the narrow form gives."""
    from featstore._core import belady as core

    rng = np.random.default_rng(3)
    batches = [rng.permutation(50)[:20].astype(np.int64) for _ in range(20)]
    offsets = np.arange(0, 401, 20, dtype=np.int64)
    results = []
    for kind in (np.int32, np.int64):
        last = np.full(50, 400, kind)
        nxt = np.empty(400, kind)
        assert core.link(np.concatenate(batches), 0, last, nxt) == -1
        bits = core.Bits(np.zeros(core.Bits.words_for(400), np.uint64), 400, 10)
        limits = [bits.run(nxt[offsets[b] : offsets[b + 1]], offsets, b) for b in range(20)]
        out = np.empty(400, np.uint8)
        core.bits_at(bits, np.arange(400).astype(kind), out)
        slots = core.Slots(np.arange(10, dtype=np.int32)[::-1].copy())
        slots.begin(np.full(50, -1, np.int32))
        found = []
        for b in range(20):
            at, arrays = np.empty(20, np.int32), [np.empty(20, t) for t in (np.int64, np.int64, np.int32, np.int64)]
            n_in, n_out = slots.changes(bits, batches[b], batches[b], nxt[offsets[b] : offsets[b + 1]], limits[b], at, *arrays)
            found.append((at.tolist(), [a[:n_in].tolist() for a in arrays[:3]], arrays[3][:n_out].tolist()))
        results.append((out.tolist(), limits, found))
    assert results[0] == results[1]
    assert 0 < sum(results[0][0]) < 400


def test_bad_traces_are_refused() -> None:
    policy = Belady()
    policy.start(2, PolicyContext(5, 1))
    for bad in (5, -1):
        batches = [np.array([0, bad], np.int32)]
        with pytest.raises(IndexError, match=f"row {bad} at position 1 of batch 0"):
            list(policy.plan(Horizon(5, np.array([0, 2], np.int64), batches.__getitem__, 1)))
        with pytest.raises(IndexError, match=f"row {bad}"):
            Trace(batches, 5)
    with pytest.raises(ValueError, match="start"):
        list(policy.plan(Horizon(6, np.array([0], np.int64), [].__getitem__, 0)))
    with pytest.raises(ValueError, match="twice"):
        Trace([[1, 1]])
    with pytest.raises(TypeError, match="integer"):
        Trace([[0.5]], 3)
    with pytest.raises(ValueError, match="capacity"):
        simulate([[1]], -1)


@given(trace=traces(rows=10, batches=8), data=st.data())
def test_next_access_is_the_first_later_batch(trace: tuple[int, list[list[int]]], data: st.DataObject) -> None:
    n, batches = trace
    access = Trace(batches, n).horizon().next_access
    for batch in sorted(data.draw(st.lists(st.integers(-1, len(batches)), max_size=6))):
        rows = np.array(data.draw(st.lists(st.integers(0, n - 1))), np.int64)
        expected = [next((j for j in range(batch + 1, len(batches)) if row in batches[j]), -1) for row in rows.tolist()]
        assert access.next(rows, batch).tolist() == expected
    lists = [access.iters[access.ptr[r] : access.ptr[r + 1]].tolist() for r in range(n)]
    assert lists == [[j for j, batch in enumerate(batches) if r in batch] for r in range(n)]
    with pytest.raises(IndexError, match="row 99 at position 0"):
        access.next(np.array([99], np.int64), 0)


def test_simulate_counts_the_fill_and_extremes() -> None:
    batches = [np.array([0, 1]), np.array([0, 1]), np.array([2])]
    assert simulate(batches, 3, "frequency").tolist() == [2, 0, 1]  # everything fits: each row once
    assert simulate(batches, 0, "lru").tolist() == [2, 2, 1]
    assert simulate(batches, 99, "lru").tolist() == [2, 0, 1]
    assert simulate([], 5, "belady").tolist() == []


def test_a_simulation_ends_when_misses_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are of no interest to it: their pass over the batches ends with the first one."""
    batches = [np.arange(k, k + 5) for k in range(20)]
    expected = [5, *[1] * 19]
    planned: list[int] = []
    real = Belady._batches

    def counted(self: Belady, *args: Any) -> Iterator[Any]:
        for plan in real(self, *args):
            planned.append(len(plan.slots))
            yield plan

    monkeypatch.setattr(Belady, "_batches", counted)
    assert simulate(batches, 5, "belady", n=30).tolist() == expected
    assert planned == [5]


def test_a_simulation_does_not_believe_what_a_plug_in_announces() -> None:
    class Hopeful(Belady):
        def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
            announce = horizon.announce
            assert announce is not None
            yield from super().plan(
                replace(horizon, announce=lambda batch, missed: announce(batch, missed[:0] if batch > 9 else missed))
            )

    with pytest.raises(PluginError, match=r"announce|miss"):
        simulate([np.arange(k, k + 5) for k in range(20)], 5, Hopeful(), n=30)


def test_planned_policies_are_not_for_on_demand_caches() -> None:
    with pytest.raises((TypeError, PluginError)):
        FeatureCache(5, 8, 10, get_policy("belady"))
