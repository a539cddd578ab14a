"""The papers' figures are measured at their smallest size, and show what the papers show where that is counted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.usefixtures("_program_server")

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ("ginex", "diskgnn", "outre", "pagraph", "insitu")
WANTED = {  # what each paper's readers look for
    "ginex": {f"figure {n}" for n in (4, 5, 6, *range(14, 20))},
    "diskgnn": {f"table {n}" for n in (1, 5, 6, 7)} | {f"figure {n}" for n in (5, 12, 13, 14, 16, 17)},
    "outre": {f"table {n}" for n in (2, 3, 4, 6, 7, 8, 11, 12)} | {"figure 5"},
    "pagraph": {f"table {n}" for n in (4, 5)} | {f"figure {n}" for n in (11, 12, 13, 14, 17, 18, 21)},
    "insitu": {"table 2", "figure 5"},
}
LONG = {  # those that start processes or train: make stress runs them
    "ginex": ("figure 4", "figure 6", "figure 14", "figure 16", "figure 17", "figure 18", "figure 19"),
    "diskgnn": ("table 1", "table 5", "table 6"),
    "outre": ("table 6", "table 7", "table 11", "table 12", "figure 5"),
    "pagraph": ("figure 11", "figure 12", "figure 21"),
    "insitu": (),
}


def run(paper: str, tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    """Measure figures at the smallest size; return their lines, each of which stands in the printed tables."""
    out = tmp_path / "out.jsonl"
    line = ["benchmarks.papers", paper, "--tiny", "--scratch", tmp_path / "scratch", "--out", out, *more]
    done = run_program("-m", *line, cwd=tmp_path, starts_programs=True, PYTHONPATH=str(ROOT), FEATSTORE_GRAPHS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any((tmp_path / "scratch").iterdir()), "generated data is removed"
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    for each in lines:
        assert each["name"].startswith(f"{paper}, ")
        assert each["panel"] in done.stdout
        assert each["side"] in done.stdout
        assert "target" not in each, "targets are of the real size"
    return lines


def asked(what: tuple[str, ...] | list[str]) -> list[str]:
    """Turn ``"table 2"`` into options."""
    return [word for each in what for word in (f"--{each.split()[0]}", each.split()[1])]


def points(lines: list[dict[str, Any]], what: str, unit: str) -> dict[tuple[str, str], float]:
    """Values of a figure by side and place."""
    found = {(f["side"], str(f["at"])): f["value"] for f in lines if f", {what}, " in f["name"] and f["unit"] == unit}
    assert found, (what, unit)
    return found


@pytest.fixture(scope="module")
def papers() -> dict[str, Any]:
    """The papers' declarations."""
    return {name: importlib.import_module(f"benchmarks.papers.figures.{name}").PAPER for name in PAPERS}


def test_every_figure_is_measured_documented_and_tested(papers: dict[str, Any]) -> None:
    index = (ROOT / "docs" / "papers.md").read_text()
    for name, paper in papers.items():
        measured = {what for what, shown in paper.shown.items() if shown.measure is not None}
        assert measured == WANTED[name]
        assert measured >= set(LONG[name])
        assert index.count(f"papers/{name}.md") == index.count(f"\npapers/{name}\n") == 1
        page = (ROOT / "docs" / "papers" / f"{name}.md").read_text()
        assert page.startswith(f"# {paper.title}\n")
        for what in measured:
            kind, number = what.split()
            rows = [line for line in page.splitlines() if f"| `{name} --{kind} {number}` |" in line]
            assert len(rows) == 1, f"docs/papers/{name}.md lacks {what}"
            assert all(cell.strip() for cell in rows[0].split("|")[1:-1]), f"docs/papers/{name}.md: {what} has an empty cell"
        for what, shown in paper.shown.items():
            assert shown.measure is not None or shown.instead, f"{what} is left out without a reason"


def test_what_is_not_there_is_said(papers: dict[str, Any]) -> None:
    program = importlib.import_module("benchmarks.papers.__main__")
    for words, message in (
        (["diskgnn", "--figure", "15"], "figure 15, is not measured: it needs a second drive"),
        (["diskgnn", "--figure", "99"], "has no figure 99"),
    ):
        with pytest.raises(SystemExit, match=message):
            program.chosen(program.parse(words), papers["diskgnn"])
    assert program.chosen(program.parse(["insitu"]), papers["insitu"]) == ["table 2", "figure 5"]
    assert program.chosen(program.parse(["insitu", "--figure", "5"]), papers["insitu"]) == ["figure 5"]
    assert [program.parse(["insitu", *words]).runs for words in ([], ["--scale", "22"], ["--runs", "2"])] == [1, 3, 2]
    lines = papers["ginex"].contents().splitlines()
    assert any(line.startswith("  - table 3") for line in lines)
    assert any(line.startswith("    figure 19") for line in lines)


def test_ginex_misses_least_with_its_optimum(tmp_path: Path) -> None:
    lines = run("ginex", tmp_path, "--figure", "5", "--figure", "15", "--plot", str(tmp_path))
    missed = points(lines, "figure 5", "of accesses missed")
    for percent in ("5", "10", "20", "40"):
        others = [missed[policy, percent] for policy in ("degree", "frequency", "sieve")]
        assert missed["belady", percent] <= min(others)
        assert missed["belady", percent] < missed["sieve", percent]
    in_superbatches = points(lines, "figure 15", "of accesses")
    assert in_superbatches["belady", "miss ratio"] <= in_superbatches["degree", "miss ratio"]
    for what in ("figure-5", "figure-15"):
        assert (tmp_path / f"ginex-{what}.png").stat().st_size > 1_000


