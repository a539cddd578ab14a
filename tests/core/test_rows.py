"""Row copies, id checks, page checksums, pooled blocks: compiled kernels against NumPy and the xxhash package."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.checksum import page_sums
from featstore._core.rows import copy_costs, copy_rows, wrap_ids
from featstore.budget import Budget
from featstore.errors import BudgetError, ClosedError
from featstore.gather import buffers
from featstore.gather.buffers import BufferPool, huge_array, take_pages, taking_pages


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 64, 100, 256, 512, 4096, 70_000])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_copy_rows(width: int, n_threads: int) -> None:
    rng = np.random.default_rng(width)
    n = max(40, min(20_000, (6 << 20) // width))
    src = rng.integers(0, 256, (n, width), dtype=np.uint8)
    for index in (np.int32, np.int64):
        take = rng.integers(0, n, n).astype(index)
        put = rng.permutation(n).astype(index)
        dst = np.zeros((n, width), np.uint8)
        copy_rows(src, take, dst, None, n_threads)
        assert np.array_equal(dst, src[take])
        copy_rows(src, None, dst, put, n_threads)
        assert np.array_equal(dst[put], src)
        dst.fill(7)
        copy_rows(src, take, dst, put, n_threads)
        assert np.array_equal(dst[put], src[take])


def test_copy_rows_checks_its_indices() -> None:
    rows = np.zeros((5, 8), np.uint8)
    for bad in ([5], [-1], [0, 5]):
        for index in (np.int32, np.int64):
            with pytest.raises(IndexError):
                copy_rows(rows, np.array(bad, index), rows.copy(), None)
            with pytest.raises(IndexError):
                copy_rows(rows, None, rows.copy(), np.array(bad, index))
    with pytest.raises(ValueError, match="widths"):
        copy_rows(rows, None, np.zeros((5, 9), np.uint8), None)
    with pytest.raises(IndexError):
        copy_rows(rows, np.zeros(6, np.int64), rows.copy(), None)


def test_copies_in_a_forked_child() -> None:
    src = np.random.default_rng(0).integers(0, 256, (4000, 512), dtype=np.uint8)
    ids = np.arange(4000)[::-1].copy()
    copy_rows(src, ids, np.empty_like(src), None, 4)  # the parent's threads exist
    child = os.fork()
    if child == 0:
        out = np.empty_like(src)
        copy_rows(src, ids, out, None, 4)
        os._exit(0 if np.array_equal(out, src[::-1]) else 1)
    assert os.waitpid(child, 0)[1] == 0


@given(ids=st.lists(st.integers(-12, 12)), n=st.integers(0, 10))
def test_wrap_ids(ids: list[int], n: int) -> None:
    array = np.array(ids, np.int64)
    out = np.full(len(ids), 99, np.int64)
    bad, negative = wrap_ids(array, n, out)
    wrong = [i for i, value in enumerate(ids) if not -n <= value < n]
    assert bad == (wrong[0] if wrong else -1)
    if not wrong:
        assert negative == any(value < 0 for value in ids)
        assert out.tolist() == [value % n for value in ids]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_page_sums_are_those_of_the_package(level: int) -> None:
    try:
        page_sums(b"", 0, np.empty(0, np.uint64), level)
    except ValueError as error:  # this processor lacks the instruction set; the portable one is always tested
        assert "instruction set" in str(error)
        assert level > 0
        return
    data = np.random.default_rng(level).integers(0, 256, 64 * 4096, dtype=np.uint8)
    out = np.zeros(64, np.uint64)
    for seed in (0, 1, 2**31, 2**64 - 1, 0x9E3779B97F4A7C15):
        page_sums(data, seed, out, level)
        assert out.tolist() == [xxhash.xxh3_64_intdigest(page.tobytes(), seed) for page in data.reshape(64, 4096)]
    with pytest.raises(ValueError, match="whole pages"):
        page_sums(data[:-1], 0, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_pool_reuses_and_accounts(dtype: torch.dtype) -> None:
    budget = Budget(40 << 20)
    pool = BufferPool(budget)
    a = pool.tensor((1000, 1000), dtype)
    assert (a.shape, a.dtype, a.data_ptr() % 4096) == ((1000, 1000), dtype, 0)
    assert budget.used >= a.nbytes
    assert budget.report() == {"batch buffers": budget.used}
    address, used = a.data_ptr(), budget.used
    del a
    b = pool.tensor((990, 1000), dtype)
    assert (b.data_ptr(), budget.used) == (address, used)
    del b
    pool.trim()
    assert budget.used == 0
    pool.close()
    with pytest.raises(ClosedError):
        pool.tensor((1000, 1000), dtype)


def test_pool_over_budget_holds_nothing_more() -> None:
    budget = Budget(8 << 20)
    pool = BufferPool(budget)
    a = pool.array((5 << 20,), np.uint8)
    used = budget.used
    with pytest.raises(BudgetError) as caught:
        pool.array((5 << 20,), np.uint8)
    assert caught.value.needed > budget.total
    assert budget.used == used
    view = a.reshape(-1, 1024)[3]
    del a
    pool.trim()
    assert budget.used == used
    del view
    bigger = pool.array((7 << 20,), np.uint8)  # the idle block makes room
    assert budget.used <= budget.total
    pool.close()
    assert budget.used == 0  # and the array goes on
    bigger[:] = 1
    assert int(bigger.sum()) == 7 << 20


def faults_of_writing_to_taken_pages() -> int:
    """Page faults of this thread while it writes to every page of 32 huge ones, 16,384 small ones."""
    memory = huge_array(64 << 20)
    assert take_pages(memory)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::4096] = 3
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_pages_are_taken_and_what_is_in_them_stays() -> None:
    known = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14)
    memory = huge_array(64 << 20)
    memory[12_345], memory[-1] = 7, 9
    assert take_pages(memory) == known
    assert (memory[12_345], memory[-1], memory[0]) == (7, 9, 0)
    if known:
        assert min(faults_of_writing_to_taken_pages() for _ in range(3)) < 16  # a kernel that moves pages just then makes more
    asked: list[int] = []
    assert not take_pages(huge_array(64 << 20), lambda: len(asked) < 2 and not asked.append(0))  # type: ignore[func-returns-value]
    assert len(asked) == 2
    assert take_pages(memory[:0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_comes_back_while_the_pool_is_closed(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Between its trimming and its end, or after that, in a thread that had the queue already: the budget gets it once."""
    budget = Budget(8 << 20)
    pool = BufferPool(budget)
    held = [pool.array((1 << 20,), np.uint8)]
    end, returned = pool._loan.end, pool._returned

    def comes_back() -> None:
        end()
        held.clear()
        assert pool._idle_bytes() == 1 << 20

    if when == "before":
        monkeypatch.setattr(pool._loan, "end", comes_back)
    pool.close()
    assert not budget.used
    assert not pool._idle_bytes()
    held.clear()
    pool._returned = returned
    pool.trim()
    assert not budget.used


