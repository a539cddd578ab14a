"""Races of eight threads over loops of every strategy: right rows, no hang, nothing left; and defects, which must be noticed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.cache.gate import Gate
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
    """Slots are overwritten while other threads copy hits from them."""
    Gate.enter = Gate.leave = lambda self, *depth: None  # type: ignore[method-assign, assignment]
    Gate.write = lambda self: nullcontext()  # type: ignore[method-assign, assignment, return-value]


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
    """Each epoch keeps 4 MiB."""
    real, kept = RunningEpoch.__init__, list[Any]()

    def begin(self: RunningEpoch, *args: Any, **options: Any) -> None:
        kept.append(np.ones(4 << 20, np.uint8))
        real(self, *args, **options)

    RunningEpoch.__init__ = begin  # type: ignore[method-assign]


def hang() -> None:
    """A thread that closes an epoch waits for what never comes."""
    races.PATIENCE_S = 4.0
    RunningEpoch.close = lambda self: threading.Event().wait()  # type: ignore[method-assign, assignment, return-value]


DEFECTS: dict[Callable[[], None], str] = {
    unguarded: "wrong rows|other batch",
    leave_descriptors: r"is left, or was closed",
    leave_threads: r"go on|held by nobody|is left|a closed loop delivers",
    keep_memory: "memory grows",
    hang: "Timeout",
}


def race_with(folder: str, defect: Callable[[], None]) -> None:
    defect()
    races.races(folder, 8, 1, round_s=2.0)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_noticed(defect: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as noticed:
        run_in_fork(race_with, str(tmp_path), defect)
    assert re.search(DEFECTS[defect], str(noticed.value)), noticed.value
