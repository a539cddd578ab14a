"""Columns of tables as fields: times, decimals, text; and what errors of files and columns advise."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import featstore
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.tables import Column, EdgeTable, NodeTable, import_tables
from featstore.errors import CorruptionError, FormatError


def write(path: Path, **columns: Any) -> Path:
    n = len(next(iter(columns.values())))
    table = pa.table({"s": range(n), "t": range(n), **columns})
    (pa.feather.write_feather if path.suffix == ".arrow" else pa.parquet.write_table)(table, path)
    return path


def imported(path: Path, files: Any, given: Any = "v", **options: Any) -> Report:
    edges = EdgeTable(files, "s", "t", {"v": given}, **options)
    return import_tables(path / "g", edges=edges, progress=False, memory="64MiB", overwrite=True)


def stored(path: Path) -> np.ndarray[Any, Any]:
    with featstore.open(path / "g", memory="64MiB") as g:
        return g.edge_features["v"][:].numpy()


DAY = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "value", "count"),
    [
        (pa.timestamp("s"), DAY.replace(tzinfo=None), 1577934245),
        (pa.timestamp("us", "UTC"), DAY, 1577934245_000_000),
        (pa.date32(), DAY.date(), 18263),
        (pa.date64(), DAY.date(), 18263 * 86_400_000),
        (pa.time32("ms"), time(0, 0, 2), 2000),
        (pa.time64("ns"), time(0, 0, 2), 2 * 10**9),
        (pa.duration("us"), timedelta(seconds=-3), -3_000_000),
        (pa.list_(pa.timestamp("ms")), [DAY.replace(tzinfo=None)], [1577934245_000]),
    ],
)
@pytest.mark.parametrize("dtype", [None, "int64"])
def test_times_are_counts_in_their_own_unit(tmp_path: Path, kind: pa.DataType, value: Any, count: Any, dtype: str | None) -> None:
    path = write(tmp_path / "e.arrow", v=pa.array([value, value], kind))
    imported(tmp_path, path, Column("v", dtype))
    assert stored(tmp_path).dtype == np.int64
    assert stored(tmp_path).tolist() == [count, count]
    if isinstance(count, int):
        write(path, v=pa.array([value, None], kind))
        with pytest.raises(ValueError, match=r"e\.arrow, row 2: column 'v' has no value"):
            imported(tmp_path, path, Column("v", dtype))
        imported(tmp_path, path, Column("v", dtype, fill=-1))
        assert stored(tmp_path).tolist() == [count, -1]


@pytest.mark.parametrize(
    ("cell", "count"),
    [("2020-01-02", 18263), ("2020-01-02 03:04:05", 1577934245), ("2020-01-02T03:04:05Z", 1577934245), ("00:00:02", 2)],
)
@pytest.mark.parametrize("dtype", [None, "int64", "float64"])
def test_times_of_csv(tmp_path: Path, cell: str, count: int, dtype: str | None) -> None:
    (tmp_path / "e.csv").write_text(f"s,t,v\n1,2,{cell}\n2,1,{cell}\n")
    imported(tmp_path, tmp_path / "e.csv", Column("v", dtype))
    assert stored(tmp_path).dtype == np.dtype(dtype or "int64")
    assert stored(tmp_path).tolist() == [count, count]


def test_files_count_times_in_one_unit(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{unit}.parquet", v=pa.array([1, 2], pa.timestamp(unit))) for unit in ("us", "ms")]
    with pytest.raises(TypeError, match=r"ms\.parquet: field 'v' has timestamp\[ms\], and in .*us\.parquet timestamp\[us\]"):
        imported(tmp_path, files)
    with pytest.raises(TypeError, match=r"n\.parquet: field 'v' has no times, and in .*us\.parquet timestamp\[us\]"):
        imported(tmp_path, [files[0], write(tmp_path / "n.parquet", v=[1])], Column("v", "int64"))


def test_files_that_differ_in_lengths_or_dtypes(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{i}.parquet", v=[[1.0] * n], w=pa.array([1], k)) for i, (n, k) in enumerate(((2, "i4"), (3, "i8")))
    ]
    with pytest.raises(
        TypeError, match=r"1\.parquet: field 'v' has rows of float64 \[3\].*float64 \[2\]; rows of a field have one"
    ):
        imported(tmp_path, files)
    with pytest.raises(TypeError, match=r"has rows of int64 \[\], and in .*; Column\(…, dtype=\) converts them$"):
        imported(tmp_path, files, "w")


def test_a_cell_of_text_among_numbers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    for number in ("7", "-.5e3", "+1.", "nan", " 12 "):
        path.write_text("s,t,v\n" + f"0,1,{number}\n" * 30 + "1,0,abc\n0,0,7\n")
        with pytest.raises(ValueError, match=r"e.csv, row 32: column 'v' has 'abc' there, and numbers elsewhere; null_values="):
            imported(tmp_path, path)
    imported(tmp_path, path, Column("v", fill=0), null_values=["abc"])
    assert stored(tmp_path)[29:].tolist() == [12, 0, 7]
    for cells in ("x\n1,0,y\n0,0,7\n", "x\n0,1,y\n" + "1,1,\n" * 8):
        path.write_text("s,t,v\n0,1," + cells)
        with pytest.raises(TypeError, match=r"column 'v' has string, which no field stores; .*number texts first"):
            imported(tmp_path, path)


def test_decimals_and_text_name_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "e.parquet", v=[Decimal("1.5"), None], w=[["1"], ["2"]])
    with pytest.raises(TypeError, match=r"column 'v' has decimal.*, which no field stores; Column\('v', dtype='float64'\)"):
        imported(tmp_path, path)
    with pytest.raises(TypeError, match=r"column 'w' has string, which no field stores; .*number texts first"):
        imported(tmp_path, path, "w")
    with pytest.raises(ValueError, match="row 2: column 'v' has no value"):
        imported(tmp_path, path, Column("v", "float64"))
    imported(tmp_path, path, Column("v", "float64", fill=0))
    assert stored(tmp_path).tolist() == [1.5, 0]


def test_labels_that_are_none_are_counted_as_of_other_importers(tmp_path: Path) -> None:
    path = tmp_path / "n.parquet"
    none = float("nan")
    columns = {"a": [-1, 0, -2, 3], "b": [none, 1.0, 2.0, none], "c": [None, 1, -1, None], "d": [-1, -1, 5, 5]}
    write(path, id=["a", "b", "c", "d"], lists=[[none, none], [none, 1.0], [1.0, 2.0], [none, None]], **columns)
    data = {"a": "a", "b": "b", "c": Column("c", fill=0), "ad": ["a", "d"], "lists": Column("lists", fill=7)}
    data |= {"cd": Column(["c", "d"], fill=0), "year": "t"}
    nodes = NodeTable(path, "id", features={"x": "b"}, data=data)
    (tmp_path / "e.csv").write_text("s,t\na,b\n")
    edges = EdgeTable(tmp_path / "e.csv", "s", "t")
    report = import_tables(tmp_path / "g", nodes, edges, progress=False, memory="64MiB")
    assert report.unlabelled == {"a": 2, "b": 2, "c": 3, "ad": 1, "lists": 2, "cd": 1}


def whole(suffix: str) -> bytes:
    table, file = pa.table({"s": range(99), "t": range(99)}), BytesIO()
    (pa.parquet.write_table if suffix == "parquet" else pa.feather.write_feather)(table, file)
    return file.getvalue()


FAR = b"x,s,v,t\n" + b"0,1,2,3\n" * 300_000
BAD_VALUE = r"e\.csv, row 300002: column '{}': int64: invalid value 'w'; cells have the type of the first ones: {}"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "e.csv",
            b"s,v,t\n1,2,2\n3,4,caf\xe9\n",
            r"row 3: column 't': string: invalid UTF8 data; not UTF-8: convert it \(iconv -f latin1",
        ),
        ("e.csv", "s,t,v,\xe9\n1,2,3,4\n".encode("latin1"), r"e\.csv: not UTF-8: convert it \(iconv -f latin1 -t utf-8\)"),
        (
            "e.csv",
            "s,t,v\n1,2,3\n".encode("utf-16"),
            r"e\.csv: not UTF-8 text, but UTF-16: convert it \(iconv -f utf-16 -t utf-8\)$",
        ),
        ("e.csv", b"\xfe\xff" + "s,t,v\n1,2,3\n".encode("utf-16-be"), r"e\.csv: not UTF-8 text, but UTF-16: convert it"),
        ("e.csv", FAR + b"0,1,w,2\n", BAD_VALUE.format("v", r"Column\('v', dtype=…\).*--null-values\)$")),
        ("e.csv", FAR + b"0,1,2,w\n", BAD_VALUE.format("t", r"text=True \(--text-ids\) reads ids as text$")),
        ("e.csv.gz", b"s,t,v\n1,2,3\n", r"not a gzip file: "),
        ("e.csv.bz2", b"s,t,v\n1,2,3\n", r"not a bzip2 file: "),
        ("e.csv", b"s;t;v\n1;2;3\n", r"it has 's;t;v'; give delimiter=';' \(--delimiter\)"),
        ("e.csv", b"s\tt\tv\n1\t2\t3\n", r"; give delimiter='.*t'"),
        ("e.csv", b"s|t|v\n1|2|3\n", r"; give delimiter='\|'"),
        ("e.csv", b"s\n1\n", r"it has 's'.$"),
        ("e.csv", b"1,2,3.5\n3,4,5\n", r"it has '1', '2', '3\.5'; if it has no header, header=\[…\] names its columns"),
        ("e.csv", b"s,x1,v\n3,4,5\n", r"it has 's', 'x1', 'v'.$"),
        ("e.parquet", whole("parquet")[:-9], r"e\.parquet: Parquet magic bytes not found.*; the file ends early: copy it again$"),
        ("e.parquet", b"", r"e\.parquet: Parquet file size is 0 bytes; the file ends early"),
        ("e.parquet", b"s,t\n1,2\n" * 9, r"this is not a parquet file\.$"),
        ("e.arrow", whole("arrow")[:-9], r"e\.arrow: Not an Arrow file; the file ends early: copy it again$"),
    ],
)
def test_errors_of_files_say_what_helps(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises((FormatError, CorruptionError, KeyError), match=message):
        imported(tmp_path, tmp_path / name)


def test_columns_that_a_header_names_are_named(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("1,2,3\n1,2,x\n")
    with pytest.raises(FormatError, match=r"row 2: column 'v': int64: invalid value 'x'"):
        imported(tmp_path, tmp_path / "e.csv", Column("v", "int64"), header=["s", "t", "v"])


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 0)])
def test_lists_of_no_number_are_no_field(tmp_path: Path, kind: pa.DataType) -> None:
    pa.parquet.write_table(pa.table({"s": [1], "t": [2], "v": pa.array([[]], kind)}), tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"e\.parquet: column 'v' has lists of no number"):
        imported(tmp_path, tmp_path / "e.parquet", "v")


def test_splits_have_the_names_of_other_importers(tmp_path: Path) -> None:
    texts = ["Train", "val", "TEST", "train", None, "Validation", "valid", "Other", "other", "train"]
    ids = [f"n{i}" for i in range(len(texts))]
    path = write(tmp_path / "n.parquet", id=ids, split=texts, y=range(len(texts)))
    (tmp_path / "e.csv").write_text("s,t\nn0,n1\n")
    edges = EdgeTable(tmp_path / "e.csv", "s", "t")
    report = import_tables(tmp_path / "g", NodeTable(path, "id", split="split"), edges, progress=False, memory="64MiB")
    expected = {"train_idx": [0, 3, 9], "valid_idx": [1, 5, 6], "test_idx": [2], "Other_idx": [7], "other_idx": [8]}
    assert report.splits == {name: len(nodes) for name, nodes in expected.items()}
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert {name: nodes.tolist() for name, nodes in g.node_data.items()} == expected
    nodes = NodeTable(path, "id", data={"valid_idx": "y"}, split="split")
    with pytest.raises(
        ValueError, match=r"n\.parquet: a split in column 'split' makes node data 'valid_idx', and there is another"
    ):
        import_tables(tmp_path / "h", nodes, edges, progress=False, memory="64MiB")
