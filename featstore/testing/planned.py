"""The contract suite of planned policies; see :mod:`featstore.testing.policies` for the other kinds and an example."""

from __future__ import annotations

import tracemalloc
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from featstore.cache.base import PolicyContext
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch, PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.gather.plan import BatchPlan, Tier, TierRows
from featstore.testing import policies
from featstore.testing.policies import GOLDEN_CAPACITY, GOLDEN_ROWS, _data, _long_trace, _PolicyContract, gathered, golden_trace
from featstore.testing.strategies import row_ids, traces

__all__ = ["PlannedPolicyContract", "play_planned"]

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[Any]
Announced = list[tuple[int, list[int]]]


def play_planned(
    policy: PlannedPolicy,
    n: int,
    capacity: int,
    batches: Sequence[Ints],
    size: int | None = None,
    *,
    residents: Int64s = NO_ROWS,
    context: PolicyContext | None = None,
    spill: Callable[[int], Any] | None = None,
    announce: Callable[[int, Any], None] | None = None,
) -> list[PlannedBatch]:
    """Plan a trace, apply every plan to a cache, and check every row that a plan reads and every invariant of the cache.

    Parameters
    ----------
    policy : PlannedPolicy
    n, capacity : int
        Rows and slots.
    batches : sequence of integer array
        Distinct rows each.
    size : int, optional
        Batches to plan per horizon, which also shows as many following batches; by default one horizon has all batches.
    residents : int64 array, optional
        Rows that are in the cache at the start, the i-th in slot i.
    context, spill, announce : optional
        Arguments of the policy, and of every :class:`~featstore.cache.planned.Horizon`.

    Raises
    ------
    PluginError
        The policy raised, or a plan is wrong.
    """
    checked, data = CheckedPolicy(policy, always=True), _data(n)
    checked.start(capacity, context or PolicyContext(n, 1), residents)
    cache = FeatureCache(capacity, data.shape[1], n, None)
    cache.preload(residents, lambda rows, out: np.copyto(out, data[rows]))
    size = size or max(1, len(batches))
    plans: list[PlannedBatch] = []
    for first in range(0, len(batches), size):
        seen = batches[first : first + 2 * size]
        horizon = _horizon(n, seen, min(size, len(seen)), spill, announce)
        for ids, planned in zip(seen, checked.plan(horizon, first), strict=False):
            _carry_out(cache, data, ids, planned)
            plans.append(planned)
    assert len(plans) == len(batches)
    return plans


def _horizon(n: int, batches: Sequence[Ints], n_planned: int, spill: Any = None, announce: Any = None) -> Horizon:
    offsets = np.cumsum([0, *map(len, batches)], dtype=np.int64)
    return Horizon(n, offsets, batches.__getitem__, n_planned, spill, announce)


def _carry_out(cache: FeatureCache, data: npt.NDArray[np.uint8], ids: Ints, planned: PlannedBatch) -> None:
    hits, misses = np.flatnonzero(planned.slots >= 0), np.flatnonzero(planned.slots < 0)
    parts = TierRows(Tier.HOST, planned.slots[hits], hits), TierRows(Tier.BASE, ids[misses].astype(np.int64), misses)
    out = gathered(cache, data, BatchPlan(len(ids), parts))
    assert np.array_equal(out, data[ids]), "a plan reads other rows than the batch's"
    cache.apply(planned.changes, out)
    cache._check()


def _as_lists(plans: Sequence[PlannedBatch]) -> list[Any]:
    names = ("in_rows", "in_positions", "in_slots", "out_rows")
    return [(p.slots.tolist(), [getattr(p.changes, name).tolist() for name in names]) for p in plans]


