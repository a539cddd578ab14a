"""Datasets of tables against pandas: ids, edges, fields, of CSV, Parquet and Arrow, in any memory; hostile files by name."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import featstore
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.tables import Column, EdgeTable, NodeTable, import_tables
from featstore.adapters.datasets.tables import importer as module
from featstore.errors import BudgetError, CorruptionError, FormatError, UnknownNameError
from featstore.idmaps.numbering import Room
from tests.support.programs import FORGET_FEATSTORE, run_program

CODE = f"""{FORGET_FEATSTORE}
for name in [*sys.modules]:
    if name.split(".")[0] == "pyarrow":
        del sys.modules[name]
from featstore.adapters import datasets
print("pyarrow" in sys.modules, hasattr(datasets, "table"))
print(datasets.tables.import_tables.__name__, "pyarrow" in sys.modules)
"""


PAPERS = ["p10", "ünï", 'quo"te', "new\nline", "", "NA", "x" * 300, "p1"]


@pytest.mark.usefixtures("_program_server")
def test_tables_are_imported_when_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CODE)
    done = run_program("script.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["False False", "import_tables True"], done.stderr


def stored_edges(g: featstore.OutOfCoreGraph) -> list[tuple[int, int]]:
    """The edges of a graph, sorted."""
    src, dst = np.concatenate([np.empty((2, 0), np.int64), *(block.numpy() for block in g.edges())], axis=1)
    return sorted(zip(src.tolist(), dst.tolist(), strict=True))


def write_csv(path: Path, columns: dict[str, Sequence[Any]], **options: Any) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC, **options)
    return path


def made(path: Path, **tables: Any) -> Report:
    return import_tables(path / "g", progress=False, **({"memory": "64MiB"} | tables))


def nothing_left(path: Path) -> bool:
    return not [entry for entry in path.iterdir() if entry.name.startswith("g")]


def check_edges(path: Path, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Compare ids and edges with those of a dictionary, in order of first appearance."""
    order = {name: number for number, name in enumerate(dict.fromkeys(end for pair in pairs for end in pair))}
    with featstore.open(path / "g", memory="64MiB") as g:
        assert g.num_nodes == len(order)
        names = g.ids().decode(range(len(order)))
        assert list(names if g.ids().kind == "text" else names.tolist()) == list(order)
        assert stored_edges(g) == sorted((order[src], order[dst]) for src, dst in pairs)
        g.verify(progress=False)


