"""Batches of seeds from few parts of a graph: close seeds share neighbours, so their batch requests fewer rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_at_least, refuse_path
from featstore.graph.savedparts import KeptParts
from featstore.sampling.batches import CutBatches, CutSeeds, check_given, warn_of_none
from featstore.topology.partarrays import by_part, check_parts

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["PartitionBatches", "PartitionEpoch"]

Int64s = npt.NDArray[np.int64]
Parts = str | KeptParts | torch.Tensor | npt.NDArray[Any] | Sequence[int]

# Default macro-batches. Seeds of this many parts train as well as random ones, if the next batch is of other parts.
PARTS = 40
LEAST_PARTS = 36  # a tenth of the parts made may have no seed
# With fewer parts: a macro-batch has this fraction of all parts, and at least this many batches of seeds.
MACRO_FRACTION, MACRO_BATCHES = 1 / 2, 2


class PartitionBatches(CutBatches):
    """Seeds cut into batches, each from a few random parts.

    An epoch takes the parts in a random order, ``macro`` at a time, and shuffles the seeds of each such macro-batch. Batches are
    cut from that order, so left-over seeds go into the first batch of the next macro-batch. Every epoch has the same number of
    batches, and each given seed occurs once.

    Parameters
    ----------
    g : OutOfCoreGraph
        Not kept.
    ids : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Nodes; they may repeat. A batch samples each of its nodes once.
    batch_size : int
        Seeds a batch; at least 1.
    parts : integer array or tensor, shape (num_nodes,), str or KeptParts, optional
        The part of every node; or parts that the dataset keeps, by their name (:meth:`OutOfCoreGraph.parts
        <featstore.OutOfCoreGraph.parts>`). By default the parts that were kept last.
    macro : int or "auto"
        Parts of a macro-batch; only parts with a seed count. Fewer parts share more neighbours, so fewer rows are read. They also
        mix seeds less, which can cost accuracy. ``"auto"``, as None: the parts that hold one batch of seeds on average, if these
        are 36 or more. Otherwise half of all parts, and at least the parts that hold two batches.
    shuffle : bool
        A new order each epoch, drawn by a generator keyed with (``seed``, epoch); otherwise parts ascend, and seeds within each
        are in the order of ``ids``.
    seed : int
        Not negative.
    drop_last : bool
        Leave out a last batch that is not full.

    Attributes
    ----------
    macro : int
        Parts of a macro-batch.
    macro_reason : str
        Reason for this number.

    Raises
    ------
    TypeError, ValueError, IndexError
        Seeds that are not nodes, or zeros and ones that repeat; a number out of range; parts of a wrong length, dtype or range;
        the dataset keeps no parts, or none of that name.
    NotImplementedError
        A graph of several types.
    StaleError
        The parts were made for another adjacency than the dataset has now.
    BudgetError, CorruptionError, OSError
        Reading kept parts failed.

    Notes
    -----
    If the parts are kept with their lists (``keep_lists`` of :func:`featstore.partition`), a loader reads the lists of a
    macro-batch in sequence. Memory: 32 bytes a seed and 40 a part that has seeds; 4 bytes a node while kept parts are read.

    References
    ----------
    OUTRE, VLDB 2024, sections 3.2 and 4.2.

    Examples
    --------
    >>> featstore.partition(g, 40 * len(idx) // 1000, train_idx=idx)
    >>> loader = featstore.Loader(g, sampler, featstore.PartitionBatches(g, idx, batch_size=1000))
    """

    _numbers: Int64s

    def __init__(
        self,
        g: OutOfCoreGraph,
        ids: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        batch_size: int,
        parts: Parts | None = None,
        macro: int | str | None = "auto",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, shuffle, seed, drop_last)
        is_auto = macro is None or (isinstance(macro, str) and macro == "auto")
        if isinstance(macro, str) and not is_auto:
            raise ValueError(f"macro must be a number of parts, or 'auto', not {macro!r}")
        wanted = 1 if is_auto else check_at_least("macro", macro, 1)
        refuse_path(g)
        g.refuse_types("PartitionBatches")
        self.num_nodes = int(g.num_nodes)
        given, self.repeats = check_given(ids, self.num_nodes)
        seeds = given.numpy()
        if parts is None or isinstance(parts, str):
            parts = g.partitions.find(parts)
        self.kept = (parts.name, parts.generation) if isinstance(parts, KeptParts) else None
        part = check_parts(parts.load() if isinstance(parts, KeptParts) else parts, self.num_nodes)
        # Parts without seeds are left out: there may be many of them.
        self.part_numbers, dense = np.unique(part[seeds], return_inverse=True)
        del part
        n_parts = len(self.part_numbers)
        self._offsets, self._numbers = by_part(dense.astype(np.int32), n_parts)
        self.seeds = torch.from_numpy(seeds[self._numbers])
        warn_of_none(len(seeds), self.batch_size, self.drop_last)
        self.macro_reason = "as stated"
        if is_auto:
            wanted, self.macro_reason = _choose(n_parts, len(seeds), self.batch_size)
        self._is_auto, self.macro = is_auto, max(1, min(wanted, n_parts))

    def __repr__(self) -> str:
        macro = f"{self.macro} (auto)" if self._is_auto else self.macro
        options = f"macro={macro}, shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}"
        ids = f"<{len(self.seeds)} ids in {len(self.part_numbers)} parts>"
        return f"PartitionBatches({ids}, batch_size={self.batch_size}, {options})"

    @property
    def nbytes(self) -> int:
        """Bytes of the seeds and their positions, of two epochs' orders, and of the parts."""
        return 32 * len(self.seeds) + 40 * len(self._offsets)

    @property
    def run_length(self) -> int:
        """Consecutive batches whose seeds are from the same parts."""
        n_parts = max(1, len(self._offsets) - 1)
        return max(2, -(-len(self.seeds) * self.macro // (n_parts * self.batch_size)))

    def check(self, num_nodes: int) -> None:
        """See :class:`~featstore.Batches`."""
        if num_nodes != self.num_nodes:
            raise ValueError(f"the batches are of a graph of {self.num_nodes} nodes, not of {num_nodes}")

    def digest(self) -> str:
        """See :class:`~featstore.Batches`."""
        text = f"parts {self.batch_size} {self.macro} {self.shuffle} {self.seed} {self.drop_last} {len(self.seeds)} "
        found = hashlib.blake2b(text.encode(), digest_size=16)
        found.update(self.seeds.numpy().tobytes())
        found.update(self._offsets.tobytes())
        return found.hexdigest()

    def epoch(self, epoch: int) -> PartitionEpoch:
        """See :class:`~featstore.Batches`."""
        parts, order = np.arange(len(self.part_numbers)), None
        if self.shuffle:
            generator = self._generator(epoch)
            parts = generator.permutation(len(parts))
            order = torch.from_numpy(self._order(generator, parts))
        ends = np.cumsum(np.diff(self._offsets)[parts])
        last = np.minimum(np.arange(self.macro, len(parts) + self.macro, self.macro), len(parts)) - 1
        cut = self.seeds, order, self.batch_size, len(self), self.repeats, self._numbers
        return PartitionEpoch(*cut, self.part_numbers[parts], self.macro, ends[last])

    def _order(self, generator: np.random.Generator, parts: Int64s) -> Int64s:
        """Shuffle the positions of an epoch's seeds, macro-batch by macro-batch."""
        starts, lengths = self._offsets[:-1], np.diff(self._offsets)
        order, end = np.empty(len(self.seeds), np.int64), 0
        for first in range(0, len(lengths), self.macro):
            chosen = parts[first : first + self.macro]
            n_seeds = lengths[chosen]
            begin, end = end, end + int(n_seeds.sum())
            there = np.repeat(starts[chosen] - (np.cumsum(n_seeds) - n_seeds), n_seeds) + np.arange(end - begin)
            order[begin:end] = generator.permutation(there)
        return order


def _choose(n_parts: int, n_seeds: int, batch_size: int) -> tuple[int, str]:
    """Choose the default number of parts of a macro-batch, and its reason."""
    n_seeds = max(1, n_seeds)
    of_a_batch, of_two = -(-batch_size * n_parts // n_seeds), -(-MACRO_BATCHES * batch_size * n_parts // n_seeds)
    if of_a_batch >= LEAST_PARTS:
        return of_a_batch, f"one batch of seeds, which is in {of_a_batch} parts"
    better = -(-PARTS * n_seeds // batch_size)
    hint = f"; of {better} parts fewer would do" if better <= n_seeds else ""
    reason = f"half, because a batch of seeds is in {of_a_batch} parts, and fewer than {LEAST_PARTS} cost accuracy{hint}"
    return max(math.ceil(n_parts * MACRO_FRACTION), of_two), reason


class PartitionEpoch(CutSeeds):
    """The batches of one epoch, and the macro-batches that they are cut from; immutable.

    ``parts`` has the numbers of the parts in the epoch's order, ``macro`` of them a macro-batch. ``ends`` has the number of
    seeds up to the end of each macro-batch.
    """

    def __init__(
        self,
        seeds: torch.Tensor,
        order: torch.Tensor | None,
        batch_size: int,
        n_batches: int,
        repeats: bool,
        numbers: Int64s,
        parts: npt.NDArray[np.int32],
        macro: int,
        ends: Int64s,
    ) -> None:
        super().__init__(seeds, order, batch_size, n_batches, repeats, numbers)
        self._parts, self._macro, self._ends = parts, macro, ends

    def __repr__(self) -> str:
        return f"<{len(self)} batches of up to {self._batch_size} seeds, {self._macro} parts at a time>"

    def macro_of(self, index: int) -> int:
        """Find the number of the macro-batch of a batch's middle seed."""
        begin = index * self._batch_size
        end = min(begin + self._batch_size, int(self._ends[-1]))
        return int(np.searchsorted(self._ends, (begin + end) // 2, "right"))

    def parts_of(self, macro: int) -> npt.NDArray[np.int32]:
        """Get the numbers of a macro-batch's parts."""
        return self._parts[macro * self._macro : (macro + 1) * self._macro]
