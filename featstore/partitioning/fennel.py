"""FENNEL: each node, in the order of ids, goes to the part with most of its neighbours, less a penalty for the part's size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore._core.partition import Placer, table_bytes
from featstore.config import check_at_least
from featstore.errors import OptionError
from featstore.partitioning.base import GraphStream, Partitioner, register_partitioner
from featstore.partitioning.ranges import ranges

__all__ = ["IMBALANCE", "TRAIN_WEIGHT", "Fennel", "most_nodes", "stream"]

IMBALANCE: Final = 1.1  # most nodes of a part, over the mean
TRAIN_WEIGHT: Final = 0.5  # of a part's training nodes, beside its nodes, where it has the mean of both
_PIECE: Final = 1 << 16

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


@register_partitioner("fennel")
@dataclass(frozen=True)
class Fennel(Partitioner):
    """Put each node into the part with the highest score, in the order of ids, several times over.

    The score of part P is the number of the node's in-neighbours in P, less ``a * |P|**(gamma - 1)``, less
    ``t * |train nodes of P|**(gamma - 1)``. Of equal scores the lowest part wins. A part takes at most 1.1 times the mean number
    of nodes.

    Parameters
    ----------
    passes : int
        In the first pass, a node's neighbours with higher ids have no part yet, so they do not count. In a later pass every node
        is taken out of its part and placed again, while all other nodes have a part.
    gamma : float
        Above 1. Higher values balance more strictly, and cut more edges.
    start : {None, "ranges"}
        Begin without parts, or with contiguous ranges of ids, which are already good parts if ids have locality.
    levels : pair of int, optional
        Make the first number of parts, and divide each into the second number: ``(100, 100)`` for 10,000 parts, as OUTRE does.
        Takes twice as many passes, and cuts more edges; it is not faster here.

    Notes
    -----
    ``a`` and ``t`` are FENNEL's alpha times gamma. With ``m`` stored edges, ``n`` nodes and ``k`` parts,
    ``a = gamma * (m / 2) / n * (k / n)**(gamma - 1)``: edges stored in both directions count once. ``t`` is half of that, with
    the number of training nodes in the last factor. A node is compared only with the parts of its neighbours and the part of the
    least penalty; no other part can win. So time is proportional to the edges, whatever the number of parts. Memory: 5 bytes a
    node (13 with levels), about 60 a part, and a block of neighbour ids.

    References
    ----------
    Tsourakakis, Gkantsidis, Radunovic, Vojnovic: FENNEL, WSDM 2014. Nishimura, Ugander: Restreaming graph partitioning, KDD 2013.
    OUTRE, VLDB 2024, sections 4.2 and 5.2.
    """

    passes: int = 3
    gamma: float = 1.5
    start: str | None = None
    levels: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", check_at_least("passes", self.passes, 1))
        gamma: Any = self.gamma
        if isinstance(gamma, bool) or not isinstance(gamma, Real) or not 1 < float(gamma) < math.inf:
            raise OptionError("gamma", f"must be a number above 1, not {gamma!r}")
        object.__setattr__(self, "gamma", float(gamma))
        if self.start not in (None, "ranges"):
            raise OptionError("start", f"must be None or 'ranges', not {self.start!r}")
        levels: Any = self.levels
        if levels is not None:
            numbers: tuple[Any, ...] = tuple(levels) if isinstance(levels, Sequence) and not isinstance(levels, str) else ()
            if len(numbers) != 2 or not all(isinstance(n, Integral) for n in numbers) or min(numbers) < 1:
                raise OptionError("levels", f"must be two numbers of parts, not {levels!r}")
            object.__setattr__(self, "levels", (int(numbers[0]), int(numbers[1])))

    @property
    def n_passes(self) -> int:
        return self.passes * (1 if self.levels is None else 2)

    def check(self, n_parts: int) -> None:
        if self.levels is not None and self.levels[0] * self.levels[1] != n_parts:
            first, second = self.levels
            raise OptionError("levels", f"{first} times {second} parts are {first * second}, not {n_parts}")

    def assign(self, graph: GraphStream) -> npt.NDArray[Any]:
        n, is_train = graph.num_nodes, graph.is_train
        n_train = 0 if is_train is None else int(is_train.sum(dtype=np.int64))
        first = graph.n_parts if self.levels is None else self.levels[0]
        part = self._begin(n, first)
        one = np.ones(1, np.int64)
        inside = self._stream(graph, part, first, one * n, one * graph.num_edges, one * n_train)
        if self.levels is None:
            return part
        with graph.reserve(8 * n + 8 * 8 * first):
            group, members, trained = part, *_counts(part, is_train, first)
            second = self.levels[1]
            part = self._begin(n, second, group, members)
            self._stream(graph, part, second, members, inside, trained, group)
            return part

    def _begin(self, n: int, width: int, group: Int32s | None = None, members: Int64s | None = None) -> Int32s:
        if self.start is None:
            return np.full(n, -1, np.int32)
        return ranges(n, width, group, members)

    def _stream(
        self,
        graph: GraphStream,
        part: Int32s,
        width: int,
        n_nodes: Int64s,
        n_edges: Int64s,
        n_train: Int64s,
        group: Int32s | None = None,
    ) -> Int64s:
        """Place all nodes ``passes`` times; the numbers of nodes, edges and training nodes are for each group."""
        degree = self.gamma * (n_edges / 2) / np.maximum(1, n_nodes)
        scale = degree * _powers(width / np.maximum(1, n_nodes), self.gamma - 1)
        train_scale = TRAIN_WEIGHT * degree * _powers(width / np.maximum(1, n_train), self.gamma - 1)
        cap = most_nodes(n_nodes, width)
        return stream(graph, part, width, self.passes, float(self.gamma), scale, train_scale, cap, group)


def _powers(bases: Float64s, exponent: float) -> Float64s:
    """Compute powers as the C library rounds them; NumPy's own loops may round differently for some lengths."""
    try:
        return np.array([math.pow(each, exponent) for each in bases])
    except OverflowError:
        raise OptionError("gamma", f"{exponent + 1} is too much for so many parts and nodes: give less") from None


