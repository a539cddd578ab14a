"""Rates at which rows are copied within memory: how they are measured, and kept."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from featstore.budget import Budget
from featstore.estimate import copies as copies_module
from featstore.estimate.copies import copy_speed
from featstore.storage.lock import WRITER_LOCK, FileLock
from tests.support.graphs import skewed_dataset


def test_copies_are_measured_within_the_budget() -> None:
    for row_bytes in (4, 512, 20_000):
        budget = Budget(2 << 20)
        found = copies_module._measure(row_bytes, 1, budget)
        assert 1e5 < found.fresh_bandwidth <= found.copy_bandwidth
        assert 1e5 < found.batch_bandwidth <= found.copy_bandwidth
        assert budget.used == 0
        assert budget.peak <= 2 << 20


def test_copies_are_measured_of_rows_that_no_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was copied a moment ago comes from the processor's cache, one and a half times as fast."""
    asked: list[set[int]] = []
    written: list[int] = []

    def noted(array: Any, rows: Any, out: Any, places: Any, n_threads: int) -> float:
        asked.append(set(rows.tolist()))
        written.append(out.ctypes.data)
        return float(len(asked))  # never stable

    monkeypatch.setattr(copies_module, "_time_copy", noted)
    clock = iter(range(100))
    monkeypatch.setattr(copies_module.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("featstore.storage.drive.CALIBRATION_S", 300.0)  # ten slices of each
    copies_module._measure(512, 1, Budget(64 << 20))
    assert len(asked) > 10
    for before, after in pairwise(asked):
        assert len(before & after) < len(after) / 2
    for before, after in pairwise(written):
        assert before != after


def test_rates_of_copies_are_those_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory that was never touched, by lists on both sides beside a stream, and plainly."""
    seen: list[tuple[bool, bool, bool]] = []

    def timed(array: Any, rows: Any, out: Any, places: Any, n_threads: int) -> float:
        touched = bool(out.any())
        beside = any(thread.name == "featstore-measure" for thread in threading.enumerate())
        seen.append((touched, places is not None, beside))
        return 1e9 if not touched else 3e9 if places is not None else 8e9

    monkeypatch.setattr(copies_module, "_time_copy", timed)
    found = copies_module._measure(512, 2, Budget(64 << 20))
    assert (found.copy_bandwidth, found.batch_bandwidth, found.fresh_bandwidth) == (8e9, 3e9, 1e9)
    assert set(seen) == {(True, False, False), (False, False, False), (True, True, True)}


def test_copies_are_kept_by_width_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(skewed_dataset(tmp_path / "g", 300, 40))
    measured: list[tuple[int, int]] = []

    def measure(row_bytes: int, n_threads: int, budget: Budget) -> copies_module.CopySpeed:
        measured.append((row_bytes, n_threads))
        return copies_module.CopySpeed(3.0, 2.0, float(len(measured)))

    monkeypatch.setattr(copies_module, "_measure", measure)
    budget = Budget(1 << 20)
    assert copy_speed(path, 40, 2, budget).fresh_bandwidth == 1
    assert copy_speed(path, 40, 2, budget).fresh_bandwidth == 1
    assert copy_speed(path, 40, 1, budget).fresh_bandwidth == 2
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 3
    assert copy_speed(path, 80, 1, budget, again=True).fresh_bandwidth == 4
    monkeypatch.setattr(copies_module, "METHOD", copies_module.METHOD + 1)
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 5
    with FileLock(os.path.join(path, WRITER_LOCK), exclusive=True):
        assert copy_speed(path, 8, 1, budget).fresh_bandwidth == 6
    assert copy_speed(path, 80, 1, budget).fresh_bandwidth == 5
