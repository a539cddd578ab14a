"""Prefetching from a generator in a thread: its items, its error, its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from featstore.adapters.datasets.prefetch import prefetch
from tests.support.refusing import refuses


def names() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("featstore-import")]


def test_items_in_order_from_another_thread() -> None:
    seen = set()

    def items() -> Iterator[int]:
        for number in range(100):
            seen.add(threading.current_thread().name)
            yield number

    assert list(prefetch(items())) == list(range(100))
    assert seen == {"featstore-import_0"}
    assert list(prefetch(iter(()))) == []
    assert not names()


def test_one_item_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    running = prefetch(items())
    assert next(running) == 0
    running.close()  # waits for the one that is under way
    assert made == [0, 1]
    assert not names()


def test_errors_come_where_the_item_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second one")

    running = prefetch(items())
    assert next(running) == 1
    refuses(ValueError, "the second one", lambda: next(running))
    assert not names()
