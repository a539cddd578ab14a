"""Rows of a base and patches: the contract of row sources, streams of their pages, and tables that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.io import PAGE_BYTES
from featstore._core.stream import Stream
from featstore.budget import Budget
from featstore.errors import CorruptionError
from featstore.gather.patchedrows import PatchedRows, patch_table_bytes, segments
from featstore.gather.sources import RowSource
from featstore.storage import pagedsums
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.format import sums_seed
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.reader import Reader
from featstore.testing import RowSourceContract
from tests.gather.test_sources import closed_readers, reader, row_file  # noqa: F401


def patched(rows: np.ndarray, folder: Path, n_base: int, tables: list[list[int]], using: Reader | None = None) -> PatchedRows:
    """Rows of which the base has ``n_base``, and old ones in the blocks of the patches."""
    unit = choose_layout(rows.shape[1]).block[0]
    base, stale = rows[:n_base].copy(), set().union(*tables)
    for block in stale:
        base[block * unit : (block + 1) * unit] ^= 0xFF
    using, made = using or reader(), []
    for k, table in enumerate(tables):
        newer = set().union(*tables[k + 1 :])
        parts = [rows[b * unit : (b + 1) * unit] ^ np.uint8(0x77 * (b in newer)) for b in table]
        (folder / f"patch-{k}").mkdir()
        made.append((row_file(np.concatenate(parts), folder / f"patch-{k}", using), np.array(table)))
    (folder / "base").mkdir()
    below = row_file(base, folder / "base", using)
    return PatchedRows(below, made, len(rows), f"{below.fingerprint} and patches", Budget(64 << 20))


class TestPatches(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        n = len(rows)
        unit = choose_layout(rows.shape[1]).block[0]
        n_blocks = -(-n // unit)
        last = [n_blocks - 1]
        first = sorted({*range(0, n_blocks, 3), *last})
        return patched(rows, folder, n - 1, [first, sorted({*range(0, n_blocks, 5), n_blocks // 2}), last])


@pytest.mark.parametrize("n", [900, 9000])  # where one read of sums goes on from file to file, and where it does not
@pytest.mark.parametrize("is_kept", [True, False])
def test_packing_and_tables_of_sums_that_are_not_kept(
    is_kept: bool, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extents of rows of all files, in order, where pages of sums are loaded as they are needed, too."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (n, 2000), np.uint8)
    using = reader()
    if not is_kept:
        monkeypatch.setattr(pagedsums, "ALWAYS_KEPT_BYTES", 0)
        using.sums_divisor = 1 << 20
    source = patched(
        rows, tmp_path, n, [sorted(rng.choice(n // 2, n // 13, replace=False).tolist()), [4, 5, 6, n // 2 - 1]], using
    )
    assert source.holds_sums == is_kept
    picked = [np.sort(rng.choice(n, k, replace=False)).astype(np.int32) for k in (3, 0, n // 5, n // 22)]
    with ExtentWriter(tmp_path / "extents", ExtentMap(np.array([len(each) for each in picked]), 2000)) as writer:
        writer.fill(source, lambda k: picked[k], 32 << 20, 4)
        record, extents = writer.finish(), writer.extents
    seeds = {"seed": record.seed, "sums_seed": sums_seed(record.seed)}
    file = reader().open(tmp_path / "extents", layout=record.layout, n_rows=record.n_rows, **seeds)
    pages = file.read(0, file.n_rows)
    for k, ids in enumerate(picked):
        first = int(extents.first_page[k]) - 1
        found = pages[first : first + int(extents.n_pages[k])].reshape(-1)[: len(ids) * 2000]
        assert np.array_equal(found.reshape(len(ids), 2000), rows[ids])
    file.close()
    source.close()


def brute_force(unit: int, n_rows: int, n_base: int, tables: list[list[int]]) -> list[tuple[int, int]]:
    """File and row there of each row."""
    found = []
    for row in range(n_rows):
        at = (0, row)
        for k, table in enumerate(tables, 1):
            if row // unit in table:
                at = (k, table.index(row // unit) * unit + row % unit)
        found.append(at)
    return found


@given(st.data())
def test_segments_are_those_of_brute_force(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([choose_layout(1000), choose_layout(2048), RowLayout(4608, 1, 4608), choose_layout(5000)]))
    unit = layout.block[0]
    n_rows = data.draw(st.integers(1, 30 * unit))
    n_blocks = -(-n_rows // unit)
    n_base = data.draw(st.integers(0, n_rows))
    tables = data.draw(st.lists(st.lists(st.integers(0, n_blocks - 1), min_size=1, unique=True).map(sorted), max_size=3))
    whole = sorted({*range(n_base // unit, n_blocks)} if n_base < n_rows else set())
    tables = [*([whole] if whole else []), *tables] or [[0]]
    lengths = [n_base, *(len(t) * unit - (n_blocks * unit - n_rows) * (t[-1] == n_blocks - 1) for t in tables)]
    found = segments(layout, n_rows, lengths, [np.array(t, np.int64) for t in tables], ["base", *"abcd"[: len(tables)]])
    assert found.starts[0] == 0
    assert (found.ends[:-1] == found.starts[1:]).all()
    assert sum(each.nbytes for each in found) <= patch_table_bytes(layout, n_rows, [len(t) for t in tables])
    rows = np.arange(n_rows)
    at = np.searchsorted(found.starts, rows // unit, side="right") - 1
    expected = brute_force(unit, n_rows, n_base, tables)
    assert list(zip(found.file_of[at].tolist(), (rows + found.moved[at] * unit).tolist(), strict=True)) == expected
    bits = np.unpackbits(found.bits, bitorder="little")[:n_blocks].astype(bool)
    assert set(np.flatnonzero(bits).tolist()) == set().union(*tables)


@pytest.mark.parametrize("table", [[], [2, 1], [1, 1], [-1], [4]])
def test_wrong_tables_are_found(table: list[int]) -> None:
    with pytest.raises(CorruptionError, match="its blocks is wrong"):
        segments(choose_layout(4096), 4, [4, len(table)], [np.array(table, np.int64)], ["base", "patch"])


def test_rows_that_no_file_has_are_found() -> None:
    layout = choose_layout(4096)
    with pytest.raises(CorruptionError, match="ends before rows"):
        segments(layout, 5, [3, 1], [np.array([4])], ["base", "patch"])
    with pytest.raises(CorruptionError, match="ends before rows"):
        segments(layout, 5, [4, 1], [np.array([3, 4])], ["base", "patch"])


def test_streams_over_files_refuse_what_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(4 * PAGE_BYTES))

    def stream() -> Stream:
        places = np.array([0, 2], np.uint64), np.array([1, 1], np.uint32)
        return Stream(os.open(path, os.O_RDONLY), False, str(path), "pread", *places, 1, PAGE_BYTES)

    at = np.array([1, 0], np.uint64)
    wrong = [
        ("one file a piece", [], ["a"], at[:1], [0], None, None),
        ("one file a piece", [], ["a", "b"], at, [0, 0], None, None),
        ("in file 1 of 1", [], ["a"], at, [0, 1], None, None),
        ("page 600 of a has no sum", [], ["a"], np.array([1, 600], np.uint64), [0, 0], [1], [1]),
    ]
    for text, fds, paths, where, files, seeds, n_sums in wrong:
        found = stream()
        with pytest.raises(ValueError, match=text):
            found.over(fds, paths, where, np.array(files, np.uint32), seeds, n_sums)
        found.close()
    twice = stream()
    twice.over([os.open(path, os.O_RDONLY)], ["a", "b"], at, np.array([0, 1], np.uint32))
    with pytest.raises(ValueError, match="its files already"):
        twice.over([], ["a"], at, np.array([0, 0], np.uint32))
    twice.close()
