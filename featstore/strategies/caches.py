"""Feature caches of a loader: their sizes, and the claims of epochs whose plans they follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from featstore.cache.base import OnlinePolicy, Policy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.epochmemory import Use
from featstore.errors import BudgetError, OptionError
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
from featstore.strategies.memory import Memory

__all__ = [
    "ClaimedCaches",
    "check_instances",
    "make_online_edge_caches",
    "online_edge_bytes",
    "room_for_caches",
    "size_caches",
]


def online_edge_bytes(context: Context, size: int | float | str | None, policy: str | Policy | type[Policy]) -> dict[str, int]:
    """Compute the bytes of each cache of edge features that an online policy manages.

    Raises
    ------
    OptionError
        An instance of a policy for several edge features.
    """
    if isinstance(policy, Policy) and len(context.edges.stores) > 1:
        raise OptionError("edge_policy", "an instance serves one cache: give its name or class for several edge features")
    return context.edges.sizes(size, get_policy(policy))


def make_online_edge_caches(context: Context, sizes: Mapping[str, int], policy: str | Policy | type[Policy]) -> None:
    """Make the caches of edge features that an online policy manages, of ``sizes`` bytes each.

    Called before the caches that take all memory left. A cache that follows the plans of a running epoch stays, and edges are
    read through it.
    """
    for name, rows in context.edges.capacities(sizes, get_policy(policy)).items():
        own = get_policy(policy)
        assert isinstance(own, OnlinePolicy)
        with context.graph.locked(), context.timer.time("cache"):  # an epoch of another loader may begin meanwhile
            if not context.edges.is_claimed(name):
                context.edges.make_cache(name, rows, policy=own)


def size_caches(context: Context, memory: Memory, size: int | float | str | None, policy: Policy) -> tuple[dict[str, int], int]:
    """Compute the bytes of each feature's cache, and the number of batches that are made ahead beside the caches.

    Parameters
    ----------
    context : Context
    memory : Memory
    size : int, float, "auto" or None
    policy : Policy

    Returns
    -------
    sizes : dict
        Empty if there is nothing to cache, or if ``"auto"`` has no room for one row.
    prefetch : int

    Raises
    ------
    BudgetError
        A given size exceeds the memory that is left.
    """
    nodes, prefetch = context.nodes, context.prefetch
    if size is None or not nodes.stores or not nodes.n:
        return {}, prefetch
    if size != "auto":
        return nodes.divided(size, policy, context.budget.available + context.budget.on_loan, memory.batch), prefetch
    room, claimed = room_for_caches(context)
    free_bytes, prefetch = memory.left_for_caches(room, prefetch, claimed)
    if not nodes.fitting(free_bytes, policy):
        return {}, prefetch  # no room for one row: the loader runs without caches
    return nodes.divided(free_bytes, policy, room, memory.batch), prefetch


def room_for_caches(context: Context) -> tuple[int, int]:
    """Return the bytes that caches of node features may take, and the part of them that caches of a running epoch hold now."""
    claimed = context.nodes.claimed_bytes
    return context.budget.available + context.chosen.freed + claimed, claimed


def check_instances(policy: str | Policy | type[Policy], n_features: int) -> None:
    """Raise ValueError if one policy instance would serve the caches of several features."""
    if isinstance(policy, Policy) and n_features > 1 and not isinstance(get_policy(policy), PlannedPolicy):
        raise ValueError("a policy instance serves one cache: give its name or class for several features")


class ClaimedCaches:
    """The caches that follow a loader's plans; they are empty at first.

    A feature has one cache. The plans of a loader name slots of *its* cache. Every epoch therefore claims the caches before it
    runs. A cache that another loader or ``g.cache`` has replaced is made anew.

    Caches on loan that have given memory back are made anew, too: as large as they were, or as the memory allows by then.

    Parameters
    ----------
    domain : Domain
        The features. With a domain without features, no caches are made or claimed.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._capacities = dict.fromkeys(domain.stores, 0)
        self._room: Callable[[], int] | None = None
        self._mine: dict[str, FeatureCache] = {}

    def make(self, capacities: Mapping[str, int], room: Callable[[], int] | None = None) -> None:
        """Make the caches, with ``capacities`` rows, in place of those that the features have.

        If a feature's cache follows the plans of a running epoch, the new one is made later, when an epoch claims it.

        Parameters
        ----------
        capacities : mapping of str to int
        room : callable () -> int, optional
            Puts the caches on loan. Returns the bytes that they may take when they are made anew.

        Raises
        ------
        BudgetError
            No memory for the caches.
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
        # Marks the cache as smaller than planned: plans of a pack name slots of the whole cache, and the next epoch tries again.
        cache.is_cut = capacity < self._capacities[name]

    def check_free(self) -> None:
        """Raise BusyError if one of the features' caches follows the plans of a running epoch."""
        self._domain.check_free()

    def claim(self) -> Use:
        """Claim the caches for an epoch, all or none. The claim ends with :meth:`release`, or with the object returned.

        Raises
        ------
        BusyError
            One of the caches follows the plans of another epoch.
        BudgetError
            The caches have to be made anew, and there is no memory for them.
        """
        claim = Use()
        with self._domain.graph.locked():  # of two epochs that begin at once, one gets the caches, the other a BusyError
            self.check_free()
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
        """Return whether the feature's cache was replaced, or has given memory back."""
        cache = self._domain.stores[name].cache
        return cache is None or cache is not self._mine.get(name) or cache.is_cut

    def _make_what_fits(self, room: Callable[[], int]) -> None:
        """Make the caches anew, each with as many rows as there is room for now."""
        domain = self._domain
        for name in domain.stores:
            domain.make_cache(name, 0)
        try:
            for name, rows in domain.cut(self._capacities, room()).items():
                self._make(name, rows)
        except BudgetError:  # other holders took the memory first: caches on loan are optional, the epoch runs without
            for name in self._capacities:
                self._make(name, 0)

    def release(self) -> None:
        """End the epoch; may be called again."""
        for cache in self._mine.values():
            cache.release()
