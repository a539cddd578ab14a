"""Making a dataset: inputs of any size are checked, sorted into canonical form and written in bounded memory."""

from __future__ import annotations

import os
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from featstore.config import available_memory, format_size, parse_size
from featstore.errors import BudgetError, CorruptionError
from featstore.graph.edgeids import EDGE_IDS, EdgeIdsWriter, id_bytes_of
from featstore.graph.extsort import PairSorter, sort_keys
from featstore.graph.inputfields import check_edge_rows, open_fields, total_bytes
from featstore.graph.progress import Progress
from featstore.graph.source import ArrayLike, NpySource, Source, dtype_name, open_source
from featstore.graph.topologyfiles import Form, WrittenField, open_topology_files
from featstore.storage.builddir import BuildDirectory
from featstore.storage.catalog import EDGE, Catalog, FieldRecord, Part, write_catalog
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.stripes import make_stripe
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["create", "file_stem", "from_edge_index"]

Int64s = npt.NDArray[np.int64]

_LEAST_MEMORY = 8 << 20
_NONE = np.empty(0, dtype=np.int64)


def file_stem(name: str) -> str:
    """Return a part of a file's name that tells the field ``name`` from all others, and is plain whatever the field is called."""
    stem = urllib.parse.quote(name, safe=" ,;@()+")
    if len(stem) > 100:  # file names end at 255 bytes, and a letter can take 12
        stem = f"{stem[:80]}-{xxhash.xxh3_64_hexdigest(name.encode())}"
    return stem


