"""Layer-neighbour sampling: which sources the destinations of a hop take."""

from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from featstore._core.sampler import Hops

_Int64s = npt.NDArray[np.int64]
_Ids = npt.NDArray[Any]

STEP: int

@final
class Layer:
    n_expected: int
    n_ids: int
    n_missing: int
    def __new__(
        cls,
        hops: Hops,
        n_dst: int,
        fanout: int,
        early: int,
        late: int,
        phase: int,
        turn: int,
        records: _Ids | None,
        id_bytes: int,
        level: int = 2,
    ) -> Self: ...
    @property
    def done(self) -> bool: ...
    @property
    def n_chosen(self) -> int: ...
    def turn(self, positions: _Int64s) -> int: ...
    def choose(
        self, found: _Ids, chosen: _Ids, counts: _Int64s, starts: _Int64s | None = None, edge_pos: _Int64s | None = None
    ) -> bool: ...
    def number(self, chosen: _Ids, counts: _Int64s, src: _Int64s, dst: _Int64s) -> bool: ...

@final
class Importance:
    def __new__(cls, layer: Layer, sources: Hops, fanout: int, listed: _Ids, counts: _Int64s) -> Self: ...
    @property
    def n_sources(self) -> int: ...
    def number(self) -> bool: ...
    def weigh(self, weights: npt.NDArray[np.float64], steps: int, least: float) -> list[float]: ...
    def keep(self, edge_pos: _Int64s | None = None) -> None: ...
