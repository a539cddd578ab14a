"""The neighbour lists that an open dataset keeps in memory: one cache, which is chosen, saved, lent to the budget and freed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy.typing as npt

from featstore.budget import DEAR_COST, Budget, Loan
from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.sharedrows import check_shareable
from featstore.config import check_at_least, check_flag, parse_cache_size
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import private_array
from featstore.gather.sharedmemory import Allocate
from featstore.graph.adjacency import SHOWN_AFTER_S, Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.neighbors.listscores import WriteScores
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.graph.neighbors.savedcache import is_still_saved, load_neighbor_cache, save_neighbor_cache, saved_bytes
from featstore.graph.neighbors.sharedlists import share_lists
from featstore.graph.opentopology import stored_size
from featstore.graph.partitions import Partitions
from featstore.graph.policyinputs import Given
from featstore.graph.rowcaches import GivenParts, RowCaches
from featstore.graph.savedparts import KeptParts
from featstore.graph.snapshot import Snapshot
from featstore.progress import Progress
from featstore.ranks import sharing_ranks
from featstore.storage.catalog import Catalog
from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import huge_bytes

__all__ = ["NEIGHBOR_POLICY", "NeighborLists"]

NEIGHBOR_POLICY = "in_out_ratio"


def _static(policy: str | Policy | type[Policy]) -> StaticPolicy:
    chosen = get_policy(policy)
    if not isinstance(chosen, StaticPolicy):
        raise ValueError(f"neighbour lists are cached once, by score: policy {chosen.name!r} is not a static one")
    return chosen


class NeighborLists:
    """Neighbour lists of a graph that lie in memory.

    Attributes
    ----------
    cache : NeighborCache or None
        The current cache; a sampler uses it within :meth:`using`.
    """

    def __init__(
        self, graph: StoredGraph, snapshot: Snapshot, adjacency: Adjacency, partitions: Partitions, rows: RowCaches
    ) -> None:
        self._graph, self._snapshot, self._adjacency, self._partitions, self._rows = graph, snapshot, adjacency, partitions, rows
        self.cache: NeighborCache | None = None
        self._loan: Loan | None = None
        self._passing: NeighborCache | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._users: deque[None] = deque()  # one entry for each user: counted without a lock, which a fork could leave locked

    @contextmanager
    def using(self) -> Iterator[NeighborCache | None]:
        """Yield the cache for sampling a batch; the budget does not take the cache back meanwhile."""
        self._users.append(None)  # before reading the cache: _give_back() takes the cache first, and then looks for users
        try:
            yield self.cache
        finally:
            self._users.pop()

    def choosing_bytes(self) -> int:
        """Count the scratch bytes of choosing lists, :meth:`NeighborCache.scratch_bytes`, without opening the topology."""
        n_bytes, in_memory = stored_size(self._snapshot)
        return NeighborCache.scratch_bytes(self._graph.num_nodes, n_bytes, in_memory=in_memory)

    def choose(
        self,
        budget: int | float | str | None,
        policy: str | Policy | type[Policy],
        *,
        counts: Given,
        parts: GivenParts,
        seed: int,
        edges: bool,
        save: bool,
        progress: bool,
        shared: bool | int = False,
    ) -> None:
        """See :meth:`featstore.OutOfCoreGraph.cache_neighbors`."""
        graph = self._graph
        edges, save = check_flag("edges", edges), check_flag("save", save)
        seed = check_at_least("seed", seed, 0)
        chosen = _static(policy)
        is_kept = parts is None or isinstance(parts, (str, KeptParts))
        usual = isinstance(policy, str) and counts is None and (is_kept if chosen.needs_parts else parts is None)
        if save and (not usual or budget is None):
            raise ValueError(
                "a cache is saved for a policy's name and a stated budget, without counts=, and with no parts= but kept ones"
            )
        size = None if budget is None else parse_cache_size(budget, "budget", "the memory")
        ranks = sharing_ranks(shared)
        if graph.own_part is not None and (ranks or (save and graph.own_part.row_of is None)):
            raise NotImplementedError(f"lists of {graph.own_part} are neither shared nor saved: each rank has a part of its own")
        if ranks:
            check_shareable(policy, chosen)
            if not isinstance(size, int) or save:
                raise ValueError("ranks share a cache of a budget= in bytes, without save=True: let one process save it before")
        graph.check_open()
        if chosen.needs_parts and is_kept and not isinstance(parts, KeptParts):
            parts = self._partitions.find(parts)  # type: ignore[arg-type]
        self.drop()
        topology = self._adjacency.topology
        graph.pool.trim()  # frees memory first, as the available memory decides the number of lists
        n_bytes = graph.budget.available if size is None else int(size * graph.budget.total) if isinstance(size, float) else size
        if n_bytes == 0:
            return
        recipe: dict[str, Any] = {"policy": chosen.name, "bytes": n_bytes, "seed": seed}
        if chosen.needs_parts and isinstance(parts, KeptParts):
            recipe["parts"] = [parts.name, parts.generation]

        def made(ledger: Budget, scratch: Budget | None, allocate: Allocate) -> tuple[NeighborCache, bool]:
            """Make the cache; return it, and whether it was loaded as stored."""
            all_bytes = topology.num_edges * NeighborCache.entry_bytes(topology, edges)
            with Progress("neighbour lists", all_bytes, progress, delay_s=SHOWN_AFTER_S) as bar:
                found = self._stored(n_bytes, ledger, recipe if usual else None, bar.add, edges=edges, allocate=allocate)
            if found is not None:
                return found, True
            scoring = 24 * graph.num_nodes  # bytes of two degrees and a score for each node
            total = scoring + NeighborCache.work_bytes(topology, edges)
            with (
                Progress("neighbour lists", total, progress, delay_s=SHOWN_AFTER_S) as bar,
                graph.or_closed(),
                self._rows.policy_inputs(topology.id_bytes, counts, parts, seed, graph.budget, bar.add) as inputs,
            ):
                scores: npt.NDArray[Any] | WriteScores
                if chosen.goes_by_degrees:
                    scores = self._adjacency.list_scores(chosen, bar.add)
                else:
                    if not self._snapshot.types.is_one:
                        raise NotImplementedError(
                            f"policy {chosen.name!r} scores nodes, and a node of a graph of several types has several lists"
                        )
                    scores = self._adjacency.own_scores(inputs.scores(chosen, of_lists=True))
                    bar.reach(scoring)
                most = graph.budget.available if size is None else n_bytes
                found = self._built(ledger, scores, most, scratch, bar.add, edges=edges, allocate=allocate)
                bar.reach(total)
            return found, False

        if ranks:
            shared_cache = share_lists(
                topology,
                graph.budget,
                n_bytes,
                lambda ledger, allocate: made(ledger, graph.budget, allocate)[0],
                edges=edges,
                recipe=self._rows.recipe(chosen, counts, parts, seed),
                ranks=ranks,
            )
            self._put(shared_cache)
            return
        cache, is_stored = made(graph.budget, None, private_array)
        self._put(cache)
        kept = is_stored and (cache.whole or is_still_saved(graph.path, self._snapshot.catalog))
        if save and not kept:
            save_neighbor_cache(graph.path, self._snapshot.catalog, cache, recipe, self._see_saved)

    def _see_saved(self, catalog: Catalog, key: str, names: list[str]) -> None:
        """Let a later call find the cache that was just saved; one that cannot be opened is made again there."""
        self._snapshot.committed(catalog)
        with suppress(OSError, BudgetError, ClosedError), self._graph.locked():
            self._snapshot.adopt(catalog, key, names)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Keep other threads from exchanging the cache; nothing in the block waits or takes memory."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()  # another thread of the parent may have held the lock
        with self._lock:
            yield

    def use_beside(self, cache: NeighborCache) -> bool:
        """Use a cache that its maker closes, unless the graph has a cache; return whether it is used."""
        with self._exchanging():
            if self.cache is None:
                self.cache = cache
            return self.cache is cache

    def use_no_more(self, cache: NeighborCache) -> None:
        """Undo :meth:`use_beside`."""
        with self._exchanging():
            if self.cache is cache:
                self.cache = None

    def _put(self, cache: NeighborCache) -> None:
        """Take a new cache into use, in place of one that another thread has made meanwhile."""
        try:
            with self._graph.locked():
                with self._exchanging():
                    old, self.cache = self.cache, cache
                self._end_loan()
        except BaseException:
            cache.close()
            raise
        if old is not None:
            old.close()

    def lend(self, *, passing: bool = False) -> None:
        """Lend the cache to the budget, which may take the whole cache back while no batch is being sampled with it.

        ``passing``: the cache is a call's, for its own time, unless :meth:`adopt` keeps it.
        """
        self._passing = self.cache if passing else None
        self._end_loan()  # an earlier loan may be of a cache that was given back
        if self.cache is not None and self.cache.reservation is not None:
            self._loan = self._graph.budget.lend(self._lent_bytes, self._give_back, cost=DEAR_COST, of=self.cache.reservation)

    def adopt(self) -> bool:
        """Keep a cache that a call has for its own time alone, on loan; return whether there is a cache."""
        with self._graph.locked():
            self._passing = None
            return self.cache is not None

    def drop_passing(self) -> None:
        """Drop the cache of a call that is over, unless it is no longer there, or others use it, or the graph is closed."""
        with suppress(ClosedError), self._graph.locked():
            passing, self._passing = self._passing, None
            if passing is not None and self.cache is passing:
                self.drop()

    def _lent_bytes(self) -> int:
        cache = self.cache
        return 0 if cache is None or cache.reservation is None else cache.reservation.n_bytes

    def _give_back(self, n_bytes: int) -> int:
        with self._exchanging():
            cache, self.cache = self.cache, None
            if cache is None:
                return 0
            if self._users:
                self.cache = cache
                return 0
        freed = 0 if cache.reservation is None else cache.reservation.n_bytes
        cache.close()
        return freed

    def _stored(
        self,
        n_bytes: int,
        budget: Budget,
        recipe: Mapping[str, Any] | None,
        note: Callable[[int], None] = lambda n_bytes: None,
        *,
        edges: bool,
        allocate: Allocate = private_array,
    ) -> NeighborCache | None:
        """Load the whole adjacency if it fits ``n_bytes``, else the saved cache of ``recipe``; None if there is neither."""
        topology = self._adjacency.topology
        if self._adjacency.list_words() is not None:  # what is stored is of the whole graph
            return None
        if NeighborCache.whole_bytes(topology, edges) <= n_bytes:
            return NeighborCache.build(topology, budget, None, n_bytes, note=note, edges=edges, allocate=allocate)
        if recipe is None:
            return None
        return load_neighbor_cache(self._snapshot.catalog, self._snapshot.files, topology, budget, recipe, edges, allocate)

    def make(self, budget: Budget, scratch: Budget, least: int) -> tuple[NeighborCache, bool]:
        """Make a neighbour cache that fills ``budget``, a share of the graph's that the caller holds; loaders call this.

        ``scratch`` counts the memory for choosing the nodes. A saved cache of at least ``least`` bytes is used even if there is
        memory for a larger one. The method returns the cache, and whether it was loaded as stored: the whole adjacency, or a
        cache that :meth:`choose` saved with its default policy. Raises as :meth:`choose`.
        """
        chosen = _static(NEIGHBOR_POLICY)
        self._graph.check_open()
        n_bytes = budget.available
        saved = saved_bytes(self._snapshot.catalog)
        size = saved if least <= saved <= n_bytes else n_bytes
        found = self._stored(n_bytes, budget, {"policy": chosen.name, "bytes": size, "seed": 0}, edges=False)
        if found is not None:
            return found, True
        with self._graph.or_closed():
            return self._built(budget, self._adjacency.list_scores(chosen), n_bytes, scratch), False

    def _built(
        self,
        budget: Budget,
        scores: npt.NDArray[Any] | WriteScores,
        n_bytes: int,
        scratch: Budget | None,
        note: Callable[[int], None] = lambda n_bytes: None,
        *,
        edges: bool = False,
        allocate: Allocate = private_array,
    ) -> NeighborCache:
        """Make a cache by scores; a view's holds lists of its part alone, so never the whole adjacency, and asks for no other."""
        topology, part = self._adjacency.topology, self._graph.own_part
        only = None if part is None or self._adjacency.list_words() is None else part.has_list
        n_bytes = min(n_bytes, self.most_bytes(edges))
        return NeighborCache.build(topology, budget, scores, n_bytes, scratch, note, edges=edges, allocate=allocate, only=only)

    def most_bytes(self, edges: bool = False) -> int:
        """Count the bytes of a cache of all lists that the graph has, with edge ids for ``edges``."""
        topology, words = self._adjacency.topology, self._adjacency.list_words()
        if words is None:
            return NeighborCache.whole_bytes(topology, edges)
        return huge_bytes(8 * topology.num_lists) + 2 * PAGE_BYTES + words * NeighborCache.entry_bytes(topology, edges)

    def drop(self) -> None:
        """Drop the cache, end its loan and free its memory."""
        with self._exchanging():
            old, self.cache = self.cache, None
        self._end_loan()
        if old is not None:
            old.close()

    def _end_loan(self) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.end()
