"""Slot tables: the row of each slot, changed by an online policy, whose answers are checked, or by a planner's changesets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import cache as _core
from featstore.cache.base import OnlinePolicy, PolicyContext
from featstore.cache.rowmap import RowMap
from featstore.errors import CorruptionError, PluginError
from featstore.gather.plan import Changeset
from featstore.registry import cause_of, error_text, plugin_errors, read_only, whole_number

__all__ = ["PlannedSlots", "SlotTable"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MOVED_ROWS = 256  # at once, while a table shrinks
_VICTIM_FAULTS = {1: "is not a slot of {capacity}", 2: "occurs twice", 3: "is empty"}


class SlotTable:
    """The slots of one cache under one online policy, without the rows' bytes.

    The table keeps ``rows`` up to date: an admitted row is *held* until its bytes are in the slot. Not thread-safe: the owner's
    lock is held around every call.

    A policy fails if it raises, or if its victims are not distinct occupied slots. The table is then emptied and the policy
    started anew, and :meth:`admit` raises PluginError (MemoryError if the policy had no memory). So the current batch's data are
    right whatever the policy did, and table and policy agree at the next batch. If even the start fails, the table stays empty
    and admits nothing more.
    """

    def __init__(self, capacity: int, rows: RowMap, policy: OnlinePolicy, context: PolicyContext) -> None:
        self.capacity = capacity
        self.policy = policy
        self.n_used = 0
        self.row_of_slot = np.full(capacity, -1, np.int64)
        self.n_admitted = 0
        self.n_evicted = 0
        self._rows = rows
        self._context = context
        self._bitmap = np.zeros(-(-capacity // 64), np.uint64)
        self._fault: PluginError | MemoryError | None = None
        self._is_broken = False
        self._n_groups = whole_number(f"policy {policy.name!r}", "groups", policy.groups, 1)
        try:
            policy.start(capacity, context)
        except MemoryError:
            raise
        except Exception as error:
            raise PluginError(f"policy {policy.name!r} cannot start with {capacity} slots: {error_text(error)}") from error

    @property
    def nbytes(self) -> int:
        label = f"policy {self.policy.name!r}"
        with plugin_errors(label, "nbytes"):
            n_bytes: Any = self.policy.nbytes
        return self.row_of_slot.nbytes + self._bitmap.nbytes + whole_number(label, "nbytes", n_bytes)

    def reset(self) -> None:
        """Empty every slot, whatever state another thread left the table and the map in, and start the policy anew."""
        self._is_broken = True  # until the policy has started; meanwhile nothing is admitted, so that no slot is overwritten
        # The whole map: a row that had lost its slot, but not yet its map entry, when the parent forked would hit for ever.
        self._rows.slot_of_row.fill(-1)
        self.row_of_slot.fill(-1)
        self._bitmap.fill(0)
        self.n_used = 0
        self.policy.start(self.capacity, self._context)
        self._is_broken = False

    @property
    def has_failed(self) -> bool:
        """Whether the next :meth:`admit` raises an earlier error of the policy, as of :meth:`touch`."""
        return self._fault is not None

    def touch(self, slots: Int32s) -> None:
        """Tell the policy of a batch's hits (repeats allowed); its error, if any, is raised by the next :meth:`admit`."""
        if self._is_broken or not len(slots):
            return
        distinct = np.empty(len(slots), np.int32)
        n = _core.distinct_slots(slots, self._bitmap, distinct)
        distinct.setflags(write=False)
        try:
            self.policy.hit(distinct[:n])
        except BaseException as error:
            self._fault = self._after(error, "hit")

    def admit(self, rows: Int64s, positions: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Changeset | None:
        """Choose the missed rows of a batch to admit, and their slots; None if nothing changes.

        The first ``capacity`` distinct absent rows in the batch's order are admitted. If the policy decides in groups, this call
        may evict some of them again; these are not among the changes. Evicted rows are absent from now on; admitted rows are held
        until their bytes arrive. A row that is still held from an earlier call is among the changes again. Raises the policy's
        error of this call, or of :meth:`touch` before.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if self._is_broken or not len(rows):
            return None
        new_rows, new_positions, held_rows, held_positions, held_slots = self._rows.claim(rows, positions, self.capacity, array)
        if len(new_rows) <= max(self.capacity - self.n_used, self.capacity // self._n_groups):
            slots, out_rows = self._place(new_rows)
        else:
            slots, out_rows = self._place_groups(new_rows)
            stays = self.row_of_slot.take(slots) == new_rows
            new_rows, new_positions, slots = new_rows[stays], new_positions[stays], slots[stays]
        if len(held_rows):
            # A held row may just have lost its slot to another row.
            held_rows, held_positions, held_slots = self._rows.still_held(held_rows, held_positions, held_slots)
            new_rows = np.concatenate((new_rows, held_rows))
            new_positions = np.concatenate((new_positions, held_positions))
            slots = np.concatenate((slots, held_slots))
        return Changeset(new_rows, new_positions, slots, out_rows) if len(new_rows) else None

    def _place_groups(self, new_rows: Int64s) -> tuple[Int32s, Int64s]:
        """Place the rows group by group; a later group may take an earlier one's slots.

        Returns the slots, and the rows evicted that were cached before the call.
        """
        step = max(1, self.capacity // self._n_groups)
        placed = [self._place(new_rows[first : first + step]) for first in range(0, len(new_rows), step)]
        slots = np.concatenate([each for each, _ in placed])
        out_rows = np.concatenate([each for _, each in placed])
        passing = new_rows[self.row_of_slot.take(slots) != new_rows]
        if len(passing):
            self.n_admitted -= len(passing)
            self.n_evicted -= len(passing)
            self._rows.hold(passing, np.zeros(len(passing), np.int32))  # for a moment, to tell them from the old rows below
            out_rows = out_rows[self._rows.slot_of_row.take(out_rows) == -1]
            self._rows.release(passing)
        return slots, out_rows

    def _place(self, new_rows: Int64s) -> tuple[Int32s, Int64s]:
        """Give slots to ``new_rows``, free ones first; return the slots and the rows evicted for them."""
        if not len(new_rows):
            return np.empty(0, np.int32), np.empty(0, np.int64)
        n_free = min(len(new_rows), self.capacity - self.n_used)
        slots = np.arange(self.n_used, self.n_used + n_free, dtype=np.int32)
        out_rows = np.empty(0, np.int64)
        if n_free < len(new_rows):
            with self._guard("victims"):
                victims = self._victims(len(new_rows) - n_free)
            out_rows = self.row_of_slot.take(victims)
            slots = np.concatenate((slots, victims))
        with self._guard("insert", new_rows):
            self.policy.insert(read_only(new_rows), read_only(slots))
            self._rows.release(out_rows)
            self._rows.hold(new_rows, slots)
            self.row_of_slot.put(slots, new_rows)
            self.n_used += n_free
            self.n_admitted += len(new_rows)
            self.n_evicted += len(out_rows)
        return slots, out_rows

    def shrink(self, capacity: int, array: npt.NDArray[np.uint8]) -> None:
        """Keep the first ``capacity`` slots, and in them the rows that the policy would evict last.

        Rows that stay move from later slots into free ones, with their bytes in ``array``, shape (slots, row_bytes). The policy
        starts anew with the new capacity; the rows that stay are inserted in its order of eviction. If the policy fails, no row
        stays, and the next :meth:`admit` raises its error.
        """
        order = np.empty(0, np.int32)
        if not self._is_broken and self.n_used:
            try:
                with self._guard("victims"):
                    order = self._victims(self.n_used)
            except (PluginError, MemoryError) as error:
                self._fault = error
        if self._is_broken:
            order = np.empty(0, np.int32)
        rows = self.row_of_slot.take(order)
        kept = order[self._rows.lookup(rows) >= 0][-capacity:]
        kept_rows = self.row_of_slot.take(kept)
        # Slots are in use from the first on.
        slots = kept.copy()
        moving = np.flatnonzero(kept >= len(kept))
        slots[moving] = np.setdiff1d(np.arange(len(kept), dtype=np.int32), kept)
        for first in range(0, len(moving), MOVED_ROWS):
            some = moving[first : first + MOVED_ROWS]
            array[slots[some].astype(np.intp)] = array.take(kept[some], axis=0)
        self._rows.release(self.row_of_slot[self.row_of_slot >= 0])
        self.n_evicted += self.n_used - len(kept)
        self.capacity = capacity
        self.row_of_slot = np.full(capacity, -1, np.int64)
        self._bitmap = np.zeros(-(-capacity // 64), np.uint64)
        self.n_used = 0
        self._is_broken = True
        try:
            with self._guard("start"):
                self.policy.start(capacity, self._context)
                self._is_broken = False
                if len(kept):
                    self.policy.insert(read_only(kept_rows), read_only(slots))
                    self._rows.assign(kept_rows, slots)
                    self.row_of_slot.put(slots, kept_rows)
                    self.n_used = len(kept)
        except (PluginError, MemoryError) as error:
            self._fault = error

    def _victims(self, n: int) -> Int32s:
        answer: Any = np.asarray(self.policy.victims(n))
        if answer.dtype.kind not in "iu":
            raise PluginError(f"policy {self.policy.name!r}: victims({n}) must return integers, not {answer.dtype}")
        if answer.shape != (n,):
            raise PluginError(f"policy {self.policy.name!r}: victims({n}) must return shape ({n},), not {answer.shape}")
        # Clipped, so that a wide value cannot wrap round into a slot number.
        lowest = 0 if answer.dtype.kind == "u" else -1
        slots: Int32s = answer.clip(lowest, min(self.capacity, np.iinfo(answer.dtype).max)).astype(np.int32)
        reason, position = _core.check_victims(slots, self.row_of_slot, self._bitmap)
        if reason:
            what = _VICTIM_FAULTS[reason].format(capacity=self.capacity)
            raise PluginError(f"policy {self.policy.name!r}: victims({n})[{position}] = {answer[position]} {what}")
        return slots

    @contextmanager
    def _guard(self, hook: str, new_rows: Int64s | None = None) -> Iterator[None]:
        """Empty the table if a hook fails or is interrupted, so that table and policy agree; the error names the policy."""
        try:
            yield
        except BaseException as error:
            fault = self._after(error, hook, new_rows)
            if fault is error:
                raise
            raise fault from cause_of(error)

    def _after(self, error: BaseException, hook: str, new_rows: Int64s | None = None) -> PluginError | MemoryError:
        """Empty the table after a hook's ``error``; return the exception to raise, with the policy's name.

        An interrupt is raised here.
        """
        self._is_broken = True
        if new_rows is not None:
            self._rows.release(new_rows)
        # If the policy cannot even start, the table stays empty; the first error is shown.
        with suppress(Exception):
            self.reset()
        if isinstance(error, (PluginError, MemoryError)):
            return error
        if not isinstance(error, Exception):
            raise error
        fault = PluginError(f"policy {self.policy.name!r}: {hook} raised {error_text(error)}")
        fault.__cause__ = cause_of(error)
        return fault

    def _check(self) -> None:
        """Assert every invariant; O(n)."""
        entries = self._rows.slot_of_row
        mapped = np.flatnonzero(entries != -1)
        slots = np.where(entries[mapped] >= 0, entries[mapped], -2 - entries[mapped])
        used = np.flatnonzero(self.row_of_slot >= 0)
        assert not self._bitmap.any()
        assert len(used) == self.n_used == len(mapped), (len(used), self.n_used, len(mapped))
        assert (used < self.n_used).all()
        assert (np.sort(slots) == used).all()
        assert (self.row_of_slot[slots] == mapped).all()
        if not self._is_broken:
            self.policy._check()


class PlannedSlots:
    """The slots of one cache that follows a planner, without the rows' bytes; the table keeps ``rows`` up to date."""

    def __init__(self, capacity: int, rows: RowMap) -> None:
        self._rows = rows
        self._row_of_slot = np.full(capacity, -1, np.int64)
        self.n_used = 0

    @property
    def nbytes(self) -> int:
        return self._row_of_slot.nbytes

    @contextmanager
    def changed(self, changes: Changeset) -> Iterator[None]:
        """Apply a planner's changes; the ``with`` block copies their bytes. Any error empties the cache.

        PluginError if the changeset does not fit the table; CorruptionError if it was read from a file.
        """
        rows = changes.in_rows
        try:
            problem = self._rows.exchange(changes.out_rows, rows, changes.in_slots, self._row_of_slot)
            if problem is not None and changes.path:
                raise CorruptionError(f"a plan {problem}", changes.path)
            if problem is not None:
                raise PluginError(f"the changeset {problem}")
            self.n_used += len(rows) - len(changes.out_rows)
            yield
        except BaseException:
            self._rows.release(rows[(rows >= 0) & (rows < len(self._rows))])
            self.clear()
            raise

    @property
    def rows(self) -> Int64s:
        """The rows that :meth:`reserve` gave slots, by slot; a view, before any changes."""
        return self._row_of_slot[: self.n_used]

    def reserve(self, rows: Int64s) -> None:
        """Give the first slots of an empty table to ``rows``, ascending. Look-ups find them after :meth:`load`."""
        slots = self._row_of_slot[: len(rows)]
        slots[:] = rows
        slots.sort()  # where they lie: a copy of many rows would be in no ledger
        self.n_used = len(rows)

    def load(self) -> None:
        """Record that slots hold the rows that :meth:`reserve` gave them."""
        self._rows.assign_first(self.rows)

    def clear(self) -> None:
        """Empty all slots."""
        self._rows.release(self._row_of_slot[self._row_of_slot >= 0])
        self._row_of_slot.fill(-1)
        self.n_used = 0

    def shrink(self, capacity: int) -> None:
        """Keep the first ``capacity`` slots."""
        gone = self._row_of_slot[capacity:]
        gone = gone[gone >= 0]
        self._rows.release(gone)
        self._row_of_slot = self._row_of_slot[:capacity].copy()
        self.n_used -= len(gone)

    def reset(self) -> None:
        """Empty the table, whatever state another thread left the table and the map in."""
        self._row_of_slot.fill(-1)
        self._rows.slot_of_row.fill(-1)
        self.n_used = 0

    def _check(self) -> None:
        """Assert every invariant; O(n)."""
        cached = np.flatnonzero(self._rows.slot_of_row != -1)
        assert self.n_used == np.count_nonzero(self._row_of_slot >= 0)
        assert (self._row_of_slot[self._rows.slot_of_row[cached]] == cached).all()
