from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

def populate(memory: npt.NDArray[np.uint8]) -> bool: ...

class Block:
    nbytes: int
    def __init__(self, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Lease:
    nbytes: int
    def __init__(self, block: Block, nbytes: int, give_back: Callable[[Block], Any]) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
