"""The share of a batch's rows that a planned cache lacks, by the cache's size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ALL_MISSED", "UNKNOWN", "MissCurves", "Misses"]


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


@dataclass(frozen=True)
class MissCurves:
    """What is known of an epoch's misses: where plans look ahead, and where the rows of most out-edges stay.

    Any static policy's are taken to be as many as those by degree.
    """

    planned: Misses = ALL_MISSED
    by_degree: Misses = ALL_MISSED

    def of(self, looks_ahead: bool) -> Misses:
        """Return one of both."""
        return self.planned if looks_ahead else self.by_degree


UNKNOWN = MissCurves()
