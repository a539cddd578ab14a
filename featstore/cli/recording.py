"""The seeds that training would begin with, and the batches of a recorded trace."""

from __future__ import annotations

import torch

from featstore.cli.splits import Labelled, no_seeds, split_seeds
from featstore.sampling.batches import check_seeds
from featstore.sampling.sampledbatches import EpochBatches, SampledBatches

__all__ = ["TracedBatches", "seeds_of"]


class TracedBatches(SampledBatches):
    """The batches of a trace, as far as strategies ask of them before a run: how many, and how large."""

    run_length = 1

    def __init__(self, n_batches: int, n_rows: int, batch_size: int) -> None:
        self._n_batches, self.most_rows, self.batch_size = n_batches, n_rows, batch_size

    def __len__(self) -> int:
        return self._n_batches

    def digest(self) -> str:
        """Return a constant: traces are not distinguished."""
        return ""

    def sampled(self, epoch: int) -> EpochBatches:
        """Raise an error: a trace has no blocks."""
        raise NotImplementedError("a trace has the ids of batches, not their blocks")


def seeds_of(g: Labelled, labels: str, name: str | None = None) -> torch.Tensor:
    """Get the training seeds; ValueError, with advice, if there are none.

    Nodes without a label are left out (:func:`split_seeds`). ``name`` names other node data with the seeds, ids or a mask,
    whatever their labels.
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
