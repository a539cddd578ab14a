"""Contract suites for cache policies: subclass one, write :meth:`make`, and pytest runs every test over the policy.

Examples
--------
>>> class TestMine(OnlinePolicyContract):
...     def make(self):
...         return Mine()
"""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from featstore.cache.base import OnlinePolicy, Policy, PolicyContext, StaticPolicy, get_policy
from featstore.cache.rowmap import RowMap
from featstore.cache.select import top_rows
from featstore.cache.slots import SlotTable
from featstore.cache.table import FeatureCache
from featstore.gather.plan import BatchPlan, Changeset, Tier
from featstore.testing.strategies import row_ids, traces

__all__ = [
    "GOLDEN_CAPACITY",
    "GOLDEN_ROWS",
    "OnlinePolicyContract",
    "Played",
    "StaticPolicyContract",
    "golden_context",
    "golden_trace",
    "play",
]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

GOLDEN_ROWS = 60
GOLDEN_CAPACITY = 16

_settings = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
_stateful_settings = settings(deadline=None, max_examples=30, stateful_step_count=25, suppress_health_check=list(HealthCheck))


# -- playing traces --------------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """Record of a policy over a trace: missed rows of every batch, and the slots of every call of ``victims``."""

    misses: list[int] = field(default_factory=list)
    victims: list[list[int]] = field(default_factory=list)


class _Witness(OnlinePolicy):
    """Wrapper that passes every hook on, records the victims, and overwrites lent arrays, as a table that reuses them would."""

    def __init__(self, policy: OnlinePolicy) -> None:
        self.policy = policy
        self.groups = policy.groups
        self.chosen: list[list[int]] = []

    @property
    def nbytes(self) -> int:
        return self.policy.nbytes

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.policy.start(capacity, context)

    def hit(self, slots: Int32s) -> None:
        lent = slots.copy()
        self.policy.hit(lent)
        assert (lent == slots).all(), "hit() wrote to its argument"
        lent.fill(-1)

    def victims(self, n: int) -> Int32s:
        answer = self.policy.victims(n)
        self.chosen.append(np.asarray(answer).tolist())
        return answer

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        lent_rows, lent_slots = rows.copy(), slots.copy()
        self.policy.insert(lent_rows, lent_slots)
        assert (lent_rows == rows).all(), "insert() wrote to its argument"
        assert (lent_slots == slots).all(), "insert() wrote to its argument"
        lent_rows.fill(-1)
        lent_slots.fill(-1)

    def _check(self) -> None:
        self.policy._check()


def play(policy: OnlinePolicy, n: int, capacity: int, batches: Sequence[Int64s], context: PolicyContext | None = None) -> Played:
    """Run a policy over a trace of id batches from an empty cache, checking every invariant after every batch."""
    game = _Game(policy, n, capacity, context or PolicyContext(n, 4))
    for ids in batches:
        game.batch(ids)
    return game.played


class _Game:
    """One policy's run over a trace, batch by batch."""

    def __init__(self, policy: OnlinePolicy, n: int, capacity: int, context: PolicyContext) -> None:
        self.rows = RowMap(n)
        witness = _Witness(policy)
        self.table = SlotTable(capacity, self.rows, witness, context)
        self.played = Played(victims=witness.chosen)

    def batch(self, ids: Int64s) -> None:
        _, hit_slots, missed, _ = self.rows.split(ids)
        self.table.touch(hit_slots)
        changes = self.table.admit(ids[missed], missed)
        if changes is not None:
            self.rows.assign(changes.in_rows, changes.in_slots)
        self.table._check()
        self.played.misses.append(len(missed))


