"""Rows read ahead: all of them once and in order, one block ahead at most, errors at their block's turn, no thread left."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from featstore.gather.doublebuffer import double_buffer

Rows = npt.NDArray[np.uint8]


class File:
    """Rows that hold their number; notes what was read, and by which thread; fails at one row."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.firsts: list[int] = []
        self.threads: set[int] = set()

    def read(self, first: int, n: int, out: Rows) -> None:
        self.firsts.append(first)
        self.threads.add(threading.get_ident())
        if first <= self.fails_at < first + n:
            raise OSError(5, "Input/output error")
        out[:] = np.arange(first, first + n, dtype=np.uint8)[:, None]


def cut(n_rows: int, step: int) -> list[tuple[int, Rows]]:
    """Cut rows into blocks; two arrays take turns."""
    turns = np.empty((2, step, 3), np.uint8)
    return [(first, turns[k % 2, : min(step, n_rows - first)]) for k, first in enumerate(range(0, n_rows, step))]


@settings(max_examples=50, deadline=None)
@given(n_rows=st.integers(0, 60), step=st.integers(1, 20))
def test_all_rows_come_in_order(n_rows: int, step: int) -> None:
    file = File()
    found: list[int] = []
    for n_done, (first, rows) in enumerate(double_buffer(file.read, cut(n_rows, step)), 1):
        assert first == len(found)
        found += rows[:, 0].tolist()
        assert len(file.firsts) <= n_done + 1, "never more than a block ahead: the arrays take turns"
    assert found == list(range(n_rows))
    assert file.firsts == list(range(0, n_rows, step))


def test_a_thread_reads_the_next_block() -> None:
    file = File()
    blocks = double_buffer(file.read, cut(40, 10))
    next(blocks)
    assert file.threads >= {threading.get_ident()}
    assert len(list(blocks)) == 3
    assert len(file.threads) == 2


def test_one_block_needs_no_thread() -> None:
    file = File()
    assert len(list(double_buffer(file.read, cut(5, 10)))) == 1
    assert file.threads == {threading.get_ident()}


@pytest.mark.parametrize(("row", "n_before"), [(0, 0), (9, 0), (10, 1), (35, 3)])
def test_an_error_comes_at_its_blocks_turn(row: int, n_before: int) -> None:
    n_found = 0
    with pytest.raises(OSError, match="Input/output error"):
        for _ in double_buffer(File(row).read, cut(40, 10)):
            n_found += 1
    assert n_found == n_before


def test_nothing_is_left_of_one_that_is_given_up() -> None:
    before = set(threading.enumerate())
    blocks = double_buffer(File().read, cut(40, 10))
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]  # a generator
    assert set(threading.enumerate()) <= before
