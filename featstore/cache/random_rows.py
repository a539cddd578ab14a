"""Rows drawn at random: the baseline that every other policy has to beat."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["RandomRows"]


@register_policy("random")
class RandomRows(StaticPolicy):
    """Keep rows drawn uniformly, the same ones for the same ``context.seed``."""

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return uniform draws, float64 [n]."""
        return np.random.Generator(np.random.Philox(context.seed)).random(context.n)
