"""Wrong plans: each entry changes one thing of each right plan in which it can, and counts how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from featstore.cache.belady import Belady
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch
from featstore.gather.plan import Changeset

REFUSED, RIGHT, EITHER = "refused", "right", "either"


@dataclass
class Seen:
    """The view that a misbehaviour has."""

    number: int
    horizon: Horizon
    ids: Any
    capacity: int
    earlier: list[PlannedBatch]
    cached: set[int]  # before this batch's changes, had all been carried out as they were right


Spoil = Callable[[PlannedBatch, Seen], Any]


@dataclass
class Misbehaviour:
    """A way to be wrong: the policy that is, and what has to come of it."""

    name: str
    outcome: str
    make: Callable[[], type[Belady]]


class Base(Belady):
    """Right, and counts as a plug-in: it is no class of the library's."""

    n_spoiled: ClassVar[int] = 0

    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        super().start(capacity, context, residents)
        self.capacity = capacity
        self.cached = set(residents.tolist())

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        yield from super().plan(replace(horizon, announce=None))


class NothingToSpoil(Exception):
    """There is nothing in this batch to do wrong."""


TABLE: list[Misbehaviour] = []


def spoils(outcome: str, name: str | None = None) -> Callable[[Spoil], Spoil]:
    """Decorator: a misbehaviour that changes each planned batch in which it can."""

    def decorate(spoil: Spoil) -> Spoil:
        def make() -> type[Belady]:
            def plan(self: Any, horizon: Horizon) -> Iterator[Any]:
                earlier: list[PlannedBatch] = []
                for number, planned in enumerate(Belady.plan(self, replace(horizon, announce=None))):
                    seen = Seen(number, horizon, horizon.ids(number), self.capacity, earlier, set(self.cached))
                    earlier.append(planned)
                    self.cached -= set(planned.changes.out_rows.tolist())
                    self.cached |= set(planned.changes.in_rows.tolist())
                    try:
                        wrong = spoil(planned, seen)
                    except NothingToSpoil:
                        wrong = planned
                    else:
                        type(self).n_spoiled += 1
                    yield wrong

            return type("Wrong", (Base,), {"plan": plan})

        TABLE.append(Misbehaviour(name or spoil.__name__, outcome, make))
        return spoil

    return decorate


def wholly(outcome: str, name: str | None = None) -> Callable[[Any], Any]:
    """Decorator: a class of policy that is wrong in another way than in one of its batches."""

    def decorate(cls: type[Belady]) -> type[Belady]:
        TABLE.append(Misbehaviour(name or cls.__name__, outcome, lambda: type("Wrong", (cls,), {"n_spoiled": 1})))
        return cls

    return decorate


def changed(planned: PlannedBatch, **fields: Any) -> PlannedBatch:
    """A plan with other slots or changes."""
    slots = fields.pop("slots", planned.slots)
    changes = planned.changes
    names = ("in_rows", "in_positions", "in_slots", "out_rows")
    return PlannedBatch(slots, Changeset(*(fields.get(name, getattr(changes, name)) for name in names)))


def hits(planned: PlannedBatch, least: int = 1) -> Any:
    found = np.flatnonzero(planned.slots >= 0)
    if len(found) < least:
        raise NothingToSpoil
    return found


def misses(planned: PlannedBatch, least: int = 1) -> Any:
    found = np.flatnonzero(planned.slots < 0)
    if len(found) < least:
        raise NothingToSpoil
    return found


def comes(planned: PlannedBatch, least: int = 1) -> Changeset:
    if len(planned.changes.in_rows) < least:
        raise NothingToSpoil
    return planned.changes


def goes(planned: PlannedBatch, least: int = 1) -> Changeset:
    if len(planned.changes.out_rows) < least:
        raise NothingToSpoil
    return planned.changes


# -- slots that hold other rows --------------------------------------------------------------------------------------------------


def early(seen: Seen, least: int = 2) -> PlannedBatch:
    """The plan of the batch before, if there are at least so many."""
    if len(seen.earlier) < least:
        raise NothingToSpoil
    return seen.earlier[-2]


def moved(planned: PlannedBatch, at: Any, values: Any) -> PlannedBatch:
    """A plan with other slots at some positions."""
    slots = planned.slots.copy()
    slots[at] = values
    return changed(planned, slots=slots)


