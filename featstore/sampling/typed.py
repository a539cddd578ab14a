"""Sampling over several types of edges: a hop goes from the lists of each type that end at nodes of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from featstore.config import check_integer, listed
from featstore.gather.buffers import BufferPool
from featstore.sampling.scratch import EMPTY, Int64s, Scratch, edge_starts
from featstore.topology.base import Topology
from featstore.topology.noderows import by_type
from featstore.topology.types import EdgeKey, EdgeType, Types

__all__ = [
    "Fanouts",
    "HopLists",
    "JoinedLists",
    "ListsOfType",
    "fanouts_of_types",
    "lists_of_type",
    "most_drawn",
    "nodes_of_types",
    "number_owners",
]

Fanouts = dict[EdgeKey, tuple[int, ...]]


def fanouts_of_types(types: Types, fanouts: Any) -> Fanouts:
    """Read the fan-outs of each type of edges: a mapping, in which a type that is not named has 0, or one list for all.

    Raises
    ------
    ValueError, TypeError
        A type that the graph has not; lists of different lengths, or none; numbers that are no fan-outs.
    """
    if not isinstance(fanouts, Mapping):
        fanouts = dict.fromkeys(types.edges, fanouts)
    found: Fanouts = {}
    for key, each in fanouts.items():
        if key not in types.edges:
            raise ValueError(f"fanouts: the graph has no edge type {key!r}; it has {listed(types.edges)}")
        try:
            found[key] = tuple(check_integer("a fan-out", fanout) for fanout in each)
        except TypeError:
            raise TypeError(f"fanouts of {key!r} must be a sequence of integers, one a hop, not {each!r}") from None
        for fanout in found[key]:
            if not -1 <= fanout < 2**31:
                raise ValueError(f"a fan-out of {key!r} is -1 (all), or from 0 to 2**31 - 1, not {fanout}")
    depths = {key: len(each) for key, each in found.items()}
    if len(set(depths.values())) > 1:
        raise ValueError(f"fanouts have a number for each hop, and as many hops for all edge types, not {depths}")
    depth = max(depths.values(), default=0)
    if not depth:
        raise ValueError(f"fanouts name no hop: {fanouts!r}")
    return {key: found.get(key, (0,) * depth) for key in types.edges}


def most_drawn(types: Types, fanouts: Fanouts) -> tuple[int, ...]:
    """Bound the neighbours that a node draws in each hop, over all types of edges that end at it; -1: all."""
    depth = len(next(iter(fanouts.values())))
    found = []
    for hop in range(depth):
        of_nodes = dict.fromkeys(types.nodes, 0)
        for key, each in fanouts.items():
            before = of_nodes[key[2]]
            of_nodes[key[2]] = -1 if min(before, each[hop]) < 0 else before + each[hop]
        found.append(-1 if min(of_nodes.values()) < 0 else min(max(of_nodes.values()), 2**31 - 1))
    return tuple(found)


@dataclass(frozen=True)
class ListsOfType:
    """The lists that a hop goes from, of one type of edges.

    Parameters
    ----------
    n : int
    starts : int64 array, shape (n,) or (0,)
        Position of each list's first edge, if edges are numbered; see :attr:`Scratch.starts`.
    at : int64 array, shape (n,)
        Numbers in the batch of the nodes that have these lists, ascending.
    lists, place, degree : int64 array, shape (n,)
        As for :meth:`Hops.expand_lists`. In a graph of one type these and ``at`` are empty: list ``i`` is that of the batch's
        node ``i``, and the scratch has its place, in arrays that are replaced as it grows.
    offsets : int64 array, shape (n,), or None
        As for :meth:`Hops.start`.
    """

    n: int
    starts: Int64s
    at: Int64s = field(default_factory=lambda: EMPTY)
    lists: Int64s = field(default_factory=lambda: EMPTY)
    place: Int64s = field(default_factory=lambda: EMPTY)
    degree: Int64s = field(default_factory=lambda: EMPTY)
    offsets: Int64s | None = None


def nodes_of_types(types: Types, nodes: Int64s, first: int) -> dict[str, Int64s]:
    """Find the numbers of the nodes of each type in a batch, from number ``first`` on; ``nodes`` are the ids of all."""
    found = by_type(nodes[first:], types.nodes.values())
    for at in found:
        at += first
    return dict(zip(types.nodes, found, strict=True))


def lists_of_type(
    scratch: Scratch, topology: Topology, kind: EdgeType, at: Int64s, pool: BufferPool, *, edges: bool
) -> ListsOfType:
    """Look up the lists of nodes number ``at`` of a batch, which are of the type at which ``kind`` ends."""
    nodes, place, degree, starts = (pool.array((n,), np.int64) for n in (len(at), len(at), len(at), len(at) if edges else 0))
    np.take(scratch.nodes, at, out=nodes, mode="clip")  # "raise" would take through another array
    cache, ids, offsets = scratch.cache, scratch.ids_of(nodes, pool), scratch.offsets_of(nodes, pool)
    lists = kind.lists_of(ids, out=ids)
    if cache is None:
        topology.offsets(lists, place, degree)
        np.invert(place, out=place)
    else:
        cache.locate(lists, place, degree)
    if len(starts):
        edge_starts(topology, cache, lists, place, starts, degree)
    if offsets is not None:  # a list draws anew in each subgraph
        np.floor_divide(offsets, scratch.num_nodes, out=nodes)
        nodes *= topology.num_lists
        lists += nodes
    return ListsOfType(len(at), starts, at, lists, place, degree, offsets)


def number_owners(places: Int64s, owners: Int64s, pool: BufferPool) -> None:
    """Replace the numbers of lists in ``places`` by the numbers of their nodes, ``owners``."""
    places[:] = np.take(owners, places, out=pool.array(places.shape, np.int64), mode="clip")


@dataclass(frozen=True)
class HopLists:
    """The lists that a hop of a batch draws from, type of edges after type, in each in the order of their nodes.

    Parameters
    ----------
    places : int64 array, shape (n,)
        Numbers of the lists in the batch, see :class:`JoinedLists`.
    owners : int64 array, shape (n,)
        Numbers in the batch of the nodes whose lists they are.
    ends : list of int
        For each type of edges, how many of the lists are of it or of a type before.
    """

    places: Int64s
    owners: Int64s
    ends: list[int]


class JoinedLists:
    """The lists of a batch, numbered as they join with their nodes: hop after hop, and in a hop type of edges after type.

    A list joins in the hop in which its node draws first, unless neither that hop nor a later one draws from it. With ``redraw``
    lists stay for all later hops; otherwise a hop draws from the lists alone that join in it.
    """

    def __init__(self, types: Types, fanouts: Fanouts, *, redraw: bool) -> None:
        self._types, self._redraw = types, redraw
        self._kinds = [(types.edges[key], each) for key, each in fanouts.items()]
        self._joined: list[list[tuple[int, Int64s]]] = []  # of each type: the first of some lists, and whose they are
        self._n_nodes = self.n = 0

    def join(self, nodes: Int64s, hop: int) -> tuple[int, Int64s]:
        """Let the lists of the nodes join that a batch has before a hop; return the first of the new ones, and their numbers.

        ``nodes`` are the ids of all of the batch's nodes; called for hop after hop.
        """
        if not (self._redraw and self._joined):
            self._joined = [[] for _ in self._kinds]
        first, known, lists = self.n, self._n_nodes, [EMPTY]
        of_types = nodes_of_types(self._types, nodes, known)
        for (kind, fanouts), joined in zip(self._kinds, self._joined, strict=True):
            owners = of_types[kind.dst.name]
            if len(owners) and any(fanouts[hop:] if self._redraw else fanouts[hop : hop + 1]):
                joined.append((self.n, owners))
                self.n += len(owners)
                lists.append(kind.lists_of(nodes[owners]))
        if self.n >= 2**31:
            raise OverflowError("a batch has at most 2**31 lists: sample fewer seeds a batch, or fewer types of edges")
        self._n_nodes = len(nodes)
        return first, np.concatenate(lists)

    def drawing(self, hop: int) -> HopLists:
        """Find the lists that a hop draws from, after :meth:`join` for it."""
        places, owners, ends, n = [EMPTY], [EMPTY], list[int](), 0
        for (_, fanouts), joined in zip(self._kinds, self._joined, strict=True):
            for first, nodes in joined if fanouts[hop] else ():
                places.append(np.arange(first, first + len(nodes)))
                owners.append(nodes)
                n += len(nodes)
            ends.append(n)
        return HopLists(np.concatenate(places), np.concatenate(owners), ends)
