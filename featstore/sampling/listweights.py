"""Weights of edges as samplers draw by them: list by list, from memory or read for the lists of a hop."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from featstore._core import weighted as _core
from featstore._core.sampler import Hops
from featstore.budget import DEAR_COST
from featstore.config import listed
from featstore.errors import BudgetError, FeatstoreWarning, warn
from featstore.gather.buffers import BufferPool, huge_array
from featstore.graph.feature import FeatureStore
from featstore.sampling.aliastables import COLUMN_BYTES, NO_COLUMNS, AliasTables, checked_before
from featstore.sampling.orderedweights import as_doubles
from featstore.sampling.scratch import EMPTY, Int64s, Scratch
from featstore.sampling.typed import ListsOfType
from featstore.storage.rundir import has_no_room
from featstore.topology.base import Topology, huge_bytes
from featstore.topology.types import EdgeKey, EdgeType, edge_name, qualified

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["EDGE_WEIGHTS", "ListWeights"]

Doubles = npt.NDArray[np.float64]

EDGE_WEIGHTS = "edge weights"  # in the budget's report
_PIECE = 1 << 16  # lists, or edge ids, at once
_LEAST, _MOST = 1 << 14, 1 << 20  # edges whose weights are read at once, but for a longer list
_BYTES_AN_EDGE = 32  # its position, its number, its weight as it is read, and its column
_READ_FRACTION = 1 / 16  # of the budget, for what is read at once
_KEPT_FRACTION = 1 / 2  # of what is left: weights are kept in memory if they take no more

_MAKING = threading.Lock()  # one set of weights at a time, so that threads which make samplers share them
_SHARED: weakref.WeakValueDictionary[tuple[int, str, tuple[EdgeKey, ...]], ListWeights] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    global _MAKING
    _MAKING = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


@dataclass
class _OfType:
    """The weights of one type of edges."""

    kind: EdgeType
    store: FeatureStore
    all_positive: bool = True

    def is_current(self, g: OutOfCoreGraph, name: str) -> bool:
        """Tell whether the graph has this store: one of changed rows takes its place."""
        return g.edge_features.get(qualified(edge_name(self.kind.key), name)) is self.store


class ListWeights:
    """The weights of edges that a sampler draws by, of each type of edges that it draws from.

    Parameters
    ----------
    g : OutOfCoreGraph
    name : str
        An edge feature.
    keys : sequence of EdgeKey
        Types of edges, each of which has such a feature.

    Raises
    ------
    KeyError, TypeError, ValueError, NotImplementedError
        There is no such feature; it is not of floats, or has several a row; a weight is negative, infinite or NaN: the error
        names the edge; a list has more than 2²⁹ edges.
    CorruptionError, BudgetError, ClosedError, OSError
        Reading failed.

    Notes
    -----
    The feature is read once, in sequence, to check it. Draws read columns that are made of the weights of a list
    (``kernels/weighted.h``), 8 bytes an edge. The columns of all lists are kept in memory, on loan, if they take at most half of
    what is left of the budget. Edges that were not given in the order of the lists then take a pass over their numbers for each
    part of the weights that fits a quarter of what is left. Otherwise columns are in a run file (:class:`AliasTables`), made with
    the first sampler, or at the first draw after the budget took the memory back. A hop reads those of short lists, and those
    that the first trials of long ones look at; where these trials do not suffice, all of the list. Where the file cannot be made,
    for lack of disk or memory, a hop reads the weights of whole lists, and a warning says so.
    """

    def __init__(self, g: OutOfCoreGraph, name: str, keys: Sequence[EdgeKey]) -> None:
        self.name, self._g = name, g
        self._of_types = [_of_type(g, name, g.types.edges[key]) for key in keys]
        most = _core.LONGEST
        if max(each.kind.n_edges for each in self._of_types) > most and g.topology.largest_degree > most:
            raise NotImplementedError(f"weight: a node has more than {most} edges, which are not drawn from by weight")
        for each in self._of_types:
            _check(each)
        self._users: deque[None] = deque()  # counted without a lock, which a fork could leave locked
        self._kept: list[Doubles] | None = None  # columns, of each type
        self._reservation = g.budget.reserve(EDGE_WEIGHTS, 0, owner=self)
        self._loan = g.budget.lend(self._lent_bytes, self._give_back, cost=DEAR_COST, of=self._reservation)
        self._tables: dict[int, AliasTables] = {}  # by the number of the type
        self._making, self._may_make, self._pid = threading.Lock(), True, os.getpid()
        self._keep()
        if not self.in_memory:
            self._make_tables()

    @classmethod
    def of(cls, g: OutOfCoreGraph, name: str, keys: Sequence[EdgeKey]) -> ListWeights:
        """Get the weights that another sampler of the graph has, unless they were changed since, or make them."""
        if not isinstance(name, str):
            raise TypeError(f"weight is the name of an edge feature, not {name!r}")
        key = id(g), name, tuple(keys)
        found = _SHARED.get(key)
        if found is None or not found._serves(g):
            with _MAKING:
                found = _SHARED.get(key)
                if found is None or not found._serves(g):
                    found = _SHARED[key] = cls(g, name, keys)
        return found

    def _serves(self, g: OutOfCoreGraph) -> bool:
        """Tell whether new samplers of a graph draw by these weights: of its features as they are, in this process."""
        is_current = self._g is g and all(each.is_current(g, self.name) for each in self._of_types)
        is_current &= not any(each.is_damaged for each in tuple(self._tables.values()))  # another thread may add one
        return is_current and (self.in_memory or bool(self._tables) or self._pid == os.getpid())

    @property
    def in_memory(self) -> bool:
        """Whether the weights are in memory."""
        return self._kept is not None

    def read_bytes(self, disjoint: bool) -> int:
        """Memory to read a turn of lists, and those that lack columns, or a longer list; 0 if the weights are in memory."""
        if self.in_memory:
            return 0
        # A disjoint batch may have each list many times.
        most, longest = self._most, self._g.topology.largest_degree
        n_edges = max(most, longest) if disjoint else max(each.kind.n_edges for each in self._of_types)
        n_more = min(n_edges, most) if self._tables or self._may_make else 0
        return _BYTES_AN_EDGE * (min(n_edges, max(most, longest)) + n_more)

    @property
    def _most(self) -> int:
        """The most edges whose weights are read at once, unless a list is longer."""
        return min(max(int(self._g.budget.total * _READ_FRACTION) // _BYTES_AN_EDGE, _LEAST), _MOST)

    # -- memory ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _using(self) -> Iterator[list[Doubles] | None]:
        """Yield the columns in memory, which the budget does not take back meanwhile."""
        self._users.append(None)
        try:
            yield self._kept
        finally:
            self._users.pop()

    def _lent_bytes(self) -> int:
        return 0 if self._kept is None else self._reservation.n_bytes

    def _give_back(self, n_bytes: int) -> int:
        kept, self._kept = self._kept, None
        if kept is None:
            return 0
        if self._users:
            self._kept = kept
            return 0
        freed = self._reservation.n_bytes
        self._reservation.release()
        return freed

    def _keep(self) -> None:
        """Load the weights into memory if they fit."""
        budget, n_bytes = self._g.budget, sum(huge_bytes(each.kind.n_edges * COLUMN_BYTES) for each in self._of_types)
        if n_bytes > budget.available * _KEPT_FRACTION:
            return
        self._reservation.resize(n_bytes)
        try:
            self._kept = [self._load(each) for each in self._of_types]
        except BaseException:
            self._reservation.release()
            raise
        self._loan.renew()

    def _make_tables(self) -> None:
        """Write the alias tables of weights that are not in memory, unless another thread does or it was tried.

        Draws read weights of whole lists meanwhile, and in a process that was forked before.
        """
        if not self._may_make or self.in_memory:
            return
        if self._pid != os.getpid():
            self._may_make = False
            warn(
                f"weight={self.name!r}: the weights do not fit the memory, and this process was forked before their alias tables "
                "were made, so each hop reads the weights of whole lists, which is much slower: make the sampler in this process",
                FeatstoreWarning,
            )
            return
        if not self._making.acquire(blocking=False):
            return
        try:
            for at, each in enumerate(self._of_types if self._may_make else ()):
                if at not in self._tables:
                    self._tables[at] = AliasTables(self._g, each.store, each.kind)
            self._may_make = False
        except (BudgetError, OSError) as error:
            if isinstance(error, OSError) and not has_no_room(error):
                raise
            self._may_make = False
            warn(
                f"weight={self.name!r}: the weights do not fit the memory, and there is no room for their alias tables, so each "
                f"hop reads the weights of whole lists, which is much slower: {error}",
                FeatstoreWarning,
            )
        finally:
            self._making.release()

    def _load(self, of: _OfType) -> Doubles:
        """Load the weights of a type of edges in the order of its lists, and make their columns."""
        kind, topology = of.kind, self._g.topology
        columns = huge_array(kind.n_edges * COLUMN_BYTES).view(np.float64)[: kind.n_edges]
        if topology.edge_ids is None:
            for first, rows in of.store.blocks():
                columns[first : first + len(rows)] = as_doubles(rows)
        else:
            self._load_moved(of, columns)
        for begin in range(kind.first_list, kind.first_list + kind.n_lists, _PIECE):
            stop = min(begin + _PIECE, kind.first_list + kind.n_lists)
            with checked_before(of.store):
                too_long = _core.make_columns(columns, topology.offsets_between(begin, stop) - kind.first_edge)
            assert too_long < 0, "no list is longer than LONGEST, as the constructor checked"
        return columns

    def _load_moved(self, of: _OfType, weights: Doubles) -> None:
        """Load weights that were given in another order: a part of them at a time, each in a pass over the edge ids."""
        kind, numbers = of.kind, self._g.topology.edge_ids
        assert numbers is not None
        n_part = max(_PIECE, self._g.budget.available // 4 // (COLUMN_BYTES + of.store.row_bytes))
        buffer = np.empty(_PIECE, numbers.dtype)
        for first in range(0, kind.n_edges, n_part):
            part = as_doubles(of.store[first : first + n_part])
            for begin, ids in numbers.pieces(kind.first_edge, kind.first_edge + kind.n_edges, buffer):
                at = begin - kind.first_edge
                _core.place_weights(part, kind.first_edge + first, ids, weights[at : at + len(ids)])

    # -- draws -------------------------------------------------------------------------------------------------------------------

    def draw(
        self, scratch: Scratch, lists: ListsOfType, fanout: int, replace: bool, key: int, topology: Topology, pool: BufferPool
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Draw a hop from lists of one type of edges.

        Returns
        -------
        tensor, tensor
            Where each drawn neighbour lies and its list, as for :meth:`Hops.start` with ``drawn``.
        int
            Neighbours that are in the file.
        """
        hops, n_dst = scratch.hops, lists.n
        number = self._type_of(lists, topology)
        of = self._of_types[number]
        room, _, _ = hops.count(n_dst, fanout, replace)
        src, dst = (pool.tensor((room,), torch.int64) for _ in range(2))
        # A list that is drawn from gives as many as the fan-out.
        words = pool.array((max(1, min(fanout, room)),), np.int64)
        starts = self._starts(scratch, lists, topology, pool)
        arrays = src.numpy(), dst.numpy()
        with self._using() as kept:
            if kept is not None:
                if of.kind.first_edge:
                    starts = np.subtract(starts, of.kind.first_edge, out=pool.array((n_dst,), np.int64))
                n_edges, n_missing = _core.draw(hops, 0, n_dst, fanout, replace, key, kept[number], starts, *arrays, 0, words)
                return src[:n_edges], dst[:n_edges], n_missing
        self._make_tables()
        drawn = self._draw_read(number, hops, n_dst, (fanout, replace, key), starts, arrays, words, topology, pool)
        return src[: drawn[0]], dst[: drawn[0]], drawn[1]

    def _draw_read(
        self,
        number: int,
        hops: Hops,
        n_dst: int,
        how: tuple[int, bool, int],
        starts: Int64s,
        arrays: tuple[Int64s, Int64s],
        words: Int64s,
        topology: Topology,
        pool: BufferPool,
    ) -> tuple[int, int]:
        """Draw a hop by columns that are read, a turn of lists at a time; returns its edges, and those that are in the file."""
        (fanout, replace, _), of, tables, most = how, self._of_types[number], self._tables.get(number), self._most
        n_trials = 0 if tables is None else _core.sparse_trials(fanout, replace)
        may_skip = of.all_positive and not replace
        first = pool.array((n_dst,), np.int64)
        begin = n_edges = n_missing = 0
        while begin < n_dst:
            turn = hops, begin, n_dst, *how, may_skip, starts, most, first
            stop, n = _core.turn(*turn, EMPTY, n_trials)
            columns = here = NO_COLUMNS  # those of the turn before are free
            if n:
                positions = pool.array((n,), np.int64)
                _core.turn(*turn, positions, n_trials)
                if tables is None:
                    columns = self._read(of, positions, topology, pool)
                    with checked_before(of.store):
                        _core.make_columns_of(hops, begin, stop, first, columns)
                else:
                    columns = tables.read(positions, pool, (hops, begin, stop), first, n_trials)
                del positions
            while begin < stop:  # as many at a time as there is room for, if their trials do not suffice
                until, n_more = stop, 0
                if n_trials and n:
                    until, n_more = _core.lacking(hops, begin, stop, *how, columns, first, most, n_trials)
                here = columns
                if tables is not None and n_more:
                    positions = pool.array((n_more,), np.int64)
                    _core.place_lacking(hops, begin, until, n, starts, first, positions)
                    here = tables.read(positions, pool, (hops, begin, until), first, n_trials, columns)
                    del positions
                n_edges, more = _core.draw(hops, begin, until, *how, here, first, *arrays, n_edges, words, n_trials)
                n_missing += more
                begin = until
        return n_edges, n_missing

    def _type_of(self, lists: ListsOfType, topology: Topology) -> int:
        """Find the number of the type of edges that lists are of."""
        if len(self._of_types) == 1 or not len(lists.lists):
            return 0
        at = int(lists.lists[0]) % topology.num_lists
        return next(i for i, each in enumerate(self._of_types) if 0 <= at - each.kind.first_list < each.kind.n_lists)

    def _starts(self, scratch: Scratch, lists: ListsOfType, topology: Topology, pool: BufferPool) -> Int64s:
        """Find the stored position of the first edge of each list."""
        cache, n = scratch.cache, lists.n
        place = lists.place if len(lists.lists) else scratch.place[:n]
        if cache is not None and cache.whole:
            return place
        found = pool.array((n,), np.int64)
        if cache is None and scratch.lists is None:
            return np.invert(place, out=found)
        ids = scratch.ids_of(scratch.nodes[:n], pool) if not len(lists.lists) else lists.lists
        if len(lists.lists) and scratch.disjoint:
            ids = np.remainder(ids, topology.num_lists)
        topology.offsets(ids, found, pool.array((n,), np.int64))
        return found

    def _read(self, of: _OfType, positions: Int64s, topology: Topology, pool: BufferPool) -> Doubles:
        """Read the weights of stored edges; ``positions`` are overwritten."""
        if topology.edge_ids is not None:
            topology.edge_ids.replace(positions, pool.array)
        if of.kind.first_edge:
            positions -= of.kind.first_edge
        weights = pool.tensor((len(positions),), torch.float64)
        weights.copy_(of.store.gather(torch.from_numpy(positions)).reshape(-1))
        return weights.numpy()


