"""The labels of a batch's seeds: node data by name, or rows that are given beside the seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import PluginError
from featstore.gather.arrays import as_array, find_ids
from featstore.load.arguments import check_labels
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.batches import CutSeeds, EpochSeeds, says_where_given, underlying
from featstore.sampling.sampledbatches import Drawn, SampledBatches
from featstore.topology.types import NodeType

__all__ = ["SeedLabels"]

Int64s = npt.NDArray[np.int64]
Rows = torch.Tensor | npt.NDArray[Any]


class SeedLabels:
    """Find the labels of batches, row by row of the seeds as the user gave them. Thread-safe.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
    labels : str, sequence of str, None, array or tensor, shape (n_given, …), or mapping of str to such
        Names of node data, or rows beside the seeds: row ``i`` belongs to the ``i``-th given seed. An array is ``y``.
    kind : NodeType, optional
        The type of the seeds, in a graph of several types.

    Raises
    ------
    TypeError, ValueError
        Not labels; names that the graph has not, or that occur twice.
    """

    def __init__(self, g: Graph, labels: Any, kind: NodeType | None = None) -> None:
        self._g, self._first = g, 0 if kind is None else kind.first
        self._n = g.num_nodes if kind is None else kind.n
        self._given: dict[str, Rows] = {}
        if hasattr(labels, "__array__"):
            labels = {"y": labels}
        if isinstance(labels, Mapping):
            self.names: tuple[str, ...] = ()
            for name, rows in labels.items():
                if not isinstance(name, str) or isinstance(rows, (str, bytes)):
                    raise TypeError(f"labels: a mapping of names to rows, one a given seed, not {name!r}: {rows!r}")
                self._given[name] = _checked(name, rows)
        else:
            self.names = check_labels(g, labels, "" if kind is None else f"{kind.name}/")
        # The fields of node data, by the names of the labels.
        self._fields = {name: name if kind is None else f"{kind.name}/{name}" for name in self.names}
        self._data: dict[str, torch.Tensor] = {}
        self._drawn: Drawn | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all labels."""
        yield from (*self.names, *self._given)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of node data that hold labels."""
        return tuple(self._fields.values())

    def check_lengths(self) -> None:
        """Read the node data that holds labels, and raise ValueError unless it has a row for each node.

        The loader keeps them as they are now, whatever becomes of the field.
        """
        for name, field in self._fields.items():
            data = self._data[name] = self._g.node_data[field]
            if (n := len(data)) != self._n:
                raise ValueError(
                    f"labels: {name!r} has {n} entries for {self._n} nodes; give an entry a node, or an array with one a seed"
                )

    def forget(self) -> None:
        """Let go of the node data; no batch is asked for any more."""
        self._data.clear()

    def attach(self, batches: SampledBatches) -> None:
        """Take the batches whose seeds the labels belong to.

        Raises
        ------
        ValueError
            Rows beside seeds of which nothing says where they were given, or of another number.
        """
        self._drawn = batches if isinstance(batches, Drawn) else None
        n = None if self._drawn is None else getattr(self._drawn.batches, "n_seeds", None)
        for name, rows in self._given.items():
            if n is None:
                who = "a pack" if self._drawn is None else _class_of(self._drawn.batches)
                raise ValueError(
                    f"labels: {name!r} has rows beside the seeds, and {who} does not say where its seeds were given (n_seeds, "
                    "and given and positions of an epoch, see featstore.Batches); give names of node data instead"
                )
            if len(rows) != n:
                hint = "; for a mask of seeds give labels[mask]" if len(rows) == self._n else ""
                raise ValueError(f"labels: {name!r} has {len(rows)} rows for {n} seeds{hint}")

    def order(self, epoch: int) -> EpochSeeds | None:
        """Get the seeds of an epoch as they were given, for as long as the epoch runs; None if nothing says it."""
        order = None if self._drawn is None else self._drawn.order(epoch)
        says = says_where_given(order)
        if self._given and not says:
            raise PluginError(f"{_class_of(order)} has no given and positions, by which labels beside the seeds are found")
        return order if says else None

    def of(
        self, sampled: SampledBatch, order: EpochSeeds | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Find a batch's labels; and for each the number of its seed in the batch, and its position among all that were given.

        Raises
        ------
        PluginError
            A sampler returned other seeds than it was given, and labels are known of the given ones alone. Or the methods of a
            user's batches contradict each other.
        """
        seeds = sampled.seeds
        nodes = seeds - self._first if self._first else seeds
        found = None if order is None else _given(seeds.numpy(), order, sampled.index)
        if found is None:
            if self._given:
                raise PluginError(
                    f"batch {sampled.index}: the sampler returned seeds that it was not given, which have no labels"
                )
            return (
                {name: rows[nodes] for name, rows in self._data.items()},
                torch.arange(len(seeds), device="cpu"),
                None,
            )
        number, positions = map(torch.from_numpy, found)
        labels = {name: rows[nodes[number]] for name, rows in self._data.items()}
        labels |= {name: _taken(name, rows, positions) for name, rows in self._given.items()}
        return labels, number, positions


