"""Types of nodes and of edges, each a range: of the ids of nodes, of list ids, of edge ids.

Users see ids within a type. Within the library there is one space of node ids, in which each type of nodes is a contiguous
range; one space of list numbers, in which each type of edges has a list for each node of its destination's type; and one of
edges, numbered type after type in the order in which they were given. In a graph of one type all three offsets are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.errors import FormatError

__all__ = ["ONE_EDGE", "ONE_NODE", "EdgeKey", "EdgeType", "NodeType", "Types", "edge_name", "name_of_links", "qualified"]

Int64s = npt.NDArray[np.int64]
EdgeKey = tuple[str, str, str]  # type of the source, relation, type of the destination

ONE_NODE = "_"  # the types of a graph of one type
ONE_EDGE: EdgeKey = ("_", "_", "_")


def edge_name(key: EdgeKey) -> str:
    """Write a type of edges as keys of the catalog do."""
    return ",".join(key)


def qualified(of: str, name: str) -> str:
    """Name a field of a type among those of all types: ``"paper/x"``, and ``"x"`` in a graph of one type."""
    return name if of in (ONE_NODE, edge_name(ONE_EDGE)) else f"{of}/{name}"


def name_of_links(name: str, key: EdgeKey) -> str:
    """Name data of links of a type, which are node data of their source: ``"train_edges:writes:paper"``."""
    return name if key == ONE_EDGE else f"{name}:{key[1]}:{key[2]}"


@dataclass(frozen=True)
class NodeType:
    """A type of nodes: ids ``first … stop - 1``."""

    name: str
    first: int
    n: int

    @property
    def stop(self) -> int:
        return self.first + self.n


@dataclass(frozen=True)
class EdgeType:
    """A type of edges: lists ``first_list … first_list + dst.n - 1``, and the edges of these, from ``first_edge`` on."""

    key: EdgeKey
    src: NodeType
    dst: NodeType
    first_list: int
    first_edge: int
    n_edges: int

    @property
    def n_lists(self) -> int:
        return self.dst.n

    def lists_of(self, nodes: Int64s, out: Int64s | None = None) -> Int64s:
        """Compute the numbers of the lists of nodes, which are given by their ids and are of the destination's type."""
        return np.add(nodes, self.first_list - self.dst.first, out=out)


@dataclass(frozen=True)
class Types:
    """All types of a graph, in the order in which their ranges lie.

    Parameters
    ----------
    nodes : dict of str to NodeType
    edges : dict of EdgeKey to EdgeType
    """

    nodes: Mapping[str, NodeType]
    edges: Mapping[EdgeKey, EdgeType]

    @classmethod
    def of(cls, nodes: Mapping[str, int], edges: Mapping[EdgeKey, int]) -> Types:
        """Lay out ranges for types of so many nodes and edges; KeyError for an edge's end that is no type of nodes."""
        node_types, first = {}, 0
        for name, n in nodes.items():
            node_types[name] = NodeType(name, first, n)
            first += n
        edge_types, first_list, first_edge = {}, 0, 0
        for key, n_edges in edges.items():
            src, dst = node_types[key[0]], node_types[key[2]]
            edge_types[key] = EdgeType(key, src, dst, first_list, first_edge, n_edges)
            first_list += dst.n
            first_edge += n_edges
        return cls(node_types, edge_types)

    @classmethod
    def one(cls, num_nodes: int, num_edges: int) -> Types:
        """Make the types of a graph of one type."""
        return cls.of({ONE_NODE: num_nodes}, {ONE_EDGE: num_edges})

    @property
    def is_one(self) -> bool:
        """Whether there is one type of nodes and one of edges, and none of them has a name."""
        return tuple(self.nodes) == (ONE_NODE,) and tuple(self.edges) == (ONE_EDGE,)

    @property
    def num_nodes(self) -> int:
        return sum(each.n for each in self.nodes.values())

    @property
    def num_lists(self) -> int:
        return sum(each.n_lists for each in self.edges.values())

    @property
    def num_edges(self) -> int:
        return sum(each.n_edges for each in self.edges.values())

    def edges_into(self, node_type: str) -> list[EdgeType]:
        """List the types of edges that end at a type of nodes."""
        return [each for each in self.edges.values() if each.dst.name == node_type]

    def entry(self) -> dict[str, Any]:
        """Describe the types as the catalog does; empty for a graph of one type."""
        if self.is_one:
            return {}
        return {
            "node_types": [[each.name, each.n] for each in self.nodes.values()],
            "edge_types": [[*each.key, each.n_edges] for each in self.edges.values()],
        }

    @classmethod
    def of_entry(cls, dataset: Mapping[str, Any], path: str) -> Types:
        """Read what :meth:`entry` wrote, beside the numbers of nodes and edges of all types; FormatError if they disagree."""
        num_nodes, num_edges = int(dataset["num_nodes"]), int(dataset["num_edges"])
        if "node_types" not in dataset and "edge_types" not in dataset:
            return cls.one(num_nodes, num_edges)
        try:
            nodes = {str(name): _count(n) for name, n in dataset["node_types"]}
            edges = {(str(a), str(b), str(c)): _count(n) for a, b, c, n in dataset["edge_types"]}
            found = cls.of(nodes, edges)
        except (TypeError, ValueError, KeyError) as error:
            raise FormatError(f"{path}: the types of the catalog cannot be read: {error!r}", path) from None
        if (found.num_nodes, found.num_edges) != (num_nodes, num_edges):
            raise FormatError(
                f"{path}: {found.num_nodes} nodes and {found.num_edges} edges of all types are not the dataset's", path
            )
        if ONE_NODE in nodes and not found.is_one:
            raise FormatError(f"{path}: a type is named {ONE_NODE!r}, the name of nodes without types", path)
        if any(each.n_edges and not (each.src.n and each.dst.n) for each in found.edges.values()):
            raise FormatError(f"{path}: a type of edges ends at a type without nodes", path)
        return found


def _count(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise ValueError(f"{n!r} is no number")
    return n
