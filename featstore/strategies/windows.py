"""Windows in which a sampler draws many batches at once: their number in an epoch, and advice to make it one."""

from __future__ import annotations

from typing import Any

from featstore.errors import PerformanceWarning, warn
from featstore.estimate.length import at_least
from featstore.strategies.context import Context
from featstore.strategies.memory import FRACTIONS, SAMPLED_AHEAD, Memory

__all__ = ["describe_windows"]

MANY = 4  # windows of an epoch that deserve a warning: each passes over the neighbour lists in every hop


def describe_windows(context: Context, memory: Memory) -> dict[str, Any]:
    """Return ``windows`` for the loader's statistics, empty if the sampler chooses none; warn if an epoch has many."""
    granted, batch = memory.granted.get(SAMPLED_AHEAD), memory.batch
    found = None if granted is None else context.batches.windows(granted, (batch.n_rows, batch.n_edges))
    if granted is None or found is None:
        return {}
    advice = None
    if found.n >= MANY:
        more = []
        if found.memory is not None:
            short = int((found.memory - granted) / FRACTIONS[SAMPLED_AHEAD])
            more.append(f"memory='{at_least(context.budget.total + short * 9 // 8)}'")
        if found.disk is not None:
            more.append(f"EpochSampler(disk='{at_least(found.disk)}')")
        advice = (
            f"an epoch has {found.n} windows of {found.size} batches, each of which passes over the neighbour lists once a hop; "
            f"{' and '.join(more)} would make it one"
        )
        warn(f"window='auto': {advice}", PerformanceWarning)
    return {"windows": {"batches": found.size, "of": len(context.batches), "passes": found.n, "advice": advice}}
