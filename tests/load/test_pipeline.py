"""The pipeline alone: order, errors, the end, and what it does when memory is short."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.budget import DEAR_COST, Budget
from featstore.errors import BudgetError, ClosedError
from featstore.gather.counters import StageTimer
from featstore.load.pipeline import Pipeline
from tests.support.refusing import refuses
from tests.support.sampled import covering


class Lump:
    """Bytes of a budget, held while the object lives: what a pooled tensor is to the pipeline."""

    def __init__(self, budget: Budget, n_bytes: int, item: int) -> None:
        self.item = item
        self._reservation = budget.reserve(f"item {item}", n_bytes)
        weakref.finalize(self, self._reservation.release)

    def smaller(self) -> Lump:
        """Give half of the bytes back."""
        self._reservation.resize(self._reservation.n_bytes // 2)
        return self


def drain(pipeline: Pipeline) -> Iterator:
    """Yield all items as a ``for`` loop would, then close."""
    try:
        while pipeline.position < pipeline._stop:
            yield pipeline.get()
    finally:
        pipeline.close()


def make(first, second, n, third=None, *, start=0, threads=2, depth=2) -> Pipeline:
    pipeline = Pipeline(first, second, third, start=start, stop=n, threads=threads, depth=depth, timer=StageTimer())
    pipeline.begin()
    return pipeline


@pytest.mark.parametrize(
    ("depth", "threads", "start", "third"),
    covering([0, 1, 2, 5], [1, 3], [0, 7, 20], [None, lambda i, b: (*b, -i)], together=2),
)
def test_in_order(depth, threads, start, third):
    done = list(drain(make(lambda i: i * i, lambda i, a: (i, a), 20, third, start=start, threads=threads, depth=depth)))
    assert done == [(i, i * i) if third is None else (i, i * i, -i) for i in range(start, 20)]


def test_later_stages_are_in_order_and_alone():
    seen = []

    def alone(stage):
        inside = threading.Semaphore(1)

        def run(i, a):
            assert inside.acquire(blocking=False)
            seen.append((stage, i))
            inside.release()
            return a

        return run

    sum(1 for _ in drain(make(lambda i: i, alone(2), 200, alone(3), threads=4, depth=3)))
    for stage in (2, 3):
        assert [i for which, i in seen if which == stage] == list(range(200))


def test_an_item_is_transferred_while_the_next_is_assembled():
    met = []

    def meet(i):
        barrier = barriers.setdefault(i, threading.Barrier(2, timeout=30))  # breaks unless both stages come to it
        barrier.wait()
        met.append(i)

    barriers: dict[int, threading.Barrier] = {}
    second = lambda i, a: meet(i) if i else None  # noqa: E731
    third = lambda i, b: meet(i + 1) if i < 9 else None  # noqa: E731
    assert len(list(drain(make(lambda i: i, second, 10, third, depth=2)))) == 10
    assert sorted(met) == sorted([*range(1, 10)] * 2)


def test_without_a_third_stage_there_is_no_thread_for_it():
    for third, names in ((None, set()), (lambda i, b: b, {"featstore-transfer"})):
        pipeline = make(lambda i: i, lambda i, a: a, 9, third)
        running = {thread.name for thread in threading.enumerate() if thread.is_alive()}
        assert running & {"featstore-transfer"} == names
        pipeline.close()


def test_first_stage_runs_at_once():
    barrier = threading.Barrier(3, timeout=30)  # breaks unless three items are in the first stage together
    assert list(drain(make(lambda i: barrier.wait() >= 0, lambda i, a: a, 6, threads=3, depth=2))) == [True] * 6


@pytest.mark.parametrize("third", [None, lambda i, b: b])
def test_runs_no_further_ahead_than_asked(third):
    started: list[int] = []
    assembled: list[int] = []
    pipeline = make(lambda i: started.append(i), lambda i, a: assembled.append(i) or i, 100, third, threads=2, depth=3)
    for k in range(50):
        assert pipeline.get() == k
        assert max(started) < k + 1 + 3 + 2
        assert max(assembled) < k + 1 + 3
    pipeline.close()


def test_looks_as_far_ahead_as_asked_and_no_further():
    started = threading.Semaphore(0)
    pipeline = make(lambda i: started.release(), lambda i, a: i, 100, threads=2, depth=3)
    assert pipeline.get() == 0
    for _ in range(1 + 3 + 2):
        assert started.acquire(timeout=30)
    assert not started.acquire(timeout=0.05)
    pipeline.close()


def test_the_queue_before_the_third_stage_is_bounded():
    go, assembled = threading.Event(), threading.Semaphore(0)
    seen: list[int] = []
    pipeline = make(
        lambda i: i, lambda i, a: seen.append(i) or assembled.release() or i, 100, lambda i, b: go.wait(30) and b, depth=3
    )
    for _ in range(3):
        assert assembled.acquire(timeout=30)
    assert not assembled.acquire(timeout=0.05)  # the fourth is begun once the loop takes the first
    assert seen == [0, 1, 2]
    go.set()
    assert list(drain(pipeline)) == list(range(100))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("error", [ValueError("v"), OSError(5, "io", "file"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_arrives_in_its_turn(stage, depth, error):
    def stage_of(which, i):
        if which == stage and i == 5:
            raise error
        return i

    stages = (lambda i: stage_of(0, i), lambda i, a: stage_of(1, i), 9, lambda i, b: stage_of(2, i))
    pipeline = make(*stages, threads=3, depth=depth)
    assert [pipeline.get() for _ in range(5)] == list(range(5))
    caught = refuses(type(error), "", pipeline.get)
    assert caught.value is error
    pipeline.close()


def test_stop_iteration_of_a_stage_does_not_end_the_loop():
    def first(i):
        raise StopIteration

    pipeline = make(first, lambda i, a: a, 3)
    refuses(RuntimeError, "StopIteration", lambda: pipeline.get())
    pipeline.close()


def test_closed_while_waited_for():
    release = threading.Event()
    pipeline = make(lambda i: release.wait(30), lambda i, a: a, 3)
    caught = []

    def consume():
        try:
            pipeline.get()
        except BaseException as error:
            caught.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=pipeline.close)
    closer.start()
    release.set()
    consumer.join(30)
    closer.join(30)
    assert not caught or isinstance(caught[0], ClosedError)  # either the first item came before, or the closing
    refuses(ClosedError, "", lambda: pipeline.get())


@pytest.mark.parametrize("at", [None, 1, 2])
def test_items_made_ahead_are_dropped_at_close(at):
    """Wherever they are: at the loop's end of the queues, or before a third stage that is in the middle of one."""
    budget, inside, go = Budget(10**6), threading.Event(), threading.Event()

    def third(i, b):
        if i == at:
            inside.set()
            go.wait(30)
        return b

    pipeline = make(lambda i: Lump(budget, 10, i), lambda i, a: a, 50, third, depth=4)
    item = pipeline.get()
    if at is not None:
        assert inside.wait(30)
        threading.Timer(0.02, go.set).start()  # close() waits for it
    pipeline.close()
    del item
    assert budget.used == 0


