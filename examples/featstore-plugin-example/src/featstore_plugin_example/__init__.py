"""Least frequently used, with ageing: an online cache policy for featstore in plain NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore import OnlinePolicy, PolicyContext

__all__ = ["LFU"]


class LFU(OnlinePolicy):
    """Evict the rows with the fewest hits; every eviction halves the counts, so that old fame fades. 4 bytes a slot."""

    slot_bytes = 4

    _hits: npt.NDArray[np.int32]  # -1 where a slot is empty

    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with ``capacity`` empty slots."""
        self._hits = np.full(capacity, -1, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._hits.nbytes

    def hit(self, slots: npt.NDArray[np.int32]) -> None:
        """Count a hit of every slot."""
        self._hits[slots] += 1

    def victims(self, n: int) -> npt.NDArray[np.int32]:
        """Empty the ``n`` slots with the fewest hits; of equals the lowest slots."""
        occupied = np.flatnonzero(self._hits >= 0)
        order = np.argsort(self._hits[occupied], kind="stable")
        chosen = occupied[order[:n]].astype(np.int32)
        self._hits[occupied] >>= 1
        self._hits[chosen] = -1
        return chosen

    def insert(self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int32]) -> None:
        """Occupy the slots, without hits so far."""
        self._hits[slots] = 0

    def _check(self) -> None:
        assert (self._hits >= -1).all()
