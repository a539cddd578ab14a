"""Mutations: each breaks one mechanism in a copy of the tree, and the tests named with it must fail.

``python -m tests.mutations [NAME …]`` runs all of them or some; ``make stress`` runs all. A mutation replaces one text of one
file, which must be there exactly once. Compiled modules are built anew in the copy. The control runs the same tests in a copy
that nothing was changed in.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.table import MUTATIONS, Mutation

__all__ = ["copy_tree", "main", "mutate", "run_tests"]

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
LIMIT_S = 900  # of the tests of one mutation; one that hangs was noticed


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


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float = LIMIT_S, test_s: float = 120) -> tuple[bool, str]:
    """Run tests in a copy, ``test_s`` seconds each at most; return whether one failed, and what pytest printed.

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
    try:
        done = subprocess.run(command, timeout=limit_s, check=False, **options)
    except subprocess.TimeoutExpired:
        return True, f"stopped after {limit_s} s"
    printed = done.stdout + done.stderr
    # Killed by a signal, or ended by its own time-out: the mutation was noticed.
    if done.returncode not in (0, 1) and done.returncode > 0:
        raise RuntimeError(f"pytest ended with status {done.returncode}, which says nothing of the mutation:\n{printed}")
    return done.returncode != 0, printed


def main(names: list[str]) -> int:
    """Run mutations, all where none is named, and the control of their tests; return how many survived."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    if unknown := sorted(set(names) - {mutation.name for mutation in chosen}):
        near = difflib.get_close_matches(unknown[0], [mutation.name for mutation in MUTATIONS], cutoff=0.3)
        raise SystemExit(f"no mutation {unknown}; near the first: {near}. The tables tests/mutations/*.txt have all.")
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tests = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
        failed, printed = run_tests(copy_tree(Path(folder) / "control"), tests, 3 * LIMIT_S)
        print(f"{'FAILED' if failed else 'passed':<9} control", flush=True)
        if failed:
            print(printed)
            return 1
        for number, mutation in enumerate(chosen):
            tree = copy_tree(Path(folder) / str(number))
            mutate(tree, mutation)
            noticed, printed = run_tests(tree, mutation.tests)
            shutil.rmtree(tree)
            lines = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
            print(f"{'noticed' if noticed else 'SURVIVED':<9} {mutation.name}: {lines[0] if lines else ''}", flush=True)
            survivors += not noticed
    return survivors
