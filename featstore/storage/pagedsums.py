"""Checksum tables: small ones are kept in memory, and pages of larger ones are cached and their reads counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from featstore._core.io import PAGE_BYTES, SUMS_PER_PAGE, Engine, File
from featstore.budget import Budget

__all__ = ["DIVISOR", "MIN_ARENA_BYTES", "PagedSums", "divisor_for", "is_kept", "pages_cached", "pointer_bytes", "table_bytes"]

MIN_ARENA_BYTES = 256 << 10
ALWAYS_KEPT_BYTES = 16 * PAGE_BYTES
DIVISOR = 20  # of the budget; a larger table gets at most a twentieth: it is kept if it fits, else some of its pages are cached
DIVISOR_OF_ALL = 4  # of the budget; all larger tables together get at most a quarter


def divisor_for(tables: Iterable[int]) -> int:
    """Choose the divisor of the budget that gives the most of a large table, from the bytes of all tables."""
    return max(DIVISOR, DIVISOR_OF_ALL * sum(table > ALWAYS_KEPT_BYTES for table in tables))


def is_kept(table: int, total: int, divisor: int) -> bool:
    """Decide whether a table of ``table`` bytes is kept whole under a budget of ``total`` bytes."""
    return table <= ALWAYS_KEPT_BYTES or total >= divisor * table


def pages_cached(total: int, divisor: int) -> int:
    """Count the pages to cache of a table that is not kept; one row may need more."""
    return total // divisor // PAGE_BYTES


def table_bytes(table: int, row_bytes: int, total: int, divisor: int) -> int:
    """Count the bytes held for a table of ``table`` bytes under a budget of ``total`` bytes."""
    held = table if is_kept(table, total, divisor) else PagedSums.held_bytes(row_bytes, pages_cached(total, divisor))
    return held + pointer_bytes(table // PAGE_BYTES)


def pointer_bytes(n_pages: int) -> int:
    """Count the bytes of the core's pointers to the pages of a table: much for a file of 10 TB."""
    return 8 * (n_pages + 1)


class PagedSums:
    """A checksum table too large to keep: a clock cache of its pages, filled as gathers need them.

    ``n_slots`` pages of the table are cached, or more if one row needs more. ``set_page(number, page)`` checks a page of the
    table and hands it to ``file``. ``engine(n_rows)`` lends a queue; ``with_backend(make)`` makes a queue of the table's own.
    """

    def __init__(
        self,
        file: File,
        table: File,
        row_bytes: int,
        n_slots: int,
        *,
        set_page: Callable[[int, npt.NDArray[np.uint8]], None],
        engine: Callable[[int], AbstractContextManager[Engine]],
        with_backend: Callable[[Callable[[str], Engine]], Engine],
        budget: Budget,
    ) -> None:
        self._file = file
        self._table = table
        self._row_bytes = row_bytes
        self._set_page = set_page
        self._borrow = engine
        self._with_backend = with_backend
        n_slots, span = self._slots(row_bytes, n_slots)
        self.capacity = n_slots - span
        # A small queue of its own: the borrowed one is in the middle of a gather when pages of sums are needed.
        self._engine_reservation = budget.reserve("reader buffers", MIN_ARENA_BYTES + 16 * n_slots, owner=self)
        try:
            n_bytes = n_slots * PAGE_BYTES + pointer_bytes(table.n_rows)
            self._reservation = budget.reserve("checksum tables", n_bytes, owner=self)
        except BaseException:
            self._engine_reservation.release()
            raise
        self._pages = np.empty((n_slots, PAGE_BYTES), np.uint8)
        self._page_of_slot = np.full(n_slots, -1, np.int64)
        self._slot_of_page: dict[int, int] = {}
        self._hand = 0
        self._engine: Engine | None = None
        self._reads = 0
        self._bytes = 0
        self.lock = threading.Lock()

    @staticmethod
    def _slots(row_bytes: int, n_slots: int) -> tuple[int, int]:
        span = -(-row_bytes // (PAGE_BYTES * SUMS_PER_PAGE)) + 1  # sums pages that one row may need
        return max(n_slots, 16 + 2 * span), span

    @classmethod
    def held_bytes(cls, row_bytes: int, n_slots: int) -> int:
        """Count the bytes that a table of ``n_slots`` pages holds, its queue included."""
        n_slots, _ = cls._slots(row_bytes, n_slots)
        return MIN_ARENA_BYTES + (16 + PAGE_BYTES) * n_slots

    def load(self, wanted: Sequence[int]) -> None:
        """Load the pages of the table that ``wanted`` lists; the core calls this between stretches of a gather."""
        keep = set(wanted)
        missing = [page for page in wanted if page not in self._slot_of_page]
        if not missing:
            return
        slots: list[int] = []
        while len(slots) < len(missing):
            old = int(self._page_of_slot[self._hand])
            if old not in keep:
                if old >= 0:
                    del self._slot_of_page[old]  # first, so that a child forked in between does not take the page for present
                    self._file.set_sums_page(old, None)
                    self._page_of_slot[self._hand] = -1
                slots.append(self._hand)
            self._hand = (self._hand + 1) % len(self._page_of_slot)
        numbers, places = np.array(missing, np.int64), np.array(slots, np.int64)
        if self._engine is None or self._engine.pid != os.getpid():
            self._engine = self._with_backend(lambda backend: Engine(backend, MIN_ARENA_BYTES // PAGE_BYTES, MIN_ARENA_BYTES))
            self._engine.set_scratch(len(self._page_of_slot))
        reads, n_bytes = self._engine.gather(self._table, numbers, self._pages, places, 0)
        self._reads += reads
        self._bytes += n_bytes
        for page, slot in zip(missing, slots, strict=True):
            self._set_page(page, self._pages[slot])
            self._slot_of_page[page] = slot
            self._page_of_slot[slot] = page

    def table_pages(self, first: int, n: int) -> npt.NDArray[np.uint8]:
        """Read pages of the table without caching them: a scan would only evict pages that gathers need."""
        pages = np.empty((n, PAGE_BYTES), np.uint8)
        with self._borrow(0) as engine:
            engine.read(self._table, first, n, pages)
        return pages

    def gather(
        self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64] | None, gap: int
    ) -> tuple[int, int]:
        """Gather rows with the pages of sums that they need, one gather at a time; return the total reads and bytes."""
        with self.lock, self._borrow(len(rows)) as engine:
            self._reads = self._bytes = 0
            reads, n_bytes = engine.gather(self._file, rows, out, positions, gap, self)
            return reads + self._reads, n_bytes + self._bytes

    def read(self, first: int, n: int, out: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """Read a run of rows, a stretch at a time; return the reads and bytes."""
        if not 0 <= first <= first + n <= self._file.n_rows or len(out) != n:
            raise IndexError("rows out of range")
        step = max(1, (4 << 20) // self._row_bytes)
        reads = n_bytes = 0
        for at in range(0, n, step):
            rows = np.arange(first + at, first + min(at + step, n), dtype=np.int64)
            cost = self.gather(rows, out[at : at + step], None, 0)
            reads, n_bytes = reads + cost[0], n_bytes + cost[1]
        return reads, n_bytes

    def close(self) -> None:
        """Close the table's file and queue, and release their memory."""
        self._table.close()
        if self._engine is not None:
            self._engine.close()
        self._engine_reservation.release()
        self._reservation.release()
