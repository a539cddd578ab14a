"""Budgets from the least to ample, in a control group: each run within its budget and 64 MiB, and errors whose numbers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.load.stages import Stages
from tests.memory.budgets import CASES, EXCEPTIONS, Budgeted, Case, Named, Refused, epochs_at_budgets, in_a_group

pytestmark = pytest.mark.usefixtures("_program_server")

SOME = [Case("superbatch", "neighbor", "chunked"), Case("streamed", "labor", "csc", history=True)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_some_budgets_are_kept(tmp_path: Path, case: Case) -> None:
    in_a_group(str(tmp_path), case, 2)


@pytest.mark.stress
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fifty_budgets_are_kept(tmp_path: Path, case: Case) -> None:
    in_a_group(str(tmp_path), case, 50)


def hide_memory(*arguments: Any) -> None:
    """A control, in the child: each epoch holds 80 MiB that no budget counts."""
    real, hidden = Stages.begin, list[Any]()

    def begin(self: Stages, *args: Any) -> None:
        hidden[:] = [np.ones(80 << 20, np.uint8)]
        real(self, *args)

    Stages.begin = begin  # type: ignore[method-assign]
    epochs_at_budgets(*arguments)


def test_memory_that_no_budget_counts_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"SIGKILL|bytes beside a budget"):
        in_a_group(str(tmp_path), SOME[0], 4, run=hide_memory)


class Told(Budgeted):
    """A case whose errors name what the test says: less than the least of a call, and it names what ``names`` has for it."""

    def __init__(self, case: Case, least: tuple[int, int, int], names: dict[int, int | None]) -> None:
        self.case, self._least, self._names, self.n_wrong = case, least, names, 0
        self.ran = list[int]()

    def run(self, memory: int) -> Refused | None:
        self.ran.append(memory)
        short = [call for call, least in enumerate(self._least) if memory < least]
        return Refused(short[0], self._names.get(memory, 1000), f"{memory} are too little") if short else None


PLAIN, OF_EPOCHS = Case("ondemand", "neighbor", "csc"), Case("ondemand", "epoch", "csc")
WRONG = {
    "none": (PLAIN, (0, 0, 100), {50: None}, "50 are too little"),
    "less": (PLAIN, (0, 0, 100), {50: 40}, "50 are too little"),
    "one that is too little": (PLAIN, (0, 0, 100), {50: 99}, "named is too little: 99"),
    "one that the call before refuses": (PLAIN, (0, 100, 100), {50: 99}, "named is too little: 99"),
    "too little for open": (PLAIN, (100, 200, 200), {50: 99}, "open in.*named is too little: 99"),
    "four that are too little": (OF_EPOCHS, (0, 0, 100), {n: n + 1 for n in range(50, 55)}, "named is too little: 54"),
    "much more than the least": (PLAIN, (0, 0, 100), {50: 404}, "404, much more than 101"),
    "much more than open needs": (PLAIN, (100, 0, 200), {50: 900}, "900, much more than 225"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_numbers_are_noticed(what: str) -> None:
    case, least, names, message = WRONG[what]
    with pytest.raises(AssertionError, match=message):
        Told(case, least, names).accepted(50)


def test_right_numbers_are_accepted() -> None:
    """Each call names what it needs itself, at most four times as much; and an exception is one."""
    told = Told(PLAIN, (100, 200, 300), {50: 100, 100: 350, 350: 360})
    assert told.accepted(50) == 350
    assert told.ran == [50, 100, 350]  # a quarter of each was tried before, or is less than what was
    assert Told(PLAIN, (0, 0, 100), {10: 399}).accepted(10) == 399
    of_epochs = Told(OF_EPOCHS, (0, 0, 100), {n: n + 1 for n in range(50, 53)} | {53: 100})
    assert of_epochs.accepted(50) == 100
    assert of_epochs.n_wrong == 3


def test_each_exception_is_of_cases() -> None:
    assert {case.named for case in CASES} == {Named(), *EXCEPTIONS.values()}
