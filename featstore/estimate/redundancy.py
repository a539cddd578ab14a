"""Redundancy: the rows requested per seed, for several ways of making batches and of sampling them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from featstore.config import check_at_least
from featstore.graph.savedparts import KeptParts
from featstore.partitioning.assign import partition
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches, RandomBatches, check_seeds
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.partitionbatches import PartitionBatches

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["N_BATCHES", "Redundancy", "Requested", "redundancy"]

N_BATCHES = 32  # of an epoch that are counted
RANGES_A_BATCH = 2  # contiguous ranges that hold a batch of seeds


@dataclass(frozen=True)
class Requested:
    """Seeds and rows of the counted batches, for one way of making batches (``batches``) and one ``sampler``.

    ``batches`` is ``"random"``, ``"ranges"`` or ``"partition"``; with the last, ``parts`` names the kept parts. ``macro`` is the
    number of parts of a macro-batch, None with ``"random"``. ``n_rows`` is the sum of each batch's distinct rows.
    """

    batches: str
    parts: str | None
    macro: int | None
    sampler: str
    n_seeds: int
    n_rows: int

    @property
    def label(self) -> str:
        """The way of making batches, with the name of the parts."""
        return self.batches if self.parts is None else f"parts {self.parts}"

    @property
    def ratio(self) -> float:
        """Rows requested a seed: the redundancy ratio."""
        return self.n_rows / self.n_seeds


@dataclass(frozen=True)
class Redundancy:
    """Rows requested per seed, for each way of making and sampling batches.

    ``n_counted`` of an epoch's ``n_batches`` were counted. The first of ``ways`` is of random batches, and the others are
    compared with it. ``skipped``: kept parts that cannot be used, and the reason.
    """

    n: int
    n_seeds: int
    batch_size: int
    n_batches: int
    n_counted: int
    ways: list[Requested]
    skipped: dict[str, str]

    def against(self, way: Requested) -> float:
        """Divide the rows per seed of a way by those of the first way."""
        return way.ratio / self.ways[0].ratio

    def epoch_rows(self, way: Requested) -> int:
        """Compute the rows that a way requests in an epoch, at the rate of the counted batches."""
        return round(way.ratio * self.n_seeds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.n,
            "seeds": self.n_seeds,
            "batch_size": self.batch_size,
            "batches": self.n_batches,
            "counted": self.n_counted,
            "ways": [
                {
                    "batches": way.batches,
                    "parts": way.parts,
                    "macro": way.macro,
                    "sampler": way.sampler,
                    "seeds": way.n_seeds,
                    "rows": way.n_rows,
                    "rows_a_seed": way.ratio,
                    "against_first": self.against(way),
                    "epoch_rows": self.epoch_rows(way),
                }
                for way in self.ways
            ],
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """Format the ways as text: a line a way, with its rows per seed compared with the first way."""
        whole = self.n_counted == self.n_batches
        which = "all" if whole else f"{self.n_counted:,} of {self.n_batches:,}"
        spread = "" if whole else ", spread over an epoch"
        heads = ("batches", "parts a macro-batch", "sampler", "rows a seed", "against the first", "rows an epoch")
        first, cells = self.ways[0], []
        for way in self.ways:
            change = "" if way is first else f"{self.against(way) - 1:+.1%}"
            rows = f"{'' if whole else 'about '}{self.epoch_rows(way):,}"
            cells.append(
                (way.label, "" if way.macro is None else f"{way.macro:,}", way.sampler, f"{way.ratio:.2f}", change, rows)
            )
        widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]

        def line(texts: Sequence[str]) -> str:
            aligned = (
                text.ljust(width) if i in (0, 2) else text.rjust(width)
                for i, (text, width) in enumerate(zip(texts, widths, strict=True))
            )
            return "  ".join(aligned).rstrip()

        lines = [
            f"{self.n:,} nodes; {self.n_seeds:,} seeds in {self.n_batches:,} batches of {self.batch_size:,}",
            f"rows requested by {which} batches{spread}, by the seeds of these batches",
            "",
            line(heads),
            *map(line, cells),
        ]
        lines += [f"not counted: parts {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def redundancy(
    g: OutOfCoreGraph,
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int],
    batch_size: int,
    samplers: Mapping[str, Sampler],
    *,
    parts: Sequence[str] | None = None,
    macro: int | None = None,
    seed: int = 0,
    n_batches: int | None = N_BATCHES,
    on_batch: Callable[[int, int], None] | None = None,
) -> Redundancy:
    """Count the rows requested per seed, for several ways of making batches and of sampling them.

    Batches are made at random, from contiguous ranges of ids, and from each partition that the dataset keeps. Each way is
    sampled with each sampler, in the caller's thread. No feature is read.

    Parameters
    ----------
    g : OutOfCoreGraph
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Distinct nodes, at least one.
    batch_size : int
        Seeds a batch; at least 1.
    samplers : mapping of str to Sampler
        Samplers by name, at least one. All results are compared with the first sampler's on random batches.
    parts : sequence of str, optional
        Names of kept parts. By default all that were made for the dataset's present adjacency; others are in ``skipped``.
    macro : int, optional
        Parts of a macro-batch, for all :class:`~featstore.PartitionBatches`.
    seed : int
        Seed of the order of the batches.
    n_batches : int, optional
        Batches counted for each way, evenly spread over the first epoch. None: all batches.
    on_batch : callable (done, total), optional
        Called after every batch, with the numbers of batches done and of all batches, over all ways.

    Notes
    -----
    A short last batch has few seeds and many rows for each. The ratio is that of the sums over batches, as in the paper, so such
    a batch weighs by its seeds. Contiguous ranges are parts with half a batch of seeds each, on average. The result is a function
    of the graph and the arguments. ``batch_dependency`` of :class:`~featstore.LaborSampler` also makes batches share rows with
    earlier ones: simulate a cache to see that (:func:`~featstore.estimate.misscurve.miss_curve`).

    References
    ----------
    OUTRE, VLDB 2024, section 3.1, equation 2, and tables 2 and 3.

    Examples
    --------
    >>> found = redundancy(g, idx, 1000, {"neighbor": featstore.NeighborSampler(g, [10, 10])})
    >>> print(found.table())
    """
    batch_size, seed = check_at_least("batch_size", batch_size, 1), check_at_least("seed", seed, 0)
    if macro is not None:
        macro = check_at_least("macro", macro, 1)
    if n_batches is not None:
        n_batches = check_at_least("n_batches", n_batches, 1)
    if not samplers:
        raise ValueError("no samplers: give at least one")
    ids = check_seeds(seeds, g.num_nodes)
    if not len(ids):
        raise ValueError("no seeds: rows requested a seed are counted for at least one")
    checked = {name: checked_sampler(sampler, g.num_nodes, g) for name, sampler in samplers.items()}
    kept, skipped = _kept(g, parts)
    n_epoch = -(-len(ids) // batch_size)
    n_counted = n_epoch if n_batches is None else min(n_epoch, n_batches)
    total, done = n_counted * len(checked) * (2 + len(kept)), 0
    ways: list[Requested] = []
    for kind, each in [("random", None), ("ranges", None), *(("partition", each) for each in kept)]:
        with _batches(g, kind, each, ids, batch_size, macro, seed) as batches:
            order = batches.epoch(0)
            for sampler_name, sampler in checked.items():
                n_seeds = n_rows = 0
                for index in _spread(n_epoch, n_counted):
                    sampled = sampler.sample(order.seeds(index), epoch=0, index=index)
                    n_seeds += sampled.n_seeds
                    n_rows += len(sampled.input_ids)
                    del sampled  # so that the next batch can take its memory
                    done += 1
                    if on_batch is not None:
                        on_batch(done, total)
                name, of = None if each is None else each.name, getattr(batches, "macro", None)
                ways.append(Requested(kind, name, of, sampler_name, n_seeds, n_rows))
    return Redundancy(g.num_nodes, len(ids), batch_size, n_epoch, n_counted, ways, skipped)


def _kept(g: OutOfCoreGraph, names: Sequence[str] | None) -> tuple[list[KeptParts], dict[str, str]]:
    """Select the kept parts to count; return them, and the reason for each skipped one."""
    if names is not None:
        return [g.partitions.find(name) for name in names], {}
    there = {name: each for name, each in g.parts().items() if each.hops is None}
    stale = "made for another adjacency than the dataset has now; partition it again"
    skipped = {name: stale for name, each in there.items() if each.is_stale}
    return [each for name, each in there.items() if name not in skipped], skipped


@contextmanager
def _batches(
    g: OutOfCoreGraph, kind: str, kept: KeptParts | None, ids: torch.Tensor, batch_size: int, macro: int | None, seed: int
) -> Iterator[Batches]:
    """Make batches, and reserve their memory inside the ``with`` block."""
    batches: Batches
    if kind == "random":
        batches = RandomBatches(ids, batch_size, seed=seed)
    elif kept is None:
        n_parts = max(1, RANGES_A_BATCH * len(ids) // batch_size)
        ranges = partition(g, n_parts, "ranges", keep=False, progress=False)
        batches = PartitionBatches(g, ids, batch_size, ranges, macro, seed=seed)
        del ranges
    else:
        batches = PartitionBatches(g, ids, batch_size, kept, macro, seed=seed)
    with g.budget.reserve("loader order", batches.nbytes):
        yield batches


def _spread(n: int, n_chosen: int) -> list[int]:
    """Choose ``n_chosen`` of ``n`` positions, each in the middle of an equal share."""
    return [(2 * k + 1) * n // (2 * n_chosen) for k in range(n_chosen)]
