"""Plug-ins that lie, of every kind: an error that names them, or what the right plug-in gives; nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from featstore.cache import slots
from featstore.load import checkedstrategy
from featstore.sampling import foreign
from tests.campaigns import plugins
from tests.campaigns.checks import report
from tests.campaigns.plugins import KINDS, Graph, attempt


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    found = plugins.opened(tmp_path_factory.mktemp("plugins"))
    yield found
    found.close()


def lied(graph: Graph, kind: str, step: int = 1) -> tuple[Counter[str], list[str]]:
    """Tell each ``step``-th lie of a kind; return what came of them, and what is wrong."""
    counts, wrong = Counter[str](), []
    for case in list(KINDS[kind].lies())[::step]:
        found, what = attempt(graph, case)
        counts[found] += 1
        if what:
            wrong.append(f"{case.name}: {found}: {what}")
    return counts, wrong


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.stress)], ids=["some", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_lies_are_named_or_harmless(graph: Graph, kind: str, step: int) -> None:
    counts, wrong = lied(graph, kind, step)
    report("plug-ins", kind=kind, step=step, lies=counts.total(), **{name.replace(" ", "_"): n for name, n in counts.items()})
    assert not wrong, "\n".join(wrong)
    assert plugins.same(KINDS[kind].use(graph, KINDS[kind].right()), graph.right[kind]), (
        "the next right plug-in gives something else"
    )
    assert counts["named"] > counts.total() // 4


# --- controls: a library in which one check accepts all -------------------------------------------------------------------------


def without_check_of_victims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slots._core, "check_victims", lambda *_: (0, 0))


def without_check_of_samples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(foreign, "_check", lambda *_: None)


def without_check_of_plans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkedstrategy._CheckedEpoch, "_check_plan", lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "names", "remove"),
    [
        ("online", ("victims returns repeated",), without_check_of_victims),
        ("sampler", ("n_seeds is a number", "a hop is missing"), without_check_of_samples),
        ("strategy", ("a plan of other rows", "a plan of rows in another order"), without_check_of_plans),
    ],
)
def test_without_a_check_a_lie_is_noticed(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, kind: str, names: tuple[str, ...], remove: Callable[[pytest.MonkeyPatch], None]
) -> None:
    chosen = [case for case in KINDS[kind].lies() if case.name in names]
    assert len(chosen) == len(names)
    assert not any(attempt(graph, case)[1] for case in chosen)
    remove(monkeypatch)
    assert any(attempt(graph, case)[1] for case in chosen)
