"""A neighbour cache whose arrays lie in memory that a machine's ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from featstore.budget import Budget, Reservation
from featstore.cache.sharedrows import share_of
from featstore.gather.sharedmemory import Allocate, SharedArrays, shared_arrays
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.topology.base import Topology

__all__ = ["SharedNeighborCache", "share_lists"]


class SharedNeighborCache(NeighborCache):
    """A neighbour cache over shared arrays; ``reservation`` is of the rank's share of their bytes."""

    def __init__(self, topology: Topology, shared: SharedArrays, reservation: Reservation) -> None:
        arrays = shared.arrays
        rest = {name: arrays.get(name) for name in ("indptr", "edge_ids")}
        super().__init__(topology, arrays["records"], arrays.get("offset_of_node"), reservation, **rest)
        self._shared = shared

    def close(self) -> None:
        """See :meth:`NeighborCache.close`; memory is freed when the last rank has closed the cache."""
        super().close()
        self._shared.close()


def share_lists(
    topology: Topology,
    budget: Budget,
    n_bytes: int,
    make: Callable[[Budget, Allocate], NeighborCache],
    *,
    edges: bool,
    recipe: Mapping[str, Any],
    ranks: int,
) -> SharedNeighborCache:
    """Get a neighbour cache of ``n_bytes`` at most that ``ranks`` processes share, made by the first of them.

    ``make(ledger, allocate)`` makes it: the cache's arrays by ``allocate``, counted by ``ledger``. ``budget`` counts this rank's
    share. ``recipe`` has all else that decides what the cache holds, as JSON. Raises as ``make``, and as
    :func:`~featstore.gather.sharedmemory.shared_arrays`.
    """

    def fill(allocate: Allocate) -> None:
        make(Budget(n_bytes, "shared neighbour cache"), allocate)

    # Forms of one adjacency differ in which of its arrays are in memory.
    made_of = {**recipe, "lists": type(topology).__name__, "bytes": n_bytes, "edges": edges and topology.edge_ids is not None}
    most = min(n_bytes, NeighborCache.whole_bytes(topology, edges))
    with budget.reserve("neighbor cache", share_of(most, ranks)).kept() as held:
        shared = shared_arrays("the shared neighbour cache", made_of, ranks, fill)
        held.resize(share_of(shared.nbytes, ranks))
        return SharedNeighborCache(topology, shared, held)
