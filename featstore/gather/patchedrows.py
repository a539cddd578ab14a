"""Rows of a file of which blocks were rewritten later: patch files hold the new blocks, and later rows than the file has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore._core.io import MAX_SORTED_ROWS
from featstore.budget import Budget
from featstore.distinct import distinct
from featstore.errors import CorruptionError
from featstore.gather.plan import Addresses
from featstore.storage.layout import RowLayout
from featstore.storage.pagestream import PageStream
from featstore.storage.rowfile import ReadStats, RowFile
from featstore.storage.stripedrows import dividing

__all__ = ["PatchedRows", "Segments", "patch_table_bytes", "segments"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
T = TypeVar("T")

_FEW = 8  # segments that are read one by one
_LONG_PAGES = 128  # of a mean segment: a drive reaches its bandwidth


class Segments(NamedTuple):
    """Blocks behind each other in one file, from block 0 on without gaps.

    ``starts`` and ``ends`` are the first block of each segment and the block behind its last; ``file_of`` is the number of its
    file, 0 for the base; ``moved`` is what is added to the number of a block for its number in the file. ``bits`` have a bit a
    block: whether it is patched.
    """

    starts: Int64s
    ends: Int64s
    file_of: npt.NDArray[np.int32]
    moved: Int64s
    bits: Uint8s


def patch_table_bytes(layout: RowLayout, n_rows: int, lengths: Sequence[int]) -> int:
    """Bound the bytes of the tables of rows over which patches of ``lengths`` blocks lie."""
    return 28 * (2 * sum(lengths) + 1) + n_rows // (8 * layout.block[0]) + 1 if lengths else 0


def segments(layout: RowLayout, n_rows: int, lengths: Sequence[int], tables: Sequence[Int64s], paths: Sequence[str]) -> Segments:
    """Find which file has which blocks, given the rows of the base and of each patch, and the blocks of each patch.

    CorruptionError, with one of ``paths``, if a table of blocks is not ascending, or rows lie in no file.
    """
    unit = layout.block[0]
    n_blocks = -(-n_rows // unit)
    for blocks, path in zip(tables, paths[1:], strict=True):
        if not len(blocks) or int(blocks[0]) < 0 or int(blocks[-1]) >= n_blocks or not bool((np.diff(blocks) > 0).all()):
            raise CorruptionError("the table of its blocks is wrong", path)
    # The last patch of a block comes first here, and np.unique finds the first of equals.
    numbers = np.concatenate([np.empty(0, np.int64), *reversed(tables)])
    owners = np.concatenate([np.full(len(b), k, np.int32) for k, b in reversed(list(enumerate(tables, 1)))])
    slots = np.concatenate([np.arange(len(blocks)) for blocks in reversed(tables)])
    blocks, first = np.unique(numbers, return_index=True)
    owners, moved = owners[first], slots[first] - blocks
    begins = np.ones(len(blocks), np.bool_)
    begins[1:] = (np.diff(blocks) != 1) | (np.diff(owners) != 0) | (np.diff(moved) != 0)
    at = np.flatnonzero(begins)
    behind = np.concatenate([np.zeros(1, np.int64), 1 + blocks[np.append(at[1:], len(blocks)) - 1]])
    behind = behind[~np.isin(behind, blocks[at]) & (behind < n_blocks)]  # where the base goes on
    starts = np.concatenate([blocks[at], behind])
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    file_of = np.concatenate([owners[at], np.zeros(len(behind), np.int32)])[order]
    moved = np.concatenate([moved[at], np.zeros(len(behind), np.int64)])[order]
    ends = np.append(starts[1:], n_blocks)
    bits = np.zeros(-(-n_blocks // 8), np.uint8)
    np.bitwise_or.at(bits, blocks >> 3, np.uint8(1) << (blocks & 7).astype(np.uint8))
    last = np.minimum(ends * unit, n_rows) + moved * unit
    if (bad := np.flatnonzero(last > np.array(lengths)[file_of])).size:
        raise CorruptionError("it ends before rows that it should have", paths[int(file_of[bad[0]])])
    return Segments(starts, ends, file_of, moved, bits)


class PatchedRows:
    """Rows by number (a :class:`~featstore.gather.sources.RowSource`) of a base file and of patches over it. Thread-safe.

    Rows are divided into blocks, the fewest rows that fill whole pages (:attr:`RowLayout.block`). A patch is a row file of the
    same layout that holds some blocks, one after the other. A block lies in the last patch that has it, else in the base.
    Blocks behind each other in one file are a *segment*; a bit a block says whether it is patched, so that rows of the base take
    no other path than without patches.

    Parameters
    ----------
    base : RowFile
    patches : sequence of (RowFile, int64 array)
        Each patch and the numbers of its blocks, ascending; later patches go before earlier ones.
    n_rows : int
        At least the base's; further rows lie in patches.
    fingerprint : str
    budget : Budget
        Counts the tables, as ``patch tables``: a bit a block and 28 bytes a segment.

    Raises
    ------
    CorruptionError
        A table of blocks is not ascending, or rows lie in no file.
    """

    in_order = False

    def __init__(
        self, base: RowFile, patches: Sequence[tuple[RowFile, Int64s]], n_rows: int, fingerprint: str, budget: Budget
    ) -> None:
        self.base, self.files = base, [base, *(file for file, _ in patches)]
        self.n_rows, self.row_bytes, self.layout = n_rows, base.row_bytes, base.layout
        self.fingerprint = fingerprint
        self._budget = budget
        self._unit, self._unit_pages = base.layout.block
        lengths, paths = [file.n_rows for file in self.files], [file.path for file in self.files]
        found = segments(base.layout, n_rows, lengths, [blocks for _, blocks in patches], paths)
        if any(file.layout != base.layout for file in self.files):
            raise CorruptionError("its rows are laid out in another way than those that it patches", paths[-1])
        self._starts, self._ends, self._file_of, self._moved, self._bits = found
        self._held = budget.reserve("patch tables", sum(each.nbytes for each in found), owner=self)

    # -- as a row file -----------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.base.path

    @property
    def mode(self) -> str:
        return self.base.mode

    @property
    def stats(self) -> ReadStats:
        """Sum of the statistics of all files."""
        total = ReadStats()
        for file in self.files:
            total.add(file.stats)
        return total

    @property
    def gap_bytes(self) -> int:
        return self.base.gap_bytes

    def with_backend(self, make: Callable[[str], T]) -> T:
        return self.base.with_backend(make)

    @property
    def stream_threads(self) -> int:
        return self.base.stream_threads

    @property
    def is_direct(self) -> bool:
        return any(file.is_direct for file in self.files)

    @property
    def verifies(self) -> bool:
        return self.base.verifies

    @property
    def holds_sums(self) -> bool:
        return all(file.holds_sums for file in self.files)

    @property
    def seed(self) -> int:
        return self.base.seed

    @property
    def n_sums_pages(self) -> int:
        """Number of pages of all tables of checksums."""
        return sum(file.n_sums_pages for file in self.files)

    def duplicate(self) -> int:
        return self.base.duplicate()

    def count(self, rows: int, reads: int, n_bytes: int) -> ReadStats:
        return self.base.count(rows, reads, n_bytes)

    def sums_pages(self, first: int, n: int) -> list[npt.NDArray[np.uint64]]:
        """Get checked pages of the tables of checksums, numbered through all files."""
        found: list[npt.NDArray[np.uint64]] = []
        for file in self.files:
            begin, stop = max(first, 0), min(first + n, file.n_sums_pages)
            if begin < stop:
                found += file.sums_pages(begin, stop - begin)
            first -= file.n_sums_pages
        return found

    def check_open(self) -> None:
        for file in self.files:
            file.check_open()

    def close(self) -> None:
        """Close all files and free the tables; may be called again."""
        self._held.release()
        for file in self.files:
            file.close()

    # -- rows --------------------------------------------------------------------------------------------------------------------

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        """See :meth:`RowSource.gather <featstore.gather.sources.RowSource.gather>`; files are read one after the other."""
        if isinstance(addresses, range) and positions is None:
            return self._read(addresses.start, len(addresses), out[: len(addresses)])
        ids = np.asarray(addresses, np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.n_rows:
            bad = int(np.flatnonzero((ids < 0) | (ids >= self.n_rows))[0])
            raise IndexError(f"row {ids[bad]} at position {bad} is out of range for {self.n_rows} rows")
        cost = ReadStats()
        with dividing(self._budget, min(len(ids), MAX_SORTED_ROWS)) as n:
            for begin in range(0, len(ids), n):
                part = ids[begin : begin + n]
                if positions is not None:
                    self._gather(part, out, positions[begin : begin + n], gap_bytes, cost)
                else:
                    self._gather(part, out[begin : begin + n], None, gap_bytes, cost)
        return cost

    def _gather(self, ids: Int64s, out: Uint8s, positions: Int64s | None, gap_bytes: int | None, cost: ReadStats) -> None:
        blocks = ids // self._unit
        is_patched = (self._bits[blocks >> 3] >> (blocks & 7).astype(np.uint8)) & 1
        at = np.flatnonzero(is_patched)
        if not len(at):
            cost.add(self.base.gather(ids, out, positions, gap_bytes))
            return
        where = np.arange(len(ids)) if positions is None else positions
        if len(at) < len(ids):
            others = np.flatnonzero(is_patched == 0)
            cost.add(self.base.gather(ids[others], out, where[others], gap_bytes))
        segments = np.searchsorted(self._starts, blocks[at], side="right") - 1
        rows, file_of = ids[at] + self._moved[segments] * self._unit, self._file_of[segments]
        for number in distinct(file_of).tolist():
            mine = np.flatnonzero(file_of == number)
            cost.add(self.files[number].gather(rows[mine], out, where[at[mine]], gap_bytes))

    def read(self, first: int, n: int, out: Uint8s | None = None) -> Uint8s:
        """Read consecutive rows; see :meth:`RowFile.read`."""
        if out is None:
            out = np.empty((n, self.row_bytes), np.uint8)
        self._read(first, n, out)
        return out

    def _read(self, first: int, n: int, out: Uint8s) -> ReadStats:
        if first < 0 or first + n > self.n_rows:
            raise IndexError(f"rows {first} to {first + n} of a run are out of range for {self.n_rows} rows")
        cost = ReadStats()
        if not n:
            self.check_open()
            return cost
        low, high = first // self._unit, -(-(first + n) // self._unit)
        begin = int(np.searchsorted(self._starts, low, side="right")) - 1
        end = int(np.searchsorted(self._starts, high, side="left"))
        starts = np.maximum(self._starts[begin:end] * self._unit, first)
        stops = np.minimum(self._ends[begin:end] * self._unit, first + n)
        files, rows = self._file_of[begin:end], starts + self._moved[begin:end] * self._unit
        if end - begin <= _FEW:
            for start, stop, number, row in zip(starts.tolist(), stops.tolist(), files.tolist(), rows.tolist(), strict=True):
                cost.add(self.files[number].gather(range(row, row + stop - start), out[start - first : stop - first]))
            return cost
        # One long read of the base, old blocks included, and then the patched rows over it.
        n_base = min(n, self.base.n_rows - first)
        if n_base > 0:
            cost.add(self.base.gather(range(first, first + n_base), out[:n_base]))
        for number in distinct(files[files > 0]).tolist():
            mine = np.flatnonzero(files == number)
            counts = stops[mine] - starts[mine]
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            ids, where = np.repeat(rows[mine], counts) + within, np.repeat(starts[mine] - first, counts) + within
            cost.add(self.files[number].gather(ids, out, where))
        return cost

    # -- pages -------------------------------------------------------------------------------------------------------------------

    @property
    def has_long_runs(self) -> bool:
        """Whether a stream of all pages reads in long pieces; else :meth:`read` is faster, which reads over patched blocks."""
        return len(self._starts) * _LONG_PAGES <= int(self._ends[-1]) * self._unit_pages

    def stream(self, runs: Int64s, window_bytes: int, arena: Arena | None = None) -> PageStream:
        """Open runs of pages as one stream, in which each page comes from the file that has it; see :class:`PageStream`."""
        return PageStream(self, runs, window_bytes, arena, self.files, self._place)

    def _place(self, first: Int64s, end: Int64s) -> tuple[Int64s, Int64s, npt.NDArray[np.uint32], Int64s]:
        """Divide runs of pages among the files.

        ``first`` and ``end`` are the first page of each run and the page behind its last. Returns the same of each piece of the
        runs, the number of its file, and its first page there. Page 0 is the base's header.
        """
        pages = self._unit_pages
        starts, ends = 1 + self._starts * pages, 1 + self._ends * pages
        starts[0], ends[-1] = 0, np.iinfo(np.int64).max
        low = np.searchsorted(starts, first, side="right") - 1
        counts = np.searchsorted(starts, end, side="left") - low
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        segments = np.repeat(low, counts) + within
        begins = np.maximum(np.repeat(first, counts), starts[segments])
        stops = np.minimum(np.repeat(end, counts), ends[segments])
        return begins, stops, self._file_of[segments].astype(np.uint32), begins + self._moved[segments] * pages
