"""Fields that a dataset is made of: features and data of nodes, features of edges, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from featstore.config import listed
from featstore.creation.source import ArrayLike, Source, open_source
from featstore.storage.catalog import EDGE, NODE
from featstore.topology.edgeids import EDGE_IDS

__all__ = ["Field", "check_edge_rows", "check_field_name", "open_fields", "total_bytes"]

Field = tuple[str, str, str, Source]  # key (NODE or EDGE), role, name, rows

# Fields of the adjacency, whose keys and files are those of edge features.
_TAKEN = ("chunk_directory", "chunks", EDGE_IDS, "indices", "indptr", "out_degree")


def check_field_name(name: object, of: str = "a field") -> None:
    """Raise ValueError unless a field can have this name; ``of`` is what else has it, in the message."""
    if not isinstance(name, str) or not name.isprintable() or not re.fullmatch(r"[^./][^/]{0,59}", name):
        raise ValueError(f"{of} has a name of 1 to 60 printable characters without '/', not starting with '.': {name!r}")


def open_fields(
    features: Mapping[str, ArrayLike] | None,
    node_data: Mapping[str, ArrayLike] | None,
    edge_features: Mapping[str, ArrayLike] | None,
    num_nodes: int,
    nodes: str = "nodes",
    advice: Mapping[int, str] = {},
) -> list[Field]:
    """Open all fields; check their names, and that fields of nodes have a row for each node.

    ``nodes`` is the text after the number of nodes in messages, with its origin; ``advice``, by a wrong number of rows, is the
    text after that. Raises as :meth:`featstore.OutOfCoreGraph.create`.
    """
    for argument, given in (("features", features), ("node_data", node_data), ("edge_features", edge_features)):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"{argument} must be a mapping of names to arrays, such as {{'x': array}}, not {type(given).__name__}"
            )
    features, node_data, edge_features = features or {}, node_data or {}, edge_features or {}
    for name in (*features, *node_data, *edge_features):
        check_field_name(name)
    if twice := sorted(set(features) & set(node_data)):
        raise ValueError(f"named both as a feature and as node data: {', '.join(twice)}")
    if taken := sorted(set(edge_features) & set(_TAKEN)):
        raise ValueError(f"edge features cannot be named {listed(taken)}: the adjacency has fields of these names")
    found: list[Field] = [(NODE, "feature", name, open_source(f"feature {name!r}", value)) for name, value in features.items()]
    for _, _, name, source in found:
        _check_rows("feature", name, source, num_nodes, nodes + advice.get(source.n_rows, ""))
    found += [(NODE, "data", name, open_source(f"node data {name!r}", value)) for name, value in node_data.items()]
    opened = ((name, open_source(f"edge feature {name!r}", value)) for name, value in edge_features.items())
    return found + [(EDGE, "feature", name, source) for name, source in opened]


def check_edge_rows(fields: Iterable[Field], num_edges: int) -> None:
    """Raise ValueError unless edge features have a row for each edge."""
    for key, _, name, source in fields:
        if key == EDGE:
            _check_rows("edge feature", name, source, num_edges, "edges")


def _check_rows(what: str, name: str, source: Source, n: int, of: str) -> None:
    if source.n_rows != n:
        raise ValueError(f"{what} {name!r} has {source.n_rows} rows, but the graph has {n} {of}")


def total_bytes(fields: Iterable[Field]) -> int:
    return sum(source.n_rows * source.row_bytes for *_, source in fields)
