"""OUTRE's policy of the features' cache: the rows whose reads it saves most."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["SavedReads"]


@register_policy("saved_io")
class SavedReads(StaticPolicy):
    """Keep the rows that save most I/O: each access of a profiled epoch saves the read of one row.

    So it keeps what ``"frequency"`` keeps. Through a loader with a history, accesses are those of its pruned batches.

    References
    ----------
    Sheng et al.: OUTRE, VLDB 2024, section 4.4.
    """

    score_bytes = 0

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the access counts, integer [n]."""
        return context.counts
