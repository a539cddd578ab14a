"""What the doctor says: against what the kernel, file systems, control groups and limits really do, or are made to say."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import re
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import config
from featstore._core.io import direct_alignment, direct_mode
from featstore.cli import doctor
from featstore.cli.doctor import Finding, examine
from featstore.cli.main import main
from featstore.config import parse_memory
from featstore.storage.drive import DriveSpeed
from featstore.testing.faults import Fault, deny_syscalls, forked, run_in_child
from featstore.testing.limits import memory_group
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

NAMES = ["io_uring", "direct I/O", "memory", "processors", "open files", "disk", "packages", "devices"]


def look(path: Path | str, **options: Any) -> dict[str, Finding]:
    found = {each.name: each for each in examine(os.fspath(path), **{"rates": False, **options})}
    assert not [each for each in found.values() if each.status == "warning" and not each.remedy]
    return found


def says(texts: dict[str, str]) -> Callable[[str], str]:
    """Files of the kernel's as they would be elsewhere."""
    really = doctor._text
    return lambda path: texts[path] if path in texts else really(path)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    x = np.arange(30_000, dtype=np.float32).reshape(3000, 10)
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(3001, int), [], {"x": x}, progress=False).close()
    return tmp_path / "g"


def test_nothing_is_in_the_way_here(dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_IOPS", 0)  # however busy the drive is
    before = sorted(os.listdir(dataset))
    assert main(["doctor", str(dataset), "--memory", "64MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(dataset)
    assert [line[11:23].strip() for line in lines[1:-1]] == [*NAMES, "drive"]
    assert {line.split()[0] for line in lines[1:-1]} <= {"ok", "note"}
    assert lines[-1] == "nothing is in the way"
    assert sorted(os.listdir(dataset)) == before
    assert os.listdir(dataset.parent) == ["g"]


def test_of_a_directory_where_a_dataset_is_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """By default the one that the shell is in; as JSON, with the figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "SLOW_IOPS", 0)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["warnings"]) == (str(tmp_path), 0)
    values = {each["name"]: each["values"] for each in found["findings"]}
    assert list(values) == [*NAMES, "drive"]
    assert values["io_uring"] == {"kernel": os.uname().release}
    assert values["direct I/O"]["mode"].startswith("direct")
    assert values["drive"]["iops"] > 0
    assert values["drive"]["bandwidth"] > 0
    assert values["processors"]["processors"] == len(os.sched_getaffinity(0))
    assert values["packages"]["torch"] == torch.__version__.partition("+")[0] or values["packages"]["torch"] == torch.__version__
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("path", "words"), [("nowhere", "no such file"), ("file", "Not a directory")])
def test_of_no_directory(tmp_path: Path, path: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / path)]) == 2
    assert words in capsys.readouterr().err


# -- rings ---------------------------------------------------------------------------------------------------------------------


def refused(path: str, error: int) -> None:
    deny_syscalls(["io_uring_setup"], error)
    ring = look(path)["io_uring"]
    assert ring.status == "warning"
    assert ring.values == {"errno": error}
    assert os.strerror(error) in ring.text
    assert "threads of pread" in ring.text
    if error == errno.ENOMEM:
        assert "memory that may be locked" in ring.text
        assert "memlock=-1" in ring.remedy
    else:
        assert "a seccomp filter is in force" in ring.text
        assert "docker run --security-opt seccomp=profile.json" in ring.remedy
    with featstore.open(path, memory="64MiB") as g:
        assert "featstore doctor" in g.features["x"].stats()["reason"]
    with pytest.raises(OSError, match="featstore doctor says why") as caught:
        featstore.open(path, memory="64MiB", backend="io_uring")
    assert caught.value.errno == error


def refused_with_each_error(path: str) -> None:
    for error in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
        assert forked(functools.partial(refused, path, error)) is None, errno.errorcode[error]


def test_a_seccomp_filter_is_named_with_its_remedy(dataset: Path) -> None:
    run_in_fork(refused_with_each_error, str(dataset))


@pytest.mark.parametrize(("value", "more"), [("1", "kernel.io_uring_group"), ("2", "")])
def test_a_setting_of_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch, value: str, more: str) -> None:
    monkeypatch.setattr(doctor, "_text", says({"/proc/sys/kernel/io_uring_disabled": value}))
    why, remedy = doctor._refusal(OSError(errno.EPERM, "not permitted"))
    assert why == f"kernel.io_uring_disabled is {value}"
    assert remedy.startswith("as root: sysctl -w kernel.io_uring_disabled=0")
    assert more in remedy


def test_other_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_text", says({"/proc/self/status": "Seccomp:\t0", "/proc/sys/kernel/io_uring_disabled": "0"}))
    assert "CONFIG_IO_URING" in doctor._refusal(OSError(errno.ENOSYS, "not there"))[1]
    assert doctor._refusal(OSError(errno.EMFILE, "too many")) == ("too many files are open", "ulimit -n 65536")


@pytest.mark.parametrize("backend", ["pread", "buffered"])
def test_a_variable_that_rules_rings_out(dataset: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATSTORE_BACKEND", backend)
    ring = look(dataset)["io_uring"]
    assert (ring.status, ring.remedy) == ("warning", "unset FEATSTORE_BACKEND")


# -- file systems --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no tmpfs here")
def test_a_file_system_in_memory() -> None:
    found = look("/dev/shm")["direct I/O"]
    assert found.status == "warning"
    assert found.values["file_system"] == "tmpfs"
    assert "lies in memory" in found.text
    assert "memory that no budget counts" in found.remedy
    assert not [name for name in os.listdir("/dev/shm") if "doctor" in name]


def overlaid(path: str) -> None:
    """As on overlayfs over squashfs: opening and ``fcntl`` take O_DIRECT, reads do not; in the child."""
    mounts = f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / {path} rw - overlay overlay rw,lowerdir=/squash"
    doctor._text = says({"/proc/self/mountinfo": mounts})  # type: ignore[assignment]
    with Fault(path, "read_direct", "EINVAL") as fault:
        found = look(path)["direct I/O"]
        assert fault.fired
    assert found.status == "warning"
    assert found.values["file_system"] == "overlay"
    assert "takes O_DIRECT and refuses to read" in found.text
    assert "docker run -v" in found.remedy


def test_layers_of_a_container(dataset: Path) -> None:
    run_in_fork(overlaid, os.path.realpath(dataset))


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [("nfs4", "note", "across a network"), ("fuse.sshfs", "note", "across a network"), ("xfs", "ok", "")],
)
def test_other_file_systems(dataset: Path, kind: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two mounts on one point the later one is meant, and a longer name is no mount's inside."""
    real = os.path.realpath(dataset)
    mounts = ["1 0 0:1 / / rw - ext4 a rw", f"2 1 0:2 / {real} rw - tmpfs b rw", f"3 1 0:3 / {real} rw - {kind} c rw"]
    mounts.append(f"4 1 0:4 / {real[:-1]} rw - ramfs d rw")
    monkeypatch.setattr(doctor, "_text", says({"/proc/self/mountinfo": "\n".join(mounts)}))
    found = look(dataset)["direct I/O"]
    assert (found.status, found.values["file_system"], found.values["mount_point"]) == (status, kind, real)
    assert words in found.remedy


def test_a_place_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there is read; without one that is said."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    found = look(tmp_path)["direct I/O"]
    assert "none may be made" in found.text
    assert found.remedy == "give a directory that may be written, or one with files that may be read"
    (tmp_path / "some").write_bytes(bytes(10_000))
    assert look(tmp_path)["direct I/O"].status == "ok"
    assert os.listdir(tmp_path) == ["some"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EIO, "dmesg"), (errno.EROFS, "a directory that may be written")],
)
def test_a_page_that_cannot_be_read(tmp_path: Path, error: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(doctor, "direct_mode", fails)
    found = look(tmp_path)["direct I/O"]
    assert (found.status, "not tried: " in found.text) == ("warning", True)
    assert remedy in found.remedy


@pytest.mark.parametrize(("alignment", "text"), [(512, "direct, aligned to 512 bytes"), (None, "direct: not reported")])
def test_the_alignment_of_direct_reads(tmp_path: Path, alignment: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "direct_mode", lambda _: "direct" if alignment else "direct: not reported")
    monkeypatch.setattr(doctor, "direct_alignment", lambda _: alignment)
    found = look(tmp_path)["direct I/O"]
    assert found.text.endswith(text)
    assert found.values["alignment"] == alignment


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


Usage = namedtuple("Usage", "total used free")


def test_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 << 30, 99 << 30, 1 << 30))
    found = look(tmp_path)["disk"]
    assert (found.status, found.text) == ("warning", "1.00 GiB of 100.00 GiB are free")
    assert "run_dir" in found.remedy


