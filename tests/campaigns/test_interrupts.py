"""Ctrl-C in every operation and in loops over a loader: it ends promptly, leaves nothing, and no thread goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.testing.faults import sweep
from tests.campaigns.checks import prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.campaigns.test_failing_calls import files_in
from tests.campaigns.test_kills import CALLS
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork
from tests.system.test_faults import descriptors

pytestmark = pytest.mark.usefixtures("_program_server")


def test_ctrl_c_ends_a_training_loop(small):
    code = f"""
        import featstore, numpy, signal, threading, time
        g = featstore.open({os.fspath(small.path)!r}, memory="64MiB")
        loader = featstore.Loader(g, featstore.NeighborSampler(g, [5]), numpy.arange(500), 1)
        try:
            while True:
                for batch in loader:
                    if batch.index == 20:
                        print("running", flush=True)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # only after this the traceback, and with it perhaps an iterator, is gone
        deadline = time.monotonic() + 30
        while left := [t.name for t in threading.enumerate() if t.name.startswith("featstore-") and t.is_alive()]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # a thread that was being started ends by itself
        print("interrupted", left, len(g.features["x"][:5]))
        g.close()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "running\n"
    for _ in range(12):  # as a user would: CPython drops an interrupt that strikes within a destructor
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            rest, _ = child.communicate(timeout=10)
            break
    else:
        child.kill()
        child.communicate()
        raise AssertionError("it goes on")
    assert rest.splitlines()[-1] == "interrupted [] 5"
    assert child.returncode == 0


def interrupt(path: str, n: int, options: dict) -> None:
    """Interrupt loops ``n`` times at random moments; in the child, whose main thread signals reach.

    CPython drops an interrupt that strikes within a destructor or the callback of a weak reference, and says so; where an epoch
    has many threads, of which it has a WeakSet, that is one in a hundred. So it strikes again after five seconds, as a user
    would. None may be lost that CPython does not report: the library would have swallowed it. It also says that a file is not
    closed where one strikes between an open and its ``with`` block.
    """
    struck = caught = 0
    lost: list[str] = []  # where CPython says so

    def strike(*_: object) -> None:
        nonlocal struck
        struck += 1
        raise KeyboardInterrupt

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        lost.append(f"{what.exc_value!r} in {what.object!r}")

    signal.signal(signal.SIGALRM, strike)
    sys.unraisablehook = unraisable
    rng = np.random.default_rng(n)
    with featstore.open(path, memory="64MiB") as g:
        for _ in range(n):
            loader = make_loader(g, featstore.NeighborSampler(g, [5]), np.arange(500), 1, labels=None, **options)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 0.03), 5.0)
                while True:
                    for _ in loader:
                        pass
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except RuntimeError as error:  # Thread.start() itself was interrupted, between taking a lock and giving it back
                signal.setitimer(signal.ITIMER_REAL, 0)
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
            caught += 1
            loader.close()
            deadline = time.monotonic() + 60
            # Of a start() that was interrupted before there was a thread, enumerate() goes on to list the object.
            while left := [t.name for t in threading.enumerate() if t.name.startswith("featstore-") and t.is_alive()]:
                assert time.monotonic() < deadline, left
                time.sleep(0.001)
            assert len(g.features["x"][:5]) == 5
    assert not [what for what in lost if not what.startswith(("KeyboardInterrupt", "ResourceWarning"))], lost
    reported = sum(what.startswith("KeyboardInterrupt") for what in lost)
    said = f"{struck - caught} of {struck} interrupts were lost, in {lost}"
    assert struck - caught <= reported, f"swallowed: {said}"
    assert reported <= 2 + n // 10, said
    report("interrupts of loops", options=str(options), interrupts=struck, dropped_by_cpython=reported)


INTERRUPTED = [
    {},
    {"prefetch": 0},
    {"strategy": "superbatch", "superbatch": 40},
    {"strategy": "superbatch", "superbatch": 40, "prefetch": 0},
    {"device": "meta"},
]


@pytest.mark.parametrize("options", INTERRUPTED[2::2], ids=str)
def test_ctrl_c_at_any_moment(small, options):
    run_in_fork(interrupt, os.fspath(small.path), 12, options)


@pytest.mark.stress
@pytest.mark.parametrize("options", INTERRUPTED, ids=str)
def test_ctrl_c_at_many_moments(small, options):
    run_in_fork(interrupt, os.fspath(small.path), 10_000, options, timeout_s=1800)


# -- operations ------------------------------------------------------------------------------------------------------------------


