"""Writing the adjacency, in either form, from neighbour lists that come in order."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.config import listed, user_path
from featstore.gather.buffers import huge_array
from featstore.storage.calls import close_quietly, open_regular, pread_exactly
from featstore.storage.catalog import EDGE, TOPOLOGIES, FieldPart, FieldRecord
from featstore.storage.format import HEADER_BYTES as FILE_HEADER_BYTES
from featstore.storage.layout import PAGE_BYTES, RowLayout, choose_layout
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.chunkformat import DEFAULT_CHUNK_BYTES, HEADER_BYTES, Directory, chunk_header, parse_chunk_bytes

__all__ = [
    "RESUMABLE",
    "ChunkedFiles",
    "CscFiles",
    "Form",
    "TopologyFiles",
    "WrittenField",
    "lists_in_order",
    "open_topology_files",
    "stored_ids",
]

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
RESUMABLE = ("indices", "chunks")  # the files that a later writer may go on with; all others are made anew
# name, layout, dtype, stripe or "" -> the writer of the field's file, of that kind
OpenWriter = Callable[[str, RowLayout, str, str], RowFileWriter]


@dataclass(frozen=True)
class Form:
    """Form of the stored adjacency: ``"csc"``, or ``"chunked"`` in chunks of ``chunk_bytes``, some of them in ``stripes``."""

    topology: str
    chunk_bytes: int
    stripes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        topology: str,
        chunk_bytes: int | str | None,
        stripes: Sequence[str | os.PathLike[str]],
        path: str | os.PathLike[str],
    ) -> Form:
        """Check a user's options; ValueError or TypeError if there is no such form, OSError if a stripe is no directory."""
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {listed(TOPOLOGIES)}, not {topology!r}")
        for name, value in (("chunk_bytes", chunk_bytes), ("stripes", stripes or None)):
            if value is not None and topology != "chunked":
                raise ValueError(f"{name} is of topology='chunked', not of {topology!r}")
        if topology == "csc":
            return cls(topology, 0)
        n_bytes = DEFAULT_CHUNK_BYTES if chunk_bytes is None else parse_chunk_bytes(chunk_bytes)
        return cls(topology, n_bytes, _stripes(stripes, os.path.realpath(user_path(path))))

    def entry(self) -> dict[str, Any]:
        """Describe the form as the catalog does."""
        return (
            {"topology": self.topology}
            if self.topology == "csc"
            else {"topology": self.topology, "chunk_bytes": self.chunk_bytes}
        )


def _stripes(directories: Sequence[str | os.PathLike[str]], root: str) -> tuple[str, ...]:
    """Check directories of stripes, none of which may lie within the dataset ``root``; return absolute paths."""
    if isinstance(directories, (str, os.PathLike)):
        raise TypeError(f"stripes is a list of directories, not {directories!r}")
    found = tuple(os.path.abspath(user_path(each)) for each in directories)
    for each in found:
        with os.scandir(each):  # raises its error
            pass
        if os.path.commonpath([os.path.realpath(each), root]) == root:
            raise ValueError(f"the stripe {each} lies within the dataset {root}")
    return found


@dataclass(frozen=True)
class WrittenField:
    """A field of the topology, and its durable files."""

    name: str
    files: tuple[FileRecord, ...]
    shape: tuple[int, ...]

    def record(self, generation: int) -> FieldRecord:
        parts, row = [], 0
        for file in self.files:
            parts.append(FieldPart(file.name, row, file.n_rows))
            row += file.n_rows
        return FieldRecord(f"{EDGE}/{self.name}", "topology", self.files[0].dtype, self.shape, generation, tuple(parts))


