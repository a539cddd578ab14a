"""Edges in files, in any of their forms, as checked blocks; errors name the file, and the line or the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.arrays import MemberSource
from featstore.adapters.datasets.csvfiles import CsvSource
from featstore.creation.inputedges import CscInput, EdgeBlocks, not_a_node
from featstore.creation.source import NpySource, Source
from featstore.errors import FormatError

__all__ = ["EdgeList", "RepeatedRows"]

Int64s = npt.NDArray[np.int64]

_BLOCK_EDGES: Final = 1 << 17  # so that blocks of 16 bytes an edge have 2 MiB


class EdgeList:
    """Edges of a file: sources, and destinations, as ids within their types.

    Parameters
    ----------
    name : str
        The file, and the array in it, for messages.
    n_edges : int
    blocks : callable
        ``blocks(n)`` yields integer arrays ``[2, k]`` of about ``n`` edges, in order; ``[3, k]`` and others are an error.
    n_sources, n_destinations : int
    place : callable
        ``place(row, edge)`` says where an id is, for messages.
    """

    def __init__(
        self,
        name: str,
        n_edges: int,
        blocks: Callable[[int], Iterator[npt.NDArray[Any]]],
        n_sources: int,
        n_destinations: int,
        place: Callable[[int, int], str],
    ) -> None:
        self.name, self.n_edges = name, n_edges
        self._blocks, self._place = blocks, place
        self._bounds = n_sources, n_destinations
        self._counts: dict[str, int] = {}
        self._key = "loops"

    def count_in(self, counts: dict[str, int], name: str) -> None:
        """Put the number of self loops into ``counts``, once all edges are read."""
        self._counts, self._key = counts, f"loops {name}"

    @property
    def n_loops(self) -> int:
        return self._counts[self._key]

    @classmethod
    def of(cls, source: Source, n_sources: int, n_destinations: int, *, pairs: bool, n_edges: int | None = None) -> EdgeList:
        """Make the edges of an array: ``[E, 2]`` if ``pairs``, else ``[2, E]``; FormatError for other shapes and numbers.

        ``n_edges`` is the number that another file names.
        """
        shape, path = source.shape, source.name
        if len(shape) != 2 or shape[1 if pairs else 0] != 2:
            raise FormatError(f"{path} must have shape {'[E, 2]' if pairs else '[2, E]'}, not {list(shape)}")
        if "int" not in source.dtype:
            raise FormatError(f"{path} must hold integers, not {source.dtype}")
        n = shape[0 if pairs else 1]
        if n_edges is not None and n != n_edges:
            raise FormatError(f"{path} has {n} edges; expected {n_edges}")

        def blocks(k: int) -> Iterator[npt.NDArray[Any]]:
            if isinstance(source, CsvSource):
                return (rows.T for rows in source.arrays())
            if pairs:
                return (rows.T for rows in source.values(k * source.row_bytes))
            assert isinstance(source, (NpySource, MemberSource))
            return source.columns(16 * k) if n else iter(())

        def place(row: int, edge: int) -> str:
            if isinstance(source, CsvSource):
                return f"{path}, line {edge + 1}"
            return f"{path}[{edge}, {row}]" if pairs else f"{path}[{row}, {edge}]"

        return cls(path, n, blocks, n_sources, n_destinations, place)

    @classmethod
    def of_lists(cls, name: str, indptr: Source, indices: Source, n_columns: int, *, from_rows: bool) -> EdgeList:
        """Make the edges of compressed rows, one list of columns a row; ``from_rows``: the rows are the sources."""
        try:
            lists = CscInput(indptr, indices, n_columns)
            lists.check_offsets()
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise ValueError(f"{name}: {error}") from None

        def blocks(k: int) -> Iterator[npt.NDArray[Any]]:
            for columns, rows in lists.pairs(k, 16 * k):
                yield np.stack((rows, columns) if from_rows else (columns, rows))

        bounds = (lists.num_nodes, n_columns) if from_rows else (n_columns, lists.num_nodes)
        return cls(name, lists.num_edges, blocks, *bounds, lambda row, edge: f"{name}: indices[{edge}]")

    @classmethod
    def of_columns(cls, name: str, sources: Source, destinations: Source, n: int) -> EdgeList:
        """Make the edges of two arrays ``[E]``; FormatError if their lengths or dtypes are wrong."""
        for each in (sources, destinations):
            if len(each.shape) != 1 or "int" not in each.dtype:
                raise FormatError(f"{each.name} must hold integers [E], not {each.dtype} {list(each.shape)}")
        if sources.n_rows != destinations.n_rows:
            raise FormatError(f"{sources.name} has {sources.n_rows} entries, but {destinations.name} has {destinations.n_rows}")

        def blocks(k: int) -> Iterator[npt.NDArray[Any]]:
            pieces = (each.values(k * each.row_bytes) for each in (sources, destinations))
            done = 0
            for pair in zip(*pieces, strict=True):
                for source, each in zip((sources, destinations), pair, strict=True):
                    if each.dtype.kind == "u" and len(each) and int(each.max()) >= n:  # before int64, which would change it
                        at = int((each >= n).argmax())
                        raise not_a_node(f"{source.name}[{done + at}]: {int(each[at])}", n)
                done += len(pair[0])
                yield np.stack([each.astype(np.int64) for each in pair])

        return cls(name, sources.n_rows, blocks, n, n, lambda row, edge: f"{(sources, destinations)[row].name}[{edge}]")

    def stream(self, *, flip: bool = False, both: bool = False) -> EdgeBlocks:
        """Make the checked blocks, int64 ``[2, k]``.

        ``flip`` exchanges sources and destinations; with ``both`` each edge is followed by its reverse.
        """
        return EdgeBlocks(self.n_edges * (1 + both), self._stream(flip, both))

    def _stream(self, flip: bool, both: bool) -> Iterator[Int64s]:
        done = n_loops = 0
        for block in self._blocks(_BLOCK_EDGES):
            ids = block.astype(np.int64, copy=False)  # a uint64 beyond int64 turns negative, which no id may be
            for row, bound in enumerate(self._bounds):
                if ids.shape[1] and (int(ids[row].min()) < 0 or int(ids[row].max()) >= bound):
                    at = int(((ids[row] < 0) | (ids[row] >= bound)).argmax())
                    raise not_a_node(f"{self._place(row, done + at)}: {int(block[row, at])}", bound)
            n_loops += int((ids[0] == ids[1]).sum())
            done += ids.shape[1]
            if both:
                yield np.stack((ids, ids[::-1]), axis=2).reshape(2, -1)
            else:
                yield ids[::-1] if flip else ids
        self._counts[self._key] = n_loops


class RepeatedRows(Source):
    """The rows of another source, each of them twice: features of edges that are followed by their reverses."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, source.dtype, (2 * source.n_rows, *source.shape[1:]), may_be_empty=True)
        self._source = source

    def blocks(self, max_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        for block in self._source.blocks(max(1, max_bytes // 2)):
            yield np.repeat(block, 2, axis=0)
