"""Locks of a dataset, and updates under them: one writer at a time, nothing left half-done."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from featstore.errors import BusyError
from featstore.storage.calls import close_quietly
from featstore.storage.catalog import read_catalog
from featstore.storage.layout import choose_layout
from featstore.storage.lock import READERS_LOCK, WRITER_LOCK, FileLock, lock_directory
from featstore.storage.update import Update, sweep
from featstore.storage.writer import RowFileWriter
from tests.storage.test_catalog import add_field, file_record, root, sample
from tests.support.refusing import refuses
from tests.support.rowfiles import snapshot

__all__ = ["root"]  # a fixture


def test_writers_exclude_each_other_and_readers_share(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path, exclusive=True):
        caught = refuses(BusyError, "", lambda: FileLock(path, exclusive=True))
        assert caught.value.filename == str(path)
        refuses(BusyError, "", lambda: FileLock(path, exclusive=False))
    with FileLock(path, exclusive=False), FileLock(path, exclusive=False):
        refuses(BusyError, "", lambda: FileLock(path, exclusive=True))
    lock = FileLock(path, exclusive=True)
    lock.release()
    lock.release()
    refuses(FileNotFoundError, "", lambda: FileLock(tmp_path / "absent", exclusive=False))


def test_a_dead_writers_lock_is_gone_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = FileLock(path, exclusive=True)
        os.write(tell, b"held")
        signal.pause()
        lock.release()
        os._exit(0)
    assert os.read(ready, 4) == b"held"
    refuses(BusyError, "", lambda: FileLock(path, exclusive=True))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    FileLock(path, exclusive=True).release()
    os.close(ready)
    os.close(tell)


def test_a_forked_child_does_not_release_the_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path, exclusive=True) as lock:
        pid = os.fork()
        if pid == 0:
            lock.release()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        refuses(BusyError, "", lambda: FileLock(path, exclusive=True))
    FileLock(path, exclusive=True).release()


def test_a_reader_that_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with FileLock(path, exclusive=False) as lock:
        for _ in range(2):
            with lock.alone() as is_alone:
                assert is_alone
                refuses(BusyError, "", lambda: FileLock(path, exclusive=False))
            with FileLock(path, exclusive=False), lock.alone() as is_alone:
                assert not is_alone
            refuses(BusyError, "", lambda: FileLock(path, exclusive=True))  # it is held as before
    with lock.alone() as is_alone:
        assert not is_alone


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    FileLock(tmp_path / "lock", exclusive=False).release()
    refuses(OSError, "No locks", lambda: FileLock(tmp_path / "lock", exclusive=True))


def test_directories_can_be_locked(tmp_path: Path) -> None:
    fd = lock_directory(tmp_path)
    assert fd is not None
    assert lock_directory(tmp_path) is None
    close_quietly(fd)
    fd = lock_directory(tmp_path)
    assert fd is not None
    close_quietly(fd)
    assert lock_directory(tmp_path / "absent") is None
    (tmp_path / "file").touch()
    assert lock_directory(tmp_path / "file") is None


def test_an_update_adds_a_field_and_replaces_one(root: Path) -> None:
    with Update(root) as update:
        add_field(update, "new")
        add_field(update, "x0")
        assert read_catalog(root) == sample()  # not before the commit
        catalog = update.commit()
    assert read_catalog(root) == catalog
    assert catalog.generation == 2
    assert set(catalog.files) == {"node.new.2.rows", "node.x0.2.rows", "node.x1.1.rows"}
    assert catalog.fields["node/_/x0"].generation == 2


def test_an_update_that_is_left_changes_nothing(root: Path) -> None:
    before = snapshot(root)
    with Update(root) as update:
        add_field(update, "new")
        update.writer("node.open", choose_layout(4), kind="feature", dtype="float32").write(np.zeros((1, 4), np.uint8))
    assert snapshot(root) == before


def test_one_update_at_a_time(root: Path) -> None:
    with Update(root), pytest.raises(BusyError):
        Update(root)
    Update(root).__exit__(None, None, None)


def test_the_lock_of_a_directory_that_was_moved(root: Path) -> None:
    root.rename(f"{root}.moved")
    with pytest.raises(FileNotFoundError, match="may have been renamed or removed") as caught:
        Update(root)
    assert caught.value.filename == str(root)


def test_what_dead_writers_left_goes_at_once_and_old_files_when_nobody_reads(root: Path) -> None:
    dead = {"a.tmp", "node.x.rows.2.tmp", "node.new.2.rows", "node.new.2.rows.sums", "catalog.lmdb/data.mdb.1.tmp"}
    making = {"making.z/step-0.rows.ab.tmp", "making.z/step-0.rows.sums.ab.tmp", "making.z/state.new.tmp"}
    old = {"node.old.1.rows", "node.old.1.rows.sums", "node.of.3.rows.1.rows"}
    mine = {"mine.txt", "making.y/state", "making.y/step-1.rows.cd.tmp", "making.mine/thesis"}
    for name in (*dead, *making, *old, *mine):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    (root / "making.link").symlink_to(root / "making.y")
    RowFileWriter(root, "node.x0.1.rows", choose_layout(4), kind="feature", dtype="float32").commit()
    named = {"node.x0.1.rows", "node.x0.1.rows.sums", "catalog.lmdb/data.mdb", READERS_LOCK, WRITER_LOCK}

    def there() -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    with FileLock(root / READERS_LOCK, exclusive=False):
        with Update(root) as update:
            assert there() == named | old | mine
            assert not (root / "making.z").exists()
            writer = update.writer("node.new", choose_layout(4), kind="feature", dtype="float32")
            refuses(BusyError, "", lambda: Update(root))
            writer.commit()
            assert there() == named | old | mine | {"node.new.2.rows", "node.new.2.rows.sums"}
        assert sweep(root, sample()) == []
    with Update(root):
        assert there() == named | mine


def test_generations_are_in_the_seed(root: Path) -> None:
    record = file_record("x")
    assert record.seed != replace(record, generation=2).seed != replace(record, file_id="cd" * 16).seed
