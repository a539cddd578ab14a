import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

LEVELS: int
NO_MORE: int

def begin(ids: UInt8s, id_bytes: int, cursor: Int64s, ends: Int64s, nexts: Int64s) -> None: ...
def accumulate(
    rows: UInt8s,
    row_item: int,
    first: int,
    width: int,
    ids: UInt8s,
    id_bytes: int,
    cursor: Int64s,
    ends: Int64s,
    nexts: Int64s,
    sums: UInt8s,
    sum_item: int,
    scale: npt.NDArray[np.float64] | None,
    self_first: int,
    bounds: Int64s,
    n_threads: int,
    level: int = 2,
) -> int: ...
def count_self(ids: UInt8s, id_bytes: int, begins: Int64s, ends: Int64s, first: int, counts: Int64s) -> None: ...
def mark_runs(ids: UInt8s, id_bytes: int, run: int, wanted: UInt8s) -> bool: ...
def finish(sums: UInt8s, sum_item: int, width: int, factors: npt.NDArray[np.float64], divides: bool, n_threads: int) -> None: ...
