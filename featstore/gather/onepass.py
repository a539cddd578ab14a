"""One pass over rows on the device: each goes from its slot straight to its place in the batch. A kernel in Triton.

Triton is imported only here. ``gather/device.py`` imports this file where there is a CUDA device, and does without it where
Triton is not installed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["place_rows"]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
TILE = 2048  # words that one program copies


def _place(
    source: Any, slots: Any, out: Any, positions: Any, n: Any, width: Any, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """Copy a tile of ROWS rows by COLUMNS words. Addresses are 64 bits wide: a tier may have more than 2**31 words."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row, mask=row < n, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=row < n, other=0).to(tl.int64)
    inside = (row < n)[:, None] & (column < width)[None, :]
    words = tl.load(source + slot[:, None] * width + column[None, :], mask=inside)
    tl.store(out + position[:, None] * width + column[None, :], words, mask=inside)


_kernel: Any = triton.jit(_place)


def place_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, positions: torch.Tensor) -> None:
    """Copy row ``slots[i]`` of ``source`` to row ``positions[i]`` of ``out``; nothing is checked.

    ``source`` and ``out`` are contiguous, of one dtype, share no memory, and lie on the device (``source`` also pinned in host
    memory). ``slots`` and ``positions`` are int32 or int64 ``[n]``, the latter distinct. RuntimeError where Triton cannot
    compile for this device, or the device fails.

    Queued in the current stream of the current device, which must be that of ``out``. A row is copied as the widest words that
    divide its bytes, so its bits stay what they are, whatever its type.
    """
    row_bytes = math.prod(out.shape[1:]) * out.dtype.itemsize
    if not len(slots) or not row_bytes:
        return
    word = math.gcd(row_bytes, source.data_ptr(), out.data_ptr(), max(WORDS))
    width = row_bytes // word
    columns = min(TILE, triton.next_power_of_2(width))
    rows = min(TILE // columns, triton.next_power_of_2(len(slots)))
    grid = triton.cdiv(len(slots), rows), triton.cdiv(width, columns)
    _kernel[grid](_words(source, word), slots, _words(out, word), positions, len(slots), width, ROWS=rows, COLUMNS=columns)


def _words(rows: torch.Tensor, word: int) -> torch.Tensor:
    return rows.reshape(-1).view(torch.uint8).view(WORDS[word])
