"""Indices of several axes, by NumPy's rules: the rows that such an index reads, and the part of each row that it takes."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool, as_bytes, size_class
from featstore.gather.rowindex import ONE_TRUTH_VALUE, as_index_array, check_rows, resolve_rows

__all__ = ["Selection", "select"]

Int64s = npt.NDArray[np.int64]
Rows = Int64s | range

STEP_BYTES: Final = 8 << 20  # rows that are read whole at a time, before a part of each is taken


@dataclass(frozen=True)
class Selection:
    """An index of several axes, taken apart: ``n`` places along one leading axis, each of which takes a part of one row.

    Parameters
    ----------
    n : int
    shape : tuple of int
        Shape of the whole result.
    tail : tuple of int
        Shape of the part that a place takes.
    places : callable
        ``places(low, high)`` returns the rows of places ``low … high - 1`` to read, and the index that takes these places' parts
        of the rows read. A row that several places share may be read once.
    axis : int
        Axes of ``tail`` that the result has before the axis of the places.
    row_shape : tuple of int
    """

    n: int
    shape: tuple[int, ...]
    tail: tuple[int, ...]
    places: Callable[[int, int], tuple[Rows, tuple[Any, ...]]]
    axis: int
    row_shape: tuple[int, ...]

    def read(self, gather: Callable[[Rows, npt.NDArray[np.uint8]], object], pool: BufferPool, dtype: torch.dtype) -> torch.Tensor:
        """Read the rows with ``gather(rows, out)``, some megabytes at a time, and copy the parts to a tensor of the pool.

        A row is read whole, also where the index takes one column of it.

        Raises
        ------
        BudgetError
            The result, and the rows that are read at a time, do not fit.
        """
        item = dtype.itemsize
        row_bytes, part_bytes = math.prod(self.row_shape) * item, math.prod(self.tail) * item
        step = max(1, min(self.n, STEP_BYTES // max(1, row_bytes, part_bytes)))
        try:
            found = pool.tensor((self.n, *self.tail), dtype)
        except BudgetError as error:  # the rows come on top
            raise BudgetError(error.reason, (error.needed or 0) + size_class(step * row_bytes)) from None
        block = pool.tensor((step, *self.row_shape), dtype)
        into, rows_of = _as_numbers(found), _as_numbers(block)
        if not found.numel():
            gather(range(0), as_bytes(block, row_bytes)[:0])  # which refuses a closed store
            return found.reshape(self.shape)
        for low in range(0, self.n, step):
            high = min(self.n, low + step)
            rows, taken = self.places(low, high)
            gather(rows, as_bytes(block, row_bytes)[: len(rows)])
            parts = rows_of[: len(rows)][taken]
            into[low:high] = np.moveaxis(parts, self.axis, 0) if self.axis else parts
        return (found.movedim(0, self.axis) if self.axis else found).reshape(self.shape)


def _as_numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def select(index: Any, shape: Sequence[int]) -> Selection | None:
    """Take an index of rows of ``shape``, no list, apart; None if it takes whole rows, which ``resolve_rows`` understands.

    Raises
    ------
    IndexError
        An id, a position or a mask does not fit its axis, there are too many axes, or arrays do not broadcast together.
    TypeError
        A part of the index is no index.
    """
    if not isinstance(index, tuple):
        if index is not None and not (_is_mask(index) and index.ndim > 1):
            return None
        index = (index,)
    before, items = _split(index, shape)
    if not before and all(item is Ellipsis or _is_whole(item, axis, shape) for axis, item in _by_axis(items[1:], len(shape))):
        return None
    items[1:] = _checked(items[1:], shape)
    if any(isinstance(item, np.ndarray) for item in items) and not isinstance(items[0], slice):
        return _of_arrays(before, items, shape)
    return _of_slice(before, items, shape)


# -- the parts of an index -------------------------------------------------------------------------------------------------------


def _part(item: Any) -> Any:
    """Convert a part of a tuple to None, an ellipsis, a slice, an int, or an array of integers or of truth values."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if not isinstance(item, (list, np.ndarray, torch.Tensor, bool, np.bool_)):
        with contextlib.suppress(TypeError):
            return operator.index(item)
    array = as_index_array(item)
    if array.dtype.kind not in "biu":
        raise TypeError(f"an axis is indexed by integers, slices or a boolean mask, not {array.dtype}")
    if array.ndim:
        return array
    if array.dtype.kind == "b":
        raise IndexError(ONE_TRUTH_VALUE)
    return int(array)


def _is_whole(item: Any, axis: int, shape: Sequence[int]) -> bool:
    return isinstance(item, slice) and range(shape[axis])[item] == range(shape[axis])


