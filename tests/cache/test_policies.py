"""The policies: compiled against plain-Python references, scores against their formulas, selection against a sort."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import featstore
from featstore.cache.base import Int64s, PolicyContext
from featstore.cache.clock import Clock
from featstore.cache.cross_partition import CrossPartition
from featstore.cache.degree import Degree
from featstore.cache.frequency import Frequency
from featstore.cache.in_out_ratio import InOutRatio
from featstore.cache.lru import LRU
from featstore.cache.random_rows import RandomRows
from featstore.cache.rowmap import RowMap
from featstore.cache.s3fifo import S3FIFO
from featstore.cache.saved_io import SavedReads
from featstore.cache.select import top_rows
from featstore.cache.sieve import Sieve
from featstore.cache.slots import SlotTable
from featstore.errors import PluginError
from featstore.testing import OnlinePolicyContract, StaticPolicyContract, play, traces
from tests.support.reference_policies import ReferenceClock, ReferenceLRU, ReferenceS3FIFO, ReferenceSieve
from tests.support.refusing import refuses
from tests.support.sampled import covering

PAIRS = [(LRU, ReferenceLRU), (Clock, ReferenceClock), (Sieve, ReferenceSieve), (S3FIFO, ReferenceS3FIFO)]


def suite(base: Any, name: str, policy: Any, *golden: int) -> Any:
    """The contract of a policy; misses of each batch of the golden trace, or the rows that are kept."""
    return type("Suite", (base,), {"registered_name": name, "make": policy, "golden": golden or None})


# Misses of each batch of the golden trace. They change only where a policy changes, which is then worth a line in the CHANGELOG.
TestLRU = suite(OnlinePolicyContract, "lru", LRU, 3, 4, 5, 4, 4, 5, 4, 3, 4, 3, 2, 4, 2, 4, 3, 18, 8, 7, 4, 1, 1, 1, 3, 4)
TestClock = suite(OnlinePolicyContract, "clock", Clock, 3, 4, 5, 4, 4, 5, 3, 3, 4, 3, 2, 4, 2, 4, 3, 18, 8, 7, 4, 1, 1, 1, 3, 4)
TestSieve = suite(OnlinePolicyContract, "sieve", Sieve, 3, 4, 5, 4, 4, 5, 3, 2, 4, 2, 2, 4, 2, 4, 2, 21, 7, 5, 6, 1, 0, 1, 3, 4)
TestS3FIFO = suite(
    OnlinePolicyContract, "s3fifo", S3FIFO, 3, 4, 5, 4, 4, 5, 4, 2, 4, 2, 2, 4, 4, 5, 3, 19, 6, 6, 7, 1, 0, 1, 4, 4
)
TestDegree = suite(StaticPolicyContract, "degree", Degree, 4, 6, 8, 9, 15, 17, 19, 27, 29, 31, 38, 40, 42, 50, 52, 54)
TestInOutRatio = suite(
    StaticPolicyContract, "in_out_ratio", InOutRatio, 4, 8, 13, 15, 19, 27, 29, 30, 31, 32, 38, 40, 43, 49, 52, 54
)
TestCrossPartition = suite(
    StaticPolicyContract, "cross_partition", CrossPartition, 4, 8, 10, 13, 15, 19, 27, 29, 30, 31, 32, 38, 40, 49, 52, 54
)
TestFrequency = suite(StaticPolicyContract, "frequency", Frequency, 2, 7, 9, 14, 19, 21, 26, 28, 33, 38, 40, 45, 50, 52, 57, 59)
TestSavedReads = suite(StaticPolicyContract, "saved_io", SavedReads, 2, 7, 9, 14, 19, 21, 26, 28, 33, 38, 40, 45, 50, 52, 57, 59)
TestRandomRows = suite(StaticPolicyContract, "random", RandomRows)


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@given(trace=traces(), share=st.floats(0, 1))
def test_victims_equal_the_reference(policy: Any, reference: Any, trace: tuple[int, list[Int64s]], share: float) -> None:
    n, batches = trace
    capacity = max(1, int(n * share))
    assert play(policy(), n, capacity, batches) == play(reference(), n, capacity, batches)


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@pytest.mark.parametrize("capacity", [1, 2, 7, 50, 333])
def test_long_skewed_traces_equal_the_reference(policy: Any, reference: Any, capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    n = 1000
    batches = [np.unique((n * rng.random(rng.integers(1, 120)) ** 3).astype(np.int64)) for _ in range(150)]
    for ids in batches:
        rng.shuffle(ids)
    assert play(policy(), n, capacity, batches) == play(reference(), n, capacity, batches)


@pytest.mark.stress
@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@given(trace=traces(max_rows=300, max_batches=60, max_batch=80), share=st.floats(0, 1))
def test_longer_traces_equal_the_reference(policy: Any, reference: Any, trace: tuple[int, list[Int64s]], share: float) -> None:
    n, batches = trace
    capacity = max(1, int(n * share))
    assert play(policy(), n, capacity, batches) == play(reference(), n, capacity, batches)


def loads(policy: Any, capacity: int, batches: list[Int64s]) -> int:
    return int(featstore.simulate(batches, capacity, policy, n=1000).sum())


def one_at_a_time(reference: Any, capacity: int, batches: list[Int64s]) -> int:
    """Rows loaded where each row of the batches is a batch: a table in plain Python around a reference."""
    reference.start(capacity, PolicyContext(1000, 4))
    slot_of: dict[int, int] = {}
    row_of: dict[int, int] = {}
    n_loaded = 0
    for row in np.concatenate(batches).tolist():
        if row in slot_of:
            reference.hit(np.array([slot_of[row]], np.int32))
            continue
        n_loaded += 1
        slot = len(slot_of)
        if slot == capacity:
            (slot,) = reference.victims(1).tolist()
            del slot_of[row_of[slot]]
        reference.insert(np.array([row]), np.array([slot], np.int32))
        slot_of[row], row_of[slot] = slot, row
    return n_loaded


class Tenths(ReferenceLRU):
    groups = 10


@pytest.fixture(scope="module")
def wide() -> list[Int64s]:
    """Batches of about 500 skewed rows in random order."""
    rng = np.random.default_rng(0)
    rank = rng.permutation(1000)
    batches = []
    for _ in range(60):
        rows = rank[(1000 * rng.random(900) ** 2).astype(np.int64)]
        batches.append(rows[np.sort(np.unique(rows, return_index=True)[1])])
    return batches


@pytest.mark.parametrize(("pair", "capacity"), covering(PAIRS, [50, 100, 200, 350]))
def test_batches_wider_than_the_cache_load_no_more_than_one_row_at_a_time(pair, capacity, wide) -> None:
    """Decisions within a batch are worth as much as what it decides between rows; a batch's hits are known at once."""
    policy, reference = pair
    wide = wide[:20]
    rows = [ids[i : i + 1] for ids in wide for i in range(len(ids))]
    expected = one_at_a_time(reference(), capacity, wide)
    assert loads(policy(), capacity, rows) == expected
    assert loads(policy(), capacity, wide) <= 1.005 * expected


