"""Columns of tables as fields: times, decimals, text, and what a refusal advises."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
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
