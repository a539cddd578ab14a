"""The memory that a runner holds for as long as it lives; between epochs all but the least is on loan."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass

from featstore.budget import Budget, Loan, Reservation
from featstore.errors import BudgetError, BusyError
from featstore.strategies.memory import Memory

__all__ = ["Holdings"]

LOAN_COST = 10  # what rests between epochs is taken back before a cache is


def _nothing(n_bytes: int) -> None:
    pass


class _Use:
    """The epoch that uses what is held."""

    def __init__(self) -> None:
        self.epoch: weakref.ref[object] | None = None
        self.beginning = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self.epoch is not None and self.epoch() is not None


@dataclass(eq=False)
class _Holding:
    """A reservation; what is beyond its least is on loan while no epoch uses it."""

    reservation: Reservation
    least: int
    useful: int
    used_by: _Use
    hold: Callable[[int], None] = _nothing
    loan: Loan | None = None

    def lend(self) -> None:
        """Lend what an epoch leaves."""
        self.loan = self.reservation.budget.lend(self._lent_bytes, self._give_back, cost=LOAN_COST, of=self.reservation)

    def lends_again(self) -> None:
        """Note that memory is about to be on loan that was not."""
        if self.loan is not None:
            self.loan.renew()

    @property
    def spare_bytes(self) -> int:
        """Bytes beyond the least."""
        return max(0, self.reservation.n_bytes - self.least)

    def _lent_bytes(self) -> int:
        return 0 if self.used_by.is_running or self.used_by.beginning.locked() else self.spare_bytes

    def _give_back(self, n_bytes: int) -> int:
        if not self.used_by.beginning.acquire(blocking=False):
            return 0
        try:
            freed = 0 if self.used_by.is_running else self.spare_bytes
            if freed:
                self.hold(self.least)
                self.reservation.resize(self.least)
            return freed
        finally:
            self.used_by.beginning.release()


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
        self._use = _Use()
        with ExitStack() as undo:
            for each in memory.requests:
                if each.is_held:
                    held = undo.enter_context(budget.reserve(each.holder, memory.granted[each.holder]))
                    self._held[each.holder] = _Holding(held, each.least, held.n_bytes, self._use)
            self._release = weakref.finalize(self, _release, self._held)
            undo.pop_all()
        for holding in self._held.values():  # now that all have what was divided
            holding.lend()

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
        return self._use.is_running

    def beginning(self, what: str) -> AbstractContextManager[object]:
        """Context manager in which an epoch begins: nothing is given back meanwhile.

        Raises
        ------
        BusyError
            One is under way; ``what`` has one cache.
        """
        if self.is_running:
            raise BusyError(f"another epoch of this loader is running; {what} have one cache, so end or drop it first")
        return self._use.beginning

    def began(self, epoch: object) -> None:
        """Note that an epoch has begun; what it uses is not on loan until it has ended or died."""
        self._use.epoch = weakref.ref(epoch)

    def are_used_by(self, epoch: object) -> bool:
        """Whether it is this epoch that is under way: it has begun and not ended."""
        return self._use.epoch is not None and self._use.epoch() is epoch

    def ended(self, epoch: object) -> None:
        """Note that an epoch is over, and its memory on loan again; may be called again, and of an epoch that used none of it."""
        if self.are_used_by(epoch):
            for held in list(self._held.values()):
                held.lends_again()
            self._use.epoch = None

    def grow(self, holder: str, room: int | None = None) -> None:
        """Have again what was given back, or what there is ``room`` for; where others have it, do without."""
        held = self._held.get(holder)
        if held is None:
            return
        n_bytes = held.useful if room is None else max(held.least, min(held.useful, room // 4096 * 4096))
        if held.reservation.n_bytes < n_bytes:
            if not held.spare_bytes:
                held.lends_again()
            with suppress(BudgetError):
                held.reservation.resize(n_bytes)
                held.hold(n_bytes)

    def close(self) -> None:
        """Give everything back; may be called again."""
        self._release()


def _release(held: dict[str, _Holding]) -> None:
    while held:
        _, each = held.popitem()
        if each.loan is not None:
            each.loan.end()
        each.hold(0)
        each.reservation.release()
