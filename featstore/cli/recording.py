"""The seeds that training would begin with, the rows that it would ask for, and the batches of a recorded trace."""

from __future__ import annotations

import torch

from featstore.cli.splits import Labelled, no_seeds, split_seeds
from featstore.config import listed
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.graph.typeviews import NodeView
from featstore.pack.packgraph import Graph, PackedGraph
from featstore.pack.typedarguments import features_of_types, types_of
from featstore.sampling.batches import check_seeds
from featstore.sampling.sampledbatches import EpochBatches, SampledBatches
from featstore.strategies.domain import Domain
from featstore.topology.noderows import NodeRows

__all__ = ["TracedBatches", "check_target", "nodes_with", "rows_asked_for", "seeds_among_all", "seeds_of"]


class TracedBatches(SampledBatches):
    """The batches of a trace, as far as strategies ask of them before a run: how many, and how large."""

    run_length = 1

    def __init__(self, n_batches: int, n_rows: int, batch_size: int) -> None:
        self._n_batches, self.most_rows, self.batch_size = n_batches, n_rows, batch_size

    def __len__(self) -> int:
        return self._n_batches

    def digest(self) -> str:
        """Return a constant: traces are not distinguished."""
        return ""

    def sampled(self, epoch: int) -> EpochBatches:
        """Raise an error: a trace has no blocks."""
        raise NotImplementedError("a trace has the ids of batches, not their blocks")


def seeds_of(g: Labelled, labels: str, name: str | None = None) -> torch.Tensor:
    """Get the training seeds; ValueError, with advice, if there are none.

    Nodes without a label are left out (:func:`split_seeds`). ``name`` names other node data with the seeds, ids or a mask,
    whatever their labels.
    """
    whose, there = repr(g.type) if isinstance(g, NodeView) else "the dataset", f"it has {listed(sorted(g.node_data))}"
    if name is not None:
        if name not in g.node_data:
            raise ValueError(f"--seeds: {whose} has no node data {name!r}; {there}")
        return check_seeds(g.node_data[name], g.num_nodes)
    if labels not in g.node_data:
        raise ValueError(f"labels: {whose} has no {labels!r}; {there}. Name others with --labels, or nodes with --seeds")
    seeds = split_seeds(g, "train", labels)
    if seeds is None or not len(seeds):
        raise ValueError(f"{no_seeds(seeds, g.node_data)}. Name other nodes with --seeds")
    return check_seeds(seeds, g.num_nodes)


def seeds_among_all(g: OutOfCoreGraph, target: str | None, labels: str, name: str | None = None) -> torch.Tensor:
    """Get the training seeds as :func:`seeds_of` does, those of the type ``target`` among the ids of all types.

    ValueError if the graph has several types and ``target`` is none of them, or has one and ``target`` is given.
    """
    check_target(g, target)
    if target is None:
        return seeds_of(g, labels, name)
    return seeds_of(g[target], labels, name) + g.types.nodes[target].first


def check_target(g: Graph, target: str | None) -> None:
    """Check that a type of nodes is named if the graph has several, and only then; ValueError otherwise."""
    if g.types.is_one:
        if target is not None:
            raise ValueError(
                f"--target: {target!r} names a type of nodes, and the graph has one type, without a name: leave it out"
            )
    elif target not in g.types.nodes:
        what, names = "is needed" if target is None else f"there is no {target!r}", listed(g.node_types)
        there = "pack" if isinstance(g, PackedGraph) else "dataset"
        raise ValueError(f"--target: {what}; the {there} has the node types {names}: name that of the nodes to classify")


def nodes_with(g: Graph, feature: str) -> Domain:
    """Make the domain of a feature of every node that has it, with a part for each column; ValueError: nothing has it."""
    types = types_of(g)
    if types is None:
        return Domain.of_nodes(g, [feature])
    rows = features_of_types(g, types, feature)
    return Domain.of_rows(g, {name: g.columns[name] for name in rows}, rows)


def rows_asked_for(g: OutOfCoreGraph, feature: str) -> tuple[FeatureStore, NodeRows]:
    """Find the rows of a feature that batches ask for, which one cache serves, and the rows that nodes have there.

    In a graph of several types ``feature`` is a name, of all types that have it, or ``type/name``. ValueError if there is none,
    or if types have files of their own.
    """
    types = g.types
    if types.is_one:
        if feature not in g.features:
            raise ValueError(f"--feature: the dataset has no {feature!r}; it has {listed(sorted(g.features))}")
        return g.features[feature], NodeRows(g.num_nodes)
    kinds = {f"{kind}/{feature}": each for kind, each in types.nodes.items() if feature in g[kind].features}
    if feature in g.features:
        kinds = {feature: types.nodes[feature.rpartition("/")[0]]}
    columns = {g.column_of(full) for full in kinds}
    if len(columns) != 1:
        there = sorted(kinds or g.features)
        what = "lie in files of their own: name one" if kinds else f"have no {feature!r}: name one of them"
        raise ValueError(f"--feature: one cache is planned for, and {', '.join(there) or 'nodes'} {what}")
    (column,) = columns
    return g.columns[column], g.node_rows(column).only(kinds.values())
