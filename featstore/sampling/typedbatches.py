"""Batches of a user's own whose seeds are of one type of nodes, among those of all types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from featstore.gather.arrays import id_array
from featstore.sampling.batches import Batches, EpochSeeds
from featstore.topology.types import NodeType

__all__ = ["BatchesOfType"]


class BatchesOfType:
    """Batches whose seeds are ids within a type of nodes, as batches of ids among those of all types.

    All else that the given batches say of themselves, such as ``run_length`` and ``n_seeds``, holds here, too.
    """

    def __init__(self, batches: Batches, kind: NodeType) -> None:
        self.of_type, self.kind = batches, kind

    def __getattr__(self, name: str) -> Any:
        if name in ("of_type", "kind"):  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.of_type, name)

    def __repr__(self) -> str:
        return f"({self.kind.name!r}, {self.of_type!r})"

    def __len__(self) -> int:
        return len(self.of_type)

    def check(self, num_nodes: int) -> None:
        """See :class:`Batches`; the bound is that of the type."""
        self.of_type.check(self.kind.n)

    def digest(self) -> str:
        """See :class:`Batches`."""
        return f"{self.kind.name} {self.of_type.digest()}"

    def epoch(self, epoch: int) -> EpochSeeds:
        """See :class:`Batches`."""
        order = self.of_type.epoch(epoch)
        return _GivenOfType(order, self.kind) if callable(getattr(order, "given", None)) else _SeedsOfType(order, self.kind)


class _SeedsOfType:
    """The seeds of an epoch's batches, :class:`EpochSeeds`."""

    def __init__(self, order: EpochSeeds, kind: NodeType) -> None:
        self._order: Any = order
        self._kind = kind

    def __len__(self) -> int:
        return len(self._order)

    def seeds(self, index: int) -> torch.Tensor:
        return self._among_all(self._order.seeds(index))

    def _among_all(self, seeds: Any) -> torch.Tensor:
        ids, kind = id_array("seeds", seeds).astype(np.int64), self._kind
        bad = np.flatnonzero((ids < 0) | (ids >= kind.n))  # otherwise these would be nodes of another type
        if len(bad):
            raise IndexError(f"seed {ids[bad[0]]} at position {bad[0]} is out of range for {kind.n} nodes of {kind.name!r}")
        return torch.from_numpy(ids + kind.first)


class _GivenOfType(_SeedsOfType):
    """The same, of batches that say where their seeds were given."""

    def given(self, index: int) -> torch.Tensor:
        return self._among_all(self._order.given(index))

    def positions(self, index: int) -> Any:
        return self._order.positions(index)
