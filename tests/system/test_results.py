"""Kept figures, and what docs/performance.md has of them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.tools import harness

MACHINE = "AMD EPYC (family 26, model 2), 2 cores, 24 GiB, Linux 6.18"


def line(name: str, ratio: float | None, target: str, **more: Any) -> dict[str, Any]:
    relation, bound = target.split()
    met = ratio is not None and (ratio >= float(bound) if relation == ">=" else ratio <= float(bound))
    found = {
        "name": name,
        "value": 3.0,
        "unit": "s",
        "reference": "fio",
        "ratio": ratio,
        "runs": [1.0],
        "target": target,
        "met": met,
    }
    return {**found, "machine": MACHINE, "commit": "0123abcd", "command": "rows.gather --only hot", **more}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, place in (("ROOT", ""), ("KEPT", "results"), ("PAGE", "page.md"), ("PLOTS", "plots"), ("BOUNDS", "bounds.md")):
        monkeypatch.setattr(results, name, tmp_path / place)
    (tmp_path / "plots").mkdir()
    (tmp_path / "page.md").write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    return tmp_path


def lines_file(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "new.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_newer_figures_replace_older_ones_of_the_same_processor(places: Path) -> None:
    xeon = "Intel(R) Xeon (family 6, model 207), 2 cores, 24 GiB, Linux 6.18"
    assert results.keep(
        [lines_file(places, line("a", 0.9, ">= 0.95"), line("b", 1.0, "<= 1.1"), line("a", 0.5, "<= 1", machine=xeon))]
    )
    results.keep([lines_file(places, line("a", 0.97, ">= 0.95"))])
    epyc = results.read(places / "results" / "amd-epyc-family-26-model-2.jsonl")
    assert [(each["name"], each["ratio"]) for each in epyc] == [("a", 0.97), ("b", 1.0)]
    assert len(results.read(places / "results" / "intel-r-xeon-family-6-model-207.jsonl")) == 1


def test_a_figure_beside_two_references_is_two_figures(places: Path) -> None:
    results.keep([lines_file(places, line("a", 0.9, ">= 0.95"), line("a", 2.0, ">= 1", reference="a memory map"))])
    kept = results.read(places / "results" / "amd-epyc-family-26-model-2.jsonl")
    assert [each["reference"] for each in kept] == ["a memory map", "fio"]


@pytest.mark.parametrize("wrong", [{"tiny": True}, {"commit": "0123abcd+"}, {"commit": ""}, {"command": "unknown.gather"}])
def test_figures_that_show_nothing_are_refused(places: Path, wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        results.main(["keep", str(lines_file(places, line("a", 1.0, "<= 1.1"), line("b", 1.0, "<= 1.1", **wrong)))])
    assert "run it anew" in (said := capsys.readouterr().err) or "TOPICS" in said
    assert not (places / "results").exists()


@pytest.mark.shares_resources  # matplotlib keeps its fonts open
def test_the_table_counts_bounds_and_the_page_has_them_all(places: Path) -> None:
    hot, value = line("hot rows", 0.9, ">= 0.95"), line("first batch", None, "<= 2.5", reference=None, command="sizes.papers100m")
    results.keep(
        [
            lines_file(
                places, hot, line("cold rows", 1.2, ">= 0.95"), value, {**line("no bound", 1.0, "<= 1")} | {"target": "<= 1"}
            )
        ]
    )
    results.main(["write"])
    page = (places / "page.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| [rows](bounds.md#rows) | 2 of 3 (0123abcd) |" in page
    assert "| [sizes](bounds.md#sizes) | 0 of 1 (0123abcd) |" in page
    of_all = (places / "bounds.md").read_text()
    assert "| hot rows | fio | >= 0.95 | **0.9** (1, 0123abcd) | `rows.gather --only hot` |" in of_all
    assert "| cold rows | fio | >= 0.95 | 1.2 (1, 0123abcd) |" in of_all
    assert "| first batch | s | <= 2.5 | **3** (1, 0123abcd) |" in of_all
    drawn = (places / "plots" / "bounds-rows.svg").read_text()
    assert "hot rows" in drawn
    assert "cold rows" in drawn
    assert "first batch" not in drawn
    assert sorted(path.name for path in (places / "plots").iterdir()) == ["bounds-rows.svg", "bounds-sizes.svg"]
    results.main(["write"])
    assert (places / "page.md").read_text() == page
    assert (places / "plots" / "bounds-rows.svg").read_text() == drawn


def test_a_page_without_marks_is_left_as_it_is(places: Path) -> None:
    (places / "page.md").write_text("no marks")
    with pytest.raises(SystemExit):
        results.main(["write"])
    assert (places / "page.md").read_text() == "no marks"


@pytest.mark.parametrize(
    ("ratio", "target", "times"),
    [
        (0.5, "<= 1", 2.0),
        (2.0, "<= 1", 0.5),
        (2.0, ">= 1", 2.0),
        (0.5, ">= 1", 0.5),
        (0.0, "<= 0", 1.0),
        (0.0, "<= 1", float("inf")),
    ],
)
def test_distance_from_a_bound(ratio: float, target: str, times: float) -> None:
    assert results.distance(line("a", ratio, target)) == times


def test_kept_commands_are_modules_that_are_there() -> None:
    """``python -m benchmarks.`` goes before each."""
    commands = {each["command"].split()[0] for path in results.KEPT.glob("*.jsonl") for each in results.read(path)}
    assert len(commands) >= 6
    assert [each for each in commands if importlib.util.find_spec(f"benchmarks.{each}") is None] == []


def test_the_page_has_what_is_kept() -> None:
    """Once there are results, the table in docs/performance.md and docs/bounds.md are made of them."""
    kept = {results.processor(each[0]): each for path in sorted(results.KEPT.glob("*.jsonl")) if (each := results.read(path))}
    page = results.PAGE.read_text()
    assert (results.BEGIN in page) == bool(kept)
    if kept:
        assert page.partition(results.BEGIN)[2].partition(results.END)[0].strip() == results.table(kept)
        assert results.BOUNDS.read_text() == results.bounds(kept)


def test_figures_say_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = [
        "/x/rows/gather.py",
        "--only",
        "few rows",
        "--out",
        "/tmp/a",
        "--graphs",
        "/g",
        "--scratch=/s",
        "--keep",
        "--runs",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", called)
    harness.Report(tmp_path / "out", silent=True, tiny=True).figure("a", 1.0, "s")
    (found,) = results.read(tmp_path / "out")
    assert found["command"] == 'rows.gather --only "few rows" --graphs DIR --runs 2'
    assert found["tiny"]
    assert re.fullmatch(r"[0-9a-f]{8}\+?|", found["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert results.processor(found) in found["machine"]
