"""``strategy="ondemand"``: sample a batch when its turn comes, and read the rows that the host cache lacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from featstore.cache.base import Policy, get_policy
from featstore.errors import BudgetError
from featstore.gather.executor import Tally
from featstore.graph.policyinputs import Given
from featstore.sampling.batches import EpochOrder
from featstore.strategies.base import EpochRun, Prepared
from featstore.strategies.requests import BatchSize
from featstore.strategies.setup import Setup

__all__ = ["OnDemand"]


class OnDemand:
    """Sample when a batch is asked for, read what the host cache lacks."""

    plans = False

    @staticmethod
    def least_bytes(setup: Setup, batch: BatchSize) -> int:
        """Nothing is held."""
        return 0

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def make_caches(self, sizes: Mapping[str, int], policy: str | Policy | type[Policy], counts: Given, *, on_loan: bool) -> None:
        """See :class:`Strategy`."""
        graph = self._setup.graph
        for name, n_bytes in sizes.items():
            left = n_bytes
            while left > 0:
                try:
                    graph.make_cache(name, left, get_policy(policy), counts=counts, on_loan=on_loan)
                    break
                except BudgetError as error:
                    # Choosing the rows takes memory, too: less for a cache whose size is the loader's choice, or none.
                    if not on_loan:
                        raise
                    left -= max(n_bytes // 8, (error.needed or 0) - graph.budget.total)

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``; nothing is done ahead."""
        return _OnDemandEpoch(self._setup, self._setup.batcher.epoch(epoch))

    def close(self) -> None:
        """Nothing is held."""


class _OnDemandEpoch:
    def __init__(self, setup: Setup, order: EpochOrder) -> None:
        self._setup = setup
        self._order = order

    @property
    def threads(self) -> int:
        return self._setup.threads

    @property
    def has_device_tier(self) -> bool:
        return False

    def batch(self, position: int) -> Prepared:
        with self._setup.watch.time("sample"):
            seeds = self._order.seeds(position)
            return Prepared(self._setup.sampler.sample(seeds, epoch=self._order.epoch, index=position))

    def may_begin(self, position: int) -> bool:
        return True

    def gather(self, name: str, prepared: Prepared, tally: Tally) -> torch.Tensor:
        rows: torch.Tensor = self._setup.graph.features[name].take(prepared.sampled.input_ids, tally=tally)
        return rows

    def passed(self, position: int) -> None:
        pass

    def spare(self) -> bool:
        return False

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass
