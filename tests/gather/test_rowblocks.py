"""Blocks of rows: all rows once and in order, read in large pieces, within the budget; errors at their block's turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore._core.buffers import Arena
from featstore.budget import Budget
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.gather import rowblocks
from featstore.gather.buffers import BufferPool
from featstore.gather.sources import MemorySource, SourceRange
from featstore.storage.rowfile import RowFile
from featstore.testing.faults import forked
from tests.support.kernel_counts import agree_with_the_kernel

MIB = 1 << 20


def made(path: Path, values: np.ndarray | torch.Tensor, memory: str | int = "64MiB", **options: str) -> featstore.OutOfCoreGraph:
    featstore.create(path, values, progress=False).close()
    return featstore.open(path, memory=memory, **options)


WIDTHS = (1, 4, 400, 512, 3072, 4096, 4100, 5732, 9000)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.OutOfCoreGraph]:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "g"
    features = {str(width): rng.integers(0, 256, (300, width), dtype=np.uint8) for width in WIDTHS}
    none = np.empty(0, np.int64)
    with featstore.OutOfCoreGraph.create(path, np.zeros(301, np.int64), none, features, progress=False, memory="64MiB") as g:
        yield g


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(0, 40),
    width=st.integers(1, 9),
    rows=st.none() | st.integers(1, 50),
    read_bytes=st.sampled_from([1, 40, 100_000]),
)
def test_all_rows_come_once_and_in_order(n: int, width: int, rows: int | None, read_bytes: int) -> None:
    values = torch.arange(n * width, dtype=torch.int16).reshape(n, width)
    pool = BufferPool(Budget(64 * MIB))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowblocks, "PIECE_BYTES", read_bytes)
        patch.setattr(rowblocks, "PAGE_BYTES", 1)
        source = MemorySource(values.numpy().view(np.uint8).reshape(n, 2 * width), 1)
        blocks = list(rowblocks.row_blocks(source, pool, (width,), torch.int16, rows))
    firsts = [first for first, _ in blocks]
    sizes = [len(block) for _, block in blocks]
    assert firsts == [sum(sizes[:k]) for k in range(len(sizes))]
    assert torch.equal(torch.cat([values[:0], *(block for _, block in blocks)]), values)
    if rows is not None:
        assert all(size == rows for size in sizes[:-1])
        assert not sizes or 0 < sizes[-1] <= rows


@pytest.mark.parametrize("backend", ["auto", "pread"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("row", [(), (25,), (3, 500)], ids=str)  # dense, dense, and padded to pages
def test_blocks_of_a_store(tmp_path: Path, row: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    values = torch.from_numpy(np.random.default_rng(1).integers(0, 2, (2_000, *row))).to(dtype)
    with made(tmp_path / "g", values, backend=backend) as g:
        for rows in (None, 1_999, 333):
            found = dict(g["x"].blocks(rows))
            assert torch.equal(torch.cat(list(found.values())), values)
            assert all(block.dtype == dtype and block.shape[1:] == values.shape[1:] for block in found.values())
            assert rows is None or [*found] == [*range(0, 2_000, rows)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.sampled_from([*WIDTHS]), rows=st.none() | st.integers(1, 99), piece=st.integers(1, 30_000))
def test_any_layout_from_any_row(
    layouts: featstore.OutOfCoreGraph, data: st.DataObject, width: int, rows: int | None, piece: int
) -> None:
    store = layouts.features[str(width)]
    first = data.draw(st.integers(0, len(store)))
    n = data.draw(st.integers(0, len(store) - first))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowblocks, "PIECE_BYTES", piece)
        patch.setattr(rowblocks, "PAGES", 2)
        blocks = rowblocks.row_blocks(SourceRange(store.source, first, n), layouts.pool, (width,), torch.uint8, rows)
        found = torch.cat([torch.empty((0, width), dtype=torch.uint8), *(block for _, block in blocks)])
    assert torch.equal(found, store[first : first + n])


def test_the_file_is_read_once(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((40_000, 128)).astype(np.float32)  # 20 MB
    with made(tmp_path / "g", values, memory="6MiB") as g:
        x = g["x"]
        assert len([first for first, _ in x.blocks(rows=100)]) == 400
        stats = x.stats()
        assert values.nbytes <= stats["bytes_read"] <= 1.03 * values.nbytes
        assert stats["rows_loaded"] == len(values)
        assert stats["reads"] <= 100, "small blocks are parts of large reads"
        if stats["mode"] == "direct":
            assert isinstance(x.source, RowFile)
            assert agree_with_the_kernel(x.source, lambda: sum(len(block) for _, block in x.blocks())) <= 1.03 * values.nbytes


def test_memory_stays_within_the_budget_and_goes_back(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((60_000, 128)).astype(np.float32)  # 30 MB
    with made(tmp_path / "g", values, memory="8MiB") as g:
        held = g.budget.used
        done = 0
        for first, block in g["x"].blocks():
            assert np.array_equal(block.numpy(), values[first : first + len(block)])
            done += len(block)
        assert done == len(values)
        del block
        g.pool.trim()
        assert g.budget.used <= held + MIB  # queues of reads
        assert g.budget.peak <= 8 * MIB


def test_a_block_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowblocks, "PIECE_BYTES", 100_000)
    values = np.random.default_rng(4).standard_normal((4_000, 32)).astype(np.float32)
    with made(tmp_path / "g", values) as g:
        kept = list(g["x"].blocks(rows=700))
    for first, block in kept:
        assert np.array_equal(block.numpy(), values[first : first + 700])


@pytest.mark.parametrize("memory", ["4MiB", "7MiB", "12MiB"])  # of which none, one and two blocks fit
def test_the_error_names_memory_that_suffices(tmp_path: Path, memory: str) -> None:
    values = np.random.default_rng(5).standard_normal((80_000, 128)).astype(np.float32)  # 40 MB
    with made(tmp_path / "g", values, memory=memory) as g:
        blocks = g["x"].blocks(rows=8_000)
        with pytest.raises(BudgetError) as refused:
            list(map(len, blocks))
    assert refused.value.needed is not None
    with featstore.open(tmp_path / "g", memory=refused.value.needed) as g:
        for first, block in g["x"].blocks(rows=8_000):
            assert np.array_equal(block.numpy(), values[first : first + 8_000])


def test_an_array_of_all_rows(tmp_path: Path) -> None:
    values = np.random.default_rng(6).standard_normal((80_000, 128)).astype(np.float32)
    with made(tmp_path / "g", values, memory="10MiB") as g:
        with pytest.raises(BudgetError) as refused:
            g["x"].numpy()
    assert refused.value.needed is not None
    with featstore.open(tmp_path / "g", memory=refused.value.needed) as g:
        found = g["x"].numpy()
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        assert np.array_equal(found, values)
        assert g.budget.used >= values.nbytes, "it counts while it lives"
    with made(tmp_path / "b", torch.ones(3, 2, dtype=torch.bfloat16)) as g:
        with pytest.raises(TypeError, match="no bfloat16"):
            g["x"].numpy()
        assert g["x"].stats()["reads"] == 0


def test_the_cache_stays_as_it_is(tmp_path: Path) -> None:
    values = np.random.default_rng(7).standard_normal((2_000, 64)).astype(np.float32)
    with made(tmp_path / "g", values) as g:
        g.cache("x", budget="100KB", policy="lru")
        g["x"][:100]
        before = g["x"].stats()["cache"]
        assert sum(len(block) for _, block in g["x"].blocks()) == 2_000
        assert g["x"].stats()["cache"] == before


def test_wrong_sizes_and_closed_stores(tmp_path: Path) -> None:
    with made(tmp_path / "g", np.eye(9, dtype=np.float32)) as g:
        x = g["x"]
        for rows in (0, -1):
            with pytest.raises(ValueError, match="rows"):
                x.blocks(rows)
        with pytest.raises(TypeError, match="rows"):
            x.blocks(2.5)  # type: ignore[arg-type]
        begun = x.blocks(rows=2)
        next(begun)
    with pytest.raises(ClosedError):
        x.blocks()


def test_closing_ends_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowblocks, "PIECE_BYTES", 4096)
    with made(tmp_path / "g", np.zeros((9_000, 64), np.float32)) as g:
        blocks = g["x"].blocks()
        next(blocks)
    with pytest.raises(ClosedError):
        list(blocks)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("featstore-read")]


def test_damage_is_found_at_its_block(tmp_path: Path) -> None:
    values = np.random.default_rng(8).standard_normal((8_000, 128)).astype(np.float32)
    featstore.create(tmp_path / "g", values, progress=False).close()
    data = max((file for file in (tmp_path / "g").rglob("*") if file.is_file()), key=os.path.getsize)
    with open(data, "r+b") as file:
        file.seek(4096 + 6_000 * 512)
        file.write(b"\x01")
    with featstore.open(tmp_path / "g", memory="64MiB") as g, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowblocks, "PIECE_BYTES", 512_000)
        seen = []
        with pytest.raises(CorruptionError):
            for first, block in g["x"].blocks(rows=1_000):
                assert np.array_equal(block.numpy(), values[first : first + 1_000])
                seen.append(first)
        assert 3 <= len(seen) <= 6, "the megabyte with the damage, and nothing before it, is not delivered"


def test_a_forked_child_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowblocks, "PIECE_BYTES", 64_000)
    values = np.random.default_rng(9).standard_normal((4_000, 32)).astype(np.float32)
    with made(tmp_path / "g", values) as g:
        blocks = g["x"].blocks(rows=500)
        next(blocks)

        def rest() -> None:
            for first, block in blocks:
                assert np.array_equal(block.numpy(), values[first : first + 500])
            assert first == 3_500

        assert forked(rest) is None
        rest()


def test_arenas_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pages cost more than reading into them: three reads' memory takes turns."""
    sizes: list[int] = []

    def counted(size: int) -> Arena:
        sizes.append(size)
        return Arena(size)

    monkeypatch.setattr(rowblocks, "PIECE_BYTES", 512_000)
    monkeypatch.setattr("featstore.gather.buffers.Arena", counted)
    with made(tmp_path / "g", np.zeros((20_000, 128), np.float32)) as g:
        for _, _block in g["x"].blocks():
            pass
    assert len(sizes) <= 4
