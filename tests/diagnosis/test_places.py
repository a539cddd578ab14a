"""File systems, direct I/O by a read, free space and shared memory: real ones, and those that the kernel is made to list."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore._core.io import direct_alignment, direct_mode
from featstore.diagnosis import kernel, places
from featstore.testing.faults import Fault
from tests.diagnosis.test_kernel import says
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    x = np.arange(30_000, dtype=np.float32).reshape(3000, 10)
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(3001, int), [], {"x": x}, progress=False).close()
    return os.path.realpath(tmp_path / "g")


def list_mounts(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "text_of", says({"/proc/self/mountinfo": "\n".join(lines)}))


# -- which file system ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("nfs4", "note", "across a network"),
        ("fuse.sshfs", "note", "across a network"),
        ("overlay", "note", "a container's layers"),
        ("squashfs", "note", "a container's layers"),
        ("tmpfs", "warning", "lies in memory"),
        ("xfs", "ok", ""),
    ],
)
def test_kinds(dataset: str, kind: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two mounts on one point the later one is meant, and a name that begins alike is not inside."""
    mounts = [
        "1 0 0:1 / / rw - ext4 a rw",
        f"2 1 0:2 / {dataset} rw - tmpfs b rw",
        f"3 1 0:3 / {dataset} rw shared:7 - {kind} c rw",
    ]
    mounts += [f"4 1 0:4 / {os.path.dirname(dataset)} rw - ramfs d rw"]
    list_mounts(mounts, monkeypatch)
    assert places.mount_of(f"{dataset}2").kind == "ramfs"
    found = places.file_system(dataset, True)
    assert (found.status, found.values["file_system"], found.values["mount_point"]) == (status, kind, dataset)
    assert words in found.cause
    assert bool(found.remedy) == (status != "ok")


def test_names_with_blanks_and_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(os.path.realpath(tmp_path)) / "a é b"
    place.mkdir()
    escaped = str(place).replace(" ", r"\040")
    list_mounts(["1 0 0:1 / / rw - ext4 a rw", f"2 1 0:2 / {escaped} rw - xfs b rw"], monkeypatch)
    assert places.mount_of(str(place)) == places.Mount("xfs", str(place))


def test_what_an_overlay_lies_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is seen: of a container's layers only the runtime sees the directories."""
    real = os.path.realpath(tmp_path)
    for name in ("over", "under"):
        (tmp_path / name).mkdir()
    mounts = ["1 0 0:1 / / rw - ext4 a rw", f"2 1 0:2 / {real}/under ro - squashfs b ro"]
    overlay = f"3 1 0:3 / {real}/over rw,relatime - overlay overlay rw,lowerdir={real}/under:/not/seen:{real},upperdir=/up"
    list_mounts([*mounts, overlay], monkeypatch)
    assert str(places.mount_of(f"{real}/over")) == "overlay over ext4 and squashfs"
    list_mounts([*mounts, overlay.replace(f"{real}/under:/not/seen:{real}", "/not/seen")], monkeypatch)
    assert str(places.mount_of(f"{real}/over")) == "overlay"


def test_no_list_of_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_mounts([], monkeypatch)
    assert places.file_system(str(tmp_path), False).text == "unknown file system at ?"


