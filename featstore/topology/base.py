"""The adjacency: the interface of all its forms, and the CSC form, with its offsets in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import lists as _core
from featstore.budget import Budget, Reservation
from featstore.errors import ClosedError, CorruptionError
from featstore.gather.buffers import huge_array, taking_pages
from featstore.gather.doublebuffer import double_buffer
from featstore.lazy import lazy
from featstore.registry import read_only
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile
from featstore.storage.scan import SCAN_BYTES, scan_words
from featstore.topology.edgeids import EdgeIds
from featstore.topology.listblocks import ListBlock, NodeLists
from featstore.topology.liststream import LIST_BYTES, pass_pages, stream_lists

__all__ = ["BLOCK_BYTES", "CscTopology", "Topology", "huge_bytes", "scan_ids", "stored_offsets"]

Int64s = npt.NDArray[np.int64]

BLOCK_BYTES = SCAN_BYTES  # for reading the adjacency in sequence
_PIECE = 1 << 16  # nodes handled at once if that takes temporary arrays


def huge_bytes(n_bytes: int) -> int:
    """Round a number of bytes up to the whole pages that :func:`~featstore.gather.buffers.huge_array` takes."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class Topology(ABC):
    """Lists of in-neighbours. Edges are numbered: those of list 0 first, then those of list 1, and so on. Thread-safe.

    With one edge type there is a list for each node, by its id. With several, each edge type has a list for each node of its
    destination's type, in a range of list numbers of its own; neighbours are nodes' ids in any case. Samplers use only
    :meth:`offsets`, :meth:`read_edges` and ``edge_ids``. ``kind`` is ``"csc"`` or ``"chunked"``, as in the catalog. ``edge_ids``
    gives each edge's position in the input; it is None if edges are stored in the order of the input.
    """

    kind: str
    edge_ids: EdgeIds | None = None

    def __init__(self, num_lists: int, num_edges: int, id_bytes: int, num_nodes: int | None = None) -> None:
        if id_bytes not in (4, 8):
            raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
        self.num_lists, self.num_nodes = num_lists, num_lists if num_nodes is None else num_nodes
        self.num_edges = num_edges
        self.id_bytes = id_bytes

    def __repr__(self) -> str:
        lists = f"num_lists={self.num_lists}, " * (self.num_lists != self.num_nodes)
        return f"{type(self).__name__}({lists}num_nodes={self.num_nodes}, num_edges={self.num_edges}, id_bytes={self.id_bytes})"

    @property
    def id_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int32 if self.id_bytes == 4 else np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all neighbour ids."""
        return self.num_edges * self.id_bytes

    @property
    @abstractmethod
    def resident_offsets(self) -> Int64s | None:
        """The offsets, int64 ``[num_lists + 1]``, read-only, if they are in memory; else None."""

    @abstractmethod
    def offsets(self, ids: Int64s, starts: Int64s | None = None, degrees: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Look up each list's first edge and length, int64 ``[k]``; written to ``starts`` and ``degrees`` if given.

        ``ids``, int64 ``[k]`` in ``[0, num_lists)``, are **not** checked. Raises ClosedError; if offsets are read from disk,
        also CorruptionError and OSError.
        """

    @property
    @abstractmethod
    def path(self) -> str:
        """Path of the file that holds the neighbour ids, or of the first one of several."""

    @abstractmethod
    def offsets_between(self, first: int, stop: int) -> Int64s:
        """Get the offsets of nodes ``first … stop - 1`` and the end of the last node's list; the array is read-only."""

    def offset_pieces(self, n_nodes: int) -> Iterator[tuple[int, Int64s]]:
        """Yield the offsets of all nodes in order: a first node, and offsets of up to ``n_nodes`` nodes, int64 ``[k + 1]``.

        Offsets are checked to ascend. The arrays must not be written to.
        """
        for first in range(0, self.num_lists, n_nodes):
            yield first, self.offsets_between(first, min(first + n_nodes, self.num_lists))

    @abstractmethod
    def read_edges(self, positions: Int64s, out: npt.NDArray[Any]) -> None:
        """Read the neighbour ids of edges, in any order, into ``out``; only the blocks that hold these ids are read.

        ``positions`` are int64 ``[k]``; IndexError outside ``[0, num_edges)``. ``out`` is an array of ``id_dtype``. The ids read
        are **not** checked to be nodes: see :meth:`check_found`.
        """

    @abstractmethod
    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[ListBlock]:
        """Yield all edges in order, in blocks with the nodes that they lead to; ids are checked, and reads go on meanwhile.

        Reading holds ``block_bytes``, at least three pages. A block is valid until the next one is requested.
        """

    @abstractmethod
    def lists(self, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[NodeLists]:
        """Yield the lists of some nodes, in order: many lists at once, or a long one in pieces; reads go on meanwhile.

        ``nodes``, int64 ``[k]``, are distinct and ascending, and **not** checked. Two blocks of ids take ``block_bytes``; a
        block is valid until the next one is requested.
        """

    @property
    @abstractmethod
    def gap_bytes(self) -> int:
        """Bytes that the drive reads in the time of starting another read; a default until the drive is measured."""

    @abstractmethod
    def pass_cost(self, nodes: Int64s) -> int:
        """Count the bytes that :meth:`lists` reads for ``nodes``, plus :attr:`gap_bytes` for each read."""

    @abstractmethod
    def lookup_cost(self, nodes: Int64s) -> int:
        """Bound the cost of :meth:`offsets` of ``nodes``, in the bytes of :meth:`pass_cost`."""

    def files_of(self, nodes: Int64s) -> Int64s:
        """Find the number, from 0, of the file in which each node's list begins."""
        return np.zeros(len(nodes), np.int64)

    @abstractmethod
    def bad_id(self, position: int, found: int) -> CorruptionError:
        """Make the error for the id ``found`` of edge ``position``, which is no node."""

    @abstractmethod
    def close(self) -> None:
        """Give memory back to the budget; the files stay open, as their opener closes them."""

    def scan(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the blocks of :meth:`blocks` as ``(first edge, ids)``."""
        for block in self.blocks(block_bytes):
            yield block.first_edge, block.ids

    def degrees(self, first: int = 0, stop: int | None = None) -> Int64s:
        """Compute the in-degrees of nodes ``first … stop - 1``, int64."""
        stop = self.num_lists if stop is None else stop
        found = np.empty(stop - first, np.int64)
        for begin in range(first, stop, _PIECE):
            offsets = self.offsets_between(begin, min(begin + _PIECE, stop))
            np.subtract(offsets[1:], offsets[:-1], out=found[begin - first : begin - first + len(offsets) - 1])
        return found

    @lazy
    def largest_degree(self) -> int:
        """The largest in-degree of a node; the first access processes all offsets."""
        return max(
            (int(self.degrees(k, min(k + _PIECE, self.num_lists)).max()) for k in range(0, self.num_lists, _PIECE)), default=0
        )

    def check_ids(self, first: int, ids: npt.NDArray[Any]) -> None:
        """Check that ``ids``, the neighbour ids of the edges ``first …``, are nodes; CorruptionError otherwise."""
        bad = _core.first_bad_id(ids, self.id_bytes, self.num_nodes)
        if bad >= 0:
            raise self.bad_id(first + bad, int(ids[bad]))

    def check_found(self, positions: Int64s, ids: npt.NDArray[Any]) -> None:
        """Check that ``ids``, which were read at ``positions``, are nodes; CorruptionError otherwise."""
        bad = _core.first_bad_id(ids, self.id_bytes, self.num_nodes)
        if bad >= 0:
            raise self.bad_id(int(positions[bad]), int(ids[bad]))


class CscTopology(Topology):
    """The CSC form: the edges of list ``v`` are the ids ``indptr[v] … indptr[v + 1] - 1`` of the file.

    Parameters
    ----------
    num_lists, num_edges : int
    indptr : int64 array, shape (num_lists + 1,)
        Offsets, whose memory the caller counts; :meth:`load` counts its own. CorruptionError unless they ascend from 0 to
        ``num_edges``.
    indices : RowFile
        ``num_edges`` rows of ``id_bytes``.
    id_bytes : {4, 8}
    num_nodes : int, optional
        Ids are below it; by default there is a list for each node.
    is_checked : bool
        Whether ``indptr`` is known to ascend.
    """

    kind = "csc"

    def __init__(
        self,
        num_lists: int,
        num_edges: int,
        indptr: Int64s,
        indices: RowFile,
        id_bytes: int,
        num_nodes: int | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        super().__init__(num_lists, num_edges, id_bytes, num_nodes)
        if indptr.shape != (num_lists + 1,):
            raise ValueError(f"indptr of {num_lists} lists has shape ({num_lists + 1},), not {indptr.shape}")
        self.indptr = read_only(np.ascontiguousarray(indptr, np.int64))  # as plug-ins get this array, and slices of it
        self.indices = indices
        self._reservation: Reservation | None = None
        if not is_checked:
            _check_offsets(self.indptr, 0, 0, num_lists, num_edges, indices.path)

    @classmethod
    def load(
        cls,
        num_lists: int,
        num_edges: int,
        indptr: RowFile,
        indices: RowFile,
        id_bytes: int,
        budget: Budget,
        note: Callable[[int], None] = lambda n_bytes: None,
        num_nodes: int | None = None,
    ) -> CscTopology:
        """Read the offsets, a file of 8-byte rows, into memory counted as ``indptr``; ``note`` gets the bytes of each block."""
        held = budget.reserve("indptr", cls.held_bytes(num_lists))
        with held.kept():
            memory = huge_array((num_lists + 1) * 8)
            array, rows = memory.view(np.int64), memory.reshape(-1, 8)
            step = BLOCK_BYTES // 8
            blocks = ((first, rows[first : first + step]) for first in range(0, num_lists + 1, step))
            with taking_pages(memory):
                for first, block in double_buffer(indptr.read, blocks):
                    before = int(array[first - 1]) if first else 0
                    _check_offsets(array[first : first + len(block)], first, before, num_lists, num_edges, indptr.path)
                    note(block.nbytes)
            topology = cls(num_lists, num_edges, array, indices, id_bytes, num_nodes, is_checked=True)
        topology._reservation = held
        return topology

    @staticmethod
    def held_bytes(num_lists: int) -> int:
        return huge_bytes((num_lists + 1) * 8)

    @property
    def resident_offsets(self) -> Int64s | None:
        return self.indptr

    def offsets(self, ids: Int64s, starts: Int64s | None = None, degrees: Int64s | None = None) -> tuple[Int64s, Int64s]:
        indptr = self._open_indptr()
        if starts is None:
            starts = np.empty(len(ids), np.int64)
        if degrees is None:
            degrees = np.empty(len(ids), np.int64)
        _core.offsets(indptr, ids, starts, degrees)
        return starts, degrees

    def _open_indptr(self) -> Int64s:
        indptr = self.indptr  # stays valid if another thread closes
        if len(indptr) != self.num_lists + 1:
            raise ClosedError(f"the adjacency in {self.path} is closed")
        return indptr

    @property
    def path(self) -> str:
        return self.indices.path

    def offsets_between(self, first: int, stop: int) -> Int64s:
        return self.indptr[first : stop + 1]

    def read_edges(self, positions: Int64s, out: npt.NDArray[Any]) -> None:
        if len(positions):
            self.indices.gather(positions, out.view(np.uint8).reshape(len(positions), self.id_bytes))

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[ListBlock]:
        indptr = self.indptr
        for first, ids in self.scan(block_bytes):
            node = int(np.searchsorted(indptr, first, side="right")) - 1
            end = int(np.searchsorted(indptr, first + len(ids), side="left"))
            yield ListBlock(node, indptr[node : end + 1], first, ids)

    def lists(self, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[NodeLists]:
        """Read the lists of some nodes, see :meth:`Topology.lists`; other pages are not read, except in short gaps."""
        return stream_lists(self.indices, self._open_indptr(), nodes, self.num_nodes, self.bad_id, block_bytes)

    @property
    def gap_bytes(self) -> int:
        return self.indices.gap_bytes

    def pass_cost(self, nodes: Int64s) -> int:
        n_pages, n_runs = pass_pages(self._open_indptr(), nodes, self.id_bytes)
        return n_pages * PAGE_BYTES + self.gap_bytes * n_runs

    def lookup_cost(self, nodes: Int64s) -> int:
        return 0

    def scan(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        return scan_ids(self.indices, self.num_nodes, self.num_edges, self.id_bytes, block_bytes)

    def bad_id(self, position: int, found: int) -> CorruptionError:
        return _bad_id(self.indices, self.id_bytes, self.num_nodes, position, found)

    def close(self) -> None:
        self.indptr = np.zeros(0, np.int64)
        if self._reservation is not None:
            self._reservation.release()


def _first_bad_offset(offsets: Int64s, first: int, before: int, num_lists: int, num_edges: int) -> int:
    """Find the first list from ``first`` on whose offset breaks the ascent from 0 to ``num_edges``; -1 if none does.

    ``before`` is the offset of the list before, or another lower bound of the offsets.
    """
    if first == 0 and offsets[0] != 0:
        return 0
    bad = _core.first_bad_offset(offsets, before, num_edges)
    if bad >= 0:
        return first + bad
    return num_lists if first + len(offsets) == num_lists + 1 and offsets[-1] != num_edges else -1


def _check_offsets(offsets: Int64s, first: int, before: int, num_lists: int, num_edges: int, path: str) -> None:
    bad = _first_bad_offset(offsets, first, before, num_lists, num_edges)
    if bad >= 0:
        raise CorruptionError(f"offsets do not ascend from 0 to {num_edges} at node {bad}", path)


def _bad_id(indices: RowFile, id_bytes: int, num_nodes: int, position: int, found: int) -> CorruptionError:
    offset = PAGE_BYTES + position * id_bytes // PAGE_BYTES * PAGE_BYTES
    return CorruptionError(f"edge {position} leads to node {found} of {num_nodes}", indices.path, offset)


def scan_ids(
    indices: RowFile, num_nodes: int, num_edges: int, id_bytes: int, block_bytes: int
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield checked blocks of a CSC file of ids in order, as ``(first edge, ids)``; see :meth:`Topology.blocks`."""
    for first, ids in scan_words(indices, num_edges, np.dtype(np.int32 if id_bytes == 4 else np.int64), block_bytes):
        bad = _core.first_bad_id(ids, id_bytes, num_nodes)
        if bad >= 0:
            raise _bad_id(indices, id_bytes, num_nodes, first + bad, int(ids[bad]))
        yield first, ids


def stored_offsets(indptr: RowFile, num_lists: int, num_edges: int, n_nodes: int) -> Iterator[tuple[int, Int64s]]:
    """Yield the offsets of a CSC file as :meth:`Topology.offset_pieces` does, read in sequence and checked."""
    for first in range(0, num_lists, n_nodes):
        n = min(n_nodes, num_lists - first)
        offsets = indptr.read(first, n + 1).reshape(-1).view(np.int64)
        if _first_bad_offset(offsets, first, 0, num_lists, num_edges) >= 0:
            where = PAGE_BYTES + first * 8 // PAGE_BYTES * PAGE_BYTES
            raise CorruptionError(f"offsets do not ascend from 0 to {num_edges} from node {first} on", indptr.path, where)
        yield first, offsets
