"""Mutations drawn at random (tests/mutations/drawn.py): what is drawn, and that nothing is that no test could notice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import drawn
from tests.mutations.campaign import NOTICED, PASSED, ROOT, SURVIVED, TIMED_OUT, Run
from tests.mutations.drawn import draw, is_equivalent, own_tests, places
from tests.mutations.equivalent import EQUIVALENT

ROOMS = [
    "base",
    *sorted({path.relative_to(ROOT / "featstore").parts[0] for path in (ROOT / "featstore").glob("*/**/*.py")} - {"_core"}),
]
DRAWS = 1  # of each room

NOTHING = '''
"""A text of 1 < 2."""
import a
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import b
    c = 1 < 2
x: int | None = None
class A:
    """Is not 1 + 1."""
    field: "int | None"
    def __repr__(self) -> str:
        return str(1 + 1)
    def f(self, y: int | None, *, z: list[int | str]) -> int | None:
        """Say `not 1`."""
        assert y
        pairs = zip(y, z, strict=True)
'''
CASES = {
    "a < b": ["(a <= b)"],
    "a is not b": ["(a is b)"],
    "a * b": ["(a // b)"],
    "a and b or c": ["((a and b) and c)", "(a or b) or c"],
    "not a": ["(a)"],
    "a = -b": ["a = (b)"],
    "a = True": ["a = False"],
    "a = 7": ["a = (8)", "a = (6)"],
    "for a in b: break": ["for a in b: continue"],
    "def f(a=3): return a": ["def f(a=(4)): return a", "def f(a=(2)): return a", "def f(a=3): return None"],
    "raise ValueError(1 + 1)": ["pass"],
    "a.b = c": ["pass"],
    "a += c": ["pass"],
    "for a in zip(b or c, strict=True): d": ["for a in zip((b and c), strict=True): d"],
    "f('ä'); g()": ["pass; g()", "f('ä'); pass"],
}


@pytest.mark.parametrize("source", CASES)
def test_a_statement_has_these_mutations(source: str) -> None:
    assert sorted(each.changed(source) for each in places("file", source)) == sorted(CASES[source])


def test_texts_types_and_checks_of_the_library_have_none() -> None:
    assert [each.changed(NOTHING) for each in places("file", NOTHING)] == []


def test_a_seed_draws_the_same_again_and_another_one_others() -> None:
    assert draw("idmaps", 10, 1) == draw("idmaps", 10, 1) != draw("idmaps", 10, 2)
    assert len({(each.file, each.start) for each in draw("idmaps", 10, 1)}) == 10


def test_a_larger_count_draws_more_and_a_new_line_changes_no_other_draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So a draw that was mended stays so until its own line changes."""
    lines = [f"a{i} = {i} < {i + 1}" for i in range(50)]
    (tmp_path / "featstore" / "room").mkdir(parents=True)
    path = tmp_path / "featstore" / "room" / "module.py"
    monkeypatch.setattr(drawn, "ROOT", tmp_path)
    path.write_text("\n".join(lines))
    first = [each.lines(path.read_text())[1:] for each in draw("room", 10, 1)]
    assert [each.lines(path.read_text())[1:] for each in draw("room", 5, 1)] == first[:5]
    unlike = [text for text in lines if text not in {old for old, _ in first}]
    path.write_text("\n".join(["f()", *(text for text in lines if text not in unlike[:5])]))
    again = [each.lines(path.read_text())[1:] for each in draw("room", 10, 1)]
    assert [each for each in again if each[0] != "f()"] == first[: 10 - (("f()", "pass") in again)]


def test_lines_of_one_text_are_drawn_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "featstore" / "room").mkdir(parents=True)
    (tmp_path / "featstore" / "room" / "module.py").write_text("f()\n" * 40 + "g()\n" * 40)
    monkeypatch.setattr(drawn, "ROOT", tmp_path)
    found = draw("room", 40, 1)
    assert len({each.start for each in found}) == 40
    assert 0 < sum(each.start < 160 for each in found) < 40


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("featstore/idmaps/keys.py", ["idmaps/test_keys.py"]),
        ("featstore/budget.py", ["base/test_budget.py"]),
        ("featstore/graph/derive/aggregate.py", ["graph/test_aggregate.py"]),
        ("featstore/adapters/datasets/tables/reading.py", ["adapters/test_datasets_reading.py"]),
        ("featstore/adapters/ray/data.py", ["adapters/test_ray.py"]),  # of tests/tested_by.txt
    ],
)
def test_a_module_has_these_tests(file: str, tests: list[str]) -> None:
    assert own_tests(file) == tuple(f"tests/{each}" for each in tests)


