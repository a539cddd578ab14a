"""Inputs of ``create`` are read ahead: the next block of a memory map or a ``.npy`` file is asked for while one is used."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.creation.source import open_source

ROWS, WIDTH = 1_000, 24


class Map(mmap.mmap):
    """A memory map that notes what it is advised."""

    advised: list[tuple[int, int, int]]

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        """Note the call, and make it."""
        assert length is not None
        self.advised.append((option, start, length))
        super().madvise(option, start, length)


@pytest.mark.parametrize("offset", [0, 16, 5_000])
def test_the_next_block_of_a_memory_map_is_asked_for(offset: int) -> None:
    file = Map(-1, offset + ROWS * WIDTH)
    file.advised = []
    array = np.ndarray((ROWS, WIDTH), np.uint8, buffer=file, offset=offset)
    array[:] = np.random.default_rng(0).integers(0, 256, array.shape)
    source, seen = open_source("x", array), 0
    for block in source.blocks(300 * WIDTH):
        assert np.array_equal(block, array[seen : seen + len(block)])
        seen += len(block)
        if seen < ROWS:
            option, start, length = file.advised[-1]
            end = offset + min(ROWS, seen + 300) * WIDTH
            assert (option, start % mmap.PAGESIZE, start + length) == (mmap.MADV_WILLNEED, 0, end)
            assert start <= offset + seen * WIDTH < start + mmap.PAGESIZE
    assert seen == ROWS
    assert len(file.advised) == 3, "the first block, and what is behind the last one, are not asked for"
    columns = np.concatenate(list(open_source("x", array[:, ::2]).blocks(300 * WIDTH)))
    assert np.array_equal(columns, array[:, ::2])
    assert len(file.advised) == 3


def test_the_next_block_of_a_npy_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    np.save(tmp_path / "x.npy", array)
    start = os.path.getsize(tmp_path / "x.npy") - array.nbytes
    asked: list[tuple[int, int]] = []

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((offset, length))
        raise OSError(5, "Input/output error")  # which costs time alone

    monkeypatch.setattr(os, "posix_fadvise", advise)
    source, seen = open_source("x", tmp_path / "x.npy"), 0
    row = WIDTH * 8
    found: list[Any] = []
    for block in source.values(300 * row):
        seen += len(block)
        found.append(block.copy())
        assert asked[-1] == (start + seen * row, 300 * row)
    assert np.array_equal(np.concatenate(found), array)
