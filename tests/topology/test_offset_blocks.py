"""Offsets that are read on open are checked block by block, and across the seams of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from featstore.errors import CorruptionError
from featstore.topology import base as topology_module
from featstore.topology.base import CscTopology
from tests.support.written_rows import opened, write_rows

BLOCK = 8  # offsets


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_module, "BLOCK_BYTES", 8 * BLOCK)


def load(folder: Path, indptr: np.ndarray, num_edges: int) -> np.ndarray:
    """Write offsets whose pages have their right checksums, read them, and return what was read."""
    folder.mkdir()
    record = write_rows(folder, indptr.view(np.uint8).reshape(-1, 8))
    with opened(folder, record) as (file, reader):
        topology = CscTopology.load(len(indptr) - 1, num_edges, file, file, 8, reader.budget)
        found = topology.indptr.copy()
        topology.close()
        return found


@pytest.mark.parametrize("length", [0, 4, 6])
def test_offsets_of_another_number_of_lists_are_refused(tmp_path: Path, length: int) -> None:
    """Checked or not, as the core walks them."""
    record = write_rows(tmp_path, np.zeros((1, 4), np.uint8))
    with opened(tmp_path, record) as (file, _):
        for is_checked in (False, True):
            with pytest.raises(ValueError, match=rf"of 4 lists has shape \(5,\), not \({length},\)"):
                CscTopology(4, 0, np.zeros(length, np.int64), file, 4, is_checked=is_checked)


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 2])
def test_offsets_that_ascend_are_read(tmp_path: Path, n: int) -> None:
    indptr = np.arange(0, 10 * n + 1, 10)
    assert np.array_equal(load(tmp_path / "g", indptr, 10 * n), indptr)


def test_every_descent_is_found(tmp_path: Path) -> None:
    """Wherever it is: within a block, from one to the next, at the first and at the last offset."""
    n = 3 * BLOCK + 2
    for node in range(n + 1):
        indptr = np.arange(0, 10 * n + 1, 10)
        indptr[node] += -11 if node else 1  # below the one before it
        with pytest.raises(CorruptionError, match=f"do not ascend from 0 to {10 * n} at node {node}:"):
            load(tmp_path / str(node), indptr, 10 * n)
    with pytest.raises(CorruptionError, match="do not ascend"):
        load(tmp_path / "long", np.arange(0, 10 * n + 1, 10), 10 * n + 1)
