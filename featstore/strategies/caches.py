"""The feature caches of a loader: how large they are, and whose plans they follow while others of the graph have theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import OnlinePolicy, Policy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.sizes import cache_bytes, rows_within
from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, BusyError, OptionError
from featstore.graph.feature import FeatureStore
from featstore.strategies.memory import Memory
from featstore.strategies.setup import Setup, row_bytes

__all__ = [
    "CacheLease",
    "LeasedCaches",
    "beside_caches",
    "check_free",
    "check_instances",
    "edge_cache_bytes",
    "edge_capacities",
    "is_claimed",
    "make_online_edge_caches",
    "make_room",
    "online_edge_bytes",
    "read_rows",
    "room_for_caches",
    "size_caches",
]


def beside_caches(setup: Setup, size: int | float | str | None, policy: Policy, of_edges: Mapping[str, int]) -> tuple[Setup, int]:
    """Return a setup that knows the rows of caches of ``size``, and the bytes of all caches, those of edge features included."""
    sizes: dict[str, int] = {}
    widths, n = setup.row_bytes, setup.graph.num_nodes
    if size is not None and size != "auto" and widths and n:
        sizes = cache_bytes(size, n, widths, policy, setup.graph.budget, 1 << 62)
    capacity = min((FeatureCache.capacity_for(sizes[name], widths[name], n, policy) for name in sizes), default=0)
    if size != "auto" and setup.planning is not None:
        setup = replace(setup, planning=replace(setup.planning, capacity=capacity))
    return setup, sum(sizes.values()) + sum(of_edges.values())


def edge_cache_bytes(setup: Setup, size: int | float | str | None, policy: Policy | None) -> dict[str, int]:
    """Return the bytes of each loaded edge feature's cache, for ``size`` bytes in all or a share of the edges.

    Raises
    ------
    ValueError, BudgetError
        See :func:`cache_bytes`; whether they fit beside all else is not asked here.
    """
    n, widths = int(setup.graph.num_edges) if setup.edge_features else 0, setup.edge_row_bytes
    return {} if size is None or not n else cache_bytes(size, n, widths, policy, setup.graph.budget, 1 << 62)


def edge_capacities(setup: Setup, sizes: Mapping[str, int], policy: Policy | None) -> dict[str, int]:
    """Return the rows of each edge feature's cache of so many bytes: the same edges for each."""
    if not sizes:
        return {}
    n, widths = int(setup.graph.num_edges), setup.edge_row_bytes
    rows = min(FeatureCache.capacity_for(n_bytes, widths[name], n, policy) for name, n_bytes in sizes.items())
    return dict.fromkeys(sizes, rows)


def online_edge_bytes(setup: Setup, size: int | float | str | None, policy: str | Policy | type[Policy]) -> dict[str, int]:
    """Return :func:`edge_cache_bytes` of caches that an online policy manages.

    Raises
    ------
    OptionError
        An instance of a policy for several edge features.
    """
    if isinstance(policy, Policy) and len(setup.edge_features) > 1:
        raise OptionError("edge_policy", "an instance serves one cache: give its name or class for several edge features")
    return edge_cache_bytes(setup, size, get_policy(policy))


def make_online_edge_caches(setup: Setup, sizes: Mapping[str, int], policy: str | Policy | type[Policy]) -> None:
    """Make the caches of edge features, of so many bytes, that an online policy manages: before caches that take what is left.

    Not those that follow the plans of an epoch under way: edges are read through these.
    """
    for name, rows in edge_capacities(setup, sizes, get_policy(policy)).items():
        if is_claimed(setup.graph, name, of_edges=True):
            continue
        own = get_policy(policy)
        assert isinstance(own, OnlinePolicy)
        with setup.watch.time("cache"):
            setup.graph.cache_for_planner(name, rows, of_edges=True, policy=own)


def size_caches(setup: Setup, memory: Memory, size: int | float | str | None, policy: Policy) -> tuple[dict[str, int], int]:
    """Return the bytes of each feature's cache, and the batches that are made ahead beside them.

    Parameters
    ----------
    setup : Setup
    memory : Memory
    size : int, float, "auto" or None
    policy : Policy

    Returns
    -------
    sizes : dict
        Empty where there is nothing to cache, and where ``"auto"`` leaves no room for one row.
    prefetch : int

    Raises
    ------
    BudgetError
        More than is left.
    """
    n, widths, prefetch = setup.graph.num_nodes, setup.row_bytes, setup.prefetch
    if size is None or not widths or not n:
        return {}, prefetch
    if size != "auto":
        return cache_bytes(size, n, widths, policy, setup.budget, setup.budget.available + setup.budget.on_loan), prefetch
    room, claimed = room_for_caches(setup)
    spare, prefetch = memory.left_for_caches(room, prefetch, claimed)
    if spare < sum(FeatureCache.least_bytes(1, width, n, policy) for width in widths.values()):
        return {}, prefetch  # what is left may be nothing; the loader then goes without
    return cache_bytes(spare, n, widths, policy, setup.budget, room), prefetch


def check_instances(policy: str | Policy | type[Policy], n_features: int) -> None:
    """Raise ValueError where one policy instance would serve the caches of several features."""
    if isinstance(policy, Policy) and n_features > 1 and not isinstance(get_policy(policy), PlannedPolicy):
        raise ValueError("a policy instance serves one cache: give its name or class for several features")


