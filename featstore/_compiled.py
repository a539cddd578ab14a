"""One-line advice where the compiled modules are not those of these sources."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """Context manager of imports: a compiled module that is missing, or lacks a name, is said with what to do.

    Raises
    ------
    ImportError
        From the import's own error, which names the module.
    """
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("featstore._core"):
            raise
        raise ImportError(
            f"{error}: compiled modules are missing or older than these sources: run make install, or install featstore again",
            name=error.name,
            path=error.path,
        ) from error
