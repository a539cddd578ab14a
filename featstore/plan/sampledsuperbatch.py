"""A superbatch between sampling and the loop: its samples, its plans, its extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.devicetier import DeviceTier
from featstore.plan.edgetrace import EdgeTrace
from featstore.plan.overlapped import SuperbatchExtents
from featstore.plan.planfile import PlanFile
from featstore.plan.samples import SampleFile

__all__ = ["SampledSuperbatch"]

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]


@dataclass
class SampledSuperbatch:
    """Batches that are sampled, and then planned.

    ``plans`` are of the rows that ``tier``, the device as they were planned, leaves; ``packed`` has the extents of those that
    are missed. ``edges`` and ``edge_plans``: where the caches of edge features are planned.
    """

    samples: SampleFile
    plans: PlanFile | None = None
    packed: SuperbatchExtents | None = None
    tier: DeviceTier | None = None
    edges: EdgeTrace | None = None
    edge_plans: PlanFile | None = None

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        """Return the rows of a batch that are planned: those that the device leaves."""
        ids: Ints = self.samples.ids(number, array)
        return ids if self.tier is None else self.tier.rest(ids)

    @property
    def lengths(self) -> Int64s:
        """How many rows of each batch are planned; beside a tier, a pass over them."""
        if self.tier is None:
            return self.samples.lengths
        return np.array([len(self.ids(number)) for number in range(len(self.samples))], np.int64)

    def missed(self, number: int) -> Ints:
        """Return the rows that a batch misses, in the plan's order."""
        assert self.plans is not None
        return np.take(self.ids(number), self.plans.missed(number))

    def remove(self) -> None:
        for file in (self.samples, self.plans, self.edges, self.edge_plans, self.packed):
            if file is not None:
                file.remove()
