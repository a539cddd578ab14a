"""Look ahead: a few batches are sampled to estimate the rows that a cache will lack, before superbatches are sized."""

from __future__ import annotations

from dataclasses import replace

from featstore.cache.base import get_policy
from featstore.errors import BudgetError
from featstore.estimate.choice import observe
from featstore.estimate.length import Planning
from featstore.estimate.misses import UNKNOWN, MissCurves
from featstore.storage.calls import NO_SPACE
from featstore.strategies.caches import size_caches
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.strategies.profile import Profile, least_batches

__all__ = ["degree_bytes", "look_ahead", "rows_in_memory", "rows_in_use"]


def degree_bytes(context: Context) -> int:
    """Count the bytes of out-degrees: 2 for each node, and 2 for each row if some nodes have no row."""
    nodes = context.nodes
    return 2 * (context.graph.num_nodes + (nodes.n if nodes.rows.kinds else 0))


def rows_in_memory(context: Context, memory: Memory, size: int | float | str | None) -> int:
    """Count the rows of each feature that a loader's cache of ``size`` would hold, beside batches drawn ahead."""
    beside = replace(context.chosen, freed=context.chosen.freed - memory.sampled_ahead)
    sizes, _ = size_caches(replace(context, chosen=beside), memory, size, get_policy("belady"))
    return context.nodes.capacity(sizes)


def rows_in_use(context: Context) -> int:
    """Count the rows that batches may ask for: all, or those of the part that the graph is a view of."""
    part = context.graph.own_part
    return context.nodes.n if part is None else min(context.nodes.n, part.n_nodes)


def look_ahead(context: Context, planning: Planning, capacity: int, *, by_degree: bool) -> tuple[Profile | None, MissCurves, str]:
    """Sample a few batches, which the run then uses, and estimate the share of their rows that a cache will lack.

    Returns the batches, the shares with a margin, and a text, which is empty if all went well. With ``by_degree`` the shares
    include those of a cache by degree. If there is nothing to cache, or if memory or disk does not suffice, the batches are None,
    and all rows count as misses. In the latter case the text is the reason.
    """
    if not len(context.batches) or not context.features or not capacity:
        return None, UNKNOWN, ""
    profile = None
    try:
        profile = Profile(context, planning.run_dir, planning.disk, least_batches(context.batches.run_length))
        graph, n_batches = context.graph, len(context.batches)
        with graph.budget.reserve("cost model", degree_bytes(context) if by_degree else 0):
            degrees = context.nodes.rows.select(graph.short_degrees()) if by_degree else None
            seen = observe(
                profile.trace(), row_bytes=1, capacity=capacity, budget=graph.budget, n_batches=n_batches, out_degree=degrees
            )
        return profile, seen.misses, ""
    except BaseException as error:
        if profile is not None:
            profile.close()
        if isinstance(error, BudgetError):
            return None, UNKNOWN, f"no memory: {error}"
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return None, UNKNOWN, f"no disk: {error.strerror}"
        raise
