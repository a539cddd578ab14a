"""Files of a run: sections, traces, the disk that they may take, and the directories that they lie in."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featstore.errors import BusyError, ClosedError, CorruptionError, FeatstoreError, FormatError, PluginError
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace, record
from featstore.sampling.batch import SampledBatch
from featstore.storage import rundir
from featstore.storage.rundir import DiskQuota, RunDirectory, has_no_room
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.testing.faults import flipped
from tests.support.refusing import refuses


def test_record_and_files(tmp_path: Path) -> None:
    class Doubling:
        def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
            return SampledBatch(index, epoch, torch.cat([seeds, seeds + 50]), len(seeds), ())

    batches = [torch.arange(i, i + 5) for i in range(0, 40, 5)]
    in_memory = record(Doubling(), batches, 100)
    on_disk = record(Doubling(), batches, 100, tmp_path / "trace")
    assert len(in_memory) == len(on_disk) == 8
    assert in_memory.n_accesses == on_disk.n_accesses == 80
    for a, b in zip(in_memory, on_disk, strict=True):
        assert np.array_equal(a, b)
        assert a.dtype == b.dtype == np.int32
    on_disk.close()
    for policy in ("belady", "lru", "frequency"):
        assert np.array_equal(simulate(tmp_path / "trace", 12, policy), simulate(in_memory, 12, policy))
    refuses(PluginError, "node 80; there are 80", lambda: record(Doubling(), batches, 80))
    refuses(PluginError, "node 80; there are 80", lambda: record(Doubling(), batches, 80, tmp_path / "abandoned"))
    assert not list(tmp_path.glob("abandoned*"))
    (tmp_path / "trace.tmp").write_bytes(b"of a writer that was killed")
    in_memory.save(tmp_path / "trace")
    with contextlib.closing(Trace.open(tmp_path / "trace")) as again:
        assert [ids.tolist() for ids in again] == [ids.tolist() for ids in in_memory]
    assert not (tmp_path / "trace.tmp").exists()


def test_paths_that_are_too_long_are_refused(tmp_path: Path) -> None:
    """The longest name works; errors say how long they may be, and which argument names another."""
    longest = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    RunDirectory(longest).close()
    remedy = r"run_dir= \(--run-dir\) names another directory"
    deep = Path(str(tmp_path) + "/d" * 2500)
    for path, words in ((Path(f"{longest}n"), "its name has 256 bytes, and may have 255"), (deep, "bytes, and may have 3997")):
        with pytest.raises(OSError, match=f"too long for a directory of run files: .*{words}: {remedy}") as caught:
            RunDirectory(path)
        assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(path))
    assert os.listdir(tmp_path) == []


def test_run_files_go_where_they_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside the dataset, whose path may be relative, or into the user's own directory."""
    writable: list[str] = []
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path in writable)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    mine = f"{tmp_path}/featstore-{os.geteuid()}.runs"
    for folder, found in (("/nowhere", [mine, "/nowhere/g.runs"]), (".", ["no-such-graph.runs", mine])):
        writable[:] = [folder]
        assert [rundir.runs_directory(name) for name in ("no-such-graph", "/nowhere/g")] == found
    assert rundir.runs_directory("g", tmp_path) == str(tmp_path)


def test_every_damage_to_a_section_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    arrays = [np.arange(10, dtype=np.int32), np.empty(0, np.int64), np.arange(5, dtype=np.uint64), np.arange(10, dtype=np.int32)]
    with SectionWriter(path, "test") as writer:
        for array in arrays:
            writer.append(array)
        writer.finish(durable=True).close()
    good = path.read_bytes()

    def read_all() -> list[np.ndarray]:
        file = SectionFile(path, "test")
        try:
            return [file[i] for i in range(len(file))]
        finally:
            file.close()

    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(read_all(), arrays, strict=True))
    for bit in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        refuses(FeatstoreError, "", read_all)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        refuses(FeatstoreError, "", read_all)
    swapped = bytearray(good)
    swapped[0:40], swapped[80:120] = good[80:120], good[0:40]  # equal arrays under another number are harmless
    path.write_bytes(swapped)
    assert np.array_equal(read_all()[0], arrays[0])
    path.write_bytes(good)
    refuses(FormatError, "'test', not 'trace'", lambda: Trace.open(path))
    file = SectionFile(path, "test")
    refuses(IndexError, "", lambda: file[4])
    file.close()
    refuses(ClosedError, "", lambda: file[0])


