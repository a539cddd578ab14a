"""Dynamic neighbour cache: the neighbour lists of the current macro-batches (OUTRE, VLDB 2024, section 4.2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from featstore.budget import LISTS_COST, Loan, Reservation
from featstore.errors import BudgetError
from featstore.gather.buffers import huge_array
from featstore.sampling.hops import HopSampler
from featstore.sampling.partitionbatches import PartitionBatches, PartitionEpoch
from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import huge_bytes
from featstore.topology.partlists import NearbyLists, PartLists, Uint8s

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["FRACTION", "HOLDER", "MacroLists", "macro_lists"]

HOLDER = "lists of parts"  # in the budget's report
FRACTION = 1 / 8  # of the memory that is left, for the lists
AT_ONCE = 2  # macro-batches whose lists are in memory: a few batches of the previous one are still being sampled


@dataclass(eq=False)
class _Slot:
    lists: NearbyLists
    memory: Uint8s
    n_users: int = 0


class MacroLists:
    """Neighbour lists of two macro-batches at most, read in sequence when the first of their batches is sampled. Thread-safe.

    The cache is empty until :meth:`use` gives it memory. All memory but that of lists in use is on loan. If the lists of a
    macro-batch do not fit, the lists of some of its parts are read. Samples do not depend on the cache.
    """

    def __init__(self, g: OutOfCoreGraph, lists: PartLists, batches: PartitionBatches) -> None:
        self._g, self._lists = g, lists
        sizes = np.sort(lists.sizes(batches.part_numbers))[::-1]
        self._most_bytes = huge_bytes(int(sizes[: batches.macro].sum()) + lists.beside())
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], _Slot] = {}  # by epoch and macro-batch, the last used one at the end
        self._room = 0  # bytes of each
        self._n_slots = 0
        self._reservation: Reservation = g.budget.reserve(HOLDER, 0)
        self._loan: Loan = g.budget.lend(self._lent_bytes, self._give_back, cost=LISTS_COST, of=self._reservation)

    @property
    def useful_bytes(self) -> int:
        """Most bytes that the cache can use; 0 if the neighbour cache holds all lists."""
        return 0 if self._is_idle() else AT_ONCE * self._most_bytes

    def _is_idle(self) -> bool:
        cache = self._g.neighbor_cache
        return cache is not None and cache.whole

    def use(self, n_bytes: int) -> None:
        """Set the memory to ``n_bytes``, or none if the budget lacks them; call it while no batch is sampled."""
        with self._lock:
            self._slots.clear()
            self._room = n_bytes // AT_ONCE // PAGE_BYTES * PAGE_BYTES
        self._grow()

    def _grow(self) -> None:
        if not self._lent_bytes():
            self._loan.renew()
        with suppress(BudgetError):  # lists are read from the file instead
            self._reservation.resize(AT_ONCE * self._room)
        with self._lock:
            self._n_slots = self._reservation.n_bytes // self._room if self._room else 0

    def begin(self) -> None:
        """Begin an epoch: take given-back memory again if it is free."""
        if 0 < AT_ONCE * self._room - self._reservation.n_bytes <= self._g.budget.available:
            self._grow()

    @contextmanager
    def of(self, epoch: int, order: PartitionEpoch, position: int) -> Iterator[NearbyLists | None]:
        """Lend the lists for a batch, and read them first if needed; None while other batches use all the memory."""
        slot = self._take(epoch, order, position)
        if slot is None:
            yield None
            return
        try:
            yield slot.lists
        finally:
            with self._lock:
                if not self._lent_bytes():
                    self._loan.renew()
                slot.n_users -= 1

    def _take(self, epoch: int, order: PartitionEpoch, position: int) -> _Slot | None:
        macro = order.macro_of(position)
        with self._lock:
            slot = self._slots.pop((epoch, macro), None)
            if slot is None:
                if not self._n_slots or self._is_idle():
                    return None
                memory = self._free_memory()
                if memory is None:
                    return None
                slot = _Slot(self._lists.load(order.parts_of(macro), memory), memory)
            slot.n_users += 1
            self._slots[epoch, macro] = slot
            return slot

    def _free_memory(self) -> Uint8s | None:
        """Find memory for lists, if needed in place of the least recently used ones; None if all are in use."""
        if len(self._slots) < self._n_slots:
            return huge_array(self._room)
        for key, slot in self._slots.items():
            if not slot.n_users:
                del self._slots[key]
                return slot.memory
        return None

    def _lent_bytes(self) -> int:
        n_in_use = sum(slot.n_users > 0 for slot in list(self._slots.values()))
        return max(0, self._reservation.n_bytes - n_in_use * self._room)

    def _give_back(self, n_bytes: int) -> int:
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            self._slots = {key: slot for key, slot in self._slots.items() if slot.n_users}
            freed, self._n_slots = self._lent_bytes(), len(self._slots)
            self._reservation.resize(self._n_slots * self._room)
            return freed
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give all memory back; may be called again."""
        self._loan.end()
        with self._lock:
            self._slots.clear()
            self._room = self._n_slots = 0
        self._reservation.release()


def macro_lists(g: OutOfCoreGraph, sampler: object, batches: object) -> MacroLists | None:
    """Make a loader's dynamic neighbour cache; None unless its batches are of parts that are kept with their lists."""
    # An epoch-wide sampler is no HopSampler: it passes over all lists, and needs no lists of a macro-batch.
    if not (isinstance(sampler, HopSampler) and isinstance(batches, PartitionBatches) and len(batches)):
        return None
    if sampler.graph is not g or batches.kept is None:  # the cache takes the memory of one graph
        return None
    kept = g.parts().get(batches.kept[0])
    if kept is None or kept.generation != batches.kept[1] or not kept.has_lists or kept.is_stale:
        return None
    return MacroLists(g, g.partitions.lists(kept), batches)
