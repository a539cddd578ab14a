"""Belady's replacement as Ginex writes it down: next accesses in CSR form, and a new cache state for each batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from featstore.cache.base import PolicyContext, register_policy
from featstore.cache.planned import NO_ROWS, Horizon, Int32s, Int64s, PlannedBatch, PlannedPolicy
from featstore.gather.plan import Changeset

__all__ = ["BeladyCsr"]


@register_policy("belady_csr")
class BeladyCsr(PlannedPolicy):
    """Keep the rows whose next use is nearest, batch by batch, by the CSR form of next accesses.

    The algorithm of the paper. After each batch the rows that are cached and those just loaded are the candidates. Each one's
    next batch is looked up in :class:`~featstore.cache.planned.NextAccess`, and as many as there are slots stay, those used
    soonest. It loads as many rows in each batch as ``"belady"``. Prefer ``"belady"``, which needs less memory, and no pass over
    the cache for each batch. This policy is the reference, for reading and for comparison.

    Notes
    -----
    Two passes over the horizon make the CSR form, a third one plans. A batch costs a pass over the cache and the batch, so a
    superbatch costs time linear in its batches. Memory: 20 bytes a row of the field, 4 an access of the horizon, 8 a slot, and
    about 40 bytes a candidate while a batch is planned.

    References
    ----------
    Ginex (VLDB 2022), section 3.4, figures 12 and 13. Two differences: a row that is not used again within the horizon is not
    admitted; of rows used in the same batch, rows that are cached already stay first, which saves insertions.
    """

    def __init__(self) -> None:
        self._slot_of: Int32s = np.empty(0, np.int32)  # of each row, -1 where it is not cached
        self._row_in: Int64s = NO_ROWS  # of each slot, -1 where it is free

    @property
    def nbytes(self) -> int:
        """Bytes held between horizons."""
        return self._slot_of.nbytes + self._row_in.nbytes

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        self._slot_of = np.full(context.n, -1, np.int32)
        self._row_in = np.full(min(capacity, context.n), -1, np.int64)
        self._row_in[: len(residents)] = residents
        self._slot_of[residents] = np.arange(len(residents), dtype=np.int32)

    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        for b in range(horizon.n_planned):
            ids = horizon.ids(b).astype(np.int64)
            slots = self._slot_of[ids]
            missed = np.flatnonzero(slots < 0)
            cached = self._row_in[self._row_in >= 0]
            candidates = np.concatenate([cached, ids[missed]])
            stays = self._nearest(horizon.next_access.next(candidates, b), len(cached), horizon.n_batches)
            positions = missed[stays[len(cached) :]]
            yield PlannedBatch(slots, self._change(ids, positions, cached[~stays[: len(cached)]]))

    def _nearest(self, nexts: Int64s, n_cached: int, n_batches: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Choose the candidates of the next cache state, one bool each; the first ``n_cached`` candidates are cached now."""
        keys = 2 * np.where(nexts < 0, n_batches, nexts)
        keys[n_cached:] += 1  # of rows used in the same batch, cached ones stay first
        may_stay = nexts >= 0
        may_stay[:n_cached] = True
        stays = np.zeros(len(nexts), bool)
        of = np.flatnonzero(may_stay)
        if len(of) > len(self._row_in):
            of = of[np.argpartition(keys[of], len(self._row_in))[: len(self._row_in)]] if len(self._row_in) else of[:0]
        stays[of] = True
        return stays

    def _change(self, ids: Int64s, positions: Int64s, leaving: Int64s) -> Changeset:
        """Evict the rows ``leaving``, admit the batch's rows at ``positions``, and return the changeset."""
        self._row_in[self._slot_of[leaving]] = -1
        self._slot_of[leaving] = -1
        rows = ids[positions]
        into = np.flatnonzero(self._row_in < 0)[: len(rows)].astype(np.int32)
        self._row_in[into] = rows
        self._slot_of[rows] = into
        return Changeset(in_rows=rows, in_positions=positions, in_slots=into, out_rows=leaving)
