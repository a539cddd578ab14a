"""The rows that a loader keeps on its device: chosen by a static policy, and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.base import StaticPolicy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import NO_ROWS
from featstore.cache.select import top_rows
from featstore.strategies.accesscounts import AccessCounts
from featstore.strategies.context import Context

__all__ = ["DEVICE_POLICY", "FILL_BYTES", "make_tiers"]

FILL_BYTES = 8 << 20  # one read
DEVICE_POLICY = "degree"  # the default


def make_tiers(
    context: Context, policy: StaticPolicy, n_rows: Sequence[int], go_on: Callable[[], bool] = lambda: True
) -> tuple[DeviceTier | None, ...] | None:
    """Choose the rows that stay on a loader's device, and read them; None if ``go_on()`` returned False before all were read.

    ``n_rows`` are the rows of the tier for each of ``nodes.each``; without rows there is none.

    Raises
    ------
    BudgetError, PluginError, OSError, CorruptionError, RuntimeError
        From choosing or reading; no memory is held then.
    """
    graph, parts, chosen = context.graph, context.nodes.each, list[npt.NDArray[np.int64]]()
    with AccessCounts(context) as counts:
        for part, n in zip(parts, n_rows, strict=True):
            if n:
                with graph.policy_inputs(part.width, counts, rows=part.rows) as inputs:
                    chosen.append(top_rows(inputs.scores(policy), n))
            else:
                chosen.append(NO_ROWS)
    made = list[DeviceTier | None]()
    with ExitStack() as undo:
        for part, rows in zip(parts, chosen, strict=True):
            if not len(rows):
                made.append(None)
                continue
            shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in part.stores.items()}
            tier = DeviceTier(rows, shapes, context.device, graph.pool, part.n, context.copy_threads)
            undo.callback(tier.close)
            made.append(tier)
            for name, row_bytes in part.row_bytes.items():
                if not tier.fill(name, max(1, FILL_BYTES // max(1, row_bytes)), partial(part.read, name), go_on):
                    return None
        undo.pop_all()
    return tuple(made)
