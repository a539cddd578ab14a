"""Adding a field to a dataset, and removing one: one commit each, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from featstore.budget import Budget
from featstore.creation.builder import field_stem
from featstore.creation.inputfields import check_edge_rows, check_field_name, open_fields
from featstore.creation.source import ArrayLike, Source
from featstore.errors import BusyError
from featstore.progress import Progress
from featstore.storage.catalog import Catalog, FieldPart, FieldRecord
from featstore.storage.layout import choose_layout
from featstore.storage.lock import FileLock
from featstore.storage.update import Update

__all__ = ["HOLDER", "Place", "add_field", "check_new_field", "check_same_graph", "remove_field", "room_for"]

HOLDER: Final = "changes"  # in the budget's report
_MOST_BLOCK: Final = 32 << 20  # of input rows at once
_LEAST_BLOCK: Final = 64 << 10
_MOST_BUFFER: Final = 8 << 20  # of a writer's two buffers together
_WRITER_BYTES: Final = 2 << 20  # of rows that are padded at once, and of checksums that are not written yet


@dataclass(frozen=True)
class Place:
    """Owner of a field: nodes or edges of one type.

    Parameters
    ----------
    prefix : str
        Beginning of the keys of the type's fields in the catalog, such as ``"node/paper"``.
    n : int
        Number of the nodes or edges.
    label : str
        The type's name in messages with a slash behind it; "" without types.
    advice : mapping of int to str
        Text in an error for so many rows, which are those of another owner.
    """

    prefix: str
    n: int
    label: str
    advice: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_of_edges(self) -> bool:
        return self.prefix.startswith("edge/")

    def key(self, name: str) -> str:
        """Make the catalog's key of a field."""
        return f"{self.prefix}/{name}"


def room_for(budget: Budget, row_bytes: int) -> tuple[int, int]:
    """Divide the available memory: bytes of a block of input rows, and bytes of a writer's buffers."""
    block = max(_LEAST_BLOCK, min(_MOST_BLOCK, budget.available // 16))
    return max(block, row_bytes), max(_LEAST_BLOCK, min(_MOST_BUFFER, budget.available // 16))


def check_new_field(catalog: Catalog, prefix: str, role: str, name: str, overwrite: bool, label: str = "") -> None:
    """Check that a new field of a type can get this name; ValueError otherwise."""
    check_field_name(name)
    what, other = ("feature", "node data") if role == "feature" else ("node data", "a feature")
    if name in catalog.by_role("data" if role == "feature" else "feature", prefix):
        raise ValueError(f"{label + name!r} is the name of {other}; choose another")
    if name in catalog.by_role(role, prefix) and not overwrite:
        there = f"a feature {label + name!r}" if role == "feature" else f"{what} {label + name!r}"
        raise ValueError(f"there is {there} already; overwrite=True (--overwrite) replaces it")


def check_same_graph(opened: Catalog, current: Catalog, root: str) -> None:
    """Check that a dataset still has the nodes and edges that a handle has open; BusyError otherwise."""
    names = ("id", "num_nodes", "num_edges", "node_types", "edge_types")
    if any(opened.dataset.get(each) != current.dataset.get(each) for each in names):
        raise BusyError("the dataset was replaced, or has got nodes, since it was opened: open it again", root)


def open_rows(place: Place, role: str, name: str, rows: ArrayLike) -> Source:
    """Open the rows of a new field and check their number; raises as :meth:`featstore.OutOfCoreGraph.create`."""
    if place.is_of_edges:
        fields = open_fields(None, None, {name: rows}, 0)
        check_edge_rows(fields, place.n)
    elif role == "feature":
        fields = open_fields({name: rows}, None, None, place.n, advice=place.advice)
    else:
        fields = open_fields(None, {name: rows}, None, place.n)
    return fields[0][3]


def add_field(
    root: str,
    opened: Catalog,
    place: Place,
    role: str,
    name: str,
    rows: ArrayLike,
    *,
    overwrite: bool,
    budget: Budget,
    progress: bool,
    own: FileLock | None,
) -> Catalog:
    """Write a new field of a type, and commit it; return the new catalog. See :class:`Update` for ``own``.

    Raises as :meth:`featstore.OutOfCoreGraph.add_feature`.
    """
    source = open_rows(place, role, name, rows)
    block_bytes, buffer_bytes = room_for(budget, source.row_bytes)
    held = block_bytes + buffer_bytes + _WRITER_BYTES
    with budget.reserve(HOLDER, held), Update(root, own) as update:
        check_same_graph(opened, update.catalog, root)
        check_new_field(update.catalog, place.prefix, role, name, overwrite, place.label)
        layout, stem = choose_layout(source.row_bytes), field_stem(place.prefix, name)
        total = source.n_rows * source.row_bytes
        with (
            Progress(f"add {place.label}{name}", total, progress) as bar,
            update.writer(stem, layout, kind=role, dtype=source.dtype, buffer_bytes=buffer_bytes) as writer,
        ):
            for block in source.blocks(block_bytes):
                writer.write(block)
                bar.add(block.nbytes)
            file = writer.commit()
        part = FieldPart(file.name, 0, file.n_rows)
        record = FieldRecord(place.key(name), role, file.dtype, source.shape, update.generation, (part,))
        update.add([file], [record])
        return update.commit()


def remove_field(root: str, opened: Catalog, place: Place, name: str, own: FileLock | None) -> Catalog:
    """Remove a field of a type in one commit; return the new catalog. KeyError if the last commit has no such field."""
    with Update(root, own) as update:
        check_same_graph(opened, update.catalog, root)
        key = place.key(name)
        if key not in update.catalog.fields:
            raise KeyError(f"no field {place.label + name!r} in {root}: another process has removed it")
        update.add([], drop_fields=[key])
        return update.commit()
