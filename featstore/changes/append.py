"""Appending nodes of a type to a dataset: rows behind those of each of its features, and empty neighbour lists; one commit.

Ids, lists and rows of the types behind it move up. If there are none, only what is appended is written, beside offsets and
out-degrees. Otherwise stored neighbour ids, and files that several types share, are written anew, as a graph made at once has
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.changes.chunktail import ChunkTail, words_from, write_tail
from featstore.changes.fields import HOLDER, check_same_graph, room_for
from featstore.changes.insertion import Insertion, with_inserted
from featstore.changes.updates import NewRows, Rows, fields_in, insert_rows, moved, patch_rows
from featstore.config import listed
from featstore.creation.source import ArrayLike, Source, open_source
from featstore.errors import BusyError
from featstore.progress import Progress
from featstore.storage.catalog import EDGE, Catalog, FieldPart, FieldRecord
from featstore.storage.layout import choose_layout
from featstore.storage.lock import FileLock
from featstore.storage.rowfile import RowFile
from featstore.storage.update import Update
from featstore.topology.base import Topology, scan_ids
from featstore.topology.chunks import ChunkedTopology
from featstore.topology.types import qualified

__all__ = ["append_nodes", "appended_rows"]

Uint8s = npt.NDArray[np.uint8]

_CHUNKS: Final = f"{EDGE}/chunks"
_INDICES: Final = f"{EDGE}/indices"
_MOST_IDS: Final = 1 << 31  # ids of more nodes take 8 bytes
_ROW_BYTES: Final = 24  # of a new row beside its own: its number, and its block


def appended_rows(
    catalog: Catalog, new: Insertion, features: Mapping[str, ArrayLike] | None, data: Mapping[str, ArrayLike] | None
) -> dict[str, Source]:
    """Open the rows of the new nodes, by the keys of their fields, and check that nothing is missing.

    Raises as :meth:`featstore.OutOfCoreGraph.append_nodes`.
    """
    found, n, prefix = {}, new.n, f"node/{new.of}"
    for role, what, given in (("feature", "feature", features), ("data", "node data", data)):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{what} must be a mapping of names to arrays, such as {{'x': array}}, not {type(given).__name__}")
        records, given = catalog.by_role(role, prefix), dict(given or {})
        if unknown := [name for name in given if name not in records]:
            raise ValueError(
                f"there is no {what} {qualified(new.of, unknown[0])!r} to append rows to; there is {listed(records)}"
            )
        for name, record in records.items():
            own = f"{what} {qualified(new.of, name)!r}"
            has_all = role == "feature" or record.n_rows == new.kind.n
            if name not in given:
                if has_all:
                    raise ValueError(f"{own} has a row for each node, so it needs rows for the {n} new ones")
                continue
            source = open_source(own, given[name])
            if has_all and source.n_rows != n:
                raise ValueError(f"{own} has {source.n_rows} rows for {n} new nodes")
            if source.shape[1:] != record.shape[1:]:
                raise ValueError(f"rows of {own} have shape {record.shape[1:]}, not {source.shape[1:]}")
            if source.dtype != record.dtype:
                raise TypeError(f"rows of {own} are {record.dtype}, not {source.dtype}: cast them before")
            if source.n_rows:
                found[record.key] = source
    return found


class _InOrder:
    """Rows of a source, taken in order."""

    def __init__(self, source: Source, block_bytes: int) -> None:
        self._blocks, self._left = source.blocks(block_bytes), np.empty((0, source.row_bytes), np.uint8)

    def take(self, first: int, n: int) -> Uint8s:
        out = np.empty((n, self._left.shape[1]), np.uint8)
        done = 0
        while done < n:
            if not len(self._left):
                self._left = next(self._blocks)
            k = min(n - done, len(self._left))
            out[done : done + k] = self._left[:k]
            done, self._left = done + k, self._left[k:]
        return out

    def finish(self) -> None:
        """Let the source check that nothing more comes."""
        assert not len(self._left)
        assert next(self._blocks, None) is None


def _numbers(file: RowFile, step: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the int64 rows of a file."""
    for first in range(0, file.n_rows, step):
        yield file.read(first, min(step, file.n_rows - first)).view("<i8").reshape(-1)


