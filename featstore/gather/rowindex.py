"""Conversion of indices to row numbers, by NumPy's rules for the first axis."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.rows import wrap_ids
from featstore.gather.arrays import id_array

__all__ = ["ONE_TRUTH_VALUE", "as_index_array", "check_rows", "resolve_rows"]

Int64s = npt.NDArray[np.int64]

_NAMES = ("bool", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")  # torch 2.2 lacks the last three
_INDICES = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))


ONE_TRUTH_VALUE: Final = "a single truth value is no mask of rows: a boolean mask has one value for each row"


def as_index_array(index: Any) -> npt.NDArray[Any]:
    """Convert an array-like index to an array of any dtype; TypeError if it is ragged, or a tensor of another kind."""
    if isinstance(index, torch.Tensor):
        if index.dtype in _INDICES:
            array: npt.NDArray[Any] = index.numpy(force=True)
            return array
        if index.dtype != torch.uint8:
            raise TypeError(f"rows are indexed by integers or a boolean mask, not {index.dtype}")
    if isinstance(index, (list, tuple)) and len(index) == 0:
        return np.empty(0, np.int64)
    if isinstance(index, list) and isinstance(index[0], torch.Tensor):
        try:
            return as_index_array(torch.stack(index))
        except (TypeError, RuntimeError) as error:  # other objects among the tensors, or several shapes
            raise TypeError(f"not an index array: {error}") from None
    try:
        array = id_array("rows", index)
    except ValueError as error:  # ragged lists
        raise TypeError(f"not an index array: {error}") from None
    if array.size == 0 and isinstance(index, list):
        return array.astype(np.int64)  # of any shape, such as [[]]
    if array.dtype.kind in "Of" and isinstance(index, list):
        # NumPy makes objects or floats of integers that do not fit one integer dtype.
        objects = np.asarray(index, object)
        for position, value in enumerate(objects.reshape(-1)):
            if not isinstance(value, int) or isinstance(value, bool):
                return array
            if not -(2**63) <= value < 2**63:
                raise IndexError(f"row {value} at position {position} is out of range: it does not fit 64 bits")
    return array


def _out_of_range(row: Any, position: Any, n: int) -> IndexError:
    return IndexError(f"row {int(row)} at position {int(position)} is out of range for {n} rows")


def check_rows(ids: npt.NDArray[Any], n: int) -> Int64s:
    """Turn integer ``ids`` (any width, byte order and layout, 1-D) into rows, contiguous int64 in ``[0, n)``."""
    if ids.dtype.kind == "u" and ids.dtype.itemsize == 8:
        too_big = np.flatnonzero(ids > np.uint64(2**63 - 1))
        if len(too_big):
            raise _out_of_range(ids[too_big[0]], too_big[0], n)
    rows = np.ascontiguousarray(ids, dtype=np.int64)
    bad, negative = wrap_ids(rows, n, None)
    if bad >= 0:
        raise _out_of_range(rows[bad], bad, n)
    if negative:
        wrapped = np.empty_like(rows)
        wrap_ids(rows, n, wrapped)
        return wrapped
    return rows


def _of_rows(index: tuple[Any, ...], shape: Sequence[int]) -> Any:
    """Get the index of the first axis from a tuple; IndexError unless the tuple takes the other axes whole."""
    dots = [at for at, each in enumerate(index) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one ellipsis (...) at the most")
    if dots:
        whole = (slice(None),) * (len(shape) + 1 - len(index))
        index = (*index[: dots[0]], *whole, *index[dots[0] + 1 :])
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} axes are indexed, and there are {len(shape)}")
    for each, n in zip(index[1:], shape[1:], strict=False):
        if not isinstance(each, slice) or range(n)[each] != range(n):
            raise IndexError("rows alone are taken here, with other axes whole: store[ids, columns] takes parts of rows")
    return index[0] if index else slice(None)


def resolve_rows(index: Any, shape: Sequence[int]) -> tuple[Int64s | range, tuple[int, ...] | None]:
    """Turn an index into row numbers in ``[0, n)``, and the shape that replaces the first axis (None: a single row).

    Ids below 0 count from the end; a mask has one value for each row. A slice of step 1 becomes a range, to be read
    sequentially. ``shape`` is that of all rows; axes other than the first may only be taken whole. TypeError if ``index`` is no
    index; IndexError for an id out of range or a mask of the wrong length.
    """
    n = shape[0]
    if isinstance(index, tuple) or index is Ellipsis:
        index = _of_rows(index if isinstance(index, tuple) else (), shape)
    if not isinstance(index, (list, np.ndarray, torch.Tensor)):
        if isinstance(index, slice):
            span = range(*index.indices(n))
            if span.step == 1:
                return span, (len(span),)
            return np.arange(span.start, span.stop, span.step, dtype=np.int64), (len(span),)
        try:
            number = None if isinstance(index, (bool, np.bool_)) else operator.index(index)
        except TypeError:
            number = None
        if number is not None:
            row = number + n if number < 0 else number
            if not 0 <= row < n:
                raise _out_of_range(number, 0, n)
            return range(row, row + 1), None
    ids = as_index_array(index)
    kind = ids.dtype.kind
    if kind == "b":
        if not ids.ndim:
            raise IndexError(ONE_TRUTH_VALUE)
        if ids.shape != (n,):
            raise IndexError(f"a boolean mask of rows must have shape ({n},), not {ids.shape}")
        return np.flatnonzero(ids).astype(np.int64, copy=False), (int(np.count_nonzero(ids)),)
    if kind not in "iu":
        given = ids.dtype if ids.ndim or isinstance(index, (np.ndarray, torch.Tensor)) else type(index).__name__
        raise TypeError(f"rows are indexed by integers or a boolean mask, not {given}")
    rows = check_rows(ids if ids.ndim == 1 else ids.reshape(-1), n)
    return rows, (ids.shape or None)
