"""A loader's arguments in a graph of several types: seeds of a type, features by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featstore.load.arguments import check_edge_features
from featstore.pack.batches import PackBatches
from featstore.pack.packgraph import Graph, PackedGraph
from featstore.pack.typedarguments import check_typed_sampler, features_of_types, mixed_text
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies.base import Strategy
from featstore.strategies.domain import Domain
from featstore.topology.types import NodeType, Types, edge_name

__all__ = ["check_typed", "domain_of", "edge_features_of", "seed_type_of"]


def seed_type_of(types: Types, batches: SampledBatches, strategy: Strategy) -> NodeType:
    """Find the type of the seeds of a strategy's own batches, those of a pack; NotImplementedError for others, which say none."""
    if not isinstance(batches, PackBatches):
        raise NotImplementedError(
            f"strategy {strategy.name!r} brings batches that do not say of which type their seeds are; only those of a pack do"
        )
    return types.nodes[str(batches.pack.seed_type)]


def check_typed(types: Types, strategy: Strategy, sampler: Any, history: Any) -> None:
    """Raise NotImplementedError for what is not built for several types."""
    if history is not None:
        raise NotImplementedError("history: historical embeddings are not built for graphs of several types")
    if not type(strategy).takes_types:
        raise NotImplementedError(f"strategy {strategy.name!r} does not take graphs of several types")
    if sampler is not None:
        check_typed_sampler(types, sampler)


def edge_features_of(g: Graph, types: Types, features: Any, sampler: Any) -> tuple[str, ...]:
    """Find the stores of edge features: by name, of all types of edges that have it; or by type, some of its names.

    Raises
    ------
    TypeError, ValueError
        No names; names that no type has, or a type has not; the sampler does not number edges.
    """
    if isinstance(features, Mapping):
        asked = [
            f"{edge_name(key) if isinstance(key, tuple) else key}/{name}"
            for key, names in features.items()
            for name in ([names] if isinstance(names, str) else names)
        ]
    else:
        names = [features] if isinstance(features, str) else list(features)
        asked, there = [], () if isinstance(g, PackedGraph) else g.edge_features  # a pack has none, as check_edge_features says
        for name in names:
            having = [store for store in there if store.rpartition("/")[2] == name]
            asked += having or [name]  # check_edge_features says that there is none
    return check_edge_features(g, asked, sampler)


def domain_of(g: Graph, types: Types, features: Any, strategy: Strategy) -> Domain:
    """Make the domain of the features that are asked for: by name, of all types that have it; or by type, some of its names.

    Raises
    ------
    TypeError, ValueError
        As of :func:`~featstore.pack.typedarguments.features_of_types`.
    NotImplementedError
        The strategy plans one cache, and the features are of different types.
    """
    rows = features_of_types(g, types, features)
    found = Domain.of_rows(g, {store: g.columns[store] for store in rows}, rows)
    if found.is_mixed and not type(strategy).takes_mixed:
        raise NotImplementedError(mixed_text(strategy.name, rows))
    return found
