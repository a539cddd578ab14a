"""A type of nodes or of edges of an open graph: its number, and its fields by their own names."""

from __future__ import annotations

from dataclasses import dataclass

from featstore.display import Display, ShownAsTables
from featstore.graph.fields import Fields
from featstore.graph.showing import show_type
from featstore.topology.types import EdgeKey

__all__ = ["EdgeView", "NodeView"]


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

    def _display(self) -> Display:
        return show_type(f"EdgeView({self.type!r}, num_edges={self.num_edges})", self.features)
