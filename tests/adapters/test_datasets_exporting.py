"""Exported files against the arrays that a dataset was made of, and datasets that are made of the files again."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.adapters.datasets import export, exporting
from featstore.adapters.datasets.tables import EdgeTable, NodeTable, import_tables
from featstore.cli.main import main
from featstore.errors import BudgetError, MissingExtraError
from featstore.idmaps import idmap
from tests.support.commands import run
from tests.support.imports import Folder, assert_same
from tests.support.refusing import refuses
from tests.support.typed import random_types

MEMORY = "64MiB"


def read(path: Path) -> Any:
    """Read an array, or a table of one column, or edges in two, as they were before."""
    if path.suffix == ".npy":
        return np.load(path)
    table = pyarrow.parquet.read_table(path)
    columns = [table.column(name).combine_chunks() for name in table.column_names]
    arrays = [np.asarray(each.to_numpy(zero_copy_only=False).tolist()) for each in columns]
    return np.stack(arrays) if len(arrays) == 2 else arrays[0]


@pytest.mark.parametrize("form", exporting.FORMS)
@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_one_type(tmp_path: Path, form: str, topology: str) -> None:
    folder = Folder(tmp_path / "in", n=3000, n_edges=40_000)
    path = folder.make(tmp_path / "g", topology=topology)
    with featstore.open(path, memory=MEMORY) as g:
        files = export(g, tmp_path / "out", form, progress=False)
    there = {os.path.relpath(each, tmp_path / "out") for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert there == set(files)
    for name, array in {
        "features/x": folder.x,
        "node_data/y": folder.y,
        "node_data/train_idx": folder.splits["train"],
        "edge_features/edge_feat": folder.weight,
        "edges": folder.edges,
    }.items():
        found = read(tmp_path / "out" / f"{name}.{form}")
        np.testing.assert_array_equal(found, array)
    if form == "npy":
        out = tmp_path / "out"
        again: Any = {
            "features": {"x": out / "features" / "x.npy"},
            "node_data": {each.stem: each for each in (out / "node_data").iterdir()},
            "edge_features": {"edge_feat": out / "edge_features" / "edge_feat.npy"},
            "topology": topology,
        }
        featstore.OutOfCoreGraph.from_edge_index(tmp_path / "again", out / "edges.npy", 3000, **again, progress=False).close()
        assert_same(tmp_path / "again", path)


@given(seed=st.integers(0, 9), form=st.sampled_from(exporting.FORMS))
def test_several_types(seed: int, form: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, graph = tmp_path_factory.mktemp("g"), random_types(seed)
    graph.create(root / "g").close()
    with featstore.open(root / "g", memory=MEMORY) as g:
        files = export(g, root / "out", form, progress=False)
    n_fields = sum(map(len, (*graph.features.values(), *graph.data.values(), *graph.edge_features.values())))
    assert len(files) == n_fields + len(graph.edges)
    for key, pairs in graph.edges.items():
        found = read(root / "out" / "edges" / f"{','.join(key)}.{form}")
        assert found.size == pairs.size
        assert found.reshape(pairs.shape).tolist() == pairs.tolist()
        rows = read(root / "out" / "edge_features" / f"{','.join(key)}" / f"w.{form}")
        assert rows.size == graph.edge_features[key]["w"].size
        assert rows.reshape(-1).tolist() == graph.edge_features[key]["w"].reshape(-1).tolist()
    for kind, features in graph.features.items():
        assert read(root / "out" / "features" / kind / f"x.{form}").reshape(-1).tolist() == features["x"].reshape(-1).tolist()


def test_dtypes_and_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "half": rng.random((9, 3)).astype(np.float16),
        "cube": rng.integers(0, 9, (9, 2, 3)).astype(np.int16),
        "flag": rng.random(9) < 0.5,
        "brain": torch.randn(9, 4, dtype=torch.bfloat16, device="cpu"),
    }
    featstore.create(tmp_path / "g", arrays["cube"], progress=False).close()
    ends = np.zeros((2, 0), np.int64)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", ends, 9, arrays, overwrite=True, progress=False).close()
    with featstore.open(tmp_path / "g", memory=MEMORY) as g:
        export(g, tmp_path / "npy", progress=False)
        export(g, tmp_path / "parquet", "parquet", progress=False)
        g_edges = np.load(tmp_path / "npy" / "edges.npy")
    assert g_edges.shape == (2, 0)
    for name, array in arrays.items():
        expected = array.float().numpy() if isinstance(array, torch.Tensor) else array
        found = np.load(tmp_path / "npy" / "features" / f"{name}.npy")
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        column = read(tmp_path / "parquet" / "features" / f"{name}.parquet")
        np.testing.assert_array_equal(column.reshape(expected.shape), expected)


def test_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges that are sorted back through many files."""
    folder = Folder(tmp_path / "in", n=900, n_edges=120_000)
    path = folder.make(tmp_path / "g")
    monkeypatch.setattr(exporting, "LEAST_MEMORY", 1 << 20)
    with featstore.open(path, memory=MEMORY) as g:
        export(g, tmp_path / "out", memory="1MiB", progress=False)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "edges.npy"), folder.edges)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_path_is_opened_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = Folder(tmp_path / "in"), []
    path, real = folder.make(tmp_path / "g"), featstore.OutOfCoreGraph.open

    def noted(given: Any) -> featstore.OutOfCoreGraph:
        opened.append(real(given, memory=MEMORY))
        return opened[-1]

    monkeypatch.setattr(exporting.OutOfCoreGraph, "open", noted)
    assert "edges.npy" in export(path, tmp_path / "out", progress=False)
    refuses(ValueError, "form must be", lambda: export(str(path), tmp_path / "no", "csv"))
    assert [g.closed for g in opened] == [True, True]
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "edges.npy"), folder.edges)


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Folder(tmp_path / "in").make(tmp_path / "g")
    before = sorted(os.listdir(tmp_path))
    with featstore.open(path, memory=MEMORY) as g:
        refuses(ValueError, "form must be one of npy, parquet, not 'csv'", lambda: export(g, tmp_path / "out", "csv"))
        refuses(FileExistsError, "give another folder, or remove this one", lambda: export(g, tmp_path / "g"))
        refuses(FileNotFoundError, "", lambda: export(g, tmp_path / "no" / "out"))
        refuses(TypeError, "open datasets are exported", lambda: export(3, tmp_path / "out"))  # type: ignore[arg-type]
        refuses(BudgetError, "export in 1.00 MiB", lambda: export(g, tmp_path / "out", memory="1MiB"))
        refuses(BudgetError, "", lambda: export(g, tmp_path / "out", memory="1GiB"))
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "pyarrow.parquet", None)
            refuses(MissingExtraError, r"pip install pyarrow", lambda: export(g, tmp_path / "out", "parquet"))
        with monkeypatch.context() as patched:
            patched.setattr(exporting, "_paired", lambda *columns: 1 / 0)
            refuses(ZeroDivisionError, "", lambda: export(g, tmp_path / "out", progress=False))
    assert sorted(os.listdir(tmp_path)) == before


