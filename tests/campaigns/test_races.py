"""Races of eight threads over loops of every strategy: right rows, no hang, nothing left; and defects, which must be noticed."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.cache.gate import Gate
from featstore.cache.table import FeatureCache
from featstore.load.epoch import RunningEpoch
from featstore.load.pipeline import Pipeline
from tests.campaigns import races
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")


def race(folder: str, seconds: float, seed: int, round_s: float) -> None:
    """Run the campaign, in the child; each thread has done something in each round."""
    found = races.races(folder, seconds, seed, round_s=round_s)
    assert sum(found["acts"].values()) >= races.N_THREADS * found["rounds"], found


def test_threads_race(tmp_path: Path) -> None:
    run_in_fork(race, str(tmp_path), 4.5, 1, 1.5)


@pytest.mark.stress
def test_threads_race_for_ten_minutes(tmp_path: Path) -> None:
    run_in_fork(race, str(tmp_path), 600, int.from_bytes(os.urandom(2), "little"), races.ROUND_S, timeout_s=1800)


# -- growth ----------------------------------------------------------------------------------------------------------------------


def resident(
    n: int, leak_mib: float = 0, *, noise_mib: float = 0, every: int = 1, warm_mib: float = 60, late_mib: float = 0
) -> list[int]:
    """List the memory of ``n`` rounds, the first of which warm up. ``late_mib`` comes once, in the last quarter."""
    draws, found = random.Random(n), list[int]()
    for number in range(n):
        warm = warm_mib * min(1, 3 * number / n)
        late = late_mib * (number >= n * 3 // 4)
        mib = 200 + warm + late + leak_mib * (number // every) + draws.uniform(-noise_mib, noise_mib)
        found.append(int(mib * 2**20))
    return found


@pytest.mark.parametrize("n", [4, 6, 7, 20, 60])
def test_memory_that_is_noisy_or_grows_once_does_not_grow(n: int) -> None:
    for of in (resident(n), resident(n, noise_mib=6), resident(n, noise_mib=2, late_mib=40 if n > 4 else 0)):
        assert races.grown_bytes(of) < races.GROWTH_BYTES, of
    assert abs(races.grown_bytes(resident(60, noise_mib=6))) < races.GROWTH_BYTES / 2


@pytest.mark.parametrize(
    "of",
    [
        resident(60, 2),
        resident(60, 2, noise_mib=10),
        resident(60, 1, noise_mib=4),
        resident(60, 10, every=5),
        resident(20, 3, noise_mib=4),
        resident(6, 12, noise_mib=2),
        resident(5, 16),
        resident(2, 32, warm_mib=0),
    ],
)
def test_memory_that_grows_steadily_grows(of: list[int]) -> None:
    assert races.grown_bytes(of) > races.GROWTH_BYTES, of


# -- defects ---------------------------------------------------------------------------------------------------------------------


def unguarded() -> None:
    """Slots are overwritten while other threads copy hits from them, which they begin late, so that no luck is needed."""
    Gate.enter = Gate.leave = lambda self, *depth: None  # type: ignore[method-assign, assignment]
    Gate.write = lambda self: nullcontext()  # type: ignore[method-assign, assignment, return-value]
    plan = FeatureCache.plan

    def plan_early(self: FeatureCache, *args: Any) -> Any:
        found = plan(self, *args)
        time.sleep(0.01)
        return found

    FeatureCache.plan = plan_early  # type: ignore[method-assign]


def leave_descriptors() -> None:
    """The end of an epoch leaves a file open."""
    real = RunningEpoch.close

    def close(self: RunningEpoch) -> None:
        os.open("/etc/passwd", os.O_RDONLY)
        real(self)

    RunningEpoch.close = close  # type: ignore[method-assign]


def leave_threads() -> None:
    """The threads of a loop that is left early go on waiting."""
    Pipeline.close = lambda self, timeout=None: None  # type: ignore[method-assign, assignment]


def keep_memory() -> None:
    """Each round keeps 20 MiB, however many epochs it has: less than all rounds may keep."""
    real, kept = races.Races.round, list[Any]()

    def begin(self: races.Races, number: int, seconds: float) -> None:
        kept.append(np.ones(20 << 20, np.uint8))
        real(self, number, seconds)

    races.Races.round = begin  # type: ignore[method-assign]


def leave_where_interrupted() -> None:
    """An interrupt leaves a file open; the rounds without interrupts leave none."""
    real = races.Races.interrupted

    def interrupted(self: races.Races, draws: random.Random) -> str:
        found = real(self, draws)
        if found == "interrupted":
            os.open("/etc/passwd", os.O_RDONLY)
        return found

    races.Races.interrupted = interrupted  # type: ignore[method-assign]


def leave_once() -> None:
    """A round without interrupts leaves one file, after one with interrupts."""
    real, rounds = races.Races.round, itertools.count()

    def begin(self: races.Races, number: int, seconds: float) -> None:
        if next(rounds) == 2:
            os.open("/etc/passwd", os.O_RDONLY)
        real(self, number, seconds)

    races.Races.round = begin  # type: ignore[method-assign]


def hang() -> None:
    """A thread that closes an epoch waits for what never comes."""
    races.PATIENCE_S = 2.0
    RunningEpoch.close = lambda self: threading.Event().wait()  # type: ignore[method-assign, assignment, return-value]


# What is said, and after how many rounds at the latest: the campaign ends where something is noticed, which on a busy machine
# takes more of them. Growth is looked for at the end.
DEFECTS: dict[Callable[[], None], tuple[str, int]] = {
    unguarded: ("wrong rows|other batch", 50),
    leave_descriptors: (r"/etc/passwd.* is left", 50),
    leave_threads: (r"go on|held by nobody|is left|a closed loop delivers", 50),
    leave_where_interrupted: (r"interrupts left more than \d+: .*/etc/passwd", 50),
    leave_once: (r"round 2: \[.*/etc/passwd.*\] is left", 3),
    keep_memory: ("memory grows", 5),
    hang: ("Timeout", 50),
}


def race_with(folder: str, defect: Callable[[], None], n_rounds: int) -> None:
    defect()
    races.races(folder, 0.5 * n_rounds, 1, round_s=0.5)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_noticed(defect: Callable[[], None], tmp_path: Path) -> None:
    said, n_rounds = DEFECTS[defect]
    with pytest.raises(AssertionError) as noticed:
        run_in_fork(race_with, str(tmp_path), defect, n_rounds)
    assert re.search(said, str(noticed.value)), noticed.value
