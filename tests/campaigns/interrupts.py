"""Ctrl-C in every operation: at system calls, at bytecodes and at random moments; what it leaves, and how soon it comes out."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import numpy as np

import featstore
from featstore.testing.faults import Fault, sweep
from tests.campaigns.checks import BadStateError, prepared, report
from tests.campaigns.operations import KEY, contents, leftovers, sweep_as_a_writer
from tests.campaigns.test_failing_calls import files_in
from tests.campaigns.test_kills import CALLS
from tests.support.library_threads import going_on, remaining
from tests.system.test_faults import descriptors

__all__ = [
    "LARGE",
    "LATEST_S",
    "AtBytecode",
    "Struck",
    "expect_interrupts",
    "interrupt_at_bytecodes",
    "interrupt_at_calls",
    "interrupt_at_moments",
    "interrupt_large",
]

LATEST_S = 1.0  # from the signal until KeyboardInterrupt has left the operation
TRIES = 6  # at the same place, where it is later: a machine with other load may have had no time for it
PATIENCE_S = 30.0  # for threads to end
Outcome: TypeAlias = "tuple[BaseException | None, float | None, float]"  # what came out; when the interrupt came; the end
OURS = os.path.dirname(featstore.__file__) + os.sep
# Modules that open a file in Python's own bytecodes: an interrupt there may leave one.
OPENS_IN_PYTHON = ("tempfile.py", "shutil.py")
# Functions that remove files: an interrupt within one may leave what it was about to remove.
REMOVES = re.compile("leave|remove|sweep|unlink|discard")


def most_left(n_struck: int) -> int:
    """Return how many interrupts may leave something though nothing was being removed: between a call and the next bytecode."""
    return 2 + n_struck // 20


def expect_interrupts() -> list[str]:
    """List interrupts that CPython drops, in destructors and the like, and files that an interrupt leaves to be collected."""
    dropped = list[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = lambda what: dropped.append(f"{what.exc_value!r} in {what.object!r}")
    return dropped


class Struck:
    """An operation that is interrupted again and again; what is left after each is checked.

    ``n_left`` counts descriptors that interrupts left within modules that open files in Python, ``n_files_left`` interrupts that
    left files though nothing was being removed; :func:`most_left` bounds each. ``n_dropped`` counts interrupts that CPython
    dropped in destructors and callbacks, and reported; ``slowest_s`` is how late the latest KeyboardInterrupt was.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.ready, self._dropped = prepared(folder, name), expect_interrupts()
        self._before = descriptors()
        self.n_struck = self.n_dropped = self.n_left = self.n_files_left = 0
        self.slowest_s = 0.0

    def attempt(self) -> tuple[BaseException | None, float]:
        """Call the operation; return the KeyboardInterrupt that came out, if one did, and when that was."""
        try:
            self.ready.call()
        except KeyboardInterrupt as error:
            return error, time.monotonic()
        return None, time.monotonic()

    def strike(self, where: str, interrupted: Callable[[], Outcome]) -> float | None:
        """Attempt the operation, :meth:`check` what is left, and return when the interrupt came. Where it is late, try again."""
        for _ in range(TRIES):
            self.ready.fresh()
            error, struck_s, ended_s = interrupted()
            if error is None or struck_s is None or ended_s - struck_s <= LATEST_S:
                break
        self.check(error, where, struck_s, ended_s)
        return struck_s

    def check(self, error: BaseException | None, where: str, struck_s: float | None, ended_s: float) -> None:
        """Check what is left after ``error``. BadStateError: too much, or the interrupt was lost or late.

        ``struck_s`` is when the interrupt came, None where none did, and ``ended_s`` when the operation was over.
        """
        where = f"{self.ready.name}: {where}"
        reported = [what for what in self._dropped if what.startswith("KeyboardInterrupt")]
        assert len(reported) == len([what for what in self._dropped if not what.startswith("ResourceWarning")]), self._dropped
        if struck_s is not None:
            self.n_struck += 1
            if error is None and not reported:
                raise BadStateError(f"{where}: the interrupt was swallowed")
            if error is not None:
                self.slowest_s = max(self.slowest_s, ended_s - struck_s)
                if ended_s - struck_s > LATEST_S:
                    raise BadStateError(f"{where}: KeyboardInterrupt came after {ended_s - struck_s:.2f} s")
        opener, trace, removes = "", "", error is None or was_removing(error)
        if error is not None:  # its frames hold what was open: a handle not closed keeps its files from a sweep
            opener, trace = innermost(error), "".join(traceback.format_exception(error))
            error.__traceback__ = error.__context__ = error.__cause__ = None
            gc.collect()
        n_left, threads = self.ready.n_left, going_on(PATIENCE_S)
        if threads:
            raise BadStateError(f"{where}: {threads} go on\n{trace}")
        try:
            self.ready.is_new_after(error, where, may_leave=struck_s is not None)
        except BadStateError as bad:
            raise BadStateError(f"{bad}\n{trace}") from bad
        more = remaining(self._more, 10)
        if files_in(more) and os.path.basename(opener).partition(":")[0] not in OPENS_IN_PYTHON:
            raise BadStateError(f"{where}: {more} is open after an interrupt in {opener}")
        if more - files_in(more):
            raise BadStateError(f"{where}: {more} goes on")
        self._before = descriptors()
        self.n_left += len(files_in(more))
        self.n_files_left += self.ready.n_left > n_left and not removes
        for n in (self.n_left, self.n_files_left):
            if n > most_left(self.n_struck):
                raise BadStateError(f"{where}: {n} of {self.n_struck} interrupts left something\n{trace}")
        self.n_dropped += len(reported)
        self._dropped.clear()

    def _more(self) -> set[str]:
        """List what is open, and the threads, that were not there before the call."""
        numbers = {each.partition(":")[0] for each in self._before}  # the name of a file that is gone is another one
        more = {each for each in descriptors() if each.partition(":")[0] not in numbers}
        # Where several threads are at work, a pool has as many as were busy at once.
        return files_in(more) if self.ready.scenario.resumes else more

    def report(self, campaign: str, **figures: Any) -> None:
        counts = {"interrupts": self.n_struck, "dropped_by_cpython": self.n_dropped, "descriptors_left": self.n_left}
        counts |= {"slowest_ms": round(1000 * self.slowest_s), "left": self.ready.n_left, "states": self.ready.n_states}
        counts["left_not_in_removals"] = self.n_files_left
        report(campaign, operation=self.ready.name, **counts, **figures)


