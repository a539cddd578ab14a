"""Take memory that a running loader holds on loan."""

from __future__ import annotations

import time

from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError

__all__ = ["take_back"]


def take_back(budget: Budget, parts: int, more: int = 0) -> Reservation:
    """Reserve what is free, one of ``parts`` of what is on loan, and ``more`` bytes.

    A thread of the loader may reserve memory between the reading of the figures and the reservation, or be busy with what it
    lends: then they are read again. If all loans were taken back by then, what is free is reserved alone. The limit is for a
    ledger that is broken.
    """
    end = time.monotonic() + 60
    while True:
        try:
            lent = budget.on_loan
            return budget.reserve("others", budget.available + (lent // parts + more if lent else 0))
        except BudgetError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)