class PlannedPolicyContract(_PolicyContract):
    """Tests of a planned policy's contract.

    Attributes
    ----------
    golden : sequence of int, optional
        Rows loaded in each batch of :func:`golden_trace` with 16 slots, all of it in one horizon.
    """

    golden: ClassVar[Sequence[int] | None] = None

    @abstractmethod
    def make(self) -> PlannedPolicy:
        """Make a new policy."""

    def test_any_trace_in_any_capacity(self) -> None:
        """Check that every planned slot holds its row and every change fits, for any trace, horizon and number of slots."""

        @policies._settings
        @given(traces(), st.integers(0, 45), st.integers(1, 13), st.sampled_from([np.int32, np.int64]))
        def check(trace: tuple[int, list[Int64s]], capacity: int, size: int, kind: type) -> None:
            n, batches = trace
            play_planned(self.make(), n, min(capacity, n), [ids.astype(kind) for ids in batches], size)

        check()

    def test_a_long_trace(self) -> None:
        for capacity in (0, 1, 2, 30, 299):
            for size in (1, 7, None):
                play_planned(self.make(), 300, capacity, _long_trace(), size)

    def test_what_is_cached_at_the_start(self) -> None:
        """Check that plans find the rows that are in the first slots when the policy starts."""

        @policies._settings
        @given(st.data(), traces(), st.integers(0, 45), st.integers(1, 13))
        def check(data: st.DataObject, trace: tuple[int, list[Int64s]], capacity: int, size: int) -> None:
            n, batches = trace
            capacity = min(capacity, n)
            residents = np.sort(data.draw(row_ids(n, max_size=capacity, unique=True)))
            play_planned(self.make(), n, capacity, batches, size, residents=residents)

        check()
        play_planned(self.make(), 300, 40, _long_trace(), 7, residents=np.arange(0, 300, 8))

    def test_nothing_to_plan(self) -> None:
        nothing = np.empty(0, np.int64)
        for n, batches in ((0, []), (0, [nothing]), (5, []), (5, [nothing, nothing]), (5, [nothing, np.arange(5), nothing])):
            for size in (1, None):
                play_planned(self.make(), n, min(2, n), batches, size)

    def test_same_trace_same_plans(self) -> None:
        one, other = (_as_lists(play_planned(self.make(), 300, 40, _long_trace(), 7)) for _ in range(2))
        assert one == other, "two instances differ"

    def test_start_forgets_everything(self) -> None:
        @policies._settings
        @given(traces(), st.integers(0, 20), traces(), st.integers(0, 20), st.integers(1, 13))
        def check(
            earlier: tuple[int, list[Int64s]], capacity: int, trace: tuple[int, list[Int64s]], other: int, size: int
        ) -> None:
            used = self.make()
            self._play(used, *earlier, capacity, size)
            again = self._play(used, *trace, other, size)
            assert again == self._play(self.make(), *trace, other, size), "a used policy differs from a new one after start()"

        check()
        used = self.make()
        for capacity in (40, 7, 40):
            again = self._play(used, 300, _long_trace(), capacity, 7)
            fresh = self._play(self.make(), 300, _long_trace(), capacity, 7)
            assert again == fresh, "a used policy differs from a new one after start()"

    def test_a_plan_may_be_given_up(self) -> None:
        """Check that the policy can start anew after a half-planned horizon, as when an epoch ends early."""
        used = self.make()
        batches = _long_trace()
        for n_taken in (0, 1, 50):
            checked = CheckedPolicy(used, always=True)
            checked.start(40, PolicyContext(300, 1))
            plans = checked.plan(_horizon(300, batches, len(batches)))
            for _ in range(n_taken):
                next(plans)
            plans.close()
            again = self._play(used, 300, batches, 40, 7)
            assert again == self._play(self.make(), 300, batches, 40, 7), "a plan that was given up changes the next one"

    def test_instances_are_independent(self) -> None:
        batches = _long_trace()
        alone = [self._play(self.make(), 300, batches, capacity, None) for capacity in (7, 40)]
        both = []
        for capacity in (7, 40):
            checked = CheckedPolicy(self.make(), always=True)
            checked.start(capacity, PolicyContext(300, 1))
            both.append(checked.plan(_horizon(300, batches, len(batches))))
        beside = list(zip(*both, strict=True))
        assert [_as_lists([plans[i] for plans in beside]) for i in (0, 1)] == alone, "instances share state"

    def test_a_window_may_spill(self) -> None:
        """Check that plans are the same if the policy may spill arrays that grow with the accesses."""
        made: list[dict[int, Any]] = []

        def spill(n_batches: int) -> dict[int, Any]:
            made.append({})
            return made[-1]

        plans = play_planned(self.make(), 300, 40, _long_trace(), 7, spill=spill)
        assert _as_lists(plans) == self._play(self.make(), 300, _long_trace(), 40, 7), "a horizon that may spill is planned apart"

    def test_what_is_announced_is_planned(self) -> None:
        """Check that a policy that announces misses does so for every batch, and plans these misses."""
        heard: Announced = []
        plans = play_planned(
            self.make(), 300, 40, _long_trace(), 7, announce=lambda batch, positions: heard.append((batch, positions.tolist()))
        )
        assert _as_lists(plans) == self._play(self.make(), 300, _long_trace(), 40, 7), "who listens changes the plans"
        if heard:
            assert [positions for _, positions in heard] == [np.flatnonzero(plan.slots < 0).tolist() for plan in plans]

    def test_memory_is_stated(self) -> None:
        """Check that the policy holds no more than its ``nbytes`` between horizons, and that ``nbytes`` does not grow."""
        n, capacity = 200_000, 5_000
        rng = np.random.default_rng(2)
        batches = [np.unique((n * rng.random(4_000) ** 3).astype(np.int64)) for _ in range(12)]
        policy = self.make()
        held = []
        tracemalloc.start()
        try:
            for keep in (False, True, False):
                policy.keep_memory(keep)
                policy.start(capacity, PolicyContext(n, 1))
                for first in range(0, 12, 4):
                    for _ in policy.plan(_horizon(n, batches[first : first + 8], 4)):
                        pass
                    del _
                used, states = tracemalloc.get_traced_memory()[0], policy.nbytes
                assert used <= states + 262_144, f"it holds {used} bytes and states nbytes = {states}"
                if not keep:
                    policy.keep_memory(False)
                    held.append(policy.nbytes)
        finally:
            tracemalloc.stop()
        assert held[0] == held[1], "nbytes grows from start to start"

    def test_golden_loads(self) -> None:
        if self.golden is not None:
            plans = play_planned(self.make(), GOLDEN_ROWS, GOLDEN_CAPACITY, golden_trace())
            loads = [int(np.count_nonzero(plan.slots < 0)) for plan in plans]
            assert loads == list(self.golden), f"it loads {loads}"

    def _play(self, policy: PlannedPolicy, n: int, batches: Sequence[Ints], capacity: int, size: int | None) -> list[Any]:
        return _as_lists(play_planned(policy, n, min(capacity, n), batches, size))
