"""Appended nodes: their rows are behind the others, their lists are empty, and only their bytes are written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.adapters.datasets.tables import EdgeTable, import_tables
from featstore.errors import BusyError, StaleError
from featstore.storage.catalog import read_catalog

RNG = np.random.default_rng(5)
N, E = 3000, 8000
IN_CHUNKS = {"topology": "chunked", "chunk_bytes": 4096}
EDGES = RNG.integers(0, N, (2, E))


def fields(n: int, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    features = {"x": rng.standard_normal((n, 100)).astype(np.float32), "b": rng.integers(0, 9, (n, 7), np.uint8)}
    return features, {"y": rng.integers(0, 9, n)}


def make(path: Path, **options: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    features, data = fields(N)
    featstore.OutOfCoreGraph.from_edge_index(
        path,
        EDGES,
        N,
        features,
        {**data, "train_idx": np.arange(5)},
        edge_features={"w": np.arange(E)},
        progress=False,
        **options,
    ).close()
    return features, data


def joined(*parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def sizes(path: Path) -> dict[str, int]:
    return {name: os.path.getsize(path / name) for name in os.listdir(path) if ".rows" in name}


@pytest.mark.parametrize("form", [{}, IN_CHUNKS], ids=["csc", "chunks"])
def test_nodes_are_appended_again_and_again(form: dict[str, Any], tmp_path: Path) -> None:
    features, data = make(tmp_path / "g", **form)
    whole = featstore.open(tmp_path / "g")
    for k, n in enumerate((1, 13, 400, 2, 700, 3)):
        more, labels = fields(n, k + 1)
        with featstore.open(tmp_path / "g", memory="32MiB") as g:
            before = g.num_nodes
            blocks = (more["x"].shape, "float32", (more["x"][first : first + 3] for first in range(0, n, 3)))
            found = g.append_nodes(n, {**more, "x": blocks}, {**labels, "train_idx": [before]}, progress=False)
            assert found == range(before, before + n)
            assert g.num_nodes == before
            assert np.array_equal(g.features["x"][:].numpy(), features["x"])
            assert g.memory_report().get("changes", 0) == 0
        features, data = joined(features, more), joined(data, labels)
        with featstore.open(tmp_path / "g") as g:
            assert g.num_nodes == len(features["x"])
            for name, rows in features.items():
                assert np.array_equal(g.features[name][:].numpy(), rows)
            assert np.array_equal(g.node_data["y"].numpy(), data["y"])
            assert len(g.node_data["train_idx"]) == 6 + k
            g.verify(progress=False)
            x = RNG.standard_normal((2, 100)).astype(np.float32)
            features["x"][[1, -1]] = x
            g.features["x"].update([1, -1], x, progress=False)
    assert whole.num_nodes == N
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g.in_degree.numpy()[:N], whole.in_degree.numpy())
        assert not g.in_degree[N:].any()
        assert not g.out_degree[N:].any()
        assert g.neighbors(5).tolist() == whole.neighbors(5).tolist()
        sampler = featstore.NeighborSampler(g, [4])
        seeds = np.arange(N - 40, g.num_nodes)
        with featstore.Loader(g, sampler, seeds, 100, features="x", labels="y", strategy="superbatch") as loader:
            for batch in loader:
                ids = batch.input_ids.numpy()
                assert np.array_equal(batch.x.numpy(), features["x"][ids])
                assert np.array_equal(batch.y.numpy(), data["y"][batch.seeds.numpy()])
    whole.close()


def test_appending_costs_what_is_appended(tmp_path: Path) -> None:
    n = 60_000
    x = np.zeros((n, 512), np.uint8)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", EDGES, n, {"x": x}, progress=False).close()
    known = sizes(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        g.append_nodes(10, {"x": x[:10]}, progress=False)
    new = {name: size for name, size in sizes(tmp_path / "g").items() if name not in known}
    rows = sum(size for name, size in new.items() if ".x." in name)
    assert rows <= (2 + 1 + 1 + 2 + 1) * 4096
    assert sum(new.values()) - rows <= 16 * n + 20 * 4096
    assert "edge.indices.1.rows" in sizes(tmp_path / "g")


@pytest.mark.parametrize("form", [{}, IN_CHUNKS], ids=["csc", "chunks"])
def test_what_was_made_of_the_old_graph_is_stale(form: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path / "g", **form)
    more, labels = fields(3)
    with featstore.open(tmp_path / "g") as g:
        featstore.partition(g, 4, "ldg", progress=False)
        g.cache_neighbors("40KiB", "random", save=True)
        before = read_catalog(tmp_path / "g").adjacency()
        g.append_nodes(3, more, labels, progress=False)
    after = read_catalog(tmp_path / "g").adjacency()
    changed = ("chunks", "chunk_directory", "out_degree") if form else ("indptr", "out_degree")
    assert all(before[f"edge/_,_,_/{name}"] != after[f"edge/_,_,_/{name}"] for name in changed)
    with featstore.open(tmp_path / "g") as g:
        ((_, kept),) = g.parts().items()
        assert kept.is_stale
        with pytest.raises(StaleError):
            kept.load()
        g.cache_neighbors("40KiB", "random")
        assert g.neighbors(4).tolist() == sorted(EDGES[0][EDGES[1] == 4].tolist())
        g.verify(progress=False)


X, Y = fields(3)
WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ({"x": X["x"]}, Y, ValueError, "feature 'b' has a row for each node, so it needs rows for the 3 new ones"),
    (X, {}, ValueError, "node data 'y' has a row for each node"),
    ({**X, "z": X["x"]}, Y, ValueError, "there is no feature 'z'"),
    (X, {**Y, "z": [1]}, ValueError, "there is no node data 'z'"),
    ({**X, "x": X["x"][:2]}, Y, ValueError, "feature 'x' has 2 rows for 3 new nodes"),
    ({**X, "x": X["x"][:, :9]}, Y, ValueError, "have shape (100,), not (9,)"),
    ({**X, "x": X["x"].astype(np.float64)}, Y, TypeError, "are float32, not float64"),
    ({**X, "x": ((3, 100), "float32", [X["x"][:1]])}, Y, ValueError, "1"),
    (X["x"], Y, TypeError, "must be a mapping"),
]


@pytest.mark.parametrize(("features", "data", "error", "text"), WRONG)
def test_wrong_arguments_change_nothing(features: Any, data: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    make(tmp_path / "g")
    before = sizes(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        with pytest.raises(error, match=re.escape(text)):
            g.append_nodes(3, features, data, progress=False)
        with pytest.raises(ValueError, match="n must be"):
            g.append_nodes(0, *fields(0), progress=False)
    assert sizes(tmp_path / "g") == before
    assert read_catalog(tmp_path / "g").generation == 1


def test_a_handle_that_has_not_seen_a_change_appends_nothing(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as one, featstore.open(tmp_path / "g") as two:
        one.add_feature("z", np.zeros(N), progress=False)
        with pytest.raises(BusyError, match="'z' was changed"):
            two.append_nodes(3, *fields(3), progress=False)
        one.append_nodes(3, {**X, "z": np.zeros(3)}, Y, progress=False)
        for g in (one, two):
            with pytest.raises(BusyError, match="open it again"):
                g.append_nodes(3, {**X, **({"z": np.zeros(3)} if g is one else {})}, Y, progress=False)


def test_a_graph_whose_nodes_have_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("from,to\nb,a\nc,b\n")
    table = EdgeTable(tmp_path / "edges.csv", src="from", dst="to")
    import_tables(tmp_path / "g", edges=table, progress=False)
    with featstore.open(tmp_path / "g") as g:
        with pytest.raises(NotImplementedError, match="have names"):
            g.append_nodes(2, progress=False)
        assert len(g.ids()) == g.num_nodes == 3
