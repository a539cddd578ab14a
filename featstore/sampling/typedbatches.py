"""Batches of a user's own whose seeds are of one type of nodes, among those of all types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from featstore.sampling.batches import Batches, DerivedBatches, DerivedSeeds, EpochSeeds
from featstore.sampling.hops import as_ids
from featstore.topology.types import NodeType

__all__ = ["BatchesOfType"]


class BatchesOfType(DerivedBatches):
    """Batches whose seeds are ids within a type of nodes, as batches of ids among those of all types."""

    def __init__(self, batches: Batches, kind: NodeType) -> None:
        super().__init__(batches)
        self.kind = kind

    def __repr__(self) -> str:
        return f"({self.kind.name!r}, {self.made_of!r})"

    def check(self, num_nodes: int) -> None:
        """See :class:`Batches`; the bound is that of the type."""
        self.made_of.check(self.kind.n)

    def digest(self) -> str:
        """See :class:`Batches`."""
        return f"{self.kind.name} {self.made_of.digest()}"

    def epoch(self, epoch: int) -> EpochSeeds:
        """See :class:`Batches`."""
        return _SeedsOfType(self.made_of.epoch(epoch), self.kind)


class _SeedsOfType(DerivedSeeds):
    """The seeds of an epoch's batches, :class:`EpochSeeds`."""

    def __init__(self, order: EpochSeeds, kind: NodeType) -> None:
        super().__init__(order)
        self._kind = kind

    def seeds(self, index: int) -> torch.Tensor:
        return self._among_all(self.made_of.seeds(index))

    def given(self, index: int) -> torch.Tensor:
        return self._among_all(self.made_of.given(index))

    def positions(self, index: int) -> Any:
        return self.made_of.positions(index)

    def _among_all(self, seeds: Any) -> torch.Tensor:
        ids, kind = as_ids(seeds, self._kind.n), self._kind
        bad = np.flatnonzero((ids < 0) | (ids >= kind.n))  # otherwise these would be nodes of another type
        if len(bad):
            raise IndexError(f"seed {ids[bad[0]]} at position {bad[0]} is out of range for {kind.n} nodes of {kind.name!r}")
        return torch.from_numpy(ids + kind.first)
