"""Every Python block of README.md and docs/ runs, page by page, in an empty folder; so does every `featstore …` command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(\s*)```(\w*)\s*$")
PROMPT = "$ featstore "
PRELUDE = (
    "import os as _os, subprocess as _subprocess, sys as _sys; _run = lambda line: _subprocess.run(line, shell=True, check=True)"
)


def script_of(text: str) -> tuple[str, int]:
    """Turn a page into a script whose line numbers are the page's; also return how many lines of it do something.

    Text becomes empty lines, Python blocks stay, console lines that start with ``$ featstore`` become calls.
    """
    lines, language, indent = [], "", ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence:
            language, indent = ("", "") if language else (fence[2] or "text", fence[1])
            lines.append("")
        elif language == "python":
            lines.append(line.removeprefix(indent))
        elif language == "console" and line.strip().startswith(PROMPT):
            lines.append(f"_run({line.strip()[2:]!r})")
        else:
            lines.append("")
    assert not language, "a fence is not closed"
    return "\n".join(lines), sum(bool(line.strip()) for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script, n_lines = script_of(page.read_text())
    if not n_lines:
        return
    assert script.startswith("\n"), "a page starts with its title"
    (tmp_path / "page.py").write_text(PRELUDE + script)
    # The command as an installation would make it, on the tree's package.
    programs = tmp_path_factory.mktemp("bin")
    (programs / "featstore").write_text(
        f"#!{sys.executable}\nimport sys\nfrom featstore.cli.main import main\nsys.exit(main())\n"
    )
    (programs / "featstore").chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{page.name} (line numbers are the page's):\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+://", target):
            assert (page.parent / target).exists(), target


def test_make_targets_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for page in PAGES for target in re.findall(r"\bmake ([a-z]+)\b(?=[`\n ]*[`\n])", page.read_text())}
    assert {"demo", "test", "lint", "stress"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_sections_of_ginex_are_cited_by_what_they_hold() -> None:
    """The paper (VLDB 2022) has the neighbour cache in section 3.2, the feature cache in 3.3, and changesets in 3.4."""
    expected = {"graph/topology.py": "3.2", "cache/planned.py": "3.3 3.4", "cache/belady.py": "3.4", "_core/belady.pyx": "3.4"}
    sources = [path for top in ("featstore", "src_cython", "docs") for path in sorted((ROOT / top).rglob("*"))]
    cited = {}
    for path in sources:
        if path.suffix in (".py", ".pyx", ".h", ".md"):
            found = re.findall(r"Ginex[^\n]*?(?:section|§) ?(\d(?:\.\d)?)", path.read_text())
            if found:
                cited["/".join(path.parts[-2:])] = " ".join(found)
    assert cited == expected


def test_readme_starts_with_two_commands() -> None:
    first = re.search(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    assert [shlex.split(line) for line in first[1].splitlines()] == [["$", "make", "demo"], ["$", "make", "test"]]


def test_control_a_wrong_block_fails(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nassert 1 == 2, 'line four'\n```\n\n```text\nnot python\n```\n")
    with pytest.raises(AssertionError, match=r"line 4(?s:.*)line four"):
        test_page_runs(page, tmp_path, tmp_path_factory)
