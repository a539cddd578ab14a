"""Epochs under ``strategy="auto"`` beside their estimates: what is kept of them, and what makes the drive be measured again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import featstore
from featstore.cli.main import main
from featstore.plan.cost import Machine
from featstore.storage import drive as drive_module
from featstore.storage.catalog import read_catalog
from featstore.storage.drive import DriveSpeed, drive_speed
from featstore.storage.lock import WRITER_LOCK, FileLock
from featstore.storage.update import Update
from featstore.strategies import actual as actual_module
from featstore.strategies.actual import KEY, Actual, counted, kept_runs, runs_table
from featstore.strategies.estimates import estimate_all
from tests.loaders import CANDIDATES, make_loader
from tests.test_auto import data, loader, steer
from tests.test_auto_packs import frozen
from tests.test_cost import SKETCH, workload

__all__ = ["data", "frozen"]  # fixtures


def an_epoch(**options: Any) -> Actual:
    given = {"estimate_s": 1.0, "counted_s": 1.0, "drive_s": 0.9, "epoch_s": 1.0, "wait_s": 0.9, **options}
    return Actual("streamed", "belady", 10, 5, estimate_rows=100, rows_loaded=90, when=0.0, **{"n_before": 1, **given})


@pytest.mark.parametrize(
    ("options", "doubts"),
    [
        ({}, False),
        ({"epoch_s": 1.45, "wait_s": 1.4}, False),
        ({"epoch_s": 1.55, "wait_s": 1.5}, True),
        ({"epoch_s": 1.95, "wait_s": 1.9, "n_before": 0}, False),
        ({"epoch_s": 2.05, "wait_s": 2.0, "n_before": 0}, True),
        ({"epoch_s": 0.65, "wait_s": 0.6, "n_before": 0}, True),
        ({"epoch_s": 0.68, "wait_s": 0.6}, False),
        ({"epoch_s": 0.65, "wait_s": 0.6}, True),
        ({"epoch_s": 10.0, "wait_s": 9.0, "drive_s": 0.4}, False),  # it is not the drive that it waited for
        ({"epoch_s": 10.0, "wait_s": 4.0}, False),  # the loop took its time
        ({"epoch_s": 1.1, "wait_s": 1.0, "estimate_s": 9.0}, False),  # other rows were missed than expected, at the kept rates
    ],
)
def test_what_doubts_the_drive(options: dict[str, float], doubts: bool) -> None:
    assert an_epoch(**options).doubts_the_drive == doubts


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_the_model_is_asked_again_with_the_rows_that_were_served(candidate: tuple[str, str]) -> None:
    hits = {"host": 600, "base": 200, "packed": 80, "disk_cache": 20} | ({"device": 100} if candidate[0] == "packed" else {})
    w = counted(workload(), hits, 2)
    assert (w.n_accesses, w.n_device) == (sum(hits.values()) // 2, hits.get("device", 0) // 2)
    assert w.n_top == w.n_static == w.n_degree == 300
    found = {(each.strategy, each.policy): each for each in estimate_all(w, Machine(SKETCH, 8e9))}
    assert found[candidate].rows_loaded == w.loads == 150


@pytest.mark.parametrize(("strategy", "policy"), [*CANDIDATES, ("ondemand", "none")])
def test_explain_prints_estimate_and_actual_of_every_strategy(
    data: Path,
    frozen: Path,
    strategy: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(actual_module, "WAITED", 0.0)  # however long the loop itself took
    steer(monkeypatch, strategy, policy)
    with featstore.open(data, memory="64MiB") as g:
        options: dict[str, Any] = {"feature_cache": 0 if policy == "none" else 0.1, "epochs": 2}
        given = {"pack": frozen, "features": ["x", "z"], **options}
        with make_loader(g, strategy="auto", **given) if strategy == "packed" else loader(g, "auto", **options) as ours:
            assert "actual" not in ours.stats()["auto"]
            seen = []
            for epoch in range(2):
                before = ours.stats()
                assert sum(1 for _ in ours) == 10
                after = ours.stats()
                seen.append(after["auto"]["actual"])
                hits = {tier: n - before["hits"].get(tier, 0) for tier, n in after["hits"].items()}
                assert seen[-1]["rows_loaded"] == sum(n for tier, n in hits.items() if tier != "host") // 2
                assert seen[-1]["n_before"] == epoch
                assert seen[-1]["epoch_s"] >= seen[-1]["wait_s"] > 0
                assert seen[-1]["prepared_s"] == seen[-1]["epoch_s"]
            taken = after["auto"]["taken"]
            assert not kept_runs(str(data))
        assert ours.stats()["auto"]["actual"] == seen[-1]
    (kept,) = kept_runs(str(data))
    assert kept.to_dict() == seen[-1]
    assert (kept.strategy, kept.policy, kept.n_batches) == (strategy, policy, 10)
    assert (kept.estimate_s, kept.estimate_rows) == (taken["epoch_s"], taken["rows_loaded"])
    assert kept.counted_s > 0
    monkeypatch.undo()
    arguments = ["plan", str(data), "--explain", "--fanouts", "4,3", "--batch-size", "100", "--sizes", "10%"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith(runs_table([kept]))
    line = text.splitlines()[-1]
    assert f"{strategy} ({policy})" in line
    for number in (f"{kept.estimate_s:.3g}", f"{kept.counted_s:.3g}", kept.shown(), f"{kept.rows_loaded:,}"):
        assert number in line
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [kept.to_dict()]


def test_the_last_of_each_strategy_is_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    when = iter(range(1, 100))
    monkeypatch.setattr(actual_module.time, "time", lambda: float(next(when)))
    with featstore.open(data, memory="64MiB") as g:
        for strategy, policy, cache in (("ondemand", "degree", 0.1), ("streamed", "belady", 0.1), ("ondemand", "degree", 0.2)):
            with monkeypatch.context() as patched:
                steer(patched, strategy, policy)
                with loader(g, "auto", feature_cache=cache) as ours:
                    assert sum(1 for _ in ours) == 10
        found = [(each.strategy, each.policy, each.capacity) for each in kept_runs(str(data))]
        assert found == [("ondemand", "degree", 600), ("streamed", "belady", 300)]


def test_what_is_no_record_is_left_out(data: Path) -> None:
    good = an_epoch()
    entries = {"a": good.to_dict(), "b": {}, "c": 7, "d": {**good.to_dict(), "epoch_s": "long"}, "e": {"when": 1.0}}
    with Update(data) as update:
        update.add([], extra={KEY: entries})
        update.commit()
    assert kept_runs(str(data)) == [good]


def test_a_part_of_an_epoch_is_none(data: Path) -> None:
    with featstore.open(data, memory="64MiB") as g:
        with loader(g, "auto", feature_cache=0.1) as ours:
            for _ in ours:
                break
            assert "actual" not in ours.stats()["auto"]
        with pytest.raises(RuntimeError, match="the loop's own"), loader(g, "auto", feature_cache=0.1) as ours:
            assert sum(1 for _ in ours) == 10
            raise RuntimeError("the loop's own")
        with loader(g, "ondemand", feature_cache=0.1) as ours:  # nothing was estimated
            assert sum(1 for _ in ours) == 10
    assert not kept_runs(str(data))


def test_two_epochs_at_once_are_not_told_apart(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steer(monkeypatch, "ondemand", "degree")
    with featstore.open(data, memory="64MiB") as g, loader(g, "auto", feature_cache=0.1) as ours:
        assert sum(1 for _ in zip(ours, ours, strict=True)) == 10
        assert "actual" not in ours.stats()["auto"]
        assert sum(1 for _ in ours) == 10
        assert ours.stats()["auto"]["actual"]["n_batches"] == 10


class Drive:
    """A drive that is measured to be hopelessly slow, or as it is said to be; counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.speed = DriveSpeed(1.0, 1e3, 1e3, 1e3, 1e3)
        self.measured = 0
        monkeypatch.setattr(drive_module, "_measure", self._measure)
        monkeypatch.setattr(actual_module, "WAITED", 0.0)

    def _measure(self, *_: object) -> DriveSpeed:
        self.measured += 1
        return self.speed

    def run(self, g: Any) -> dict[str, Any]:
        with loader(g, "auto", feature_cache=0.1) as ours:
            assert sum(1 for _ in ours) == 10
        return dict(read_catalog(g.path).extra[drive_module.KEY])


