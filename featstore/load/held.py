"""The memory of a loader that its batches hold."""

from __future__ import annotations

from featstore.config import Budget
from featstore.strategies.requests import BATCHES

__all__ = ["Held"]


class Held:
    """Bytes of a loader's memory, released after the last batch object that refers to them has died.

    Parameters
    ----------
    share : Budget
        The loader's memory.
    n_bytes : int

    Raises
    ------
    BudgetError
        They are not available.
    """

    def __init__(self, share: Budget, n_bytes: int) -> None:
        self._reservation = share.reserve(BATCHES, n_bytes, owner=self)

    def resize(self, n_bytes: int) -> None:
        """Hold ``n_bytes`` from now on, or raise BudgetError."""
        self._reservation.resize(n_bytes)
