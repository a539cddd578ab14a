"""Draws in proportion to the weights of edges, and the weights in the order of the lists."""

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.sampler import Hops

_Int64s = npt.NDArray[np.int64]
_Doubles = npt.NDArray[np.float64]

LONGEST: int

def sparse_trials(fanout: int, replace: bool) -> int: ...
def turn(
    hops: Hops,
    begin: int,
    n_dst: int,
    fanout: int,
    replace: bool,
    key: int,
    all_positive: bool,
    starts: _Int64s,
    room: int,
    first: _Int64s,
    positions: _Int64s,
    n_trials: int = 0,
) -> tuple[int, int]: ...
def lacking(
    hops: Hops,
    begin: int,
    end: int,
    fanout: int,
    replace: bool,
    key: int,
    columns: _Doubles,
    first: _Int64s,
    room: int,
    n_trials: int,
) -> tuple[int, int]: ...
def place_lacking(
    hops: Hops, begin: int, end: int, n_columns: int, starts: _Int64s, first: _Int64s, positions: _Int64s
) -> None: ...
def draw(
    hops: Hops,
    begin: int,
    end: int,
    fanout: int,
    replace: bool,
    key: int,
    columns: _Doubles,
    first: _Int64s,
    src: _Int64s,
    dst: _Int64s,
    n_edges: int,
    scratch: _Int64s,
    n_trials: int = 0,
    level: int = 2,
) -> tuple[int, int]: ...
def first_bad_weight(weights: _Doubles) -> tuple[int, int]: ...
def place_weights(weights: _Doubles, first: int, ids: npt.NDArray[Any], out: _Doubles) -> None: ...
def make_columns(weights: _Doubles, offsets: _Int64s) -> int: ...
def first_bad_column(
    hops: Hops, begin: int, end: int, columns: _Doubles, first: _Int64s, n_trials: int, least: int = 0
) -> int: ...
def make_columns_of(hops: Hops, begin: int, end: int, first: _Int64s, weights: _Doubles) -> None: ...
