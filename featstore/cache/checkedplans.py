"""A planned plug-in whose every answer is checked against a slot-to-row table before anything uses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core import cache as _core
from featstore._core.blocks import missed_positions
from featstore.cache.base import PolicyContext
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch, PlannedPolicy
from featstore.cache.rowmap import RowMap
from featstore.errors import FeatstoreError, PluginError
from featstore.gather.plan import Changeset
from featstore.registry import cause_of, error_text, read_only

__all__ = ["CheckedPolicy"]

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class CheckedPolicy:
    """Planned policy whose every plan is checked against a table of its own.

    The table keeps the row of each slot. A plan is refused unless every slot that it names for a row holds that row, and unless
    its changes fit the table. So the rows that a plan reads from a cache are right. Each method raises PluginError if the policy
    raised, or broke its contract. The message names the policy, and for a wrong plan the batch, row and slot. Errors of a
    horizon's callables (a disk is full, the epoch is over) pass through unchanged.

    The library's own policies are checked only with ``always``; ``is_checked`` tells. Otherwise their plans and errors are
    passed on unchanged: the contract suite shows that these plans are right.

    Memory, where plans are checked: 4 bytes a row and 4 a slot, from :meth:`start` on. A batch costs a pass over its slots and
    one over its changes. One thread at a time.
    """

    def __init__(self, policy: PlannedPolicy, *, always: bool = False) -> None:
        self._policy = self.policy = policy
        self._is_own = type(policy).__module__.startswith("featstore.cache.")
        self.is_checked = always or not self._is_own
        self._map = RowMap(0)
        self._row_of_slot: Ints = np.empty(0, np.int32)

    @property
    def label(self) -> str:
        with suppress(Exception):
            return f"policy {self._policy.name!r}"
        return f"policy {type(self._policy).__qualname__!r}"

    @property
    def nbytes(self) -> int:
        """Bytes that the policy says it holds."""
        with self._guard("nbytes"):
            n_bytes: int = operator.index(self._policy.nbytes)
        if n_bytes < 0:
            raise PluginError(f"{self.label}: nbytes must be a number of bytes, not {n_bytes}")
        return n_bytes

    @property
    def check_bytes(self) -> int:
        """Bytes of the tables that plans are checked against, from :meth:`start` on."""
        return int(self._map.slot_of_row.nbytes + self._row_of_slot.nbytes)

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy's plans depend on later batches."""
        with self._guard("looks_ahead"):
            return bool(self._policy.looks_ahead)

    def keep_memory(self, keep: bool) -> None:
        with self._guard("keep_memory"):
            self._policy.keep_memory(keep)

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        """Start the policy, see :meth:`PlannedPolicy.start`; ``residents`` are distinct, and ``capacity`` is cut to the rows."""
        capacity = min(capacity, context.n)
        if self.is_checked:
            self._begin(capacity, context.n, residents)
        with self._guard("start"):
            if len(residents):
                self._policy.start(capacity, context, read_only(residents))
            else:
                self._policy.start(capacity, context)

    def _begin(self, capacity: int, n: int, residents: Int64s) -> None:
        """Make the slot table, with ``residents`` in the first slots."""
        if len(self._map) != n:
            self._map = RowMap(n)
        else:
            self._map.slot_of_row.fill(-1)
        self._row_of_slot = np.full(capacity, -1, np.int32 if n < 2**31 else np.int64)
        self._row_of_slot[: len(residents)] = residents
        self._map.assign(residents, np.arange(len(residents), dtype=np.int32))

    def plan(self, horizon: Horizon, first: int = 0) -> Generator[PlannedBatch, None, None]:
        """Yield the plan of each of the horizon's first ``n_planned`` batches; messages count them from ``first``.

        The plans' arrays are their own, which the policy cannot change: ``slots`` and ``in_slots`` int32, the others int64.
        """
        if not self.is_checked:
            yield from self._policy.plan(horizon)
            return
        lent = _Lent(horizon)
        answer: Any = None
        is_over = False
        try:
            with self._guard("plan", lent.errors):
                answer = self._policy.plan(lent.horizon())
                batches = iter(answer)
            for number in range(horizon.n_planned):
                planned = self._next(batches, lent)
                if planned is _END:
                    raise PluginError(f"{self.label}: plan ended after {number} of {horizon.n_planned} batches")
                yield self._checked(planned, number, lent, f"{self.label}: batch {first + number}")
            if self._next(batches, lent) is not _END:
                raise PluginError(f"{self.label}: plan yielded more than the {horizon.n_planned} batches of its horizon")
            is_over = True
        finally:
            if not is_over:
                _close(answer)

    def _next(self, batches: Iterator[Any], lent: _Lent) -> Any:
        with self._guard("plan", lent.errors):
            return next(batches, _END)

    def _checked(self, planned: Any, number: int, lent: _Lent, where: str) -> PlannedBatch:
        """Check a plan, apply its changes to the table, and return a copy of the plan."""
        if not isinstance(planned, PlannedBatch):
            raise PluginError(f"{where}: plan must yield a PlannedBatch, not a {type(planned).__name__}")
        with self._guard("reading the changes", where=where):
            changes: Any = planned.changes
        if not isinstance(changes, Changeset):
            raise PluginError(f"{where}: the changes must be a Changeset, not a {type(changes).__name__}")
        ids = lent.ids(number)
        slots: Int32s = self._integers(planned, "slots", where, np.int32, len(ids))
        bad = _core.check_hits(ids, slots, self._row_of_slot)
        if bad >= 0:
            raise PluginError(f"{where}: row {ids[bad]} is planned in slot {self._what_of(int(slots[bad]))}")
        lent.has_begun = True
        if lent.announced:
            lent.check_announced(slots, number, where)
        in_positions: Int64s = self._integers(changes, "in_positions", where, np.int64)
        n_in = len(in_positions)
        in_rows: Int64s = self._integers(changes, "in_rows", where, np.int64, n_in)
        in_slots: Int32s = self._integers(changes, "in_slots", where, np.int32, n_in)
        out_rows: Int64s = self._integers(changes, "out_rows", where, np.int64)
        if n_in and (int(in_positions.min()) < 0 or int(in_positions.max()) >= len(ids)):
            bad = int(np.flatnonzero((in_positions < 0) | (in_positions >= len(ids)))[0])
            raise PluginError(f"{where}: in_positions[{bad}] = {in_positions[bad]} is no position of {len(ids)} rows")
        others = np.flatnonzero(ids[in_positions] != in_rows)
        if len(others):
            bad = int(others[0])
            row, position = ids[in_positions[bad]], in_positions[bad]
            raise PluginError(f"{where}: in_rows[{bad}] = {in_rows[bad]}, but the row at position {position} is {row}")
        problem = self._map.exchange(out_rows, in_rows, in_slots, self._row_of_slot)
        if problem is not None:
            raise PluginError(f"{where}: the plan {problem}")
        return PlannedBatch(slots, Changeset(in_rows, in_positions, in_slots, out_rows))

    def _what_of(self, slot: int) -> str:
        """Describe a slot and its content, for messages."""
        if not 0 <= slot < len(self._row_of_slot):
            return f"{slot}, which is neither -1 (missed) nor one of {len(self._row_of_slot)} slots"
        row = int(self._row_of_slot[slot])
        return f"{slot}, which {'is empty' if row < 0 else f'holds row {row}'}"

    def _integers(self, holder: Any, name: str, where: str, dtype: type[np.integer[Any]], n: int | None = None) -> Ints:
        """Copy the integers ``holder.name``, shape ``(n,)``; numbers beyond ``dtype`` are clipped."""
        with self._guard(f"reading {name}", where=where):
            array = np.asarray(getattr(holder, name))
        if array.ndim != 1 or (n is not None and len(array) != n):
            raise PluginError(f"{where}: {name} must have shape ({'k' if n is None else n},), not {array.shape}")
        if not len(array):
            return np.empty(0, dtype)  # of any dtype: an empty list becomes an array of floats
        if array.dtype.kind not in "iu":
            raise PluginError(f"{where}: {name} must be integers, not {array.dtype}")
        if not np.can_cast(array.dtype, dtype):
            # Clipped, so that a wide value cannot wrap round into one that is allowed.
            bounds, own = np.iinfo(dtype), np.iinfo(array.dtype)
            array = array.clip(max(int(bounds.min), int(own.min)), min(int(bounds.max), int(own.max)))
        return np.array(array, dtype, order="C", subok=False)

    @contextmanager
    def _guard(self, what: str, errors: Sequence[BaseException] = (), where: str | None = None) -> Iterator[None]:
        """Turn the policy's exceptions into a PluginError that names the policy; ``errors`` pass through."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._is_own or any(error is other for other in errors):
                raise
            raise PluginError(f"{where or self.label}: {what} raised {error_text(error)}") from cause_of(error)


_END = object()


def _close(answer: Any) -> None:
    """Close an abandoned plan; errors of closing are dropped, so that the first error is shown."""
    try:
        answer.close()
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass


def _digest(positions: Int32s) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(positions).data)


class _Lent:
    """Horizon as lent to a policy: its arrays are read-only, and its callables note errors that are not the policy's.

    ``errors`` has these errors: of disks, of memory, of the end of the epoch. ``has_begun``: a batch has been planned.
    ``announced`` has a digest of the announced misses of each batch.
    """

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon
        self.errors: list[BaseException] = []
        self.has_begun = False
        self.announced: list[int] = []
        self._last: tuple[int, Ints] = (-1, NO_ROWS)

    def horizon(self) -> Horizon:
        horizon = self._horizon
        return replace(
            horizon,
            offsets=read_only(horizon.offsets),
            ids=self._ids,
            spill=None if horizon.spill is None else self._spill,
            announce=None if horizon.announce is None else self._announce,
        )

    def ids(self, number: int) -> Ints:
        """Get the rows of a batch, read-only."""
        last = self._last
        if last[0] != number:  # requested by the policy, then by the check
            last = self._last = number, read_only(self._horizon.ids(number))
        return last[1]

    def check_announced(self, slots: Int32s, number: int, where: str) -> None:
        """Raise PluginError if the policy announced other misses than it plans, or not all batches."""
        if len(self.announced) != self._horizon.n_planned:
            n = self._horizon.n_planned
            raise PluginError(f"{where}: the policy announced {len(self.announced)} of {n} batches before it planned the first")
        missed = np.empty(len(slots), np.int32)
        if _digest(missed[: missed_positions(slots, missed)]) != self.announced[number]:
            raise PluginError(f"{where}: the plan misses other rows than the policy announced")

    @contextmanager
    def _noted(self, kinds: tuple[type[BaseException], ...] = (BaseException,)) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            self.errors.append(error)
            raise

    # Callables for the policy.

    def _ids(self, number: Any) -> Ints:
        number = _number(number, self._horizon.n_batches)
        with self._noted():
            return self.ids(number)

    def _announce(self, number: Any, positions: Any) -> None:
        assert self._horizon.announce is not None
        if _number(number, self._horizon.n_planned) != len(self.announced):
            raise ValueError(f"the policy announced batch {number} where batch {len(self.announced)} came next")
        if self.has_begun:
            raise ValueError("misses are announced before the first batch is planned, or not at all")
        array = np.asarray(positions)
        length = int(self._horizon.offsets[number + 1] - self._horizon.offsets[number])
        if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= length)):
            raise ValueError(f"the misses of batch {number} are not positions of its {length} rows")
        missed = np.array(array, np.int32, order="C", subok=False)
        self.announced.append(_digest(missed))
        with self._noted():
            self._horizon.announce(int(number), missed)

    def _spill(self, n_batches: Any) -> _LentSpill:
        assert self._horizon.spill is not None
        n_batches = _number(n_batches, self._horizon.n_planned + 1)
        with self._noted():
            return _LentSpill(self._horizon.spill(n_batches), self._noted)


_SYSTEM = (OSError, MemoryError, FeatstoreError)


class _LentSpill:
    """Horizon's spill as lent to a policy; errors of the disk are noted as not the policy's."""

    def __init__(self, arrays: Any, noted: Callable[..., Any]) -> None:
        self._arrays, self._noted = arrays, noted

    def __setitem__(self, batch: int, positions: Ints) -> None:
        with self._noted(_SYSTEM):
            self._arrays[batch] = positions

    def __getitem__(self, batch: int) -> Any:
        with self._noted(_SYSTEM):
            return self._arrays[batch]


def _number(number: Any, below: int) -> int:
    found: int = operator.index(number)
    if not 0 <= found < below:
        raise IndexError(f"batch {found} is out of range for {below} batches")
    return found