@pytest.mark.parametrize("capacity", [50, 100, 200])
def test_policies_differ_where_a_batch_misses_more_than_they_hold(capacity: int, wide: list[Int64s]) -> None:
    found = {policy: loads(policy(), capacity, wide) for policy, _ in PAIRS}
    assert len(set(found.values())) == len(PAIRS)
    assert max(found[Sieve], found[S3FIFO]) < 0.99 * found[LRU]


@given(trace=traces(max_batch=60), share=st.floats(0, 1))
def test_groups_make_no_difference_to_lru(trace: tuple[int, list[Int64s]], share: float) -> None:
    n, batches = trace
    capacity = max(1, int(n * share))
    assert play(LRU(), n, capacity, batches).misses == play(Tenths(), n, capacity, batches).misses


@pytest.mark.parametrize("groups", [0, -1, 2.0, None])
def test_groups_that_are_no_number_are_refused(groups: Any) -> None:
    policy = LRU()
    policy.groups = groups
    with pytest.raises(PluginError, match=f"policy 'lru': groups must be a whole number, at least 1, not {groups}"):
        SlotTable(4, RowMap(9), policy, PolicyContext(9, 4))


@pytest.mark.parametrize("policy", [LRU, Clock, Sieve, S3FIFO])
def test_wrong_slots_are_refused(policy: Any) -> None:
    made = policy()
    made.start(4, PolicyContext(100, 4))
    rows, slots = np.array([7, 8], np.int64), np.array([0, 1], np.int32)
    for wrong in ([0], [-1], [4], [2**31 - 1]):
        refuses(ValueError, "slot", lambda: made.hit(np.array(wrong, np.int32)))
        made.start(4, PolicyContext(100, 4))
    made.insert(rows, slots)
    refuses(ValueError, "slot", lambda: made.insert(rows, slots))
    made.start(4, PolicyContext(100, 4))
    made.insert(rows, slots)
    refuses(ValueError, "3 asked for, 2 occupied", lambda: made.victims(3))


