"""The exceptions of the library, each of which is also an instance of a built-in one.

Errors of the operating system are not wrapped: they stay :class:`OSError` with ``errno`` and ``filename``.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Any, Final

from featstore.config import format_size

__all__ = [
    "BudgetError",
    "BusyError",
    "ClosedError",
    "CommittedError",
    "CorruptionError",
    "FeatstoreError",
    "FeatstoreWarning",
    "FormatError",
    "MissingExtraError",
    "OptionError",
    "PerformanceWarning",
    "PluginError",
    "StaleError",
    "UnknownNameError",
    "VersionError",
]

_PASSED: Final = frozenset({__name__.partition(".")[0], "contextlib", "functools"})  # packages whose frames warnings skip


class FeatstoreError(Exception):
    """Base of the library's own exceptions."""


class CorruptionError(FeatstoreError, OSError):
    """Stored bytes are not the bytes that were written.

    Parameters
    ----------
    message : str
        Description of the damage.
    path : path-like
        The damaged file; also ``filename``.
    offset : int, optional
        First byte of the damaged page, if known.
    """

    offset: int | None

    def __init__(self, message: str, path: str | os.PathLike[str], offset: int | None = None) -> None:
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(errno.EBADMSG, f"{message}{where}", os.fspath(path))
        self.message = message
        self.offset = offset

    @property
    def path(self) -> str:
        """The damaged file."""
        return str(self.filename)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.filename, self.offset)


class CommittedError(FeatstoreError, OSError):
    """The result is complete and in place, but a later step failed, such as opening it. The result need not be made again.

    Parameters
    ----------
    message : str
        The result, and the step that failed.
    path : path-like
        The result: a dataset, a pack or a layout.
    error : OSError
        The failure of the step. This error has its ``errno`` and ``filename``.
    """

    def __init__(self, message: str, path: str | os.PathLike[str], error: OSError) -> None:
        where = os.fspath(path)
        super().__init__(error.errno, f"{message}: {error.strerror}", where if error.filename is None else error.filename)
        self.message = message
        self.path = where
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.path, self.error)


class FormatError(FeatstoreError, ValueError):
    """A file is not in the library's format, or its header is impossible; ``filename`` is its path, or None."""

    def __init__(self, message: str, filename: str | None = None) -> None:
        super().__init__(message)
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.filename)


class VersionError(FormatError):
    """A file needs a newer release of the library, or was written in another byte order."""


class StaleError(FormatError):
    """A file was made from other data than the data with which it is used."""


class UnknownNameError(FeatstoreError, KeyError):
    """Names belong to no node; the message lists the first of them and says how many there are."""

    def __str__(self) -> str:  # KeyError's would be that of repr()
        return str(self.args[0])


class ClosedError(FeatstoreError, ValueError):
    """The dataset, store or loader was closed."""


class BusyError(FeatstoreError, BlockingIOError):
    """Another process, handle or epoch holds the lock or the cache that this operation needs."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(errno.EWOULDBLOCK, message, None if path is None else os.fspath(path))
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.filename)


class PluginError(FeatstoreError, RuntimeError):
    """A policy, sampler or other plug-in raised, or returned a result that its contract forbids."""


class OptionError(FeatstoreError, ValueError):
    """An option's value cannot be used, or an option cannot be combined with others.

    Parameters
    ----------
    option : str
        The option's name in Python; the command line writes it as ``--its-name``.
    reason : str
        The mistake, and a value that would be accepted.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.option, self.reason)


class FeatstoreWarning(UserWarning):
    """The requested operation is done, but is probably not the intended one; the message gives advice."""


class PerformanceWarning(FeatstoreWarning):
    """The choice of "auto" is several times slower than it would be with more memory or disk; the message says how much more."""


class MissingExtraError(FeatstoreError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class BudgetError(FeatstoreError, MemoryError):
    """The memory budget does not suffice.

    Parameters
    ----------
    reason : str
        The allocation that does not fit. The message is this text, followed by the needed bytes.
    needed : int, optional
        A number of bytes that suffices; None if unknown.
    """

    def __init__(self, reason: str, needed: int | None = None) -> None:
        least = "" if needed is None else f"; at least {needed} bytes ({format_size(needed)}) would do"
        super().__init__(reason + least)
        self.reason = reason
        self.needed = needed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.needed)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called the library, however deep the caller of this function is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
