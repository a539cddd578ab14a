"""The memory of an epoch beside batches and caches; it is kept from one epoch to the next, on loan in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from featstore.budget import EPOCH_COST, Budget, Loan, Reservation
from featstore.errors import BudgetError, BusyError

__all__ = ["EpochMemory", "Use"]


class Use:
    """A token for an epoch's use of memory or caches: the epoch holds it, and memory and caches are free once it dies."""


class EpochMemory:
    """Reservations by holder, and the epoch that uses them: one at a time. Thread-safe.

    Parameters
    ----------
    budget : Budget
    needs : mapping of str to (int, int)
        For each holder, the bytes without which an epoch cannot run, and the bytes that it gets if the budget has them.
    drop : callable () -> None
        Releases the content of the memory; called while no epoch runs. It may wait for threads that read. It keeps its owner
        alive only as long as this object.

    Raises
    ------
    BudgetError
        The budget cannot hold the full needs.
    """

    def __init__(self, budget: Budget, needs: Mapping[str, tuple[int, int]], drop: Callable[[], None]) -> None:
        self._needs, self._drop = dict(needs), drop
        self._use: weakref.ref[Use] | None = None
        self._beginning = threading.Lock()
        self._held: dict[str, Reservation] = {}
        with ExitStack() as undo:
            for holder, (_, n_bytes) in self._needs.items():
                self._held[holder] = undo.enter_context(budget.reserve(holder, n_bytes))
            self._loan = budget.lend(self._lent_bytes, self._give_back, cost=EPOCH_COST, of=self._held, waits=True)
            self._release = weakref.finalize(self, _release, self._held, self._loan)
            undo.pop_all()

    def __getitem__(self, holder: str) -> Reservation:
        return self._held[holder]

    def get(self, holder: str) -> Reservation | None:
        """Get a holder's reservation; None if it has none."""
        return self._held.get(holder)

    @property
    def is_running(self) -> bool:
        """Whether an epoch is under way."""
        return self._use is not None and self._use() is not None

    def begin(self, what: str) -> Use:
        """Begin an epoch: restore the memory that was taken back meanwhile, as far as the budget has it.

        The memory is in use until the epoch ends or its token dies.

        Raises
        ------
        BusyError
            Another epoch is under way; the message says that ``what`` have one cache.
        BudgetError
            The least memory of an epoch is not available; no epoch has begun.
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
        if not least:  # optional memory takes no loans back
            n_bytes = min(n_bytes, (held.n_bytes + held.budget.available) // 4096 * 4096)
        if held.n_bytes < n_bytes:
            try:
                held.resize(n_bytes)
            except BudgetError:
                held.resize(max(held.n_bytes, least))

    def is_of(self, use: Use) -> bool:
        """Check whether ``use`` is the token of the epoch under way, which has begun and not ended."""
        return self._use is not None and self._use() is use

    def end(self, use: Use) -> None:
        """End an epoch, after which the memory is on loan; may be called again."""
        if self.is_of(use):
            self._loan.renew()
            self._use = None

    def close(self) -> None:
        """Drop the content and release all memory; may be called again."""
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
