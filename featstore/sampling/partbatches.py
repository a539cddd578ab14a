"""Batches of self-reliant parts: each of several processes trains on the seeds of its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.graph.savedparts import KeptParts
from featstore.graph.selfreliant import SelfReliantParts
from featstore.sampling.batches import CutBatches, CutSeeds, check_seeds, underlying, warn_of_none
from featstore.topology.part import Part

__all__ = ["PartBatches", "check_part", "check_parts_of_ranks"]

Int64s = npt.NDArray[np.int64]


class PartBatches(CutBatches):
    """Seeds cut into batches by self-reliant parts: those of part ``r`` for rank ``r`` of a :class:`~featstore.Loader`.

    All ranks have as many batches. Each divides its own seeds evenly, shuffled among themselves, so that sizes of a rank's
    batches differ by one at most. There must be as many ranks as parts.

    Parameters
    ----------
    parts : SelfReliantParts or KeptParts
        Made by :func:`featstore.partition` with ``hops``, which must be at least the hops of the sampler.
    ids : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Distinct training nodes of these parts; all of them, or some.
    batch_size : int
        Most seeds of a batch; at least 1.
    shuffle : bool
        A new order each epoch, drawn by a generator keyed with (``seed``, epoch); otherwise the order of ``ids``.
    seed : int
        Not negative.
    drop_last : bool
        Only batches of ``batch_size`` seeds, as many as the part with the fewest seeds has.

    Raises
    ------
    TypeError, ValueError, IndexError
        Seeds that are not nodes, repeat, or are no training nodes of the parts; a number out of range; parts of all nodes; a part
        with fewer seeds than there are batches.
    StaleError, BudgetError, CorruptionError, OSError
        Kept parts are stale, or reading them failed.

    Notes
    -----
    Memory: 40 bytes a seed.

    References
    ----------
    PaGraph, TPDS 2021, sections 3.2 and 4.

    Examples
    --------
    >>> parts = featstore.partition(g, 4, "ldg", idx, hops=2)
    >>> loader = featstore.Loader(g, sampler, featstore.PartBatches(parts, idx, 1024), rank=0, world_size=4)
    """

    run_length = 1
    repeats = False
    _numbers: Int64s

    def __init__(
        self,
        parts: SelfReliantParts | KeptParts,
        ids: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, shuffle, seed, drop_last)
        if isinstance(parts, KeptParts):
            parts = parts.self_reliant()
        if not isinstance(parts, SelfReliantParts):
            raise TypeError(f"parts must be self-reliant, of featstore.partition with hops=, not a {type(parts).__name__}")
        self.n_parts, self.hops, self.num_nodes = parts.n_parts, parts.hops, parts.num_nodes
        seeds = check_seeds(ids, parts.num_nodes).numpy()
        part = _parts_of(parts, seeds)
        self._numbers = np.argsort(part, kind="stable")
        self._offsets = np.searchsorted(part[self._numbers], np.arange(parts.n_parts + 1))
        self.seeds = torch.from_numpy(seeds[self._numbers])
        sizes = np.diff(self._offsets)
        fewest, most = int(sizes.min()), int(sizes.max())
        self._n_steps = fewest // self.batch_size if self.drop_last else -(-most // self.batch_size)
        if not self.drop_last and fewest < self._n_steps:
            remedy = f", or batch_size={-(-most // fewest)} or more" if fewest else ""
            raise ValueError(
                f"part {int(sizes.argmin())} has {fewest} of the seeds, fewer than the {self._n_steps} batches of each rank: "
                f"give more of its training nodes{remedy}"
            )
        warn_of_none(fewest, self.batch_size, self.drop_last)

    def __repr__(self) -> str:
        options = f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}"
        ids = f"<{len(self.seeds)} ids in {self.n_parts} parts>"
        return f"PartBatches({ids}, batch_size={self.batch_size}, {options})"

    def __len__(self) -> int:
        """Batches of all ranks; number ``p * n_parts + r`` is batch ``p`` of part ``r``."""
        return self._n_steps * self.n_parts

    @property
    def nbytes(self) -> int:
        """Bytes of the seeds and their positions, of two epochs' orders, and of the parts."""
        return 40 * len(self.seeds) + 8 * len(self._offsets)

    def check(self, num_nodes: int) -> None:
        """See :class:`~featstore.Batches`."""
        if num_nodes != self.num_nodes:
            raise ValueError(f"the parts are of a graph of {self.num_nodes} nodes, not of {num_nodes}")

    def digest(self) -> str:
        """See :class:`~featstore.Batches`."""
        text = f"self-reliant {self.batch_size} {self.shuffle} {self.seed} {self.drop_last} {len(self.seeds)} "
        found = hashlib.blake2b(text.encode(), digest_size=16)
        found.update(self.seeds.numpy().tobytes())
        found.update(self._offsets.tobytes())
        return found.hexdigest()

    def epoch(self, epoch: int) -> PartEpoch:
        """See :class:`~featstore.Batches`."""
        order = None
        if self.shuffle:
            generator = self._generator(epoch)
            sizes = np.diff(self._offsets)
            shuffled = [begin + generator.permutation(n) for begin, n in zip(self._offsets[:-1], sizes, strict=True)]
            order = torch.from_numpy(np.concatenate(shuffled))
        return PartEpoch(self.seeds, order, self.batch_size, self._n_steps, self._numbers, self._offsets, self.drop_last)