class _Builder:
    """The files and fields of a dataset under construction."""

    def __init__(self, directory: str, memory: int, progress: Progress) -> None:
        self.directory = directory
        self.memory = memory
        self.progress = progress
        self.block_bytes = max(64 << 10, min(32 << 20, memory // 16))
        self.files: dict[str, FileRecord] = {}
        self.fields: dict[str, FieldRecord] = {}

    def writer(self, prefix: str, name: str, layout: RowLayout, kind: str, dtype: str, stripe: str = "") -> RowFileWriter:
        """Open a writer for a field's file; its name says what it is, and is a plain file name whatever the field is called."""
        buffer_bytes = max(64 << 10, min(4 << 20, self.memory // 32))
        file = os.path.join(stripe, f"{prefix}.{file_stem(name)}.1.rows")
        return RowFileWriter(self.directory, file, layout, kind=kind, dtype=dtype, buffer_bytes=buffer_bytes)

    def register(self, key: str, role: str, file: FileRecord, shape: tuple[int, ...]) -> None:
        """Note a committed file as all of the field ``key``."""
        self.files[file.name] = file
        self.fields[key] = FieldRecord(key, role, file.dtype, shape, file.generation, (Part(file.name, 0, file.n_rows),))

    def add(self, key: str, role: str, name: str, source: Source) -> None:
        """Stream one field of the nodes, or of the edges: ``key`` is ``NODE`` or ``EDGE``."""
        prefix = key.partition("/")[0]
        with self.writer(prefix, name, choose_layout(source.row_bytes), role, source.dtype) as writer:
            for block in source.blocks(self.block_bytes):
                writer.write(block)
                self.progress.add(block.nbytes)
            self.register(f"{key}/{name}", role, writer.commit(), source.shape)

    def finish(self, num_nodes: int, num_edges: int, form: Form) -> None:
        """Write the catalog, after which the build directory is a dataset."""
        dataset: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "generation": 1,
            "num_nodes": num_nodes,
            "num_edges": num_edges,
            **form.entry(),
            "created_by": f"featstore {_release()}",
        }
        write_catalog(self.directory, Catalog(dataset, self.files, self.fields))


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"


class _TopologyWriter:
    """Write the adjacency and ``out_degree`` from sorted neighbour lists that come in order; a context manager."""

    def __init__(self, builder: _Builder, num_nodes: int, num_edges: int, form: Form) -> None:
        self._builder = builder
        self._n = num_nodes
        self._step = max(1024, builder.memory // 64)
        # Degrees are counted as the ids go by, for as many nodes as a quarter of the memory holds; the rest is counted later.
        self._degrees = np.zeros(min(num_nodes, max(1024, builder.memory // 32)), dtype=np.int64)

        def open_writer(name: str, layout: RowLayout, dtype: str, stripe: str) -> RowFileWriter:
            return builder.writer("edge", name, layout, name, dtype, stripe)

        def stripe_in(directory: str) -> str:
            return make_stripe(builder.directory, directory)

        id_bytes = 4 if num_nodes < 1 << 31 else 8
        self._files = open_topology_files(form, num_nodes, num_edges, id_bytes, open_writer, stripe_in)

        def open_edge_ids(width: int, dtype: str) -> RowFileWriter:
            return builder.writer("edge", EDGE_IDS, choose_layout(width), EDGE_IDS, dtype)

        self._edge_ids = EdgeIdsWriter(num_edges, open_edge_ids)

    def write(self, begins: Int64s, ids: Int64s, edges: Int64s | None) -> None:
        """Append lists, see :meth:`TopologyFiles.write`; the ids are in range, ``edges`` are their numbers in the input."""
        self._files.write(begins, ids)
        self._edge_ids.write(edges, len(ids))
        if len(ids):
            _count(ids, 0, self._degrees)
        self._builder.progress.add(ids.nbytes)

    def add_pairs(self, dst: Int64s, src: Int64s, edges: Int64s) -> None:
        """Append edges sorted by destination, which go on where the last call's ended, and their numbers in the input."""
        base, done, end = self._files.n_edges, 0, int(dst[-1]) + 1
        for first in range(self._files.n_begun, end, self._step):
            at = np.searchsorted(dst, np.arange(first, min(end, first + self._step), dtype=np.int64), side="left")
            last = int(at[-1])
            self.write(base + at, src[done:last], edges[done:last])
            done = last
        self.write(_NONE, src[done:], edges[done:])

    def finish(self) -> int:
        """Complete the files; return the number of edges."""
        builder, fields = self._builder, self._files.finish()
        for field in fields:
            record = field.record(1)
            builder.files.update((file.name, file) for file in field.files)
            builder.fields[record.key] = record
        moved = self._edge_ids.finish()
        if moved is not None:
            builder.register(f"{EDGE}/{EDGE_IDS}", "edge ids", moved, (self._files.n_edges,))
        self._write_degrees(fields)
        return self._files.n_edges

    def _write_degrees(self, fields: list[WrittenField]) -> None:
        degrees, low = self._degrees, 0
        with self._builder.writer("edge", "out_degree", choose_layout(8), "out_degree", "int64") as writer:
            while True:
                writer.write(degrees.astype("<i8").view(np.uint8).reshape(len(degrees), 8))
                low += len(degrees)
                if low >= self._n:
                    break
                degrees = degrees[: self._n - low]
                degrees[:] = 0
                for ids in self._files.stored_ids(fields, self._builder.directory, self._step):
                    _count(ids, low, degrees)
            self._builder.register(f"{EDGE}/out_degree", "topology", writer.commit(), (self._n,))

    def __enter__(self) -> _TopologyWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()
        self._edge_ids.close()


def _count(ids: Int64s, low: int, counts: Int64s) -> None:
    """Add to ``counts[i]`` how often ``low + i`` occurs in ``ids``."""
    if low or len(counts) == 0 or int(ids.max(initial=0)) >= len(counts):
        ids = ids[(ids >= low) & (ids < low + len(counts))] - low
    if len(counts) <= 4 * len(ids):
        counts += np.bincount(ids, minlength=len(counts))
    elif len(ids):
        values, found = np.unique(ids, return_counts=True)
        counts[values] += found


# --- create ---------------------------------------------------------------------------------------------------------------------


class _Cursor:
    """Read a one-dimensional integer source ``n`` at a time, as int64."""

    def __init__(self, source: Source, block_bytes: int) -> None:
        self._blocks = source.values(block_bytes)
        self._rest: npt.NDArray[Any] = np.empty(0, dtype=np.int64)

    def read(self, n: int) -> Int64s:
        """Return the next ``n`` values, fewer at the end; the caller's to change."""
        out = np.empty(n, dtype=np.int64)
        done = 0
        while done < n:
            if not len(self._rest):
                found = next(self._blocks, None)
                if found is None:
                    break
                self._rest = found
                continue
            take = self._rest[: n - done]
            out[done : done + len(take)] = take  # a uint64 beyond int64 turns negative, which no id or offset may be
            done += len(take)
            self._rest = self._rest[len(take) :]
        return out[:done]


def _integers(name: str, value: ArrayLike) -> Source:
    if isinstance(value, (list, tuple)) and not value:
        value = np.empty(0, dtype=np.int64)  # NumPy would make it float64
    source = open_source(name, value, wider=True)
    if source.dtype == "bool" or "int" not in source.dtype:
        raise TypeError(f"{name} must hold integers, not {source.dtype}")
    if len(source.shape) != 1:
        raise ValueError(f"{name} must have one dimension, not shape {source.shape}")
    return source


def _check_ids(ids: Int64s, first: int, num_nodes: int, where: str) -> None:
    bad = (ids < 0) | (ids >= num_nodes)
    if bad.any():
        position = int(bad.argmax())
        raise CorruptionError(
            f"indices[{first + position}] is {ids[position]}, which is not a node: ids are 0 … {num_nodes - 1}", where
        )


def _write_csc(topology: _TopologyWriter, builder: _Builder, indptr: Source, indices: Source, where: str) -> None:
    """Check the compressed columns, sort each list and write them."""
    n, n_edges = indptr.n_rows - 1, indices.n_rows
    step, cap = max(1024, builder.memory // 128), max(1024, builder.memory // 128)
    offsets, ids = _Cursor(indptr, builder.block_bytes), _Cursor(indices, builder.block_bytes)
    previous = offsets.read(1)
    if int(previous[0]) != 0:
        raise CorruptionError(f"indptr[0] is {previous[0]}; it must be 0", where)
    for node in range(0, n, step):
        ends = offsets.read(min(step, n - node))
        bounds = np.concatenate((previous, ends))
        previous = ends[-1:]
        if int(ends.min()) < 0 or int(ends.max()) > n_edges:
            bad = int(((ends < 0) | (ends > n_edges)).argmax())
            raise CorruptionError(f"indptr[{node + bad + 1}] is {ends[bad]}, but there are {n_edges} indices", where)
        degrees = np.diff(bounds)
        if int(degrees.min()) < 0:
            bad = node + int((degrees < 0).argmax())
            raise CorruptionError(f"indptr decreases from {bounds[bad - node]} to {bounds[bad - node + 1]} at node {bad}", where)
        first = 0
        while first < len(ends):
            last = int(np.searchsorted(bounds, bounds[first] + cap, side="right")) - 1
            if last <= first:
                _write_long_list(topology, builder, ids, int(bounds[first]), int(degrees[first]), n, where)
                first += 1
                continue
            block = ids.read(int(bounds[last] - bounds[first]))
            _check_ids(block, int(bounds[first]), n, where)
            block, order = _sort_lists(block, degrees[first:last], n)
            if order is not None:
                order += bounds[first]
            topology.write(bounds[first:last], block, order)
            first = last
    if int(previous[0]) != n_edges:
        raise CorruptionError(f"indptr ends with {previous[0]}, but there are {n_edges} indices", where)


def _sort_lists(ids: Int64s, degrees: Int64s, n: int) -> tuple[Int64s, Int64s | None]:
    """Return consecutive lists of the given lengths, each sorted ascending, and where each id was; None: all where they are."""
    bits, spread = max(1, (n - 1).bit_length()), (len(degrees) - 1).bit_length()
    owner = np.repeat(np.arange(len(degrees), dtype=np.int64), degrees)
    if bits + spread > 63:
        order = np.lexsort((ids, owner))
        return ids[order], order
    key = owner
    key <<= bits
    key |= ids
    if bool((key[1:] >= key[:-1]).all()):
        return ids, None
    key, moved = sort_keys(key, bits + spread, with_order=True)
    key &= (1 << bits) - 1
    return key, moved


def _write_long_list(
    topology: _TopologyWriter, builder: _Builder, ids: _Cursor, start: int, degree: int, n: int, where: str
) -> None:
    """Sort one list that is longer than what is sorted in memory."""
    with PairSorter(n, builder.memory, builder.directory, id_bytes_of(start + degree)) as sorter:
        done = 0
        while done < degree:
            block = ids.read(min(sorter.block_pairs, degree - done))
            _check_ids(block, start + done, n, where)
            sorter.add(np.zeros_like(block), block, start + done)
            done += len(block)
        begins = np.array([start], dtype=np.int64)
        for _, block, edges in sorter.sorted():
            topology.write(begins, block, edges)
            begins = _NONE


def _build_memory(memory: int | str | None, form: Form) -> int:
    """Return the memory to work in, beside the chunk that is being filled."""
    least = _LEAST_MEMORY + form.chunk_bytes
    n_bytes = max(least, min(1 << 30, available_memory() // 4)) if memory is None else parse_size(memory)
    if n_bytes < least:
        of = f" with chunks of {format_size(form.chunk_bytes)}" if form.chunk_bytes else ""
        raise BudgetError(f"making a dataset{of} needs more memory than {n_bytes} bytes", least)
    return n_bytes - form.chunk_bytes


def create(
    path: str | os.PathLike[str],
    indptr: ArrayLike,
    indices: ArrayLike,
    features: Mapping[str, ArrayLike] | None = None,
    node_data: Mapping[str, ArrayLike] | None = None,
    *,
    edge_features: Mapping[str, ArrayLike] | None = None,
    topology: str = "csc",
    chunk_bytes: int | str | None = None,
    stripes: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: bool = True,
    memory: int | str | None = None,
) -> None:
    """Write a dataset; see :meth:`featstore.OutOfCoreGraph.create`, which also opens it."""
    form = Form.of(topology, chunk_bytes, stripes, path)
    n_bytes = _build_memory(memory, form)
    offsets, ids = _integers("indptr", indptr), _integers("indices", indices)
    target = os.fspath(path)
    if offsets.n_rows == 0:
        raise CorruptionError("indptr is empty; it has one entry more than there are nodes", target)
    num_nodes = offsets.n_rows - 1
    fields = open_fields(features, node_data, edge_features, num_nodes)
    check_edge_rows(fields, ids.n_rows)
    with BuildDirectory(target, overwrite=overwrite) as build:
        with Progress("create", total_bytes(fields) + 8 * ids.n_rows, progress) as bar:
            builder = _Builder(build.path, n_bytes, bar)
            with _TopologyWriter(builder, num_nodes, ids.n_rows, form) as writer:
                _write_csc(writer, builder, offsets, ids, target)
                num_edges = writer.finish()
            for field in fields:
                builder.add(*field)
        builder.finish(num_nodes, num_edges, form)
        build.commit()


# --- from_edge_index ------------------------------------------------------------------------------------------------------------


def _edge_blocks(edge_index: Any, n_pairs: int) -> Iterator[npt.NDArray[Any]]:
    """Yield ``[2, k]`` integer blocks of at most ``n_pairs`` columns from any input that :func:`from_edge_index` takes."""
    if isinstance(edge_index, (str, os.PathLike)):
        source = open_source("edge_index", edge_index, wider=True)
        assert isinstance(source, NpySource)
        _check_edge_shape(source.shape, source.dtype)
        yield from source.columns(16 * n_pairs)
    elif isinstance(edge_index, (np.ndarray, torch.Tensor)):
        yield from _slices(edge_index, n_pairs)
    elif isinstance(edge_index, (list, tuple)):
        yield from _slices(np.asarray(edge_index) if len(edge_index) else np.empty((2, 0), dtype=np.int64), n_pairs)
    elif isinstance(edge_index, Iterable):
        for block in edge_index:
            yield from _slices(block if isinstance(block, torch.Tensor) else np.asarray(block), n_pairs)
    else:
        raise TypeError(f"edge_index must be an array [2, E], a .npy path or an iterable of such blocks, not {type(edge_index)}")


def _check_edge_shape(shape: tuple[int, ...], dtype: object) -> None:
    if len(shape) != 2 or shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, E], not {list(shape)}")
    if "int" not in dtype_name(dtype, wider=True):
        raise TypeError(f"edge_index must hold integers, not {dtype}")


def _slices(array: npt.NDArray[Any] | torch.Tensor, n_pairs: int) -> Iterator[npt.NDArray[Any]]:
    _check_edge_shape(tuple(array.shape), array.dtype)
    for first in range(0, array.shape[1], n_pairs):
        block = array[:, first : first + n_pairs]
        yield block.detach().cpu().numpy() if isinstance(block, torch.Tensor) else block


def _edge_ids(block: npt.NDArray[Any], first: int, num_nodes: int) -> tuple[Int64s, Int64s]:
    ids = block.astype(np.int64)  # a uint64 beyond int64 turns negative, which no id may be
    bad = (ids < 0) | (ids >= num_nodes)
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        raise IndexError(
            f"edge_index[{row}, {first + column}] is {block[row, column]}, which is not a node: ids are 0 … {num_nodes - 1}"
        )
    return ids[0], ids[1]


def from_edge_index(
    path: str | os.PathLike[str],
    edge_index: Any,
    num_nodes: int,
    features: Mapping[str, ArrayLike] | None = None,
    node_data: Mapping[str, ArrayLike] | None = None,
    *,
    edge_features: Mapping[str, ArrayLike] | None = None,
    topology: str = "csc",
    chunk_bytes: int | str | None = None,
    stripes: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: bool = True,
    memory: int | str | None = None,
) -> None:
    """Write a dataset from an edge list; see :meth:`featstore.OutOfCoreGraph.from_edge_index`, which also opens it."""
    form = Form.of(topology, chunk_bytes, stripes, path)
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, np.integer)):
        raise TypeError(f"num_nodes must be an integer, not {num_nodes!r}")
    num_nodes = int(num_nodes)
    if num_nodes < 0:
        raise ValueError(f"num_nodes cannot be negative: {num_nodes}")
    n_bytes = _build_memory(memory, form)
    fields = open_fields(features, node_data, edge_features, num_nodes)
    shape = getattr(edge_index, "shape", None)
    n_known = int(shape[1]) if shape is not None and len(shape) == 2 else 0
    with BuildDirectory(path, overwrite=overwrite) as build:
        with Progress("create", total_bytes(fields) + 24 * n_known, progress) as bar:
            builder = _Builder(build.path, n_bytes, bar)
            # How many edges an iterator has is not known before it ends.
            with PairSorter(num_nodes, n_bytes, build.path, id_bytes_of(n_known) if shape is not None else 8) as sorter:
                n_edges = 0
                for block in _edge_blocks(edge_index, sorter.block_pairs):
                    src, dst = _edge_ids(block, n_edges, num_nodes)
                    sorter.add(dst, src, n_edges)
                    n_edges += block.shape[1]
                    bar.add(16 * block.shape[1])
                check_edge_rows(fields, n_edges)
                with _TopologyWriter(builder, num_nodes, n_edges, form) as writer:
                    for dst, src, edges in sorter.sorted():
                        assert edges is not None
                        writer.add_pairs(dst, src, edges)
                    num_edges = writer.finish()
            for field in fields:
                builder.add(*field)
        builder.finish(num_nodes, num_edges, form)
        build.commit()
