"""Controls of the contract of row sources: for each promise a source that breaks it, which the suite must find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.gather.sources import MemorySource
from featstore.storage.rowfile import ReadStats
from featstore.testing import RowSourceContract


class OtherRows(MemorySource):
    def gather(self, addresses: Any, out: Any, *more: Any) -> ReadStats:
        return super().gather((np.asarray(addresses, np.int64) + 1) % self.n_rows, out, *more)


class WritesBeside(MemorySource):
    """Writes the last row of the output, which nobody wanted where there are no positions."""

    def gather(self, addresses: Any, out: Any, positions: Any = None, gap_bytes: int | None = None) -> ReadStats:
        if positions is None:
            out[-1:] = 0
        return super().gather(addresses, out, positions)


class CountsWrong(MemorySource):
    def gather(self, addresses: Any, out: Any, *more: Any) -> ReadStats:
        super().gather(addresses, out, *more)
        return ReadStats(rows=len(addresses))


class TakesAnyRow(MemorySource):
    """Gives another row for one that is not there."""

    def gather(self, addresses: Any, out: Any, *more: Any) -> ReadStats:
        return super().gather(np.asarray(addresses, np.int64).clip(0, max(0, self.n_rows - 1)), out, *more)


class StaysOpen(MemorySource):
    def close(self) -> None: ...


class NamedAlike(MemorySource):
    fingerprint = "mine"


class SharesItsScratch(MemorySource):
    """Reads the addresses of whichever thread came last."""

    def gather(self, addresses: Any, out: Any, *more: Any) -> ReadStats:
        self.scratch = addresses
        time.sleep(0.001)
        return super().gather(self.scratch, out, *more)


FAULTS = {  # what each breaks
    OtherRows: "test_rows_come_where_they_are_wanted",
    WritesBeside: "test_rows_come_where_they_are_wanted",
    CountsWrong: "test_rows_come_where_they_are_wanted",
    TakesAnyRow: "test_what_is_no_row_is_refused",
    StaysOpen: "test_a_closed_source_says_so",
    NamedAlike: "test_identities_differ",
    SharesItsScratch: "test_threads_gather_at_once",
}


def failed(source: type[MemorySource], folder: Path) -> list[str]:
    """Run the suite on a source; return the tests that fail."""

    class Suite(RowSourceContract):
        def make(self, rows: Any, folder: Path) -> Any:
            return source(rows.copy(), 1)

    found = []
    for name in sorted({*FAULTS.values()}):
        (folder / name).mkdir()
        given = {"row_bytes": 400} if name == "test_rows_come_where_they_are_wanted" else {}
        try:
            getattr(Suite(), name)(tmp_path=folder / name, **given)
        except (AssertionError, pytest.fail.Exception):
            found.append(name)
    return found


@pytest.mark.parametrize("source", [MemorySource, *FAULTS])
def test_faults_are_found_and_a_right_source_passes(source: type[MemorySource], tmp_path: Path) -> None:
    found = failed(source, tmp_path)
    assert FAULTS[source] in found if source in FAULTS else not found
