"""Plans of one domain's caches, nodes or edges, superbatch by superbatch, written to run files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.cache.base import PolicyContext
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, PlannedBatch, PlannedPolicy, Window
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool
from featstore.plan.planfile import write_bytes
from featstore.plan.planmemory import PLANNER_DIVISOR, Spill, planning_bytes
from featstore.storage.rundir import DiskQuota, RunDirectory
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["CachePlanner"]

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]


class CachePlanner:
    """Plans the caches of one domain; one thread plans.

    Parameters
    ----------
    policy : PlannedPolicy
        No other domain's.
    n, capacity : int
        Ids of the domain; rows of each of its caches.
    runs : RunDirectory
    disk : DiskQuota
    memory : Reservation
        What planning may hold; grown where a window is larger than was expected.
    room : callable () -> int
        Bytes that it may grow by: those that no batch needs.
    pool : BufferPool
    label : str
        Tells the domain's run files from others.
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
        label: str = "",
    ) -> None:
        self._policy, self.n, self.capacity = CheckedPolicy(policy), n, capacity
        self.runs, self.disk, self.memory, self.pool = runs, disk, memory, pool
        self._room, self._label = room, label

    @property
    def looks_ahead(self) -> bool:
        """Whether plans depend on later batches."""
        return self._policy.looks_ahead

    def start(self, residents: Int64s = NO_ROWS, *, keeps_memory: bool | None = None) -> None:
        """Begin with caches that have these rows. ``keeps_memory``: the policy may hold some between plans."""
        if keeps_memory is not None:
            self._policy.keep_memory(keeps_memory)
        self._policy.start(self.capacity, PolicyContext(self.n, 1), residents)

    def plan(
        self,
        k: int,
        lengths: Int64s,
        ids: Callable[[int], Ints],
        n_planned: int,
        first: int,
        write: Callable[[SectionWriter, int, PlannedBatch], None],
        *,
        begin: Callable[[Window], None] = lambda window: None,
        foresee: Callable[[int, npt.NDArray[np.int32]], None] | None = None,
        beside: int = 0,
    ) -> SectionFile:
        """Plan superbatch ``k`` into a run file; return the file.

        Parameters
        ----------
        lengths : int64 array
            Distinct ids of each batch: of those that are planned, then of those whose next uses count.
        ids : callable (b) -> int array
        first : int
            Number of the first batch in its epoch.
        write : callable (writer, number, planned)
            Stores the plan of a batch.
        begin : callable (window), optional
            Called before the policy plans.
        foresee : callable, optional
            See :class:`~featstore.Window`.
        beside : int
            Bytes that are held beside planning.

        Raises
        ------
        BudgetError, OSError, PluginError
            No memory to plan in; the disk is full; the policy failed.
        """
        with ExitStack() as removed_after:

            def spill(_: int) -> Spill:
                positions = Spill(self.runs.file(f"next-{self._label}{k}"), self.disk)
                removed_after.callback(positions.remove)
                return positions

            spilled = self._must_spill(lengths, n_planned, beside)
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            window = Window(self.n, offsets, ids, n_planned, spill if spilled else None, foresee)
            name = self.runs.file(f"plan-{self._label}{k}")
            with SectionWriter(name, "plan", self.disk, write_bytes(int(lengths.max(initial=0)))) as writer:
                begin(window)
                for number, planned in enumerate(self._policy.plan(window, first)):
                    write(writer, number, planned)
                return writer.finish()

    def _must_spill(self, lengths: Int64s, n_planned: int, beside: int) -> bool:
        """Reserve what planning a window of these ``lengths`` holds; return whether next positions must go to disk.

        The memory grows where it is too small: with next positions in memory if it then is not more than an eighth of the
        budget, and there is room for that, after the pool gave back what nobody uses. BudgetError: it does not fit even so.
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
        # A cache on loan is not taken back for it: what it was to hold would be read again, which is worse than to spill.
        fits = whole - memory.n_bytes <= min(memory.budget.available, self._room())
        if fits and needed(0) <= memory.budget.total // PLANNER_DIVISOR:
            with suppress(BudgetError):
                memory.resize(whole)
                return False
        memory.resize(max(memory.n_bytes, needed(self.capacity, spilled=True)))
        return True
