"""Columns of Arrow tables as names of nodes and as rows of fields; errors name the file and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from featstore.adapters.datasets.csvfiles import load_pandas
from featstore.adapters.datasets.tables.files import TableBlock, TableFile
from featstore.creation.source import dtype_name
from featstore.idmaps.keys import IntKeys, Keys, TextKeys

__all__ = ["Column", "Field", "field_of", "id_kind", "names_of", "rows_of", "texts_of"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """Columns that make a field, with what :class:`NodeTable` and :class:`EdgeTable` cannot say by their names alone.

    Parameters
    ----------
    columns : str or sequence of str
        A column of numbers or of lists of one length, or several columns of numbers, which become one row.
    dtype : str, optional
        Such as ``"float32"``: values are converted, and one that does not fit is an error. Among floats values are rounded, and
        one that would become infinite is an error. By default what the columns have; int64 of dates, times and durations, which
        are counted in the column's own unit (since 1970, since midnight).
    fill : number, optional
        Value of cells without one, and of numbers in lists without one. By default such a cell is an error.
    """

    columns: str | Sequence[str]
    dtype: str | None = None
    fill: float | None = None


@dataclass(frozen=True)
class Field:
    """A field to be read: its columns, its dtype, and the shape of a row."""

    name: str
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fill: float | None
    kinds: tuple[pa.DataType | None, ...] = ()  # to which cells of CSV are converted; None: what the first ones look like

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def units(self) -> str:
        """Types of the columns that have times, as files could count in others."""
        return ", ".join(str(kind) for kind in self.kinds if _is_time(kind)) or "no times"


def id_kind(file: TableFile, column: str, text: bool | None) -> str:
    """Decide what a column of ids holds: ``"text"`` or ``"int64"``; TypeError for other types of Parquet and Arrow."""
    load_pandas()
    kind = file.schema.field(column).type
    if file.format == "csv":
        return "text" if text or (text is None and not pa.types.is_integer(kind)) else "int64"
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return "text" if text else "int64"
    if _is_text(kind):
        return "text"
    raise TypeError(f"{file.path}: ids are text or integers, and column {column!r} has {kind}")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


_NUMBER = r"(?i)^\s*[-+]?(\d+\.?\d*(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|nan|inf(inity)?)\s*$"
_WHOLE_LISTS = "fill is for numbers, not for whole lists"


def _no_value(name: str) -> str:
    return f"Column({name!r}, fill=…) gives such cells one (on the command line --fill {name}=VALUE)"


def _refuse_nulls(block: TableBlock, name: str, column: pa.Array, advice: str = "") -> None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        text = f"{block.where(row)}: column {name!r} has no value ({column.null_count} such cells near there)"
        raise ValueError(text + (advice and f"; {advice}"))


def names_of(block: TableBlock, name: str, kind: str) -> Keys:
    """Read names of nodes from a column; ValueError, which names the row, for a cell that is none."""
    column = block.column(name)
    _refuse_nulls(block, name, column)
    if kind == "int64":
        if _is_text(column.type):  # of CSV, where 0x0a would be read as 10
            if (bad := np.flatnonzero(pc.match_substring_regex(column, "^ *-?0[xX]").to_numpy(zero_copy_only=False))).size:
                row = int(bad[0])
                raise ValueError(
                    f"{block.where(row)}: id {column[row].as_py()!r} in column {name!r} is a hexadecimal number, "
                    "and ids there are decimal ones; text=True reads ids as text"
                )
            column = pc.utf8_trim_whitespace(column)
        try:
            values = column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            hint = "; text=True reads ids as text" if _is_text(column.type) else ""
            raise ValueError(f"{block.where(0)}, or shortly behind: an id is no int64: {error}{hint}") from None
        return IntKeys(values.to_numpy(zero_copy_only=False))
    text = column if pa.types.is_large_string(column.type) else column.cast(pa.large_string())
    return _text_keys(text)


def _text_keys(text: pa.Array) -> TextKeys:
    _, offsets, data = text.buffers()
    n = len(text)
    ends = np.frombuffer(offsets, np.int64)[text.offset : text.offset + n + 1] if n else np.zeros(1, np.int64)
    held = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return TextKeys(ends, held)


def texts_of(block: TableBlock, name: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Read the distinct texts of a column, and the number of each row's, -1 for a cell without a value."""
    coded = block.column(name).cast(pa.string()).dictionary_encode()
    numbers = pc.fill_null(coded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return coded.dictionary.to_pylist(), numbers


def _numbers(column: pa.Array, width: tuple[int, ...] = ()) -> tuple[pa.Array, tuple[int, ...]]:
    """Take the numbers out of lists of one length; return them, and the shape of a row. ValueError if lengths differ."""
    if isinstance(column, pa.ExtensionArray):
        return _numbers(column.storage, width)
    if pa.types.is_nested(column.type) and column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise _LengthError(at // max(1, int(np.prod(width))), None, None)
    if pa.types.is_fixed_size_list(column.type):
        return _numbers(column.flatten(), (*width, column.type.list_size))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        size = int(lengths[0]) if len(lengths) else 0
        if (bad := np.flatnonzero(lengths != size)).size:
            raise _LengthError(int(bad[0]) // max(1, int(np.prod(width))), int(lengths[bad[0]]), size)
        return _numbers(column.flatten(), (*width, size))
    return column, width


class _LengthError(Exception):
    """Row, its length, and that of the first row; None: there is no list."""


def _is_time(kind: pa.DataType | None) -> bool:
    return kind is not None and pa.types.is_temporal(kind) and not pa.types.is_interval(kind)


def _plain(kind: pa.DataType) -> np.dtype[Any] | None:
    if _is_time(kind):
        return np.dtype(np.int64)
    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return found
    return None


def _remedy(kind: pa.DataType, column: str) -> str:
    if pa.types.is_decimal(kind):
        return f"Column({column!r}, dtype='float64') converts them (on the command line NAME={column}/float64)"
    if pa.types.is_null(kind):
        return f"no cell near the top has a value: give Column({column!r}, dtype=…, fill=…)"
    return "numbers and lists of numbers do; number texts first (pandas.factorize), or use them as ids"


def _counted(column: pa.Array) -> pa.Array:
    """Convert times to their counts, and decimals to float64."""
    if _is_time(column.type):
        column = column.view(f"int{column.type.bit_width}").cast(pa.int64())
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def field_of(file: TableFile, name: str, given: Any) -> Field:
    """Find dtype and shape of a field in a file; TypeError if its columns cannot be stored."""
    wanted = given if isinstance(given, Column) else Column(given)
    columns = (wanted.columns,) if isinstance(wanted.columns, str) else tuple(wanted.columns)
    if not columns:
        raise ValueError(f"field {name!r} has no columns")
    try:
        np.dtype(wanted.dtype)
    except TypeError:
        raise TypeError(f"field {name!r}: {wanted.dtype!r} is no dtype of numbers, such as 'float32'") from None
    file.check(columns)
    plains, kinds, shape = [], [], None
    for column in columns:
        kind, width = _row_type(file, column)
        plain = np.dtype(wanted.dtype) if file.format == "csv" and wanted.dtype is not None else _plain(kind)
        if plain is None and file.format == "csv" and _is_text(kind):
            _refuse_odd_cell(file, column)
        if plain is None or (pa.types.is_decimal(kind) and (wanted.dtype is None or np.dtype(wanted.dtype).kind != "f")):
            raise TypeError(f"{file.path}: column {column!r} has {kind}, which no field stores; {_remedy(kind, column)}")
        if width and len(columns) > 1:
            raise TypeError(
                f"{file.path}: field {name!r} of several columns has lists in column {column!r}; give one or the other"
            )
        plains.append(plain)
        kinds.append(kind if _is_time(kind) else None)
        shape = width
    if shape is not None and 0 in shape:
        raise ValueError(f"{file.path}: column {columns[0]!r} has lists of no number, which no field stores")
    dtype = np.result_type(*plains) if wanted.dtype is None else np.dtype(wanted.dtype)
    dtype_name(dtype, of=f"field {name!r}")
    _check_fill(name, wanted.fill, dtype)
    assert shape is not None
    is_row = not isinstance(wanted.columns, str) and not shape
    # Floats are parsed as float64, so that one beyond the dtype is seen.
    csv_type = pa.float64() if dtype.kind == "f" else None if wanted.dtype is None else pa.from_numpy_dtype(dtype)
    of_columns = tuple(kind or csv_type for kind in kinds)
    return Field(name, columns, dtype.newbyteorder("<"), (len(columns),) if is_row else shape, wanted.fill, of_columns)


def _refuse_odd_cell(file: TableFile, column: str) -> None:
    """Raise ValueError for the first cell of text near the top of a CSV file if most cells there are numbers."""
    block = next(file.blocks({column: pa.string()}), None)
    if block is None:
        return
    cells = block.column(column)
    odd = np.flatnonzero(~pc.match_substring_regex(cells, _NUMBER).fill_null(True).to_numpy(zero_copy_only=False))
    if 0 < len(odd) <= (len(cells) - cells.null_count) // 2:
        row = int(odd[0])
        raise ValueError(
            f"{block.where(row)}: column {column!r} has {cells[row].as_py()!r:.80} there, and numbers elsewhere; "
            "null_values=[…] names cells without a value (--null-values), and Column(…, fill=…) gives these one (--fill)"
        )


def _check_fill(name: str, fill: Any, dtype: np.dtype[Any]) -> None:
    """Raise TypeError for a fill that is no number, ValueError for one that the dtype does not hold."""
    if fill is None:
        return
    if not isinstance(fill, (int, float, np.number, np.bool_)):
        raise TypeError(f"field {name!r}: fill must be a number, not {type(fill).__name__}")
    with np.errstate(all="ignore"):
        try:
            held = np.array(fill).astype(dtype)
            fits = bool(np.isfinite(held) or not np.isfinite(fill)) if dtype.kind == "f" else bool(held == fill)
        except (OverflowError, TypeError, ValueError):
            fits = False
    if not fits:
        raise ValueError(f"field {name!r}: fill={fill!r} is no {dtype.name}")


def _row_type(file: TableFile, column: str) -> tuple[pa.DataType, tuple[int, ...]]:
    kind: pa.DataType = file.schema.field(column).type
    width: tuple[int, ...] = ()
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_fixed_size_list(kind):
            kind, width = kind.value_type, (*width, kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            first = next(file.blocks({column: None}), None)
            if first is None:
                raise ValueError(f"{file.path}: column {column!r} has lists, and no row tells their length")
            _refuse_nulls(first, column, first.column(column), _WHOLE_LISTS)
            try:
                numbers, shape = _numbers(first.column(column))
            except _LengthError as error:
                raise _lengths_differ(first, column, error) from None
            return numbers.type, shape
        else:
            return kind, width


def _lengths_differ(block: TableBlock, column: str, error: _LengthError) -> ValueError:
    row, length, size = error.args
    if length is None:
        return ValueError(f"{block.where(row)}: column {column!r} has no list there; {_WHOLE_LISTS}")
    return ValueError(f"{block.where(row)}: the list in column {column!r} has {length} numbers, and those before have {size}")


def rows_of(block: TableBlock, field: Field) -> tuple[npt.NDArray[Any], Bools | None]:
    """Read the rows of a field, ``[k, *shape]``, and find the numbers that were filled; None if there is none.

    ValueError, which names the row, for a cell that cannot be one.
    """
    each = [_column_rows(block, column, field) for column in field.columns]
    made, filled = [rows for rows, _ in each], [found for _, found in each]
    if field.shape == (len(made),) and made[0].ndim == 1:
        none = np.zeros(len(made[0]), np.bool_)
        are_filled = any(found is not None for found in filled)
        return np.stack(made, 1), np.stack([none if found is None else found for found in filled], 1) if are_filled else None
    return each[0]


def _column_rows(block: TableBlock, name: str, field: Field) -> tuple[npt.NDArray[Any], Bools | None]:
    column = block.column(name)
    if field.fill is None or not _plain(column.type):
        _refuse_nulls(block, name, column, _no_value(name) if _plain(column.type) else _WHOLE_LISTS)
    try:
        numbers, width = _numbers(column)
    except _LengthError as error:
        raise _lengths_differ(block, name, error) from None
    expected = field.shape if len(field.columns) == 1 and field.shape != (1,) else width
    if width != expected:
        raise ValueError(f"{block.where(0)}: lists in column {name!r} have {width} numbers, and those before have {expected}")
    if numbers.null_count and field.fill is None:
        at = int(np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False))[0]) // max(1, int(np.prod(width)))
        raise ValueError(f"{block.where(at)}: column {name!r} has no value; {_no_value(name)}")
    if _plain(numbers.type) is None:
        raise TypeError(f"{block.where(0)}: column {name!r} has {numbers.type}, which no field stores")
    numbers = _counted(numbers)
    missing = numbers.is_null().to_numpy(zero_copy_only=False) if numbers.null_count else None
    if missing is not None:
        numbers = pc.fill_null(numbers, pa.scalar(numbers.type.to_pandas_dtype()(0), numbers.type))
    values: npt.NDArray[Any] = numbers.to_numpy(zero_copy_only=False)
    if missing is None and values.dtype == field.dtype:
        return values.reshape(len(column), *width), None
    with np.errstate(all="ignore"):
        found: npt.NDArray[Any] = values.astype(field.dtype)
        differ = np.isinf(found) & ~np.isinf(values) if field.dtype.kind == "f" else found != values
        if (bad := np.flatnonzero(differ)).size:
            at = int(bad[0]) // max(1, int(np.prod(width)))
            raise ValueError(f"{block.where(at)}: {values[bad[0]]} in column {name!r} is no {field.dtype.name}")
    if missing is not None:
        assert field.fill is not None
        found[missing] = field.fill
    return found.reshape(len(column), *width), None if missing is None else missing.reshape(len(column), *width)