def test_a_child_after_fork_is_told():
    pipeline = make(lambda i: i, lambda i, a: a, 50)
    pipeline.get()
    pid = os.fork()
    if pid == 0:
        try:
            pipeline.get()
        except ClosedError:
            pipeline.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert pipeline.get() == 1
    pipeline.close()


@given(
    budget=st.integers(25, 120),
    firsts=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    seconds=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    threads=st.integers(1, 4),
    depth=st.integers(1, 5),
    third=st.sampled_from([None, lambda i, b: b, lambda i, b: (b[0], b[1].smaller())]),
)
def test_two_batches_suffice(budget, firsts, seconds, threads, depth, third):
    """Any budget that holds two batches serves an epoch, in order, whatever the look-ahead; and it is never exceeded."""
    ledger = Budget(budget)
    pipeline = make(
        lambda i: Lump(ledger, firsts[i], i),
        lambda i, a: (a, Lump(ledger, seconds[i], i)),
        len(firsts),
        third,
        threads=threads,
        depth=depth,
    )
    got = []
    batch = None
    for batch in drain(pipeline):
        got.append((batch[0].item, batch[1].item))
    del batch
    assert got == [(i, i) for i in range(len(firsts))]
    assert ledger.used == 0
    assert ledger.peak <= budget


