"""CLOCK: second chance over the slots as a ring."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore._core import policies as _core
from featstore.cache.base import OnlinePolicy, PolicyContext, register_policy

__all__ = ["Clock"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@register_policy("clock")
class Clock(OnlinePolicy):
    """Sweep the slots in a ring: a slot hit since the hand last passed loses its mark and stays; an unmarked slot is evicted.

    A new row is unmarked, so a row that is requested only once gets no second chance. 1 byte a slot.

    References
    ----------
    Corbató, "A Paging Experiment with the Multics System", 1968.
    """

    slot_bytes = 1
    groups = 10

    _mark: npt.NDArray[np.uint8]  # 0 empty, 1 occupied, 2 occupied and visited
    _hand: int

    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with ``capacity`` empty slots and the hand at slot 0."""
        self._mark = np.zeros(capacity, np.uint8)
        self._hand = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._mark.nbytes

    def hit(self, slots: Int32s) -> None:
        """Mark the slots."""
        _core.mark_visited(slots, self._mark)

    def victims(self, n: int) -> Int32s:
        """Empty the first ``n`` unmarked slots from the hand on."""
        out = np.empty(n, np.int32)
        self._hand = _core.clock_victims(out, self._mark, self._hand)
        return out

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """Occupy the slots, unmarked."""
        _core.mark_occupied(slots, self._mark)

    def _check(self) -> None:
        assert 0 <= self._hand < len(self._mark)
        assert (self._mark <= 2).all()