def test_arrays_are_read_while_the_file_is_written(tmp_path: Path) -> None:
    disk = DiskQuota(1 << 20)
    with SectionWriter(tmp_path / "file", "test", disk) as writer:
        for n in (3, 0, 1000):
            writer.append(np.arange(n, dtype=np.int32))
            assert np.array_equal(writer.read(0), [0, 1, 2])
        assert np.array_equal(writer.read(2), np.arange(1000))
        assert len(writer.read(1)) == 0
        for bad in (-1, 3):
            refuses(IndexError, f"no array {bad} of 3", lambda: writer.read(bad))
        with flipped(tmp_path / "file.tmp", 12 + 999 * 4, 5):
            assert np.array_equal(writer.read(0), [0, 1, 2])
            caught = refuses(CorruptionError, "array 2 is damaged", lambda: writer.read(2))
            assert (caught.value.path, caught.value.offset) == (str(tmp_path / "file.tmp"), 12)
        writer.abort()
        assert disk.used == 0
        refuses(ClosedError, "", lambda: writer.read(0))
    assert not list(tmp_path.iterdir())


def test_the_disk_budget_is_an_enospc_that_leaves_nothing(tmp_path: Path) -> None:
    disk = DiskQuota(10_000)
    writer = SectionWriter(tmp_path / "a", "test", disk)
    writer.append(np.zeros(500, np.int64))
    writer.append(np.zeros(500, np.int64))
    caught = refuses(
        OSError, "disk budget of .*: give a larger disk=, or a smaller length=", lambda: writer.append(np.zeros(500, np.int64))
    )
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "a"))
    assert disk.used == 0
    assert disk.peak <= 10_000
    assert not os.listdir(tmp_path)
    with SectionWriter(tmp_path / "b", "test", disk) as writer:
        writer.append(np.zeros(500, np.int64))
        file = writer.finish()
    assert disk.used == (tmp_path / "b").stat().st_size
    file.remove()
    assert disk.used == 0


def test_a_parent_that_is_removed_after_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there for ``makedirs``, and gone when its type is looked at: it is made anew. A file in its place is an error."""
    parent, isdir, times = tmp_path / "runs", os.path.isdir, []
    others = RunDirectory(parent)

    def gone(path: str) -> bool:
        if path == str(parent) and not times:
            times.append(others.close())
        return isdir(path)

    monkeypatch.setattr(rundir.os.path, "isdir", gone)
    runs = RunDirectory(parent)
    assert times
    assert isdir(runs.path)
    runs.close()
    parent.write_bytes(b"")
    refuses(FileExistsError, "runs", lambda: RunDirectory(parent))


@pytest.mark.parametrize("after", ["makedirs", "_sweep"])
def test_a_run_directory_where_another_removes_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """The one that closes the last run directory removes the parent, too, while somebody makes the next one."""
    parent, times = tmp_path / "runs", []
    of = rundir.os if after == "makedirs" else rundir
    step = getattr(of, after)

    def then_removed(*args: Any, **options: Any) -> None:
        step(*args, **options)
        if not times:
            times.append(shutil.rmtree(parent))

    monkeypatch.setattr(of, after, then_removed)
    runs = rundir.RunDirectory(parent)
    assert times
    assert os.path.isdir(runs.path)
    runs.close()
    assert not parent.exists()


def test_run_directories_belong_to_their_process(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    mine = RunDirectory(parent)
    (parent / "somebody's").mkdir()
    child = os.fork()
    if child == 0:
        theirs = RunDirectory(parent)  # sweeps nothing that is held
        Path(theirs.file("x")).write_text("data")
        os._exit(0 if os.path.exists(mine.path) else 1)  # dies without closing
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(parent)) == 4
    other = RunDirectory(parent)  # sweeps what the dead child left
    expected = [rundir.MADE, os.path.basename(mine.path), os.path.basename(other.path), "somebody's"]
    assert sorted(os.listdir(parent)) == sorted(expected)
    other.close()
    mine.close()
    mine.close()
    assert sorted(os.listdir(parent)) == [rundir.MADE, "somebody's"]


def test_closing_removes_what_a_process_left_that_was_killed_meanwhile(tmp_path: Path) -> None:
    """As a rank's that is lost: the last one to end leaves no run files, though none makes any later."""
    mine, other = RunDirectory(tmp_path / "runs"), RunDirectory(tmp_path / "runs")
    child = os.fork()
    if child == 0:
        theirs = RunDirectory(tmp_path / "runs")
        Path(theirs.file("samples")).write_bytes(b"1")
        os._exit(0)  # dies without closing
    assert os.waitpid(child, 0)[1] == 0
    mine.close()
    assert sorted(os.listdir(tmp_path / "runs")) == sorted([rundir.MADE, os.path.basename(other.path)])
    other.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("first", [0, 1])
