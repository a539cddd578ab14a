"""Progress of long operations, in bytes or pieces, with the time left."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from featstore.config import check_flag

__all__ = ["Bar", "Progress", "note"]


def note(text: str, show: bool = True) -> None:
    """Write a line where a :class:`Progress` would show its bar."""
    if show and sys.stderr.isatty():
        tqdm.write(text, file=sys.stderr)


class Bar(tqdm):  # type: ignore[type-arg]  # not subscriptable at run time in every release
    """tqdm without a thread of its own."""

    monitor_interval = 0  # tqdm would start a thread, and leave it


class Progress:
    """A progress bar on a terminal's stderr, nothing elsewhere; a context manager.

    Parameters
    ----------
    label : str
    total : int
        Bytes (units) expected.
    show : bool
        False: never.
    unit : str
        What is counted.
    delay_s : float
        Show nothing of what takes less.
    """

    def __init__(self, label: str, total: int, show: bool, unit: str = "B", delay_s: float = 0.0) -> None:
        self._done = 0
        self._bar: tqdm[Any] | None = None
        if check_flag("progress", show) and sys.stderr.isatty():
            self._bar = Bar(total=total, desc=label, unit=unit, unit_scale=unit == "B", file=sys.stderr, delay=delay_s)

    def add(self, n_bytes: int) -> None:
        """Count ``n_bytes`` more as done."""
        self._done += n_bytes
        if self._bar is not None:
            self._bar.update(n_bytes)

    def reach(self, n_bytes: int) -> None:
        """Count ``n_bytes`` in all as done, where fewer are."""
        if n_bytes > self._done:
            self.add(n_bytes - self._done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
