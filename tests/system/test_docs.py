"""Every Python block and every `featstore …` command of README.md and docs/ runs, page by page, each in a folder of its own."""

from __future__ import annotations

import re
import shlex
import shutil
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore import errors
from featstore.cli.main import main
from featstore.strategies.options import options_of
from tests.support.graphbolt import load
from tests.support.programs import OF_LIGHTNING, OF_PYG, run_in_fork, run_program

pytestmark = pytest.mark.usefixtures("_program_server")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = ROOT / "docs" / "guide"
SETUP = GUIDE / "README.md"
LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "examples").rglob("README.md")),
]
MOST_LINES = 200  # of a page of the guide
FENCE = re.compile(r"^(\s*)```(\w*)\s*$")
PROMPT = "$ featstore "
# Commands run in the page's process: a page has up to forty, and a process each would import torch as often. That a shell finds
# the command, and what it exits with, is tests/cli/test_main.py's matter.
PRELUDE = "from tests.system.test_docs import run_command as _run;"


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


def run_command(line: str) -> None:
    """Run ``featstore …`` as a page says it, in this process."""
    status = main(shlex.split(line)[1:])
    assert status == 0, f"{line}: exit status {status}"


def named(pages: Sequence[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda path: path.relative_to(ROOT).as_posix())


def run_page(page: Path, folder: Path) -> None:
    """Run a page in ``folder``."""
    script, n_lines = script_of(page.read_text())
    if not n_lines:
        return
    assert script.startswith("\n"), "a page starts with its title"
    (folder / "page.py").write_text(PRELUDE + script)
    done = run_program("page.py", cwd=folder, ignored=[*OF_PYG, *OF_LIGHTNING], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, f"{page.name} (line numbers are the page's):\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def guide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the pages of the guide begin, with their graph; it must not be changed."""
    folder = tmp_path_factory.mktemp("guide")
    run_page(SETUP, folder)
    return folder


@named(PAGES)
def test_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page.parent == GUIDE and page != SETUP:
        shutil.copytree(request.getfixturevalue("guide_folder"), tmp_path, dirs_exist_ok=True)
    run_page(page, tmp_path)


def test_pages_of_the_guide_are_short_and_listed() -> None:
    pages = sorted(GUIDE.glob("*.md"))
    assert len(pages) > 10
    assert not [page.name for page in pages if len(page.read_text().splitlines()) > MOST_LINES]
    listed = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| [^|]+\? \|$", SETUP.read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in pages if page != SETUP]


def test_the_table_of_scale_is_what_its_block_computes() -> None:
    """Gigabytes of ten and more, and those of drives, without decimals."""
    text = (GUIDE / "scale.md").read_text()
    found: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], found)  # type: ignore[index]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    ways = [(name, graph, way) for name, graph in found["graphs"].items() for way in ("copies", "shares")]
    assert len(rows) == len(ways)
    for (label, *cells), (name, graph, way) in zip(rows, ways, strict=True):
        assert label.startswith(name.split(",")[0].split("'")[0]), label
        assert way in label
        for cell, machines in zip(cells, (1, 4, 16), strict=True):
            of = found[way](graph, machines)
            sent = of["sent"] / 1e9
            network = "0" if not sent else f"{sent:,.0f} GB" if sent >= 9.95 else f"{sent:.1f} GB"
            assert cell == f"{of['disk'] / 1e9:,.0f} GB; {network}; {of['seconds']:,.0f} s", (label, machines)


def options_table() -> str:
    """Return the guide's table of options: a strategy's default where it takes the option."""
    classes = [
        featstore.OnDemand,
        featstore.Superbatch,
        featstore.Ginex,
        featstore.Streamed,
        featstore.Packed,
        featstore.Auto,
    ]
    taken = {cls.__name__: options_of(cls) for cls in classes}
    options = ["cache", "policy", "edge_cache", "edge_policy", "length", "disk", "run_dir", "pack", "epochs"]
    assert {option for each in taken.values() for option in each} == set(options)
    lines = ["| option | " + " | ".join(f"`{name}`" for name in taken) + " |", "|---" * (len(taken) + 1) + "|"]
    for option in options:
        cells = ["`" + repr(each[option][2]).replace("'", '"') + "`" if option in each else "" for each in taken.values()]
        lines.append("".join(f"| {cell} ".replace("|  ", "| ") for cell in [f"`{option}`", *cells]) + "|")
    return "\n".join(lines) + "\n"


def test_the_guide_has_the_strategies_options() -> None:
    """The table is that of the code.

    To mend it: ``python -c "from tests.system.test_docs import *; print(options_table())"`` prints it.
    """
    assert f"\n\n{options_table()}\n" in (GUIDE / "strategies.md").read_text()


