"""The pool of threads: one in a process, whatever module has the loop."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from featstore._core.aggregate import finish
from featstore._core.rows import copy_rows
from tests.support.library_threads import remaining

N_THREADS = 4


def n_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def names() -> list[str]:
    return [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]


def test_loops_of_all_modules_share_the_threads() -> None:
    rows = np.arange(4096 * 64, dtype=np.uint8).reshape(4096, 64)
    out = np.zeros_like(rows)
    copy_rows(rows, None, out, None, N_THREADS)
    assert np.array_equal(out, rows)
    before = n_tasks()
    assert before >= N_THREADS
    sums = np.ones(1000)
    finish(sums.view(np.uint8), 8, 1, np.full(1000, 3.0), False, N_THREADS)
    assert (sums == 3).all()
    assert n_tasks() <= before, "threads of tests before may end meanwhile"
    # A thread names itself when it first runs.
    assert remaining(lambda: [] if names().count("fs-copy") >= N_THREADS - 1 else names(), 60) == []
