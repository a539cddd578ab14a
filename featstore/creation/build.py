"""Making a dataset: inputs of any size are checked, sorted into canonical form and written in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.config import check_at_least
from featstore.creation.builder import Builder, field_stem, inputs_of
from featstore.creation.cleaning import Cleaning
from featstore.creation.extsort import PairSorter, sort_keys
from featstore.creation.inputedges import CscInput, PairInput
from featstore.creation.inputfields import check_edge_rows, open_fields, total_bytes
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike
from featstore.creation.steps import BuildSteps, Inputs
from featstore.creation.topologyfiles import RESUMABLE, Form, WrittenField, open_topology_files, stored_ids
from featstore.progress import Progress
from featstore.storage.builddir import BuildDirectory
from featstore.storage.catalog import EDGE
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.stripes import make_stripe
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.edgeids import EDGE_IDS, EdgeIdsWriter, id_bytes_of
from featstore.topology.types import Types

__all__ = [
    "TopologyWriter",
    "count_ids",
    "create",
    "from_edge_index",
    "write_pairs",
]

Int64s = npt.NDArray[np.int64]

# Fields of the adjacency, in either form, in the order of their steps; the last one is always there.
_ADJACENCY = (("indptr", "chunk_directory"), RESUMABLE, (EDGE_IDS,), ("out_degree",))
_NONE = np.empty(0, dtype=np.int64)


class TopologyWriter:
    """Write the adjacency and ``out_degree`` from sorted neighbour lists that come in order; a context manager."""

    def __init__(self, builder: Builder, num_nodes: int, num_edges: int, form: Form, num_lists: int | None = None) -> None:
        self._builder = builder
        self._n = num_nodes
        self._step, self._chunk_bytes = max(1024, builder.memory // 64), form.chunk_bytes
        # Degrees are counted while ids are written, for as many nodes as a quarter of the memory holds; the rest later.
        self._degrees = np.zeros(min(num_nodes, max(1024, builder.memory // 32)), dtype=np.int64)

        def open_writer(name: str, layout: RowLayout, dtype: str, stripe: str) -> RowFileWriter:
            return builder.writer("edge", name, layout, name, dtype, stripe)

        def stripe_in(directory: str) -> str:
            return make_stripe(builder.directory, directory)

        id_bytes = 4 if num_nodes < 1 << 31 else 8
        num_lists = num_nodes if num_lists is None else num_lists
        self._files = open_topology_files(form, num_lists, num_edges, id_bytes, open_writer, stripe_in)

        def open_edge_ids(width: int, dtype: str) -> RowFileWriter:
            return builder.writer("edge", EDGE_IDS, choose_layout(width), EDGE_IDS, dtype)

        self._edge_ids = EdgeIdsWriter(num_edges, open_edge_ids)

    def write(self, begins: Int64s, ids: Int64s, edges: Int64s | None) -> None:
        """Append lists, see :meth:`TopologyFiles.write`; ids must be in range, ``edges`` has the edge ids in the input."""
        self._files.write(begins, ids)
        self._edge_ids.write(edges, len(ids))
        if len(ids):
            count_ids(ids, 0, self._degrees)
        self._builder.progress.add(ids.nbytes)

    def add_pairs(self, dst: Int64s, src: Int64s, edges: Int64s | None) -> None:
        """Append edges sorted by destination, which continue the last call's, and their numbers in the input.

        Without numbers, edges are numbered as they are stored.
        """
        base, done, end = self._files.n_edges, 0, int(dst[-1]) + 1
        for first in range(self._files.n_begun, end, self._step):
            at = np.searchsorted(dst, np.arange(first, min(end, first + self._step), dtype=np.int64), side="left")
            last = int(at[-1])
            self.write(base + at, src[done:last], None if edges is None else edges[done:last])
            done = last
        self.write(_NONE, src[done:], None if edges is None else edges[done:])

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

    @staticmethod
    def _ids_of(fields: list[WrittenField]) -> tuple[FileRecord, ...]:
        """Select the files with the ids."""
        return next(each.files for each in fields if each.name in RESUMABLE)

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
                for ids in stored_ids(self._ids_of(fields), self._chunk_bytes, self._builder.directory, self._step):
                    count_ids(ids, low, degrees)
            self._builder.register(f"{EDGE}/out_degree", "topology", writer.commit(), (self._n,))

    def __enter__(self) -> TopologyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._edge_ids.close()


def count_ids(ids: Int64s, low: int, counts: Int64s) -> None:
    """Add the number of times that ``low + i`` occurs in ``ids`` to ``counts[i]``."""
    if low or len(counts) == 0 or int(ids.max(initial=0)) >= len(counts):
        ids = ids[(ids >= low) & (ids < low + len(counts))] - low
    np.add.at(counts, ids, 1)  # since NumPy 1.25 as fast as bincount, without an array as long as the counts


# --- create ---------------------------------------------------------------------------------------------------------------------


def _write_csc(topology: TopologyWriter, builder: Builder, csc: CscInput) -> None:
    """Sort each neighbour list of the input, and write the lists."""
    cap, ids = builder.step, csc.ids(builder.block_bytes)
    for bounds in csc.offsets(builder.step, builder.block_bytes):
        first, n_lists, degrees = 0, len(bounds) - 1, np.diff(bounds)
        while first < n_lists:
            last = int(np.searchsorted(bounds, bounds[first] + cap, side="right")) - 1
            if last <= first:
                _write_long_list(topology, builder, ids, int(bounds[first]), int(degrees[first]), csc.num_nodes)
                first += 1
                continue
            block, order = _sort_lists(ids(int(bounds[last] - bounds[first])), degrees[first:last], csc.num_nodes)
            if order is not None:
                order += bounds[first]
            topology.write(bounds[first:last], block, order)
            first = last


def _sort_lists(ids: Int64s, degrees: Int64s, n: int) -> tuple[Int64s, Int64s | None]:
    """Sort each of consecutive lists of the given lengths; return them, and each id's old place, None if all were in order."""
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
    topology: TopologyWriter, builder: Builder, ids: Callable[[int], Int64s], start: int, degree: int, n: int
) -> None:
    """Sort and write one list that is too long to sort in memory."""
    with PairSorter(n, builder.memory, builder.directory, id_bytes_of(start + degree)) as sorter:
        done = 0
        while done < degree:
            block = ids(min(sorter.block_pairs, degree - done))
            sorter.add(np.zeros_like(block), block, start + done)
            done += len(block)
        begins = np.array([start], dtype=np.int64)
        for _, block, edges in sorter.sorted():
            topology.write(begins, block, edges)
            begins = _NONE


