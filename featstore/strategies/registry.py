"""The loader's strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from featstore.strategies.base import Strategy
from featstore.strategies.ondemand import OnDemand
from featstore.strategies.packed import Packed
from featstore.strategies.setup import Setup
from featstore.strategies.streamed import Streamed
from featstore.strategies.superbatch import Superbatch

__all__ = ["SAMPLING", "STRATEGIES"]

STRATEGIES: Mapping[str, Callable[[Setup], Strategy]] = {
    "ondemand": OnDemand,
    "superbatch": Superbatch,
    "streamed": Streamed,
    "packed": Packed,
}
SAMPLING: Mapping[str, type[OnDemand] | type[Superbatch]] = {
    "ondemand": OnDemand,
    "superbatch": Superbatch,
    "streamed": Streamed,
}  # those that sample, and can say before they are made what they need