class TopologyFiles(ABC):
    """The files of one form of the adjacency, being written; a context manager, which removes unfinished files.

    ``open_writer(name, layout, dtype, stripe)`` makes the writer of a file.
    """

    kind: str

    def __init__(self, num_lists: int, id_bytes: int, open_writer: OpenWriter) -> None:
        self.num_lists, self.id_bytes = num_lists, id_bytes
        self.id_type = f"int{8 * id_bytes}"
        self.n_begun = 0  # lists that have begun
        self.n_edges = 0
        self._open_writer = open_writer
        self._writers: list[RowFileWriter] = []

    def _open(self, name: str, layout: RowLayout, dtype: str, stripe: str = "") -> RowFileWriter:
        self._writers.append(self._open_writer(name, layout, dtype, stripe))
        return self._writers[-1]

    @abstractmethod
    def write(self, begins: Int64s, ids: Int64s) -> None:
        """Append edges.

        Parameters
        ----------
        begins : int64 array, shape (k,)
            Ascending: the first edge of each further list, among the edges appended now, or the edge after them.
        ids : integer array, shape (n,)
            The neighbour ids of the next edges, in range.
        """

    @abstractmethod
    def go_on(self) -> None:
        """Go on behind the ids that the writer of :data:`RESUMABLE` has already, as another one left them.

        The next edge to write is ``n_edges``. The next list to begin is ``n_begun``, which may be a list of edges that are
        written. Call this before anything is written.
        """

    @abstractmethod
    def finish(self) -> list[WrittenField]:
        """Complete the files, durably; lists that have not begun are empty."""

    def _rest(self) -> Iterator[Int64s]:
        """Yield the begins, piece by piece, of the lists that have not begun."""
        while self.n_begun < self.num_lists:
            yield np.full(min(self.num_lists - self.n_begun, 1 << 16), self.n_edges, np.int64)

    def close(self) -> None:
        for writer in self._writers:
            writer.abort()

    def __enter__(self) -> TopologyFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(values: npt.NDArray[np.integer], width: int) -> UInt8s:
    """View integers as little-endian rows of ``width`` bytes."""
    return np.ascontiguousarray(values, f"<i{width}").view(np.uint8).reshape(len(values), width)


class CscFiles(TopologyFiles):
    """``indptr`` and ``indices``."""

    kind = "csc"

    def __init__(self, num_lists: int, id_bytes: int, open_writer: OpenWriter) -> None:
        super().__init__(num_lists, id_bytes, open_writer)
        try:
            self._indptr = self._open("indptr", choose_layout(8), "int64")
            self._indices = self._open("indices", choose_layout(id_bytes), self.id_type)
        except BaseException:
            self.close()
            raise

    def write(self, begins: Int64s, ids: Int64s) -> None:
        if len(begins):
            self._indptr.write(_rows(begins, 8))
            self.n_begun += len(begins)
        if len(ids):
            self._indices.write(_rows(ids, self.id_bytes))
            self.n_edges += len(ids)

    def go_on(self) -> None:
        self.n_edges = self._indices.n_rows

    def finish(self) -> list[WrittenField]:
        for begins in self._rest():
            self.write(begins, np.empty(0, np.int64))
        self._indptr.write(_rows(np.array([self.n_edges]), 8))
        return [
            WrittenField("indptr", (self._indptr.commit(),), (self.num_lists + 1,)),
            WrittenField("indices", (self._indices.commit(),), (self.n_edges,)),
        ]


