"""The size of a sampled batch, expected from degrees alone: for errors where there is no memory to sample even a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["expected_edges"]

PIECE_NODES = 4096  # read at once: arrays of so many are ordinary memory, not pooled


def expected_edges(graph: Any, fanouts: Sequence[int], batch_size: int) -> tuple[int, list[int]]:
    """Return the expected rows of a batch, and the edges that each hop draws.

    Parameters
    ----------
    graph : OutOfCoreGraph
    fanouts : sequence of int
    batch_size : int
        Seeds, taken as uniform over the nodes.

    Notes
    -----
    An edge is drawn as often as any other, so node v is in a batch of s seeds and k draws with probability
    ``1 - (1 - s / n) exp(-k · out_degree(v) / edges)``. A hop draws ``min(fanout, in_degree(v))`` of each such node. One
    sequential pass over the degrees for each hop, and one more.
    """
    n, n_edges, drawn = graph.num_nodes, max(1, graph.num_edges), 0.0
    outside = 1 - min(1.0, batch_size / max(1, n))
    edges: list[int] = []
    for fanout in fanouts:
        more = 0.0
        for in_degree, out_degree in graph.degree_pieces(PIECE_NODES):
            most = in_degree if fanout < 0 else np.minimum(in_degree, fanout)
            more += float((most * _presence(out_degree, outside, drawn / n_edges)).sum())
        edges.append(int(np.ceil(more)))
        drawn += more
    rows = sum(float(_presence(out, outside, drawn / n_edges).sum()) for _, out in graph.degree_pieces(PIECE_NODES))
    return int(np.ceil(rows)), edges


def _presence(out_degree: npt.NDArray[np.int64], outside: float, rate: float) -> npt.NDArray[np.float64]:
    """Return each node's probability of being in the batch."""
    chance: npt.NDArray[np.float64] = 1 - outside * np.exp(-rate * out_degree)
    return chance
