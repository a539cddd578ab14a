"""The labels of a batch's seeds: node data by name, or rows that are given beside the seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import PluginError
from featstore.gather.arrays import as_array, first_seen
from featstore.load.arguments import check_labels
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import Drawn, SampledBatches

__all__ = ["SeedLabels"]

Int64s = npt.NDArray[np.int64]


class SeedLabels:
    """Find the labels of batches, row by row of the seeds as the user gave them. Thread-safe.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
    labels : str, sequence of str, None, array or tensor, shape (n_given, …), or mapping of str to such
        Names of node data, or rows beside the seeds: row ``i`` belongs to the ``i``-th given seed. An array is ``y``.

    Raises
    ------
    TypeError, ValueError
        Not labels; names that the graph has not, or that occur twice.
    """

    def __init__(self, g: Graph, labels: Any) -> None:
        self._g = g
        self._given: dict[str, torch.Tensor] = {}
        if isinstance(labels, (torch.Tensor, np.ndarray)):
            labels = {"y": labels}
        if isinstance(labels, Mapping):
            self.names: tuple[str, ...] = ()
            for name, rows in labels.items():
                if not isinstance(name, str) or isinstance(rows, (str, bytes)):
                    raise TypeError(f"labels: a mapping of names to rows, one a given seed, not {name!r}: {rows!r}")
                found = as_array(f"labels: {name!r}", rows)
                if found.ndim == 0:
                    raise TypeError(f"labels: {name!r} has no rows, one a given seed: {rows!r}")
                try:
                    self._given[name] = torch.from_numpy(found if found.flags.writeable else found.copy())
                except TypeError as error:
                    raise TypeError(f"labels: {name!r}: {error}") from None
        else:
            self.names = check_labels(g, labels)
        self._drawn: Drawn | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all labels."""
        yield from (*self.names, *self._given)

    def attach(self, batches: SampledBatches) -> None:
        """Take the batches whose seeds the labels belong to.

        Raises
        ------
        ValueError
            Rows beside seeds of which nothing says where they were given, or of another number.
        """
        drawn = batches if isinstance(batches, Drawn) else None
        if drawn is not None and hasattr(drawn.order(0), "positions"):
            self._drawn = drawn
        elif self._given:
            why = "a pack has its own" if drawn is None else f"{type(drawn.batches).__name__} does not say which are where"
            raise ValueError(f"labels: rows beside the seeds do not fit, as {why}; give names of node data instead")
        n = getattr(getattr(drawn, "batches", None), "n_seeds", None)
        for name, rows in self._given.items():
            if n is not None and len(rows) != n:
                raise ValueError(f"labels: {name!r} has {len(rows)} rows for {n} seeds")

    def of(self, sampled: SampledBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Find a batch's labels; and for each the number of its seed in the batch, and its position among all that were given.

        Raises
        ------
        PluginError
            A sampler returned other seeds than it was given, and only those have labels.
        """
        seeds, data = sampled.seeds, self._g.node_data
        found = None if self._drawn is None else _given(seeds.numpy(), self._drawn.order(sampled.epoch), sampled.index)
        if found is None:
            if self._given:
                raise PluginError(
                    f"batch {sampled.index}: the sampler returned other seeds than it was given, which have the labels"
                )
            return {name: data[name][seeds] for name in self.names}, torch.arange(len(seeds), device="cpu"), None
        number, positions = map(torch.from_numpy, found)
        labels = {name: data[name][seeds[number]] for name in self.names}
        labels |= {name: rows[positions] for name, rows in self._given.items()}
        return labels, number, positions


def _given(seeds: Int64s, order: Any, index: int) -> tuple[Int64s, Int64s] | None:
    """Find the number in ``seeds`` of each seed as it was given, and its position; None if these are no batch's ``seeds``.

    Where no seed repeats, they are in the order of ``seeds``, in which another library's sampler may have put them.
    """
    given, positions = order.given(index).numpy(), order.positions(index).numpy()
    first, number = first_seen(given)
    if not np.array_equal(given[first], seeds):
        ascending = np.argsort(seeds)
        number = ascending[np.searchsorted(seeds, given, sorter=ascending).clip(max=len(seeds) - 1)] if len(seeds) else number[:0]
        if len(first) != len(seeds) or not np.array_equal(seeds[number], given):
            return None
        if len(given) == len(seeds):
            positions, number = positions[np.argsort(number)], np.arange(len(seeds))
    return number, positions
