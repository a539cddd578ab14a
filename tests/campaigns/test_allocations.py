"""Each allocation of every operation and of epochs fails in turn: MemoryError, nothing is left, and the next call works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from featstore.testing.faults import Fault
from tests.campaigns.checks import prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.campaigns.test_failing_calls import fail_calls
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

WAYS = ("alloc", "core_alloc")


def lack_memory(folder: str, name: str, step: int = 1) -> None:
    """Fail every ``step``-th allocation, of 32 KiB and more, and those of any size that the core asks for; in the child."""
    ready, figures = prepared(folder, name), dict[str, int]()
    for way in WAYS:
        ready.fresh()
        with Fault(ready.root, way, "ENOMEM", k=1 << 40) as fault:
            ready.call()
        figures[way] = fault.calls
        if fault.calls:
            figures[f"{way} failed"], figures[f"{way} errors"] = fail_calls(ready, way, "ENOMEM", step)
    assert any(figures[way] for way in WAYS)
    report("allocations", operation=name, **figures)


def lack_some(folder: str, cases: list[tuple[str, int]]) -> None:
    """A sample, in one child."""
    for number, (name, step) in enumerate(cases):
        os.mkdir(f"{folder}/{number}")
        lack_memory(f"{folder}/{number}", name, step)


SAMPLE = [("create", 9), ("aggregate", 9), ("epoch", 17), ("layout", 13)]


def test_some_allocations_fail(tmp_path: Path) -> None:
    run_in_fork(lack_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_allocation_fails(name: str, tmp_path: Path) -> None:
    run_in_fork(lack_memory, str(tmp_path), name, timeout_s=3400)
