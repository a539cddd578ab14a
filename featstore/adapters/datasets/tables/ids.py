"""The ids of a type of nodes while its tables are read: numbers in order of first appearance, and the files of its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from featstore._core.distinct import Ranks
from featstore.adapters.datasets.tables.files import TableBlock
from featstore.errors import CorruptionError
from featstore.idmaps.keys import Keys, joined
from featstore.idmaps.numbering import Numbers
from featstore.idmaps.writer import IdMapWriter

__all__ = ["BothEnds", "Ends", "Ids"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_PIECE = 1 << 16  # names that are read back at once


class BothEnds:
    """Names of the sources and destinations of edges, in turns."""

    def __init__(self, src: Keys, dst: Keys) -> None:
        self._ends = src, dst

    def take(self, at: Int64s) -> Keys:
        """Take names by their positions, which ascend."""
        src, dst = (end.take(at[at % 2 == parity] // 2) for parity, end in enumerate(self._ends))
        order = np.empty(len(at), np.int64)
        order[at % 2 == 0], order[at % 2 == 1] = np.arange(len(src)), np.arange(len(src), len(at))
        return joined(src, dst).take(order)


Ends: TypeAlias = "Keys | BothEnds"


class Ids:
    """The ids of a type of nodes while it is read. One owner thread."""

    def __init__(self, name: str, kind: str, numbers: Numbers, writer: IdMapWriter) -> None:
        self.name = name
        self.kind = kind
        self.numbers = numbers
        self.writer = writer
        self.n = 0
        self.seen_bits: npt.NDArray[np.uint64] | None = None  # of a node table: which nodes have an edge
        self._seen: Ranks | None = None
        self._files: list[tuple[int, str, int]] = []  # of a node table: the first node of each file, its path, its first row

    @property
    def is_closed(self) -> bool:
        """Whether all nodes are in the type's node table."""
        return self._seen is not None

    def close(self) -> None:
        """Add no more nodes: the node table was read."""
        self.seen_bits = np.zeros(Ranks.words_for(self.n), np.uint64)
        self._seen = Ranks(self.seen_bits, self.n)

    def state(self) -> dict[str, Any]:
        """Describe all but the names and :attr:`seen_bits`, for a later call, as JSON values."""
        return {"names": self.n, "files": self._files}

    def go_on(self, left: Mapping[str, Any], seen: npt.NDArray[np.uint64] | None) -> None:
        """Go on where an earlier call stopped: number the names again that it had written."""
        self._files = [(int(first), str(path), int(row)) for first, path, row in left["files"]]
        for keys in self.writer.names_so_far(_PIECE):
            self.numbers.add(keys.hashes())
        self.n = self.writer.n
        if not self.n == self.numbers.n == left["names"]:
            raise CorruptionError(f"{self.numbers.n} distinct names instead of {left['names']}", self.writer.path)
        if seen is not None:
            self.seen_bits, self._seen = seen, Ranks(seen, self.n)

    def of_table(self, keys: Keys, block: TableBlock) -> None:
        """Number the nodes of a node table; ValueError for an id that was there before."""
        if not self._files or self._files[-1][1] != block.path:
            self._files.append((self.n, block.path, block.first))
        ids, new = self.numbers.add(keys.hashes())
        if len(new) < len(keys):
            row = int(np.flatnonzero(ids != np.arange(self.n, self.n + len(keys)))[0])
            begin, path, first = max(each for each in self._files if each[0] <= int(ids[row]))
            other = (
                f"row {first + int(ids[row]) - begin}" if path == block.path else f"{path}, row {first + int(ids[row]) - begin}"
            )
            raise ValueError(f"{block.where(row)}: id {keys.show(row)} is that of {other}, too")
        self._name(keys)

    def of_edges(self, keys: Ends, hashes: UInt64s) -> Int64s:
        """Number ends of edges; -1 for one that the type's node table does not have."""
        if self._seen is not None:
            ids = self.numbers.find(hashes)
            ids[ids >= self.n] = -1
            self._seen.mark(ids[ids >= 0])
            return ids
        ids, new = self.numbers.add(hashes)
        if len(new):
            self._name(keys.take(new))
        return ids

    def _name(self, keys: Keys) -> None:
        self.writer.add(keys)
        self.n += len(keys)

    def count_isolated(self) -> int | None:
        """Count the nodes of a node table that no edge has, once; None without one."""
        if self._seen is None:
            return None
        n_seen = self._seen.number()
        self.seen_bits = self._seen = None
        return self.n - n_seen
