"""Races of eight threads over loops of every strategy: right rows, no hang, nothing left; and defects, which must be noticed."""

from __future__ import annotations

import os
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
    run_in_fork(race, str(tmp_path), 3, 1, 1.5)


@pytest.mark.stress
def test_threads_race_for_ten_minutes(tmp_path: Path) -> None:
    run_in_fork(race, str(tmp_path), 600, int.from_bytes(os.urandom(2), "little"), races.ROUND_S, timeout_s=1800)


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
    """Each round keeps 64 MiB, however many epochs it has."""
    real, kept = races.Races.round, list[Any]()

    def begin(self: races.Races, number: int, seconds: float) -> None:
        kept.append(np.ones(64 << 20, np.uint8))
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
    leave_descriptors: (r"is left, or was closed", 50),
    leave_threads: (r"go on|held by nobody|is left|a closed loop delivers", 50),
    keep_memory: ("memory grows", 4),
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
