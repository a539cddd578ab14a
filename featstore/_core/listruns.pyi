import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

def find_runs(
    indptr: Int64s,
    nodes: Int64s,
    id_bytes: int,
    gap_pages: int,
    where: Int64s,
    begins: Int64s,
    degrees: Int64s,
    runs: Int64s,
    first_lists: Int64s,
) -> tuple[int, int]: ...
def count_runs(indptr: Int64s, nodes: Int64s, id_bytes: int, gap_pages: int) -> tuple[int, int]: ...