def create(
    options: CreateOptions,
    indptr: ArrayLike,
    indices: ArrayLike,
    features: Mapping[str, ArrayLike] | None = None,
    node_data: Mapping[str, ArrayLike] | None = None,
    edge_features: Mapping[str, ArrayLike] | None = None,
) -> None:
    """Write a dataset; see :meth:`featstore.OutOfCoreGraph.create`, which also opens it."""
    form, cleaning = options.form, options.cleaning
    cleaning.refuse_rows(edge_features)
    csc = CscInput(indptr, indices)
    num_nodes, num_edges = csc.num_nodes, csc.num_edges
    fields = open_fields(features, node_data, edge_features, num_nodes, f"nodes (indptr has {num_nodes + 1} entries)")
    check_edge_rows(fields, num_edges)
    csc.check_offsets()
    with BuildDirectory(options.path, overwrite=options.overwrite) as build:
        with Progress("create", total_bytes(fields) + cleaning.work_bytes(num_edges, 8), options.progress) as bar:
            builder = Builder(build.path, options.work_bytes, bar)
            if cleaning.is_none:
                with TopologyWriter(builder, num_nodes, num_edges, form) as writer:
                    _write_csc(writer, builder, csc)
                    writer.finish()
            else:
                num_edges = write_pairs(
                    builder, lambda n: csc.pairs(n, builder.block_bytes), num_nodes, num_edges, form, cleaning
                )
            for field in fields:
                builder.add(*field)
        builder.finish(Types.one(num_nodes, num_edges), form)
        build.commit()


# --- from_edge_index ------------------------------------------------------------------------------------------------------------


