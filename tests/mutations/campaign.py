"""Mutations: each breaks one mechanism in a copy of the tree, and the tests named with it must fail.

``python -m tests.mutations [NAME …]`` runs all of them or some; ``make stress`` runs all. A mutation replaces one text of one
file, which must be there exactly once. Compiled modules are built anew in the copy. The control runs the same tests in a copy
that nothing was changed in.

Tests that hang notice a mutation, too; but a slow machine may also stop them. They run again, with three times the time that they
take in an unchanged copy at that moment. If they do not hang again, the mutation is reported as timed out, which is not noticed.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.table import MUTATIONS, Mutation

__all__ = ["FAILED", "NOTICED", "PASSED", "SURVIVED", "TIMED_OUT", "Run", "copy_tree", "judge", "main", "mutate", "run_tests"]

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "Makefile",
    "benchmarks",
    "build/cython-release",
    "build/release",
    "docs",
    "examples",
    "featstore",
    "pyproject.toml",
    "setup.py",
)
PARTS += ("src_cython", "tests", "README.md", ".ci")
LIMIT_S = 900  # of the tests of one mutation
TEST_S = 120  # of one test
LONGER = 3  # times that the tests of an unchanged copy take, before what timed out hangs
FAILED, PASSED, TIMED_OUT = "FAILED", "passed", "TIMED OUT"  # runs of tests
NOTICED, SURVIVED = "noticed", "SURVIVED"  # mutations, which may have TIMED_OUT, too
# As pytest-timeout and faulthandler print it before they end the process, and as pytest-timeout lets a test fail.
_STOPPED = re.compile(r"^\++ Timeout \++$|^E +Failed: Timeout \(>|^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A run of tests: how it ended, FAILED, PASSED or TIMED_OUT, what pytest printed, and how long it took."""

    ended: str
    printed: str
    seconds: float


def copy_tree(target: Path) -> Path:
    """Copy what tests need, compiled modules and times included, so that only what changes is built anew; return ``target``."""
    ignored = shutil.ignore_patterns(".*cache", "*.tmp-*")  # compiled files go with their sources' times
    for part in PARTS:
        source = ROOT / part
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, target / part)
    return target


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def mutate(tree: Path, mutation: Mutation) -> None:
    """Put a mutation into a copy of the tree.

    Raises
    ------
    ValueError
        Its text is not in the file once.
    RuntimeError
        The core does not compile with it: it would show nothing.
    """
    path = tree / mutation.file
    path.write_text(mutation.changed(path.read_text()))
    if mutation.is_compiled:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"mutation {mutation.name!r} does not compile:\n{done.stdout}{done.stderr}")


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float = LIMIT_S, test_s: float = TEST_S) -> Run:
    """Run tests in a copy, ``test_s`` seconds each at most, until one fails.

    Raises
    ------
    RuntimeError
        The copy's package is not what they would import; or they could not be run, which shows nothing.
    """
    where = "import importlib.util; print(importlib.util.find_spec('featstore').origin)"
    options = {"cwd": tree, "env": _environment(tree), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    found = subprocess.run([sys.executable, "-c", where], check=True, **options).stdout.strip()
    if Path(found) != tree / "featstore" / "__init__.py":
        raise RuntimeError(f"the tests in {tree} would import {found}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--timeout",
        str(test_s),
        *tests,
    ]
    began_s = time.monotonic()
    try:
        done = subprocess.run(command, timeout=limit_s, check=False, **options)
    except subprocess.TimeoutExpired:
        return Run(TIMED_OUT, f"stopped after {limit_s} s", time.monotonic() - began_s)
    printed = done.stdout + done.stderr
    # One that a signal killed has failed.
    if done.returncode not in (0, 1) and done.returncode > 0:
        raise RuntimeError(f"pytest ended with status {done.returncode}, which says nothing of the mutation:\n{printed}")
    ended = PASSED if done.returncode == 0 else TIMED_OUT if _STOPPED.search(printed) else FAILED
    return Run(ended, printed, time.monotonic() - began_s)


def judge(tree: Path, tests: tuple[str, ...], limit_s: float = LIMIT_S, test_s: float = TEST_S) -> tuple[str, str]:
    """Run tests in a copy with a mutation; return NOTICED, SURVIVED or TIMED_OUT, and what pytest printed.

    What times out runs again: the same tests in a new unchanged copy, then in this one with LONGER times their time.

    Raises
    ------
    RuntimeError
        As :func:`run_tests`; or the tests fail in the unchanged copy.
    """
    run = run_tests(tree, tests, limit_s, test_s)
    if run.ended == TIMED_OUT:
        with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
            unchanged = run_tests(copy_tree(Path(folder) / "tree"), tests, LONGER * limit_s, LONGER * test_s)
        if unchanged.ended == FAILED:
            raise RuntimeError(f"{tests} fail without a mutation:\n{unchanged.printed}")
        if unchanged.ended == TIMED_OUT:
            return TIMED_OUT, run.printed
        longer_s = LONGER * unchanged.seconds
        run = run_tests(tree, tests, max(limit_s, longer_s), max(test_s, longer_s))
        if run.ended == TIMED_OUT:  # a mark of its own may have stopped a test earlier
            return NOTICED if run.seconds >= longer_s else TIMED_OUT, run.printed
        if run.ended == PASSED:
            return TIMED_OUT, "timed out at first, and passed with more time"
    return (SURVIVED if run.ended == PASSED else NOTICED), run.printed


def main(names: list[str]) -> int:
    """Run mutations, all where none is named, and the control of their tests; return how many were not noticed."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    if unknown := sorted(set(names) - {mutation.name for mutation in chosen}):
        near = difflib.get_close_matches(unknown[0], [mutation.name for mutation in MUTATIONS], cutoff=0.3)
        raise SystemExit(f"no mutation {unknown}; near the first: {near}. The tables tests/mutations/*.txt have all.")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tests = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
        control = run_tests(copy_tree(Path(folder) / "control"), tests, LONGER * LIMIT_S)
        print(f"{control.ended:<9} control", flush=True)
        if control.ended != PASSED:
            print(control.printed)
            return 1
        for number, mutation in enumerate(chosen):
            tree = copy_tree(Path(folder) / str(number))
            mutate(tree, mutation)
            verdict, printed = judge(tree, mutation.tests)
            shutil.rmtree(tree)
            lines = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
            print(f"{verdict:<9} {mutation.name}: {lines[0] if lines else ''}", flush=True)
            missed += verdict != NOTICED
    return missed
