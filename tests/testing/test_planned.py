"""Controls of the planned contract: for each promise a policy that breaks it, which the suite must find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

import featstore.testing.policies as contracts
from featstore.cache.base import PolicyContext
from featstore.cache.belady import Belady
from featstore.cache.belady_csr import BeladyCsr
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, Horizon, Int64s, PlannedBatch, PlannedPolicy
from featstore.gather.plan import Changeset
from featstore.plan.planmemory import planning_bytes
from featstore.plan.trace import Trace
from featstore.testing import PlannedPolicyContract
from featstore.testing.planned import _as_lists
from tests.support.refusing import refuses
from tests.testing.test_policies import failures


class TestBelady(PlannedPolicyContract):
    registered_name = "belady"
    golden = (3, 4, 5, 4, 4, 5, 2, 1, 2, 1, 2, 2, 1, 3, 1, 14, 4, 4, 1, 0, 1, 0, 1, 4)

    def make(self) -> PlannedPolicy:
        return Belady()


class TestBeladyCsr(PlannedPolicyContract):
    registered_name = "belady_csr"
    golden = TestBelady.golden

    def make(self) -> PlannedPolicy:
        return BeladyCsr()


class Oldest(PlannedPolicy):
    """First in, first out, in plain Python; the faulty ones differ in one thing."""

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        self.capacity = capacity
        self.cached = {int(row): slot for slot, row in enumerate(residents)}  # oldest first

    @property
    def nbytes(self) -> int:
        return 200 * self.capacity

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for b in range(horizon.n_planned):
            ids = horizon.ids(b).tolist()
            slots = np.array([self.cached.get(row, -1) for row in ids], np.int32)
            yield PlannedBatch(slots, self.changes(ids, slots))

    def changes(self, ids: list[int], slots: Any) -> Changeset:
        positions = np.flatnonzero(slots < 0)[: self.capacity].tolist()
        n_out = max(0, len(self.cached) + len(positions) - self.capacity)
        gone = [*self.cached][:n_out]
        for row in gone:
            del self.cached[row]
        used = set(self.cached.values())
        free = (slot for slot in range(self.capacity) if slot not in used)
        into = [next(free) for _ in positions]
        rows = [ids[position] for position in positions]
        self.cached |= dict(zip(rows, into, strict=True))
        return Changeset(
            np.array(rows, np.int64), np.array(positions, np.int64), np.array(into, np.int32), np.array(gone, np.int64)
        )


class NeedsSlots(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        self.share = 1 / self.capacity
        yield from super().plan(horizon)


class NeedsRows(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for b in range(horizon.n_planned):
            self.least = min(horizon.ids(b))
        yield from super().plan(horizon)


class SwapsSlots(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for planned in super().plan(horizon):
            hits = np.flatnonzero(planned.slots >= 0)
            planned.slots[hits] = np.roll(planned.slots[hits], 1)
            yield planned


class PlansTheLookAhead(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        yield from super().plan(replace(horizon, n_planned=horizon.n_batches))


class EmptiesBetweenWindows(Oldest):
    """Takes every horizon for the first one."""

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        self.cached = {}
        yield from super().plan(horizon)


class IgnoresResidents(Oldest):
    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        super().start(capacity, context)


class TakesNoResidents(Oldest):
    def start(self, capacity: int, context: PolicyContext) -> None:  # type: ignore[override]
        super().start(capacity, context)


class OverfillsTheCache(Oldest):
    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        super().start(capacity + 1, context, residents)


class ForgetsToEvict(Oldest):
    def changes(self, ids: list[int], slots: Any) -> Changeset:
        return replace(super().changes(ids, slots), out_rows=NO_ROWS)


class StartKeepsState(Oldest):
    """Skips rows that an earlier run has cached."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def changes(self, ids: list[int], slots: Any) -> Changeset:
        self.seen.update(ids)
        if len(self.seen) > 290:
            self.capacity = min(self.capacity, 1 + len(self.cached))
        return super().changes(ids, slots)


class SharesState(Oldest):
    table: dict[int, int] = {}  # noqa: RUF012 (the fault: one for all instances)

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        super().start(capacity, context, residents)
        self.table.clear()
        self.table.update(self.cached)
        self.cached = self.table


class Unseeded(Oldest):
    def changes(self, ids: list[int], slots: Any) -> Changeset:
        cached = [*self.cached.items()]
        np.random.default_rng().shuffle(cached)
        self.cached = {int(row): int(slot) for row, slot in cached}
        return super().changes(ids, slots)


