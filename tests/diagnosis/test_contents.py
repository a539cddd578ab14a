"""Contents of a directory, whole and damaged, and the drive's rates."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.diagnosis import contents
from featstore.diagnosis.findings import Finding
from featstore.diagnosis.places import direct_io
from featstore.errors import BudgetError, CorruptionError
from featstore.storage import drive
from featstore.storage.drive import DriveSpeed
from featstore.testing.faults import forked, sweep, truncated
from tests.support.programs import run_in_fork

X = np.arange(30_000, dtype=np.float32).reshape(3000, 10)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.arange(3001), np.zeros(3000, int), {"x": X}, progress=False).close()
    return str(tmp_path / "g")


@contextmanager
def opened(path: str, memory: int = 64 << 20) -> Iterator[tuple[Finding | None, Any]]:
    with contents.opened(path, memory, "auto") as found:
        yield found


def test_a_dataset_that_is_whole(dataset: str) -> None:
    with opened(dataset) as (found, graph):
        assert found is not None
        assert (found.status, found.values["num_nodes"], found.values["num_edges"]) == ("ok", 3000, 3000)
        assert found.values["bytes"] >= X.nbytes
        assert np.array_equal(graph.features["x"][:].numpy(), X)


def test_neither_dataset_nor_pack(tmp_path: Path) -> None:
    with opened(str(tmp_path)) as found:
        assert found == (None, None)


@pytest.mark.parametrize("what", ["catalog", "file"])
def test_a_dataset_that_is_damaged(dataset: str, what: str) -> None:
    files = [each for each in Path(dataset).iterdir() if each.is_file()]
    largest = max(files, key=lambda each: each.stat().st_size)
    target = Path(dataset) / "catalog.lmdb" / "data.mdb" if what == "catalog" else largest
    with truncated(target, 4096), opened(dataset) as (found, graph):
        assert found is not None
        assert graph is None
        assert (found.name, found.status, found.text) == ("dataset", "error", "is damaged")
        assert os.path.basename(target) in found.cause or dataset in found.cause
        assert "featstore verify" in found.remedy


def test_a_file_that_is_missing(dataset: str) -> None:
    largest = max((each for each in Path(dataset).iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    largest.unlink()
    with opened(dataset) as (found, _):
        assert found is not None
        assert (found.status, largest.name in found.cause) == ("error", True)


def test_too_little_memory_to_open(dataset: str) -> None:
    with opened(dataset, 1 << 16) as (found, _):
        assert found is not None
        assert (found.status, found.text) == ("error", "does not open within the memory")
        needed = found.values["needed"]
        assert "is needed to open it" in found.remedy
    with opened(dataset, needed) as (found, _):
        assert found is not None
        assert found.status == "ok"


def test_errors_of_opening() -> None:
    for error, status, words in (
        (featstore.BusyError("another process writes"), "note", "look again"),
        (featstore.VersionError("format 9"), "error", "the release that made it"),
        (PermissionError(errno.EACCES, "Permission denied", "/g/x"), "error", "readable for this user"),
    ):
        found = contents._unopened("dataset", error)
        assert (found.status, words in found.remedy, bool(found.cause)) == (status, True, True)


def test_packs(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "p")
    with featstore.open(dataset, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [2])
        featstore.sample_offline(g, sampler, np.arange(100), 10, path=path, progress=False).close()
    with opened(path) as (found, graph):
        assert found is not None
        assert (graph, found.name, found.status, found.values) == (None, "pack", "ok", {"epochs": 1, "batches": 10})
        before = sorted(os.listdir(path))
        monkeypatch.setattr(contents, "measure_drive", lambda _, run_dir, __: seen.append(run_dir) or DriveSpeed(9e4, 1e9, 1e9))
        seen: list[str] = []
        contents.rates(path, graph, "auto")
        assert (seen, sorted(os.listdir(path))) == ([f"{path}.runs"], before)
        assert direct_io(path, True).values["mode"]
    shutil.rmtree(os.path.join(path, "samples"), ignore_errors=True)
    if os.path.isfile(os.path.join(path, "samples")):
        os.unlink(os.path.join(path, "samples"))
    with opened(path) as (found, _):
        assert found is not None
        assert (found.name, found.status) == ("pack", "error")


# -- rates ---------------------------------------------------------------------------------------------------------------------


def test_rates_of_a_directory_and_of_a_dataset(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As strategies measure; nothing is left behind, and nothing is kept in the dataset."""
    monkeypatch.setattr(contents, "SLOW_IOPS", 0)
    parent = os.path.dirname(dataset)
    before = sorted(os.listdir(dataset))
    with opened(dataset) as (_, graph):
        for found in (contents.rates(dataset, graph, "auto"), contents.rates(parent, None, "pread")):
            assert found.status == "ok"
            assert found.values["iops"] > 0
            assert found.values["bandwidth"] > 0
            assert found.values["write_bandwidth"] > 0
        assert "drive/speed" not in graph.catalog.extra
    assert sorted(os.listdir(dataset)) == before
    assert os.listdir(parent) == ["g"]