def test_a_pool_prepares_blocks_from_half_of_what_is_left() -> None:
    budget = Budget(64 << 20)
    pool = BufferPool(budget)
    pool.prepare(5 << 20, 3)
    assert budget.used == 3 * (5 << 20)
    held = [pool.array((5 << 20,), np.uint8) for _ in range(3)]
    assert budget.used == 15 << 20
    pool.prepare(5 << 20, 100)
    assert budget.used == (15 + 20) << 20  # of the 49 MiB left no more than half
    pool.prepare(5 << 20, 100, lambda: False)
    del held
    pool.prepare(100 << 20, 1)
    pool.trim()
    assert budget.used == 0


def test_blocks_freed_by_the_collector_inside_the_pool() -> None:
    pool = BufferPool(Budget(1 << 30))
    for _ in range(50):  # cycles: the collector, not the reference count, frees them, anywhere
        cycle: list[Any] = [pool.tensor((300_000,), torch.float32)]
        cycle.append(cycle)
        del cycle
        if _ % 7 == 0:
            gc.collect()
    gc.collect()
    pool.trim()
    assert pool.budget.used == 0


@pytest.mark.parametrize(("row_bytes", "n"), [(512, 80_000), (64, 500_000), (100, 200_000), (4096, 9_000)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_large_copies_by_every_way(row_bytes: int, n: int, n_threads: int) -> None:
    """Pieces of a large copy are done in each way there is, and timed; the rows are those of NumPy's take."""
    rng = np.random.default_rng(row_bytes)
    src = rng.integers(0, 256, (n // 4, row_bytes), dtype=np.uint8)
    rows, places = rng.integers(0, len(src), n).astype(np.int32), rng.permutation(n)
    out = huge_array(n * row_bytes).reshape(n, row_bytes)
    copy_rows(src, rows, out, places, n_threads)
    expected = np.empty_like(out)
    expected[places] = src[rows]
    assert np.array_equal(out, expected)
    costs = copy_costs(row_bytes, row_bytes % 64 == 0)
    assert min(costs[:2]) > 0
    assert all(cost < 2**31 for cost in costs)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def test_pages_are_taken_from_the_end_beside_whoever_fills_memory() -> None:
    memory = huge_array(192 << 20)
    memory[-5:] = [1, 2, 3, 4, 5]
    memory[:5] = [6, 7, 8, 9, 10]
    gc.collect()  # what other tests left would go meanwhile
    before = resident()
    with taking_pages(memory):
        end = time.monotonic() + 60
        while resident() - before < 180 << 20 and time.monotonic() < end:
            time.sleep(0.01)
    assert resident() - before >= 180 << 20
    assert memory[-5:].tolist() == [1, 2, 3, 4, 5]
    assert memory[:5].tolist() == [6, 7, 8, 9, 10]
    assert not [each for each in threading.enumerate() if each.name == "featstore-pages"]


def test_pages_are_taken_no_longer_than_memory_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, taken, begun = huge_array(4 << 30), [], threading.Event()

    def take(piece: Any) -> bool:
        taken.append(len(piece))
        begun.set()
        time.sleep(0.05)  # all of them take 26 s
        return True

    monkeypatch.setattr(buffers, "populate", take)
    with pytest.raises(OSError, match="the drive"), taking_pages(memory):
        assert begun.wait(60)
        raise OSError("the drive failed")
    assert sum(taken) < len(memory)
    with taking_pages(memory[: 1 << 20]):  # too little for a thread
        assert not [each for each in threading.enumerate() if each.name == "featstore-pages"]
