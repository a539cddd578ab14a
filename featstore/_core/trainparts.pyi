from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

def table_bytes(n_nodes: int, n_parts: int) -> int: ...
def add_paths(
    offsets: Int64s,
    first_node: int,
    block: Any,
    id_bytes: int,
    first: int,
    part: Int32s,
    begin: int,
    paths: Floats | None,
    more: Floats,
) -> None: ...
def bring_neighbors(
    offsets: Int64s, first_node: int, block: Any, id_bytes: int, first: int, bits: UInt8s, into: UInt8s
) -> None: ...

@final
class TrainPlacer:
    def __new__(cls, part: Int32s, member: UInt8s, n_train: int, n_parts: int, hops: int) -> Self: ...
    @property
    def n_visits(self) -> int: ...
    def put_exact(self, nodes: Int64s, slot: Int32s, starts: Int64s, ids: Any, id_bytes: int, most: int) -> int: ...
    def put_by(self, nodes: Int64s, counts: Floats) -> None: ...
    def join(self, bits: UInt8s) -> None: ...
    def sizes(self, trained: Int64s, size: Int64s) -> None: ...
