"""Several ranks of an exchange in one process, each with a third, say, of some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from featstore.budget import Budget
from featstore.distributed.exchange import Exchange, Sizes
from featstore.distributed.owners import Claim, Owners
from featstore.distributed.rows import ShardedRows
from featstore.gather.sources import MemorySource, RowSource

__all__ = ["Ranks", "at_once"]


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls in a thread each, as steps that all ranks take."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


class Ranks:
    """``len(bounds) - 1`` ranks in this process; rank r has the rows from ``bounds[r]`` to ``bounds[r + 1] - 1``.

    ``sources`` are in the places of the ranks' own rows; ``piece_bytes`` and ``n_answers`` size the buffers.
    """

    def __init__(
        self,
        rows: np.ndarray,
        bounds: Sequence[int],
        *,
        sources: dict[int, RowSource] | None = None,
        piece_bytes: int = 4096,
        n_answers: int = 4,
        timeout_s: float = 60.0,
    ) -> None:
        n = len(bounds) - 1
        store = dist.HashStore()
        groups = at_once([lambda r=r: dist.ProcessGroupGloo(store, r, n, timedelta(seconds=60)) for r in range(n)])  # type: ignore[misc]
        sizes = Sizes(rows.shape[1], max(piece_bytes, rows.shape[1]), n_answers, len(rows))
        self.budget = Budget(64 << 20)
        self.exchanges, self.rows = list[Exchange](), list[ShardedRows]()
        hosts = [f"host-{r}" for r in range(n)]
        claims = [Claim(r, hosts[r], bounds[r + 1] - bounds[r], bounds[r], f"rows of {r}") for r in range(n)]
        fingerprint = f"{hash(rows.tobytes()):x}"
        for rank in range(n):
            local = (sources or {}).get(rank) or MemorySource(rows[bounds[rank] : bounds[rank + 1]].copy(), 1)
            exchange = Exchange(groups[rank], rank, hosts, local, sizes, timeout_s, "the rows of 'x'")
            held = self.budget.reserve("sharding 'x'", sizes.bytes_of(n))
            owners = Owners(claims, len(rows))
            self.exchanges.append(exchange)
            self.rows.append(
                ShardedRows("x", owners, rank, local, exchange, sizes.piece_rows, rows.shape[1], fingerprint, self.budget, held)
            )
        for exchange in self.exchanges:
            exchange.start()

    def close(self) -> None:
        at_once([each.close for each in self.rows])