def turned(planned: PlannedBatch, at: Any, turn: Callable[[Any], Any]) -> PlannedBatch:
    return moved(planned, at, turn(planned.slots[at]))


SLOTS: dict[str, Spoil] = {
    "two_hits_are_swapped": lambda p, seen: turned(p, hits(p, 2)[:2], lambda slots: slots[::-1]),
    "all_hits_are_rotated": lambda p, seen: turned(p, hits(p, 3), lambda slots: np.roll(slots, 1)),
    "all_hits_are_the_next_slots": lambda p, seen: turned(p, hits(p), lambda slots: (slots + 1) % seen.capacity),
    "all_hits_are_one_slot": lambda p, seen: turned(p, hits(p, 2), lambda slots: slots[0]),
    "the_last_hit_is_another_rows": lambda p, seen: moved(p, hits(p, 2)[-1], p.slots[hits(p)[0]]),
    "a_miss_is_in_a_hits_slot": lambda p, seen: moved(p, misses(p)[0], p.slots[hits(p)[0]]),
    "misses_are_hits_where_they_will_be": lambda p, seen: moved(p, comes(p).in_positions, p.changes.in_slots),
    "a_hit_in_the_first_slot_at_once": lambda p, seen: moved(p, misses(p)[0], 0),
    "slots_are_reversed": lambda p, seen: changed(p, slots=p.slots[::-1] if len(hits(p, 2)) else None),
    "slots_are_sorted": lambda p, seen: changed(p, slots=np.sort(p.slots) if len(hits(p, 3)) and len(misses(p)) else None),
    "slots_are_positions": lambda p, seen: changed(p, slots=np.arange(len(p.slots), dtype=np.int32)),
    "slots_are_rows": lambda p, seen: changed(p, slots=seen.ids),
    "slots_of_the_batch_before": lambda p, seen: changed(p, slots=np.resize(early(seen, 3).slots, len(p.slots))),
    "the_plan_of_the_batch_before": lambda p, seen: early(seen, 3),
}
for name, spoil in SLOTS.items():
    spoils(REFUSED, name)(spoil)
spoils(RIGHT, "hits_are_forgotten")(lambda p, seen: changed(p, slots=np.full(len(p.slots), -1, np.int32)))


# -- slots that are none ---------------------------------------------------------------------------------------------------------


def number_of_a_hit(name: str, value: Callable[[Seen], int], dtype: Any = np.int64) -> None:
    def spoil(planned: PlannedBatch, seen: Seen) -> Any:
        slots = planned.slots.astype(dtype)
        slots[hits(planned)[0]] = value(seen)
        return changed(planned, slots=slots)

    spoils(REFUSED, name)(spoil)


number_of_a_hit("a_slot_that_is_the_capacity", lambda seen: seen.capacity, np.int32)
number_of_a_hit("a_slot_of_2_31_less_1", lambda seen: 2**31 - 1, np.int32)
number_of_a_hit("a_slot_of_less_2", lambda seen: -2, np.int32)
number_of_a_hit("a_slot_of_less_2_31", lambda seen: -(2**31), np.int32)
number_of_a_hit("a_slot_of_2_32", lambda seen: 2**32)
number_of_a_hit("a_slot_of_2_32_less_1", lambda seen: 2**32 - 1)
number_of_a_hit("a_slot_of_2_63_less_1", lambda seen: 2**63 - 1)
number_of_a_hit("a_slot_of_less_2_63", lambda seen: -(2**63))


@spoils(REFUSED)
def slots_wrap_round_to_the_right_ones(planned: PlannedBatch, seen: Seen) -> Any:
    slots = planned.slots.astype(np.int64)
    slots[hits(planned)] += 2**32
    return changed(planned, slots=slots)


def slots_become(outcome: str, name: str, convert: Callable[[Any], Any]) -> None:
    def spoil(planned: PlannedBatch, seen: Seen) -> Any:
        return changed(planned, slots=convert(planned.slots))

    spoils(outcome, f"slots_{name}")(spoil)


