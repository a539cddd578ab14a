"""Readers beside a process that replaces a dataset without pause: each sees the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BusyError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage import builddir, directory
from featstore.storage.builddir import BuildDirectory
from featstore.storage.calls import close_quietly
from featstore.storage.catalog import current_catalog
from featstore.storage.directory import open_directory, remove_replaced
from featstore.storage.lock import OPENING_LOCK, FileLock
from tests.support.programs import run_beside
from tests.support.refusing import refuses
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("_program_server")


def replace_without_pause(link: Any, target: Path, how: str, templates: list[Path]) -> None:
    """Replace the dataset by links to the files of others in turn: about a millisecond each, so that readers meet it often."""
    os.fsync = lambda fd: None
    if how == "two steps":
        builddir._renameat2 = lambda *arguments: False
    for n in itertools.count():
        source = templates[n % len(templates)]
        with BuildDirectory(target, overwrite=True) as build:
            os.mkdir(f"{build.path}/catalog.lmdb")
            for name in ["catalog.lmdb/data.mdb", *(name for name in os.listdir(source) if ".rows" in name)]:
                os.link(f"{source}/{name}", f"{build.path}/{name}")
            build.commit()
        if not n:
            link.send("replaced")


def make(path: Path, value: int, n_rows: int = 20) -> None:
    """Create a dataset all of whose values, and the number of whose rows, say which one it is."""
    n = n_rows + value
    x = np.full((n, 300), value, np.float32)
    OutOfCoreGraph.create(path, np.zeros(n + 1, np.int64), [], {"x": x, "z": x[:, :2]}, {"y": x[:, 0]}, progress=False).close()


@contextlib.contextmanager
def replaced_without_pause(folder: Path, n_rows: int, how: str = "exchange") -> Iterator[Path]:
    """Replace ``folder/g`` by each of two datasets in turn, in another process, while the context lasts."""
    templates = [folder / "first", folder / "second"]
    for value, template in enumerate(templates):
        make(template, value, n_rows)
    make(folder / "g", 0, n_rows)
    with run_beside(replace_without_pause, folder / "g", how, templates) as (link, writer):
        assert link.recv() == "replaced"
        yield folder / "g"
        assert writer.is_alive(), "the writer ended early"


def open_often(path: Path, n_opens: int, n_rows: int, verify: str) -> None:
    seen = []
    for _ in range(n_opens):
        with featstore.open(path, memory="64MiB", backend="pread", verify=verify, threads=1) as g:
            value = g.num_nodes - n_rows
            assert g.features["x"][[0, g.num_nodes - 1]].unique().tolist() == [value]
            assert g.features["z"][[3]].unique().tolist() == [value]
            assert g.node_data["y"].tolist() == [value] * g.num_nodes
            seen.append(value)
    assert set(seen) == {0, 1}, "the writer replaced nothing while this read"


@pytest.mark.parametrize(("verify", "how"), covering(["always", "open", "off"], ["exchange", "two steps"]))
def test_some_hundred_opens_of_a_dataset_that_is_replaced_without_pause(tmp_path: Path, verify: str, how: str) -> None:
    with replaced_without_pause(tmp_path, 20, how) as path:
        open_often(path, 50, 20, verify)


def test_opening_takes_longer_than_replacing(tmp_path: Path) -> None:
    """9 MiB are checked by each open, and many replacements happen meanwhile."""
    with replaced_without_pause(tmp_path, 8000) as path:
        open_often(path, 30, 8000, "open")


@pytest.mark.stress
@pytest.mark.parametrize(("n_rows", "verify", "how", "n_opens"), [
    (20, "always", "exchange", 10_000),
    (20, "open", "exchange", 10_000),
    (20, "off", "exchange", 10_000),
    (20, "always", "two steps", 10_000),
    (8000, "open", "exchange", 10_000),
    (8000, "open", "two steps", 2_000),
    (85_000, "open", "exchange", 500),
])  # fmt: skip
def test_ten_thousand_opens_of_a_dataset_that_is_replaced_without_pause(tmp_path, n_rows, verify, how, n_opens) -> None:
    with replaced_without_pause(tmp_path, n_rows, how) as path:
        open_often(path, n_opens, n_rows, verify)


def test_verify_and_catalog_of_a_dataset_that_is_replaced_without_pause(tmp_path: Path) -> None:
    with replaced_without_pause(tmp_path, 20) as path:
        with featstore.open(path, memory="64MiB", backend="pread") as g:
            for _ in range(100):
                assert g.verify(progress=False)["files"] == 6
                assert current_catalog(path).num_nodes in (20, 21)


def test_a_pack_that_is_replaced_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced between the record and the samples, which once were looked up by path."""
    make(tmp_path / "g", 0)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, fanouts=[2])

        def sample(seed: int, overwrite: bool) -> None:
            featstore.sample_offline(g, sampler, np.arange(20), 5, seed=seed, overwrite=overwrite, progress=False).close()

        sample(1, False)
        real, replaced = directory.OpenDirectory.has, []

        def replace_then_look(self: directory.OpenDirectory, name: str) -> bool:
            if not replaced:
                replaced.append(name)
                monkeypatch.setattr(builddir, "remove_replaced", lambda path: remove_replaced(path, 0.0))  # it is being read
                sample(2, True)
            return real(self, name)

        monkeypatch.setattr(directory.OpenDirectory, "has", replace_then_look)
        with featstore.Pack(f"{g.path}.pack") as pack:
            assert replaced
            assert pack.record["seed"] == 1
            assert len(pack.ids(0))
        with featstore.Pack(f"{g.path}.pack") as pack:
            assert pack.record["seed"] == 2


