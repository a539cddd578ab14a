"""PaGraph's policy: a node of high out-degree is an in-neighbour of many, and so is sampled often."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["Degree"]


@register_policy("degree")
class Degree(StaticPolicy):
    """Keep the nodes of highest out-degree.

    References
    ----------
    Bai et al., "Efficient Data Loader for Fast Sampling-Based GNN Training on Large Graphs" (PaGraph), TPDS 2021, section 3.1.
    """

    score_bytes = 0
    from_degrees = True

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the out-degrees, integer [n]."""
        return context.out_degree
