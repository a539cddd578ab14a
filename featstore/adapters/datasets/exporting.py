"""A dataset's features, node data and edges as plain files: ``.npy``, or Parquet."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.descriptor import open_fd
from featstore.config import check_flag, format_size, parse_memory, user_path
from featstore.creation.extsort import PairSorter
from featstore.errors import BudgetError, MissingExtraError
from featstore.graph.adjacency import write_edges
from featstore.graph.dataset import OutOfCoreGraph
from featstore.idmaps.idmap import maps_of
from featstore.progress import Progress
from featstore.storage.builddir import SUFFIX_BYTES, BuildDirectory
from featstore.storage.calls import check_length, close_fd, close_quietly, fsync_fd, pwrite_all
from featstore.storage.writer import fsync_directory
from featstore.topology.crossedges import blocks_in
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, EdgeType, edge_name

__all__ = ["FORMS", "export"]

Int64s = npt.NDArray[np.int64]

FORMS: Final = ("npy", "parquet")
HOLDER: Final = "export"  # in the budget's report
LEAST_MEMORY: Final = 8 << 20
_MOST_MEMORY: Final = 1 << 30
_DATA_BYTES: Final = 8 << 20  # of node data, written together

_LONG_NAMES: Final = "files are named as types and fields; give a shorter path, or leave out edges (--no-edges)"


def export(
    g: OutOfCoreGraph | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    form: str = "npy",
    *,
    edges: bool = True,
    memory: int | str | None = None,
    progress: bool = True,
) -> list[str]:
    """Write a dataset's features, node data and edges as files that other programs read.

    Parameters
    ----------
    g : OutOfCoreGraph or path-like
        An open dataset; or the directory of one, which is opened as by ``featstore.open(g)``, and closed at the end.
    folder : path-like
        A new folder; its parent must exist. It appears in one step, when it is complete.
    form : {"npy", "parquet"}
        ``.npy`` files as NumPy's, or Parquet files, which need the extra ``import``. A field of one number a row becomes a plain
        column, others a column of lists of fixed size.
    edges : bool
        Write the edges and their features, too.
    memory : int or str, optional
        Most bytes to sort edges in, within the graph's budget; by default half of what is available, at most 1 GiB.
    progress : bool
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    list of str
        The files, by their paths in the folder: ``features/x.npy``, ``node_data/y.npy``, ``edge_features/w.npy``, and
        ``edges.npy`` of shape (2, E), sources and destinations. With types ``features/paper/x.npy``,
        ``edges/author,writes,paper.npy`` and so on. In Parquet edges have the columns ``source`` and ``destination``.
        If nodes have names (``g.ids()``), ``ids.parquet`` has columns ``id`` and ``name``; in the form ``npy`` row ``i`` of
        ``ids.npy`` is the integer name of node ``i``, and line ``i`` of ``ids.jsonl`` its text as a JSON string.

    Raises
    ------
    FileExistsError
        There is something at ``folder``.
    OSError
        With ``ENAMETOOLONG``: names of types and fields are too long for names of files; nothing was written.
    ValueError, TypeError
        Another form; ``g`` is neither an open dataset nor a path, or is a view of a part.
    MissingExtraError
        Parquet, without pyarrow.
    BudgetError, ClosedError, CorruptionError, OSError
        ``memory`` is less than 8 MiB, or does not fit the budget; reading or writing failed. There is no new folder then.
    CommittedError
        The folder is complete and in place, but the drive did not confirm it, and it could not be taken back.

    Notes
    -----
    Edges have the order, and so the numbers, in which they were given when the dataset was made; the rows of edge features are
    theirs. Where the dataset has sorted them, they are sorted back, through temporary files in the folder. ``bfloat16`` is
    written as float32, which holds all its values.
    """
    if isinstance(g, (str, os.PathLike)):
        with OutOfCoreGraph.open(g) as opened:
            return export(opened, folder, form, edges=edges, memory=memory, progress=progress)
    check_flag("edges", edges)
    if not isinstance(g, OutOfCoreGraph) or g.own_part is not None:
        raise TypeError(f"open datasets are exported whole, not a {type(g).__name__} that is a part or something else")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
    target = os.path.abspath(user_path(folder))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "there is something already: give another folder, or remove this one", target)
    n_bytes = min(_MOST_MEMORY, max(LEAST_MEMORY, g.budget.available // 2)) if memory is None else parse_memory(memory)
    if n_bytes < LEAST_MEMORY:
        raise BudgetError(f"export in {format_size(n_bytes)}", LEAST_MEMORY)
    writers = _writers_of(form)
    stores = [("features", g.features), *([("edge_features", g.edge_features)] if edges else [])]
    names = {of: g.ids(of) for of in maps_of(g.catalog)}
    total = sum(each.nbytes for _, of in stores for each in of.values()) + 16 * g.num_edges * edges
    total += 8 * sum(map(len, names.values()))
    # A commit that fails leaves no folder; the next export removes what killed ones left.
    with BuildDirectory(target, what="folder of exported files", has_locks=False) as made:
        build = made.path
        of_data = [f"node_data/{name}" for name in g.node_data]
        of_edges = [_edges_file(kind) for kind in g.types.edges.values()] if edges else []
        of_names = {of: f"{_ids_file(of)}.{writers.names[ids.kind][0]}" for of, ids in names.items()}
        of_fields = (f"{kind}/{name}" for kind, of in stores for name in of)
        for name in (*(f"{each}.{form}" for each in (*of_fields, *of_data, *of_edges)), *of_names.values()):
            path = os.path.join(target, name)
            check_length(path, "a file of an export", _LONG_NAMES, inside=SUFFIX_BYTES)
        with Progress("export", total, progress) as bar:
            files: list[str] = []

            def placed(file: str) -> str:
                files.append(file)
                path = os.path.join(build, file)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                return path

            def writer(name: str, label: str, dtype: str, shape: Sequence[int]) -> _NumbersWriter:
                return writers.numbers(placed(f"{name}.{form}"), [label], dtype, tuple(shape))

            for kind, of in stores:
                for name, store in of.items():
                    shape, dtype = tuple(store.shape), _numpy_name(store.dtype)
                    with writer(f"{kind}/{name}", name.rpartition("/")[2], dtype, shape) as out:
                        for _, rows in store.blocks():
                            out.write(_numbers(rows))
                            bar.add(rows.nbytes)
            for name, data in g.node_data.items():
                with writer(f"node_data/{name}", name.rpartition("/")[2], _numpy_name(data.dtype), data.shape) as out:
                    for part in torch.split(data, max(1, _DATA_BYTES * len(data) // max(1, data.nbytes))):
                        out.write(_numbers(part))
            for node_type, ids in names.items():
                _, names_writer = writers.names[ids.kind]
                with names_writer(placed(of_names[node_type]), ["id", "name"], ids.kind, (len(ids),)) as listing:
                    for block in ids.blocks():
                        listing.write(block)
                        bar.add(8 * len(block))
            if edges:
                with g.budget.reserve(HOLDER, n_bytes):
                    for kind_of, blocks in _edges_by_type(g, n_bytes, build):
                        path = placed(f"{_edges_file(kind_of)}.{form}")
                        with writers.numbers(path, ["source", "destination"], "int64", (2, kind_of.n_edges)) as out:
                            for block in blocks:
                                out.write_columns(block)
                                bar.add(block.nbytes)
        for place, _, _ in os.walk(build):
            fsync_directory(place)
        made.commit()
    return files


def _edges_file(kind: EdgeType) -> str:
    return "edges" if kind.key == ONE_EDGE else f"edges/{edge_name(kind.key)}"


def _ids_file(of: str) -> str:
    return "ids" if of == ONE_NODE else f"ids/{of}"


def _numpy_name(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


def _numbers(rows: torch.Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    return found


# --- edges ----------------------------------------------------------------------------------------------------------------------


def _edges_by_type(g: OutOfCoreGraph, memory: int, directory: str) -> Iterator[tuple[EdgeType, Iterable[Int64s]]]:
    """Yield each type of edges, and its edges in the order of the input, in blocks int64 ``[2, k]``; one pass over all lists."""
    of_types = groupby(_stored(g), key=lambda piece: piece[0])
    for key, kind in g.types.edges.items():
        if not kind.n_edges:
            yield kind, ()
            continue
        found, pieces = next(of_types)
        assert found == key
        if g.topology.edge_ids is None:
            yield kind, (ends for _, _, ends in pieces)
            continue
        most = max(kind.n_edges, kind.src.n, kind.dst.n)
        with PairSorter(most, memory // 2, directory) as sources, PairSorter(most, memory // 2, directory) as destinations:
            for _, numbers, ends in pieces:
                sources.add(numbers, ends[0])
                destinations.add(numbers, ends[1])
            yield kind, _paired(sources.sorted(), destinations.sorted())


def _stored(g: OutOfCoreGraph) -> Iterator[tuple[EdgeKey, Int64s, Int64s]]:
    """Yield the edges as they are stored, type after type: the type, their numbers in its input, and ``[2, k]``."""
    topology = g.topology
    for block in blocks_in(topology, g.budget, HOLDER):
        first, stop = block.first_edge, block.first_edge + len(block.ids)
        whole = np.empty((2, stop - first), np.int64)
        write_edges(block, whole)
        for key, kind in g.types.edges.items():
            low, high = max(first, kind.first_edge), min(stop, kind.first_edge + kind.n_edges)
            if low >= high:
                continue
            numbers = np.arange(low, high)
            if topology.edge_ids is not None:
                read = np.empty(high - low, topology.edge_ids.dtype)
                topology.edge_ids.read(low, read)
                numbers = read.astype(np.int64)
            ends = whole[:, low - first : high - first] - np.array([[kind.src.first], [kind.first_list]])
            yield key, numbers - kind.first_edge, ends


def _paired(*columns: Iterator[tuple[Int64s, Int64s, Any]]) -> Iterator[Int64s]:
    """Yield blocks of both columns, whose own blocks may end at different places."""
    rest = [np.empty(0, np.int64) for _ in columns]
    while True:
        for number, column in enumerate(columns):
            if not len(rest[number]):
                rest[number] = next(column, (None, rest[number], None))[1]
        k = min(map(len, rest))
        if not k:
            return
        yield np.stack([each[:k] for each in rest])
        rest = [each[k:] for each in rest]


# --- files ----------------------------------------------------------------------------------------------------------------------


_Self = TypeVar("_Self", bound="_Writer")


class _Writer(ABC):
    """A file that is written in order; a context manager, which completes the file and flushes it durably at its end."""

    def __init__(self, path: str, labels: list[str], dtype: str, shape: tuple[int, ...]) -> None:
        self.path, self.labels, self.dtype, self.shape = path, labels, dtype, shape
        self._at = 0
        self._fd: int = open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self.begin()
        except BaseException:
            self._close_quietly()
            raise

    def put(self, data: Any) -> None:
        """Append bytes."""
        pwrite_all(self._fd, memoryview(data), self._at, self.path)
        self._at += len(data)

    @abstractmethod
    def begin(self) -> None:
        """Write what comes before the first row."""

    @abstractmethod
    def write(self, rows: Any) -> None:
        """Append rows, an array; or names, a list of them."""

    def end(self) -> None:
        """Write what comes after the last row."""

    def abandon(self) -> None:
        """Let go of a file that an error ended; nothing is written any more."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.end()
                fsync_fd(self._fd, self.path)
                fd, self._fd = self._fd, -1
                close_fd(fd, self.path)
        finally:
            if self._fd >= 0:
                self.abandon()
                self._close_quietly()

    def _close_quietly(self) -> None:
        fd, self._fd = self._fd, -1
        close_quietly(fd)


