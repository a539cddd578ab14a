"""Caches that follow plans begin an epoch with rows that stay, read alone or in a pass over the features that is made anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import NO_ROWS
from featstore.cache.table import FeatureCache
from featstore.storage.extents import Kept
from featstore.strategies.context import Context

__all__ = ["CacheFilling"]

Int64s = npt.NDArray[np.int64]


class CacheFilling:
    """Fills the caches of a loader's features for an epoch.

    Parameters
    ----------
    context : Context
    filled : dict of str to FeatureCache
        By feature the cache that has its rows; kept from epoch to epoch.
    """

    def __init__(self, context: Context, filled: dict[str, FeatureCache]) -> None:
        self._context, self._filled = context, filled
        self._waiting: dict[str, FeatureCache] = {}  # caches whose rows have slots and are not read yet

    def begin(self, rows: Int64s | None) -> Int64s:
        """Let caches begin with ``rows``, where they do not have them already, or with none; return the rows by slot."""
        found = NO_ROWS
        for name, store in self._context.nodes.stores.items():
            cache = store.cache
            if cache is None:
                continue
            if rows is None or self._filled.get(name) is not cache:
                cache.clear()
                if rows is not None:
                    cache.reserve(rows)
                    self._waiting[name] = cache
            if len(cache.planned_rows) > len(found):
                found = cache.planned_rows  # what the ledger has counted: not a copy
        return found

    @contextmanager
    def kept(self, name: str) -> Iterator[Kept | None]:
        """Lend a feature's rows that are still to be read, and where to; whoever leaves this has read them."""
        cache = self._waiting.pop(name, None)
        if cache is None:
            yield None
            return
        with cache.loading() as (rows, array):
            yield (rows, array) if len(rows) else None
        self._filled[name] = cache

    def finish(self) -> None:
        """Read what no pass has read."""
        for name, cache in list(self._waiting.items()):
            with self.kept(name) as kept:
                if kept is not None:
                    cache.read_into(*kept, partial(self._context.nodes.read, name))
