"""How many threads copy beside a stream: the quicker number, whichever it is, and again after that has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from featstore.budget import Budget
from featstore.cache.base import PolicyContext, get_policy
from featstore.cache.gather import Gather
from featstore.cache.table import FeatureCache
from featstore.gather import sources
from featstore.gather.buffers import BufferPool
from featstore.gather.copythreads import BLOCK, EVERY, CopyThreads
from featstore.gather.sources import LEARNT_BYTES, MemorySource


def run(threads: CopyThreads, rates: dict[int, float], n_batches: int) -> list[int]:
    """Run batches of 1,000 bytes at the given bytes a second; return the threads of each."""
    used = []
    for _ in range(n_batches):
        used.append(threads.now)
        threads.ran(1000, 1000 / rates[threads.now])
    return used


@pytest.mark.parametrize("n_threads", [2, 3, 16])
@pytest.mark.parametrize("more_is_better", [False, True])
def test_the_quicker_number_runs(n_threads: int, more_is_better: bool) -> None:
    fewer = max(1, n_threads - 2)
    rates = {fewer: 1.0, n_threads: 1.8 if more_is_better else 0.9}
    best, other = (n_threads, fewer) if more_is_better else (fewer, n_threads)
    threads = CopyThreads(n_threads)
    used = run(threads, rates, (10 * EVERY - 1) * BLOCK)
    assert used[:BLOCK] == [fewer] * BLOCK
    assert used[BLOCK : 2 * BLOCK] == [n_threads] * BLOCK
    assert used.count(other) <= BLOCK * 11
    assert threads.now == best
    assert used[2 * BLOCK : EVERY * BLOCK] == [best] * (EVERY - 2) * BLOCK


def test_a_change_is_noticed() -> None:
    """Where the other number becomes quicker, it runs after a few more tries."""
    threads = CopyThreads(2)
    run(threads, {1: 1.0, 2: 1.7}, 20 * BLOCK)
    assert run(threads, {1: 1.0, 2: 0.6}, 4 * EVERY * BLOCK)[-1] == 1
    assert run(threads, {1: 1.0, 2: 1.7}, 8 * EVERY * BLOCK)[-1] == 2


def test_one_thread_is_one() -> None:
    threads = CopyThreads(1)
    assert set(run(threads, {1: 1.0}, 100)) == {1}


@pytest.mark.parametrize("best", [1, 3])
def test_copies_out_of_memory_find_their_number(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds of large copies; small ones are neither timed nor changed."""
    now, used, copy = [0.0], [], sources.copy_rows

    def timed(*args: Any) -> None:
        copy(*args)
        used.append(args[4])
        now[0] += 1.0 if args[4] == best else 2.0

    monkeypatch.setattr(sources, "copy_rows", timed)
    monkeypatch.setattr(sources.time, "perf_counter", lambda: now[0])
    array = np.random.default_rng(0).integers(0, 256, (64, LEARNT_BYTES // 32), np.uint8)
    source = MemorySource(array, 3, copying=CopyThreads(3))
    for n_rows, expected in ((31, [3] * 20), (32, [1] * BLOCK + [3] * BLOCK + [best] * 10)):
        used.clear()
        for i in range(len(expected)):
            addresses = range(i, i + n_rows) if i % 2 else np.arange(n_rows)[::-1] + i
            out = np.empty((n_rows, array.shape[1]), np.uint8)
            source.gather(addresses, out)
            assert np.array_equal(out, array[np.asarray(addresses)])
        assert used == expected


def test_a_cached_feature_learns_across_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a machine stays when the cache is replaced."""
    used, seen, copy = [], [], sources.copy_rows

    def noted(*args: Any) -> None:
        copy(*args)
        used.append(args[4])

    monkeypatch.setattr(sources, "copy_rows", noted)
    rows = np.random.default_rng(0).integers(0, 256, (32, LEARNT_BYTES // 32), np.uint8)
    pool = BufferPool(Budget(1 << 26))
    gather = Gather(MemorySource(rows, 1), pool, 4)
    out = np.empty_like(rows)
    for _ in range(2 * BLOCK):
        context = PolicyContext(32, rows.shape[1], out_degree_of=lambda: np.ones(32, np.int64))
        cache = FeatureCache(32, rows.shape[1], 32, get_policy("degree"), context)
        cache.fill(MemorySource(rows, 1).gather)
        gather.use_cache(cache)
        used.clear()
        gather.rows(np.arange(32), out)
        assert np.array_equal(out, rows)
        cache.close()
        seen.append(used[-1])
    assert seen == [2] * BLOCK + [4] * BLOCK
    pool.close()
