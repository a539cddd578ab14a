"""The feature caches that a loader's plans are made for, while other loaders of the graph have theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from featstore.cache.table import FeatureCache
from featstore.errors import BusyError

__all__ = ["Claim", "OwnCaches", "check_free", "make_room"]


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

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    features : sequence of str
    """

    def __init__(self, graph: Any, features: Sequence[str]) -> None:
        self._graph = graph
        self._capacities = dict.fromkeys(features, 0)
        self._mine: dict[str, FeatureCache] = {}

    def make(self, capacities: Mapping[str, int]) -> None:
        """Make the caches, with so many rows each, in place of those that the features have.

        Raises
        ------
        BudgetError, BusyError
            No memory for them; a feature's cache follows the plans of an epoch under way.
        """
        self._capacities.update(capacities)
        with self._graph.locked():
            for name in capacities:
                self._make(name)

    def _make(self, name: str) -> None:
        self._mine.pop(name, None)
        self._graph.cache_for_planner(name, self._capacities[name])
        self._mine[name] = self._graph.features[name].cache

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
            for name in self._capacities:
                cache = self._graph.features[name].cache
                if cache is None or cache is not self._mine.get(name):
                    self._make(name)
            for cache in self._mine.values():
                cache.claim(claim)
        return claim

    def release(self) -> None:
        """End the epoch; may be called again."""
        for cache in self._mine.values():
            cache.release()
