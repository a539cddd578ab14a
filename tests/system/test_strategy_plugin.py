"""The example of a strategy in a package of its own: one file, installed as a user would, and no edit of the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import featstore
from tests.base.test_registry import ROOT, install, run_python
from tests.support.graphs import skewed_dataset
from tests.support.programs import run_program

EXAMPLE = ROOT / "examples" / "strategy-plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return install(EXAMPLE, tmp_path_factory.mktemp("strategy"))


@pytest.mark.stress  # the suite runs on the library's own strategies, and on the guide's
def test_the_example_keeps_the_contract(installed: tuple[Path, Path]) -> None:
    """Every sampler, cache and budget, by way of :class:`featstore.testing.StrategyContract`, and what it is for."""
    target, source = installed
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests"]
    assert " passed" in run_python(arguments, [target, ROOT], cwd=source)


@pytest.mark.usefixtures("_program_server")
def test_the_command_line_trains_with_it(installed: tuple[Path, Path], tmp_path: Path) -> None:
    """With an option of its own, which the command line lists once the strategy is named."""
    line = ["train", str(skewed_dataset(tmp_path / "g", 300, 5)), "--strategy", "shared_rows"]
    line += ["--length", "3", "--cache", "10%", "--epochs", "1", "--batch-size", "20", "--fanouts", "3,3", "--hidden", "4"]
    script = f"import sys; sys.path.insert(0, {str(installed[0])!r}); from featstore.cli.main import main"
    script += f"; assert main({[*line, '--memory', '64MB', '--json']}) == 0; print()"
    script += "; main(['train', '--strategy', 'shared_rows', '--help'])"
    (tmp_path / "script.py").write_text(script)
    done = run_program("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, _, listed = done.stdout.partition("\n\n")
    assert len(json.loads(found)["losses"]) == 5
    assert "packed, shared_rows)" in " ".join(listed.split())


def test_one_file_and_public_names_suffice() -> None:
    files = [path.name for path in (EXAMPLE / "src").rglob("*.py")]
    assert files == ["featstore_shared_rows.py"]
    source = (EXAMPLE / "src" / files[0]).read_text()
    assert "from featstore." not in source
    assert "import featstore." not in source


def test_it_was_not_there_before() -> None:
    assert "shared_rows" not in featstore.available_strategies()
