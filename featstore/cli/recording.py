"""Recording what training would ask for: a trace of one epoch, without reading a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from featstore.cli.splits import no_seeds, split_seeds
from featstore.graph.progress import make_bar
from featstore.plan.trace import Trace, record
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches, check_seeds
from featstore.sampling.drawn import EpochBatches, SampledBatches
from featstore.storage.rundir import DiskBudget

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["TracedBatches", "record_epoch", "seeds_of"]


class TracedBatches(SampledBatches):
    """The batches of a trace, as far as strategies ask of them before a run: how many, and how large."""

    together = 1

    def __init__(self, n_batches: int, n_rows: int, batch_size: int) -> None:
        self._n_batches, self.most_rows, self.batch_size = n_batches, n_rows, batch_size

    def __len__(self) -> int:
        return self._n_batches

    def digest(self) -> str:
        """No two traces are told apart."""
        return ""

    def sampled(self, epoch: int) -> EpochBatches:
        """A trace has no blocks."""
        raise NotImplementedError("a trace has the ids of batches, not their blocks")


def seeds_of(g: OutOfCoreGraph, labels: str, name: str | None = None) -> torch.Tensor:
    """Return the nodes that training would begin its batches with; ValueError, which says what to do, where there are none.

    Nodes without a label are left out (:func:`split_seeds`). ``name`` is other node data with the seeds themselves, ids or a
    mask, whatever their labels.
    """
    there = f"it has {sorted(g.node_data)}"
    if name is not None:
        if name not in g.node_data:
            raise ValueError(f"--seeds: the dataset has no node data {name!r}; {there}")
        return check_seeds(g.node_data[name], g.num_nodes)
    if labels not in g.node_data:
        raise ValueError(f"labels: the dataset has no {labels!r}; {there}. Name others with --labels, or nodes with --seeds")
    seeds = split_seeds(g, "train", labels)
    if seeds is None or not len(seeds):
        raise ValueError(f"{no_seeds(seeds, g.node_data)}. Name other nodes with --seeds")
    return check_seeds(seeds, g.num_nodes)


def record_epoch(
    g: OutOfCoreGraph,
    sampler: Sampler,
    batches: Batches,
    path: str,
    *,
    max_batches: int | None = None,
    disk: DiskBudget | None = None,
    progress: bool = False,
) -> Trace:
    """Sample the first epoch as a :class:`~featstore.Loader` of these batches would, and write its rows to a new trace file."""
    with g.budget.reserve("loader order", batches.nbytes):
        order = batches.epoch(0)
        numbers = range(len(order) if max_batches is None else min(len(order), max_batches))
        shown = make_bar(numbers, desc="sampling", unit="batch", leave=False) if progress else numbers
        return record(sampler, (order.seeds(index) for index in shown), g.num_nodes, path, disk=disk)
