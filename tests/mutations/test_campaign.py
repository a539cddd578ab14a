"""The mutation campaign (tests/mutations/campaign.py): every mutation fits the source, and the tests named with it notice it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.campaign import ROOT, copy_tree, mutate, run_tests
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


def noticed(mutation: Mutation, folder: Path) -> bool:
    tree = copy_tree(folder / "tree")
    mutate(tree, mutation)
    return run_tests(tree, mutation.tests)[0]


def test_a_mutation_is_noticed_and_what_shows_nothing_is_not(tmp_path: Path) -> None:
    """Two controls in the same copy: a change that no test can see, and tests that are not there, which are an error."""
    (mutation,) = (each for each in MUTATIONS if each.name == SAMPLE)
    tree = copy_tree(tmp_path / "tree")
    mutate(tree, Mutation("harmless", "", "featstore/sampling/rng.py", "Bentley, Floyd", "Floyd, Bentley", mutation.tests))
    assert not run_tests(tree, mutation.tests)[0]
    with pytest.raises(RuntimeError, match="status 4"):
        run_tests(tree, ("tests/cache/test_rowmap.py::test_that_is_not_there",))
    mutate(tree, mutation)
    assert run_tests(tree, mutation.tests)[0]


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
    failed, printed = run_tests(copy_tree(tmp_path / "tree"), tests, limit_s=3000)
    assert not failed, printed


@pytest.mark.stress
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    assert noticed(mutation, tmp_path)
