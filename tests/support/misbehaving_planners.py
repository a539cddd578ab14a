"""Planned policies that are wrong in another way than in one of their plans; together with wrong plans, the whole table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import featstore
from featstore.cache.belady import Belady
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch
from featstore.gather.plan import Changeset
from tests.support.planned_misbehaviours import (
    EITHER,
    REFUSED,
    RIGHT,
    TABLE,
    Base,
    Misbehaviour,
    NothingToSpoil,
    Seen,
    spoils,
    wholly,
)

__all__ = ["EITHER", "REFUSED", "RIGHT", "TABLE", "Base", "Misbehaviour"]


# -- what is no plan -------------------------------------------------------------------------------------------------------------

for name, what in {
    "none": None,
    "a_number": 3,
    "text": "plan",
    "a_dictionary": {},
    "the_class": PlannedBatch,
    "an_exception": ValueError("x"),
}.items():
    spoils(REFUSED, f"yields_{name}")(lambda planned, seen, what=what: what)


spoils(REFUSED, "yields_a_tuple")(lambda planned, seen: (planned.slots, planned.changes))
spoils(REFUSED, "yields_the_changes")(lambda planned, seen: planned.changes)


@spoils(REFUSED)
def yields_what_raises_when_it_is_read(planned: PlannedBatch, seen: Seen) -> Any:
    class Raises(PlannedBatch):
        def __getattribute__(self, name: str) -> Any:
            raise EOFError(name)

    return Raises(planned.slots, planned.changes)


@spoils(RIGHT)
def writes_to_what_it_yielded(planned: PlannedBatch, seen: Seen) -> Any:
    if len(seen.earlier) < 2:
        raise NothingToSpoil
    before = seen.earlier[-2]
    for array in (before.slots, before.changes.in_rows, before.changes.in_positions, before.changes.in_slots):
        array.fill(1)
    return planned


ANSWERS = {"none": None, "a_number": 3, "text": "plans", "a_class": PlannedBatch, "no_batches": []}


def right(self: Base, horizon: Horizon) -> list[Any]:
    return list(Base.plan(self, horizon))


PLANS: dict[str, Any] = {
    **{f"returns_{name}": lambda self, horizon, value=value: value for name, value in ANSWERS.items()},
    "takes_nothing": lambda self: [],
    "is_none": None,
    "ends_early": lambda self, horizon: right(self, horizon)[:-1],
    "ends_late": lambda self, horizon: (batches := right(self, horizon)) + batches[-1:],
    "plans_the_look_ahead_too": lambda self, horizon: (
        (batches := right(self, horizon)) + batches[: horizon.n_batches - horizon.n_planned + 1]
    ),
    "plans_in_another_order": lambda self, horizon: right(self, horizon)[::-1],
}
for name, plan in PLANS.items():
    wholly(REFUSED, f"plan_{name}")(type("Plans", (Base,), {"plan": plan}))
wholly(RIGHT, "plan_returns_a_list")(type("Plans", (Base,), {"plan": right}))


@wholly(REFUSED)
class PlanIsACoroutine(Base):
    async def plan(self, horizon: Horizon) -> Any:  # type: ignore[override]
        return []


@wholly(REFUSED)
class NeverEnds(Base):
    def plan(self, horizon: Horizon) -> Any:
        yield from super().plan(horizon)
        nothing = np.empty(0, np.int64)
        while True:
            yield PlannedBatch(nothing.astype(np.int32), Changeset(nothing, nothing, nothing.astype(np.int32), nothing))


# -- exceptions ------------------------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


for raised in (
    RuntimeError,
    ZeroDivisionError,
    IndexError,
    KeyError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
    MemoryError,
    RecursionError,
    (OSError, 5, "x", "file"),
    (BlockingIOError, 11, "x"),
    (StopIteration, 3),
    StopAsyncIteration,
    (UnicodeDecodeError, "utf-8", b"x", 0, 1, "x"),
    EOFError,
    NotImplementedError,
    (SystemExit, 3),
    GeneratorExit,
    asyncio.CancelledError,
    Unspeakable,
    (featstore.CorruptionError, "x", "file"),
    (featstore.ClosedError, "x"),
    (featstore.BusyError, "x"),
    (featstore.BudgetError, "x", 1 << 20),
    (featstore.FormatError, "x"),
    (featstore.PluginError, "x"),
):
    kind, *arguments = raised if isinstance(raised, tuple) else (raised,)

    class _Raises(Base):
        error: Any = staticmethod(lambda kind=kind, arguments=arguments: kind(*arguments))

        def plan(self, horizon: Horizon) -> Any:
            for number, planned in enumerate(super().plan(horizon)):
                if number == 1:
                    raise self.error()
                yield planned

    wholly(REFUSED, f"raises_{kind.__name__}")(_Raises)  # type: ignore[attr-defined]


@wholly(REFUSED)
class RaisesAtOnce(Base):
    def plan(self, horizon: Horizon) -> Any:
        raise ZeroDivisionError


@wholly(REFUSED)
class RaisesBehindTheLast(Base):
    def plan(self, horizon: Horizon) -> Any:
        yield from super().plan(horizon)
        raise ZeroDivisionError


@wholly(REFUSED)
class RaisesInTheEnd(Base):
    def plan(self, horizon: Horizon) -> Any:
        try:
            yield None
        finally:
            raise ZeroDivisionError


@wholly(REFUSED)
class DoesNotLetItselfBeClosed(Base):
    def plan(self, horizon: Horizon) -> Any:
        try:
            yield None
        except GeneratorExit:
            yield None


# -- the horizon -----------------------------------------------------------------------------------------------------------------


class _Window(Base):
    def use(self, horizon: Horizon) -> Any:
        """Use the horizon before all is planned as it should be."""

    def plan(self, horizon: Horizon) -> Any:
        self.use(horizon)
        yield from super().plan(horizon)


for name, use in {
    "writes_to_the_ids": lambda horizon: horizon.ids(0).fill(0),
    "writes_to_the_last_ids": lambda horizon: horizon.ids(horizon.n_planned - 1).fill(0),
    "sorts_the_ids": lambda horizon: horizon.ids(0).sort(),
    "writes_to_the_offsets": lambda horizon: horizon.offsets.fill(0),
    "asks_for_a_batch_too_many": lambda horizon: horizon.ids(horizon.n_batches),
    "asks_for_a_batch_too_few": lambda horizon: horizon.ids(-1),
    "asks_for_half_a_batch": lambda horizon: horizon.ids(0.5),
    "asks_for_no_batch": lambda horizon: horizon.ids(None),
    "asks_for_many_batches": lambda horizon: horizon.ids(np.arange(2)),
    "changes_the_window": lambda horizon: setattr(horizon, "n", 3),
}.items():
    wholly(REFUSED, name)(type("Uses", (_Window,), {"use": lambda self, horizon, use=use: use(horizon)}))


@wholly(RIGHT)
class AsksForBatchesWithNumPysNumbers(_Window):
    def use(self, horizon: Horizon) -> Any:
        for b in np.arange(horizon.n_batches):
            horizon.ids(b)


# -- start, and what a policy says of itself -----------------------------------------------------------------------------------


@wholly(REFUSED)
class StartRaises(Base):
    def start(self, *_: Any) -> None:
        raise ZeroDivisionError


@wholly(REFUSED)
class StartTakesNothing(Base):
    def start(self) -> None: ...  # type: ignore[override]


@wholly(RIGHT)
class StartReturnsSomething(Base):
    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> Any:
        super().start(capacity, context, residents)
        return 3


@wholly(REFUSED)
class StartForgetsTheField(Base):
    def start(self, *_: Any) -> None: ...


@wholly(EITHER)
class ThinksThatThereIsMoreRoom(Base):
    """Names slots that do not exist, where it needs them."""

    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        super().start(capacity + 7, context, residents)


@wholly(RIGHT)
class ThinksThatThereIsLessRoom(Base):
    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        super().start(max(len(residents), capacity // 2), context, residents)


@wholly(REFUSED)
class ThinksThatRowsAreCached(Base):
    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        super().start(capacity, context, np.arange(capacity)[::-1].copy())


@wholly(EITHER)
class WritesToTheResidents(Base):
    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        residents[:] = residents[::-1]
        super().start(capacity, context, residents)


@wholly(EITHER)
class RemembersEarlierStarts(Base):
    """Belady whose slots survive start(): right until the cache is emptied."""

    def start(self, capacity: int, context: Any, residents: Any = NO_ROWS) -> None:
        if not hasattr(self, "capacity") or len(residents):
            super().start(capacity, context, residents)


for name, value in {"none": None, "negative": -5, "nan": float("nan"), "text": "many", "far_out": 2**80}.items():
    wholly(EITHER, f"nbytes_{name}")(type("States", (Base,), {"nbytes": value}))


@wholly(EITHER)
class NbytesRaises(Base):
    @property
    def nbytes(self) -> int:
        raise ZeroDivisionError


@wholly(EITHER)
class KeepMemoryRaises(Base):
    def keep_memory(self, keep: bool) -> None:
        raise ZeroDivisionError


@wholly(EITHER)
class KeepMemoryIsNone(Base):
    keep_memory = None  # type: ignore[assignment]


@wholly(EITHER)
class HasAnAttributeThatCannotBeRead(Base):
    class Fails:
        def __get__(self, *_: Any) -> Any:
            raise ZeroDivisionError

    secret = Fails()


# -- announced misses ------------------------------------------------------------------------------------------------------------


class _Announces(Base):
    """Belady, which announces misses; ``announce`` is called in place of the horizon's."""

    def lie(self, announce: Any, batch: int, positions: Any, n: int) -> None:
        raise NotImplementedError

    def plan(self, horizon: Horizon) -> Iterator[Any]:
        announce = horizon.announce
        if announce is None:
            yield from Belady.plan(self, horizon)
            return
        n = horizon.n_planned

        def instead(batch: int, positions: Any) -> None:
            self.lie(announce, batch, positions, n)

        yield from Belady.plan(self, replace(horizon, announce=instead))


