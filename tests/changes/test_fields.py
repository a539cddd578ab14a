"""Adding and removing fields: what is read is what was given, here and in later handles; others keep what they have."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import BusyError, CommittedError
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update

N, E = 300, 900
RNG = np.random.default_rng(3)
EDGES = RNG.integers(0, N, (2, E))
X = RNG.standard_normal((N, 25)).astype(np.float32)
EDGE = ("_", "_", "_")
WRITES = ("author", "writes", "paper")


def make(path: Path) -> None:
    featstore.OutOfCoreGraph.from_edge_index(
        path, EDGES, N, {"x": X}, {"y": X[:, 0]}, edge_features={"w": np.arange(E)}, progress=False
    ).close()


def make_typed(path: Path) -> None:
    nodes = {
        "paper": featstore.Nodes(N, features={"x": X}, data={"y": X[:, 0]}),
        "author": featstore.Nodes(40, features={"x": X[:40]}),
    }
    edges = {WRITES: np.stack([EDGES[0] % 40, EDGES[1]])}
    featstore.OutOfCoreGraph.create(path, nodes=nodes, edges=edges, progress=False).close()


def files(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name.endswith(".rows")}


def as_array(rows: np.ndarray, folder: Path) -> Any:
    return rows


def as_file(rows: np.ndarray, folder: Path) -> Any:
    np.save(folder / "rows.npy", rows)
    return folder / "rows.npy"


def as_map(rows: np.ndarray, folder: Path) -> Any:
    return np.load(as_file(rows, folder), mmap_mode="r")


def as_blocks(rows: np.ndarray, folder: Path) -> Any:
    return rows.shape, rows.dtype, (rows[first : first + 7] for first in range(0, len(rows), 7))


@pytest.mark.parametrize("given", [as_array, as_file, as_map, as_blocks])
def test_a_feature_is_there_at_once_and_later(given: Callable[[np.ndarray, Path], Any], tmp_path: Path) -> None:
    make(tmp_path / "g")
    z = RNG.standard_normal((N, 3, 5))
    with featstore.open(tmp_path / "g") as old, featstore.open(tmp_path / "g") as g:
        store = g.add_feature("z", given(z, tmp_path), progress=False)
        assert store is g.features["z"]
        assert torch.equal(store[:], torch.from_numpy(z))
        assert "z" not in old.features
        assert g.budget.report().get("changes", 0) == 0
    with featstore.open(tmp_path / "g") as g:
        assert torch.equal(g.features["z"][[5, 1]], torch.from_numpy(z[[5, 1]]))
        assert torch.equal(g.features["x"][:], torch.from_numpy(X))
        g.verify(progress=False)


def test_a_replaced_feature_is_read_by_open_handles_until_they_close(tmp_path: Path) -> None:
    make(tmp_path / "g")
    before, other = files(tmp_path / "g"), featstore.open(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        x, fingerprint = g.features["x"], g.fingerprint()
        with pytest.raises(ValueError, match="overwrite=True"):
            g.add_feature("x", X + 1, progress=False)
        g.add_feature("x", X + 1, overwrite=True, progress=False)
        assert torch.equal(g.features["x"][:], torch.from_numpy(X + 1))
        assert torch.equal(x[:], torch.from_numpy(X))
        changed = {key for key in fingerprint if fingerprint[key] != g.fingerprint()[key]}
        assert changed == {"node/_/x"}
    assert before < files(tmp_path / "g")
    assert torch.equal(other.features["x"][:], torch.from_numpy(X))
    other.close()
    with featstore.open(tmp_path / "g") as g:
        assert torch.equal(g.features["x"][:], torch.from_numpy(X + 1))
        g.remove_data("y")
    assert not {"node.x.1.rows", "node.y.1.rows"} & files(tmp_path / "g")


def test_a_feature_whose_cache_follows_plans_is_not_replaced(tmp_path: Path) -> None:
    """And nothing is written before that is said."""
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        sampler, strategy = featstore.NeighborSampler(g, [3]), featstore.Superbatch(cache=0.1, length=2)
        with featstore.Loader(g, sampler, np.arange(N), 20, strategy=strategy) as loader:
            running, before = iter(loader), files(tmp_path / "g")
            next(running)
            with pytest.raises(BusyError, match="follows the plans of a loader"):
                g.add_feature("x", X + 1, overwrite=True, progress=False)
            assert files(tmp_path / "g") == before
            g.add_data("mean", X.mean(1), progress=False)
            running.close()
        g.add_feature("x", X + 1, overwrite=True, progress=False)
        assert np.array_equal(g.features["x"][:].numpy(), X + 1)


def test_a_removed_feature_is_gone(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        x = g.features["x"]
        g.remove_feature("x")
        assert "x" not in g.features
        assert "node/_/x" not in g.fingerprint()
        assert torch.equal(x[:3], torch.from_numpy(X[:3]))
        with pytest.raises(KeyError, match="no feature 'x'"):
            g.remove_feature("x")
        with pytest.raises(KeyError, match="'w' is a feature of edges"):
            g.remove_feature("w")
        with pytest.raises(KeyError, match="'y' is node data: remove_data"):
            g.remove_feature("y")
        g.add_feature("x", X * 2, progress=False)
    with featstore.open(tmp_path / "g") as g:
        assert torch.equal(g.features["x"][:], torch.from_numpy(X * 2))
    assert "node.x.1.rows" not in files(tmp_path / "g")


def test_node_data_changes(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        held = g.node_data["y"]
        g.add_data("y", np.arange(5), overwrite=True, progress=False)
        assert g.node_data["y"].tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(held, torch.from_numpy(X[:, 0]))
        assert g.memory_report()["node data"] == held.nbytes + 40  # as long as anybody has it
        del held
        g.add_data("train_idx", [3, 1], progress=False)
        assert g.memory_report()["node data"] == 40
        g.remove_data("y")
        assert list(g.node_data) == ["train_idx"]
        assert g.memory_report().get("node data", 0) == 0
        with pytest.raises(KeyError, match="no node data 'y'"):
            g.remove_data("y")
    with featstore.open(tmp_path / "g") as g:
        assert g.node_data["train_idx"].tolist() == [3, 1]


def test_edge_features_change(tmp_path: Path) -> None:
    make(tmp_path / "g")
    t = RNG.integers(0, 100, (E, 2))
    with featstore.open(tmp_path / "g") as g:
        w = g.edge_features["w"]
        assert torch.equal(g.add_feature("t", t, type=EDGE, progress=False)[:], torch.from_numpy(t))
        g.add_feature("w", -np.arange(E), type=EDGE, overwrite=True, progress=False)
        assert g.edge_features["w"][[2, 1]].tolist() == [-2, -1]
        assert w[[2, 1]].tolist() == [2, 1]
        g.remove_feature("w", type=EDGE)
        assert list(g.edge_features) == ["t"]
    with featstore.open(tmp_path / "g") as g:
        assert torch.equal(g.edge_features["t"][:], torch.from_numpy(t))


def test_types_have_fields_of_their_own(tmp_path: Path) -> None:
    make_typed(tmp_path / "g")
    z = RNG.standard_normal((40, 2))
    with featstore.open(tmp_path / "g") as g:
        assert g.add_feature("z", z, type="author", progress=False).shape == (40, 2)
        g.add_feature("t", np.arange(E), type=WRITES, progress=False)
        g.add_data("train_idx", [4], type="author", progress=False)
        assert g["author"].node_data["train_idx"].tolist() == [4]
        g.add_feature("x", X[:40] + 1, type="author", overwrite=True, progress=False)
        g.remove_data("y", type="paper")
        with pytest.raises(ValueError, match="type= names"):
            g.add_feature("z", z)
        words = f"{E} rows, but the graph has 40 nodes; edges are {E}: give type={WRITES}"
        with pytest.raises(ValueError, match=re.escape(words)):
            g.add_feature("w", np.zeros(E), type="author")
    for remove in (False, True):
        with featstore.open(tmp_path / "g") as g:
            assert torch.equal(g["author"].features["z"][:], torch.from_numpy(z))
            assert torch.equal(g["paper"].features["x"][:], torch.from_numpy(X))
            assert g[WRITES].features["t"][[7]].tolist() == [7]
            if remove:
                g.remove_feature("x", type="author")
                assert list(g["author"].features) == ["z"]
                assert torch.equal(g["paper"].features["x"][:], torch.from_numpy(X))
            else:
                assert torch.equal(g["author"].features["x"][:], torch.from_numpy(X[:40] + 1))
            g.verify(progress=False)


def test_removing_one_type_of_a_shared_column_leaves_the_others(tmp_path: Path) -> None:
    make_typed(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        g.remove_feature("x", type="paper")
        assert torch.equal(g["author"].features["x"][:], torch.from_numpy(X[:40]))
    with featstore.open(tmp_path / "g") as g:
        assert list(g.features) == ["author/x"]
        assert torch.equal(g["author"].features["x"][:], torch.from_numpy(X[:40]))
        g.remove_feature("x", type="author")
    with featstore.open(tmp_path / "g") as g:
        assert not g.features
        g.verify(progress=False)
    assert not [name for name in files(tmp_path / "g") if ".x." in name]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows": X[:7]}, ValueError, "'z' has 7 rows, but the graph has 300 nodes"),
    ({"rows": np.zeros(E)}, ValueError, f"'z' has {E} rows, but the graph has {N} nodes; edges are {E}: give type={EDGE}"),
    ({"rows": X[:7], "type": EDGE}, ValueError, "7 rows, but the graph has 900 edges"),
    ({"rows": X.astype(complex)}, TypeError, "complex128"),
    *(({"name": name}, ValueError, "name of 1 to 60") for name in ("a/b", ".a", "", "x\u202e", "x\n", 61 * "x")),
    ({"name": "y"}, ValueError, "'y' is the name of node data"),
    ({"name": "x"}, ValueError, "there is a feature 'x' already"),
    ({"type": "paper"}, KeyError, "no node type 'paper'"),
    ({"type": ("a", "b", "c")}, KeyError, "no edge type"),
    ({"type": 3}, TypeError, "type must be"),
    ({"name": "indptr", "rows": np.arange(E), "type": EDGE}, ValueError, "indptr"),
    ({"rows": ((N, 25), "float32", [X[:10]])}, ValueError, "10"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_wrong_arguments_change_nothing(wrong: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    make(tmp_path / "g")
    before = set(os.listdir(tmp_path / "g"))
    with featstore.open(tmp_path / "g") as g:
        with pytest.raises(error, match=re.escape(text)):
            g.add_feature(**{"name": "z", "rows": X, "progress": False, **wrong})
        assert g.budget.report().get("changes", 0) == 0
    assert set(os.listdir(tmp_path / "g")) == before
    assert read_catalog(tmp_path / "g").generation == 1


def test_data_is_of_nodes(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        with pytest.raises(TypeError, match="edges have features"):
            g.add_data("t", [1], type=EDGE)
        with pytest.raises(TypeError, match="edges have features"):
            g.remove_data("t", type=EDGE)
        with pytest.raises(ValueError, match="'x' is the name of a feature"):
            g.add_data("x", [1])


def test_a_number_of_rows_that_two_types_of_edges_have_says_nothing(tmp_path: Path) -> None:
    pairs = np.zeros((2, 7), np.int64)
    edges = {("a", "r", "a"): pairs, ("a", "s", "a"): pairs}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", nodes={"a": featstore.Nodes(2)}, edges=edges, progress=False) as g:
        with pytest.raises(ValueError, match=r"7 rows, but the graph has 2 nodes$"):
            g.add_feature("w", np.zeros(7), type="a")


def test_another_writer_is_refused_and_another_dataset(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        with Update(tmp_path / "g"), pytest.raises(BusyError):
            g.add_feature("z", X, progress=False)
        featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", EDGES, N, overwrite=True, progress=False).close()
        with pytest.raises(BusyError, match="open it again"):
            g.add_feature("z", X, progress=False)
        with pytest.raises(BusyError, match="open it again"):
            g.remove_feature("x")


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda g: g.add_feature("z", X, progress=False), "the feature 'z' is in "),
        (lambda g: g.add_data("z", X, progress=False), "the node data 'z' is in "),
        (lambda g: g.add_feature("z", np.arange(E), type=EDGE, progress=False), "the edge feature 'z' is in "),
    ],
)
def test_a_field_that_is_there_but_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add: Callable[[Any], Any], what: str
) -> None:
    make(tmp_path / "g")

    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with featstore.open(tmp_path / "g") as g:
        with monkeypatch.context() as patch:
            patch.setattr("featstore.graph.snapshot.open_file", full)
            with pytest.raises(CommittedError, match=f"{what}.*g, but opening it failed: Too many open files"):
                add(g)
        assert "z" not in {*g.features, *g.node_data, *g.edge_features}
    with featstore.open(tmp_path / "g") as g:
        assert len({*g.features, *g.node_data, *g.edge_features}) == 4


def test_two_handles_add_one_after_the_other(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as one, featstore.open(tmp_path / "g") as two:
        one.add_feature("a", X, progress=False)
        two.add_feature("b", X + 1, progress=False)
        with pytest.raises(ValueError, match="a feature 'a' already"):
            two.add_feature("a", X, progress=False)
        two.remove_feature("x")
        with pytest.raises(KeyError, match="another process has removed it"):
            one.remove_feature("x")
    with featstore.open(tmp_path / "g") as g:
        assert list(g.features) == ["a", "b"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    n = 40_000
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(n + 1, np.int64), np.empty(0, np.int64), progress=False).close()
    rows = RNG.integers(0, 255, (n, 1024), np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    with featstore.open(tmp_path / "g", memory="24MiB") as g:
        g.add_feature("z", tmp_path / "rows.npy", progress=False)
        assert g.memory_report().peak <= 24 << 20
        assert np.array_equal(g.features["z"][np.arange(0, n, 17)].numpy(), rows[::17])
