"""The contract of partitioners, as a test suite for authors of partitioners.

Examples
--------
>>> class TestMine(PartitionerContract):
...     def make(self):
...         return Mine()
"""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.partitioning.base import GraphStream, Partitioner
from featstore.registry import read_only
from featstore.topology.partarrays import check_parts

__all__ = ["PartitionerContract"]

Int64s = npt.NDArray[np.int64]


class _Stream(GraphStream):
    """A graph in memory, whose blocks cut lists, and are overwritten when the next block is requested."""

    def __init__(
        self, indptr: Int64s, indices: Int64s, n_parts: int, train: Int64s | None, seed: int, step: int, wide: bool
    ) -> None:
        self._indptr, self._ids, self._step = indptr, indices.astype(np.int64 if wide else np.int32), step
        self.num_nodes, self.num_edges, self.n_parts, self.seed = len(indptr) - 1, len(indices), n_parts, seed
        self.is_train = None if train is None else read_only(np.isin(np.arange(self.num_nodes), train).astype(np.uint8))
        self._budget = Budget(1 << 26)
        self.n_blocks = 0

    @property
    def indptr(self) -> Int64s:
        return read_only(self._indptr)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for first in range(0, max(1, self.num_edges), self._step):
            self.n_blocks += 1
            block = self._ids[first : first + self._step].copy()
            yield first, read_only(block)
            block.fill(-1)

    @property
    def n_held(self) -> int:
        return self._budget.used


class PartitionerContract(ABC):
    """Tests of a partitioner: derive a class named ``Test…`` from it, and write :meth:`make`."""

    @abstractmethod
    def make(self) -> Partitioner:
        """Make a new partitioner."""

    def _assign(
        self, lists: list[list[int]], n_parts: int, train: Any = None, seed: int = 0, step: int = 5, wide: bool = False
    ) -> npt.NDArray[np.int32]:
        indptr = np.cumsum([0, *map(len, lists)]).astype(np.int64)
        indices = np.array([u for each in lists for u in each], np.int64)
        stream = _Stream(indptr, indices, n_parts, None if train is None else np.asarray(train, np.int64), seed, step, wide)
        method = self.make()
        method.check(n_parts)
        answer = check_parts(method.assign(stream), len(lists), n_parts, "the answer").copy()
        assert stream.n_held == 0, "memory stays reserved when it has returned"
        n_blocks = -(-len(indices) // step) or 1
        assert stream.n_blocks <= method.n_passes * n_blocks, (
            f"the adjacency was read more than n_passes = {method.n_passes} times"
        )
        return answer

    @staticmethod
    def _lists(n: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [sorted(rng.integers(0, n, d).tolist()) for d in rng.integers(0, 9, n)]

    @pytest.mark.parametrize("n_parts", [1, 2, 7, 60, 300])
    def test_every_node_has_a_part(self, n_parts: int) -> None:
        """Check that parts are integers in range, one a node, for fewer and more parts than nodes."""
        assert len(self._assign(self._lists(60), n_parts)) == 60

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_tiny_graphs(self, n: int) -> None:
        """Check graphs of no, one and two nodes, without edges, with self-loops and with repeated edges."""
        nothing: list[list[int]] = [[] for _ in range(n)]
        for lists in (nothing, [[v, v] for v in range(n)], [list(range(n)) for _ in range(n)]):
            for n_parts in (1, 2, 5):
                assert len(self._assign(lists, n_parts)) == n

    def test_isolated_nodes(self) -> None:
        """Check that nodes without edges have parts, too: at the first ids, at the last ones, everywhere."""
        lists = self._lists(40)
        for empty in (range(20), range(20, 40), range(40)):
            self._assign([[] if v in empty else each for v, each in enumerate(lists)], 6)

    @pytest.mark.parametrize("train", [[], [3], range(60)])
    def test_training_nodes(self, train: Any) -> None:
        """Check no, one and all nodes as training nodes."""
        self._assign(self._lists(60), 5, train)

    def test_the_same_whatever_the_blocks(self) -> None:
        """Check that parts depend neither on the size of blocks nor on the width of ids, and that a second call agrees."""
        lists = self._lists(60)
        first = self._assign(lists, 7, range(0, 60, 3))
        for step, wide in ((1, False), (1000, False), (5, False), (5, True)):
            assert np.array_equal(first, self._assign(lists, 7, range(0, 60, 3), step=step, wide=wide)), f"blocks of {step} ids"

    def test_memory_grows_with_nodes_not_with_edges(self) -> None:
        """Check that ten times the edges take the same memory."""
        peaks = []
        for degree in (4, 40):
            lists = [[(v + k) % 2000 for k in range(degree)] for v in range(2000)]
            indptr, indices = np.arange(0, 2000 * degree + 1, degree), np.array(lists, np.int64).ravel()
            stream = _Stream(indptr, indices, 20, None, 0, 500, False)
            tracemalloc.start()
            try:
                self.make().assign(stream)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert peaks[1] < 2 * peaks[0] + 20_000, f"{peaks[0]} bytes for 4 edges a node, {peaks[1]} for 40"

    def test_in_a_dataset(self, tmp_path: Path) -> None:
        """Check that ``featstore.partition`` keeps the parts that it returns, and that batches can be made of them."""
        lists = self._lists(200)
        indptr, indices = np.cumsum([0, *map(len, lists)]), np.array([u for each in lists for u in each])
        with featstore.OutOfCoreGraph.create(tmp_path / "graph", indptr, indices, progress=False) as g:
            parts = featstore.partition(g, 8, self.make(), train_idx=range(0, 200, 2), name="contract", progress=False)
            assert np.array_equal(parts.numpy(), self._assign(lists, 8, range(0, 200, 2)))
            assert torch.equal(g.parts()["contract"].load(), parts)
            batches = featstore.PartitionBatches(g, range(0, 200, 2), 10)
            order = batches.epoch(0)
            assert sorted(v for k in range(len(order)) for v in order.seeds(k).tolist()) == list(range(0, 200, 2))
