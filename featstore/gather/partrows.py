"""The rows of a part of the nodes in a file of their own, by the ids that the nodes have in the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore.gather.plan import Addresses
from featstore.storage.layout import RowLayout
from featstore.storage.pagestream import PageStream
from featstore.storage.rowfile import ReadStats, RowFile

__all__ = ["PartRows"]

Int64s = npt.NDArray[np.int64]


class PartRows:
    """Rows by node (:class:`~featstore.gather.sources.RowSource`), of a file that has those of some of the nodes alone.

    Row ``v`` is that of node ``v``, if the file has it; else it is the row of another node. So a cache with room for more
    rows than there are holds some that nobody asks for. Who asks for nodes checks them (:class:`~featstore.topology.part.Part`).

    Parameters
    ----------
    file : RowFile
        The rows, ascending by node; at least one.
    row_of : integer array, shape (num_nodes,)
        How many rows are those of nodes with lower ids.
    """

    in_order = False

    def __init__(self, file: RowFile, row_of: npt.NDArray[Any]) -> None:
        self.file, self._row_of = file, row_of
        self.n_rows, self.row_bytes = len(row_of), file.row_bytes

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def mode(self) -> str:
        return self.file.mode

    @property
    def stats(self) -> ReadStats:
        return self.file.stats

    @property
    def fingerprint(self) -> str:
        return self.file.fingerprint

    @property
    def layout(self) -> RowLayout:
        """That of the file, whose pages have the rows of :meth:`in_file`."""
        return self.file.layout

    def in_file(self, nodes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Find the rows of nodes in the file, in the dtype of ``nodes``; of ascending ones they ascend, too."""
        rows = self._row_of.take(nodes)
        np.minimum(rows, self.file.n_rows - 1, out=rows)
        return rows.astype(nodes.dtype, copy=False)

    def gather(
        self,
        addresses: Addresses,
        out: npt.NDArray[np.uint8],
        positions: Int64s | None = None,
        gap_bytes: int | None = None,
    ) -> ReadStats:
        self.check_open()
        nodes = np.asarray(addresses, np.int64)
        if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < self.n_rows:
            raise IndexError(f"rows {nodes.min()} to {nodes.max()} of {self.n_rows}")
        return self.file.gather(self.in_file(nodes), out, positions, gap_bytes)

    def stream(self, runs: Int64s, window_bytes: int, arena: Arena | None = None) -> PageStream:
        """Open a stream of the file's pages; see :class:`~featstore.storage.pagestream.PagedRows`."""
        return self.file.stream(runs, window_bytes, arena)

    def check_open(self) -> None:
        self.file.check_open()

    def close(self) -> None:
        self.file.close()
        self._row_of = self._row_of[:0].copy()
