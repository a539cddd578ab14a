"""IGB's folders, with headers and raw, against datasets of the same arrays; sizes, splits and edges that do not agree."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.adapters.datasets import igb
from featstore.adapters.datasets.igb import LABELLED, SIZES
from featstore.adapters.datasets.writing import PaddedLabels
from featstore.creation.source import open_source
from featstore.errors import CorruptionError, FormatError
from tests.support.commands import run
from tests.support.imports import TINY, assert_same, follow_advice, refused
from tests.support.typed import CITES, TypedArrays

WRITTEN = ("paper", "written_by", "author")
N = {"paper": 60, "author": 25}


def save(path: Path, array: Any, *, raw: bool) -> None:
    """Write an array as NumPy does, or as a memory map is: its bytes alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if raw:
        array.tofile(path)
    else:
        np.save(path, array)


def write(root: Path, *, raw: bool, labelled: int = 60) -> TypedArrays:
    """Write the layout; return the arrays of the dataset that it must become."""
    rng = np.random.default_rng(1)
    x = {kind: rng.standard_normal((n, 16)).astype(np.float32) for kind, n in N.items()}
    edges = {
        CITES: rng.integers(0, 60, (2, 300)),
        WRITTEN: np.stack([rng.integers(0, 60, 120), rng.integers(0, 25, 120)]),
    }
    y = np.full(60, np.nan, np.float32)
    y[:labelled] = rng.integers(0, 19, labelled)
    processed = root / "processed"
    for kind, rows in x.items():
        save(processed / kind / "node_feat.npy", rows, raw=raw)
    save(processed / "paper" / "node_label_19.npy", y[:labelled], raw=raw)
    for key, pairs in edges.items():
        save(processed / "__".join(key) / "edge_index.npy", np.ascontiguousarray(pairs.T), raw=raw)
    bounds = [0, int(0.6 * labelled), int(0.6 * labelled) + int(0.2 * labelled), labelled]
    split = {f"{name}_idx": np.arange(bounds[i], bounds[i + 1]) for i, name in enumerate(("train", "valid", "test"))}
    return TypedArrays(N, edges, {kind: {"x": rows} for kind, rows in x.items()}, {"paper": {"y": y, **split}})


@pytest.mark.parametrize("raw", [False, True], ids=["with headers", "raw"])
def test_types_are_the_same_dataset(tmp_path: Path, raw: bool) -> None:
    graph = write(tmp_path / "in", raw=raw)
    report = igb(tmp_path / "in", tmp_path / "g", num_nodes=N, **TINY)
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.splits == {"paper/train_idx": 36, "paper/valid_idx": 12, "paper/test_idx": 12}
    assert report.edges == {"paper,cites,paper": 300, "paper,written_by,author": 120}
    shapes = {f"{kind}/x": list(of["x"].shape) for kind, of in graph.features.items()}
    assert report.features == shapes
    assert f"feature  paper/x: {shapes['paper/x']}" in str(report)
    igb(tmp_path / "in", tmp_path / "back", num_nodes=N, reverse=True, **TINY)
    graph.edges["author", "rev_written_by", "paper"] = graph.edges[WRITTEN][::-1]
    graph.create(tmp_path / "made-back").close()
    assert_same(tmp_path / "back", tmp_path / "made-back")


@pytest.mark.parametrize("raw", [False, True], ids=["with headers", "raw"])
def test_papers_alone_have_no_types(tmp_path: Path, raw: bool) -> None:
    graph = write(tmp_path / "in", raw=raw)
    report = igb(tmp_path / "in", tmp_path / "g", num_nodes=N, papers_only=True, remove_self_loops=True, **TINY)
    featstore.OutOfCoreGraph.from_edge_index(
        tmp_path / "made",
        graph.edges[CITES],
        60,
        graph.features["paper"],
        graph.data["paper"],
        remove_self_loops=True,
        progress=False,
    ).close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.loops_dropped == int((graph.edges[CITES][0] == graph.edges[CITES][1]).sum()) > 0
    again = igb(tmp_path / "in", tmp_path / "again", num_nodes=N, papers_only=True, reverse=True, **TINY)
    assert "reverse edges were asked for, and are made of edges between two types" in " ".join(again.notes)


