"""Belady by the CSR form of next accesses: what ``belady`` loads, batch by batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.plan.simulate import simulate
from tests.test_belady import optimal_loads, traces


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


@pytest.mark.parametrize("strategy", [featstore.Superbatch, featstore.Streamed])
def test_epochs_under_it(small: SimpleNamespace, strategy: type[featstore.Superbatch]) -> None:
    """An epoch that is one superbatch: rows bit for bit, and as many loaded; in several superbatches rows bit for bit."""
    loaded = {}
    for policy in ("belady", "belady_csr"):
        for length in (12, 5):
            with featstore.open(small.path, memory="64MiB") as g:
                chosen = strategy(cache=0.1, policy=policy, length=length)
                sampler = featstore.NeighborSampler(g, [4, 3], seed=2)
                with featstore.Loader(g, sampler, np.arange(600), 50, strategy=chosen, labels=None) as loader:
                    for batch in loader:
                        assert np.array_equal(batch.x.numpy(), small.x[batch.input_ids.numpy()])
                    loaded[policy, length] = loader.stats()["hits"]
    assert loaded["belady_csr", 12] == loaded["belady", 12]
