"""Memory, processors and open files, against control groups and limits as the kernel has them."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from featstore import config
from featstore.config import parse_memory
from featstore.diagnosis import process
from featstore.diagnosis.findings import Finding
from featstore.testing.limits import MemoryGroup, memory_group
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")


def suggestion(found: Finding) -> str:
    """The budget that the remedy has, as a user would copy it."""
    words = re.match(r"memory='([^']*)' keeps within", found.remedy)
    assert words is not None
    return words[1]


def within_a_group(group: MemoryGroup) -> None:
    """In a control group of 1 GiB: what it allows is named, and the budget that keeps within it does; in a fork."""
    group.enter()
    much = SimpleNamespace(total=1 << 40, available=1 << 40)  # whatever the machine has
    psutil.virtual_memory = lambda: much
    found = process.memory("900MiB")
    assert (found.status, found.values["limit_bytes"], found.values["memory"]) == ("warning", 1 << 30, 900 << 20)
    assert "a control group allows 1.00 GiB; memory=900.00 MiB" in found.text
    assert found.cause == "the budget and an interpreter with torch do not fit into the control group's limit"
    assert "docker run --memory" in found.remedy
    for suggested in (found.values["suggested"], suggestion(found)):
        assert process.memory(suggested).status == "ok"
    assert process.memory(None).status == "ok"
    above = process.memory("2GiB")
    assert above.status == "error"
    assert above.cause.startswith("the budget exceeds the 1.00 GiB that the control group allows: the kernel kills")
    assert suggestion(above)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
def test_the_limit_of_a_control_group() -> None:
    with memory_group(1 << 30) as group:
        run_in_fork(within_a_group, group)


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = process.memory("900TiB")
    assert found.status == "error"
    assert "keeps within what is available" in found.remedy or "the control group's limit" in found.remedy
    monkeypatch.setattr(process, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(process, "memory_limit", lambda: None)
    found = process.memory("1GiB")
    assert (found.status, "do not fit into what is available" in found.cause) == ("warning", True)


def test_a_budget_as_large_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter with torch lies beside it."""
    monkeypatch.setattr(process, "available_memory", lambda: 8 << 30)
    monkeypatch.setattr(process, "memory_limit", lambda: 1 << 30)
    found = process.memory("1GiB")
    assert (found.status, "the control group's limit" in found.remedy) == ("warning", True)
    assert process.memory(found.values["suggested"]).status == "ok"
    assert process.memory((1 << 30) + 1).status == "error"


@pytest.mark.parametrize("room", [5000, (1 << 20) + 5242, 3 * 10**8, (1 << 30) - 1, 64_424_509_439, (1 << 40) - 1, 3 << 40])
def test_the_budget_that_is_suggested_does_not_warn(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "available_memory", lambda: room + process.SPARE_BYTES)
    monkeypatch.setattr(process, "memory_limit", lambda: None)
    suggested = suggestion(process.memory(room + 1))
    assert 0.99 * room < parse_memory(suggested) <= room
    assert process.memory(suggested).status == "ok"


def test_a_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = float(len(os.sched_getaffinity(0)))
    for quota, status, remedy in (
        (None, "ok", ""),
        (whole, "ok", ""),
        (0.5, "note", "FEATSTORE_THREADS=1 and OMP_NUM_THREADS=1"),
    ):
        monkeypatch.setattr(process, "processor_quota", lambda quota=quota: quota)
        found = process.processors()
        assert (found.values["quota"], found.status, found.remedy.partition(";")[0]) == (quota, status, remedy)
        assert found.values["processors"] == len(os.sched_getaffinity(0))


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


def test_few_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert process.descriptors().values == {"soft": soft, "hard": hard}
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = process.descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.status, found.text) == ("warning", "512 at most")
    assert found.remedy.startswith("ulimit -n ")


@pytest.mark.parametrize(
    ("soft", "hard", "text", "remedy"),
    [
        (-1, -1, "unlimited", ""),
        (1024, 4096, "1,024 at most", ""),
        (512, 4096, "512 at most", "ulimit -n 4096"),
        (512, 1 << 20, "512 at most", "ulimit -n 65536"),
        (512, -1, "512 at most", "ulimit -n 65536"),
    ],
)
def test_limits_of_descriptors(soft: int, hard: int, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice can be followed: it is no more than the hard limit, if there is one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = process.descriptors()
    assert (found.status, found.text, found.remedy) == ("warning" if remedy else "ok", text, remedy)


def test_a_group_that_holds_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice that nobody could follow would be memory='0 B'."""
    monkeypatch.setattr(process, "memory_limit", lambda: 256 << 20)
    found = process.memory("64MiB")
    assert found.values["suggested"] == 0
    assert found.remedy.startswith("no memory= keeps within the control group's limit beside an interpreter")