class _NumbersWriter(_Writer):
    """A file of numbers: rows, or columns that are given together."""

    @abstractmethod
    def write_columns(self, block: Int64s) -> None:
        """Append columns ``[2, k]`` to an array ``[2, n]``."""


class _NpyWriter(_NumbersWriter):
    def begin(self) -> None:
        head = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(np.dtype(self.dtype).newbyteorder("<"))
        np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": self.shape})
        self.put(head.getvalue())

    def write(self, rows: npt.NDArray[Any]) -> None:
        self.put(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))

    def write_columns(self, block: Int64s) -> None:
        for row, ids in enumerate(block):
            data = np.ascontiguousarray(ids).view(np.uint8)
            pwrite_all(self._fd, memoryview(data), self._at + 8 * self.shape[1] * row, self.path)
        self._at += 8 * block.shape[1]


class _Sink(io.RawIOBase):
    """A file as pyarrow writes to it, whose errors are those of :class:`_Writer`."""

    def __init__(self, writer: _Writer) -> None:
        self._put: Callable[[Any], None] | None = writer.put
        self._n_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n_bytes

    def write(self, data: Any, /) -> int:
        if self._put is not None:
            self._put(data)
        self._n_bytes += len(data)
        return len(data)

    def abandon(self) -> None:
        """Write nothing any more."""
        self._put = None