@pytest.mark.parametrize("line", ["2 1 0:2 / {} ro - ext4 b rw", "2 1 0:2 / {} rw - ext4 b ro"])
def test_mounted_read_only(dataset: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    list_mounts(["1 0 0:1 / / rw - ext4 a rw", line.format(dataset)], monkeypatch)
    found = places.file_system(dataset, True)
    assert (found.status, found.text) == ("note", f"ext4 at {dataset}, read-only")
    assert f"{dataset}.runs" in found.cause
    assert "run_dir" in found.remedy
    found = places.file_system(dataset, False)
    assert (found.status, found.cause) == ("warning", "the file system is mounted read-only: no dataset can be made here")


# -- direct I/O ----------------------------------------------------------------------------------------------------------------


def overlaid(path: str) -> None:
    """As on overlayfs over squashfs: opening and ``fcntl`` take O_DIRECT, reads do not; in the child."""
    mounts = f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / {path} rw - overlay overlay rw,lowerdir=/squash"
    kernel.text_of = says({"/proc/self/mountinfo": mounts})
    with Fault(path, "read_direct", "EINVAL") as fault:
        found = places.direct_io(path, True)
        assert fault.fired
    assert found.status == "warning"
    assert found.cause == f"the file system takes O_DIRECT and refuses to read (Invalid argument): overlay at {path}"
    assert "docker run -v" in found.remedy


def test_reads_that_an_overlay_refuses(dataset: str) -> None:
    run_in_fork(overlaid, dataset)


@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    [
        ("nfs4", "buffered: O_DIRECT refused (Invalid argument)", "a drive of this machine"),
        ("zfs", "buffered: the file system has no direct I/O", "ext4, xfs or btrfs"),
        ("xfs", "buffered: direct I/O would need 16384-byte alignment", "lsblk"),
    ],
)
def test_other_refusals(tmp_path: Path, kind: str, mode: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    list_mounts([f"1 0 0:1 / / rw - {kind} a rw"], monkeypatch)
    monkeypatch.setattr(places, "direct_mode", lambda _: mode)
    found = places.direct_io(str(tmp_path), False)
    assert (found.status, found.cause) == ("warning", f"{mode.removeprefix('buffered: ')}: {kind} at /")
    assert words in found.remedy


def test_a_variable_that_rules_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_BACKEND", "buffered")
    found = places.direct_io(str(tmp_path), False)
    assert (found.status, found.remedy) == ("warning", "unset FEATSTORE_BACKEND")


def test_a_place_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there is read; without one that is said."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    found = places.direct_io(str(tmp_path), False)
    assert (found.status, found.text) == ("warning", "not tried")
    assert "none may be made" in found.cause
    assert found.remedy == "give a directory that may be written, or one with files that may be read"
    (tmp_path / "some").write_bytes(bytes(10_000))
    assert places.direct_io(str(tmp_path), False).status == "ok"
    assert os.listdir(tmp_path) == ["some"]
    for name, size in (("empty", 0), ("largest", 20_000)):
        (tmp_path / name).write_bytes(bytes(size))
    read: list[int] = []
    monkeypatch.setattr(places, "direct_mode", lambda fd: read.append(os.fstat(fd).st_size) or "direct")
    places.direct_io(str(tmp_path), False)
    assert read == [20_000]


@pytest.mark.parametrize(
    ("error", "status", "remedy"),
    [
        (errno.ENOSPC, "warning", "free some space"),
        (errno.EIO, "error", "dmesg"),
        (errno.EROFS, "warning", "a directory that may be written"),
    ],
)
def test_a_page_that_cannot_be_read(
    tmp_path: Path, error: int, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(places, "direct_mode", fails)
    found = places.direct_io(str(tmp_path), False)
    assert (found.status, found.cause) == (status, os.strerror(error))
    assert remedy in found.remedy
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("alignment", "text"), [(512, "direct, aligned to 512 bytes"), (None, "direct: not reported")])
def test_the_alignment_of_direct_reads(tmp_path: Path, alignment: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "direct_mode", lambda _: "direct" if alignment else "direct: not reported")
    monkeypatch.setattr(places, "direct_alignment", lambda _: alignment)
    found = places.direct_io(str(tmp_path), False)
    assert (found.status, found.text, found.values["alignment"]) == ("ok", text, alignment)


def test_the_alignment_is_the_kernels(tmp_path: Path) -> None:
    """As its mode says, and direct reads begin at any multiple of it."""
    path = tmp_path / "some"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    try:
        mode, alignment = direct_mode(fd), direct_alignment(fd)
        if mode == "direct":
            assert alignment in (512, 1024, 2048, 4096)
            assert os.preadv(fd, [mmap.mmap(-1, 4096)], alignment) == 4096
        else:
            assert alignment == 0 if "has no direct I/O" in mode else not alignment or alignment > 4096
    finally:
        os.close(fd)


# -- space ---------------------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_full_drive(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset it is the drive where files of runs go that matters."""
    seen = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen.append(path) or Usage(100 << 30, 99 << 30, 1 << 30))
    found = places.space(dataset, True)
    assert (found.status, found.text) == ("warning", f"1.00 GiB of 100.00 GiB are free at {os.path.dirname(dataset)}")
    assert "run_dir" in found.remedy
    assert places.space(dataset, False).text == "1.00 GiB of 100.00 GiB are free"
    assert seen == [os.path.dirname(dataset), dataset]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 30, 98 << 30, 2 << 30))
    assert places.space(dataset, True).status == "ok"


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((64 << 20, "note"), (1 << 30, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(2 << 30, 0, free))
        found = places.shared_memory()
        assert (found.status, found.values["free_bytes"], "--shm-size" in found.remedy) == (status, free, status == "note")


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.sharedmemory, "DIRECTORY", str(tmp_path / "shm"))
    found = places.shared_memory()
    assert (found.status, str(tmp_path) in found.cause, "--shm-size" in found.remedy) == ("note", True, True)
