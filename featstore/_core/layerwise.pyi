"""Layer-wise sampling: lists in pieces, importance of sources, what a layer takes."""

from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from featstore._core.sampler import Hops

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_Doubles = npt.NDArray[np.float64]
_Ids = npt.NDArray[Any]

@final
class Lists:
    hops: Hops
    id_bytes: int
    n_ids: int
    n_missing: int
    def __new__(cls, hops: Hops, n_dst: int, records: _Ids | None, id_bytes: int) -> Self: ...
    @property
    def n_dst(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def rewind(self) -> None: ...
    def turn(self, positions: _Int64s) -> int: ...
    def take(self, found: _Ids, listed: _Ids, owners: _Int32s) -> int: ...

@final
class Candidates:
    n_edges: int
    def __new__(cls, sources: Hops, lists: Lists, is_mean: bool) -> Self: ...
    @property
    def n_sources(self) -> int: ...
    def begin(self, n: int) -> None: ...
    def number(self, listed: _Ids) -> bool: ...
    def accumulate(self, listed: _Ids, owners: _Int32s, importance: _Doubles, n_edges: _Int64s) -> None: ...
    def draw(
        self,
        importance: _Doubles,
        n_edges: _Int64s,
        size: int,
        key: int,
        takes_own: bool,
        upto: _Doubles | None,
        drawn: _Int64s | None,
    ) -> None: ...
    def take_edges(
        self,
        listed: _Ids,
        owners: _Int32s,
        factors: _Doubles,
        src: _Int64s,
        dst: _Int64s,
        weights: npt.NDArray[np.float32],
        starts: _Int64s | None = None,
        edge_pos: _Int64s | None = None,
    ) -> None: ...
    def number_edges(self, src: _Int64s) -> bool: ...

def keep_members(
    lists: Lists,
    listed: _Ids,
    owners: _Int32s,
    n: int,
    numbers: _Int32s,
    starts: _Int64s | None = None,
    edge_pos: _Int64s | None = None,
) -> int: ...