def test_only_a_parent_that_was_made_for_run_directories_is_removed(tmp_path: Path, first: int) -> None:
    """With the last of them, whoever made it; also where the one that made it was killed."""
    made, given = tmp_path / "made", tmp_path / "given"
    given.mkdir()
    runs = [RunDirectory(made), RunDirectory(made)]
    for each in (RunDirectory(given), runs[first], runs[1 - first]):
        assert made.exists()
        each.close()
    assert not made.exists()
    assert os.listdir(given) == []
    child = os.fork()
    if child == 0:
        _held = RunDirectory(made)
        os._exit(0)  # dies without closing
    assert os.waitpid(child, 0)[1] == 0
    assert made.exists()
    RunDirectory(made).close()
    assert not made.exists()


def test_a_parent_that_gets_another_run_directory_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, others = tmp_path / "runs", list[RunDirectory]()
    unlink = os.unlink

    def then_another(path: str) -> None:
        unlink(path)
        if os.path.basename(path) == rundir.MADE and not others:
            others.append(RunDirectory(parent))

    runs = RunDirectory(parent)
    monkeypatch.setattr(rundir.os, "unlink", then_another)
    runs.close()
    assert os.path.isdir(others[0].path)
    others[0].close()
    assert not parent.exists()


def test_a_parent_is_not_left_where_nothing_can_be_made_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("_mark", "_sweep"):
        with monkeypatch.context() as patched:
            patched.setattr(rundir, name, full)
            refuses(OSError, "No space", lambda: RunDirectory(tmp_path / "runs"))
        assert os.listdir(tmp_path) == []


def test_places_without_room_are_told_from_what_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for parent in (tmp_path / "file", tmp_path / "file" / "runs", tmp_path / ("x" * 256)):
        assert has_no_room(refuses(OSError, "", lambda: RunDirectory(parent)).value)
    with pytest.raises(OSError, match="disk budget") as full:
        DiskQuota(10).take(11, "run-1")
    assert has_no_room(full.value)

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(rundir, "_sweep", fails)
    no_room = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOLCK", "EOPNOTSUPP", "ENOSYS")
    for name in (*no_room, "EIO", "EMFILE", "ENOMEM", "EBADF"):
        code = getattr(errno, name)
        assert has_no_room(refuses(OSError, os.strerror(code), lambda: RunDirectory(tmp_path / "runs")).value) == (
            name in no_room
        )


@pytest.mark.parametrize("how", ["gone before", "gone meanwhile", "held"])
def test_a_run_directory_swept_while_it_is_made_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """By another process, between its directory and its lock: before the lock file, behind it, or while its lock is held."""
    real, tried = rundir.FileLock, list[str]()

    def lock(path: str, *, exclusive: bool) -> Any:
        tried.append(path)
        if len(tried) > 1:
            return real(path, exclusive=exclusive)
        if how == "gone before":
            shutil.rmtree(os.path.dirname(path))
        held = real(path, exclusive=exclusive)
        shutil.rmtree(os.path.dirname(path))
        if how == "held":
            held.release()
            raise BusyError("held by another process or handle", path)
        return held

    monkeypatch.setattr(rundir, "FileLock", lock)
    runs = rundir.RunDirectory(tmp_path / "runs")
    assert len(tried) == 2
    Path(runs.file("samples")).write_bytes(b"1")
    assert os.listdir(runs.path) == sorted([rundir.LOCK_NAME, "samples"])
    runs.close()
    assert not os.path.exists(runs.path)
