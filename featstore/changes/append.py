"""Appending nodes to a dataset of one type: rows behind those of each feature, and empty neighbour lists; one commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.changes.chunktail import ChunkTail, words_from, write_tail
from featstore.changes.fields import HOLDER, check_same_graph, room_for
from featstore.changes.updates import NewRows, Rows, patch_rows
from featstore.creation.source import ArrayLike, Source, open_source
from featstore.errors import BusyError
from featstore.progress import Progress
from featstore.storage.catalog import EDGE, NODE, Catalog, FieldPart, FieldRecord
from featstore.storage.layout import choose_layout
from featstore.storage.lock import FileLock
from featstore.storage.rowfile import RowFile
from featstore.storage.update import Update
from featstore.topology.base import Topology
from featstore.topology.chunks import ChunkedTopology

__all__ = ["append_nodes", "appended_rows"]

Uint8s = npt.NDArray[np.uint8]

_CHUNKS: Final = f"{EDGE}/chunks"
_MOST_IDS: Final = 1 << 31  # ids of more nodes take 8 bytes
_ROW_BYTES: Final = 24  # of a new row beside its own: its number, and its block


def appended_rows(
    catalog: Catalog, n: int, features: Mapping[str, ArrayLike] | None, data: Mapping[str, ArrayLike] | None
) -> dict[str, Source]:
    """Open the rows of ``n`` new nodes, by the keys of their fields, and check that nothing is missing.

    Raises as :meth:`featstore.OutOfCoreGraph.append_nodes`.
    """
    found = {}
    for role, what, given in (("feature", "feature", features), ("data", "node data", data)):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{what} must be a mapping of names to arrays, such as {{'x': array}}, not {type(given).__name__}")
        records, given = catalog.by_role(role, NODE), dict(given or {})
        if unknown := [name for name in given if name not in records]:
            raise ValueError(
                f"there is no {what} {unknown[0]!r} to append rows to; there is {', '.join(map(repr, records)) or 'none'}"
            )
        for name, record in records.items():
            has_all = role == "feature" or record.n_rows == catalog.num_nodes
            if name not in given:
                if has_all:
                    raise ValueError(f"{what} {name!r} has a row for each node, so it needs rows for the {n} new ones")
                continue
            source = open_source(f"{what} {name!r}", given[name])
            if has_all and source.n_rows != n:
                raise ValueError(f"{what} {name!r} has {source.n_rows} rows for {n} new nodes")
            if source.shape[1:] != record.shape[1:]:
                raise ValueError(f"rows of {what} {name!r} have shape {record.shape[1:]}, not {source.shape[1:]}")
            if source.dtype != record.dtype:
                raise TypeError(f"rows of {what} {name!r} are {record.dtype}, not {source.dtype}: cast them before")
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


def _longer(file: RowFile, n: int, value: int, step: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the int64 rows of a file, and then ``value`` ``n`` times."""
    for first in range(0, file.n_rows, step):
        yield file.read(first, min(step, file.n_rows - first)).view("<i8").reshape(-1)
    for first in range(0, n, step):
        yield np.full(min(step, n - first), value, np.int64)


def append_nodes(
    root: str,
    opened: Catalog,
    n: int,
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
    """Append ``n`` nodes and commit; ``sources`` are those of :func:`appended_rows`. Return the new catalog.

    ``topology`` opens the adjacency; it is called if that is in chunks. See :class:`Update` for ``own``. ``stale`` are the names
    of derived features that are stale, and stay so.

    Raises as :meth:`featstore.OutOfCoreGraph.append_nodes`.
    """
    before, after = opened.num_nodes, opened.num_nodes + n
    if before < _MOST_IDS <= after:
        raise ValueError(f"{after} nodes need ids of 8 bytes, and those of the dataset have 4: make a dataset anew")
    widest = max([8, *(source.row_bytes for source in sources.values())])
    lists = topology() if opened.topology == "chunked" else None
    block_bytes, buffer_bytes = room_for(budget, widest)
    most = max([0, *(source.n_rows for source in sources.values())])
    held = 3 * block_bytes + buffer_bytes + (2 << 20) + _ROW_BYTES * most
    total, columns = sum(source.n_rows * source.row_bytes for source in sources.values()) + 8 * after, [("out_degree", 0)]
    tail = None
    if isinstance(lists, ChunkedTopology):
        parts = opened.fields[_CHUNKS].parts
        tail = ChunkTail.of(lists.directory, parts, n, lambda name: opened.files[name].n_rows)
        total += words_from(lists.directory, tail.chunk) * lists.id_bytes
        held += opened.chunk_bytes + buffer_bytes
    else:
        total, columns = total + 8 * after, [("indptr", opened.num_edges), *columns]
    with budget.reserve(HOLDER, held), Update(root, own) as update:
        catalog = update.catalog
        check_same_graph(opened, catalog, root)
        node_fields = {key for key in {*opened.fields, *catalog.fields} if key.startswith(f"{NODE}/")}
        for key in node_fields | {record.key for record in opened.by_role("topology", EDGE).values()}:
            record = opened.fields.get(key)
            if catalog.fields.get(key) != record or record is None:
                raise BusyError(f"{key.rpartition('/')[2]!r} was changed since the dataset was opened: open it again", root)
        with Progress("append", total, progress) as bar:
            for key, source in sources.items():
                record, rows = opened.fields[key], _InOrder(source, block_bytes)
                base, count = opened.files[record.parts[0].file], record.n_rows + source.n_rows
                new = NewRows(np.arange(record.n_rows, count), rows.take)
                made = patch_rows(update, base, rows_of(record), new, tables, (block_bytes // 4, buffer_bytes), bar.add, count)
                rows.finish()
                part = FieldPart(made.name, 0, count)
                derived = f"derived/{key}"  # of stale rows, which the new ones do not make right
                kept = {derived: {**catalog.extra[derived], "made": made.rows_id}} if record.name in stale else {}
                longer = replace(record, shape=(count, *record.shape[1:]), generation=update.generation, parts=(part,))
                update.add([], [longer], kept)
            if isinstance(lists, ChunkedTopology) and tail is not None:
                memory = (block_bytes // 4, buffer_bytes)
                write_tail(update, opened, lists, opened.fields[_CHUNKS], tail, memory, bar.add)
            for name, value in columns:
                record = opened.fields[f"{EDGE}/{name}"]
                with update.writer(f"edge.{name}", choose_layout(8), kind=name, dtype="int64", buffer_bytes=buffer_bytes) as out:
                    for block in _longer(file_of(record), n, value, block_bytes // 8):
                        out.write(block.view(np.uint8).reshape(len(block), 8))
                        bar.add(block.nbytes)
                    file = out.commit()
                part = FieldPart(file.name, 0, file.n_rows)
                update.add([file], [FieldRecord(record.key, "topology", "int64", (file.n_rows,), file.generation, (part,))])
        # The adjacency is another one, so it has no earlier identity.
        dataset: dict[str, Any] = {"num_nodes": after, "adjacency": None}
        update.add([], dataset=dataset)
        return update.commit()
