"""DiskGNN's policy: the rows that a profiled run used most."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["Frequency"]


@register_policy("frequency")
class Frequency(StaticPolicy):
    """Keep the rows with the most accesses in the samples at hand: no static choice loads fewer rows over those samples.

    References
    ----------
    Liu et al., "DiskGNN: Bridging I/O Efficiency and Model Accuracy for Out-of-Core GNN Training", SIGMOD 2025, section 3.
    """

    score_bytes = 0
    needs_counts = True

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the access counts, integer [n]."""
        return context.counts