class _ParquetWriter(_NumbersWriter):
    def begin(self) -> None:
        import pyarrow.parquet

        self._arrow = pyarrow
        self._width = None if len(self.labels) > 1 or len(self.shape) == 1 else int(np.prod(self.shape[1:], dtype=np.int64))
        self._schema = pyarrow.schema([(label, self.column_type(pyarrow, label)) for label in self.labels])
        self._sink = _Sink(self)
        self._file: Any = None
        try:
            self._file = pyarrow.parquet.ParquetWriter(pyarrow.PythonFile(self._sink, mode="w"), self._schema)
        except BaseException:
            self.abandon()
            raise

    def column_type(self, arrow: Any, label: str) -> Any:
        number = arrow.from_numpy_dtype(np.dtype(self.dtype))
        return number if self._width is None else arrow.list_(number, self._width)

    def write(self, rows: Any) -> None:
        column = self._arrow.array(np.ascontiguousarray(rows).reshape(-1))
        if self._width is not None:
            column = self._arrow.FixedSizeListArray.from_arrays(column, self._width)
        self._append([column])

    def write_columns(self, block: Int64s) -> None:
        self._append([self._arrow.array(np.ascontiguousarray(ids)) for ids in block])

    def _append(self, columns: list[Any]) -> None:
        self._file.write_table(self._arrow.table(columns, schema=self._schema))

    def end(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        self._sink.abandon()
        if self._file is not None:
            with contextlib.suppress(Exception):  # it would write its end once it is collected
                self._file.close()


class _ParquetNamesWriter(_ParquetWriter):
    _n_written = 0

    def column_type(self, arrow: Any, label: str) -> Any:
        return arrow.string() if (label, self.dtype) == ("name", "text") else arrow.int64()

    def write(self, rows: Any) -> None:
        first, self._n_written = self._n_written, self._n_written + len(rows)
        self._append([self._arrow.array(np.arange(first, self._n_written)), self._arrow.array(rows)])


class _LinesWriter(_Writer):
    """Texts as JSON strings, one a line: a name may have line ends."""

    def begin(self) -> None:
        pass

    def write(self, rows: Any) -> None:
        self.put("".join(f"{json.dumps(text, ensure_ascii=False)}\n" for text in rows).encode())


class _Form(NamedTuple):
    """Writers of a form of files: of numbers, and by the kind of names of those, with the ending of the file."""

    numbers: type[_NumbersWriter]
    names: Mapping[str, tuple[str, type[_Writer]]]


_WRITERS: Final = {
    "npy": _Form(_NpyWriter, {"int64": ("npy", _NpyWriter), "text": ("jsonl", _LinesWriter)}),
    "parquet": _Form(_ParquetWriter, dict.fromkeys(("int64", "text"), ("parquet", _ParquetNamesWriter))),
}


def _writers_of(form: str) -> _Form:
    if form == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(f"Parquet needs pyarrow ({error}): pip install pyarrow") from None
    return _WRITERS[form]
