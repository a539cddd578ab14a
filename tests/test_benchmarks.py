"""Every benchmark runs at its smallest size and prints figures that can be read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))
FIELDS = {"name", "value", "unit", "reference", "ratio", "runs", "machine"}
NEEDS_FIO = {"bench_gather.py", "bench_packing.py"}


def check_lines(text: str) -> list[dict[str, object]]:
    """Check that each line is a figure with all its fields; return them."""
    figures = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert figures
    for figure in figures:
        assert figure.keys() >= FIELDS, figure
        assert isinstance(figure["value"], int | float)
        assert (figure["ratio"] is None) == (figure["reference"] is None), figure
    return figures


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs(script: str, tmp_path: Path) -> None:
    arguments = ["--tiny", "--scratch", tmp_path / "scratch", "--out", tmp_path / "out.jsonl"]
    if script in NEEDS_FIO and shutil.which("fio") is None:
        arguments += ["--only", "hot"]  # the reference is another program, which the library does not need
    command = [sys.executable, "-W", "error", BENCHMARKS / script, *arguments]
    env = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_lines(done.stdout) == check_lines((tmp_path / "out.jsonl").read_text())
    assert not any((tmp_path / "scratch").iterdir()), "generated data is removed"


def test_every_part_has_a_benchmark() -> None:
    assert {"bench_gather.py", "bench_planner.py", "bench_sampling.py"} <= set(SCRIPTS)


HARNESS = """
import sys; sys.path.insert(0, sys.argv[1])
from harness import Report, alternate, median_ratio
order = []
results = alternate(3, {"a": lambda: order.append("a") or 4.0, "b": lambda: order.append("b")}, warm_up=1)
assert order == list("abababab") and results["a"] == [4.0] * 3 and all(0 <= s < 60 for s in results["b"]), (order, results)
assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
report = Report()
assert report.figure("f", [1.0, 3.0, 2.0], "s", reference="r", references=[2.0, 3.0, 8.0], target="<= 0.4") == 0.5
assert report.failed == 1
report.figure("g", 5.0, "s", target=">= 5")
assert report.failed == 1
"""


def test_harness(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HARNESS, BENCHMARKS], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = check_lines(done.stdout)
    assert (first["value"], first["met"]) == (2.0, False)
    assert (second["value"], second["met"], second["ratio"]) == (5.0, True, None)
