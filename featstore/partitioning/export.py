"""Export of a self-reliant part: a dataset of its own, which a machine without the whole one can train on."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.config import check_flag, format_size, listed, parse_memory, user_path
from featstore.creation.build import count_ids
from featstore.creation.builder import Builder, file_stem
from featstore.creation.options import LEAST_MEMORY
from featstore.creation.steps import FILES, BuildSteps, Field, Inputs
from featstore.creation.topologyfiles import RESUMABLE, Form, WrittenField, lists_in_order, open_topology_files, stored_ids
from featstore.errors import BudgetError, CorruptionError, FormatError
from featstore.gather.patchedrows import PatchedRows
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.derive.provenance import copied_provenance
from featstore.graph.partadjacency import HOPS_ROLE
from featstore.graph.savedparts import PARTS_KEY, SELF_RELIANT_ROLES, KeptParts, file_of_parts
from featstore.graph.snapshot import fingerprint_of
from featstore.progress import Progress
from featstore.storage.builddir import BuildDirectory
from featstore.storage.catalog import EDGE, NODE, PART, Catalog, FieldRecord
from featstore.storage.layout import RowLayout
from featstore.storage.rowfile import RowFile
from featstore.storage.sections import SectionFile, replacing
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.part import HOLDER as PART_HOLDER
from featstore.topology.part import OUTSIDE, Part, Reached, lists_between, lists_bytes, reach
from featstore.topology.types import Types

__all__ = ["export"]

HOLDER: Final = "export"  # in the budget's report
_PIECE_NODES: Final = 1 << 16
_MOST_MEMORY: Final = 1 << 30
_HOPS, _BEGINS, _LISTS, _DEGREES, _FIRST_FIELD = range(5)  # steps
_REACHED: Final = "reached.tmp"  # in the build directory: how far the part's nodes are found
_REACHED_KIND: Final = "reached"

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


def export(
    g: OutOfCoreGraph,
    path: str | os.PathLike[str],
    part: int,
    name: str | None = None,
    *,
    topology: str | None = None,
    chunk_bytes: int | str | None = None,
    overwrite: bool = False,
    memory: int | str | None = None,
    progress: bool = True,
) -> Part:
    """Write one of a dataset's self-reliant parts as a dataset of its own, for another machine.

    Parameters
    ----------
    g : OutOfCoreGraph
    path : path-like
        Directory of the new dataset. Its parent must exist.
    part : int
        Number of the part, such as the rank of the process that will train on it.
    name : str, optional
        Name of the kept parts; by default the self-reliant ones that were kept last. See :func:`featstore.partition`.
    topology : {"csc", "chunked"}, optional
        Form of the new adjacency; by default that of ``g``.
    chunk_bytes : int or str, optional
        Size of a chunk, for ``"chunked"``.
    overwrite : bool
        Replace a dataset at ``path`` in one step, when the new one is complete.
    memory : int or str, optional
        Most bytes to hold, within the graph's budget; by default half of what is available, at most 1 GiB.
    progress : bool
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    Part
        The part: its nodes by their ids, and how many nodes of the graph it is without.

    Raises
    ------
    IndexError, ValueError, TypeError, StaleError, ClosedError
        There is no such part; see :meth:`OutOfCoreGraph.part`. ``path`` is that of ``g``, or inside.
    NotImplementedError
        The graph has several types, or edge features; ``g`` is a part already.
    FileExistsError, FileNotFoundError, NotADirectoryError, BusyError
        ``path`` exists; its parent does not; another process is making or changing a dataset there.
    BudgetError
        ``memory`` is too little; the error names the least that works.
    CommittedError, CorruptionError, OSError
        The dataset is in place, but making its name durable failed; reading or writing failed.

    Notes
    -----
    The new dataset keeps the ids of the graph, and its ``num_nodes``: seeds, batches and node data mean the same nodes, and draws
    are the same bit for bit. What goes by degrees or by shares of the nodes, such as ``History(nodes=0.2)``, sees the part's.
    Another node is an IndexError that names the part. It has the rows of the part's nodes alone, the lists of those whose list
    training needs, all node data (which is indexed by ids), and the kept parts, so that :class:`~featstore.PartBatches` can be
    made of it; of features made of others, what they were made of. Edge ids are not in it (``edges=True``), nor saved
    caches.

    Each list of the part is read twice, each of its rows once, in the order of the files. The call holds a byte a node of the
    graph and 16 to 26 MiB at least. What a kill, Ctrl-C or a lack of memory leaves is a directory ``path.tmp-…``: the same call
    goes on with it, except for the last seconds, and the next other one removes it. The files are the same bit for bit.

    References
    ----------
    PaGraph, TPDS 2021, sections 3.2 and 4.

    Examples
    --------
    >>> featstore.partition(g, 4, "ldg", train_idx, hops=2)
    >>> featstore.export(g, "part.2", part=2)
    """
    overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"parts of an open dataset are exported, not of a {type(g).__name__}")
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path must be the directory of the new dataset, not {path!r}")
    target = os.path.abspath(user_path(path))
    inside = os.path.realpath(target), os.path.realpath(g.path)
    if inside[0] == inside[1]:
        raise ValueError(f"path: {target} is the dataset that the part is of")
    if os.path.commonpath(inside) == inside[1]:
        raise ValueError(f"path: {target} lies inside the dataset that the part is of: put the new one beside it")
    number, kept = g.find_part(part, name)
    catalog = g.catalog
    if edge_features := sorted(catalog.by_role("feature", EDGE)):
        raise NotImplementedError(f"export does not take edge features, and the dataset has {listed(edge_features)}")
    chosen = catalog.topology if topology is None else topology
    if chunk_bytes is None and chosen == catalog.topology == "chunked":
        chunk_bytes = catalog.chunk_bytes
    form = Form.of(chosen, chunk_bytes, (), target)
    least = g.num_nodes + lists_bytes(g.num_nodes) + LEAST_MEMORY + form.chunk_bytes
    if memory is not None and parse_memory(memory) < least:
        text = f"exporting a part of {g.num_nodes:,} nodes takes more memory than {format_size(parse_memory(memory))}"
        raise BudgetError(f"{text}: {format_size(least)}", least)
    g.check_room_for_part(HOLDER, kept, least if memory is None else parse_memory(memory))
    with g.or_closed():
        train = g.train_nodes_of(number, kept)
        n_bytes = min(_MOST_MEMORY, max(least, g.budget.available // 2)) if memory is None else parse_memory(memory)
        inputs = Inputs(_recipe(g, number, kept, form))
        with (
            g.budget.reserve(HOLDER, n_bytes - g.num_nodes - lists_bytes(g.num_nodes)),
            BuildDirectory(target, overwrite=overwrite, resume=inputs.digest) as build,
        ):
            steps = _Steps(build.path, target, inputs, progress=progress)
            steps.begin()
            found = _Export(g, steps, number, kept, form, n_bytes - least + LEAST_MEMORY, progress).write(train)
            build.commit()
    return found


def _recipe(g: OutOfCoreGraph, number: int, kept: KeptParts, form: Form) -> dict[str, Any]:
    """Describe what the new dataset is made of, as JSON values."""
    catalog = g.catalog
    fields = catalog.by_role("topology", EDGE) | catalog.by_role("feature", NODE) | catalog.by_role("data", NODE)
    files = [part.file for record in fields.values() for part in record.parts]
    files += [str(each) for each in catalog.extra[f"{PARTS_KEY}{kept.name}"]["files"].values()]
    return {
        "part": [kept.name, number],
        "form": form.entry(),
        "fields": sorted(record.key for record in fields.values()),
        FILES: [catalog.files[name].rows_id for name in sorted(files)],
    }


class _Steps(BuildSteps):
    """The steps of an export, with how far the part's nodes are found."""

    others = BuildSteps.others | {_REACHED}

    def reached(self, n: int) -> Reached | None:
        """Read how far a killed export had found the part's nodes; None if there is no record of that."""
        try:
            with contextlib.closing(SectionFile(self._reached_path, _REACHED_KIND)) as file:
                (hop, node), hop_of = file[0].tolist(), file[1].copy()
        except (FormatError, CorruptionError, FileNotFoundError, LookupError, ValueError):
            return None
        return Reached(hop_of, hop, node) if len(hop_of) == n else None

    def keep_reached(self, reached: Reached) -> None:
        """Record how far the part's nodes are found, if the last record is old enough."""
        if self.is_due:
            with replacing(self._reached_path, _REACHED_KIND) as sections:
                sections.append(np.array([reached.hop, reached.node], np.int64))
                sections.append(reached.hop_of)
            self._record()

    def forget_reached(self) -> None:
        for name in (self._reached_path, f"{self._reached_path}.tmp"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    @property
    def _reached_path(self) -> str:
        return os.path.join(self.folder, _REACHED)


class _Export:
    """The files of a new dataset, step by step: hops, lists, out-degrees, fields, kept parts."""

    def __init__(
        self, g: OutOfCoreGraph, steps: _Steps, number: int, kept: KeptParts, form: Form, memory: int, progress: bool
    ) -> None:
        self._g, self._steps, self._number, self._kept, self._form = g, steps, number, kept, form
        self._memory, self._shows = memory, progress
        self._step = _FIRST_FIELD

    def write(self, train: Int64s) -> Part:
        """Write what is not written yet, and the catalog; return the part."""
        g, kept, catalog = self._g, self._kept, self._g.catalog
        part = Part(kept.name, self._number, int(kept.hops or 0), self._hop_of(train))
        degrees = (self._degrees(part, first) for first in range(0, g.num_nodes, _PIECE_NODES))
        n_edges = sum(int(each.sum()) for each in degrees)
        fields: list[tuple[str, str, _Rows]] = []
        rows: _Rows
        for role, records in (("feature", catalog.by_role("feature", NODE)), ("data", catalog.by_role("data", NODE))):
            for name, record in records.items():
                file = g.snapshot.rows_of(record)
                rows = _PartRows(record, file, part) if role == "feature" else _Stored(record.dtype, record.shape, file)
                fields.append((role, name, rows))
        total = n_edges * g.topology.id_bytes
        total += sum(each.n_rows * each.row_bytes for _, _, each in fields)
        total += sum(each.n_rows * each.row_bytes for _, each in self._kept_files())
        with Progress("export", total, self._shows) as bar:
            builder = Builder(self._steps.folder, self._memory, bar)
            hops = self._file(_HOPS, builder, "part.hops", HOPS_ROLE, _Array(part.hop_of))
            builder.files[hops.name] = hops
            self._steps.forget_reached()
            self._write_lists(builder, part, n_edges)
            for role, name, rows in fields:
                made = self._file(self._next(), builder, f"node.{file_stem(name)}", role, rows)
                builder.register(f"{NODE}/{name}", role, made, rows.shape)
            entries = {
                f"{PARTS_KEY}{kept.name}": self._write_kept(builder),
                PART: {
                    "name": part.name,
                    "number": part.number,
                    "hops": part.hops,
                    "nodes": part.n_nodes,
                    "files": {HOPS_ROLE: hops.name},
                },
            }
            # It has the adjacency's identity, as the draws are the same: samplers, and states of training, fit either dataset.
            more = {"adjacency": catalog.adjacency()}
            entries |= copied_provenance(catalog, fingerprint_of(Catalog(more, builder.files, builder.fields, {})))
            builder.finish(Types.one(g.num_nodes, n_edges), self._form, more, entries)
        return part

    def _next(self) -> int:
        self._step += 1
        return self._step - 1

    def _file(self, step: int, builder: Builder, stem: str, kind: str, rows: _Rows) -> FileRecord:
        """Write a file, behind the rows that are written already, unless it is complete; return its record."""
        steps, name = self._steps, f"{stem}.1.rows"
        if steps.is_done(step):
            builder.progress.add(rows.n_rows * rows.row_bytes if step >= _FIRST_FIELD else 0)
            return steps.file(step)
        field = Field(rows.n_rows, rows.shape[1:], rows.dtype)
        with steps.leaving():
            writer = steps.writer(step, field, builder.buffer_bytes, name=name, kind=kind)
            builder.progress.add(writer.n_rows * rows.row_bytes)
            for block in rows.blocks_from(writer.n_rows, builder.block_bytes):
                writer.write(block)
                builder.progress.add(block.nbytes if step >= _FIRST_FIELD else 0)
                steps.checkpoint()
            steps.finish(step)
        return steps.file(step)

    # -- nodes and lists ---------------------------------------------------------------------------------------------------------

    def _hop_of(self, train: Int64s) -> Uint8s:
        """Find the hops of all nodes, or read those that were found; the first step writes them."""
        g, steps, kept = self._g, self._steps, self._kept
        if steps.is_done(_HOPS):
            hop_of = np.empty(g.num_nodes, np.uint8)
            g.budget.reserve(PART_HOLDER, hop_of.nbytes, owner=hop_of)
            with contextlib.closing(steps.open(_HOPS, g.reader)) as file:
                file.read(0, len(hop_of), hop_of.reshape(-1, 1))
            return hop_of
        with Progress("part", g.num_edges, self._shows, unit=" edges") as bar:
            begun = steps.reached(g.num_nodes)
            hop_of, _ = reach(g.topology, train, int(kept.hops or 0), g.budget, bar.add, begun=begun, keep=steps.keep_reached)
            bar.reach(g.num_edges)
        return hop_of

    def _degrees(self, part: Part, first: int) -> Int64s:
        """Count the edges of the lists that the part has, of a piece of the nodes."""
        degrees = self._g.topology.degrees(first, min(first + _PIECE_NODES, self._g.num_nodes))
        degrees[~part.has_list(first, first + len(degrees))] = 0
        return degrees

    def _write_lists(self, builder: Builder, part: Part, n_edges: int) -> None:
        """Write the adjacency, the lists that the part has as they are, and empty ones for all other nodes; and out-degrees."""
        steps, n, form = self._steps, part.hop_of.size, self._form
        id_bytes = self._g.topology.id_bytes
        if steps.is_done(_LISTS):
            builder.progress.add(n_edges * id_bytes)
        else:
            self._write_topology(builder, part, n_edges)
        for each in (steps.file(_BEGINS), steps.file(_LISTS)):
            shape = (each.n_rows, 3) if each.kind == "chunk_directory" else (each.n_rows,)
            builder.files[each.name] = each
            record = WrittenField(each.kind, (each,), shape).record(1)
            builder.fields[record.key] = record
        degrees = _OutDegrees(n, steps.file(_LISTS), form.chunk_bytes, steps.folder, self._memory)
        file = self._file(_DEGREES, builder, "edge.out_degree", "out_degree", degrees)
        builder.register(f"{EDGE}/out_degree", "topology", file, (n,))

    def _write_topology(self, builder: Builder, part: Part, n_edges: int) -> None:
        topology, steps, form, n = self._g.topology, self._steps, self._form, part.hop_of.size

        def open_writer(name: str, layout: RowLayout, dtype: str, _: str) -> RowFileWriter:
            if name not in RESUMABLE:
                return builder.writer("edge", name, layout, name, dtype)
            n_bytes = form.chunk_bytes + (n + n_edges) * layout.row_bytes if form.chunk_bytes else n_edges * layout.row_bytes
            field = Field(n_bytes // layout.row_bytes, (), dtype)
            return steps.writer(_LISTS, field, builder.buffer_bytes, name=f"edge.{name}.1.rows", kind=name)

        def begins(first_list: int) -> Iterator[Int64s]:
            before = 0
            for first in range(0, n, _PIECE_NODES):
                degrees = self._degrees(part, first)
                ends = before + np.cumsum(degrees)
                yield (ends - degrees)[max(0, first_list - first) :]
                before = int(ends[-1])

        with open_topology_files(form, n, n_edges, topology.id_bytes, open_writer, lambda directory: directory) as files:
            with steps.leaving():
                files.go_on()
                builder.progress.add(files.n_edges * topology.id_bytes)
                ids = self._ids_from(files.n_edges, part)
                for some, block in lists_in_order(begins(files.n_begun), ids, files.n_edges):
                    files.write(some, block)
                    builder.progress.add(block.nbytes)
                    steps.checkpoint()
                if files.n_edges != n_edges:
                    raise CorruptionError(f"the lists of {part} have not the lengths that offsets say", topology.path)
                made = {each.name: each.files[0] for each in files.finish()}
        main = next(name for name in made if name in RESUMABLE)
        steps.put({_BEGINS: next(each for name, each in made.items() if name != main), _LISTS: made[main]})

    def _ids_from(self, edge: int, part: Part) -> Iterator[npt.NDArray[Any]]:
        """Yield the ids of the part's lists from its edge ``edge`` on."""
        topology, node = self._g.topology, 0
        while node < part.hop_of.size and edge:
            ends = np.cumsum(self._degrees(part, node))
            if edge < ends[-1]:
                at = int(np.searchsorted(ends, edge, side="right"))  # the list that the edge is of
                edge -= int(ends[at - 1]) if at else 0
                node += at
                break
            edge -= int(ends[-1])
            node += len(ends)
        for _, _, _, ids in lists_between(topology, part.hop_of, 0, part.hops, node):
            if edge < len(ids):
                yield ids[edge:]
            edge = max(0, edge - len(ids))

    def _kept_files(self) -> Iterator[tuple[str, RowFile]]:
        """Yield the files of the training nodes of all parts, by role."""
        for role in SELF_RELIANT_ROLES:
            if role != "train_nodes" or self._kept.n_train:
                yield role, file_of_parts(self._g.snapshot, self._kept, role)

    def _write_kept(self, builder: Builder) -> dict[str, Any]:
        """Write the training nodes of all parts, as they are kept; return the catalog's entry."""
        g, kept, files = self._g, self._kept, dict[str, str]()
        for role, file in self._kept_files():
            rows = _Stored(f"int{8 * file.row_bytes}", (file.n_rows,), file)
            record = self._file(self._next(), builder, f"{role}.{file_stem(kept.name)}", role, rows)
            builder.files[record.name] = record
            files[role] = record.name
        return {**g.catalog.extra[f"{PARTS_KEY}{kept.name}"], "generation": 1, "files": files}


class _Rows(ABC):
    """The rows of a file to be written, from any of them on."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.n_rows, self.row_bytes = shape[0], Field(shape[0], shape[1:], dtype).row_bytes

    @abstractmethod
    def blocks_from(self, first: int, max_bytes: int) -> Iterator[Uint8s]:
        """Yield the rows from ``first`` on, uint8 ``[k, row_bytes]``, about ``max_bytes`` at once."""


class _Array(_Rows):
    """The bytes of an array."""

    def __init__(self, array: Uint8s) -> None:
        super().__init__("uint8", array.shape)
        self._array = array

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[Uint8s]:
        for begin in range(first, self.n_rows, max_bytes):
            yield self._array[begin : begin + max_bytes].reshape(-1, 1)


class _Stored(_Rows):
    """All rows of a file."""

    def __init__(self, dtype: str, shape: tuple[int, ...], file: RowFile | PatchedRows) -> None:
        super().__init__(dtype, shape)
        self._file = file

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[Uint8s]:
        step = max(1, max_bytes // self.row_bytes)
        for begin in range(first, self.n_rows, step):
            yield self._file.read(begin, min(step, self.n_rows - begin))


class _PartRows(_Rows):
    """The rows of a part's nodes."""

    def __init__(self, record: FieldRecord, file: RowFile | PatchedRows, part: Part) -> None:
        super().__init__(record.dtype, (part.n_nodes, *record.shape[1:]))
        self._file, self._hop_of = file, part.hop_of

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[Uint8s]:
        step = max(1, max_bytes // self.row_bytes)
        for piece in range(0, len(self._hop_of), _PIECE_NODES):
            nodes = np.flatnonzero(self._hop_of[piece : piece + _PIECE_NODES] != OUTSIDE) + piece
            for begin in range(min(first, len(nodes)), len(nodes), step):
                rows = np.empty((len(nodes[begin : begin + step]), self.row_bytes), np.uint8)
                self._file.gather(nodes[begin : begin + step], rows)
                yield rows
            first = max(0, first - len(nodes))


class _OutDegrees(_Rows):
    """Number of times that each node is in the lists that are written, counted for as many nodes at once as memory takes."""

    def __init__(self, n: int, lists: FileRecord, chunk_bytes: int, directory: str, memory: int) -> None:
        super().__init__("int64", (n,))
        self._lists, self._chunk_bytes, self._directory, self._memory = lists, chunk_bytes, directory, memory

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[Uint8s]:
        n = max(1024, self._memory // 32)
        for low in range(first, self.n_rows, n):
            counts = np.zeros(min(n, self.n_rows - low), np.int64)
            for ids in stored_ids([self._lists], self._chunk_bytes, self._directory, max(1024, self._memory // 64)):
                count_ids(ids, low, counts)
            yield counts.astype("<i8").view(np.uint8).reshape(-1, 8)
