"""The cache of neighbour lists in memory, for samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import lists as _core
from featstore.budget import Budget, Reservation
from featstore.config import format_size, parse_size
from featstore.errors import BudgetError
from featstore.gather.buffers import private_array, taking_pages
from featstore.gather.sharedmemory import Allocate
from featstore.graph.neighbors.listscores import WriteScores, scoring_bytes
from featstore.idmaps.keys import ranges
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.scan import scan_bytes
from featstore.topology import prefix
from featstore.topology.base import BLOCK_BYTES, Topology, huge_bytes
from featstore.topology.edgeids import EdgeIds

__all__ = ["NeighborCache", "lists_block_bytes"]

Int64s = npt.NDArray[np.int64]

_CHUNK_NODES = 1 << 16  # nodes handled at once if that takes temporary arrays
_READ_EDGES = 1 << 20  # edges whose numbers are read at once into their place
_PIECE_BYTES = 32  # for each node whose offset is read
_SCRATCH_FRACTION = 1 / 64  # of the file's bytes, within fixed limits
_LISTS_FRACTION = 1 / 16  # of it, for a block of some lists: their places, their numbers and the window of reads take the rest


class NeighborCache:
    """Neighbour lists in memory: of all nodes, or of those with the highest scores; see :meth:`build`.

    Attributes
    ----------
    whole : bool
        Whether every list is in memory; then nothing is read from the file.
    records : array of the topology's ``id_dtype``
        If ``whole``, all ids in the order of their edges; else records ``[degree, n1 … nd]`` one after the other, in node order.
    offset_of_node : int64 array, shape (num_nodes,), or None
        Index of each node's record, -1 for a node without one; None if ``whole``.
    indptr : int64 array, shape (num_nodes + 1,), or None
        The offsets of all lists, if the cache is ``whole`` and the topology has none in memory.
    edge_ids : array of the topology's ``edge_ids.dtype``, or None
        Position of each edge in the input, at the index that its id has in ``records``; None if not kept.
    n_cached : int
        Number of nodes whose list is in memory.
    reservation : Reservation or None
        The reservation of the arrays' bytes; None if the caller counts them.

    Notes
    -----
    The cache is read-only once made, so any number of threads may use it. It addresses lists directly.

    Source: Ginex (VLDB 2022), section 3.2.
    """

    def __init__(
        self,
        topology: Topology,
        records: npt.NDArray[Any],
        offset_of_node: Int64s | None,
        reservation: Reservation | None = None,
        indptr: Int64s | None = None,
        edge_ids: npt.NDArray[Any] | None = None,
    ) -> None:
        self.topology = topology
        self.records = records
        self.offset_of_node = offset_of_node
        self.indptr = indptr
        self.edge_ids = edge_ids
        self.n_cached = topology.num_lists if offset_of_node is None else _count_kept(offset_of_node)
        self._first_kept = 0 if offset_of_node is None else topology.num_edges  # see number_edges
        self.reservation = reservation

    @property
    def whole(self) -> bool:
        return self.offset_of_node is None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.to_arrays().values())

    def __repr__(self) -> str:
        what = "whole" if self.whole else f"{self.n_cached:,} of {self.topology.num_lists:,} nodes"
        return f"NeighborCache({what}{', with edge ids' * (self.edge_ids is not None)}, {format_size(self.nbytes)})"

    @classmethod
    def build(
        cls,
        topology: Topology,
        budget: Budget,
        scores: npt.NDArray[Any] | WriteScores | None = None,
        n_bytes: int | str | None = None,
        scratch: Budget | None = None,
        note: Callable[[int], None] = lambda n_bytes: None,
        *,
        edges: bool = False,
        allocate: Allocate = private_array,
        only: Callable[[int, int], npt.NDArray[np.bool_]] | None = None,
    ) -> NeighborCache:
        """Load the whole adjacency if it fits; else the longest prefix that fits of lists by descending score, ascending node.

        Parameters
        ----------
        topology : Topology
        budget : Budget
            Counts the arrays, as ``neighbor cache``.
        scores : array, shape (num_nodes,), or callable, optional
            One score a node, no NaN; not needed if everything fits. A callable writes the scores into a float64 array, which is
            the memory of the cache's table, and holds :func:`~featstore.graph.neighbors.listscores.scoring_bytes` meanwhile.
        n_bytes : int or str, optional
            Bytes that the cache may take, its table of 8 bytes a node included; by default all that ``budget`` has available.
        scratch : Budget, optional
            Counts scratch memory (:meth:`scratch_bytes`) while the cache is built. By default ``budget``, which leaves that much
            less for the cache.
        note : callable
            Gets the number of bytes that were read or processed since its last call; their sum is at most :meth:`work_bytes`.
        edges : bool
            Keep the numbers of the lists' edges beside them, if the topology has a file of numbers.
        allocate : callable
            Makes each array, ``allocate(name, n, dtype)``, by the name of its attribute.
        only : callable, optional
            ``only(first, stop)`` tells of which of the nodes ``first … stop - 1`` lists may be in memory: scores choose in any
            case, and no other list is asked for.

        Raises
        ------
        BudgetError
            Not even the table fits; the error names the least that works.
        ValueError
            Scores are missing, of the wrong shape, or NaN.
        CorruptionError
            The file of lists holds an id that is no node, or the file of numbers one that is no edge.
        """
        edges = edges and topology.edge_ids is not None
        limit = budget.available if n_bytes is None else parse_size(n_bytes)
        table_bytes = huge_bytes(topology.num_lists * 8)
        whole_bytes = cls.whole_bytes(topology, edges)
        if only is None and whole_bytes <= limit:
            return cls._whole(topology, budget, note, edges, allocate)
        in_memory = topology.resident_offsets is not None
        width = cls.entry_bytes(topology, edges) - topology.id_bytes  # bytes of an edge's number; 0 if numbers are not kept
        numbers_bytes = topology.num_edges * width
        scratch_bytes = cls.scratch_bytes(topology.num_lists, topology.nbytes, numbers_bytes, in_memory=in_memory)
        needed = table_bytes
        if scratch is None:
            scratch = budget
            limit = min(limit, budget.available - scratch_bytes)
            needed += scratch_bytes
        if table_bytes > limit:
            least = min(needed, whole_bytes)
            raise BudgetError(f"a neighbour cache of this graph does not fit {max(0, limit)} bytes", least)
        if scores is None:
            raise ValueError(f"scores are needed: the whole adjacency takes {whole_bytes} bytes, more than {limit}")
        with scratch.reserve("neighbor cache", scratch_bytes), budget.reserve("neighbor cache", table_bytes).kept() as held:
            offset_of_node = allocate("offset_of_node", topology.num_lists, np.int64)
            if callable(scores):
                write, scores = scores, offset_of_node.view(np.float64)  # each score is read before its place is written
                write(scores)
            n_pages = (limit - table_bytes) // PAGE_BYTES
            room = PAGE_BYTES * (max(0, n_pages - 1) if edges else n_pages)  # each of two arrays takes whole pages
            entry_bytes = topology.id_bytes + width
            n_records = prefix.write_prefix(topology, np.asarray(scores), room, entry_bytes, offset_of_node, note)
            held.resize(table_bytes + huge_bytes(n_records * topology.id_bytes) + huge_bytes(n_records * width))
            records = allocate("records", n_records, topology.id_dtype)
            edge_ids = allocate("edge_ids", n_records, _numbers_of(topology).dtype) if edges else None
            if only is None:
                _fill(topology, offset_of_node, records, edge_ids, note)
            else:
                _fill_some(topology, only, offset_of_node, records, edge_ids, note)
        return cls(topology, records, offset_of_node, held, None, edge_ids)

    @classmethod
    def _whole(
        cls, topology: Topology, budget: Budget, note: Callable[[int], None], edges: bool, allocate: Allocate
    ) -> NeighborCache:
        with budget.reserve("neighbor cache", cls.whole_bytes(topology, edges)).kept() as held:
            indptr = None
            if topology.resident_offsets is None:
                indptr = allocate("indptr", topology.num_lists + 1, np.int64)
                for first, offsets in topology.offset_pieces(_CHUNK_NODES):
                    indptr[first : first + len(offsets)] = offsets
            ids = allocate("records", topology.num_edges, topology.id_dtype)
            with taking_pages(ids.view(np.uint8)):
                for first, block in topology.scan():
                    ids[first : first + len(block)] = block
                    note(block.nbytes)
            edge_ids = None
            if edges:
                numbers = _numbers_of(topology)
                edge_ids = allocate("edge_ids", topology.num_edges, numbers.dtype)
                for begin in range(0, len(edge_ids), _READ_EDGES):
                    piece = edge_ids[begin : begin + _READ_EDGES]
                    numbers.read(begin, piece)
                    note(piece.nbytes)
        return cls(topology, ids, None, held, indptr, edge_ids)

    @staticmethod
    def entry_bytes(topology: Topology, edges: bool = False) -> int:
        """Count an edge's bytes in memory: of its neighbour's id, and with ``edges`` of its number if numbers are stored."""
        return topology.id_bytes + (topology.edge_ids.dtype.itemsize if edges and topology.edge_ids is not None else 0)

    @staticmethod
    def work_bytes(topology: Topology, edges: bool = False) -> int:
        """Count the bytes that :meth:`build` processes if not everything fits: offsets for choosing, then all edges."""
        return prefix.work_bytes(topology.num_lists) + topology.num_edges * NeighborCache.entry_bytes(topology, edges)

    @staticmethod
    def whole_bytes(topology: Topology, edges: bool = False) -> int:
        """Count the bytes of a cache of all lists: ids, edge ids (``edges``), and offsets if the topology holds none."""
        offsets = 0 if topology.resident_offsets is not None else huge_bytes((topology.num_lists + 1) * 8)
        numbers = topology.num_edges * NeighborCache.entry_bytes(topology, edges) - topology.nbytes
        return huge_bytes(topology.nbytes) + huge_bytes(numbers) + offsets

    @staticmethod
    def scratch_bytes(num_nodes: int, n_bytes: int, edge_ids: int = 0, *, in_memory: bool) -> int:
        """Count the bytes that :meth:`build` holds beside a cache of a part of the lists; at most 29 MB.

        ``n_bytes`` are the bytes of all neighbour ids. ``edge_ids`` are the bytes of all edge ids, 0 if numbers are not
        kept. ``in_memory`` says that the topology has its offsets in memory.
        """
        held = max(prefix.scratch_bytes(num_nodes) + _block_bytes(n_bytes) + _buffer_bytes(edge_ids), scoring_bytes(num_nodes))
        return held if in_memory else held + _PIECE_BYTES * prefix.piece_nodes(num_nodes) + _block_bytes(n_bytes)

    def locate(self, ids: Int64s, place: Int64s, degree: Int64s) -> None:
        """Find the lists of nodes, in memory or in the file.

        ``place`` receives the index of each node's first neighbour in :attr:`records`, or ``~position`` in the file. ``degree``
        receives the in-degrees. All three arrays are int64 ``[k]``; ``ids`` are **not** checked.
        """
        if self.offset_of_node is None:
            if self.indptr is None:
                self.topology.offsets(ids, place, degree)
            else:
                _core.offsets(self.indptr, ids, place, degree)
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
        """Find lists in memory, as :meth:`locate`; return the positions in ``ids`` of the other nodes, whose degree is set to 0.

        The topology is not used. Must not be called if the cache is ``whole``.
        """
        assert self.offset_of_node is not None
        missing = np.empty(len(ids) + 1, np.int64)
        n = _core.lookup(self.offset_of_node, self.records, self.topology.id_bytes, ids, place, degree, missing)
        return missing[:n]

    @property
    def places_edges(self) -> bool:
        """Whether :meth:`edge_places` can compute places of edges from the lists' places alone."""
        return self.whole or self.edge_ids is not None

    def edge_places(self, place: Int64s, starts: Int64s) -> None:
        """Compute the places of lists' first edges, for :meth:`number_edges`, from the lists' places of :meth:`locate`.

        The result is written to ``starts``, which may be ``place``. Requires :attr:`places_edges`.
        """
        _core.edge_places(place, self._first_kept, starts)

    def number_edges(self, positions: Int64s, array: Callable[[tuple[int], npt.DTypeLike], npt.NDArray[Any]]) -> None:
        """Replace places of edges by their numbers in the input, from memory or from the file.

        ``positions``, int64 ``[n]``, are places of :meth:`edge_places` plus an edge's position in its list. The place of an edge
        in the file is its position there. The place of a cached edge is ``num_edges`` plus its index in ``edge_ids``. If the
        cache is ``whole``, position and index are the same, and the place is either. ``array(shape, dtype)`` allocates the
        arrays for reading. Raises as :meth:`EdgeIds.replace`.
        """
        assert self.edge_ids is not None
        n_missing = _core.take_edge_ids(self.edge_ids, self.edge_ids.itemsize, self._first_kept, positions)
        self.number_missing(positions, n_missing, array)

    def number_missing(
        self, positions: Int64s, n_missing: int, array: Callable[[tuple[int], npt.DTypeLike], npt.NDArray[Any]]
    ) -> None:
        """Read the numbers of the ``n_missing`` edges whose entry is ``~position``; the other entries are numbers already."""
        if n_missing:
            missing, stored = (array((n_missing,), np.int64) for _ in range(2))
            _core.missing_edges(positions, missing, stored)
            _numbers_of(self.topology).replace(stored, array)
            positions[missing] = stored

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """List the arrays to save, by name; they are not copied."""
        names = ("records", "offset_of_node", "indptr", "edge_ids")
        arrays = {name: getattr(self, name) for name in names}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def from_arrays(
        cls, topology: Topology, arrays: Mapping[str, npt.NDArray[Any]], reservation: Reservation | None = None
    ) -> NeighborCache:
        """Make a cache of saved arrays, which the caller has counted; :meth:`close` releases ``reservation``.

        ValueError if the arrays are not a cache of this topology.
        """
        edge_ids = arrays.get("edge_ids")
        records, offset_of_node, indptr = arrays["records"], arrays.get("offset_of_node"), arrays.get("indptr")
        if records.dtype != topology.id_dtype or records.ndim != 1 or not records.flags.c_contiguous:
            raise ValueError(f"records must be a 1-D array of {topology.id_dtype}")
        if edge_ids is not None:
            stored = topology.edge_ids
            if stored is None or edge_ids.dtype != stored.dtype or edge_ids.shape != records.shape:
                raise ValueError("edge_ids are kept of each record, where the topology has a file of them, in its dtype")
            if offset_of_node is None and _core.first_bad_id(edge_ids, edge_ids.itemsize, topology.num_edges) >= 0:
                raise ValueError("the edge ids are not this topology's")
        if offset_of_node is None:
            if len(records) != topology.num_edges or _core.first_bad_id(records, topology.id_bytes, topology.num_nodes) >= 0:
                raise ValueError("the records are not this topology's adjacency")
            is_whole = indptr is not None and indptr.dtype == np.int64 and indptr.shape == (topology.num_lists + 1,)
            if (topology.resident_offsets is None) != is_whole:
                raise ValueError(
                    "offsets of all lists are kept where the topology has none in memory, int64, one a node and one more"
                )
            if indptr is not None:
                for first, offsets in topology.offset_pieces(_CHUNK_NODES):
                    if not np.array_equal(indptr[first : first + len(offsets)], offsets):
                        raise ValueError(f"the offsets from node {first} on are not this topology's")
        else:
            if offset_of_node.dtype != np.int64 or offset_of_node.shape != (topology.num_lists,):
                raise ValueError(f"offset_of_node must be int64 of shape ({topology.num_lists},)")
            for first, offsets in topology.offset_pieces(_CHUNK_NODES):
                places = offset_of_node[first : first + len(offsets) - 1]
                bad = _core.first_bad_record(offsets, places, records, topology.id_bytes, topology.num_nodes)
                if bad >= 0:
                    raise ValueError(f"the record of node {first + bad} is not this topology's")
                if edge_ids is not None:
                    bad = _core.first_bad_record(offsets, places, edge_ids, edge_ids.itemsize, topology.num_edges)
                    if bad >= 0:
                        raise ValueError(f"the edge ids of node {first + bad} are not this topology's")
        return cls(topology, records, offset_of_node, reservation, indptr, edge_ids)

    def close(self) -> None:
        """Give the memory back to the budget; a batch that is being sampled keeps the arrays until it is done."""
        if self.reservation is not None:
            self.reservation.release()


