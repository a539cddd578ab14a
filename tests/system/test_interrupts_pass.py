"""No code of the library keeps an interrupt to itself, nor opens files in a way in which one leaves them open."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import featstore

PACKAGE = Path(featstore.__file__).parent
# Handlers of BaseException that do not end by raising, by module, and why no interrupt is lost there.
HANDED_ON = {
    "cache/checkedplans.py": (1, "KeyboardInterrupt has a handler before it"),
    "cache/slots.py": (1, "what is no Exception is raised by the method that is called"),
    "cli/run.py": (1, "the program ends"),
    "estimate/copies.py": (1, "of a thread: its starter raises it"),
    "gather/prefetchrows.py": (1, "of a thread: the loop raises it"),
    "load/pipeline.py": (3, "of a stage: the loop raises it"),
    "plan/daemonthreads.py": (1, "of a task: who asks for its result raises it"),
    "plan/superbatches.py": (3, "of a thread: the loop raises it"),
    "strategies/devicefill.py": (1, "of a thread: the epoch's end raises it"),
    "testing/faults.py": (1, "the process ends"),
}
# What opens files in bytecodes of its own, where ``open_fd`` and ``remove_tree`` open them in compiled code.
OPENS = {"os.open", "os.dup", "os.memfd_create", "shutil.rmtree", "os.pipe"}
MAY_OPEN = {"cli/run.py": "the program ends", "testing/faults.py": "of tests"}
ALL = {"BaseException", "KeyboardInterrupt"}


def swallows(tree: ast.AST) -> Iterator[int]:
    """Find handlers of interrupts that do not end by raising, suppressions, and ``finally`` blocks that are left early."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ALL if node.type is None else {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)}
            if caught & ALL and not isinstance(node.body[-1], ast.Raise):
                yield node.lineno
        elif isinstance(node, ast.Try):
            left = (each for line in node.finalbody for each in ast.walk(line))
            yield from (each.lineno for each in left if isinstance(each, (ast.Return, ast.Break, ast.Continue)))
        elif isinstance(node, ast.Call) and ALL & {each.id for each in node.args if isinstance(each, ast.Name)}:
            yield from [node.lineno] if ast.unparse(node.func).endswith("suppress") else []


def opens(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in OPENS:
            yield f"{node.value.id}.{node.attr}"


@functools.cache
def modules() -> dict[str, ast.AST]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_handler_swallows_an_interrupt() -> None:
    found = Counter({name: len(list(swallows(tree))) for name, tree in modules().items()})
    assert +found == Counter({name: n for name, (n, _) in HANDED_ON.items()})


def test_files_are_opened_with_an_owner() -> None:
    assert {name for name, tree in modules().items() if list(opens(tree))} <= set(MAY_OPEN)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    f()\nexcept BaseException:\n    pass",
        "try:\n    f()\nexcept:\n    g()",
        "try:\n    f()\nexcept (OSError, KeyboardInterrupt):\n    g()",
        "def g():\n    try:\n        f()\n    finally:\n        return 1",
        "with contextlib.suppress(BaseException):\n    f()",
    ],
)
def test_a_swallow_is_found(code: str) -> None:
    assert list(swallows(ast.parse(code)))
    assert list(opens(ast.parse("fd = os.open(path, 0)")))
