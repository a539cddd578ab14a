"""Least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore._core import policies as _core
from featstore.cache.base import OnlinePolicy, PolicyContext, register_policy

__all__ = ["LRU"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MAX_SLOTS = 2**30  # positions in the log fit an int32


@register_policy("lru")
class LRU(OnlinePolicy):
    """Evict the rows whose last use is longest ago; within a batch, hits come before admissions, each in the batch's order.

    Notes
    -----
    The policy keeps a log of uses instead of a linked list; an entry counts only if it is its slot's last use. A hit is one
    sequential and one random store. The log has twice the capacity, and is compacted when it is full, at a constant cost a use.
    12 bytes a slot.
    """

    slot_bytes = 12

    _log: Int32s
    _last_use: Int32s
    _state: Int64s  # first and past-the-last entry of the log

    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with ``capacity`` empty slots."""
        if capacity > MAX_SLOTS:
            raise ValueError(f"lru has at most {MAX_SLOTS} slots, not {capacity}")
        self._log = np.empty(2 * capacity, np.int32)
        self._last_use = np.full(capacity, -1, np.int32)
        self._state = np.zeros(2, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._log.nbytes + self._last_use.nbytes

    def hit(self, slots: Int32s) -> None:
        """Make the slots the most recently used."""
        _core.lru_use(slots, False, self._log, self._last_use, self._state)

    def victims(self, n: int) -> Int32s:
        """Empty the ``n`` least recently used slots."""
        out = np.empty(n, np.int32)
        _core.lru_victims(out, self._log, self._last_use, self._state)
        return out

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """Occupy the slots; they are the most recently used."""
        _core.lru_use(slots, True, self._log, self._last_use, self._state)

    def _check(self) -> None:
        begin, end = self._state.tolist()
        assert 0 <= begin <= end <= len(self._log)
        occupied = np.flatnonzero(self._last_use >= 0)
        uses = self._last_use[occupied]
        assert not len(uses) or (begin <= uses.min() and uses.max() < end)
        assert (self._log[uses] == occupied).all()