def test_a_directory_that_is_being_opened_is_removed_by_the_next_builder(tmp_path: Path) -> None:
    make(tmp_path / "g", 0)
    old = tmp_path / f"g.tmp-{'0' * 32}"
    with open_directory(tmp_path / "g") as opened:
        (tmp_path / "g").rename(old)
        assert opened.is_locked
        assert not opened.in_place
        assert not remove_replaced(str(old), 0.0)
        make(tmp_path / "g", 1)
        assert sorted(os.listdir(tmp_path)) == ["g", old.name]
        fd, _ = opened.open_regular("catalog.lmdb/data.mdb")
        close_quietly(fd)
    BuildDirectory(tmp_path / "g", overwrite=True).__exit__(None, None, None)
    assert os.listdir(tmp_path) == ["g"]


def test_a_directory_that_is_dropped_is_closed(tmp_path: Path) -> None:
    (tmp_path / OPENING_LOCK).touch()
    before = os.listdir("/proc/self/fd")
    opened = open_directory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    del opened
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("error", "is_locked"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.ENOSPC, True), (errno.EIO, False)]
)
def test_a_full_drive_needs_no_room_for_a_lock_file(
    error: int, is_locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "out.tmp-0"
    half.mkdir()
    (half / "edges.npy").touch()
    if is_locked:
        (half / OPENING_LOCK).touch()

    def fail(path: str, **_: object) -> FileLock:
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(directory, "FileLock", fail)
    is_removed = error != errno.EIO and not is_locked
    assert remove_replaced(str(half)) == is_removed
    assert half.exists() != is_removed


def test_a_directory_that_is_being_removed_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "g", 0)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "OPEN_PATIENCE_S", 0.0)
        with FileLock(tmp_path / "g" / OPENING_LOCK, exclusive=True):
            before = os.listdir("/proc/self/fd")
            caught = refuses(BusyError, "another process is removing it", lambda: open_directory(tmp_path / "g"))
            assert os.listdir("/proc/self/fd") == before
            assert caught.value.filename == str(tmp_path / "g")
    remover = FileLock(tmp_path / "g" / OPENING_LOCK, exclusive=True)
    monkeypatch.setattr("time.sleep", lambda seconds: remover.release())
    featstore.open(tmp_path / "g", memory="64MiB").close()  # waits until the remover is done
    assert not remover.is_held


def test_without_lock_files_it_is_opened_again_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems without locks: the directory is replaced and removed while its files are opened, twenty times."""
    make(tmp_path / "g", 0)
    (tmp_path / "g" / OPENING_LOCK).unlink()
    real, n_replaced = directory.OpenDirectory.open_regular, 0

    def open_late(self: directory.OpenDirectory, name: str) -> tuple[int, int]:
        nonlocal n_replaced
        if self.path == str(tmp_path / "g") and name == "node.z.1.rows.sums" and n_replaced < 20:
            n_replaced += 1
            make(tmp_path / "new", 1)
            (tmp_path / "new" / OPENING_LOCK).unlink()
            shutil.rmtree(tmp_path / "g")
            (tmp_path / "new").rename(tmp_path / "g")
        return real(self, name)

    monkeypatch.setattr(directory.OpenDirectory, "open_regular", open_late)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.num_nodes == 21
    assert n_replaced == 20


def test_between_two_renames_the_old_one_is_read_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing without an exchange of directories: a reader in the gap neither fails nor puts the old one back."""
    make(tmp_path / "g", 0)
    make(tmp_path / "other", 1)
    real, seen = os.rename, []

    def rename(source: str, target: str) -> None:
        real(source, target)
        if ".old-" in str(target):
            assert not (tmp_path / "g").exists()
            with featstore.open(tmp_path / "g", memory="64MiB") as g:
                seen.append(g.num_nodes)
            assert not (tmp_path / "g").exists()

    monkeypatch.setattr(builddir, "_renameat2", lambda *arguments: False)
    monkeypatch.setattr(os, "rename", rename)
    x = np.ones((21, 2), np.float32)
    OutOfCoreGraph.create(tmp_path / "g", np.zeros(22, np.int64), [], {"x": x}, overwrite=True, progress=False).close()
    assert seen == [20]
    assert sorted(os.listdir(tmp_path)) == ["g", "other"]
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.num_nodes == 21


def test_a_writer_waits_for_the_lock_of_the_directory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a directory that was replaced between its open and its lock is nobody's."""
    from featstore.storage.update import Update

    make(tmp_path / "g", 0)
    make(tmp_path / "other", 1)
    real, moved = FileLock._try, []

    def lock_late(self: FileLock, fd: int) -> bool:
        if not moved and self.exclusive and self.path.endswith("writer.lock"):
            moved.append(self.path)
            (tmp_path / "g").rename(tmp_path / "gone")
            (tmp_path / "other").rename(tmp_path / "g")
        return real(self, fd)

    monkeypatch.setattr(FileLock, "_try", lock_late)
    with Update(tmp_path / "g") as update:
        assert update.catalog.num_nodes == 21
        refuses(BusyError, "", lambda: FileLock(tmp_path / "g" / "writer.lock", exclusive=True))
    assert moved


def test_links_and_what_is_not_there(tmp_path: Path) -> None:
    make(tmp_path / "g", 0)
    (tmp_path / "link").symlink_to(tmp_path / "g")
    featstore.open(tmp_path / "link", memory="64MiB").close()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name in ("dangling", "absent", "absent/g"):
        caught = refuses(FileNotFoundError, "", lambda: featstore.open(tmp_path / name))
        assert caught.value.filename == str(tmp_path / name)
    refuses(NotADirectoryError, "", lambda: featstore.open(tmp_path / "file" / "g"))
