"""The model of an epoch against whole epochs: what policies load, at sizes of the cache that a few batches do not fill."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.estimate.epochmodel import EpochModel
from featstore.estimate.unseen import count_accesses
from featstore.plan.trace import Trace


def counts_of(trace: Trace, n_batches: int) -> np.ndarray:
    return count_accesses(trace.head(n_batches))[1]


@pytest.mark.parametrize("policy", ["belady", "sieve"])
@pytest.mark.parametrize("power", [1, 3, 6])
def test_what_an_epoch_loads_follows_from_counts_of_eight_batches(power: int, policy: str) -> None:
    """The epoch is simulated whole; rows are requested alike, or some far more often than others."""
    n, n_batches = 20_000, 100
    rng = np.random.default_rng(0)
    names = rng.permutation(n)
    whole = Trace([names[np.unique((n * rng.random(2000) ** power).astype(np.int64))] for _ in range(n_batches)], n)
    model = EpochModel.like(counts_of(whole, 8), n_batches, 1 << 16)
    assert model.trace.n_accesses == pytest.approx(1 << 16, rel=0.03)
    assert model.part == pytest.approx((1 << 16) / whole.n_accesses, rel=0.03)
    for share in (0.02, 0.1, 0.4):
        capacity = round(share * n)
        loads = featstore.simulate(whole, capacity, policy).sum() / whole.n_accesses
        found = model.share(featstore.simulate(model.trace, model.rows(capacity), policy))
        assert found == pytest.approx(loads, rel=0.12, abs=0.01), share


def test_rows_that_nothing_requests_are_not_requested() -> None:
    """Most rows are never asked for: the counts tell, once most of the others are known."""
    rng = np.random.default_rng(0)
    whole = Trace([np.unique(rng.integers(0, 1000, 900)) for _ in range(50)], 50_000)
    model = EpochModel.like(counts_of(whole, 8), 50, 1 << 20)
    assert model.part == 1
    assert len(np.unique(np.concatenate(list(model.trace)))) == pytest.approx(1000, rel=0.05)


@given(rows=st.lists(st.integers(0, 300), min_size=2, max_size=40), n_batches=st.integers(1, 60), most=st.integers(1, 2000))
def test_any_counts_have_a_model(rows: list[int], n_batches: int, most: int) -> None:
    """Batches of distinct rows, as many as asked for, the same each time."""
    model = EpochModel.like(np.array(rows), n_batches, most)
    assert len(model.trace) == n_batches
    assert 0 < model.part <= 1
    for ids in model.trace:
        assert len(np.unique(ids)) == len(ids)
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < model.trace.n
    again = EpochModel.like(np.array(rows), n_batches, most)
    assert all(np.array_equal(one, other) for one, other in zip(model.trace, again.trace, strict=True))
    assert model.rows(0) == 0
    assert model.rows(10**9) <= model.trace.n
    assert model.share(np.zeros(n_batches, np.int64)) == 0
