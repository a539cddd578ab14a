"""Blockwise passes: sums of the rows of each node's in-neighbours, for fields larger than memory.

Nodes are taken in blocks whose sums fit the memory. For each block the neighbour lists are read, and then the rows once, in
sequence: a row is added to the sum of every node of the block whose list names it. Rows come in ascending order, as lists do. So
each sum is made in the order of its list, and has the same bits for all sizes of blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore._core import aggregate as _core
from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError, CorruptionError
from featstore.gather.buffers import empty_tensor, huge_array
from featstore.gather.doublebuffer import double_buffer
from featstore.gather.patchedrows import PatchedRows
from featstore.storage.rowfile import RowFile
from featstore.topology.edgelists import EdgeLists
from featstore.topology.liststream import stream_bytes

__all__ = ["OPS", "PassCosts", "Passes", "StoredRows", "SummedBlock", "check_op", "summed_dtype"]

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

OPS: Final = ("mean", "sum", "gcn")

MOST_RUN_BYTES: Final = 64 << 20  # rows that are read at once
MOST_LISTS: Final = 4 << 20  # bytes of two blocks of lists as they are read, see stream_bytes
LEAST_LISTS: Final = 16 << 10
LISTS_FRACTION: Final = 1 / 32  # of the memory, for the two blocks of lists
_LEAST_IDS: Final = 1 << 10  # of a list that is summed in stretches
_NODE_BYTES: Final = 48  # of a node of a block beside its sum and its list: degree, cursors, and arrays for cutting blocks
_FOUND_BYTES: Final = 64  # of a node whose list is being read: its number, offset and degree, and scratch
RUN_DIVISORS: Final = (16, 32, 64)  # each of two runs of rows gets the memory divided by one of these
SHORT_RUNS: Final = 256  # estimated time of a pass: 1 + divisor / SHORT_RUNS, as each run of rows moves the sums once more
_EXACT_IN_FLOAT: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16})


def check_op(op: object) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype to which numbers of ``dtype`` are converted before adding: float32 if it is exact, else float64."""
    return torch.float32 if dtype == torch.float32 or dtype in _EXACT_IN_FLOAT else torch.float64


@dataclass(frozen=True)
class StoredRows:
    """A field whose rows are summed: each row has ``width`` numbers of ``dtype``; row 0 is row ``first`` of the file."""

    file: RowFile | PatchedRows
    dtype: torch.dtype
    width: int
    first: int = 0


@dataclass
class PassCosts:
    """Costs of passes: node blocks, ids of their lists, bytes of rows read, and seconds of reading lists, waiting and summing."""

    blocks: int = 0
    edges: int = 0
    bytes_read: int = 0
    lists_s: float = 0.0
    wait_s: float = 0.0
    sum_s: float = 0.0


@dataclass(frozen=True)
class SummedBlock:
    """Aggregated rows of nodes ``first … stop - 1``: float32 or float64 ``[stop - first, width]``, valid until the next block."""

    first: int
    stop: int
    sums: npt.NDArray[Any]