def test_names_that_are_too_long_for_files_are_refused(tmp_path: Path) -> None:
    """A type of edges has at most 250 bytes; with the suffix of Parquet that may be too long for a file."""
    of, relation, to = ("é" * 41, "ü" * 41, "ö" * 41)
    nodes = {of: featstore.Nodes(2, {"x": np.eye(2, dtype=np.float32)}), to: featstore.Nodes(2)}
    edges: dict[Any, Any] = {(of, relation, to): np.array([[0, 1], [1, 0]])}
    featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False).close()
    with featstore.open(tmp_path / "g", memory=MEMORY) as g:
        words = r"its name has 256 bytes, and may have 255: .*leave out edges \(--no-edges\)"
        refuses(OSError, words, lambda: export(g, tmp_path / "out", "parquet", progress=False))
        refuses(OSError, "its name has 256 bytes, and may have 218", lambda: export(g, tmp_path / ("n" * 256), progress=False))
        assert export(g, tmp_path / "out", "parquet", edges=False, progress=False) == [f"features/{of}/x.parquet"]
        assert f"edges/{of},{relation},{to}.npy" in export(g, tmp_path / "npy", progress=False)
    with pytest.raises(OSError, match="its name has 250 bytes, and may have 218: give a shorter one") as caught:
        Folder(tmp_path / "in").make(tmp_path / ("n" * 250))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert sorted(os.listdir(tmp_path)) == ["g", "npy", "out"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Folder(tmp_path / "in").make(tmp_path / "g")
    found = run(capsys, "export", path, tmp_path / "out", "--form", "npy", "--no-edges", "--memory", MEMORY)
    assert set(found["files"]) == {f"{name}.npy" for name in ("features/x", *(f"node_data/{each}" for each in NODE_DATA))}
    assert main(["export", str(path), str(tmp_path / "again"), "--form", "parquet"]) == 0
    assert "edges.parquet" in capsys.readouterr().out
    assert main(["export", str(path), str(tmp_path / "x"), "--form", "npy", "--topology", "csc"]) == 2
    assert "--topology is for --part" in capsys.readouterr().err
    assert main(["export", str(path), str(tmp_path / "x"), "--part", "0", "--no-edges"]) == 2
    assert "--no-edges is for --form" in capsys.readouterr().err
    assert main(["export", str(path), str(tmp_path / "out"), "--form", "npy"]) == 2
    assert "out: there is something already: give another folder, or remove this one" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "with --part: replace a dataset" in capsys.readouterr().out


NODE_DATA = ("node_year", "y", "train_idx", "valid_idx", "test_idx")


@pytest.mark.parametrize("form", exporting.FORMS)
def test_names_are_exported(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two types, and of one; a name has a line end, which a line of text could not."""
    monkeypatch.setattr(idmap, "_BLOCK_NAMES", 5)
    texts = ["new\nline", "", 'quo"te', "ünï", *map(str, range(20))]
    tables = {"papers": {"id": texts, "x": np.arange(24.0)}, "authors": {"id": np.arange(7) * 10**15}}
    tables |= {"writes": {"a": np.arange(7) * 10**15, "p": texts[:7]}, "cites": {"a": texts[:3], "b": texts[1:4]}}
    for name, columns in tables.items():
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    nodes = {"paper": NodeTable(tmp_path / "papers.parquet", "id"), "author": NodeTable(tmp_path / "authors.parquet", "id")}
    edges = {("author", "writes", "paper"): EdgeTable(tmp_path / "writes.parquet", "a", "p")}
    import_tables(tmp_path / "g", nodes, edges, progress=False)
    import_tables(tmp_path / "one", None, EdgeTable(tmp_path / "cites.parquet", "a", "b"), progress=False)
    expected = {"paper": texts, "author": (np.arange(7) * 10**15).tolist()}
    for path, of_types in ((tmp_path / "g", ["ids/paper", "ids/author"]), (tmp_path / "one", ["ids"])):
        out = tmp_path / f"{path.name}-out"
        with featstore.open(path, memory=MEMORY) as g:
            files = export(g, out, form, progress=False)
            for name in of_types:
                kind = name.partition("/")[2]
                ids = g.ids(kind or None)
                wanted = list(ids.decode(range(len(ids)))) if ids.kind == "text" else ids.decode(range(len(ids))).tolist()
                assert not kind or sorted(wanted) == sorted(expected[kind])
                (file,) = [each for each in files if each.rpartition(".")[0] == name]
                if form == "parquet":
                    assert pyarrow.parquet.read_table(out / file).to_pydict() == {"id": [*range(len(ids))], "name": wanted}
                elif ids.kind == "text":
                    assert [json.loads(line) for line in (out / file).read_text().split("\n")[:-1]] == wanted
                else:
                    assert np.load(out / file).tolist() == wanted


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    path = Folder(tmp_path / "in", n=30, n_edges=50).make(tmp_path / "g")
    left = tmp_path / f"out.tmp-{'0' * 32}"
    (left / "features").mkdir(parents=True)
    (left / "features" / "x.npy").write_bytes(b"half")
    with featstore.open(path, memory=MEMORY) as g:
        export(g, tmp_path / "out", progress=False)
    assert sorted(each.name for each in tmp_path.glob("out*")) == ["out"]
