"""Graphs in memory, for tests of sampling: what is asked of their files is counted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from featstore.budget import Budget
from featstore.creation.topologyfiles import ChunkedFiles
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import CscTopology, Topology
from featstore.topology.chunkformat import Directory
from featstore.topology.chunks import ChunkedTopology
from featstore.topology.part import Part
from featstore.topology.types import Types

Int64s = npt.NDArray[np.int64]


class ArrayFile:
    """A row file of ids in memory that counts what is asked of it."""

    path = "indices.bin"
    gap_bytes = 12 << 10

    def __init__(self, ids: npt.NDArray[Any]) -> None:
        self.rows = ids.view(np.uint8).reshape(len(ids), ids.itemsize)
        self.n_rows, self.row_bytes = self.rows.shape
        self.n_gathers = self.n_gathered = self.n_read = 0
        self.streams: list[ArrayStream] = []

    def read(self, first: int, n: int, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        assert first >= 0
        assert first + n <= len(self.rows)
        out = np.empty((n, self.rows.shape[1]), np.uint8) if out is None else out
        out[:] = self.rows[first : first + n]
        self.n_read += n
        return out

    def gather(
        self, rows: Int64s, out: npt.NDArray[np.uint8], positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> None:
        assert positions is None
        assert rows.min() >= 0
        out[:] = self.rows[rows]
        self.n_gathers += 1
        self.n_gathered += len(rows)

    def read_pages(self, numbers: Int64s, out: npt.NDArray[np.uint8]) -> None:
        """Pages of which the first is a header."""
        out[:] = self.rows.reshape(-1, 4096)[numbers - 1]
        self.n_gathers += 1

    def stream(self, runs: Int64s, window_bytes: int, arena: Any = None) -> ArrayStream:
        stream = ArrayStream(self, runs, window_bytes)
        self.streams.append(stream)
        self.n_read += len(stream) * PAGE_BYTES // self.row_bytes
        return stream


class ArrayStream:
    """Pages of an :class:`ArrayFile`, in order, as many as were fed."""

    def __init__(self, file: ArrayFile, runs: Int64s, window_bytes: int) -> None:
        self._window = np.empty(window_bytes, np.uint8)  # counts as a stream's buffers do
        self._data = file.rows.reshape(-1)
        self._firsts, lengths = runs[runs[:, 1] > 0].T  # not the pages' numbers, which would be memory that no stream holds
        self._ends = np.cumsum(lengths)
        assert (self._firsts[1:] >= (self._firsts + lengths)[:-1]).all(), "a page is read twice, or out of order"
        self._taken = self._fed = 0
        self.core = self

    def __enter__(self) -> ArrayStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._fed = -1

    def __len__(self) -> int:
        """Pages."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def pages(self, first: int = 0, stop: int | None = None) -> Int64s:
        """Compute the numbers of pages ``first … stop - 1`` of the stream, from 0 for the page after the header."""
        places = np.arange(first, len(self) if stop is None else min(stop, len(self)))
        run = np.searchsorted(self._ends, places, side="right")
        return self._firsts[run] - 1 + places - np.concatenate([[0], self._ends])[run]

    def pieces_before(self, n_pages: int) -> int:
        return n_pages

    def feed(self, n_pieces: int) -> None:
        self._fed = max(self._fed, n_pieces)

    def scatter(self, n: int, positions: None, out: npt.NDArray[np.uint8]) -> None:
        assert self._taken + n <= self._fed
        for page, row in zip(self.pages(self._taken, self._taken + n).tolist(), out, strict=False):
            data = self._data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            row[: len(data)], row[len(data) :] = data, 0
        self._taken += n


