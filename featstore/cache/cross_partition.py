"""OUTRE's policy for neighbour lists: the requests for a list by batches of other parts, over the cost of keeping it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy
from featstore.config import check_flag

__all__ = ["CrossPartition"]


@register_policy("cross_partition")
class CrossPartition(StaticPolicy):
    """Keep the neighbour lists that batches of other parts ask for most often, by the byte.

    Parameters
    ----------
    per_byte : bool
        Divide by the length of the list, which is the cost of keeping it. False: the plain count, as in the paper.

    Notes
    -----
    A list holds the in-neighbours of its node ``v``. A sampler asks for it when it has drawn ``v`` itself, from the list of a
    node ``w`` that ``v`` has an *out*-edge to. If ``w`` is in the part of ``v``, that happens mostly in batches of this part,
    which follow each other once an epoch. Nodes ``w`` of other parts request the list throughout the epoch. So the score counts
    the out-edges of ``v`` into *other* parts
    (:meth:`KeptParts.cross_out_degree <featstore.graph.savedparts.KeptParts.cross_out_degree>`), not its list's ids from other
    parts. Those ids tell which lists come next, not how often this list is requested. If all edges are stored in both
    directions, the two counts are equal.

    Lists of nodes without in-neighbours are empty: there is nothing to save, so they come last. If every node is a part of its
    own, and there are no self-loops, the score is that of ``in_out_ratio``.

    References
    ----------
    OUTRE, VLDB 2024, section 4.2: the plain count.
    """

    score_bytes = 9
    needs_parts = True

    def __init__(self, per_byte: bool = True) -> None:
        self.per_byte = check_flag("per_byte", per_byte)

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the scores, float64 [n]; -1 where the in-degree is 0."""
        scores = np.full(context.n, -1.0)
        there = context.in_degree > 0
        if self.per_byte:
            np.divide(context.cross_out_degree, context.in_degree, out=scores, where=there)
        else:
            np.copyto(scores, context.cross_out_degree, where=there)
        return scores
