"""The loader's strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from featstore.run.packed import Packed
from featstore.run.strategy import OnDemand, Setup, Strategy
from featstore.run.streamed import Streamed
from featstore.run.superbatch import Superbatch

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
