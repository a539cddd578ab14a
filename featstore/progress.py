"""Progress bars of long operations, in bytes or pieces, with the time left: on a terminal, and in a notebook."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from featstore.config import check_flag

__all__ = ["Bar", "Progress", "is_seen", "make_bar", "note"]


def note(text: str, show: bool = True) -> None:
    """Write a line to stderr if a :class:`Progress` would show its bar."""
    if show and is_seen():
        tqdm.write(text, file=sys.stderr)


class Bar(tqdm):  # type: ignore[type-arg]  # not subscriptable at run time in every release
    """tqdm without a thread of its own."""

    monitor_interval = 0  # otherwise tqdm starts a thread and never ends it


def is_seen() -> bool:
    """Check whether bars are visible: stderr is a terminal, or the process is a notebook's."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()  # it is None where it was closed before
    return on_terminal or _in_notebook()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def make_bar(iterable: Any = None, **options: Any) -> tqdm[Any]:
    """Make a bar of tqdm on stderr, or a notebook's widget; ``options`` are tqdm's."""
    kind: Any = Bar
    if _in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.auto import tqdm as notebook_tqdm

        kind = type("NotebookBar", (notebook_tqdm,), {"monitor_interval": 0})
    bar: tqdm[Any] = kind(iterable, file=sys.stderr, **options)
    return bar


class Progress:
    """A progress bar of ``total`` bytes (or other units), shown if :func:`is_seen`; a context manager.

    ``show=False`` never shows the bar. The bar appears after ``delay_s`` seconds.
    """

    def __init__(self, label: str, total: int, show: bool, unit: str = "B", delay_s: float = 0.0) -> None:
        self._done = 0
        self._bar: tqdm[Any] | None = None
        if check_flag("progress", show) and is_seen():
            self._bar = make_bar(total=total, desc=label, unit=unit, unit_scale=unit == "B", delay=delay_s)

    def add(self, n_bytes: int) -> None:
        """Count ``n_bytes`` more as done."""
        self._done += n_bytes
        if self._bar is not None:
            self._bar.update(n_bytes)

    def reach(self, n_bytes: int) -> None:
        """Count ``n_bytes`` in all as done, unless more are done already."""
        if n_bytes > self._done:
            self.add(n_bytes - self._done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
