"""Sizes of feature caches: bytes, shares of the rows, and their division among several features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from featstore.budget import Budget
from featstore.cache.base import Policy
from featstore.cache.table import FeatureCache
from featstore.config import parse_size
from featstore.errors import BudgetError

__all__ = ["cache_bytes", "in_proportion", "rows_within"]


def cache_bytes(
    size: int | float | str, n: int, row_bytes: Mapping[str, int], policy: Policy | None, budget: Budget, room: int
) -> dict[str, int]:
    """Divide ``size`` bytes, or a share of the rows, among the features' caches: the same rows for each.

    ValueError if ``size`` is no size. BudgetError if the caches take more than the ``room`` that is left, or hold less than one
    row; it names the least memory that suffices.
    """

    def least(rows: int) -> dict[str, int]:
        return {name: FeatureCache.least_bytes(rows, width, n, policy) for name, width in row_bytes.items()}

    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"a cache as a share of the rows must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        rows = max(1, round(size * n))
        total = sum(least(rows).values())
    else:
        total = parse_size(size)
        if total == 0:
            return dict.fromkeys(row_bytes, 0)  # no cache, as in g.cache
        rows = rows_within(total, n, list(row_bytes.values()), policy)
        if not rows:
            one = sum(least(1).values())
            raise BudgetError(f"a feature cache of one row takes {one} bytes, not {total}", one)
        total = sum(least(rows).values())
    if total > room:
        needed = budget.total + total - room
        raise BudgetError(
            f"a feature cache of {rows} rows takes {total} bytes, and {room} of the {budget.name} budget are left", needed
        )
    return least(rows)


def rows_within(n_bytes: int, n: int, widths: Sequence[int], policy: Policy | None = None) -> int:
    """Count the rows that each cache can have if one cache for each width, over ``n`` rows, shares ``n_bytes``.

    ``policy`` manages the caches; None: they follow plans.
    """
    one, two = (sum(FeatureCache.least_bytes(rows, width, n, policy) for width in widths) for rows in (1, 2))
    return 0 if n_bytes < one else min(n, 1 + (n_bytes - one) // max(1, two - one))


def in_proportion(n_bytes: int, wholes: Sequence[int]) -> list[int]:
    """Divide ``n_bytes`` among caches of features that have different rows, each of ``wholes`` bytes: the same share of each."""
    return [n_bytes * whole // max(1, sum(wholes)) for whole in wholes]
