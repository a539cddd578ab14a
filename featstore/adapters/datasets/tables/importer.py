"""One import of tables: names numbered in order of first appearance, fields written as they are read, edges sorted at the end."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from featstore._core.distinct import Ranks
from featstore.adapters.datasets.tables.columns import Field, field_of, id_kind, names_of, rows_of, texts_of
from featstore.adapters.datasets.tables.files import Block, TableFile, find_files
from featstore.adapters.datasets.tables.given import EdgeTable, NodeTable, Table
from featstore.creation.build import Builder, file_stem, write_pairs
from featstore.creation.extsort import PairSorter
from featstore.creation.inputfields import check_field_name
from featstore.creation.options import CreateOptions
from featstore.errors import UnknownNameError
from featstore.idmaps.idmap import IDS_KEY
from featstore.idmaps.keys import Keys, joined
from featstore.idmaps.numbering import MemoryNumbers, Numbers, Room, SpilledNumbers, TableFullError
from featstore.idmaps.writer import IdMapWriter
from featstore.progress import Progress
from featstore.storage.calls import close_quietly, pread_exactly, pwrite_all
from featstore.storage.layout import choose_layout
from featstore.storage.writer import RowFileWriter
from featstore.topology.types import ONE_NODE, EdgeKey, Types, edge_name, qualified

__all__ = ["Counts", "Importer"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_MOST_SPLITS = 100


@dataclass
class Counts:
    """What an import has read."""

    nodes: dict[str, int] = field(default_factory=dict)
    edges: dict[EdgeKey, int] = field(default_factory=dict)
    edges_read: int = 0
    loops: int = 0
    duplicates: int = 0
    reverses: int = 0
    unknown: dict[EdgeKey, int] = field(default_factory=dict)  # edges left out, as an end is no node
    isolated: dict[str, int] = field(default_factory=dict)  # nodes of node tables that no edge has
    filled: dict[str, int] = field(default_factory=dict)  # cells of features without a value
    unlabelled: dict[str, int] = field(default_factory=dict)  # nodes without a value of node data
    splits: dict[str, int] = field(default_factory=dict)
    was_spilled: bool = False


class _Ids:
    """The ids of a type of nodes while it is read."""

    def __init__(self, name: str, kind: str, numbers: Numbers, writer: IdMapWriter) -> None:
        self.name = name
        self.kind = kind
        self.numbers = numbers
        self.writer = writer
        self.n = 0
        self.is_closed = False  # all nodes are in its node table
        self.seen: Ranks | None = None  # of a node table: which nodes have an edge
        self._files: list[tuple[int, str, int]] = []  # of a node table: the first node of each file, its path, its first row

    def of_table(self, keys: Keys, block: Block) -> None:
        """Number the nodes of a node table; ValueError for an id that was there before."""
        if not self._files or self._files[-1][1] != block.path:
            self._files.append((self.n, block.path, block.first))
        ids, new = self.numbers.add(keys.hashes())
        if len(new) < len(keys):
            row = int(np.flatnonzero(ids != np.arange(self.n, self.n + len(keys)))[0])
            begin, path, first = max(each for each in self._files if each[0] <= int(ids[row]))
            other = (
                f"row {first + int(ids[row]) - begin}" if path == block.path else f"{path}, row {first + int(ids[row]) - begin}"
            )
            raise ValueError(f"{block.where(row)}: id {keys.show(row)} is that of {other}, too")
        self._name(keys)

    def of_edges(self, keys: Keys | _BothEnds, hashes: UInt64s) -> Int64s:
        """Number ends of edges; -1 for one that the type's node table does not have."""
        if self.is_closed:
            ids = self.numbers.find(hashes)
            ids[ids >= self.n] = -1
            assert self.seen is not None
            self.seen.mark(ids[ids >= 0])
            return ids
        ids, new = self.numbers.add(hashes)
        self._name(keys.take(new))
        return ids

    def _name(self, keys: Keys) -> None:
        self.writer.add(keys)
        self.n += len(keys)


