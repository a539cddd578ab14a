"""The batches that wait for the loop: those that a growing look-ahead has made are on loan, and lose their rows where others need
the memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from featstore.budget import Budget
from featstore.gather.buffers import HOLDER, SMALL_BYTES, BufferPool
from featstore.load.minibatch import MiniBatch

__all__ = ["LOAN_COST", "Waiting"]

LOAN_COST = 20  # rows are read twice: after what rests between epochs, and before caches, whose rows are wanted again


class Waiting:
    """Lend the rows of batches that wait, but for the first few. Thread-safe.

    Parameters
    ----------
    budget : Budget
    pool : BufferPool
        Has the rows' memory.
    least : int
        So many of the batches that wait keep their rows.
    refill : callable (MiniBatch) -> None
        Gathers a batch's rows again.

    Notes
    -----
    A batch stays in its place: only its rows go, the last batch's first. :meth:`take` gathers them again, the same bits, in the
    loop's thread. No lock is held while rows are let go of, or gathered.
    """

    def __init__(self, budget: Budget, pool: BufferPool, least: int, refill: Callable[[MiniBatch], None]) -> None:
        self._pool, self._least, self._refill = pool, least, refill
        self._lock = threading.Lock()
        self._batches: list[MiniBatch] = []
        self._n_emptied = 0
        self._loan = budget.lend(self._lent_bytes, self._give_back, cost=LOAN_COST, of=HOLDER)

    def after(self, stage: Callable[..., MiniBatch]) -> Callable[..., MiniBatch]:
        """Return a pipeline's last stage, after which a batch waits."""

        def made(*args: Any) -> MiniBatch:
            batch = stage(*args)
            with self._lock:
                if not self._lent_bytes():
                    self._loan.renew()
                self._batches.append(batch)
            return batch

        return made

    def take(self, batch: MiniBatch) -> None:
        """Note, in the loop's thread, that a batch waits no longer; gather its rows, if they were lent.

        Raises
        ------
        BudgetError, OSError, CorruptionError, ClosedError
            The rows cannot be gathered. After BudgetError it may be called again.
        """
        with self._lock:
            self._batches = [each for each in self._batches if each is not batch]
        self._refill(batch)

    def n_emptied(self) -> int:
        """Return how many batches have lost their rows since this was last asked."""
        with self._lock:
            n, self._n_emptied = self._n_emptied, 0
            return n

    def _lent(self) -> list[MiniBatch]:
        return [batch for batch in self._batches[self._least :] if batch.features]

    def _lent_bytes(self) -> int:
        return sum(map(_pooled_bytes, self._lent()))

    def _give_back(self, n_bytes: int) -> int:
        freed, rows = 0, []
        with self._lock:
            for batch in reversed(self._lent()):
                if freed >= n_bytes:
                    break
                freed += _pooled_bytes(batch)
                rows.append(dict(batch.features))
                batch.features.clear()
                self._n_emptied += 1
        rows.clear()
        self._pool.trim()
        return freed

    def close(self) -> None:
        """Lend no longer, and forget the batches; may be called again."""
        self._loan.end()
        with self._lock:
            batches, self._batches = self._batches, []
        del batches  # without the lock


def _pooled_bytes(batch: MiniBatch) -> int:
    """Return the bytes of a batch's rows that the budget counts."""
    return sum(tensor.nbytes for tensor in list(batch.features.values()) if tensor.nbytes >= SMALL_BYTES)
