"""Arrays of parts, one number for each node: checks, and sorting of nodes by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.partition import group_by_part
from featstore.gather.arrays import as_array

__all__ = ["MOST_PARTS", "by_part", "check_parts"]

MOST_PARTS: Final = 2**31 - 1
_PIECE: Final = 1 << 16

Int32s = npt.NDArray[np.int32]
Given = torch.Tensor | npt.NDArray[Any] | Sequence[int]


def check_parts(parts: Given, n: int, n_parts: int | None = None, what: str = "parts") -> Int32s:
    """Check parts and convert them to a contiguous int32 array, which is copied only if necessary.

    TypeError unless the parts are integers. ValueError unless their shape is ``[n]`` and each is in ``[0, n_parts)``; the error
    names the node. ``what`` names the argument in messages.
    """
    array = as_array(what, parts)
    if array.shape != (n,):
        raise ValueError(f"{what} must have one entry a node, shape ({n},), not {array.shape}")
    if array.dtype.kind not in "iu" and n:
        raise TypeError(f"{what} must be integers, not {array.dtype}")
    most = MOST_PARTS if n_parts is None else n_parts
    for first in range(0, n, _PIECE):
        piece = array[first : first + _PIECE]
        bad = np.flatnonzero((piece < 0) | (piece >= most))
        if len(bad):
            raise ValueError(f"{what}: node {first + bad[0]} is in part {piece[bad[0]]}, which is not in [0, {most})")
    return np.ascontiguousarray(array, np.int32)


def by_part(
    parts: Int32s, n_parts: int, nodes: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort all nodes, or ``nodes``, by part; return the offset of each part, int64 ``[n_parts + 1]``, and the sorted nodes."""
    offsets, out = np.empty(n_parts + 1, np.int64), np.empty(len(parts) if nodes is None else len(nodes), np.int64)
    bad = group_by_part(parts, nodes, offsets, out)
    if bad >= 0:
        raise ValueError(f"entry {bad} is no node, or its part is not in [0, {n_parts})")
    return offsets, out
