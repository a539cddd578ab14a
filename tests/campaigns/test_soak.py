"""Hours of training and changes, in small: nothing grows, and what does is noticed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.campaigns.soak import STRATEGIES, GrownError, Round, growth, soak

FLAT = Round("ondemand", 1.0, 10, 4, 300 << 20, 1 << 20)


def test_training_and_changes_leave_nothing(tmp_path: Path) -> None:
    rounds = soak(tmp_path, n_nodes=1500)
    assert [each.strategy for each in rounds] == [*STRATEGIES] * 4


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_hours_of_training_and_changes_leave_nothing(tmp_path: Path) -> None:
    """Two hours, unless FEATSTORE_SOAK has other seconds."""
    soak(tmp_path, seconds=float(os.environ.get("FEATSTORE_SOAK", "7200")))


@pytest.mark.parametrize("what", ["descriptors", "threads", "resident memory", "disk"])
def test_what_grows_is_noticed(tmp_path: Path, what: str) -> None:
    """Each round leaves one thing behind."""
    over, left = threading.Event(), list[object]()

    def leave(number: int) -> None:
        if what == "descriptors":
            left.append(open("/dev/null"))  # noqa: SIM115
        elif what == "threads":
            left.append(threading.Thread(target=over.wait, daemon=True))
            left[-1].start()  # type: ignore[attr-defined]
        elif what == "resident memory":
            left.append(np.ones(8 << 20, np.uint8))
        else:
            (tmp_path / "graph" / f"left-{number}").write_bytes(b"x" * (256 << 10))

    try:
        with pytest.raises(GrownError, match=what):
            soak(tmp_path, n_nodes=500, strategies=("ondemand",), after=leave)
    finally:
        over.set()
        for each in left:
            if hasattr(each, "close"):
                each.close()


def test_a_warm_up_is_no_growth() -> None:
    """The first quarter may have less; later the least of each quarter counts, as a moment may have more."""
    more = Round("auto", 1.0, 14, 6, 380 << 20, 2 << 20)
    assert growth([Round("packed", 1.0, 5, 1, 100 << 20, 1 << 10), FLAT, more, FLAT, more, FLAT, more, FLAT]) == []
    assert len(growth([FLAT] * 6 + [more] * 2)) == 4
