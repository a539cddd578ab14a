"""Alias tables of neighbour lists in a run file, where weights do not fit the memory: draws read those columns that they need."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featstore._core import weighted as _core
from featstore._core.sampler import Hops
from featstore.config import format_size
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool
from featstore.graph.feature import FeatureStore
from featstore.sampling.orderedweights import as_doubles, spilled_bytes, weights_in_order
from featstore.sampling.scratch import Int64s
from featstore.storage.format import sums_seed
from featstore.storage.layout import RowLayout
from featstore.storage.rundir import RunDirectory, free_share, runs_directory
from featstore.storage.writer import RowFileWriter
from featstore.topology.types import EdgeType

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["COLUMN_BYTES", "NO_COLUMNS", "AliasTables", "checked_before"]

Doubles = npt.NDArray[np.float64]

COLUMN_BYTES = 8
NO_COLUMNS = np.zeros(0, np.float64)
_DISK_FRACTION = 1 / 2  # of the free disk
_WRITE_BYTES = 1 << 18  # of the writer's two buffers
_LISTS, _EDGES = 1 << 16, 1 << 15  # at once, but for a longer list


@contextmanager
def checked_before(store: FeatureStore) -> Iterator[None]:
    """Raise CorruptionError for weights that turn out to be none, as they were good when they were checked."""
    try:
        yield
    except ArithmeticError as error:
        text = f"edge feature {store.name!r}: {error}, and was not when it was checked"
        raise CorruptionError(text, store.source.path) from None


class AliasTables:
    """The alias tables of a type of edges (``kernels/weighted.h``), 8 bytes an edge, in a run file that goes with this object.

    Parameters
    ----------
    g : OutOfCoreGraph
    store : FeatureStore
        The weights: an edge feature, in the order of the input.
    kind : EdgeType
        The type of edges.

    Raises
    ------
    BudgetError
        What is left of the budget is less than 2 MB, 8 bytes an edge of the longest list, and what
        :func:`~featstore.sampling.orderedweights.weights_in_order` needs.
    CorruptionError, OSError
        Reading or writing failed, as where the disk has no room (ENOSPC).

    Notes
    -----
    A table is made of a whole list, once. A draw looks at few columns of a long one.
    """

    def __init__(self, g: OutOfCoreGraph, store: FeatureStore, kind: EdgeType) -> None:
        self._kind, self.is_damaged = kind, False
        numbers, folder = g.topology.edge_ids, runs_directory(g.path)
        needed = kind.n_edges * COLUMN_BYTES + (0 if numbers is None else spilled_bytes(store, numbers, kind.n_edges))
        free = free_share(os.path.dirname(folder) or ".", _DISK_FRACTION)
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"alias tables of weights take {format_size(needed)}, and half of the free disk is {format_size(free)}",
                folder,
            )
        self._runs = RunDirectory(folder)
        try:
            record = self._write(g, store)
            path = self._runs.file("columns")
            self._runs.file("columns.sums")
            seed = record.seed
            self._file = g.reader.open(
                path, layout=record.layout, n_rows=record.n_rows, seed=seed, sums_seed=sums_seed(seed), n_bytes=record.n_bytes
            )
        except BaseException:
            self._runs.close()
            raise

    def _write(self, g: OutOfCoreGraph, store: FeatureStore) -> Any:
        layout = RowLayout(COLUMN_BYTES, 1, COLUMN_BYTES)
        options: Any = {"kind": "alias tables", "dtype": "float32", "buffer_bytes": _WRITE_BYTES}
        most = max(_EDGES, g.topology.largest_degree)
        with (
            g.budget.reserve("alias tables being made", _WRITE_BYTES + most * COLUMN_BYTES),
            RowFileWriter(self._runs.path, "columns", layout, **options) as writer,
        ):
            for columns in self._columns(g, store, np.empty(most, np.float64)):
                writer.write(columns.view(np.uint8).reshape(len(columns), COLUMN_BYTES))
            assert writer.n_rows == self._kind.n_edges
            return writer.commit()

    def _columns(self, g: OutOfCoreGraph, store: FeatureStore, buffer: Doubles) -> Iterator[Doubles]:
        """Yield the tables of some lists at a time, in their order."""
        kind, numbers = self._kind, g.topology.edge_ids
        weights: Generator[npt.NDArray[Any], None, None]
        if numbers is None:
            weights = (as_doubles(rows) for _, rows in store.blocks())
        else:
            weights = weights_in_order(store, kind, numbers, self._runs.path, g.budget)
        end = kind.first_list + kind.n_lists
        with closing(weights):
            source = _Values(weights)
            for first in range(kind.first_list, end, _LISTS):
                offsets = g.topology.offsets_between(first, min(first + _LISTS, end)) - kind.first_edge
                begin = 0
                while begin < len(offsets) - 1:
                    stop = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + _EDGES, "right")) - 1)
                    columns = buffer[: int(offsets[stop] - offsets[begin])]
                    source.fill(columns)
                    with checked_before(store):
                        _core.make_columns(columns, offsets[begin : stop + 1] - offsets[begin])
                    yield columns
                    begin = stop

    def read(
        self,
        positions: Int64s,
        pool: BufferPool,
        chosen: tuple[Hops, int, int],
        first: Int64s,
        n_trials: int,
        before: Doubles = NO_COLUMNS,
    ) -> Doubles:
        """Read the columns of stored edges behind those of ``before``, and check that they name edges of their lists.

        Parameters
        ----------
        positions : int64 array
            Overwritten.
        pool : BufferPool
        chosen : (Hops, int, int)
            The lists ``begin … end - 1`` of a hop.
        first : int64 array
            Where the columns of each list begin, as ``_core.weighted.turn`` and ``lacking`` tell.
        n_trials : int
            As for ``_core.weighted.turn``.

        Raises
        ------
        CorruptionError
            A column is damaged, which is found with ``verify="off"``, too. The object then ``is_damaged``.
        """
        if self._kind.first_edge:
            positions -= self._kind.first_edge
        n, n_more = len(before), len(positions)
        columns = pool.array((n + n_more,), np.float64)
        columns[:n] = before
        try:
            self._file.gather(positions, columns[n:].view(np.uint8).reshape(n_more, COLUMN_BYTES))
            if _core.first_bad_column(*chosen, columns, first, n_trials, n) >= 0:
                raise CorruptionError(
                    "an alias table of weights names edges that its list has not: make the sampler again", self._file.path
                )
        except CorruptionError:
            self.is_damaged = True
            raise
        return columns

    def close(self) -> None:
        """Remove the file; may be called again."""
        self._file.close()
        self._runs.close()


class _Values:
    """The values of several arrays, one after the other."""

    def __init__(self, arrays: Iterator[npt.NDArray[Any]]) -> None:
        self._arrays, self._left = arrays, np.zeros(0)

    def fill(self, out: Doubles) -> None:
        """Copy the next values."""
        n = 0
        while n < len(out):
            if not len(self._left):
                self._left = next(self._arrays)
            some = min(len(self._left), len(out) - n)
            out[n : n + some], self._left = self._left[:some], self._left[some:]
            n += some