for name, lie in {
    "one_too_few": lambda say, b, at, n: say(b, at[1:]),
    "nothing": lambda say, b, at, n: say(b, at[:0]),
    "all_again": lambda say, b, at, n: say(b, np.append(at, at)),
    "another": lambda say, b, at, n: say(b, np.append(at[1:], 0 if len(at) and at[0] else 1)),
    "descending": lambda say, b, at, n: say(b, at[::-1]) if len(at) > 1 else None,
    "far_out": lambda say, b, at, n: say(b, at + 2**20),
    "negative": lambda say, b, at, n: say(b, at - 2**20),
    "floats": lambda say, b, at, n: say(b, at.astype(float)),
    "no_positions": lambda say, b, at, n: say(b, None),
    "twice": lambda say, b, at, n: (say(b, at), say(b, at)),
    "in_another_order": lambda say, b, at, n: say(n - 1 - b, at) if n > 1 else None,
    "some": lambda say, b, at, n: say(b, at) if 2 * b < n else None,
    "a_batch_that_is_none": lambda say, b, at, n: say(b + n, at),
    "half_a_batch": lambda say, b, at, n: say(b + 0.5, at),
}.items():
    wholly(EITHER, f"announces_{name}")(
        type("Announces", (_Announces,), {"lie": lambda self, say, b, at, n, lie=lie: lie(say, b, at, n)})
    )


@wholly(RIGHT)
class AnnouncesInArraysThatChangeAfterwards(_Announces):
    def lie(self, announce: Any, batch: int, positions: Any, n: int) -> None:
        wide = positions.astype(np.int64)
        announce(batch, wide)
        wide.fill(0)


@wholly(EITHER)
class AnnouncesAfterwards(Base):
    def plan(self, horizon: Horizon) -> Any:
        for number, planned in enumerate(super().plan(horizon)):
            yield planned
            if horizon.announce is not None:
                horizon.announce(number, np.flatnonzero(planned.slots < 0))
