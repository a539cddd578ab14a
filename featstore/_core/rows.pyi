from typing import Any

import numpy as np
import numpy.typing as npt

def copy_rows(
    src: npt.NDArray[np.uint8],
    src_rows: npt.NDArray[Any] | None,
    dst: npt.NDArray[np.uint8],
    dst_rows: npt.NDArray[Any] | None,
    n_threads: int = 1,
) -> None: ...
def copy_costs(row_bytes: int, past_cache: bool = True) -> list[int]: ...
def wrap_ids(ids: npt.NDArray[np.int64], n: int, out: npt.NDArray[np.int64] | None) -> tuple[int, bool]: ...
def is_writable(address: int, n_bytes: int) -> bool: ...
