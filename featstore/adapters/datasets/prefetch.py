"""A generator in a thread of its own, one item ahead: files are unpacked and parsed while the rows before are written."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["prefetch"]

Item = TypeVar("Item")


def prefetch(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items of a generator that runs in a thread of its own, one item ahead of the caller.

    The items share no memory with each other. The generator's exception is raised where its item would have come. The thread ends
    with this generator, also if that is closed early.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="featstore-import") as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]