def test_what_was_made_ahead_makes_room():
    """Three items are prepared before the first one is assembled, and leave it no memory: they are dropped, and made again."""
    ledger, prepared = Budget(20), threading.Semaphore(0)
    waits = [0]

    def first(i):
        lump = Lump(ledger, 5, i)
        prepared.release()
        return lump

    def second(i, a):
        if waits:
            for _ in range(3):
                assert prepared.acquire(timeout=30)
            waits.clear()
        return a, Lump(ledger, 10, i)

    pipeline = make(first, second, 6, threads=2, depth=1)
    items = []
    for batch in drain(pipeline):
        items.append(batch[1].item)
        del batch
    assert items == list(range(6))


@given(
    stage=st.integers(0, 1),
    at=st.integers(0, 9),
    threads=st.integers(1, 3),
    depth=st.integers(0, 4),
    third=st.sampled_from([None, lambda i, b: b]),
)
def test_a_batch_that_never_fits_is_an_error_and_no_hang(stage, at, threads, depth, third):
    ledger = Budget(40)
    sizes = [10 if i != at else 50 for i in range(10)]
    pipeline = make(
        lambda i: Lump(ledger, sizes[i] if stage == 0 else 1, i),
        lambda i, a: (a, Lump(ledger, sizes[i] if stage == 1 else 1, i)),
        10,
        third,
        threads=threads,
        depth=depth,
    )
    got: list[int] = []

    def loop():
        for batch in drain(pipeline):
            got.append(batch[0].item)

    refuses(BudgetError, "", loop)
    assert got == list(range(at))
    assert ledger.used == 0


def test_holding_every_batch_ends_in_an_error():
    ledger = Budget(100)
    pipeline = make(lambda i: None, lambda i, a: Lump(ledger, 10, i), 50)
    kept = [pipeline.get() for _ in range(10)]
    refuses(BudgetError, "", lambda: pipeline.get())
    pipeline.close()
    assert [lump.item for lump in kept] == list(range(10))


@pytest.mark.parametrize("depth", [2, 4])
def test_what_is_transferred_off_the_host_needs_no_shrinking(depth):
    """If the device takes items off the ledger, two of them are room enough for any look-ahead, and the loop may hold all."""
    ledger = Budget(20)
    pipeline = make(lambda i: None, lambda i, a: Lump(ledger, 10, i), 200, lambda i, b: b.item, depth=depth)
    assert list(drain(pipeline)) == list(range(200))
    assert pipeline.depth == depth
    assert ledger.used == 0
    assert ledger.peak == 20


def test_an_item_that_does_not_fit_waits_for_the_one_that_is_transferred():
    ledger, failed = Budget(10), threading.Event()

    def second(i, a):
        try:
            return Lump(ledger, 10, i)
        except BudgetError:
            failed.set()
            raise

    def third(i, b):
        if i == 0:
            assert failed.wait(30)  # the next is asked for meanwhile
        return b.item

    pipeline = make(lambda i: None, second, 5, third)
    assert list(drain(pipeline)) == list(range(5))
    assert failed.is_set()
    assert pipeline.depth == 2


def test_look_ahead_shrinks():
    ledger = Budget(35)
    pipeline = make(lambda i: Lump(ledger, 5, i), lambda i, a: (a, Lump(ledger, 10, i)), 30, threads=4, depth=5)
    pipeline.get()
    deadline = time.monotonic() + 60
    while pipeline.depth > 2:  # before the loop goes on: one that is quick enough is never short of memory
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert sum(1 for _ in drain(pipeline)) == 29
    assert 1 <= pipeline.depth <= 2


