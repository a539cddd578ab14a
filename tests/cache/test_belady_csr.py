"""Belady by the CSR form of next accesses: what ``belady`` loads, batch by batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.plan.simulate import simulate
from tests.cache.test_belady import optimal_loads, traces


@given(trace=traces(rows=20, batches=14), capacity=st.integers(0, 21))
def test_loads_are_those_of_brute_force(trace: tuple[int, list[list[int]]], capacity: int) -> None:
    n, batches = trace
    found = simulate([np.array(batch, np.int64) for batch in batches], capacity, "belady_csr", n=n)
    assert found.tolist() == optimal_loads(batches, min(capacity, n))


@pytest.mark.parametrize("share", [0.002, 0.02, 0.1, 0.5])
def test_it_loads_what_belady_loads(share: float) -> None:
    """Of skewed accesses, as hubs make them: in every batch."""
    rng = np.random.default_rng(5)
    n = 5_000
    ids = (n * rng.random((60, 1200)) ** 3).astype(np.int64)
    batches = [rng.permutation(np.unique(each)) for each in ids]
    loads = {policy: simulate(batches, int(share * n), policy, n=n).tolist() for policy in ("belady", "belady_csr")}
    assert loads["belady_csr"] == loads["belady"]
    assert sum(loads["belady"]) < sum(map(len, batches))
