"""Verification of a whole dataset: every page of every file, and the structure of the adjacency."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.checksum import page_sums
from featstore.errors import CorruptionError, FormatError
from featstore.gather.patchedrows import segments
from featstore.graph.base import StoredGraph
from featstore.graph.partadjacency import check_part, part_of_catalog
from featstore.graph.snapshot import DatasetFiles, open_files, topology_bytes
from featstore.idmaps.idmap import map_of, maps_of
from featstore.idmaps.keys import mixed
from featstore.idmaps.verify import map_bytes, verify_map
from featstore.progress import Progress
from featstore.storage.calls import pread_exactly
from featstore.storage.catalog import EDGE
from featstore.storage.format import HEADER_BYTES, SUMS_PER_PAGE, sums_page
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.update import OpenFile, open_file
from featstore.storage.writer import FileRecord
from featstore.topology.chunkformat import Directory, check_header
from featstore.topology.edgeids import EDGE_IDS
from featstore.topology.part import OUTSIDE
from featstore.topology.types import EdgeType, Types

__all__ = ["verify", "verify_file", "verify_files", "verify_patches", "verify_topology"]

Int64s = npt.NDArray[np.int64]
Add = Callable[[int], None]

_BLOCK_NODES = 1 << 18
_BLOCK_EDGES = 1 << 20


def verify(self: StoredGraph, progress: bool = True) -> dict[str, int]:
    """Check the whole dataset as it is on disk now: catalog, every page of every file, and the structure of the adjacency.

    Maps of names to ids are checked, too: that each name leads to its id.

    Parameters
    ----------
    progress : bool
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    dict
        Numbers of ``files``, ``pages`` and ``bytes`` that were checked.

    Raises
    ------
    CorruptionError
        A file is damaged; the error names path and offset.
    FormatError, VersionError, OSError
        As for :meth:`open`.

    Notes
    -----
    The check reads every file once. It then reads the adjacency again, and its neighbour ids once more for every 2 million
    nodes. Memory is bounded. The ``verify`` of :meth:`open` makes no difference.
    """
    with self.locked():
        opened = open_files(self.path)
    with opened:
        catalog = opened.catalog
        total = sum(record.n_bytes for record in catalog.files.values())
        counts = {of: opened.types.nodes[of].n if of in opened.types.nodes else -1 for of in maps_of(catalog)}
        maps = [each for of, n in counts.items() if (each := map_of(catalog, of, n, self.path)) is not None]
        with Progress("verify", total + topology_bytes(catalog) + sum(map(map_bytes, maps)), progress) as bar:
            n_pages = verify_files(opened, bar.add)
            verify_patches(opened)
            verify_topology(opened, bar.add)
            for each in maps:
                verify_map(each, opened.files, bar.add)
    return {"files": len(catalog.files), "pages": n_pages, "bytes": total}


def verify_files(opened: DatasetFiles, progress: Add) -> int:
    """Check every page of every file, header, padding and checksums included; return the number of pages.

    ``progress`` gets the bytes that were checked since its last call. Files are read in sequence, in about 2 MiB of memory.
    CorruptionError names the first damaged page of a file.
    """
    return sum(_verify_open(file, progress) for file in opened.files.values())


def verify_file(root: str, record: FileRecord, progress: Add) -> int:
    """Check every page of one file, as :func:`verify_files` does; return their number."""
    file = open_file(root, record)
    try:
        return _verify_open(file, progress)
    finally:
        file.close()


def _verify_open(file: OpenFile, progress: Add) -> int:
    record, path = file.record, file.path
    seed, n_pages = record.seed, record.n_bytes // PAGE_BYTES
    for index in range(record.n_sums_bytes // PAGE_BYTES):
        first = index * SUMS_PER_PAGE
        k = min(SUMS_PER_PAGE, n_pages - first)
        stored = pread_exactly(file.sums_fd, PAGE_BYTES, index * PAGE_BYTES, path + ".sums")
        sums = np.frombuffer(stored, dtype="<u8", count=k)
        # The page must equal the page written for these sums, with its own checksum and its unused entries.
        if sums_page(sums, index, seed) != stored:
            raise CorruptionError("the table of checksums is damaged", path + ".sums", index * PAGE_BYTES)
        found = np.empty(k, dtype=np.uint64)
        page_sums(pread_exactly(file.fd, k * PAGE_BYTES, first * PAGE_BYTES, path), seed, found)
        if (bad := np.flatnonzero(found != sums)).size:
            raise CorruptionError("a page is damaged: its checksum differs", path, (first + int(bad[0])) * PAGE_BYTES)
        progress(k * PAGE_BYTES)
    return n_pages


def verify_patches(opened: DatasetFiles) -> None:
    """Check that patches hold the blocks that their tables say, and that every row lies in a file; CorruptionError otherwise."""
    for record in opened.catalog.files.values():
        if record.patches:
            files = [opened.files[name] for name in (record.name, *(each.file for each in record.patches))]
            tables = []
            for patch in record.patches:
                table = opened.files[patch.blocks]
                data = pread_exactly(table.fd, 8 * table.record.n_rows, HEADER_BYTES, table.path)
                tables.append(np.frombuffer(data, "<i8").astype(np.int64))
            lengths = [each.record.n_rows for each in files]
            segments(record.layout, record.total_rows, lengths, tables, [each.path for each in files])


class _Column:
    """A one-dimensional integer field of the topology, in one file or several, read in runs of dense rows."""

    def __init__(self, opened: DatasetFiles, name: str, n_rows: int | None) -> None:
        record = opened.catalog.fields.get(f"{EDGE}/{name}")
        is_column = record is not None and record.parts and len(record.shape) == 1 and record.dtype in ("int32", "int64")
        if record is None or not is_column or n_rows not in (None, record.n_rows):
            raise FormatError(f"{opened.path}: the catalog has no {name} of {n_rows} rows", opened.path)
        self.record, self.width = record, record.row_bytes
        self._files = [opened.files[part.file] for part in record.parts]
        self._first_rows, self._lengths = [part.first for part in record.parts], [part.rows for part in record.parts]

    def blocks(self, step: int) -> Iterator[Int64s]:
        """Yield all values in order, ``step`` at a time."""
        for first in range(0, self.record.n_rows, step):
            yield self.read(first, min(step, self.record.n_rows - first))

    def read(self, first: int, n: int) -> Int64s:
        data = bytearray()
        while len(data) < n * self.width:
            number, row = self._place(first + len(data) // self.width)
            file = self._files[number]
            n_bytes = min(n * self.width - len(data), (self._lengths[number] - row) * self.width)
            data += pread_exactly(file.fd, n_bytes, HEADER_BYTES + row * self.width, file.path)
        return np.frombuffer(data, dtype=f"<i{self.width}").astype(np.int64)

    def check_units(self, n_rows: int) -> None:
        """Check that each file begins with a multiple of ``n_rows``, or behind the last row; FormatError otherwise."""
        for file, first in zip(self._files, self._first_rows, strict=True):
            if first % n_rows and first != self.record.n_rows:
                raise FormatError(f"{file.path}: it cannot hold row {first} and those that follow", file.path)

    def _place(self, row: int) -> tuple[int, int]:
        """Find the number of the file that holds a row, and the row's number there."""
        number = bisect.bisect_right(self._first_rows, row) - 1
        return number, row - self._first_rows[number]

    def page_at(self, row: int) -> tuple[str, int]:
        """Find the file that holds a row, and the byte at which the row's page begins."""
        number, row = self._place(row)
        return self._files[number].path, (HEADER_BYTES + row * self.width) // PAGE_BYTES * PAGE_BYTES

    def damage(self, message: str, row: int) -> CorruptionError:
        """Make the error for a wrong value in ``row``."""
        return CorruptionError(message, *self.page_at(row))


