"""Filling of caches that follow plans with rows that stay: read by themselves, or in a pass over the features made anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import NO_ROWS
from featstore.cache.table import FeatureCache
from featstore.storage.extents import Kept
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain

__all__ = ["CacheFilling"]

Int64s = npt.NDArray[np.int64]


class CacheFilling:
    """Fill the caches of a loader's features for an epoch.

    Parameters
    ----------
    context : Context
    filled : dict of str to FeatureCache
        For each feature the cache that is filled already; the dict is kept from epoch to epoch.
    """

    def __init__(self, context: Context, filled: dict[str, FeatureCache]) -> None:
        self._context, self._filled = context, filled
        self._waiting: dict[str, FeatureCache] = {}  # caches whose rows have slots, but are not read yet

    def begin(self, domain: Domain, rows: Int64s | None) -> Int64s:
        """Assign slots to ``rows`` in a domain's caches not filled yet; without ``rows``, empty them. Return the rows by slot.

        The domain's features have the same rows.
        """
        found = NO_ROWS
        for name, store in domain.stores.items():
            cache = store.cache
            if cache is None:
                continue
            if rows is None or self._filled.get(name) is not cache:
                cache.clear()
                if rows is not None:
                    cache.reserve(rows)
                    self._waiting[name] = cache
            if len(cache.planned_rows) > len(found):
                found = cache.planned_rows  # the cache's own array, which the budget counts: not a copy
        return found

    @contextmanager
    def kept(self, name: str) -> Iterator[Kept | None]:
        """Lend the rows of a feature still to be read, and the array for them; None if there are none.

        The caller reads them all before it leaves the block.
        """
        cache = self._waiting.pop(name, None)
        if cache is None:
            yield None
            return
        with cache.loading() as (rows, array):
            yield (rows, array) if len(rows) else None
        self._filled[name] = cache

    def finish(self, names: Iterable[str]) -> None:
        """Read the rows of features that no pass has read."""
        for name in names:
            cache = self._waiting.get(name)
            with self.kept(name) as kept:
                if kept is not None and cache is not None:
                    cache.read_into(*kept, partial(self._context.nodes.read, name))