class _Append:
    """The commit in preparation; one owner thread.

    ``memory`` are the bytes of a block of rows, and of a writer's buffers.
    """

    def __init__(
        self, update: Update, opened: Catalog, new: Insertion, memory: tuple[int, int], progress: Callable[[int], None]
    ) -> None:
        self._update, self._opened, self._new = update, opened, new
        self._memory, self._progress = memory, progress

    def add_rows(
        self,
        record: FieldRecord,
        source: Source,
        old: Rows,
        tables: Callable[[str], npt.NDArray[np.int64]],
        stale: Collection[str],
    ) -> None:
        """Put rows behind those of a field; those of other types behind them in the file move up."""
        update, n, taken = self._update, source.n_rows, _InOrder(source, self._memory[0])
        base, memory = self._opened.files[record.parts[0].file], (self._memory[0] // 4, self._memory[1])
        end = (record.parts[0].at or 0) + record.n_rows
        if end == base.total_rows:
            rows = NewRows(np.arange(end, end + n), taken.take)
            made = patch_rows(update, base, old, rows, tables, memory, self._progress, end + n)
        else:
            made = insert_rows(update, base, old, end, n, taken.take, memory, self._progress)
        taken.finish()
        count = record.n_rows + n
        part = FieldPart(made.name, 0, count, record.parts[0].at)
        fields, extra = [replace(record, shape=(count, *record.shape[1:]), generation=update.generation, parts=(part,))], {}
        order = [f"node/{name}/" for name in self._new.types.nodes]
        own = order.index(record.key.removesuffix(record.name))
        for each in fields_in(self._opened.fields, base.name):
            if each.key == record.key:
                continue
            is_behind = order.index(each.key.removesuffix(each.name)) > own or each.n_rows > 0
            fields.append(moved(each, made, update.generation, n if is_behind and (each.parts[0].at or 0) >= end else 0))
        for each in fields:
            derived = self._opened.extra.get(f"derived/{each.key}", {})
            # Rows of the type that are stale are so with new ones; those of other types are derived from what they were.
            name = qualified(each.key.split("/")[1], each.name)
            if derived.get("made") == base.rows_id and (each.key != record.key or name in stale):
                extra[f"derived/{each.key}"] = {**derived, "made": made.rows_id}
        update.add([], fields, extra)

    def add_column(self, name: str, file: RowFile, places: list[int], value: int | None) -> None:
        """Write a column of the adjacency anew, with the rows of the new nodes or lists; see :func:`with_inserted`."""
        step = self._memory[0] // 8
        blocks = with_inserted(_numbers(file, step), places, self._new.n, step, value=value)
        self._add_file(name, "int64", blocks)

    def move_ids(self, record: FieldRecord, file: RowFile) -> None:
        """Write the ids of a CSC adjacency anew, as those of nodes behind the new ones are others now."""
        opened = self._opened
        found = scan_ids(file, opened.num_nodes, opened.num_edges, record.row_bytes, self._memory[0] // 4)
        self._add_file("indices", record.dtype, (self._new.ids(ids) for _, ids in found))

    def _add_file(self, name: str, dtype: str, blocks: Iterator[npt.NDArray[Any]]) -> None:
        update, width = self._update, np.dtype(dtype).itemsize
        layout, buffer_bytes = choose_layout(width), self._memory[1]
        with update.writer(f"edge.{name}", layout, kind=name, dtype=dtype, buffer_bytes=buffer_bytes) as out:
            for block in blocks:
                out.write(np.ascontiguousarray(block, f"<i{width}").view(np.uint8).reshape(len(block), width))
                self._progress(block.nbytes)
            file = out.commit()
        part = FieldPart(file.name, 0, file.n_rows)
        update.add([file], [FieldRecord(f"{EDGE}/{name}", "topology", dtype, (file.n_rows,), file.generation, (part,))])


def append_nodes(
    root: str,
    opened: Catalog,
    new: Insertion,
    sources: Mapping[str, Source],
    rows_of: Callable[[FieldRecord], Rows],
    file_of: Callable[[FieldRecord], RowFile],
    tables: Callable[[str], npt.NDArray[np.int64]],
    topology: Callable[[], Topology],
    *,
    budget: Budget,
    progress: bool,
    own: FileLock | None,
    stale: Collection[str],
) -> Catalog:
    """Append nodes and commit; ``sources`` are those of :func:`appended_rows`. Return the new catalog.

    ``topology`` opens the adjacency; it is called if that is in chunks. See :class:`Update` for ``own``. ``stale`` are the names
    of derived features that are stale, and stay so.

    Raises as :meth:`featstore.OutOfCoreGraph.append_nodes`.
    """
    before, after = opened.num_nodes, opened.num_nodes + new.n
    if before < _MOST_IDS <= after:
        raise ValueError(f"{after} nodes need ids of 8 bytes, and those of the dataset have 4: make a dataset anew")
    widest = max([8, *(source.row_bytes for source in sources.values())])
    block_bytes, buffer_bytes = room_for(budget, widest)
    most = max([0, *(source.n_rows for source in sources.values())])
    held = 3 * block_bytes + buffer_bytes + (2 << 20) + _ROW_BYTES * most
    total = 8 * after + sum(_written(opened, opened.fields[key], source) for key, source in sources.items())
    lists, tail = topology() if opened.topology == "chunked" else None, None
    if isinstance(lists, ChunkedTopology):
        parts = opened.fields[_CHUNKS].parts
        tail = ChunkTail.of(lists.directory, parts, new, lambda name: opened.files[name].n_rows)
        if tail is not None:
            total += words_from(lists.directory, tail.chunk) * lists.id_bytes
            held += opened.chunk_bytes + buffer_bytes
    else:
        total += 8 * new.after().num_lists if new.lists else 0
        total += opened.num_edges * opened.fields[_INDICES].row_bytes if new.moves_ids else 0
    with budget.reserve(HOLDER, held), Update(root, own) as update:
        check_same_graph(opened, update.catalog, root)
        _check_unchanged(opened, update.catalog, root)
        with Progress("append", total, progress) as bar:
            append = _Append(update, opened, new, (block_bytes, buffer_bytes), bar.add)
            for key, source in sources.items():
                record = opened.fields[key]
                append.add_rows(record, source, rows_of(record), tables, stale)
            if isinstance(lists, ChunkedTopology):
                if tail is not None:
                    memory = (block_bytes // 4, buffer_bytes)
                    write_tail(update, opened, lists, opened.fields[_CHUNKS], tail, memory, bar.add)
            else:
                if new.lists:
                    append.add_column("indptr", file_of(opened.fields[f"{EDGE}/indptr"]), new.lists, None)
                if new.moves_ids:
                    append.move_ids(opened.fields[_INDICES], file_of(opened.fields[_INDICES]))
            append.add_column("out_degree", file_of(opened.fields[f"{EDGE}/out_degree"]), [new.kind.stop], 0)
        # The adjacency is another one, so it has no earlier identity.
        dataset: dict[str, Any] = {"num_nodes": after, **new.after().entry(), "adjacency": None}
        update.add([], dataset=dataset)
        return update.commit()


def _written(opened: Catalog, record: FieldRecord, source: Source) -> int:
    """Count the bytes of rows that appending writes: its own, or the whole file's if others follow in it."""
    n_old = opened.files[record.parts[0].file].total_rows
    is_last = (record.parts[0].at or 0) + record.n_rows == n_old
    return (source.n_rows + (0 if is_last else n_old)) * source.row_bytes


def _check_unchanged(opened: Catalog, current: Catalog, root: str) -> None:
    """Check that nodes and adjacency have the fields that a handle has open; BusyError otherwise."""
    keys = {key for key in {*opened.fields, *current.fields} if key.startswith("node/")}
    for key in keys | {record.key for record in opened.by_role("topology", EDGE).values()}:
        record = opened.fields.get(key)
        if current.fields.get(key) != record or record is None:
            raise BusyError(f"{key.rpartition('/')[2]!r} was changed since the dataset was opened: open it again", root)
