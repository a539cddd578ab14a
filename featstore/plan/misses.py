"""The share of a batch's rows that a planned cache lacks, by the cache's size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ALL_MISSED", "Misses"]


@dataclass(frozen=True)
class Misses:
    """What a planned cache loads of a batch once it is full, counted at some sizes; between them it is less than the chord.

    Parameters
    ----------
    capacities : tuple of int
        Rows, ascending.
    shares : tuple of float
        Of a batch's rows, with a margin, as batches differ.
    """

    capacities: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def share(self, capacity: int) -> float:
        """Return the share that a cache of so many rows lacks."""
        return float(np.interp(capacity, (0, *self.capacities), (1.0, *self.shares)))


ALL_MISSED = Misses()