def _class_of(batches: Any) -> str:
    """Get the name of the class of a user's batches, or of an epoch's seeds."""
    return type(underlying(batches)).__name__


def _checked(name: str, rows: Any) -> Rows:
    """Check labels that are no node data: dense, in host memory, with rows, of a dtype that torch has."""
    if isinstance(rows, torch.Tensor):
        if rows.layout != torch.strided or rows.is_meta:
            raise TypeError(f"labels: {name!r} is no dense tensor with values: {rows.layout} on {rows.device}")
        found: Rows = rows.detach().cpu()
    else:
        found = as_array(f"labels: {name!r}", rows)
        try:
            torch.from_numpy(np.empty(0, found.dtype.newbyteorder("=")))
        except TypeError as error:
            raise TypeError(f"labels: {name!r}: {error}") from None
    if not found.ndim:
        raise TypeError(f"labels: {name!r} has no rows, one a given seed: {rows!r}")
    return found


def _taken(name: str, rows: Rows, positions: torch.Tensor) -> torch.Tensor:
    """Copy the rows of these positions."""
    try:
        if isinstance(rows, torch.Tensor):
            return rows[positions]
        taken = rows[positions.numpy()]
        return torch.from_numpy(np.ascontiguousarray(taken, taken.dtype.newbyteorder("=")))
    except IndexError as error:
        raise PluginError(f"labels: {name!r} has no rows for the positions that the batches say: {error}") from None


def _given(seeds: Int64s, order: Any, index: int) -> tuple[Int64s, Int64s] | None:
    """Find the number in ``seeds`` of each seed as it was given, and its position; None if one of ``seeds`` was not given.

    Where no seed repeats, they are in the order of ``seeds``, in which a user's sampler may have put them, and without those that
    it left out.
    """
    given, positions = (np.asarray(each(index)).astype(np.int64, copy=False) for each in (order.given, order.positions))
    if given.ndim != 1 or given.shape != positions.shape or (positions < 0).any():
        shapes = f"seeds of shape {given.shape}, and positions of {positions.shape}"
        raise PluginError(f"batch {index}: {_class_of(order)} gave {shapes}: as many, and none below 0, were expected")
    if np.array_equal(given, seeds):
        # The user's own memory may be what their batches return; the library's return a copy.
        return np.arange(len(seeds)), positions if isinstance(order, CutSeeds) else positions.copy()
    number, there = find_ids(seeds, given)
    number, positions = number[there], positions[there]
    n_of_each = np.bincount(number, minlength=len(seeds))
    if not n_of_each.all():
        return None
    if n_of_each.max(initial=0) <= 1:
        positions, number = positions[np.argsort(number)], np.arange(len(seeds))
    return number, positions
