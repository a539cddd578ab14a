"""Self-reliant parts: PaGraph's algorithm, which puts training nodes where most of their neighbourhoods are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.trainparts import TrainPlacer, add_paths, bring_neighbors, table_bytes
from featstore.budget import Budget, Reservation
from featstore.config import check_at_least
from featstore.distinct import distinct
from featstore.graph.savedparts import HOLDER as PARTS_HOLDER
from featstore.graph.selfreliant import SelfReliantParts
from featstore.partitioning.base import HOLDER
from featstore.topology.base import Topology
from featstore.topology.crossedges import blocks_in
from featstore.topology.liststream import stream_bytes
from featstore.topology.part import MOST_HOPS
from featstore.topology.partarrays import by_part

__all__ = ["VISITS", "TrainParts"]

VISITS: Final = 50  # edges followed, over those of the graph, while neighbourhoods are expanded
REFRESHES: Final = 64  # of the counts of paths
_CALL_VISITS: Final = 1 << 26  # of one call of the core, between which Ctrl-C is answered and progress shown
_BLOCK_NODES: Final = 1 << 14  # training nodes whose lists are read together, at most
_PIECE_EDGES: Final = 1 << 15
_READ_BYTES: Final = 1 << 19  # of two blocks of lists
_PIECE_BYTES: Final = 40 * _PIECE_EDGES  # of positions, and what they are computed of
_ID_BYTES: Final = 24  # beside a list's id: of those that are sorted to find the next hop's nodes
_LEAST_IDS: Final = 1 << 16
_MOST_PATHS: Final = 1e30  # of a count, so that sums of counts stay finite
_MOST_VISITS: Final = 1 << 62  # numbers of the core
_MEMORY_FRACTION: Final = 1 / 2  # of the available memory, that lists, or paths, take at most

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainParts:
    """PaGraph's linear deterministic greedy: training nodes, in a random order, go to the part with the highest score.

    The score of part P for node v is ``(1 + c) * (avg - t) / (n + 1)``. Here ``c`` counts the training nodes of P among the
    in-neighbours of v within ``hops`` hops, ``t`` all training nodes of P, and ``avg`` those of a part on average. ``n`` counts
    the nodes of P: its training nodes and their in-neighbours. Of equal scores the part with the fewest training nodes wins, then
    the lowest. In the end the numbers of training nodes of two parts differ by one at most.

    Parameters
    ----------
    hops : int
        From 1 to 254: as many as the sampler has.
    visits : int
        In-neighbours are looked up node by node, until as many edges were followed as the graph has, ``visits`` times over. For
        the training nodes after that, ``c`` counts paths. These counts, and ``n``, are brought up to date every sixty-fourth of
        the training nodes.

    Notes
    -----
    Differs from equation 1 as printed, which is 0 where a part shares nothing with the node, and divides by 0 where it is empty.

    References
    ----------
    PaGraph, TPDS 2021, section 3.2 and algorithm 1.
    """

    hops: int
    visits: int = VISITS

    def __post_init__(self) -> None:
        object.__setattr__(self, "hops", check_at_least("hops", self.hops, 1, MOST_HOPS))
        object.__setattr__(self, "visits", check_at_least("visits", self.visits, 0))

    def assign(
        self, topology: Topology, train: Int64s, n_parts: int, seed: int, budget: Budget, note: Callable[[int], None]
    ) -> SelfReliantParts:
        """Divide the training nodes, distinct and ascending; the result is counted while it lives. ``note`` gets numbers."""
        n, n_train = topology.num_nodes, len(train)
        stride = -(-n_parts // 8)
        with budget.reserve(HOLDER, n * (4 + stride) + table_bytes(n, n_parts) + 16 * n_train):
            order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(train)
            part, member = np.full(n, -1, np.int32), np.zeros((n, stride), np.uint8)
            placer = TrainPlacer(part, member, n_train, n_parts, self.hops)
            most = min(self.visits * topology.num_edges, _MOST_VISITS)
            done = _put_exact(placer, topology, order, self.hops, most, budget, note)
            if done < n_train:
                _put_by_paths(placer, part, topology, order, done, n_parts, self.hops, budget, note)
            n_nodes = np.empty(n_parts, np.int64)
            placer.sizes(np.empty(n_parts, np.int64), n_nodes)
            offsets, nodes = by_part(part, n_parts, train)
            found = SelfReliantParts(n, self.hops, torch.from_numpy(nodes), offsets, n_nodes)
            budget.reserve(PARTS_HOLDER, nodes.nbytes + offsets.nbytes + n_nodes.nbytes, owner=found)
            return found


def _put_exact(
    placer: TrainPlacer, topology: Topology, order: Int64s, hops: int, most: int, budget: Budget, note: Callable[[int], None]
) -> int:
    """Put training nodes by their neighbourhoods until ``most`` edges were followed; return how many were put."""
    done, size = 0, _BLOCK_NODES
    with budget.reserve(HOLDER, 0) as held:
        lists = _Lists(topology, hops, budget, held)
        while done < len(order) and placer.n_visits < most:
            block = order[done : done + size]
            if not lists.hold(block, is_last=size == 1):
                size = max(1, size // 2)
                continue
            put = placer.put_exact(
                block,
                lists.slot,
                lists.starts[: lists.n + 1],
                lists.ids,
                topology.id_bytes,
                min(most, placer.n_visits + _CALL_VISITS),
            )
            note(put)
            done += put
    return done


class _Lists:
    """Neighbour lists that neighbourhoods need, read in sequence, and kept as long as there is room."""

    def __init__(self, topology: Topology, hops: int, budget: Budget, held: Reservation) -> None:
        self._topology, self._hops, self._held = topology, hops, held
        n, each = topology.num_nodes, topology.id_bytes + _ID_BYTES
        held.resize(5 * n + stream_bytes(_READ_BYTES) + 2 * _PIECE_BYTES)
        self.slot = np.full(n, -1, np.int32)
        self._seen = np.zeros(n, np.bool_)
        room = int(budget.available * _MEMORY_FRACTION)
        self._make(min(n, room // 32), max(_LEAST_IDS, min(topology.num_edges, room // 2 // each)))

    def _make(self, n_lists: int, n_ids: int) -> None:
        """Make room for so many lists and ids, in place of those that are there."""
        self.n = 0
        self.slot.fill(-1)
        self.starts, self.ids = np.zeros(0, np.int64), np.empty(0, self._topology.id_dtype)  # the earlier ones go first
        fixed = 5 * len(self.slot) + stream_bytes(_READ_BYTES) + 2 * _PIECE_BYTES
        self._held.resize(fixed + 8 * (n_lists + 1) + n_ids * (self._topology.id_bytes + _ID_BYTES))
        self.starts, self.ids = np.zeros(n_lists + 1, np.int64), np.empty(n_ids, self._topology.id_dtype)

    def hold(self, nodes: Int64s, *, is_last: bool) -> bool:
        """Hold the lists of all nodes within a hop less of ``nodes``; return whether there is room.

        With ``is_last`` there is in any case, or a BudgetError.
        """
        if self._add(nodes) < 0:
            return True
        self.n = 0
        self.slot.fill(-1)
        while (missing := self._add(nodes)) >= 0:
            if not is_last:
                return False
            n_ids = min(self._topology.num_edges, 2 * len(self.ids) + missing)
            self._make(min(len(self.slot), 2 * len(self.starts) + missing), n_ids)
        return True

    def _add(self, nodes: Int64s) -> int:
        """Read the lists that are not there; return -1, or the ids that there is no room for."""
        met = [np.sort(nodes)]
        try:
            return self._expand(met)
        finally:
            for each in met:
                self._seen[each] = False

    def _expand(self, met: list[Int64s]) -> int:
        """Do as :meth:`_add` for the nodes in ``met``, and put those of each further hop there, if they are new."""
        for hop in range(self._hops):
            todo = met[-1]
            self._seen[todo] = True
            missing = todo[self.slot[todo] < 0]
            _, degrees = self._topology.offsets(missing)
            begin, total = int(self.starts[self.n]), int(degrees.sum())
            if self.n + len(missing) >= len(self.starts) or begin + total > len(self.ids):
                return total
            self.slot[missing] = np.arange(self.n, self.n + len(missing))
            np.cumsum(degrees, out=self.starts[self.n + 1 : self.n + 1 + len(missing)])
            self.starts[self.n + 1 : self.n + 1 + len(missing)] += begin
            first, self.n = self.n, self.n + len(missing)
            for block in self._topology.lists(missing, _READ_BYTES) if total else ():
                low = np.maximum(block.at, 0)
                counts = np.minimum(block.at + block.degree, len(block.ids)) - low
                to = self.starts[first + block.where] + low - block.at
                for k, where in _spread(low, counts):
                    self.ids[to[k] + where - low[k]] = block.ids[where]
            if hop + 1 == self._hops:
                break
            met.append(self._neighbors(todo, only_missing=hop + 2 == self._hops))
            if not len(met[-1]):
                break
        return -1

    def _neighbors(self, nodes: Int64s, *, only_missing: bool) -> Int64s:
        """Find the distinct in-neighbours of nodes whose lists are held, ascending, but those that were met before."""
        slots = self.slot[nodes]
        found = [np.empty(0, np.int64)]
        for _, where in _spread(self.starts[slots], self.starts[slots + 1] - self.starts[slots]):
            ids = self.ids[where]
            found.append(distinct(ids[self.slot[ids] < 0] if only_missing else ids[~self._seen[ids]]).astype(np.int64))
        return distinct(np.concatenate(found))


def _spread(begins: Int64s, counts: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield all positions of ranges in pieces: the range that each position is of, and the position."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, _PIECE_EDGES):
        at = np.arange(first, min(total, first + _PIECE_EDGES))
        of = np.searchsorted(ends, at, side="right")
        yield of, at - (ends[of] - counts[of]) + begins[of]


def _put_by_paths(
    placer: TrainPlacer,
    part: Int32s,
    topology: Topology,
    order: Int64s,
    done: int,
    n_parts: int,
    hops: int,
    budget: Budget,
    note: Callable[[int], None],
) -> None:
    """Put the training nodes from ``done`` on by the paths that lead to them from training nodes of each part.

    Counts of as many parts as memory allows are made in a pass a hop. The first such passes also bring the neighbourhoods of the
    nodes that were put since into the parts.
    """
    n, stride = topology.num_nodes, -(-n_parts // 8)
    chunk = -(-len(order) // REFRESHES)
    with budget.reserve(HOLDER, 2 * n * stride + 8 * n + 4 * chunk * n_parts) as held:
        more_bytes = int(budget.available * _MEMORY_FRACTION) - 8 * n
        width = min(n_parts, 1 + max(0, more_bytes) // max(1, 8 * n))
        held.resize(held.n_bytes + 8 * n * (width - 1))
        fresh, brought = np.zeros((n, stride), np.uint8), np.empty((n, stride), np.uint8)
        paths, more = np.empty(n * width, np.float32), np.empty(n * width, np.float32)
        counts = np.zeros((chunk, n_parts), np.float32)
        before = order[:0]
        while len(before) or done < len(order):
            now = order[done : done + chunk]
            fresh.fill(0)
            _set_bits(fresh, before, part)
            placer.join(fresh)
            n_counted = 0 if not done else n_parts if len(now) else 1  # at first there is nothing; in the end nodes are brought
            for first in range(0, n_counted, width):
                shape = n, min(width, n_parts - first)
                known: npt.NDArray[np.float32] | None = None
                for _ in range(hops):
                    into = more[: shape[0] * shape[1]].reshape(shape)
                    into.fill(0)
                    brought.fill(0)
                    for block in blocks_in(topology, budget, HOLDER):
                        edges = block.offsets, block.first_node, block.ids, block.ids.itemsize, block.first_edge
                        if len(now):
                            add_paths(*edges, part, first, known, into)
                        if not first:
                            bring_neighbors(*edges, fresh, brought)
                    if not first:
                        placer.join(brought)
                        fresh, brought = brought, fresh
                    np.minimum(into, _MOST_PATHS, out=into)
                    is_at_rest = not len(now) or (known is not None and _same(into, known))  # and so in further hops
                    is_at_rest = is_at_rest and (first > 0 or not fresh.any())
                    known, paths, more = into, more, paths
                    if is_at_rest:
                        break
                if known is not None:
                    counts[: len(now), first : first + shape[1]] = known[now]
            placer.put_by(now, counts[: len(now)])
            note(len(now))
            done, before = done + len(now), now


def _same(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    pieces = range(0, len(one), _BLOCK_NODES)
    return all(np.array_equal(one[first : first + _BLOCK_NODES], other[first : first + _BLOCK_NODES]) for first in pieces)


def _set_bits(bits: npt.NDArray[np.uint8], nodes: Int64s, part: Int32s) -> None:
    """Set the bit of each node's own part; the nodes are distinct."""
    own = part[nodes]
    bits[nodes, own // 8] |= np.left_shift(1, own % 8).astype(np.uint8)
