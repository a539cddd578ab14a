"""Tables of cases for :func:`pytest.mark.parametrize`: a line a name, with all of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["each"]


def each(table: Mapping[Any, Iterable[Any]]) -> list[tuple[Any, Any]]:
    """Pair each key of a table with each of its values."""
    return [(key, value) for key, values in table.items() for value in values]
