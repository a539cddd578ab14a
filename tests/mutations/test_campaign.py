"""The mutation campaign (tests/mutations/campaign.py): every mutation fits the source, and the tests named with it notice it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import campaign
from tests.mutations.campaign import (
    FAILED,
    NOTICED,
    PASSED,
    ROOT,
    SURVIVED,
    TIMED_OUT,
    Run,
    copy_tree,
    judge,
    mutate,
    run_tests,
)
from tests.mutations.table import MUTATIONS, Mutation

SAMPLE = "sampler without neighbour cache"  # pure Python, and noticed within seconds


def test_every_mutation_fits_the_source() -> None:
    """Its text is there exactly once, so that none is left out; its tests are there too."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert mutation.changed(text) != text
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


def test_every_room_has_ten() -> None:
    """As many of each room's mechanisms are broken by hand; others are drawn, see test_drawn.py."""
    rooms = [path.name for path in (ROOT / "featstore").iterdir() if len([*path.rglob("*.py")]) > 1]
    assert len(rooms) > 20
    counts = Counter(Path(mutation.file).parts[1] for mutation in MUTATIONS)
    assert {room: counts[room] for room in rooms if counts[room] < 10} == {}


@pytest.mark.parametrize("old", ["is not there", "twice"])
def test_a_text_that_does_not_fit_is_an_error(old: str) -> None:
    mutation = Mutation("mine", "mine", "file", old, "", ("tests",))
    with pytest.raises(ValueError, match=r"'mine'.*not once"):
        mutation.changed("twice, twice")


def test_a_mutation_is_noticed_and_what_shows_nothing_is_not(tmp_path: Path) -> None:
    """Two controls in the same copy: a change that no test can see, and tests that are not there, which are an error."""
    (mutation,) = (each for each in MUTATIONS if each.name == SAMPLE)
    tree = copy_tree(tmp_path / "tree")
    mutate(tree, Mutation("harmless", "", "featstore/sampling/rng.py", "Bentley, Floyd", "Floyd, Bentley", mutation.tests))
    assert judge(tree, mutation.tests)[0] == SURVIVED
    with pytest.raises(RuntimeError, match="status 4"):
        run_tests(tree, ("tests/cache/test_rowmap.py::test_that_is_not_there",))
    mutate(tree, mutation)
    assert judge(tree, mutation.tests)[0] == NOTICED


# How the tests end, and their seconds: in the changed copy, the unchanged one, and the first again. Then the verdict and
# the last limits.
STOPPED, LATE = (TIMED_OUT, 100.0), (TIMED_OUT, 150.0)
RUNS: dict[str, tuple[list[tuple[str, float]], str, tuple[float, float]]] = {
    "hangs": ([STOPPED, (PASSED, 50.0), LATE], NOTICED, (150.0, 150.0)),
    "hangs, beside quick tests": ([STOPPED, (PASSED, 5.0), STOPPED], NOTICED, (120.0, 100.0)),
    "was slow, and passes": ([STOPPED, (PASSED, 50.0), (PASSED, 140.0)], TIMED_OUT, (150.0, 150.0)),
    "was slow, and fails": ([STOPPED, (PASSED, 50.0), (FAILED, 140.0)], NOTICED, (150.0, 150.0)),
    "a test's own mark stops it": ([STOPPED, (PASSED, 50.0), (TIMED_OUT, 149.0)], TIMED_OUT, (150.0, 150.0)),
    "so slow that nothing is told": ([STOPPED, (TIMED_OUT, 300.0)], TIMED_OUT, (360.0, 300.0)),
    "fails": ([(FAILED, 1.0)], NOTICED, (120.0, 100.0)),
    "passes": ([(PASSED, 1.0)], SURVIVED, (120.0, 100.0)),
}


@pytest.mark.parametrize("what", RUNS)
def test_a_time_out_is_noticed_only_if_it_comes_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    runs, verdict, last = RUNS[what]
    asked: list[tuple[bool, float, float]] = []

    def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float, test_s: float) -> Run:
        asked.append((tree == tmp_path, limit_s, test_s))
        ended, seconds = runs[len(asked) - 1]
        return Run(ended, "", seconds)

    monkeypatch.setattr(campaign, "run_tests", run_tests)
    monkeypatch.setattr(campaign, "copy_tree", lambda tree: tree)
    assert judge(tmp_path, ("tests",), 120.0, 100.0)[0] == verdict
    assert [is_changed for is_changed, _, _ in asked] == [True, False, True][: len(runs)]
    assert asked[-1][1:] == last


def test_tests_that_fail_without_the_mutation_show_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = iter([Run(TIMED_OUT, "", 100.0), Run(FAILED, "why", 1.0)])
    monkeypatch.setattr(campaign, "run_tests", lambda *given: next(runs))
    monkeypatch.setattr(campaign, "copy_tree", lambda tree: tree)
    with pytest.raises(RuntimeError, match=r"(?s)fail without a mutation.*why"):
        judge(tmp_path, ("tests",))


@pytest.mark.parametrize("method", ["thread", "signal", "whole"])
def test_each_way_to_stop_a_test_is_a_time_out(tmp_path: Path, method: str) -> None:
    """A test that waits for ever, stopped by pytest-timeout in either way, or with the whole run."""
    (tmp_path / "featstore").mkdir()
    (tmp_path / "featstore" / "__init__.py").touch()
    mark = "" if method == "whole" else f"@pytest.mark.timeout(1, method={method!r})\n"
    wait = "import threading, pytest\n" + mark + "def test_waits(): threading.Event().wait()\n"
    (tmp_path / "test_waits.py").write_text(wait + "def test_fails(): assert 0, 'Timeout (>'\n")
    limit_s = 3 if method == "whole" else 100
    assert run_tests(tmp_path, ("test_waits.py::test_waits",), limit_s, 100).ended == TIMED_OUT
    assert run_tests(tmp_path, ("test_waits.py::test_fails",)).ended == FAILED


@pytest.mark.stress
def test_a_core_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    old = "#define FEATSTORE_DRAWS_H\n"
    broken = Mutation(
        "broken",
        "",
        "src_cython/featstore/_core/kernels/draws.h",
        old,
        old + "#error broken\n",
        ("tests/sampling/test_draws.py",),
    )
    with pytest.raises(RuntimeError, match="does not compile"):
        mutate(copy_tree(tmp_path / "tree"), broken)


@pytest.mark.stress
def test_nothing_fails_without_a_mutation(tmp_path: Path) -> None:
    """The control: all those tests pass in a copy that nothing was changed in."""
    tests = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
    run = run_tests(copy_tree(tmp_path / "tree"), tests, limit_s=3000)
    assert run.ended == PASSED, run.printed


@pytest.mark.stress
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    mutate(tree, mutation)
    verdict, printed = judge(tree, mutation.tests)
    assert verdict == NOTICED, printed
