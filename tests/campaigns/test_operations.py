"""The states that campaigns compare: what an operation might mix up, leave out or do twice is another state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from tests.campaigns.operations import N, arrays, labels, make_from_edges, state, tables_and_an_old_dataset
from tests.campaigns.operations import import_tables as import_them

ROWS = [3, 4]


def change(update: Callable[[featstore.OutOfCoreGraph], object]) -> Callable[[Path], None]:
    def changed(root: Path) -> None:
        with featstore.open(root / "g", memory="16MiB") as g:
            update(g)

    return changed


def other_edges(order: Any, pairs: np.ndarray) -> Callable[[Path], None]:
    """The dataset of other edges, or of the same in another order."""

    def make(root: Path) -> None:
        nodes: dict[str, Any] = {"features": {"x": arrays("old")[1]}, "node_data": {"y": labels("old")}}
        w = {"w": np.arange(5000, dtype=np.int32)}
        featstore.OutOfCoreGraph.from_edge_index(
            root / "g", pairs[:, order], N["old"], **nodes, edge_features=w, overwrite=True, progress=False
        ).close()

    return make


EDGES = arrays("old")[0]
OTHERS = EDGES.copy()
OTHERS[0, [10, 11]] = EDGES[0, [11, 10]]
SWAPPED = np.r_[0:10, 11, 10, 12:5000]
WRONG: dict[str, Callable[[Path], None]] = {
    "two rows": change(lambda g: g.features["x"].update(ROWS, arrays("old")[1][ROWS[::-1]], progress=False)),
    "two labels": change(lambda g: g.update_data("y", ROWS, labels("old")[ROWS[::-1]], progress=False)),
    "two rows of edges": change(lambda g: g.edge_features["w"].update(ROWS, np.array([4, 3], np.int32), progress=False)),
    "the ends of two edges": other_edges(np.arange(5000), OTHERS),
    "the numbers of two edges": other_edges(SWAPPED, EDGES),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_changed_places_is_another_state(what: str, tmp_path: Path) -> None:
    make_from_edges(tmp_path / "g", "old")
    before = state(tmp_path)
    other_edges(np.arange(5000), EDGES)(tmp_path)
    assert state(tmp_path) == before
    WRONG[what](tmp_path)
    try:
        after = state(tmp_path)
    except AssertionError:  # it is none of the datasets
        return
    assert after != before


def test_names_that_changed_places_are_another_state(tmp_path: Path) -> None:
    tables_and_an_old_dataset(tmp_path)
    import_them(tmp_path)
    before, (nodes, edges) = state(tmp_path), (tmp_path / "in" / f"{name}.csv" for name in ("nodes", "edges"))
    for file in (nodes, edges):  # names alone: the graph is the same
        text = file.read_text().replace("p3,", "q,").replace("p4,", "p3,").replace("q,", "p4,")
        file.write_text(text.replace("p3\n", "q\n").replace("p4\n", "p3\n").replace("q\n", "p4\n"))
    import_them(tmp_path)
    after = state(tmp_path)
    assert after != before
    assert {key for key in before[1] if before[1][key] != after[1][key]} == {"names of _"}
