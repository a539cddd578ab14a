"""LDG: each node, in the order of ids, goes to the part with most of its neighbours, weighted by the part's free share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.config import check_at_least
from featstore.partitioning.base import GraphStream, Partitioner, register_partitioner
from featstore.partitioning.fennel import most_nodes, stream

__all__ = ["LDG"]


@register_partitioner("ldg")
@dataclass(frozen=True)
class LDG(Partitioner):
    """Linear deterministic greedy: the number of neighbours in a part, times the share of it that is free.

    A node without placed neighbours goes to the part with the fewest nodes. Of equal scores the lowest part wins. A part takes at
    most 1.1 times the mean number of nodes. Training nodes are not balanced. This is Stanton and Kliot's method, over all nodes.
    With ``hops=``, :func:`featstore.partition` makes PaGraph's self-reliant parts instead:
    :class:`~featstore.partitioning.trainparts.TrainParts`.

    Parameters
    ----------
    passes : int
        As of :class:`~featstore.partitioning.fennel.Fennel`.

    References
    ----------
    Stanton, Kliot: Streaming graph partitioning for large distributed graphs, KDD 2012.
    """

    passes: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", check_at_least("passes", self.passes, 1))

    @property
    def n_passes(self) -> int:
        return self.passes

    def assign(self, graph: GraphStream) -> npt.NDArray[Any]:
        part = np.full(graph.num_nodes, -1, np.int32)
        cap = most_nodes(np.array([graph.num_nodes], np.int64), graph.n_parts)
        unit = np.ones(1)
        stream(graph, part, graph.n_parts, self.passes, 2.0, unit, unit, cap, ldg=True)
        return part