class Unreadable:
    """An array that cannot be made one."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LookupError("no array")


class Strange(np.ndarray[Any, Any]):
    """A subclass that shows something else to who indexes it."""

    def __getitem__(self, key: Any) -> Any:
        return 7


def strided(values: Any) -> Any:
    return np.repeat(values, 2)[::2]


def read_only(values: Any) -> Any:
    values = values.copy()
    values.flags.writeable = False
    return values


for name, convert in {
    "too_few": lambda slots: slots[:-1],
    "too_many": lambda slots: np.append(slots, np.int32(-1)),
    "empty": lambda slots: slots[:0],
    "as_a_column": lambda slots: slots[:, None],
    "as_a_matrix": lambda slots: np.array([slots]),
    "a_scalar": lambda slots: slots[0],
    "none": lambda slots: None,
    "text": lambda slots: "slots",
    "bytes": lambda slots: slots.tobytes(),
    "a_dictionary": lambda slots: dict(enumerate(slots.tolist())),
    "a_set": lambda slots: set(slots.tolist()),
    "a_generator": lambda slots: (slot for slot in slots.tolist()),
    "floats": lambda slots: slots.astype(np.float64),
    "halves": lambda slots: slots + 0.5,
    "nan": lambda slots: np.full(len(slots), np.nan),
    "infinite": lambda slots: np.full(len(slots), np.inf),
    "complex": lambda slots: slots.astype(complex),
    "booleans": lambda slots: slots >= 0,
    "strings": lambda slots: slots.astype(str),
    "objects": lambda slots: slots.astype(object),
    "objects_that_are_none": lambda slots: np.full(len(slots), None),
    "dates": lambda slots: slots.astype("datetime64[s]"),
    "records": lambda slots: slots.view([("slot", np.int32)]),
    "unsigned": lambda slots: slots.view(np.uint32),
    "unsigned_and_wide": lambda slots: slots.astype(np.int64).view(np.uint64),
    "ragged": lambda slots: [[1], [2, 3]],
    "unreadable": lambda slots: Unreadable(),
    "a_function": lambda slots: len,
    "a_tensor_on_no_device": lambda slots: torch.empty(len(slots), dtype=torch.int32, device="meta"),
}.items():
    slots_become(REFUSED, name, convert)  # type: ignore[no-untyped-call]
for name, convert in {
    "a_list": lambda slots: slots.tolist(),
    "a_tuple": lambda slots: tuple(slots.tolist()),
    "wide": lambda slots: slots.astype(np.int64),
    "narrow": lambda slots: slots.astype(np.int16),
    "byte_swapped": lambda slots: slots.astype(">i4"),
    "strided": strided,
    "backwards_in_memory": lambda slots: slots[::-1].copy()[::-1],
    "read_only": read_only,
    "masked": lambda slots: np.ma.masked_array(slots, mask=slots >= 0),
    "a_tensor": lambda slots: torch.from_numpy(slots.copy()),
    "a_memoryview": lambda slots: memoryview(slots),
    "of_a_strange_kind": lambda slots: slots.view(Strange),
}.items():
    slots_become(RIGHT, name, convert)  # type: ignore[no-untyped-call]


# -- changes ---------------------------------------------------------------------------------------------------------------------


def changes_become(outcome: str, field: str, name: str, convert: Callable[[Any, Seen], Any], least: int = 1) -> None:
    def spoil(planned: PlannedBatch, seen: Seen) -> Any:
        (goes if field == "out_rows" else comes)(planned, least)
        return changed(planned, **{field: convert(getattr(planned.changes, field).copy(), seen)})

    spoils(outcome, f"{field}_{name}")(spoil)


def with_first(values: Any, first: int) -> Any:
    values[0] = first
    return values


for field in ("in_rows", "in_positions", "in_slots", "out_rows"):
    for name, change in {
        "none": lambda values, seen: None,
        "floats": lambda values, seen: values.astype(float),
        "nan": lambda values, seen: np.full(len(values), np.nan),
        "objects": lambda values, seen: values.astype(object),
        "as_a_column": lambda values, seen: values[:, None],
        "negative": lambda values, seen: with_first(values, -1),
        "far_negative": lambda values, seen: with_first(values, -(2**31)),
        "far_out": lambda values, seen: with_first(values, 2**31 - 1),
        "beyond_64_bits": lambda values, seen: with_first(values.astype(np.uint64), 2**64 - 1),
        "first_twice": lambda values, seen: np.append(values[:-1], values[0]) if len(values) > 1 else values - values - 1,
    }.items():
        changes_become(REFUSED, field, name, change)  # type: ignore[no-untyped-call]
    for name, change in {
        "a_list": lambda values, seen: values.tolist(),
        "wide": lambda values, seen: values.astype(np.int64),
        "narrow": lambda values, seen: values.astype(np.int16),
        "unsigned": lambda values, seen: values.astype(np.uint64),
        "byte_swapped": lambda values, seen: values.astype(values.dtype.newbyteorder()),
        "strided": lambda values, seen: strided(values),
        "read_only": lambda values, seen: read_only(values),
    }.items():
        changes_become(RIGHT, field, name, change)  # type: ignore[no-untyped-call]
for field in ("in_rows", "in_positions", "in_slots"):
    changes_become(REFUSED, field, "too_few", lambda values, seen: values[:-1])
    changes_become(REFUSED, field, "too_many", lambda values, seen: np.append(values, values[-1]))
    changes_become(REFUSED, field, "reversed", lambda values, seen: values[::-1], 2)
changes_become(REFUSED, "in_positions", "the_batchs_length", lambda values, seen: with_first(values, len(seen.ids)))
changes_become(REFUSED, "in_slots", "the_capacity", lambda values, seen: with_first(values, seen.capacity))
changes_become(REFUSED, "in_rows", "of_no_batch", lambda values, seen: with_first(values, (values[0] + 1) % seen.horizon.n))
changes_become(REFUSED, "in_rows", "beyond_the_last", lambda values, seen: values + seen.horizon.n)
changes_become(REFUSED, "out_rows", "beyond_the_last", lambda values, seen: with_first(values, seen.horizon.n))
changes_become(REFUSED, "out_rows", "all_rows", lambda values, seen: np.arange(seen.horizon.n))
changes_become(REFUSED, "out_rows", "none_of_them", lambda values, seen: values[:0])
changes_become(REFUSED, "out_rows", "all_twice", lambda values, seen: np.tile(values, 2))
changes_become(RIGHT, "out_rows", "reversed", lambda values, seen: values[::-1])


def stays(planned: PlannedBatch, seen: Seen) -> int:
    """Position of the first row that was cached and is not evicted."""
    found = [at for at in hits(planned).tolist() if int(seen.ids[at]) not in planned.changes.out_rows]
    if not found:
        raise NothingToSpoil
    return int(found[0])


@spoils(REFUSED)
def evicts_what_is_hit_later(planned: PlannedBatch, seen: Seen) -> Any:
    left = np.setdiff1d([*seen.cached], planned.changes.out_rows)
    if not len(left):
        raise NothingToSpoil
    return changed(planned, out_rows=np.concatenate([planned.changes.out_rows, left]))


@spoils(REFUSED)
def admits_a_row_that_is_cached(planned: PlannedBatch, seen: Seen) -> Any:
    positions = with_first(comes(planned).in_positions.copy(), stays(planned, seen))
    return changed(planned, in_positions=positions, in_rows=seen.ids[positions])


FIELDS = ("in_rows", "in_positions", "in_slots", "out_rows")
CHANGES: dict[str, Spoil] = {
    "evicts_a_row_that_is_not_cached": lambda p, seen: changed(
        p, out_rows=np.append(p.changes.out_rows, np.setdiff1d(np.arange(seen.horizon.n), [*seen.cached])[-1])
    ),
    "admits_into_a_slot_that_is_taken": lambda p, seen: changed(
        p, in_slots=with_first(comes(p).in_slots.copy(), int(p.slots[stays(p, seen)]))
    ),
    "admits_into_other_slots_and_goes_on": lambda p, seen: changed(p, in_slots=np.roll(comes(p, 2).in_slots, 1)),
    "admits_nothing_and_goes_on": lambda p, seen: changed(p, **dict.fromkeys(FIELDS[:3], comes(p).in_rows[:0])),
    "changes_nothing_and_goes_on": lambda p, seen: changed(p, in_rows=[], in_positions=[], in_slots=[], out_rows=[]),
    "changes_of_the_batch_before": lambda p, seen: PlannedBatch(p.slots, early(seen).changes),
    "changes_are_none": lambda p, seen: PlannedBatch(p.slots, None),  # type: ignore[arg-type]
    "changes_are_a_tuple": lambda p, seen: PlannedBatch(p.slots, tuple(getattr(p.changes, name) for name in FIELDS)),  # type: ignore[arg-type]
}
for name, spoil in CHANGES.items():
    spoils(REFUSED, name)(spoil)
