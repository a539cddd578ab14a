"""Scores of neighbour lists, computed from degrees for one piece of the nodes at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.graph.policyinputs import policy_scores
from featstore.storage.rowfile import RowFile
from featstore.storage.scan import scan_bytes, scan_words
from featstore.topology.base import Topology
from featstore.topology.types import Types

__all__ = ["WriteScores", "scores_by_degrees", "scoring_bytes"]

WriteScores: TypeAlias = "Callable[[npt.NDArray[np.float64]], None]"

_SCAN_BYTES = 4 << 20
_NODE_BYTES = 49  # of a node of a block, beside its out-degree: in-degree, score, masks, and memory for reading its offsets


def scoring_bytes(num_nodes: int) -> int:
    """Count the bytes that writing scores holds beside the scores; at most 10.7 MB."""
    held = scan_bytes(8 * num_nodes, _most_bytes(num_nodes))
    return held + _NODE_BYTES * min(num_nodes, held // 4 // 8)


def _most_bytes(num_nodes: int) -> int:
    return min(_SCAN_BYTES, max(1 << 16, num_nodes // 4))


def scores_by_degrees(
    policy: StaticPolicy,
    topology: Topology,
    out_degrees: RowFile,
    types: Types,
    note: Callable[[int], None] = lambda n_bytes: None,
) -> WriteScores:
    """Make a function that writes the scores of all lists into a float64 array ``[num_lists]``.

    ``policy`` is one that ``goes_by_degrees``; the out-degree of a list is its node's. ``note`` gets the bytes of degrees and
    scores as they are processed, 24 a node in all. The function reads the out-degrees once in sequence, with many reads in
    flight, and holds :func:`scoring_bytes` meanwhile. PluginError if the policy fails.
    """

    def write(scores: npt.NDArray[np.float64]) -> None:
        n, n_bytes = topology.num_nodes, _most_bytes(topology.num_nodes)
        for first, of_nodes in scan_words(out_degrees, n, np.dtype(np.int64), n_bytes):
            for kind in types.edges.values():
                begin, end = max(first, kind.dst.first), min(first + len(of_nodes), kind.dst.stop)
                if begin >= end:
                    continue
                out_degree = of_nodes[begin - first : end - first]
                start = begin - kind.dst.first + kind.first_list
                stop = start + len(out_degree)
                in_degree = topology.degrees(start, stop)
                degrees = partial(np.asarray, in_degree), partial(np.asarray, out_degree)
                context = PolicyContext(len(out_degree), topology.id_bytes, *degrees)
                scores[start:stop] = policy_scores(policy, context, of_lists=True)
            note(24 * len(of_nodes))

    return write
