"""The neighbour lists that a cache of a number of bytes takes: a prefix of the nodes in order of score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import prefix as _core
from featstore.graph.topology import Topology

__all__ = ["Prefix", "piece_nodes"]

Int64s = npt.NDArray[np.int64]

_KEY_BITS = 64
_PIECE_NODES = 1 << 16  # nodes weighed at once, their scores made float64
_SCRATCH_SHARE = 64  # of the nodes that are weighed at once where that is fewer


class Prefix:
    """The longest prefix of nodes, by descending score and ascending id, whose records fit ``n_bytes``.

    An entry of a record takes ``entry_bytes``, by default the bytes of an id; a list has one an edge and one more. ``note`` is
    told how many bytes of offsets were gone through since it was told last; all are :meth:`work_bytes`. ValueError unless the
    scores are numbers, one a node, none NaN.

    The score of the first node that does not fit is found by radix selection, 8 or 16 bits a pass, so no order of all nodes is
    made: O(num_nodes) in :meth:`scratch_bytes` of memory. The offsets are gone through once a pass, so 5 to 9 times.
    """

    def __init__(
        self,
        topology: Topology,
        scores: npt.NDArray[Any],
        n_bytes: int,
        entry_bytes: int | None = None,
        note: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        n = topology.num_nodes
        if scores.shape != (n,) or scores.dtype.kind not in "biuf":
            raise ValueError(f"scores must be real numbers of shape ({n},), not {scores.dtype} of {scores.shape}")
        self._topology = topology
        self._widths = topology.id_bytes, topology.id_bytes if entry_bytes is None else entry_bytes
        self._scores, self._note = scores, note
        self._left = float(n_bytes)
        self._threshold = 0  # key of the first score that does not fit whole
        bits = _digit_bits(n)
        last = (1 << bits) - 1
        known = 0
        for shift in range(_KEY_BITS - bits, -1, -bits):
            reached = np.cumsum(self._weights(shift, known, bits)[::-1])
            over = int(np.searchsorted(reached, self._left, side="right"))
            if over == len(reached):
                self._left = math.inf  # all fit
                return
            self._left -= float(reached[over - 1]) if over else 0.0
            known = known << bits | last - over
        self._threshold = known

    def _weights(self, shift: int, known: int, bits: int) -> npt.NDArray[np.float64]:
        weights = np.zeros(1 << bits)
        for first, offsets, scores in self._pieces():
            bad = _core.weigh(scores, offsets, 0, *self._widths, shift, known, weights)
            if bad >= 0:
                raise ValueError(f"the score of node {first + bad} is NaN")
        return weights

    def _pieces(self) -> Iterator[tuple[int, Int64s, npt.NDArray[np.float64]]]:
        for first, offsets in self._topology.offset_pieces(piece_nodes(len(self._scores)) or 1):
            yield first, offsets, np.ascontiguousarray(self._scores[first : first + len(offsets) - 1], np.float64)
            self._note(8 * (len(offsets) - 1))

    @staticmethod
    def work_bytes(num_nodes: int) -> int:
        """Count the bytes of offsets that choosing and writing go through, a pass a digit and one more."""
        return 8 * num_nodes * (_KEY_BITS // _digit_bits(num_nodes) + 1)

    @staticmethod
    def scratch_bytes(num_nodes: int) -> int:
        """Bound what choosing holds: below 2.2 MB."""
        return 8 * piece_nodes(num_nodes) + 3 * 8 * (1 << _digit_bits(num_nodes))

    def write_offsets(self, offset_of_node: Int64s) -> int:
        """Write the record of each chosen node, -1 for the others; return the records' length in entries."""
        end, left = 0, self._left
        for first, offsets, scores in self._pieces():
            out = offset_of_node[first : first + len(scores)]
            left, end = _core.place(scores, offsets, 0, *self._widths, self._threshold, left, end, out)
        return end


def piece_nodes(num_nodes: int) -> int:
    """Choose how many nodes are weighed at once: few where the graph is small, so that choosing takes little memory."""
    return min(num_nodes, max(256, num_nodes // _SCRATCH_SHARE), _PIECE_NODES)


def _digit_bits(num_nodes: int) -> int:
    """Choose the bits of a score's key that one pass sorts by: sums for every digit are held."""
    return 16 if num_nodes >= 1 << 18 else 8
