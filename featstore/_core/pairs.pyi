import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

def divide(
    records: UInt8s,
    record_bytes: int,
    at: int,
    number_bytes: int,
    low: int,
    width: int,
    bucket: npt.NDArray[np.uint16],
    begins: Int64s,
    out: UInt8s,
) -> None: ...
def sort_keys(keys: Int64s, spare: Int64s, low: int, high: int) -> bool: ...
