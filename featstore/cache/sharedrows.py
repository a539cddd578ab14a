"""A static cache whose rows and row map lie in memory that a machine's ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from featstore.budget import Budget
from featstore.cache.base import OnlinePolicy, Policy, PolicyContext, StaticPolicy
from featstore.cache.rowmap import RowMap
from featstore.cache.select import choose_rows
from featstore.cache.table import FeatureCache, Read
from featstore.gather.sharedmemory import Allocate, shared_arrays

__all__ = ["SharedCache", "check_shareable", "share_of"]


def check_shareable(policy: str | Policy | type[Policy], chosen: Policy) -> StaticPolicy:
    """Check that all ranks would choose the same rows; ValueError unless ``policy`` is the name or class of a static one."""
    if not isinstance(chosen, StaticPolicy):
        kind = "an online" if isinstance(chosen, OnlinePolicy) else "a planned"
        raise ValueError(f"a shared cache never changes: policy {chosen.name!r} is {kind} one, whose cache is each rank's own")
    if isinstance(policy, Policy):
        raise ValueError("give the policy of a shared cache by its name or class: ranks cannot compare instances")
    return chosen


def share_of(n_bytes: int, ranks: int) -> int:
    """Count the bytes of shared memory that the budget of each of ``ranks`` processes counts."""
    return -(-n_bytes // ranks)


class SharedCache(FeatureCache):
    """A static cache over shared arrays, filled once by the first of its ranks. Its budget counts the rank's share.

    Parameters
    ----------
    capacity, row_bytes, n, policy, context, budget, name
        As for :class:`FeatureCache`; ``capacity`` is at least 1. Only the rank that fills the cache asks the policy.
    read : callable
        Reads rows, as for :meth:`FeatureCache.fill`.
    recipe : mapping
        All else that decides which rows the cache holds, and their bytes, as JSON.
    ranks : int
        Number of processes that share the cache.

    Raises
    ------
    PluginError
        The policy failed in this rank.
    BudgetError
        This rank has no memory for its share, or for scoring the rows.
    BusyError, OSError
        See :func:`~featstore.gather.sharedmemory.shared_arrays`.
    """

    def __init__(
        self,
        capacity: int,
        row_bytes: int,
        n: int,
        policy: StaticPolicy,
        context: PolicyContext,
        budget: Budget,
        read: Read,
        *,
        name: str,
        recipe: Mapping[str, Any],
        ranks: int,
    ) -> None:
        super().__init__(0, row_bytes, n, policy, context, name=name)
        n_filled = 0

        def make(allocate: Allocate) -> None:
            nonlocal n_filled
            # Without credit for the cache's own bytes: shared pages are there before they are touched.
            rows, _ = choose_rows(policy, context, n, capacity, by_score=False, budget=budget)
            array = allocate("rows", capacity * row_bytes, np.uint8).reshape(capacity, row_bytes)
            row_map = RowMap(n, allocate("slot_of_row", n, np.int32))
            row_map.slot_of_row.fill(-1)
            self.read_into(rows, array, read)
            row_map.assign_first(rows)
            n_filled = len(rows)

        share = share_of(self.least_bytes(capacity, row_bytes, n, policy), ranks)
        with budget.reserve(name, share, owner=self).kept() as self._reservation:
            made_of = {**recipe, "capacity": capacity, "row_bytes": row_bytes, "n": n}
            self._shared = shared_arrays(f"the shared {name}", made_of, ranks, make)
        self.budget, self._share = budget, share
        self.array = self._shared.arrays["rows"].reshape(capacity, row_bytes)
        self.map = RowMap(n, self._shared.arrays["slot_of_row"])
        self.capacity = self._n_filled = capacity
        self._counts["fill_rows"] = n_filled

    @property
    def nbytes(self) -> int:
        """Bytes that the rank's budget counts: its share of the array and the row map."""
        return 0 if self._is_closed else self._share

    def close(self) -> None:
        """See :meth:`FeatureCache.close`; the last rank that closes the cache frees its memory."""
        super().close()
        self._shared.close()
