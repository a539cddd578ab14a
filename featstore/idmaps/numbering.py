"""Numbers for names in order of first appearance: in memory, or through files where the distinct names do not fit.

Both give the same numbers. In memory a name takes 24 to 48 bytes, whatever its length. Through files, the names are gone through
twice: :meth:`SpilledNumbers.collect` takes their hashes once, and then :meth:`SpilledNumbers.add` gives the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.distinct import Ranks
from featstore._core.names import fill_slots, number_keys
from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.storage.spill import SpillFiles

__all__ = ["MemoryNumbers", "Numbers", "Room", "SpilledNumbers", "TableFullError"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_PARTITIONS = 256
_LEAST_ROOM = 1 << 10
_RECORD = np.dtype([("at", "<i8"), ("hashes", "<u8", 2)])
_FIRST = np.dtype([("hash", "<u8"), ("first", "<i8")])


class TableFullError(Exception):
    """The distinct names do not fit into the memory that they may take."""


class Numbers(Protocol):
    """Numbers of names, which are given by their hashes, uint64 ``[k, 2]``."""

    n: int

    def add(self, hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """Number names; return the numbers, and the positions of those that are new, ascending."""
        ...

    def find(self, hashes: UInt64s) -> Int64s:
        """Find the numbers of names; another name has -1, or a number from ``n`` on."""
        ...

    def sorted_hashes(self, n: int) -> Iterator[tuple[UInt64s, Int64s]]:
        """Yield the first words of the hashes of names ``0 … n - 1``, ascending, with the numbers; ends its use."""
        ...


class Room:
    """Memory that some tables may take together."""

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes

    def take(self, n_bytes: int, at_once: int = 0) -> None:
        """Take memory, or give it back; TableFullError if so much is not left, or ``at_once`` while the table grows."""
        if max(n_bytes, at_once) > self._left:
            raise TableFullError
        self._left -= n_bytes


class MemoryNumbers:
    """A hash table in memory; TableFullError where there is no room for more names. One owner thread."""

    def __init__(self, room: Room) -> None:
        self.n = 0
        self._room = room
        self._held = np.empty((_LEAST_ROOM, 2), np.uint64)
        self._slots = np.zeros(2 * _LEAST_ROOM, np.uint32)

    @property
    def n_bytes(self) -> int:
        return self._held.nbytes + self._slots.nbytes

    def add(self, hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """See :class:`Numbers`."""
        ids, firsts = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        done = n_new = 0
        while done < len(hashes):
            k, new = number_keys(
                self._slots, self._held, self.n, hashes[done:], ids[done:], firsts[n_new : n_new + len(hashes) - done], True
            )
            firsts[n_new : n_new + new] += done
            done, n_new, self.n = done + k, n_new + new, self.n + new
            if done < len(hashes):
                self._grow()
        return ids, firsts[:n_new]

    def find(self, hashes: UInt64s) -> Int64s:
        """See :class:`Numbers`."""
        ids, firsts = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        number_keys(self._slots, self._held, self.n, hashes, ids, firsts, False)
        return ids

    def _grow(self) -> None:
        n_held, n_slots = 2 * len(self._held), 2 * len(self._slots)
        if n_slots > 1 << 32:
            raise TableFullError
        # Twice as much as before; while names are copied, the old and the new ones.
        self._room.take(self.n_bytes, 2 * self._held.nbytes)
        held = np.empty((n_held, 2), np.uint64)
        held[: self.n] = self._held[: self.n]
        self._held = held
        self._slots = np.empty(0, np.uint32)  # freed before larger ones are made
        self._slots = np.zeros(n_slots, np.uint32)
        fill_slots(self._slots, held[: self.n])

    def sorted_hashes(self, n: int) -> Iterator[tuple[UInt64s, Int64s]]:
        """See :class:`Numbers`."""
        self._slots = np.zeros(4, np.uint32)
        hashes = self._held[:n, 0].copy()
        self._held = np.empty((0, 2), np.uint64)
        order = np.argsort(hashes, kind="stable")
        step = 1 << 18
        for first in range(0, n, step):
            some = order[first : first + step]
            yield hashes[some], some


class SpilledNumbers:
    """Numbers through files in ``directory``, of 24 bytes a name that is given, and then 32 to 48; a context manager.

    In memory are at most about ``memory`` bytes, of which a bitmap takes a quarter byte a name that is given. ``sorter(n)`` makes
    an external sort of pairs in ``[0, n)``. One owner thread.
    """

    def __init__(self, directory: str, memory: int) -> None:
        self.n = 0
        self._directory = directory
        self._memory = memory
        self._total = 0
        self._step = max(1 << 10, memory // 256)
        self._records = SpillFiles(directory, _RECORD, _PARTITIONS)
        self._firsts = SpillFiles(directory, _FIRST, _PARTITIONS)
        self._sorted: Iterator[tuple[Int64s, Int64s, Int64s | None]] = iter(())
        self._rest: Int64s = np.empty(0, np.int64)
        self._done = 0
        self._ranks: Ranks | None = None

    def collect(self, hashes: UInt64s) -> None:
        """Take the hashes of the next names."""
        for first in range(0, len(hashes), self._step):
            some = hashes[first : first + self._step]
            records = np.empty(len(some), _RECORD)
            records["at"] = np.arange(self._total, self._total + len(some))
            records["hashes"] = some
            number = (some[:, 0] >> np.uint64(56)).astype(np.uint16)
            order = np.argsort(number, kind="stable")
            ends = np.bincount(number, minlength=_PARTITIONS).cumsum().tolist()
            records, start = records[order], 0
            for each, end in enumerate(ends):
                if end > start:
                    self._records[each].append(records[start:end])
                    start = end
            self._total += len(some)

    @property
    def total(self) -> int:
        """Number of names that were given, repeats included."""
        return self._total

    def number(
        self, add: Callable[[Int64s, Int64s], None], pairs: Callable[[], Iterator[tuple[Int64s, Int64s, Int64s | None]]]
    ) -> None:
        """Find the first appearance of each name, when all were collected.

        ``add`` and ``pairs`` are those of an external sort of pairs below ``total``, see
        :class:`featstore.creation.extsort.PairSorter`: they take pairs, and yield them sorted.
        """
        words = Ranks.words_for(self._total)
        if 8 * words > self._memory // 2:
            raise BudgetError(
                f"numbering {self._total} names of nodes through files takes {format_size(8 * words)} for a bitmap", 32 * words
            )
        ranks = Ranks(np.zeros(words, np.uint64), self._total)
        for of_hash, firsts_of_hash in zip(self._records, self._firsts, strict=True):
            if not of_hash.n_written:
                continue
            table, first_at = MemoryNumbers(Room(self._memory // 4)), np.empty(_LEAST_ROOM, np.int64)
            for records in of_hash.drain(self._step):
                at = records["at"].astype(np.int64)
                if not 0 <= at.min() <= at.max() < self._total:
                    raise of_hash.damage()
                before = table.n
                try:
                    ids, new = table.add(np.ascontiguousarray(records["hashes"], np.uint64))
                except TableFullError:
                    raise BudgetError(
                        "more distinct names of nodes than can be numbered through files", 4 * self._memory
                    ) from None
                if table.n > len(first_at):
                    first_at = np.concatenate((first_at[:before], np.empty(2 * table.n - before, np.int64)))
                first_at[before : table.n] = at[new]
                add(at, first_at[ids])
                firsts = np.empty(len(new), _FIRST)
                firsts["hash"], firsts["first"] = records["hashes"][new, 0], at[new]
                if len(new):
                    ranks.mark(at[new])
                    firsts_of_hash.append(firsts)
        self._ranks = ranks
        ranks.number()
        self._sorted = pairs()

    def add(self, hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """See :class:`Numbers`; the names come in the order in which they were collected."""
        assert self._ranks is not None
        k, found = len(hashes), [self._rest[: len(hashes)]]
        self._rest, n = self._rest[k:], len(found[0])
        while n < k:
            firsts = next(self._sorted)[1]
            found.append(firsts[: k - n])
            self._rest = firsts[k - n :]
            n += len(found[-1])
        firsts = np.concatenate(found)
        ids = np.empty(k, np.int64)
        self._ranks.of(np.ascontiguousarray(firsts), ids)
        new = np.flatnonzero(firsts == np.arange(self._done, self._done + k))
        self._done += k
        self.n += len(new)
        return ids, new

    def find(self, hashes: UInt64s) -> Int64s:
        """See :class:`Numbers`: names are numbered on, and the caller leaves these out."""
        n = self.n
        ids, _ = self.add(hashes)
        self.n = n
        return ids

    def sorted_hashes(self, n: int) -> Iterator[tuple[UInt64s, Int64s]]:
        """See :class:`Numbers`."""
        assert self._ranks is not None
        for file in self._firsts:
            blocks = list(file.drain(self._step))
            if not blocks:
                continue
            firsts = np.concatenate(blocks)
            ids = np.empty(len(firsts), np.int64)
            self._ranks.of(np.ascontiguousarray(firsts["first"], np.int64), ids)
            hashes = firsts["hash"].astype(np.uint64)[ids < n]
            ids = ids[ids < n]
            order = np.argsort(hashes, kind="stable")
            yield hashes[order], ids[order]

    def close(self) -> None:
        self._records.close()
        self._firsts.close()

    def __enter__(self) -> SpilledNumbers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
