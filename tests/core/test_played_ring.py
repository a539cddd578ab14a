"""Reads over an io_uring whose kernel is played (played_ring.c): the queue stays full; refusals end with nothing in flight."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
MAX_REFUSALS = 400  # uring.c
OS_ERROR, SIGNAL = 1, 4  # FS_ERR_OS, FS_ERR_SIGNAL
REFUSALS = {"a": errno.EAGAIN, "b": errno.EBUSY, "x": errno.ENXIO}

LOOPS = pytest.mark.parametrize("loop", ["gather", "stream"])


class Ending(NamedTuple):
    """The last words of the program."""

    n_done: int
    kind: int
    number: int
    n_flying: int
    n_sleeps: int


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "played_ring"
    include = ROOT / "src_cython" / "featstore" / "_core" / "kernels"
    command = [os.environ.get("CC", "gcc"), "-std=gnu11", "-O1", "-Wno-unused-function", f"-I{include}", "-pthread", "-o", path]
    subprocess.run([*command, Path(__file__).with_name("played_ring.c")], check=True, capture_output=True, text=True)
    return path


def play(program: Path, loop: str, depth: int, n_reads: int, script: str, newest: int = 0) -> tuple[list[list[int]], Ending]:
    """Return the waits, (reads in flight, reads not begun) each, and how it ended."""
    command = [program, loop, str(depth), str(n_reads), str(newest), script]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    *waits, ending = ([int(word) for word in line.split()] for line in lines)
    return waits, Ending(*ending)


@LOOPS
@pytest.mark.parametrize("newest_first", [0, 1])
@pytest.mark.parametrize(("depth", "n_reads"), [(1, 5), (8, 5), (8, 100), (64, 65), (64, 1000)])
def test_the_queue_is_full_at_every_wait(program: Path, depth: int, n_reads: int, newest_first: int, loop: str) -> None:
    """One read lands a wait, the oldest or the newest; another takes its place before the next wait."""
    waits, ending = play(program, loop, depth, n_reads, "r", newest_first)
    assert ending == (n_reads, 0, 0, 0, 0)
    assert len(waits) == n_reads
    assert [(flying, left) for flying, left in waits if flying < depth and left] == []
    assert max(flying for flying, _ in waits) == min(depth, n_reads)


@LOOPS
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_kernel_that_refuses_for_ever_is_an_error(program: Path, loop: str, refusal: str) -> None:
    """At once where it means it, after a while where it lacks memory; reads that it took land before that."""
    for taken in ("", "h"):
        _, ending = play(program, loop, 8, 20, taken + refusal)
        assert (ending.kind, ending.number, ending.n_flying) == (OS_ERROR, REFUSALS[refusal], 0)
        assert ending.n_sleeps == 8 * len(taken) + (0 if refusal == "x" else MAX_REFUSALS - 1)


@LOOPS
def test_a_kernel_that_lacks_memory_for_a_while_is_waited_for(program: Path, loop: str) -> None:
    script = "a" * (MAX_REFUSALS - 1) + "p" + "b" * (MAX_REFUSALS - 1) + "r"
    _, ending = play(program, loop, 8, 20, script)
    assert ending[:4] == (20, 0, 0, 0)


def test_a_signal_ends_a_slow_gather(program: Path) -> None:
    """Also where each wait begins reads, and so returns their number and not that a signal came."""
    _, ending = play(program, "gather", 4, 500, "k")
    assert (ending.kind, ending.n_flying) == (SIGNAL, 0)
    assert ending.n_done <= 20  # of 20 ms each


@LOOPS
@settings(max_examples=30, deadline=None)
@given(script=st.text("rhpabx", max_size=12), last=st.sampled_from("rabx"), n_reads=st.integers(1, 40), newest=st.booleans())
def test_any_refusals(program: Path, loop: str, script: str, last: str, n_reads: int, newest: bool) -> None:
    """All rows are right or an error says why, nothing is in flight then, and the ring can be used again (the program checks)."""
    _, ending = play(program, loop, 8, n_reads, script + last, int(newest))
    assert ending.n_flying == 0
    if ending.kind:
        assert ending.kind == OS_ERROR
        assert ending.number in [REFUSALS[letter] for letter in script + last if letter in REFUSALS]
    else:
        assert ending.n_done == n_reads
    if last == "r":
        assert bool(ending.kind) <= ("x" in script)
