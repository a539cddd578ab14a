"""Rows that stay: a static policy's choice, as plans without changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore._core.distinct import Ranks
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch, PlannedPolicy
from featstore.cache.rowmap import RowMap
from featstore.cache.select import top_rows, top_rows_beside
from featstore.gather.plan import NO_CHANGES

__all__ = ["FixedRows"]

Int64s = npt.NDArray[np.int64]


class FixedRows(PlannedPolicy):
    """Plan no changes: the rows that a static policy scores highest are in the cache from the first batch to the last.

    Parameters
    ----------
    static : StaticPolicy

    References
    ----------
    The baselines Ginex-PG and Ali+PG of Ginex (VLDB 2022), section 5.
    """

    looks_ahead: ClassVar[bool] = False
    _ranks: Ranks | None

    def __init__(self, static: StaticPolicy) -> None:
        self.static = static
        self._drop()

    @property
    def name(self) -> str:
        """Name of the static policy."""
        return self.static.name

    @property
    def nbytes(self) -> int:
        """Bytes of the table: a quarter byte a row of the field, and 8 a slot where the rows are not ascending."""
        return self._memory.nbytes + self._slots.nbytes

    @staticmethod
    def best(scores: npt.NDArray[np.generic], capacity: int, without: RowMap | None = None) -> Int64s:
        """Choose the ``capacity`` rows of highest score, the best first; rows with a slot in ``without`` are left out."""
        rows = top_rows(scores, capacity) if without is None else top_rows_beside(scores, capacity, without)
        return rows[np.argsort(scores[rows], kind="stable")[::-1]]

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        """Begin with ``residents``, which stay."""
        self._drop()
        if not len(residents):
            return
        self._memory = np.zeros(Ranks.words_for(context.n), np.uint64)
        self._ranks = Ranks(self._memory, context.n)
        self._ranks.mark(residents)
        self._ranks.number()
        if np.any(residents[1:] < residents[:-1]):
            self._slots = np.argsort(residents)  # of the row of each rank

    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        """Yield the slots of each batch's rows, and no changes."""
        for b in range(horizon.n_planned):
            yield self.of_batch(horizon.ids(b))

    def of_batch(self, ids: npt.NDArray[Any]) -> PlannedBatch:
        """Plan one batch of distinct rows; no other batch matters."""
        return PlannedBatch(self._slots_of(ids), NO_CHANGES)

    def _slots_of(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        if self._ranks is None:
            return np.full(len(ids), -1, np.int32)
        found = np.empty_like(ids)
        self._ranks.of(ids, found)
        if len(self._slots):
            found = np.where(found < 0, -1, self._slots[found])
        return found.astype(np.int32, copy=False)

    def keep_memory(self, keep: bool) -> None:
        """Drop the table unless ``keep``; :meth:`start` makes it anew."""
        if not keep:
            self._drop()

    def _drop(self) -> None:
        self._memory = np.zeros(0, np.uint64)
        self._slots = np.zeros(0, np.int64)
        self._ranks = None
