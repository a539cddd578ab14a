"""Properties that are computed once: kept, and without a lock that a fork could leave locked."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from featstore.lazy import lazy


class Slow:
    begun, go_on = threading.Event(), threading.Event()
    n = 0

    @lazy
    def value(self) -> int:
        """The value."""
        self.n += 1
        return self.n

    @lazy
    def waiting(self) -> int:
        self.begun.set()
        assert self.go_on.wait(60)
        return 7


def test_it_is_computed_once() -> None:
    slow = Slow()
    assert [slow.value, slow.value, slow.n] == [1, 1, 1]
    assert isinstance(Slow.value, lazy)
    assert Slow.value.__doc__ == "The value."
    del slow.__dict__["value"]
    assert slow.value == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_one_is_computed_computes_its_own() -> None:
    Slow.begun.clear()
    Slow.go_on.clear()
    thread = threading.Thread(target=lambda: Slow().waiting)
    thread.start()
    assert Slow.begun.wait(60)
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        Slow.go_on = threading.Event()
        Slow.go_on.set()
        os._exit(0 if Slow().waiting == 7 else 1)
    Slow.go_on.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