@pytest.mark.parametrize(
    ("depth", "first_fails", "third", "n_spare"),
    covering([0, 1, 3], [False, True], [None, lambda i, b: b], [0, 2], together=2),
)
def test_what_can_be_spared_is_asked_for_last(depth, first_fails, n_spare, third):
    """An item that does not fit is tried again for as long as something was given back, and fails once nothing is."""
    asked, short = [], [2]

    def spare() -> bool:
        asked.append(1)
        short[0] -= n_spare > 0
        return len(asked) <= n_spare

    def stage(i: int) -> int:
        if i == 4 and short[0]:
            raise BudgetError("no room", 1)
        return i

    stages = (stage, lambda i, a: a) if first_fails else (lambda i: i, lambda i, a: stage(a))
    pipeline = Pipeline(*stages, third, start=0, stop=8, threads=2, depth=depth, timer=StageTimer(), release=spare)
    pipeline.begin()
    if n_spare:
        assert list(drain(pipeline)) == list(range(8))
        assert len(asked) == 2
    else:
        refuses(BudgetError, "no room", lambda: list(drain(pipeline)))
        assert len(asked) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_an_attempt_without_room_keeps_nothing(depth):
    """The memory of its frames, and of those of the error that it comes of, is free before anything else is given back for it."""
    ledger, used = Budget(100), []

    def read(i):
        held = Lump(ledger, 10, i)
        raise MemoryError(held.item)

    def second(i, a):
        held = Lump(ledger, 10, i)
        try:
            read(held.item)
        except MemoryError as error:
            raise BudgetError("no room") from error

    pipeline = Pipeline(
        int, second, start=0, stop=1, threads=1, depth=depth, timer=StageTimer(), release=lambda: bool(used.append(ledger.used))
    )
    pipeline.begin()
    refuses(BudgetError, "no room", lambda: list(drain(pipeline)))
    assert used == [0]


def no_room(*args):
    raise BudgetError("no room")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("stage", ["first", "second"])
def test_an_error_of_sparing_arrives_in_its_turn(stage, depth):
    """It was raised in the stage's thread, where nobody saw it: the loop waited for ever."""

    def spare():
        raise LookupError("nothing to spare here")

    def first(i):
        return no_room() if stage == "first" and i == 2 else i

    def second(i, a):
        return no_room() if stage == "second" and i == 2 else a

    pipeline = Pipeline(first, second, start=0, stop=5, threads=2, depth=depth, timer=StageTimer(), release=spare)
    pipeline.begin()
    with pytest.raises(LookupError, match="nothing to spare"):
        for i, item in enumerate(drain(pipeline)):
            assert item == i < 2


def test_an_error_of_may_begin_is_the_loops():
    def may_begin(item):
        if item == 3:
            raise LookupError("a strategy's own")
        return True

    pipeline = Pipeline(int, lambda i, a: a, start=0, stop=5, threads=2, depth=2, timer=StageTimer(), may_begin=may_begin)
    pipeline.begin()
    refuses(LookupError, "a strategy's own", lambda: list(drain(pipeline)))


class Kept:
    """Bytes on loan, all of which come back at once."""

    def __init__(self, budget: Budget, n_bytes: int, cost: int) -> None:
        self.held = budget.reserve("kept", n_bytes)
        self.loan = budget.lend(self.lent, self.give_back, cost=cost, of=self.held)

    def lent(self) -> int:
        return self.held.n_bytes

    def give_back(self, n_bytes: int) -> int:
        freed, _ = self.held.n_bytes, self.held.release()
        return freed


@pytest.mark.parametrize(("n_bytes", "cheap", "dear"), [(10, 40, 40), (35, 0, 40), (110, 0, 0)])
def test_what_is_dear_to_others_is_taken_last(n_bytes: int, cheap: int, dear: int) -> None:
    """Batches that are made ahead wait for those before them; only one that nothing else makes room for takes it."""
    budget = Budget(140)
    kept = Kept(budget, 40, DEAR_COST - 1), Kept(budget, 40, DEAR_COST)
    n, done = 8, []
    pipeline = Pipeline(
        lambda i: i,
        lambda i, _: Lump(budget, n_bytes, i),
        start=0,
        stop=n,
        threads=2,
        depth=3,
        timer=StageTimer(),
        releasing=budget.sparing,
    )
    pipeline.begin()
    for lump in drain(pipeline):
        done.append(lump.item)
        time.sleep(0.02)  # others run ahead meanwhile, and take nothing that is to stay
        end = time.monotonic() + 60
        while len(done) == 4 and kept[0].held.n_bytes != cheap and time.monotonic() < end:  # on a busy machine they take longer
            time.sleep(0.001)
        del lump
    assert done == list(range(n))
    assert [each.held.n_bytes for each in kept] == [cheap, dear]
