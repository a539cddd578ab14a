"""Samplers of the library as PyG's ``BaseSampler``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch_geometric.sampler.base import NumNeighbors

from featstore.errors import OptionError

__all__ = ["fanouts_of"]


def fanouts_of(num_neighbors: Any) -> list[int]:
    """Return PyG's ``num_neighbors`` as fan-outs; OptionError where they are for edge types."""
    values = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
    if isinstance(values, Mapping):
        raise OptionError("num_neighbors", "the graph has one type of edges: give a list, a number for each hop")
    try:
        return [operator.index(each) for each in values]
    except TypeError:
        raise OptionError("num_neighbors", f"a list of integers, one for each hop, not {num_neighbors!r}") from None
