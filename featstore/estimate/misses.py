"""The share of a batch's rows that a planned cache lacks, by the cache's size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ALL_MISSED", "UNKNOWN", "MissCurves", "Misses"]


@dataclass(frozen=True)
class Misses:
    """Share of a batch's rows that a full planned cache loads, counted at some sizes; between them the chord is an upper bound.

    Parameters
    ----------
    capacities : tuple of int
        Rows of the cache, ascending.
    shares : tuple of float
        Shares of a batch's rows, with a margin, since batches differ.
    """

    capacities: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def share(self, capacity: int) -> float:
        """Interpolate the share that a cache of ``capacity`` rows lacks."""
        return float(np.interp(capacity, (0, *self.capacities), (1.0, *self.shares)))


ALL_MISSED = Misses()


@dataclass(frozen=True)
class MissCurves:
    """Misses of an epoch: of a cache whose plans look ahead, and of a cache that keeps the rows of the most out-edges.

    The misses by degree stand for any static policy.
    """

    planned: Misses = ALL_MISSED
    by_degree: Misses = ALL_MISSED

    def of(self, looks_ahead: bool) -> Misses:
        """Select the misses of plans that look ahead, or by degree."""
        return self.planned if looks_ahead else self.by_degree


UNKNOWN = MissCurves()