def expect_interrupts() -> list[str]:
    """List interrupts that CPython drops, in destructors and the like, and files that an interrupt leaves to be collected."""
    dropped = list[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = lambda what: dropped.append(f"{what.exc_value!r} in {what.object!r}")
    return dropped


class Struck:
    """An operation that is interrupted again and again; what is left after each is checked.

    CPython may raise KeyboardInterrupt between a call that opened a file and the assignment of its number, which nobody can
    close then, and within what closes others. ``n_left`` counts such descriptors, ``n_dropped`` interrupts that CPython dropped,
    ``n_unseen`` those that came to nothing without a word.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.ready, self._dropped = prepared(folder, name), expect_interrupts()
        self._before = descriptors()
        self.n_struck = self.n_dropped = self.n_left = self.n_unseen = 0

    def check(self, error: BaseException | None, where: str, is_struck: bool) -> None:
        """Check what is left after ``error``."""
        where = f"{self.ready.name}: {where}"
        reported = [what for what in self._dropped if what.startswith("KeyboardInterrupt")]
        assert len(reported) == len([what for what in self._dropped if not what.startswith("ResourceWarning")]), self._dropped
        self.n_unseen += bool(is_struck and error is None and not reported)
        assert self.n_unseen <= 1 + self.n_struck // 50, f"{where}: the interrupt was swallowed"
        self.ready.is_new_after(error, where, may_leave=is_struck)
        if error is not None:  # its frames hold what was open
            error.__traceback__ = error.__context__ = error.__cause__ = None
        found = descriptors(self._before, 1.0)
        number = {each.partition(":")[0] for each in self._before}  # the name of a file that is gone is another one
        more = {each for each in found if each.partition(":")[0] not in number}
        assert is_struck or not more, (where, more)
        assert self.ready.scenario.resumes or not more - files_in(more), (where, more)
        self._before = found
        self.n_left += len(more)
        self.n_struck += is_struck
        self.n_dropped += len(reported)
        self._dropped.clear()

    def report(self, campaign: str, **figures: Any) -> None:
        counts = {"interrupts": self.n_struck, "dropped_by_cpython": self.n_dropped, "unseen": self.n_unseen}
        counts |= {"descriptors_left": self.n_left}
        report(campaign, operation=self.ready.name, **counts, **figures, left=self.ready.n_left, states=self.ready.n_states)


def interrupt_at_calls(folder: str, name: str, step: int = 1) -> None:
    """Interrupt an operation at every ``step``-th system call on files; in the child."""
    struck = Struck(folder, name)
    ready = struck.ready
    for fault in sweep(ready.root, CALLS, "interrupt", step=step):
        ready.fresh()
        error: BaseException | None = None
        with fault:
            try:
                ready.call()
            except KeyboardInterrupt as caught:
                error = caught
        struck.check(error, f"interrupted at call {fault.k}", bool(fault.fired))
    struck.report("interrupts at calls")


def interrupt_at_moments(folder: str, name: str, n: int) -> None:
    """Interrupt an operation ``n`` times at random moments; in the child."""
    struck, draws, usual_s, slowest_s = Struck(folder, name), random.Random(name), 0.05, 0.0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    while struck.n_struck < n:
        struck.ready.fresh()
        error: BaseException | None = None
        after_s, began = draws.uniform(1e-4, usual_s), time.perf_counter()
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            struck.ready.call()
        except KeyboardInterrupt as caught:
            error = caught
        lasted_s = time.perf_counter() - began
        is_done = signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
        if error is not None:
            slowest_s = max(slowest_s, lasted_s - after_s)
        usual_s = min(usual_s * 1.1, 5) if not is_done else min(usual_s * 0.9, lasted_s)
        struck.check(error, f"interrupted after {after_s} s", not is_done)
    struck.report("interrupts at moments", slowest_ms=round(1000 * slowest_s))


def interrupt_some(folder: str, cases: list[tuple[str, int]]) -> None:
    """A sample, in one child."""
    for number, (name, step) in enumerate(cases):
        os.mkdir(f"{folder}/{number}")
        interrupt_at_calls(f"{folder}/{number}", name, step)
        os.mkdir(f"{folder}/{number}-moments")
        interrupt_at_moments(f"{folder}/{number}-moments", name, 3)


SAMPLE = [("replace", 37), ("save again", 23), ("append to stripes", 41), ("infer named", 37)]


def test_ctrl_c_in_some_operations(tmp_path: Path) -> None:
    run_in_fork(interrupt_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c_at_every_call_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_at_calls, str(tmp_path), name, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c_at_many_moments_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_at_moments, str(tmp_path), name, 100, timeout_s=3000)
