"""A type of nodes or of edges of an open graph: its number, and its fields by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featstore.config import no_attribute
from featstore.display import Display, ShownAsTables
from featstore.graph.fields import Fields
from featstore.graph.showing import show_type
from featstore.topology.types import EdgeKey

__all__ = ["EdgeView", "NodeView"]

_OF_EDGES = {"add_feature": "name, rows", "remove_feature": "name"}
_OF_NODES = {
    **_OF_EDGES,
    "add_data": "name, rows",
    "append_nodes": "n, features, data",
    "remove_data": "name",
    "update_data": "name, ids, rows",
}  # methods of the graph, and their arguments before type=


def _missing(view: NodeView | EdgeView, name: str, of_graph: Mapping[str, str]) -> AttributeError:
    """Make the error of a missing attribute, which names the graph's method that takes the type."""
    return no_attribute(view, name, f"it is g.{name}({of_graph[name]}, type={view.type!r})" if name in of_graph else "")


@dataclass(frozen=True, eq=False, repr=False)
class NodeView(ShownAsTables):
    """A type of nodes of a graph, ``g["paper"]``; rows and values are indexed by ids within the type.

    Attributes
    ----------
    type : str
    num_nodes : int
    features : mapping of str to FeatureStore
    node_data : mapping of str to Tensor
        As :attr:`featstore.OutOfCoreGraph.node_data`.
    """

    type: str
    num_nodes: int
    features: Fields
    node_data: Fields

    if not TYPE_CHECKING:  # for a type checker __getattr__ would define every name

        def __getattr__(self, name: str) -> Any:
            raise _missing(self, name, _OF_NODES)

    def _display(self) -> Display:
        return show_type(f"NodeView({self.type!r}, num_nodes={self.num_nodes})", self.features, self.node_data)


@dataclass(frozen=True, eq=False, repr=False)
class EdgeView(ShownAsTables):
    """A type of edges of a graph, ``g["author", "writes", "paper"]``.

    Attributes
    ----------
    type : tuple (source, relation, destination)
    num_edges : int
    features : mapping of str to FeatureStore
        Row ``i`` is that of the type's edge ``i`` in the order of the input.
    """

    type: EdgeKey
    num_edges: int
    features: Fields

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _missing(self, name, _OF_EDGES)

    def _display(self) -> Display:
        return show_type(f"EdgeView({self.type!r}, num_edges={self.num_edges})", self.features)
