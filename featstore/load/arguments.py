"""Checks of a loader's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from featstore.config import check_at_least, listed
from featstore.pack.packgraph import Graph, PackedGraph

__all__ = ["check_edge_features", "check_features", "check_labels", "check_prefetch"]


def _check_names(
    what: str, names: str | Sequence[str], there: Mapping[str, Any], *, if_no_names: str = "", if_missing: str = ""
) -> tuple[str, ...]:
    """Check names: distinct, and all of them in ``there``; else TypeError or ValueError. Return them as a tuple.

    ``if_no_names`` and ``if_missing`` are hints at the end of messages: for what is no names, and for a name that is missing.
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} must be given by name, of {listed(sorted(there))}, not as a {type(names).__name__}{if_no_names}")
    for name in names:
        if name not in there:
            raise ValueError(f"{what}: the graph has no {name!r}; it has {listed(sorted(there))}{if_missing}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a name occurs twice in {list(names)}")
    return tuple(names)


def check_features(g: Graph, names: Any) -> tuple[str, ...]:
    """Check names of features."""
    return _check_names("features", names, g.features)


def check_edge_features(g: Graph, names: Any, sampler: Any) -> tuple[str, ...]:
    """Check names of edge features; ValueError for a pack, and for a sampler whose attribute ``edges`` is False."""
    if isinstance(g, PackedGraph) and names:
        raise ValueError(
            "edge_features: a pack has no rows of edges; open its dataset, and give the pack as strategy=Packed(pack)"
        )
    if not isinstance(names, str) and isinstance(names, Sequence) and not names:
        return ()
    found = _check_names("edge_features", names, g.edge_features)
    if getattr(sampler, "edges", True) is False:
        raise ValueError(f"edge_features={list(found)} needs edge ids: make the sampler with edges=True")
    return found


def check_labels(g: Graph, names: str | Sequence[str] | None, prefix: str = "") -> tuple[str, ...]:
    """Check names of node data, of which the fields begin with ``prefix``; ``"auto"``: ``y`` if there is one, else none."""
    there = {name.removeprefix(prefix): None for name in g.node_data if name.startswith(prefix)}
    if isinstance(names, str) and names == "auto":
        return ("y",) if "y" in there else ()
    if names is None:
        return ()
    hints = {
        "if_no_names": "; rows beside the seeds are an array, np.array(labels)",
        "if_missing": "; pass labels=None for batches without",
    }
    return _check_names("labels", names, there, **hints)


def check_prefetch(prefetch: int | str, threads: int) -> int:
    """Return the number of batches made ahead at first; ``"auto"``: the number of sampling threads, at least two."""
    if prefetch == "auto":
        return max(2, threads)
    if isinstance(prefetch, str):
        raise ValueError(f"prefetch must be a number of batches or 'auto', not {prefetch!r}")
    return check_at_least("prefetch", prefetch, 0)
