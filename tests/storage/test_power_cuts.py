"""Kills and power cuts at each system call of whatever commits: the old or the new is there afterwards, whole.

A power cut is real to the file system: ext4 or xfs on a loop device, whose writer is killed and which is then shut down
(``EXT4_IOC_SHUTDOWN``, which is ``XFS_IOC_GOINGDOWN``), so that all that was not flushed is gone. That needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featstore.creation import steps
from featstore.errors import FeatstoreError
from featstore.testing.faults import forked, sweep
from tests.storage.test_commit_faults import SCENARIOS, keep, leftovers, state
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

OPERATIONS = ["open", "write", "fsync", "rename", "truncate", "unlink", "mkdir", "close"]
# What is gone: nothing but the process; all since the last flush; the same, but the file system's log with names and sizes
# reached the drive; that, and the bytes of some files did.
ENDS = ("kill", "cut", "names", "some bytes")
CUTS = ENDS[1:]
NAMES = ("add", "add again", "remove", "append", "append to chunks", "update", "merge", "anew")
NAMES += ("import", "import replace", "import tables", "export", "export parquet", "create", "edges replace")

SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2
NEW_NAMESPACE = 0x00020000
WRITE_AND_WAIT = 7  # of sync_file_range(2)
# Bytes of an image (of xfs mkfs's least), and how it is mounted. For ext4: files that are renamed over others are not flushed
# unasked, and the log is written when it is asked for. xfs has no such options.
KINDS = {"ext4": (64 << 20, "loop,noauto_da_alloc,commit=3000"), "xfs": (300 << 20, "loop,nouuid")}


# -- the drive -----------------------------------------------------------------------------------------------------------------


class Drive:
    """ext4 or xfs on a file in memory, mounted at ``path`` while :meth:`mounted`. All of it is gone when the process ends."""

    def __init__(self, folder: Path, kind: str = "ext4") -> None:
        n_bytes, self._options = KINDS[kind]
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NAMESPACE):
            raise OSError(ctypes.get_errno(), "unshare")
        self._run("mount", "--make-rprivate", "/")
        images, self.path = folder / "images", folder / "drive"
        images.mkdir()
        self.path.mkdir()
        self._run("mount", "-t", "tmpfs", "tmpfs", images)
        self._image, self._kept = images / "now", images / "before"
        with open(self._image, "wb") as file:
            file.truncate(n_bytes)
        self._run(f"mkfs.{kind}", "-q", "-F" if kind == "ext4" else "-f", self._image)

    @staticmethod
    def _run(*command: str | Path) -> None:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def keep(self) -> None:
        """Remember what the drive holds, unmounted."""
        self._run("cp", "--sparse=always", self._image, self._kept)

    def restore(self) -> None:
        self._run("cp", "--sparse=always", self._kept, self._image)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        self._run("mount", "-o", self._options, self._image, self.path)
        try:
            yield self.path / "data"
        finally:
            self._run("umount", self.path)

    def cut(self, how: str, seed: int) -> None:
        """Cut the power."""
        if how == "some bytes":
            draws, libc = random.Random(seed), ctypes.CDLL(None, use_errno=True)
            for path in sorted(self.path.rglob("*")):
                if path.is_file() and draws.random() < 0.5:
                    fd = os.open(path, os.O_RDONLY)
                    assert libc.sync_file_range(fd, ctypes.c_long(0), ctypes.c_long(0), WRITE_AND_WAIT) == 0
                    os.close(fd)
        fd = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", LOG_LOST if how == "cut" else LOG_FLUSHED))
        os.close(fd)


def can_mount(kind: str = "ext4") -> bool:
    """Whether this process may make and mount a file system of its own."""
    size, force = ("8M", "-F") if kind == "ext4" else ("300M", "-f")
    script = f"mount -t tmpfs tmpfs /mnt && truncate -s {size} /mnt/i && mkfs.{kind} -q {force} /mnt/i && mkdir /mnt/d"
    script += " && mount -o loop /mnt/i /mnt/d && umount /mnt/d"
    with contextlib.suppress(OSError):
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False)
        return done.returncode == 0
    return False


# -- the campaign --------------------------------------------------------------------------------------------------------------


def end_each(folder: str, name: str, how: str, step: int, without: str = "", kind: str = "ext4") -> None:
    """End an operation before every ``step``-th system call, and after the last; in the child.

    ``without``: the flushes that are left out, of a "file" or of a "directory", for the control. It must come out.
    """
    steps.CHECKPOINT_S = -1e9  # type: ignore[misc] - a record wherever one may be
    drive = Drive(Path(folder), kind)
    scenario = SCENARIOS[name]
    with drive.mounted() as root:
        root.mkdir()
        scenario.before(root)
        old = state(root)
    drive.keep()
    with drive.mounted() as root:
        scenario.call(root)
        new = state(root)
    assert new != old
    real, n_states, n_wrong, seen = os.fsync, 0, 0, set()

    def careless(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}") != (without == "directory"):
            real(fd)

    def attempt(root: Path) -> None:
        if without:
            os.fsync = careless
        scenario.call(root)

    for fault in sweep(drive.path, OPERATIONS, "kill", step=step):
        drive.restore()
        with drive.mounted() as root:
            with fault:
                killed = forked(lambda root=root: attempt(root))  # type: ignore[misc]
            if how != "kill":
                drive.cut(how, fault.k)
        n_states += 1
        where = f"{name}: {how} before call {fault.k}"
        with drive.mounted() as root:
            try:
                found = state(root)
            except (FeatstoreError, OSError, AssertionError) as error:
                assert without, (where, error)
                n_wrong += 1
                continue
            if without:
                n_wrong += found not in (old, new) or (killed is None and found != new)
                continue
            assert found in (old, new), (where, found, old, new)
            assert killed is not None or found == new, (where, "what was acknowledged is lost")
            seen.add(found == new)
            if found == old:
                scenario.call(root)  # the dead one is not in anyone's way; an import goes on
                assert state(root) == new, where
            if os.path.lexists(root / "g"):
                keep(root, 2)  # the next writer sweeps
            left = leftovers(root, root)
            if found == new:  # what a builder left is swept by the next one
                left = {each for each in left if ".tmp-" not in each}
            assert not left, (where, left)
    if without:
        assert n_wrong, f"{name}: {how} without flushes of a {without}: nothing was noticed"
    else:
        assert seen == {False, True} or step > 1, (name, how, seen)
    (Path(folder) / "count").write_text(f"{n_states} {n_wrong}")


def needs_mounts(kind: str = "ext4") -> None:
    if not can_mount(kind):
        pytest.skip(f"power is cut on a file system of the test's own: that needs root, loop devices, {kind} and mkfs.{kind}")


SAMPLE = [("append", "names", 61), ("import", "cut", 261), ("export", "some bytes", 31)]


SAMPLE_OF_XFS = [("update", "names", 13, "", "xfs"), ("export", "cut", 61, "", "xfs"), ("update", "names", 17, "file", "xfs")]


def end_some(folder: str, cases: list[list[Any]]) -> None:
    """A sample, in one child."""
    for number, (name, how, step, *more) in enumerate(cases):
        (Path(folder) / str(number)).mkdir()
        end_each(f"{folder}/{number}", name, how, step, *more)


def test_some_operations_ended_at_some_calls(tmp_path: Path) -> None:
    needs_mounts()
    run_in_fork(end_some, str(tmp_path), SAMPLE)


def test_some_operations_ended_at_some_calls_on_xfs(tmp_path: Path) -> None:
    """The last is the control."""
    needs_mounts("xfs")
    run_in_fork(end_some, str(tmp_path), SAMPLE_OF_XFS)


def test_without_flushes_power_cuts_are_noticed(tmp_path: Path) -> None:
    """The control."""
    needs_mounts()
    run_in_fork(end_some, str(tmp_path), [("update", "names", 17, "file")])


@pytest.mark.stress
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("how", "without"), [("names", "file"), ("cut", "directory")])
def test_without_any_flush_power_cuts_are_noticed(name: str, how: str, without: str, tmp_path: Path) -> None:
    """The controls of all operations."""
    needs_mounts()
    run_in_fork(end_each, str(tmp_path), name, how, 1, without, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_ended_at_every_call(name: str, how: str, kind: str, tmp_path: Path) -> None:
    needs_mounts(kind)
    run_in_fork(end_each, str(tmp_path), name, how, 1, "", kind, timeout_s=3000)