def _of_type(g: OutOfCoreGraph, name: str, kind: EdgeType) -> _OfType:
    """Find the feature of a type of edges, and check its shape."""
    of = qualified(edge_name(kind.key), name)
    if of not in g.edge_features:
        others = any(each.endswith(f"/{name}") for each in g.edge_features)  # which are of several types
        advice = f"; each type in fanouts needs one: leave {kind.key} out, or give it weights of 1" if others else ""
        raise KeyError(f"weight: the graph has no edge feature {of!r}; there is {listed(g.edge_features)}{advice}")
    store = g.edge_features[of]
    if len(store.shape) > 2 or store.shape[1:].numel() != 1:
        raise ValueError(f"weight: edge feature {of!r} has the shape {list(store.shape)}; a weight is one number an edge")
    return _OfType(kind, store)


def _check(of: _OfType) -> None:
    """Read all weights of a type of edges; ValueError names the first that is none."""
    for first, rows in of.store.blocks():
        bad, n_zeros = _core.first_bad_weight(as_doubles(rows))
        if bad >= 0:
            raise ValueError(
                f"weight: edge {first + bad} has {float(rows.reshape(-1)[bad])} in edge feature {of.store.name!r}; weights are "
                "finite and not negative"
            )
        of.all_positive &= not n_zeros
