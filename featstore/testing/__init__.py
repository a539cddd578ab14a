"""Tests for authors of plug-ins: contract suites for policies, partitioners, row sources, samplers, strategies; fault injection.

Only the suites need pytest and Hypothesis; both are imported when a suite is requested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featstore.testing.loading import StrategyContract
    from featstore.testing.partitioners import PartitionerContract
    from featstore.testing.planned import PlannedPolicyContract, play_planned
    from featstore.testing.policies import OnlinePolicyContract, StaticPolicyContract, golden_context, golden_trace, play
    from featstore.testing.samplers import SamplerContract
    from featstore.testing.sources import RowSourceContract
    from featstore.testing.strategies import row_ids, traces

__all__ = [
    "OnlinePolicyContract",
    "PartitionerContract",
    "PlannedPolicyContract",
    "RowSourceContract",
    "SamplerContract",
    "StaticPolicyContract",
    "StrategyContract",
    "golden_context",
    "golden_trace",
    "play",
    "play_planned",
    "row_ids",
    "traces",
]

_HOMES = {"row_ids": "strategies", "traces": "strategies", "RowSourceContract": "sources", "StrategyContract": "loading"}
_HOMES |= {
    "PartitionerContract": "partitioners",
    "SamplerContract": "samplers",
    "PlannedPolicyContract": "planned",
    "play_planned": "planned",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"featstore.testing.{_HOMES.get(name, 'policies')}"), name)