class ChunkedFiles(TopologyFiles):
    """The files ``chunks`` and ``chunk_directory``.

    One chunk is held in memory, and filled with a word for each list that begins and a word for each id. Each file, in the
    dataset or in one of ``stripes``, takes the same number of consecutive chunks, except for rounding. ``num_edges`` is used only
    to divide the chunks among the files.
    """

    kind = "chunked"

    def __init__(
        self,
        num_lists: int,
        id_bytes: int,
        open_writer: OpenWriter,
        chunk_bytes: int,
        stripes: Sequence[str] = (),
        num_edges: int = 0,
    ) -> None:
        super().__init__(num_lists, id_bytes, open_writer)
        self.chunk_bytes = chunk_bytes
        self._capacity = (chunk_bytes - HEADER_BYTES) // id_bytes
        # Begins are filled from the front and ids from the back; untouched pages take no memory.
        self._begins = huge_array(self._capacity * id_bytes).view(f"<i{id_bytes}")
        self._ids = huge_array(self._capacity * id_bytes).view(f"<i{id_bytes}")
        self._n_lists = self._n_ids = self._n_chunks = 0
        self._is_last = False
        self._stripes = stripes
        n_chunks, n_files = -(-(num_lists + num_edges) // self._capacity), 1 + len(stripes)
        self._ends = [-(-n_chunks * (k + 1) // n_files) for k in range(len(stripes))]  # a word of a chunk may stay unused
        self._full: list[FileRecord] = []
        self._first_list = self._first_edge = 0
        # Directory rows of chunks whose first list has not begun yet.
        self._waiting: list[tuple[int, int]] = []
        try:
            self._chunks = self._open("chunks", choose_layout(id_bytes), self.id_type)
            self._directory = self._open("chunk_directory", RowLayout(24, 1, 24), "int64")
        except BaseException:
            self.close()
            raise

    def write(self, begins: Int64s, ids: npt.NDArray[np.integer]) -> None:
        while len(begins) or len(ids):
            room = self._capacity - self._n_lists - self._n_ids
            # A list's begin takes a word before the id that it begins with.
            place = begins[:room] - self.n_edges
            place += np.arange(len(place))
            n_lists = int(np.searchsorted(place, room))
            n_ids = min(room - n_lists, len(ids))
            is_full = n_lists + n_ids == room
            if is_full and n_lists and int(begins[n_lists - 1]) == self.n_edges + n_ids:
                n_lists -= 1  # otherwise the list would begin in this chunk without any of its ids
            self._fill(begins[:n_lists], ids[:n_ids])
            begins, ids = begins[n_lists:], ids[n_ids:]
            if is_full:
                self._flush()

    def _fill(self, begins: Int64s, ids: npt.NDArray[np.integer]) -> None:
        if len(begins):
            if self._n_lists == 0:
                self._waiting.append((self._first_list, self._first_edge))
                self._begin(int(begins[0]))
            np.subtract(
                begins, self._first_edge, out=self._begins[self._n_lists : self._n_lists + len(begins)], casting="same_kind"
            )
            self._n_lists += len(begins)
            self.n_begun += len(begins)
        self._ids[self._n_ids : self._n_ids + len(ids)] = ids
        self._n_ids += len(ids)
        self.n_edges += len(ids)

    def _begin(self, edge: int) -> None:
        """Write the directory's rows of the chunks that waited for the begin of a list."""
        rows = np.array([(number, first, edge) for number, first in self._waiting], "<i8").reshape(-1, 3)
        self._directory.write(rows.view(np.uint8))
        self._waiting.clear()

    def _flush(self) -> None:
        """Write the whole chunk, or the last chunk up to its last used page."""
        width = self.id_bytes
        while len(self._full) < len(self._ends) and self._n_chunks >= self._ends[len(self._full)]:
            self._next_file()
        if self._n_lists == 0:
            self._waiting.append((self._first_list, self._first_edge))
        header = chunk_header(self._n_chunks, self._first_list, self._n_lists, self._first_edge, self._n_ids, width)
        used = self._n_lists + self._n_ids
        n_bytes = -(-(HEADER_BYTES + used * width) // PAGE_BYTES) * PAGE_BYTES if self._is_last else self.chunk_bytes
        for part in (header, self._begins[: self._n_lists], self._ids[: self._n_ids]):
            self._chunks.write(part.view(np.uint8).reshape(-1, width))
        if padding := n_bytes - HEADER_BYTES - used * width:
            self._chunks.write(np.zeros((padding // width, width), np.uint8))
        self._n_chunks += 1
        self._first_list, self._first_edge = self.n_begun, self.n_edges
        self._n_lists = self._n_ids = 0

    def go_on(self) -> None:
        header_words = HEADER_BYTES // self.id_bytes
        with _opened(self._chunks.path, self.id_bytes) as read:
            for chunk in range(0, self._chunks.n_rows, self.chunk_bytes // self.id_bytes):
                words = read(chunk, header_words + 1)
                header = words[:-1].astype(f"<i{self.id_bytes}").view("<i8")
                self._waiting.append((int(header[2]), int(header[4])))
                if header[3]:
                    self._begin(int(header[4]) + int(words[-1]))
                self.n_begun, self.n_edges = int(header[2] + header[3]), int(header[4] + header[5])
                self._n_chunks += 1
        self._first_list, self._first_edge = self.n_begun, self.n_edges

    def go_on_behind(self, directory: Directory, chunk: int) -> None:
        """Begin with ``chunk`` of a graph, whose earlier chunks lie in other files. Call this before anything is written."""
        columns = directory.first_node, directory.first_edge, directory.first_start
        for first in range(0, chunk, 1 << 16):
            rows = np.stack([each[first : min(first + (1 << 16), chunk)] for each in columns], axis=1)
            self._directory.write(rows.astype("<i8", copy=False).view(np.uint8))
        self._n_chunks = chunk
        self.n_begun = self._first_list = int(directory.first_node[chunk])
        self.n_edges = self._first_edge = int(directory.first_edge[chunk])

    def _next_file(self) -> None:
        """Complete the file of chunks, and begin the file of the next stripe."""
        self._full.append(self._chunks.commit())
        self._chunks = self._open("chunks", choose_layout(self.id_bytes), self.id_type, self._stripes[len(self._full) - 1])

    def finish(self) -> list[WrittenField]:
        for begins in self._rest():
            self.write(begins, np.empty(0, np.int64))
        self._is_last = True
        if self._n_lists or self._n_ids:
            self._flush()
        while len(self._full) < len(self._stripes):  # they stay empty
            self._next_file()
        self._waiting.append((self.num_lists, self.n_edges))
        self._begin(self.n_edges)
        directory = self._directory.commit()
        chunks = (*self._full, self._chunks.commit())
        return [
            WrittenField("chunks", chunks, (sum(file.n_rows for file in chunks),)),
            WrittenField("chunk_directory", (directory,), (directory.n_rows, 3)),
        ]


def stored_ids(files: Sequence[FileRecord], chunk_bytes: int, directory: str, step: int) -> Iterator[Int64s]:
    """Yield all ids of the finished files ``indices`` or ``chunks`` in ``directory``, about ``step`` at a time, in order."""
    for file in files:
        id_bytes = file.layout.row_bytes
        with _opened(f"{directory}/{file.name}", id_bytes) as read:
            for at, n_ids in _runs_of_chunks(read, file.n_rows, chunk_bytes, id_bytes) if chunk_bytes else [(0, file.n_rows)]:
                for first in range(0, n_ids, step):
                    yield read(at + first, min(step, n_ids - first))


def _runs_of_chunks(
    read: Callable[[int, int], Int64s], n_words: int, chunk_bytes: int, id_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield where the ids of each chunk begin, and how many there are."""
    header_words = HEADER_BYTES // id_bytes
    for chunk in range(0, n_words, chunk_bytes // id_bytes):
        header = read(chunk, header_words).astype(f"<i{id_bytes}").view("<i8")
        yield chunk + header_words + int(header[3]), int(header[5])


def lists_in_order(
    begins: Iterator[Int64s], blocks: Iterable[npt.NDArray[Any]], n_edges: int = 0
) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
    """Pair begins of lists with ids, as :meth:`TopologyFiles.write` takes them: both come in pieces of any lengths, in order.

    ``begins`` has the first edge of each list, ``blocks`` all ids from the edge ``n_edges`` on. Begins of the last lists, if they
    are empty, may be left out.
    """
    known: Int64s | None = np.empty(0, np.int64)
    for block in blocks:
        rest = block
        while len(rest):
            if known is not None and not len(known):
                known = next(begins, None)
                continue
            now = np.empty(0, np.int64) if known is None else known
            n_lists = int(np.searchsorted(now, n_edges + len(rest)))
            # If more begins may follow, ids come only up to the last known begin.
            n_ids = len(rest) if known is None or n_lists < len(now) else max(0, int(now[-1]) - n_edges)
            yield now[:n_lists], rest[:n_ids]
            n_edges += n_ids
            rest = rest[n_ids:]
            known = None if known is None else now[n_lists:]
    for now in itertools.chain(() if known is None else (known,), begins):  # those of empty last lists are left out
        if n_lists := int(np.searchsorted(now, n_edges)):
            yield now[:n_lists], np.empty(0, np.int64)


@contextlib.contextmanager
def _opened(path: str, width: int) -> Iterator[Callable[[int, int], Int64s]]:
    """Read runs of a file of integers of ``width`` bytes, as int64."""
    fd, _ = open_regular(path)

    def read(first: int, n: int) -> Int64s:
        data = pread_exactly(fd, n * width, FILE_HEADER_BYTES + first * width, path)
        return np.frombuffer(data, dtype=f"<i{width}").astype(np.int64)

    try:
        yield read
    finally:
        close_quietly(fd)


def open_topology_files(
    form: Form, num_lists: int, num_edges: int, id_bytes: int, open_writer: OpenWriter, make_stripe: Callable[[str], str]
) -> CscFiles | ChunkedFiles:
    """Open the writer of a form of the adjacency; ``make_stripe`` makes a stripe in a directory."""
    if form.topology == "csc":
        return CscFiles(num_lists, id_bytes, open_writer)
    stripes = [make_stripe(directory) for directory in form.stripes]
    return ChunkedFiles(num_lists, id_bytes, open_writer, form.chunk_bytes, stripes, num_edges)
