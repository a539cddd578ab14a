"""Plans of the caches of one domain: those written batch by batch are those of the whole superbatch."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.budget import Budget
from featstore.cache.degree import Degree
from featstore.cache.fixed import FixedRows
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool
from featstore.plan.cacheplans import CachePlanner
from featstore.storage.rundir import DiskQuota, RunDirectory
from tests.support.refusing import refuses

N = 300


class Batches:
    """Accesses in memory."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.lengths = np.array([len(each) for each in batches], np.int64)

    def ids(self, number: int) -> Any:
        return self.batches[number]


def planner_in(runs: RunDirectory, memory: int, disk: int | None, label: str, residents: Any) -> CachePlanner:
    budget = Budget(1 << 20)
    planner = CachePlanner(
        FixedRows(Degree()),
        N,
        len(residents),
        runs=runs,
        disk=DiskQuota(disk),
        memory=budget.reserve("planner", memory),
        room=lambda: budget.available,
        pool=BufferPool(budget),
        time=lambda stage: contextlib.nullcontext(),
        label=label,
    )
    planner.start(residents)
    return planner


@given(
    st.lists(st.lists(st.integers(0, N - 1), unique=True, max_size=60), min_size=1, max_size=8),
    st.lists(st.integers(0, N - 1), unique=True, max_size=100),
    st.sampled_from([np.int32, np.int64]),
    st.booleans(),
)
def test_written_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], residents: list[int], dtype: Any, by_row: bool
) -> None:
    batches = Batches([np.array(each, dtype) for each in rows])
    runs = RunDirectory(tmp_path_factory.mktemp("runs"))
    try:
        planners = [planner_in(runs, 1 << 16, None, label, np.array(residents, np.int64)) for label in ("a", "b")]
        missed: list[list[int]] = []
        note = (lambda number, ids: missed.append(ids.tolist())) if by_row else None
        whole = planners[0].plan(0, batches, None, 0, lambda: None, missed=note)
        with planners[1].writer(0, by_row=by_row) as writer:
            for ids in batches.batches:
                writer.add(ids)
            alone = writer.finish()
        assert len(alone) == len(whole) == 5 * len(rows)
        for number in range(len(whole)):
            assert alone[number].dtype == whole[number].dtype
            assert np.array_equal(alone[number], whole[number])
        if by_row:
            assert missed == [sorted(set(each) - set(residents)) for each in rows]
    finally:
        runs.close()


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    runs = RunDirectory(tmp_path)
    try:
        planner = planner_in(runs, 1 << 16, 1500, "", np.arange(10))
        with pytest.raises(OSError, match="plan-0") as raised, planner.writer(0, by_row=True) as writer:
            for _ in range(10):
                writer.add(np.arange(100, dtype=np.int32))
        assert raised.value.errno == errno.ENOSPC
        assert planner.disk.used == 0
        assert not list(Path(runs.path).glob("plan*"))
        # The first batch fits the memory that is held; a far larger one fits no budget.
        with planner.writer(1, by_row=True) as writer:
            writer.add(np.arange(10, dtype=np.int32))
            refuses(BudgetError, "budget", lambda: writer.add(np.arange(1 << 20, dtype=np.int32) % N))
        assert planner.disk.used == 0
        assert not list(Path(runs.path).glob("plan*"))
    finally:
        runs.close()
