"""The neighbour lists of one type of edges, numbered as those of a graph that has no other types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.lists import first_bad_id
from featstore.errors import CorruptionError
from featstore.topology.base import Topology
from featstore.topology.listblocks import NodeLists
from featstore.topology.types import ONE_EDGE, EdgeType, edge_name

__all__ = ["EdgeLists"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EdgeLists:
    """The lists of a type of edges: list ``v`` is that of destination ``v``, both as ids within the destination's type.

    Ids are stored among those of all types; :meth:`to_local` makes them ids within the source's type. In a graph of one type
    nothing is shifted. Thread-safe.
    """

    topology: Topology
    kind: EdgeType

    @property
    def n_lists(self) -> int:
        """Destinations, each of which has a list."""
        return self.kind.n_lists

    @property
    def n_sources(self) -> int:
        """Nodes of the source's type; ids within the type are below it."""
        return self.kind.src.n

    @property
    def n_edges(self) -> int:
        return self.kind.n_edges

    @property
    def id_bytes(self) -> int:
        return self.topology.id_bytes

    @property
    def id_dtype(self) -> np.dtype[Any]:
        return self.topology.id_dtype

    @property
    def path(self) -> str:
        return self.topology.path

    def degrees(self, first: int, stop: int) -> Int64s:
        """Compute the lengths of lists ``first … stop - 1``, int64."""
        begin = self.kind.first_list
        return self.topology.degrees(begin + first, begin + stop)

    def lists(self, first: int, stop: int, block_bytes: int) -> Iterator[NodeLists]:
        """Yield lists ``first … stop - 1`` as :meth:`Topology.lists` does, ids as they are stored."""
        begin = self.kind.first_list
        return self.topology.lists(np.arange(begin + first, begin + stop), block_bytes)

    def edges_into(self, first: int, stop: int) -> tuple[Int64s, Int64s]:
        """Read all edges of lists ``first … stop - 1``: sources within their type, and the list of each less ``first``, int64."""
        begin = self.kind.first_list
        starts, degrees = self.topology.offsets(np.arange(begin + first, begin + stop))
        ends = np.cumsum(degrees)
        positions = np.repeat(starts - ends + degrees, degrees)
        positions += np.arange(len(positions))
        found = np.empty(len(positions), self.id_dtype)
        if len(positions):
            self.topology.read_edges(positions, found)
            self.topology.check_found(positions, found)
            self.to_local(found)
        return found.astype(np.int64), np.repeat(np.arange(stop - first), degrees)

    def to_local(self, ids: npt.NDArray[Any]) -> None:
        """Turn stored ids, which are nodes of the graph, into ids within the source's type, in place.

        CorruptionError: a node is of another type.
        """
        if self.kind.key == ONE_EDGE:
            return  # a graph of one type, whose ids were checked as they were read
        ids -= ids.dtype.type(self.kind.src.first)
        bad = first_bad_id(ids, self.id_bytes, self.n_sources)
        if bad >= 0:
            found = int(ids[bad]) + self.kind.src.first
            raise CorruptionError(
                f"a list of {edge_name(self.kind.key)!r} names node {found} of all types, which is no {self.kind.src.name!r}",
                self.path,
            )