def innermost(error: BaseException) -> str:
    """The file whose code was at work when an error was raised, and the line."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{each.filename}:{each.lineno}" for each in reversed(frames) if each.filename != __file__), "")


def was_removing(error: BaseException) -> bool:
    """Tell whether files were being removed when an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(each.filename.startswith(OURS) and REMOVES.search(each.name) for each in frames)


# -- at system calls -------------------------------------------------------------------------------------------------------------


def interrupt_at_calls(folder: str, name: str, step: int = 1) -> None:
    """Interrupt an operation at every ``step``-th system call on files; in the child."""
    struck = Struck(folder, name)
    for fault in sweep(struck.ready.root, CALLS, "interrupt", step=step):
        struck.strike(f"interrupted at call {fault.k}", functools.partial(at_call, struck, fault))
    struck.report("interrupts at calls")


def at_call(struck: Struck, fault: Fault) -> Outcome:
    with fault:
        error, ended_s = struck.attempt()
    return error, fault.fired_s if fault.fired else None, ended_s


# -- at bytecodes ----------------------------------------------------------------------------------------------------------------


@functools.cache
def looks_for_signals(code: CodeType) -> frozenset[int]:
    """List the bytecodes after which CPython looks for signals: calls, backward jumps, and the beginning of a function."""
    names = ((each.offset, each.opname) for each in dis.get_instructions(code))
    return frozenset(at for at, name in names if name.startswith(("CALL", "RESUME")) or "BACKWARD" in name)