@pytest.mark.parametrize("raw", [False, True], ids=["with headers", "raw"])
def test_papers_beyond_the_labels_have_none(tmp_path: Path, raw: bool) -> None:
    graph = write(tmp_path / "in", raw=raw, labelled=45)
    report = igb(tmp_path / "in", tmp_path / "g", num_nodes=N, **TINY)
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.unlabelled == {"paper/y": 15}
    assert report.splits == {"paper/train_idx": 27, "paper/valid_idx": 9, "paper/test_idx": 9}


def test_sizes_are_those_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = write(tmp_path / "tiny", raw=True)
    monkeypatch.setitem(SIZES, "tiny", N)
    width = r"node_feat.npy: .*float32 \[60, 1024\] has 245760 bytes, and the file has 3840"
    refused(FormatError, width, tmp_path / "g", lambda: igb(tmp_path / "tiny", tmp_path / "g", **TINY))
    monkeypatch.setattr(sys.modules[igb.__module__], "WIDTH", 16)
    found = run(capsys, "import", "igb", tmp_path / "tiny", tmp_path / "g", "--memory", "9MiB", "--labelled", "60")
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert found["nodes"] == N
    given = ("--num-nodes", "paper=60", "author=25", "--size", "full", "--labelled", "60")
    run(capsys, "import", "igb", tmp_path / "tiny", tmp_path / "h", *given)
    assert_same(tmp_path / "h", tmp_path / "made")


def test_full_is_split_by_the_published_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "full", raw=True)
    monkeypatch.setitem(LABELLED, 19, 50)
    monkeypatch.setitem(SIZES, "full", N)
    monkeypatch.setattr(sys.modules[igb.__module__], "WIDTH", 16)
    report = igb(tmp_path / "full", tmp_path / "g", num_nodes=N, **TINY)
    assert report.splits == {"paper/train_idx": 30, "paper/valid_idx": 10, "paper/test_idx": 10}
    change("paper/node_label_19.npy", np.zeros(49, np.float32), raw=True)(tmp_path / "full")
    words = "node_label_19.npy: labels of 49 papers; 50 are published for the size 'full'"
    refused(FormatError, words, tmp_path / "h", lambda: igb(tmp_path / "full", tmp_path / "h", num_nodes=N, **TINY))


def test_splits_of_mlperf_are_read_after_the_advised_conversion(tmp_path: Path) -> None:
    graph = write(tmp_path / "in", raw=True)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(42))
    for name, ids in (("train", order[:36]), ("val", order[36:38])):
        torch.save(ids, tmp_path / "in" / "processed" / f"{name}_idx.pt")

    def call(**options: Any) -> Any:
        return igb(tmp_path / "in", tmp_path / "g", num_nodes=N, **options, **TINY)

    follow_advice(refused(FormatError, "train_idx.pt: .*can run code", tmp_path / "g", call).value)
    refused(ValueError, "labelled is of splits by position; .*split_dict.npz has", tmp_path / "g", lambda: call(labelled=9))
    report = call()
    for name in ("train_idx", "valid_idx", "test_idx"):
        graph.data["paper"].pop(name)
    graph.data["paper"] |= {"train_idx": order[:36].numpy(), "valid_idx": order[36:38].numpy()}
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.splits == {"paper/train_idx": 36, "paper/valid_idx": 2}
    np.savez(tmp_path / "in" / "processed" / "split_dict.npz", train=np.array([59, 60]))
    refused(
        IndexError,
        r"split_dict.npz: .*train\[1\]: 60 is not a node",
        tmp_path / "h",
        lambda: igb(tmp_path / "in", tmp_path / "h", num_nodes=N, **TINY),
    )


def change(name: str, array: Any, *, raw: bool = False) -> Callable[[Path], None]:
    return lambda root: save(root / "processed" / name, array, raw=raw)


