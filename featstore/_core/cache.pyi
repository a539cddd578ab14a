import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U64 = npt.NDArray[np.uint64]
_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]

def split(rows: _I64, slot_of_row: _I32, hit_positions: _I64, hit_slots: _I32, miss_positions: _I64) -> int: ...
def lookup(rows: _I64, slot_of_row: _I32, slots: _I32) -> int: ...
def assign(rows: _I64, values: _I32, slot_of_row: _I32) -> int: ...
def release(rows: _I64, slot_of_row: _I32) -> int: ...
def claim(
    rows: _I64,
    positions: _I64,
    slot_of_row: _I32,
    new_rows: _I64,
    new_positions: _I64,
    held_rows: _I64,
    held_positions: _I64,
    held_slots: _I32,
) -> tuple[int, int]: ...
def distinct_slots(slots: _I32, bitmap: _U64, out: _I32) -> int: ...
def check_victims(slots: _I32, row_of_slot: _I64, bitmap: _U64) -> tuple[int, int]: ...
def still_held(
    rows: _I64,
    positions: _I64,
    slots: _I32,
    slot_of_row: _I32,
    rows_out: _I64,
    positions_out: _I64,
    slots_out: _I32,
) -> int: ...
def count_digits(keys: _U64, shift: int, prefix: int, counts: _I64) -> None: ...
def take_top(keys: _U64, first_row: int, threshold: int, n_equal: int, rows: _I64, n_rows: int) -> tuple[int, int]: ...
