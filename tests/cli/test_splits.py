"""The names of splits, what is said of others, and which labels are class ids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.cli.splits import count_classes, split_seeds, unknown_splits
from tests.support.sampled import covering

N = 120
ORDER = np.random.default_rng(0).permutation(N)
TRAINING = ["--epochs", "1", "--hidden", "4", "--batch-size", "50", "--fanouts", "2,2"]


def dataset(path: Path, **node_data: Any) -> Path:
    x = np.random.default_rng(1).standard_normal((N, 4)).astype(np.float32)
    data = {"y": np.arange(N) % 3, **node_data}
    indptr, indices = np.arange(0, 2 * N + 1, 2), np.arange(2 * N) % N
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    return path


def mask(ids: np.ndarray) -> np.ndarray:
    return np.isin(np.arange(N), ids)


@pytest.mark.parametrize("name", ["val_idx", "valid_idx", "val_mask", "valid_mask"])
def test_every_name_of_the_validation_split_gives_its_accuracy(tmp_path, capsys, name) -> None:
    held_out = ORDER[60:90]
    path = dataset(tmp_path / "g", train_idx=ORDER[:60], **{name: mask(held_out) if name.endswith("mask") else held_out})
    with featstore.open(path) as g:
        assert sorted(split_seeds(g, "val", "y").tolist()) == sorted(held_out.tolist())
        assert split_seeds(g, "test", "y") is None
    assert main(["train", str(path), *TRAINING, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["epochs"][0]["val_accuracy"] is not None


def test_the_first_name_that_is_there_counts(tmp_path: Path) -> None:
    names = {"val_idx": ORDER[:1], "valid_idx": ORDER[:2], "val_mask": mask(ORDER[:3]), "valid_mask": mask(ORDER[:4])}
    for n, left in enumerate(range(4), 1):
        with featstore.open(dataset(tmp_path / f"g{n}", **dict(list(names.items())[left:]))) as g:
            assert len(split_seeds(g, "val", "y")) == n


@pytest.mark.parametrize("quiet", [[], ["--json"]])
def test_what_is_no_split_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: list[str]) -> None:
    path = dataset(tmp_path / "g", train_mask=mask(ORDER[:60]), dev_idx=ORDER[60:90], heldout_mask=mask(ORDER[90:]), idx=ORDER)
    assert main(["train", str(path), *TRAINING, *quiet]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(
        "featstore: node data not used as a split: dev_idx, heldout_mask. Names of splits are train: train_idx"
    )
    assert "val: val_idx, valid_idx, val_mask, valid_mask" in said


def described(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> tuple[dict[str, Any], str]:
    assert main(["train", str(path), *TRAINING, "--json", *more]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize(("dtype", "shape"), covering(["int64", "int8", "float16", "float32", "float64"], [(N,), (N, 1)]))
def test_labels_as_datasets_have_them(tmp_path, capsys, shape, dtype) -> None:
    """A column, whole floats, and NaN for no label train as the same integers do, and what is left out is said."""
    splits = {"train_idx": ORDER[:60], "val_idx": ORDER[60:90]}
    plain = np.arange(N) % 3
    plain[ORDER[:5]] = plain[ORDER[60:67]] = -1
    given = plain.astype(dtype).reshape(shape)
    if given.dtype.kind == "f":
        given[given < 0] = np.nan
    want, said = described(capsys, dataset(tmp_path / "plain", **splits, y=plain))
    found, said_too = described(capsys, dataset(tmp_path / "given", **splits, y=given))
    assert said == said_too
    assert said == "featstore: nodes without a label in 'y' (negative, NaN) are left out: 5 of 60 of train, 7 of 30 of val\n"
    assert found["losses"] == want["losses"]
    assert len(found["losses"]) > 0
    assert main(["train", str(tmp_path / "given"), "--unlabelled", "error"]) == 2
    assert "5 of 60 of train, 7 of 30 of val; --unlabelled skip leaves them out" in capsys.readouterr().err
    assert [e["val_accuracy"] for e in found["epochs"]] == [e["val_accuracy"] for e in want["epochs"]]
    with featstore.open(tmp_path / "given") as g:  # a loader delivers what is there
        batch = next(iter(featstore.Loader(g, featstore.NeighborSampler(g, [2]), np.arange(N), N, shuffle=False)))
        np.testing.assert_array_equal(batch.y.numpy(), given)
        assert batch.y.numpy().dtype == given.dtype


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.linspace(-1, 1, N), "labels: 'y' has float64 values such as -0.983193, "),
        (np.linspace(0, 1, N, dtype=np.float32), "labels: 'y' has float32 values such as 0.00840336, which are no class ids"),
        (np.where(np.arange(N) == 7, np.inf, 1.0), "labels: 'y' has float64 values such as inf, which are no class ids"),
        (np.eye(N, 3), "labels: 'y' has shape (120, 3); training takes one class id a node, of shape (n,) or (n, 1)"),
        (np.arange(50), "labels: 'y' has 50 entries for 120 nodes"),
        (np.where(np.arange(N) == 3, 100_000, 0), "labels: 'y' has class ids up to 100000; training takes ids from 0 to 99999"),
        (np.arange(N) * 10**7, "labels: 'y' has class ids up to 1190000000; training takes ids from 0 to 99999"),
        (np.arange(N) * 1e30, "labels: 'y' has class ids up to "),
        (np.full(N, np.nan), "the dataset has no training seeds: its 'train_idx' or 'train_mask' names no node with a label"),
    ],
)
def test_labels_that_are_no_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str], y: np.ndarray, message: str) -> None:
    assert main(["train", str(dataset(tmp_path / "g", train_idx=ORDER[:60], y=y)), *TRAINING]) == 2
    assert message in capsys.readouterr().err


def test_as_many_classes_as_there_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dataset(tmp_path / "g", train_idx=ORDER[:60], y=np.where(np.arange(N) == 3, 99_999, 0))
    described(capsys, path, "--hidden", "1")


def test_classes_are_counted_in_parts() -> None:
    """The largest class may be in any of them."""
    for at in (0, 1 << 20):
        y = torch.zeros((1 << 20) + 1, dtype=torch.int8, device="cpu")
        y[at] = 7
        assert count_classes(SimpleNamespace(num_nodes=len(y), node_data={"y": y}), "y") == 8


def test_a_mask_of_whole_numbers_is_one(tmp_path: Path) -> None:
    with featstore.open(dataset(tmp_path / "g", train_mask=mask(ORDER[:60]).astype(np.uint8))) as g:
        assert split_seeds(g, "train", "y").tolist() == sorted(ORDER[:60].tolist())


def test_nodes_of_splits_are_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ids, message in [
        ("train_idx", np.array([3, N]), f"'train_idx': seed {N} at position 1 is not a node"),
        ("train_mask", np.ones(7, bool), "must have one entry a node (120), not 7"),
        ("val_idx", np.array([0.5]), "'val_idx': seeds must be integers, not float64"),
    ]:
        path = dataset(tmp_path / name, **{"train_idx" if name == "val_idx" else "idle": ORDER[:9], name: ids})
        assert main(["train", str(path), *TRAINING]) == 2
        assert message in capsys.readouterr().err


def test_a_packs_seeds_have_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pack may be of any nodes; training does not take a node without a label for one of a class."""
    y = np.where(np.arange(N) % 10 == 0, np.nan, 1.0)
    path, pack = dataset(tmp_path / "g", train_idx=ORDER[:60], some=np.arange(50), y=y), tmp_path / "p"
    sampled = ["--fanouts", "2,2", "--batch-size", "50", "--seeds", "some", "--cache", "0.5"]
    assert main(["pack", str(path), str(pack), *sampled, "--epochs", "1"]) == 0
    capsys.readouterr()
    given = ["--strategy", "packed", "--pack", str(pack), "--cache", "0.5", "--epochs", "1", "--hidden", "4"]
    assert main(["train", str(path), *given]) == 2
    assert "labels: 5 of the 50 seeds of batch 0 have no label" in capsys.readouterr().err


def test_names_that_look_like_splits() -> None:
    names = ["train_idx", "valid_mask", "test_idx", "y", "index", "validation_idx", "train_index", "trainidx", "dev_mask"]
    assert unknown_splits(names) == ["dev_mask", "validation_idx"]
