"""Threads of the library that are alive."""

from __future__ import annotations

import threading
import time


def library_threads() -> list[str]:
    """List the names; of a start() that was interrupted before there was a thread, enumerate() goes on to list the object."""
    return [each.name for each in threading.enumerate() if each.name.startswith("featstore-") and each.is_alive()]


def going_on(patience_s: float = 1) -> list[str]:
    """List those that are still alive after ``patience_s`` at most: what was closed may be on its way out."""
    until_s = time.monotonic() + patience_s
    while (found := library_threads()) and time.monotonic() < until_s:
        time.sleep(0.001)
    return found
