"""Compiled modules that are not those of the sources: one line says what to do, and the import's own error is not lost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import FORGET_FEATSTORE, run_program
from tests.support.sampled import covering

MISSING = "sys.modules['featstore._core.buffers'] = None"
OLDER = "sys.modules['featstore._core.buffers'] = types.ModuleType('featstore._core.buffers')"
USES = ("featstore.open", "__import__('featstore.cli.main').cli.main.main(['info', 'nowhere'])")


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize(("wrong", "use"), covering([(MISSING, "ModuleNotFoundError"), (OLDER, "cannot import name")], USES))
def test_what_to_do_is_said(wrong: tuple[str, str], use: str, tmp_path: Path) -> None:
    what, original = wrong
    (tmp_path / "use.py").write_text(f"{FORGET_FEATSTORE}import types, featstore; {what}; {use}")
    done = run_program("use.py", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "featstore._core.buffers" in last
    assert "run make install" in last
    assert last.endswith("if it is installed, start Python outside the clone, whose folder featstore hides it")
    assert original in done.stderr


def test_other_modules_that_are_missing_are_said_as_ever() -> None:
    code = "import sys, featstore; sys.modules['torch'] = None; featstore.open"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr.strip().splitlines()[-1]


def test_the_version_is_the_packages_and_needs_no_torch() -> None:
    code = "import sys, featstore; print(featstore.__version__, 'torch' in sys.modules, '__version__' in dir(featstore))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert done.stdout.split() == [version, "False", "True"]
