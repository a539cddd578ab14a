"""Conversion of the arrays of users and plug-ins to NumPy, without losing a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["as_array", "find_ids", "first_seen", "id_array", "refuse_mask"]


def as_array(what: str, given: Any) -> npt.NDArray[Any]:
    """Convert a tensor, an array or a sequence to an array; ``what`` is its name in messages.

    Raises
    ------
    TypeError
        Values are masked (``numpy.ma``).
    ValueError
        Rows differ in length.
    """
    if isinstance(given, torch.Tensor):
        array: npt.NDArray[Any] = given.numpy(force=True)
        return array
    if type(given) is np.ndarray:
        return given
    rows = given if isinstance(given, (list, tuple)) and given and isinstance(given[0], np.ndarray) else (given,)
    n_masked = sum([int(np.ma.getmaskarray(each).sum()) for each in rows if isinstance(each, np.ma.MaskedArray)])
    if n_masked:
        raise TypeError(
            f"{what}: {n_masked} values of a masked array are masked, and masks are not kept; say what stands for them: "
            "array.filled(value)"
        )
    try:
        return np.asarray(given)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def id_array(what: str, given: Any) -> npt.NDArray[Any]:
    """Convert ids or a mask as :func:`as_array` does; TypeError for a tensor of uint8, a mask in torch but ids in NumPy."""
    if isinstance(given, torch.Tensor) and given.dtype == torch.uint8:
        raise TypeError(f"{what}: a tensor of torch.uint8 may be a mask or ids; give a mask as .bool(), ids as .long()")
    return as_array(what, given)


def refuse_mask(what: str, ids: npt.NDArray[np.integer[Any]]) -> None:
    """Raise ValueError if ids, none below 0, repeat and are 0 and 1 alone: they are a mask that lacks its dtype."""
    if len(ids) and ids.max() <= 1:
        for value in (0, 1):
            places = np.flatnonzero(ids[:3] == value)  # one of two values is among any three twice
            if len(places) > 1:
                raise ValueError(
                    f"{what} of 0 and 1 alone look like a mask: {value} is at positions {places[0]} and {places[1]}; "
                    "a mask of 0 and 1 must be given as booleans: .astype(bool)"
                )


def first_seen(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find the positions at which distinct ids are seen first, ascending, and for every id the number of its own."""
    values, first, number = np.unique(ids, return_index=True, return_inverse=True)
    if len(values) == len(ids):
        return (places := np.arange(len(ids))), places
    order = np.argsort(first)
    number_of = np.empty_like(order)
    number_of[order] = np.arange(len(order))
    return first[order], number_of[number]


def find_ids(distinct: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Find the number of each id among the ``distinct`` ones, in any order, and whether it is one of them."""
    if not len(distinct):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
    ascending = np.argsort(distinct)
    number = ascending[np.searchsorted(distinct, ids, sorter=ascending).clip(max=len(distinct) - 1)]
    return number, distinct[number] == ids
