"""The executor, which runs any batch plan. It looks nothing up and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from featstore.errors import ClosedError
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import BatchPlan, Tier, TierRows
from featstore.gather.sources import RowSource, gather_of

__all__ = ["execute"]


def _order(part: TierRows) -> int:
    """Rank a part: memory first, an extent last. An extent comes once, so a lack of memory before it allows another try."""
    return len(Tier) if part.tier == Tier.PACKED else part.tier


def execute(
    plan: BatchPlan,
    sources: Mapping[Tier, RowSource],
    out: npt.NDArray[np.uint8],
    tiers: frozenset[Tier],
    counts: GatherCounts | None = None,
    gap_bytes: int | None = None,
) -> int:
    """Fill ``out`` with the rows that the plan's parts of ``tiers`` name; return their number.

    The cost of the reads is added to ``counts``; ``gap_bytes`` goes to :meth:`RowSource.gather`. If a source fails, ``out`` is
    undefined, and the plan's changes must not be applied. ClosedError if a tier of the plan is gone.
    """
    filled, parts = 0, plan.parts
    for part in sorted(parts, key=_order) if len(parts) > 1 else parts:
        n = len(part.addresses)
        if part.tier not in tiers or not n:
            continue
        if part.tier not in sources:  # it was closed after the plan was made
            raise ClosedError(f"the {part.tier.name.lower()} tier was closed")
        cost = gather_of(sources[part.tier])(part.addresses, out, part.positions, gap_bytes)
        if counts is not None:
            counts.read.add(cost)
        filled += n
    return filled