def verify_topology(opened: DatasetFiles, progress: Add) -> None:
    """Check the adjacency: offsets ascend from 0 to the number of edges, ids are nodes, lists ascend, out-degrees are right.

    If edges are stored in another order than that of the input, also check that each edge has a number of its own. If there are
    several types, ids and edge ids are in the ranges of their types. If the topology is chunked, also check the directory
    and the header of each chunk. The check reads offsets and ids once. It reads the ids once more for every 2 million nodes, to
    recount their out-degrees in bounded memory. Raises CorruptionError.
    """
    types, n, n_edges = opened.types, opened.catalog.num_nodes, opened.catalog.num_edges
    degrees = _Column(opened, "out_degree", n)
    indices: _Column | _ChunkIds
    if opened.catalog.topology == "csc":
        indptr, indices = _Column(opened, "indptr", types.num_lists + 1), _Column(opened, "indices", n_edges)
        starts = _check_offsets(indptr, n_edges, progress)
    else:
        indices = _ChunkIds(opened)
        starts = indices.starts(progress)
    _check_lists(indices, types, _check_begins(types, starts, opened.path), progress)
    low = 0
    for stored in degrees.blocks(8 * _BLOCK_NODES):
        counts = np.zeros(len(stored), dtype=np.int64)
        for ids in indices.blocks(_BLOCK_EDGES):
            inside = ids if low == 0 and len(counts) == n else ids[(ids >= low) & (ids < low + len(counts))] - low
            counts += np.bincount(inside, minlength=len(counts))
        if (bad := np.flatnonzero(counts != stored)).size:
            node = int(bad[0])
            message = f"out_degree[{low + node}] is {stored[node]}, but the node occurs {counts[node]} times"
            raise degrees.damage(message, low + node)
        low += len(stored)
        progress(stored.nbytes)
    _check_part(opened, indices, progress)
    if f"{EDGE}/{EDGE_IDS}" in opened.catalog.fields:
        _check_edge_ids(_Column(opened, EDGE_IDS, n_edges), types, progress)


