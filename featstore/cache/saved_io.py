"""OUTRE's policy: the rows, or the neighbour lists, that save the most reads."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from featstore.cache.base import PolicyContext, StaticPolicy, register_policy

__all__ = ["SavedReads"]


@register_policy("saved_io")
class SavedReads(StaticPolicy):
    """Keep the rows or neighbour lists that save the most I/O per byte.

    Each access of a profiled epoch saves the read of one row, so the policy keeps the same rows as ``"frequency"``. Through a
    loader with a history, accesses are those of its pruned batches. Each edge drawn from a list saves equally much, and a list
    takes room for its length and its ids. So the policy keeps the neighbour lists with the most edges drawn for that room.

    References
    ----------
    Sheng et al.: OUTRE, VLDB 2024, section 4.4.
    """

    score_bytes = 0
    list_score_bytes = 16
    needs_counts = True

    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return the access counts, integer [n]."""
        return context.counts

    def list_scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Divide the edges drawn from each node's list by the list's length plus one, float64 [n]."""
        scores: npt.NDArray[Any] = context.counts / (context.in_degree + 1)
        return scores
