"""Plans of the caches of features that have the same rows, over the batches of a superbatch, whose missed rows may be packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from featstore.cache.devicetier import REST_BYTES, DeviceTier
from featstore.cache.planned import NO_ROWS, Horizon, PlannedBatch
from featstore.gather.plan import BatchPlan, Tier
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.overlapped import MissedRows, OverlappedPacking, PackSuperbatch, SuperbatchExtents
from featstore.plan.planfile import PlanFile, most_bytes, write_plan
from featstore.plan.sampledsuperbatch import PlannedRows
from featstore.storage.sections import SectionWriter
from featstore.topology.noderows import NodeRows

__all__ = ["RowPlanner"]

Ints = npt.NDArray[np.int32 | np.int64]
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
    ) -> None:
        self.names, self.rows = tuple(names), rows
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

    def plan(
        self,
        k: int,
        part: PlannedRows,
        ahead: PlannedRows | None,
        first: int,
        tier: DeviceTier | None,
        time: Callable[[str], AbstractContextManager[None]],
        check: Callable[[], None],
        beside: int = 0,
    ) -> None:
        """Plan and pack superbatch ``k``, whose first batch is number ``first``.

        Rows of the next one, ``ahead``, count as next uses. ``tier`` has the device's rows, which plans leave out. ``check`` is
        called from time to time, and raises once the epoch is over. ``beside``: bytes of the same memory that others hold.
        """
        part.tier, pack = tier, self._pack
        if ahead is not None:
            ahead.tier = tier  # until it is planned itself
        if pack is None:
            part.plans = self._plan(k, part, ahead, first, time, check, beside, None)
            return

        def may_begin(n_missed: Int64s) -> bool:
            lengths = part.lengths
            plans = most_bytes(len(lengths), int(lengths.sum()), int(n_missed.sum()), self._planner.capacity)
            return pack.fits(n_missed, plans)

        def run(n_missed: Int64s, rows_of: MissedRows, check: Callable[[], None]) -> SuperbatchExtents | None:
            with time("pack"):
                return pack(k, n_missed, rows_of, check)

        with OverlappedPacking(len(part.samples), part.ids, part.missed, pack.most_held, run, may_begin, check) as packing:
            part.plans = self._plan(k, part, ahead, first, time, check, beside, packing)
            part.packed = packing.finish()
        if part.packed is None:
            part.plans.tier = Tier.BASE

    def _plan(
        self,
        k: int,
        part: PlannedRows,
        ahead: PlannedRows | None,
        first: int,
        time: Callable[[str], AbstractContextManager[None]],
        check: Callable[[], None],
        beside: int,
        packing: OverlappedPacking | None,
    ) -> PlanFile:
        planner = self._planner
        horizon_of = [part] if ahead is None else [part, ahead]
        lengths = np.concatenate([each.lengths for each in horizon_of])
        longest = max(int(each.samples.lengths.max(initial=0)) for each in horizon_of)
        beside += 0 if part.tier is None else REST_BYTES * longest
        n = len(part.samples)

        last: tuple[int, Ints] = (-1, NO_ROWS)

        def ids(b: int) -> Ints:
            nonlocal last
            if b >= n:
                assert ahead is not None
                return ahead.ids(b - n)
            if last[0] != b:  # kept, because first the policy reads a batch's ids, then write()
                last = b, part.ids(b)
            return last[1]

        def begin(horizon: Horizon) -> None:
            if self._begins_anew:
                self.first_rows = horizon.first_rows(planner.capacity) if self._residents is None else self._residents
                planner.start(self.first_rows)

        def write(writer: SectionWriter, number: int, planned: PlannedBatch) -> None:
            positions = write_plan(writer.append, planned, None if packing is None else ids(number))
            if packing is not None:
                packing.planned(number, ids(number).take(positions))
            check()

        announce = None if packing is None else packing.announce
        with time("plan"):
            file = planner.plan(k, lengths, ids, n, first, write, begin=begin, announce=announce, beside=beside)
        return PlanFile(file, Tier.BASE if self._pack is None else Tier.PACKED)

    @staticmethod
    def of(part: PlannedRows, number: int, rows: Int64s, array: Callable[..., npt.NDArray[np.int64]]) -> BatchPlan:
        """Read the plan of a batch that has these rows, in memory of ``array``."""
        assert part.plans is not None
        if part.tier is None:
            return part.plans.plan(number, rows, array)
        on_device, rest = part.tier.split(rows, array)
        return replace(part.plans.plan(number, rest, array), device=on_device)