def _check_part(opened: DatasetFiles, indices: _Column | _ChunkIds, progress: Add) -> None:
    """Check a part of a graph: how far its nodes are, that other lists than its own are empty, that its own lead to its nodes."""
    found = part_of_catalog(opened.catalog, opened.types, opened.path)
    if found is None:
        return
    (part, n_nodes, name), n = found, opened.catalog.num_nodes
    file = opened.files[name]
    part = replace(part, hop_of=np.frombuffer(pread_exactly(file.fd, n, HEADER_BYTES, file.path), np.uint8))
    check_part(part, n_nodes, file.path)
    starts = indices.starts(progress) if isinstance(indices, _ChunkIds) else _Column(opened, "indptr", n + 1).blocks(_BLOCK_NODES)
    previous, first = 0, -1  # the begin of the list ``first``
    for block in itertools.chain(starts, [np.array([opened.catalog.num_edges])]):
        lengths = np.diff(block, prepend=previous)
        begin = max(first, 0)
        lengths = lengths[begin - first :][: n - begin]  # of the lists from ``begin`` on
        bad = np.flatnonzero((lengths > 0) & ~part.has_list(begin, begin + len(lengths)))
        if len(bad):
            raise CorruptionError(f"node {begin + bad[0]} has a list, which {part} has not", opened.path)
        first, previous = first + len(block), int(block[-1])
    position = 0
    for ids in indices.blocks(_BLOCK_EDGES):
        if len(outside := np.flatnonzero(part.hop_of[ids] == OUTSIDE)):
            at = int(outside[0])
            raise indices.damage(f"indices[{position + at}] is {ids[at]}, which is not in {part}", position + at)
        position += len(ids)


def _spans(types: Types, first: int, n: int) -> Iterator[tuple[EdgeType, int, int]]:
    """Divide the edges ``first … first + n - 1`` by type; yield each type, and the begin and end of its edges after ``first``."""
    for kind in types.edges.values():
        begin, end = max(kind.first_edge - first, 0), min(kind.first_edge + kind.n_edges - first, n)
        if begin < end:
            yield kind, begin, end


def _check_begins(types: Types, starts: Iterator[Int64s], path: str) -> Iterator[Int64s]:
    """Yield the first edges of all lists, block by block, and check that those of each type begin with the type's first edge."""
    first, rest = 0, list(types.edges.values())
    for block in starts:
        while rest and rest[0].first_list < first + len(block):
            kind = rest.pop(0)
            begin = int(block[kind.first_list - first])
            if begin != kind.first_edge:
                raise CorruptionError(f"edges of type {kind.key!r} begin with edge {begin}, not {kind.first_edge}", path)
        first += len(block)
        yield block


def _check_edge_ids(edge_ids: _Column, types: Types, progress: Add) -> None:
    """Check that each number occurs once: all are in range, and their hashes have the sum of the hashes of all numbers."""
    row = total = 0
    for ids in edge_ids.blocks(_BLOCK_EDGES):
        for kind, begin, end in _spans(types, row, len(ids)):
            low, high = kind.first_edge, kind.first_edge + kind.n_edges
            outside = (ids[begin:end] < low) | (ids[begin:end] >= high)
            if outside.any():
                bad = begin + int(outside.argmax())
                edges = f"there are {high} edges" if types.is_one else f"edges of type {kind.key!r} are {low} … {high - 1}"
                raise edge_ids.damage(f"edge_ids[{row + bad}] is {ids[bad]}, and {edges}", row + bad)
        total += int((mixed(np.arange(row, row + len(ids))) - mixed(ids)).sum(dtype=np.uint64))
        row += len(ids)
        progress(ids.nbytes)
    if total % 2**64:
        raise edge_ids.damage("edge_ids has a number twice, so edges would get the data of others", 0)


