import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]

def lru_use(slots: _I32, is_new: bool, log: _I32, last_use: _I32, state: _I64) -> None: ...
def lru_victims(out: _I32, log: _I32, last_use: _I32, state: _I64) -> None: ...
def mark_visited(slots: _I32, mark: _U8) -> None: ...
def mark_occupied(slots: _I32, mark: _U8) -> None: ...
def clock_victims(out: _I32, mark: _U8, hand: int) -> int: ...
def sieve_insert(slots: _I32, log: _I32, mark: _U8, state: _I64) -> None: ...
def sieve_victims(out: _I32, n_occupied: int, log: _I32, mark: _U8, state: _I64) -> None: ...
def s3fifo_hit(slots: _I32, mark: _U8) -> None: ...
def s3fifo_insert(
    rows: _I64,
    slots: _I32,
    most_small: int,
    small: _I32,
    main: _I32,
    mark: _U8,
    row_of_slot: _I64,
    ghost: _I64,
    table: _I32,
    state: _I64,
) -> None: ...
def s3fifo_victims(
    out: _I32,
    main_limit: int,
    small: _I32,
    main: _I32,
    mark: _U8,
    row_of_slot: _I64,
    ghost: _I64,
    table: _I32,
    state: _I64,
) -> None: ...
