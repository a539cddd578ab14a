"""Rows of some of the nodes by the nodes' ids: where each one is, and packed as if the file had all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from featstore.gather.partrows import PartRows
from featstore.gather.sources import RowSource
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.format import sums_seed
from featstore.testing import RowSourceContract
from tests.gather.test_sources import closed_readers, reader, row_file  # noqa: F401

N = 1500


class TestAllNodes(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return PartRows(row_file(rows, folder), np.arange(len(rows), dtype=np.int32))


def part_rows(folder: Path, row_bytes: int = 40) -> tuple[PartRows, np.ndarray, np.ndarray]:
    """A third of the nodes, with their rows."""
    rng = np.random.default_rng(0)
    nodes = np.sort(rng.choice(N - 5, 500, replace=False))  # the last nodes have none
    rows = rng.integers(0, 256, (len(nodes), row_bytes), dtype=np.uint8)
    row_of = np.searchsorted(nodes, np.arange(N)).astype(np.int32)
    return PartRows(row_file(rows, folder), row_of), nodes, rows


def test_rows_are_found_by_node(tmp_path: Path) -> None:
    source, nodes, rows = part_rows(tmp_path)
    at = np.random.default_rng(1).integers(0, len(nodes), 300)
    out = np.empty((300, 40), np.uint8)
    source.gather(nodes[at], out)
    assert np.array_equal(out, rows[at])
    source.gather(nodes[at].astype(np.int32), out)
    assert np.array_equal(out, rows[at])
    assert source.n_rows == N
    source.gather(np.arange(N), np.empty((N, 40), np.uint8))  # of others there is a row of a neighbour
    ascending = source.in_file(np.arange(N))
    assert (np.diff(ascending) >= 0).all()
    assert ascending.max() == len(nodes) - 1
    source.close()


def test_extents_of_nodes_have_their_rows(tmp_path: Path) -> None:
    """Packing reads the pages of the file that nodes' rows are in, also those that it keeps in memory."""
    source, nodes, rows = part_rows(tmp_path)
    rng = np.random.default_rng(2)
    picked = [np.sort(rng.choice(len(nodes), n, replace=False)) for n in (3, 0, 200, 41)]
    kept = np.sort(rng.choice(len(nodes), 17, replace=False))
    beside = np.empty((17, 40), np.uint8)
    with ExtentWriter(tmp_path / "extents", ExtentMap(np.array([len(each) for each in picked]), 40)) as writer:
        writer.fill(source, lambda k: nodes[picked[k]].astype(np.int32), 16 << 20, 4, kept=(nodes[kept], beside))
        record, extents = writer.finish(), writer.extents
    assert np.array_equal(beside, rows[kept])
    seeds = {"seed": record.seed, "sums_seed": sums_seed(record.seed)}
    file = reader().open(tmp_path / "extents", layout=record.layout, n_rows=record.n_rows, **seeds)
    for k, each in enumerate(picked):
        n_pages = int(extents.n_pages[k])
        pages = np.empty((n_pages, 4096), np.uint8)
        if n_pages:
            file.read_pages(np.arange(n_pages) + int(extents.first_page[k]), pages)
        assert np.array_equal(pages.reshape(-1)[: len(each) * 40].reshape(-1, 40), rows[each])
    file.close()
    source.close()
