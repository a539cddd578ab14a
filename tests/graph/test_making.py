"""Features made of others, in their dataset: there at once, replaced, refused, and made while others change the dataset."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import BusyError
from featstore.storage.update import Update
from tests.support.refusing import refuses
from tests.support.whole_graph import skewed_graph

N = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "g"
    indptr, indices = skewed_graph(N, 12, [3, N - 1], 2_000)
    rng = np.random.default_rng(0)
    features = {
        "float32": rng.standard_normal((N, 17)).astype(np.float32),
        "float64": rng.standard_normal((N, 3, 2)),
        "vector": rng.standard_normal(N),
    }
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False).close()
    return path


def copy_of(path: Path, folder: Path) -> Path:
    shutil.copytree(path, folder / "g")
    return folder / "g"


def test_the_feature_is_there_at_once_and_after_opening_again(made: Path, tmp_path: Path) -> None:
    path = copy_of(made, tmp_path)
    with featstore.open(path, memory="32MiB") as g, featstore.open(path, memory="32MiB") as other:
        store = g.aggregate("float32", progress=False)
        assert g.features["float32_mean"] is store
        assert "float32_mean" not in other.features
        g.cache("float32_mean", "10%")
        expected = store[:]
        again = g.aggregate("float32", name="x2", progress=False)
        assert torch.equal(again[:], expected)
        refuses(ValueError, "already", lambda: g.aggregate("float32", progress=False))
        replaced = g.aggregate("float32", "sum", name="float32_mean", overwrite=True, progress=False)
        assert g.features["float32_mean"] is replaced
        assert torch.equal(store[:], expected), "a store that was handed out reads what it did"
    with featstore.open(path, memory="32MiB") as g:
        assert not torch.equal(g.features["float32_mean"][:], expected)
        assert torch.equal(g.features["x2"][:], expected)
        sampler = featstore.NeighborSampler(g, [3], seed=0)
        with featstore.Loader(g, sampler, np.arange(N), batch_size=50, features="x2", labels=None) as loader:
            assert all(torch.equal(batch.x, expected[batch.input_ids]) for batch in loader)


def test_files_of_replaced_features_go_with_the_last_handle(made: Path, tmp_path: Path) -> None:
    """Not before: stores that were handed out read them, and so do other handles. A handle that replaced nothing removes none."""
    path = copy_of(made, tmp_path)

    def held() -> set[str]:
        return {name for name in os.listdir(path) if name.startswith("node.y.") and name.endswith(".rows")}

    with featstore.open(path) as g:
        first = g.aggregate("float32", name="y", progress=False)
        expected = first[:].numpy()
        g.aggregate("float32", "sum", name="y", overwrite=True, progress=False)
        g.aggregate("float64", name="y", overwrite=True, progress=False)
        assert len(held()) == 3
        np.testing.assert_array_equal(first[:].numpy(), expected)
    assert len(held()) == 1
    with featstore.open(path) as other, featstore.open(path) as g:
        g.aggregate("float32", name="y", overwrite=True, progress=False)
        g.close()
        assert len(held()) == 2
        assert other.features["y"].dtype == torch.float64
        assert len(other.features["y"][:5]) == 5
    assert len(held()) == 2
    with featstore.open(path) as g:
        g.aggregate("float32", name="y", overwrite=True, progress=False)
    assert len(held()) == 1
    left = set(os.listdir(path))
    assert all(name.removesuffix(".sums") in left for name in left)


def test_what_cannot_be_made_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    path = copy_of(made, tmp_path)
    before = sorted(os.listdir(path))
    with featstore.open(path, memory="32MiB") as g:
        for arguments, error, words in (
            (("nothing",), KeyError, "no feature 'nothing'; there is"),
            (("float32", "max"), ValueError, "op must be one of mean, sum, gcn"),
        ):
            refuses(error, words, lambda: g.aggregate(*arguments, progress=False))
        for options, error, words in (
            ({"hops": 0}, ValueError, "hops must be at least 1"),
            ({"name": "a/b"}, ValueError, "a field has a name of"),
            ({"name": "float32"}, ValueError, "choose another"),
            ({"progress": 1}, TypeError, "progress"),
        ):
            refuses(error, words, lambda: g.aggregate("float32", **{"progress": False, **options}))
        with Update(path), pytest.raises(BusyError):
            g.aggregate("float32", progress=False)
    assert sorted(os.listdir(path)) == before


def test_a_dataset_that_was_changed_meanwhile_is_busy(made: Path, tmp_path: Path) -> None:
    path = copy_of(made, tmp_path)
    with featstore.open(path, memory="32MiB") as g, featstore.open(path, memory="32MiB") as other:
        other.aggregate("float32", name="y", progress=False)
        g.aggregate("float32", name="z", progress=False)  # what is made of others is no matter
        other.aggregate("vector", name="y", overwrite=True, progress=False)
        with featstore.open(path, memory="32MiB") as third:
            other.aggregate("float64", name="y", overwrite=True, progress=False)
            refuses(BusyError, "changed", lambda: third.aggregate("y", name="w", progress=False))
