"""The end of the chunks, made anew for appended nodes: earlier chunks stay where they are, as parts of their files.

With several types, lists and ids in the middle change; the end begins with the first chunk that one of these may lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from featstore.changes.insertion import Insertion, with_inserted
from featstore.creation.topologyfiles import ChunkedFiles, lists_in_order
from featstore.storage.catalog import Catalog, FieldPart, FieldRecord
from featstore.storage.format import STRIPE
from featstore.storage.layout import RowLayout
from featstore.storage.update import Update
from featstore.storage.writer import RowFileWriter
from featstore.topology.chunkformat import Directory
from featstore.topology.chunks import ChunkedTopology

__all__ = ["MOST_FILES", "ChunkTail", "words_from", "write_tail"]

MOST_FILES: Final = 8  # of chunks, besides those in stripes


@dataclass(frozen=True)
class ChunkTail:
    """The chunks to make anew for appended nodes: those from ``chunk`` on. Earlier ones stay where ``parts`` say."""

    chunk: int
    parts: tuple[FieldPart, ...]
    new: Insertion

    @classmethod
    def of(
        cls, directory: Directory, parts: Sequence[FieldPart], new: Insertion, file_rows: Callable[[str], int]
    ) -> ChunkTail | None:
        """Choose the first chunk that changes, and files before it that the new one outgrows; None if no chunk changes.

        ``file_rows`` counts the rows of a file by its name. A file in a stripe only loses its last chunks.
        """
        first, last = new.first_list, max(0, directory.n_chunks - 1)
        if first is None:
            return None
        # The list before the first one that changes may end in a later chunk than it begins in, which is then written as it was.
        before = int(np.searchsorted(directory.first_node[:-1], first)) - 1
        chunk = last if first == new.types.num_lists else max(0, before)
        kept = _before(parts, chunk * directory.chunk_words, file_rows)
        while kept and not STRIPE.match(kept[-1].file):
            own = sum(not STRIPE.match(part.file) for part in kept)
            if own < MOST_FILES and kept[-1].rows > words_from(directory, chunk) + new.n_lists:
                break
            chunk = kept.pop().first // directory.chunk_words
            kept = _before(kept, chunk * directory.chunk_words, file_rows)
        return cls(chunk, tuple(kept), new)


def words_from(directory: Directory, chunk: int) -> int:
    """Count the words of lists and ids in ``chunk`` and the later ones."""
    return int(directory.n_nodes[chunk:].sum() + directory.n_edges[chunk:].sum())


def _before(parts: Sequence[FieldPart], end: int, file_rows: Callable[[str], int]) -> list[FieldPart]:
    """Get the parts of the first ``end`` words, without those of no words."""
    found = [replace(part, rows=min(part.rows, end - part.first)) for part in parts if part.rows and part.first < end]
    return [replace(part, at=0 if part.rows < file_rows(part.file) else None) for part in found]


def write_tail(
    update: Update,
    opened: Catalog,
    topology: ChunkedTopology,
    record: FieldRecord,
    tail: ChunkTail,
    memory: tuple[int, int],
    progress: Callable[[int], None],
) -> None:
    """Write chunks and their directory with the lists of new nodes, all empty, and register the files.

    Parameters
    ----------
    update : Update
    opened : Catalog
        The commit that ``topology`` is of.
    topology : ChunkedTopology
        The lists as they are.
    record : FieldRecord
        Of the chunks.
    tail : ChunkTail
    memory : tuple of int
        Bytes that are read at once, and of a writer's buffers. A chunk is in memory besides.
    progress : callable
        Gets the number of bytes that were written since its last call.
    """
    directory, width = topology.directory, topology.id_bytes
    n_lists, new, step = topology.num_lists + tail.new.n_lists, tail.new, max(1, memory[0] // 8)

    def open_writer(name: str, layout: RowLayout, dtype: str, stripe: str) -> RowFileWriter:
        return update.writer(f"edge.{name}", layout, kind=name, dtype=dtype, stripe=stripe, buffer_bytes=memory[1])

    files = ChunkedFiles(n_lists, width, open_writer, opened.chunk_bytes)
    with files:
        files.go_on_behind(directory, tail.chunk)
        begins, ids = topology.lists_from(tail.chunk, step)
        begins = with_inserted(begins, new.lists, new.n, step, first=int(directory.first_node[tail.chunk]))
        for starts, some in lists_in_order(begins, map(new.ids, ids), int(directory.first_edge[tail.chunk])):
            files.write(starts, some)
            progress((len(starts) + len(some)) * width)
        written = {field.name: field for field in files.finish()}
    first = sum(part.rows for part in tail.parts)
    (file,) = written["chunks"].files
    parts = (*tail.parts, FieldPart(file.name, first, file.n_rows))
    shape = (first + file.n_rows,)
    chunks = replace(record, shape=shape, generation=update.generation, parts=parts)
    others = written["chunk_directory"]
    update.add([file, *others.files], [chunks, others.record(update.generation)])
