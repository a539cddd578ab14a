"""The bytes of a chunked topology: headers of chunks, and the directory of the nodes and edges of each chunk.

A chunk is a run of words, as wide as a neighbour id. It has a header, the first edge of each list that begins in the chunk, and
the neighbour ids. Byte tables are in docs/format.md. Source: in-situ sampling (DaMoN 2024), section 2.3.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from featstore.config import format_size, parse_size
from featstore.errors import CorruptionError
from featstore.storage.layout import PAGE_BYTES

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "HEADER_BYTES",
    "MOST_CHUNK_BYTES",
    "Directory",
    "check_header",
    "chunk_header",
    "parse_chunk_bytes",
]

Int64s = npt.NDArray[np.int64]

DEFAULT_CHUNK_BYTES: Final = 1 << 20
MOST_CHUNK_BYTES: Final = 1 << 30  # the limit of one read operation
HEADER_BYTES: Final = 64
_MAGIC: Final = int.from_bytes(b"FSCHUNK\0", "little")


def parse_chunk_bytes(value: int | str) -> int:
    """Parse the size of a chunk; ValueError unless it is a multiple of 4 KiB, up to 1 GiB."""
    n_bytes = parse_size(value, "chunk_bytes")
    if not PAGE_BYTES <= n_bytes <= MOST_CHUNK_BYTES or n_bytes % PAGE_BYTES:
        raise ValueError(
            f"chunk_bytes must be a multiple of {PAGE_BYTES} bytes, from {PAGE_BYTES} to {MOST_CHUNK_BYTES}, not {value!r} "
            f"({format_size(n_bytes)})"
        )
    return n_bytes


def chunk_header(
    number: int, first_node: int, n_nodes: int, first_edge: int, n_edges: int, id_bytes: int
) -> npt.NDArray[np.uint8]:
    """Make the header of chunk ``number``, :data:`HEADER_BYTES` bytes."""
    words = [_MAGIC, number, first_node, n_nodes, first_edge, n_edges, id_bytes, 0]
    return np.array(words, "<i8").view(np.uint8)


class Directory:
    """The nodes and edges of each chunk, held in memory; about 56 bytes a chunk.

    ``rows``, int64 ``[n_chunks + 1, 3]``, have three numbers for each chunk. ``first_node`` is the first node whose list begins
    in the chunk or later. ``first_edge`` is the chunk's first edge. ``first_start`` is the first edge of ``first_node``'s list.
    The last row is ``(num_nodes, num_edges, num_edges)``. ``n_words`` is the number of words of ``id_bytes`` in the file of
    chunks. ``ids_at`` is the word at which each chunk's ids begin. CorruptionError, which names ``path``, unless the rows
    describe such chunks.
    """

    def __init__(
        self, rows: Int64s, num_nodes: int, num_edges: int, id_bytes: int, chunk_bytes: int, n_words: int, path: str
    ) -> None:
        self.n_chunks = len(rows) - 1
        self.chunk_bytes, self.id_bytes = chunk_bytes, id_bytes
        self.header_words, self.chunk_words = HEADER_BYTES // id_bytes, chunk_bytes // id_bytes
        self.first_node, self.first_edge, self.first_start = (np.ascontiguousarray(rows[:, k]) for k in range(3))
        bad = self._first_bad(num_nodes, num_edges, n_words)
        if bad >= 0:
            where = PAGE_BYTES + bad * 24 // PAGE_BYTES * PAGE_BYTES
            raise CorruptionError(f"the entry of chunk {bad} does not agree with its neighbours or the graph", path, where)
        self.n_nodes = np.diff(self.first_node)
        self.n_edges = np.diff(self.first_edge)
        self.ids_at = np.arange(self.n_chunks, dtype=np.int64) * self.chunk_words + self.header_words + self.n_nodes

    @staticmethod
    def held_bytes(n_chunks: int) -> int:
        """Count the bytes of a directory's arrays, and of an array of each chunk's first page in a cache of pages."""
        return 7 * 8 * (n_chunks + 1)

    def _first_bad(self, num_nodes: int, num_edges: int, n_words: int) -> int:
        """Find the first invalid row; -1 if all rows are valid."""
        node, edge, start, last = self.first_node, self.first_edge, self.first_start, self.n_chunks
        if (node[last], edge[last], start[last]) != (num_nodes, num_edges, num_edges):
            return last
        if node[0] or edge[0] or start[0]:
            return 0
        in_range = (node >= 0) & (node <= num_nodes) & (edge >= 0) & (edge <= num_edges) & (start >= edge) & (start <= num_edges)
        if not in_range.all():
            return int(in_range.argmin())
        n_nodes, n_edges = np.diff(node), np.diff(edge)
        used = self.header_words + n_nodes + n_edges
        is_good = (n_nodes >= 0) & (n_edges >= 0) & (n_nodes + n_edges > 0) & (used <= self.chunk_words)
        # If lists begin in a chunk, the first of them does; else the whole chunk belongs to a list that continues.
        is_good &= np.where(n_nodes > 0, start[:-1] <= edge[1:], start[:-1] == start[1:]) & (start[1:] >= start[:-1])
        if not is_good.all():
            return int(is_good.argmin())
        page_words = PAGE_BYTES // self.id_bytes
        expected = (last - 1) * self.chunk_words + -(-int(used[-1]) // page_words) * page_words if last else 0
        return -1 if n_words == expected else last


def check_header(words: npt.NDArray[np.uint8], directory: Directory, number: int, place: tuple[str, int]) -> None:
    """Check that ``words`` are the header that the directory implies for the chunk at ``place``; CorruptionError otherwise."""
    expected = chunk_header(
        number,
        int(directory.first_node[number]),
        int(directory.n_nodes[number]),
        int(directory.first_edge[number]),
        int(directory.n_edges[number]),
        directory.id_bytes,
    )
    if not np.array_equal(words, expected):
        raise CorruptionError(
            f"another chunk is in the place of chunk {number}: its header differs",
            *place,
        )
