from typing import Any

import numpy.typing as npt

def page_sums(
    data: npt.NDArray[Any] | bytes | bytearray | memoryview, seed: int, out: npt.NDArray[Any], level: int = -1
) -> None: ...