HOSTILE: dict[str, tuple[Callable[[Path], None], type[BaseException], str]] = {
    "edges [2, E]": (
        change("paper__cites__paper/edge_index.npy", np.zeros((2, 9), np.int64)),
        FormatError,
        r"must have shape \[E, 2\], not \[2, 9\]",
    ),
    "an id too large": (
        change("paper__written_by__author/edge_index.npy", np.array([[1, 2], [3, 25]])),
        IndexError,
        r"edges\[1, 1\]: 25 is not a node: ids are 0 … 24",
    ),
    "edges of floats": (
        change("paper__cites__paper/edge_index.npy", np.zeros((9, 2))),
        FormatError,
        "must hold integers, not float64",
    ),
    "half an edge": (
        change("paper__cites__paper/edge_index.npy", np.zeros(3, np.int64), raw=True),
        FormatError,
        "a raw array of int64",
    ),
    "features cut short": (
        change("paper/node_feat.npy", np.zeros(16 * 60 - 1, np.float32), raw=True),
        FormatError,
        "cannot have 60 rows of float32",
    ),
    "features cut behind their header": (
        lambda root: os.truncate(root / "processed" / "paper" / "node_feat.npy", 128 + 16 * 60 * 4 - 1),
        CorruptionError,
        "node_feat.npy",
    ),
    "labels cut in their header": (
        lambda root: os.truncate(root / "processed" / "paper" / "node_label_19.npy", 100),
        CorruptionError,
        "ends within its header.*node_label_19.npy",
    ),
    "another number of papers": (
        change("paper/node_feat.npy", np.zeros((59, 16), np.float32)),
        FormatError,
        "has 59 rows; expected 60",
    ),
    "too many labels": (
        change("paper/node_label_19.npy", np.zeros(61, np.float32), raw=True),
        FormatError,
        "labels of 61 papers, of which there are 60",
    ),
    "an empty file": (
        lambda root: (root / "processed" / "author" / "node_feat.npy").write_bytes(b"") and None,
        FormatError,
        "the file is empty",
    ),
    "a type without number": (
        lambda root: change("paper__topic__fos/edge_index.npy", np.zeros((1, 2), np.int64))(root),
        FormatError,
        "the number of nodes of 'fos' must be given",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_do_not_agree_are_named(tmp_path: Path, case: str) -> None:
    apply, error, words = HOSTILE[case]
    write(tmp_path / "in", raw=False)
    apply(tmp_path / "in")
    refused(error, words, tmp_path / "g", lambda: igb(tmp_path / "in", tmp_path / "g", num_nodes=N, **TINY))


def test_wrong_options(tmp_path: Path) -> None:
    write(tmp_path / "in", raw=True)
    for options, words in (
        ({"size": "huge"}, "size: 'huge' is none of tiny"),
        ({"classes": 20}, "classes: 20 is neither"),
        ({"labelled": 61, "num_nodes": N}, "labelled: 61 of 60 papers"),
        ({"num_nodes": {**N, "paper": -1}}, r"num_nodes\['paper'\] must be at least 0"),
        ({"num_nodes": {"papers": 60}}, "num_nodes: .*processed has no type 'papers' of nodes; its relations have .*paper"),
        ({"num_nodes": N, "coalesce": True}, "coalesce is for a graph of one type"),
    ):
        refused(ValueError, words, tmp_path / "g", lambda: igb(tmp_path / "in", tmp_path / "g", **options, **TINY))
    refused(
        FormatError,
        "raw array of unknown size; give the numbers",
        tmp_path / "g",
        lambda: igb(tmp_path / "in", tmp_path / "g", **TINY),
    )
    (tmp_path / "bare" / "processed").mkdir(parents=True)
    refused(FormatError, "no folder paper__cites__paper", tmp_path / "g", lambda: igb(tmp_path / "bare", tmp_path / "g", **TINY))


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_labels_without_a_value_for_none_are_not_padded(dtype: str) -> None:
    source = open_source("y", np.ones(3, dtype))
    with pytest.raises(FormatError, match=f"y: 3 labels of 5 nodes, and {dtype} has no value that stands for none"):
        PaddedLabels(source, 5)
    assert len(np.concatenate(list(PaddedLabels(source, 3).blocks(1 << 20)))) == 3
