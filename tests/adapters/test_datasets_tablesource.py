"""Tables from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import featstore
from featstore.adapters.datasets.tablesource import read
from featstore.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "papers.csv").write_text("doi,a,b,label,split\np1,1.5,2,0,train\np2,3,4,1,test\n")
    (tmp_path / "cites.csv").write_text("from,to,year\np2,p1,1999\np1,p1,2001\n")
    (tmp_path / "writes.csv").write_text("who,what\n7,p2\n")
    return tmp_path


def test_one_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["import", "table", str(folder), str(folder / "g"), "--memory", "64MiB", "--json", "--remove-self-loops"]
    line += ["--nodes", "papers.csv:doi", "--features", "x=a+b/float32", "--node-data", "y=label", "--split", "split"]
    assert main([*line, "--edges", "cites.csv:from:to", "--edge-features", "year=year"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nodes"] == {"_": 2}
    assert (report["edges"], report["loops_dropped"], report["source"]) == ({"_,_,_": 1}, 1, "table")
    assert report["splits"] == {"train_idx": 1, "test_idx": 1}
    assert (report["features"], report["edge_features"]) == ({"x": [2, 2]}, {"year": [1]})
    with featstore.open(folder / "g", memory="64MiB") as g:
        assert g.features["x"][:].tolist() == [[1.5, 2], [3, 4]]
        assert g.node_data["y"].tolist() == [0, 1]
        assert g.edge_features["year"][:].tolist() == [1999]
        assert g.ids().encode(["p2"]).tolist() == [1]
    assert main(["info", str(folder / "g")]) == 0
    assert "  ids        2 names, text, " in capsys.readouterr().out
    assert main(["verify", str(folder / "g")]) == 0


def test_several_types(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read(
        folder,
        folder / "g",
        nodes=["paper=papers.csv:doi"],
        edges=["author,writes,paper=writes.csv:who:what", "paper,cites,paper=cites.csv:from:to"],
        features=["paper:x=a"],
        edge_features=["paper,cites,paper:year=year"],
        split=["paper=split"],
        progress=False,
        memory="64MiB",
    )
    assert report.nodes == {"paper": 2, "author": 1}
    assert main(["info", str(folder / "g"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"]["author"]["kind"] == "int64"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"nodes": ["papers.csv"]}, r"--nodes 'papers.csv' is not \[TYPE=\]FILE:ID"),
        ({"edges": ["cites.csv:from"]}, r"--edges 'cites.csv:from' is not"),
        ({"edges": ["cites.csv:from:to", "writes.csv:who:what"]}, "tables of one type have the same columns"),
        ({"edges": ["cites.csv:from:to"], "features": ["x=a"]}, "--features without a type: there is no such table"),
        (
            {"nodes": ["paper=papers.csv:doi"], "node_data": ["author:x=a"]},
            "--node-data of type 'author': there is no such table",
        ),
        ({"nodes": ["p=papers.csv:doi"], "features": ["p:x"]}, "--features 'x' is not NAME=COLUMNS"),
        ({"nodes": ["p=papers.csv:doi"], "split": ["p=a", "p=b"]}, "--split: one column a type, not a, b"),
        ({"nodes": ["=papers.csv:doi"]}, "--nodes '=papers.csv:doi' is not"),
        ({"edges": ["cites.csv:from:to"], "edge_header": ["p=a,b"]}, "--edge-header of type 'p': there is no such table"),
        ({"edges": ["cites.csv:from:to"], "fill": ["year=0"]}, "--fill: no field has the columns 'year'"),
        ({"edges": ["cites.csv:from:to"], "fill": ["year=x"]}, "--fill 'year=x' is not COLUMN=VALUE with a number"),
        (
            {"edges": ["cites.csv:from:to"], "fill": ["a=0", "a=1"]},
            "--fill 'a=1' is not COLUMN=VALUE with a number, one for each",
        ),
        (
            {"nodes": ["papers.csv:doi"], "features": ["x=a+b"], "fill": ["a=0", "b=1"]},
            "--fill: columns a, b make one field 'x', which has one value",
        ),
        ({"nodes": ["papers.csv:doi"]}, "nodes alone have a type, such as --nodes node=papers.csv:doi$"),
    ],
)
def test_wrong_words_are_named(folder: Path, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(folder, folder / "g", progress=False, **words)
    assert not (folder / "g").exists()


def test_nodes_alone_are_imported_as_advised(folder: Path) -> None:
    assert read(folder, folder / "g", progress=False, nodes=["node=papers.csv:doi"]).nodes == {"node": 2}


def test_a_file_in_place_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for given, inside in ((folder / "cites.csv", str(folder)), (Path("cites.csv"), ".")):
        words = rf"FOLDER is a file: give the folder .* \({re.escape(inside)}\), and their names by --nodes"
        with pytest.raises(NotADirectoryError, match=words):
            read(given, folder / "g", progress=False, edges=["cites.csv:from:to"])


def test_cells_without_a_value_and_files_without_a_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "n.csv").write_text("p1,NA,\np2,3,4\n")
    (folder / "e.csv").write_text("p2,p1,\np1,p1,2001\n")
    line = [
        "import",
        "table",
        str(folder),
        str(folder / "g"),
        "--memory",
        "64MiB",
        "--null-values",
        "NA",
        "--node-header",
        "id,x,y",
    ]
    line += ["--nodes", "n.csv:id", "--features", "x=x/float32", "--node-data", "y=y/int64", "--edges", "e.csv:s:t"]
    line += ["--edge-header", "s,t,year", "--edge-features", "year=year"]
    assert main([*line, "--fill", "x=0.5"]) != 0
    assert "n.csv, row 1: column 'y' has no value (1 such cells near there); Column('y', fill=…)" in (
        said := capsys.readouterr().err
    )
    assert "--fill y=VALUE" in said
    assert main([*line, "--fill", "x=nan", "y=-1", "--fill", "year=0"]) == 0
    with featstore.open(folder / "g", memory="64MiB") as g:
        assert g.features["x"][:].isnan().tolist() == [True, False]
        assert g.node_data["y"].tolist() == [-1, 4]
        assert g.edge_features["year"][:].tolist() == [0, 2001]
    (folder / "n.csv").write_text("p1,1,2\n,3,4\n")
    assert main([*line, "--overwrite"]) != 0
    assert capsys.readouterr().err.rstrip().endswith("column 'id' has no value (1 such cells near there)")
