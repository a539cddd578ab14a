"""The report of an import: what was read and made, as text and as plain containers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from featstore.idmaps.idmap import IDS_KEY, maps_of
from featstore.storage.catalog import Catalog
from featstore.topology.types import ONE_NODE, qualified

__all__ = ["Report"]


@dataclass
class Report:
    """Report of an import: what was read and made.

    Parameters
    ----------
    source : str
        Name of the layout, such as ``"ogb"``.
    folder : str
        What was read.
    path : str
        Directory of the dataset.
    nodes, edges : mapping of str to int
        Numbers that the dataset has, by type; those of edges by ``"author,writes,paper"``. Without types, one type each: ``"_"``
        and ``"_,_,_"``.
    edges_read : int
        Edges in the files, which are more or fewer than the dataset's if edges were cleaned.
    loops_dropped, duplicates_dropped : int
        Edges that ``remove_self_loops``, ``coalesce`` and ``to_undirected`` have removed.
    reverses_added : int
        Edges that were added as the reverses of others.
    unlabelled : mapping of str to int
        Nodes without a label, by the name of the labels: rows of NaN only, or of negative whole numbers.
    splits : mapping of str to int
        Nodes of each split, by the name of its node data.
    notes : list of str
        What was left out or chosen, and why.
    seconds : float
    features, edge_features : mapping of str to list of int
        Shapes, by name; with types ``"paper/x"``.
    ids : mapping of str to str
        Kinds of the nodes' ids in tables, by type: ``"text"`` or ``"int64"``.
    """

    source: str
    folder: str
    path: str
    nodes: dict[str, int]
    edges: dict[str, int]
    edges_read: int
    loops_dropped: int = 0
    duplicates_dropped: int = 0
    reverses_added: int = 0
    unlabelled: dict[str, int] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    features: dict[str, list[int]] = field(default_factory=dict)
    edge_features: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def add_shapes(self, catalog: Catalog) -> None:
        """Add the shapes of a new dataset's features, and the kinds of its ids."""
        self.ids = {of: str(catalog.extra[IDS_KEY + of]["kind"]) for of in maps_of(catalog)}
        for key, record in catalog.fields.items():
            of, kind, name = key.split("/", 2)
            if record.role == "feature":
                shapes = self.features if of == "node" else self.edge_features
                shapes[qualified(kind, name)] = list(record.shape)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain containers, as ``--json`` prints them."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        n_nodes, n_edges = sum(self.nodes.values()), sum(self.edges.values())
        lines = [f"{self.path}: {n_nodes:,} nodes, {n_edges:,} edges, from {self.folder} ({self.source})"]
        if len(self.nodes) > 1 or len(self.edges) > 1:
            lines += [f"  node type  {name}: {n:,} nodes" for name, n in self.nodes.items()]
            lines += [f"  edge type  {name}: {n:,} edges" for name, n in self.edges.items()]
        for of, kind in self.ids.items():
            lines.append(f"  ids{'' if of == ONE_NODE else f'  {of}'}: {'text' if kind == 'text' else 'whole numbers'}")
        if self.loops_dropped or self.duplicates_dropped or self.reverses_added or self.edges_read != n_edges:
            dropped = f"{self.loops_dropped:,} self loops and {self.duplicates_dropped:,} duplicates dropped"
            lines.append(f"  edges read: {self.edges_read:,}; {self.reverses_added:,} reverses added; {dropped}")
        lines += [f"  feature  {name}: {shape}" for name, shape in self.features.items()]
        lines += [f"  edge feature  {name}: {shape}" for name, shape in self.edge_features.items()]
        lines += [f"  labels  {name}: {n:,} nodes have none" for name, n in self.unlabelled.items()]
        lines += [f"  split  {name}: {n:,} nodes" for name, n in self.splits.items()]
        lines += [f"  note: {each}" for each in self.notes]
        return "\n".join([*lines, f"made in {self.seconds:.1f} s"])
