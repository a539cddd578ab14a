"""The memory ledger: the bytes of a budget by holder, the loans of holders, and the least needs of workers."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Generic, Protocol, TypeVar, cast

from featstore.config import format_size
from featstore.display import Display, ShownAsTables, Table
from featstore.errors import BudgetError

__all__ = ["Budget", "HeldMemory", "Living", "Loan", "MemoryReport", "Reservation", "Worker"]

T = TypeVar("T")

# What is taken back first costs least: idle buffers cost nothing.
KEPT_COST = 5  # ids and batches that can be sampled again
LISTS_COST = 8  # lists of macro-batches, which can be read again
EPOCH_COST = 10  # what an epoch's planners, packers and readers have, while none runs
CACHE_COST = 100  # a cache loses its coldest rows
DEAR_COST = 101  # what is missed for the rest of an epoch; a reservation that can wait spares such loans


class Living(Generic[T]):
    """The added objects that still live, held by weak references. Thread-safe.

    The class is like ``weakref.WeakSet``, but the death of an object runs no Python code, in which Ctrl-C would be lost.
    """

    def __init__(self) -> None:
        self._refs: dict[weakref.ref[T], None] = {}

    def add(self, each: T) -> None:
        """Add an object, which compares by identity."""
        self._refs[weakref.ref(each, self._refs.pop)] = None

    def __iter__(self) -> Iterator[T]:
        # A copy, as objects may die meanwhile.
        return iter([each for ref in self._refs.copy() if (each := ref()) is not None])


_BUDGETS: Living[Budget] = Living()


def _after_fork() -> None:
    for budget in _BUDGETS:
        budget._renew_lock()  # another thread of the parent may have held the lock
        budget._workers = Living()  # the loaders belong to the parent


os.register_at_fork(after_in_child=_after_fork)


class Worker(Protocol):
    """An object, such as a loader, that needs memory beside its reservations."""

    def required(self, *, idle: bool) -> int:
        """Count the least bytes that the worker needs now; with ``idle``, the bytes it will need even if it rests now."""
        ...


class Loan:
    """Memory that its holder gives back if another reservation does not fit; made by :meth:`Budget.lend`."""

    def __init__(
        self,
        budget: Budget,
        cost: int,
        size: Callable[[], int],
        give_back: Callable[[int], int],
        of: str | Reservation | Mapping[str, Reservation],
        waits: bool = False,
    ) -> None:
        self.cost, self.waits, self._of = cost, waits, of
        self._budget = budget
        # The ledger does not keep holders alive; the loan of a dead holder has no bytes. A WeakMethod would run Python code
        # when it dies.
        sizes, gives_back = cast(MethodType, size), cast(MethodType, give_back)
        self._holder = weakref.ref(sizes.__self__)
        self._size, self._give_back = sizes.__func__, gives_back.__func__
        self.renew()

    def renew(self) -> None:
        """Restart the count of seconds on loan; a holder calls this when it begins to lend after it had lent nothing."""
        self.since = time.monotonic()

    def by_holder(self) -> Mapping[str, int]:
        """Count the bytes on loan by the holders that reserve them; empty if nothing is on loan."""
        n_bytes = self.n_bytes
        if not n_bytes:
            return {}
        if isinstance(self._of, Mapping):
            return {held.holder: held.n_bytes for held in self._of.values()}
        return {self._of if isinstance(self._of, str) else self._of.holder: n_bytes}

    @property
    def n_bytes(self) -> int:
        """Bytes that the holder would give back now."""
        holder = self._holder()
        return 0 if holder is None else int(self._size(holder))

    def give_back(self, n_bytes: int) -> int:
        """Ask the holder to release ``n_bytes``; return the number of released bytes."""
        holder = self._holder()
        return 0 if holder is None else int(self._give_back(holder, n_bytes))

    def end(self) -> None:
        """End the loan; may be called again."""
        self._budget._end_loan(self)


class _TakingBack(threading.local):
    """Loans that a thread leaves out while it takes loans back."""

    now = False  # it takes one back
    spared: float = math.inf  # loans of this cost and dearer
    awaited = False  # loans that may wait for this thread

    @contextlib.contextmanager
    def leaving_out(self, **of: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in of}
        self.__dict__.update(of)
        try:
            yield
        finally:
            self.__dict__.update(before)


@dataclass(frozen=True)
class HeldMemory:
    """The bytes that one holder has of a budget.

    Parameters
    ----------
    bytes : int
        Bytes held.
    on_loan_bytes : int
        Held bytes that the holder gives back if another reservation does not fit.
    on_loan_s : float
        Seconds since the holder began to lend without a break, for the longest of its loans; 0 if nothing is on loan.
    """

    bytes: int
    on_loan_bytes: int = 0
    on_loan_s: float = 0.0


@dataclass(frozen=True, eq=False, repr=False)
class MemoryReport(ShownAsTables, Mapping[str, int]):
    """The bytes of a budget by holder, largest first: a mapping of str to int, taken at one moment, which prints as a table.

    Parameters
    ----------
    holders : dict of str to HeldMemory
        The holders, each with its bytes, its bytes on loan and the seconds since they were lent.
    total : int
        The budget in bytes.
    peak : int
        Most bytes that were ever held at once.
    """

    holders: dict[str, HeldMemory]
    total: int
    peak: int

    def __getitem__(self, holder: str) -> int:
        return self.holders[holder].bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self.holders)

    def __len__(self) -> int:
        return len(self.holders)

    @property
    def used(self) -> int:
        """Bytes held by all holders."""
        return sum(self.values())

    @property
    def available(self) -> int:
        """Bytes that no holder has."""
        return self.total - self.used

    @property
    def on_loan(self) -> int:
        """Held bytes that their holders would give back."""
        return sum(each.on_loan_bytes for each in self.holders.values())

    def _display(self) -> Display:
        rows = []
        for name, held in self.holders.items():
            lent = (format_size(held.on_loan_bytes), f"{held.on_loan_s:.1f} s") if held.on_loan_bytes else ("", "")
            rows.append((name, format_size(held.bytes), *lent))
        used, total, on_loan, peak = map(format_size, (self.used, self.total, self.on_loan, self.peak))
        note = f"{used} of {total} are held, {on_loan} of them on loan; at most {peak} were held"
        return Display("", [Table(("holder", "held", "on loan", "for"), rows)], [note])


class Budget:
    """The ledger of one memory budget, with the bytes of each holder. Thread-safe.

    A holder that can do with less memory lends the rest (:meth:`lend`). If a reservation does not fit, the ledger takes loans
    back, cheapest first; it refuses a reservation only if loans do not suffice. A holder's ``give_back`` runs in the thread that
    reserves. So a thread must not reserve while it holds a lock for which any ``give_back`` waits.

    Parameters
    ----------
    total : int
        The budget in bytes.
    name : str
        The budget's name in messages.
    """

    def __init__(self, total: int, name: str = "memory") -> None:
        self.total = total
        self.name = name
        self._held: dict[int, Reservation] = {}
        self._owned: dict[int, tuple[weakref.ref[Any], Reservation]] = {}
        self._dead: deque[weakref.ref[Any]] = deque()
        self._loans: list[Loan] = []
        self._workers: Living[Worker] = Living()
        self._taking_back = _TakingBack()
        self._used = 0
        self._peak = 0
        self._renew_lock()
        _BUDGETS.add(self)

    def __repr__(self) -> str:
        return f"Budget({format_size(self.used)} of {format_size(self.total)} held, at most {format_size(self._peak)})"

    def _renew_lock(self) -> None:
        # Reentrant, because a destructor that releases memory may run inside any call of the ledger.
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        self._release_dead()
        return self._used

    @property
    def peak(self) -> int:
        """Most bytes that were ever reserved at once."""
        return self._peak

    @property
    def available(self) -> int:
        """Bytes not reserved."""
        return self.total - self.used

    @property
    def on_loan(self) -> int:
        """Reserved bytes that their holders would give back."""
        return sum(loan.n_bytes for loan in self._loans)

    def lend(
        self,
        size: Callable[[], int],
        give_back: Callable[[int], int],
        *,
        cost: int,
        of: str | Reservation | Mapping[str, Reservation],
        waits: bool = False,
    ) -> Loan:
        """Register a loan, so that the ledger may take memory back from a holder.

        ``size`` and ``give_back`` are bound methods of the holder. ``size()`` returns the bytes that the holder would give back
        now, and takes no lock, as the ledger holds its own. ``give_back(n_bytes)`` releases at least ``n_bytes`` if it can, or
        fewer, and returns the number of released bytes. Any thread that reserves may call it. Loans are taken back in ascending
        order of ``cost``. ``of`` is the reservation of the bytes, a mapping of reservations that are lent whole and together, or
        the holder's name of several reservations. ``waits``: giving back may wait for other threads, see :meth:`awaited`.
        """
        loan = Loan(self, cost, size, give_back, of, waits)
        with self._lock:
            self._loans = sorted([*self._loans, loan], key=lambda each: each.cost)
        return loan

    def require(self, worker: Worker) -> None:
        """Register the least needs of ``worker``, for as long as the worker lives."""
        self._workers.add(worker)

    def required(self, without: Any = None, *, idle: bool = False) -> int:
        """Count the least bytes that all workers except ``without`` need now.

        If they need none and ``idle`` is set, count the largest need of a single resting worker instead.
        """
        others = [worker for worker in self._workers if worker is not without]
        now = sum(worker.required(idle=False) for worker in others)
        return now if now or not idle else max((worker.required(idle=True) for worker in others), default=0)

    def _end_loan(self, loan: Loan) -> None:
        with self._lock:
            self._loans = [each for each in self._loans if each is not loan]

    def _take_back(self, n_bytes: int) -> bool:
        """Take back loans of ``n_bytes``; return whether any bytes were given back."""
        if self._taking_back.now:
            return False  # this thread is a holder that reserves while it gives back
        self._taking_back.now = True
        freed = 0
        try:
            for loan in self._loans:
                if freed >= n_bytes or loan.cost >= self._taking_back.spared:
                    break
                if loan.n_bytes and not (loan.waits and self._taking_back.awaited):
                    freed += loan.give_back(n_bytes - freed)
        finally:
            self._taking_back.now = False
        return freed > 0

    def sparing(self, cost: int = DEAR_COST) -> contextlib.AbstractContextManager[None]:
        """Spare loans of at least ``cost`` in reservations of this thread, which fail instead; for callers that can wait."""
        return self._taking_back.leaving_out(spared=cost)

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """Leave out loans whose giving back waits for other threads, as they may wait for this one.

        Such a thread has what others read with, or draws what is itself on loan.
        """
        return self._taking_back.leaving_out(awaited=True)

    def reserve(self, holder: str, n_bytes: int, owner: object = None) -> Reservation:
        """Reserve ``n_bytes`` for ``holder``, taking back loans if necessary; BudgetError names all holders.

        If an ``owner`` is given, the bytes are released after its death, but not by a destructor: an interrupt in a destructor
        is lost, with the rest of the destructor. So the death is only noted, by one call of a compiled method. The bytes are
        released at the next reservation or count.
        """
        reservation = Reservation(self, holder)
        if owner is not None:
            self.release_with(owner, reservation)
        reservation.resize(n_bytes)
        return reservation

    def release_with(self, owner: object, reservation: Reservation) -> None:
        """Release a reservation after the death of ``owner``, as :meth:`reserve` does."""
        ref = weakref.ref(owner, self._dead.append)
        self._owned[id(ref)] = ref, reservation

    def _release_dead(self) -> None:
        """Release the reservations of dead owners."""
        while self._dead:
            with contextlib.suppress(IndexError, ValueError):  # another thread was faster
                ref = self._dead[0]
                owned = self._owned.get(id(ref))
                if owned is not None:
                    owned[1].release()
                self._owned.pop(id(ref), None)
                self._dead.remove(ref)  # last: Ctrl-C before would lose the bytes

    def try_reserve(self, holder: str, n_bytes: int) -> Reservation | None:
        """Reserve ``n_bytes`` of optional memory, without taking loans back; return None if they are not available."""
        with self._lock:
            return None if n_bytes > self.available else self.reserve(holder, n_bytes)

    def report(self) -> MemoryReport:
        """Report the bytes of all holders, largest first, and their bytes on loan, at one moment."""
        self._release_dead()
        with self._lock:
            now = time.monotonic()
            sums, lent, seconds = dict[str, int](), dict[str, int](), dict[str, float]()
            for loan in self._loans:
                for holder, n_bytes in loan.by_holder().items():
                    lent[holder] = lent.get(holder, 0) + n_bytes
                    seconds[holder] = max(seconds.get(holder, 0.0), now - loan.since)
            for reservation in list(self._held.values()):  # a destructor may release meanwhile
                sums[reservation.holder] = sums.get(reservation.holder, 0) + reservation.n_bytes
            total, peak = self.total, self._peak
        held = sorted(sums.items(), key=lambda item: -item[1])
        holders = {name: HeldMemory(n_bytes, min(n_bytes, lent.get(name, 0)), seconds.get(name, 0.0)) for name, n_bytes in held}
        return MemoryReport(holders, total, peak)

    def _change(self, reservation: Reservation, n_bytes: int) -> None:
        if n_bytes > reservation.n_bytes:
            self._release_dead()
        while True:
            with self._lock:
                more = n_bytes - reservation.n_bytes
                short = self._used + more - self.total
                if more <= 0 or short <= 0:
                    key, used, peak = id(reservation), self._used + more, max(self._peak, self._used + more)
                    if n_bytes:
                        self._held[key] = reservation
                    # No call lies within, so no interrupt comes between.
                    self._used, self._peak, reservation.n_bytes = used, peak, n_bytes
                    if not n_bytes:
                        self._held.pop(key, None)
                    return
            # Without the lock, as holders release memory in other threads meanwhile.
            if self._take_back(short):
                continue
            with self._lock:
                more = n_bytes - reservation.n_bytes
                if self._used + more > self.total:
                    raise self._refusal(reservation.holder, more)

    def _refusal(self, holder: str, more: int) -> BudgetError:
        """Make the error of a reservation that does not fit; the lock is held."""
        holders = ", ".join(f"{name} {format_size(size)}" for name, size in self.report().items()) or "nobody yet"
        needed = self._used + more
        return BudgetError(
            f"{holder} needs {format_size(more)} more, but {format_size(self.total - self._used)} of the "
            f"{self.name} budget of {format_size(self.total)} are left (held: {holders})",
            needed,
        )


@dataclass(eq=False)
class Reservation:
    """Bytes of a budget held under one name; a context manager that releases them."""

    budget: Budget
    holder: str
    n_bytes: int = field(default=0)

    def resize(self, n_bytes: int) -> None:
        """Change the reservation to ``n_bytes``; BudgetError if they are not available, and the reservation is unchanged."""
        self.budget._change(self, n_bytes)

    def release(self) -> None:
        """Release all bytes; may be called again."""
        self.budget._change(self, 0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[Reservation]:
        """Release all bytes only if the block raises; a context manager."""
        try:
            yield self
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
