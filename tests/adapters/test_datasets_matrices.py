"""SciPy's matrices and .npz archives against datasets of the same edges, in all formats; archives that are no graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.adapters.datasets import npz, scipy
from featstore.errors import FormatError
from tests.support.commands import run
from tests.support.imports import TINY, assert_same, refused
from tests.support.sampled import fewer_examples


def matrix(n: int = 40, density: float = 0.1, seed: int = 0) -> Any:
    return sparse.random(n, n, density, "csr", rng=np.random.default_rng(seed), dtype=np.float32)


def made(path: Path, of: Any, *, weights: bool = False, **options: Any) -> Path:
    """Make the dataset by the library's own call: an edge a stored value, from its row to its column."""
    coo = of.tocoo()
    features = {"weight": coo.data} if weights else None
    edges = np.stack([coo.row, coo.col]).astype(np.int64)
    featstore.OutOfCoreGraph.from_edge_index(path, edges, of.shape[0], edge_features=features, **options, progress=False).close()
    return path


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_what_scipy_writes(tmp_path: Path, form: str, weights: bool, compressed: bool) -> None:
    of = matrix().asformat(form)
    sparse.save_npz(tmp_path / "m.npz", of, compressed=compressed)
    report = npz(tmp_path / "m.npz", tmp_path / "g", weights=weights, **TINY)
    assert_same(tmp_path / "g", made(tmp_path / "made", of, weights=weights))
    assert report.edges_read == of.nnz


@fewer_examples(0.4)  # each writes two datasets
@given(
    n=st.integers(1, 60), density=st.floats(0, 0.5), seed=st.integers(0, 9), form=st.sampled_from(["csr", "csc", "coo", "lil"])
)
def test_matrices_in_memory(tmp_path_factory: pytest.TempPathFactory, n: int, density: float, seed: int, form: str) -> None:
    root, of = tmp_path_factory.mktemp("m"), matrix(n, density, seed).asformat(form)
    report = scipy(of, root / "g", weights=True, **TINY)
    assert_same(root / "g", made(root / "made", of if form in ("csr", "csc") else of.tocsr(), weights=True))
    assert report.nodes == {"_": n}


def test_arrays_of_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    edges, x, y = rng.integers(0, 30, (2, 200)), rng.random((30, 5)).astype(np.float32), rng.integers(-1, 3, 30)
    mask = rng.random(30) < 0.5
    data: Any = {"y": y, "train_mask": mask, "valid_idx": np.arange(3)}
    np.savez_compressed(tmp_path / "a.npz", edge_index=edges, x=x, **data)
    found = run(capsys, "import", "npz", tmp_path / "a.npz", tmp_path / "g", "--memory", "9MiB", "--remove-self-loops")
    options: Any = {"features": {"x": x}, "node_data": data, "remove_self_loops": True, "progress": False}
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "made", edges, 30, **options).close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert found["unlabelled"] == {"y": int((y < 0).sum())}
    assert found["splits"] == {"train_mask": int(mask.sum()), "valid_idx": 3}
    np.savez(tmp_path / "b.npz", indptr=np.array([0, 2, 3]), indices=np.array([0, 1, 0]), feat=np.eye(2))
    npz(tmp_path / "b.npz", tmp_path / "b", features="feat", **TINY)
    with featstore.open(tmp_path / "b", memory="64MiB") as g:
        assert list(g.features) == ["feat"]
        assert np.concatenate([block.numpy() for block in g.edges()], axis=1).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_weights_beside_lists_are_stored_once(tmp_path: Path) -> None:
    matrix = sparse.random(20, 20, 0.2, "csr", np.float32)
    np.savez(tmp_path / "a.npz", indptr=matrix.indptr, indices=matrix.indices, data=matrix.data, shape=matrix.shape)
    npz(tmp_path / "a.npz", tmp_path / "g", weights=True, **TINY)
    with featstore.open(tmp_path / "g") as g:
        assert (list(g.edge_features), list(g.node_data)) == (["weight"], [])


def test_arrays_of_edges_are_edge_features(tmp_path: Path) -> None:
    """As PyG names them; a sampler finds them."""
    rng = np.random.default_rng(2)
    edges, x = rng.integers(0, 30, (2, 200)), rng.random((30, 5)).astype(np.float32)
    of_edges: Any = {"edge_attr": rng.random((200, 3)).astype(np.float32), "edge_weight": rng.random(200).astype(np.float32)}
    masks: Any = {"train_mask": np.arange(30) < 20, "val_mask": np.arange(30) >= 25, "test_mask": np.zeros(30, bool)}
    np.savez(tmp_path / "a.npz", edge_index=edges, x=x, **of_edges, **masks)
    report = npz(tmp_path / "a.npz", tmp_path / "g", **TINY)
    assert report.splits == {"train_mask": 20, "val_mask": 5, "test_mask": 0}
    options: Any = {"features": {"x": x}, "node_data": masks, "edge_features": of_edges, "progress": False}
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "made", edges, 30, **options).close()
    assert_same(tmp_path / "g", tmp_path / "made")
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [2], weight="edge_weight", seed=0)
        assert len(sampler.sample(np.arange(9)).input_ids) >= 9
    np.savez(tmp_path / "b.npz", edge_index=edges, num=np.ones(200), x=x)
    words = r"b.npz: num has 200 rows, as there are edges, and there are 30 nodes; .*rename it to 'edge_num'"
    refused(FormatError, words, tmp_path / "h", lambda: npz(tmp_path / "b.npz", tmp_path / "h", **TINY))
    np.savez(tmp_path / "b.npz", edge_index=edges, edge_attr=np.ones(199), x=x)
    words = "edge_attr has 199 rows, but there are 200 edges; .*rename it"
    refused(FormatError, words, tmp_path / "h", lambda: npz(tmp_path / "b.npz", tmp_path / "h", **TINY))


