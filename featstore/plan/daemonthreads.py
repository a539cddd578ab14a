"""Threads for tasks that may wait for a loop which never goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["DaemonThreads"]


class DaemonThreads(Executor):
    """An executor whose threads do not keep the interpreter from ending.

    At exit the interpreter joins the threads of a ``ThreadPoolExecutor`` before it ends any epoch. So a script that fails in an
    epoch would hang if a task waits for memory that the loop holds.

    Parameters
    ----------
    n : int
        Threads, which begin with the first tasks.
    name : str
        Prefix of their names.
    """

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in one of the threads; return the future of its result."""
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._n:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after all tasks that were submitted, or not cancelled here; with ``wait``, wait for that."""
        with contextlib.suppress(Empty):
            while cancel_futures and (task := self._tasks.get_nowait()):
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _work(tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (task := tasks.get()) is not None:
        _run(*task)
        del task  # nothing of it is kept while the thread waits for the next one


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
