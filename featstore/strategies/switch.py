"""One share of the memory for two caches in turn: neighbour lists while sampling, feature rows while gathering."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import CACHE_COST, Budget, Loan, Reservation
from featstore.cache.table import FeatureCache
from featstore.epochmemory import Use
from featstore.errors import BudgetError, CorruptionError
from featstore.gather.buffers import huge_array
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.strategies.domain import Domain
from featstore.topology.base import Topology, huge_bytes

__all__ = ["CacheSwitch", "NeighborFile", "NoSwitch"]

BLOCK_ITEMS = 1 << 20  # items of an array of a neighbour file that are read at once
# Names of the share in the graph's budget, one for each cache that can be in it.
FEATURES = "superbatch caches (features)"
NEIGHBORS = "superbatch caches (neighbors)"

Int64s = npt.NDArray[np.int64]


class NeighborFile:
    """A neighbour cache in a run file, which is loaded again for every superbatch."""

    def __init__(self, path: str, cache: NeighborCache, disk: DiskQuota) -> None:
        self._shapes: dict[str, tuple[int, np.dtype[Any]]] = {}
        with SectionWriter(path, "neighbors", disk) as writer:
            for name, array in cache.to_arrays().items():
                self._shapes[name] = len(array), array.dtype
                for first in range(0, len(array), BLOCK_ITEMS):
                    writer.append(array[first : first + BLOCK_ITEMS])
            self._file: SectionFile = writer.finish()

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache in memory."""
        return sum(huge_bytes(n * dtype.itemsize) for n, dtype in self._shapes.values())

    def remove(self) -> None:
        """Delete the file."""
        self._file.remove()

    def load(self, topology: Topology, budget: Budget, check: Callable[[], None]) -> NeighborCache:
        """Load the cache; ``budget`` counts its arrays.

        Raises
        ------
        BudgetError, CorruptionError, OSError
        """
        reservation = budget.reserve("neighbor cache", self.n_bytes)
        try:
            arrays: dict[str, npt.NDArray[Any]] = {}
            number = 0
            for name, (n, dtype) in self._shapes.items():
                array = arrays[name] = huge_array(n * dtype.itemsize).view(dtype)
                for first in range(0, n, BLOCK_ITEMS):
                    check()
                    array[first : first + BLOCK_ITEMS] = self._file[number]
                    number += 1
            try:
                return NeighborCache.from_arrays(topology, arrays, reservation)
            except ValueError as error:
                raise CorruptionError(f"the neighbour cache does not fit the topology: {error}", self._file.path) from None
        except BaseException:
            reservation.release()
            raise


class NoSwitch:
    """The switch of the serial schedule without caches: it does nothing."""

    def to_neighbors(self, check: Callable[[], None]) -> None:
        """Do nothing: no cache is held."""

    def to_features(self, rows: Mapping[str, Int64s], check: Callable[[], None]) -> None:
        """Do nothing: a plan for no slots begins with no rows."""


