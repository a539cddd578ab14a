"""Row files that another writer goes on with: the same rows and checksums, whatever the layout and wherever it was left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import FormatError
from featstore.storage import writer as module
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.writer import RowFileWriter, WriterState
from tests.support.rowfiles import check_sums, file_rows


def rows_of(n: int, row_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (n, row_bytes)).astype(np.uint8)


def make(folder: Path, layout: RowLayout, resume: WriterState | None = None) -> RowFileWriter:
    return RowFileWriter(folder, "f.rows", layout, kind="feature", dtype="uint8", buffer_bytes=64 << 10, resume=resume)


@pytest.mark.parametrize("row_bytes", [1, 100, 3072, 4096, 5000, 70_000])
def test_a_file_that_was_left_anywhere_is_whole_in_the_end(tmp_path: Path, row_bytes: int) -> None:
    n = 3_000_000 // row_bytes + 3
    rows, layout = rows_of(n, row_bytes), choose_layout(row_bytes)
    cuts = [0, 1, n // 3, n // 3 + 1, n - 1]
    state = None
    for begin, end in zip(cuts, [*cuts[1:], n], strict=True):
        writer = make(tmp_path, layout, state)
        assert writer.n_rows == begin
        writer.write(rows[begin:end])
        state = writer.checkpoint()
        assert state.n_rows == end
        writer.write(rows[: min(n, 40)])  # of what was not recorded nothing stays
        writer.leave()
    with make(tmp_path, layout, state) as last:
        record = last.commit()
    assert sorted(os.listdir(tmp_path)) == ["f.rows", "f.rows.sums"]
    assert np.array_equal(file_rows(tmp_path, record), rows)
    check_sums(tmp_path, record)


def test_what_a_state_says_is_on_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: dict[str, int] = {}
    monkeypatch.setattr(module, "fsync_fd", lambda fd, path: flushed.update({path: os.fstat(fd).st_size}))
    writer = make(tmp_path, choose_layout(100))
    writer.write(rows_of(5_000, 100))
    state = writer.checkpoint()
    writer.abort()
    assert len(flushed) == 2
    assert max(flushed.values()) >= state.offset
    assert not os.listdir(tmp_path)


def test_a_file_that_was_cut_short_or_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    writer = make(tmp_path, choose_layout(512))
    writer.write(rows_of(1_000, 512))
    state = writer.checkpoint()
    writer.leave()
    path = next(each for each in tmp_path.iterdir() if ".sums" not in each.name)
    os.truncate(path, state.offset - 1)
    with pytest.raises(FormatError, match="shorter"):
        make(tmp_path, choose_layout(512), state)
    assert path.exists()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        make(tmp_path, choose_layout(512), state)
