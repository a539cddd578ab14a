"""Host cache of one feature: a row map, an array of slots, and the policy that chooses their rows."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import discard
from featstore._core.rows import copy_rows
from featstore.budget import CACHE_COST, DEAR_COST, Budget, Loan
from featstore.cache.base import OnlinePolicy, Policy, PolicyContext, StaticPolicy
from featstore.cache.gate import Gate
from featstore.cache.rowmap import CLAIM_BYTES, RowMap
from featstore.cache.select import choose_rows
from featstore.cache.slots import PlannedSlots, SlotTable
from featstore.errors import BudgetError, ClosedError, PluginError
from featstore.gather.buffers import huge_array, taking_pages
from featstore.gather.plan import BatchPlan, Changeset, Tier, TierRows

__all__ = ["FILL_BYTES", "FeatureCache", "RowMap"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Uint8s = npt.NDArray[np.uint8]
Read = Callable[..., Any]

PLAN_BYTES = 20  # that plan() allocates per row
FILL_BYTES = 64 << 20  # of one read of fill()
GIVEN_BACK_FRACTION = 1 / 16  # a cache gives back at least this part at a time: giving back passes over its row map
MAX_SLOTS = 2**31 - 2  # a slot and the mark of a slot without bytes both fit an int32


class FeatureCache:
    """A direct-addressed cache of a feature's rows in host memory. Thread-safe.

    Parameters
    ----------
    capacity : int
        Rows that the cache may hold, below 2³¹ - 1; cut to ``n``. 0 is no cache.
    row_bytes, n : int
        Bytes of a row; rows of the feature.
    policy : Policy or None
        A static policy: :meth:`fill` loads its rows once. An online policy: :meth:`admit` asks it batch by batch. None:
        changesets come from elsewhere (a planner), and :meth:`apply` carries them out.
    context : PolicyContext, optional
        Arrays that the policy may use; by default only ``n`` and ``row_bytes``.
    budget : Budget, optional
        Pays for array, map and policy state.
    name : str
        Name of the cache in the budget's report.

    Attributes
    ----------
    array : uint8 array, shape (capacity, row_bytes)
        The slots' bytes.
    map : RowMap
        The slot of each row (of no rows where the capacity is 0).

    Notes
    -----
    One batch is ``plan`` → gather → ``admit`` → ``apply``. Call ``admit`` after every gather that missed rows, and if
    ``has_failed``: it also raises the policy's error in ``plan``. The map and the policy change under one lock. Only ``apply``
    overwrites slots, and it waits for the threads that are inside :meth:`pinned`. So if several threads use one cache, or after
    a fork, each thread plans and copies its hits inside ``pinned()``, and reads its misses outside. A static cache never changes
    after ``fill``.

    A forked child keeps a static cache; it empties an online one, whose state may have been in motion at the fork.

    A policy's failure never harms data: the cache is emptied, the policy started anew, and PluginError raised after the gather.

    A cache that is lent (:meth:`lend`) shrinks if the budget is short: ``capacity`` is then less, ``is_cut`` is true, and rows in
    slots beyond it are missed. Plans made earlier may still name those slots: :meth:`surviving` and :meth:`apply` leave them out.
    """

    def __init__(
        self,
        capacity: int,
        row_bytes: int,
        n: int,
        policy: Policy | None,
        context: PolicyContext | None = None,
        budget: Budget | None = None,
        *,
        name: str = "feature cache",
    ) -> None:
        if capacity < 0 or row_bytes < 1 or n < 0:
            raise ValueError(f"a cache cannot have {capacity} slots of {row_bytes} bytes over {n} rows")
        if not (policy is None or isinstance(policy, (OnlinePolicy, StaticPolicy))):
            raise TypeError(f"{policy!r} is neither a static nor an online policy")
        capacity = min(capacity, n)
        if capacity > MAX_SLOTS:
            raise ValueError(f"a cache has at most {MAX_SLOTS} slots, not {capacity}")
        self.capacity = capacity
        self.row_bytes = row_bytes
        self.n = n
        self.policy = policy
        self.is_online = isinstance(policy, OnlinePolicy)
        self._is_static = isinstance(policy, StaticPolicy)
        self.context = PolicyContext(n, row_bytes) if context is None else context
        self.budget = budget
        self._name = name
        n_bytes = self.least_bytes(capacity, row_bytes, n, policy)
        # Of a feature that was replaced, the cache dies with the loader, and nobody closes it.
        self._reservation = None if budget is None else budget.reserve(name, n_bytes, owner=self)
        try:
            self.map = RowMap(n if capacity else 0)
            self.array: Uint8s = huge_array(capacity * row_bytes).reshape(capacity, row_bytes)
            self._slots: SlotTable | None = None
            self._planned = PlannedSlots(capacity, self.map) if policy is None else None
            if capacity and isinstance(policy, OnlinePolicy):
                self._slots = SlotTable(capacity, self.map, policy, self.context)
            if self._reservation is not None:
                self._reservation.resize(self.nbytes)
        except BaseException:
            if self._reservation is not None:
                self._reservation.release()
            raise
        self.is_cut = False
        self._loan: Loan | None = None
        self._is_loading = False  # slots are being read into, outside the gate
        self._n_filled = 0
        self._counts = {"hits": 0, "misses": 0, "admitted": 0, "evicted": 0, "fill_rows": 0}
        self._is_closed = False
        self._user: weakref.ref[object] | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._gate = Gate()

    @staticmethod
    def least_bytes(capacity: int, row_bytes: int, n: int, policy: Policy | None) -> int:
        """Count the bytes of a cache of ``capacity`` rows, as far as they are known before its policy has started."""
        if not capacity:
            return 0
        slot_bytes = 0 if isinstance(policy, StaticPolicy) else 8
        if isinstance(policy, OnlinePolicy):
            slot_bytes += 1 + policy.slot_bytes
        return 4 * n + capacity * (row_bytes + slot_bytes)

    @classmethod
    def capacity_for(cls, n_bytes: int, row_bytes: int, n: int, policy: Policy | None) -> int:
        """Count the rows that a cache of ``n_bytes``, row map and policy state included, can hold.

        BudgetError if not even one row fits; it names the bytes that suffice.
        """
        if n == 0 or n_bytes == 0:
            return 0
        fixed = cls.least_bytes(1, row_bytes, n, policy)
        per_row = cls.least_bytes(2, row_bytes, n, policy) - fixed
        if n_bytes < fixed:
            raise BudgetError(f"a cache of one row of {row_bytes} bytes over {n} rows takes {fixed} bytes, not {n_bytes}", fixed)
        return int(min(n, 1 + (n_bytes - fixed) // per_row, MAX_SLOTS))

    @property
    def in_use(self) -> bool:
        """Whether an epoch runs plans for this cache, see :meth:`claim`; a cache in use must not be replaced."""
        self._leave_parent()
        return self._user is not None and self._user() is not None

    def claim(self, user: object) -> None:
        """Let the cache follow an epoch's plans until :meth:`release`, or until ``user``, an object of the epoch, has died."""
        self._leave_parent()
        self._user = weakref.ref(user)

    def release(self) -> None:
        """End the epoch's claim of :meth:`claim`; may be called again."""
        self._user = None

    @property
    def nbytes(self) -> int:
        """Bytes held: array, row map, table and policy."""
        table = self._planned or self._slots
        return self.array.nbytes + self.map.nbytes + (0 if table is None else table.nbytes)

    @property
    def n_cached(self) -> int:
        table = self._planned or self._slots
        return self._n_filled if table is None else table.n_used

    def stats(self) -> dict[str, int]:
        """Count, since the start: requests hit and missed, rows admitted, evicted and filled; and capacity, rows cached."""
        self._leave_parent()
        with self._lock:
            counts = dict(self._counts)
            if self._slots is not None:
                counts.update(admitted=self._slots.n_admitted, evicted=self._slots.n_evicted)
            return {**counts, "capacity": self.capacity, "cached": self.n_cached}

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the slots' bytes as they are inside the ``with`` block, where a batch is planned and its hits copied.

        Keep it short: ``apply`` waits for it.
        """
        depth = self.pins()
        try:
            self.pin()
            yield
        finally:
            self.unpin(depth)

    def pins(self) -> int:
        """Count the pins that this thread holds: the depth that :meth:`unpin` goes back to."""
        if self._is_closed or self._pid != os.getpid():
            self._enter()
        return self._gate.mine.depth

    def pin(self) -> None:
        """Pin the slots, as :meth:`pinned` does; to be called inside a ``try`` whose ``finally`` calls :meth:`unpin`."""
        if self._loan is not None or not self._is_static:  # else slots never change
            self._gate.enter()

    def unpin(self, depth: int) -> None:
        """Undo :meth:`pin`, even an interrupted one: go back to the ``depth`` that :meth:`pins` counted before."""
        self._gate.leave(depth)

    def plan(self, rows: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> BatchPlan:
        """Plan a batch: hits in the host tier, misses in the base file; tell the policy of the hits.

        ``rows`` (int64 [k]) are in any order; repeats are allowed, and each counts as a request. IndexError outside ``[0, n)``.
        ``array(n, dtype)`` allocates the plan's arrays, 20 bytes a row at most. Its exceptions propagate before the policy or a
        count has changed.
        """
        row_map, slots = self.map, self._slots  # these stay if another thread closes
        if self._is_closed:
            self._check_open()
        k = len(rows)
        if not self.capacity or not k:
            with self._lock:
                self._check_open()
                self._counts["misses"] += k
            return BatchPlan(k, (TierRows(Tier.BASE, rows),) if k else ())
        if slots is None:
            parts, hits = row_map.parts(rows, array)
        with self._lock:
            self._check_open()
            if self._slots is not None:
                parts, hits = self.map.parts(rows, array, copied=True)
                self._slots.touch(hits)
            self._counts["hits"] += len(hits)
            self._counts["misses"] += k - len(hits)
        return BatchPlan(k, parts)

    def scratch_bytes(self, n_rows: int) -> int:
        """Count the bytes of the arrays that a gather of ``n_rows`` makes in :meth:`plan` and :meth:`admit`."""
        per_row = PLAN_BYTES + (0 if self._slots is None else CLAIM_BYTES)
        return per_row * n_rows + 128  # each array begins at a multiple of 8

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`admit` has an error of the policy to raise, even if no row was missed."""
        slots = self._slots
        return slots is not None and slots.has_failed

    def admit(
        self, rows: Int64s, positions: Int64s | None = None, array: Callable[..., npt.NDArray[Any]] = np.empty
    ) -> Changeset | None:
        """Choose the missed rows of a batch to admit; None if there are none. :meth:`apply` copies their bytes later.

        ``rows`` (int64 [k]) are the missed rows, a plan's BASE part, repeats allowed. ``positions`` are their rows of the output,
        by default 0 … k-1. ``array(n, dtype)`` allocates the result, within :meth:`scratch_bytes`. If there are more new rows
        than slots, the first ``capacity`` in the batch's order are admitted. Rows that another thread has admitted since are left
        out. The changeset's ``out_rows`` are evicted already. PluginError if the policy failed: the cache is then empty, and the
        batch's data are right.
        """
        self._enter()
        if positions is None:
            positions = np.arange(len(rows), dtype=np.int64)
        with self._lock:
            self._check_open()
            return None if self._slots is None else self._slots.admit(rows, positions, array)

    def apply(self, changes: Changeset | None, out: Uint8s) -> None:
        """Copy admitted rows from a batch's output, uint8 [k, row_bytes], into their slots; from now on they hit.

        ``changes`` are from :meth:`admit`. In a cache without a policy they are from a planner, and ``out_rows`` leave first.

        Raises
        ------
        PluginError
            A planner's changeset does not fit the cache (a slot taken, a row that is not cached); the cache is then empty. Or
            the cache is static.
        IndexError, ValueError
            A position lies outside ``out``, or ``out`` has another width; nothing was copied.
        """
        self._enter()
        if changes is None:
            return
        with self._gate.write(), self._lock:
            self._check_open()
            if self.is_cut and not self.capacity:
                return
            if self._slots is not None:
                # A row whose slot was given away since, by another thread's batch, is left out.
                rows, positions, slots = self.map.still_held(changes.in_rows, changes.in_positions, changes.in_slots)
                copy_rows(out, positions, self.array, slots)
                self.map.assign(rows, slots)
            elif self._planned is not None:
                if self.is_cut:
                    changes = changes.within(self.capacity, self.map.lookup(changes.out_rows) >= 0)
                with self._planned.changed(changes):
                    copy_rows(out, changes.in_positions, self.array, changes.in_slots)
                self._counts["admitted"] += len(changes.in_rows)
                self._counts["evicted"] += len(changes.out_rows)
            else:
                raise PluginError("a static cache does not change")

    def fill(self, read: Read, *, by_score: bool = False, without: RowMap | None = None) -> int:
        """Load a static policy's rows: the ``capacity`` of highest score, of equal scores the lowest rows. Return their number.

        ``read(rows, out)`` reads ``rows`` (int64 [k], ascending) into ``out`` (uint8 [k, row_bytes]), up to 64 MiB a time. With
        ``by_score`` the best rows get the first slots, so that a cache that is lent loses its lowest scores first. Then
        ``read(rows, out, positions)`` reads row ``rows[i]`` into ``out[positions[i]]``. Rows that have a slot in ``without``
        are left out. PluginError if the policy raised, or returned no valid scores. After this error, or one of ``read``, the
        cache is empty and may be filled again.
        """
        self._enter()
        policy = self.policy
        if not isinstance(policy, StaticPolicy) or not self.capacity:
            return 0
        with self._lock:
            if self._n_filled:
                raise RuntimeError("the cache was filled already")
            # The array is not touched before the rows are known: scores may take its place in the budget.
            rows, slots = choose_rows(
                policy, self.context, self.n, self.capacity, by_score, without, self.budget, self.array.nbytes
            )
            self.read_into(rows, self.array, read, slots)
            self._counts["fill_rows"] += len(rows)
            if slots is None:
                self.map.assign_first(rows)
            else:
                self.map.assign(rows, slots.astype(np.int32))
            self._n_filled = len(rows)
            self.context = PolicyContext(self.n, self.row_bytes)  # the other may keep a loader's sampler alive
            return len(rows)

    def preload(self, rows: Int64s, read: Read) -> None:
        """Load the initial rows of an empty cache that follows a planner: ``rows``, ascending, into the first slots.

        ``rows`` (int64 [k]) are distinct, at most ``capacity``; ``read`` as for :meth:`fill`. After an error the cache is empty.
        """
        self.reserve(rows)
        with self.loading() as (rows, array):
            self.read_into(rows, array, read)

    def reserve(self, rows: Int64s) -> None:
        """Give the first slots of an empty cache to ``rows``, ascending, as :meth:`preload` does.

        Look-ups find them after the ``with`` block of :meth:`loading`.
        """
        self._enter()
        with self._gate.write(), self._lock:
            self._check_open()
            if self.is_cut:
                rows = np.sort(rows)[: self.capacity]  # the slots that plans were made for
            if self._planned is None or len(rows) > self.capacity or self._planned.n_used:
                raise ValueError(
                    "only an empty cache that follows a planner is loaded ahead, with no more rows than it has slots"
                )
            self._planned.reserve(rows)

    @contextmanager
    def loading(self) -> Iterator[tuple[Int64s, Uint8s]]:
        """Yield the rows of :meth:`reserve`, without those in slots given back, and the slots' array, to read them into."""
        self._enter()
        with self._gate.write(), self._lock:
            self._check_open()
            planned, array = self._planned, self.array
            assert planned is not None
            self._is_loading = True
            rows = planned.rows
        # Outside the gate: reading may wait for a thread that waits to take this cache's memory back.
        try:
            yield rows, array
        except BaseException:
            planned.clear()
            raise
        finally:
            if self._loan is not None:
                self._loan.renew()
            self._is_loading = False
        with self._gate.write(), self._lock:
            self._check_open()
            planned.load()
            self._counts["fill_rows"] += len(rows)

    @property
    def planned_rows(self) -> Int64s:
        """The rows of :meth:`reserve` by slot; a view, which changes with the cache, as no budget counts a copy."""
        return np.empty(0, np.int64) if self._planned is None else self._planned.rows

    @staticmethod
    def read_into(rows: Int64s, array: Uint8s, read: Read, slots: Int64s | None = None) -> None:
        """Read rows into ``slots`` of ``array``, by default the first, in large pieces."""
        step = max(1, FILL_BYTES // array.shape[1])
        with taking_pages(array[: len(rows)].reshape(-1)):
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                if slots is None:
                    read(chunk, array[first : first + len(chunk)])
                else:
                    read(chunk, array, slots[first : first + step])

    def count(self, plan: BatchPlan) -> None:
        """Count the requests, hit or missed, of a plan that was made elsewhere."""
        hits = plan.count(Tier.HOST)
        with self._lock:
            self._counts["hits"] += hits
            self._counts["misses"] += plan.n_rows - hits

    def count_on_from(self, other: FeatureCache) -> None:
        """Continue the counts of ``other``, the cache that this one replaces."""
        self._counts = dict(other._counts)

    # Memory on loan.

    def lend(self) -> None:
        """Let the budget take memory back if another reservation does not fit: the last slots leave, and their pages.

        A static cache filled by score, or an online one, then loses its coldest rows.
        """
        if self._reservation is not None and self._loan is None:
            held = self._reservation
            # Plans rely on planned hits: a row that left is read again at each request.
            cost = CACHE_COST if self._planned is None else DEAR_COST
            self._loan = held.budget.lend(self._lent_bytes, self.give_back, cost=cost, of=held)

    @property
    def is_lent(self) -> bool:
        return self._loan is not None

    def _lent_bytes(self) -> int:
        return 0 if self._reservation is None or self._is_loading or self._gate.is_mine else self._reservation.n_bytes

    def give_back(self, n_bytes: int) -> int:
        """Shrink by ``n_bytes`` or more, or to nothing; return the bytes given back, 0 if the cache cannot now.

        Waits for gathers that copy hits; those never wait for memory.
        """
        if not self._lent_bytes() or self._pid != os.getpid():
            return 0
        with self._gate.write(), self._lock:
            if self._is_closed or self._is_loading or self._reservation is None:
                return 0
            before = self._reservation.n_bytes
            row = self.least_bytes(2, self.row_bytes, 0, self.policy) - self.least_bytes(1, self.row_bytes, 0, self.policy)
            self._cut(self.capacity - max(-(-n_bytes // row), int(self.capacity * GIVEN_BACK_FRACTION)))
            self._reservation.resize(self.nbytes)
            return before - self._reservation.n_bytes

    def _cut(self, capacity: int) -> None:
        """Keep the first ``capacity`` slots, and none if that is below one."""
        capacity = max(0, capacity)
        if self._slots is not None:
            self._slots.shrink(max(1, capacity), self.array)
            if not capacity:
                self._slots = None
        elif self._planned is not None:
            self._planned.shrink(capacity)
        else:
            self.map.release_from(capacity)
            self._n_filled = min(self._n_filled, capacity)
        if not capacity:
            self.map = RowMap(0)
            self._planned = self._planned and PlannedSlots(0, self.map)
        discard(self.array[capacity:].reshape(-1))
        self.array = self.array[:capacity]
        self.capacity, self.is_cut = capacity, True

    def surviving(self, plan: BatchPlan, rows: Callable[[], Int64s]) -> BatchPlan:
        """Turn a planned batch's hits in slots that were given back since into misses; ``rows()`` returns the batch's rows.

        Call this, and copy the hits, inside :meth:`pinned`.
        """
        return plan.within(self.capacity, rows) if self.is_cut else plan

    def clear(self) -> None:
        """Empty a cache that follows a planner; the next plan starts from nothing."""
        self._enter()
        with self._gate.write(), self._lock:
            if self._planned is not None:
                self._planned.clear()

    def close(self) -> None:
        """Give memory and budget back; may be called again. Threads that still use the cache get ClosedError."""
        self._leave_parent()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._loan is not None:
                self._loan.end()
            self.array = np.empty((0, self.row_bytes), np.uint8)
            self.map = RowMap(0)
            self._slots = self._planned = None
            if self._reservation is not None:
                self._reservation.release()

    def _enter(self) -> None:
        self._check_open()
        self._leave_parent()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the {self._name} was closed")

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            # In a forked child: another thread of the parent may have held the locks, or been halfway through a change.
            self._lock = threading.RLock()
            self._gate = Gate()
            self._pid = os.getpid()
            self._user = None  # the parent's epoch
            table = self._planned or self._slots
            if table is not None:
                table.reset()

    def _check(self) -> None:
        """Assert every invariant; O(n)."""
        if self._slots is not None:
            self._slots._check()
        elif self.capacity:
            cached = np.flatnonzero(self.map.slot_of_row != -1)
            slots = self.map.slot_of_row[cached]
            assert len(cached) == self.n_cached
            assert len(np.unique(slots)) == len(slots)
            assert not len(slots) or (slots.min() >= 0 and slots.max() < self.capacity)
            if self._planned is not None:
                self._planned._check()
