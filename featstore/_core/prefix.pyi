import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

def weigh(
    scores: Floats, indptr: Int64s, first: int, id_bytes: int, entry_bytes: int, shift: int, known: int, weights: Floats
) -> int: ...
def place(
    scores: Floats,
    indptr: Int64s,
    first: int,
    id_bytes: int,
    entry_bytes: int,
    threshold: int,
    left: float,
    end: int,
    out: Int64s,
) -> tuple[float, int]: ...
