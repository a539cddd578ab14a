"""SIEVE: one queue in order of insertion, and a hand that moves from the oldest to the newest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore._core import policies as _core
from featstore.cache.base import OnlinePolicy, PolicyContext, register_policy

__all__ = ["Sieve"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MAX_SLOTS = 2**30


@register_policy("sieve")
class Sieve(OnlinePolicy):
    """Move a hand over the queue: visited rows lose their mark and stay in place, unvisited rows are evicted.

    New rows go to the queue's head.

    Notes
    -----
    The queue is a log with holes where rows were evicted, of twice the capacity and compacted when it is full. 9 bytes a slot.

    References
    ----------
    Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI 2024, algorithm 1.
    """

    slot_bytes = 9
    groups = 10

    _log: Int32s  # oldest first, -1 for a hole
    _mark: npt.NDArray[np.uint8]  # 0 empty, 1 occupied, 2 occupied and visited
    _state: Int64s  # first and past-the-last entry of the log; the hand's entry, -1 to start at the oldest
    _n_occupied: int

    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with ``capacity`` empty slots."""
        if capacity > MAX_SLOTS:
            raise ValueError(f"sieve has at most {MAX_SLOTS} slots, not {capacity}")
        self._log = np.empty(2 * capacity, np.int32)
        self._mark = np.zeros(capacity, np.uint8)
        self._state = np.array([0, 0, -1], np.int64)
        self._n_occupied = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._log.nbytes + self._mark.nbytes

    def hit(self, slots: Int32s) -> None:
        """Mark the slots visited."""
        _core.mark_visited(slots, self._mark)

    def victims(self, n: int) -> Int32s:
        """Empty the ``n`` slots that the hand finds unvisited."""
        out = np.empty(n, np.int32)
        _core.sieve_victims(out, self._n_occupied, self._log, self._mark, self._state)
        self._n_occupied -= n
        return out

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """Occupy the slots, at the head of the queue, unvisited."""
        _core.sieve_insert(slots, self._log, self._mark, self._state)
        self._n_occupied += len(slots)

    def _check(self) -> None:
        begin, end, hand = self._state.tolist()
        assert 0 <= begin <= end <= len(self._log)
        queue = self._log[begin:end]
        occupied = np.flatnonzero(self._mark)
        assert (np.sort(queue[queue >= 0]) == occupied).all()
        assert len(occupied) == self._n_occupied
        assert hand == -1 or (begin <= hand < end and self._log[hand] >= 0)