@pytest.mark.parametrize("reopen", [False, True])
def test_an_epoch_unlike_the_kept_rates_makes_the_drive_be_measured_again(
    data: Path, reopen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(monkeypatch)
    g = featstore.open(data, memory="64MiB")

    def run() -> dict[str, Any]:
        nonlocal g
        if reopen:
            g.close()
            g = featstore.open(data, memory="64MiB")
        return drive.run(g)

    assert run()["doubted"]
    assert drive.measured == 1
    drive.speed = DriveSpeed(1.8, 1e3, 1e3, 1e3, 1e3)
    entry = run()
    assert (drive.measured, entry["iops"], entry["confirmed"], entry["doubted"]) == (2, 1.8, False, True)
    drive.speed = DriveSpeed(1.3, 1e3, 1e3, 1e3, 1e3)
    entry = run()  # the same once more: it is not the drive
    assert (drive.measured, entry["iops"], entry["confirmed"], "doubted" in entry) == (3, 1.3, True, False)
    assert run() == entry
    assert drive.measured == 3
    assert kept_runs(str(data))[0].doubts_the_drive
    g.close()


def test_what_is_confirmed_is_doubted_again_once_it_is_old(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch)
    with featstore.open(data, memory="64MiB") as g:
        for _ in range(3):
            entry = drive.run(g)
        assert (drive.measured, entry["confirmed"]) == (2, True)
        with Update(data) as update:
            update.add([], extra={drive_module.KEY: {**entry, "when": entry["when"] - 25 * 3600}})
            update.commit()
    with featstore.open(data, memory="64MiB") as g:
        entry = drive.run(g)
    assert (drive.measured, entry["doubted"]) == (3, True)


def test_an_epoch_as_expected_leaves_the_rates(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch)
    monkeypatch.setattr(actual_module, "MUCH", 1e12)
    monkeypatch.setattr(actual_module, "MUCH_AT_FIRST", 1e12)
    with featstore.open(data, memory="64MiB") as g:
        for _ in range(3):
            assert "doubted" not in drive.run(g)
    assert drive.measured == 1


def test_without_the_right_to_write_nothing_is_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch)
    with featstore.open(data, memory="64MiB") as g:
        drive_speed(g.reader, g.path, [])
        with loader(g, "auto", feature_cache=0.1):  # choosing keeps the rates of copies
            pass
        before = read_catalog(data)
        with FileLock(os.path.join(data, WRITER_LOCK), exclusive=True):
            drive.run(g)
        for code in (errno.EROFS, errno.EACCES, errno.ENOSPC):

            def refuse(_: object, code: int = code) -> None:
                raise OSError(code, "refused")

            with monkeypatch.context() as patched:
                patched.setattr(actual_module, "Update", refuse)
                drive.run(g)

        def broken(_: object) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(actual_module, "Update", broken)
        with pytest.raises(OSError, match="broken"):
            drive.run(g)
        assert read_catalog(data) == before
        assert drive.measured == 1
