"""A feature cache whose policy breaks its contract, or is interrupted: named, and no wrong row."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from featstore.budget import Budget
from featstore.cache.base import Int32s, Int64s, OnlinePolicy, PolicyContext
from featstore.errors import PluginError
from featstore.testing.policies import gathered, missing
from tests.cache.test_table import batch, make, store


class Faulty(OnlinePolicy):
    """FIFO that does as it is told at the ``when``-th call of one hook."""

    def __init__(self, hook: str, fault: Any, when: int = 1) -> None:
        self.hook, self.fault, self.when = hook, fault, when
        self.calls = 0
        self.starts = 0

    def _act(self, hook: str, answer: Any = None) -> Any:
        if hook != self.hook or (hook == "victims" and len(answer) < 2):
            return answer
        self.calls += 1
        if self.calls != self.when:
            return answer
        if isinstance(self.fault, BaseException):
            raise self.fault
        return self.fault(answer)

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.starts += 1
        self.queue: list[int] = []
        self._act("start")

    def hit(self, slots: Int32s) -> None:
        self._act("hit")

    def victims(self, n: int) -> Any:
        taken, self.queue = self.queue[:n], self.queue[n:]
        return self._act("victims", np.array(taken, np.int32))

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        self._act("insert")
        assert not set(slots.tolist()) & set(self.queue)
        self.queue += slots.tolist()


VICTIM_FAULTS = {
    "raises": (RuntimeError("boom"), "victims raised RuntimeError: boom"),
    "none": (lambda answer: None, "must return integers"),
    "floats": (lambda answer: answer.astype(float), "must return integers, not float64"),
    "too few": (lambda answer: answer[:-1], "must return shape"),
    "too many": (lambda answer: np.append(answer, answer[0]), "must return shape"),
    "matrix": (lambda answer: answer[:, None], "must return shape"),
    "range": (lambda answer: answer + 100, "is not a slot of 6"),
    "negative": (lambda answer: answer - 100, "is not a slot of 6"),
    "wide": (lambda answer: answer + np.int64(2**32), "is not a slot of 6"),
    "unsigned": (lambda answer: answer + np.uint64(2**63), "is not a slot of 6|must return integers"),
    "repeated": (lambda answer: np.full_like(answer, answer[0]), "occurs twice"),
    "text": (lambda answer: ["a"] * len(answer), "must return integers"),
}


@pytest.mark.parametrize("fault", sorted(VICTIM_FAULTS))
@pytest.mark.parametrize("when", [1, 3])
def test_faulty_victims(fault: str, when: int) -> None:
    action, message = VICTIM_FAULTS[fault]
    check_fault(Faulty("victims", action, when), message)


@pytest.mark.parametrize("hook", ["hit", "victims", "insert"])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_raising_hooks(hook: str, when: int) -> None:
    check_fault(Faulty(hook, ZeroDivisionError("boom"), when), f"{hook} raised ZeroDivisionError: boom")


def check_fault(policy: Faulty, message: str) -> None:
    """The fault shows as one PluginError that names the policy; every batch's data are right; the cache recovers."""
    data = store(40, 8)
    cache = make(6, data, policy)
    rng = np.random.default_rng(3)
    errors = []
    for _ in range(40):
        ids = rng.integers(0, 15, 5)
        with cache.pinned():
            plan = cache.plan(ids)
            out = gathered(cache, data, plan)
        assert (out == data[ids]).all()
        try:
            changes = cache.admit(*missing(plan))
        except PluginError as error:
            errors.append(str(error))
            assert cache.stats()["cached"] == 0
        else:
            cache.apply(changes, out)
        cache._check()
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert "'Faulty'" in errors[0]
    assert policy.starts == 2
    assert cache.stats()["cached"] == 6


def test_a_victim_that_is_empty() -> None:
    class Empty(Faulty):
        def victims(self, n: int) -> Any:
            table.row_of_slot[0] = -1
            return np.zeros(1, np.int32)

    data = store(9, 4)
    cache = make(2, data, Empty("none", None))
    table = cache._slots
    assert table is not None
    batch(cache, data, np.array([0, 1]))
    cache.map.release(np.array([0]))
    with pytest.raises(PluginError, match="is empty"):
        cache.admit(np.array([5]))


def test_a_policy_that_cannot_start() -> None:
    data = store(9, 4)
    budget = Budget(10**6)
    with pytest.raises(PluginError, match="'Faulty' cannot start with 2 slots: RuntimeError: boom"):
        make(2, data, Faulty("start", RuntimeError("boom")), budget=budget)
    assert budget.used == 0
    # One that cannot start again leaves a cache that holds nothing and harms nothing.
    policy = Faulty("start", RuntimeError("boom"), when=2)
    policy.insert = lambda rows, slots: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    cache = make(2, data, policy)
    with pytest.raises(PluginError, match="insert raised ZeroDivisionError"):
        cache.admit(np.array([1]))
    for _ in range(3):
        assert (batch(cache, data, np.array([1, 2])) == data[[1, 2]]).all()
    assert cache.stats()["cached"] == 0
    cache._check()


def test_an_interrupt_in_a_hook_leaves_the_cache_usable() -> None:
    data = store(15, 4)
    rng = np.random.default_rng(0)
    for hook in ("hit", "victims", "insert"):
        cache = make(6, data, Faulty(hook, KeyboardInterrupt()))
        interrupts = 0
        for _ in range(30):
            ids = rng.integers(0, 15, 5)
            try:
                assert (batch(cache, data, ids) == data[ids]).all()
            except KeyboardInterrupt:
                interrupts += 1
            cache._check()
        assert interrupts == 1
        assert cache.stats()["hits"] > 0


@pytest.mark.parametrize("step", ["release", "hold"])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_between_two_steps_of_an_admission(step: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = store(15, 4)
    cache = make(6, data, "lru")
    batch(cache, data, np.arange(6))
    original = getattr(cache.map, step)
    pending = [KeyboardInterrupt()]

    def interrupted(*arguments: Any) -> None:
        if late or not pending:
            original(*arguments)
        if pending:
            raise pending.pop()

    monkeypatch.setattr(cache.map, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.admit(np.array([7, 8]))
    cache._check()
    assert cache.stats()["cached"] == 0
    for ids in (np.array([7, 8]), np.arange(12), np.array([7, 8, 0]), np.arange(15)):
        assert (batch(cache, data, ids) == data[ids]).all()
        cache._check()


def test_hooks_cannot_write_to_their_arguments() -> None:
    class Writes(Faulty):
        def insert(self, rows: Int64s, slots: Int32s) -> None:
            slots[0] = 1

    cache = make(2, store(9, 4), Writes("none", None))
    with pytest.raises(PluginError, match="read-only"):
        cache.admit(np.array([5]))
