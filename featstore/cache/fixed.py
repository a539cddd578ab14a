"""Rows that stay: a static policy's choice, as plans without changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.cache.planned import NO_ROWS, PlannedBatch, PlannedPolicy, Window
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

    def __init__(self, static: StaticPolicy) -> None:
        self.static = static
        self._map = RowMap(0)

    @property
    def name(self) -> str:
        """The static policy's."""
        return self.static.name

    @property
    def nbytes(self) -> int:
        """Bytes of the row map."""
        return self._map.nbytes

    @staticmethod
    def best(scores: npt.NDArray[np.generic], capacity: int, without: RowMap | None = None) -> Int64s:
        """Choose the ``capacity`` rows of highest score, the best first; of those that have no slot in ``without``."""
        rows = top_rows(scores, capacity) if without is None else top_rows_beside(scores, capacity, without)
        return rows[np.argsort(scores[rows], kind="stable")[::-1]]

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        """Begin with ``residents``, which stay."""
        self._map = RowMap(context.n if len(residents) else 0)
        if len(residents):
            self._map.assign(residents, np.arange(len(residents), dtype=np.int32))

    def plan(self, window: Window) -> Iterator[PlannedBatch]:
        """Yield where each row of a batch is."""
        rows = self._map
        for b in range(window.n_planned):
            ids = window.ids(b).astype(np.int64, copy=False)
            yield PlannedBatch(rows.lookup(ids) if len(rows) else np.full(len(ids), -1, np.int32), NO_CHANGES)

    def keep_memory(self, keep: bool) -> None:
        """Drop the map where it may not be kept: :meth:`start` makes it anew."""
        if not keep:
            self._map = RowMap(0)