class _Pairs:
    """Edges as pairs of ids, written to a file and read again."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, f"spill-{uuid.uuid4().hex}.tmp")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._blocks: list[tuple[int, int, int, int]] = []  # first byte, edges, bytes of an id, kind of edges
        self._end = 0

    def append(self, number: int, src: Int64s, dst: Int64s) -> None:
        """Append edges of the type with this number."""
        most = max(int(src.max(initial=0)), int(dst.max(initial=0)))
        rows = np.stack((src, dst)).astype("<i4" if most < 1 << 31 else "<i8")
        pwrite_all(self._fd, rows.view(np.uint8).reshape(-1).data, self._end, self._path)
        self._blocks.append((self._end, len(src), rows.itemsize, number))
        self._end += rows.nbytes

    def read(self, n: int) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield number of the type, sources and destinations of the next edges, at most ``n``."""
        for first, n_edges, width, number in self._blocks:
            for at in range(0, n_edges, n):
                k = min(n, n_edges - at)
                ends = [
                    np.frombuffer(
                        pread_exactly(self._fd, k * width, first + (row * n_edges + at) * width, self._path), f"<i{width}"
                    )
                    for row in range(2)
                ]
                yield number, ends[0].astype(np.int64), ends[1].astype(np.int64)

    def close(self) -> None:
        close_quietly(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class Importer:
    """Read tables into a dataset that a builder makes; see :func:`featstore.adapters.datasets.tables.import_tables`."""

    def __init__(
        self,
        nodes: Mapping[str, NodeTable],
        edges: Mapping[EdgeKey, EdgeTable],
        missing: str,
        options: CreateOptions,
    ) -> None:
        self._nodes, self._edges = dict(nodes), dict(edges)
        self._missing, self._options = missing, options
        # Loops are left out while edges are read, with their rows of features.
        self._cleaning = replace(options.cleaning, remove_self_loops=False)
        self._cleaning.refuse_rows({name: each for table in edges.values() for name, each in table.features.items()})
        self._memory = options.work_bytes
        ends = (end for key in edges for end in (key[0], key[2]))
        self.types = list(dict.fromkeys([*nodes, *ends]))
        # Blocks of the reader, of which pyarrow holds some, take about a quarter of the memory.
        self._block_bytes = max(64 << 10, min(8 << 20, self._memory // 64))
        self._files: dict[int, list[TableFile]] = {}
        for name, table in self._nodes.items():
            self._files[id(table)] = self._open(table, f"node table {name!r}")
        for key, edge_table in self._edges.items():
            self._files[id(edge_table)] = self._open(edge_table, f"edge table {edge_name(key)!r}")
        self._kinds = self._find_kinds()
        self._fields = {id(table): self._find_fields(table) for table in (*self._nodes.values(), *self._edges.values())}
        self.counts = Counts()

    # -- what is there -----------------------------------------------------------------------------------------------------------

    def _open(self, table: NodeTable | EdgeTable, what: str) -> list[TableFile]:
        files = find_files(table.files, what)
        made = [TableFile(path, table.delimiter, table.header, table.null_values, self._block_bytes) for path in files]
        for file in made:
            if isinstance(table, NodeTable):
                file.check([table.id, *([] if table.split is None else [table.split])])
            else:
                file.check([table.src, table.dst])
        return made

    @property
    def files(self) -> list[str]:
        """Paths of all files."""
        return [file.path for files in self._files.values() for file in files]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for files in self._files.values() for file in files)

    def _id_columns(self) -> Iterator[tuple[str, Table, str]]:
        for name, table in self._nodes.items():
            yield name, table, table.id
        for key, edge_table in self._edges.items():
            yield key[0], edge_table, edge_table.src
            yield key[2], edge_table, edge_table.dst

    def _find_kinds(self) -> dict[str, str]:
        """Decide for each type of nodes whether ids are text; TypeError where tables differ."""
        found: dict[str, list[tuple[str, str, bool]]] = {}
        for name, table, column in self._id_columns():
            for file in _with_rows(self._files[id(table)]):
                may_be_text = file.format == "csv" and table.text is None  # digits are text, too
                where = f"column {column!r} of {file.path}"
                found.setdefault(name, []).append((id_kind(file, column, table.text), where, may_be_text))
        kinds = {}
        for name, columns in found.items():
            texts = [where for kind, where, _ in columns if kind == "text"]
            others = [where for kind, where, may_be_text in columns if kind != "text" and not may_be_text]
            if texts and others:
                of = "" if name == ONE_NODE else f" of nodes of type {name!r}"
                raise TypeError(
                    f"ids{of} are text in {texts[0]}, and integers in {others[0]}; text=True of a table reads integers as text"
                )
            kinds[name] = "text" if texts else "int64"
        return kinds

    def _find_fields(self, table: Table) -> dict[str, tuple[str, Field]]:
        """Find role, columns and rows of each field; TypeError where the files of a table differ."""
        assert isinstance(table, (NodeTable, EdgeTable))
        wanted = [(name, "feature", given) for name, given in table.features.items()]
        if isinstance(table, NodeTable):
            if twice := sorted(set(table.features) & set(table.data)):
                raise ValueError(f"named both as a feature and as node data: {', '.join(twice)}")
            wanted += [(name, "data", given) for name, given in table.data.items()]
        found: dict[str, tuple[str, Field]] = {}
        for name, role, given in wanted:
            check_field_name(name)
            files = _with_rows(self._files[id(table)])
            each = [field_of(file, name, given) for file in files]
            for file, one in zip(files, each, strict=True):
                if (one.dtype, one.shape) != (each[0].dtype, each[0].shape):
                    raise TypeError(
                        f"{file.path}: field {name!r} has rows of {one.dtype.name} {list(one.shape)}, and in {files[0].path} of "
                        f"{each[0].dtype.name} {list(each[0].shape)}; Column(…, dtype=) converts them"
                    )
            found[name] = role, each[0]
        return found

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def _blocks(
        self, table: Table, columns: Mapping[str, str], fields: Mapping[str, tuple[str, Field]], progress: Progress | None
    ) -> Iterator[Block]:
        """Yield the blocks of a table: its columns of ids, given with what they hold, and those of fields."""
        for file in self._files[id(table)]:
            are_ints = not file.may_have_hex
            types = {name: pa.int64() if kind == "int64" and are_ints else pa.string() for name, kind in columns.items()}
            for _, each in fields.values():
                for column in each.columns:
                    types.setdefault(column, each.csv_type)
            done = 0
            for block in file.blocks(types):
                yield block
                if progress is not None:
                    more = min(block.batch.nbytes, file.n_bytes - done)
                    progress.add(more)
                    done += more
            if progress is not None:
                progress.add(file.n_bytes - done)

    def run(self, builder: Builder) -> tuple[Types, dict[str, Any]]:
        """Write all files; return the types, and the catalog's entries of the maps of ids."""
        try:
            return self._attempt(builder, self._numbers_in_memory())
        except TableFullError:
            pass
        self.counts = Counts(was_spilled=True)
        builder.files.clear()
        builder.fields.clear()
        with contextlib.ExitStack() as stack:
            share = self._memory // (2 * len(self.types))
            spilled = {name: stack.enter_context(SpilledNumbers(builder.directory, share)) for name in self.types}
            for name, hashes in self._all_hashes():
                spilled[name].collect(hashes)
            for each in spilled.values():
                sorter = stack.enter_context(PairSorter(max(1, each.total), share // 2, builder.directory))
                each.number(sorter)
            return self._attempt(builder, spilled)

    def _numbers_in_memory(self) -> dict[str, Numbers]:
        room = Room(self._memory // 2)
        return {name: MemoryNumbers(room) for name in self.types}

    def _all_hashes(self) -> Iterator[tuple[str, UInt64s]]:
        """Yield the hashes of all names, in the order in which they are numbered."""
        for name, table in self._nodes.items():
            for block in self._blocks(table, {table.id: self._kinds[name]}, {}, None):
                yield name, names_of(block, table.id, self._kinds[name]).hashes()
        for key, edge_table in self._edges.items():
            for block in self._blocks(edge_table, self._ends(key, edge_table), {}, None):
                for name, _, hashes in self._names(key, edge_table, block):
                    yield name, hashes

    def _ends(self, key: EdgeKey, table: EdgeTable) -> dict[str, str]:
        kinds = {table.src: self._kinds[key[0]], table.dst: self._kinds[key[2]]}
        if table.src == table.dst:
            raise ValueError(f"edge table {edge_name(key)!r}: sources and destinations are in one column, {table.src!r}")
        return kinds

    def _names(self, key: EdgeKey, table: EdgeTable, block: Block) -> list[tuple[str, Keys | _BothEnds, UInt64s]]:
        """Read the ends of edges, by type; of one type both ends of each edge follow one another."""
        src, dst = names_of(block, table.src, self._kinds[key[0]]), names_of(block, table.dst, self._kinds[key[2]])
        if key[0] != key[2]:
            return [(key[0], src, src.hashes()), (key[2], dst, dst.hashes())]
        hashes = np.empty((2 * len(src), 2), np.uint64)
        hashes[0::2], hashes[1::2] = src.hashes(), dst.hashes()
        return [(key[0], _BothEnds(src, dst), hashes)]

    # -- one attempt -------------------------------------------------------------------------------------------------------------

    def _attempt(self, builder: Builder, numbers: Mapping[str, Numbers]) -> tuple[Types, dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            ids = {}
            for name in self.types:
                open_writer = partial(_open_map_writer, builder, name)
                ids[name] = _Ids(
                    name, self._kinds[name], numbers[name], stack.enter_context(IdMapWriter(self._kinds[name], open_writer))
                )
            pairs = _Pairs(builder.directory)
            stack.callback(pairs.close)
            self._read_nodes(builder, ids, stack)
            n_read = [self._read_edges(builder, number, ids, pairs, stack) for number in range(len(self._edges))]
            entries = {}
            for name, each in ids.items():
                entry, files = each.writer.finish(each.numbers.sorted_hashes(each.n))
                entries[IDS_KEY + name] = entry
                builder.files.update((file.name, file) for file in files)
                self.counts.nodes[name] = each.n
                if each.seen is not None:
                    self.counts.isolated[name] = each.n - each.seen.number()
                    each.seen = None
            pa.default_memory_pool().release_unused()  # edges are sorted in all of the memory
            types = self._write_edges(builder, pairs, n_read)
        return types, entries

    def _read_nodes(self, builder: Builder, ids: dict[str, _Ids], stack: contextlib.ExitStack) -> None:
        shared: dict[tuple[str, str, tuple[int, ...]], tuple[list[str], int]] = {}
        for name, table in self._nodes.items():
            for of, (role, each) in self._fields[id(table)].items():
                if role == "feature":
                    shared.setdefault((of, each.dtype.name, each.shape), ([], each.row_bytes))[0].append(name)
        features = {
            like: stack.enter_context(builder.field_writer("node/" + ",".join(names), "feature", like[0], width, like[1]))
            for like, (names, width) in shared.items()
        }
        for name, table in self._nodes.items():
            fields, own = self._fields[id(table)], ids[name]
            data = {
                of: stack.enter_context(builder.field_writer(f"node/{name}", "data", of, each.row_bytes, each.dtype.name))
                for of, (role, each) in fields.items()
                if role == "data"
            }
            splits = _Splits(builder, name, stack)
            columns = {table.id: own.kind} | ({} if table.split is None else {table.split: "text"})
            for block in self._blocks(table, columns, fields, builder.progress):
                before = own.n
                own.of_table(names_of(block, table.id, own.kind), block)
                for of, (_, each) in fields.items():
                    writer = data[of] if of in data else features[of, each.dtype.name, each.shape]
                    without = self.counts.unlabelled if of in data else self.counts.filled
                    _count(without, qualified(name, of), self._write(writer, block, each))
                if table.split is not None:
                    splits.write(block, table.split, before)
            own.is_closed = True
            own.seen = Ranks(np.zeros(Ranks.words_for(own.n), np.uint64), own.n)
            for of, writer in data.items():
                builder.register(f"node/{name}/{of}", "data", writer.commit(), (own.n, *fields[of][1].shape))
            self.counts.splits.update({qualified(name, of): n for of, n in splits.finish(data).items()})
        for like, (names, _) in shared.items():
            of, _, shape = like
            builder.register_feature(of, features[like].commit(), {name: (ids[name].n, *shape) for name in names})

    def _write(self, writer: RowFileWriter, block: Block, field: Field, keep: npt.NDArray[np.bool_] | None = None) -> int:
        """Append the rows of a field; return the number of cells without a value, which are filled."""
        rows, n_filled = rows_of(block, field)
        if keep is not None:
            rows = rows[keep]
        rows = np.ascontiguousarray(rows, field.dtype)
        writer.write(rows.view(np.uint8).reshape(len(rows), field.row_bytes))
        return n_filled

    def _read_edges(self, builder: Builder, number: int, ids: dict[str, _Ids], pairs: _Pairs, stack: contextlib.ExitStack) -> int:
        key, table = list(self._edges.items())[number]
        fields = self._fields[id(table)]
        writers = {
            of: stack.enter_context(
                builder.field_writer(f"edge/{edge_name(key)}", "feature", of, each.row_bytes, each.dtype.name)
            )
            for of, (_, each) in fields.items()
        }
        n_kept = 0
        for block in self._blocks(table, self._ends(key, table), fields, builder.progress):
            names = self._names(key, table, block)
            found = [ids[name].of_edges(keys, hashes) for name, keys, hashes in names]
            src, dst = found if len(found) == 2 else (found[0][0::2], found[0][1::2])
            self.counts.edges_read += len(src)
            keep = self._known(key, table, block, src, dst)
            if self._options.cleaning.remove_self_loops and key[0] == key[2]:
                is_edge = src != dst
                kept = is_edge if keep is None else keep & is_edge
                self.counts.loops += (len(src) if keep is None else int(keep.sum())) - int(kept.sum())
                keep = kept
            if keep is not None:
                src, dst = src[keep], dst[keep]
            pairs.append(number, src, dst)
            n_kept += len(src)
            for of, writer in writers.items():
                n_filled = self._write(writer, block, fields[of][1], keep)
                _count(self.counts.filled, qualified(edge_name(key), of), n_filled)
        for of, writer in writers.items():
            key_of = f"edge/{edge_name(key)}/{of}"
            builder.register(key_of, "feature", writer.commit(), (n_kept, *fields[of][1].shape))
        return n_kept

    def _known(self, key: EdgeKey, table: EdgeTable, block: Block, src: Int64s, dst: Int64s) -> npt.NDArray[np.bool_] | None:
        """Find the edges whose ends are nodes; None if all are. UnknownNameError unless others are left out."""
        is_known = (src >= 0) & (dst >= 0)
        if is_known.all():
            return None
        bad = np.flatnonzero(~is_known)
        if self._missing == "error":
            row = int(bad[0])
            of, column = (key[0], table.src) if src[row] < 0 else (key[2], table.dst)
            shown = names_of(block, column, self._kinds[of]).show(row)
            where = "of the node table" if of == ONE_NODE else f"of type {of!r}, which has a node table"
            raise UnknownNameError(
                f"{block.where(row)}: {column} {shown} is no node {where} ({len(bad)} such edges near there); "
                "missing='drop' leaves such edges out"
            )
        self.counts.unknown[key] = self.counts.unknown.get(key, 0) + len(bad)
        return is_known

    # -- the adjacency -----------------------------------------------------------------------------------------------------------

    def _write_edges(self, builder: Builder, pairs: _Pairs, n_read: list[int]) -> Types:
        counts, cleaning, form = self.counts.nodes, self._cleaning, self._options.form
        laid_out = Types.of(counts, dict(zip(self._edges, n_read, strict=True)))
        kinds = list(laid_out.edges.values())

        def shifted(n: int) -> Iterator[tuple[Int64s, Int64s]]:
            for number, src, dst in pairs.read(n):
                src += kinds[number].src.first
                dst += kinds[number].first_list
                yield src, dst

        begins = np.array([*(each.first_list for each in kinds), laid_out.num_lists])
        stored = np.zeros(len(kinds), np.int64)

        def count(lists: Int64s) -> None:
            np.add(stored, np.diff(np.searchsorted(lists, begins)), out=stored)

        with Progress("sort edges", cleaning.work_bytes(sum(n_read), 24), self._options.progress) as bar:
            read, builder.progress = builder.progress, bar
            try:
                n_lists = laid_out.num_lists
                write_pairs(builder, shifted, laid_out.num_nodes, sum(n_read), form, cleaning, num_lists=n_lists, stored=count)
            finally:
                builder.progress = read
        n_stored = dict(zip(self._edges, stored.tolist(), strict=True))
        self.counts.edges = n_stored
        self.counts.reverses = sum(n_read) if cleaning.to_undirected else 0
        self.counts.duplicates = sum(n_read) + self.counts.reverses - sum(n_stored.values())
        return Types.of(counts, n_stored)


def _with_rows(files: list[TableFile]) -> list[TableFile]:
    """Choose the files whose types are known; all, if none has a row."""
    return [file for file in files if file.has_rows] or files


class _BothEnds:
    """Names of the sources and destinations of edges, in turns."""

    def __init__(self, src: Keys, dst: Keys) -> None:
        self._ends = src, dst

    def take(self, at: Int64s) -> Keys:
        """Take names by their positions, which ascend."""
        src, dst = (end.take(at[at % 2 == parity] // 2) for parity, end in enumerate(self._ends))
        order = np.empty(len(at), np.int64)
        order[at % 2 == 0], order[at % 2 == 1] = np.arange(len(src)), np.arange(len(src), len(at))
        return joined(src, dst).take(order)


class _Splits:
    """Nodes of a type by the text that a column has, each as a field of node data."""

    def __init__(self, builder: Builder, name: str, stack: contextlib.ExitStack) -> None:
        self._builder, self._name, self._stack = builder, name, stack
        self._writers: dict[str, RowFileWriter] = {}

    def write(self, block: Block, column: str, first: int) -> None:
        """Append the nodes of a block, whose first is ``first``; those without a value are in no split."""
        texts, numbers = texts_of(block, column)
        for number, text in enumerate(texts):
            nodes = first + np.flatnonzero(numbers == number)
            if text not in self._writers:
                if len(self._writers) == _MOST_SPLITS:
                    raise ValueError(f"{block.path}: more than {_MOST_SPLITS} splits in column {column!r}")
                check_field_name(f"{text}_idx", f"{block.path}: a split in column {column!r}")
                open_writer = self._builder.field_writer(f"node/{self._name}", "data", f"{text}_idx", 8, "int64")
                self._writers[text] = self._stack.enter_context(open_writer)
            self._writers[text].write(nodes.astype("<i8").view(np.uint8).reshape(len(nodes), 8))

    def finish(self, taken: Mapping[str, object]) -> dict[str, int]:
        """Complete the fields; return the number of nodes of each. ``taken`` are names of other fields."""
        counts = {}
        for text, writer in self._writers.items():
            of = f"{text}_idx"
            if of in taken:
                raise ValueError(
                    f"a split of type {self._name!r} makes node data {of!r}, and there is another field of this name"
                )
            counts[of] = writer.n_rows
            self._builder.register(f"node/{self._name}/{of}", "data", writer.commit(), (counts[of],))
        return counts


def _count(counts: dict[str, int], name: str, n: int) -> None:
    """Add to a count; one that stays 0 is left out."""
    if n:
        counts[name] = counts.get(name, 0) + n


def _open_map_writer(builder: Builder, name: str, role: str, row_bytes: int, dtype: str) -> RowFileWriter:
    prefix = "ids" if name == ONE_NODE else f"ids@{file_stem(name, '%2E')}"
    return builder.writer(prefix, role.removeprefix("id_"), choose_layout(row_bytes), role, dtype)
