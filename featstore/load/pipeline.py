"""Stages ahead of a loop: threads prepare batches, one assembles them in order, one transfers them, the loop takes them.

Memory is the bound. A stage that meets :class:`~featstore.errors.BudgetError` first drops batches that were prepared ahead;
they can be made again. Then it waits until earlier batches are transferred, and until the loop drops them. The loop gets the
error only if it waits for that very batch, so that no more memory can come free. A short budget thus costs look-ahead, but never
a hang.
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
from featstore.gather.counters import Overlap, StageTimer

__all__ = ["FINALIZER_JOIN_S", "Pipeline"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

# A finalizer may run anywhere, even inside a lock that a stage waits for: a join in it needs a timeout.
FINALIZER_JOIN_S = 10.0
PATIENCE = 4  # one item less is made ahead once the queue was full for this many times its length of items


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _End:
    """Marker that the loop gets in place of an item once the pipeline is closed."""


class _PutBack:
    """Outcome of a stage that was short of memory, and put its item back for later."""


def _without_frames(error: BaseException) -> BaseException:
    """Remove the tracebacks of an error: their frames would keep memory alive that the stage has allocated."""
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
        Prepares item ``i``; called by ``threads`` threads at once, and perhaps again for the same item, so it must be pure.
    second : callable (int, A) -> B
        Assembles item ``i``; called once an item (again only after BudgetError), in order, by one thread.
    third : callable (int, B) -> C, optional
        Transfers item ``i``; called once an item, in order, by one thread, while ``second`` assembles the next item. It takes
        no memory of the budget, so that ``second`` may wait for it. None: the loop gets the results of ``second``, with no
        further thread or queue.
    start, stop : int
    threads : int
        Threads for ``first``, at least 1.
    depth : int
        Items that are assembled or being assembled, transferred or not, beyond the one that the loop holds. It bounds both
        queues. 0: all stages run in the caller's thread.
    timer : StageTimer
        Measures ``wait``: the seconds that :meth:`get` waited.
    release : callable () -> bool, optional
        Called to free memory when there is none for an item that the loop waits for; returns False if none can be freed.
    releasing : callable () -> context manager, optional
        Stages run in it as long as waiting may free memory: in it, reservations take no costly loans back.
    may_begin : callable (int) -> bool, optional
        Returns whether ``first`` may be called for an item. False: the call would wait until an earlier item is assembled, and
        that item may lack memory that later items hold.
    overlap : Overlap, optional
        Measures the clock's seconds in which a stage works, and the seconds that the loop waits.
    most : int
        If it exceeds ``depth``: the most items begun ahead. Their number grows by one when the loop has to wait and
        ``may_grow()`` returns True. It shrinks by one, down to ``depth``, when the queue was full for long.
    may_grow : callable () -> bool
        Returns whether memory allows one more item.

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
        timer: StageTimer,
        release: Callable[[], bool] = lambda: False,
        releasing: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_begin: Callable[[int], bool] = lambda item: True,
        overlap: Overlap | None = None,
        most: int = 0,
        may_grow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._overlap = Overlap() if overlap is None else overlap
        self._least, self._most, self._may_grow = depth, max(depth, most), may_grow
        self._n_full = 0  # items taken one after the other from a full queue
        self._may_begin = may_begin
        self._release, self._releasing = release, releasing
        self._first = first
        self._second = second
        self._third = third
        self._stop = stop
        self._depth = depth
        self._ahead = threads
        self._timer = timer
        # The loop takes the lock itself, not the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        # The loop waits for items in a queue: Ctrl-C may leave Condition.wait() without the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()
        self._closed = False
        self._begun = not depth
        self._taken = start  # the item the loop takes next
        self._finishing = start  # the item the second stage works on
        self._fresh = start  # first item never begun
        self._again: list[int] = []  # items put back, a heap
        self._active: set[int] = set()  # items in the first stage
        self._ready: dict[int, A | _Failure] = {}
        self._assembled: deque[B | _Failure] = deque()  # between the second stage and the third
        self._transferred = stop if third is None else start  # the item the third stage works on
        self._done: SimpleQueue[C | _Failure | _End] = SimpleQueue()
        self._waiting = False  # the loop waits for item _taken
        self._urgent: int | None = None  # an item that is short of memory: no later item is begun
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the threads. The constructor does not, so that the caller can first arrange to close the pipeline."""
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
                self._begun = True  # only now threads claim items: a thread that Ctrl-C kept out of the list never does
                self._changed.notify_all()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """Number of items made ahead now: fewer than were asked for, once memory was short."""
        return self._depth

    @property
    def position(self) -> int:
        """The item that :meth:`get` returns next."""
        return self._taken

    def get(self) -> C:
        """Return the next item. An error of a stage is raised here, after all earlier items were returned.

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
            self._timer.add("wait", waited)
            self._overlap.waited(waited)
        if isinstance(outcome, _Failure):
            try:
                if isinstance(outcome.error, StopIteration):  # would end the loop without an error
                    raise RuntimeError("a stage raised StopIteration") from outcome.error
                raise outcome.error
            finally:
                del outcome  # else the error would hold this frame, and the frame the error
        return outcome

    def _adapt(self) -> None:
        """Make one more item ahead if the loop is about to wait, one fewer if the queue was full for long."""
        if self._most <= self._least:
            return
        n_there = self._done.qsize()
        may_grow = not n_there and self._depth < self._most and self._may_grow()  # outside the lock: it asks the budget
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
                if not self._release():
                    raise

    @property
    def has_ended(self) -> bool:
        """Whether no thread runs any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, timeout: float | None = None) -> None:
        """Stop the threads, wait at most ``timeout`` seconds for each, and drop all items made ahead; may be called again."""
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
        """Run a stage. Each item is a call of its own, so that no local keeps an item's memory while the thread waits."""
        try:
            while once():
                pass
        except BaseException as error:  # from code around the stages, as may_begin: the loop must not wait for this thread
            self._done.put(_Failure(error))

    # First stage.

    def _claim(self) -> int | None:
        """Claim the lowest item that may be begun; the lock is held."""
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
        if isinstance(outcome, _PutBack):
            return True
        with self._lock:
            self._active.discard(item)
            if self._urgent is not None and item > self._urgent:
                heapq.heappush(self._again, item)
            elif not self._closed:
                self._ready[item] = outcome
            # This thread may sleep before it returns, and must not hold the item's memory, which woken threads may need.
            del outcome
            self._changed.notify_all()
        return True

    def _put_back(self, item: int) -> bool:
        """Put an item that is short of memory back for later; return False if the second stage needs this item next."""
        with self._lock:
            if item == self._finishing:
                return False
            self._active.discard(item)
            heapq.heappush(self._again, item)
            self._shrink(item - self._taken)
            self._changed.notify_all()
            return True

    def _shrink(self, items: int) -> None:
        """Limit the items begun beyond the one that the loop holds to ``items`` from now on; the lock is held."""
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
            if not self._closed and not isinstance(outcome, _PutBack):
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

    def _attempt(self, item: int, stage: Callable[[], D]) -> D | _Failure | _PutBack:
        """Run a stage until memory suffices, or put its item back.

        Costly loans are taken back only when waiting would free no more memory.
        """
        dear = False
        try:
            while True:
                starved, transferred = self._standing(item)
                try:
                    with nullcontext() if dear else self._releasing():
                        return stage()
                except BudgetError as error:
                    failure = _Failure(_without_frames(error))
                if self._put_back(item):
                    return _PutBack()
                if self._relieve(item, starved, transferred):
                    continue
                if dear and (self._closed or not self._release()):
                    return failure
                dear = True
        except BaseException as error:
            return _Failure(error)

    def _standing(self, item: int) -> tuple[bool, int]:
        """Return whether the loop waits for this item, and so drops no batch before it, and how many items were transferred."""
        with self._lock:
            return self._waiting and self._taken == item, self._transferred

    def _relieve(self, item: int, starved: bool, transferred: int) -> bool:
        """Make room for ``item``, which the second stage needs next; True: try again, False: no more memory comes free.

        ``starved`` and ``transferred`` are the results of :meth:`_standing` when the failed attempt began.
        """
        dropped = []
        with self._lock:
            if self._transferred < item:  # the transfer of earlier items frees their memory
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
