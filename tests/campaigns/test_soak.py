"""Hours of training and changes, in small: nothing grows, and what does is noticed."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import featstore
from tests.campaigns.soak import STRATEGIES, GrownError, Round, Soak, growth, left, soak

FLAT = Round("ondemand", 1.0, 10, 4, 300 << 20, 1 << 20, 2 << 20)


def test_training_and_changes_leave_nothing(tmp_path: Path) -> None:
    rounds = soak(tmp_path, n_nodes=1500)
    assert [each.strategy for each in rounds] == [*STRATEGIES] * 4


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_hours_of_training_and_changes_leave_nothing(tmp_path: Path) -> None:
    """Two hours, unless FEATSTORE_SOAK has other seconds."""
    soak(tmp_path, seconds=float(os.environ.get("FEATSTORE_SOAK", "7200")))


@pytest.mark.parametrize("what", ["descriptors", "threads", "resident memory", "dataset"])
def test_what_grows_is_noticed(tmp_path: Path, what: str) -> None:
    """Each round leaves more behind than comes and goes by itself."""
    over, kept = threading.Event(), list[object]()

    def leave(number: int) -> None:
        if what == "descriptors":
            kept.extend(open("/dev/null") for _ in range(8))  # noqa: SIM115
        elif what == "threads":
            kept.extend(threading.Thread(target=over.wait, daemon=True) for _ in range(8))
            for thread in kept[-8:]:
                thread.start()  # type: ignore[attr-defined]
        elif what == "resident memory":
            kept.append(np.ones(32 << 20, np.uint8))
        else:
            with featstore.open(tmp_path / "graph", memory="16MiB") as g:
                g.add_feature(f"kept-{number}", np.zeros((500, 16), np.float32), progress=False)

    try:
        with pytest.raises(GrownError, match=what):
            soak(tmp_path, n_nodes=500, strategies=("ondemand",), after=leave)
    finally:
        over.set()
        for each in kept:
            if hasattr(each, "close"):
                each.close()


PLACES = [
    "graph.runs/7",
    "graph.lock",
    "graph.tmp-1/file",
    "graph/x.tmp",
    "graph/node.x.99.rows",
    "graph.pack/old",
    "temporary/a/b",
]


@pytest.mark.parametrize("place", PLACES)
def test_what_one_round_leaves_is_noticed(folder: Path, place: str) -> None:
    """A file beside the dataset, in it, in its pack, or in the temporary directory; what torch has there is not featstore's."""
    (folder / "temporary" / "torchinductor_me").mkdir(exist_ok=True)
    assert left(folder) == []
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("left")
    try:
        assert [f"{place}/".startswith(f"{each}/") for each in left(folder)] == [True]
    finally:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder between rounds: a dataset and its pack."""
    folder = tmp_path_factory.mktemp("soak")
    (folder / "temporary").mkdir()
    Soak(folder, 0, 300, ("packed",)).round(0)
    return folder


def test_a_round_that_leaves_a_file_ends_the_soak(tmp_path: Path) -> None:
    """The file is made in the temporary directory, which is the process's own while it soaks."""
    before = tempfile.gettempdir()
    with pytest.raises(GrownError, match=r"after round 1, ondemand, is left: \['temporary/featstore-"):
        soak(
            tmp_path,
            n_nodes=300,
            strategies=("ondemand",),
            after=lambda number: number == 1 and tempfile.mkdtemp(prefix="featstore-"),
        )
    assert tempfile.gettempdir() == before


def test_a_warm_up_is_no_growth() -> None:
    """The first quarter may have less; later the least of each quarter counts, as a moment may have more."""
    more = Round("auto", 1.0, 14, 6, 380 << 20, 1 << 20, 4 << 20)
    assert growth([Round("packed", 1.0, 5, 1, 100 << 20, 1 << 20, 1 << 10), FLAT, more, FLAT, more, FLAT, more, FLAT]) == []
    assert len(growth([FLAT] * 6 + [more] * 2)) == 4


def test_a_dataset_that_grew_in_one_round_is_noticed() -> None:
    grown = replace(FLAT, dataset=FLAT.dataset * 11 // 10)
    assert growth([FLAT] * 4 + [grown] + [FLAT] * 3) == ["dataset: 1024 KiB, and 1126 after round 4"]
