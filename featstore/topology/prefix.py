"""Choice of the neighbour lists for a cache of a given size: a prefix of the nodes in the order of their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import prefix as _core
from featstore.topology.base import Topology

__all__ = ["piece_nodes", "scratch_bytes", "work_bytes", "write_prefix"]

Int64s = npt.NDArray[np.int64]

_KEY_BITS = 64
_PIECE_NODES = 1 << 16  # most nodes weighed at once; their scores are converted to float64
_SCRATCH_FRACTION = 1 / 64  # of the nodes, weighed at once in a smaller graph


def write_prefix(
    topology: Topology,
    scores: npt.NDArray[Any],
    n_bytes: int,
    entry_bytes: int,
    offset_of_node: Int64s,
    note: Callable[[int], None] = lambda n_bytes: None,
) -> int:
    """Choose the longest prefix of nodes, by descending score and ascending id, whose records fit ``n_bytes``.

    The offset of each chosen node's record is written to ``offset_of_node``, and -1 for the other nodes. The function returns
    the length of all records in entries of ``entry_bytes``; a list has one entry for each edge, and one more.
    ``offset_of_node`` may be the memory of the scores: each score is read before its place is written. ``note`` gets the bytes
    of offsets that were processed since its last call; their sum is at most :func:`work_bytes`. ValueError unless the scores are
    numbers, one a node, none NaN.

    Radix selection, 8 or 16 bits a pass, finds the score of the first node that does not fit. So the nodes are not sorted: the
    cost is O(num_nodes), in :func:`scratch_bytes` of memory. Each pass processes all offsets, at most 5 to 9 times in all.
    """
    n, widths = topology.num_lists, (topology.id_bytes, entry_bytes)
    if scores.shape != (n,) or scores.dtype.kind not in "biuf":
        raise ValueError(f"scores must be real numbers of shape ({n},), not {scores.dtype} of {scores.shape}")

    def pieces() -> Iterator[tuple[int, Int64s, npt.NDArray[np.float64]]]:
        for first, offsets in topology.offset_pieces(piece_nodes(n) or 1):
            yield first, offsets, np.ascontiguousarray(scores[first : first + len(offsets) - 1], np.float64)
            note(8 * (len(offsets) - 1))

    threshold, left, end = 0, float(n_bytes), 0  # threshold: the key of the first score whose nodes do not all fit
    bits = _digit_bits(n)
    for shift in range(_KEY_BITS - bits, -1, -bits):
        weights = np.zeros(1 << bits)
        for first, offsets, some in pieces():
            bad = _core.weigh(some, offsets, 0, *widths, shift, threshold, weights)
            if bad >= 0:
                raise ValueError(f"the score of node {first + bad} is NaN")
        reached = np.cumsum(weights[::-1])
        over = int(np.searchsorted(reached, left, side="right"))
        if over == len(reached):
            threshold, left = 0, math.inf  # all fit
            break
        left -= float(reached[over - 1]) if over else 0.0
        threshold = threshold << bits | (1 << bits) - 1 - over
    for first, offsets, some in pieces():
        out = offset_of_node[first : first + len(some)]
        left, end = _core.place(some, offsets, 0, *widths, threshold, left, end, out)
    return end


def work_bytes(num_nodes: int) -> int:
    """Count the bytes of offsets that choosing and writing process: one pass for each digit, and one more."""
    return 8 * num_nodes * (_KEY_BITS // _digit_bits(num_nodes) + 1)


def scratch_bytes(num_nodes: int) -> int:
    """Bound the bytes that choosing holds: below 2.2 MB."""
    return 8 * piece_nodes(num_nodes) + 3 * 8 * (1 << _digit_bits(num_nodes))


def piece_nodes(num_nodes: int) -> int:
    """Choose the number of nodes weighed at once: few for a small graph, so that choosing takes little memory."""
    return min(num_nodes, max(256, int(num_nodes * _SCRATCH_FRACTION)), _PIECE_NODES)


def _digit_bits(num_nodes: int) -> int:
    """Choose the number of key bits that one pass selects by; a pass holds sums for every digit."""
    return 16 if num_nodes >= 1 << 18 else 8
