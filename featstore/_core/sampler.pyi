"""Neighbour sampling: draws, and the numbering of a batch's nodes."""

from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

_Int64s = npt.NDArray[np.int64]
_Ids = npt.NDArray[Any]

MAX_NODES: int

def absorb(key: int, x: int) -> int: ...
def draw_scratch(fanout: int) -> int: ...

@final
class Hops:
    def __new__(cls, num_nodes: int, exact: bool, draw_level: int = 2, copies: int = 1) -> Self: ...
    @property
    def n_nodes(self) -> int: ...
    def attach(self, nodes: _Int64s, place: _Int64s, degree: _Int64s, table: npt.NDArray[np.uint64]) -> None: ...
    def expand_lists(self, lists: _Int64s, place: _Int64s, degree: _Int64s) -> None: ...
    def begin(self, seeds: _Int64s) -> tuple[int, int]: ...
    def count(self, n_dst: int, fanout: int, replace: bool) -> tuple[int, int, bool]: ...
    def start(
        self,
        n_dst: int,
        fanout: int,
        replace: bool,
        key: int,
        records: _Ids | None,
        id_bytes: int,
        src: _Int64s,
        dst: _Int64s,
        scratch: _Int64s,
        positions: _Int64s,
        edges: _Int64s,
        starts: _Int64s | None = None,
        edge_pos: _Int64s | None = None,
        edge_ids: npt.NDArray[Any] | None = None,
        offsets: _Int64s | None = None,
        drawn: bool = False,
    ) -> None: ...
    def draw_positions(
        self,
        n_dst: int,
        fanout: int,
        replace: bool,
        key: int,
        place: _Int64s,
        degree: _Int64s,
        dst: _Int64s,
        scratch: _Int64s,
        edge_pos: _Int64s,
        edge_ids: _Ids | None = None,
    ) -> int: ...
    def fill(self, ids: _Ids, id_bytes: int) -> int: ...
    def number(self) -> bool: ...
