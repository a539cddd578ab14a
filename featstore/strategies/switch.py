"""One share of the memory for two caches, one after the other: neighbour lists while sampling, feature rows while gathering."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget, Loan, Reservation
from featstore.cache.rowmap import huge_array
from featstore.cache.sizes import rows_within
from featstore.cache.table import LOAN_COST, FeatureCache
from featstore.epochmemory import Use
from featstore.errors import BudgetError, CorruptionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.neighborcache import NeighborCache
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.strategies.domain import Domain
from featstore.topology.base import Topology, huge_bytes

__all__ = ["CacheSwitch", "NeighborFile", "NoSwitch"]

BLOCK_ITEMS = 1 << 20  # of one array of a neighbour file: what is read at once
# What the graph's budget calls the share, by what is in it.
FEATURES = "superbatch caches (features)"
NEIGHBORS = "superbatch caches (neighbors)"

Int64s = npt.NDArray[np.int64]


class NeighborFile:
    """A neighbour cache in a run file, to be loaded again superbatch after superbatch."""

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
        """Bytes of the cache, loaded."""
        return sum(huge_bytes(n * dtype.itemsize) for n, dtype in self._shapes.values())

    def remove(self) -> None:
        """Delete the file."""
        self._file.remove()

    def load(self, topology: Topology, budget: Budget, check: Callable[[], None]) -> NeighborCache:
        """Return the cache again, its arrays counted in ``budget``.

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
    """The serial schedule without caches."""

    def to_neighbors(self, check: Callable[[], None]) -> None:
        """Nothing is held."""

    def to_features(self, rows: Int64s, check: Callable[[], None]) -> None:
        """Nothing is loaded: a plan for no slots begins with no rows."""