def read_rows(setup: Setup, store: FeatureStore, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
    """Read what a cache begins with from the feature's own file, and count it."""
    setup.reads.add(store.source.gather(rows, out))


class CacheLease:
    """What an epoch holds while caches follow its plans; they are free when it has died, however the epoch was lost."""


def _stores(graph: Any, *, of_edges: bool) -> Mapping[str, FeatureStore]:
    stores: Mapping[str, FeatureStore] = graph.edge_features if of_edges else graph.features
    return stores


def is_claimed(graph: Any, name: str, *, of_edges: bool = False) -> bool:
    """Return whether a feature's cache follows the plans of an epoch under way: others read through it, and leave it."""
    cache = _stores(graph, of_edges=of_edges)[name].cache
    return cache is not None and cache.in_use


def room_for_caches(setup: Setup) -> tuple[int, int]:
    """Return the bytes that caches of the features may take, and those of them that an epoch under way has for its own now.

    The caches are made when it is over, in the place of those.
    """
    caches = [setup.graph.features[name].cache for name in setup.features]
    claimed = sum(cache.nbytes for cache in caches if cache is not None and cache.in_use)
    return setup.budget.available + claimed, claimed


def check_free(graph: Any, features: Iterable[str], *, of_edges: bool = False) -> None:
    """Raise BusyError where a feature's cache follows the plans of an epoch under way."""
    for name in features:
        if is_claimed(graph, name, of_edges=of_edges):
            raise BusyError(
                f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch: end or drop its loop "
                "first, or open the graph again for this loader"
            )


def make_room(graph: Any, features: Iterable[str] = (), edge_features: Iterable[str] = ()) -> None:
    """Give back the caches that features have, and buffers of batches that nobody has, before others are made.

    Not those that follow the plans of an epoch under way. Does nothing where no features are named.
    """
    kinds = [(of_edges, list(names)) for of_edges, names in ((False, features), (True, edge_features))]
    kinds = [(of_edges, names) for of_edges, names in kinds if names]
    if not kinds:
        return
    with graph.locked():
        for of_edges, names in kinds:
            for name in names:
                has_cache = _stores(graph, of_edges=of_edges)[name].cache is not None
                if has_cache and not is_claimed(graph, name, of_edges=of_edges):
                    graph.cache_for_planner(name, 0, of_edges=of_edges)
    graph.pool.trim()


class LeasedCaches:
    """The caches that follow a loader's plans, empty at first.

    A feature has one cache. A loader's plans say which slot of *its* cache holds a row, so every epoch leases the caches before
    anything runs, and makes them anew where another loader, or ``g.cache``, has taken their place since.

    Caches on loan that have given memory back are made anew too, as large as they were, or as the memory is by then.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    features : sequence of str
    of_edges : bool
        They are features of edges.
    """

    def __init__(self, graph: Any, features: Sequence[str], *, of_edges: bool = False) -> None:
        self._graph, self._of_edges = graph, of_edges
        self._capacities = dict.fromkeys(features, 0)
        self._room: Callable[[], int] | None = None
        self._mine: dict[str, FeatureCache] = {}

    def make(self, capacities: Mapping[str, int], room: Callable[[], int] | None = None) -> None:
        """Make the caches, with so many rows each, in place of those that the features have.

        Those in whose place there is one that follows the plans of an epoch under way are made once an epoch leases them.

        Parameters
        ----------
        capacities : mapping of str to int
        room : callable () -> int, optional
            The caches are on loan; how many bytes they may take, once some of them was taken back.

        Raises
        ------
        BudgetError
            No memory for them.
        """
        self._capacities.update(capacities)
        self._room = room
        with self._graph.locked():
            for name, capacity in capacities.items():
                if not is_claimed(self._graph, name, of_edges=self._of_edges):
                    self._make(name, capacity)

    def _make(self, name: str, capacity: int) -> None:
        self._mine.pop(name, None)
        self._graph.cache_for_planner(name, capacity, on_loan=self._room is not None, of_edges=self._of_edges)
        cache = _stores(self._graph, of_edges=self._of_edges)[name].cache
        assert cache is not None
        self._mine[name] = cache
        # A pack's plans are made for the whole cache; and the next epoch tries again.
        cache.is_cut = capacity < self._capacities[name]

    def check_free(self) -> None:
        """Raise BusyError where one of the features' caches follows the plans of an epoch under way."""
        check_free(self._graph, self._capacities, of_edges=self._of_edges)

    def lease(self) -> CacheLease:
        """Take the caches for an epoch, all or none, until :meth:`release` or as long as what is returned lives.

        Raises
        ------
        BusyError
            Another epoch follows its plans in one of them.
        BudgetError
            They have to be made anew, and there is no memory for them.
        """
        lease = CacheLease()
        with self._graph.locked():  # of two epochs that begin at once one has the caches, the other is told so
            self.check_free()
            lost = [name for name in self._capacities if self._is_lost(name)]
            if lost and self._room is not None:
                self._make_what_fits(self._room)
            else:
                for name in lost:
                    self._make(name, self._capacities[name])
            for cache in self._mine.values():
                cache.lease(lease)
        return lease

    def _is_lost(self, name: str) -> bool:
        """Whether the feature's cache is another's, or has given memory back."""
        cache = _stores(self._graph, of_edges=self._of_edges)[name].cache
        return cache is None or cache is not self._mine.get(name) or cache.is_cut

    def _make_what_fits(self, room: Callable[[], int]) -> None:
        """Make the caches anew, with the rows that there is room for now, the same of each."""
        for name in self._capacities:
            self._graph.cache_for_planner(name, 0, of_edges=self._of_edges)
        stores = _stores(self._graph, of_edges=self._of_edges)
        n = max((len(stores[name]) for name in self._capacities), default=0)
        rows = rows_within(room(), n, [row_bytes(stores[name]) for name in self._capacities])
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
