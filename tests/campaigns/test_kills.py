"""Kills at each system call and at random moments of every operation: what was acknowledged is there, and nothing is torn."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from featstore.storage import builddir
from featstore.testing.faults import OPERATIONS, forked, sweep
from tests.campaigns.checks import BadStateError, prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

CALLS = [each for each in OPERATIONS if "alloc" not in each]
SHARED = Path("/dev/shm")


def kill_at_calls(folder: str, name: str, step: int, begin: int = 1) -> None:
    """Kill an operation before every ``step``-th system call on files; in the child."""
    ready, n_kills, seen = prepared(folder, name), 0, set()
    for fault in sweep(ready.root, CALLS, "kill", step=step):
        ready.fresh()
        with fault:
            killed = forked(ready.call)
        n_kills += killed is not None
        seen.add(ready.is_new(f"killed before call {fault.k}", killed is None))
    assert n_kills
    assert seen == ({False, True} if ready.scenario.commits else {True}), seen
    report("kills at calls", operation=name, kills=n_kills, states=ready.n_states)


def kill_at_moments(folder: str, name: str, n: int) -> None:
    """Kill an operation ``n`` times at random moments, between system calls too; in the child."""
    ready, draws, n_kills, n_done = prepared(folder, name), random.Random(name), 0, 0
    usual_s = 0.1
    while n_kills < n:
        ready.fresh()
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ready.call()
                status = 0
            finally:
                os._exit(status)
        time.sleep(draws.uniform(0, usual_s))  # chooses the moment; nothing waits for anything
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        n_kills += killed
        n_done += not killed
        usual_s = usual_s * 1.1 if killed else min(usual_s * 0.9, time.perf_counter() - began)
        ready.is_new(f"killed at a random moment, {n_kills}", not killed)
    report("kills at moments", operation=name, kills=n_kills, done=n_done, states=ready.n_states)


def kill_in_place(folder: str) -> None:
    """The control, in the child: a builder that works at the final place. Its killed builds are noticed."""

    def build_in_place(self: builddir.BuildDirectory, kept: str) -> None:
        os.mkdir(self.target)
        self.path = self.target

    def commit(self: builddir.BuildDirectory) -> None:
        self.path = ""

    builddir.BuildDirectory._make = build_in_place  # type: ignore[method-assign]
    builddir.BuildDirectory.commit = commit  # type: ignore[method-assign]
    ready, n_bad, n_kills = prepared(folder, "create"), 0, 0
    for fault in sweep(ready.root, CALLS, "kill", step=17):
        ready.fresh()
        with fault:
            n_kills += forked(ready.call) is not None
        try:
            ready.is_new(f"killed before call {fault.k}", False)
        except BadStateError:
            n_bad += 1
    assert n_bad >= 3
    report("kills: control", operation="create", kills=n_kills, bad=n_bad)


def folders(folder: str) -> Iterator[str]:
    for number in range(1000):
        path = f"{folder}/{number}"
        os.mkdir(path)
        yield path


def kill_some(folder: str, cases: list[tuple[str, int]]) -> None:
    """A sample, and the control; in one child, as starting one takes longer than the kills."""
    paths = folders(folder)
    for name, step in cases:
        kill_at_calls(next(paths), name, step)
    kill_at_moments(next(paths), "replace", 5)
    kill_in_place(next(paths))


SAMPLE = [("replace stripes", 97), ("part again", 211), ("aggregate", 61)]


def test_some_operations_killed_at_some_calls(tmp_path: Path) -> None:
    run_in_fork(kill_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_killed_at_every_call(name: str, tmp_path: Path) -> None:
    run_in_fork(kill_at_calls, str(tmp_path), name, 1, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    run_in_fork(kill_at_moments, str(tmp_path), name, 60, timeout_s=3000)