def _count_kept(offset_of_node: Int64s) -> int:
    """Count the nodes that have a record."""
    firsts = range(0, len(offset_of_node), _CHUNK_NODES)
    return sum(int(np.count_nonzero(offset_of_node[first : first + _CHUNK_NODES] >= 0)) for first in firsts)


def _fill(
    topology: Topology,
    offset_of_node: Int64s,
    records: npt.NDArray[Any],
    edge_ids: npt.NDArray[Any] | None,
    note: Callable[[int], None],
) -> None:
    """Fill the records, and the numbers of their edges, in one pass over all lists."""
    if edge_ids is not None:
        width = edge_ids.itemsize
        buffer = np.empty(max(1, _buffer_bytes(topology.num_edges * width) // width), edge_ids.dtype)
    for block in topology.blocks(_block_bytes(topology.nbytes)):
        places = offset_of_node[block.first_node : block.first_node + len(block.offsets) - 1]
        _core.fill_records(block.ids, block.first_edge, block.offsets, places, 0, records, topology.id_bytes)
        note(block.ids.nbytes)
        if edge_ids is not None:
            node = 0
            for first, ids in _numbers_of(topology).pieces(block.first_edge, block.first_edge + len(block.ids), buffer):
                node = _core.fill_records(ids, first, block.offsets, places, node, edge_ids, width)
                note(ids.nbytes)


def _fill_some(
    topology: Topology,
    only: Callable[[int, int], npt.NDArray[np.bool_]],
    offset_of_node: Int64s,
    records: npt.NDArray[Any],
    edge_ids: npt.NDArray[Any] | None,
    note: Callable[[int], None],
) -> None:
    """Fill the records of the nodes that ``only`` allows, and ask for no other list; other nodes get no record."""
    step = max(1, prefix.piece_nodes(topology.num_lists) // 2)
    block_bytes = lists_block_bytes(topology)
    for first in range(0, topology.num_lists, step):
        places = offset_of_node[first : first + step]
        places[~only(first, first + len(places))] = -1
        nodes = np.flatnonzero(places >= 0) + first
        for block in topology.lists(nodes, block_bytes) if len(nodes) else ():
            places_of = offset_of_node[nodes[block.where]]
            _fill_lists(block.ids, block.at, block.degree, places_of, records)
            begins, counts = block.held()
            note(int(counts.sum()) * topology.id_bytes)
            if edge_ids is not None:
                starts, _ = topology.offsets(nodes[block.where])
                numbers = ranges(starts + begins, counts)
                _numbers_of(topology).replace(numbers, np.empty)
                at = np.cumsum(counts) - counts - begins
                _fill_lists(numbers.astype(edge_ids.dtype), at, block.degree, places_of, edge_ids)
                note(len(numbers) * edge_ids.itemsize)


def _fill_lists(ids: npt.NDArray[Any], at: Int64s, degree: Int64s, places: Int64s, records: npt.NDArray[Any]) -> None:
    """Fill the records of lists that begin at ``at`` in ``ids``, and may reach beyond them on both sides."""
    offsets, of = np.stack([at, at + degree], axis=1).reshape(-1), np.full(max(0, 2 * len(at) - 1), -1)
    of[::2] = places  # between two lists is what nobody asked for, as the list of a node without a record
    _core.fill_records(ids, 0, offsets[: len(of) + 1], of, 0, records, records.itemsize)


def _numbers_of(topology: Topology) -> EdgeIds:
    assert topology.edge_ids is not None
    return topology.edge_ids


def _block_bytes(n_bytes: int) -> int:
    """Count the bytes that a scan of ``n_bytes`` of ids holds while records are filled."""
    return scan_bytes(n_bytes, min(BLOCK_BYTES, max(1 << 16, int(n_bytes * _SCRATCH_FRACTION))))


def lists_block_bytes(topology: Topology) -> int:
    """Choose the size of two blocks for reading some lists within what :meth:`NeighborCache.scratch_bytes` counts."""
    return max(2 * PAGE_BYTES, int(_block_bytes(topology.nbytes) * _LISTS_FRACTION) // PAGE_BYTES * PAGE_BYTES)


def _buffer_bytes(n_bytes: int) -> int:
    """Choose the size of the buffer for ``n_bytes`` of edge ids while records are filled."""
    return min(n_bytes, max(1 << 16, int(n_bytes * _SCRATCH_FRACTION)), BLOCK_BYTES) // 8 * 8
