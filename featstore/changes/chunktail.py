"""The end of the chunks, made anew for appended nodes: earlier chunks stay where they are, as parts of their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

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
    """The chunks to make anew for ``n`` appended lists: those from ``chunk`` on. Earlier ones stay where ``parts`` say."""

    chunk: int
    parts: tuple[FieldPart, ...]
    n: int

    @classmethod
    def of(cls, directory: Directory, parts: Sequence[FieldPart], n: int, file_rows: Callable[[str], int]) -> ChunkTail:
        """Choose the last chunk, and files before it that it outgrows; ``file_rows`` counts the rows of a file by its name.

        A file in a stripe only loses its last chunk.
        """
        chunk = max(0, directory.n_chunks - 1)
        kept = _before(parts, chunk * directory.chunk_words, file_rows)
        while kept and not STRIPE.match(kept[-1].file):
            own = sum(not STRIPE.match(part.file) for part in kept)
            if own < MOST_FILES and kept[-1].rows > words_from(directory, chunk) + n:
                break
            chunk = kept.pop().first // directory.chunk_words
            kept = _before(kept, chunk * directory.chunk_words, file_rows)
        return cls(chunk, tuple(kept), n)


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
    """Write chunks and their directory for lists that are appended, all empty, and register the files.

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
    n_lists = topology.num_lists + tail.n

    def open_writer(name: str, layout: RowLayout, dtype: str, stripe: str) -> RowFileWriter:
        return update.writer(f"edge.{name}", layout, kind=name, dtype=dtype, stripe=stripe, buffer_bytes=memory[1])

    files = ChunkedFiles(n_lists, width, open_writer, opened.chunk_bytes)
    with files:
        files.go_on_behind(directory, tail.chunk)
        begins, ids = topology.lists_from(tail.chunk, max(1, memory[0] // 8))
        for starts, some in lists_in_order(begins, ids, int(directory.first_edge[tail.chunk])):
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
