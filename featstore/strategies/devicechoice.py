"""The rows that a loader keeps on its device: chosen by a static policy, and read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from featstore.cache.base import StaticPolicy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.select import top_rows
from featstore.strategies.accesscounts import AccessCounts
from featstore.strategies.context import Context

__all__ = ["DEVICE_POLICY", "FILL_BYTES", "make_tier"]

FILL_BYTES = 8 << 20  # one read
DEVICE_POLICY = "degree"  # the default


def make_tier(context: Context, policy: StaticPolicy, n_rows: int, go_on: Callable[[], bool] = lambda: True) -> DeviceTier | None:
    """Choose the rows that stay on a loader's device, and read them; None if ``go_on()`` returned False before all were read.

    Raises
    ------
    BudgetError, PluginError, OSError, CorruptionError, RuntimeError
        From choosing or reading; no memory is held then.
    """
    graph = context.graph
    with AccessCounts(context) as counts, graph.policy_inputs(context.nodes.width, counts, rows=context.nodes.rows) as inputs:
        rows = top_rows(inputs.scores(policy), n_rows)
    stores = context.nodes.stores
    shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in stores.items()}
    tier = DeviceTier(rows, shapes, context.device, graph.pool, context.nodes.n, context.copy_threads)
    try:
        for name in stores:
            step = max(1, FILL_BYTES // max(1, context.nodes.row_bytes[name]))
            if not tier.fill(name, step, partial(context.nodes.read, name), go_on):
                tier.close()
                return None
    except BaseException:
        tier.close()
        raise
    return tier
