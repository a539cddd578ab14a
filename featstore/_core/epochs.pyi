"""Epoch-wide sampling: logs of many batches, draws list by list, and a batch's hops from its logs."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from featstore._core.sampler import Hops

_Int64s = npt.NDArray[np.int64]
_UInt32s = npt.NDArray[np.uint32]
_Bytes = npt.NDArray[np.int8]
_Words = npt.NDArray[Any]

TARGET_WORDS: int
LEAST_BLOCK_WORDS: int
LEAST_BLOCKS: int
LOG_BYTES: int
BLOCK_BYTES: int
LEAST_POSITIONS: int

@final
class Logs:
    def __new__(cls, n_logs: int, arena: _Bytes, block_words: int, wide: bool) -> Self: ...
    @property
    def is_empty(self) -> bool: ...
    def clear(self) -> None: ...
    def length(self, log: int) -> int: ...
    def copy(self, log: int, out: _Bytes) -> None: ...
    def scatter(self, lists: _Int64s, first: int, end: int, batch: int, shift: int, place: int = 0) -> int: ...

def sort_targets(
    records: _Words,
    wide: bool,
    base: int,
    n_range: int,
    ends: _Int64s,
    batch: _UInt32s,
    place: _UInt32s,
    nodes: _Int64s,
    starts: _Int64s,
) -> int: ...

@final
class Draws:
    def __new__(
        cls,
        logs: Logs,
        keys: npt.NDArray[np.uint64],
        fanouts: _Int64s,
        hops: tuple[int, int],
        replace: bool,
        n_batches: int,
        nodes: _Int64s,
        starts: _Int64s,
        batch: _UInt32s,
        place: _UInt32s,
        level: int = 2,
        numbered: bool = False,
    ) -> Self: ...
    @staticmethod
    def scratch(fanouts: Sequence[int]) -> int: ...
    def begin(self, first: int, end: int, at: _Int64s, degree: _Int64s, ids: _Words, id_bytes: int, scratch: _Int64s) -> None: ...
    def begin_elsewhere(
        self, first: int, end: int, at: _Int64s, degree: _Int64s, positions: _Int64s, holes: _Int64s, scratch: _Int64s
    ) -> None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def n_drawn(self) -> int: ...
    def fill(self, found: _Words, id_bytes: int) -> None: ...
    def go_on(self) -> bool: ...

def replay(
    hops: Hops,
    records: _Words,
    wide: bool,
    n_dst: int,
    counts: _Int64s,
    array: Callable[[int], tuple[_Int64s, ...]],
    numbered: bool = False,
    starts: _Int64s | None = None,
    places: _Int64s | None = None,
    owners: _Int64s | None = None,
) -> None: ...
