"""Power cuts at each system call of every operation, on ext4 and xfs: the old state or the new one is there, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from featstore.testing.faults import forked, sweep
from tests.campaigns.checks import BadStateError, Prepared, report
from tests.campaigns.drives import CAN_BE_CUT, Drive, needs_mounts
from tests.campaigns.operations import SCENARIOS
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

CALLS = ["open", "write", "fsync", "rename", "truncate", "unlink", "mkdir", "close"]
# What is gone: all since the last flush; the same, but the file system's log with names and sizes reached the drive; that, and
# the bytes of some files did.
CUTS = ("cut", "names", "some bytes")
# Operations that change something.
NAMES = [name for name, each in SCENARIOS.items() if each.commits]


def end_each(folder: str, name: str, how: str, step: int, kind: str = "ext4", without: str = "") -> None:
    """Cut the power before every ``step``-th system call of an operation, and after the last; in the child.

    ``without``: the flushes that are left out, of a "file" or of a "directory", for the control. It must come out.
    """
    drive = Drive(Path(folder), kind)
    with drive.mounted() as root:
        root.mkdir()
        ready = Prepared(name, drive.path / "template", root)
        ready.fresh()
    drive.keep()
    real, n_states, n_bad, seen = os.fsync, 0, 0, set()

    def careless(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}") != (without == "directory"):
            real(fd)

    def attempt() -> None:
        if without:
            os.fsync = careless
        ready.call()

    for fault in sweep(ready.root, CALLS, "kill", step=step):
        drive.restore()
        with drive.mounted():
            with fault:
                killed = forked(attempt)
            drive.cut(how, fault.k)
        n_states += 1
        with drive.mounted():
            try:
                seen.add(ready.is_new(f"{kind}, {how} before call {fault.k}", killed is None))
            except BadStateError:
                if not without:
                    raise
                n_bad += 1
    if without:
        assert n_bad, f"{name}: {how} without flushes of a {without}: nothing was noticed"
    else:
        assert seen == {False, True} or step > 1, (name, how, seen)
    figures: dict[str, Any] = {"without": without, "bad": n_bad} if without else {}
    report("power cuts", operation=name, kind=kind, how=how, states=n_states, different=ready.n_states, **figures)


def end_some(folder: str, cases: list[tuple[Any, ...]]) -> None:
    """A sample, in one child."""
    for number, (name, how, step, *more) in enumerate(cases):
        (Path(folder) / str(number)).mkdir()
        end_each(f"{folder}/{number}", name, how, step, *more)


# The last of each is the control.
SAMPLE = [("append", "names", 61), ("export", "some bytes", 31), ("update", "names", 17, "ext4", "file")]
SAMPLE_OF_XFS = [("update", "names", 13, "xfs"), ("aggregate", "cut", 71, "xfs"), ("update", "names", 17, "xfs", "file")]


@pytest.mark.parametrize("kind", CAN_BE_CUT)
def test_power_cuts_of_some_operations(kind: str, tmp_path: Path) -> None:
    needs_mounts(kind)
    run_in_fork(end_some, str(tmp_path), SAMPLE if kind == "ext4" else SAMPLE_OF_XFS)


@pytest.mark.stress
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("how", "without"), [("names", "file"), ("cut", "directory")])
def test_without_any_flush_power_cuts_are_noticed(name: str, how: str, without: str, tmp_path: Path) -> None:
    """The controls of all operations."""
    needs_mounts()
    run_in_fork(end_each, str(tmp_path), name, how, 1, "ext4", without, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("kind", CAN_BE_CUT)
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_ended_at_every_call(name: str, how: str, kind: str, tmp_path: Path) -> None:
    needs_mounts(kind)
    run_in_fork(end_each, str(tmp_path), name, how, 1, kind, timeout_s=3000)
