"""Options that clean edges while a dataset is made: remove duplicates and self loops, add the reverse of each edge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.config import check_flag

__all__ = ["Cleaning"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cleaning:
    """Choice of the input's edges that a dataset has; see :meth:`featstore.OutOfCoreGraph.from_edge_index`."""

    coalesce: bool
    remove_self_loops: bool
    to_undirected: bool

    @classmethod
    def of(cls, coalesce: bool, remove_self_loops: bool, to_undirected: bool, stripes: Sequence[str]) -> Cleaning:
        """Check a user's options; ValueError if the number of edges is not known ahead and there are stripes."""
        options = {"coalesce": coalesce, "remove_self_loops": remove_self_loops, "to_undirected": to_undirected}
        cleaning = cls(**{name: check_flag(name, value) for name, value in options.items()})
        if stripes and cleaning.is_distinct:
            raise ValueError(
                f"stripes cannot be given with {'coalesce' if coalesce else 'to_undirected'}=True: equal shares need the number "
                "of edges, which is known at the end; make the dataset, then featstore.convert(path, 'chunked', stripes=…)"
            )
        return cleaning

    @property
    def given(self) -> str | None:
        """Name of the first option that is asked for."""
        return next((name for name, value in vars(self).items() if value), None)

    @property
    def is_none(self) -> bool:
        """Whether all edges stay as they are."""
        return self.given is None

    @property
    def is_distinct(self) -> bool:
        """Whether duplicates are removed."""
        return self.coalesce or self.to_undirected

    def refuse_rows(self, edge_features: Mapping[str, Any] | None) -> None:
        """Raise ValueError if edges are removed or added and there are edge features."""
        if not self.is_none and edge_features:
            raise ValueError(
                f"edge_features cannot be given with {self.given}=True: they have a row for each edge of the input, and the "
                "dataset gets other edges; clean the edges and their rows before"
            )

    def work_bytes(self, n_edges: int, n_bytes: int) -> int:
        """Compute the progress bar's bytes for the edges; an edge counts ``n_bytes`` if no edge is cleaned."""
        return n_edges * (n_bytes if self.is_none else 24 * (1 + self.to_undirected))

    def apply(self, blocks: Iterable[tuple[Int64s, Int64s]]) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield sources and destinations, without self loops and with their reverse, as the options say."""
        for src, dst in blocks:
            if self.remove_self_loops:
                stays = src != dst
                src, dst = src[stays], dst[stays]
            yield src, dst
            if self.to_undirected:
                yield dst, src

    def distinct(self, blocks: Iterable[tuple[Int64s, Int64s, Int64s | None]]) -> Iterator[tuple[Int64s, Int64s, Int64s | None]]:
        """Yield sorted pairs, without duplicates if ``is_distinct``; a block has at least one pair."""
        last: tuple[int, int] | None = None
        for dst, src, edges in blocks:
            if not self.is_distinct:
                yield dst, src, edges
                continue
            is_new = np.empty(len(dst), bool)
            is_new[0] = (int(dst[0]), int(src[0])) != last
            np.not_equal(dst[1:], dst[:-1], out=is_new[1:])
            is_new[1:] |= src[1:] != src[:-1]
            last = int(dst[-1]), int(src[-1])
            if is_new.any():
                yield dst[is_new], src[is_new], None