def _split(index: tuple[Any, ...], shape: Sequence[int]) -> tuple[int, list[Any]]:
    """Return the number of new axes before the rows, and the parts of the index from the rows' part on, masks as positions."""
    parts = [_part(item) for item in index]
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index has one ellipsis (...) at the most")
    n_indexed = sum(part.ndim if _is_mask(part) else part is not None and part is not Ellipsis for part in parts)
    if n_indexed > len(shape):
        raise IndexError(f"{n_indexed} axes are indexed, and there are {len(shape)}")
    left, axis = len(shape) - n_indexed, 0
    items: list[Any] = []
    for part in parts:
        if _is_mask(part):
            if part.shape != tuple(shape[axis : axis + part.ndim]):
                wanted = tuple(shape[axis : axis + part.ndim])
                raise IndexError(f"a boolean mask must have shape {wanted} there, not {part.shape}")
            items += part.nonzero()
            axis += part.ndim
        elif part is not Ellipsis:
            items.append(part)
            axis += part is not None
        elif axis:  # kept, even if it stands for no axis: it parts the arrays on its two sides
            items.append(part)
            axis += left
        else:
            items += [slice(None)] * left
            axis = left
    if not axis:
        items.append(slice(None))
    before = next(n for n, item in enumerate(items) if item is not None)
    return before, items[before:]


def _is_mask(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return part.dtype is torch.bool
    return isinstance(part, np.ndarray) and part.dtype.kind == "b"


def _by_axis(items: Sequence[Any], n_axes: int) -> Iterator[tuple[int, Any]]:
    """Yield the parts that follow the rows' part, each with the axis at which it begins."""
    axis = 1
    left = n_axes - 1 - sum(item is not None and item is not Ellipsis for item in items)
    for item in items:
        yield axis, item
        axis += left if item is Ellipsis else item is not None


def _checked(items: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Check positions on other axes than that of the rows; arrays of them become int64."""
    found = []
    for axis, item in _by_axis(items, len(shape)):
        if isinstance(item, (int, np.ndarray)):
            values, n = np.asarray(item), shape[axis]
            bad = np.flatnonzero((values < -n) | (values >= n))
            if len(bad):
                raise IndexError(f"{values.flat[bad[0]]} is out of range for axis {axis}, which has {n} places")
        found.append(item.astype(np.int64) if isinstance(item, np.ndarray) else item)
    return found


def _is_parted(items: Sequence[Any]) -> bool:
    """Whether slices or new axes separate arrays and integers: the axes of the arrays then come first in the result."""
    places = [n for n, item in enumerate(items) if isinstance(item, (int, np.ndarray))]
    return places[-1] - places[0] >= len(places)


def _broadcast_shape(items: Sequence[Any]) -> tuple[int, ...]:
    shapes = [item.shape for item in items if isinstance(item, np.ndarray)]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise IndexError(f"index arrays of shapes {', '.join(map(str, shapes))} do not broadcast together") from None


def _part_shape(taken: tuple[Any, ...], shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the shape of what an index takes of one row, the axis of that row included."""
    part: tuple[int, ...] = np.broadcast_to(np.zeros((), bool), (1, *shape[1:]))[taken].shape
    return part


# -- what is read ----------------------------------------------------------------------------------------------------------------


def _one_row(row: int, n: int) -> range:
    rows, _ = resolve_rows(row, (n,))
    return range(int(rows[0]), int(rows[0]) + 1)


def _of_slice(before: int, items: list[Any], shape: Sequence[int]) -> Selection:
    """Select from a slice of rows, or from one row."""
    row, taken = items[0], (slice(None), *items[1:])
    span = range(*row.indices(shape[0])) if isinstance(row, slice) else _one_row(row, shape[0])
    axis = 0
    if any(isinstance(item, np.ndarray) for item in items):
        lead = _broadcast_shape(items)
        axis = len(lead) if _is_parted(items) else 0
    tail = list(_part_shape(taken, shape))
    del tail[axis]

    def places(low: int, high: int) -> tuple[Rows, tuple[Any, ...]]:
        part = span[low:high]
        return part if part.step == 1 else np.arange(part.start, part.stop, part.step, dtype=np.int64), taken

    of_rows = (len(span),) if isinstance(row, slice) else ()
    whole = (*tail[:axis], *(1,) * before, *of_rows, *tail[axis:])
    return Selection(len(span), whole, tuple(tail), places, axis, tuple(shape[1:]))


def _of_arrays(before: int, items: list[Any], shape: Sequence[int]) -> Selection:
    """Make the selection of an index with an array of rows; arrays on other axes are broadcast with it, as in NumPy."""
    lead, others = _broadcast_shape(items), items[1:]
    ids = check_rows(np.asarray(items[0]).reshape(-1), shape[0]).reshape(np.shape(items[0]))
    has_others = any(isinstance(item, np.ndarray) for item in others)
    first = np.zeros(1, np.int64)
    tail = _part_shape((first, *(first if isinstance(item, np.ndarray) else item for item in others)), shape)[1:]

    def places(low: int, high: int) -> tuple[Rows, tuple[Any, ...]]:
        def cut(array: Int64s) -> Int64s:
            return np.broadcast_to(array, lead).flat[low:high]

        if not has_others:
            return cut(ids), (slice(None), *others)
        rows, number = np.unique(cut(ids), return_inverse=True)
        return rows, (number, *(cut(item) if isinstance(item, np.ndarray) else item for item in others))

    new = (1,) * before
    whole = (*lead, *new, *tail) if _is_parted(items) else (*new, *lead, *tail)
    return Selection(math.prod(lead), whole, tail, places, axis=0, row_shape=tuple(shape[1:]))