@pytest.mark.parametrize("room", ["base", "idmaps", "cache"])
def test_what_is_drawn_is_another_program(room: str) -> None:
    for each in draw(room, 40, 0):
        source = (ROOT / each.file).read_text()
        assert ast.dump(ast.parse(each.changed(source))) != ast.dump(ast.parse(source)), each
        assert all((ROOT / test).is_file() for test in own_tests(each.file))


def test_each_that_is_listed_as_equivalent_is_a_mutation_and_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in {file for file, _, _ in EQUIVALENT}:
        source = (ROOT / file).read_text()
        possible = {(file, *each.lines(source)[1:]) for each in places(file, source)}
        assert {each for each in EQUIVALENT if each[0] == file} <= possible
    first = draw("idmaps", 1, 3)[0]
    monkeypatch.setitem(drawn.EQUIVALENT, (first.file, *first.lines((ROOT / first.file).read_text())[1:]), "mine")
    assert is_equivalent(first, (ROOT / first.file).read_text())
    others = draw("idmaps", 10**6, 3)
    assert others
    assert first not in others


@pytest.mark.parametrize("last", [SURVIVED, TIMED_OUT])
def test_what_was_not_noticed_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    """Its own tests run first, those of the room only if they noticed nothing, and the copy is whole again for the next one."""
    ran: list[tuple[str, ...]] = []
    chosen = draw("idmaps", 2, 1)

    def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float, test_s: float) -> Run:
        ran.append(tests)
        return Run(PASSED, "", 1.0)

    def judge(tree: Path, tests: tuple[str, ...], limit_s: float, test_s: float) -> tuple[str, str]:
        files = dict.fromkeys(each.file for each in chosen)  # both may be of one file
        changed = [file for file in files if (tree / file).read_text() != (ROOT / file).read_text()]
        ran.append((*changed, *tests))
        verdict = {2: NOTICED, 3: TIMED_OUT}.get(len(ran), last)
        return verdict, f"FAILED here, {limit_s} s, {test_s} s"

    def copy_tree(tree: Path) -> Path:
        for each in chosen:
            (tree / each.file).parent.mkdir(parents=True, exist_ok=True)
            (tree / each.file).write_text((ROOT / each.file).read_text())
        return tree

    monkeypatch.setattr(drawn, "run_tests", run_tests)
    monkeypatch.setattr(drawn, "judge", judge)
    monkeypatch.setattr(drawn, "copy_tree", copy_tree)
    assert drawn.main(["--room", "idmaps", "--count", "2", "--seed", "1", "--limit", "7"]) == 1
    one, two = chosen
    assert ran == [
        ("tests/idmaps",),
        (one.file, *own_tests(one.file)),
        (two.file, *own_tests(two.file)),
        (two.file, "tests/idmaps"),
    ]
    printed = capsys.readouterr().out
    assert f"noticed  {one.file}:{one.lines((ROOT / one.file).read_text())[0]} FAILED here, 7.0 s, 7.0 s\n" in printed
    assert f"{last:<9}{two.file}" in printed
    assert f"1 of 2 noticed, {int(last == TIMED_OUT)} timed out" in printed


@pytest.mark.stress
@pytest.mark.parametrize("room", ROOMS)
def test_what_is_drawn_is_noticed(room: str) -> None:
    """One that survives gets a test, or shows needless code, or changes nothing, which equivalent.py says."""
    assert drawn.main(["--room", room, "--count", str(DRAWS), "--seed", "2"]) == 0


def test_each_room_is_drawn_from() -> None:
    assert len(ROOMS) == 22
    assert all(len(draw(room, DRAWS, 2)) == DRAWS and (ROOT / "tests" / room).is_dir() for room in ROOMS)
