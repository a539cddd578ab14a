"""The share of a batch's rows that a planned cache lacks, by the cache's size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ALL_MISSED", "UNKNOWN", "MissCurves", "Misses"]


@dataclass(frozen=True)
class Misses:
    """Share of the rows asked for that a cache lacks, counted at some sizes; between them the chord is an upper bound.

    Parameters
    ----------
    capacities : tuple of int
        Rows of the cache, ascending.
    shares : tuple of float
        Shares of a batch's rows, as memory and disk are provided for: with a margin, since batches differ.
    of_epochs : tuple of float, optional
        Shares of an epoch's rows, without a margin: fewer and fewer rows are requested for the first time. None: ``shares``.
    """

    capacities: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    of_epochs: tuple[float, ...] | None = None

    def share(self, capacity: int) -> float:
        """Interpolate the share of a batch's rows that a cache of ``capacity`` rows lacks."""
        return self._between(capacity, self.shares)

    def of_epoch(self, capacity: int) -> float:
        """Interpolate the share of an epoch's rows that a cache of ``capacity`` rows lacks."""
        return self._between(capacity, self.shares if self.of_epochs is None else self.of_epochs)

    def _between(self, capacity: int, shares: tuple[float, ...]) -> float:
        return float(np.interp(capacity, (0, *self.capacities), (1.0, *shares)))


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