def test_a_slow_drive_and_one_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_drive", lambda *_: DriveSpeed(180.0, 1.5e8, 1.2e8))
    found = look(tmp_path, rates=True)["drive"]
    assert (found.status, found.text) == ("warning", "reads 0.15 GB/s, writes 0.12 GB/s, 180 random reads a second")
    assert "streamed" in found.remedy

    def fails(*_: Any) -> DriveSpeed:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/here")

    monkeypatch.setattr(doctor, "measure_drive", fails)
    found = look(tmp_path, rates=True)["drive"]
    assert (found.status, found.text) == ("warning", "not measured: /here: Read-only file system")


# -- the process ---------------------------------------------------------------------------------------------------------------


def suggestion(found: Finding) -> str:
    """The budget that the remedy has, as a user would copy it."""
    words = re.match(r"memory='([^']*)' keeps within", found.remedy)
    assert words is not None
    return words[1]


def within_a_group(path: str) -> None:
    """In a control group of 1 GiB: what it allows is named, and the budget that keeps within it does; in the child."""
    found = look(path, memory="900MiB")["memory"]
    assert (found.status, found.values["limit_bytes"]) == ("warning", 1 << 30)
    assert "a control group allows 1.00 GiB" in found.text
    assert "keeps within the control group's limit" in found.remedy
    for suggested in (found.values["suggested"], suggestion(found)):
        assert look(path, memory=suggested)["memory"].status == "ok"
    assert look(path)["memory"].status == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
