"""Ctrl-C in every operation and in loops over a loader: it ends promptly, leaves nothing, and no thread goes on."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.load.epoch import RunningEpoch
from featstore.storage import builddir, calls, directory, lock
from tests.campaigns import interrupts
from tests.campaigns.checks import BadStateError, report
from tests.campaigns.interrupts import (
    LARGE,
    LATEST_S,
    AtBytecode,
    expect_interrupts,
    interrupt_at_bytecodes,
    interrupt_at_calls,
    interrupt_at_moments,
    interrupt_large,
)
from tests.campaigns.operations import SCENARIOS
from tests.campaigns.test_failing_calls import files_in
from tests.support.library_threads import going_on, remaining
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork
from tests.system.test_faults import descriptors

pytestmark = pytest.mark.usefixtures("_program_server")


def test_ctrl_c_ends_a_training_loop(small):
    code = f"""
        import featstore, numpy, signal
        from tests.support.library_threads import going_on
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
        left = going_on(30)  # a thread that was being started ends by itself
        print("interrupted", left, len(g.features["x"][:5]))
        g.close()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "running\n"
    for _ in range(5):  # as a user would: CPython drops an interrupt that strikes within a destructor
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            rest, _ = child.communicate(timeout=60)
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
    has many threads, of which it has a WeakSet, that is one in a hundred. So it strikes again a second after CPython said so, as
    a user would. It does so after a minute in any case, and none may be lost that CPython does not report: the library would have
    swallowed it. CPython also says that a file is not closed where one strikes between an open and its ``with`` block: one
    interrupt in fifty may leave a descriptor or run files. Once the dataset is closed none of its memory is held.
    """
    struck = caught = 0
    lost: list[str] = []  # where CPython says so

    def strike(*_: object) -> None:
        nonlocal struck
        struck += 1
        raise KeyboardInterrupt

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        lost.append(f"{what.exc_value!r} in {what.object!r}")
        if isinstance(what.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 1, 60)

    def there() -> set[str]:
        return files_in(descriptors()) | set(glob.glob(f"{path}.runs/*"))

    signal.signal(signal.SIGALRM, strike)
    sys.unraisablehook = unraisable
    rng, left = np.random.default_rng(n), list[str]()
    with featstore.open(path, memory="64MiB") as g:
        with make_loader(g, featstore.NeighborSampler(g, [5]), np.arange(500), 1, labels=None, **options) as loader:
            next(iter(loader))
        before = there()
        for _ in range(n):
            loader = make_loader(g, featstore.NeighborSampler(g, [5]), np.arange(500), 1, labels=None, **options)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 0.03), 60)
                while True:
                    for _ in loader:
                        pass
            except KeyboardInterrupt as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                error.__traceback__ = error.__context__ = None  # its frames hold what was open
            except RuntimeError as error:  # Thread.start() itself was interrupted, between taking a lock and giving it back
                signal.setitimer(signal.ITIMER_REAL, 0)
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
            caught += 1
            loader.close()
            running = going_on(60)
            assert not running
            assert len(g.features["x"][:5]) == 5
            left += remaining(lambda: sorted(there() - before - set(left)), 10)  # what is to be collected, and rings, end
            assert len(left) <= 1 + caught // 50, left
    del loader  # its sampler has memory of its own
    gc.collect()
    assert g.budget.used == 0, g.memory_report()
    assert not [what for what in lost if not what.startswith(("KeyboardInterrupt", "ResourceWarning"))], lost
    reported = sum(what.startswith("KeyboardInterrupt") for what in lost)
    said = f"{struck - caught} of {struck} interrupts were lost, in {lost}"
    assert struck - caught <= reported, f"swallowed: {said}"
    assert reported <= 2 + n // 10, said
    report("interrupts of loops", options=str(options), interrupts=struck, dropped_by_cpython=reported, left=left)


INTERRUPTED = [
    {},
    {"prefetch": 0},
    {"strategy": "superbatch", "length": 40},
    {"strategy": "superbatch", "length": 40, "prefetch": 0},
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


def leave_open(folder: str) -> None:
    """A control, in the child: files have no owner, so what does not close them leaves them open."""
    for module in (builddir, calls, directory, lock):
        module.open_fd = os.open  # type: ignore[attr-defined]
    with pytest.raises(BadStateError, match="is open after an interrupt in"):
        interrupt_at_calls(folder, "replace", 11)


def swallow(folder: str) -> None:
    """A control, in the child: the removal of folders drops interrupts."""
    real = directory.remove_tree

    def remove_tree(path: str, *, quiet: bool = False) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            real(path, quiet=quiet)

    directory.remove_tree = remove_tree
    with pytest.raises(BadStateError, match="was swallowed"):
        interrupt_at_calls(folder, "edges replace", 3)


def come_late(folder: str) -> None:
    """A control, in the child: what cleans up takes longer than a second."""
    real = builddir.BuildDirectory._leave

    def leave(self: builddir.BuildDirectory, **options: bool) -> None:
        time.sleep(LATEST_S)
        real(self, **options)

    builddir.BuildDirectory._leave = leave  # type: ignore[method-assign]
    with pytest.raises(BadStateError, match=r"KeyboardInterrupt came after \d"):
        interrupt_at_calls(folder, "create", 23)


def close_again(path: str) -> None:
    """Interrupt the closing of a dataset at each bytecode, in the child, then close it again: all is closed while it lives on."""
    dropped, k = expect_interrupts(), 1
    with featstore.open(path, memory="64MiB", backend="pread") as g:
        g.features["x"].take_async([1]).result()
    before = descriptors()
    while True:
        g = featstore.open(path, memory="64MiB", backend="pread")
        g.features["x"].take_async([1]).result()
        featstore.NeighborSampler(g, [5]).sample(torch.arange(5))
        with AtBytecode(k) as interrupt, contextlib.suppress(KeyboardInterrupt):
            g.close()
        g.close()
        assert descriptors(before) == before, k
        assert g.budget.used == 0, k
        if interrupt.struck_s is None:
            break
        k += 1
    assert k > 100
    report("interrupts of closing", interrupts=k - 1, dropped_by_cpython=len(dropped))


def test_a_dataset_whose_closing_was_interrupted_is_closed_by_the_next_call(small) -> None:
    run_in_fork(close_again, os.fspath(small.path))


def leave_files(folder: str) -> None:
    """A control, in the child: an interrupted build is not removed."""
    real = builddir.remove_replaced
    builddir.remove_replaced = lambda path, *of_a_sweep: real(path, *of_a_sweep) if of_a_sweep else None
    with pytest.raises(BadStateError, match="interrupts left something"):
        interrupt_at_calls(folder, "create", 5)


def leave_threads(folder: str) -> None:
    """A control, in the child: an interrupted build leaves a thread."""
    interrupts.PATIENCE_S = 5
    real = builddir.BuildDirectory.__exit__

    def leave(self: builddir.BuildDirectory, *error: Any) -> None:
        if error[0] is KeyboardInterrupt:
            threading.Thread(target=time.sleep, args=[500], name="featstore-left", daemon=True).start()
        real(self, *error)

    builddir.BuildDirectory.__exit__ = leave  # type: ignore[method-assign]
    with pytest.raises(BadStateError, match=r"featstore-left.* go on"):
        interrupt_at_calls(folder, "create", 11)


def when_interrupted(name: str, does: Callable[[Path], object]) -> None:
    """Let an interrupted operation on a dataset, large no more, do something."""
    draws = np.random.default_rng(1)
    arrays = draws.integers(0, 20_000, (2, 100_000)), draws.standard_normal((20_000, 64), np.float32)
    interrupts.N_LARGE, interrupts.large_arrays, real = 20_000, lambda: arrays, LARGE[name]  # type: ignore[assignment]

    def call(root: Path) -> None:
        try:
            real(root)
        except KeyboardInterrupt:
            does(root)
            raise

    LARGE[name] = call


def spoil(folder: str) -> None:
    """A control, in the child: an interrupted operation changes a byte of a feature."""

    def change(root: Path) -> None:
        path = next((root / "g").glob("node.x.*.rows"))
        content = path.read_bytes()
        path.write_bytes(content[:-9000] + bytes([content[-9000] ^ 1]) + content[-8999:])

    when_interrupted("verify", change)
    with pytest.raises(BadStateError, match="neither the old state nor the new one"):
        interrupt_large(folder, "verify", 20)


def leave_temporaries(folder: str) -> None:
    """A control, in the child: an interrupted operation leaves a folder beside the dataset."""
    when_interrupted("verify", lambda root: (root / f"g.tmp-{time.monotonic_ns()}").mkdir())
    with pytest.raises(BadStateError, match="is left, where nothing was removed"):
        interrupt_large(folder, "verify", 20)


def leave_large_open(folder: str) -> None:
    """A control, in the child: an interrupted operation leaves a file open."""
    when_interrupted("convert", lambda root: os.open(root / "g" / "catalog.lmdb", os.O_RDONLY))
    with pytest.raises(BadStateError, match=r"catalog\.lmdb'} is open"):
        interrupt_large(folder, "convert", 20)


CONTROLS = [leave_open, swallow, come_late, leave_files, leave_threads, spoil, leave_temporaries, leave_large_open]


def leave_in_loops(path: str) -> None:
    """A control, in the child: a loop that ends leaves a file open."""
    real = RunningEpoch.close

    def close(self: RunningEpoch) -> None:
        os.open("/etc/passwd", os.O_RDONLY)
        real(self)

    RunningEpoch.close = close  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="/etc/passwd"):
        interrupt(path, 12, {})


def test_what_interrupted_loops_leave_is_noticed(small) -> None:
    run_in_fork(leave_in_loops, os.fspath(small.path))


def interrupt_some(folder: str, cases: list[tuple[str, int, int]]) -> None:
    """A sample, in one child."""
    for number, (name, step, bytecodes) in enumerate(cases):
        for what in ("calls", "bytecodes", "moments"):
            os.mkdir(f"{folder}/{number}-{what}")
        interrupt_at_calls(f"{folder}/{number}-calls", name, step)
        interrupt_at_bytecodes(f"{folder}/{number}-bytecodes", name, bytecodes)
        interrupt_at_moments(f"{folder}/{number}-moments", name, 3)


SAMPLE = [("replace", 37, 499), ("save again", 23, 499), ("append to stripes", 41, 499), ("infer named", 37, 499)]


def test_ctrl_c_in_some_operations(tmp_path: Path) -> None:
    run_in_fork(interrupt_some, str(tmp_path), SAMPLE)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_defect_is_noticed(control: Callable[[str], None], tmp_path: Path) -> None:
    run_in_fork(control, str(tmp_path))


def test_ctrl_c_in_a_large_operation(tmp_path: Path) -> None:
    run_in_fork(interrupt_large, str(tmp_path), "convert", 5)


@pytest.mark.stress
@pytest.mark.parametrize("name", LARGE)
def test_ctrl_c_in_every_large_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_large, str(tmp_path), name, 40, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c_at_every_call_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_at_calls, str(tmp_path), name, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c_at_every_bytecode_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_at_bytecodes, str(tmp_path), name, timeout_s=3400)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c_at_many_moments_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(interrupt_at_moments, str(tmp_path), name, 100, timeout_s=3000)
