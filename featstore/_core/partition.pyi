from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

def table_bytes(n_groups: int, width: int) -> int: ...
def edges_inside(offsets: Int64s, first_node: int, part: Int32s, block: Any, id_bytes: int, first: int) -> int: ...
def cross_edges(offsets: Int64s, first_node: int, part: Int32s, block: Any, id_bytes: int, first: int, counts: Any) -> None: ...
def list_starts(degree: Int64s, part: Int32s, next: Int64s, starts: Int64s | None = None) -> None: ...
def move_lists(
    block: Any, first: int, indptr: Int64s, starts: Int64s, node: int, window: Any, begin: int, id_bytes: int
) -> int: ...
def group_by_part(part: Int32s, nodes: Int64s | None, offsets: Int64s, out: Int64s) -> int: ...

@final
class Placer:
    def __new__(
        cls,
        indptr: Int64s,
        part: Int32s,
        width: int,
        gamma: float,
        scale: npt.NDArray[np.float64],
        train_scale: npt.NDArray[np.float64],
        cap: Int64s,
        is_train: npt.NDArray[np.uint8] | None = None,
        group: Int32s | None = None,
        ldg: bool = False,
    ) -> Self: ...
    @property
    def node(self) -> int: ...
    def begin(self) -> None: ...
    def place(self, block: Any, id_bytes: int, first: int) -> None: ...
    def sizes(self, size: Int64s, trained: Int64s, inside: Int64s) -> None: ...
