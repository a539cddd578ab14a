"""Packing beside the rest of planning: it begins early where it may, packs what is planned, and nothing outlives a failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon, Int32s, PlannedBatch
from featstore.pack.packing import RunPacker
from featstore.plan.overlapped import MOST_PENDING, MissedRows, OverlappedPacking
from tests.strategies.test_superbatch import batches, dataset, ondemand, same

__all__ = ["dataset", "ondemand"]  # fixtures


class Silent(Belady):
    """Says nothing before it has the slots."""

    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        yield from super().plan(replace(horizon, announce=None))


class Liar(Belady):
    """Announces one miss too few, or another one; or not all batches."""

    how = ""

    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        announce = horizon.announce
        assert announce is not None

        def lie(batch: int, positions: Int32s) -> None:
            if self.how == "fewer":
                positions = positions[1:]
            elif self.how == "others" and batch == 3:
                positions = positions.copy()
                positions[0] = np.setdiff1d(np.arange(len(horizon.ids(batch))), positions)[0]
            elif self.how == "twice" and batch == 2:
                announce(batch, positions)
            if self.how != "some" or batch < 2:
                announce(batch, positions)

        yield from super().plan(replace(horizon, announce=lie))


@pytest.mark.parametrize("size", [4, 40])
def test_a_policy_need_not_announce(dataset: Path, ondemand: list[Any], size: int) -> None:
    found, stats = batches(dataset, strategy="streamed", length=size, cache=0.1, policy=Silent)
    assert same(found, ondemand)
    assert stats["rows_loaded"] == batches(dataset, strategy="streamed", length=size, cache=0.1)[1]["rows_loaded"]


def test_missed_rows_that_do_not_fit_are_read_back(dataset: Path, ondemand: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing that begins early then waits for the plans."""
    read = []
    monkeypatch.setattr(RunPacker, "most_held", 100)
    back = MissedRows.__call__
    monkeypatch.setattr(MissedRows, "__call__", lambda self, b: (read.append(self.kept(b) is None), back(self, b))[1])
    assert same(batches(dataset, strategy="streamed", length=7, cache=0.1)[0], ondemand)
    assert read
    assert all(read)


@pytest.mark.parametrize("how", ["fewer", "others", "twice", "some"])
def test_what_a_policy_announces_wrongly_is_the_loops_error(dataset: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(Liar, "how", how)
    with pytest.raises(featstore.PluginError, match="announced"):
        batches(dataset, strategy="streamed", length=12, cache=0.1, policy=Liar)
    assert not os.path.exists(f"{dataset}.runs")


@pytest.mark.parametrize("early", [True, False])
def test_packing_begins_where_there_is_disk_for_both(dataset, ondemand, monkeypatch, early) -> None:
    begun, seen = threading.Event(), []
    pack = RunPacker.__call__

    def noting(self: RunPacker, *given: Any) -> Any:
        begun.set()
        return pack(self, *given)

    class Waiting(Belady):
        def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
            begun.clear()
            for planned in super().plan(horizon):
                if early:
                    assert begun.wait(60)
                yield planned
            seen.append(begun.is_set())

    monkeypatch.setattr(RunPacker, "__call__", noting)
    if not early:
        monkeypatch.setattr(RunPacker, "fits", lambda *_: False)
    found, _ = batches(dataset, strategy="streamed", length=12, cache=0.1, policy=Waiting)
    assert same(found, ondemand)
    assert len(seen) == 6
    assert set(seen) == {early}


def test_what_was_packed_goes_with_a_plan_that_fails(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = threading.Event()
    pack = RunPacker.__call__

    def noting(self: RunPacker, *given: Any) -> Any:
        found = pack(self, *given)
        packed.set()
        return found

    class Failing(Belady):
        def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
            for planned in super().plan(horizon):
                assert packed.wait(60)
                yield planned
                raise RuntimeError("no more plans")

    monkeypatch.setattr(RunPacker, "__call__", noting)
    with pytest.raises(RuntimeError, match="no more plans"):
        batches(dataset, strategy="streamed", length=12, cache=0.1, policy=Failing)
    assert not os.path.exists(f"{dataset}.runs")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("featstore-pack")]


def test_a_policy_does_not_run_ahead_of_the_sorting_of_its_misses() -> None:
    """An error of the first batch's ids is met by the policy once so many batches wait behind it, not at its end."""

    def lost(_: int) -> Any:
        raise OSError("no ids")

    none = np.empty(0, np.int32)
    with OverlappedPacking(100, lost, lost, 0, lambda *_: None, lambda _: False, lambda: None) as packing:
        for batch in range(MOST_PENDING + 1):
            packing.announce(batch, none)
        with pytest.raises(OSError, match="no ids"):
            packing.announce(MOST_PENDING + 1, none)
