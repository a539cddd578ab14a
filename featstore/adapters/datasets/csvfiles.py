"""CSV files of numbers without a header, plain or gzipped, as rows that are read in order; errors name file and line.

pyarrow reads and parses them in blocks. Lines are parsed by several threads; only if a value is wrong, the file is read again by
one thread, which knows the line.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import importlib
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.arrays import check_memory
from featstore.adapters.datasets.prefetch import prefetch
from featstore.config import user_path
from featstore.creation.source import Source, array_bytes, numpy_dtype
from featstore.errors import CorruptionError, FormatError, MissingExtraError
from featstore.storage.calls import close_quietly, open_input

__all__ = ["CsvSource", "column_of", "count_lines", "errno_of", "explained", "load_pandas", "read_ints", "read_records"]

UInt8s = npt.NDArray[np.uint8]

_BLOCK_BYTES: Final = 1 << 20  # of text, parsed together
_ROW: Final = re.compile(r"Row #(\d+): (.*)", re.DOTALL)
_COLUMN: Final = re.compile(r"In CSV column #(\d+): ")
_FRACTION: Final = re.compile(r"invalid value '\s*[-+]?\d*\.\d*(e[-+]?\d+)?\s*'", re.IGNORECASE)
_ADVICE: Final = "; the values before it are whole numbers: give feature_dtype or label_dtype (--feature-dtype float32)"
_MOST_RECORDS: Final = 10_000
_MOST_RECORD_BYTES: Final = 1 << 22
_MOST_INTS: Final = 1 << 28


def errno_of(error: OSError) -> int | None:
    """Find the number of an error of pyarrow's; None if the content is wrong. Of a close that failed pyarrow says no number."""
    return errno.EIO if error.errno is None and "error closing file" in str(error) else error.errno


