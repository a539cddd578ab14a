"""Reading of tables: names are numbered, fields written, and edges kept as pairs of ids; a later call goes on in the middle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.prefetch import prefetch
from featstore.adapters.datasets.tables.columns import Field, names_of, rows_of, texts_of
from featstore.adapters.datasets.tables.files import TableBlock
from featstore.adapters.datasets.tables.ids import BothEnds, Ends, Ids
from featstore.adapters.datasets.tables.pairs import Pairs
from featstore.adapters.datasets.tables.schema import EdgeTable
from featstore.adapters.datasets.tables.stepfiles import MOST_SPLITS, StepFiles
from featstore.adapters.datasets.tables.tables import Tables
from featstore.adapters.datasets.writing import SPLITS, count_unlabelled
from featstore.creation.builder import Builder, field_stem
from featstore.creation.inputfields import check_field_name
from featstore.errors import UnknownNameError
from featstore.idmaps.idmap import IDS_KEY
from featstore.idmaps.numbering import Numbers
from featstore.idmaps.writer import IdMapWriter
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.types import ONE_NODE, EdgeKey, edge_name, qualified

__all__ = ["Counts", "Reading", "names_of_ends"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Item = TypeVar("Item")


@dataclass
class Counts:
    """Counts of what an import has read."""

    nodes: dict[str, int] = field(default_factory=dict)
    edges: dict[EdgeKey, int] = field(default_factory=dict)
    edges_read: int = 0
    loops: int = 0
    duplicates: int = 0
    reverses: int = 0
    unknown: dict[EdgeKey, int] = field(default_factory=dict)  # edges left out, as an end is no node
    isolated: dict[str, int] = field(default_factory=dict)  # nodes of node tables that no edge has
    filled: dict[str, int] = field(default_factory=dict)  # cells of features without a value
    unlabelled: dict[str, int] = field(default_factory=dict)  # nodes without a value of node data, as other importers count
    splits: dict[str, int] = field(default_factory=dict)
    was_spilled: bool = False

    def to_json(self) -> dict[str, Any]:
        """Describe the counts as JSON values."""
        values = dataclasses.asdict(self)
        return {**values, **{name: [[*key, n] for key, n in values[name].items()] for name in ("edges", "unknown")}}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Counts:
        """Read what :meth:`to_json` describes."""
        of_edges = {name: {tuple(key): n for *key, n in values[name]} for name in ("edges", "unknown")}
        return cls(**{**values, **of_edges})


def names_of_ends(tables: Tables, key: EdgeKey, block: TableBlock) -> list[tuple[str, Ends, UInt64s]]:
    """Read the ends of edges, by type, with their hashes; of one type both ends of each edge follow one another."""
    table = tables.edges[key]
    src, dst = names_of(block, table.src, tables.kinds[key[0]]), names_of(block, table.dst, tables.kinds[key[2]])
    if key[0] != key[2]:
        return [(key[0], src, src.hashes()), (key[2], dst, dst.hashes())]
    hashes = np.empty((2 * len(src), 2), np.uint64)
    src.hashes(hashes[0::2])
    dst.hashes(hashes[1::2])
    return [(key[0], BothEnds(src, dst), hashes)]


class Reading:
    """One reading of all tables. Close it at the end; :meth:`run` within :meth:`Steps.leaving`.

    Parameters
    ----------
    tables : Tables
    builder : Builder
    files : StepFiles
    numbers : mapping
        Of the names of each type of nodes, none so far.
    counts : Counts
        The first ones.
    missing : {"error", "drop"}
        What to do with an edge whose end is not in a node table.
    drop_loops : bool
    keeps : bool
        Record the progress now and then, and go on with that of an earlier call. Its names are numbered again, so ``numbers``
        must take names that come alone.
    """

    def __init__(
        self,
        tables: Tables,
        builder: Builder,
        files: StepFiles,
        numbers: Mapping[str, Numbers],
        counts: Counts,
        missing: str,
        *,
        drop_loops: bool,
        keeps: bool,
    ) -> None:
        self._tables, self._builder, self._files, self._steps = tables, builder, files, builder.steps
        self._missing, self._drop_loops, self._keeps = missing, drop_loops, keeps
        left: dict[str, Any] = self._steps.more.get("reading", {}) if keeps else {}
        self._counts = Counts.of_json(left["counts"]) if left else counts
        self._at: list[int] = left.get("at", [0, 0, 0])  # table, file of it, rows of that
        self._n_kept: list[int] = left.get("n_kept", [0] * len(tables.edges))  # edges of each table
        self._splits: dict[str, list[str]] = left.get("splits", {})
        self._features: dict[Any, RowFileWriter] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._pairs = Pairs(builder.directory, left.get("pairs"))
            self._stack.callback(self._pairs.close)
            self._ids = {}
            for name in tables.types:
                kind = tables.kinds[name]
                writer = IdMapWriter(kind, partial(files.open_map, name))
                self._ids[name] = Ids(name, kind, numbers[name], self._stack.enter_context(writer))
        except BaseException:
            self._steps.leave()
            self.close()
            raise
        self._left = left

    def close(self) -> None:
        self._stack.close()

    def run(self) -> None:
        """Read all tables, and finish all files but the adjacency's; what is found is in the steps' ``more``."""
        steps, tables = self._steps, self._tables
        for name, each in self._ids.items() if self._left else ():
            each.go_on(self._left["ids"][name], steps.arrays.get(f"seen {name}"))
        begin, n_nodes = self._at, len(tables.nodes)
        if begin[0] < n_nodes:
            self._features = {like: self._files.open("feature", like) for like in self._files.shared}
        for number, table in enumerate((*tables.nodes.values(), *tables.edges.values())):
            if number < begin[0]:
                self._builder.progress.add(tables.n_bytes_of(table))
        for number, name in enumerate(tables.nodes):
            if number >= begin[0]:
                self._end_table(number, self._read_nodes(number, name, self._start(number)))
        for number, key in enumerate(tables.edges, n_nodes):
            if number >= begin[0]:
                self._end_table(number, self._read_edges(number, key, self._start(number)))
        self._finish()

    def _start(self, number: int) -> tuple[int, int]:
        """Find the file, and the number of its rows, from which on a table is read."""
        return (self._at[1], self._at[2]) if number == self._at[0] else (0, 0)

    def _end_table(self, number: int, made: Mapping[int, RowFileWriter]) -> None:
        """Complete the files of a table."""
        self._at = [number + 1, 0, 0]
        files = {step: writer.commit() for step, writer in made.items()}
        if files and self._keeps:
            self._note()
        self._steps.add(files, keeps=self._keeps and bool(files))

    def _finish(self) -> None:
        """Complete the maps of ids, and record that all tables are read."""
        steps, counts = self._steps, self._counts
        entries: dict[str, Any] = {}
        files: dict[int, FileRecord] = {}
        for name, each in self._ids.items():
            entry, records = each.writer.finish(each.numbers.sorted_hashes(each.n))
            entries[IDS_KEY + name] = entry
            files.update((self._files.step("map", name, record.kind), record) for record in records)
            counts.nodes[name] = each.n
            n_isolated = each.count_isolated()
            if n_isolated is not None:
                counts.isolated[name] = n_isolated
        steps.more.pop("reading", None)
        steps.arrays.clear()
        steps.more["read"] = {
            "counts": counts.to_json(),
            "maps": entries,
            "n_kept": self._n_kept,
            "splits": self._splits,
            "pairs": self._pairs.state(),
        }
        steps.kept.add(Pairs.name)
        steps.add(files, keeps=False)
        steps.skip(self._files.last_step)

    def _note(self) -> None:
        """Note for a record how far the reading is."""
        ids = {name: each.state() for name, each in self._ids.items()}
        self._steps.more["reading"] = {
            "at": self._at,
            "counts": self._counts.to_json(),
            "ids": ids,
            "n_kept": self._n_kept,
            "splits": self._splits,
            "pairs": self._pairs.state(),
        }
        bits = ((name, each.seen_bits) for name, each in self._ids.items())
        self._steps.arrays = {f"seen {name}": each for name, each in bits if each is not None}
        self._steps.kept.add(Pairs.name)

    def _ahead(self, blocks: Iterator[Item]) -> Iterator[Item]:
        """Parse the next block, and hash its names, while the rows of one are stored."""
        return self._stack.enter_context(contextlib.closing(prefetch(blocks)))

    def _have_read(self, number: int, file: int, block: TableBlock) -> None:
        """Record the progress behind a block, if the last record is old enough."""
        self._at = [number, file, block.end]
        if self._keeps:
            self._steps.checkpoint(self._note, self._pairs.n_bytes)

    # -- nodes -------------------------------------------------------------------------------------------------------------------

    def _read_nodes(self, number: int, name: str, start: tuple[int, int]) -> dict[int, RowFileWriter]:
        """Read a table of nodes, from a file and a row on; return the writers of its fields, by step."""
        tables, files, own, table = self._tables, self._files, self._ids[name], self._tables.nodes[name]
        fields = tables.fields(table)
        data = {of: files.open("data", name, of) for of, (role, _) in fields.items() if role == "data"}
        splits = _Splits(files, name, self._splits.setdefault(name, []), data)
        columns = {table.id: own.kind} | ({} if table.split is None else {table.split: "text"})
        for file, block, names in self._ahead(
            (file, block, names_of(block, table.id, own.kind))
            for file, block in tables.blocks(table, columns, fields, self._builder.progress, start)
        ):
            before = own.n
            own.of_table(names, block)
            for of, (_, each) in fields.items():
                writer = data[of] if of in data else self._features[of, each.dtype.name, each.shape]
                without = self._counts.unlabelled if of in data else self._counts.filled
                _count(without, qualified(name, of), _write(writer, block, each, are_labels=of in data))
            if table.split is not None:
                splits.write(block, table.split, before)
            self._have_read(number, file, block)
        own.close()
        self._counts.splits.update({qualified(name, of): n for of, n in splits.counts().items()})
        made = {files.step("data", name, of): writer for of, writer in data.items()}
        made |= {files.step("split", name, place): writer for place, writer in enumerate(splits.writers)}
        if number == len(tables.nodes) - 1:  # types may share a file
            made |= {files.step("feature", like): writer for like, writer in self._features.items()}
        return made

    # -- edges -------------------------------------------------------------------------------------------------------------------

    def _read_edges(self, number: int, key: EdgeKey, start: tuple[int, int]) -> dict[int, RowFileWriter]:
        """Read a table of edges, from a file and a row on; return the writers of its fields, by step."""
        tables, table, counts = self._tables, self._tables.edges[key], self._counts
        fields, place = tables.fields(table), number - len(tables.nodes)
        writers = {of: self._files.open("edge", key, of) for of in fields}
        for file, block, names in self._ahead(
            (file, block, names_of_ends(tables, key, block))
            for file, block in tables.blocks(table, tables.ends(key), fields, self._builder.progress, start)
        ):
            found = [self._ids[name].of_edges(keys, hashes) for name, keys, hashes in names]
            src, dst = found if len(found) == 2 else (found[0][0::2], found[0][1::2])
            counts.edges_read += len(src)
            keep = self._known(key, table, block, src, dst)
            if self._drop_loops and key[0] == key[2]:
                is_edge = src != dst
                kept = is_edge if keep is None else keep & is_edge
                counts.loops += (len(src) if keep is None else int(keep.sum())) - int(kept.sum())
                keep = kept
            if keep is not None:
                src, dst = src[keep], dst[keep]
            self._pairs.append(place, src, dst)
            self._n_kept[place] += len(src)
            for of, writer in writers.items():
                n_filled = _write(writer, block, fields[of][1], keep)
                _count(counts.filled, qualified(edge_name(key), of), n_filled)
            self._have_read(number, file, block)
        return {self._files.step("edge", key, of): writer for of, writer in writers.items()}

    def _known(self, key: EdgeKey, table: EdgeTable, block: TableBlock, src: Int64s, dst: Int64s) -> Bools | None:
        """Find the edges whose ends are nodes; None if all are. UnknownNameError unless others are left out."""
        is_known = (src >= 0) & (dst >= 0)
        if is_known.all():
            return None
        bad = np.flatnonzero(~is_known)
        if self._missing == "error":
            row = int(bad[0])
            of, column = (key[0], table.src) if src[row] < 0 else (key[2], table.dst)
            shown = names_of(block, column, self._tables.kinds[of]).show(row)
            where = "of the node table" if of == ONE_NODE else f"of type {of!r}, which has a node table"
            raise UnknownNameError(
                f"{block.where(row)}: {column} {shown} is no node {where} ({len(bad)} such edges near there); "
                "missing='drop' leaves such edges out"
            )
        self._counts.unknown[key] = self._counts.unknown.get(key, 0) + len(bad)
        return is_known


class _Splits:
    """Nodes of a type by the text that a column has, each as a field of node data; texts of one split make one field."""

    def __init__(self, files: StepFiles, name: str, fields: list[str], taken: Mapping[str, object]) -> None:
        self._files, self._name, self._fields, self._taken = files, name, fields, taken  # taken: names of other fields
        self.writers = [self._open(place) for place in range(len(fields))]  # those that an earlier call had

    def _open(self, place: int) -> RowFileWriter:
        stem = field_stem(f"node/{self._name}", self._fields[place])
        return self._files.open("split", self._name, place, stem=stem)

    def write(self, block: TableBlock, column: str, first: int) -> None:
        """Append the nodes of a block, whose first is ``first``; those without a value are in no split."""
        texts, numbers = texts_of(block, column)
        fields = [SPLITS.get(text.lower(), f"{text}_idx") for text in texts]
        for field_ in dict.fromkeys(fields):
            of_field = [number for number, each in enumerate(fields) if each == field_]
            nodes = first + np.flatnonzero(np.isin(numbers, of_field))
            if field_ not in self._fields:
                self._add(field_, block, column)
            self.writers[self._fields.index(field_)].write(nodes.astype("<i8").view(np.uint8).reshape(len(nodes), 8))

    def _add(self, field_: str, block: TableBlock, column: str) -> None:
        if len(self._fields) == MOST_SPLITS:
            raise ValueError(f"{block.path}: more than {MOST_SPLITS} splits in column {column!r}")
        check_field_name(field_, f"{block.path}: a split in column {column!r}")
        if field_ in self._taken:
            raise ValueError(
                f"{block.path}: a split in column {column!r} makes node data {field_!r}, and there is another field of this name"
            )
        self._fields.append(field_)
        self.writers.append(self._open(len(self._fields) - 1))

    def counts(self) -> dict[str, int]:
        """Count the nodes of each, by the name of its field."""
        return {of: writer.n_rows for of, writer in zip(self._fields, self.writers, strict=True)}


def _write(writer: RowFileWriter, block: TableBlock, field: Field, keep: Bools | None = None, *, are_labels: bool = False) -> int:
    """Append the rows of a field; return the number of cells without a value, which are filled, or of rows that are no label."""
    rows, filled = rows_of(block, field)
    n_filled = 0 if filled is None else int(filled.sum())
    if keep is not None:
        rows = rows[keep]
    rows = np.ascontiguousarray(rows, field.dtype)
    data = rows.view(np.uint8).reshape(len(rows), field.row_bytes)
    writer.write(data)
    return count_unlabelled(data, field.dtype.name, filled) if are_labels else n_filled


def _count(counts: dict[str, int], name: str, n: int) -> None:
    """Add to a count; one that stays 0 is left out."""
    if n:
        counts[name] = counts.get(name, 0) + n
