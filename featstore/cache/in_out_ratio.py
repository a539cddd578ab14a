"""AliGraph's and Ginex's policy: the requests for a neighbour list over the cost of keeping it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["InOutRatio"]


@register_policy("in_out_ratio")
class InOutRatio(StaticPolicy):
    """Keep the nodes of highest out-degree over in-degree.

    Notes
    -----
    A node is sampled about as often as its out-degree says, and its list of in-neighbours is as long as its in-degree. The lists
    of nodes without in-neighbours are empty: there is nothing to save, so they come last instead of first, where a quotient with
    a small denominator would put them.

    References
    ----------
    Zhu et al., "AliGraph", VLDB 2019. Park et al., "Ginex", VLDB 2022: the neighbour cache.
    """

    score_bytes = 9
    from_degrees = True

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the ratios, float64 [n]; -1 where the in-degree is 0."""
        ratio = np.full(context.n, -1.0)
        np.divide(context.out_degree, context.in_degree, out=ratio, where=context.in_degree > 0)
        return ratio
