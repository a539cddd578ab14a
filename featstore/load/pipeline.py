"""Stages ahead of a loop: threads prepare batches, one assembles them in order, one transfers them, the loop takes them.

Memory is the bound. A stage that meets :class:`~featstore.errors.BudgetError` gives back first what was prepared ahead (it can
be made again), then waits for earlier batches to leave: to be transferred, and the loop to let go of them. Only when the loop
itself waits for that very batch, so that nothing more can come free, the error is the loop's. So a short budget costs look-ahead,
never a hang.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from featstore.errors import BudgetError, ClosedError
from featstore.gather.counters import Overlap, Stopwatch

__all__ = ["FINALIZER_JOIN_S", "Pipeline"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

# A finalizer may run anywhere, even inside a lock that a stage waits for: there a join must end.
FINALIZER_JOIN_S = 10.0
PATIENCE = 4  # an item less is made ahead once the queue was full for so many times its length


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _End:
    """What the loop gets instead of an item once the pipeline is closed."""


class _GivenBack:
    """What a stage ends with when memory was short and its item waits for another turn."""


def _without_frames(error: BaseException) -> BaseException:
    """Strip an error of its tracebacks: their frames would keep alive what the stage had allocated so far."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


class Pipeline(Generic[A, B, C]):
    """Deliver ``third(i, second(i, first(i)))`` for ``i = start … stop-1``, in order, made ahead by threads.

    Parameters
    ----------
    first : callable (int) -> A
        Prepares item ``i``; called by ``threads`` threads at once, and perhaps again for the same item: pure.
    second : callable (int, A) -> B
        Assembles item ``i``; called once an item (again only after BudgetError), in order, by one thread.
    third : callable (int, B) -> C, optional
        Transfers item ``i``; called once an item, in order, by one thread, while ``second`` assembles the next. It takes no
        memory of the budget, so that ``second`` may wait for it. None: items are what ``second`` returned, with no thread or
        queue between.
    start, stop : int
    threads : int
        Threads for ``first``, at least 1.
    depth : int
        Items assembled or being assembled, transferred or not, beyond the one the loop holds, from :meth:`begin` on: the bound of
        both queues. 0: all stages run in the caller's thread.
    watch : Stopwatch
        Gets ``wait``: seconds that :meth:`get` waited.
    spare : callable () -> bool, optional
        Asked for memory when there is none for an item that the loop waits for; False: there is no more.
    sparing : callable () -> context manager, optional
        Stages run in it as long as waiting may bring memory: they take none that is dear to others.
    may_begin : callable (int) -> bool, optional
        Whether ``first`` may be called for an item: False where it would wait for an earlier item to be assembled, which may lack
        the memory that others hold.
    overlap : Overlap, optional
        Gets the clock's seconds in which a stage is at work, and those that the loop waits.
    most : int
        Where it is more than ``depth``: so many items are begun ahead at most. One more each time the loop has to wait and
        ``may_grow()`` says that the memory allows it; one fewer, down to ``depth``, when the queue was full for long.
    may_grow : callable () -> bool

    Notes
    -----
    Results of ``first`` run at most ``threads`` items ahead of ``second``. One caller at a time.
    """

    def __init__(
        self,
        first: Callable[[int], A],
        second: Callable[[int, A], B],
        third: Callable[[int, B], C] | None = None,
        *,
        start: int,
        stop: int,
        threads: int,
        depth: int,
        watch: Stopwatch,
        spare: Callable[[], bool] = lambda: False,
        sparing: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_begin: Callable[[int], bool] = lambda item: True,
        overlap: Overlap | None = None,
        most: int = 0,
        may_grow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._overlap = Overlap() if overlap is None else overlap
        self._least, self._most, self._may_grow = depth, max(depth, most), may_grow
        self._n_full = 0  # items taken one after the other while as many as may be were there
        self._may_begin = may_begin
        self._spare, self._sparing = spare, sparing
        self._first = first
        self._second = second
        self._third = third
        self._stop = stop
        self._depth = depth
        self._ahead = threads
        self._watch = watch
        # The loop takes the lock itself, never by way of the condition, whose __enter__ Ctrl-C may leave with the lock taken for
        # good; and it waits for items in a queue, since Ctrl-C may leave Condition.wait() without the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()
        self._closed = False
        self._begun = not depth
        self._taken = start  # the item the loop takes next
        self._finishing = start  # the item the second stage works on
        self._fresh = start  # first item never begun
        self._again: list[int] = []  # items given back, a heap
        self._active: set[int] = set()  # items in the first stage
        self._ready: dict[int, A | _Failure] = {}
        self._assembled: deque[B | _Failure] = deque()  # between the second stage and the third
        self._transferred = stop if third is None else start  # the item the third stage works on
        self._done: SimpleQueue[C | _Failure | _End] = SimpleQueue()
        self._waiting = False  # the loop waits for item _taken
        self._urgent: int | None = None  # short of memory: no item after this one is begun
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the threads; apart from the constructor, so that what closes the pipeline can be in place before."""
        if not self._depth:
            return
        try:
            names = [f"featstore-sample-{k}" for k in range(min(self._ahead, max(1, self._stop - self._taken)))]
            stages = [*((name, self._first_once) for name in names), ("featstore-gather", self._second_once)]
            if self._third is not None:
                stages.append(("featstore-transfer", self._third_once))
            for name, once in stages:
                thread = threading.Thread(target=self._run, args=(once,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            with self._lock:
                self._begun = True  # all is there, so a thread that Ctrl-C left out of the list above does nothing
                self._changed.notify_all()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """Items made ahead now: less than was asked for, once memory was short."""
        return self._depth

    @property
    def position(self) -> int:
        """The item that :meth:`get` returns next."""
        return self._taken

    def get(self) -> C:
        """Return the next item; what a stage raised for it is raised here, after all earlier items were returned.

        Raises
        ------
        IndexError
            All items were returned.
        ClosedError
            The pipeline was closed, or belongs to another process.
        """
        if self._taken >= self._stop:
            raise IndexError("no item is left")
        if self._closed or os.getpid() != self._pid:
            raise ClosedError("this iterator was closed, or belongs to the parent process")
        if not self._threads:
            item = self._at_once(self._taken)
            self._taken += 1
            return item
        begin = time.perf_counter()
        self._adapt()
        try:
            with self._lock:
                self._waiting = True
                self._changed.notify_all()
            outcome = self._done.get()
            with self._lock:
                self._waiting = False
                if self._closed or isinstance(outcome, _End):
                    del outcome
                    raise ClosedError("this iterator was closed while it was waited for")
                self._taken += 1
                self._changed.notify_all()
        finally:
            waited = time.perf_counter() - begin
            self._watch.add("wait", waited)
            self._overlap.waited(waited)
        if isinstance(outcome, _Failure):
            try:
                if isinstance(outcome.error, StopIteration):  # would end the loop as if all were well
                    raise RuntimeError("a stage raised StopIteration") from outcome.error
                raise outcome.error
            finally:
                del outcome  # or the error would hold this frame, and the frame the error
        return outcome

    def _adapt(self) -> None:
        """Look further ahead where the loop is about to wait, less far where it long did not."""
        if self._most <= self._least:
            return
        n_there = self._done.qsize()
        may_grow = not n_there and self._depth < self._most and self._may_grow()  # outside the lock: it asks the ledger
        with self._lock:
            if n_there >= self._depth:
                self._n_full += 1
            else:
                self._n_full = 0
            if may_grow and self._depth < self._most:
                self._depth += 1
            elif self._n_full >= PATIENCE * self._depth and self._depth > self._least:
                self._depth -= 1
                self._n_full = 0

    def _at_once(self, item: int) -> C:
        begin = time.perf_counter()
        try:
            with self._overlap:
                assembled = self._until_it_fits(partial(self._second, item, self._until_it_fits(partial(self._first, item))))
                return cast(C, assembled) if self._third is None else self._third(item, assembled)
        finally:
            self._overlap.waited(time.perf_counter() - begin)

    def _until_it_fits(self, stage: Callable[[], D]) -> D:
        while True:
            try:
                return stage()
            except BudgetError as error:
                _without_frames(error)
                if not self._spare():
                    raise

    def close(self, timeout: float | None = None) -> None:
        """Stop the threads, wait for them (at most ``timeout`` seconds each), drop what was made ahead. May be called again."""
        if os.getpid() != self._pid:
            return  # after a fork the threads are the parent's
        with self._lock:
            self._closed = True
            self._done.put(_End())
            self._changed.notify_all()
        here = threading.current_thread()
        for thread in self._threads:
            if thread is not here:
                thread.join(timeout)
        if here not in self._threads:
            self._ready.clear()
            self._assembled.clear()
            with contextlib.suppress(Empty):
                while True:
                    self._done.get_nowait()
            self._done.put(_End())

    def _run(self, once: Callable[[], bool]) -> None:
        """Run a stage: a call an item, so that no local keeps an item's memory while the thread waits."""
        try:
            while once():
                pass
        except BaseException as error:  # of what stands around the stages, as may_begin: the loop must not wait for this thread
            self._done.put(_Failure(error))

    # First stage.

    def _claim(self) -> int | None:
        """Take the lowest item that may be begun; the lock is held."""
        if not self._begun:
            return None
        item = self._again[0] if self._again else self._fresh
        limit = min(self._stop, self._taken + self._depth + self._ahead)
        if item >= limit or (self._urgent is not None and item > self._urgent) or not self._may_begin(item):
            return None
        if self._again:
            heapq.heappop(self._again)
        else:
            self._fresh += 1
        self._active.add(item)
        return item

    def _first_once(self) -> bool:
        item: int | None = None
        with self._lock:
            while not self._closed and (item := self._claim()) is None:
                self._changed.wait()
            if self._closed or item is None:
                return False
        with self._overlap:
            outcome = self._attempt(item, partial(self._first, item))
        if isinstance(outcome, _GivenBack):
            return True
        with self._lock:
            self._active.discard(item)
            if self._urgent is not None and item > self._urgent:
                heapq.heappush(self._again, item)
            elif not self._closed:
                self._ready[item] = outcome
            # This thread may sleep before it returns, and must not keep the item's memory from those it wakes.
            del outcome
            self._changed.notify_all()
        return True

    def _give_back(self, item: int) -> bool:
        """Short of memory: put the item back for later, unless it is the one that the second stage needs next (then False)."""
        with self._lock:
            if item == self._finishing:
                return False
            self._active.discard(item)
            heapq.heappush(self._again, item)
            self._shrink(item - self._taken)
            self._changed.notify_all()
            return True

    def _shrink(self, items: int) -> None:
        """Begin at most ``items`` items beyond the one the loop holds from now on; the lock is held."""
        items = max(1, items)
        self._most = min(self._most, max(self._least, items))
        self._depth = min(self._depth, items)
        self._ahead = min(self._ahead, items - self._depth)

    # Second stage.

    def _second_once(self) -> bool:
        with self._lock:
            item = self._finishing
            if item >= self._stop:
                return False
            self._changed.wait_for(lambda: self._closed or (item in self._ready and item < self._taken + self._depth))
            if self._closed:
                return False
            prepared = self._ready.pop(item)
        with self._overlap:
            outcome = prepared if isinstance(prepared, _Failure) else self._attempt(item, partial(self._second, item, prepared))
        with self._lock:
            self._urgent = None
            self._finishing += 1
            if not self._closed and not isinstance(outcome, _GivenBack):
                if self._third is None:
                    self._done.put(cast("C | _Failure", outcome))
                else:
                    self._assembled.append(outcome)
            is_last = isinstance(outcome, _Failure)
            del outcome, prepared
            self._changed.notify_all()
        return not is_last

    # Third stage.

    def _third_once(self) -> bool:
        with self._lock:
            item = self._transferred
            if item >= self._stop:
                return False
            self._changed.wait_for(lambda: self._closed or self._assembled)
            if self._closed:
                return False
            assembled = self._assembled.popleft()
        outcome: C | _Failure = assembled if isinstance(assembled, _Failure) else self._transfer(item, assembled)
        del assembled
        with self._lock:
            self._transferred += 1
            if not self._closed:
                self._done.put(outcome)
            is_last = isinstance(outcome, _Failure)
            del outcome
            self._changed.notify_all()
        return not is_last

    def _transfer(self, item: int, assembled: B) -> C | _Failure:
        assert self._third is not None
        try:
            with self._overlap:
                return self._third(item, assembled)
        except BaseException as error:
            return _Failure(error)

    # Memory.

    def _attempt(self, item: int, stage: Callable[[], D]) -> D | _Failure | _GivenBack:
        """Run a stage until memory suffices, or give its item back.

        Memory that is dear to others is taken only when waiting would bring no more.
        """
        dear = False
        try:
            while True:
                starved, transferred = self._standing(item)
                try:
                    with nullcontext() if dear else self._sparing():
                        return stage()
                except BudgetError as error:
                    failure = _Failure(_without_frames(error))
                if self._give_back(item):
                    return _GivenBack()
                if self._relieve(item, starved, transferred):
                    continue
                if dear and (self._closed or not self._spare()):
                    return failure
                dear = True
        except BaseException as error:
            return _Failure(error)

    def _standing(self, item: int) -> tuple[bool, int]:
        """Whether the loop waits for this item, so that it will let go of nothing before it has it; how many were transferred."""
        with self._lock:
            return self._waiting and self._taken == item, self._transferred

    def _relieve(self, item: int, starved: bool, transferred: int) -> bool:
        """Make room for ``item``, which the second stage needs next; True: try again, False: nothing more can be had.

        ``starved`` and ``transferred`` are what :meth:`_standing` said when the failed attempt began.
        """
        dropped = []
        with self._lock:
            if self._transferred < item:  # what those before it hold comes back by itself
                self._changed.wait_for(lambda: self._closed or self._transferred > transferred)
            if self._transferred > transferred:
                return not self._closed
            self._urgent = item
            later = [k for k in self._ready if k > item]
            for k in later:
                dropped.append(self._ready.pop(k))
                heapq.heappush(self._again, k)
            busy = any(k > item for k in self._active)
            self._changed.wait_for(lambda: self._closed or not any(k > item for k in self._active))
            self._shrink(item - self._taken if item > self._taken else self._depth)
            if not dropped and not busy and not self._closed:
                if starved:
                    return False
                taken = self._taken
                self._changed.wait_for(lambda: self._closed or self._taken > taken or (self._waiting and self._taken == item))
            return not self._closed