def golden_trace() -> list[Int64s]:
    """Make 24 batches of distinct ids below 60: skewed, with one scan, and the same everywhere and always."""
    state = 12345

    def draw(below: int) -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % 2**31
        return (state >> 8) * below >> 23

    batches = [
        list(dict.fromkeys(draw(GOLDEN_ROWS) * draw(GOLDEN_ROWS) // GOLDEN_ROWS for _ in range(3 + number % 9)))
        for number in range(23)
    ]
    batches.insert(15, list(range(20, 45)))  # a scan, longer than the cache
    return [np.array(ids, np.int64) for ids in batches]


def golden_context() -> PolicyContext:
    """Make a context over 60 rows with every array known, the same everywhere and always."""
    rows = np.arange(GOLDEN_ROWS)
    arrays = {
        "in_degree_of": rows * 7 % 11,
        "out_degree_of": rows * rows % 23,
        "counts_of": rows * 13 % 31,
        "parts_of": rows % 4,
        "cross_out_degree_of": rows * rows % 23 // 2,
    }
    return _context(GOLDEN_ROWS, arrays)


def _context(n: int, arrays: dict[str, npt.NDArray[Any]], seed: int = 0) -> PolicyContext:
    for array in arrays.values():
        array.flags.writeable = False  # the dataset's own
    return PolicyContext(n, 4, seed=seed, **{name: (lambda array=array: array) for name, array in arrays.items()})


@st.composite
def _contexts(draw: Any) -> PolicyContext:
    n = draw(st.integers(0, 50))
    names = ["in_degree_of", "out_degree_of", "counts_of", "parts_of", "cross_out_degree_of"]
    degrees = st.lists(st.integers(0, 5), min_size=n, max_size=n)
    return _context(n, {name: np.array(draw(degrees), np.int64) for name in names}, draw(st.integers(0, 2**63 - 1)))


# -- the cache's side ------------------------------------------------------------------------------------------------------------


def _data(n: int) -> npt.NDArray[np.uint8]:
    return np.arange(5 * n, dtype=np.int64).astype(np.uint8).reshape(n, 5)


def gathered(cache: FeatureCache, data: npt.NDArray[np.uint8], plan: BatchPlan) -> npt.NDArray[np.uint8]:
    """Return the rows that ``plan`` asks for: of the cache, and of ``data`` those that it misses."""
    out = np.full((plan.n_rows, data.shape[1]), 0xEE, np.uint8)
    for part in plan.parts:
        source = cache.array if part.tier == Tier.HOST else data
        out[slice(None) if part.positions is None else part.positions] = source[part.addresses]
    return out


def missing(plan: BatchPlan) -> tuple[Int64s, Int64s | None]:
    """Return the ids of the rows that the cache does not have, and their positions in the batch."""
    for part in plan.parts:
        if part.tier == Tier.BASE:
            return np.asarray(part.addresses, np.int64), part.positions
    return np.empty(0, np.int64), None


def _long_trace() -> list[Int64s]:
    rng = np.random.default_rng(1)
    batches = [np.unique((300 * rng.random(rng.integers(1, 60)) ** 3).astype(np.int64)) for _ in range(120)]
    for ids in batches:
        rng.shuffle(ids)
    return batches


# -- suites ----------------------------------------------------------------------------------------------------------------------


class _PolicyContract(ABC):
    registered_name: ClassVar[str | None] = None
    """The name that :func:`featstore.get_policy` should know the policy by; None where it has none."""

    @abstractmethod
    def make(self) -> Policy:
        """Make a new policy."""

    def test_its_name_leads_to_it(self) -> None:
        if self.registered_name is not None:
            assert type(get_policy(self.registered_name)) is type(self.make())
            assert self.make().name == self.registered_name


class StaticPolicyContract(_PolicyContract):
    """Tests of a static policy's contract.

    Attributes
    ----------
    golden : sequence of int, optional
        The rows that the policy keeps of :func:`golden_context` with 16 slots, ascending.
    """

    golden: ClassVar[Sequence[int] | None] = None

    @abstractmethod
    def make(self) -> StaticPolicy:
        """Make a new policy."""

    def test_scores_are_one_number_a_row(self) -> None:
        @_settings
        @given(_contexts())
        def check(context: PolicyContext) -> None:
            scores = np.asarray(self.make().scores(context))
            assert scores.shape == (context.n,), f"scores have shape {scores.shape}, not ({context.n},)"
            assert scores.dtype.kind in "buif", f"scores are {scores.dtype}, neither integer nor floating"
            assert not np.isnan(scores.astype(np.float64)).any(), "a score is NaN"

        check()

    def test_same_context_same_scores(self) -> None:
        @_settings
        @given(_contexts())
        def check(context: PolicyContext) -> None:
            policy = self.make()
            first = np.array(policy.scores(context))
            assert np.array_equal(policy.scores(context), first), "a second call gives other scores"
            assert np.array_equal(self.make().scores(context), first), "another instance gives other scores"

        check()

    def test_scores_from_degrees_need_no_other_rows(self) -> None:
        @_settings
        @given(_contexts(), st.integers(0, 60), st.integers(0, 60))
        def check(context: PolicyContext, first: int, stop: int) -> None:
            policy = self.make()
            if not policy.goes_by_degrees:
                return
            in_degree, out_degree = context.in_degree[first:stop], context.out_degree[first:stop]
            of_some = PolicyContext(len(in_degree), 4, partial(np.asarray, in_degree), partial(np.asarray, out_degree))
            found, whole = np.asarray(policy.list_scores(of_some)), np.asarray(policy.list_scores(context))
            assert np.array_equal(found, whole[first:stop]), "from_degrees is set, and scores depend on other rows"

        check()

    def test_the_cache_holds_the_best_rows(self) -> None:
        @_settings
        @given(_contexts(), st.integers(0, 60))
        def check(context: PolicyContext, capacity: int) -> None:
            data = _data(context.n)
            cache = FeatureCache(capacity, data.shape[1], context.n, self.make(), context)
            cache.fill(lambda rows, out: np.copyto(out, data[rows]))
            plan = cache.plan(np.arange(context.n))
            assert np.array_equal(gathered(cache, data, plan), data), "the cache gives other bytes than the store"
            best = top_rows(np.asarray(self.make().scores(context)), capacity)
            assert np.array_equal(np.flatnonzero(cache.map.slot_of_row >= 0) if capacity and context.n else best[:0], best)
            cache._check()

        check()

    def test_golden_rows(self) -> None:
        if self.golden is not None:
            kept = top_rows(np.asarray(self.make().scores(golden_context())), GOLDEN_CAPACITY)
            assert kept.tolist() == list(self.golden), f"it keeps {kept.tolist()}"


class OnlinePolicyContract(_PolicyContract):
    """Tests of an online policy's contract.

    Attributes
    ----------
    golden : sequence of int, optional
        Misses of each batch of :func:`golden_trace` with 16 slots.
    """

    golden: ClassVar[Sequence[int] | None] = None

    @abstractmethod
    def make(self) -> OnlinePolicy:
        """Make a new policy."""

    def context(self, n: int) -> PolicyContext:
        """Make the policy's context for ``n`` rows; override it if the policy needs more than their number."""
        return PolicyContext(n, 4)

    def test_any_trace_in_any_capacity(self) -> None:
        """Check, with any trace, that victims are distinct occupied slots, and the state's invariants; the table checks both."""

        @_settings
        @given(traces(), st.integers(1, 45))
        def check(trace: tuple[int, list[Int64s]], capacity: int) -> None:
            self._play(self.make(), *trace, capacity)

        check()

    def test_a_long_trace(self) -> None:
        for capacity in (1, 2, 30, 299):
            self._play(self.make(), 300, _long_trace(), capacity)

    def test_same_trace_same_victims(self) -> None:
        one, other = (self._play(self.make(), 300, _long_trace(), 40) for _ in range(2))
        assert one == other, "two instances differ"

    def test_start_forgets_everything(self) -> None:
        @_settings
        @given(traces(), st.integers(1, 20), traces(), st.integers(1, 20))
        def check(earlier: tuple[int, list[Int64s]], capacity: int, trace: tuple[int, list[Int64s]], other: int) -> None:
            used = self.make()
            self._play(used, *earlier, capacity)
            again = self._play(used, *trace, other)
            assert again == self._play(self.make(), *trace, other), "a used policy differs from a new one after start()"

        check()
        used = self.make()
        for capacity in (40, 7, 40):  # in a small trace the kept rows may not matter
            again = self._play(used, 300, _long_trace(), capacity)
            fresh = self._play(self.make(), 300, _long_trace(), capacity)
            assert again == fresh, "a used policy differs from a new one after start()"

    def test_instances_are_independent(self) -> None:
        alone = [self._play(self.make(), 300, _long_trace(), capacity) for capacity in (7, 40)]
        games = [_Game(self.make(), 300, capacity, self.context(300)) for capacity in (7, 40)]
        for ids in _long_trace():
            for game in games:
                game.batch(ids)
        assert [game.played for game in games] == alone, "instances share state"

    def test_a_full_cache_can_be_emptied(self) -> None:
        for capacity in (1, 2, 9, 64):
            policy = self.make()
            policy.start(capacity, self.context(1000))
            for turn in range(3):
                rows = np.arange(capacity, dtype=np.int64) + turn * capacity
                policy.insert(rows, np.arange(capacity, dtype=np.int32))
                policy.hit(np.arange(0, capacity, 2, dtype=np.int32))
                policy._check()
                slots = np.asarray(policy.victims(capacity))
                assert sorted(slots.tolist()) == list(range(capacity)), "victims of all slots are not all slots"
                policy._check()

    def test_memory_is_stated_and_follows_the_capacity(self) -> None:
        capacity = 20_000
        held, used = [], []
        for n in (100_000, 1_000_000):
            policy, context = self.make(), self.context(n)
            tracemalloc.start()
            try:
                policy.start(capacity, context)
                policy.insert(np.arange(capacity), np.arange(capacity, dtype=np.int32))
                policy.hit(np.arange(capacity, dtype=np.int32))
                del context  # its arrays are not the policy's, unless the policy keeps them
                used.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
            held.append(policy.nbytes)
            assert used[-1] <= held[-1] + 65_536, f"it holds {used[-1]} bytes and states nbytes = {held[-1]}"
        assert held[0] == held[1], "nbytes depends on the number of rows"
        assert used[1] - used[0] < 65_536, "the memory depends on the number of rows"
        assert held[0] <= policy.slot_bytes * capacity + 4096, "nbytes exceeds slot_bytes a slot"

    def test_golden_misses(self) -> None:
        if self.golden is not None:
            played = self._play(self.make(), GOLDEN_ROWS, golden_trace(), GOLDEN_CAPACITY)
            assert played.misses == list(self.golden), f"it misses {played.misses}"

    def test_cache_and_policy_against_a_model(self) -> None:
        """Check a feature cache under this policy, driven at random, with failed gathers and batches that overtake each other."""
        make, context = self.make, self.context

        class Machine(RuleBasedStateMachine):
            @initialize(n=st.integers(1, 30), share=st.floats(0, 1))
            def begin(self, n: int, share: float) -> None:
                self.n = n
                self.data = _data(n)
                self.cache = FeatureCache(max(1, int(n * share)), self.data.shape[1], n, make(), context(n))
                self.cached: set[int] = set()
                self.open: list[tuple[Changeset, npt.NDArray[np.uint8]]] = []
                self.requests = 0

            def _plan(self, data: st.DataObject) -> tuple[Int64s, BatchPlan, npt.NDArray[np.uint8]]:
                ids = data.draw(row_ids(self.n, max_size=40))
                plan = self.cache.plan(ids)
                out = gathered(self.cache, self.data, plan)
                assert np.array_equal(out, self.data[ids]), "wrong data"
                hits = sum(len(part.addresses) for part in plan.parts if part.tier == Tier.HOST)
                assert hits == sum(row in self.cached for row in ids.tolist()), "hits are not the requests for cached rows"
                self.requests += len(ids)
                return ids, plan, out

            @rule(data=st.data())
            def batch(self, data: st.DataObject) -> None:
                ids, plan, out = self._plan(data)
                changes = self.cache.admit(*missing(plan))
                if not self.open:
                    new = list(dict.fromkeys(row for row in ids.tolist() if row not in self.cached))
                    came = [] if changes is None else changes.in_rows.tolist()
                    first = new[: self.cache.capacity]
                    in_groups = isinstance(self.cache.policy, OnlinePolicy) and self.cache.policy.groups > 1
                    assert came == ([row for row in first if row in set(came)] if in_groups else first)
                    assert bool(came) == bool(first)
                if changes is not None:
                    self.cached -= set(changes.out_rows.tolist())
                    self._apply(changes, out)

            @rule(data=st.data())
            def failed_gather(self, data: st.DataObject) -> None:
                self._plan(data)

            @rule(data=st.data())
            def admit_only(self, data: st.DataObject) -> None:
                _, plan, out = self._plan(data)
                changes = self.cache.admit(*missing(plan))
                if changes is not None:
                    self.cached -= set(changes.out_rows.tolist())
                    self.open.append((changes, out))

            @rule(which=st.integers(0, 5), lost=st.booleans())
            def apply_late(self, which: int, lost: bool) -> None:
                if self.open:
                    changes, out = self.open[which % len(self.open)]
                    if not lost:
                        del self.open[which % len(self.open)]
                        self._apply(changes, out)

            def _apply(self, changes: Changeset, out: npt.NDArray[np.uint8]) -> None:
                before = self.cache.map.slot_of_row[changes.in_rows]
                self.cache.apply(changes, out)
                for row, slot, code in zip(changes.in_rows.tolist(), changes.in_slots.tolist(), before.tolist(), strict=True):
                    if code == -2 - slot:  # it had not been overtaken
                        self.cached.add(row)

            @invariant()
            def holds(self) -> None:
                if hasattr(self, "cache"):
                    self.cache._check()
                    entries = self.cache.map.slot_of_row
                    assert set(np.flatnonzero(entries >= 0).tolist()) == self.cached
                    rows = np.flatnonzero(entries >= 0)
                    assert np.array_equal(self.cache.array[entries[rows]], self.data[rows])
                    stats = self.cache.stats()
                    assert stats["hits"] + stats["misses"] == self.requests
                    assert stats["admitted"] - stats["evicted"] == stats["cached"] <= self.cache.capacity

        run_state_machine_as_test(Machine, settings=_stateful_settings)

    def _play(self, policy: OnlinePolicy, n: int, batches: Sequence[Int64s], capacity: int) -> Played:
        return play(policy, n, min(capacity, n), batches, self.context(n))