def test_the_guide_has_every_error_and_real_messages() -> None:
    """Pieces of the messages in the guide's table are in the library's sources; ``…`` stands for what is filled in."""
    text = (GUIDE / "errors.md").read_text()
    assert not [name for name in errors.__all__ if f"`{name}`" not in text.replace("featstore.", "")]
    cells = re.findall(r"^\| (`.*?`) \| .* \|$", text.split("## By the text")[1].split("\n## ")[0], re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 25
    sources = [re.sub(r'"\s+f?"', "", path.read_text()) for path in sorted((ROOT / "featstore").rglob("*.py"))]

    def is_there(message: str) -> bool:
        pattern = r"[^\n]*".join(map(re.escape, message.split("…")))
        return any(re.search(pattern, source) for source in sources)

    assert [message for message in messages if not is_there(message)] == []
    assert not is_there("no such … message")


def prose_of(text: str) -> str:
    """Return a page without its code."""
    lines, is_code = [], False
    for line in text.splitlines():
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            lines.append(re.sub(r"`[^`]*`", lambda found: found[0].replace("[", "(").replace("]", ")"), line))
    return "\n".join(lines)


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?) *$", prose_of(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(next(each for k in range(1000) if (each := f"{anchor}-{k}" if k else anchor) not in found))
    return found


def broken_links(page: Path) -> list[str]:
    """Return a page's relative links whose file or heading does not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page.read_text())):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if re.match(r"[a-z]+:", link):
            continue
        if not path.exists() or (anchor and (path.suffix != ".md" or anchor not in anchors_of(path.read_text()))):
            broken.append(link)
    return broken


@named(LINKED)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(), re.MULTILINE), "half merged"


def test_control_broken_links_are_found(tmp_path: Path) -> None:
    good = "[a](other.md#some-title-2) [b](#a-page) [c](https://x.org/#y) ![d](other.md) [`x[i]`](other.md#xi-and-y)"
    bad = "[e](no.md) [f](other.md#none) [g](#none)"
    (tmp_path / "other.md").write_text("# `x[i]`, and y\n\n## Some *title*: 2\n\n```console\n# none\n```\n")
    (tmp_path / "page.md").write_text(f"# A page\n\n{good}\n{bad}\n\n```text\n[h](nowhere.md)\n```\n")
    assert broken_links(tmp_path / "page.md") == ["no.md", "other.md#none", "#none"]


FOLDERS = (ROOT, ROOT / "featstore", ROOT / "src_cython" / "featstore")  # below which pages name files


def wrong_places(text: str) -> list[str]:
    """Return files that tables name and that do not exist, and names in brackets that the file before them lacks."""
    wrong = []
    table = "\n".join(re.findall(r"^\|.*$", text, re.MULTILINE))
    for place, name in re.findall(r"`([\w./]+(?:/|\.(?:py|pyx|c|txt)))`(?: \(`([\w.]+)`)?", table):
        path = next((path for folder in FOLDERS if (path := folder / place).exists()), None)
        if path is None:
            wrong.append(place)
        elif name and not re.search(rf"(?:def|class|void) {name.rpartition('.')[2]}\b", path.read_text()):
            wrong.append(name)
    return wrong


def test_places_named_for_contributors_exist() -> None:
    section = (ROOT / "docs" / "contributing.md").read_text().partition("\n## Where things are\n")[2].partition("\n## ")[0]
    assert section.count("\n| ") > 15
    assert wrong_places(section) == []


def test_control_wrong_places_are_found() -> None:
    good = "| a | `budget.py` (`Budget._take_back`), `changes/`, `_core/belady.pyx` (`Bits.evict`), an `option` (`none`) |\n"
    bad = "| b | `budgets.py`, `change/`, `budget.py` (`Budget.none`), `_core/kernels/none.c` |\nnot in a table: `none.py`\n"
    assert wrong_places(good + bad) == ["budgets.py", "change/", "Budget.none", "_core/kernels/none.c"]


def test_make_targets_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for page in PAGES for target in re.findall(r"\bmake ([a-z]+)\b(?=[`\n ]*[`\n])", page.read_text())}
    assert {"demo", "test", "lint", "stress"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_sections_of_ginex_are_cited_by_what_they_hold() -> None:
    """The paper (VLDB 2022) has the neighbour cache in section 3.2, the feature cache in 3.3, changesets in 3.4."""
    expected = {
        "neighbors/neighborcache.py": "3.2",
        "cache/planned.py": "3.3 3.4",
        "cache/belady.py": "3.4",
        "cache/belady_csr.py": "3.4",
        "_core/belady.pyx": "3.4",
    }
    expected |= {"strategies/ginex.py": "3", "cache/fixed.py": "5"}  # all of it; baselines
    sources = [path for top in ("featstore", "src_cython", "docs") for path in sorted((ROOT / top).rglob("*"))]
    cited = {}
    for path in sources:
        if path.suffix in (".py", ".pyx", ".h", ".md"):
            found = re.findall(r"Ginex[^\n]*?(?:section|§) ?(\d(?:\.\d)?)", path.read_text())
            if found:
                cited["/".join(path.parts[-2:])] = " ".join(found)
    assert cited == expected


SECTIONS = {
    "PaGraph": "1 2 2.1 2.2 2.3 3 3.1 3.2 3.3 4 5 5.1 5.2 5.3 5.4 5.5 5.6 5.7 5.8 5.9 6 7 8",
    "OUTRE": "1 2 2.1 2.2 2.3 3 3.1 3.2 3.3 4 4.1 4.2 4.3 4.4 4.5 5 5.1 5.2 5.3 6 6.1 6.2 6.3 6.4 6.5 7 8",
    "DiskGNN": "1 2 3 4 5 5.1 5.2 5.3 6 7 7.1 7.2 7.3 8 9",
    "DaMoN": "1 2 2.1 2.2 2.3 3 4 5 6",
}


def test_cited_sections_exist() -> None:
    """Of the papers other than Ginex; what must be cited for what: PaGraph's policy, OUTRE's lists, the paper's chunks."""
    sources = [path for top in ("featstore", "src_cython", "docs", "benchmarks") for path in (ROOT / top).rglob("*")]
    cited: dict[str, list[str]] = {}
    for path in [*sources, ROOT / "README.md"]:
        if path.suffix in (".py", ".pyx", ".pxd", ".h", ".md"):
            for paper, there in SECTIONS.items():
                found = re.findall(rf"{paper}\b[^.|]*?\(?sections? ([\d., and()]*\d)", path.read_text())
                numbers = [number for each in found for number in re.findall(r"\d(?:\.\d)?", each)]
                assert set(numbers) <= set(there.split()), path
                cited.setdefault(f"{paper} {path.name}", []).extend(numbers)
    assert cited["PaGraph degree.py"] == cited["PaGraph devicetier.py"] == ["3.1"]
    assert cited["OUTRE macrolists.py"] == ["4.2"]
    assert cited["OUTRE saved_io.py"] == ["4.4"]
    assert cited["DaMoN chunks.py"] == cited["DaMoN chunkformat.py"] == ["2.3"]


