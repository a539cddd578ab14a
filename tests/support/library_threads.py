"""Threads of this process and of the library, and patience with what is on its way out."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def tasks() -> dict[str, str]:
    """List the names of this process's threads by id, without the kernel's workers of rings, which come and go by themselves."""
    found = dict[str, str]()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found[task] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return {task: name for task, name in found.items() if not name.startswith("iou-")}


def library_threads() -> list[str]:
    """List the names; of a start() that was interrupted before there was a thread, enumerate() goes on to list the object."""
    return [each.name for each in threading.enumerate() if each.name.startswith("featstore-") and each.is_alive()]


def remaining(find: Callable[[], T], patience_s: float) -> T:
    """Find what is left until that is nothing, for ``patience_s`` at most: what was closed may be on its way out."""
    until_s = time.monotonic() + patience_s
    while (found := find()) and time.monotonic() < until_s:
        time.sleep(0.001)
    return found


def going_on(patience_s: float = 1) -> list[str]:
    """List the library's threads that are still alive after ``patience_s`` at most."""
    return remaining(library_threads, patience_s)
