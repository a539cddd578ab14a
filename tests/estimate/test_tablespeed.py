"""Seconds of making a pack's tables: how they are measured, kept, and what the estimates of layouts make of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.budget import Budget
from featstore.estimate import tablespeed
from featstore.estimate.tablespeed import TableSpeed, table_speed
from featstore.storage.drive import DriveSpeed
from featstore.storage.lock import WRITER_LOCK, FileLock
from featstore.strategies.estimates import estimate_all
from tests.estimate.test_cost import FREE_COPIES, workload
from tests.support.graphs import skewed_dataset


@pytest.mark.parametrize("n_nodes", [0, 1, 63, 3000, 1 << 16])
@pytest.mark.parametrize("total", [200_000, 64 << 20])
def test_tables_are_measured_within_the_budget(n_nodes: int, total: int) -> None:
    budget = Budget(total)
    found = tablespeed._measure(n_nodes, budget)
    assert min(found.static_table_s, found.planned_table_s, found.missed_table_s) > 0
    assert budget.used == 0
    assert 0 < budget.peak <= total // 4


def test_seconds_are_those_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which the code that makes tables takes 2 s a row, 3 s more if it is missed, and 5 s a planned row."""
    clock, rows = [0.0], set[int]()

    def static(table: Any, ids: np.ndarray, tier_of_row: np.ndarray) -> None:
        assert len(ids) == len(np.unique(ids))
        rows.update(ids.tolist())
        clock[0] += 2 * len(ids) + 3 * int((tier_of_row[ids] < 0).sum())

    def plan(table: Any, planned: Any, ids: np.ndarray) -> None:
        assert not np.any(planned.slots < 0)
        clock[0] += 5 * len(ids)

    monkeypatch.setattr(tablespeed, "write_static", static)
    monkeypatch.setattr(tablespeed, "write_plan", plan)
    monkeypatch.setattr(tablespeed.time, "thread_time", lambda: clock[0])
    found = tablespeed._measure(1 << 14, Budget(64 << 20))
    assert (found.static_table_s, found.planned_table_s, found.missed_table_s) == (2.0, 5.0, 3.0)
    assert min(rows) < 1 << 10  # all over the tables
    assert max(rows) >= 15 << 10


def test_tables_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(skewed_dataset(tmp_path / "g", 300, 40))
    measured: list[int] = []

    def measure(n_nodes: int, budget: Budget) -> TableSpeed:
        measured.append(n_nodes)
        return TableSpeed(3.0, 2.0, float(len(measured)))

    monkeypatch.setattr(tablespeed, "_measure", measure)
    budget = Budget(1 << 20)

    def which(n_nodes: int = 300, **options: Any) -> float:
        return table_speed(path, n_nodes, budget, **options).missed_table_s

    assert [which(), which()] == [1, 1]  # a catalog without them, of an earlier release: measured at first use
    assert which(again=True) == 2
    assert which(400) == 3
    monkeypatch.setattr(tablespeed, "METHOD", tablespeed.METHOD + 1)
    assert [which(400), which(400)] == [4, 4]
    with FileLock(os.path.join(path, WRITER_LOCK), exclusive=True):
        assert which() == 5
    assert which(400) == 4
    assert measured == [300, 300, 400, 400, 300]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_layout_that_is_not_there_pays_for_its_tables(epochs: int) -> None:
    w = replace(workload(has_pack=True, plan_s=0.0), pack_epochs=epochs)
    timed = replace(FREE_COPIES, static_table_s=1e-7, planned_table_s=2e-7, missed_table_s=5e-7)

    def more(**changes: Any) -> dict[str, float]:
        """Compute the seconds that tables add to those before the first epoch, by policy."""
        plain, found = (estimate_all(replace(w, **changes), machine) for machine in (FREE_COPIES, timed))
        return {each.policy: each.once_s - other.once_s for each, other in zip(found, plain, strict=True) if each.is_of_layout}

    found = more()
    assert found["frequency"] == pytest.approx(epochs * (35_000_000 * 1e-7 + 7_000_000 * 5e-7))
    assert found["belady"] == pytest.approx(epochs * (35_000_000 * 2e-7 + 5_000_000 * 5e-7))
    assert more(layouts={"frequency": 1, "belady": 1}) == {"frequency": 0.0, "belady": 0.0}


def test_tables_are_written_to_the_drive() -> None:
    w = workload(has_pack=True, n_top=35_000_000, capacity=0)  # nothing is packed
    fast, slow = (replace(FREE_COPIES, drive=DriveSpeed(87_000, 2.5e9, rate)) for rate in (1e15, 1e9))
    once_s = [
        next(each.once_s for each in estimate_all(w, machine) if (each.strategy, each.policy) == ("packed", "frequency"))
        for machine in (fast, slow)
    ]
    assert once_s[1] - once_s[0] == pytest.approx(4 * 35_000_000 / 1e9, rel=1e-3)  # a slot an access
