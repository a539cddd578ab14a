"""Budgets from the least to ample, in a control group: each run within its budget and 64 MiB, and errors whose numbers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.load.stages import Stages
from tests.memory.budgets import CASES, Case, epochs_at_budgets, in_a_group

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
