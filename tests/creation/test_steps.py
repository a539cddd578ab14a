"""Steps of several files: whenever a maker ends, the next one goes on from the last record, with the files of a single maker."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.creation import steps as module
from featstore.creation.steps import BuildSteps, Field, Inputs
from featstore.storage.builddir import BUILD_STATE
from featstore.storage.format import HEADER_BYTES
from tests.support.rowfiles import check_sums

RECIPE = {"what": 1}
WIDTHS = (1, 8, 400)  # of the rows of three files, by step


def begun(folder: Path, recipe: dict[str, int] | None = None) -> BuildSteps:
    found = BuildSteps(os.fspath(folder), "x", Inputs(RECIPE if recipe is None else recipe), progress=False)
    found.begin()
    return found


def rows(width: int, first: int, end: int) -> npt.NDArray[np.uint8]:
    """Rows of a file, which depend on their numbers alone."""
    return ((np.arange(first, end)[:, None] * 31 + np.arange(width) * 7 + width) % 251).astype(np.uint8)


def make_some(steps: BuildSteps, lengths: list[int], data: st.DataObject) -> bool:
    """Go on with three files, in turns, with records; return whether all of them are complete. Ends anywhere."""
    writers = {
        step: steps.writer(step, Field(0, (width,), "uint8"), 64 << 10, name=f"{step}.rows") for step, width in enumerate(WIDTHS)
    }
    at = steps.more.get("at", {})
    for step, writer in writers.items():
        assert writer.n_rows == at.get(str(step), 0), "of the last record"
        if writer.layout.is_dense:
            so_far = [np.empty((0, WIDTHS[step]), np.uint8), *writer.rows_so_far(data.draw(st.integers(1, 3000)))]
            assert np.concatenate(so_far).tobytes() == rows(WIDTHS[step], 0, writer.n_rows).tobytes()
    for _ in range(data.draw(st.integers(0, 3))):
        for step, writer in writers.items():
            k = data.draw(st.integers(0, lengths[step] - writer.n_rows))
            writer.write(rows(WIDTHS[step], writer.n_rows, writer.n_rows + k))
        if data.draw(st.booleans()):
            steps.more["at"] = {str(step): writer.n_rows for step, writer in writers.items()}
            steps.keep()
    end = data.draw(st.sampled_from(["in the middle", "committed", "recorded"]))
    if end != "in the middle":
        for step, writer in writers.items():
            writer.write(rows(WIDTHS[step], writer.n_rows, lengths[step]))
        files = {step: writer.commit() for step, writer in writers.items()}
        if end == "recorded":
            steps.put(files)
    return end == "recorded"


@settings(max_examples=25)
@given(st.data())
def test_makers_that_end_anywhere_make_the_files_of_one(data: st.DataObject) -> None:
    """Each writes pieces of three files in turns, records, commits, and is ended as by a kill, also behind a commit."""
    lengths = data.draw(st.lists(st.integers(0, 6_000), min_size=3, max_size=3))
    with tempfile.TemporaryDirectory() as name:
        folder, is_made = Path(name), False
        for _ in range(6):
            steps = begun(folder)
            try:
                is_made = make_some(steps, lengths, data)
            finally:
                steps.leave()
            if is_made:
                break
        for step, width in enumerate(WIDTHS if is_made else ()):
            record = begun(folder).file(step)
            stored = (folder / record.name).read_bytes()[HEADER_BYTES:]
            made = rows(width, 0, lengths[step])
            if record.layout.is_dense:
                assert stored[: made.nbytes] == made.tobytes()
            check_sums(folder, record)


def test_a_record_brings_back_counts_arrays_and_files(tmp_path: Path) -> None:
    inputs = Inputs(RECIPE)
    steps = BuildSteps(os.fspath(tmp_path), "x", inputs, progress=False)
    steps.begin()
    inputs.counts["loops"] = 3
    steps.more["at"], steps.arrays["seen"] = [1, 2], np.arange(5, dtype=np.uint64)
    for name in ("kept", "stray"):
        (tmp_path / name).write_bytes(b"x")
    steps.kept.add("kept")
    steps.skip(0)
    again = Inputs(RECIPE)
    steps = BuildSteps(os.fspath(tmp_path), "x", again, progress=False)
    steps.begin()
    assert (again.counts, steps.more["at"], steps.arrays["seen"].tolist()) == ({"loops": 3}, [1, 2], [0, 1, 2, 3, 4])
    assert steps.is_done(0)
    assert not steps.is_done(1)
    assert sorted(os.listdir(tmp_path)) == ["kept", BUILD_STATE]
    steps.drop(["kept"])
    assert begun(tmp_path).kept == set()
    assert os.listdir(tmp_path) == [BUILD_STATE]


@pytest.mark.parametrize("damage", ["recipe", "kept file", "finished file", "unfinished file", "record", "release"])
def test_what_cannot_be_gone_on_with_is_removed(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = begun(tmp_path)
    steps.writer(0, Field(0, (), "uint8"), 64 << 10, name="a.rows").write(rows(1, 0, 9))
    steps.finish(0)
    (tmp_path / "kept").touch()
    steps.kept.add("kept")
    steps.writer(1, Field(0, (), "uint8"), 64 << 10, name="b.rows").write(rows(1, 0, 20_000))
    steps.keep()
    steps.leave()
    assert begun(tmp_path).is_done(0)
    if damage == "unfinished file":
        (left,) = (each for each in tmp_path.glob("b.rows.*.tmp") if ".sums." not in each.name)
        os.truncate(left, 10_000)
    elif damage in ("kept file", "finished file"):
        (tmp_path / ("kept" if damage == "kept file" else "a.rows")).unlink()
    elif damage == "record":
        os.truncate(tmp_path / BUILD_STATE, 100)
    elif damage == "release":
        monkeypatch.setattr(module, "_FORMAT", module._FORMAT + 1)
    steps = begun(tmp_path, {"what": 2} if damage == "recipe" else None)
    assert not steps.is_done(0)
    assert os.listdir(tmp_path) == []


def test_restarting_removes_all_that_was_made(tmp_path: Path) -> None:
    inputs = Inputs(RECIPE, {"loops": 1})
    steps = BuildSteps(os.fspath(tmp_path), "x", inputs, progress=False)
    steps.begin()
    steps.writer(0, Field(0, (), "uint8"), 64 << 10, name="a.rows").write(rows(1, 0, 9))
    steps.finish(0)
    steps.writer(1, Field(0, (), "uint8"), 64 << 10, name="b.rows")
    steps.leave()
    steps.restart()
    assert os.listdir(tmp_path) == []
    assert not steps.is_done(0)
    assert steps.more == {"counts": {}}
    assert steps.more["counts"] is inputs.counts


def test_without_a_recipe_nothing_is_recorded(tmp_path: Path) -> None:
    steps = BuildSteps(os.fspath(tmp_path), "x", Inputs(), progress=False)
    steps.begin()
    steps.writer(0, Field(0, (), "uint8"), 64 << 10, name="a.rows").write(rows(1, 0, 9))
    steps.keep()
    steps.finish(0)
    assert sorted(os.listdir(tmp_path)) == ["a.rows", "a.rows.sums"]


def test_files_are_known_by_path_size_and_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    before = Inputs.of_files([tmp_path / "a"])
    assert before == Inputs.of_files([f"{tmp_path}/./a"])
    os.utime(tmp_path / "a", ns=(5, 5))
    assert Inputs.of_files([tmp_path / "a"]) == [[str(tmp_path / "a"), 2, 5]]
    assert Inputs({"files": before}).digest != Inputs({"files": [[str(tmp_path / "a"), 2, 5]]}).digest
    assert Inputs().digest == ""
