"""Estimates from a few batches, and a few rows, of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.estimate import choice as choice_module
from featstore.estimate.choice import expected_hits, observe, static_hits
from featstore.estimate.epochmodel import MODEL_BYTES
from featstore.estimate.rowsample import RowSample, numbered
from featstore.estimate.unseen import count_accesses, distinct_rows
from featstore.plan.simulate import row_counts
from featstore.plan.trace import Trace
from tests.estimate.test_choice import skewed

pytestmark = pytest.mark.usefixtures("small_pieces")


@given(st.lists(st.sets(st.integers(0, 11)), max_size=8))
def test_a_tally_counts_batches_rows_and_what_is_new(batches: list[set[int]]) -> None:
    trace = Trace([sorted(batch) for batch in batches], 12)
    counts, rows_of, fresh = count_accesses(trace)
    assert counts.tolist() == row_counts(trace).tolist()
    assert rows_of.tolist() == np.bincount(counts, minlength=len(batches) + 1).tolist()
    assert fresh.tolist() == [len(set(batch).difference(*batches[:k])) for k, batch in enumerate(batches)]


@pytest.mark.parametrize("seen", [8, 25])
@pytest.mark.parametrize("power", [1.5, 3.0, 6.0])
def test_distinct_rows_of_many_batches_follow_from_a_few(seen: int, power: float) -> None:
    rng, n, total = np.random.default_rng(1), 40_000, 80
    batches = [np.unique((n * rng.random(1500) ** power).astype(np.int64)) for _ in range(total)]
    counts, rows_of, _ = count_accesses(Trace(batches[:seen], n))
    actual = np.cumsum(count_accesses(Trace(batches, n))[2])
    found = distinct_rows(rows_of, seen, np.arange(seen, total + 1))
    assert found[0] == (counts > 0).sum() == actual[seen - 1]
    assert found == pytest.approx(actual[seen - 1 :], rel=0.15)
    assert (np.diff(found) >= 0).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 500))
def test_distinct_rows_are_finite_and_grow(rows: list[int], never: int) -> None:
    """Whatever chance made of the counts: no pole, no fewer rows than were seen, no more than there are."""
    rows_of = np.array([never, *rows])
    found = distinct_rows(rows_of, len(rows), len(rows) * np.arange(1, 200))
    assert found[0] == sum(rows)
    assert (np.diff(found) >= -1e-9).all()
    assert found[-1] <= rows_of.sum() + 1e-9


def test_distinct_rows_of_nothing_and_of_one_batch() -> None:
    assert distinct_rows(np.array([5]), 0, 3) == 0
    assert distinct_rows(np.array([5, 0]), 1, 3) == 0
    assert distinct_rows(np.array([100, 5]), 1, 4) == 20
    assert distinct_rows(np.array([3, 5]), 1, 4) == 8  # there are no more


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_a_cache_that_a_few_batches_do_not_fill_learns_from_the_others(share: float) -> None:
    n, seen, total = 30_000, 8, 80
    batches = skewed(n, 2 * total, 900)
    rows_of = count_accesses(Trace(batches[:seen], n))[1]
    capacity = int(share * n)
    chosen = np.argsort(-row_counts(Trace(batches[:total], n)), kind="stable")[:capacity]
    kept = np.zeros(n, bool)
    kept[chosen] = True
    actual = sum(int(kept[ids].sum()) for ids in batches[total:])
    n_accesses = sum(len(ids) for ids in batches[total:])
    found = static_hits(rows_of, capacity, seen, total)
    by_few = expected_hits(rows_of, capacity, seen) * total / seen
    assert by_few <= found <= actual + 0.01 * n_accesses  # on the safe side
    assert found >= by_few * (1.05 if share in (0.3, 0.5) else 1)  # where there is room for what was not seen
    assert static_hits(rows_of, capacity, seen, seen) == pytest.approx(expected_hits(rows_of, capacity, seen))


@pytest.mark.parametrize("n", [1, 2, 1000, 4096, 5000])
@pytest.mark.parametrize("halvings", [0, 1, 3])
def test_a_part_of_the_rows(n: int, halvings: int) -> None:
    """It asks for its rows in the batches that ask for them, wherever they are numbered, and is as large as it should be."""
    rng = np.random.default_rng(n)
    trace = Trace([rng.permutation(n)[: rng.integers(0, n + 1)] for _ in range(12)] + [np.arange(n)], n)
    sample = RowSample(n, halvings)
    part, value = sample.trace(trace), sample.values(np.arange(n) * 7 + 1)
    assert part.n == sample.n == len(value)
    rows = sample.rows(part[12])  # the row that each number stands for
    assert len(rows) == len(np.unique(rows)) == (value > 0).sum()
    assert abs(len(rows) - n / 2**halvings) <= 2 + 0.02 * n
    for ids, of_part in zip(trace, part, strict=True):
        assert of_part.dtype == ids.dtype
        assert sorted(sample.rows(of_part)) == sorted(set(ids.tolist()) & set(rows.tolist()))
        assert (value[of_part] == sample.rows(of_part) * 7 + 1).all()
    assert part.lengths.tolist() == [len(ids) for ids in part]


@given(st.lists(st.sets(st.integers(0, 30)), max_size=8))
def test_rows_that_are_asked_for_get_numbers(batches: list[set[int]]) -> None:
    rows, found = numbered(Trace([sorted(batch) for batch in batches], 31))
    assert rows.tolist() == sorted(set().union(*batches)), "and no others"
    assert found.n == len(rows)
    assert [rows[ids].tolist() for ids in found] == [sorted(batch) for batch in batches]


def test_what_is_told_does_not_depend_on_rows_that_nobody_asks_for() -> None:
    """A field of many rows: memory for accesses, slots, and some bytes a row; told is the same of them."""
    few, many = 4000, 2_000_000
    batches, capacity = skewed(few, 10, 300), 200
    degree = np.zeros(many, np.uint16)
    degree[:few] = np.arange(few)[::-1]
    for total in (10, 40):
        options = {"row_bytes": 8, "n_batches": total, "online": "sieve", "capacity": capacity}
        budget = Budget(1 << 26)
        found = observe(Trace(batches, many), budget=budget, out_degree=degree, **options)
        near = observe(Trace(batches, few), budget=Budget(1 << 26), out_degree=degree[:few], **options)
        assert (found.n_top, found.n_degree, found.n_batches) == (near.n_top, near.n_degree, near.n_batches)
        assert found.n_static == near.n_static
        assert found.loads == pytest.approx(near.loads, rel=0.05)
        assert found.online_loads == near.online_loads
        assert budget.peak <= many + 100 * 3000 + 64 * capacity + MODEL_BYTES * 300 * total * (total > 10)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_what_a_part_of_the_rows_tells_is_near_what_all_do(monkeypatch: pytest.MonkeyPatch, is_sorted: bool) -> None:
    """Rows in order of use are a hard case: the most used lie side by side."""
    n, total = 50_000, 40
    names = np.arange(n) if is_sorted else np.random.default_rng(0).permutation(n)
    trace = Trace([names[ids] for ids in skewed(n, 10, 6000)], n)
    degree = np.empty(n, np.int64)
    degree[names] = np.arange(n)[::-1]
    for capacity in (1000, 10_000):

        def look(most: int, capacity: int = capacity) -> featstore.estimate.cost.Workload:
            monkeypatch.setattr(choice_module, "REPLAYED", most)
            options = {"row_bytes": 8, "n_batches": total, "online": "sieve", "out_degree": degree}
            return observe(trace, capacity=capacity, budget=Budget(1 << 26), **options)

        all_rows, some = look(1 << 40), look(trace.n_accesses // 6)
        assert (some.n_rows, some.capacity, some.n_accesses) == (n, capacity, all_rows.n_accesses)
        for what in ("n_static", "n_top", "n_degree", "loads", "online_loads", "online_again"):
            assert getattr(some, what) == pytest.approx(getattr(all_rows, what), rel=0.05), what
        for rows in (capacity // 8, capacity // 2, capacity):
            assert some.misses.planned.share(rows) == pytest.approx(all_rows.misses.planned.share(rows), rel=0.05)
        assert some.plan_s > 0


def test_a_part_of_the_rows_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "REPLAYED", 500)
    trace = Trace(skewed(3000, 10, 400), 3000)
    budget = Budget(1 << 22)
    observe(trace, row_bytes=8, capacity=300, budget=budget, n_batches=30)
    assert budget.used == 0
    assert budget.peak > 0
    small = Budget(10_000)
    with pytest.raises(featstore.BudgetError):
        observe(trace, row_bytes=8, capacity=300, budget=small, n_batches=30)
    assert small.used == 0
