"""A model of an epoch: batches drawn independently, with the rates at which a few sampled batches request rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featstore.distinct import distinct
from featstore.plan.trace import Trace

__all__ = ["MODEL_BYTES", "EpochModel"]

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

MODEL_BYTES = 128  # per access of the model, while it is drawn and simulated
RATES = 40  # of rows that are requested at all
RAREST = 0.2  # requests an epoch, at the lowest rate
OFTENEST = 4.0  # requests a batch, at the highest rate: 98 % of the batches request such a row
STEPS = 300  # the fit has settled


@dataclass(frozen=True)
class EpochModel:
    """Batches that are drawn like an epoch's, over a part of its rows.

    A part of the rows with the same part of the cache has the misses of all: what a policy keeps depends on how often rows are
    requested, not on how many there are.

    Parameters
    ----------
    trace : Trace
        The batches.
    part : float
        The part of the rows.
    """

    trace: Trace
    part: float

    @classmethod
    def like(cls, rows_of: Int64s, n_batches: int, most: int) -> EpochModel:
        """Draw ``n_batches`` batches of ``most`` accesses together; takes :data:`MODEL_BYTES` for each.

        ``rows_of`` has the number of rows with each count of requests, int64 [n_sampled + 1], rows without a request included.
        """
        rates, weights = _fitted(rows_of, n_batches)
        part = min(1.0, most / max(1.0, float((rates * weights).sum()) * n_batches))
        rng = np.random.default_rng(0)
        rows = np.floor(part * weights + rng.random(len(weights))).astype(np.int64)  # on average as many as there should be
        # A row has a Poisson process; a batch sees whether there was a request at all. Rows of one rate share their requests.
        requests = rng.poisson(-n_batches * np.log1p(-rates) * rows)
        first = np.cumsum(rows) - rows
        asked = np.repeat(first, requests) + rng.integers(0, np.repeat(np.maximum(1, rows), requests))
        names, asked = np.unique(asked, return_inverse=True)
        n = max(1, len(names))
        asked = rng.permutation(n)[asked]  # or rows would lie in order of their rates
        keys = distinct(rng.integers(0, n_batches, len(asked)) * n + asked)
        bounds, ids = np.searchsorted(keys, n * np.arange(n_batches + 1)), keys % n
        return cls(Trace.reading(lambda k: ids[bounds[k] : bounds[k + 1]], np.diff(bounds), n), part)

    def rows(self, capacity: int) -> int:
        """Convert a cache's rows to those of the model's cache."""
        return min(self.trace.n, round(self.part * capacity))

    def share(self, loaded: Int64s) -> float:
        """Convert the rows loaded in each batch of the model to the share of an epoch's accesses that are loaded."""
        return float(loaded.sum()) / max(1, self.trace.n_accesses)


def _fitted(rows_of: Int64s, n_batches: int) -> tuple[Float64s, Float64s]:
    """Fit the number of rows with each rate of requests to the counts of the sampled batches, by expectation maximisation.

    A row of rate ``p`` is requested by each batch with this probability, so its count is binomial. Rows may also have the rate 0.
    """
    n_sampled, total = len(rows_of) - 1, max(1, int(rows_of.sum()))
    rates = np.concatenate([[0.0], -np.expm1(-np.geomspace(min(RAREST / n_batches, OFTENEST), OFTENEST, RATES))])
    counts = np.arange(n_sampled + 1)[:, None]
    logs = counts * np.log(np.maximum(rates, 1e-300)) + (n_sampled - counts) * np.log1p(-rates)
    likely = np.exp(logs - logs.max(axis=1, keepdims=True))
    weights, seen = np.full(len(rates), 1 / len(rates)), np.maximum(rows_of, 0) / total
    for _ in range(STEPS):
        of_count = likely * weights
        weights = (seen / np.maximum(of_count.sum(axis=1), 1e-300)) @ of_count
    return rates, total * weights
