"""Options, sizes, the environment and the memory budget. Imports nothing else of the library but the errors."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MethodType, TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, get_args

import psutil

from featstore.errors import BudgetError

__all__ = [
    "Budget",
    "Living",
    "Loan",
    "Options",
    "Reservation",
    "Worker",
    "available_memory",
    "check_at_least",
    "check_flag",
    "format_size",
    "parse_cache_size",
    "parse_disk",
    "parse_size",
]

Backend = Literal["auto", "io_uring", "pread"]
Verify = Literal["always", "open", "off"]
T = TypeVar("T")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_NUMBER = re.compile(r"\s*\d+(?:\.\d+)?\s*")
_LEAST_WITHOUT_UNIT = 4096  # bytes: fewer are no cache that anybody wants, but a share or a unit that was forgotten
_MULTIPLE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
        raise TypeError(f"{name} must be True or False, not {value!r}")


def parse_size(size: int | str) -> int:
    """Return a byte count from an int or a string such as ``"4GiB"``, ``"400MB"``, ``"1.5 G"`` (``G`` is 10⁹, ``GiB`` 2³⁰).

    Raises
    ------
    ValueError
        The text is not a size, or the size is negative.
    TypeError
        Neither an int nor a string.
    """
    if not isinstance(size, str):
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"a size is an int or a string like '4GiB', not {type(size).__name__}")
        n_bytes = operator.index(size)
        if n_bytes < 0:
            raise ValueError(f"a size cannot be negative: {n_bytes}")
        return n_bytes
    match = _SIZE.fullmatch(size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"not a size: {size!r}; write a number of bytes or a number with KB, MB, GB, KiB, MiB, GiB …")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_cache_size(size: Any, name: str = "", of: str = "the rows") -> int | float:
    """Return the size of a cache: bytes as an int, or a share as a float in (0, 1].

    Parameters
    ----------
    size : int, float or str
        A share as a float (``0.1``) or in percent (``"10%"``); bytes as an int, or as text that :func:`parse_size` takes. 0: no
        cache.
    name, of : str
        The argument, and what a share is one of, for messages.

    Raises
    ------
    ValueError
        No size, a share beyond 0 … 1, or a number below 4,096 without a unit, which is no cache; says what was probably meant.
    TypeError
        No number and no text.
    """
    percent = _PERCENT.fullmatch(size) if isinstance(size, str) else None
    if percent is not None or (isinstance(size, Real) and not isinstance(size, Integral)):
        share = float(percent[1]) / 100 if percent is not None else float(size)
        if share == 0:
            return 0
        if not 0 < share <= 1:
            what = f"{name} as a share" if name else "a share"
            raise ValueError(f"{what} of {of} must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        return share
    n_bytes = parse_size(size)
    has_unit = isinstance(size, str) and not _NUMBER.fullmatch(size)
    number = n_bytes if has_unit else float(size)
    if not has_unit and 0 < number < _LEAST_WITHOUT_UNIT:
        shown = f"{name}={size!r}" if name else repr(size)
        percents, bytes_ = f"'{100 * number if number <= 1 else number:g}%'", f"'{number:g}MiB'"
        meant = percents if number <= 1 else f"{percents} or {bytes_}" if number <= 100 else bytes_
        raise ValueError(
            f"{shown} has no unit and would be a cache of {n_bytes} bytes: probably {meant} is meant; write a share of {of} as "
            f"'10%' or as a float, bytes with a unit ('{n_bytes}B')"
        )
    return n_bytes


def parse_disk(size: int | str, features_bytes: int) -> int:
    """Return a byte count of disk: what :func:`parse_size` takes, or a multiple of the features such as ``"1.5x"``.

    Parameters
    ----------
    size : int or str
    features_bytes : int
        Bytes of the features that are meant.

    Raises
    ------
    ValueError, TypeError
        As :func:`parse_size`.
    """
    match = _MULTIPLE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        try:
            return parse_size(size)
        except ValueError as error:
            raise ValueError(f"{error}; or a multiple of the features, such as '1.5x'") from None
    return int(Fraction(match[1]) * features_bytes)


def format_size(n_bytes: int) -> str:
    """Return ``n_bytes`` as text with a binary unit, such as ``'1.50 GiB'``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def _cgroup_headroom() -> int | None:
    """Bytes this process's memory cgroup (v1 or v2) still allows; None where none is set."""
    headroom: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        node = base / group.lstrip("/")
        for level in (node, *node.parents):
            try:
                limit = (level / limit_name).read_text().strip()
                # Page cache is charged to the group too, but is given back under pressure.
                stat = dict(row.split() for row in (level / "memory.stat").read_text().splitlines())
                usage = int((level / usage_name).read_text())
            except (OSError, ValueError):
                continue
            if limit.isdigit() and int(limit) < 2**60:
                reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                headroom.append(int(limit) - usage + reclaimable)
            if level == base:
                break
    return max(0, min(headroom)) if headroom else None


