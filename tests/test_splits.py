"""The names of splits, and what is said of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.cli.training import split_seeds, unknown_splits

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
def test_every_name_of_the_validation_split_gives_its_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
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


def test_names_that_look_like_splits() -> None:
    names = ["train_idx", "valid_mask", "test_idx", "y", "index", "validation_idx", "train_index", "trainidx", "dev_mask"]
    assert unknown_splits(names) == ["dev_mask", "validation_idx"]
