"""A pack's batches, in the order in which a loader runs them."""

from __future__ import annotations

import hashlib
import os
from copy import copy

import numpy as np
import numpy.typing as npt
import torch

from featstore.gather.buffers import BufferPool
from featstore.pack.offline import Pack
from featstore.sampling.batches import RandomBatches
from featstore.sampling.sampledbatches import EpochBatches, SampledBatches

__all__ = ["PackBatches"]

Int64s = npt.NDArray[np.int64]


class PackBatches(SampledBatches):
    """Batches that were sampled offline: epoch ``e`` is the pack's epoch ``e`` modulo the pack's number of epochs.

    A pack that this object opens is closed by :meth:`close`, its own or a view's. ``group`` consecutive batches run together, in
    their order. With ``shuffle`` the groups run in a new order each epoch. A rank's share are consecutive batches of each epoch.
    """

    run_length = 1  # the largest batch is known

    def __init__(self, pack: Pack | str | os.PathLike[str], pool: BufferPool, shuffle: bool = True, seed: int = 0) -> None:
        self._is_mine = not isinstance(pack, Pack)
        self.pack = pack if isinstance(pack, Pack) else Pack(pack)
        self._pool, self._shuffle, self._seed, self._group = pool, shuffle, seed, 1
        self._rank = 0
        self.batch_size = int(self.pack.record["batch_size"] or 1)  # 1 if the pack's sampler had its own batches
        self.most_rows = int(self.pack.lengths.max(initial=0))
        self.nbytes = 16 * self.pack.n_batches

    def __repr__(self) -> str:
        share = f", rank {self._rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"PackBatches({self.pack!r}, shuffle={self._shuffle}, seed={self._seed}, group={self._group}){share}"

    def grouped(self, group: int) -> PackBatches:
        """Make a view of these batches in groups of ``group``."""
        found = copy(self)
        found._group = group
        return found

    def share(self, rank: int, world_size: int) -> PackBatches:
        """See :class:`~featstore.SampledBatches`; ValueError unless each rank gets as many batches."""
        n = self.pack.n_batches
        if n % world_size:
            raise ValueError(
                f"{self.pack.path} has {n} batches, of which {world_size} ranks cannot have as many each: sample it with another "
                f"batch_size, or with drop_last=True, so that {world_size} divides their number"
            )
        found = copy(self)
        found._rank, found.world_size = rank, world_size
        return found

    def __len__(self) -> int:
        return self.pack.n_batches // self.world_size

    def digest(self) -> str:
        """Compute a text that differs for other samples, and for another order."""
        group = self._group if self._shuffle else 0
        text = f"{self.pack.record['samples']} {self._shuffle} {self._seed} {len(self)} {group}"  # ranks have the same
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def numbers(self, epoch: int) -> tuple[Int64s, int]:
        """Compute which of the share's batches runs at each position of ``epoch``, and the number of the first in the pack."""
        n = len(self)
        groups = [np.arange(first, min(first + self._group, n)) for first in range(0, n, max(1, self._group))]
        if self._shuffle and len(groups) > 1:
            shuffled = RandomBatches(torch.arange(len(groups), device="cpu"), 1, seed=self._seed).epoch(epoch)
            groups = [groups[int(shuffled.seeds(k)[0])] for k in range(len(groups))]
        order = np.concatenate(groups) if groups else np.empty(0, np.int64)
        return order, epoch % max(1, self.pack.epochs) * self.pack.n_batches + self._rank * n

    def sampled(self, epoch: int) -> EpochBatches:
        """See :class:`~featstore.SampledBatches`; a batch's ``index`` is its number in the pack's epoch."""
        order, base = self.numbers(epoch)
        return EpochBatches(len(order), lambda position: self.pack.batch(base + int(order[position]), self._pool))

    def close(self) -> None:
        """Close the pack if this object opened it; may be called again."""
        if self._is_mine:
            self.pack.close()