def available_memory() -> int:
    """Bytes of memory that may be taken now: what the machine has available, or less under a memory cgroup."""
    machine = int(psutil.virtual_memory().available)
    group = _cgroup_headroom()
    return machine if group is None else min(machine, group)


@dataclass(frozen=True)
class Options:
    """How a dataset is opened; passed on explicitly, never changed.

    ``FEATSTORE_BACKEND``, ``FEATSTORE_VERIFY`` and ``FEATSTORE_THREADS`` give defaults, read by :meth:`resolve` once at ``open``.
    """

    memory: int
    backend: Backend = "auto"
    verify: Verify = "always"
    threads: int = 1
    queue_depth: int = 512

    @classmethod
    def resolve(
        cls,
        memory: int | str | None = None,
        backend: str = "auto",
        verify: str | None = None,
        threads: int | None = None,
    ) -> Options:
        """Check user-given options and fill in what was left open (``memory``: half of what is available)."""
        if backend == "auto":
            backend = os.environ.get("FEATSTORE_BACKEND", "auto")
        if verify is None:
            verify = os.environ.get("FEATSTORE_VERIFY", "always")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be 'auto', 'io_uring' or 'pread', not {backend!r}")
        if verify not in get_args(Verify):
            raise ValueError(f"verify must be 'always', 'open' or 'off', not {verify!r}")
        if threads is None:
            text = os.environ.get("FEATSTORE_THREADS", "0")
            if not text.strip().isdecimal():
                raise ValueError(f"FEATSTORE_THREADS must be a number of threads, not {text!r}")
            threads = int(text) or len(os.sched_getaffinity(0))
        check_at_least("threads", threads, 1)
        n_bytes = available_memory() // 2 if memory is None else parse_size(memory)
        return cls(n_bytes, cast(Backend, backend), cast(Verify, verify), threads)


class Living(Generic[T]):
    """The objects that were added and still live; keeps none alive. Thread-safe.

    As ``weakref.WeakSet``, but a death runs no Python code: Ctrl-C while objects are collected would be lost in it.
    """

    def __init__(self) -> None:
        self._refs: dict[weakref.ref[T], None] = {}

    def add(self, each: T) -> None:
        """Add an object; it compares by identity."""
        self._refs[weakref.ref(each, self._refs.pop)] = None

    def __iter__(self) -> Iterator[T]:
        # A copy: objects may die meanwhile.
        return iter([each for ref in self._refs.copy() if (each := ref()) is not None])


_BUDGETS: Living[Budget] = Living()


def _after_fork() -> None:
    for budget in _BUDGETS:  # another thread of the parent may have held the lock
        budget._renew_lock()


os.register_at_fork(after_in_child=_after_fork)


class Worker(Protocol):
    """Who needs memory beside what it holds under names of its own."""

    def required(self, *, idle: bool) -> int:
        """Return the least bytes that it needs now; with ``idle`` those that it will need, though it rests."""
        ...


