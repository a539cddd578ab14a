"""Controls: for each promise of a policy's contract, a policy that breaks it, which the suites must find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

import featstore.testing.policies as contracts
from featstore.cache.base import Int32s, Int64s, OnlinePolicy, PolicyContext, StaticPolicy
from featstore.testing import OnlinePolicyContract, StaticPolicyContract


class FIFO(OnlinePolicy):
    """Right, in plain Python; the faulty ones differ in one thing."""

    slot_bytes = 120

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.capacity = capacity
        self.queue: list[int] = []

    @property
    def nbytes(self) -> int:
        return 120 * self.capacity

    def hit(self, slots: Int32s) -> None: ...

    def victims(self, n: int) -> Any:
        taken, self.queue = self.queue[:n], self.queue[n:]
        return np.array(taken, np.int32)

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        self.queue += slots.tolist()


def fault(hook: str, wrong: Any, name: str) -> type[FIFO]:
    """Return FIFO of which one hook does something wrong: it is called with the policy, and with what the right hook returns."""

    def call(self: FIFO, *args: Any) -> Any:
        return wrong(self, getattr(super(made, self), hook)(*args), *args)

    made: type[FIFO] = type(name, (FIFO,), {hook: call})
    return made


def boom(*_: Any) -> None:
    raise RuntimeError("boom")


SIMPLE_FAULTS = [
    fault("hit", boom, "Raises"),
    fault("victims", lambda self, answer, n: answer.astype(np.float64), "Floats"),
    fault("victims", lambda self, answer, n: answer[: max(1, n - 1)], "TooFew"),
    fault("victims", lambda self, answer, n: np.full(n, answer[0]), "Repeats"),
    fault("victims", lambda self, answer, n: answer + self.capacity, "OutOfRange"),
    fault("insert", lambda self, answer, rows, slots: slots.fill(0), "WritesToItsArguments"),
    fault("insert", lambda self, answer, rows, slots: rows.fill(0), "WritesToRows"),
    fault("hit", lambda self, answer, slots: slots.fill(0), "WritesToHits"),
    fault("start", lambda self, answer, capacity, context: setattr(self, "seen", np.ones(context.n, np.uint8)), "HoldsRows"),
]


class StartKeepsHits(FIFO):
    """Evicts the least used slots, by counts that survive start()."""

    hits: dict[int, int] | None = None

    def hit(self, slots: Int32s) -> None:
        self.hits = self.hits or {}
        for slot in slots.tolist():
            self.hits[slot] = self.hits.get(slot, 0) + 1

    def victims(self, n: int) -> Any:
        self.queue.sort(key=lambda slot: (self.hits or {}).get(slot, 0))
        return super().victims(n)


class SharesState(FIFO):
    queues: list[int] = []  # noqa: RUF012 (the fault: one for all instances)

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.capacity = capacity
        self.queue = self.queues
        self.queue.clear()

    def victims(self, n: int) -> Any:
        taken = self.queue[:n]
        del self.queue[:n]
        return np.array(taken, np.int32)


class SharesHits(StartKeepsHits):
    hits: dict[int, int] = {}  # noqa: RUF012 (the fault: one for all instances)

    def start(self, capacity: int, context: PolicyContext) -> None:
        super().start(capacity, context)
        self.hits.clear()

    def hit(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            self.hits[slot] = self.hits.get(slot, 0) + 1


class Unseeded(FIFO):
    def victims(self, n: int) -> Any:
        np.random.default_rng().shuffle(self.queue)
        return super().victims(n)


class KeepsItsArguments(FIFO):
    def start(self, capacity: int, context: PolicyContext) -> None:
        super().start(capacity, context)
        self.parts: list[Int32s] = []

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        self.parts.append(slots)

    def victims(self, n: int) -> Any:
        self.queue += [slot for part in self.parts for slot in part.tolist()]
        self.parts = []
        return super().victims(n)


class KeepsRows(FIFO):
    """Knows slots by their rows, which it reads late."""

    def start(self, capacity: int, context: PolicyContext) -> None:
        super().start(capacity, context)
        self.parts: list[tuple[Int64s, list[int]]] = []
        self.slot_of: dict[int, int] = {}

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        self.parts.append((rows, slots.tolist()))

    def victims(self, n: int) -> Any:
        for rows, slots in self.parts:
            self.slot_of |= dict(zip(rows.tolist(), slots, strict=True))
        self.parts = []
        taken = [self.slot_of.pop(row) for row in [*self.slot_of][:n]]
        return np.array(taken, np.int32)


class KeepsHits(FIFO):
    """Evicts what was not hit before what was."""

    def start(self, capacity: int, context: PolicyContext) -> None:
        super().start(capacity, context)
        self.hits: list[Int32s] = []

    def hit(self, slots: Int32s) -> None:
        self.hits.append(slots)

    def victims(self, n: int) -> Any:
        for slots in self.hits:
            self.queue = [slot for slot in self.queue if slot not in slots] + slots.tolist()
        self.hits = []
        return super().victims(n)


class UnderstatesMemory(FIFO):
    slot_bytes = 0
    nbytes = 0  # type: ignore[assignment]


class BrokenInvariant(FIFO):
    def _check(self) -> None:
        assert not self.queue or self.queue[0] == 0


BREAKS = {  # what each breaks
    "Raises": "test_a_long_trace",
    "Floats": "test_a_long_trace",
    "TooFew": "test_a_long_trace",
    "Repeats": "test_a_full_cache_can_be_emptied",
    "OutOfRange": "test_a_long_trace",
    "WritesToItsArguments": "test_a_long_trace",
    "WritesToRows": "test_a_long_trace",
    "WritesToHits": "test_a_long_trace",
    "HoldsRows": "test_memory_is_stated_and_follows_the_capacity",
    "StartKeepsHits": "test_start_forgets_everything",
    "SharesState": "test_instances_are_independent",
    "SharesHits": "test_instances_are_independent",
    "Unseeded": "test_same_trace_same_victims",
    "KeepsItsArguments": "test_any_trace_in_any_capacity",
    "KeepsRows": "test_any_trace_in_any_capacity",
    "KeepsHits": "test_any_trace_in_any_capacity",
    "UnderstatesMemory": "test_memory_is_stated_and_follows_the_capacity",
    "BrokenInvariant": "test_cache_and_policy_against_a_model",
    "WrongShape": "test_scores_are_one_number_a_row",
    "NeedsRows": "test_scores_are_one_number_a_row",
    "NotNumbers": "test_scores_are_one_number_a_row",
    "GivesNaN": "test_scores_are_one_number_a_row",
    "Random": "test_same_context_same_scores",
    "Drifts": "test_same_context_same_scores",
    "WritesToTheContext": "test_the_cache_holds_the_best_rows",
    "RanksByDegrees": "test_scores_from_degrees_need_no_other_rows",
}
ONLINE_FAULTS = [*SIMPLE_FAULTS, StartKeepsHits, SharesState, SharesHits, Unseeded, KeepsItsArguments, KeepsRows]
ONLINE_FAULTS += [KeepsHits, UnderstatesMemory, BrokenInvariant]


def scored(name: str, scores: Any, **attributes: Any) -> type[StaticPolicy]:
    """Return a static policy of these scores of a context."""
    return type(name, (StaticPolicy,), {"scores": lambda self, context: scores(context), **attributes})


def ratio(context: PolicyContext) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        return context.out_degree / context.in_degree


class Drifts(StaticPolicy):
    """Every instance begins with the same scores."""

    calls = 0

    def scores(self, context: PolicyContext) -> Any:
        self.calls += 1
        return context.counts * self.calls


Counts = scored("Counts", lambda context: context.counts)
STATIC_FAULTS = [
    scored("WrongShape", lambda context: context.counts[:1]),
    scored("NeedsRows", lambda context: context.counts - context.counts.max()),
    scored("NotNumbers", lambda context: context.counts.astype(complex)),
    scored("GivesNaN", ratio),
    scored("Random", lambda context: np.random.default_rng().random(context.n)),
    Drifts,
    scored("WritesToTheContext", lambda context: np.negative(context.counts, out=context.counts)),
    scored("RanksByDegrees", lambda context: context.out_degree - context.out_degree.max(initial=0), from_degrees=True),
]


@pytest.fixture(autouse=True)
def _no_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis need not look for the smallest example of a fault that is there on purpose."""
    for name in ("_settings", "_stateful_settings"):
        without = settings(getattr(contracts, name), phases=[Phase.explicit, Phase.generate], database=None)
        monkeypatch.setattr(contracts, name, without)


