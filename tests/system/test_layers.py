"""The layers hold: a file imports only from the layers below its own, the core knows no torch, and nothing unpickles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "featstore"
FILES = sorted(PACKAGE.rglob("*.py")) + sorted(PACKAGE.rglob("*.pyi"))
CORE = sorted((ROOT / "src_cython").rglob("*.pyx")) + sorted((ROOT / "src_cython").rglob("*.pxd"))

# Lowest first; packages of one rank are siblings and may not import each other.
RANKS = [
    {
        "errors",
        "config",
        "lazy",
        "registry",
        "budget",
        "epochmemory",
        "progress",
        "ranks",
        "display",
        "plotting",
        "distinct",
        "_compiled",
    },
    {"_core"},
    {"storage"},
    {"gather", "idmaps"},
    {"cache"},
    {"topology"},
    {"creation"},
    {"changes"},
    {"graph"},
    {"sampling", "partitioning"},
    {"inference"},
    {"plan"},
    {"pack"},
    {"estimate"},
    {"strategies"},
    {"load", "diagnosis"},
    {"adapters", "cli", "distributed"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
# config is below errors within the lowest rank; testing, the package's own __init__ and what that imports may import anything.
WITHIN = {
    ("errors", "config"),
    ("progress", "config"),
    ("registry", "errors"),
    ("registry", "config"),
    ("budget", "errors"),
    ("budget", "config"),
}
WITHIN |= {("epochmemory", "budget"), ("epochmemory", "errors"), ("ranks", "config")}
WITHIN |= {("display", "config"), ("budget", "display"), ("plotting", "errors"), ("plotting", "config")}
FREE = {"__init__", "__main__", "_public", "testing"}


def part_of(module: str) -> str:
    """Return the part of the library, such as ``storage``, that the dotted ``module`` belongs to ('' for featstore itself)."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else ""


@functools.cache
def imports_of(path: Path, module: str) -> list[tuple[int, str]]:
    """List line and absolute dotted name of everything that the file imports, inside functions and TYPE_CHECKING blocks too."""
    return list(_imports_of(path, module))


def _imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    is_package = path.stem == "__init__"
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                stem = module.split(".")
                stem = stem[: len(stem) - node.level + is_package]
                base = ".".join([*stem, base]) if base else ".".join(stem)
            # `from featstore import storage` imports featstore.storage
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def module_of(path: Path) -> str:
    """Return the dotted name of the module that the file holds."""
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)


def violations(path: Path, module: str) -> list[str]:
    """Return one line for each import of the file that the layer order forbids."""
    part = part_of(module)
    if part in FREE or not part:
        return []
    found = []
    for line, target in imports_of(path, module):
        if target.split(".")[0] != "featstore":
            continue
        other = part_of(target)
        if other == part or (part, other) in WITHIN:
            continue
        if other not in RANK or RANK[other] >= RANK[part]:
            found.append(f"{path}:{line}: {module} imports {target}")
    return found


def test_every_part_has_a_rank() -> None:
    parts = {part_of(module_of(path)) for path in FILES} - FREE - {""}
    assert parts <= set(RANK), "a new package needs a place in the layer order"


def test_imports_go_down() -> None:
    assert not [line for path in FILES for line in violations(path, module_of(path))]


def test_the_page_of_the_architecture_has_every_layer() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
    order, table = page.partition("\n| layer ")[::2]
    assert not [name for name in RANK if not re.search(rf"\b{name}\b", order) or f"`{name}`" not in table]


def test_a_folder_has_thirty_files_at_most() -> None:
    sizes = {str(folder): len(list(folder.glob("*.py"))) for folder in PACKAGE.rglob("*") if folder.is_dir()}
    assert not {name: size for name, size in sizes.items() if size > 30}


