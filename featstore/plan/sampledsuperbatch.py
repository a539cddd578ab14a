"""A superbatch on its way from sampling to the loop: its samples, plans and extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.devicetier import DeviceTier
from featstore.plan.edgetrace import EdgeTrace
from featstore.plan.planfile import PlanFile
from featstore.plan.samples import SampleFile
from featstore.plan.superbatchextents import SuperbatchExtents
from featstore.plan.trace import lengths_of
from featstore.topology.noderows import NodeRows

__all__ = ["PlannedEdges", "PlannedRows", "SampledSuperbatch"]

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]


@dataclass
class PlannedRows:
    """The rows of a superbatch's batches in features that have the same rows, and their plans, made later.

    ``rows`` are those of the nodes. ``tier`` holds the device's rows at the time of planning; ``plans`` cover all other rows.
    ``packed`` has the extents of the missed rows.
    """

    samples: SampleFile
    rows: NodeRows
    plans: PlanFile | None = None
    packed: SuperbatchExtents | None = None
    tier: DeviceTier | None = None
    _counted: tuple[DeviceTier | None, Int64s] | None = field(default=None, init=False)  # the lengths beside this tier

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        """Return the rows of a batch that plans cover: all but the device's."""
        rows = self.rows.stored(self.samples.ids(number, array), array)
        return rows if self.tier is None else self.tier.rest(rows)

    @property
    def lengths(self) -> Int64s:
        """Number of rows of each batch that plans cover. With a tier, or types of nodes, the first use passes over all rows."""
        if self.tier is None and not self.rows.kinds:
            return self.samples.lengths
        if self._counted is None or self._counted[0] is not self.tier:
            self._counted = self.tier, lengths_of(self.ids, len(self.samples))
        return self._counted[1]

    def missed(self, number: int) -> Ints:
        """Return the rows that a batch misses, in the plan's order."""
        assert self.plans is not None
        return np.take(self.ids(number), self.plans.missed(number))

    def remove(self) -> None:
        for file in (self.plans, self.packed):
            if file is not None:
                file.remove()


@dataclass
class PlannedEdges:
    """The edges of a superbatch's batches, of one type, and the plans of the caches of their features, made later."""

    trace: EdgeTrace
    plans: PlanFile | None = None

    def remove(self) -> None:
        self.trace.remove()
        if self.plans is not None:
            self.plans.remove()


@dataclass
class SampledSuperbatch:
    """The batches of a superbatch: sampled, and planned later.

    ``parts`` are the rows of features, those of features with the same rows together. ``edges`` are those of each type of edges
    of which caches of features are planned, too.
    """

    samples: SampleFile
    parts: list[PlannedRows] = field(default_factory=list)
    edges: list[PlannedEdges] = field(default_factory=list)

    def remove(self) -> None:
        self.samples.remove()
        for edges in self.edges:
            edges.remove()
        for part in self.parts:
            part.remove()
