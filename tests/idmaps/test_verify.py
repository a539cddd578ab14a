"""Maps whose pages are whole, and whose content is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import CorruptionError
from featstore.idmaps import verify as check
from featstore.idmaps import writer
from tests.support.names import named_graph

NAMES = [f"name {i}" for i in range(500)]


def verify(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        g.verify(progress=False)


def swapped(array: Any, first: int, second: int) -> Any:
    found = array.copy()
    found[[first, second]] = found[[second, first]]
    return found


def shifted(rows: Any, by: int) -> Any:
    """Add to the last number of a file of numbers."""
    found = rows.copy().view("<i8")
    found[-1] += by
    return found.view(np.uint8)


def without_first_hash(rows: Any) -> Any:
    """Make a block's first hash the least there is."""
    found = rows.copy()
    found[0, :8] = 0
    return found


WRONG: list[tuple[str, Callable[[Any, int], Any], str]] = [
    ("first", lambda rows, n: shifted(rows, 1), "the first name does not begin with the first byte"),
    ("8 int64", lambda rows, n: shifted(rows, -1), "the names end at byte 3889 of 3890"),
    ("8 int64", lambda rows, n: shifted(rows, 50 if rows[0, 0] == 6 else 0), "offsets of names do not ascend"),
    ("16", lambda rows, n: without_first_hash(rows) if n == 334 else rows, "the hashes of names do not ascend"),
    ("rest", lambda rows, n: shifted(rows, -1), "begins at a wrong place"),
    ("8 int64", lambda rows, n: swapped(rows, 100, 101) if n == 250 else rows, "offsets of names do not ascend"),
    ("16", lambda rows, n: np.concatenate((rows[1:], rows[:1])), "the hashes of names do not ascend"),
    ("16", lambda rows, n: np.where(np.arange(16) < 8, rows, np.roll(rows, 1, axis=0)), "names would get ids of others"),
    ("16", lambda rows, n: np.where(np.arange(16) < 15, rows, 1), "an id is no node's"),
    ("buckets", lambda rows, n: rows + np.uint8(1), "begins at a wrong place"),
]


@pytest.mark.parametrize(("which", "change", "message"), WRONG)
def test_what_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, change: Callable[[Any, int], Any], message: str
) -> None:
    plain = writer._rows

    def rows(values: Any, width: int) -> Any:
        found = plain(values, width)
        is_bucket = width == 8 and len(values) and values.max() <= len(NAMES) and len(values) not in (1, 250)
        hit = {"16": width == 16, "8 int64": width == 8 and not is_bucket and len(values) > 1, "buckets": is_bucket}
        hit |= {"first": width == 8 and not values.any(), "rest": width == 8 and (values == len(NAMES)).all()}
        return change(found, len(values)) if hit[which] else found

    monkeypatch.setattr(writer, "_rows", rows)
    path = named_graph(tmp_path / "g", NAMES)
    monkeypatch.undo()
    monkeypatch.setattr(check, "_BLOCK", 251 if which != "16" else 166)
    with pytest.raises(CorruptionError, match=message):
        verify(path)


def test_a_whole_map_passes(tmp_path: Path) -> None:
    for number, names in enumerate((NAMES, ["a"], ["", "b"], list(range(-300, 900)), [])):
        verify(named_graph(tmp_path / str(number), names))  # type: ignore[arg-type]