def _first_lines(source: str) -> list[str]:
    """List first lines of the docstrings of Python."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, owners))
    return [each.partition("\n")[0] for each in docstrings]


def _first_lines_of_cython(source: str) -> list[str]:
    """List first lines of the docstrings of Cython, which no parser of Python reads: of strings that begin a line."""
    return re.findall(r'^[ \t]*"""(\S.*?)(?:""")?$', source, re.MULTILINE)


def _questions(firsts: list[str]) -> list[str]:
    """List the first lines that begin with a question's word, and so name nothing."""
    return [first for first in firsts if re.match(r"(?:Return what|What|Where|How|Who|Which|Why|When)\b", first)]


def test_docstrings_name_their_object() -> None:
    """First lines are an imperative with its object, or a noun phrase; in tests, too."""
    firsts = {path: _first_lines(path.read_text()) for path in [*FILES, *Path(__file__).parents[1].rglob("*.py")]}
    firsts |= {path: _first_lines_of_cython(path.read_text()) for path in CORE}
    assert not {str(path): found for path, lines in firsts.items() if (found := _questions(lines))}


@pytest.mark.parametrize("first", ["What a row costs.", "Return what a row costs.", "Where rows are.\n\n    In memory."])
def test_docstrings_that_name_nothing_are_found(first: str) -> None:
    line = first.partition("\n")[0]
    for source in (f'"""{first}"""', f'class A:\n    """{first}"""', f'def f():\n    """{first}"""'):
        assert _questions(_first_lines(source)) == _questions(_first_lines_of_cython(source)) == [line]
    assert _first_lines_of_cython(f'cdef int f() except -1:\n    """{first}"""\n    return 0  # """What\n') == [line]
    assert not _questions(["Whatever the order is, rows are the same."])


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("featstore.storage.x", "from featstore.gather import plan"),
        ("featstore.storage.x", "import featstore.graph.dataset"),
        ("featstore.sampling.x", "from ..partitioning import fennel"),
        ("featstore.cache.x", "from featstore import graph"),
        ("featstore.load.x", "from featstore.testing import faults"),
        ("featstore.cli", "def f():\n    from featstore.adapters import pyg"),
        ("featstore.errors", "from featstore.budget import Budget"),
        ("featstore._core.x", "import featstore.storage.layout"),
    ],
)
def test_control_a_wrong_import_is_seen(tmp_path: Path, module: str, line: str) -> None:
    path = tmp_path / "x.py"
    path.write_text(line)
    assert len(violations(path, module)) == 1


def test_control_right_imports_pass(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from featstore.errors import FormatError\nfrom .layout import RowLayout\nfrom featstore._core import io\nimport numpy\n"
    )
    assert not violations(path, "featstore.storage.x")


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other, directly or by way of others."""
    reachable: dict[str, set[str]] = {}
    for module in imports:
        found: set[str] = set()
        todo = [module]
        while todo:
            for other in imports.get(todo.pop(), set()) - found:
                found.add(other)
                todo.append(other)
        reachable[module] = found
    groups = [{other for other in reachable[module] if module in reachable[other]} for module in imports]
    return [group for n, group in enumerate(groups) if group and group not in groups[:n]]


def imports_between(paths: dict[str, Path]) -> dict[str, set[str]]:
    """Return which of the modules each of them imports; those for type checkers, and within functions, too."""
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        found[module] = set()
        for _, name in imports_of(path, module):
            target = name
            while target and target not in paths:
                target = target.rpartition(".")[0]
            if target and target not in (module, "featstore"):
                found[module].add(target)
    return found


def test_no_circles() -> None:
    paths = {module_of(path): path for path in FILES if path.suffix == ".py"}
    assert not circles(imports_between(paths))


def test_control_a_circle_is_seen(tmp_path: Path) -> None:
    texts = {
        "one": "from featstore.x import two",
        "two": "import featstore.x.three",
        "three": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import One",
        "four": "from featstore.x.one import One",
    }
    paths = {}
    for name, text in texts.items():
        paths[f"featstore.x.{name}"] = tmp_path / f"{name}.py"
        paths[f"featstore.x.{name}"].write_text(text)
    assert circles(imports_between(paths)) == [{"featstore.x.one", "featstore.x.two", "featstore.x.three"}]


UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def test_no_pickle() -> None:
    found = [
        f"{path}:{line}: {target}"
        for path in FILES
        for line, target in imports_of(path, module_of(path))
        if target.split(".")[0] in UNPICKLERS or target in ("torch.load", "numpy.load")
    ]
    assert not found
    # np.load without allow_pickle=False spelled out, and torch.load at all, would unpickle too.
    calls = re.compile(r"\b(torch\.load|allow_pickle\s*=\s*True)\b")
    assert not [f"{path}: {hit[0]}" for path in FILES if (hit := calls.search(path.read_text()))]


def test_the_core_knows_no_torch() -> None:
    sources = [path for path in (ROOT / "src_cython").rglob("*") if path.suffix in (".pyx", ".pxd", ".pxi", ".h", ".c")]
    sources += sorted((PACKAGE / "_core").glob("*.py*i"))
    wrong = re.compile(r"^\s*(from|import|cimport|#\s*include\s*[<\"])\s*(torch|ATen|c10|numpy/)", re.MULTILINE)
    assert not [f"{path}: {hit[0].strip()}" for path in sources if (hit := wrong.search(path.read_text()))]


def test_frameworks_only_in_adapters() -> None:
    frameworks = {"torch_geometric", "dgl", "pyg_lib", "torch_sparse", "lightning", "accelerate", "ray"}
    assert not [
        f"{path}:{line}: {target}"
        for path in FILES
        if part_of(module_of(path)) != "adapters"
        for line, target in imports_of(path, module_of(path))
        if target.split(".")[0] in frameworks
    ]