class Passes:
    """Aggregated rows of destinations ``first … stop - 1``, block by block; a context manager, which holds the memory.

    Nodes are named by their ids within the types of the edges' two ends.

    Parameters
    ----------
    edges : EdgeLists
    rows : StoredRows
        One row a source.
    op : {"mean", "sum", "gcn"}
        See :meth:`featstore.OutOfCoreGraph.aggregate`. ``"gcn"`` is for edges whose two ends are of one type.
    sum_dtype : torch.dtype
        float32 or float64; not narrower than :func:`summed_dtype` of the rows.
    budget : Budget
        Counts all memory as ``holder``; BudgetError if the budget, or ``memory``, is not enough for one node.
    memory : int
        Most bytes to hold.
    n_threads : int
        Number of threads that add.
    holder : str
    progress : callable
        Gets the bytes of :attr:`total_bytes` that were done since its last call.
    first, stop : int
        By default all destinations.
    """

    def __init__(
        self,
        edges: EdgeLists,
        rows: StoredRows,
        op: str,
        sum_dtype: torch.dtype,
        budget: Budget,
        memory: int,
        n_threads: int,
        holder: str,
        progress: Callable[[int], None] = lambda n_bytes: None,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        self.costs = PassCosts()
        self._edges, self._rows, self._op = edges, rows, op
        self._sum_item, self._progress, self._n_threads = sum_dtype.itemsize, progress, n_threads
        self._item = summed_dtype(rows.dtype).itemsize
        assert self._item <= self._sum_item
        self._stack = ExitStack()
        self._held: Reservation | None = None
        n, row_bytes = edges.n_sources, rows.file.row_bytes
        is_gcn = op == "gcn"
        table_bytes = 8 * n if is_gcn else 0
        self._converts = rows.dtype not in (torch.float32, torch.float64)
        per_row = 2 * row_bytes + rows.width * self._item * self._converts
        self._node_bytes = rows.width * self._sum_item + _NODE_BYTES
        least_block = self._node_bytes + _LEAST_IDS * edges.id_bytes
        least = table_bytes + per_row + least_block + _reading_bytes(LEAST_LISTS)
        if memory < least:
            needed = budget.total - memory + least
            raise BudgetError(f"{holder} needs {least} bytes, and {max(0, memory)} are left", needed)
        memory -= table_bytes
        self._lists = min(MOST_LISTS, max(LEAST_LISTS, int(memory * LISTS_FRACTION)))
        total = edges.n_lists * self._node_bytes + edges.n_edges * edges.id_bytes
        least_cost = math.inf
        for divisor in RUN_DIVISORS:
            run_bytes = min(2 * MOST_RUN_BYTES, max(per_row, 2 * memory // divisor))
            run_rows = max(1, min(n, run_bytes // per_row))
            of_blocks = memory - run_rows * per_row - _reading_bytes(self._lists)
            if of_blocks < least_block:
                continue
            cost = -(-total // of_blocks) * (SHORT_RUNS + divisor)
            if cost < least_cost:
                least_cost, self._run_rows, self._of_blocks = cost, run_rows, of_blocks
        if least_cost == math.inf:
            self._lists, self._run_rows = LEAST_LISTS, 1
            self._of_blocks = memory - per_row - _reading_bytes(LEAST_LISTS)
        try:
            self._held = budget.reserve(holder, table_bytes + memory - self._of_blocks)
            self._stack.callback(self._held.release)
            self._scale: npt.NDArray[np.float64] | None = None
            # Reserve the bytes of the largest block, not the most that a block may have.
            self._blocks = list(self._cut(first, edges.n_lists if stop is None else stop))
            self._most_nodes = max((stop - begin for begin, stop, _ in self._blocks), default=0)
            self._held.resize(self._held.n_bytes + max((n_bytes for _, _, n_bytes in self._blocks), default=0))
            self._n_runs = -(-n // self._run_rows)
            self._halves = huge_array(2 * self._run_rows * row_bytes).reshape(2, self._run_rows, row_bytes)
            self._wide = empty_tensor((self._run_rows * rows.width if self._converts else 0,), summed_dtype(rows.dtype))
            self._sums = huge_array(self._most_nodes * rows.width * self._sum_item)
            if is_gcn:
                self._scale = self._normalisation()
        except BaseException:
            self._stack.close()
            raise

    @property
    def n_blocks(self) -> int:
        """Number of blocks, each of which is one pass over the rows."""
        return len(self._blocks)

    @property
    def total_bytes(self) -> int:
        """Total of the bytes that ``progress`` gets."""
        return self.n_blocks * self._edges.n_sources * self._rows.file.row_bytes

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- blocks ------------------------------------------------------------------------------------------------------------------

    def _cut(self, first: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first node, the end (last node + 1) and the bytes of blocks before node ``n`` that fit the memory.

        A node whose list does not fit is a block of its own.
        """
        id_bytes = self._edges.id_bytes
        while first < n:
            most = min(n - first, max(1, self._of_blocks // self._node_bytes))
            degrees = self._edges.degrees(first, first + most)
            cost = np.cumsum(degrees)
            cost *= id_bytes
            cost += np.arange(1, most + 1) * self._node_bytes
            fit = int(np.searchsorted(cost, self._of_blocks, "right"))
            yield first, first + max(1, fit), int(cost[fit - 1]) if fit else self._of_blocks
            first += max(1, fit)

    def blocks(self) -> Iterator[SummedBlock]:
        """Yield all blocks in order; raises CorruptionError, OSError, ClosedError."""
        for first, stop, _ in self._blocks:
            yield self._summed(first, stop)

    def _summed(self, first: int, stop: int) -> SummedBlock:
        n, width = stop - first, self._rows.width
        sums = self._sums[: n * width * self._sum_item]
        sums[:] = 0
        degrees = self._edges.degrees(first, stop)
        n_edges = int(degrees.sum())
        if self._node_bytes + n_edges * self._edges.id_bytes > self._of_blocks and n == 1:
            self._sum_long_list(first, n_edges, sums)
        else:
            begin = time.perf_counter()
            ids = self._read_lists(first, stop, n_edges)
            self.costs.lists_s += time.perf_counter() - begin
            ends = np.cumsum(degrees)
            self._sum_lists(ids, ends - degrees, ends, sums, first, first if self._scale is not None else -1)
        self._finish(sums, first, stop, degrees)
        self.costs.blocks += 1
        self.costs.edges += n_edges
        return SummedBlock(first, stop, sums.view(np.float32 if self._sum_item == 4 else np.float64).reshape(n, width))

    # -- lists -------------------------------------------------------------------------------------------------------------------

    def _read_lists(self, first: int, stop: int, n_edges: int) -> npt.NDArray[Any]:
        """Read the lists of nodes ``first … stop - 1``, one after the other."""
        ids = np.empty(n_edges, self._edges.id_dtype)
        done = 0
        for piece in self._pieces(first, stop):
            ids[done : done + len(piece)] = piece
            done += len(piece)
        assert done == n_edges, (done, n_edges)
        self._edges.to_local(ids)
        return ids

    def _pieces(self, first: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the stored ids of consecutive lists, piece by piece; a piece is valid until the next one is requested."""
        n = self._lists // _FOUND_BYTES
        for low in range(first, stop, n):
            for found in self._edges.lists(low, min(stop, low + n), self._lists):
                yield found.ids[max(0, int(found.at[0])) : int(found.at[-1] + found.degree[-1])]

    def _stretches(self, node: int, degree: int, most: int) -> Iterator[npt.NDArray[Any]]:
        """Yield a list in stretches of ``most`` ids; a stretch is valid until the next one is requested."""
        ids = np.empty(min(most, degree), self._edges.id_dtype)
        n = 0
        for piece in self._pieces(node, node + 1):
            done = 0
            while done < len(piece):
                k = min(len(piece) - done, len(ids) - n)
                ids[n : n + k] = piece[done : done + k]
                done, n = done + k, n + k
                if n == len(ids):
                    self._edges.to_local(ids)
                    yield ids
                    n = 0
        if n:
            self._edges.to_local(ids[:n])
            yield ids[:n]

    def _sum_long_list(self, node: int, degree: int, sums: UInt8s) -> None:
        """Sum one list that does not fit the memory, one stretch after the other; each stretch reads only its span of rows."""
        most = (self._of_blocks - self._node_bytes) // self._edges.id_bytes // 2  # room for a copy without the node itself
        has_self, n_left = self._scale is None, degree
        for stretch in self._stretches(node, degree, most):
            ids, n_left = stretch, n_left - len(stretch)
            if self._scale is not None:
                ids = ids[ids != node]
            if not has_self and (n_left == 0 or (len(ids) and ids[-1] > node)):
                ids, has_self = np.insert(ids, np.searchsorted(ids, node), node), True
            self._sum_lists(ids, np.zeros(1, np.int64), np.array([len(ids)]), sums, node, -1)

    def _normalisation(self) -> npt.NDArray[np.float64]:
        """Compute 1/√(in-degree + 1) of every node; edges from a node to itself do not count."""
        edges, n_nodes = self._edges, self._edges.n_lists
        scale = np.empty(n_nodes, np.float64)
        first = 0
        while first < n_nodes:
            most = min(n_nodes - first, max(1, self._of_blocks // _NODE_BYTES))
            cost = np.cumsum(edges.degrees(first, first + most)) * edges.id_bytes + np.arange(1, most + 1) * _NODE_BYTES
            n = max(1, int(np.searchsorted(cost, self._of_blocks, "right")))
            degrees = edges.degrees(first, first + n)
            n_self = np.zeros(n, np.int64)
            if n > 1 or int(cost[0]) <= self._of_blocks:
                ends = np.cumsum(degrees)
                ids = self._read_lists(first, first + n, int(ends[-1]))
                _core.count_self(_bytes(ids), edges.id_bytes, ends - degrees, ends, first, n_self)
            else:
                stored = first + edges.kind.src.first
                n_self[0] = sum(np.count_nonzero(piece == stored) for piece in self._pieces(first, first + 1))
            scale[first : first + n] = degrees - n_self + 1
            first += n
        return np.divide(1.0, np.sqrt(scale, out=scale), out=scale)

    # -- sums --------------------------------------------------------------------------------------------------------------------

    def _sum_lists(
        self, ids: npt.NDArray[Any], cursor: Int64s, ends: Int64s, sums: UInt8s, first_node: int, self_first: int
    ) -> None:
        """Read once, in sequence, the runs of rows that any list names, and add the rows to the sums."""
        rows, n, lists, id_bytes = self._rows, len(ends), _bytes(ids), self._edges.id_bytes
        nexts = np.empty(n, np.int64)
        _core.begin(lists, id_bytes, cursor, ends, nexts)
        wanted = np.zeros(self._n_runs, np.uint8)
        if not _core.mark_runs(lists, id_bytes, self._run_rows, wanted):
            raise self._damaged(first_node)
        if self_first >= 0:
            wanted[self_first // self._run_rows : (self_first + n - 1) // self._run_rows + 1] = 1
        bounds = self._bounds(ends)
        is_wanted = np.flatnonzero(wanted)
        n_rows, step, at = self._edges.n_sources, self._run_rows, rows.first
        runs = ((at + int(k) * step, self._halves[i % 2, : min(step, n_rows - int(k) * step)]) for i, k in enumerate(is_wanted))
        self._progress((self._n_runs - len(is_wanted)) * step * rows.file.row_bytes)
        asked = time.perf_counter()
        for first_of_file, found in double_buffer(rows.file.read, runs):
            begin, first = time.perf_counter(), first_of_file - at
            numbers = self._numbers(found)
            scale = None if self._scale is None else self._scale[first : first + len(found)]
            bad = _core.accumulate(
                numbers,
                self._item,
                first,
                rows.width,
                lists,
                id_bytes,
                cursor,
                ends,
                nexts,
                sums,
                self._sum_item,
                scale,
                self_first,
                bounds,
                self._n_threads,
            )
            if bad >= 0:
                raise self._damaged(first_node + bad)
            self.costs.bytes_read += found.nbytes
            self._progress(found.nbytes)
            self.costs.wait_s += begin - asked
            asked = time.perf_counter()
            self.costs.sum_s += asked - begin

    def _numbers(self, found: UInt8s) -> UInt8s:
        """View rows as the bytes of float32 or float64 numbers; other dtypes are converted."""
        flat = found.reshape(-1)
        if not self._converts:
            return flat
        given = torch.from_numpy(flat).view(self._rows.dtype)
        wide = self._wide[: len(given)]
        wide.copy_(given)
        return wide.numpy().view(np.uint8)

    def _bounds(self, ends: Int64s) -> Int64s:
        """Divide the nodes of a block among the threads: four parts for each thread, of about equal weight."""
        n_parts = 1 if self._n_threads == 1 else 4 * self._n_threads
        weight = ends + np.arange(len(ends))
        inner = np.searchsorted(weight, np.linspace(0, weight[-1], n_parts + 1)[1:-1])
        return np.array([0, *inner, len(ends)])

    def _finish(self, sums: UInt8s, first: int, stop: int, degrees: Int64s) -> None:
        if self._op == "sum":
            return
        factors = np.maximum(degrees, 1).astype(np.float64) if self._scale is None else self._scale[first:stop]
        _core.finish(sums, self._sum_item, self._rows.width, factors, self._op == "mean", self._n_threads)

    def _damaged(self, node: int) -> CorruptionError:
        return CorruptionError(f"the neighbours of node {node} or one after it do not ascend", self._edges.path)


def _reading_bytes(block_bytes: int) -> int:
    """Count the bytes of buffers for reading lists in blocks of ``block_bytes``."""
    return stream_bytes(block_bytes) + block_bytes


def _bytes(ids: npt.NDArray[Any]) -> UInt8s:
    return ids.view(np.uint8)