def most_nodes(n_nodes: Int64s, width: int) -> Int64s:
    """Compute the most nodes of each of a group's ``width`` parts: 1.1 times the mean, and enough for all nodes."""
    return np.maximum(-(-n_nodes // width), (n_nodes * IMBALANCE / width).astype(np.int64))


def stream(
    graph: GraphStream,
    part: Int32s,
    width: int,
    passes: int,
    gamma: float,
    scale: Float64s,
    train_scale: Float64s,
    cap: Int64s,
    group: Int32s | None = None,
    *,
    ldg: bool = False,
) -> Int64s:
    """Place every node ``passes`` times, see :class:`~featstore._core.partition.Placer`; return each part's inner neighbours."""
    is_train = None if ldg else graph.is_train
    n_parts = width * len(scale)
    with graph.reserve(table_bytes(len(scale), width) + 24 * n_parts):
        placer = Placer(graph.indptr, part, width, gamma, scale, train_scale, cap, is_train, group, ldg)
        for _ in range(passes):
            placer.begin()
            for first, ids in graph.blocks():
                placer.place(ids, ids.itemsize, first)
            assert placer.node == graph.num_nodes
        size, trained, inside = (np.empty(n_parts, np.int64) for _ in range(3))
        placer.sizes(size, trained, inside)
        return inside


def _counts(part: Int32s, is_train: npt.NDArray[np.uint8] | None, n_parts: int) -> tuple[Int64s, Int64s]:
    """Count the nodes and training nodes of each part, piece by piece, since ``bincount`` converts its input."""
    members, trained = np.zeros(n_parts, np.int64), np.zeros(n_parts, np.int64)
    for begin in range(0, len(part), _PIECE):
        piece = part[begin : begin + _PIECE]
        members += np.bincount(piece, minlength=n_parts)
        if is_train is not None:
            trained += np.bincount(piece[is_train[begin : begin + _PIECE] > 0], minlength=n_parts)
    return members, trained
