"""More than 2³¹ rows in more than 4 GiB of file: no 32-bit number anywhere on a row's way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from featstore.errors import CorruptionError
from featstore.storage.layout import PAGE_BYTES, choose_layout
from featstore.storage.writer import FileRecord, RowFileWriter
from featstore.testing.faults import flipped
from tests.support.written_rows import opened

N_ROWS = (1 << 31) + 5_000
BLOCK_ROWS = 1 << 22


def rows_of(ids: np.ndarray) -> np.ndarray:
    """The two bytes of each row: a hash of its number, so that any two rows far apart differ."""
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(41)
    return mixed.astype("<u2").view(np.uint8).reshape(-1, 2)


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FileRecord]]:
    """The row file, 4.3 GB, written block by block; removed as soon as the module is done."""
    folder = tmp_path_factory.mktemp("huge")
    with RowFileWriter(folder, "rows.bin", choose_layout(2), kind="feature", dtype="uint8") as writer:
        for first in range(0, N_ROWS, BLOCK_ROWS):
            writer.write(rows_of(np.arange(first, min(first + BLOCK_ROWS, N_ROWS))))
        record = writer.commit()
    yield folder, record
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["io_uring", "pread"])
def test_rows_beyond_32_bits(huge: tuple[Path, FileRecord], backend: str) -> None:
    folder, record = huge
    assert (folder / record.name).stat().st_size > 1 << 32
    rng = np.random.default_rng(0)
    corners = np.concatenate(
        [np.arange(at - 40, at + 40) for at in (1 << 31, 1 << 30, 1 << 20)] + [np.arange(N_ROWS - 80, N_ROWS)]
    )
    ids = np.concatenate([corners, rng.integers(0, N_ROWS, 20_000)])
    rng.shuffle(ids)
    with opened(folder, record, backend=backend) as (file, _):
        for gap in (0, None):
            out = np.zeros((len(ids), 2), np.uint8)
            file.gather(ids, out, None, gap)
            assert np.array_equal(out, rows_of(ids))
        first = (1 << 31) - 3_000
        assert np.array_equal(file.read(first, 6_000), rows_of(np.arange(first, first + 6_000)))


@pytest.mark.stress
def test_damage_beyond_32_bits(huge: tuple[Path, FileRecord]) -> None:
    folder, record = huge
    offset = PAGE_BYTES + 2 * (1 << 31) + 100
    with opened(folder, record) as (file, _), flipped(folder / record.name, offset, 5):
        with pytest.raises(CorruptionError) as caught:
            file.gather(np.array([(1 << 31) + 60]), np.zeros((1, 2), np.uint8), None, 0)
        assert caught.value.offset == offset // PAGE_BYTES * PAGE_BYTES
        out = np.zeros((1, 2), np.uint8)
        file.gather(np.array([60]), out, None, 0)  # 4 GiB below: a number cut to 32 bits would land on the damage
        assert np.array_equal(out, rows_of(np.array([60])))