class PlainPool:
    """Unpooled memory, filled with what must not be relied on."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -99, dtype=dtype)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.full(shape, 157 if np.dtype(dtype).kind == "u" else -99, dtype)


class ArrayWriter:
    """A row file in memory, being written."""

    def __init__(self, row_bytes: int) -> None:
        self._rows = [np.empty((0, row_bytes), np.uint8)]

    def write(self, rows: npt.NDArray[np.uint8]) -> None:
        self._rows.append(rows.copy())

    def commit(self) -> ArrayFile:
        rows = np.concatenate(self._rows)
        return ArrayFile(np.ascontiguousarray(rows).reshape(-1).view(f"V{rows.shape[1]}"))

    def abort(self) -> None:
        """Nothing is left anyway."""


def chunked(indptr: Int64s, indices: npt.NDArray[Any], chunk_bytes: int, budget: Budget, step: int = 1 << 20) -> ChunkedTopology:
    """The chunked form of a graph in memory, written ``step`` ids at a time."""
    n, id_bytes = len(indptr) - 1, indices.itemsize
    open_writer: Any = lambda name, layout, dtype, stripe: ArrayWriter(layout.row_bytes)  # noqa: E731
    files = ChunkedFiles(n, id_bytes, open_writer, chunk_bytes)
    for first in range(0, len(indices), step):
        ids = indices[first : first + step]
        last = int(np.searchsorted(indptr[:-1], first + len(ids)))
        files.write(indptr[files.n_begun : last].astype(np.int64), ids)
    chunks, directory = files.finish()
    words: Any = chunks.files[0]
    rows: Any = directory.files[0]
    made = Directory(rows.rows.view(np.int64), n, len(indices), id_bytes, chunk_bytes, len(words.rows), "directory.bin")
    return ChunkedTopology(n, len(indices), made, words, budget)


@dataclass
class ArrayGraph:
    """The part of a graph that a sampler needs: in CSC form, or in chunks of ``chunk_bytes``."""

    chunk_bytes: ClassVar[int | None] = None

    indptr: Int64s
    indices: npt.NDArray[Any]
    neighbor_cache: NeighborCache | None = None
    own_part: Part | None = None
    budget: Budget = field(default_factory=lambda: Budget(1 << 30))
    pool: PlainPool = field(default_factory=PlainPool)

    def __post_init__(self) -> None:
        self.num_nodes = len(self.indptr) - 1
        self.types = Types.one(self.num_nodes, len(self.indices))
        self.file = ArrayFile(self.indices)
        self.topology: Topology
        if self.chunk_bytes is None:
            self.topology = CscTopology(self.num_nodes, len(self.indices), self.indptr, self.file, self.indices.itemsize)
        else:
            self.topology = chunked(self.indptr, self.indices, self.chunk_bytes, self.budget)
            self.file = self.topology.chunks

    @property
    def neighbor_lists(self) -> ArrayGraph:
        return self

    def using(self) -> AbstractContextManager[NeighborCache | None]:
        return nullcontext(self.neighbor_cache)

    def cached(self, n_ids: int | None = None, seed: int = 0) -> ArrayGraph:
        """The same graph with a whole cache, or a partial one of random nodes with room for ``n_ids`` ids of records."""
        g = ArrayGraph(self.indptr, self.indices)
        if n_ids is None:
            g.neighbor_cache = NeighborCache.build(g.topology, g.budget)
            assert g.neighbor_cache.whole
            return g
        order, degrees = np.argsort(-np.random.default_rng(seed).random(self.num_nodes)), np.diff(self.indptr)
        chosen = np.zeros(self.num_nodes, bool)
        chosen[order[: np.searchsorted(np.cumsum(degrees[order] + 1), n_ids, side="right")]] = True
        sizes = np.where(chosen, degrees + 1, 0)
        offset_of_node = np.where(chosen, np.cumsum(sizes) - sizes, -1)
        records, is_id = np.empty(sizes.sum(), g.topology.id_dtype), np.ones(sizes.sum(), bool)
        is_id[offset_of_node[chosen]] = False
        records[~is_id], records[is_id] = degrees[chosen], self.indices[np.repeat(chosen, degrees)]
        arrays = {"records": records, "offset_of_node": offset_of_node}
        g.neighbor_cache = NeighborCache.from_arrays(g.topology, arrays)
        return g


def graph_of(lists: list[list[int]], id_bytes: int = 4) -> ArrayGraph:
    indptr = np.r_[0, np.cumsum([len(neighbours) for neighbours in lists])].astype(np.int64)
    ids = np.array([v for neighbours in lists for v in neighbours], np.int32 if id_bytes == 4 else np.int64)
    return ArrayGraph(indptr, ids)


def random_graph(n: int, mean_degree: float, seed: int = 0, id_bytes: int = 4) -> ArrayGraph:
    """Heavy-tailed degrees, isolated nodes, self-loops and repeated edges."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.pareto(1.2, n) * mean_degree / 3, 4 * n).astype(np.int64)
    degrees[rng.random(n) < 0.1] = 0
    indptr = np.r_[0, np.cumsum(degrees)].astype(np.int64)
    ids = (rng.random(indptr[-1]) ** 2 * n).astype(np.int64)
    ids = ids[np.lexsort((ids, np.repeat(np.arange(n), degrees)))]
    return ArrayGraph(indptr, ids.astype(np.int32 if id_bytes == 4 else np.int64))


@st.composite
def graphs(draw: st.DrawFn) -> ArrayGraph:
    n = draw(st.integers(1, 24))
    neighbours = st.lists(st.integers(0, n - 1), max_size=draw(st.sampled_from([0, 2, 6, 40])))
    return graph_of(draw(st.lists(neighbours, min_size=n, max_size=n)), draw(st.sampled_from([4, 8])))
