"""The memory that a runner holds for as long as it lives; between epochs all but the least is on loan."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError, BusyError
from featstore.strategies.memory import Memory

__all__ = ["Holdings"]

LOAN_COST = 10  # what rests between epochs is taken back before a cache is


class _Running(Protocol):
    closed: bool


def _nothing(n_bytes: int) -> None:
    pass


@dataclass
class _Holding:
    reservation: Reservation
    least: int
    useful: int
    hold: Callable[[int], None] = _nothing


class Holdings:
    """Reservations of what a runner has asked for, and the epoch that uses them.

    Parameters
    ----------
    budget : Budget
    memory : Memory
        Has divided the budget.

    Raises
    ------
    BudgetError
        Others have taken what was divided.
    """

    def __init__(self, budget: Budget, memory: Memory) -> None:
        self._held: dict[str, _Holding] = {}
        self._epoch: weakref.ref[_Running] | None = None
        self._beginning = threading.Lock()
        self._release = weakref.finalize(self, _release, self._held)
        try:
            for each in memory.requests:
                if each.is_held:
                    n_bytes = memory.granted[each.holder]
                    self._held[each.holder] = _Holding(budget.reserve(each.holder, n_bytes), each.least, n_bytes)
        except BaseException:
            self._release()
            raise
        self._loan = budget.lend(self._idle_bytes, self._give_back, cost=LOAN_COST)

    def __getitem__(self, holder: str) -> Reservation:
        return self._held[holder].reservation

    def get(self, holder: str) -> Reservation | None:
        """Return what a holder has, if it asked for any."""
        held = self._held.get(holder)
        return None if held is None else held.reservation

    def use(self, holder: str, hold: Callable[[int], None], least: int | None = None) -> None:
        """Say how memory is let go of: ``hold(n_bytes)`` keeps no more than that; and what the least is, if it is more by now."""
        held = self._held[holder]
        held.hold = hold
        if least is not None:
            held.least, held.useful = least, max(held.useful, least)
            held.reservation.resize(held.useful)

    @property
    def is_running(self) -> bool:
        """Whether an epoch is under way."""
        epoch = None if self._epoch is None else self._epoch()
        return epoch is not None and not epoch.closed

    def beginning(self, what: str) -> AbstractContextManager[object]:
        """Context manager in which an epoch begins: nothing is given back meanwhile.

        Raises
        ------
        BusyError
            One is under way; ``what`` has one cache.
        """
        if self.is_running:
            raise BusyError(f"another epoch of this loader is running; {what} have one cache, so end or drop it first")
        return self._beginning

    def began(self, epoch: _Running) -> None:
        """Note that an epoch has begun; what it uses is not on loan until it is closed or has died."""
        self._epoch = weakref.ref(epoch)

    def grow(self, holder: str, room: int | None = None, *, must: bool = False) -> None:
        """Have again what was given back, or what there is ``room`` for; where others have it, do without, or it ``must`` be."""
        held = self._held.get(holder)
        if held is None:
            return
        n_bytes = held.useful if room is None else max(held.least, min(held.useful, room // 4096 * 4096))
        if held.reservation.n_bytes < n_bytes:
            with suppress(*() if must else (BudgetError,)):
                held.reservation.resize(n_bytes)
                held.hold(n_bytes)

    def _idle_bytes(self) -> int:
        if self.is_running or self._beginning.locked():
            return 0
        return sum(max(0, held.reservation.n_bytes - held.least) for held in list(self._held.values()))

    def _give_back(self, n_bytes: int) -> int:
        if not self._beginning.acquire(blocking=False):
            return 0
        freed = 0
        try:
            for held in () if self.is_running else list(self._held.values()):
                more = held.reservation.n_bytes - held.least
                if more > 0:
                    held.hold(held.least)
                    held.reservation.resize(held.least)
                    freed += more
            return freed
        finally:
            self._beginning.release()

    def close(self) -> None:
        """Give everything back; may be called again."""
        self._loan.end()
        self._release()


def _release(held: dict[str, _Holding]) -> None:
    while held:
        _, each = held.popitem()
        each.hold(0)
        each.reservation.release()