class _ChunkIds:
    """The neighbour ids and list offsets of a chunked topology, read in runs and checked against the directory."""

    def __init__(self, opened: DatasetFiles) -> None:
        catalog = opened.catalog
        self._words = _Column(opened, "chunks", None)
        self._words.check_units(catalog.chunk_bytes // self._words.width)
        record = catalog.fields.get(f"{EDGE}/chunk_directory")
        if record is None or len(record.parts) != 1 or record.shape[1:] != (3,) or record.dtype != "int64" or record.n_rows < 1:
            raise FormatError(f"{opened.path}: the catalog has no directory of chunks", opened.path)
        file = opened.files[record.parts[0].file]
        if not file.record.layout.is_dense:
            raise FormatError(f"{file.path}: the rows of a directory of chunks follow one another", file.path)
        data = pread_exactly(file.fd, 24 * record.n_rows, HEADER_BYTES, file.path)
        self._directory = Directory(
            np.frombuffer(data, "<i8").reshape(-1, 3),
            opened.types.num_lists,
            catalog.num_edges,
            self._words.width,
            catalog.chunk_bytes,
            self._words.record.n_rows,
            file.path,
        )

    def starts(self, progress: Add) -> Iterator[Int64s]:
        """Yield the checked numbers of the lists' first edges, in blocks, and check the header of each chunk."""
        d = self._directory
        for chunk in range(d.n_chunks):
            at, n = chunk * d.chunk_words, int(d.n_nodes[chunk])
            header = self._words.read(at, d.header_words).astype(f"<i{d.id_bytes}").view(np.uint8)
            check_header(header, d, chunk, self._words.page_at(at))
            at, previous = at + d.header_words, int(d.first_start[chunk])
            for first in range(0, n, _BLOCK_NODES):
                begins = self._words.read(at + first, min(_BLOCK_NODES, n - first)) + int(d.first_edge[chunk])
                wrong = (
                    (np.diff(begins, prepend=previous) < 0)
                    | (begins > d.first_edge[chunk + 1])
                    | (begins > d.first_start[chunk + 1])
                )
                wrong[0] |= first == 0 and begins[0] != previous
                if wrong.any():
                    bad = int(wrong.argmax())
                    node = int(d.first_node[chunk]) + first + bad
                    raise self._words.damage(f"list {node} cannot begin with edge {begins[bad]}", at + first + bad)
                previous = int(begins[-1])
                progress(begins.nbytes)
                yield begins

    def blocks(self, step: int) -> Iterator[Int64s]:
        """Yield all ids in order, up to ``step`` at a time."""
        d = self._directory
        for chunk in range(d.n_chunks):
            at, n = int(d.ids_at[chunk]), int(d.n_edges[chunk])
            for first in range(0, n, step):
                yield self._words.read(at + first, min(step, n - first))

    def damage(self, message: str, position: int) -> CorruptionError:
        """Make the error for a wrong id of edge ``position``."""
        d = self._directory
        chunk = int(np.searchsorted(d.first_edge[1:], position, side="right"))
        return self._words.damage(message, int(d.ids_at[chunk]) + position - int(d.first_edge[chunk]))


def _check_offsets(indptr: _Column, n_edges: int, progress: Add) -> Iterator[Int64s]:
    """Check all offsets; return an iterator over them, block by block, for a second pass."""
    previous, row = 0, 0
    for block in indptr.blocks(_BLOCK_NODES):
        if row == 0 and int(block[0]) != 0:
            raise indptr.damage(f"indptr[0] is {block[0]}; it must be 0", 0)
        wrong = (np.diff(block, prepend=previous) < 0) | (block < 0) | (block > n_edges)
        if wrong.any():
            bad = int(wrong.argmax())
            raise indptr.damage(f"indptr[{row + bad}] is {block[bad]} after {block[bad - 1] if bad else previous}", row + bad)
        previous = int(block[-1])
        row += len(block)
        progress(block.nbytes)
    if previous != n_edges:
        raise indptr.damage(f"indptr ends with {previous}, but there are {n_edges} indices", row - 1)
    return indptr.blocks(_BLOCK_NODES)


def _check_lists(indices: _Column | _ChunkIds, types: Types, starts: Iterator[Int64s], progress: Add) -> None:
    """Check that ids are nodes of the right type, and that they ascend within each list."""
    position, previous = 0, -1
    pending: npt.NDArray[Any] = next(starts, np.empty(0, dtype=np.int64))  # of a chunked topology: checked while they are read
    for ids in indices.blocks(_BLOCK_EDGES):
        for kind, begin, end in _spans(types, position, len(ids)):
            outside = (ids[begin:end] < kind.src.first) | (ids[begin:end] >= kind.src.stop)
            if outside.any():
                bad = position + begin + int(outside.argmax())
                of = "" if types.is_one else f" of type {kind.src.name!r}"
                raise indices.damage(f"indices[{bad}] is {ids[bad - position]}, which is not a node{of}", bad)
        falls = np.diff(ids, prepend=previous) < 0
        end = position + len(ids)
        # At the start of a list an id may be smaller than the one before.
        while len(pending):
            inside = pending[: np.searchsorted(pending, end)]
            falls[inside[inside >= position] - position] = False
            pending = pending[len(inside) :]
            if len(pending):
                break
            pending = next(starts, pending)
        if falls.any():
            bad = int(falls.argmax())
            raise indices.damage(f"the neighbour list at indices[{position + bad}] is not sorted", position + bad)
        position, previous = end, int(ids[-1])
        progress(ids.nbytes)
    for _ in starts:
        pass
