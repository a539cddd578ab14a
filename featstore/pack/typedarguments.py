"""Arguments for graphs of several types, which packs and loaders share: seeds of a type, samplers, features by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from featstore.config import listed
from featstore.graph.base import StoredGraph
from featstore.sampling.batches import check_given
from featstore.sampling.hops import refuse_types
from featstore.sampling.typedbatches import BatchesOfType
from featstore.topology.noderows import NodeRows
from featstore.topology.types import NodeType, Types

__all__ = ["check_typed_sampler", "features_of_types", "mixed_text", "seeds_of_type", "types_of"]


def types_of(g: StoredGraph) -> Types | None:
    """Get the types of a graph; None if it has one of nodes and one of edges, without names."""
    return None if g.types.is_one else g.types


def seeds_of_type(types: Types, seeds: Any) -> tuple[NodeType, Any]:
    """Read seeds that are given as ``(type, ids)``, ``(type, mask)`` or ``(type, batches)``.

    Returns the type, and the ids, a tensor, or batches, among the nodes of all types.

    Raises
    ------
    TypeError, ValueError, IndexError
        Seeds without their type, or of no type of the graph; ids that are not nodes of it.
    """
    names = listed(types.nodes)
    if not isinstance(seeds, tuple) or len(seeds) != 2 or not isinstance(seeds[0], str):
        raise TypeError(f"seeds: a graph of several types has seeds of one of them, (type, ids), where the types are {names}")
    name, given = seeds
    if name not in types.nodes:
        raise ValueError(f"seeds: the graph has no node type {name!r}; it has {names}")
    kind = types.nodes[name]
    if hasattr(given, "epoch"):
        return kind, BatchesOfType(given, kind)
    if given is None:
        raise TypeError(f"seeds: ({name!r}, None) names no nodes; all of the type are ({name!r}, np.arange({kind.n}))")
    return kind, check_given(given, kind.n)[0] + kind.first


def check_typed_sampler(types: Types, sampler: Any) -> None:
    """Raise NotImplementedError for a sampler that does not draw several types of edges."""
    if getattr(sampler, "fanouts_of_types", None) is None:
        refuse_types(type(sampler), types)


def features_of_types(g: StoredGraph, types: Types, features: Any) -> dict[str, NodeRows]:
    """Find the columns of the features that are asked for, and the rows of the types they are asked of.

    Parameters
    ----------
    g : StoredGraph
    types : Types
        Those of ``g``.
    features : str, sequence of str, or mapping of str to such
        By name, of all types that have it; or by type, some of its names.

    Raises
    ------
    TypeError, ValueError
        No names; names that no type has, or a type has not; a name twice.
    """
    columns = _columns(g)
    if not isinstance(features, Mapping):
        names = [features] if isinstance(features, str) else features
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"features must be given by name, or as a mapping of types to names, not as {features!r}")
        features = {}
        for name in names:
            having = [kind for kind in types.nodes if f"{kind}/{name}" in columns]
            if not having:
                there = sorted({each.rpartition("/")[2] for each in columns})
                raise ValueError(f"features: no type has {name!r}; there is {listed(there)}")
            for kind in having:
                features.setdefault(kind, []).append(name)
    asked: dict[str, list[NodeType]] = {}
    for kind, names in features.items():
        if kind not in types.nodes:
            raise ValueError(f"features: the graph has no node type {kind!r}; it has {listed(types.nodes)}")
        names = [names] if isinstance(names, str) else list(names)
        if len(set(names)) < len(names):
            raise ValueError(f"features of {kind!r}: a name occurs twice in {names}")
        for name in names:
            if f"{kind}/{name}" not in columns:
                there = [each.rpartition("/")[2] for each in columns if each.startswith(f"{kind}/")]
                raise ValueError(f"features: {kind!r} has no {name!r}; it has {listed(there)}")
            asked.setdefault(columns[f"{kind}/{name}"], []).append(types.nodes[kind])
    return {store: g.node_rows(store).only(kinds) for store, kinds in asked.items()}


def mixed_text(strategy: str, stores: Iterable[str]) -> str:
    """Word the refusal of columns with different rows by a strategy that plans one cache."""
    return (
        f"features: strategy {strategy!r} plans one cache, and {listed(stores)} are not stored for the same "
        "types of nodes; take strategy='ondemand', or features that the same types have"
    )


def _columns(g: StoredGraph) -> dict[str, str]:
    """Name the store that holds each feature of each type, by ``type/feature``."""
    return {f"{kind.name}/{store.rpartition('/')[2]}": store for store in g.columns for kind in g.node_rows(store).kinds}
