"""An executor of daemon threads: what is promised of any executor, and that a script ends though a task never does."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from featstore.plan.daemonthreads import DaemonThreads
from tests.support.refusing import refuses


def test_results_and_errors_are_those_of_the_calls() -> None:
    with DaemonThreads(3, "featstore-test") as threads:
        futures = [threads.submit(lambda a, b=0: 100 // (a + b), k, b=k % 2) for k in range(20)]
        assert [future.result() for future in futures[1:]] == [100 // (k + k % 2) for k in range(1, 20)]
        refuses(ZeroDivisionError, "", futures[0].result)
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("featstore-test")}
        assert names == {f"featstore-test_{k}" for k in range(3)}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("featstore-test")]


def test_what_was_cancelled_is_not_called() -> None:
    begin, called = threading.Event(), list[int]()
    with DaemonThreads(1, "featstore-test") as threads:
        threads.submit(begin.wait)
        futures = [threads.submit(called.append, k) for k in range(4)]
        assert futures[1].cancel()
        begin.set()
    assert called == [0, 2, 3]
    with pytest.raises(CancelledError):
        futures[1].result()


def test_a_shutdown_cancels_what_has_not_begun() -> None:
    begin, called = threading.Event(), list[int]()
    threads = DaemonThreads(1, "featstore-test")
    first = threads.submit(lambda: (called.append(-1), begin.wait()))
    while not called:
        begin.wait(0.01)
    futures = [threads.submit(called.append, k) for k in range(3)]
    threads.shutdown(wait=False, cancel_futures=True)
    assert [future.cancelled() for future in (first, *futures)] == [False, True, True, True]
    begin.set()
    threads.shutdown()
    assert called == [-1]
    assert first.result()[1]


def test_nothing_is_kept_of_a_task() -> None:
    class Big:
        pass

    with DaemonThreads(1, "featstore-test") as threads:
        big = Big()
        kept = weakref.ref(big)
        future = threads.submit(lambda each: each, big)
        assert future.result() is big
        threads.submit(int).result()  # the thread is done with the first by then
        del big, future
        assert kept() is None


def test_a_script_ends_beside_a_task_that_waits() -> None:
    code = """
import threading
from featstore.plan.daemonthreads import DaemonThreads
threads = DaemonThreads(2, "featstore-test")
for _ in range(3):
    threads.submit(threading.Event().wait)
print("the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
