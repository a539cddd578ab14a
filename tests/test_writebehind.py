"""Rows written behind: in order, never while their memory is filled, each error raised once, nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from featstore.storage.writebehind import WriteBehind


def failing(error: BaseException) -> Callable[[], None]:
    def write() -> None:
        raise error

    return write


def test_memory_is_given_once_what_it_holds_is_written() -> None:
    written: list[int] = []
    goes_on = threading.Event()

    def write() -> None:
        goes_on.wait()
        written.append(int(memory[0]))

    with WriteBehind(8) as behind:
        memory = behind.memory()
        assert memory.nbytes == behind.n_bytes == 8
        for number in range(5):
            memory = behind.memory()
            assert written == list(range(number))
            memory[:] = number
            goes_on.clear()
            behind.start(write)
            assert written == list(range(number)), "a thread writes"
            goes_on.set()
    assert written == list(range(5))


def test_an_error_is_raised_where_the_memory_is_asked_for_and_once() -> None:
    with WriteBehind(8) as behind:
        behind.start(failing(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            behind.memory()
        behind.memory()


def test_leaving_raises_the_last_error() -> None:
    with pytest.raises(KeyboardInterrupt), WriteBehind(8) as behind:
        behind.start(failing(KeyboardInterrupt()))


def test_leaving_with_an_error_waits_and_lets_it_pass() -> None:
    goes_on, done = threading.Event(), threading.Event()

    def write() -> None:
        goes_on.wait()
        done.set()
        raise OSError(5, "Input/output error")

    with pytest.raises(ValueError, match="a layer's"), WriteBehind(8) as behind:
        behind.start(write)
        goes_on.set()
        raise ValueError("a layer's")
    assert done.is_set()