def failures(suite: Any, *names: str) -> list[str]:
    """Run the tests of a suite, or some of them; return which fail."""
    found: list[str] = []
    for name in names or [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(suite, name)()
        except Exception:
            found.append(name)
    return found


def online(policy: type[OnlinePolicy], **attributes: Any) -> Any:
    return type("Suite", (OnlinePolicyContract,), {"make": lambda self: policy(), **attributes})()


def static(policy: type[StaticPolicy], **attributes: Any) -> Any:
    return type("Suite", (StaticPolicyContract,), {"make": lambda self: policy(), **attributes})()


def test_right_policies_pass() -> None:
    assert failures(online(FIFO)) == []
    assert failures(static(Counts)) == []


@pytest.mark.parametrize("policy", ONLINE_FAULTS)
def test_faulty_online_policies_fail(policy: type[OnlinePolicy]) -> None:
    assert failures(online(policy), BREAKS[policy.__name__])


@pytest.mark.parametrize("policy", STATIC_FAULTS)
def test_faulty_static_policies_fail(policy: type[StaticPolicy]) -> None:
    assert failures(static(policy), BREAKS[policy.__name__])


def test_wrong_names_and_golden_figures_fail() -> None:
    with pytest.raises(AssertionError):
        online(FIFO, registered_name="lru").test_its_name_leads_to_it()
    with pytest.raises(AssertionError, match="it misses"):
        online(FIFO, golden=[1, 2, 3]).test_golden_misses()
    with pytest.raises(AssertionError, match="it keeps"):
        static(Counts, golden=[1, 2, 3]).test_golden_rows()


def test_a_suite_without_make_cannot_be_run() -> None:
    with pytest.raises(TypeError, match="make"):
        OnlinePolicyContract()  # type: ignore[abstract]