def _arrow(path: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError as error:
        raise MissingExtraError(f"{path}: reading CSV needs pyarrow ({error}): pip install pyarrow") from None
    load_pandas()
    return pyarrow, pyarrow.csv


def load_pandas() -> None:
    """Import pandas, where it is there: pyarrow does so with its first array, and swallows a Ctrl-C within that import."""
    with contextlib.suppress(Exception):  # a broken one, too: pyarrow goes on without it
        importlib.import_module("pandas")


class CsvSource(Source):
    """Rows of a CSV file of numbers: float32, or int64 if ``dtype`` is None and the first megabyte has whole numbers only.

    Parameters
    ----------
    path : path-like
    n_rows : int
        Number of lines: FormatError, while the rows are read, if the file has more or fewer.
    dtype : str, optional
    n_columns : int, optional
        Number of columns, by default those of the first line. A line with more or fewer is an error that names it.

    Notes
    -----
    A quoted number is a number; a byte order mark, and carriage returns, are skipped. An empty value is NaN among float32, and
    an error among integers. Text is an error.
    """

    def __init__(self, path: str | os.PathLike[str], n_rows: int, dtype: str | None = None, n_columns: int | None = None) -> None:
        self.path = user_path(path)
        self._width, found = _first_block(self.path, n_columns)
        super().__init__(self.path, dtype or found, (n_rows, self._width))
        self._is_guess = dtype is None

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        step = self._step(max_bytes)
        for rows in self.arrays():
            for first in range(0, len(rows), step):
                yield array_bytes(rows[first : first + step])

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows in blocks ``[k, n_columns]`` of about a megabyte of text."""
        done = 0
        for rows in prefetch(_arrays(self.path, self._width, self.dtype, self._is_guess)):
            if done + len(rows) > self.n_rows:
                raise FormatError(f"{self.path}, line {self.n_rows + 1}: more lines than the {self.n_rows} expected", self.path)
            done += len(rows)
            yield rows
        if done != self.n_rows:
            raise FormatError(f"{self.path} ends after line {done}; expected {self.n_rows} lines", self.path)


def count_lines(path: str | os.PathLike[str]) -> int:
    """Count the lines of a file, by reading it; the last one may lack its end."""
    where = user_path(path)
    n, last = 0, b"\n"
    fd, _ = open_input(where)
    close_quietly(fd)
    try:
        with gzip.open(where, "rb") if where.endswith(".gz") else open(where, "rb") as file:
            while piece := file.read(_BLOCK_BYTES):
                n += piece.count(b"\n")
                last = piece[-1:]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        check_memory(error)
        raise CorruptionError(f"not a whole gzip file: {error}", where) from None
    return n + (last != b"\n")


def read_ints(path: str | os.PathLike[str]) -> npt.NDArray[np.int64]:
    """Read a file of one whole number a line, such as a split, into memory: int64 ``[n]``."""
    where, found, n = user_path(path), [np.empty(0, np.int64)], 0
    for rows in _arrays(where, 1, "int64", False):
        found.append(rows[:, 0])
        n += len(rows)
        if n > _MOST_INTS:
            raise FormatError(f"{where}: more than {_MOST_INTS} lines", where)
    return np.concatenate(found)


def read_records(path: str | os.PathLike[str]) -> list[list[str]]:
    """Read a small file of text, such as a list of types, as lists of values a line."""
    where = user_path(path)
    fd, n_bytes = open_input(where)
    close_quietly(fd)
    try:
        with gzip.open(where, "rb") if where.endswith(".gz") else open(where, "rb") as file:
            data = file.read(_MOST_RECORD_BYTES + 1)  # a line has no end that could be trusted
        if len(data) > _MOST_RECORD_BYTES:
            raise FormatError(f"{where}: more than {_MOST_RECORD_BYTES} bytes, which is no list of types", where)
        found = []
        for line in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True):
            found.append(line)
            if len(found) > _MOST_RECORDS:
                raise FormatError(f"{where}: more than {_MOST_RECORDS} lines, which is no list of types", where)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        check_memory(error)
        raise CorruptionError(f"not a whole gzip file: {error}", where) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: not a CSV file: {error}", where) from None
    if not n_bytes or not found:
        raise FormatError(f"{where}: the file is empty", where)
    return found


def _first_block(path: str, width: int | None) -> tuple[int, str]:
    """Find the number of columns, which is ``width`` if given, and the dtype of the first block."""
    for batch in _batches(path, width, None, threads=False):
        are_whole = all(str(each.type) == "int64" and not each.null_count for each in batch.columns)
        return batch.num_columns, "int64" if are_whole else "float32"
    raise FormatError(f"{path}: the file is empty", path)


def _arrays(path: str, width: int, dtype: str, is_guess: bool) -> Iterator[npt.NDArray[Any]]:
    done = 0
    for batch in _batches(path, width, dtype, is_guess=is_guess):
        rows = np.empty((batch.num_rows, width), numpy_dtype(dtype))
        for number, column in enumerate(batch.columns):
            if column.null_count and not dtype.startswith("float"):
                empty = np.asarray(column.is_null().to_numpy(zero_copy_only=False))
                text = f"{path}, line {done + int(empty.argmax()) + 1}: there is no value in column {number + 1}"
                raise FormatError(text + _ADVICE * is_guess, path)
            values = column.to_numpy(zero_copy_only=False)
            with np.errstate(over="ignore"):
                rows[:, number] = values
            if dtype.startswith("float") and (bad := np.isinf(rows[:, number]) & ~np.isinf(values)).any():
                line = done + int(bad.argmax()) + 1
                raise FormatError(f"{path}, line {line}, column {number + 1}: {values[bad][0]} is no {dtype}", path)
        done += len(rows)
        yield rows


def _parsed_as(arrow: Any, dtype: str | None) -> Any:
    """Get the type to which values are parsed: floats to float64, so that one beyond float32 is seen."""
    return arrow.float64() if str(dtype).startswith("float") else getattr(arrow, str(dtype))()


def _batches(path: str, width: int | None, dtype: str | None, *, threads: bool = True, is_guess: bool = False) -> Iterator[Any]:
    """Yield pyarrow's batches; FormatError or CorruptionError with file and line."""
    arrow, reading = _arrow(path)
    fd, n_bytes = open_input(path)
    close_quietly(fd)
    if not n_bytes:
        raise FormatError(f"{path}: the file is empty", path)
    names = None if width is None else [str(number) for number in range(width)]
    types = None if names is None or dtype is None else dict.fromkeys(names, _parsed_as(arrow, dtype))
    try:
        with arrow.input_stream(path, compression="gzip" if path.endswith(".gz") else None) as stream:
            with reading.open_csv(
                stream,
                read_options=reading.ReadOptions(
                    use_threads=threads, block_size=_BLOCK_BYTES, column_names=names, autogenerate_column_names=names is None
                ),
                parse_options=reading.ParseOptions(ignore_empty_lines=False),
                convert_options=reading.ConvertOptions(column_types=types),
            ) as batches:
                yield from batches
    except arrow.ArrowInvalid as error:
        if threads and not _ROW.search(str(error)):
            for _ in _batches(path, width, dtype, threads=False, is_guess=is_guess):
                pass
        raise FormatError(_explained(path, str(error), is_guess, is_of_pairs=width == 2 and not is_guess), path) from None
    except OSError as error:
        if number := errno_of(error):  # pyarrow does not say of which file
            raise OSError(number, os.strerror(number), path) from None
        check_memory(error)
        raise CorruptionError(f"not a whole gzip file: {error}", path) from None


def column_of(text: str, names: Sequence[str] | None = None) -> str | None:
    """Name the column of an error of pyarrow's, by its number from 1 if there are no names; None if the error has none."""
    found = _COLUMN.search(text)
    if found is None:
        return None
    number = int(found[1])
    return str(number + 1) if names is None or number >= len(names) else names[number]


def explained(text: str, line: str, names: Sequence[str] | None = None) -> str:
    """Say an error of pyarrow's behind the name of a file: with line, or ``"row"``, and column."""
    column, row = column_of(text, names), _ROW.search(text)
    said = (
        _COLUMN.sub("", text if row is None else row[2])
        .removeprefix("CSV parse error: ")
        .removeprefix("CSV conversion error to ")
    )
    where = "" if row is None else f", {line} {row[1]}"
    at = "" if column is None else f", column {column}" if names is None else f": column {column!r}"
    return f"{where}{at}: {' '.join(said.split())}"


def _explained(path: str, text: str, is_guess: bool, *, is_of_pairs: bool) -> str:
    """Say an error of pyarrow's with file, line, column, and what is likely its cause."""
    if "Empty CSV file" in text:
        return f"{path}: the file is empty"
    said, advice = explained(text, "line"), ""
    if is_guess and "int64" in said:
        advice = _ADVICE
    elif "int64" in said and _FRACTION.search(said):
        advice = "; it holds whole numbers: write 51, not 51.0"
    elif said.startswith(", line 1, column"):
        advice = "; OGB's and GraphBolt's CSV has no header: remove the line if it is one"
    elif "Expected 2 columns" in said and is_of_pairs:
        advice = "; edges in OGB's and GraphBolt's CSV have two columns, source and destination, and no header"
    return f"{path}{said}{advice}"
