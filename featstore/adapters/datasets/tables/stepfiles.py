"""The files that reading tables writes, as steps of an import: fields, and the names of nodes with their hashes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from featstore.adapters.datasets.tables.tables import Tables
from featstore.creation.builder import Builder, field_stem, file_stem
from featstore.creation.steps import Field
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.topology.types import ONE_NODE, edge_name

__all__ = ["MOST_SPLITS", "StepFiles"]

MOST_SPLITS = 100
_MAP_ROLES = ("id_names", "id_offsets", "id_hashes", "id_buckets")


@dataclass(frozen=True)
class _File:
    """A file that reading the tables writes, as a step: the beginning of its name, its role, and its rows."""

    step: int
    stem: str
    role: str
    shape: tuple[int, ...]
    dtype: str


class StepFiles:
    """All files that reading the tables writes, by what they hold; their steps follow one another."""

    def __init__(self, tables: Tables, builder: Builder) -> None:
        self._found: dict[tuple[Any, ...], _File] = {}
        self._builder = builder
        for name in tables.types:
            prefix = "ids" if name == ONE_NODE else f"ids@{file_stem(name, '%2E')}"
            is_text = tables.kinds[name] == "text"
            for role in _MAP_ROLES:
                dtype = "uint8" if role == "id_names" and is_text else "int64"
                shape: tuple[int, ...] = (2,) if role == "id_hashes" else ()
                self._add(("map", name, role), f"{prefix}.{role.removeprefix('id_')}", role, shape, dtype)
        self.shared: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}  # types of nodes by feature
        for name, table in tables.nodes.items():
            for of, (role, each) in tables.fields(table).items():
                if role == "feature":
                    self.shared.setdefault((of, each.dtype.name, each.shape), []).append(name)
        for like, names in self.shared.items():
            of, dtype, shape = like
            self._add(("feature", like), field_stem("node/" + ",".join(names), of), "feature", shape, dtype)
        for name, table in tables.nodes.items():
            for of, (role, each) in tables.fields(table).items():
                if role == "data":
                    self._add(("data", name, of), field_stem(f"node/{name}", of), "data", each.shape, each.dtype.name)
            for number in range(MOST_SPLITS if table.split is not None else 0):  # named once their texts are known
                self._add(("split", name, number), "", "data", (), "int64")
        for key, edge_table in tables.edges.items():
            for of, (_, each) in tables.fields(edge_table).items():
                self._add(("edge", key, of), field_stem(f"edge/{edge_name(key)}", of), "feature", each.shape, each.dtype.name)
        steps = builder.next_steps(len(self._found))
        self._found = {
            key: dataclasses.replace(each, step=step) for step, (key, each) in zip(steps, self._found.items(), strict=True)
        }
        self.last_step = steps[-1]

    def _add(self, key: tuple[Any, ...], stem: str, role: str, shape: tuple[int, ...], dtype: str) -> None:
        self._found[key] = _File(-1, stem, role, shape, dtype)

    def step(self, *key: Any) -> int:
        return self._found[key].step

    def open(self, *key: Any, stem: str = "") -> RowFileWriter:
        """Open the writer of a file, behind the rows that an earlier call left."""
        each = self._found[key]
        of = Field(0, each.shape, each.dtype)
        name = f"{stem or each.stem}.1.rows"
        return self._builder.steps.writer(each.step, of, self._builder.buffer_bytes, name=name, kind=each.role)

    def open_map(self, name: str, role: str, row_bytes: int, dtype: str) -> RowFileWriter:
        """Open a file of the map of a type of nodes, as :class:`~featstore.idmaps.writer.IdMapWriter` does."""
        writer = self.open("map", name, role)
        assert writer.layout.row_bytes == row_bytes, dtype
        return writer

    def made(self, *key: Any) -> FileRecord:
        """Get the record of a finished file."""
        return self._builder.steps.file(self._found[key].step)

    def maps(self, name: str) -> list[FileRecord]:
        """List the records of the map of a type of nodes."""
        found = (self._builder.steps.find_file(self.step("map", name, role)) for role in _MAP_ROLES)
        return [each for each in found if each is not None]
