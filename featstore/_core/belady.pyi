from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

def link(rows: Ints, first: int, last: Ints, nxt: Ints) -> int: ...
def bits_at(bits: Bits, positions: Ints, out: npt.NDArray[np.uint8]) -> None: ...
def next_uses(rows: Ints, batch: int, ptr: Int64s, end: Int64s, iters: Ints, out: Int64s, advance: bool) -> None: ...
def fill_iters(rows: Ints, batch: int, cursor: Int64s, iters: Ints) -> None: ...

class Bits:
    length: int
    capacity: int
    count: int
    limit: int
    @staticmethod
    def words_for(length: int) -> int: ...
    def __init__(self, memory: npt.NDArray[np.uint64], length: int, capacity: int) -> None: ...
    def start(self, positions: Ints) -> None: ...
    def run(self, nxt: Ints, offsets: Int64s, batch: int) -> int: ...
    def missed(self, first: int, last: int, out: Int32s) -> int: ...

class Slots:
    n_free: int
    def __init__(self, free_slots: Int32s, n_taken: int = 0) -> None: ...
    def begin(self, slot_of: Int32s) -> None: ...
    def release(self, slots: Int32s) -> None: ...
    def changes(
        self,
        bits: Bits,
        rows: Ints,
        numbers: Ints,
        nxt: Ints,
        limit: int,
        slots: Int32s,
        in_rows: Int64s,
        in_positions: Int64s,
        in_slots: Int32s,
        out_rows: Int64s,
    ) -> tuple[int, int]: ...
