"""One-line advice for an import error if the compiled modules do not match these sources."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """Add advice to the ImportError of a compiled module that is missing or lacks a name; a context manager for imports.

    Raises
    ------
    ImportError
        Raised from the original error, which names the module.
    """
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("featstore._core"):
            raise
        raise ImportError(
            f"{error}: compiled modules are missing or older than these sources: run make install, or install featstore again; "
            "if it is installed, start Python outside the clone, whose folder featstore hides it",
            name=error.name,
            path=error.path,
        ) from error
