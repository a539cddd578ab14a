"""CSV files of numbers, plain and gzipped, against pandas; lines of errors in every block."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from featstore.adapters.datasets import csvfiles
from featstore.adapters.datasets.csvfiles import CsvSource, count_lines, read_ints, read_records
from featstore.creation.source import numpy_dtype
from featstore.errors import CorruptionError, FormatError, MissingExtraError
from tests.support.refusing import refuses


def whole(source: CsvSource, max_bytes: int = 1 << 20) -> Any:
    return np.concatenate(list(source.blocks(max_bytes))).view(numpy_dtype(source.dtype)).reshape(source.shape)


@given(
    rows=st.integers(1, 50).flatmap(
        lambda k: st.lists(
            st.lists(st.floats(width=32, allow_infinity=False), min_size=k % 4 + 1, max_size=k % 4 + 1), min_size=1
        )
    ),
    is_zipped=st.booleans(),
    max_bytes=st.sampled_from([1, 40, 1 << 20]),
)
def test_any_floats(rows: list[list[float]], is_zipped: bool, max_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    array = np.array(rows, np.float32)
    path = tmp_path_factory.mktemp("c") / f"x.csv{'.gz' * is_zipped}"
    pd.DataFrame(array).to_csv(path, header=False, index=False, na_rep="nan", compression="gzip" if is_zipped else None)
    found = whole(CsvSource(path, len(array), "float32"), max_bytes)
    np.testing.assert_array_equal(found, array)
    assert count_lines(path) == len(array)


def test_whole_numbers_and_others_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("1,2\n3,4\n")
    assert CsvSource(path, 2).dtype == "int64"
    assert CsvSource(path, 2, "float64").dtype == "float64"
    path.write_text("1,2\n3,4.5\n")
    assert CsvSource(path, 2).dtype == "float32"
    path.write_text("1,\n3,4\n")
    assert np.isnan(whole(CsvSource(path, 2))).tolist() == [[False, True], [False, False]]
    monkeypatch.setattr(csvfiles, "_BLOCK_BYTES", 64)
    path.write_text("1,2\n" * 100 + "1,2.5\n")
    refuses(FormatError, "x.csv, line 101, column 2: .*'2.5'; .*give feature_dtype", lambda: whole(CsvSource(path, 101)))
    assert whole(CsvSource(path, 101, "float32"))[100, 1] == 2.5


@given(
    line=st.integers(1, 200),
    block_bytes=st.sampled_from([32, 64, 100, 1 << 20]),
    bad=st.sampled_from(["x", "1.5", "", "1,2,3", "1"]),
)
@example(line=1, block_bytes=32, bad="1,2,3")
@example(line=1, block_bytes=1 << 20, bad="1")
def test_the_line_of_an_error(line: int, block_bytes: int, bad: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("c") / "x.csv.gz"
    lines = [f"{i},{i}" for i in range(200)]
    lines[line - 1] = bad if "," in bad or bad == "1" else f"7,{bad}"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csvfiles, "_BLOCK_BYTES", block_bytes)
        with pytest.raises(FormatError) as caught:
            whole(CsvSource(path, 200, "int64", 2))
        assert f"x.csv.gz, line {line}" in str(caught.value)


def test_ints_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "i.csv.gz"
    ids = np.arange(300_000)
    pd.DataFrame(ids).to_csv(path, header=False, index=False, compression="gzip")
    np.testing.assert_array_equal(read_ints(path), ids)
    assert count_lines(path) == 300_000
    path.write_bytes(path.read_bytes()[:-3])
    refuses(CorruptionError, "not a whole gzip file", lambda: read_ints(path))
    refuses(CorruptionError, "not a whole gzip file", lambda: count_lines(path))
    refuses(FileNotFoundError, "", lambda: read_ints(tmp_path / "gone"))


def test_records(tmp_path: Path) -> None:
    path = tmp_path / "r.csv.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbfa,"b,c"\r\n1,2\r\n'))
    assert read_records(path) == [["a", "b,c"], ["1", "2"]]
    for data, error, words in (
        (gzip.compress(b""), FormatError, "the file is empty"),
        (gzip.compress(b"a,b\n" * 10_001), FormatError, "more than 10000 lines"),
        (gzip.compress(b"\xff\xfe"), FormatError, "not a CSV file"),
        (gzip.compress(b'"a\n'), FormatError, "not a CSV file"),
        (gzip.compress(b"a,b\n")[:-2], CorruptionError, "not a whole gzip file"),
        (b"a,b\n", CorruptionError, "not a whole gzip file"),
    ):
        path.write_bytes(data)
        refuses(error, words, lambda: read_records(path))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("1,2\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuses(MissingExtraError, "pip install pyarrow", lambda: CsvSource(path, 1))