class Loan:
    """Memory that its holder gives back where another reservation does not fit; made by :meth:`Budget.lend`."""

    def __init__(self, budget: Budget, cost: int, size: Callable[[], int], give_back: Callable[[int], int], holder: str) -> None:
        self.cost, self.holder = cost, holder
        self._budget = budget
        # The ledger keeps no holder alive: a lost holder's loan is over. Not a WeakMethod, whose death runs Python code.
        sizes, gives_back = cast(MethodType, size), cast(MethodType, give_back)
        self._holder = weakref.ref(sizes.__self__)
        self._size, self._give_back = sizes.__func__, gives_back.__func__

    @property
    def n_bytes(self) -> int:
        """Bytes that the holder would give back now."""
        holder = self._holder()
        return 0 if holder is None else int(self._size(holder))

    def give_back(self, n_bytes: int) -> int:
        """Ask the holder for ``n_bytes``; return how many it has released."""
        holder = self._holder()
        return 0 if holder is None else int(self._give_back(holder, n_bytes))

    def end(self) -> None:
        """Lend no longer; may be called again."""
        self._budget._end_loan(self)


class Budget:
    """The ledger of one memory budget: who holds how many of its bytes. Thread-safe.

    A holder that can do with less lends the rest (:meth:`lend`). Where a reservation does not fit, the ledger takes loans back,
    cheapest first, so that nothing is refused while a loan is out. A holder's ``give_back`` runs in the thread that reserves; a
    thread that holds a lock which a holder's ``give_back`` waits for must not reserve.

    Parameters
    ----------
    total : int
        The budget in bytes.
    name : str
        What messages call it.
    """

    def __init__(self, total: int, name: str = "memory") -> None:
        self.total = total
        self.name = name
        self._held: dict[int, Reservation] = {}
        self._owned: dict[int, tuple[weakref.ref[Any], Reservation]] = {}
        self._dead: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        self._loans: list[Loan] = []
        self._workers: Living[Worker] = Living()
        self._taking_back = threading.local()
        self._used = 0
        self._peak = 0
        self._renew_lock()
        _BUDGETS.add(self)

    def _renew_lock(self) -> None:
        # Reentrant: a destructor that releases memory may run inside any of our own calls.
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
        """Bytes reserved that their holders would give back."""
        return self.lent()

    def lent(self, without: str | None = None) -> int:
        """Return the bytes on loan, but for those that the report has under the name ``without``."""
        return sum(loan.n_bytes for loan in list(self._loans) if loan.holder != without)

    def lend(self, size: Callable[[], int], give_back: Callable[[int], int], *, cost: int, holder: str = "") -> Loan:
        """Let the ledger take memory back from a holder.

        Parameters
        ----------
        size : bound method () -> int
            Bytes that the holder would give back now; waits for nobody.
        give_back : bound method (n_bytes) -> int
            Releases ``n_bytes``, or more, or as many as can be had, and returns how many; called from any thread that reserves.
        cost : int
            Loans are taken back in ascending order of it.
        holder : str
            Under which name the report has the bytes, where that matters.
        """
        loan = Loan(self, cost, size, give_back, holder)
        with self._lock:
            self._loans = sorted([*self._loans, loan], key=lambda each: each.cost)
        return loan

    def require(self, worker: Worker) -> None:
        """Let others know what ``worker`` needs at the least, for as long as it lives."""
        self._workers.add(worker)

    def required(self, without: Any = None, *, idle: bool = False) -> int:
        """Return the bytes that all workers but one need at the least now.

        With ``idle``, where all of them rest: those that the largest will need.
        """
        others = [worker for worker in self._workers if worker is not without]
        now = sum(worker.required(idle=False) for worker in others)
        return now if now or not idle else max((worker.required(idle=True) for worker in others), default=0)

    def _end_loan(self, loan: Loan) -> None:
        with self._lock:
            self._loans = [each for each in self._loans if each is not loan]

    def _take_back(self, n_bytes: int) -> bool:
        """Take back loans of ``n_bytes``; return whether anything was given back."""
        if getattr(self._taking_back, "now", False):
            return False  # a holder that reserves while it gives back
        self._taking_back.now = True
        freed = 0
        try:
            for loan in self._loans:
                if freed >= n_bytes:
                    break
                if loan.n_bytes:
                    freed += loan.give_back(n_bytes - freed)
        finally:
            self._taking_back.now = False
        return freed > 0

    def reserve(self, holder: str, n_bytes: int, owner: object = None) -> Reservation:
        """Reserve ``n_bytes`` for ``holder``, taking back loans where they are needed.

        Where there is an ``owner``, they are released after it has died. Not by its destructor: an interrupt there is lost, with
        what was left of the destructor. So a death is only noted, which is one call of a compiled method, and the bytes are
        released when memory is asked for, or counted.

        Raises
        ------
        BudgetError
            They are not available; names the holders and the least total that would do.
        """
        reservation = Reservation(self, holder)
        if owner is not None:
            ref = weakref.ref(owner, self._dead.put)
            self._owned[id(ref)] = ref, reservation
        reservation.resize(n_bytes)
        return reservation

    def _release_dead(self) -> None:
        """Release what belongs to owners that have died."""
        while not self._dead.empty():
            with contextlib.suppress(Empty):  # another thread was faster
                self._owned.pop(id(self._dead.get_nowait()))[1].release()

    def try_reserve(self, holder: str, n_bytes: int) -> Reservation | None:
        """Reserve ``n_bytes``, or return None where they are not available; takes no loans back: for what is optional."""
        with self._lock:
            return None if n_bytes > self.available else self.reserve(holder, n_bytes)

    def report(self) -> dict[str, int]:
        """Return bytes by holder, largest first."""
        self._release_dead()
        with self._lock:
            sums: dict[str, int] = {}
            for reservation in list(self._held.values()):  # a destructor may release meanwhile
                sums[reservation.holder] = sums.get(reservation.holder, 0) + reservation.n_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _change(self, reservation: Reservation, n_bytes: int) -> None:
        if n_bytes > reservation.n_bytes:
            self._release_dead()
        while True:
            with self._lock:
                more = n_bytes - reservation.n_bytes
                short = self._used + more - self.total
                if more <= 0 or short <= 0:
                    self._used += more
                    self._peak = max(self._peak, self._used)
                    reservation.n_bytes = n_bytes
                    if n_bytes:
                        self._held[id(reservation)] = reservation
                    else:
                        self._held.pop(id(reservation), None)
                    return
            # Without the lock: holders release from other threads meanwhile.
            if self._take_back(short):
                continue
            with self._lock:
                more = n_bytes - reservation.n_bytes
                if self._used + more > self.total:
                    raise self._refusal(reservation.holder, more)

    def _refusal(self, holder: str, more: int) -> BudgetError:
        """Return the error of a reservation that does not fit; the lock is held."""
        holders = ", ".join(f"{name} {format_size(size)}" for name, size in self.report().items()) or "nobody yet"
        needed = self._used + more
        return BudgetError(
            f"{holder} needs {format_size(more)} more, but {format_size(self.total - self._used)} of the "
            f"{self.name} budget of {format_size(self.total)} are left (held: {holders}); "
            f"at least {needed} bytes ({format_size(needed)}) would do",
            needed,
        )


@dataclass(eq=False)
class Reservation:
    """Bytes of a budget held under one name; a context manager that releases them."""

    budget: Budget
    holder: str
    n_bytes: int = field(default=0)

    def resize(self, n_bytes: int) -> None:
        """Hold ``n_bytes`` from now on; raises BudgetError, holding what it held, where they are not available."""
        self.budget._change(self, n_bytes)

    def release(self) -> None:
        """Give everything back; may be called again."""
        self.budget._change(self, 0)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
