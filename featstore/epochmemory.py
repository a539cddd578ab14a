"""What an epoch holds beside batches and caches; it stays from one epoch to the next, on loan in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from featstore.budget import Budget, Loan, Reservation
from featstore.errors import BudgetError, BusyError

__all__ = ["EpochMemory", "Use"]

LOAN_COST = 10  # what rests between epochs is taken back before a cache is


class Use:
    """An epoch's use of memory or caches: the epoch holds it, and they are free when it has died, however it was lost."""


class EpochMemory:
    """Reservations by holder, and the epoch that uses them: one at a time. Thread-safe.

    Parameters
    ----------
    budget : Budget
    needs : mapping of str to (int, int)
        By holder the bytes without which an epoch cannot run, and those that it has where others leave them.
    drop : callable () -> None
        Lets go of what is in the memory; called while no epoch runs. It keeps its owner alive no longer than this lives.

    Raises
    ------
    BudgetError
        There is less than what an epoch cannot do without.
    """

    def __init__(self, budget: Budget, needs: Mapping[str, tuple[int, int]], drop: Callable[[], None]) -> None:
        self._needs, self._drop = dict(needs), drop
        self._use: weakref.ref[Use] | None = None
        self._beginning = threading.Lock()
        self._held: dict[str, Reservation] = {}
        with ExitStack() as undo:
            for holder, (_, n_bytes) in self._needs.items():
                self._held[holder] = undo.enter_context(budget.reserve(holder, n_bytes))
            self._loan = budget.lend(self._lent_bytes, self._give_back, cost=LOAN_COST, of=self._held)
            self._release = weakref.finalize(self, _release, self._held, self._loan)
            undo.pop_all()

    def __getitem__(self, holder: str) -> Reservation:
        return self._held[holder]

    def get(self, holder: str) -> Reservation | None:
        """Return a holder's reservation, if it has one."""
        return self._held.get(holder)

    @property
    def is_running(self) -> bool:
        """Whether an epoch is under way."""
        return self._use is not None and self._use() is not None

    def begin(self, what: str) -> Use:
        """Have again for an epoch what others took back meanwhile, or as much as they leave; until the epoch ends or dies.

        Raises
        ------
        BusyError
            One is under way; ``what`` have one cache.
        BudgetError
            There is less than what it cannot do without; none has begun.
        """
        with self._beginning:
            if self.is_running:
                raise BusyError(f"another epoch of this loader is running; {what} have one cache, so end or drop it first")
            self._loan.renew()
            for holder, (least, n_bytes) in self._needs.items():
                self._grow(self._held[holder], least, n_bytes)
            use = Use()
            self._use = weakref.ref(use)
            return use

    @staticmethod
    def _grow(held: Reservation, least: int, n_bytes: int) -> None:
        if not least:  # nothing is taken back for what an epoch can do without
            n_bytes = min(n_bytes, (held.n_bytes + held.budget.available) // 4096 * 4096)
        if held.n_bytes < n_bytes:
            try:
                held.resize(n_bytes)
            except BudgetError:
                held.resize(max(held.n_bytes, least))

    def is_of(self, use: Use) -> bool:
        """Whether this is what the epoch under way holds: it has begun and not ended."""
        return self._use is not None and self._use() is use

    def end(self, use: Use) -> None:
        """Note that an epoch is over, and the memory on loan; may be called again."""
        if self.is_of(use):
            self._loan.renew()
            self._use = None

    def close(self) -> None:
        """Give everything back; may be called again."""
        self._drop()
        self._release()

    def _lent_bytes(self) -> int:
        return 0 if self.is_running or self._beginning.locked() else sum(held.n_bytes for held in self._held.values())

    def _give_back(self, n_bytes: int) -> int:
        if not self._beginning.acquire(blocking=False):
            return 0
        try:
            freed = 0 if self.is_running else sum(held.n_bytes for held in self._held.values())
            if freed:
                self._drop()
                for held in self._held.values():
                    held.release()
            return freed
        finally:
            self._beginning.release()


def _release(held: Mapping[str, Reservation], loan: Loan) -> None:
    loan.end()
    for each in held.values():
        each.release()
