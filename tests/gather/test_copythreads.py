"""The number of threads that copy beside a stream: the quicker one, whichever it is, and again after that has changed."""

from __future__ import annotations

import pytest

from featstore.gather.copythreads import BLOCK, EVERY, CopyThreads


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
    """The other number runs after a few more tries, once it becomes quicker."""
    threads = CopyThreads(2)
    run(threads, {1: 1.0, 2: 1.7}, 20 * BLOCK)
    assert run(threads, {1: 1.0, 2: 0.6}, 4 * EVERY * BLOCK)[-1] == 1
    assert run(threads, {1: 1.0, 2: 1.7}, 8 * EVERY * BLOCK)[-1] == 2


def test_one_thread_is_one() -> None:
    threads = CopyThreads(1)
    assert set(run(threads, {1: 1.0}, 100)) == {1}
