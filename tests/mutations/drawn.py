"""Mutations drawn at random over a room's Python files; the room's own tests must notice them.

``python -m tests.mutations.drawn --room idmaps --count 10 --seed 0`` draws ten, runs the tests of each in a copy of the tree, and
prints which were noticed. A module's own tests are those of its name, or of its line in tests/tested_by.txt; they run first,
and those of its room after them if they noticed nothing. The same seed draws the same mutations from the same lines, and a
larger count draws more beside them.

The operators are few, and over :mod:`ast`. cosmic-ray, the library that offers its own, was tried: it mutates annotations (693 of
its 5,515 places in the cache), removes no statement and no returned value, and brings 27 packages of which it needs one.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.mutations.campaign import LIMIT_S, LONGER, NOTICED, PASSED, ROOT, SURVIVED, TIMED_OUT, copy_tree, judge, run_tests
from tests.mutations.equivalent import EQUIVALENT

__all__ = ["Drawn", "draw", "is_equivalent", "main", "own_tests", "places"]

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SHOWN = ("__repr__", "__str__", "_repr_html_")  # functions whose texts are for people
UNSEEN = (ast.JoinedStr, ast.Assert, ast.AnnAssign, ast.Import, ast.ImportFrom)  # messages, the library's own checks, types


@dataclass(frozen=True)
class Drawn:
    """One mutation: the bytes ``[start, end)`` of a file become ``new``."""

    file: str
    start: int
    end: int
    new: str

    def changed(self, source: str) -> str:
        """Return the file's text with the mutation in it."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def lines(self, source: str) -> tuple[int, str, str]:
        """Return the number of the first line that it changes, and the changed lines before and after, without indentation."""
        first, last = (source.encode().count(b"\n", 0, place) for place in (self.start, self.end))
        old = " ".join(line.strip() for line in source.split("\n")[first : last + 1])
        return first + 1, old, self.changed(source).split("\n")[first].strip()


def variants(node: ast.AST) -> Iterator[str]:
    """Yield the texts that may take a node's place."""
    match node:
        case ast.Compare(ops=[operator]):
            yield f"({ast.unparse(ast.Compare(node.left, [OPERATORS[type(operator)]()], node.comparators))})"
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(operator)](), node.right))})"
        case ast.BoolOp():
            yield f"({ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield repr(not node.value)
        case ast.Constant(value=int()):
            yield from (f"({node.value + 1})", f"({node.value - 1})")
        case ast.Break():
            yield "continue"
        case ast.Continue():
            yield "break"
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what of a node is code that runs, and is not there for people alone."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if node.name not in SHOWN:
            yield from (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None), *node.body)
    elif isinstance(node, ast.ClassDef):
        yield from node.body
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        yield from node.orelse
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func) in {"cast", "warnings.warn"}):
        return
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
        yield from node.args  # strict= is a check of the library's own
    else:
        yield from ast.iter_child_nodes(node)


def places(file: str, source: str) -> Iterator[Drawn]:
    """Yield every mutation of a file's text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, UNSEEN):
            continue
        for new in variants(node):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield Drawn(file, start, end, new)
        left += children(node)


def is_equivalent(drawn: Drawn, source: str) -> bool:
    """Return whether the list says that the mutation changes nothing that anyone was promised."""
    return (drawn.file, *drawn.lines(source)[1:]) in EQUIVALENT


def draw(room: str, count: int, seed: int) -> list[Drawn]:
    """Draw mutations of a room: each of another line, each line as likely as any other.

    Lines are drawn by hashes of their texts, so that a change of some lines leaves the draws of others as they are.
    """
    lines: dict[tuple[str, str, int], list[tuple[int, Drawn]]] = {}
    modules = (ROOT / "featstore").glob("*.py") if room == "base" else (ROOT / "featstore" / room).rglob("*.py")
    for path in sorted(modules):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text()
        texts = [text.strip() for text in source.split("\n")]
        for each in places(file, source):
            if not is_equivalent(each, source):
                number, _, new = each.lines(source)
                text, before = texts[number - 1], texts[: number - 1]
                lines.setdefault((file, text, before.count(text)), []).append((_hash(seed, new), each))
    drawn = sorted(lines, key=lambda line: _hash(seed, *line))[:count]
    return [min(lines[line], key=lambda variant: variant[0])[1] for line in drawn]


def _hash(*values: object) -> int:
    return int(xxhash.xxh3_64_intdigest(repr(values).encode()))


def own_tests(file: str) -> tuple[str, ...]:
    """Return a module's own files of tests."""
    _, *rooms, name = file.removesuffix(".py").split("/")
    named = dict(
        line.split(": ") for line in (ROOT / "tests/tested_by.txt").read_text().splitlines() if line.startswith("featstore")
    )
    adapter = f"{rooms[1]}_" if rooms[:1] == ["adapters"] else ""
    paths = [f"{(*rooms, 'base')[0]}/{adapter}{name}"] if file not in named else named[file].split()
    tests = [f"tests/{folder}/test_{rest}.py" for folder, _, rest in (path.partition("/") for path in paths)]
    return tuple(each for each in tests if (ROOT / each).exists())


def main(arguments: list[str] | None = None) -> int:
    """Draw mutations of a room and run its tests on each; return how many were not noticed."""
    parser = argparse.ArgumentParser(description="Draw mutations of a room, and run its tests on each.")
    parser.add_argument("--room", required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the tests of one")
    options = parser.parse_args(arguments)
    missed = timed_out = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, room = copy_tree(Path(folder) / "tree"), f"tests/{options.room}"
        control = run_tests(tree, (room,), LONGER * options.limit, options.limit)
        if control.ended != PASSED:
            raise SystemExit(f"{room} fails, or takes too long, without a mutation:\n{control.printed}")
        chosen = draw(options.room, options.count, options.seed)
        for each in chosen:
            path, source = tree / each.file, (ROOT / each.file).read_text()
            path.write_text(each.changed(source))
            tests = own_tests(each.file)
            verdict, printed = judge(tree, tests, options.limit, options.limit) if tests else (SURVIVED, "")
            if verdict != NOTICED:
                verdict, printed = judge(tree, (room,), options.limit, options.limit)
            path.write_text(source)
            by = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR", "ImportError"))] or ["stopped"]
            line, old, new = each.lines(source)
            print(f"{verdict:<9}{each.file}:{line} {by[0] if verdict == NOTICED else ''}", flush=True)
            print(f"  - {old}\n  + {new}", flush=True)
            missed += verdict != NOTICED
            timed_out += verdict == TIMED_OUT
    print(f"{options.room}, seed {options.seed}: {len(chosen) - missed} of {len(chosen)} noticed, {timed_out} timed out")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
