"""S3-FIFO: a small queue that filters rows used once, a main queue, and a ghost queue of the rows that the filter evicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore._core import policies as _core
from featstore.cache.base import OnlinePolicy, PolicyContext, register_policy

__all__ = ["S3FIFO"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MAX_SLOTS = 2**30


@register_policy("s3fifo")
class S3FIFO(OnlinePolicy):
    """Three FIFO queues: small (10 % of the slots), main (90 %) and ghost (as many rows as main has slots, without their bytes).

    A new row enters the small queue, or the main queue if the ghost queue holds it. Until the first eviction, rows also enter the
    main queue once the small queue has its share. At the small queue's tail, rows hit at least twice move to the main queue; the
    others are evicted, into the ghost queue. At the main queue's tail, a row that was hit goes round again with one hit less (at
    most three are counted). A victim comes from the main queue if that is over its share, or if the small queue is empty.

    Notes
    -----
    The ghost queue keeps the last evictions of the small queue in a ring, and finds a row in it by a hash table: at most 24 bytes
    a slot, whatever the number of rows; 17 more for the queues.

    References
    ----------
    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. The queue is chosen as in the authors'
    libCacheSim: in a full cache the choice is the same, and before that the main queue is filled, too.
    """

    slot_bytes = 41
    groups = 10

    _small: Int32s
    _main: Int32s
    _mark: npt.NDArray[np.uint8]  # bits 0-1 hits, bit 2 in the small queue, bit 3 in the main queue
    _row_of_slot: Int64s
    _ghost: Int64s
    _table: Int32s
    _state: Int64s  # head and length of small and main, next position of ghost

    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with ``capacity`` empty slots and no ghosts."""
        if capacity > MAX_SLOTS:
            raise ValueError(f"s3fifo has at most {MAX_SLOTS} slots, not {capacity}")
        self._main_limit = capacity - max(1, capacity // 10)
        self._small = np.empty(capacity, np.int32)
        self._main = np.empty(capacity, np.int32)
        self._mark = np.zeros(capacity, np.uint8)
        self._row_of_slot = np.full(capacity, -1, np.int64)
        self._ghost = np.full(self._main_limit, -1, np.int64)
        self._table = np.full(1 << (2 * self._main_limit).bit_length(), -1, np.int32)  # at most half full
        self._state = np.zeros(5, np.int64)
        self._most_small = capacity - self._main_limit

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self._small, self._main, self._mark, self._row_of_slot, self._ghost, self._table)
        return sum(array.nbytes for array in arrays)

    def _queues(self) -> tuple[Int32s, Int32s, npt.NDArray[np.uint8], Int64s, Int64s, Int32s, Int64s]:
        """List the state's arrays in the order of the core's arguments."""
        return self._small, self._main, self._mark, self._row_of_slot, self._ghost, self._table, self._state

    def hit(self, slots: Int32s) -> None:
        """Count a hit of each slot."""
        _core.s3fifo_hit(slots, self._mark)

    def victims(self, n: int) -> Int32s:
        """Empty ``n`` slots at the queues' tails."""
        if n:
            self._most_small = MAX_SLOTS
        out = np.empty(n, np.int32)
        _core.s3fifo_victims(out, self._main_limit, *self._queues())
        return out

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """Occupy the slots, at the small or main queue's head."""
        _core.s3fifo_insert(rows, slots, self._most_small, *self._queues())

    def _check(self) -> None:
        small_head, n_small, main_head, n_main, ghost_next = self._state.tolist()
        capacity = len(self._mark)
        small = self._small[(small_head + np.arange(n_small)) % capacity]
        main = self._main[(main_head + np.arange(n_main)) % capacity]
        assert (np.sort(small) == np.flatnonzero(self._mark & 4)).all()
        assert (np.sort(main) == np.flatnonzero(self._mark & 8)).all()
        assert n_small + n_main == np.count_nonzero(self._mark) == np.count_nonzero(self._row_of_slot >= 0)
        ghosts = np.flatnonzero(self._ghost >= 0)
        assert (np.sort(self._table[self._table >= 0]) == ghosts).all()
        assert len(np.unique(self._ghost[ghosts])) == len(ghosts)
        assert not set(self._ghost[ghosts].tolist()) & set(self._row_of_slot.tolist())
        assert ghost_next == 0 or ghost_next < len(self._ghost)