def test_diskgnn_reads_and_stores_less(tmp_path: Path) -> None:
    short = [what for what in sorted(WANTED["diskgnn"]) if what not in LONG["diskgnn"]]
    lines = run("diskgnn", tmp_path, *asked(short))
    for what in ("figure 5", "figure 16"):
        amplified = points(lines, what, "bytes read a byte")
        longest = max(int(at) for _, at in amplified)
        assert amplified["by MinHash", str(longest)] < amplified["by number", str(longest)]
    disk = points(lines, "figure 16", "x the features")
    assert min(disk.values()) < max(disk.values())
    by_memory = points(lines, "figure 13", "x the features")
    space = [by_memory["extents", percent] for percent in ("0", "5", "10", "20", "30", "50")]
    assert space == sorted(space, reverse=True)
    fanouts = points(lines, "figure 14", "x the features")
    assert fanouts["by fan-outs", "10,10"] < fanouts["by fan-outs", "10,15,20"]
    searched = points(lines, "table 7", "s")
    assert {side for side, _ in searched} == {"exhaustive", "shortest segment"}
    disks = points(lines, "figure 12", "MB read")
    assert all(value > 0 for value in disks.values())
    packing = points(lines, "figure 17", "s")
    assert set(packing) == {("individual", "packing"), ("batched", "packing")}


def test_outre_requests_fewer_rows(tmp_path: Path) -> None:
    short = [what for what in sorted(WANTED["outre"]) if what not in LONG["outre"]]
    lines = run("outre", tmp_path, *asked(short))
    deep = points(lines, "table 2", "rows a training node")
    assert deep["random batches", "10,10"] < deep["random batches", "10,10,10"]
    ratios = points(lines, "table 3", "x random")
    assert ratios["metis", "of random"] < ratios["random", "of random"]
    assert ratios["fennel", "of random"] < 0.9
    reused = [points(lines, "table 4", "rows a training node")["random batches", share] for share in ("0%", "10%", "20%")]
    assert reused == sorted(reused, reverse=True)
    assert reused[0] > reused[-1]
    assert all(seconds > 0 for seconds in points(lines, "table 8", "s").values())


def test_pagraph_serves_more_by_degree(tmp_path: Path) -> None:
    short = [what for what in sorted(WANTED["pagraph"]) if what not in LONG["pagraph"]]
    lines = run("pagraph", tmp_path, *asked(short))
    served = points(lines, "figure 13", "of accesses")
    for percent in ("5", "10", "20", "40"):
        assert served["random", percent] < served["degree", percent] <= served["optimum", percent]
    crossing = points(lines, "table 4", "of the rows cross")
    read = points(lines, "table 4", "MB read an epoch")
    assert crossing["degree", "40%"] < crossing["degree", "5%"] < crossing["random", "5%"]
    assert read["degree", "40%"] < read["degree", "none"]
    assert set(points(lines, "figure 17", "ids read of lists outside of parts").values()) == {0}
    added = points(lines, "figure 18", "MB")
    assert added["+ tier", "read"] < added["none", "read"]
    assert all(
        seconds > 0
        for what in ("table 5", "figure 14")
        for seconds in points(lines, what, "s" if "5" in what else "s an epoch").values()
    )


def test_in_situ_sampling_moves_a_file_a_hop(tmp_path: Path) -> None:
    lines = run("insitu", tmp_path, *asked(sorted(WANTED["insitu"])))
    moved = points(lines, "table 2", "B an epoch")
    for fanouts in ("25,10", "20,15,10"):
        assert moved["sample", fanouts] > 0
        assert moved["blocks of 512", fanouts] <= moved["blocks of 4096", fanouts] <= 8 * moved["blocks of 512", fanouts]
        assert moved["needed pages a hop", fanouts] <= moved["the file a hop", fanouts] + 3 * 4096
        read = points(lines, "figure 5", "MB read a batch")
        assert read["an epoch at a time", fanouts] < read["random access", fanouts]


@pytest.mark.stress
@pytest.mark.parametrize("paper", PAPERS)
def test_long_figures_are_measured(paper: str, tmp_path: Path) -> None:
    if not LONG[paper]:
        return
    lines = run(paper, tmp_path, *asked(LONG[paper]), "--plot", str(tmp_path))
    for what in LONG[paper]:
        assert any(f", {what}, " in each["name"] for each in lines)
        assert (tmp_path / f"{paper}-{what.replace(' ', '-')}.png").exists()
    if paper == "outre":
        rows = {side: value for (side, at), value in points(lines, "table 6", "rows").items() if at == "rows"}
        sides = ("np.memmap", "superbatch", "+ partition batches", "+ LABOR", "+ history")
        counts = [rows[side] for side in sides]
        assert counts[0] == counts[1] > counts[2] > counts[3] > counts[4]
        trained = points(lines, "table 11", "of the test nodes")
        assert trained["default macro, staleness 0", "accuracy, %"] == trained["default macro", "accuracy, %"]
        without = points(lines, "table 11", "x without (default macro)")
        assert without["default macro, staleness 0", "rows"] == 1 > without["default macro, staleness 100", "rows"]
        kept = points(lines, "table 12", "rows")
        assert kept["saved_io", "rows"] < kept["random", "rows"]
    if paper == "diskgnn":
        before = points(lines, "table 1", "table 1")
        read = {side: value for (side, at), value in before.items() if at == "read an epoch, MB"}
        assert read["packed (DiskGNN)"] < read["superbatches (Ginex)"]
    if paper == "pagraph":
        means = points(lines, "figure 11", "GraphSAGE")
        side = "no tier, batch by batch (DGL)"
        assert means[f"{side} + PP", "rows"] < means[side, "rows"]
