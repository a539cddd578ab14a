"""Row sources, which deliver the rows of a tier. Row files (:class:`~featstore.storage.rowfile.RowFile`) are one kind.

Any object that keeps the contract can hold a feature's rows, or a tier of its plans: several files, another machine. Its suite is
:class:`featstore.testing.RowSourceContract`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.errors import ClosedError, PluginError
from featstore.gather.plan import Addresses
from featstore.registry import is_plugin, plugin_errors, read_only, whole_number
from featstore.storage.extentmap import ExtentMap
from featstore.storage.pagestream import Arenas, arena_bytes
from featstore.storage.rowfile import ReadStats, RowFile

__all__ = ["AbsentRows", "ExtentSource", "MemorySource", "RowSource", "SourceRange", "check_source", "gather_of"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

_NOTHING = ReadStats()


class RowSource(Protocol):
    """Rows of one width, as bytes, by address. Thread-safe, unless it is read in order.

    Attributes
    ----------
    n_rows, row_bytes : int
    fingerprint : str
        Distinguishes these rows from all others, those of an earlier generation included; "" if nothing does.
    path : str
        Name of the source in errors.
    mode : str
        How rows are read, in a word or two.
    stats : ReadStats
        Reads so far.
    in_order : bool
        Whether rows come once, in order: ``n_rows`` are there now, a gather takes all of them (addresses 0, 1 …), then the next
        rows are there.
    """

    @property
    def n_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def stats(self) -> ReadStats: ...
    @property
    def in_order(self) -> bool: ...

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        """Copy row ``addresses[i]`` to row ``positions[i]`` of ``out``, for every i.

        Parameters
        ----------
        addresses : integer array, shape (k,), or range of step 1
            In ``[0, n_rows)``; any order, repeats allowed. A range is read in sequence.
        out : uint8 array, shape (m, row_bytes), C-contiguous
        positions : int64 array, shape (k,), optional
            ``0 … k-1`` if absent.
        gap_bytes : int, optional
            Gap in bytes up to which two reads are merged; ignored by sources that merge no reads.

        Returns
        -------
        ReadStats
            Cost of this call's reads; zero if the rows are in memory.

        Raises
        ------
        IndexError, ValueError
            Rows or positions are out of range, or, in order, not the rows that come next. After any error ``out`` is undefined.
        CorruptionError, OSError, BudgetError, ClosedError
        """
        ...

    def check_open(self) -> None:
        """Raise ClosedError if the source was closed."""
        ...

    def close(self) -> ReadStats | None:
        """Wait for reads under way and release everything; return the cost of reads in vain. May be called again."""
        ...


def _label(source: object) -> str:
    return f"row source {type(source).__qualname__!r}"


def check_source(source: RowSource, n_rows: int, row_bytes: int) -> None:
    """Check what a row source of another package says of itself.

    Raises
    ------
    PluginError
        A part of the contract is missing, or is of another type.
    ValueError
        It has fewer rows than ``n_rows``, or rows of another width than ``row_bytes``.
    """
    label, found = _label(source), dict[str, Any]()
    for name in ("n_rows", "row_bytes", "fingerprint", "path", "mode", "stats", "in_order", "gather", "check_open", "close"):
        with plugin_errors(label, name):
            found[name] = getattr(source, name)
    for name, kind in {"fingerprint": str, "path": str, "mode": str, "stats": ReadStats, "in_order": bool}.items():
        if not isinstance(found[name], kind):
            raise PluginError(f"{label}: {name} must be a {kind.__name__}, not a {type(found[name]).__name__}")
    for name in ("gather", "check_open", "close"):
        if not callable(found[name]):
            raise PluginError(f"{label}: {name} must be a method, not a {type(found[name]).__name__}")
    n, width = (whole_number(label, name, found[name]) for name in ("n_rows", "row_bytes"))
    if n < n_rows or width != row_bytes:
        raise ValueError(f"{label} has {n} rows of {width} bytes; a store of {n_rows} rows of {row_bytes} bytes is asked for")


def gather_of(source: RowSource) -> Callable[..., ReadStats]:
    """Get the method ``gather`` of a source; of one of another package, with a check of its answer."""
    return partial(_gathered, source) if is_plugin(source) else source.gather


def _gathered(
    source: RowSource, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
) -> ReadStats:
    """Gather from a source of another package, which gets read-only addresses; PluginError unless it returns its cost."""
    given: Any = addresses if isinstance(addresses, range) else read_only(np.asarray(addresses))
    cost = source.gather(given, out, None if positions is None else read_only(positions), gap_bytes)
    if not isinstance(cost, ReadStats):
        raise PluginError(f"{_label(source)}: gather must return ReadStats, not a {type(cost).__name__}")
    numbers = [getattr(cost, each.name) for each in fields(ReadStats)]
    if not all(isinstance(each, (int, float, np.number)) and 0 <= each < 1 << 63 for each in numbers):
        raise PluginError(f"{_label(source)}: gather must return what was read, in numbers of at least 0, not {cost}")
    return cost


class MemorySource:
    """Rows of an array in memory, uint8 ``[n, row_bytes]``, C-contiguous (:class:`RowSource`); ``n_threads`` threads copy."""

    path, mode, fingerprint, in_order = "memory", "memory", "", False

    def __init__(self, array: Uint8s, n_threads: int) -> None:
        self.array = array
        self.n_threads = n_threads
        self.n_rows, self.row_bytes = array.shape
        self.stats = ReadStats()
        self._is_closed = False

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        if self._is_closed:
            self.check_open()
        if isinstance(addresses, range):
            if addresses and not 0 <= addresses[0] <= addresses[-1] < len(self.array):
                raise IndexError(f"rows {addresses} of {len(self.array)}")
            copy_rows(self.array[addresses.start : addresses.stop], None, out, positions, self.n_threads)
        else:
            copy_rows(self.array, addresses, out, positions, self.n_threads)
        return _NOTHING

    def check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("these rows in memory were closed")

    def close(self) -> None:
        self._is_closed = True
        self.array = self.array[:0].copy()


class AbsentRows:
    """The rows of a feature that is not here: only number and width are known (:class:`RowSource`). Errors name ``path``."""

    mode, in_order = "absent", False

    def __init__(self, path: str, n_rows: int, row_bytes: int, fingerprint: str) -> None:
        self.path, self.n_rows, self.row_bytes, self.fingerprint = path, n_rows, row_bytes, fingerprint
        self.stats = ReadStats()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        reason = "these rows are not in the pack: to read them, or to make another layout, the dataset must be open"
        raise FileNotFoundError(errno.ENOENT, reason, self.path)

    gather = stream = _refuse
    layout = property(_refuse)

    def check_open(self) -> None:
        """Pass: nothing is open."""

    def close(self) -> None:
        """Pass: nothing is open."""


class SourceRange:
    """Consecutive rows of another source, numbered from 0 (:class:`RowSource`). Closing the other source closes it.

    ``whole`` is the other source, and ``first`` the row of it that is row 0 here.
    """

    in_order = False

    def __init__(self, source: RowSource, first: int, n_rows: int) -> None:
        self.whole, self.first = source, first
        self.n_rows, self.row_bytes = n_rows, source.row_bytes
        self.path, self.mode, self.stats = source.path, source.mode, source.stats
        self.fingerprint = source.fingerprint and f"{source.fingerprint}+{first}"

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        if isinstance(addresses, range):
            low, high = addresses.start, addresses.stop - 1
            shifted: Addresses = range(low + self.first, high + 1 + self.first)
        else:
            low, high = (int(addresses.min()), int(addresses.max())) if len(addresses) else (0, -1)
            shifted = np.asarray(addresses, np.int64) + self.first
        if len(addresses) and not 0 <= low <= high < self.n_rows:
            raise IndexError(f"rows {low} to {high} of {self.n_rows}")
        return self.whole.gather(shifted, out, positions, gap_bytes)

    def check_open(self) -> None:
        self.whole.check_open()

    def close(self) -> None:
        """Pass: the other source is closed by its owner."""


class ExtentSource:
    """The tier ``PACKED`` of a run of batches: each gather takes the next non-empty extent of ``order``, whole.

    A :class:`RowSource` that is read in order; one thread at a time. Reads run ahead of the gathers, across extents, through a
    window of :class:`PageStream`. ``arenas`` keep the window's memory for another source.
    """

    in_order = True

    def __init__(self, file: RowFile, extents: ExtentMap, order: Int64s, window_bytes: int, arenas: Arenas | None = None) -> None:
        self.path, self.mode, self.fingerprint = file.path, file.mode, file.fingerprint
        self.row_bytes = extents.row_bytes
        self.stats = ReadStats()
        order = np.asarray(order, np.int64)
        order = order[extents.n_rows[order] > 0]
        self._file = file
        self._n_rows = extents.n_rows[order]
        self._runs = np.stack([extents.first_page[order], extents.n_pages[order]], axis=1)
        self._next = 0
        self._begin(window_bytes, arenas or Arenas(0))

    def _begin(self, window_bytes: int, arenas: Arenas) -> None:
        """Begin to read the extents that are left."""
        (arena,) = arenas.of(arena_bytes(window_bytes))
        self._first = self._next
        self._pages = np.cumsum(self._runs[self._next :, 1])
        self._stream = self._file.stream(self._runs[self._next :], window_bytes, arena)
        self._counted = ReadStats()  # of this stream
        self._stream.feed(0)

    def _count(self, n_rows: int) -> ReadStats:
        core, before = self._stream.core, self._counted
        now = self._counted = ReadStats(0, core.n_reads, 0, core.read_bytes, core.waited_s)  # the stream reads on meanwhile
        reads, n_bytes = now.reads - before.reads, now.bytes_read - before.bytes_read
        cost = ReadStats(n_rows, reads, n_rows * self.row_bytes, n_bytes, now.waited_s - before.waited_s)
        self.stats.add(cost)
        return cost

    @property
    def n_rows(self) -> int:
        """Rows of the next extent; 0 after the last."""
        return int(self._n_rows[self._next]) if self._next < len(self._n_rows) else 0

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        """Take the next extent; the cost covers all reads since the last gather, those for later extents too."""
        n = len(addresses)
        if not n or n != self.n_rows:
            raise ValueError(f"a gather of {n} rows is not the extent that comes next")
        stream = self._stream
        stream.feed(stream.pieces_before(int(self._pages[self._next - self._first])))
        stream.core.scatter(n, positions, out)
        self._next += 1
        return self._count(n)

    def narrow(self, window_bytes: int) -> ReadStats:
        """Read on through a window of ``window_bytes``; return the cost of reads in vain. The old window is freed before."""
        cost = self.close()
        self._begin(window_bytes, Arenas(0))
        return cost

    def check_open(self) -> None:
        """Raise ClosedError if the file was closed; a closed stream raises by itself."""
        self._file.check_open()

    def close(self) -> ReadStats:
        self._stream.close()
        return self._count(0)
