"""The executor: runs any batch plan. It looks nothing up and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from featstore.errors import ClosedError
from featstore.gather.plan import BatchPlan, Part, Tier
from featstore.gather.sources import RowSource
from featstore.storage.rowfile import ReadStats

__all__ = ["Tally", "execute"]


@dataclass
class Tally:
    """What some gathers came to; whoever asks for them owns it, one thread at a time.

    Parameters
    ----------
    rows : dict of Tier to int
        Rows delivered from each tier.
    read : ReadStats
        What was read for them, also by gathers that failed afterwards.
    update_s : float
        Seconds of choosing what the host cache admits and of copying it there.
    hits_lost : int
        Rows that a plan has in the host cache, and that were read, as the cache has given their memory back.
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
    """What is in memory first; last an extent, which comes once: what fails before for lack of memory may be tried again."""
    return len(Tier) if part.tier == Tier.PACKED else part.tier


def execute(
    plan: BatchPlan,
    sources: Mapping[Tier, RowSource],
    out: npt.NDArray[np.uint8],
    tiers: frozenset[Tier],
    tally: Tally | None = None,
    gap_bytes: int | None = None,
) -> int:
    """Fill ``out`` with the rows that the plan's parts of ``tiers`` name; return how many.

    ``tally`` gets what was read, ``gap_bytes`` goes to :meth:`RowSource.gather`. Where a source fails, ``out`` is undefined,
    and the plan's changes must not be applied. ClosedError where a tier of the plan is gone.
    """
    filled, parts = 0, plan.parts
    for part in sorted(parts, key=_order) if len(parts) > 1 else parts:
        n = len(part.addresses)
        if part.tier not in tiers or not n:
            continue
        if part.tier not in sources:  # the plan was made while there was one
            raise ClosedError(f"the {part.tier.name.lower()} tier was closed")
        cost = sources[part.tier].gather(part.addresses, out, part.positions, gap_bytes)
        if tally is not None:
            tally.read.add(cost)
        filled += n
    return filled
