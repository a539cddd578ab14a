"""MAG240M's layout in small against a dataset of the same arrays; numbers and splits that only files of torch.save have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featstore.adapters.datasets import mag240m
from featstore.adapters.datasets.mag240m import PUBLISHED
from featstore.errors import CorruptionError, FormatError
from tests.support.commands import run
from tests.support.imports import TINY, assert_same, follow_advice, refused
from tests.support.typed import CITES, WRITES, TypedArrays

AFFILIATED = ("author", "affiliated_with", "institution")
N = {"author": 40, "institution": 5, "paper": 70}


def write(root: Path) -> TypedArrays:
    """Write the layout, with its files of torch.save; return the arrays of the dataset that it must become."""
    rng = np.random.default_rng(2)
    edges = {
        AFFILIATED: np.stack([rng.integers(0, 40, 50), rng.integers(0, 5, 50)]),
        WRITES: np.stack([rng.integers(0, 40, 200), rng.integers(0, 70, 200)]),
        CITES: rng.integers(0, 70, (2, 300)),
    }
    processed = root / "processed"
    for key, pairs in edges.items():
        (processed / "___".join(key)).mkdir(parents=True)
        np.save(processed / "___".join(key) / "edge_index.npy", pairs)
    x = rng.standard_normal((70, 8)).astype(np.float16)
    y = rng.integers(0, 9, 70).astype(np.float32)
    y[20:] = np.nan
    year = rng.integers(2000, 2021, 70).astype(np.int16)
    (processed / "paper").mkdir()
    for name, array in (("node_feat", x), ("node_label", y), ("node_year", year)):
        np.save(processed / "paper" / f"{name}.npy", array)
    splits = {"train": np.arange(12), "valid": np.arange(12, 20), "test-whole": np.arange(20, 30)}
    splits |= {"test-dev": np.arange(20, 26), "test-challenge": np.arange(26, 30)}
    torch.save(splits, root / "split_dict.pt")
    torch.save({**N, "num_classes": 9, "train": [1]}, root / "meta.pt")
    data = {
        "node_year": year,
        "y": y,
        "train_idx": splits["train"],
        "valid_idx": splits["valid"],
        "test_idx": splits["test-whole"],
    }
    data |= {"test_dev": splits["test-dev"], "test_challenge": splits["test-challenge"]}
    order = ("author", "institution", "paper")
    return TypedArrays({kind: N[kind] for kind in order}, edges, {"paper": {"x": x}}, {"paper": data})


def test_the_same_dataset_after_the_advised_conversions(tmp_path: Path) -> None:
    graph, root = write(tmp_path / "mag"), tmp_path / "mag"
    for name in ("meta", "split_dict"):
        caught = refused(
            FormatError, f"{name}.pt: .* can run code", tmp_path / "g", lambda: mag240m(root, tmp_path / "g", **TINY)
        )
        follow_advice(caught.value)
        assert (root / f"{name}.npz").exists()
    report = mag240m(root, tmp_path / "g", **TINY)
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.nodes == N
    assert report.unlabelled == {"paper/y": 50}
    assert report.splits == {"paper/train_idx": 12, "paper/valid_idx": 8, "paper/test_idx": 10}
    assert report.notes == ["test_idx is the split test-whole"]


def test_numbers_that_are_given_or_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "mag")
    (tmp_path / "mag" / "split_dict.pt").unlink()
    options = ("--num-nodes", "author=40", "institution=5", "--reverse", "--memory", "9MiB")
    found = run(capsys, "import", "mag240m", tmp_path / "mag", tmp_path / "g", *options)
    assert found["nodes"] == N
    assert found["edges"]["paper,rev_writes,author"] == 200
    assert found["splits"] == {}
    for name, n in N.items():
        monkeypatch.setitem(PUBLISHED, name, n)
    assert mag240m(tmp_path / "mag", tmp_path / "h", **TINY).nodes == N


def test_files_that_do_not_agree_are_named(tmp_path: Path) -> None:
    root = tmp_path / "mag"
    write(root)
    given: dict[str, Any] = {"num_nodes": {"author": 39, "institution": 5}, **TINY}
    (root / "split_dict.pt").unlink()
    words = r"author___writes___paper/edge_index.npy: edges\[0, \d+\]: 39 is not a node|affiliated"
    refused(IndexError, words, tmp_path / "g", lambda: mag240m(root, tmp_path / "g", **given))
    given["num_nodes"] = {"author": 40}
    (root / "meta.pt").unlink()
    refused(
        FormatError,
        "number of nodes of 'institution' must be given",
        tmp_path / "g",
        lambda: mag240m(root, tmp_path / "g", **given),
    )
    given["num_nodes"] = N
    np.save(root / "processed" / "paper" / "node_label.npy", np.zeros(69, np.float32))
    refused(FormatError, "labels has 69 rows; expected 70", tmp_path / "g", lambda: mag240m(root, tmp_path / "g", **given))
    np.savez(root / "split_dict.npz", train=np.array([70]))
    np.save(root / "processed" / "paper" / "node_label.npy", np.zeros(70, np.float32))
    refused(
        IndexError,
        "split_dict.npz: train, line 1: 70 is not a node",
        tmp_path / "g",
        lambda: mag240m(root, tmp_path / "g", **given),
    )
    for path in (root / "processed").glob("*___*"):
        path.rename(path.with_name(path.name.replace("___", "-")))
    refused(FormatError, "no folder of a relation", tmp_path / "g", lambda: mag240m(root, tmp_path / "g", **given))


def test_files_that_are_empty_or_cut_are_named(tmp_path: Path) -> None:
    root = tmp_path / "mag"
    write(root)
    for path in root.glob("*.pt"):
        path.unlink()
    for name in ("author___writes___paper/edge_index.npy", "paper/node_feat.npy", "paper/node_label.npy"):
        path = root / "processed" / name
        whole = path.read_bytes()
        for data, error, words in ((b"", FormatError, "the file is empty"), (whole[:-9], CorruptionError, "bytes instead of")):
            path.write_bytes(data)
            caught = refused(error, words, tmp_path / "g", lambda: mag240m(root, tmp_path / "g", num_nodes=N, **TINY))
            assert name in str(caught.value)
        path.write_bytes(whole)
