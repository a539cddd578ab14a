"""Sampling over several types of edges: a hop goes from the lists of each type that end at nodes of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from featstore.config import check_integer
from featstore.sampling.scratch import EMPTY, Int64s, Scratch, edge_starts
from featstore.topology.base import Topology
from featstore.topology.types import EdgeKey, EdgeType, Types

__all__ = ["Fanouts", "ListsOfType", "fanouts_of_types", "lists_of_type", "most_drawn"]

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
            raise ValueError(f"fanouts: the graph has no edge type {key!r}; it has {', '.join(map(repr, types.edges)) or 'none'}")
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
    """

    n: int
    starts: Int64s
    at: Int64s = field(default_factory=lambda: EMPTY)
    lists: Int64s = field(default_factory=lambda: EMPTY)
    place: Int64s = field(default_factory=lambda: EMPTY)
    degree: Int64s = field(default_factory=lambda: EMPTY)


def lists_of_type(scratch: Scratch, topology: Topology, kind: EdgeType, at: Int64s, *, edges: bool) -> ListsOfType:
    """Look up the lists of nodes number ``at`` of a batch, which are of the type at which ``kind`` ends."""
    cache, lists = scratch.cache, kind.lists_of(scratch.nodes[at])
    place, degree = np.empty(len(at), np.int64), np.empty(len(at), np.int64)
    if cache is None:
        topology.offsets(lists, place, degree)
        np.invert(place, out=place)
    else:
        cache.locate(lists, place, degree)
    starts = np.empty(len(at) if edges else 0, np.int64)
    if edges and len(at):
        edge_starts(topology, cache, lists, place, starts, degree)
    return ListsOfType(len(at), starts, at, lists, place, degree)
