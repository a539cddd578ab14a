"""The chunked form of the adjacency, whose offsets stay on disk."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import lists as _core
from featstore.budget import Budget, Reservation
from featstore.errors import ClosedError, CorruptionError, FormatError
from featstore.gather.doublebuffer import double_buffer
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import least_window
from featstore.storage.rowfile import RowFile
from featstore.storage.stripedrows import StripedRows
from featstore.topology.base import BLOCK_BYTES, Topology
from featstore.topology.chunkformat import Directory, check_header
from featstore.topology.listblocks import ListBlock, NodeLists
from featstore.topology.liststream import WINDOW_FACTOR
from featstore.topology.offsetpages import OffsetPages

__all__ = ["ChunkedTopology"]

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[Any]

LIST_BYTES = 16 << 20  # of two blocks together, for reading the lists of chosen nodes
_PIECE = 1 << 16  # nodes or edges handled at once if that takes temporary arrays
_LEAST_NODES = 1024  # least number of offsets read at once from a chunk that is larger than a block


class ChunkedTopology(Topology):
    """The adjacency in chunks of a fixed size, each with the offsets of its lists. Thread-safe if ``chunks`` is.

    The directory, 56 bytes a chunk, and a cache of pages (:class:`~featstore.topology.offsetpages.OffsetPages`) are in memory.
    A list costs two reads: of the page with its offset, unless that is cached, and of its ids. The rows of ``chunks`` are words
    of ``directory.id_bytes``.

    References
    ----------
    Song et al., In situ neighborhood sampling for large-scale GNN training, DaMoN 2024, section 2.3.
    """

    kind = "chunked"

    def __init__(
        self,
        num_lists: int,
        num_edges: int,
        directory: Directory,
        chunks: RowFile | StripedRows,
        budget: Budget,
        num_nodes: int | None = None,
    ) -> None:
        super().__init__(num_lists, num_edges, directory.id_bytes, num_nodes)
        self.chunks = chunks
        # The first word of each file, the word after its last, and the file, in order.
        self._files: list[tuple[int, int, RowFile]] = []
        if isinstance(chunks, StripedRows):
            for first, n, file in zip(chunks.first_rows.tolist(), chunks.lengths, chunks.files, strict=True):
                self._files.append((first, first + n, file))
        else:
            self._files.append((0, chunks.n_rows, chunks))
        self._directory: Directory | None = directory
        self._reservation: Reservation | None = None
        self._pages = OffsetPages(directory, chunks, budget)

    @classmethod
    def load(
        cls,
        num_lists: int,
        num_edges: int,
        files: Sequence[RowFile],
        directory: RowFile,
        chunk_bytes: int,
        budget: Budget,
        num_nodes: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> ChunkedTopology:
        """Read the directory, a file of rows of three int64, into memory that ``budget`` counts as ``chunk directory``.

        ``files`` hold the chunks, in order, ``lengths`` words of each, by default all. CorruptionError or FormatError if the
        directory does not describe them.
        """
        if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES or directory.n_rows < 1:
            raise FormatError(f"{files[0].path}: {directory.n_rows - 1} chunks of {chunk_bytes} bytes", files[0].path)
        chunks = files[0] if len(files) == 1 else StripedRows(files, chunk_bytes // files[0].row_bytes, budget, lengths)
        n_rows = directory.n_rows
        held = budget.reserve("chunk directory", Directory.held_bytes(n_rows))
        with held.kept(), budget.reserve("chunk directory", 24 * n_rows):
            rows = directory.read(0, n_rows).reshape(-1).view(np.int64).reshape(-1, 3)
            made = Directory(rows, num_lists, num_edges, chunks.row_bytes, chunk_bytes, chunks.n_rows, directory.path)
            topology = cls(num_lists, num_edges, made, chunks, budget, num_nodes)
        topology._reservation = held
        return topology

    @staticmethod
    def held_bytes(num_lists: int, n_chunks: int, id_bytes: int, total: int) -> int:
        """Bound the bytes that a loaded topology holds under a budget of ``total`` bytes."""
        return Directory.held_bytes(n_chunks + 1) + OffsetPages.held_bytes(num_lists, n_chunks, id_bytes, total)

    @property
    def directory(self) -> Directory:
        """The directory of chunks; ClosedError once closed."""
        directory = self._directory  # stays valid if another thread closes
        if directory is None:
            raise ClosedError(f"the adjacency in {self.path} is closed")
        return directory

    @property
    def resident_offsets(self) -> Int64s | None:
        return None

    # -- single lists ------------------------------------------------------------------------------------------------------------

    def offsets(self, ids: Int64s, starts: Int64s | None = None, degrees: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Look up offsets, see :meth:`Topology.offsets`; each page of offsets that is not cached is read once."""
        starts = np.empty(len(ids), np.int64) if starts is None else starts
        degrees = np.empty(len(ids), np.int64) if degrees is None else degrees
        for first in range(0, len(ids), _PIECE):
            part = slice(first, first + _PIECE)
            self._look_up(self.directory, ids[part], starts[part], degrees[part])
        return starts, degrees

    def _look_up(self, d: Directory, ids: Int64s, starts: Int64s, degrees: Int64s) -> None:
        chunk = np.searchsorted(d.first_node[1:], ids, side="right")
        word = ids - d.first_node[chunk]
        word += d.header_words
        # A list ends where the next one begins. For the last list of a chunk, the directory has that edge.
        within = np.flatnonzero(ids + 1 < d.first_node[chunk + 1])
        chunks = np.concatenate([chunk, chunk[within]])
        words = np.concatenate([word, word[within] + 1])
        begins = self._pages.words(chunks, words)
        if bool(((begins < 0) | (begins > d.n_edges[chunks])).any()):
            bad = int(((begins < 0) | (begins > d.n_edges[chunks])).argmax())
            raise self._damaged(d, int(chunks[bad]), int(words[bad]))
        begins += d.first_edge[chunks]
        starts[:] = begins[: len(ids)]
        degrees[:] = d.first_start[chunk + 1]
        degrees[within] = begins[len(ids) :]
        degrees -= starts
        if bool((degrees < 0).any()):
            bad = int((degrees < 0).argmax())
            raise self._damaged(d, int(chunk[bad]), int(word[bad]))

    def _damaged(self, d: Directory, chunk: int, word: int) -> CorruptionError:
        """Make the error for an offset that contradicts its neighbours or the directory."""
        return CorruptionError(
            f"where lists begin does not ascend within chunk {chunk}",
            *self._page_at(chunk * d.chunk_words + word),
        )

    def _page_at(self, word: int) -> tuple[str, int]:
        """Find the file that holds a word, and the byte at which the word's page begins."""
        file: RowFile | StripedRows = self.chunks
        if isinstance(file, StripedRows):
            file, word = file.place(word)
        return file.path, PAGE_BYTES + word * self.id_bytes // PAGE_BYTES * PAGE_BYTES

    def files_of(self, nodes: Int64s) -> Int64s:
        if not isinstance(self.chunks, StripedRows):
            return super().files_of(nodes)
        d = self.directory
        return self.chunks.file_of(np.searchsorted(d.first_node[1:], nodes, side="right") * d.chunk_words)

    def read_edges(self, positions: Int64s, out: npt.NDArray[Any]) -> None:
        if not len(positions):
            return
        d = self.directory
        shift = d.ids_at - d.first_edge[:-1]
        n_moved = 0
        try:
            for first in range(0, len(positions), _PIECE):
                part = positions[first : first + _PIECE]
                if int(part.min()) < 0 or int(part.max()) >= self.num_edges:
                    bad = int(((part < 0) | (part >= self.num_edges)).argmax())
                    raise IndexError(f"edge {part[bad]} is out of range for {self.num_edges} edges")
                # In place, as the budget does not count another array of this length.
                part += shift[np.searchsorted(d.first_edge[1:], part, side="right")]
                n_moved = first + len(part)
            self.chunks.gather(positions, out.view(np.uint8).reshape(len(positions), self.id_bytes))
        finally:
            for first in range(0, n_moved, _PIECE):
                part = positions[first : min(first + _PIECE, n_moved)]
                part -= shift[part // d.chunk_words]

    # -- all lists, or many, in sequence -----------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.chunks.path

    def offsets_between(self, first: int, stop: int) -> Int64s:
        """Read the offsets of nodes ``first … stop - 1`` from their chunks, see :meth:`Topology.offsets_between`."""
        d = self.directory
        out = np.empty(stop - first + 1, np.int64)
        chunk, node = int(np.searchsorted(d.first_node[1:], first, side="right")), first
        while node < stop:
            base, end = int(d.first_node[chunk]), min(stop, int(d.first_node[chunk + 1]))
            if end > node:
                # One more offset, if it is in the chunk, is the end of the last list.
                more = min(end + 1, int(d.first_node[chunk + 1]))
                begins = self._begins(d, chunk, node - base, more - base)
                out[node - first : node - first + len(begins)] = begins
                if more == end:
                    out[end - first] = d.first_start[chunk + 1]
            node, chunk = end, chunk + 1
        return out

    def _begins(self, d: Directory, chunk: int, first: int, stop: int) -> Int64s:
        """Read the checked numbers of the first edges of nodes ``first … stop - 1``, counted within a chunk."""
        rows = self.chunks.read(chunk * d.chunk_words + d.header_words + first, stop - first)
        return self._checked(d, chunk, first, rows.reshape(-1).view(self.id_dtype))

    def _checked(self, d: Directory, chunk: int, first: int, words: Words) -> Int64s:
        """Convert the offsets of a chunk's nodes ``first …`` into edge ids; CorruptionError if they are invalid."""
        begins = words.astype(np.int64)
        is_good = (begins >= 0) & (begins <= d.n_edges[chunk])
        is_good[1:] &= begins[1:] >= begins[:-1]
        begins += d.first_edge[chunk]
        is_good &= begins <= d.first_start[chunk + 1]
        if first == 0 and len(begins):
            is_good[0] &= begins[0] == d.first_start[chunk]
        if not is_good.all():
            raise self._damaged(d, chunk, d.header_words + first + int(is_good.argmin()))
        return begins

    def lists_from(self, chunk: int, step: int) -> tuple[Iterator[Int64s], Iterator[Words]]:
        """Read the lists' first edges, and the ids, of ``chunk`` and all later ones: two iterators, of ``step`` each at most."""
        d = self.directory

        def begins() -> Iterator[Int64s]:
            for first in range(int(d.first_node[chunk]), self.num_lists, step):
                yield self.offsets_between(first, min(first + step, self.num_lists))[:-1]

        def ids() -> Iterator[Words]:
            for number in range(chunk, d.n_chunks):
                header = self.chunks.read(number * d.chunk_words, d.header_words).reshape(-1)
                check_header(header, d, number, self._page_at(number * d.chunk_words))
                for first in range(0, int(d.n_edges[number]), step):
                    n = min(step, int(d.n_edges[number]) - first)
                    found = self.chunks.read(int(d.ids_at[number]) + first, n).reshape(-1).view(self.id_dtype)
                    self.check_ids(int(d.first_edge[number]) + first, found)
                    yield found

        return begins(), ids()

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[ListBlock]:
        return self._blocks_of(np.arange(self.directory.n_chunks), block_bytes, block_bytes // 2, 0, self.num_lists)

    def lists(self, nodes: Int64s, block_bytes: int = LIST_BYTES) -> Iterator[NodeLists]:
        """Read the chunks that hold edges of the nodes; the first and the last chunk only within the nodes' range.

        A chunk that is larger than half of ``block_bytes`` is read in parts.
        """
        if not len(nodes):
            return
        window_bytes, chunks = WINDOW_FACTOR * block_bytes, self._chunks_of(nodes)
        for block in self._blocks_of(chunks, block_bytes, window_bytes, int(nodes[0]), int(nodes[-1]) + 1):
            last = block.first_node + len(block.offsets) - 1
            low, high = np.searchsorted(nodes, (block.first_node, last))
            if low < high:
                begins, degrees = np.empty((2, high - low), np.int64)
                _core.offsets(block.offsets, nodes[low:high] - block.first_node, begins, degrees)
                yield NodeLists(np.arange(low, high), begins - block.first_edge, degrees, block.ids)

    @property
    def gap_bytes(self) -> int:
        return self.chunks.gap_bytes

    def pass_cost(self, nodes: Int64s) -> int:
        chunks = self._chunks_of(nodes)
        n_runs = 1 + int((np.diff(chunks) != 1).sum()) if len(chunks) else 0
        return len(chunks) * self.directory.chunk_bytes + self.gap_bytes * n_runs

    def lookup_cost(self, nodes: Int64s) -> int:
        """Count the cost of reading one page for each node, as if no page were cached."""
        return len(nodes) * (PAGE_BYTES + self.gap_bytes)

    def _chunks_of(self, nodes: Int64s) -> Int64s:
        """Find the chunks that hold edges of nodes, ascending."""
        d = self.directory
        at = np.searchsorted(nodes, d.first_node)
        is_wanted = at[1:] > at[:-1]
        # A list that continues behind its chunk extends to the chunk in which the next list begins.
        ends = np.flatnonzero(is_wanted & (d.first_start[1:] > d.first_edge[1:]))
        for chunk in ends[nodes[at[ends + 1] - 1] + 1 == d.first_node[ends + 1]]:
            is_wanted[chunk + 1 : int(np.searchsorted(d.first_edge[1:], d.first_start[chunk + 1], side="left")) + 1] = True
        return np.flatnonzero(is_wanted)

    def _blocks_of(self, chunks: Int64s, block_bytes: int, window_bytes: int, low: int, high: int) -> Iterator[ListBlock]:
        """Read chunks, the first and the last one only for the nodes ``low … high - 1``; ``window_bytes`` are read ahead."""
        d = self.directory
        goes_on = d.first_start[1:] > d.first_edge[1:]
        chunks = chunks[(d.n_edges[chunks] > 0) | goes_on[chunks]]
        n_words = min(max(1, block_bytes // 2 // PAGE_BYTES) * PAGE_BYTES // self.id_bytes, self.chunks.n_rows)
        carry, within = _Carry(), (low, high)
        if d.chunk_words <= n_words or (d.n_chunks == 1 and self.chunks.n_rows <= n_words):
            # Chunks of which only a part is wanted are read in parts, so that readers of the other part do not read all of it.
            n_head = int(len(chunks) > 0 and low > d.first_node[chunks[0]])
            n_tail = int(len(chunks) > n_head and high < d.first_node[chunks[-1] + 1])
            head, middle, tail = np.split(chunks, [n_head, len(chunks) - n_tail])
            words = np.empty(n_words, self.id_dtype)
            buffers = words[: n_words // 2 * 2].reshape(2, -1)
            found = itertools.chain(
                self._parts_of_chunks(d, head, buffers, carry, within),
                self._whole_chunks(d, middle, words, window_bytes, carry),
                self._parts_of_chunks(d, tail, buffers, carry, within),
            )
        else:
            buffers = np.empty((2, n_words), self.id_dtype)
            found = itertools.chain(self._parts_of_chunks(d, chunks, buffers, carry, within))
        for block in found:
            self.check_ids(block.first_edge, block.ids)
            yield block

    def _whole_chunks(self, d: Directory, chunks: Int64s, words: Words, window_bytes: int, carry: _Carry) -> Iterator[ListBlock]:
        """Read whole chunks as a stream of their pages; a block is valid until the next one is requested."""
        page_words = PAGE_BYTES // self.id_bytes
        used = d.header_words + d.n_nodes + d.n_edges
        for first_row, end_row, file in self._files:
            of_file = chunks[(chunks * d.chunk_words >= first_row) & (chunks * d.chunk_words < end_row)]
            if not len(of_file):
                continue
            n_pages = -(-used[of_file] // page_words)
            runs = np.stack([1 + (of_file * d.chunk_words - first_row) // page_words, n_pages], axis=1)  # behind the header
            ends = np.cumsum(n_pages)
            with file.stream(runs, max(least_window(), window_bytes)) as stream:
                for chunk, n, end in zip(of_file.tolist(), n_pages.tolist(), ends.tolist(), strict=True):
                    stream.feed(stream.pieces_before(end))
                    stream.core.scatter(n, None, words[: n * page_words].view(np.uint8).reshape(n, PAGE_BYTES))
                    held = words[: int(used[chunk])]
                    check_header(held[: d.header_words].view(np.uint8), d, chunk, self._page_at(chunk * d.chunk_words))
                    ids = held[d.header_words + int(d.n_nodes[chunk]) :]
                    begins = self._checked(d, chunk, 0, held[d.header_words : len(held) - len(ids)])
                    block = _block(d, chunk, begins, carry.into(chunk), ids)
                    carry.leave(chunk, int(begins[-1]) if len(begins) else carry.into(chunk))
                    if block is not None:
                        yield block

    def _parts_of_chunks(
        self, d: Directory, chunks: Int64s, buffers: Words, carry: _Carry, within: tuple[int, int]
    ) -> Iterator[ListBlock]:
        """Read chunks in parts: the offsets of some lists, then their ids."""
        n_ids = buffers.shape[1]
        n_nodes = max(_LEAST_NODES, n_ids // 4)
        coming: deque[tuple[int, Int64s, int]] = deque()

        def reads() -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
            turn = 0
            for first_node, offsets, chunk in self._pieces_of_chunks(d, chunks, n_nodes, carry, within):
                low = max(int(offsets[0]), int(d.first_edge[chunk]))
                end = min(int(offsets[-1]), int(d.first_edge[chunk + 1]))
                for edge in range(low, end, n_ids):
                    n = min(n_ids, end - edge)
                    begin = int(np.searchsorted(offsets, edge, side="right")) - 1
                    stop = int(np.searchsorted(offsets, edge + n, side="left"))
                    coming.append((first_node + begin, offsets[begin : stop + 1], edge))
                    at = int(d.ids_at[chunk]) + edge - int(d.first_edge[chunk])
                    yield at, buffers[turn % 2, :n].view(np.uint8).reshape(-1, self.id_bytes)
                    turn += 1

        for _, rows in double_buffer(self.chunks.read, reads()):
            first_node, offsets, edge = coming.popleft()
            yield ListBlock(first_node, offsets, edge, rows.reshape(-1).view(self.id_dtype))

    def _pieces_of_chunks(
        self, d: Directory, chunks: Int64s, n_nodes: int, carry: _Carry, within: tuple[int, int]
    ) -> Iterator[tuple[int, Int64s, int]]:
        """Yield the first node, offsets and chunk of up to ``n_nodes`` lists at a time.

        A list that continues over several chunks is yielded for each of them.
        """
        for chunk in chunks.tolist():
            header = self.chunks.read(chunk * d.chunk_words, d.header_words).reshape(-1)
            check_header(header, d, chunk, self._page_at(chunk * d.chunk_words))
            carried = carry.into(chunk)
            node, n = int(d.first_node[chunk]), int(d.n_nodes[chunk])
            if carried is not None and d.first_start[chunk] > d.first_edge[chunk]:
                yield node - 1, np.array([carried, d.first_start[chunk]]), chunk
            low, high = (min(max(0, at - node), n) for at in within)
            for first in range(low, high, n_nodes):
                stop = min(first + n_nodes, high)
                begins = self._begins(d, chunk, first, min(stop + 1, n))
                if stop == n:
                    begins = np.append(begins, d.first_start[chunk + 1])
                    carried = int(begins[-2])
                yield node + first, begins, chunk
            carry.leave(chunk, carried)

    def bad_id(self, position: int, found: int) -> CorruptionError:
        d = self.directory
        chunk = int(np.searchsorted(d.first_edge[1:], position, side="right"))
        where = self._page_at(int(d.ids_at[chunk]) + position - int(d.first_edge[chunk]))
        return CorruptionError(f"edge {position} leads to node {found} of {self.num_nodes}", *where)

    def close(self) -> None:
        self._directory = None
        self._pages.close()
        if self._reservation is not None:
            self._reservation.release()


class _Carry:
    """The first edge of a list that continues in the next chunk; known if the chunk before was read."""

    def __init__(self) -> None:
        self._chunk = -1
        self._edge: int | None = None

    def into(self, chunk: int) -> int | None:
        """Get the first edge of the list that continues in ``chunk``; None if the chunk before was not read."""
        return self._edge if self._chunk == chunk - 1 else None

    def leave(self, chunk: int, edge: int | None) -> None:
        self._chunk, self._edge = chunk, edge


def _block(d: Directory, chunk: int, begins: Int64s, carried: int | None, ids: Words) -> ListBlock | None:
    """Make a block of a chunk's lists.

    A list that began in an earlier chunk is included only if its first edge, ``carried``, is known.
    """
    first_edge, first_start = int(d.first_edge[chunk]), int(d.first_start[chunk])
    node, offsets = int(d.first_node[chunk]), np.append(begins, d.first_start[chunk + 1])
    if first_start > first_edge:
        if carried is None:
            skipped = first_start - first_edge
            return ListBlock(node, offsets, first_start, ids[skipped:]) if skipped < len(ids) else None
        return ListBlock(node - 1, np.concatenate([[carried], offsets]), first_edge, ids)
    return ListBlock(node, offsets, first_edge, ids) if len(ids) else None