def test_nothing_installs_featstore_by_name() -> None:
    """On PyPI the name is another package's: text names a clone (``pip install '.[pyg]'``), or what is missing itself."""
    sources = [path for top in ("featstore", "src_cython", "benchmarks", "examples") for path in (ROOT / top).rglob("*")]
    texts = [*LINKED, ROOT / "Makefile", *(path for path in sources if path.suffix in (".py", ".pyi", ".pyx", ".pxd"))]
    by_name = re.compile(r"pip install(?: -\S+)* ['\"]?featstore\b|featstore\[[a-z]+\]")
    found = {path.relative_to(ROOT).as_posix(): by_name.findall(path.read_text()) for path in texts}
    assert not {path: each for path, each in found.items() if each}
    for text in ("pip install 'featstore[pyg]'", "pip install -U featstore", "the extra featstore[plot]"):
        assert by_name.search(text)


def shown(page: Path) -> list[str]:
    """List a page's blocks of Python that are shown and not run: they need a cluster, or a library that is not here."""
    return re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_blocks_that_are_not_run_are_few_and_compile() -> None:
    found = {page.name: shown(page) for page in PAGES}
    assert {name: len(blocks) for name, blocks in found.items() if blocks} == {"moving.md": 2, "ray.md": 4}
    for name, blocks in found.items():
        for block in blocks:
            compile(block, name, "exec")


def run_graphbolts_block(folder: Path, block: str) -> None:
    load("stand-in")
    fetched = []
    datapipe = types.SimpleNamespace(fetch_feature=lambda store, node_feature_keys: fetched.append(node_feature_keys))
    with featstore.open(folder / "graph", memory="64MiB") as g:
        found: dict[str, Any] = {"g": g, "datapipe": datapipe}
        exec(compile(block, "moving.md", "exec"), found)
        assert fetched == [["x"]]
        ids = torch.tensor([7, 0, 7])
        assert torch.equal(found["store"].read("node", None, "x", ids), g.features["x"][ids])


def test_graphbolts_block_of_the_guide(guide_folder: Path) -> None:
    """Over a real store and a stand-in; tests/adapters/test_graphbolt_feature.py has GraphBolt itself."""
    (block,) = [block for block in shown(GUIDE / "moving.md") if "graphbolt" in block]
    run_in_fork(run_graphbolts_block, guide_folder, block)


def test_readme_starts_with_two_commands() -> None:
    first = re.search(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [shlex.split(line) for line in first[1].splitlines()] == [["$", "make", "demo"], ["$", "make", "test"]]


def test_control_a_wrong_block_fails(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nassert 1 == 2, 'line four'\n```\n\n```text\nnot python\n```\n")
    with pytest.raises(AssertionError, match=r"line 4(?s:.*)line four"):
        run_page(page, tmp_path)
