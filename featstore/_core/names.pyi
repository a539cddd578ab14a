import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

def hash_names(offsets: Int64s, data: npt.NDArray[np.uint8], out: UInt64s) -> None: ...
def number_keys(
    slots: npt.NDArray[np.uint32], held: UInt64s, n: int, keys: UInt64s, ids: Int64s, firsts: Int64s, adds: bool
) -> tuple[int, int]: ...
def fill_slots(slots: npt.NDArray[np.uint32], held: UInt64s) -> None: ...
