"""Contiguous ranges of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.partitioning.base import GraphStream, Partitioner, register_partitioner

__all__ = ["Ranges", "ranges"]

_PIECE = 1 << 16

Int32s = npt.NDArray[np.int32]


@register_partitioner("ranges")
class Ranges(Partitioner):
    """Cut the ids into contiguous ranges, of one size or of two that differ by one node."""

    @property
    def n_passes(self) -> int:
        return 0

    def assign(self, graph: GraphStream) -> npt.NDArray[Any]:
        return ranges(graph.num_nodes, graph.n_parts)


def ranges(n: int, width: int, group: Int32s | None = None, members: npt.NDArray[np.int64] | None = None) -> Int32s:
    """Divide each group's ids into ``width`` ranges: the ``i``-th of a group's ``m`` nodes goes to range ``i * width // m``.

    The ranges of group ``g`` are numbered from ``g * width``; ``members`` counts the nodes of each group.
    """
    part = np.empty(n, np.int32)
    seen = None if members is None else np.zeros(len(members), np.int64)
    for begin in range(0, n, _PIECE):
        end = min(n, begin + _PIECE)
        if group is None or members is None or seen is None:
            part[begin:end] = np.arange(begin, end) * width // n
            continue
        piece = group[begin:end]
        order = np.argsort(piece, kind="stable")
        counts = np.bincount(piece, minlength=len(members))
        rank = np.empty(end - begin, np.int64)
        rank[order] = np.arange(end - begin) - np.repeat(np.cumsum(counts) - counts, counts)
        part[begin:end] = piece * np.int64(width) + (seen[piece] + rank) * width // members[piece]
        seen += counts
    return part
