"""A matrix without a graph: any form of input comes back, ``graph[name]`` is a feature, and what is wrong is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.graph import matrix
from tests.support.refusing import refuses


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


FORMS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda x, _: x,
    "tensor": lambda x, _: torch.from_numpy(x),
    "lists": lambda x, _: x.tolist(),
    "memmap": lambda x, p: np.load(save(p / "x.npy", x), mmap_mode="r"),
    "npy": lambda x, p: save(p / "x.npy", x),
    "npy fortran": lambda x, p: str(save(p / "x.npy", np.asfortranarray(x))),
    "blocks": lambda x, _: (x.shape, torch.float64, (x[first : first + 7] for first in range(0, len(x), 7))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_STEP", 8)
    x = np.random.default_rng(0).standard_normal((50, 3))
    with featstore.create(tmp_path / "m", FORMS[form](x, tmp_path), node_data={"y": np.arange(50)}, progress=False) as m:
        assert (m.num_nodes, m.num_edges) == (50, 0)
        np.testing.assert_array_equal(m["x"][[5, -1, 5]], x[[5, -1, 5]])
    m = featstore.open(tmp_path / "m", memory="64MiB")
    with m:
        assert m["x"] is m.features["x"]
        np.testing.assert_array_equal(m["x"][:], x)
        assert m.indptr.tolist() == [0] * 51
        m.verify(progress=False)
        seen = torch.cat([batch.y for batch in featstore.Loader(m, featstore.NeighborSampler(m, [1]), np.arange(50), 8)])
        assert sorted(seen.tolist()) == list(range(50))


def test_one_dimension_and_no_rows(tmp_path: Path) -> None:
    for k, x in enumerate((np.arange(5), np.zeros((0, 4), np.float32))):
        with featstore.create(tmp_path / f"m{k}", x, progress=False) as m:
            assert m["x"].shape == x.shape
            np.testing.assert_array_equal(m["x"][:], x)


def test_replacing(tmp_path: Path) -> None:
    featstore.create(tmp_path / "m", np.zeros(5), progress=False).close()
    refuses(FileExistsError, "", lambda: featstore.create(tmp_path / "m", np.ones(6), progress=False))
    with featstore.create(tmp_path / "m", np.ones(6), overwrite=True, progress=False, memory="9MiB") as m:
        assert m["x"][:].tolist() == [1] * 6
        assert m.budget.total == 9 << 20


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (3.0, ValueError, "x must have at least one dimension"),
        (np.zeros(3, complex), TypeError, "x: dtype complex128 cannot be stored"),
        ({"x": np.zeros(3)}, TypeError, "x must be one array, not a mapping: OutOfCoreGraph.create takes several features"),
        (((3, 2), "float32", iter([np.zeros((2, 2), np.float32)])), ValueError, "the blocks hold 2 rows instead of the 3"),
        ("missing.npy", FileNotFoundError, "missing.npy"),
    ],
)
def test_what_is_no_matrix(tmp_path: Path, x: Any, kind: type[Exception], message: str) -> None:
    refuses(kind, message, lambda: featstore.create(tmp_path / "m", x, progress=False))
    assert os.listdir(tmp_path) == []


def test_brackets_name_features(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        assert g["h"] is g.features["h"]
        refuses(KeyError, "no feature 'z'; there is 'h', 'x'", lambda: g["z"])
        refuses(KeyError, r"'y' is node data, not a feature: node_data\['y'\]", lambda: g["y"])
        for wrong in (0, [1, 2], ("a", "to", "b"), torch.arange(3)):
            refuses(TypeError, "a graph is indexed by the name of a feature, not by", lambda: g[wrong])
        refuses(TypeError, "not iterable", lambda: iter(g))
