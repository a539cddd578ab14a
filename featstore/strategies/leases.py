"""The feature caches that a loader's plans are made for, while other loaders of the graph have theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, BusyError

__all__ = ["Claim", "OwnCaches", "check_free", "make_room", "row_bytes", "rows_within"]


def row_bytes(store: Any) -> int:
    """Return the bytes of a feature's row."""
    width: int = store.dtype.itemsize * math.prod(store.shape[1:])
    return width


def rows_within(n_bytes: int, n: int, widths: Sequence[int]) -> int:
    """Return how many rows planned caches of features of ``n`` rows of these widths can have within ``n_bytes``, each as many."""

    def needed(rows: int) -> int:
        return sum(FeatureCache.least_bytes(rows, width, n, None) for width in widths)

    return 0 if n_bytes < needed(1) else min(n, 1 + (n_bytes - needed(1)) // max(1, needed(2) - needed(1)))


class Claim:
    """What an epoch holds while caches follow its plans; they are free when it has died, however the epoch was lost."""


def check_free(graph: Any, features: Iterable[str]) -> None:
    """Raise BusyError where a feature's cache follows the plans of an epoch under way."""
    for name in features:
        cache = graph.features[name].cache
        if cache is not None and cache.in_use:
            raise BusyError(
                f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch: end or drop its loop "
                "first, or open the graph again for this loader"
            )


def make_room(graph: Any, features: Iterable[str]) -> None:
    """Give back the caches that features have, and buffers of batches that nobody has, before others are made.

    Raises
    ------
    BusyError
        One of them follows the plans of an epoch under way.
    """
    with graph.locked():
        check_free(graph, features)
        for name in features:
            if graph.features[name].cache is not None:
                graph.cache_for_planner(name, 0)
    graph.pool.trim()


class OwnCaches:
    """The caches that follow a loader's plans, empty at first.

    A feature has one cache. A loader's plans say which slot of *its* cache holds a row, so every epoch claims the caches before
    anything runs, and makes them anew where another loader, or ``g.cache``, has taken their place since.

    Caches on loan that have given memory back are made anew too, as large as they were, or as the memory is by then.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    features : sequence of str
    """

    def __init__(self, graph: Any, features: Sequence[str]) -> None:
        self._graph = graph
        self._capacities = dict.fromkeys(features, 0)
        self._room: Callable[[], int] | None = None
        self._mine: dict[str, FeatureCache] = {}

    def make(self, capacities: Mapping[str, int], room: Callable[[], int] | None = None) -> None:
        """Make the caches, with so many rows each, in place of those that the features have.

        Parameters
        ----------
        capacities : mapping of str to int
        room : callable () -> int, optional
            The caches are on loan; how many bytes they may take, once some of them was taken back.

        Raises
        ------
        BudgetError, BusyError
            No memory for them; a feature's cache follows the plans of an epoch under way.
        """
        self._capacities.update(capacities)
        self._room = room
        with self._graph.locked():
            for name, capacity in capacities.items():
                self._make(name, capacity)

    def _make(self, name: str, capacity: int) -> None:
        self._mine.pop(name, None)
        self._graph.cache_for_planner(name, capacity, on_loan=self._room is not None)
        cache = self._mine[name] = self._graph.features[name].cache
        # A pack's plans are made for the whole cache; and the next epoch tries again.
        cache.is_cut = capacity < self._capacities[name]

    def claim(self) -> Claim:
        """Take the caches for an epoch, all or none, until :meth:`release` or as long as what is returned lives.

        Raises
        ------
        BusyError
            Another epoch follows its plans in one of them.
        BudgetError
            They have to be made anew, and there is no memory for them.
        """
        claim = Claim()
        with self._graph.locked():  # of two epochs that begin at once one has the caches, the other is told so
            check_free(self._graph, self._capacities)
            lost = [name for name in self._capacities if self._is_lost(name)]
            if lost and self._room is not None:
                self._make_what_fits(self._room)
            else:
                for name in lost:
                    self._make(name, self._capacities[name])
            for cache in self._mine.values():
                cache.claim(claim)
        return claim

    def _is_lost(self, name: str) -> bool:
        """Whether the feature's cache is another's, or has given memory back."""
        cache: FeatureCache | None = self._graph.features[name].cache
        return cache is None or cache is not self._mine.get(name) or cache.is_cut

    def _make_what_fits(self, room: Callable[[], int]) -> None:
        """Make the caches anew, with the rows that there is room for now, the same of each."""
        for name in self._capacities:
            self._graph.cache_for_planner(name, 0)
        left = room()

        rows = rows_within(left, self._graph.num_nodes, [row_bytes(self._graph.features[name]) for name in self._capacities])
        try:
            for name, capacity in self._capacities.items():
                self._make(name, min(capacity, rows))
        except BudgetError:  # others were quicker: an epoch on loan never fails for want of a cache
            for name in self._capacities:
                self._make(name, 0)

    def release(self) -> None:
        """End the epoch; may be called again."""
        for cache in self._mine.values():
            cache.release()
