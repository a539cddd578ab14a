"""A self-reliant part of a graph: which nodes it has, and how many hops each is from the part's training nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.idmaps.keys import ranges
from featstore.lazy import lazy
from featstore.topology.base import Topology
from featstore.topology.crossedges import counts_dtype
from featstore.topology.liststream import stream_bytes

__all__ = ["HOLDER", "MOST_HOPS", "OUTSIDE", "Part", "Reached", "lists_between", "lists_bytes", "reach", "reach_bytes"]

HOLDER: Final = "part"  # in the budget's report
OUTSIDE: Final = 255  # in place of the hops of a node that the part has not
MOST_HOPS: Final = OUTSIDE - 1

_PIECE_NODES: Final = 1 << 18
_READ_BYTES: Final = 1 << 20  # of two blocks of lists
_EDGE_BYTES: Final = 40  # of an id of a block: its place, and what it is found by
_NODE_BYTES: Final = 17  # of a node of a piece

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Part:
    """A part's nodes: its training nodes, and their in-neighbours within ``hops``, by the ids of the whole graph.

    The part has the rows of all its nodes. It has the lists of the nodes that are less than ``hops`` hops away; nobody who begins
    with its training nodes reads others.

    Attributes
    ----------
    name : str
        Of the kept parts that it is one of.
    number : int
        Which of them, from 0.
    hops : int
        At most :data:`MOST_HOPS`.
    hop_of : uint8 array, shape (num_nodes,)
        Hops of each node from the nearest training node of the part; :data:`OUTSIDE` for others.
    row_of : integer array, shape (num_nodes,), or None
        Of a part that is a dataset of its own: how many nodes of the part have lower ids, which is a node's row.
    """

    name: str
    number: int
    hops: int
    hop_of: Uint8s
    row_of: npt.NDArray[Any] | None = None

    def __repr__(self) -> str:
        counts = f"{self.n_nodes} nodes, {self.n_train} of them to train on, {self.n_dropped} dropped"
        return f"Part({self.number} of {self.name!r}, {self.hops} hops, {counts})"

    def __str__(self) -> str:
        return f"part {self.number} of {self.name!r}"

    @lazy
    def sizes(self) -> Int64s:
        """Numbers of nodes by hops, those outside last."""
        return np.bincount(self.hop_of, minlength=OUTSIDE + 1)

    @property
    def n_nodes(self) -> int:
        """Nodes of the part."""
        return int(self.sizes[:OUTSIDE].sum())

    @property
    def n_train(self) -> int:
        """Training nodes of the part."""
        return int(self.sizes[0])

    @property
    def n_dropped(self) -> int:
        """Nodes of the graph that the part has not, as none of its training nodes reaches them."""
        return int(self.sizes[OUTSIDE])

    @property
    def train_nodes(self) -> torch.Tensor:
        """The part's training nodes, ascending, int64; found at each access."""
        return torch.from_numpy(np.flatnonzero(self.hop_of == 0))

    @property
    def nodes(self) -> torch.Tensor:
        """The part's nodes, ascending, int64; found at each access."""
        return torch.from_numpy(np.flatnonzero(self.hop_of != OUTSIDE))

    def has_list(self, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Tell of which of the nodes ``first … stop - 1`` the part has the list."""
        return self.hop_of[first:stop] < self.hops

    def check(self, nodes: Int64s | range) -> None:
        """Raise IndexError, which names the part and the first such node, if there is a node that the part has not."""
        hop_of = self.hop_of[nodes.start : nodes.stop] if isinstance(nodes, range) else self.hop_of.take(nodes)
        if len(hop_of) and int(hop_of.max()) == OUTSIDE:
            at = int((hop_of == OUTSIDE).argmax())
            raise IndexError(f"node {nodes[at]} at position {at} is not in {self}")

    def check_list(self, node: int) -> None:
        """Raise IndexError, which names the part, if it has not the list of a node."""
        self.check(range(node, node + 1))
        if self.hop_of[node] == self.hops:
            raise IndexError(f"node {node} is {self.hops} hops from {self}, which has its rows, but not its list")

    def check_edge_ids(self, what: str) -> None:
        """Raise NotImplementedError for ``what``, which asks for edge ids, if the part is a dataset of its own: it has none."""
        if self.row_of is not None:
            raise NotImplementedError(f"{what}: edge ids are in the dataset that {self} was exported from")

    def check_hops(self, n_hops: int, what: str) -> None:
        """Raise ValueError if ``what`` reads the lists of more hops than the part has."""
        if n_hops > self.hops:
            raise ValueError(
                f"{what} reads the lists of {n_hops} hops, and {self} has hops={self.hops}: make parts with hops={n_hops}"
            )

    def check_seeds(self, seeds: Int64s, n_hops: int, positions: Int64s | None = None) -> None:
        """Raise IndexError unless the part has all lists of ``n_hops`` hops from these nodes, which are in range.

        ``positions`` are those that the error names; by default those in ``seeds``.
        """
        hop_of = self.hop_of.take(seeds)
        if len(hop_of) and int(hop_of.max()) > self.hops - n_hops:
            at = int((hop_of > self.hops - n_hops).argmax())
            node, hop = int(seeds[at]), int(hop_of[at])
            at = at if positions is None else int(positions[at])
            if hop == OUTSIDE:
                raise IndexError(f"seed {node} at position {at} is not in {self}")
            raise IndexError(
                f"seed {node} at position {at} is {hop} hops from the training nodes of {self}, and {n_hops} hops from there "
                f"lead out of its {self.hops}: seeds are its training nodes"
            )


def lists_between(
    topology: Topology, hop_of: Uint8s, first_hop: int, stop_hop: int, first_node: int = 0
) -> Iterator[tuple[Int64s, Int64s, Int64s, npt.NDArray[Any]]]:
    """Yield the lists of the nodes from ``first_node`` on whose hops are in ``[first_hop, stop_hop)``, in the order of the nodes.

    Yields nodes, int64 ``[k]``; the begin, within its list, of what comes of each list now, and how many ids that is, both int64
    ``[k]``; and these ids, list after list. A long list comes in pieces, an empty one may be left out. ``hop_of`` may change
    outside of the interval meanwhile. Only lists of these nodes are asked for; :func:`lists_bytes` are held.
    """
    for first in range(first_node, len(hop_of), _PIECE_NODES):
        hops = hop_of[first : first + _PIECE_NODES]
        nodes = np.flatnonzero((hops >= first_hop) & (hops < stop_hop)) + first
        for block in topology.lists(nodes, _READ_BYTES) if len(nodes) else ():
            begins, counts = block.held()
            yield nodes[block.where], begins, counts, block.ids[ranges(block.at + begins, counts)]


def lists_bytes(num_nodes: int) -> int:
    """Count the bytes that :func:`lists_between` holds, and those of what is found of a block."""
    ids = _READ_BYTES // 2 // (4 if num_nodes < 1 << 31 else 8)
    return stream_bytes(_READ_BYTES) + _EDGE_BYTES * ids + (_NODE_BYTES + 24) * min(_PIECE_NODES, num_nodes)


def reach_bytes(num_nodes: int, num_edges: int, *, counts: bool = False) -> int:
    """Count the bytes that :func:`reach` takes, those of its results among them."""
    return lists_bytes(num_nodes) + num_nodes * (1 + (counts_dtype(num_edges).itemsize if counts else 0))


@dataclass(frozen=True)
class Reached:
    """Progress of :func:`reach`: ``hop_of`` so far, for which lists from that of ``node``, at ``hop``, are still to be read."""

    hop_of: Uint8s
    hop: int
    node: int


def reach(
    topology: Topology,
    train: Int64s,
    hops: int,
    budget: Budget,
    note: Callable[[int], None] = lambda n_edges: None,
    *,
    counts: bool = False,
    begun: Reached | None = None,
    keep: Callable[[Reached], None] = lambda reached: None,
) -> tuple[Uint8s, npt.NDArray[Any] | None]:
    """Find a part's nodes: read the lists of its training nodes, then those of the nodes that are new, hop by hop.

    Parameters
    ----------
    topology : Topology
    train : int64 array, shape (n,)
        Nodes of the graph.
    hops : int
        At most :data:`MOST_HOPS`.
    budget : Budget
        Counts the results while they live: a byte a node, and with ``counts`` 4 or 8 more.
    note : callable
        Gets the number of edges that were read since its last call.
    counts : bool
        Also count how often each node is in the lists.
    begun : Reached, optional
        What ``keep`` got of an earlier call, which this one goes on with. Not with ``counts``.
    keep : callable
        Gets the state before each block of lists that goes farther.

    Returns
    -------
    hop_of : uint8 array, shape (num_nodes,)
        See :class:`Part`.
    counts : integer array, shape (num_nodes,), or None

    Notes
    -----
    Each list of the part is read once, in the order of the file within a hop; no other list is.
    """
    n, dtype = topology.num_nodes, counts_dtype(topology.num_edges)
    hop_of, found = np.empty(n, np.uint8) if begun is None else begun.hop_of, np.empty(n, dtype) if counts else None
    for each in (hop_of, found):
        if each is not None:
            budget.reserve(HOLDER, each.nbytes, owner=each)  # no page of it is there before
    if begun is None:
        hop_of.fill(OUTSIDE)
        hop_of[train] = 0
    if found is not None:
        found.fill(0)
    first_hop, first_node = at = (0, 0) if begun is None else (begun.hop, begun.node)
    with budget.reserve(HOLDER, lists_bytes(n)):
        for hop in range(first_hop, hops):
            for nodes, _, _, ids in lists_between(topology, hop_of, hop, hop + 1, first_node if hop == first_hop else 0):
                if len(nodes) and (hop, int(nodes[0])) > at:  # lists of nodes before are read whole
                    at = hop, int(nodes[0])
                    keep(Reached(hop_of, *at))
                if found is not None:
                    values, occurs = np.unique(ids, return_counts=True)
                    found[values] += occurs.astype(dtype, copy=False)
                hop_of[ids[hop_of[ids] == OUTSIDE]] = hop + 1
                note(len(ids))
    return hop_of, found
