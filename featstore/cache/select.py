"""The rows with the best scores, in memory bounded by the answer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import cache as _core
from featstore.budget import Budget
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.cache.rowmap import RowMap
from featstore.errors import FeatstoreError, PluginError
from featstore.registry import error_text

__all__ = ["check_scores", "choose_rows", "scores_there", "top_rows", "top_rows_beside"]

CHUNK_ROWS = 1 << 16
BESIDE_BYTES = 37  # that top_rows_beside() allocates per row
BY_SCORE_BYTES = 24  # that sorting by score allocates per row
_SIGN = np.uint64(1 << 63)


def _keys(scores: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Turn scores into unsigned keys that sort as they do; equal scores, ±0.0 too, get equal keys."""
    if scores.dtype.kind in "bu":
        return scores.astype(np.uint64)
    if scores.dtype.kind == "i":
        return scores.astype(np.int64).view(np.uint64) ^ _SIGN
    bits = (scores.astype(np.float64) + 0.0).view(np.uint64)  # + 0.0 turns -0.0 into 0.0
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | _SIGN)


def _first_nan(scores: npt.NDArray[Any]) -> int:
    """Find the first row whose score is NaN; -1 if there is none."""
    if scores.dtype.kind == "f":
        for first in range(0, len(scores), CHUNK_ROWS):
            is_nan = np.isnan(scores[first : first + CHUNK_ROWS])
            if is_nan.any():
                return first + int(is_nan.argmax())
    return -1


def check_scores(policy: StaticPolicy, answer: npt.ArrayLike, n: int) -> npt.NDArray[Any]:
    """Check a policy's scores of ``n`` rows; PluginError unless they are ``n`` real numbers of at most 8 bytes, without NaN."""
    scores = np.asarray(answer)
    if scores.shape != (n,) or scores.dtype.kind not in "buif" or scores.dtype.itemsize > 8:
        what = f"{scores.dtype} of shape {scores.shape}"
        raise PluginError(f"policy {policy.name!r}: scores must be {n} real numbers of at most 8 bytes, not {what}")
    nan = _first_nan(scores)
    if nan >= 0:
        raise PluginError(f"policy {policy.name!r}: the score of row {nan} is NaN")
    return scores


def top_rows(scores: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """Choose the ``k`` rows of highest score, ascending; of equal scores the lowest rows; all rows if there are fewer.

    Scores are boolean, integer or floating; rows scored -inf are left out. TypeError for other dtypes. ValueError for NaN names
    the row. The radix selection takes at most seven passes over the scores, in chunks, and memory for the answer and about a MiB,
    whatever n.
    """
    if scores.dtype.kind not in "buif" or scores.dtype.itemsize > 8:
        raise TypeError(f"scores must be integer or floating, of at most 8 bytes, not {scores.dtype}")
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape (n,), not {scores.shape}")
    n = len(scores)
    nan = _first_nan(scores)
    if nan >= 0:
        raise ValueError(f"the score of row {nan} is NaN")
    if k >= n:
        return _chosen(scores, np.arange(n, dtype=np.int64))
    if k <= 0:
        return np.empty(0, np.int64)
    # Find the k-th highest key digit by digit: `prefix` has its digits so far; `wanted` keys with that prefix are chosen.
    # Counts and degrees are small: the digits that all keys share need no pass.
    lowest, highest = (int(key) for key in _keys(np.array([scores.min(), scores.max()])))
    n_digits = next(each for each in range(5) if lowest >> 16 * each == highest >> 16 * each)
    prefix, wanted = highest >> 16 * n_digits, k
    for shift in range(16 * (n_digits - 1), -1, -16):
        counts = np.zeros(1 << 16, np.int64)
        for first in range(0, n, CHUNK_ROWS):
            _core.count_digits(_keys(scores[first : first + CHUNK_ROWS]), shift, prefix, counts)
        at_least = counts[::-1].cumsum()  # keys with one of the i+1 highest digits
        from_top = int(np.searchsorted(at_least, wanted))
        digit = 0xFFFF - from_top
        wanted -= int(at_least[from_top]) - int(counts[digit])
        prefix = prefix << 16 | digit
    rows = np.empty(k, np.int64)
    filled = 0
    for first in range(0, n, CHUNK_ROWS):
        filled, wanted = _core.take_top(_keys(scores[first : first + CHUNK_ROWS]), first, prefix, wanted, rows, filled)
    assert filled == k
    return _chosen(scores, rows)


def _chosen(scores: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Leave out rows whose score is -inf."""
    if scores.dtype.kind != "f" or not len(rows) or scores.min() > -np.inf:
        return rows
    return rows[scores[rows] > -np.inf]


def scores_there(context: PolicyContext, scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give rows that nobody may ask for the score -inf."""
    there = context.is_there
    return scores if there is None else np.where(there, scores, -np.inf)


def top_rows_beside(scores: npt.NDArray[Any], k: int, without: RowMap) -> npt.NDArray[np.int64]:
    """Choose the ``k`` rows of highest score among those that have no slot in ``without``, ascending; see :func:`top_rows`.

    Takes ``BESIDE_BYTES`` for each row of the answer and each row with a slot, besides the memory of :func:`top_rows`.
    """
    rows = top_rows(scores, k + int(np.count_nonzero(without.slot_of_row >= 0)))
    rows = rows[without.slot_of_row[rows] < 0]
    return rows[top_rows(scores[rows], k)]


def choose_rows(
    policy: StaticPolicy,
    context: PolicyContext,
    n: int,
    capacity: int,
    by_score: bool,
    without: RowMap | None = None,
    budget: Budget | None = None,
    paid_bytes: int = 0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Choose the ``capacity`` of ``n`` rows that a static policy scores highest, ascending, and their slots.

    ``by_score``: the best rows get the first slots; otherwise the slots are None, which stands for 0, 1 …. Rows with a slot in
    ``without`` are left out. ``budget`` pays for scores and scratch meanwhile, less ``paid_bytes``, which the caller has reserved
    and does not use yet. PluginError if the policy raised, or returned no valid scores.
    """
    n_bytes = policy.score_bytes * n + BY_SCORE_BYTES * capacity * by_score
    if without is not None:
        n_bytes += BESIDE_BYTES * (capacity + int(np.count_nonzero(without.slot_of_row >= 0)))
    name = f"scores of policy {policy.name!r}"
    with nullcontext() if budget is None else budget.reserve(name, max(0, n_bytes - paid_bytes)):
        try:
            scores = scores_there(context, check_scores(policy, policy.scores(context), n))
            rows = top_rows(scores, capacity) if without is None else top_rows_beside(scores, capacity, without)
            if not by_score:
                return rows, None
            slots = np.empty(len(rows), np.int64)
            slots[np.argsort(scores[rows], kind="stable")[::-1]] = np.arange(len(rows))
            return rows, slots
        except (FeatstoreError, OSError, MemoryError):
            raise
        except Exception as error:
            raise PluginError(f"policy {policy.name!r}: scores failed: {error_text(error)}") from error