def _parts_of(parts: SelfReliantParts, seeds: Int64s) -> Int64s:
    """Look up the part of each seed; ValueError for the first one that has none."""
    nodes = parts.train_nodes.numpy()
    ascending = np.argsort(nodes)
    at = np.searchsorted(nodes, seeds, sorter=ascending)
    where = ascending[np.minimum(at, len(nodes) - 1)] if len(nodes) else np.zeros(len(seeds), np.int64)
    bad = np.flatnonzero(nodes[where] != seeds) if len(nodes) else np.arange(len(seeds))
    if len(bad):
        raise ValueError(f"seed {seeds[bad[0]]} at position {bad[0]} is no training node of the parts")
    return np.searchsorted(parts.offsets, where, side="right") - 1


class PartEpoch(CutSeeds):
    """The batches of one epoch, of all parts in turn; immutable."""

    def __init__(
        self,
        seeds: torch.Tensor,
        order: torch.Tensor | None,
        batch_size: int,
        n_steps: int,
        numbers: Int64s,
        offsets: Int64s,
        is_cut: bool,
    ) -> None:
        super().__init__(seeds, order, batch_size, n_steps * (len(offsets) - 1), numbers=numbers)
        self._offsets, self._n_steps, self._is_cut = offsets, n_steps, is_cut

    def _places(self, index: int) -> Int64s:
        step, part = divmod(index, len(self._offsets) - 1)
        begin, n = int(self._offsets[part]), int(self._offsets[part + 1] - self._offsets[part])
        if self._is_cut:
            first, last = step * self._batch_size, (step + 1) * self._batch_size
        else:
            first, last = step * n // self._n_steps, (step + 1) * n // self._n_steps
        first, last = begin + first, begin + last
        return np.arange(first, last) if self._order is None else self._order.numpy()[first:last]


def check_part(graph: Any, batches: Any, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError if a loader's graph is another part than the rank's, or has fewer hops than are sampled.

    IndexError: a seed is not in the part, or is so near its border that the sampler would leave the part. Batches that do not
    say which seeds they have, and shares of a fixed order, are not checked here: samplers check them batch by batch.
    """
    part: Part | None = graph.own_part
    if part is None:
        return
    if hasattr(sampler, "reach"):
        part.check_hops(sampler.reach, type(sampler).__name__)
    cut, n_hops = underlying(batches), int(getattr(sampler, "reach", 0))
    if isinstance(cut, PartBatches):
        if part.number != rank:
            raise ValueError(f"PartBatches: rank {rank} trains on the seeds of part {rank}, and the graph is {part}")
        cut.check_in(part, n_hops, slice(int(cut._offsets[rank]), int(cut._offsets[rank + 1])))
    elif isinstance(cut, CutBatches) and (cut.shuffle or world_size == 1):
        cut.check_in(part, n_hops)


def check_parts_of_ranks(batches: Any, world_size: int, fanouts: Sequence[int] | None) -> None:
    """Raise ValueError if batches of self-reliant parts are for another number of ranks, or for fewer hops than are sampled."""
    parts = underlying(batches)
    if not isinstance(parts, PartBatches):
        return
    if world_size != parts.n_parts:
        raise ValueError(f"PartBatches of {parts.n_parts} parts are for {parts.n_parts} ranks, not for world_size={world_size}")
    if fanouts is not None and len(fanouts) > parts.hops:
        raise ValueError(
            f"PartBatches: the parts have in-neighbours of hops={parts.hops}, and the sampler draws {len(fanouts)} hops: make "
            f"parts with hops={len(fanouts)}"
        )
