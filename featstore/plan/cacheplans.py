"""Plans of the caches of one domain (nodes or edges), written to one run file a superbatch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.cache.base import PolicyContext
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.fixed import FixedRows
from featstore.cache.planned import NO_ROWS, Horizon, PlannedPolicy
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool
from featstore.plan.planfile import write_bytes, write_plan
from featstore.plan.planmemory import PLANNER_FRACTION, Spill, planning_bytes
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["Accesses", "CachePlanner", "PlanWriter"]

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]


class Accesses(Protocol):
    """The distinct ids of each batch of a superbatch."""

    @property
    def lengths(self) -> Int64s:
        """Number of ids of each batch."""
        ...

    def ids(self, number: int) -> Ints:
        """Return the ids of a batch."""
        ...


class CachePlanner:
    """Plan the caches of one domain, in one thread.

    Parameters
    ----------
    policy : PlannedPolicy
        Serves no other domain.
    n, capacity : int
        Number of ids in the domain; rows that each of its caches holds.
    runs : RunDirectory
    disk : DiskQuota
    memory : Reservation
        Memory that planning may hold. The planner enlarges it for a horizon larger than expected.
    room : callable () -> int
        Bytes by which ``memory`` may grow: those that no batch needs.
    pool : BufferPool
    time : callable
        ``time("plan")`` is a context manager that measures planning.
    label : str
        Part of the names of the domain's run files.
    """

    def __init__(
        self,
        policy: PlannedPolicy,
        n: int,
        capacity: int,
        *,
        runs: RunDirectory,
        disk: DiskQuota,
        memory: Reservation,
        room: Callable[[], int],
        pool: BufferPool,
        time: Callable[[str], AbstractContextManager[None]],
        label: str = "",
    ) -> None:
        self._policy, self.n, self.capacity = CheckedPolicy(policy), n, capacity
        self.runs, self.disk, self.memory, self.pool = runs, disk, memory, pool
        self._room, self.time, self.label = room, time, label

    @property
    def looks_ahead(self) -> bool:
        """Whether plans depend on later batches."""
        return self._policy.looks_ahead

    @property
    def plans_each_alone(self) -> bool:
        """Whether the plan of a batch depends on no other batch, so that :meth:`writer` may write it."""
        return isinstance(self._policy.policy, FixedRows)

    @property
    def nbytes(self) -> int:
        """Bytes of ``memory`` that are held between plans."""
        return self._policy.nbytes + self._policy.check_bytes

    def start(self, residents: Int64s = NO_ROWS, *, keeps_memory: bool | None = None) -> None:
        """Start the policy with ``residents`` in the caches. ``keeps_memory``: whether it may hold memory between plans."""
        if keeps_memory is not None:
            self._policy.keep_memory(keeps_memory)
        self._policy.start(self.capacity, PolicyContext(self.n, 1), residents)

    def writer(self, k: int, *, by_row: bool) -> PlanWriter:
        """Make the writer of the plans of superbatch ``k``, one batch after the other; for a policy that plans each alone."""
        assert isinstance(self._policy.policy, FixedRows)
        make = partial(SectionWriter, self.runs.file(f"plan-{self.label}{k}"), "plan", self.disk)
        return PlanWriter(make, self._policy.policy, self._hold, self.time, by_row=by_row)

    def _hold(self, n: int) -> None:
        """Reserve memory to plan a batch of ``n`` ids alone; BudgetError if it does not suffice."""
        self._must_spill(np.array([n]), 1, 0)

    def plan(
        self,
        k: int,
        part: Accesses,
        ahead: Accesses | None,
        first: int,
        check: Callable[[], None],
        *,
        begin: Callable[[Horizon], None] = lambda horizon: None,
        announce: Callable[[int, npt.NDArray[np.int32]], None] | None = None,
        missed: Callable[[int, Ints], None] | None = None,
        beside: int = 0,
    ) -> SectionFile:
        """Plan superbatch ``k`` into a run file; return the file.

        Parameters
        ----------
        part : Accesses
            The superbatch's.
        ahead : Accesses or None
            Those of the next superbatch, which count as next uses.
        first : int
            Number of the first batch in its epoch.
        check : callable
            Called batch by batch; it raises once the epoch is over.
        begin : callable (horizon), optional
            Called before the policy plans.
        announce : callable, optional
            See :class:`~featstore.Horizon`.
        missed : callable (number, ids), optional
            Called with the ids that a planned batch misses, ascending. Its plan then names them in this order.
        beside : int
            Bytes of the same memory that are held during planning, but not by it.

        Raises
        ------
        BudgetError, OSError, PluginError
            The memory does not suffice; the disk is full; the policy failed.
        """
        parts = [part] if ahead is None else [part, ahead]
        lengths, n_planned = np.concatenate([each.lengths for each in parts]), len(part.lengths)
        last: tuple[int, Ints] = (-1, NO_ROWS)

        def ids(b: int) -> Ints:
            nonlocal last
            if b >= n_planned:
                return parts[1].ids(b - n_planned)
            if last[0] != b:  # kept, because first the policy reads a batch's ids, then the loop below
                last = b, part.ids(b)
            return last[1]

        with self.time("plan"), ExitStack() as removed_after:

            def spill(_: int) -> Spill:
                positions = Spill(self.runs.file(f"next-{self.label}{k}"), self.disk)
                removed_after.callback(positions.remove)
                return positions

            spilled = self._must_spill(lengths, n_planned, beside)
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            horizon = Horizon(self.n, offsets, ids, n_planned, spill if spilled else None, announce)
            name = self.runs.file(f"plan-{self.label}{k}")
            with SectionWriter(name, "plan", self.disk, write_bytes(int(lengths.max(initial=0)))) as writer:
                begin(horizon)
                for number, planned in enumerate(self._policy.plan(horizon, first)):
                    if missed is None:
                        write_plan(writer.append, planned)
                    else:
                        missed(number, ids(number).take(write_plan(writer.append, planned, ids(number))))
                    check()
                return writer.finish()

    def _must_spill(self, lengths: Int64s, n_planned: int, beside: int) -> bool:
        """Reserve memory to plan a horizon of these ``lengths``; return whether next positions must be spilled to disk.

        The memory grows if it is too small. Next positions stay in memory on two conditions. Planning, the tables of slots left
        out, takes at most an eighth of the budget; the growth fits the free memory, after the pool gave back idle buffers.
        BudgetError: planning does not fit even with next positions on disk.
        """
        memory = self.memory
        accesses = int(lengths.sum()), int(lengths[:n_planned].sum()), int(lengths.max(initial=0))
        policy = {"checked": self._policy.is_checked, "looks_ahead": self.looks_ahead}

        def needed(capacity: int, *, spilled: bool = False) -> int:
            return beside + planning_bytes(self.n, *accesses, capacity=capacity, spilled=spilled, **policy)

        whole = needed(self.capacity)
        if whole <= memory.n_bytes:
            return False
        self.pool.trim()
        # No cache on loan is taken back for this: reading its rows again would cost more than spilling.
        fits = whole - memory.n_bytes <= min(memory.budget.available, self._room())
        if fits and needed(0) <= int(memory.budget.total * PLANNER_FRACTION):
            with suppress(BudgetError):
                memory.resize(whole)
                return False
        memory.resize(max(memory.n_bytes, needed(self.capacity, spilled=True)))
        return True


class PlanWriter:
    """Write the plans of a superbatch batch by batch, by a policy that plans each alone; see :meth:`CachePlanner.writer`.

    ``make(n_bytes)`` opens the run file, with buffers of ``n_bytes``; ``hold(n)`` reserves memory to plan a batch of ``n`` ids.
    ``by_row``: plans name the missed rows ascending, as extents have them. A context manager, which removes an unfinished file.
    """

    def __init__(
        self,
        make: Callable[[int], SectionWriter],
        policy: FixedRows,
        hold: Callable[[int], None],
        time: Callable[[str], AbstractContextManager[None]],
        *,
        by_row: bool,
    ) -> None:
        self._make, self._policy, self._hold, self._time, self._by_row = make, policy, hold, time, by_row
        self._writer: SectionWriter | None = None  # made for the first batch, whose size says how much it buffers

    def add(self, ids: Ints) -> None:
        """Plan the next batch, of distinct ``ids``. BudgetError, OSError: the memory does not suffice; the disk is full."""
        with self._time("plan"):
            self._hold(len(ids))
            if self._writer is None:
                self._writer = self._make(write_bytes(len(ids)))
            write_plan(self._writer.append, self._policy.of_batch(ids), ids if self._by_row else None)

    def finish(self) -> SectionFile:
        """Close the file of at least one batch, and open it for reading."""
        assert self._writer is not None
        return self._writer.finish()

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)
