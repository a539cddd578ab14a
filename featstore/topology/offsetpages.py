"""A cache of the chunks' pages of offsets: a clock cache within the budget."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from featstore.budget import DEAR_COST, Budget
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile
from featstore.storage.stripedrows import StripedRows
from featstore.topology.chunkformat import Directory

__all__ = ["OffsetPages"]

Int64s = npt.NDArray[np.int64]

_LEAST_PAGES = 64
_BUDGET_FRACTION = 1 / 64  # of the budget, for the cache
_READ_PAGES = 256  # pages read at once; they are in memory twice meanwhile


class OffsetPages:
    """Offsets of lists in chunks, read by pages, which are cached. Thread-safe.

    ``budget`` counts the cache as ``offset pages``: a 64th of the budget, but at least 64 pages, and no more than all pages. All
    but 64 pages of the cache are on loan. The clock keeps pages that were used since its hand last passed them. If a call lacks
    more pages than are free and than half of the cache, it reads single words, and caches none of their pages.
    """

    def __init__(self, directory: Directory, chunks: RowFile | StripedRows, budget: Budget) -> None:
        self._directory, self._chunks = directory, chunks
        self._page_words = PAGE_BYTES // directory.id_bytes
        used = np.where(directory.n_nodes > 0, directory.header_words + directory.n_nodes, 0)
        # Pages are numbered through all chunks; pages without offsets have no number.
        self._first_page = np.concatenate([[0], np.cumsum(-(-used // self._page_words))]).astype(np.int64)
        n_pages = int(self._first_page[-1])
        n_slots = self._n_slots(n_pages, budget.total)
        self._held = budget.reserve("offset pages", self._bytes(n_pages, n_slots))
        self._slot_of_page = np.full(n_pages, -1, np.int32)
        self._make(n_slots)
        self._new_lock()
        self._loan = budget.lend(self._lendable, self._give_back, cost=DEAR_COST, of=self._held)

    @staticmethod
    def _n_slots(n_pages: int, total: int) -> int:
        return min(n_pages, max(_LEAST_PAGES, int(total * _BUDGET_FRACTION) // PAGE_BYTES))

    @staticmethod
    def _bytes(n_pages: int, n_slots: int) -> int:
        return 4 * n_pages + (PAGE_BYTES + 9) * n_slots

    @classmethod
    def held_bytes(cls, num_nodes: int, n_chunks: int, id_bytes: int, total: int) -> int:
        """Bound the bytes of the cache for so many nodes and chunks, under a budget of ``total`` bytes."""
        n_pages = num_nodes * id_bytes // PAGE_BYTES + 2 * n_chunks
        return cls._bytes(n_pages, cls._n_slots(n_pages, total))

    def _make(self, n_slots: int) -> None:
        self._pages = np.empty((n_slots, self._page_words), np.dtype(f"i{self._directory.id_bytes}"))
        self._page_of_slot = np.full(n_slots, -1, np.int64)
        self._was_used = np.zeros(n_slots, bool)
        self._n_filled = self._hand = 0

    def _new_lock(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()

    def words(self, chunk: Int64s, word: Int64s) -> Int64s:
        """Get the words ``word`` of the chunks ``chunk``, both int64 ``[k]``; only words of headers and offsets are allowed.

        The numbers are **not** checked.
        """
        if self._pid != os.getpid():
            self._new_lock()  # another thread of the parent may have held the lock
        page, at = self._first_page[chunk] + word // self._page_words, word % self._page_words
        out = np.empty(len(chunk), np.int64)
        with self._lock:
            slot = self._slot_of_page[page]
            is_here = slot >= 0
            here = slot[is_here].astype(np.intp)
            out[is_here] = self._pages[here, at[is_here]].astype(np.int64)
            self._was_used[here] = True
            n_free = len(self._pages) - self._n_filled
        if is_here.all():
            return out
        lacking = np.flatnonzero(~is_here)
        wanted, which = np.unique(page[lacking], return_inverse=True)
        if len(wanted) > max(n_free, len(self._page_of_slot) // 2):
            rows = chunk[lacking] * self._directory.chunk_words + word[lacking]
            out[lacking] = self._gather(rows).astype(np.int64)
            return out
        for first in range(0, len(wanted), _READ_PAGES):
            numbers = wanted[first : first + _READ_PAGES]
            pages = self._read(numbers)
            mine = np.flatnonzero((which >= first) & (which < first + len(numbers)))
            out[lacking[mine]] = pages[which[mine] - first, at[lacking[mine]]].astype(np.int64)
            with self._lock:
                self._keep(numbers, pages)
        return out

    def _gather(self, rows: Int64s) -> npt.NDArray[np.signedinteger]:
        width = self._directory.id_bytes
        found = np.empty((len(rows), width), np.uint8)
        self._chunks.gather(rows, found)
        return found.reshape(-1).view(f"i{width}")

    def _read(self, numbers: Int64s) -> npt.NDArray[np.signedinteger]:
        chunk = np.searchsorted(self._first_page[1:], numbers, side="right")
        chunk_pages = self._directory.chunk_words // self._page_words
        found = np.empty((len(numbers), PAGE_BYTES), np.uint8)
        self._chunks.read_pages(1 + chunk * chunk_pages + numbers - self._first_page[chunk], found)
        return found.view(f"i{self._directory.id_bytes}")

    def _keep(self, numbers: Int64s, pages: npt.NDArray[np.signedinteger]) -> None:
        """Cache pages that another thread has not cached meanwhile; the lock is held."""
        new = np.flatnonzero(self._slot_of_page[numbers] < 0)
        n_slots = len(self._pages)
        n_free = min(len(new), n_slots - self._n_filled)
        slots = list(range(self._n_filled, self._n_filled + n_free))
        self._n_filled += n_free
        taken = set(slots)
        for _ in range(2 * n_slots):  # after one round, the hand has cleared all marks
            if len(slots) >= min(len(new), n_slots):
                break
            hand, self._hand = self._hand, (self._hand + 1) % n_slots
            if self._was_used[hand]:
                self._was_used[hand] = False
            elif hand not in taken:
                if (old := int(self._page_of_slot[hand])) >= 0:
                    self._slot_of_page[old] = -1  # first, so that a child forked in between does not take the page for present
                slots.append(hand)
                taken.add(hand)
        kept = numbers[new[: len(slots)]]
        self._pages[slots] = pages[new[: len(slots)]]
        self._page_of_slot[slots] = kept
        self._was_used[slots] = True
        self._slot_of_page[kept] = slots

    def _lendable(self) -> int:
        return max(0, len(self._page_of_slot) - _LEAST_PAGES) * (PAGE_BYTES + 9)

    def _give_back(self, n_bytes: int) -> int:
        """Shrink the cache to the least number of pages, and empty it; pages are read again when they are needed."""
        with self._lock:
            freed = self._lendable()
            if freed:
                self._slot_of_page[:] = -1
                self._make(_LEAST_PAGES)
                self._held.resize(self._held.n_bytes - freed)
        return freed

    def close(self) -> None:
        self._loan.end()
        with self._lock:
            self._slot_of_page = np.full(len(self._slot_of_page), -1, np.int32)
            self._make(0)
            self._held.release()