def test_rates_are_timed_on_the_features(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(contents, "measure_drive", lambda *given: seen.append(given) or DriveSpeed(9e4, 1e9, 1e9))
    with opened(dataset) as (_, graph):
        contents.rates(dataset, graph, "auto")
        assert seen == [(graph.reader, f"{dataset}.runs", [graph.features["x"].source])]


def test_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "measure_drive", lambda *_: DriveSpeed(180.0, 1.5e8, 1.2e8))
    found = contents.rates(str(tmp_path), None, "auto")
    assert (found.status, found.text) == ("warning", "reads 0.15 GB/s, writes 0.12 GB/s, 180 random reads a second")
    assert "streamed" in found.remedy


def test_a_drive_that_fails_is_an_error_and_no_lack_of_room(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, status, remedy in (
        (errno.EIO, "error", "dmesg"),
        (errno.ENOSPC, "warning", "room"),
        (errno.EROFS, "warning", ""),
    ):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number), "features")

        monkeypatch.setattr(contents, "measure_drive", fail)
        found = contents.rates(dataset, None, "auto")
        assert (found.status, found.text) == (status, "not measured")
        assert remedy in found.remedy


def test_another_drive_has_the_files_of_runs(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "measure_drive", lambda *_: DriveSpeed(9e4, 1e9, 1e9))
    monkeypatch.setattr(contents, "runs_directory", lambda _: "/dev/featstore.runs")
    assert contents.rates(dataset, None, "auto").text.endswith("with a scratch file at /dev, as files of runs")


def kill_doctor(folder: str, path: str, step: int) -> None:
    """Kill a doctor at many system calls; in the child."""
    before, n_killed = sorted(os.listdir(folder)), 0
    drive.CALIBRATION_S, drive.SCRATCH_BYTES = 0.0, 2 << 20
    for fault in sweep(folder, ["open", "write", "fsync", "unlink"], "kill", step=step):
        with fault:
            killed = forked(lambda: featstore.doctor(path, "64MiB"))
        assert sorted(os.listdir(folder)) == before
        n_killed += killed is not None
    assert n_killed >= 2, n_killed


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("of", ["a dataset", "a directory"])
def test_a_killed_doctor_leaves_nothing(dataset: str, of: str) -> None:
    """Not even the scratch file on which it was measuring, because that has no name."""
    folder = os.path.dirname(dataset)
    run_in_fork(kill_doctor, folder, *((dataset, 23) if of == "a dataset" else (folder, 2)))


@pytest.mark.parametrize(
    ("error", "status", "cause", "remedy"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/here"), "warning", "{} may not be written", "may be written"),
        (OSError(errno.ENOSPC, "No space left", "/here"), "warning", "/here: No space left", "room for 64 MiB"),
        (BudgetError("reads need more", 1 << 20), "warning", "reads need more", "more memory"),
        (CorruptionError("a page is not what was written", "/g/x"), "error", "/g/x: ", "featstore verify"),
    ],
)
def test_a_drive_that_cannot_be_measured(
    tmp_path: Path, error: Exception, status: str, cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> DriveSpeed:
        raise error

    monkeypatch.setattr(contents, "measure_drive", fails)
    found = contents.rates(str(tmp_path), None, "auto")
    assert (found.status, found.text) == (status, "not measured")
    assert found.cause.startswith(cause.format(tmp_path))
    assert remedy in found.remedy
