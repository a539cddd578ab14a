"""Derived features are stale once what they were made of was changed, by name; replaced ones are derived no more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.graph.derive.provenance import DERIVED, stale_features
from featstore.storage.catalog import Catalog, read_catalog

N = 300
X = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32)


def make(path: Path) -> None:
    edges = np.random.default_rng(1).integers(0, N, (2, 900))
    featstore.OutOfCoreGraph.from_edge_index(path, edges, N, {"x": X, "z": X}, progress=False).close()


def test_a_changed_input_makes_a_feature_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        g.aggregate("x", "sum", name="s", progress=False)
        g.aggregate("s", "sum", name="ss", progress=False)
        assert g.stale_features == {}
        g.features["z"].update([1], X[:1], progress=False)
        assert g.stale_features == {}
        g.features["x"].update([1], X[:1], progress=False)
        assert g.stale_features == {"s": ["x"]}
        g.aggregate("x", "sum", name="s", overwrite=True, progress=False)
        assert g.stale_features == {"ss": ["s"]}
        g.remove_feature("s")
        assert g.stale_features == {"ss": ["s"]}
    with featstore.open(tmp_path / "g") as g:
        assert g.stale_features == {"ss": ["s"]}
    main(["info", str(tmp_path / "g")])
    assert "ss: float32 [300, 8], 9.38 KiB, stale: made of an earlier 's'" in capsys.readouterr().out
    main(["info", str(tmp_path / "g"), "--json"])
    features = json.loads(capsys.readouterr().out)["features"]
    assert features["ss"]["stale"] == ["s"]
    assert "stale" not in features["x"]
    with featstore.open(tmp_path / "g") as g:
        g.features["ss"].update([0], X[:1], progress=False)
        assert g.stale_features == {}


def test_other_nodes_make_a_feature_stale(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        g.aggregate("x", "sum", name="s", progress=False)
    featstore.convert(tmp_path / "g", "chunked", progress=False)  # the same adjacency
    with featstore.open(tmp_path / "g") as g:
        assert g.stale_features == {}
    featstore.convert(tmp_path / "g", "csc", progress=False)
    with featstore.open(tmp_path / "g") as g:
        g.append_nodes(2, dict.fromkeys(g.features, X[:2]), progress=False)
    with featstore.open(tmp_path / "g") as g:
        # Its rows of the new nodes were given, so it is the user's now.
        assert g.stale_features == {}
        g.aggregate("x", "sum", name="s", overwrite=True, progress=False)
        g.features["x"].update([0], X[1:2], progress=False)
        assert g.stale_features == {"s": ["x"]}
        g.append_nodes(2, dict.fromkeys(g.features, X[:2]), progress=False)
    with featstore.open(tmp_path / "g") as g:
        assert set(g.stale_features) == {"s"}  # its old rows are as they were
        g.aggregate("x", "sum", name="s", overwrite=True, progress=False)
        assert g.stale_features == {}


def test_features_of_types_are_named_as_in_the_graph(tmp_path: Path) -> None:
    nodes = {"a": featstore.Nodes(N, features={"x": X}), "b": featstore.Nodes(N)}
    key = ("a", "to", "b")
    edges = {key: np.stack([np.arange(N), np.arange(N)])}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False) as g:
        g.aggregate("x", "sum", edge_type=key, name="s", progress=False)
        g["a"].features["x"].update([1], X[:1], progress=False)
        assert g.stale_features == {"b/s": ["a/x"]}


def test_entries_of_other_releases_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "g")
    catalog = read_catalog(tmp_path / "g")
    made = catalog.files["node.x.1.rows"].file_id
    for entry in ({}, {"made": made}, {"made": made, "of": 3}, {"made": "another", "of": {"node/_/z": "gone"}}):
        changed = Catalog(catalog.dataset, catalog.files, catalog.fields, {f"{DERIVED}node/_/x": entry})
        assert stale_features(changed) == {}
