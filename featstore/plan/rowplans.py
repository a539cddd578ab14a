"""Plans of the caches of features that have the same rows, over the batches of a superbatch, whose missed rows may be packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.devicetier import REST_BYTES
from featstore.cache.planned import NO_ROWS, Horizon
from featstore.gather.plan import BatchPlan, Tier
from featstore.plan.cacheplans import CachePlanner, PlanWriter
from featstore.plan.overlapped import MissedRows, OverlappedPacking, PackSuperbatch
from featstore.plan.planfile import PlanFile, most_bytes
from featstore.plan.sampledsuperbatch import PlannedRows
from featstore.plan.samples import SampleFile
from featstore.plan.superbatchextents import SuperbatchExtents
from featstore.topology.noderows import NodeRows

__all__ = ["RowPlanner"]

Int64s = npt.NDArray[np.int64]


class RowPlanner:
    """Plan the caches of features that have the same rows, in one thread.

    Parameters
    ----------
    names : iterable of str
        The features.
    planner : CachePlanner
        The planner of their caches.
    rows : NodeRows
        The rows of nodes in these features.
    pack : PackSuperbatch, optional
        Copies missed rows into extents, which batches then read in place of the base file.
    residents : int64 array, optional
        Rows that the caches begin with, the i-th in slot i: of every superbatch if each begins anew, else of the first. By
        default none, or the rows that the superbatch uses first if each begins anew.
    begins_anew : bool
        Caches begin anew with each superbatch, which is planned alone.
    is_alone : bool
        No other planner has the same memory: this one may hold some between superbatches.
    at_once : bool
        Plan batches as they are sampled, if the policy plans each by itself and the planner is alone.
    """

    def __init__(
        self,
        names: Iterable[str],
        planner: CachePlanner,
        rows: NodeRows,
        *,
        pack: PackSuperbatch | None = None,
        residents: Int64s | None = None,
        begins_anew: bool = False,
        is_alone: bool = True,
        at_once: bool = False,
    ) -> None:
        self.names, self.rows = tuple(names), rows
        self._at_once = at_once and is_alone and not begins_anew and planner.plans_each_alone
        self._planner, self._pack, self._begins_anew = planner, pack, begins_anew
        self._residents = residents if begins_anew else None
        self.first_rows = NO_ROWS  # rows that the caches begin with, if each superbatch begins anew
        # The planner's memory has other uses between plans if caches begin anew.
        planner.start(NO_ROWS if residents is None else residents, keeps_memory=is_alone and not begins_anew)

    @property
    def looks_ahead(self) -> bool:
        """Whether plans depend on the next superbatch."""
        return not self._begins_anew and self._planner.looks_ahead

    @property
    def nbytes(self) -> int:
        """Bytes of the planner's memory that are held between superbatches."""
        return self._planner.nbytes

    def writer(self, k: int) -> PlanWriter | None:
        """Make the writer of the plans of superbatch ``k`` as it is sampled; None: it is planned afterwards."""
        return self._planner.writer(k, by_row=self._pack is not None) if self._at_once else None

    def sampled(self, samples: SampleFile, writer: PlanWriter | None) -> PlannedRows:
        """Make the rows of a sampled superbatch, with the plans that ``writer`` has written, if any."""
        tier = Tier.BASE if self._pack is None else Tier.PACKED
        return PlannedRows(samples, self.rows, None if writer is None else PlanFile(writer.finish(), tier))

    def plan(
        self, k: int, part: PlannedRows, ahead: PlannedRows | None, first: int, check: Callable[[], None], beside: int = 0
    ) -> None:
        """Plan superbatch ``k``, whose first batch is number ``first``, unless it is planned already, and pack it.

        Rows of the next one, ``ahead``, count as next uses. ``check`` and ``beside`` are those of :meth:`CachePlanner.plan`.
        """
        longest = max(int(each.samples.lengths.max(initial=0)) for each in (part, ahead) if each is not None)
        beside += 0 if part.tier is None else REST_BYTES * longest
        plan = partial(self._planner.plan, k, part, ahead, first, check, begin=self._begin, beside=beside)
        pack = self._pack
        if pack is None:
            if part.plans is None:
                part.plans = PlanFile(plan())
            return

        def may_begin(n_missed: Int64s) -> bool:
            lengths = part.lengths
            plans = most_bytes(len(lengths), int(lengths.sum()), int(n_missed.sum()), self._planner.capacity)
            return pack.fits(n_missed, plans)

        def run(n_missed: Int64s, rows_of: MissedRows, check: Callable[[], None]) -> SuperbatchExtents | None:
            with self._planner.time("pack"):
                return pack(k, n_missed, rows_of, check)

        if part.plans is not None:
            part.packed = run(part.plans.n_missed, MissedRows(part.missed), check)
        else:
            with OverlappedPacking(len(part.samples), part.ids, part.missed, pack.most_held, run, may_begin, check) as packing:
                part.plans = PlanFile(plan(announce=packing.announce, missed=packing.planned), Tier.PACKED)
                part.packed = packing.finish()
        if part.packed is None:
            part.plans.tier = Tier.BASE

    def _begin(self, horizon: Horizon) -> None:
        if self._begins_anew:
            planner = self._planner
            self.first_rows = horizon.first_rows(planner.capacity) if self._residents is None else self._residents
            planner.start(self.first_rows)

    @staticmethod
    def of(part: PlannedRows, number: int, rows: Int64s, array: Callable[..., npt.NDArray[np.int64]]) -> BatchPlan:
        """Read the plan of a batch that has these rows, in memory of ``array``."""
        assert part.plans is not None
        if part.tier is None:
            return part.plans.plan(number, rows, array)
        on_device, rest = part.tier.split(rows, array)
        return replace(part.plans.plan(number, rest, array), device=on_device)