def test_the_limit_of_a_control_group(dataset: Path) -> None:
    with memory_group(1 << 30) as group:
        run_in_child(within_a_group, str(dataset), prepare=group.enter)


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    found = look(tmp_path, memory="900TiB")["memory"]
    assert found.status == "warning"
    assert "keeps within what is available" in found.remedy


@pytest.mark.parametrize("room", [5000, (1 << 20) + 5242, 3 * 10**8, (1 << 30) - 1, 64_424_509_439, (1 << 40) - 1, 3 << 40])
def test_the_budget_that_is_suggested_does_not_warn(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: room + doctor.SPARE_BYTES)
    monkeypatch.setattr(doctor, "memory_limit", lambda: None)
    suggested = suggestion(look(tmp_path, memory=room + 1)["memory"])
    assert 0.99 * room < parse_memory(suggested) <= room
    assert look(tmp_path, memory=suggested)["memory"].status == "ok"


def test_a_share_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, status, remedy in ((None, "ok", ""), (0.5, "note", "FEATSTORE_THREADS=1 and OMP_NUM_THREADS=1")):
        monkeypatch.setattr(doctor, "processor_quota", lambda quota=quota: quota)
        found = look(tmp_path)["processors"]
        assert (found.values["quota"], found.status, found.remedy) == (quota, status, remedy)


V1 = "5:cpuset:/a\n4:memory:/a/b\n1:cpu,cpuacct:/a/b\n"
V2 = "0::/a/b\n"


@pytest.mark.parametrize(
    ("groups", "texts", "quota"),
    [
        (V2, {"cpu.max": "50000 100000"}, 0.5),
        (V2, {"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000"}, 1.5),
        (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "90000 100000"}, 0.5),
        (V2, {"a/c/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, None),
        (V2, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "50000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu.max": "50000 100000"}, None),
        (V1 + "0::/\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("", {"cpu.max": "50000 100000"}, None),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path, groups: str, texts: dict[str, str], quota: float | None, monkeypatch: Any
) -> None:
    """Of the process's own group and of all above it, of version 1 and 2, in a tree as the kernel has it."""
    control_groups(tmp_path, groups, texts, monkeypatch)
    assert config.processor_quota() == quota


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same walk finds those of memory, and what each leaves."""
    own = {"memory.max": "3000\n", "memory.current": "1000\n", "memory.stat": "anon 5\ninactive_file 400\n"}
    above = {"memory.max": "2000", "memory.current": "1900", "memory.stat": "anon 5"}
    root = {"memory.max": "max", "memory.current": "1900", "memory.stat": "anon 5"}
    texts = {folder + name: text for folder, all_ in (("a/b/", own), ("a/", above), ("", root)) for name, text in all_.items()}
    control_groups(tmp_path / "v2", V2, texts, monkeypatch)
    assert list(config._cgroup_limits()) == [(3000, 2400), (2000, 100)]
    assert (config.memory_limit(), config.available_memory()) == (2000, 100)
    names = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes", "memory.stat": "memory.stat"}
    texts = {f"memory/a/b/{names[name]}": text for name, text in own.items()}
    texts |= {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1", "memory/memory.stat": ""}
    control_groups(tmp_path / "v1", V1, texts, monkeypatch)
    assert list(config._cgroup_limits()) == [(3000, 2400)]
    assert config.memory_limit() == 3000


def control_groups(folder: Path, groups: str, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a process's list of its control groups, and their tree, and let the library read these."""
    (folder / "tree").mkdir(parents=True)
    if groups:
        (folder / "cgroup").write_text(groups)
    for name, text in texts.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(config, "_OWN_GROUPS", folder / "cgroup")
    monkeypatch.setattr(config, "_GROUPS", folder / "tree")


def test_few_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = look(tmp_path)["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.status, found.text) == ("warning", "512 at most")
    assert found.remedy.startswith("ulimit -n ")


DRIVER = "NVRM version: NVIDIA UNIX {}  580.65.06  Release Build  (root@x)\nGCC version:  gcc version 12.3.0 (Debian)\n"


@pytest.mark.parametrize(("version", "devices", "status"), [(None, [], "ok"), ("13.0", [], "note"), ("13.0", ["H100"], "ok")])
@pytest.mark.parametrize("driver", ["", "Open Kernel Module for x86_64", "x86_64 Kernel Module"])
def test_devices(
    tmp_path: Path, version: str | None, devices: list[str], status: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(is_available=lambda: bool(devices), device_count=lambda: len(devices))
    cuda.get_device_name = devices.__getitem__
    monkeypatch.setattr(doctor, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=version)))
    monkeypatch.setattr(doctor, "_text", says({"/proc/driver/nvidia/version": driver and DRIVER.format(driver)}))
    found = look(tmp_path)["devices"]
    assert found.status == status
    assert all(each in found.text for each in devices)
    assert found.text.endswith("; the kernel has driver 580.65.06") == bool(driver)
    assert found.values["driver"] == ("580.65.06" if driver else None)