def test_counts_that_cancel_each_other_are_shown(tmp_path: Path) -> None:
    """A loop goes, and a reverse comes: as many edges as before."""
    of = sparse.csr_array(np.array([[1, 1], [0, 0]]))
    report = scipy(of, tmp_path / "g", to_undirected=True, remove_self_loops=True, **TINY)
    assert report.edges_read == report.edges["_,_,_"] == 2
    assert "edges read: 2; 1 reverses added; 1 self loops and 0 duplicates dropped" in str(report)


def test_values_of_a_matrix_are_kept_or_named(tmp_path: Path) -> None:
    for form in ("csr", "coo"):
        of = matrix().asformat(form)
        arrays = {"indptr": of.indptr, "indices": of.indices} if form == "csr" else {"row": of.row, "col": of.col}
        np.savez(tmp_path / "a.npz", **arrays, data=of.data, shape=of.shape)
        report = npz(tmp_path / "a.npz", tmp_path / "g", overwrite=True, **TINY)
        assert_same(tmp_path / "g", made(tmp_path / "made", of, overwrite=True))
        assert "data, are left out; weights (--weights)" in report.notes[0]


def test_archives_that_are_no_graph(tmp_path: Path) -> None:
    def attempt(error: type[BaseException], words: str, arrays: dict[str, Any], **options: Any) -> None:
        np.savez(tmp_path / "in.npz", **arrays)
        refused(error, words, tmp_path / "g", lambda: npz(tmp_path / "in.npz", tmp_path / "g", **options, **TINY))

    edges = {"edge_index": np.array([[0, 1], [1, 2]])}
    attempt(FormatError, "no edges are in it.*it has x", {"x": np.eye(3)})
    attempt(ValueError, "num_nodes .*: .* no array that says how many", edges)
    attempt(IndexError, r"edge_index\[1, 1\]: 2 is not a node: ids are 0 … 1", edges, num_nodes=2)
    attempt(ValueError, "has no 'feat' that is not of the edges; it has x", {**edges, "x": np.eye(3)}, features="feat")
    attempt(FormatError, "x has 4 rows, but there are 3 nodes", {**edges, "x": np.eye(4)}, num_nodes=3)
    attempt(ValueError, r"indptr\[1\] is 5", {"indptr": np.array([0, 5, 2]), "indices": np.array([0, 1])})
    attempt(FormatError, "row has 2 entries, but .*col has 3", {"row": np.arange(2), "col": np.arange(3)}, num_nodes=3)
    attempt(FormatError, "must hold integers", {"row": np.eye(2), "col": np.eye(2)}, num_nodes=3)
    sparse.save_npz(tmp_path / "wide.npz", sparse.csr_array((3, 4)))
    refused(
        FormatError, r"matrix is square, not \[3, 4\]", tmp_path / "g", lambda: npz(tmp_path / "wide.npz", tmp_path / "g", **TINY)
    )
    for form in ("dia", "bsr"):
        sparse.save_npz(tmp_path / "in.npz", sparse.eye_array(3, format=form))
        refused(
            FormatError,
            rf"in.npz: a matrix of format '{form}'; convert it with .tocsr\(\)",
            tmp_path / "g",
            lambda: npz(tmp_path / "in.npz", tmp_path / "g", **TINY),
        )


def test_matrices_that_are_no_graph(tmp_path: Path) -> None:
    refused(ValueError, r"square, not \(2, 3\)", tmp_path / "g", lambda: scipy(sparse.csr_array((2, 3)), tmp_path / "g"))
    refused(TypeError, "sparse matrix of SciPy, not ndarray", tmp_path / "g", lambda: scipy(np.eye(3), tmp_path / "g"))


def test_arrays_of_one_meaning_and_wrong_splits_are_named(tmp_path: Path) -> None:
    edges = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((3, 2), np.float32)}

    def attempt(error: type[Exception], words: str, arrays: dict[str, Any]) -> None:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(error, match=words):
            npz(tmp_path / "a.npz", tmp_path / "g", progress=False, memory="64MiB")
        assert not list(tmp_path.glob("g*"))

    three = np.array([1, 1, 1])
    attempt(FormatError, "labels: there are other labels", {**edges, "y": three, "labels": three})
    for first, second in (("val", "valid"), ("train", "train_idx"), ("test_idx", "test")):
        attempt(FormatError, f"{second}: another array or file is ", {**edges, first: three, second: three})
    attempt(IndexError, r"train\[1\]: 99 is not a node: ids are 0 … 2", {**edges, "train": np.array([0, 99, -7])})
    attempt(FormatError, "train must hold ids of nodes, whole numbers", {**edges, "train": np.array([True, False, True])})
    coo = {"row": np.array([0, 2**64 - 1], np.uint64), "col": np.array([1, 2]), "x": edges["x"]}
    attempt(IndexError, r"row\[1\]: 18446744073709551615 is not a node", coo)
    matrix = {"indptr": np.array([0, 1]), "indices": np.array([0]), "data": np.array([0.0]), "shape": np.array([1, 1])}
    attempt(FormatError, "a matrix of format", {**matrix, "format": np.array([b"csr", b"a"])})
    attempt(FormatError, "a matrix of format", {**matrix, "format": np.array(b"\xff\xfe")})
    attempt(FormatError, "shape must hold whole numbers", {**matrix, "format": np.array(b"csr"), "shape": np.array([np.nan, 1])})
    attempt(ValueError, r"a\.npz: indptr\[0\] is 1", {"indptr": np.array([1, 1]), "indices": np.array([0])})
