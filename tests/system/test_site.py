"""The documentation site builds without a warning, its links lead somewhere, and every public name has its entry."""

from __future__ import annotations

import ast
import os
import re
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup, Tag
from sphinx.cmd.build import main as sphinx
from sphinx.util.inventory import InventoryFile

from tests.support.programs import run_in_fork

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {
    "featstore.options": "featstore.strategies.options",
    "featstore.adapters.datasets.SOURCES": "featstore.adapters.datasets.sources.SOURCES",
}
pytestmark = pytest.mark.usefixtures("_program_server")
# Markup that came out as text, of either language: a role, a literal, a link, a table, a fence, a directive, an underlined title.
MARKUP = re.compile(r":\w+:`|``|\]\(|\|---|:::|\.\. \w+::|^[-=~]{4,}$|\*\*\w[^*\n]*\*\*", re.MULTILINE)


def exported_by(path: Path) -> set[str]:
    """Read a module's ``__all__`` without importing it, and whatever framework it adapts."""
    module = path.parent if path.name == "__init__.py" else path.with_suffix("")
    found = re.search(r"^__all__ = (\[.*?\])$", path.read_text(), re.DOTALL | re.MULTILINE)
    return {".".join([*module.relative_to(ROOT).parts, name]) for name in (ast.literal_eval(found[1]) if found else [])}


def public_names() -> set[str]:
    """Collect the names that the library, its adapters and its tests for plug-ins export, with the module that exports them."""
    package = ROOT / "featstore"
    files = [package / "__init__.py", package / "errors.py", package / "distributed" / "__init__.py"]
    files += [package / "testing" / f"{name}.py" for name in ("__init__", "faults", "limits")]
    return set[str]().union(*map(exported_by, [*files, *(package / "adapters").rglob("__init__.py")]))


def build(docs: str, to: str, *options: str) -> None:
    """Run Sphinx as ``make docs`` does, in a fork: most of the time of a new process is imports that are there."""
    warnings.simplefilter("ignore")  # of Python; Sphinx's own are errors
    os.environ["FEATSTORE_REPOSITORY"] = ""
    status = sphinx(["-W", "--keep-going", "-q", "-d", f"{to}/doctrees", *options, docs, f"{to}/site"])
    assert status == 0, "Sphinx has failed"


def read(site: Path) -> dict[Path, BeautifulSoup]:
    """Parse the site's pages."""
    return {path: BeautifulSoup(path.read_text(), "html.parser") for path in sorted(site.rglob("*.html"))}


