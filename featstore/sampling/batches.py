"""Which seeds form which batch of an epoch: a pure function of (seeds, options, epoch), whatever strategy runs the batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["EpochOrder", "RandomBatcher", "check_seeds"]


def check_seeds(seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int], num_nodes: int) -> torch.Tensor:
    """Return ``seeds`` as a one-dimensional int64 CPU tensor of distinct nodes; a mask over all nodes gives its true nodes.

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        Not one-dimensional; a seed occurs twice; a mask of another length than the number of nodes.
    IndexError
        A seed is no node; names the first one and its position.
    """
    given = seeds.detach().cpu().numpy() if isinstance(seeds, torch.Tensor) else np.asarray(seeds)
    if given.ndim != 1:
        raise ValueError(f"seeds must be one-dimensional, not of shape {given.shape}")
    if given.dtype.kind == "b":
        if len(given) != num_nodes:
            raise ValueError(f"a mask of seeds must have one entry a node ({num_nodes}), not {len(given)}")
        return torch.from_numpy(np.flatnonzero(given))
    if given.dtype.kind not in "iu" and len(given):
        raise TypeError(f"seeds must be integers, not {given.dtype}")
    bad = np.flatnonzero((given < 0) | (given >= num_nodes))
    if len(bad):
        raise IndexError(f"seed {given[bad[0]]} at position {bad[0]} is not a node: the graph has nodes 0 … {num_nodes - 1}")
    checked = given.astype(np.int64)
    ordered = np.sort(checked)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(f"seed {ordered[twice[0]]} occurs more than once; pass torch.unique(seeds)")
    return torch.from_numpy(checked)


class EpochOrder:
    """The batches of one epoch; immutable."""

    def __init__(self, seeds: torch.Tensor, order: torch.Tensor | None, batch_size: int, n_batches: int, epoch: int) -> None:
        self.epoch = epoch
        self.n_batches = n_batches
        self._seeds = seeds
        self._order = order
        self._batch_size = batch_size

    def __len__(self) -> int:
        return self.n_batches

    def seeds(self, index: int) -> torch.Tensor:
        """Return the seeds of batch ``index``, int64 [≤ batch_size], in memory of their own: samplers may change them."""
        first = index * self._batch_size
        last = min(first + self._batch_size, len(self._seeds))
        if self._order is None:
            return self._seeds[first:last].clone()
        return self._seeds[self._order[first:last]]


class RandomBatcher:
    """Cut seeds into batches, shuffled anew each epoch.

    Parameters
    ----------
    seeds : int64 tensor, shape (n,)
        Distinct nodes.
    batch_size : int
    shuffle : bool
        Order by a generator keyed with (``seed``, epoch); otherwise as given.
    seed : int
        Non-negative.
    drop_last : bool
        Leave out a last batch that is not full.
    """

    def __init__(
        self, seeds: torch.Tensor, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, not {seed}")
        self.seeds = seeds
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last

    def __len__(self) -> int:
        n = len(self.seeds)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    @property
    def order_bytes(self) -> int:
        """Bytes that the order of one epoch takes."""
        return 8 * len(self.seeds) if self.shuffle else 0

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the batches of ``epoch``; the same for the same arguments, in any process."""
        order = None
        if self.shuffle:
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,))))
            order = torch.from_numpy(generator.permutation(len(self.seeds)))
        return EpochOrder(self.seeds, order, self.batch_size, len(self), epoch)
