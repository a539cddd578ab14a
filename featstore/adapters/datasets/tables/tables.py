"""The tables of an import: their files, what ids and fields these hold, and their rows in blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from featstore.adapters.datasets.tables.columns import Field, field_of, id_kind
from featstore.adapters.datasets.tables.files import MOST_BLOCK_BYTES, TableBlock, TableFile, find_files
from featstore.adapters.datasets.tables.schema import EdgeTable, NodeTable, Table
from featstore.creation.inputfields import check_field_name
from featstore.progress import Progress
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, edge_name

__all__ = ["Tables"]


class Tables:
    """Tables whose files are there and have their columns; see :func:`featstore.adapters.datasets.tables.import_tables`.

    Attributes
    ----------
    nodes, edges : dict
        The tables, by type.
    types : list of str
        Types of nodes, in the order in which their nodes are numbered.
    kinds : dict of str to {"text", "int64"}
        What ids of a type are.
    """

    def __init__(self, nodes: Mapping[str, NodeTable], edges: Mapping[EdgeKey, EdgeTable], memory: int) -> None:
        self.nodes, self.edges = dict(nodes), dict(edges)
        ends = (end for key in edges for end in (key[0], key[2]))
        self.types = list(dict.fromkeys([*nodes, *ends]))
        # Blocks of the reader, of which pyarrow holds some, take about a quarter of the memory.
        self._block_bytes = max(64 << 10, min(MOST_BLOCK_BYTES, memory // 64))
        self._files: dict[int, list[TableFile]] = {}
        for name, table in self.nodes.items():
            self._files[id(table)] = self._open(table, "the node table" if name == ONE_NODE else f"node table {name!r}")
        for key, edge_table in self.edges.items():
            self._files[id(edge_table)] = self._open(edge_table, _edge_table(key))
        self.kinds = self._find_kinds()
        self._fields = {id(table): self._find_fields(table) for table in (*self.nodes.values(), *self.edges.values())}

    def _open(self, table: NodeTable | EdgeTable, what: str) -> list[TableFile]:
        ids = (table.id,) if isinstance(table, NodeTable) else (table.src, table.dst)
        made = [
            TableFile(path, table.delimiter, table.header, table.null_values, self._block_bytes, ids)
            for path in find_files(table.files, what)
        ]
        split = [table.split] if isinstance(table, NodeTable) and table.split is not None else []
        for file in made:
            file.check([*ids, *split])
        return made

    @property
    def files(self) -> list[str]:
        """Paths of all files."""
        return [file.path for files in self._files.values() for file in files]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for files in self._files.values() for file in files)

    def n_bytes_of(self, table: Table) -> int:
        """Bytes of the files of a table."""
        return sum(file.n_bytes for file in self._files[id(table)])

    def describe(self) -> dict[str, Any]:
        """Describe, as JSON values, what is read of the files, and as what."""
        named: list[tuple[str, Table]] = [*self.nodes.items(), *((edge_name(key), table) for key, table in self.edges.items())]
        tables = []
        for name, table in named:
            assert isinstance(table, (NodeTable, EdgeTable))
            given = dataclasses.replace(table, files=[file.path for file in self._files[id(table)]])
            tables.append([name, repr(given), repr(self._fields[id(table)])])
        return {"tables": tables, "ids": self.kinds, "pyarrow": pa.__version__}

    def fields(self, table: Table) -> dict[str, tuple[str, Field]]:
        """Get role, columns and rows of each field of a table."""
        return self._fields[id(table)]

    def _id_columns(self) -> Iterator[tuple[str, Table, str]]:
        for name, table in self.nodes.items():
            yield name, table, table.id
        for key, edge_table in self.edges.items():
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
                    lengths = "rows of a field have one length: make the lists alike first"
                    remedy = "Column(…, dtype=) converts them" if one.shape == each[0].shape else lengths
                    raise TypeError(
                        f"{file.path}: field {name!r} has rows of {one.dtype.name} {list(one.shape)}, and in {files[0].path} of "
                        f"{each[0].dtype.name} {list(each[0].shape)}; {remedy}"
                    )
                if one.units != each[0].units:
                    raise TypeError(
                        f"{file.path}: field {name!r} has {one.units}, and in {files[0].path} {each[0].units}; "
                        "write all files with one type"
                    )
            found[name] = role, each[0]
        return found

    def blocks(
        self,
        table: Table,
        columns: Mapping[str, str],
        fields: Mapping[str, tuple[str, Field]],
        progress: Progress | None,
        begin: tuple[int, int] = (0, 0),
    ) -> Iterator[tuple[int, TableBlock]]:
        """Yield the blocks of a table, each with the number of its file.

        They have the ``columns`` of ids, given with what these hold, and those of fields. ``begin`` is a file and a number of
        rows, before which all were read by an earlier call.
        """
        for number, file in enumerate(self._files[id(table)]):
            if number < begin[0]:
                if progress is not None:
                    progress.add(file.n_bytes)
                continue
            are_ints = not file.may_have_hex
            types = {name: pa.int64() if kind == "int64" and are_ints else pa.string() for name, kind in columns.items()}
            for _, each in fields.values():
                for column, kind in zip(each.columns, each.kinds, strict=True):
                    types.setdefault(column, kind)
            done = 0
            for block in file.blocks(types, begin[1] if number == begin[0] else 0):
                yield number, block
                if progress is not None:
                    more = min(block.batch.nbytes, file.n_bytes - done)
                    progress.add(more)
                    done += more
            if progress is not None:
                progress.add(file.n_bytes - done)

    def ends(self, key: EdgeKey) -> dict[str, str]:
        """Get the columns of a table of edges that have ids, and what these hold."""
        table = self.edges[key]
        if table.src == table.dst:
            raise ValueError(f"{_edge_table(key)}: sources and destinations are in one column, {table.src!r}")
        return {table.src: self.kinds[key[0]], table.dst: self.kinds[key[2]]}


def _edge_table(key: EdgeKey) -> str:
    return "the edge table" if key == ONE_EDGE else f"edge table {edge_name(key)!r}"


def _with_rows(files: list[TableFile]) -> list[TableFile]:
    """Choose the files whose types are known; all, if none has a row."""
    return [file for file in files if file.has_rows] or files
