"""Checking a whole dataset: every page of every file, and that the adjacency is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.checksum import page_sums
from featstore.errors import CorruptionError, FormatError
from featstore.graph.snapshot import DatasetFiles
from featstore.storage.calls import pread_exactly
from featstore.storage.catalog import EDGE
from featstore.storage.format import HEADER_BYTES, SUMS_PER_PAGE, sums_page
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.update import OpenFile, open_file
from featstore.storage.writer import FileRecord

__all__ = ["verify_file", "verify_files", "verify_topology"]

Int64s = npt.NDArray[np.int64]
Progress = Callable[[int], None]

_BLOCK_NODES = 1 << 18
_BLOCK_EDGES = 1 << 20


def verify_files(opened: DatasetFiles, progress: Progress) -> int:
    """Check every page of every file, header, padding and checksums included; return the number of pages.

    Parameters
    ----------
    opened : DatasetFiles
    progress : callable
        Called with the number of bytes checked since the last call.

    Raises
    ------
    CorruptionError
        Names the file and the first byte of the first damaged page.
    OSError
        A file cannot be read.

    Notes
    -----
    Reads all files once, sequentially, in about 2 MiB of memory.
    """
    return sum(_verify_open(file, progress) for file in opened.files.values())


def verify_file(root: str, record: FileRecord, progress: Progress) -> int:
    """Check every page of one file, as :func:`verify_files` does; return their number."""
    file = open_file(root, record)
    try:
        return _verify_open(file, progress)
    finally:
        file.close()


def _verify_open(file: OpenFile, progress: Progress) -> int:
    record, path = file.record, file.path
    seed, n_pages = record.seed, record.n_bytes // PAGE_BYTES
    for index in range(record.n_sums_bytes // PAGE_BYTES):
        first = index * SUMS_PER_PAGE
        k = min(SUMS_PER_PAGE, n_pages - first)
        stored = pread_exactly(file.sums_fd, PAGE_BYTES, index * PAGE_BYTES, path + ".sums")
        sums = np.frombuffer(stored, dtype="<u8", count=k)
        # The page must be the one that would be written for these sums: its own checksum and its unused entries, too.
        if sums_page(sums, index, seed) != stored:
            raise CorruptionError("the table of checksums is damaged", path + ".sums", index * PAGE_BYTES)
        found = np.empty(k, dtype=np.uint64)
        page_sums(pread_exactly(file.fd, k * PAGE_BYTES, first * PAGE_BYTES, path), seed, found)
        if (bad := np.flatnonzero(found != sums)).size:
            raise CorruptionError("a page is damaged: its checksum differs", path, (first + int(bad[0])) * PAGE_BYTES)
        progress(k * PAGE_BYTES)
    return n_pages


class _Column:
    """A one-dimensional integer field of the topology, read in runs of dense rows."""

    def __init__(self, opened: DatasetFiles, name: str, n_rows: int) -> None:
        record = opened.catalog.fields.get(f"{EDGE}/{name}")
        if record is None or len(record.parts) != 1 or record.shape != (n_rows,) or record.dtype not in ("int32", "int64"):
            raise FormatError(f"{opened.path}: the catalog has no {name} of {n_rows} rows", opened.path)
        self._file = opened.files[record.parts[0].file]
        self.record, self.path = self._file.record, self._file.path
        self.width = self.record.layout.row_bytes

    def blocks(self, step: int) -> Iterator[Int64s]:
        """Yield all values in order, ``step`` at a time."""
        for first in range(0, self.record.n_rows, step):
            yield self._read(first, min(step, self.record.n_rows - first))

    def _read(self, first: int, n: int) -> Int64s:
        data = pread_exactly(self._file.fd, n * self.width, HEADER_BYTES + first * self.width, self.path)
        return np.frombuffer(data, dtype=f"<i{self.width}").astype(np.int64)

    def damage(self, message: str, row: int) -> CorruptionError:
        """Return the error for a wrong value in ``row``."""
        offset = (HEADER_BYTES + row * self.width) // PAGE_BYTES * PAGE_BYTES
        return CorruptionError(message, self.path, offset)


def verify_topology(opened: DatasetFiles, progress: Progress) -> None:
    """Check that offsets ascend from 0 to the number of edges, ids are nodes, lists ascend, and out-degrees are theirs.

    Raises
    ------
    CorruptionError
        Names the file, and what is wrong with which entry.

    Notes
    -----
    Reads offsets and ids once, and the ids once more for every 2 million nodes, to recount their out-degrees in bounded memory.
    """
    n, n_edges = opened.catalog.num_nodes, opened.catalog.num_edges
    indptr = _Column(opened, "indptr", n + 1)
    indices = _Column(opened, "indices", n_edges)
    degrees = _Column(opened, "out_degree", n)
    starts = _check_offsets(indptr, n_edges, progress)
    _check_lists(indices, n, starts, progress)
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


def _check_offsets(indptr: _Column, n_edges: int, progress: Progress) -> Iterator[Int64s]:
    """Check the offsets; return an iterator of the starts of lists, block by block, for a second pass."""
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


def _check_lists(indices: _Column, n: int, starts: Iterator[Int64s], progress: Progress) -> None:
    """Check that ids are nodes and that within each list they ascend."""
    position, previous = 0, -1
    pending: npt.NDArray[Any] = next(starts, np.empty(0, dtype=np.int64))
    for ids in indices.blocks(_BLOCK_EDGES):
        outside = (ids < 0) | (ids >= n)
        if outside.any():
            bad = int(outside.argmax())
            raise indices.damage(f"indices[{position + bad}] is {ids[bad]}, which is not a node", position + bad)
        falls = np.diff(ids, prepend=previous) < 0
        end = position + len(ids)
        # An id may be smaller than the one before where a list starts.
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
