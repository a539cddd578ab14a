"""Estimates of the rows that an epoch has not requested yet, from the counts of its first batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.plan.trace import Trace

__all__ = ["count_accesses", "count_bytes", "distinct_rows"]

Int64s = npt.NDArray[np.int64]


def count_bytes(trace: Trace) -> int:
    """Return the bytes per row of the counts that :func:`count_accesses` holds."""
    return np.min_scalar_type(len(trace)).itemsize


def count_accesses(trace: Trace) -> tuple[npt.NDArray[np.unsignedinteger[Any]], Int64s, Int64s]:
    """Count the batches that request each row, in one pass over the batches.

    Returns the counts, :func:`count_bytes` a row; the number of rows with each count, int64 [n_batches + 1]; and for each batch
    the number of rows that no earlier batch requested.
    """
    counts: npt.NDArray[np.unsignedinteger[Any]] = np.zeros(trace.n, np.min_scalar_type(len(trace)))
    fresh = np.zeros(len(trace), np.int64)
    above = np.zeros(len(trace) + 1, np.int64)  # rows of a higher count; each of them once had this count
    for number, ids in enumerate(trace):
        found = counts.take(ids)
        counts.put(ids, found + found.dtype.type(1))
        times = np.bincount(found, minlength=len(above))
        above += times
        fresh[number] = times[0]
    return counts, -np.diff(above, prepend=trace.n), fresh


def distinct_rows(rows_of: Int64s, seen: int, n_batches: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Estimate the distinct rows that ``n_batches`` (at least ``seen``) batches request, from the number of rows of each count.

    The estimate is Good and Toulmin's series (Biometrika 1956) of the rows requested by one, two, three and four batches, as a
    continued fraction (Daley and Smith, Nature Methods 2013). The series diverges beyond twice as many batches, the fraction does
    not. If chance gives the fraction a pole, a shorter one is used, which predicts fewer rows.
    """
    first = rows_of[1 : 1 + (4 if seen > 3 else 2 if seen > 1 else 1)].astype(np.float64)  # an even length keeps it bounded
    known = float(rows_of[1:].sum())
    more = np.asarray(n_batches, np.float64) / max(1, seen) - 1
    if not len(first) or not first[0]:
        return np.full(more.shape, known)
    below = np.ones(more.shape)
    for coefficient in _fraction(first)[::-1]:
        below = 1 + coefficient * more / below
    found: npt.NDArray[np.float64] = np.minimum(float(rows_of.sum()), known + first[0] * more / below)
    return found


def _fraction(first: npt.NDArray[np.float64]) -> list[float]:
    """Compute c1, c2, c3 of ``a1 t / (1 + c1 t / (1 + c2 t / (1 + c3 t)))``, the series of which begins with ``first``.

    The series is ``a1 t - a2 t² + a3 t³ - a4 t⁴ + …``.
    """
    series = [value * (-1) ** k / first[0] for k, value in enumerate(first)]
    coefficients: list[float] = []
    while len(series) > 1:
        inverse = [1.0]  # of the series, term by term
        for k in range(1, len(series)):
            inverse.append(-sum(series[j] * inverse[k - j] for j in range(1, k + 1)))
        coefficients.append(inverse[1])
        if not inverse[1]:
            break
        series = [value / inverse[1] for value in inverse[1:]]
    sound = next((k for k, value in enumerate(coefficients) if value < 0), len(coefficients))
    return coefficients[: sound if sound == len(coefficients) else min(sound, 1)]
