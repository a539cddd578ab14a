"""The feature cache that a loader makes: its size, and the counts of a sampled epoch that policies may ask for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from featstore.config import Budget, parse_size
from featstore.errors import BudgetError
from featstore.run.strategy import Setup

__all__ = ["cache_bytes", "count_accesses", "spare_bytes"]


def count_accesses(setup: Setup, budget: Budget, epoch: int = 0) -> npt.NDArray[np.int64]:
    """Sample ``epoch`` without reading features, and return how many of its batches need each row, int64 [num_nodes].

    Raises
    ------
    BudgetError
        The counts do not fit beside what the graph holds.

    References
    ----------
    Pre-sampling: Yang et al., GNNLab, EuroSys 2022; the ``frequency`` cache of DiskGNN, SIGMOD 2025.
    """
    order = setup.batcher.epoch(epoch)
    with budget.reserve("access counts", 8 * setup.graph.num_nodes):
        counts = np.zeros(setup.graph.num_nodes, np.int64)
        for index in range(len(order)):
            counts[setup.sampler.sample(order.seeds(index), epoch=epoch, index=index).input_ids.numpy()] += 1
    return counts


def spare_bytes(setup: Setup, budget: Budget, available: int, row_bytes: int, prefetch: int) -> tuple[int, int]:
    """Sample one batch, and return how many of ``available`` bytes a cache may take, and for how many batches made ahead.

    Where less than half would be left for the cache, fewer batches are made ahead.
    """
    order = setup.batcher.epoch(0)
    if not len(order):
        return available, prefetch
    before = budget.used
    sampled = setup.sampler.sample(order.seeds(0), epoch=0, index=0)
    sample_bytes = budget.used - before  # with the sampler's scratch, which every thread needs
    batch_bytes = len(sampled.input_ids) * row_bytes
    del sampled

    def need(ahead: int) -> int:
        # Batches differ in size by a few percent: an eighth more.
        return (batch_bytes * (1 + ahead) + sample_bytes * (1 + ahead + setup.threads)) * 9 // 8

    while prefetch > 1 and need(prefetch) > available // 2:
        prefetch -= 1
    return max(0, available - need(max(1, prefetch))), prefetch


def cache_bytes(
    size: int | float | str, num_nodes: int, row_bytes: Mapping[str, int], budget: Budget, room: int
) -> dict[str, int]:
    """Return the bytes of the cache of each feature for ``size`` bytes in all, or for a share of the rows: the same rows for
    each.

    Raises
    ------
    ValueError
        Not a size; a share outside 0 … 1.
    BudgetError
        More than the ``room`` that is left; names the least total that would do.
    """
    per_row = sum(row_bytes.values())
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"feature_cache as a share of the rows must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        rows = max(1, round(size * num_nodes)) if num_nodes else 0
    else:
        rows = min(num_nodes, parse_size(size) // max(1, per_row))
    if rows * per_row > room:
        needed = budget.total + rows * per_row - room
        raise BudgetError(
            f"a feature cache of {rows} rows takes {rows * per_row} bytes, and {room} of the {budget.name} budget are left; "
            f"at least {needed} bytes in all would do",
            needed,
        )
    return {name: rows * width for name, width in row_bytes.items()}
