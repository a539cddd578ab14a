"""Insertion of appended nodes: types are ranges, so ids, lists and rows behind those of the type move up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.topology.types import NodeType, Types

__all__ = ["Insertion", "with_inserted"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Insertion:
    """``n`` nodes behind those of the type ``of``, which have no edges.

    Parameters
    ----------
    types : Types
        The types without these nodes.
    of : str
    n : int
    """

    types: Types
    of: str
    n: int

    @property
    def kind(self) -> NodeType:
        return self.types.nodes[self.of]

    def after(self) -> Types:
        """Lay out the types with the new nodes."""
        counts = {name: each.n + (self.n if name == self.of else 0) for name, each in self.types.nodes.items()}
        return Types.of(counts, {key: each.n_edges for key, each in self.types.edges.items()})

    @property
    def lists(self) -> list[int]:
        """Numbers of the lists before which ``n`` empty ones come, ascending: each type of edges that ends here has one."""
        return [each.first_list + each.n_lists for each in self.types.edges_into(self.of)]

    @property
    def n_lists(self) -> int:
        """Number of the new lists."""
        return self.n * len(self.lists)

    @property
    def _moved(self) -> list[int]:
        """First lists of the types of edges whose sources get other ids."""
        return [each.first_list for each in self.types.edges.values() if each.n_edges and each.src.first >= self.kind.stop]

    @property
    def moves_ids(self) -> bool:
        """Whether any stored id is that of a node behind the new ones."""
        return bool(self._moved)

    @property
    def first_list(self) -> int | None:
        """The first list that is a new one, or has other ids than before; None if there is no such list."""
        return min([*self.lists, *self._moved], default=None)

    def ids(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give nodes behind the new ones their new ids; the array may be the one that was given."""
        if not self.moves_ids:
            return ids
        found = ids.copy()
        found[ids >= self.kind.stop] += self.n
        return found


def with_inserted(
    pieces: Iterable[Int64s], places: Sequence[int], n: int, step: int, *, first: int = 0, value: int | None = None
) -> Iterator[Int64s]:
    """Yield numbers that come in pieces, with ``n`` more before each of ``places``, in pieces of at most ``step`` of these.

    Parameters
    ----------
    pieces : iterable of int64 array
    places : sequence of int
        Ascending, each at least ``first``; a place may occur more than once.
    n, step : int
    first : int
        The place of the first number.
    value : int, optional
        The numbers to insert. None: before each place the number that is there; before the end of all, none.
    """
    left = list(places)
    for piece in pieces:
        done = 0
        while left and left[0] < first + len(piece):
            at = left.pop(0) - first
            if at > done:
                yield piece[done:at]
            done = at
            yield from _repeated(int(piece[at]) if value is None else value, n, step)
        first += len(piece)
        if done < len(piece):
            yield piece[done:]
    if value is not None:
        for _ in left:
            yield from _repeated(value, n, step)


def _repeated(value: int, n: int, step: int) -> Iterator[Int64s]:
    for first in range(0, n, step):
        yield np.full(min(step, n - first), value, np.int64)