class WritesToTheIds(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for b in range(horizon.n_planned):
            horizon.ids(b).sort()
        yield from super().plan(horizon)


class UnderstatesMemory(Oldest):
    nbytes = 0  # type: ignore[assignment]

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        super().start(capacity, context, residents)
        self.table = np.ones(2 * context.n, np.uint8)


class GrowsFromStartToStart(Oldest):
    def __init__(self) -> None:
        self.log: list[Any] = []

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(array.nbytes for array in self.log)

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for b in range(horizon.n_planned):
            self.log.append(horizon.ids(b).copy())
        yield from super().plan(horizon)


class AnnouncesOthers(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        for b in range(horizon.n_planned if horizon.announce is not None else 0):
            horizon.announce(b, np.arange(len(horizon.ids(b)), dtype=np.int32))
        yield from super().plan(horizon)


class PlansApartForListeners(Oldest):
    def plan(self, horizon: Horizon) -> Iterator[Any]:
        self.capacity = self.capacity if horizon.announce is None else min(1, self.capacity)
        yield from super().plan(horizon)


class SpillsWhatItDoesNotReadBack(Oldest):
    """Plans apart where it may spill."""

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        if horizon.spill is not None:
            self.capacity = len(self.cached)
        yield from super().plan(horizon)


class IsBrokenByAnEarlyEnd(Oldest):
    broken = False

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        try:
            yield from super().plan(horizon)
        except GeneratorExit:
            self.broken = True
            raise

    def changes(self, ids: list[int], slots: Any) -> Changeset:
        self.capacity = min(1, self.capacity) if self.broken else self.capacity
        return super().changes(ids, slots)


def test_the_librarys_own_plans_need_no_check() -> None:
    """Their plans are passed on unchecked, without a table: the same plans as with the check."""
    batches = contracts._long_trace()
    trace = Trace(batches, 300)
    found = []
    for always in (True, False):
        checked = CheckedPolicy(Belady(), always=always)
        assert checked.is_checked == always
        checked.start(40, PolicyContext(300, 1))
        found.append(_as_lists(list(checked.plan(trace.horizon()))))
        assert len(checked._map) == (300 if always else 0)
    assert found[0] == found[1]
    assert CheckedPolicy(type("Mine", (Belady,), {})()).is_checked


def test_the_check_is_counted() -> None:
    assert planning_bytes(1000, 5000, checked=True) - planning_bytes(1000, 5000) == 8 * 1000


FAULTS = {  # what each breaks
    NeedsSlots: "test_nothing_to_plan",
    NeedsRows: "test_any_trace_in_any_capacity",
    SwapsSlots: "test_a_long_trace",
    PlansTheLookAhead: "test_a_long_trace",
    EmptiesBetweenWindows: "test_a_long_trace",
    IgnoresResidents: "test_what_is_cached_at_the_start",
    TakesNoResidents: "test_what_is_cached_at_the_start",
    OverfillsTheCache: "test_any_trace_in_any_capacity",
    ForgetsToEvict: "test_a_long_trace",
    StartKeepsState: "test_start_forgets_everything",
    SharesState: "test_instances_are_independent",
    Unseeded: "test_same_trace_same_plans",
    WritesToTheIds: "test_a_long_trace",
    UnderstatesMemory: "test_memory_is_stated",
    GrowsFromStartToStart: "test_memory_is_stated",
    AnnouncesOthers: "test_what_is_announced_is_planned",
    PlansApartForListeners: "test_what_is_announced_is_planned",
    SpillsWhatItDoesNotReadBack: "test_a_window_may_spill",
    IsBrokenByAnEarlyEnd: "test_a_plan_may_be_given_up",
}


@pytest.fixture(autouse=True)
def _no_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis need not look for the smallest example of a fault that is there on purpose."""
    without = settings(contracts._settings, phases=[Phase.explicit, Phase.generate], database=None, max_examples=30)
    monkeypatch.setattr(contracts, "_settings", without)


def suite(policy: type[PlannedPolicy], **attributes: Any) -> Any:
    return type("Suite", (PlannedPolicyContract,), {"make": lambda self: policy(), **attributes})()


def test_a_right_policy_passes() -> None:
    assert failures(suite(Oldest)) == []


@pytest.mark.parametrize("policy", FAULTS)
def test_faulty_policies_fail(policy: type[PlannedPolicy]) -> None:
    assert failures(suite(policy), FAULTS[policy])


def test_wrong_names_and_golden_figures_fail() -> None:
    refuses(AssertionError, "", lambda: suite(Oldest, registered_name="belady").test_its_name_leads_to_it())
    refuses(AssertionError, "it loads", lambda: suite(Belady, golden=[1, 2, 3]).test_golden_loads())


def test_a_suite_without_make_cannot_be_run() -> None:
    refuses(TypeError, "make", PlannedPolicyContract)