class AtBytecode:
    """Raise KeyboardInterrupt in this thread at the ``k``-th place in the library's bytecodes where a signal may come out.

    A place counts when it is met first. ``struck_s`` is when it was raised, None where there are fewer places; ``n`` is how many
    were met.
    """

    def __init__(self, k: int) -> None:
        self._k, self._met = k, set[tuple[int, int]]()
        self._codes = dict[int, tuple[CodeType, frozenset[int]]]()  # by id: hashing a code object takes long
        self.struck_s: float | None = None

    @property
    def n(self) -> int:
        return len(self._met)

    def __enter__(self) -> AtBytecode:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if id(code) not in self._codes:
            self._codes[id(code)] = code, looks_for_signals(code)
        looks, last, number = self._codes[id(code)][1], -1, id(code)

        def step(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal last
            if event == "exception":  # a call that raises leads to its handler at once
                last = -1
            elif event == "opcode":
                before, last = last, frame.f_lasti
                if before in looks and (number, before) not in self._met:
                    self._met.add((number, before))
                    if len(self._met) == self._k:
                        self.struck_s = time.monotonic()
                        raise KeyboardInterrupt
            return step

        return step


def interrupt_at_bytecodes(folder: str, name: str, step: int = 1) -> None:
    """Interrupt an operation at every ``step``-th place in bytecodes where a signal may come out; in the child."""
    struck, k = Struck(folder, name), 1
    while struck.strike(f"interrupted at bytecode {k}", functools.partial(at_bytecode, struck, k)) is not None:
        k += step
    assert struck.n_struck > 1
    struck.report("interrupts at bytecodes", places_below=k, step=step)


def at_bytecode(struck: Struck, k: int) -> Outcome:
    with AtBytecode(k) as interrupt:
        error, ended_s = struck.attempt()
    return error, interrupt.struck_s, ended_s


# -- at random moments -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def strikes() -> Iterator[list[float]]:
    """List when an alarm's KeyboardInterrupt is raised."""
    raised = list[float]()

    def strike(*_: object) -> None:
        raised.append(time.monotonic())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        yield raised
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupt_at_moments(folder: str, name: str, n: int) -> None:
    """Interrupt an operation ``n`` times at random moments; in the child."""
    struck, draws, usual_s = Struck(folder, name), random.Random(name), 0.05
    while struck.n_struck < n:
        after_s = draws.uniform(1e-4, usual_s)
        struck_s = struck.strike(f"interrupted after {after_s} s", functools.partial(at_moment, struck.ready.call, after_s))
        usual_s = usual_s * 0.9 if struck_s is None else min(usual_s * 1.1, 5)
    struck.report("interrupts at moments")


def at_moment(call: Callable[[], object], after_s: float) -> Outcome:
    error: BaseException | None = None
    with strikes() as raised:
        began_s = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as caught:
            error = caught
        ended_s = time.monotonic()
    return error, began_s + after_s if raised else None, ended_s


# -- of large operations ---------------------------------------------------------------------------------------------------------


N_LARGE = 400_000


@functools.cache
def large_arrays() -> tuple[Any, Any]:
    draws = np.random.default_rng(1)
    return draws.integers(0, N_LARGE, (2, 6_000_000)), draws.standard_normal((N_LARGE, 64), np.float32)


def make_large(root: Path) -> None:
    """A dataset whose operations take seconds, so that what looks for no signal is noticed by its delay."""
    edges, x = large_arrays()
    options: dict[str, Any] = {"memory": "96MiB", "overwrite": True, "progress": False}
    featstore.OutOfCoreGraph.from_edge_index(root / "g", edges, N_LARGE, {"x": x}, **options).close()


def on_large(use: Callable[[featstore.OutOfCoreGraph], object]) -> Callable[[Path], None]:
    def call(root: Path) -> None:
        with featstore.open(root / "g", memory="96MiB") as g:
            use(g)

    return call


def train(g: featstore.OutOfCoreGraph) -> None:
    for _ in featstore.Loader(g, featstore.NeighborSampler(g, [10, 10]), np.arange(0, N_LARGE, 2), 1000):
        pass


LARGE: dict[str, Callable[[Path], None]] = {
    "from_edge_index": make_large,
    "convert": lambda root: featstore.convert(root / "g", topology="chunked", memory="96MiB", progress=False),
    "convert back": lambda root: featstore.convert(root / "g", topology="csc", memory="96MiB", progress=False),
    "verify": on_large(lambda g: g.verify(progress=False)),
    "aggregate": on_large(lambda g: g.aggregate("x", "mean", name="m", overwrite=True, progress=False)),
    "partition": on_large(lambda g: featstore.partition(g, 8, "fennel", progress=False)),
    "cache": on_large(lambda g: (g.cache("x", 0.2, "degree"), g.cache_neighbors("16MiB", "degree"))),
    "epoch": on_large(train),
}
REVERSE = {"convert": "convert back", "convert back": "convert"}


def large_state(root: Path) -> str:
    """Digest all that a large dataset holds, bit for bit, whichever generation of files it is."""
    found = contents(root / "g")
    found["extra"] = {key: value for key, value in json.loads(found["extra"]).items() if key != KEY}  # which an epoch measures
    del found["dataset"]["generation"], found["names"]  # others that lie there are what leftovers() lists
    return hashlib.sha256(re.sub(r"\.\d+\.rows", ".rows", repr(found)).encode()).hexdigest()


def interrupt_large(folder: str, name: str, n: int) -> None:
    """Interrupt a large operation ``n`` times at random moments, in the child: KeyboardInterrupt comes within a second.

    Nothing is flushed: no interrupt ends a flush, and a drive that others use may take seconds for a large file.
    """
    os.fsync = os.fdatasync = lambda fd: None
    root, call, draws = Path(folder), LARGE[name], random.Random(name)
    dropped, delays, lost = expect_interrupts(), [0.0], 0
    make_large(root)
    if name == "convert back":
        LARGE["convert"](root)
    began_s = time.monotonic()
    call(root)
    usual_s = time.monotonic() - began_s
    new = large_state(root)
    if name in REVERSE:
        LARGE[REVERSE[name]](root)
    before, known, lies, n_left = descriptors(), {large_state(root), new}, set[str](), 0
    while len(delays) <= n:
        after_s = draws.uniform(0, usual_s)
        for _ in range(TRIES):
            error, struck_s, ended_s = at_moment(functools.partial(call, root), after_s)
            late_s = 0.0 if error is None or struck_s is None else ended_s - struck_s
            if late_s <= LATEST_S:
                break
        where = f"{name}: interrupted after {after_s:.2f} s"
        if late_s > LATEST_S:
            raise BadStateError(f"{where}: KeyboardInterrupt came {late_s:.2f} s late") from error
        removes, trace = error is None or was_removing(error), "".join(traceback.format_exception(error)) if error else ""
        if error is not None:  # its frames hold what was open
            error.__traceback__ = error.__context__ = error.__cause__ = None
        if more := remaining(lambda: files_in(descriptors()) - files_in(before), 10):
            raise BadStateError(f"{where}: {more} is open\n{trace}")
        if threads := going_on(PATIENCE_S):
            raise BadStateError(f"{where}: {threads} go on\n{trace}")
        if (found := large_state(root)) not in known:
            raise BadStateError(f"{where}: {found} is neither the old state nor the new one: {known}\n{trace}")
        # What ends a pass stays, for the next call.
        lies, before_call = {each for each in leftovers(root, root) if not (name == "aggregate" and "making." in each)}, lies
        left = lies - before_call
        n_left += bool(left) and not removes
        if struck_s is None:
            usual_s *= 0.9
            if left:
                raise BadStateError(f"{name}: {left} is left by a call that was not interrupted")
        else:
            lost += error is None
            delays.append(late_s)
        if n_left > most_left(len(delays)):
            raise BadStateError(f"{where}: {left} is left, where nothing was removed\n{trace}")
        if name in REVERSE and found == new:  # what is interrupted starts from the other form
            LARGE[REVERSE[name]](root)
    assert lost <= len([what for what in dropped if what.startswith("KeyboardInterrupt")]), (name, dropped)
    call(root)
    assert large_state(root) == new, name
    sweep_as_a_writer(root)
    assert not leftovers(root, root), name
    figures = {"interrupts": n, "dropped_by_cpython": lost, "slowest_ms": round(1000 * max(delays)), "left": n_left}
    report("interrupts of large operations", operation=name, **figures)
