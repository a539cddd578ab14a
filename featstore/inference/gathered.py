"""Blocks of nodes with all their in-neighbours, for a layer of any kind: the sources' rows are gathered for each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.distinct import distinct
from featstore.errors import BudgetError
from featstore.graph.passes import StoredRows
from featstore.sampling.batch import Block
from featstore.topology.edgelists import EdgeLists
from featstore.topology.types import ONE_NODE, EdgeKey, NodeType

__all__ = ["WholeBlock", "whole_block", "whole_blocks"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

_EDGE_BYTES: Final = 80  # per edge of a block: its ends, their positions, and memory of sorting
_NODE_BYTES: Final = 64


@dataclass(frozen=True)
class WholeBlock:
    """Destinations ``first … first + n_dst - 1`` of a type of nodes, and all edges into them.

    Parameters
    ----------
    first, n_dst : int
    edges : dict of (str, str, str) to Block
        The edges of each type into the destinations; ends are positions in ``rows`` of their types.
    rows : dict of str to uint8 array, shape (n, row_bytes)
        Rows as stored of the destinations' type, theirs first, and of the types of sources; of 0 bytes if a type has none.
    """

    first: int
    n_dst: int
    edges: dict[EdgeKey, Block]
    rows: dict[str, Uint8s]


def whole_blocks(
    into: Sequence[EdgeLists],
    kind: NodeType,
    rows: Mapping[str, StoredRows],
    item: int,
    first: int,
    end: int,
    budget: Budget,
    memory: int,
    holder: str,
) -> Iterator[WholeBlock]:
    """Yield blocks of nodes ``first … end - 1`` of a type, in order, that fit ``memory`` bytes, reserved for ``holder``.

    ``into`` are all types of edges that end at the type, ``rows`` those of the types of nodes that have some. ``item`` is the
    bytes of a number as the layer gets it. The memory also counts one source's row an edge, since layers commonly make these.
    BudgetError: a node with all its in-neighbours does not fit.
    """

    def given(name: str) -> tuple[int, int]:
        """Count the bytes of a row in all of its forms, and as the layer gets it."""
        of = rows.get(name)
        return (0, 0) if of is None else (of.file.row_bytes + item * of.width, item * of.width)

    per_edge = [sum(given(lists.kind.src.name)) + _EDGE_BYTES for lists in into]
    per_node = 2 * given(kind.name)[0] + _NODE_BYTES
    while first < end:
        stop = min(end, first + max(1, memory // per_node))
        cost = np.arange(1, stop - first + 1) * per_node
        for lists, n_bytes in zip(into, per_edge, strict=True):
            cost += np.cumsum(lists.degrees(first, stop)) * n_bytes
        fit = int(np.searchsorted(cost, memory, "right"))
        if not fit:
            needed = budget.total + int(cost[0]) - memory
            degree = sum(int(lists.degrees(first, first + 1)[0]) for lists in into)
            node = f"node {first}" if kind.name == ONE_NODE else f"{kind.name} {first}"
            raise BudgetError(
                f"the {degree} in-neighbours of {node} take {int(cost[0])} bytes in a block, and {memory} are left", needed
            )
        with budget.reserve(holder, int(cost[fit - 1])):
            yield whole_block(into, kind, rows, first, first + fit)
        first += fit


def whole_block(into: Sequence[EdgeLists], kind: NodeType, rows: Mapping[str, StoredRows], first: int, stop: int) -> WholeBlock:
    """Read the block of nodes ``first … stop - 1`` of a type, see :func:`whole_blocks`."""
    n_dst = stop - first
    edges = {lists.kind.key: lists.edges_into(first, stop) for lists in into}
    sources: dict[str, list[EdgeKey]] = {kind.name: []}  # the types of edges that begin at each type of nodes
    for key in edges:
        sources.setdefault(key[0], []).append(key)
    places: dict[EdgeKey, Int64s] = {}
    found: dict[str, Uint8s] = {}
    for name, keys in sources.items():
        is_own = name == kind.name
        begin = n_dst if is_own else 0
        is_inside = {key: _within(edges[key][0], first, stop if is_own else first) for key in keys}
        outside = [edges[key][0][~is_inside[key]] for key in keys]
        others = distinct(outside[0] if len(outside) == 1 else np.concatenate([*outside, np.empty(0, np.int64)]))
        for key in keys:
            ids = edges[key][0]
            places[key] = np.where(is_inside[key], ids - first, begin + np.searchsorted(others, ids))
        stored = rows.get(name)
        out = found[name] = np.empty((begin + len(others), 0 if stored is None else stored.file.row_bytes), np.uint8)
        if stored is not None and begin:
            stored.file.read(stored.first + first, begin, out[:begin])
        if stored is not None and len(others):
            stored.file.gather(others + stored.first, out[begin:])
    blocks = {
        key: Block(torch.from_numpy(places[key]), torch.from_numpy(dst), len(found[key[0]]), n_dst)
        for key, (_, dst) in edges.items()
    }
    return WholeBlock(first, n_dst, blocks, found)


def _within(ids: Int64s, first: int, stop: int) -> npt.NDArray[np.bool_]:
    return (ids >= first) & (ids < stop)
