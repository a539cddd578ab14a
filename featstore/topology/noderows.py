"""Rows of nodes: which row of a column of features each node has, if nodes are of several types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from featstore.topology.types import NodeType

__all__ = ["NodeRows", "RowsOfTypes", "by_type", "joined_rows"]

Ints = npt.NDArray[np.int32 | np.int64]
Ids = TypeVar("Ids", bound=npt.NDArray[np.integer[Any]])


def by_type(ids: npt.NDArray[np.integer[Any]], kinds: Iterable[NodeType]) -> list[npt.NDArray[np.int64]]:
    """List the positions of the ids that are of each of the types, ascending."""
    return [np.flatnonzero((ids >= kind.first) & (ids < kind.stop)) for kind in kinds]


@dataclass(frozen=True)
class NodeRows:
    """The rows of a column, one for each of the nodes that have one. This class: row ``i`` is that of node ``i``.

    Parameters
    ----------
    n : int
        Rows of the column.
    """

    n: int

    @property
    def kinds(self) -> tuple[NodeType, ...]:
        """The types whose nodes have rows, in the order in which :meth:`of` has them; empty if nodes have no types."""
        return ()

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """The ranges of nodes that have rows: the first node, their number, and the first one's row."""
        return ((0, self.n, 0),)

    def of(self, ids: Ids, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ids:
        """Find the rows of nodes: those of a type after those of another, each in the order of ``ids``; others have none.

        ``array(n, dtype)`` allocates them. Without types this is ``ids`` itself.
        """
        return ids

    def stored(self, ids: Ints, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        """Find the rows of nodes in the dtype of traces: int32 where the number of rows allows it, whatever that of nodes is."""
        return ids

    def select(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Select from one value a node, of all nodes, one a row."""
        return values

    def only(self, kinds: Collection[NodeType]) -> NodeRows:
        """Leave out the rows of other types of nodes."""
        return self


@dataclass(frozen=True)
class RowsOfTypes(NodeRows):
    """The rows of a column that some types share; a loader may gather those of a part of them.

    Parameters
    ----------
    parts : tuple of (NodeType, int)
        The types that are gathered, and the row of the first node of each.
    """

    parts: tuple[tuple[NodeType, int], ...]

    @property
    def kinds(self) -> tuple[NodeType, ...]:
        return tuple(kind for kind, _ in self.parts)

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((kind.first, kind.n, row) for kind, row in self.parts)

    def of(self, ids: Ids, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ids:
        places = by_type(ids, self.kinds)
        # Rows of several columns, one behind the other, may be more than there are nodes.
        rows: Any = array(sum(map(len, places)), ids.dtype if self.n < 2**31 else np.int64)
        done = 0
        for at, (kind, first) in zip(places, self.parts, strict=True):
            part = rows[done : done + len(at)]
            if rows.dtype == ids.dtype:
                np.take(ids, at, out=part)
            else:
                part[:] = ids.take(at)
            part += first - kind.first
            done += len(at)
        return cast(Ids, rows)

    def stored(self, ids: Ints, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        rows = self.of(ids, array)
        return rows.astype(np.int32, copy=False) if self.n < 2**31 else rows.astype(np.int64, copy=False)

    def select(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.zeros(self.n, values.dtype)  # rows of other types are never asked for
        for kind, first in self.parts:
            found[first : first + kind.n] = values[kind.first : kind.stop]
        return found

    def only(self, kinds: Collection[NodeType]) -> NodeRows:
        return RowsOfTypes(self.n, tuple(part for part in self.parts if part[0] in kinds))


def joined_rows(each: Sequence[NodeRows]) -> NodeRows:
    """Put the rows of several columns behind each other; :meth:`NodeRows.of` then has a batch's rows column by column."""
    parts: list[tuple[NodeType, int]] = []
    first = 0
    for rows in each:
        if isinstance(rows, RowsOfTypes):
            parts += [(kind, first + row) for kind, row in rows.parts]
        first += rows.n
    return RowsOfTypes(first, tuple(parts)) if parts else NodeRows(first)
