"""Weights put in the order of lists, against NumPy: in any number of parts, of any type; what fails leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, CorruptionError
from featstore.sampling import orderedweights
from featstore.sampling.orderedweights import spilled_bytes, weights_in_order

N = 60
ONE = ("_", "_", "_")


def create(path: Path, n_edges: int, seed: int, dtype: Any = np.float32) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make a graph of edges in no order; return its weights, and those in the order of the lists."""
    rng = np.random.default_rng(seed)
    edges, weights = rng.integers(0, N, (2, n_edges)), rng.pareto(1.0, n_edges).astype(dtype)
    order = np.lexsort((edges[0], edges[1]))
    features = {"w": weights, "column": weights[:, None]}
    featstore.OutOfCoreGraph.from_edge_index(path, edges, N, edge_features=features, progress=False, overwrite=True).close()
    return weights, weights[order]


def in_order(g: Any, folder: Path, name: str = "w", kind: Any = None) -> Any:
    """Put the weights in order, with files in a folder that is empty afterwards."""
    kind = kind or g.types.edges[ONE]
    try:
        return np.concatenate([*weights_in_order(g.edge_features[name], kind, g.topology.edge_ids, str(folder), g.budget)])
    finally:
        assert not os.listdir(folder)


@given(
    n_edges=st.integers(1, 900),
    seed=st.integers(0, 99),
    at_once=st.sampled_from([0, 1, 4, 256]),
    most=st.sampled_from([1, 7, 900]),
)
def test_equal_numpy_in_any_number_of_parts(tmp_path_factory: Any, n_edges: int, seed: int, at_once: int, most: int) -> None:
    folder = tmp_path_factory.mktemp("ordered")
    _, expected = create(folder / "g", n_edges, seed)
    (folder / "runs").mkdir()
    with pytest.MonkeyPatch.context() as patch, featstore.open(folder / "g", memory="32MiB", threads=1) as g:
        for name, value in (("_IDS_A_PART", at_once), ("_MOST_IDS", most), ("_MEMORY_FRACTION", 0)):
            patch.setattr(orderedweights, name, value)
        if g.topology.edge_ids is not None:
            left = g.budget.used
            assert np.array_equal(in_order(g, folder / "runs", ("w", "column")[seed % 2]), expected)
            assert g.budget.used <= left + 65536  # tables of checksums


@pytest.mark.parametrize("n_edges", [1, 1000, 10**6, 10**9, 10**11])
@pytest.mark.parametrize("available", [0, 1 << 20, 16 << 20, 1 << 30, 1 << 40])
def test_files_are_opened_for_many_numbers_at_once(n_edges: int, available: int) -> None:
    found = []

    class Left:
        def reserve(self, holder: str, n_bytes: int) -> Any:
            found.append(n_bytes)

    Left.available = available  # type: ignore[attr-defined]
    memory = orderedweights._Memory(Left(), n_edges)  # type: ignore[arg-type]
    assert memory.n_rows * memory.n_parts >= n_edges
    assert memory.n_parts == 1 or memory.n_ids >= 256 * memory.n_parts
    assert found[0] <= max(available / 2, 2 * (64 * 32 * 256 * n_edges) ** 0.5 * 1.5) + 200_000


@pytest.mark.parametrize(("dtype", "width"), [(np.float16, 4), (np.float32, 4), (np.float64, 8), (np.int64, 8), (np.uint8, 4)])
def test_every_type_is_exact(tmp_path: Path, dtype: Any, width: int) -> None:
    _, expected = create(tmp_path / "g", 5000, 1, dtype)
    (tmp_path / "runs").mkdir()
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        found = in_order(g, tmp_path / "runs")
        assert np.array_equal(found.astype(np.float64), expected.astype(np.float64))
        numbers = g.topology.edge_ids
        assert numbers is not None
        assert spilled_bytes(g.edge_features["w"], numbers, 5000) == 5000 * (width + numbers.dtype.itemsize)


def test_damaged_numbers_and_too_little_memory_are_errors(tmp_path: Path) -> None:
    create(tmp_path / "g", 3000, 6)
    (tmp_path / "runs").mkdir()
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        kind, used = g.types.edges[ONE], g.budget.used
        wrong = orderedweights.EdgeType(kind.key, kind.src, kind.dst, kind.first_list, 5, kind.n_edges - 5)
        with pytest.raises(CorruptionError, match=r"edge \d+ cannot be number [0-4] of the input"):
            in_order(g, tmp_path / "runs", kind=wrong)
        with g.budget.reserve("another", g.budget.available - 1000), pytest.raises(BudgetError, match="weights put in order"):
            in_order(g, tmp_path / "runs")
        assert g.budget.used <= used + 65536
