"""The memory of a loader that its batches hold."""

from __future__ import annotations

import contextlib
import weakref
from queue import Empty, SimpleQueue

from featstore.config import Budget, Reservation
from featstore.strategies.requests import BATCHES

__all__ = ["Batches", "Held"]


class Held:
    """Bytes of a loader's memory, released after the last batch object that refers to them has died: see :class:`Batches`."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation


class Batches:
    """What a loader's batches hold of its memory. Thread-safe.

    The loop lets go of batches in the thread that Ctrl-C interrupts, and an interrupt within a destructor is lost, with what was
    left of the destructor. So a death is only noted, which is one call of a compiled method, and released here when memory is
    asked for.
    """

    def __init__(self, share: Budget) -> None:
        self._share = share
        self._dead: SimpleQueue[weakref.ref[Held]] = SimpleQueue()
        self._living: dict[weakref.ref[Held], Reservation] = {}

    def hold(self, n_bytes: int) -> Held:
        """Reserve ``n_bytes``, or raise BudgetError."""
        self._release_dead()
        held = Held(self._share.reserve(BATCHES, n_bytes))
        self._living[weakref.ref(held, self._dead.put)] = held.reservation
        return held

    def resize(self, held: Held, n_bytes: int) -> None:
        """Hold ``n_bytes`` from now on, or raise BudgetError."""
        self._release_dead()
        held.reservation.resize(n_bytes)

    def _release_dead(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._living.pop(self._dead.get_nowait()).release()