def test_names_that_are_not_what_they_seem(tmp_path: Path) -> None:
    def refused(table: Any, error: type[Exception], message: str) -> None:
        if isinstance(table, bytes):
            (file := tmp_path / "e.csv").write_bytes(table)
        else:
            file = tmp_path / "e.arrow"
            with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(error, match=message):
            made(tmp_path, edges=EdgeTable(file, "s", "d"))
        assert nothing_left(tmp_path)

    refused(b"s,d\n10,1\n0x0a,1\n", ValueError, r"e\.csv, row 3: id '0x0a' in column 's' is a hexadecimal number.* text=True")
    refused("s,d\na,b".encode("utf-16"), FormatError, r"e\.csv: not UTF-8 text, but UTF-16")
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    refused(pa.table({"s": coded, "d": ["x", "y"]}), ValueError, r"e\.arrow, row 2: column 's' has no value")
    raw = pa.array([b"caf\xe9", b"ok"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    refused(pa.table({"s": text, "d": ["x", "y"]}), FormatError, r"e\.arrow, rows 1 to 2: damaged, or text that is not UTF-8")


def test_numbers_with_and_without_hexadecimal_marks_are_the_same(tmp_path: Path) -> None:
    pairs = [(12, -3), (-3, 2**63 - 1), (-(2**63), 12)]
    for note in ("plain", "0x is in a column that is not read"):
        (tmp_path / "e.csv").write_text("s,d,note\n" + "".join(f" {s},{d} ,{note}\n" for s, d in pairs))
        made(tmp_path, edges=EdgeTable(tmp_path / "e.csv", "s", "d"), overwrite=True)
        check_edges(tmp_path, pairs)


def test_files_with_a_header_alone_say_no_types(tmp_path: Path) -> None:
    (tmp_path / "e-0.csv").write_text("s,d\n")
    (tmp_path / "e-1.csv").write_text("s,d\n1,2\n2,3\n")
    (tmp_path / "n-0.csv").write_text("id,v\n")
    (tmp_path / "n-1.csv").write_text("id,v\n1,4\n2,5\n3,6\n")
    nodes = NodeTable(tmp_path / "n-*.csv", "id", features={"x": "v"})
    made(tmp_path, nodes=nodes, edges=EdgeTable(tmp_path / "e-*.csv", "s", "d"))
    check_edges(tmp_path, [(1, 2), (2, 3)])
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.features["x"][:].tolist() == [4, 5, 6]


def test_values_beyond_a_dtype_are_refused(tmp_path: Path) -> None:
    edges = EdgeTable(write_csv(tmp_path / "e.csv", {"s": ["a"], "t": ["b"]}), "s", "t")

    def run(values: list[Any], **column: Any) -> Report:
        pa.parquet.write_table(pa.table({"id": ["a", "b"], "v": pa.array(values)}), tmp_path / "n.parquet")
        nodes = NodeTable(tmp_path / "n.parquet", "id", features={"x": Column("v", **column)})
        return made(tmp_path, nodes=nodes, edges=edges, overwrite=True)

    (tmp_path / "n.csv").write_text("id,v\na,inf\nb,1e300\n")
    for dtype in ("float16", "float32"):
        with pytest.raises(ValueError, match=rf"row 2: 1e\+300 in column 'v' is no {dtype}"):
            run([1.0, 1e300], dtype=dtype)
        with pytest.raises(ValueError, match=rf"n\.csv, row 3: 1e\+300 in column 'v' is no {dtype}"):
            made(tmp_path, nodes=NodeTable(tmp_path / "n.csv", "id", features={"x": Column("v", dtype)}), edges=edges)
    for fill, dtype in ((1.5, "int64"), (300, "uint8"), (-1, "uint8"), (float("nan"), "int64"), (1e9, "float16")):
        with pytest.raises(ValueError, match=f"field 'x': fill={fill!r} is no {dtype}".replace("+", r"\+")):
            run([1, None], fill=fill, dtype=dtype)
    with pytest.raises(TypeError, match="fill must be a number, not str"):
        run([1, None], fill="x")
    with pytest.raises(TypeError, match="field 'x': 'foo' is no dtype"):
        run([1, 2], dtype="foo")
    with pytest.raises(ValueError, match=r"n\.parquet, row 2: column 'v' has no value"):
        run([[1.0], None], fill=9)
    with pytest.raises(ValueError, match=r"n\.parquet, row 2: column 'v' has no list there"):
        run([[[1.0]], [None]], fill=9)
    assert "2 cells without a value in x, filled" in run([[1.0, None], [None, 2.0]], fill=9).notes
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.features["x"][:].tolist() == [[1, 9], [9, 2]]


def test_an_id_that_is_twice_names_both_rows(tmp_path: Path) -> None:
    edges = EdgeTable(write_csv(tmp_path / "e.csv", {"s": ["a"], "t": ["b"]}), "s", "t")
    write_csv(tmp_path / "n-0.csv", {"id": ["a", "b"]})
    write_csv(tmp_path / "n-1.csv", {"id": ["c", "b"]})
    with pytest.raises(ValueError, match=r"n-1\.csv, row 3: id 'b' is that of .*n-0\.csv, row 3, too"):
        made(tmp_path, nodes=NodeTable(tmp_path / "n-*.csv", "id"), edges=edges)


NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8) | st.sampled_from(PAPERS)


@given(pairs=st.lists(st.tuples(NAME, NAME), min_size=1, max_size=30))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_text_in_parquet(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("text")
    src, dst = (pa.array([pair[end] for pair in pairs], pa.string()) for end in range(2))
    pa.parquet.write_table(pa.table({"a": src, "b": dst}), path / "e.parquet", row_group_size=7)
    made(path, edges=EdgeTable(path / "e.parquet", "a", "b"))
    check_edges(path, pairs)


@given(pairs=st.lists(st.tuples(NAME, NAME), min_size=1, max_size=30), ends=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_text_in_csv(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], ends: str, mark: bool) -> None:
    path = tmp_path_factory.mktemp("csv")
    with open(path / "e.csv", "w", newline="", encoding="utf-8-sig" if mark else "utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=ends)
        writer.writerows([("a", "b"), *pairs])
    made(path, edges=EdgeTable(path / "e.csv", "a", "b", text=True))
    check_edges(path, pairs)


@given(pairs=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)] * 2), min_size=1, max_size=30))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_integers(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.mktemp("integers")
    table = pa.table({"a": [src for src, _ in pairs], "b": [dst for _, dst in pairs]})
    with pa.ipc.new_file(path / "e.arrow", table.schema) as file:
        file.write_table(table, 4)
    made(path, edges=EdgeTable(path / "e.arrow", "a", "b"))
    check_edges(path, pairs)


def test_memory_and_blocks_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are the same through files, and those of pandas."""
    rng = np.random.default_rng(0)
    ends = rng.zipf(1.3, (2, 30_000)) % 20_000
    names = np.array([f"name {i}" for i in range(20_000)])
    write_csv(tmp_path / "e.csv", {"a": names[ends[0]], "b": names[ends[1]], "w": rng.integers(0, 9, 30_000) / 4})
    codes, uniques = pd.factorize(names[ends.T.reshape(-1)])
    expected = sorted(zip(codes[0::2].tolist(), codes[1::2].tolist(), strict=True))
    for number, room in enumerate((1 << 30, 100_000)):
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.setattr(module, "Room", lambda n, room=room: Room(room))
        report = made(folder, edges=EdgeTable(tmp_path / "e.csv", "a", "b", {"w": "w"}), memory="16MiB")
        assert any("through files" in note for note in report.notes) == (room < 1 << 30)
        with featstore.open(folder / "g", memory="64MiB") as g:
            assert g.ids().decode(range(len(uniques))) == uniques.tolist()
            assert stored_edges(g) == expected
            assert (g.edge_features["w"][:].numpy() == pd.read_csv(tmp_path / "e.csv")["w"].to_numpy()).all()
            g.verify(progress=False)
        assert sorted(entry.name for entry in folder.iterdir()) == ["g"]


def typed_tables(path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    emb = rng.standard_normal((len(PAPERS), 4)).astype(np.float32)
    pa.parquet.write_table(
        pa.table(
            {
                "doi": PAPERS,
                "emb": pa.FixedSizeListArray.from_arrays(pa.array(emb.reshape(-1)), 4),
                "label": pa.array([3, None, 1, 2, 0, 5, 6, 7], pa.int32()),
                "split": ["train", "test", "train", None, "valid", "test", "train", "train"],
            }
        ),
        path / "papers.parquet",
    )
    authors = pd.DataFrame({"id": [700, -5, 33], "a": [1.5, 2.5, 3.5], "b": [0.0, 1.0, 2.0], "c": [9, 8, 7], "d": [0, 0, 1]})
    authors.iloc[:2].to_csv(path / "authors-1.csv", index=False)
    authors.iloc[2:].to_csv(path / "authors-2.csv", index=False)
    (path / "writes.tsv").write_text("who\twhat\tyear\n33\tp10\t1999\n700\tünï\t2001\n33\tp10\t2002\n-5\tNA\t2003\n")
    write_csv(path / "cites.csv.gz", {"from": ["p10", "p1", "ünï"], "to": ["p10", "", "p1"]})
    write_csv(path / "at.csv", {"who": [33, -5], "where": ["Linz", "Graz"]})
    return {
        "nodes": {
            "paper": NodeTable(
                path / "papers.parquet", "doi", {"x": "emb"}, {"y": Column("label", "int64", fill=-1)}, split="split"
            ),
            "author": NodeTable(str(path / "authors-*.csv"), "id", {"x": Column(["a", "b", "c", "d"], "float32"), "c": "c"}),
        },
        "edges": {
            ("author", "writes", "paper"): EdgeTable(path / "writes.tsv", "who", "what", {"year": "year"}),
            ("paper", "cites", "paper"): EdgeTable([path / "cites.csv.gz"], "from", "to"),
            ("author", "at", "place"): EdgeTable(path / "at.csv", "who", "where"),
        },
    }


def test_several_types(tmp_path: Path) -> None:
    report = made(tmp_path, **typed_tables(tmp_path))
    assert report.nodes == {"paper": 8, "author": 3, "place": 2}
    assert report.edges == {"author,writes,paper": 4, "paper,cites,paper": 3, "author,at,place": 2}
    assert report.edges_read == 9
    assert report.splits == {"paper/train_idx": 4, "paper/test_idx": 2, "paper/valid_idx": 1}
    assert report.notes == ["3 nodes of type paper have no edge"]
    assert report.unlabelled == {"paper/y": 1}
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        emb = np.array(pa.parquet.read_table(tmp_path / "papers.parquet")["emb"].to_pylist(), np.float32)
        assert (g.features["paper/x"][:].numpy() == emb).all()
        assert g["author"].features["x"][:].tolist() == [[1.5, 0, 9, 0], [2.5, 1, 8, 0], [3.5, 2, 7, 1]]
        assert g["author"].features["c"][:].tolist() == [9, 8, 7]
        assert g.columns.keys() == {"paper,author/x", "author/c"}
        assert g.node_data["paper/y"].tolist() == [3, -1, 1, 2, 0, 5, 6, 7]
        assert g.node_data["paper/train_idx"].tolist() == [0, 2, 6, 7]
        assert g.ids("paper").encode(PAPERS).tolist() == list(range(8))
        assert g.ids("author").encode([33, 700]).tolist() == [2, 0]
        assert g.ids("place").decode([0, 1]) == ["Linz", "Graz"]
        assert g.edge_features["author,writes,paper/year"][:].tolist() == [1999, 2001, 2002, 2003]
        g.verify(progress=False)
        with pytest.raises(ValueError, match="name a type of nodes: 'paper', 'author', 'place'"):
            g.ids()
    by_hand = featstore.OutOfCoreGraph.create(
        tmp_path / "h",
        nodes={"paper": featstore.Nodes(8), "author": featstore.Nodes(3), "place": featstore.Nodes(2)},
        edges={
            ("author", "writes", "paper"): np.array([[2, 0, 2, 1], [0, 1, 0, 5]]),
            ("paper", "cites", "paper"): np.array([[0, 7, 1], [0, 4, 7]]),
            ("author", "at", "place"): np.array([[2, 1], [0, 1]]),
        },
        progress=False,
        memory="64MiB",
    )
    by_hand.close()
    for name in ("indptr", "indices", "edge_ids", "out_degree"):
        file = f"edge.{name}.1.rows"
        assert (tmp_path / "g" / file).read_bytes()[4096:] == (tmp_path / "h" / file).read_bytes()[4096:], name


def test_edges_are_cleaned_and_counted(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("b", "b"), ("a", "b"), ("c", "a"), ("c", "c"), ("c", "a"), ("b", "a")]
    table = EdgeTable(write_csv(tmp_path / "e.csv", dict(zip("st", zip(*pairs, strict=True), strict=True))), "s", "t")
    report = made(tmp_path, edges=table, remove_self_loops=True, coalesce=True)
    assert (report.edges_read, report.loops_dropped, report.duplicates_dropped, report.edges) == (7, 2, 2, {"_,_,_": 3})
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert stored_edges(g) == [(0, 1), (1, 0), (2, 0)]
    report = made(tmp_path, edges=table, to_undirected=True, overwrite=True)
    assert (report.edges_read, report.reverses_added, report.duplicates_dropped, report.edges) == (7, 7, 8, {"_,_,_": 6})
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert stored_edges(g) == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2)]


def test_rows_of_dropped_loops_go_with_them(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "e.csv", {"s": [5, 6, 7], "t": [6, 6, 5], "w": [0.5, 1.5, 2.5]})
    made(tmp_path, edges=EdgeTable(file, "s", "t", {"w": Column("w", "float32")}), remove_self_loops=True)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.edge_features["w"][:].tolist() == [0.5, 2.5]


def test_edges_beyond_the_node_table(tmp_path: Path) -> None:
    nodes = NodeTable(write_csv(tmp_path / "n.csv", {"id": ["b", "a"]}), "id")
    edges = EdgeTable(
        write_csv(tmp_path / "e.csv", {"s": ["a", "a", "z"], "t": ["b", "y", "a"], "w": [1, 2, 3]}), "s", "t", {"w": "w"}
    )
    with pytest.raises(UnknownNameError, match=r"e\.csv, row 3: t 'y' is no node of the node table \(2 such edges"):
        made(tmp_path, nodes=nodes, edges=edges)
    assert nothing_left(tmp_path)
    report = made(tmp_path, nodes=nodes, edges=edges, missing="drop")
    assert report.notes == ["2 edges left out, as an end is not in its node table"]
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert stored_edges(g) == [(1, 0)]
        assert g.edge_features["w"][:].tolist() == [1]
        assert g.ids().decode([0, 1]) == ["b", "a"]


def written(form: str) -> bytes:
    """Return the bytes of a table of edges as pyarrow writes it."""
    table, out = pa.table({"s": range(3000), "t": range(3000)}), pa.BufferOutputStream()
    if form == "parquet":
        pa.parquet.write_table(table, out)
    else:
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    return bytes(out.getvalue())


HOSTILE: list[tuple[str, bytes, type[Exception], str]] = [
    ("e.csv", b"", FormatError, r"e\.csv: Empty CSV file"),
    ("e.csv", b"s,x\n1,2\n", KeyError, r"e\.csv has no column 't'; it has 's', 'x'"),
    ("e.csv", b"s,t,t\n1,2,3\n", ValueError, r"e\.csv has 2 columns 't'"),
    ("e.csv", b"s,t\n1,2\n3\n", FormatError, r"e\.csv, row 3: .*Expected 2 columns, got 1"),
    ("e.csv", b"s,t\n" + b"1,2\n" * 300_000 + b"x,2\n", FormatError, r"e\.csv, row 300002: .*invalid value 'x'; .*text=True"),
    ("e.csv", b"s,t\n1,2\n,4\n", ValueError, r"e\.csv, row 3: column 's' has no value"),
    ("e.csv", b"s,t\na,b\nc,\n", ValueError, r"e\.csv, row 3: column 't' has no value"),
    ("e.csv", b"s,t\na,\xff\n", FormatError, r"e\.csv.*invalid UTF8"),
    (
        "e.csv.gz",
        gzip.compress(b"s,t\n" + b"".join(b"%d,%d\n" % (i, i * 7) for i in range(99999)))[:-5000],
        CorruptionError,
        r"e\.csv\.gz",
    ),
    ("e.csv.gz", b"no gzip at all", CorruptionError, r"e\.csv\.gz"),
    ("e.parquet", b"PAR1 no parquet at all", FormatError, r"e\.parquet"),
    ("e.arrow", b"no arrow at all", FormatError, r"e\.arrow"),
    ("e.parquet", b"", FormatError, r"e\.parquet: Parquet file size is 0 bytes"),
    ("e.parquet", written("parquet")[:-100], FormatError, r"e\.parquet: "),
    ("e.arrow", b"", FormatError, r"e\.arrow: "),
    ("e.arrow", written("arrow")[:-100], FormatError, r"e\.arrow: "),
    ("e.xlsx", b"", FormatError, r"e\.xlsx: not known as a table by its suffix"),
]


@pytest.mark.parametrize(("name", "data", "error", "message"), HOSTILE)
def test_hostile_files_are_named(tmp_path: Path, name: str, data: bytes, error: type[Exception], message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=message):
        made(tmp_path, edges=EdgeTable(tmp_path / name, "s", "t"))
    assert nothing_left(tmp_path)


def test_wrong_cells_are_named(tmp_path: Path) -> None:
    good = EdgeTable(write_csv(tmp_path / "e.csv", {"s": ["a"], "t": ["a"]}), "s", "t")

    def refused(columns: dict[str, Any], error: type[Exception], message: str, **options: Any) -> None:
        pa.parquet.write_table(pa.table({"id": ["a", "b", "c"], **columns}), tmp_path / "n.parquet")
        with pytest.raises(error, match=message):
            made(tmp_path, nodes=NodeTable(tmp_path / "n.parquet", "id", **options), edges=good)
        assert nothing_left(tmp_path)

    refused({"id": ["a", "b", "a"]}, ValueError, r"n\.parquet, row 3: id 'a' is that of row 1, too")
    refused({"id": ["a", None, "c"]}, ValueError, r"n\.parquet, row 2: column 'id' has no value")
    refused({"id": [1.5, 2.5, 3.5]}, TypeError, "ids are text or integers, and column 'id' has double")
    refused({"id": [1, 2, 3]}, TypeError, r"text in column 's' of .*e\.csv, and integers in column 'id' of .*n\.parquet")
    refused({"x": [1.0, None, 2.0]}, ValueError, r"n\.parquet, row 2: column 'x' has no value", features={"x": "x"})
    refused(
        {"x": [[1.0], [2.0, 3.0], [4.0]]},
        ValueError,
        "row 2: the list in column 'x' has 2 numbers, and those before have 1",
        features={"x": "x"},
    )
    refused({"x": [[1.0], [None], [4.0]]}, ValueError, r"row 2: column 'x' has no value", features={"x": "x"})
    refused({"x": ["1", "2", "3"]}, TypeError, "column 'x' has string, which no field stores", features={"x": "x"})
    refused({"x": [1.0, 2.5, 3.0]}, ValueError, r"row 2: 2\.5 in column 'x' is no int32", data={"x": Column("x", "int32")})
    refused({"x": [1, 300, 3]}, ValueError, r"row 2: 300 in column 'x' is no uint8", data={"x": Column("x", "uint8")})
    refused({"x": [1, 2, 3]}, ValueError, "named both as a feature and as node data: x", features={"x": "x"}, data={"x": "x"})
    refused({"x": ["a/b", "a", "a"]}, ValueError, "a split in column 'x' has a name of", split="x")


def test_the_report_says_what_ids_are(tmp_path: Path) -> None:
    """Numbers that are no int64 are read as text."""
    for name, cells in {"a": [1, -7], "b": [1.5, 2.5], "c": ["9" * 20, 1]}.items():
        rows = "".join(f"{cell},{cell}\n" for cell in cells)  # without quotes
        (tmp_path / f"{name}.csv").write_text(f"id,to\n{rows}")
    table = EdgeTable(tmp_path / "a.csv", "id", "to")
    edges = {("a", "r", "a"): table, ("b", "r", "c"): EdgeTable([tmp_path / "b.csv"], "id", "to")}
    nodes = {"c": NodeTable([tmp_path / "c.csv", tmp_path / "b.csv"], "id")}
    report = import_tables(tmp_path / "typed", nodes, edges, progress=False)
    assert report.ids == {"a": "int64", "b": "text", "c": "text"}
    assert "\n  ids  a: whole numbers\n  ids  b: text\n  ids  c: text\n" in str(report)
    assert "\n  ids: whole numbers\n" in str(import_tables(tmp_path / "g", edges=table, progress=False))


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    table = EdgeTable(write_csv(tmp_path / "e.csv", {"s": ["a"], "t": ["a"]}), "s", "t", {})
    weighted = EdgeTable(table.files, "s", "t", {"w": "s"})
    nodes = NodeTable(table.files, "s")
    for tables, error, message in (
        ({}, TypeError, "of tables of nodes, of edges, or both"),
        ({"nodes": nodes}, TypeError, "needs a table of edges"),
        ({"nodes": {"a": nodes}, "edges": table}, TypeError, "both tables, or both mappings"),
        ({"edges": "e.csv"}, TypeError, r"edges is a table of files, such as EdgeTable\('cites.csv', src=.*, not str"),
        ({"edges": pd.DataFrame({"s": [1]})}, TypeError, r"such as EdgeTable\(.*, not DataFrame"),
        ({"nodes": nodes, "edges": "e.csv"}, TypeError, r"such as EdgeTable\("),
        ({"nodes": ["n.csv"], "edges": table}, TypeError, r"nodes is a table of files, such as NodeTable\('papers.*, not list"),
        ({"nodes": {"a": table}}, TypeError, "type 'a': it must be a NodeTable"),
        ({"edges": {("a", "b"): table}}, TypeError, "tuple"),
        ({"edges": {("_", "b", "_"): table}}, ValueError, "the name of nodes without types"),
        ({"edges": {("a", "b", "a"): table}, "to_undirected": True}, ValueError, "for a graph of one type"),
        ({"edges": table, "missing": "add"}, ValueError, "missing must be 'error' or 'drop'"),
        ({"edges": weighted}, TypeError, "column 's' has string"),
        ({"edges": EdgeTable(table.files, "s", "s")}, ValueError, "^the edge table: sources and .* are in one column"),
        ({"edges": EdgeTable(tmp_path / "none.csv", "s", "t")}, FileNotFoundError, "no such file"),
        ({"edges": EdgeTable([], "s", "t")}, ValueError, "the list of files is empty"),
        ({"edges": EdgeTable(3, "s", "t")}, TypeError, "must be a path"),
        ({"edges": table, "memory": "1MiB"}, BudgetError, "memory"),
    ):
        with pytest.raises(error, match=message):
            made(tmp_path, **tables)
        assert nothing_left(tmp_path)


def test_a_directory_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    for number, rows in enumerate((b"1;2\n2;3\n", b"3;1\n", b"")):
        (tmp_path / "edges" / f"{number}.csv").write_bytes(rows or b"9;9\n")
    made(tmp_path, edges=EdgeTable(tmp_path / "edges", "s", "t", delimiter=";", header=["s", "t"]))
    check_edges(tmp_path, [(1, 2), (2, 3), (3, 1), (9, 9)])


@pytest.mark.parametrize("name", ["e.csv", "e.csv.gz"])
def test_a_line_break_far_behind(tmp_path: Path, name: str) -> None:
    pairs = [("a", "b")] * 400_000 + [("x\ny", 'b"')]
    table = pd.DataFrame(pairs, columns=["s", "t"])
    table.to_csv(tmp_path / name, index=False)
    made(tmp_path, edges=EdgeTable(tmp_path / name, "s", "t"), memory="16MiB", coalesce=True)
    check_edges(tmp_path, [("a", "b"), ("x\ny", 'b"')])


def test_numbers_beyond_int64_are_text(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("s,t\n1,99999999999999999999\n")
    made(tmp_path, edges=EdgeTable(tmp_path / "e.csv", "s", "t"))
    check_edges(tmp_path, [("1", "99999999999999999999")])


def test_tables_without_rows(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("s,t\n")
    made(tmp_path, edges=EdgeTable(tmp_path / "e.csv", "s", "t"))
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert (g.num_nodes, g.num_edges, len(g.ids())) == (0, 0, 0)
        g.verify(progress=False)
