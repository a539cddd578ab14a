"""The executor, which runs any batch plan. It looks nothing up and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from featstore.errors import ClosedError
from featstore.gather.plan import BatchPlan, Part, Tier
from featstore.gather.sources import RowSource, gather_of
from featstore.storage.rowfile import ReadStats

__all__ = ["Tally", "execute"]


@dataclass
class Tally:
    """Counts of one or more gathers; owned by the caller of the gathers, one thread at a time.

    Parameters
    ----------
    rows : dict of Tier to int
        Rows delivered from each tier.
    read : ReadStats
        Cost of the reads, also of gathers that failed afterwards.
    update_s : float
        Seconds of choosing the rows that the host cache admits, and of copying them there.
    hits_lost : int
        Rows that were planned as hits, but had to be read, since the host cache has given their memory back.
    """

    rows: dict[Tier, int] = field(default_factory=dict)
    read: ReadStats = field(default_factory=ReadStats)
    update_s: float = 0.0
    hits_lost: int = 0

    def count(self, tier: Tier, n_rows: int) -> None:
        self.rows[tier] = self.rows.get(tier, 0) + n_rows

    def count_plan(self, plan: BatchPlan) -> None:
        for part in plan.parts:
            self.count(Tier.BASE if part.tier == Tier.AHEAD else part.tier, len(part.addresses))


def _order(part: Part) -> int:
    """Rank a part: memory first, an extent last. An extent comes once, so a lack of memory before it allows another try."""
    return len(Tier) if part.tier == Tier.PACKED else part.tier


def execute(
    plan: BatchPlan,
    sources: Mapping[Tier, RowSource],
    out: npt.NDArray[np.uint8],
    tiers: frozenset[Tier],
    tally: Tally | None = None,
    gap_bytes: int | None = None,
) -> int:
    """Fill ``out`` with the rows that the plan's parts of ``tiers`` name; return their number.

    The cost of the reads is added to ``tally``; ``gap_bytes`` goes to :meth:`RowSource.gather`. If a source fails, ``out`` is
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
        if tally is not None:
            tally.read.add(cost)
        filled += n
    return filled