class CacheSwitch:
    """Feature caches and neighbour cache of a loader, in one share of the graph's budget that is never given back in between.

    While the neighbour cache has it, the share is larger: it has all memory but working buffers, since nothing is gathered then.

    Parameters
    ----------
    nodes : Domain
    capacities : mapping of str to int
        Rows of each feature's cache.
    n_bytes : int
        The share: what those caches take.
    while_sampling : callable () -> int
        Bytes beside the share that the neighbour cache may have, as nothing is gathered.
    room : callable () -> int, optional
        The share is on loan between epochs; how many bytes it may take, once it was taken back.

    Attributes
    ----------
    share : Budget
        Who holds what of the share now; its peak shows that the two never lie beside each other.

    Raises
    ------
    BudgetError
        The graph's budget does not have the share.

    Notes
    -----
    A neighbour cache that the graph had before is left alone, and used. Where the share has no room for the offsets of a
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
        # An epoch under way may have caches: the share is then taken when they are free, with the first lease.
        free = [name for name in capacities if not nodes.is_claimed(name)]
        self._reservation = graph.budget.reserve(FEATURES, n_bytes if len(free) == len(capacities) else 0)
        self.share = Budget(self._reservation.n_bytes, "superbatch caches")
        self._neighbors: NeighborCache | None = None
        self._file: NeighborFile | None = None
        self._runs: RunDirectory | None = None
        self._disk = DiskQuota(0)
        self._planner: Reservation | None = None
        self._lease: weakref.ref[Use] | None = None
        self._taking = threading.Lock()  # held while the share is taken or given back
        self._loan: Loan | None = None
        try:
            for name in free:
                self._use(name, 0)
        except BaseException:
            self.close()
            raise
        if room is not None:
            self._loan = graph.budget.lend(self._lent_bytes, self._give_back, cost=LOAN_COST, of=self._reservation)

    @property
    def _is_leased(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def _lent_bytes(self) -> int:
        """Return the bytes of the share, but for those of a neighbour cache that is in use."""
        return 0 if self._is_leased and self._reservation.holder == NEIGHBORS else self._reservation.n_bytes

    def _lends_again(self) -> None:
        """Note that the share will be on loan, where it is not: a neighbour cache has it, or others."""
        if self._loan is not None and not self._lent_bytes():
            self._loan.renew()

    def _give_back(self, n_bytes: int) -> int:
        """Give the whole share back between epochs; within one, what the feature caches can do without."""
        if not self._taking.acquire(blocking=False):
            return 0
        try:
            held = self._lent_bytes()
            if self._is_leased and held:
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

    @property
    def capacity(self) -> int:
        """Rows that every feature's cache has room for."""
        return min(self._capacities.values(), default=0)

    def lease(self) -> Use:
        """Take the features' caches for an epoch, as :meth:`~featstore.strategies.caches.LeasedCaches.lease` does."""
        lease = Use()
        with self._graph.locked(), self._taking:
            self._nodes.check_free()
            self._lease = weakref.ref(lease)
            for name in self._capacities:
                self._use(name, 0)
            if self._room is not None:
                self._take_share(self._room)
            elif self._reservation.n_bytes < self._most_bytes:
                self._resize(self._most_bytes)
        return lease

    def _take_share(self, room: Callable[[], int]) -> None:
        """Take the share anew, as large as it was at first, or as there is room for now, beside what other loaders need.

        Within an epoch a neighbour cache cannot be taken back: samplers use it.
        """
        self._lends_again()
        self._resize(0)
        nodes = self._nodes
        rows = rows_within(min(self._most_bytes, room()), nodes.n, list(nodes.row_bytes.values()))
        self._capacities = {name: min(capacity, rows) for name, capacity in self._wanted.items()}
        self._resize(sum(nodes.bytes_of(rows)[name] for name, rows in self._capacities.items()))

    def _resize(self, n_bytes: int) -> None:
        self._reservation.resize(n_bytes)
        self.share.total = n_bytes

    def release(self) -> None:
        """End the epoch; may be called again."""
        self._lends_again()
        self._lease = None
        for name in self._capacities:
            cache = self._nodes.stores[name].cache
            if cache is not None and cache.budget is self.share:
                cache.release()

    def begin(self, runs: RunDirectory, disk: DiskQuota, planner: Reservation) -> None:
        """Keep the neighbour cache among the run files of an epoch from now on, and choose its nodes in what the planner holds.

        The planner rests meanwhile.
        """
        self._runs, self._disk, self._planner = runs, disk, planner

    def end(self) -> None:
        """Drop the neighbour cache and its run file; the feature caches stay as they are."""
        self._drop_neighbors()
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
            lease = None if self._lease is None else self._lease()
            if lease is not None:
                cache.lease(lease)
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
                if self._file is not None:  # it was chosen for the memory that there was
                    wanted = min(wanted, self._file.n_bytes)
                with suppress(BudgetError):  # others were quicker
                    self._resize(max(self._features_bytes, wanted))
        if graph.neighbor_cache is None and self.share.available > huge_bytes(8 * graph.num_nodes):
            self._neighbors = graph.neighbor_cache = self._load_neighbors(check)

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
            if self._graph.neighbor_cache is self._neighbors:
                self._graph.neighbor_cache = None
            self._neighbors.close()
            self._neighbors = None

    def to_features(self, rows: Int64s, check: Callable[[], None]) -> None:
        """Drop the neighbour cache, make the feature caches and load ``rows`` into them, in one ascending pass."""
        self._drop_neighbors()
        with self._taking:
            self._resize(min(self._features_bytes, self.share.total))
        rows_left = rows_within(self.share.total, self._nodes.n, list(self._nodes.row_bytes.values()))
        caches = []
        with self._taking:
            self._lends_again()
            self._reservation.holder = FEATURES
            for name, capacity in self._capacities.items():
                cache = self._use(name, min(capacity, rows_left))
                cache.is_cut = rows_left < capacity  # plans are made for what the share was when the epoch began
                caches.append(cache)
        for name, cache in zip(self._capacities, caches, strict=True):

            def read(some: Int64s, out: npt.NDArray[np.uint8], name: str = name) -> None:
                check()
                self._nodes.read(name, some, out)

            cache.preload(rows, read)

    def close(self) -> None:
        """Give the share back; its caches are dropped. May be called again."""
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
