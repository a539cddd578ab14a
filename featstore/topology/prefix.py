"""The neighbour lists that a cache of a number of bytes takes: a prefix of the nodes in order of score."""

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
_PIECE_NODES = 1 << 16  # nodes weighed at once, their scores made float64
_SCRATCH_DIVISOR = 64  # of the nodes that are weighed at once where that is fewer


def write_prefix(
    topology: Topology,
    scores: npt.NDArray[Any],
    n_bytes: int,
    entry_bytes: int,
    offset_of_node: Int64s,
    note: Callable[[int], None] = lambda n_bytes: None,
) -> int:
    """Choose the longest prefix of nodes, by descending score and ascending id, whose records fit ``n_bytes``.

    Writes each chosen node's record, -1 for the others, and returns the records' length in entries of ``entry_bytes``, of which
    a list has one an edge and one more. ``offset_of_node`` may be the memory of the scores: each is read before its place is
    written. ``note`` is told how many bytes of offsets were gone through since it was told last; all are :func:`work_bytes`.
    ValueError unless the scores are numbers, one a node, none NaN.

    The score of the first node that does not fit is found by radix selection, 8 or 16 bits a pass, so no order of all nodes is
    made: O(num_nodes) in :func:`scratch_bytes` of memory. The offsets are gone through once a pass, so 5 to 9 times.
    """
    n, widths = topology.num_nodes, (topology.id_bytes, entry_bytes)
    if scores.shape != (n,) or scores.dtype.kind not in "biuf":
        raise ValueError(f"scores must be real numbers of shape ({n},), not {scores.dtype} of {scores.shape}")

    def pieces() -> Iterator[tuple[int, Int64s, npt.NDArray[np.float64]]]:
        for first, offsets in topology.offset_pieces(piece_nodes(n) or 1):
            yield first, offsets, np.ascontiguousarray(scores[first : first + len(offsets) - 1], np.float64)
            note(8 * (len(offsets) - 1))

    threshold, left, end = 0, float(n_bytes), 0  # the key of the first score that does not fit whole
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
    """Count the bytes of offsets that choosing and writing go through, a pass a digit and one more."""
    return 8 * num_nodes * (_KEY_BITS // _digit_bits(num_nodes) + 1)


def scratch_bytes(num_nodes: int) -> int:
    """Bound what choosing holds: below 2.2 MB."""
    return 8 * piece_nodes(num_nodes) + 3 * 8 * (1 << _digit_bits(num_nodes))


def piece_nodes(num_nodes: int) -> int:
    """Choose how many nodes are weighed at once: few where the graph is small, so that choosing takes little memory."""
    return min(num_nodes, max(256, num_nodes // _SCRATCH_DIVISOR), _PIECE_NODES)


def _digit_bits(num_nodes: int) -> int:
    """Choose the bits of a score's key that one pass sorts by: sums for every digit are held."""
    return 16 if num_nodes >= 1 << 18 else 8
