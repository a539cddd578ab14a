"""Checks of a loader's arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from featstore.config import check_at_least
from featstore.errors import RanksWarning
from featstore.pack.packgraph import Graph, PackedGraph

__all__ = ["check_edge_features", "check_features", "check_labels", "check_prefetch", "check_ranks"]


def _check_names(what: str, names: str | Sequence[str], there: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names, distinct and all of them ``there``; else TypeError or ValueError."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} must be given by name, of {sorted(there)}, not as a {type(names).__name__}")
    for name in names:
        if name not in there:
            hint = "; pass labels=None for batches without" if what == "labels" else ""
            raise ValueError(f"{what}: the graph has no {name!r}; it has {sorted(there)}{hint}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a name occurs twice in {list(names)}")
    return tuple(names)


def check_features(g: Graph, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of features that have a row for each node: strategies and their caches take a node's id for its row."""
    found = _check_names("features", names, g.features)
    for name in found:
        first = getattr(g.features[name], "first_row", 0)  # stores of other kinds begin with node 0
        if first:
            raise NotImplementedError(f"features: row 0 of {name!r} is that of node {first}, not of node 0")
    return found


def check_edge_features(g: Graph, names: str | Sequence[str], sampler: Any) -> tuple[str, ...]:
    """Return names of edge features, of a graph that has them; the sampler numbers edges, as far as can be told."""
    if isinstance(g, PackedGraph) and names:
        raise ValueError(
            "edge_features: a pack has no rows of edges; open its dataset, and give the pack as strategy=Packed(pack)"
        )
    if not isinstance(names, str) and isinstance(names, Sequence) and not names:
        return ()
    found = _check_names("edge_features", names, g.edge_features)
    if getattr(sampler, "edges", True) is False:
        raise ValueError(f"edge_features={list(found)} needs the numbers of edges: make the sampler with edges=True")
    return found


def check_labels(g: Graph, names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return names of node data that the graph has; ``"auto"``: ``y`` where there is one."""
    if names == "auto":
        return ("y",) if "y" in g.node_data else ()
    return () if names is None else _check_names("labels", names, g.node_data)


def check_ranks() -> None:
    """Warn where this process is one of several that train together, by torch's process group: their batches are the same."""
    distributed: Any = sys.modules.get("torch.distributed")  # who has not imported it has no group
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return
    n, rank = distributed.get_world_size(), distributed.get_rank()
    if n > 1:
        warnings.warn(
            f"this is rank {rank} of {n} processes that train together, and a loader divides nothing among them: give each its "
            f"share of the seeds, seeds[{rank}::{n}][: len(seeds) // {n}], so that all have as many batches. Where that is done, "
            "say so: warnings.filterwarnings('ignore', category=featstore.RanksWarning)",
            RanksWarning,
            stacklevel=3,
        )


def check_prefetch(prefetch: int | str, threads: int) -> int:
    """Return how many batches are made ahead at first; ``"auto"``: two, or as many as there are threads for samples."""
    if prefetch == "auto":
        return max(2, threads)
    if isinstance(prefetch, str):
        raise ValueError(f"prefetch must be a number of batches or 'auto', not {prefetch!r}")
    return check_at_least("prefetch", prefetch, 0)