def broken_links(pages: dict[Path, BeautifulSoup], root: Path) -> list[str]:
    """List links and pictures of the site whose file or anchor is not there."""
    anchors = {path: {tag["id"] for tag in soup.find_all(id=True)} for path, soup in pages.items()}
    found = []
    for path, soup in pages.items():
        for tag in soup.find_all(["a", "img", "script", "link"]):
            link = str(tag.get("href") or tag.get("src") or "")
            if not link or re.match(r"[a-z]+:|//", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            is_there = target.is_file() and target.is_relative_to(root)
            if not is_there or (anchor and target in anchors and anchor not in anchors[target]):
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def unreached(pages: dict[Path, BeautifulSoup], start: Path) -> list[str]:
    """List pages to which no links lead from ``start``."""
    seen, coming = {start}, [start]
    while coming:
        path = coming.pop()
        names = (unquote(str(tag["href"])).partition("#")[0] for tag in pages[path].find_all("a", href=True))
        linked = {(path.parent / name).resolve() for name in names if name} & pages.keys()
        coming += linked - seen
        seen |= linked
    return [str(path.relative_to(start.parent)) for path in pages.keys() - seen]


def empty_entries(soup: BeautifulSoup) -> list[str]:
    """List the entries of a page of the reference that say nothing."""
    found = []
    for entry in soup.select("dl.py"):
        names, text = [tag["id"] for tag in entry.find_all("dt", id=True, recursive=False)], entry.find("dd", recursive=False)
        if names and (not isinstance(text, Tag) or len(text.get_text(" ", strip=True)) < 10):
            found.append(str(names[0]))
    return found


def odd_signatures(soup: BeautifulSoup) -> list[str]:
    """List signatures of a page of the reference that Sphinx could not read, and so has left as they came."""
    return [text for entry in soup.select("dt.sig") if re.search(r"~|<\w", text := entry.get_text())]


def markup_shown(soup: BeautifulSoup) -> list[str]:
    """List pieces of a page's text, other than code, that look like markup."""
    article = soup.select_one("[role=main]")
    assert article is not None
    text = "".join("x" if part.find_parent(["code", "pre", "dt"]) else part for part in article.find_all(string=True))
    return [text[max(0, found.start() - 30) : found.end() + 30] for found in MARKUP.finditer(text)]


def test_the_site(tmp_path: Path) -> None:
    """One test, as building takes a quarter of a minute: pages, links, entries and their text.

    The site's own theme writes a tree of all pages beside each, which is most of the work. Here pages must lead to each other.
    """
    run_in_fork(build, str(DOCS), str(tmp_path), "-D", "html_theme=basic")
    site = (tmp_path / "site").resolve()
    pages = read(site)
    sources = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*") if path.suffix in (".md", ".rst")]
    assert len(sources) > 100
    assert not [path for path in sources if site / path not in pages]
    assert broken_links(pages, site) == []
    assert set(unreached(pages, site / "index.html")) <= {"search.html"}

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    entries = {name: item.uri for kind, items in inventory.items() if kind.startswith("py:") for name, item in items.items()}
    names = public_names()
    assert {"featstore.Loader", "featstore.adapters.pyg.NeighborLoader", "featstore.testing.StrategyContract"} <= names
    assert not sorted(name for name in names if not entries.get(ELSEWHERE.get(name, name), "").startswith("api/"))
    opening = pages[site / "api" / "datasets.html"].find("dt", id="featstore.open")
    assert "path" in opening.get_text()
    for path in sorted((site / "api").glob("*.html")):
        assert empty_entries(pages[path]) == odd_signatures(pages[path]) == [], path.name
    shown = {str(path): markup_shown(pages[site / path]) for path in sources}
    assert {path: each for path, each in shown.items() if each} == {}


def test_control_faults_of_a_site_are_found(tmp_path: Path) -> None:
    """A link to no file or anchor, a page that nothing links to, an empty entry, and markup as text."""
    good = '<a href="other.html#there">a</a> <a href="#top">b</a> <a href="https://x.org/y#z">c</a> <img src="a.png">'
    bad = '<a href="none.html">d</a> <a href="other.html#none">e</a> <img src="b.png">'
    entries = '<dl class="py"><dt id="f">f()</dt><dd>Return the number.</dd></dl><dl class="py"><dt id="g">g()</dt><dd></dd></dl>'
    entries += '<dl class="py"><dt class="sig">f(x: ~typing.Any)</dt></dl><dl class="py"><dt class="sig">f(x: Any)</dt></dl>'
    text = "<p>see :class:`X` <code>``</code></p><pre>](</pre>"
    (tmp_path / "index.html").write_text(f'<body id="top"><article role="main">{good}{bad}{entries}{text}</article></body>')
    (tmp_path / "other.html").write_text('<p id="there"></p>')
    (tmp_path / "alone.html").write_text("")
    (tmp_path / "a.png").touch()
    root = tmp_path.resolve()
    pages = read(root)
    index = root / "index.html"
    assert broken_links(pages, root) == [f"index.html: {link}" for link in ("none.html", "other.html#none", "b.png")]
    assert unreached(pages, index) == ["alone.html"]
    assert empty_entries(pages[index]) == ["g"]
    assert odd_signatures(pages[index]) == ["f(x: ~typing.Any)"]
    assert len(markup_shown(pages[index])) == 1


def test_control_warnings_fail_the_build(tmp_path: Path) -> None:
    """A link to no page, and a name in none of the reference."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text())
    page = "[a](none.md)\n\n`a`\n\n```python\nx\n```\n\n{py:func}`featstore.no_such_name`\n"
    (docs / "index.md").write_text(f"# Title\n\n{page}")
    with pytest.raises(AssertionError, match="Sphinx has failed") as failed:
        run_in_fork(build, str(docs), str(tmp_path))
    for fault in ("none.md", "no_such_name"):
        assert fault in str(failed.value)