def write_pairs(
    builder: Builder,
    pairs: Callable[[int], Iterator[tuple[Int64s, Int64s]]],
    num_nodes: int,
    n_known: int | None,
    form: Form,
    cleaning: Cleaning,
    check: Callable[[int], None] = lambda n_edges: None,
    num_lists: int | None = None,
    stored: Callable[[Int64s], None] = lambda dst: None,
) -> int:
    """Clean, sort and write edges; return their number.

    ``pairs(n)`` yields sources and destinations of at most ``n`` edges at a time; ``check(n_edges)`` is called before anything
    is written. With ``num_lists``, the destinations are numbers of lists; by default there is a list for each node.
    ``stored(dst)`` is called with the destinations of edges that are stored, which ascend from call to call.
    """
    steps, more = builder.steps, builder.steps.more
    collected, *of_files = builder.next_steps(1 + len(_ADJACENCY))
    if steps.is_done(of_files[-1]):
        check(more["edges"])
        _take_adjacency(builder, of_files)
        _drop_spilled(builder)
        builder.progress.add(cleaning.work_bytes(more["edges"], 24))
        return int(more["stored"])
    # If duplicates are removed, edges are numbered as they are stored, and carry no numbers.
    edge_bytes = 0 if cleaning.is_distinct else 8 if n_known is None else id_bytes_of(n_known)
    most = num_nodes if num_lists is None else max(num_nodes, num_lists)
    with PairSorter(most, builder.memory, builder.directory, edge_bytes) as sorter:
        n_edges = 0
        if steps.is_done(collected):
            sorter.go_on(more["sorter"])
            n_edges = more["edges"]
            builder.progress.add(16 * n_edges)
        else:
            for src, dst in cleaning.apply(pairs(sorter.block_pairs)):
                sorter.add(dst, src, n_edges)
                n_edges += len(src)
                builder.progress.add(16 * len(src))
        check(n_edges)
        more["edges"] = n_edges
        if not steps.is_done(collected) and steps.is_due and (kept := sorter.keep()) is not None:
            more["sorter"] = kept
            steps.kept.update(kept["files"])
            steps.skip(collected)
        with TopologyWriter(builder, num_nodes, n_edges, form, num_lists) as writer:
            for dst, src, edges in cleaning.distinct(sorter.sorted()):
                stored(dst)
                writer.add_pairs(dst, src, edges)
            more["stored"] = writer.finish()
    _keep_adjacency(builder, of_files)
    _drop_spilled(builder)
    return int(more["stored"])


def _drop_spilled(builder: Builder) -> None:
    """Remove spilled edges, if they were kept, once the adjacency is recorded."""
    kept = builder.steps.more.pop("sorter", None)
    if kept is not None:
        builder.steps.drop(kept["files"])


def _keep_adjacency(builder: Builder, steps: Sequence[int]) -> None:
    """Record the adjacency as finished: each of its files that there is, as a step."""
    files = {}
    for step, names in zip(steps, _ADJACENCY, strict=True):
        for record in filter(None, (builder.fields.get(f"{EDGE}/{name}") for name in names)):
            files[step] = builder.files[record.parts[0].file]
    builder.steps.put(files)


def _take_adjacency(builder: Builder, steps: Sequence[int]) -> None:
    """Take over the files of an adjacency that an earlier call has finished."""
    for step, names in zip(steps, _ADJACENCY, strict=True):
        file = builder.steps.find_file(step)
        if file is not None:
            (name,) = (each for each in names if file.name == f"{field_stem(EDGE, each)}.1.rows")
            shape = (file.n_rows, 3) if name == "chunk_directory" else (file.n_rows,)
            builder.register(f"{EDGE}/{name}", "edge ids" if name == EDGE_IDS else "topology", file, shape)


def from_edge_index(
    options: CreateOptions,
    edge_index: Any,
    num_nodes: int,
    features: Mapping[str, ArrayLike] | None = None,
    node_data: Mapping[str, ArrayLike] | None = None,
    edge_features: Mapping[str, ArrayLike] | None = None,
    inputs: Inputs | None = None,
) -> None:
    """Write a dataset from an edge list; see :meth:`featstore.OutOfCoreGraph.from_edge_index`, which also opens it.

    A call that ended before it was done is gone on with by one of the same ``inputs``, if these have a recipe.
    """
    form, cleaning = options.form, options.cleaning
    cleaning.refuse_rows(edge_features)
    num_nodes = check_at_least("num_nodes", num_nodes, 0)
    fields = open_fields(features, node_data, edge_features, num_nodes)
    pairs = PairInput(edge_index, num_nodes)
    n_known = pairs.num_edges
    if n_known is not None:
        check_edge_rows(fields, n_known)
    inputs = inputs_of(inputs, options)
    with BuildDirectory(options.path, overwrite=options.overwrite, resume=inputs.digest) as build:
        steps = BuildSteps(build.path, build.target, inputs, progress=options.progress)
        steps.begin()
        with Progress("create", total_bytes(fields) + cleaning.work_bytes(n_known or 0, 24), options.progress) as bar:
            builder = Builder(build.path, options.work_bytes, bar, steps)
            num_edges = write_pairs(
                builder, pairs.blocks, num_nodes, n_known, form, cleaning, lambda n: check_edge_rows(fields, n)
            )
            for field in fields:
                builder.add(*field)
        builder.finish(Types.one(num_nodes, num_edges), form)
        build.commit()
