"""Files of tables, read by pyarrow in blocks of bounded size: CSV, Parquet and Arrow IPC. Errors name the file and the row."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from featstore.adapters.datasets.arrays import check_memory
from featstore.adapters.datasets.csvfiles import column_of, errno_of, explained
from featstore.config import format_size, is_folder, listed, user_path
from featstore.errors import CorruptionError, FormatError
from featstore.storage.calls import naming

__all__ = ["MOST_BLOCK_BYTES", "TableBlock", "TableFile", "find_files"]

_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSED = {  # names of the formats, and how their files begin
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bzip2", b"BZh"),
    ".zst": ("Zstandard", b"\x28\xb5\x2f\xfd"),
    ".lz4": ("LZ4", b"\x04\x22\x4d\x18"),
}
_MARKS = {"parquet": b"PAR1", "arrow": b"ARROW1"}  # at the begin and the end of whole files
_TO_UTF8 = "not UTF-8: convert it (iconv -f latin1 -t utf-8)"
MOST_BLOCK_BYTES = 8 << 20
_MOST_ROWS = 1 << 17
_LEAST_ROWS = 16
_MARK_BYTES = 1 << 20
_CSV_BYTES = 2 << 20  # of a block, unless a row is longer: larger ones leave the cache, and pyarrow gets new pages for each
_TEXT_BYTES = 32  # of a cell of text, as far as a schema can tell
_ROW = re.compile(r"Row #(\d+): ")


@dataclass(frozen=True)
class TableBlock:
    """Consecutive rows of a file: the first of them is row ``first`` as messages count, which is 2 behind a header.

    ``end`` is the number of the file's rows up to the block's last one.
    """

    path: str
    first: int
    batch: pa.RecordBatch
    end: int

    def column(self, name: str) -> pa.Array:
        """Get a column; one that is stored as a dictionary with its values, as some of these may be missing."""
        found = self.batch.column(self.batch.schema.get_field_index(name))
        return found.dictionary_decode() if isinstance(found, pa.DictionaryArray) else found

    def where(self, row: int) -> str:
        """Say where a row of the block is."""
        return f"{self.path}, row {self.first + row}"


def _format_of(path: str) -> str | None:
    stem, suffix = os.path.splitext(path.lower())
    if suffix in _COMPRESSED:
        return "csv" if _FORMATS.get(os.path.splitext(stem)[1]) == "csv" else None
    return _FORMATS.get(suffix)


def find_files(given: Any, argument: str) -> list[str]:
    """List the files of a table: a path, a list of paths, a pattern, or a directory, whose files are sorted by name.

    FileNotFoundError if there is none; FormatError for a suffix that is not known.
    """
    if isinstance(given, (str, os.PathLike)):
        path = user_path(given)
        if is_folder(path):
            entries = sorted(entry.path for entry in os.scandir(path) if entry.is_file())
            found = [each for each in entries if _format_of(each) is not None]
            if not found:
                raise FileNotFoundError(2, f"{argument}: the directory has no CSV, Parquet or Arrow file", path)
            return found
        found = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        if not found:
            raise FileNotFoundError(2, f"{argument}: there is no such file", path)
    elif isinstance(given, Sequence):
        found = [path for each in given for path in find_files(each, argument)]
        if not found:
            raise ValueError(f"{argument}: the list of files is empty")
    else:
        raise TypeError(f"{argument} must be a path or a list of paths, not {type(given).__name__}")
    for path in found:
        if _format_of(path) is None:
            raise FormatError(f"{path}: not known as a table by its suffix; known are {', '.join(_FORMATS)}, and .csv.gz", path)
    return found


class TableFile:
    """One file of a table, whose columns are read by name.

    Parameters
    ----------
    path : str
    delimiter : str, optional
        Of CSV; by default a tab for ``.tsv``, else a comma.
    header : sequence of str, optional
        Names of the columns of a CSV file without a header.
    null_values : sequence of str
        Cells of CSV without quotes that have no value.
    block_bytes : int
        Bytes of a block, about; at most `MOST_BLOCK_BYTES`.
    ids : sequence of str
        Columns of ids, for messages.
    """

    def __init__(
        self,
        path: str,
        delimiter: str | None,
        header: Sequence[str] | None,
        null_values: Sequence[str],
        block_bytes: int,
        ids: Sequence[str] = (),
    ) -> None:
        self.path, self._ids = path, ids
        self.format = _format_of(path)
        self._delimiter = delimiter or ("\t" if ".tsv" in os.path.basename(path).lower() else ",")
        self._header = None if header is None else list(header)
        self._null_values = list(null_values)
        self._block_bytes, self._csv_bytes = block_bytes, min(block_bytes, _CSV_BYTES)
        self._schema: pa.Schema | None = None
        self._marks: tuple[bool, bool] | None = None

    @property
    def n_bytes(self) -> int:
        return os.path.getsize(self.path)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns; of CSV as the first block of rows has them."""
        if self._schema is None:
            with self._named(None):
                if self.format == "csv":
                    self._schema = self._read_csv_schema()
                    self._schema.names  # noqa: B018  (raises for names that are not UTF-8)
                elif self.format == "parquet":
                    with pa.parquet.ParquetFile(self.path) as file:
                        self._schema = file.schema_arrow
                else:
                    with pa.OSFile(self.path) as source, _ipc(source) as reader:
                        self._schema = reader.schema
        return self._schema

    @property
    def has_rows(self) -> bool:
        """Whether there are rows, as far as types need it: of a CSV file without any, they are unknown."""
        schema = self.schema
        if self.format != "csv" or not all(pa.types.is_null(kind) for kind in schema.types):
            return True
        return next(self.blocks({schema.names[0]: None}), None) is not None

    def check(self, names: Sequence[str]) -> None:
        """Raise KeyError unless each column is there, and once."""
        there = self.schema.names
        for name in names:
            if name not in there:
                raise KeyError(f"{self.path} has no column {name!r}; it has {listed(there)}{self._hint_of_names(there)}")
            if there.count(name) > 1:
                raise ValueError(f"{self.path} has {there.count(name)} columns {name!r}")

    def _hint_of_names(self, names: Sequence[str]) -> str:
        """Say what may be wrong if a column is missing."""
        if self.format != "csv":
            return ""
        other = next((mark for mark in ";\t|," if len(names) == 1 and mark in names[0]), None)
        if other is not None:
            return f"; give delimiter={other!r} (--delimiter) if that is what is between its columns"
        if self._header is None and any(re.fullmatch(r"\s*[-+]?\d+(\.\d*)?\s*", each) for each in names):
            return "; if it has no header, header=[…] names its columns (--node-header and --edge-header)"
        return ""

    def blocks(self, types: dict[str, pa.DataType | None], begin: int = 0) -> Iterator[TableBlock]:
        """Yield the rows from ``begin`` on; ``types`` are the columns to read, and the types to which cells of CSV are converted.

        Rows before ``begin`` are parsed in CSV, read in Arrow IPC, and of Parquet at most those of one row group.
        """
        self.check(list(types))
        with self._named(types):
            above = 2 if self.format == "csv" and self._header is None else 1
            row = above
            group, passed = self._row_group_of(begin)
            begin, row = begin - passed, row + passed
            for batch in self._batches(types, group):
                if skipped := min(begin, batch.num_rows):
                    begin, row, batch = begin - skipped, row + skipped, batch.slice(skipped)
                step = _rows_of(batch.nbytes, batch.num_rows, 2 * self._block_bytes)
                for first in range(0, batch.num_rows, step):
                    some = batch.slice(first, step)
                    if self.format != "csv":
                        self._validate(some, row)
                    yield TableBlock(self.path, row, some, row + some.num_rows - above)
                    row += some.num_rows

    def _validate(self, batch: pa.RecordBatch, row: int) -> None:
        """Check what a file may say falsely, such as text that is not UTF-8; FormatError."""
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            rows = f"rows {row} to {row + batch.num_rows - 1}"
            raise FormatError(f"{self.path}, {rows}: damaged, or text that is not UTF-8: {error}", self.path) from None

    def _row_group_of(self, row: int) -> tuple[int, int]:
        """Find the row group of Parquet that has a row, and the number of rows before the group; 0 and 0 of other formats."""
        number = first = 0
        if self.format == "parquet" and row:
            with pa.parquet.ParquetFile(self.path) as file:
                while number < file.metadata.num_row_groups:
                    n_rows = file.metadata.row_group(number).num_rows
                    if first + n_rows > row:
                        break
                    number, first = number + 1, first + n_rows
        return number, first

    def _batches(self, types: dict[str, pa.DataType | None], row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield all rows, of Parquet from a row group on."""
        if self.format == "csv":
            yield from self._csv_batches(types)
        elif self.format == "parquet":
            with pa.parquet.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False) as file:
                by_type = sum(_cell_bytes(self.schema.field(name).type) for name in types)
                rows = _rows_of(max(by_type, _bytes_of_row(file.metadata, set(types))), 1, self._block_bytes)
                groups = list(range(row_group, file.metadata.num_row_groups))
                yield from file.iter_batches(min(rows, _MOST_ROWS), row_groups=groups, columns=list(types))
        else:
            with pa.OSFile(self.path) as source, _ipc(source) as reader:
                batches = (
                    reader
                    if isinstance(reader, pa.RecordBatchStreamReader)
                    else map(reader.get_batch, range(reader.num_record_batches))
                )
                for batch in batches:
                    yield batch.select(list(types))

    def _read_csv_schema(self) -> pa.Schema:
        while True:
            with self._longer_blocks(), self._open_csv(None, {}, True) as reader:
                return reader.schema

    def _csv_batches(self, types: dict[str, pa.DataType | None]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of CSV; from a row that is longer than a block on, in the longest blocks that memory allows."""
        names, n_rows = list(types), 0
        while True:
            with self._longer_blocks(), self._open_csv(names, types, True) as reader:
                types = dict(zip(reader.schema.names, reader.schema.types, strict=True))
                skipped = n_rows
                for batch in reader:
                    if rest := batch.slice(min(skipped, batch.num_rows)):
                        yield rest
                        n_rows += rest.num_rows
                    skipped -= batch.num_rows - rest.num_rows
                return

    @contextmanager
    def _longer_blocks(self) -> Iterator[None]:
        """Take the error that a row of CSV is longer than a block, if blocks may be longer; they are from then on."""
        try:
            yield
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or self._csv_bytes == self._block_bytes:
                raise
            self._csv_bytes = self._block_bytes

    @contextmanager
    def _open_csv(self, columns: list[str] | None, types: dict[str, Any], threads: bool) -> Iterator[Any]:
        with naming(self.path), pa.input_stream(self.path, compression="detect") as source:
            with pa.csv.open_csv(
                source,
                read_options=pa.csv.ReadOptions(use_threads=threads, block_size=self._csv_bytes, column_names=self._header),
                parse_options=pa.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=self._find_marks()[0]),
                convert_options=pa.csv.ConvertOptions(
                    column_types={name: kind for name, kind in types.items() if kind is not None},
                    include_columns=columns,
                    null_values=self._null_values,
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            ) as reader:
                yield reader

    @property
    def may_have_hex(self) -> bool:
        """Whether numbers of a CSV file may be hexadecimal, which pyarrow reads as well."""
        return self.format == "csv" and self._find_marks()[1]

    def _find_marks(self) -> tuple[bool, bool]:
        """Look whether a quote is in the file, and ``0x``; both may be in a compressed one.

        Without a quote no cell has line breaks, and pyarrow parses by several threads.
        """
        if self._marks is None:
            has_quotes = has_hex = os.path.splitext(self.path.lower())[1] in _COMPRESSED
            with naming(self.path), open(self.path, "rb", buffering=0) as file:
                last = b""
                while not (has_quotes and has_hex) and (data := file.read(_MARK_BYTES)):
                    has_quotes = has_quotes or b'"' in data
                    # One letter is found much faster than two where there are many zeros.
                    if not has_hex and (b"x" in data or b"X" in data):
                        has_hex = b"0x" in (seen := last + data) or b"0X" in seen
                    last = data[-1:]
            self._marks = has_quotes, has_hex
        return self._marks

    @contextmanager
    def _named(self, types: dict[str, Any] | None) -> Iterator[None]:
        """Name the file, and of CSV the row, in errors of pyarrow."""
        try:
            yield
        except pa.ArrowInvalid as error:
            text = str(error)
            if wide := self._encoding():
                raise FormatError(f"{self.path}: {wide}", self.path) from None
            if self.format == "csv" and not _ROW.search(text):
                text = self._with_row(types) or text
            names = self._header if self._schema is None else self._schema.names
            said = explained(text, "row", names) if self.format == "csv" else f": {text}"
            raise FormatError(f"{self.path}{said}{self._hint(text, column_of(text, names))}", self.path) from None
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: {self._encoding() or _TO_UTF8}: {error}", self.path) from None
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException as error:
            raise FormatError(f"{self.path}: {error}", self.path) from None
        except OSError as error:
            if number := errno_of(error):
                raise OSError(number, os.strerror(number), self.path) from None
            check_memory(error)
            name, mark = _COMPRESSED.get(os.path.splitext(self.path.lower())[1], ("", b""))
            why = f"the file cannot be read to its end: {error}; copy it again"
            raise CorruptionError(why if self._begin().startswith(mark) else f"not a {name} file: {error}", self.path) from None

    def _begin(self) -> bytes:
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            return file.read(6)

    def _encoding(self) -> str:
        """Say that CSV is UTF-16, if it begins so."""
        is_wide = self.format == "csv" and self._begin().startswith((b"\xff\xfe", b"\xfe\xff"))
        return "not UTF-8 text, but UTF-16: convert it (iconv -f utf-16 -t utf-8)" if is_wide else ""

    def _hint(self, text: str, column: str | None) -> str:
        """Say what helps against an error of pyarrow's, which may be of a column."""
        if (mark := _MARKS.get(str(self.format))) is not None:
            with naming(self.path), open(self.path, "rb") as file:
                data = file.read(len(mark))
                file.seek(max(0, self.n_bytes - len(mark)))
                return "; the file ends early: copy it again" if mark.startswith(data) and file.read() != mark else ""
        if "straddling" in text:
            at_once = format_size(self._csv_bytes)
            remedy = "give more memory" if self._csv_bytes < MOST_BLOCK_BYTES else "keep such rows in Parquet"
            return f": a row is longer than the {at_once} that are read at once, or a quote is not closed; {remedy}"
        if "invalid UTF8" in text:
            return f"; {_TO_UTF8}"
        if "conversion error" not in text:
            return ""
        if column in self._ids:
            return "; cells have the type of the first ones: text=True (--text-ids) reads ids as text"
        return (
            f"; cells have the type of the first ones: Column({column!r}, dtype=…) gives another (NAME={column}/DTYPE), and "
            "null_values=[…] names cells without a value (--null-values)"
        )

    def _with_row(self, types: dict[str, Any] | None) -> str | None:
        """Read the file once more, in one thread, which knows in which row the error is."""
        try:
            with self._open_csv(None if types is None else list(types), types or {}, False) as reader:
                for _ in reader:
                    pass
        except pa.ArrowInvalid as error:
            return str(error)
        return None


@contextmanager
def _ipc(source: Any) -> Iterator[Any]:
    """Open an Arrow IPC file or stream."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
        yield reader


def _bytes_of_row(metadata: Any, columns: set[str]) -> int:
    """Compute the bytes of a row of columns, unpacked, on average in the row group where they are most."""
    most = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        pieces = map(group.column, range(group.num_columns))
        n_bytes = sum(
            piece.total_uncompressed_size
            for piece in pieces
            if piece.path_in_schema in columns or piece.path_in_schema.partition(".")[0] in columns
        )
        most = max(most, n_bytes // max(1, group.num_rows))
    return most


def _cell_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _cell_bytes(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _cell_bytes(kind.storage_type)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text and lists
        return 8 * _TEXT_BYTES if pa.types.is_nested(kind) else _TEXT_BYTES


def _rows_of(n_bytes: int, n_rows: int, block_bytes: int) -> int:
    """Compute the rows of a block of about ``block_bytes``."""
    return max(_LEAST_ROWS, block_bytes * n_rows // max(1, n_bytes))
