"""A pack's batches, in the order in which a loader runs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.gather.buffers import BufferPool
from featstore.pack.offline import Pack
from featstore.sampling.batch import SampledBatch
from featstore.sampling.batches import RandomBatches

__all__ = ["PackBatches", "PackEpoch"]


class PackBatches:
    """Batches that were sampled offline: epoch ``e`` is the pack's epoch ``e`` modulo how many it has.

    Parameters
    ----------
    pack : Pack or path-like
        A pack that is opened here is closed by :meth:`close`.
    pool : BufferPool
    shuffle : bool
        Run the groups in a new order each epoch.
    seed : int
    group : int
        Consecutive batches that run together, in their order.
    """

    fanouts: Sequence[int] | None = None
    together = 1  # the largest is known

    def __init__(
        self, pack: Pack | str | os.PathLike[str], pool: BufferPool, shuffle: bool = True, seed: int = 0, group: int = 1
    ) -> None:
        self._is_mine = not isinstance(pack, Pack)
        self.pack = pack if isinstance(pack, Pack) else Pack(pack)
        self._pool, self._shuffle, self._seed, self._group = pool, shuffle, seed, group

    def __repr__(self) -> str:
        return f"PackBatches({self.pack!r}, shuffle={self._shuffle}, seed={self._seed}, group={self._group})"

    def grouped(self, group: int) -> PackBatches:
        """Return these batches with ``group`` of them together."""
        return PackBatches(self.pack, self._pool, self._shuffle, self._seed, group)

    @property
    def batch_size(self) -> int:
        """Seeds a batch; 1 where the sampler that made the pack had batches of its own."""
        return int(self.pack.record["batch_size"] or 1)

    @property
    def most_rows(self) -> int:
        """Nodes of the largest batch."""
        return int(self.pack.lengths.max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of an epoch's order."""
        return 16 * self.pack.n_batches

    def __len__(self) -> int:
        return self.pack.n_batches

    def digest(self) -> str:
        """Return a text that differs for other samples, and for another order."""
        group = self._group if self._shuffle else 0
        text = f"{self.pack.record['samples']} {self._shuffle} {self._seed} {len(self)} {group}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def epoch(self, epoch: int) -> PackEpoch:
        """Return the batches of ``epoch``: groups shuffled, each in its order."""
        n = len(self)
        groups = [np.arange(first, min(first + self._group, n)) for first in range(0, n, max(1, self._group))]
        if self._shuffle and len(groups) > 1:
            shuffled = RandomBatches(torch.arange(len(groups), device="cpu"), 1, seed=self._seed).epoch(epoch)
            groups = [groups[int(shuffled.seeds(k)[0])] for k in range(len(groups))]
        order = np.concatenate(groups) if groups else np.empty(0, np.int64)
        return PackEpoch(self.pack, self._pool, order, epoch % max(1, self.pack.epochs) * n)

    def trim(self) -> None:
        """Nothing is kept between batches."""

    def close(self) -> None:
        """Close the pack, where it was opened here; may be called again."""
        if self._is_mine:
            self.pack.close()


class PackEpoch:
    """One epoch of a pack.

    Attributes
    ----------
    order : integer array, shape (n_batches,)
        The batch of the pack's epoch that runs at each position.
    base : int
        The number in the pack of the epoch's first batch.
    """

    def __init__(self, pack: Pack, pool: BufferPool, order: npt.NDArray[Any], base: int) -> None:
        self._pack, self._pool, self.order, self.base = pack, pool, order, base

    def __len__(self) -> int:
        return len(self.order)

    def sample(self, position: int) -> SampledBatch:
        """Return the batch that runs as number ``position``; its ``index`` is its number in the pack's epoch."""
        return self._pack.batch(self.base + int(self.order[position]), self._pool)
