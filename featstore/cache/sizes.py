"""Sizes of feature caches: bytes, shares of the rows, and their division among several features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from featstore.budget import Budget
from featstore.cache.base import Policy
from featstore.cache.table import FeatureCache
from featstore.config import parse_size
from featstore.errors import BudgetError

__all__ = ["Columns", "cache_bytes", "divided", "in_proportion", "rows_within", "whole_bytes"]

Columns: TypeAlias = tuple[int, Mapping[str, int]]  # features with the same rows: how many, and the bytes of a row by name


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


def in_proportion(n_bytes: int, wholes: Sequence[int], weights: Sequence[int] | None = None) -> list[int]:
    """Divide ``n_bytes`` among caches of features that have different rows, none of which can use more than ``wholes`` bytes.

    In proportion to ``weights``; by default to ``wholes``, so that each holds the same share of its rows.
    """
    found, left, open_ones = [0] * len(wholes), n_bytes, set(range(len(wholes)))
    weights = wholes if weights is None or not any(weights) else weights
    while open_ones:
        total = max(1, sum(weights[at] for at in open_ones))
        parts = {at: left * weights[at] // total for at in open_ones}
        full = {at for at, part in parts.items() if part >= wholes[at]}
        for at in full or open_ones:
            found[at] = wholes[at] if full else parts[at]
            left -= found[at]
        open_ones -= full or open_ones
    return found


def whole_bytes(groups: Sequence[Columns], policy: Policy | None = None) -> list[int]:
    """Compute the bytes of caches of all rows, for each group of features with the same rows."""
    return [_least(n, n, widths, policy) for n, widths in groups]


def _least(rows: int, n: int, widths: Mapping[str, int], policy: Policy | None) -> int:
    return sum(FeatureCache.least_bytes(rows, width, n, policy) for width in widths.values())


def divided(
    groups: Sequence[Columns],
    size: int | float | str,
    policy: Policy | None,
    budget: Budget,
    room: int,
    weights: Sequence[int] | None = None,
) -> dict[str, int]:
    """Divide ``size`` among caches as :func:`cache_bytes` does, in groups of features with the same rows.

    All groups get the same share of their rows, or bytes in proportion to ``weights``. A group without room for a row gets no
    cache. ValueError, BudgetError: as of :func:`cache_bytes`; also if no group has room for a row.
    """
    if len(groups) == 1:
        return cache_bytes(size, groups[0][0], groups[0][1], policy, budget, room)
    given = size if isinstance(size, float) else parse_size(size)
    shares: Sequence[int | float] = [given] * len(groups)
    if not isinstance(given, float):
        shares = in_proportion(given, whole_bytes(groups, policy), weights)
    found: dict[str, int] = {}
    for (n, widths), share in zip(groups, shares, strict=True):
        if n and (isinstance(share, float) or rows_within(share, n, list(widths.values()), policy)):
            found |= cache_bytes(share, n, widths, policy, budget, room - sum(found.values()))
    if given and not found:  # the cheapest row has room, or the error says what it needs
        least = {_least(1, n, widths, policy): (n, widths) for n, widths in groups if n}
        return cache_bytes(given, *least[min(least)], policy, budget, room) if least else {}
    return found
