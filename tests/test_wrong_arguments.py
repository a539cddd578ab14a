"""Arguments of the wrong kind: an error that names the argument, before anything is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.storage import rundir

N = 60


def create(path: Path, features: Any, **options: Any) -> featstore.OutOfCoreGraph:
    indptr = np.arange(0, 3 * N + 1, 3)
    indices = np.arange(3 * N) % N
    return featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False, **options)


@pytest.fixture(scope="module")
def g(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("data") / "g"
    create(path, {"x": np.ones((N, 4), np.float32)}, node_data={"y": np.zeros(N)}).close()
    with featstore.open(path, memory="16MiB") as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": np.ones((N, 4))}, "features must be a mapping of names to arrays"),
        ({"features": {}, "node_data": [1]}, "node_data must be a mapping of names to arrays"),
        ({"features": {}, "edge_features": torch.ones(3)}, "edge_features must be a mapping of names to arrays"),
        ({"features": {"x": np.ones(N), "z": np.full(N, "a")}}, "feature 'z': dtype <U1 cannot be stored"),
        ({"features": {"x": torch.ones(N, dtype=torch.complex64)}}, "feature 'x': dtype torch.complex64 cannot be stored"),
    ],
)
def test_of_create(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        create(tmp_path / "g", **options)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: featstore.NeighborSampler(g, 5), "fanouts must be a sequence of integers"),
        (lambda g: featstore.NeighborSampler(g, [1.5]), "fanouts must be a sequence of integers"),
        (lambda g: featstore.NeighborSampler(g, "5,5"), "fanouts must be a sequence of integers"),
        (lambda g: featstore.NeighborSampler(g, [3], seed=None), "seed must be an integer"),
        (lambda g: featstore.NeighborSampler(g.path, [3]), r"g must be an open graph, not a path: featstore.open\("),
        (lambda g: g.features["x"].take([1], coalesce_gap="4KiB"), "coalesce_gap must be an integer"),
    ],
)
def test_of_samplers_and_stores(g: Any, make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(g)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(N)}, r"labels must be given by name, of \['y'\], not as a Tensor"),
        ({"features": None}, r"features must be given by name, of \['x'\], not as a NoneType"),
        ({"features": [torch.zeros(N)]}, "features must be given by name"),
        ({"seeds": 5}, "seeds must be an array of ids, a boolean mask or batches, not a int"),
        ({"seeds": 5, "batch_size": None}, "seeds must be an array of ids"),
    ],
)
def test_of_loaders(g: Any, options: dict[str, Any], message: str) -> None:
    given = {"seeds": np.arange(9), "batch_size": 3, "features": "x", "labels": None} | options
    with pytest.raises(TypeError, match=message):
        featstore.Loader(g, featstore.NeighborSampler(g, [2]), **given)


def test_run_files_where_no_directory_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, where a parent that others remove is made again."""
    monkeypatch.setattr(rundir, "_MOST_TRIES", 3)
    with pytest.raises(FileNotFoundError, match="/proc"):
        rundir.RunDirectory("/proc")


def test_the_package_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "featstore", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("featstore ")
