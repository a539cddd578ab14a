"""The feature caches of a loader: how large they are, and whose plans they follow while others of the graph have theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from featstore.cache.base import OnlinePolicy, Policy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.sizes import cache_bytes, rows_within
from featstore.cache.table import FeatureCache
from featstore.epochmemory import Use
from featstore.errors import BudgetError, OptionError
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
from featstore.strategies.memory import Memory

__all__ = [
    "LeasedCaches",
    "check_instances",
    "make_online_edge_caches",
    "online_edge_bytes",
    "room_for_caches",
    "size_caches",
]


def online_edge_bytes(context: Context, size: int | float | str | None, policy: str | Policy | type[Policy]) -> dict[str, int]:
    """Return the bytes of the caches of edge features that an online policy manages.

    Raises
    ------
    OptionError
        An instance of a policy for several edge features.
    """
    if isinstance(policy, Policy) and len(context.edges.stores) > 1:
        raise OptionError("edge_policy", "an instance serves one cache: give its name or class for several edge features")
    return context.edges.sizes(size, get_policy(policy))


def make_online_edge_caches(context: Context, sizes: Mapping[str, int], policy: str | Policy | type[Policy]) -> None:
    """Make the caches of edge features, of so many bytes, that an online policy manages: before caches that take what is left.

    Not those that follow the plans of an epoch under way: edges are read through these.
    """
    rows = context.edges.capacity(sizes, get_policy(policy))
    for name in sizes:
        if context.edges.is_claimed(name):
            continue
        own = get_policy(policy)
        assert isinstance(own, OnlinePolicy)
        with context.watch.time("cache"):
            context.edges.make_cache(name, rows, policy=own)


def size_caches(context: Context, memory: Memory, size: int | float | str | None, policy: Policy) -> tuple[dict[str, int], int]:
    """Return the bytes of each feature's cache, and the batches that are made ahead beside them.

    Parameters
    ----------
    context : Context
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
    nodes, prefetch = context.nodes, context.prefetch
    if size is None or not nodes.stores or not nodes.n:
        return {}, prefetch
    n, widths, budget = nodes.n, nodes.row_bytes, context.budget
    if size != "auto":
        return cache_bytes(size, n, widths, policy, budget, budget.available + budget.on_loan), prefetch
    room, claimed = room_for_caches(context)
    spare, prefetch = memory.left_for_caches(room, prefetch, claimed)
    if spare < sum(FeatureCache.least_bytes(1, width, n, policy) for width in widths.values()):
        return {}, prefetch  # what is left may be nothing; the loader then goes without
    return cache_bytes(spare, n, widths, policy, budget, room), prefetch


def room_for_caches(context: Context) -> tuple[int, int]:
    """Return the bytes that caches of node features may take, and those of them that an epoch under way has for its own now."""
    claimed = context.nodes.claimed_bytes
    return context.budget.available + context.chosen.freed + claimed, claimed


def check_instances(policy: str | Policy | type[Policy], n_features: int) -> None:
    """Raise ValueError where one policy instance would serve the caches of several features."""
    if isinstance(policy, Policy) and n_features > 1 and not isinstance(get_policy(policy), PlannedPolicy):
        raise ValueError("a policy instance serves one cache: give its name or class for several features")


class LeasedCaches:
    """The caches that follow a loader's plans, empty at first.

    A feature has one cache. A loader's plans say which slot of *its* cache holds a row, so every epoch leases the caches before
    anything runs, and makes them anew where another loader, or ``g.cache``, has taken their place since.

    Caches on loan that have given memory back are made anew too, as large as they were, or as the memory is by then.

    Parameters
    ----------
    domain : Domain
        The features; no caches are made, or leased, of those of a domain without.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._capacities = dict.fromkeys(domain.stores, 0)
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
        with self._domain.graph.locked():
            for name, capacity in capacities.items():
                if not self._domain.is_claimed(name):
                    self._make(name, capacity)

    def _make(self, name: str, capacity: int) -> None:
        self._mine.pop(name, None)
        cache = self._mine[name] = self._domain.make_cache(name, capacity, on_loan=self._room is not None)
        # A pack's plans are made for the whole cache; and the next epoch tries again.
        cache.is_cut = capacity < self._capacities[name]

    def check_free(self) -> None:
        """Raise BusyError where one of the features' caches follows the plans of an epoch under way."""
        self._domain.check_free()

    def lease(self) -> Use:
        """Take the caches for an epoch, all or none, until :meth:`release` or as long as what is returned lives.

        Raises
        ------
        BusyError
            Another epoch follows its plans in one of them.
        BudgetError
            They have to be made anew, and there is no memory for them.
        """
        lease = Use()
        with self._domain.graph.locked():  # of two epochs that begin at once one has the caches, the other is told so
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
        cache = self._domain.stores[name].cache
        return cache is None or cache is not self._mine.get(name) or cache.is_cut

    def _make_what_fits(self, room: Callable[[], int]) -> None:
        """Make the caches anew, with the rows that there is room for now, the same of each."""
        domain = self._domain
        for name in domain.stores:
            domain.make_cache(name, 0)
        rows = rows_within(room(), domain.n, list(domain.row_bytes.values()))
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
