"""Choice between two ways of reading a hop's lists: in one pass, or only the pages that hold drawn neighbours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore.storage.layout import PAGE_BYTES
from featstore.topology.base import Topology

__all__ = ["ACCESSES", "MAX_DRAWN", "costs_less_drawn", "parse_access"]

Int64s = npt.NDArray[np.int64]

ACCESSES = ("auto", "pass", "random")
MAX_DRAWN = 1 << 18  # ids that are read at once: many times a drive's queue

_PIECE = 1 << 16  # nodes at a time, which bounds temporary arrays


def parse_access(access: str) -> str:
    """Check that ``access`` is one of :data:`ACCESSES`, and return it; ValueError otherwise."""
    if access not in ACCESSES:
        raise ValueError(f"access is one of {', '.join(map(repr, ACCESSES))}, not {access!r}")
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
