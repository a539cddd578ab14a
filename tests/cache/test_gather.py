"""Gathers by plans that were made ahead: a cache that is gone by then is named, and no row is left out."""

from __future__ import annotations

import numpy as np
import pytest

from featstore.budget import Budget
from featstore.cache.gather import Gather
from featstore.cache.table import FeatureCache
from featstore.errors import ClosedError
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import BatchPlan, Tier, TierRows
from featstore.gather.sources import MemorySource

ROWS = np.arange(40, dtype=np.uint8).reshape(10, 4)
WANTED = np.array([1, 2, 7, 0])
PLANS = {
    "hits alone": BatchPlan(2, (TierRows(Tier.HOST, WANTED[:2]),)),
    "hits and misses": BatchPlan(
        4, (TierRows(Tier.HOST, WANTED[:2], np.array([0, 1])), TierRows(Tier.BASE, WANTED[2:], np.array([2, 3])))
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "closed"])
def test_a_plan_whose_cache_is_gone(plan: BatchPlan, is_dropped: bool) -> None:
    """``close`` in another thread drops the cache before it closes it; between the two, a batch may be gathered."""
    budget = Budget(10**6)
    cache = FeatureCache(3, 4, len(ROWS), None, budget=budget, name="cache of 'x'")
    cache.array[:] = ROWS[:3]
    gather = Gather(MemorySource(ROWS, 1), BufferPool(budget), 1)
    gather.use_cache(cache)
    rows = WANTED[: plan.n_rows]
    out = np.full((plan.n_rows, 4), 99, np.uint8)
    gather.planned(plan, lambda: rows, out)
    np.testing.assert_array_equal(out, ROWS[rows])

    if is_dropped:
        gather.use_cache(None)
    cache.close()
    with pytest.raises(ClosedError, match="host tier was closed" if is_dropped else "cache of 'x' was closed"):
        gather.planned(plan, lambda: rows, out)
