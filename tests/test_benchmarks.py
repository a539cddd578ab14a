"""Every benchmark runs at its smallest size and prints figures that can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))
FIELDS = {"name", "value", "unit", "reference", "ratio", "runs", "machine"}
FIO_SCRIPTS = {script for script in SCRIPTS if "fio" in (BENCHMARKS / script).read_text()}

# Reads nothing, and says that it read 1 GiB in half a second.
FIO = """
import json, pathlib, sys
options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
if options["rw"] == "write":
    pathlib.Path(options["filename"]).touch()
done = {"io_bytes": 1 << 30, "runtime": 500}
print("a line before the report", json.dumps({"jobs": [{"read": done, "write": done}]}))
"""


def check_lines(text: str) -> list[dict[str, object]]:
    """Check that each line is a figure with all its fields; return them."""
    figures = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert figures
    for figure in figures:
        assert figure.keys() >= FIELDS, figure
        assert isinstance(figure["value"], int | float)
        assert (figure["ratio"] is None) == (figure["reference"] is None), figure
    return figures


def run_script(script: str, tmp_path: Path, *more: str, **environment: str) -> tuple[list[dict[str, object]], str]:
    """Run a benchmark at its smallest size; return its figures and what it wrote to stderr."""
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-W",
        "error",
        BENCHMARKS / script,
        "--tiny",
        "--scratch",
        tmp_path / "scratch",
        "--out",
        out,
        *more,
    ]
    env = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)} | environment
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = check_lines(done.stdout)
    assert figures == check_lines(out.read_text())
    assert not any((tmp_path / "scratch").iterdir()), "generated data is removed"
    return figures, done.stderr


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - FIO_SCRIPTS))
def test_benchmark_runs(script: str, tmp_path: Path) -> None:
    figures, _ = run_script(script, tmp_path)
    assert [figure for figure in figures if "missing" in figure] == []


@pytest.mark.parametrize("script", sorted(FIO_SCRIPTS))
@pytest.mark.parametrize("has_fio", [False, True])
def test_benchmark_runs_with_and_without_fio(script: str, has_fio: bool, tmp_path: Path) -> None:
    """Where fio is absent the figures against it say so, and all others are complete. A stand-in is fio where it is there."""
    programs = tmp_path / "programs"
    programs.mkdir()
    if has_fio:
        (programs / "fio").write_text(f"#!{sys.executable}\n{FIO}")
        (programs / "fio").chmod(0o755)
    # Without fio the whole script has run; with it, the one group of bench_epoch.py that asks for it is enough.
    more = ("--only", "preparation") if has_fio and script == "bench_epoch.py" else ()
    figures, errors = run_script(script, tmp_path, *more, PATH=str(programs))
    missing = [str(figure["missing"]) for figure in figures if "missing" in figure]
    referring = [str(figure["reference"]) for figure in figures if "fio" in str(figure["reference"])]
    assert ("fio is not installed" in errors) == (not has_fio)
    assert len(figures) > len(missing + referring)
    if has_fio:
        assert referring
        assert missing == []
    else:
        assert referring == []
        assert missing
        assert all("fio" in reference for reference in missing)


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
assert report.figure("h", [1.0], "s", reference="fio", target=">= 9") is None
assert report.failed == 1
"""


def test_harness(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HARNESS, BENCHMARKS], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = check_lines(done.stdout)
    assert (first["value"], first["met"]) == (2.0, False)
    assert (second["value"], second["met"], second["ratio"]) == (5.0, True, None)
    assert (third["value"], third["missing"], third["ratio"], "met" in third) == (1.0, "fio", None, False)