@pytest.mark.parametrize("policy", [LRU, Sieve, S3FIFO])
def test_too_many_slots_are_refused_before_any_allocation(policy: Any) -> None:
    refuses(ValueError, "at most 1073741824 slots", lambda: policy().start(2**30 + 1, PolicyContext(2**40, 4)))


def context(**arrays: Any) -> PolicyContext:
    n = len(next(iter(arrays.values())))
    return PolicyContext(n, 4, **{f"{name}_of": partial(np.array, value) for name, value in arrays.items()})


def test_static_scores() -> None:
    assert Degree().scores(context(out_degree=[3, 0, 5])).tolist() == [3, 0, 5]
    assert Frequency().scores(context(counts=[3, 0, 5])).tolist() == [3, 0, 5]
    given_degrees = context(in_degree=[2, 0, 4, 0, 5], out_degree=[6, 100, 2, 0, 0])
    assert InOutRatio().scores(given_degrees).tolist() == [3, -1, 0.5, -1, 0]
    one, other = RandomRows().scores(PolicyContext(50, 4, seed=1)), RandomRows().scores(PolicyContext(50, 4, seed=2))
    assert (one == RandomRows().scores(PolicyContext(50, 4, seed=1))).all()
    assert (one != other).all()
    assert RandomRows().scores(PolicyContext(0, 4)).shape == (0,)


def test_unknown_arrays_are_named() -> None:
    for policy, missing in [
        (CrossPartition(), "in_degree|cross_out_degree"),
        (Degree(), "out_degree"),
        (Frequency(), "counts"),
        (InOutRatio(), "in_degree|out_degree"),
    ]:
        refuses(ValueError, missing, lambda: policy.scores(PolicyContext(3, 4)))


DTYPES = [np.bool_, np.int8, np.uint8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64]
FLOATS = DTYPES[-3:]


@given(
    scores=st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, st.integers(0, 40), elements={"allow_nan": False} if dtype in FLOATS else None)
    ),
    k=st.integers(-1, 45),
)
@example(scores=np.array([0.0, -0.0, 0.0, -0.0]), k=2)
@example(scores=np.array([np.inf, -np.inf, 0.0, np.inf]), k=1)
@example(scores=np.array([2**63, 2**63 + 1, 1], np.uint64), k=1)
@example(scores=np.array([2**53, 2**53 + 1], np.int64), k=1)
def test_top_rows_equal_a_stable_sort(scores: Any, k: int) -> None:
    order = sorted(range(len(scores)), key=lambda row: scores[row], reverse=True)  # stable: of equals the lowest row first
    assert top_rows(scores, k).tolist() == sorted(row for row in order[: max(k, 0)] if scores[row] > -np.inf)


def test_top_rows_over_chunks() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 1000, 600_001).astype(np.int32)
    for k in (1, 300_000, 600_000):
        order = np.lexsort((np.arange(len(scores)), -scores))[:k]
        assert (top_rows(scores, k) == np.sort(order)).all()


def test_top_rows_refuses() -> None:
    refuses(ValueError, "row 2 is NaN", lambda: top_rows(np.array([1.0, 2.0, np.nan]), 3))
    refuses(TypeError, "complex", lambda: top_rows(np.array([1j]), 1))
    refuses(ValueError, "shape", lambda: top_rows(np.zeros((2, 2)), 1))
