"""The adjacency: resident offsets, neighbour ids in a file, and the cache of neighbour lists in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import sampler as _core
from featstore._core.prefix import write_lengths
from featstore.budget import Budget, Reservation
from featstore.cache.rowmap import huge_array
from featstore.config import parse_size
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.graph.listblocks import BLOCK_BYTES, ListBlock, stream_lists
from featstore.graph.prefix import Prefix
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.readahead import read_ahead
from featstore.storage.rowfile import RowFile

__all__ = ["NeighborCache", "Topology", "huge_bytes"]

Int64s = npt.NDArray[np.int64]

_BLOCK_BYTES = 8 << 20  # one sequential read when lists are loaded
_CHUNK_NODES = 1 << 16  # nodes handled at once where that takes temporary arrays
_SCRATCH_SHARE = 64  # of the file that is read at once where that is less


def huge_bytes(n_bytes: int) -> int:
    """Bytes of memory that :func:`~featstore.cache.rowmap.huge_array` takes at most for ``n_bytes``."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class Topology:
    """In-neighbours of every node in CSC form: those of ``v`` are ids ``indptr[v] … indptr[v + 1] - 1`` of the file.

    Parameters
    ----------
    num_nodes, num_edges : int
    indptr : int64 array, shape (num_nodes + 1,)
        Resident; counted by whoever loaded it, or by :meth:`load`.
    indices : RowFile
        ``num_edges`` rows of ``id_bytes``.
    id_bytes : {4, 8}

    Raises
    ------
    CorruptionError
        ``indptr`` does not ascend from 0 to ``num_edges``.

    Notes
    -----
    Thread-safe if ``indices`` is. Samplers ask through :meth:`offsets` and :meth:`read_edges` alone, so that the offsets of a
    very large graph may be paged, or come with chunks of the topology.
    """

    def __init__(self, num_nodes: int, num_edges: int, indptr: Int64s, indices: RowFile, id_bytes: int) -> None:
        if id_bytes not in (4, 8):
            raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
        if indptr.shape != (num_nodes + 1,):
            raise ValueError(f"indptr of {num_nodes} nodes has shape ({num_nodes + 1},), not {indptr.shape}")
        self.num_nodes = num_nodes
        self.num_edges = num_edges
        self.indptr = np.ascontiguousarray(indptr, np.int64)
        self.indices = indices
        self.id_bytes = id_bytes
        self._reservation: Reservation | None = None
        bad = _core.first_bad_offset(self.indptr, num_edges)
        if bad >= 0:
            raise CorruptionError(f"offsets do not ascend from 0 to {num_edges} at node {bad}", indices.path)

    @classmethod
    def load(cls, num_nodes: int, num_edges: int, indptr: RowFile, indices: RowFile, id_bytes: int, budget: Budget) -> Topology:
        """Read the offsets, a file of 8-byte rows, into memory that ``budget`` counts as ``indptr``."""
        n_bytes = (num_nodes + 1) * 8
        reservation = budget.reserve("indptr", huge_bytes(n_bytes))
        try:
            array = huge_array((num_nodes + 1) * 8).view(np.int64)
            rows = array.view(np.uint8).reshape(-1, 8)
            step = _BLOCK_BYTES // 8
            for first in range(0, num_nodes + 1, step):
                indptr.read(first, len(rows[first : first + step]), rows[first : first + step])
            try:
                topology = cls(num_nodes, num_edges, array, indices, id_bytes)
            except CorruptionError as error:
                raise CorruptionError(error.message, indptr.path) from None
        except BaseException:
            reservation.release()
            raise
        topology._reservation = reservation
        return topology

    def __repr__(self) -> str:
        return f"Topology(num_nodes={self.num_nodes}, num_edges={self.num_edges}, id_bytes={self.id_bytes})"

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """How the file holds a neighbour id."""
        return np.dtype(np.int32 if self.id_bytes == 4 else np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all neighbour ids."""
        return self.num_edges * self.id_bytes

    def offsets(self, ids: Int64s, starts: Int64s | None = None, degrees: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Return where the lists of nodes start in the file, and their lengths.

        Parameters
        ----------
        ids : int64 array, shape (k,)
            In ``[0, num_nodes)``; **not** checked.
        starts, degrees : int64 array, shape (k,), optional
            Written if given.

        Raises
        ------
        ClosedError
        """
        indptr = self.indptr  # stays if another thread closes
        if len(indptr) != self.num_nodes + 1:
            raise ClosedError("the topology is closed")
        if starts is None:
            starts = np.empty(len(ids), np.int64)
        if degrees is None:
            degrees = np.empty(len(ids), np.int64)
        _core.offsets(indptr, ids, starts, degrees)
        return starts, degrees

    def degrees(self, first: int = 0, stop: int | None = None) -> Int64s:
        """Return the in-degrees of nodes ``first … stop - 1``."""
        stop = self.num_nodes if stop is None else stop
        return np.diff(self.indptr[first : stop + 1])

    def read_edges(self, positions: Int64s, out: npt.NDArray[Any]) -> None:
        """Read the neighbour ids at ``positions``, in any order, into ``out``: only the blocks that hold them are read.

        Parameters
        ----------
        positions : int64 array, shape (k,)
            In ``[0, num_edges)``; ``IndexError`` otherwise.
        out : array of ``id_dtype``, shape (k,)
        """
        if len(positions):
            self.indices.gather(positions, out.view(np.uint8).reshape(len(positions), self.id_bytes))

    def scan(self, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield ``(first, ids)``, blocks of the whole file in order, ids checked, the next one read meanwhile.

        Two arrays, ``block_bytes`` together, take turns: a block is there until the next one is asked for.
        """
        n_ids = max(1, min(-(-self.num_edges // 2), block_bytes // 2 // self.id_bytes))
        turns = np.empty((2, n_ids * self.id_bytes), np.uint8).view(self.id_dtype)
        places = enumerate(range(0, self.num_edges, n_ids))
        yield from self._read((first, turns[k % 2, : min(n_ids, self.num_edges - first)]) for k, first in places)

    def lists(self, nodes: Int64s, block_bytes: int = BLOCK_BYTES) -> Iterator[ListBlock]:
        """Yield the blocks of the file that hold edges of ``nodes``, ascending and distinct; see :class:`ListBlock`."""
        return stream_lists(self, nodes, block_bytes)

    def read_all(self, out: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """Read all ids, checked, into ``out``, array of ``id_dtype``, shape (num_edges,); yield its blocks as they are filled."""
        step = _BLOCK_BYTES // self.id_bytes
        for _, ids in self._read((first, out[first : first + step]) for first in range(0, self.num_edges, step)):
            yield ids

    def _read(self, blocks: Iterator[tuple[int, npt.NDArray[Any]]]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield blocks (first edge, ids) once they are read and checked."""
        rows = ((first, ids.view(np.uint8).reshape(-1, self.id_bytes)) for first, ids in blocks)
        for first, read in read_ahead(self.indices, rows):
            ids = read.reshape(-1).view(self.id_dtype)
            self.check_ids(first, ids)
            yield first, ids

    def check_ids(self, first: int, ids: npt.NDArray[Any]) -> None:
        """Raise CorruptionError if one of ``ids``, at positions ``first …`` of the file, is no node."""
        bad = _core.first_bad_id(ids, self.id_bytes, self.num_nodes)
        if bad >= 0:
            raise self.bad_id(first + bad, int(ids[bad]))

    def check_found(self, positions: Int64s, ids: npt.NDArray[Any]) -> None:
        """Raise CorruptionError if one of ``ids``, which were read at ``positions``, is no node."""
        bad = _core.first_bad_id(ids, self.id_bytes, self.num_nodes)
        if bad >= 0:
            raise self.bad_id(int(positions[bad]), int(ids[bad]))

    def bad_id(self, position: int, found: int) -> CorruptionError:
        """Return the error for the id ``found`` at ``position`` of the file."""
        offset = PAGE_BYTES + position * self.id_bytes // PAGE_BYTES * PAGE_BYTES
        return CorruptionError(f"edge {position} leads to node {found} of {self.num_nodes}", self.indices.path, offset)

    def close(self) -> None:
        """Give the offsets' memory back to the budget; the file is its opener's to close."""
        self.indptr = np.zeros(0, np.int64)
        if self._reservation is not None:
            self._reservation.release()


class NeighborCache:
    """Neighbour lists in memory: of all nodes, or of those with the highest scores.

    Make one with :meth:`build` or :meth:`from_arrays`.

    Attributes
    ----------
    whole : bool
        Every list is in memory; nothing is read from the file.
    records : array of the topology's ``id_dtype``
        All ids in file order where ``whole``; else records ``[degree, n1 … nd]`` one after the other, in node order.
    offset_of_node : int64 array, shape (num_nodes,), or None
        Index of each node's record, -1 where it has none; None where ``whole``.

    Notes
    -----
    Read-only once made, so any number of threads may use it. Direct addressing as in Ginex (VLDB 2022), section 3.2.
    """

    def __init__(
        self, topology: Topology, records: npt.NDArray[Any], offset_of_node: Int64s | None, reservation: Reservation | None = None
    ) -> None:
        self.topology = topology
        self.records = records
        self.offset_of_node = offset_of_node
        self._reservation = reservation

    @property
    def whole(self) -> bool:
        """Whether every list is in memory."""
        return self.offset_of_node is None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.records.nbytes + (0 if self.offset_of_node is None else self.offset_of_node.nbytes)

    @property
    def n_cached(self) -> int:
        """Nodes whose list is in memory."""
        return self.topology.num_nodes if self.offset_of_node is None else int(np.count_nonzero(self.offset_of_node >= 0))

    def __repr__(self) -> str:
        what = "whole" if self.whole else f"{self.n_cached} of {self.topology.num_nodes} nodes"
        return f"NeighborCache({what}, {self.nbytes} bytes)"

    @classmethod
    def build(
        cls,
        topology: Topology,
        budget: Budget,
        scores: npt.NDArray[Any] | None = None,
        n_bytes: int | str | None = None,
        scratch: Budget | None = None,
        note: Callable[[int], None] = lambda n_bytes: None,
    ) -> NeighborCache:
        """Load the neighbour lists of the nodes with the highest scores.

        Parameters
        ----------
        topology : Topology
        budget : Budget
            Counts the arrays, as ``neighbor cache``.
        scores : array, shape (num_nodes,), optional
            One a node, no NaN; of equals the lowest node comes first. Not needed where everything fits.
        n_bytes : int or str, optional
            What the cache may take, its table of 8 bytes a node included; all that ``budget`` has left by default.
        scratch : Budget, optional
            Counts what is held meanwhile, :meth:`scratch_bytes`; ``budget`` by default, which then leaves the cache that much
            less.
        note : callable
            Told how many bytes of the file were read since it was told last; all are ``topology.nbytes``.

        Returns
        -------
        NeighborCache
            The whole adjacency if it fits ``n_bytes``; else the longest prefix of the nodes in order of score.

        Raises
        ------
        BudgetError
            Not even the table fits; names the least that works.
        ValueError
            Scores are missing, of the wrong shape, or NaN.
        CorruptionError
            The file holds an id that is no node's.

        Notes
        -----
        One sequential pass over the file; a few passes over the scores.
        """
        limit = budget.available if n_bytes is None else parse_size(n_bytes)
        table_bytes = huge_bytes(topology.num_nodes * 8)
        whole_bytes = huge_bytes(topology.nbytes)
        if whole_bytes <= limit:
            with contextlib.ExitStack() as undo:
                held = budget.reserve("neighbor cache", whole_bytes)
                undo.callback(held.release)
                ids = huge_array(topology.nbytes).view(topology.id_dtype)
                for block in topology.read_all(ids):
                    note(block.nbytes)
                undo.pop_all()
            return cls(topology, ids, None, held)
        scratch_bytes = cls.scratch_bytes(topology)
        needed = table_bytes
        if scratch is None:
            scratch = budget
            limit = min(limit, budget.available - scratch_bytes)
            needed += scratch_bytes
        if table_bytes > limit:
            least = min(needed, whole_bytes)
            raise BudgetError(f"a neighbour cache of this graph needs at least {least} bytes, not {max(0, limit)}", least)
        if scores is None:
            raise ValueError(f"scores are needed: the whole adjacency takes {whole_bytes} bytes, more than {limit}")
        with scratch.reserve("neighbor cache", scratch_bytes), contextlib.ExitStack() as undo:
            held = budget.reserve("neighbor cache", table_bytes)
            undo.callback(held.release)
            chosen = Prefix(
                topology.indptr, topology.id_bytes, np.asarray(scores), (limit - table_bytes) // PAGE_BYTES * PAGE_BYTES
            )
            offset_of_node = huge_array(topology.num_nodes * 8).view(np.int64)
            n_records = chosen.write_offsets(offset_of_node)
            held.resize(table_bytes + huge_bytes(n_records * topology.id_bytes))
            records = huge_array(n_records * topology.id_bytes).view(topology.id_dtype)
            write_lengths(topology.indptr, offset_of_node, records)
            node = 0
            for position, block in topology.scan(_block_bytes(topology)):
                node = _core.fill_records(block, position, topology.indptr, offset_of_node, node, records, topology.id_bytes)
                note(block.nbytes)
            undo.pop_all()
        return cls(topology, records, offset_of_node, held)

    @staticmethod
    def scratch_bytes(topology: Topology) -> int:
        """Return what :meth:`build` holds beside the cache where that has room for a part of the lists; at most 11 MB."""
        return Prefix.scratch_bytes(topology.num_nodes) + _block_bytes(topology)

    def locate(self, ids: Int64s, place: Int64s, degree: Int64s) -> None:
        """Find the lists of nodes, in memory or in the file.

        Parameters
        ----------
        ids : int64 array, shape (k,)
            In ``[0, num_nodes)``; **not** checked.
        place : int64 array, shape (k,)
            Receives the index of each node's first neighbour in :attr:`records`, or ``~position`` in the file.
        degree : int64 array, shape (k,)
            Receives the in-degrees.
        """
        if self.offset_of_node is None:
            self.topology.offsets(ids, place, degree)
            return
        missing = np.empty(min(len(ids), _CHUNK_NODES) + 1, np.int64)
        for first in range(0, len(ids), _CHUNK_NODES):
            part = slice(first, first + _CHUNK_NODES)
            n = _core.lookup(
                self.offset_of_node, self.records, self.topology.id_bytes, ids[part], place[part], degree[part], missing
            )
            if n:
                starts, degrees = self.topology.offsets(ids[part][missing[:n]])
                _core.set_places(missing[:n], starts, degrees, place[part], degree[part])

    def find(self, ids: Int64s, place: Int64s, degree: Int64s) -> Int64s:
        """Find the lists of nodes that are in memory, as :meth:`locate`; return the positions in ``ids`` of the others.

        Those have a degree of 0. Nothing is asked of the topology; not where the cache is ``whole``.
        """
        assert self.offset_of_node is not None
        missing = np.empty(len(ids) + 1, np.int64)
        n = _core.lookup(self.offset_of_node, self.records, self.topology.id_bytes, ids, place, degree, missing)
        return missing[:n]

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to save: ``records`` and, unless the cache is whole, ``offset_of_node``; not copies."""
        arrays: dict[str, npt.NDArray[Any]] = {"records": self.records}
        if self.offset_of_node is not None:
            arrays["offset_of_node"] = self.offset_of_node
        return arrays

    @classmethod
    def from_arrays(
        cls, topology: Topology, arrays: Mapping[str, npt.NDArray[Any]], reservation: Reservation | None = None
    ) -> NeighborCache:
        """Make a cache of saved arrays, which stay the caller's to count (``reservation`` is released by :meth:`close`).

        Raises
        ------
        ValueError
            The arrays are not a cache of this topology: a wrong shape or dtype, a record that disagrees with the offsets, an id
            that is no node's.
        """
        records, offset_of_node = arrays["records"], arrays.get("offset_of_node")
        if records.dtype != topology.id_dtype or records.ndim != 1 or not records.flags.c_contiguous:
            raise ValueError(f"records must be a 1-D array of {topology.id_dtype}")
        if offset_of_node is None:
            if len(records) != topology.num_edges or _core.first_bad_id(records, topology.id_bytes, topology.num_nodes) >= 0:
                raise ValueError("the records are not this topology's adjacency")
        else:
            if offset_of_node.dtype != np.int64 or offset_of_node.shape != (topology.num_nodes,):
                raise ValueError(f"offset_of_node must be int64 of shape ({topology.num_nodes},)")
            bad = _core.first_bad_record(topology.indptr, offset_of_node, records, topology.id_bytes)
            if bad >= 0:
                raise ValueError(f"the record of node {bad} is not this topology's")
        return cls(topology, records, offset_of_node, reservation)

    def close(self) -> None:
        """Give the memory back to the budget; a batch being sampled keeps its arrays until it is done."""
        if self._reservation is not None:
            self._reservation.release()


def _block_bytes(topology: Topology) -> int:
    """Bytes of the file read at once while records are filled."""
    return min(topology.nbytes, max(1 << 16, topology.nbytes // _SCRATCH_SHARE), _BLOCK_BYTES) // 8 * 8