class CacheSwitch:
    """The feature caches and the neighbour cache of a loader, which use one share of the graph's budget in turn.

    The share is not released between the two. It is larger for the neighbour cache, which gets all memory but working buffers:
    nothing is gathered then.

    Parameters
    ----------
    nodes : Domain
    capacities : mapping of str to int
        Rows of each feature's cache.
    n_bytes : int
        Bytes of the share: those of the feature caches.
    while_sampling : callable () -> int
        Bytes that the neighbour cache may have beside the share, because nothing is gathered.
    room : callable () -> int, optional
        Puts the share on loan. Returns the bytes that the share may take when an epoch begins.

    Attributes
    ----------
    share : Budget
        The budget of the share. Its peak shows that the two caches are never in memory at once.

    Raises
    ------
    BudgetError
        The graph's budget has no room for the share.

    Notes
    -----
    A neighbour cache that the graph had before is used, and not replaced. If the share has no room for the offsets of a
    neighbour cache, 8 bytes a node, lists are read from the file. One thread at a time.
    """

    def __init__(
        self,
        nodes: Domain,
        capacities: Mapping[str, int],
        n_bytes: int,
        while_sampling: Callable[[], int],
        room: Callable[[], int] | None = None,
    ) -> None:
        graph = nodes.graph
        assert isinstance(graph, OutOfCoreGraph)
        self._graph, self._nodes = graph, nodes
        self._capacities, self._wanted = dict(capacities), dict(capacities)
        self._most_bytes = n_bytes
        self._while_sampling, self._room = while_sampling, room
        self._features_bytes = n_bytes
        # A running epoch may have claimed the features' caches: the share is then taken with the first claim.
        free = [name for name in capacities if not nodes.is_claimed(name)]
        self._reservation = graph.budget.reserve(FEATURES, n_bytes if len(free) == len(capacities) else 0)
        self.share = Budget(self._reservation.n_bytes, "superbatch caches")
        self._neighbors: NeighborCache | None = None
        self._file: NeighborFile | None = None
        self._runs: RunDirectory | None = None
        self._disk = DiskQuota(0)
        self._planner: Reservation | None = None
        self._claim: weakref.ref[Use] | None = None
        self._taking = threading.Lock()  # held while the share is taken or given back
        self._loan: Loan | None = None
        try:
            with graph.locked():  # an epoch of another loader may begin meanwhile
                for name in free:
                    if not nodes.is_claimed(name):
                        self._use(name, 0)
        except BaseException:
            self.close()
            raise
        if room is not None:
            self._loan = graph.budget.lend(self._lent_bytes, self._give_back, cost=CACHE_COST, of=self._reservation)

    @property
    def _is_claimed(self) -> bool:
        return self._claim is not None and self._claim() is not None

    def _lent_bytes(self) -> int:
        """Return the bytes on loan: the whole share, or none while a neighbour cache is in use."""
        return 0 if self._is_claimed and self._reservation.holder == NEIGHBORS else self._reservation.n_bytes

    def _lends_again(self) -> None:
        """Renew the loan if nothing was on loan, because the share is about to be lent again."""
        if self._loan is not None and not self._lent_bytes():
            self._loan.renew()

    def _give_back(self, n_bytes: int) -> int:
        """Give back the whole share between epochs; during one, the bytes that the feature caches can spare."""
        if not self._taking.acquire(blocking=False):
            return 0
        try:
            held = self._lent_bytes()
            if self._is_claimed and held:
                for name in self._capacities:
                    cache = self._nodes.stores[name].cache
                    if cache is not None and cache.budget is self.share:
                        cache.give_back(-(-n_bytes // len(self._capacities)))
                self._resize(self.share.used)
            elif held:
                self._drop_features()
                self._resize(0)
            return held - self._reservation.n_bytes
        finally:
            self._taking.release()

    def capacity(self, names: Iterable[str]) -> int:
        """Get the number of rows that the cache of each of these features has room for."""
        return min((self._capacities.get(name, 0) for name in names), default=0)

    def claim(self) -> Use:
        """Claim the features' caches for an epoch, as :meth:`~featstore.strategies.caches.ClaimedCaches.claim` does."""
        claim = Use()
        with self._graph.locked(), self._taking:
            self._nodes.check_free()
            self._claim = weakref.ref(claim)
            for name in self._capacities:
                self._use(name, 0)
            if self._room is not None:
                self._take_share(self._room)
            elif self._reservation.n_bytes < self._most_bytes:
                self._resize(self._most_bytes)
        return claim

    def _take_share(self, room: Callable[[], int]) -> None:
        """Take the share anew, as large as at first, or as large as ``room()`` allows now.

        Within an epoch the memory of the neighbour cache cannot be taken back: samplers use it.
        """
        self._lends_again()
        self._resize(0)
        nodes = self._nodes
        self._capacities = nodes.cut(self._wanted, min(self._most_bytes, room()))
        n_bytes = nodes.bytes_of(self._capacities)
        self._resize(sum(n_bytes[name] for name in self._capacities))

    def _resize(self, n_bytes: int) -> None:
        self._reservation.resize(n_bytes)
        self.share.total = n_bytes

    def release(self) -> None:
        """End the epoch; may be called again."""
        self._lends_again()
        self._claim = None
        for name in self._capacities:
            cache = self._nodes.stores[name].cache
            if cache is not None and cache.budget is self.share:
                cache.release()

    def begin(self, runs: RunDirectory, disk: DiskQuota, planner: Reservation) -> None:
        """Begin an epoch: the neighbour cache is kept in one of its run files, and its nodes are chosen in the planner's memory.

        The planner does not run while nodes are chosen.
        """
        self._runs, self._disk, self._planner = runs, disk, planner

    def end(self) -> None:
        """Drop the neighbour cache, its run file, and its memory beyond that of the feature caches, which stay."""
        self._drop_neighbors()
        with self._taking:
            if self._reservation.holder == NEIGHBORS:
                self._resize(min(self._features_bytes, self.share.total))
                self._reservation.holder = FEATURES
        if self._file is not None:
            self._file.remove()
            self._file = None
        self._runs = self._planner = None

    def _use(self, name: str, capacity: int) -> FeatureCache:
        store = self._nodes.stores[name]
        with self._graph.locked():
            old = store.cache
            if old is not None and old.budget is self.share:
                old.release()
            cache = self._nodes.make_cache(name, capacity, self.share)
            claim = None if self._claim is None else self._claim()
            if claim is not None:
                cache.claim(claim)
            if old is not None and old.budget is self.share:
                cache.count_on_from(old)
            return cache

    def to_neighbors(self, check: Callable[[], None]) -> None:
        """Drop the feature caches and load the neighbour cache."""
        graph = self._graph
        with self._taking:
            for name in self._capacities:
                self._use(name, 0)
            self._features_bytes = self.share.total
            self._reservation.holder = NEIGHBORS
            if graph.neighbor_cache is None:
                wanted = min(self._features_bytes + self._while_sampling(), NeighborCache.whole_bytes(graph.topology))
                if self._file is not None:  # the file holds the cache as it was chosen, no more
                    wanted = min(wanted, self._file.n_bytes)
                with suppress(BudgetError):  # other holders took the memory first
                    self._resize(max(self._features_bytes, wanted))
        if graph.neighbor_cache is None and self.share.available > huge_bytes(8 * graph.num_nodes):
            self._neighbors = self._load_neighbors(check)
            if not graph.neighbor_lists.use_beside(self._neighbors):  # another thread was faster
                self._drop_neighbors()

    def _load_neighbors(self, check: Callable[[], None]) -> NeighborCache:
        if self._file is not None and self._file.n_bytes > self.share.available:  # the share has become smaller
            self._file.remove()
            self._file = None
        if self._file is not None:
            return self._file.load(self._graph.topology, self.share, check)
        assert self._planner is not None
        scratch = Budget(self._planner.n_bytes, "planner")
        cache, is_stored = self._graph.neighbor_lists.make(self.share, scratch, self._features_bytes)
        if not is_stored and self._runs is not None and (self._disk.total is None or 4 * cache.nbytes <= self._disk.total):
            try:
                self._file = NeighborFile(self._runs.file("neighbors"), cache, self._disk)
            except BaseException:
                cache.close()
                raise
        return cache

    def _drop_neighbors(self) -> None:
        if self._neighbors is not None:
            self._graph.neighbor_lists.use_no_more(self._neighbors)
            self._neighbors.close()
            self._neighbors = None

    def to_features(self, rows: Mapping[str, Int64s], check: Callable[[], None]) -> None:
        """Drop the neighbour cache, make the feature caches and load each one's ``rows``, in one ascending pass."""
        self._drop_neighbors()
        with self._taking:
            self._resize(min(self._features_bytes, self.share.total))
        rows_left = self._nodes.cut(self._capacities, self.share.total)
        caches = []
        with self._taking:
            self._lends_again()
            self._reservation.holder = FEATURES
            for name, capacity in self._capacities.items():
                cache = self._use(name, rows_left[name])
                cache.is_cut = rows_left[name] < capacity  # plans are made for the capacity at the begin of the epoch
                caches.append(cache)
        for name, cache in zip(self._capacities, caches, strict=True):

            def read(some: Int64s, out: npt.NDArray[np.uint8], name: str = name) -> None:
                check()
                self._nodes.read(name, some, out)

            cache.preload(rows[name], read)

    def close(self) -> None:
        """Drop the caches and give the share back; may be called again."""
        if self._loan is not None:
            self._loan.end()
        self.end()
        self._drop_features()
        self._reservation.release()

    def _drop_features(self) -> None:
        for name in self._capacities:
            store = self._nodes.stores[name]
            cache = store.cache
            if cache is not None and cache.budget is self.share:
                cache.release()
                store.use_cache(None)
                cache.close()
