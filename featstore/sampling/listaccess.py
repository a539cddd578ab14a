"""Choice between two ways of reading a hop's lists: in one pass, or only the pages that hold drawn neighbours."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featstore._core.epochs import Draws
from featstore.config import listed
from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import Topology

__all__ = ["ACCESSES", "MAX_DRAWN", "ListAccess", "Run", "costs_less_drawn", "parse_access"]

Int64s = npt.NDArray[np.int64]

ACCESSES = ("auto", "pass", "random")
MAX_DRAWN = 1 << 18  # ids that are read at once: many times a drive's queue

_PIECE = 1 << 16  # nodes at a time, which bounds temporary arrays


def parse_access(access: str) -> str:
    """Check that ``access`` is one of :data:`ACCESSES`, and return it; ValueError otherwise."""
    if access not in ACCESSES:
        raise ValueError(f"access is one of {listed(ACCESSES)}, not {access!r}")
    return access


def costs_less_drawn(topology: Topology, nodes: Int64s, n_targets: Int64s, fanouts: list[int]) -> bool:
    """Tell whether reading the pages of drawn ids costs less than a pass over the lists.

    ``nodes`` ascend, are distinct, and draw ``n_targets`` times each in every hop of these ``fanouts``. Costs are in bytes; the
    start of a read counts as the bytes that the drive reads meanwhile, which is measured. Of a list of ``p`` pages, ``m`` draws
    touch ``p * (1 - (1 - 1 / p) ** m)`` on average. The estimate assumes that no read serves several lists, so short lists are
    read by a pass.
    """
    if -1 in fanouts:
        return False  # whole lists are taken
    each = PAGE_BYTES + topology.gap_bytes
    whole, found = topology.pass_cost(nodes), topology.lookup_cost(nodes)
    if found + each * len(nodes) >= whole:
        return False
    cost = float(found)
    for first in range(0, len(nodes), _PIECE):
        part = slice(first, first + _PIECE)
        starts, degrees = topology.offsets(nodes[part])
        pages = np.maximum((starts + degrees) * topology.id_bytes - 1, 0) // PAGE_BYTES - starts * topology.id_bytes // PAGE_BYTES
        n_drawn = n_targets[part] * sum(np.minimum(degrees, fanout) for fanout in fanouts)
        pages = np.maximum(pages + 1, 1)
        cost += each * float((pages * -np.expm1(n_drawn * np.log1p(-1 / np.maximum(pages, 1 + 1e-9)))).sum())
        if cost >= whole:
            return False
    return True


@dataclass(frozen=True)
class Run:
    """Lists number ``first … stop - 1`` of those that have targets: of one type of edges, with what draws from them."""

    first: int
    stop: int
    draws: Draws
    fanouts: list[int]  # of the hops in which they are drawn from


@dataclass(frozen=True)
class ListAccess:
    """The choice for each part of the lists that have targets; ``access`` is one of :data:`ACCESSES`.

    Lists are read in ranges of ``2**shift`` of them.
    """

    topology: Topology
    access: str
    shift: int

    def ways(
        self, runs: list[Run], wanted: Int64s, missing: Int64s | None, n_targets: Int64s
    ) -> tuple[list[slice], list[tuple[Run, slice]]]:
        """Divide lists that are not in memory by how they are read.

        Returns parts of them to be read in passes, and parts of which the drawn ids are read alone. A pass also reads unwanted
        lists between wanted ones, so it does not go beyond a range. Within the range, one pass serves all types of edges.
        """
        shift, passed, alone = self.shift, list[slice](), list[tuple[Run, slice]]()
        for run in runs:
            ends = (run.first, run.stop) if missing is None else np.searchsorted(missing, (run.first, run.stop)).tolist()
            whole = slice(*ends)
            if whole.start == whole.stop:
                continue
            if self._reads_drawn(wanted[whole], n_targets[whole], run.fanouts):
                alone.append((run, whole))
                continue
            ranges = wanted[whole] >> shift
            cuts = [whole.start, *(np.flatnonzero(np.diff(ranges)) + (whole.start + 1)).tolist(), whole.stop]
            for part in (slice(*each) for each in itertools.pairwise(cuts)):
                if len(cuts) > 2 and self._reads_drawn(wanted[part], n_targets[part], run.fanouts):
                    alone.append((run, part))
                elif passed and passed[-1].stop == part.start and wanted[part.start - 1] >> shift == wanted[part.start] >> shift:
                    passed[-1] = slice(passed[-1].start, part.stop)
                else:
                    passed.append(part)
        return passed, alone

    def _reads_drawn(self, wanted: Int64s, n_targets: Int64s, fanouts: list[int]) -> bool:
        """Tell whether ids are drawn first and read alone, instead of reading their lists."""
        if self.access != "auto":
            return self.access == "random"
        return costs_less_drawn(self.topology, wanted, n_targets, fanouts)
