"""Epoch-wide sampling where released samplers err (DaMoN 2024's code among them): each trap, against the plain-Python oracle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from featstore import NeighborSampler
from featstore.sampling.batch import SampledBatch
from featstore.topology.base import CscTopology
from featstore.topology.chunks import ChunkedTopology
from tests.sampling.test_epochwide import ChunkedEpochGraph, EpochGraph, Int64s, window_of
from tests.sampling.test_neighbor import oracle
from tests.support.array_graphs import ArrayFile, ArrayStream
from tests.support.reference_sampling import check_batch

SEED = 5


class OneChunkGraph(EpochGraph):
    """All lists in one chunk."""

    chunk_bytes = 1 << 20


KINDS = [EpochGraph, ChunkedEpochGraph, OneChunkGraph]


def drawn(g: EpochGraph, batches: list[Int64s], fanouts: list[int], path: Path, ids: Any = None, **options: Any) -> list[Any]:
    """Draw a window, check every batch against the oracle, and return the batches."""
    sampler = NeighborSampler(g, fanouts, seed=SEED, **options)
    with window_of(sampler, g, batches, path) as window:
        window.draw()
        found: list[SampledBatch] = [window.sample(k) for k in range(len(batches))]
    for k, (seeds, batch) in enumerate(zip(batches, found, strict=True)):
        replace, redraw = options.get("replace", False), options.get("redraw", True)
        expected = oracle(g.indptr, g.indices if ids is None else ids, seeds.tolist(), fanouts, replace, SEED, 0, k, redraw)
        check_batch(batch, expected, len(seeds), 0, k)
    return found


def graph(kind: type[EpochGraph], degrees: npt.ArrayLike, path: Path, seed: int = 0) -> EpochGraph:
    """A graph with these degrees and random neighbours."""
    indptr = np.concatenate([[0], np.cumsum(np.asarray(degrees, np.int64))])
    ids = np.random.default_rng(seed).integers(0, len(indptr) - 1, indptr[-1]).astype(np.int32)
    for first, end in itertools.pairwise(indptr.tolist()):
        ids[first:end].sort()
    return kind(indptr, ids, path=str(path / "graph"))


def test_chunks_without_edges_shift_no_other(tmp_path: Path) -> None:
    """In the middle, several in a row, and at both ends."""
    degrees = np.concatenate([np.zeros(2500), np.full(200, 30), np.zeros(5000), np.full(300, 20), np.zeros(3000)])
    g = graph(ChunkedEpochGraph, degrees, tmp_path)
    assert isinstance(g.topology, ChunkedTopology)
    empty = np.flatnonzero(g.topology.directory.n_edges == 0)
    assert len(empty) >= 6
    assert empty[0] == 0
    assert np.diff(empty).max() > 1
    nodes = np.random.default_rng(2).permutation(len(degrees))
    drawn(g, [nodes[:1500], nodes[1500:1600], np.arange(2490, 2710), np.arange(7690, 8010)], [5, 3], tmp_path)


@pytest.mark.parametrize("fanout", [3, -1])
def test_the_first_and_the_last_node_of_every_chunk(tmp_path: Path, fanout: int) -> None:
    """Ends are exclusive: a list that ends with its chunk, one that begins with it, and one that goes on in the next."""
    degrees = np.random.default_rng(3).integers(0, 40, 4000)
    degrees[[100, 1000, 1001]] = 1500, 990, 3000
    g = graph(ChunkedEpochGraph, degrees, tmp_path)
    assert isinstance(g.topology, ChunkedTopology)
    first = g.topology.directory.first_node
    assert len(first) > 50
    edges = [np.unique(np.clip(first + k, 0, 3999)) for k in (-1, 0, 1)]
    drawn(g, [*edges, np.array([3999, 0])], [fanout, 2], tmp_path)
    drawn(g, [np.array([node]) for node in edges[0][:20].tolist()], [fanout], tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replace", [False, True])
def test_positions_beyond_16_bits_are_drawn(tmp_path: Path, kind: type[EpochGraph], replace: bool) -> None:
    n = 200_000
    indptr = np.concatenate([[0, 3], np.full(n - 1, n + 3)]).astype(np.int64)
    ids = np.concatenate([[1, 2, 3], np.arange(n)]).astype(np.int32)  # a neighbour of node 1 is its own position
    batch = drawn(kind(indptr, ids, path=str(tmp_path / "graph")), [np.array([1])], [1000], tmp_path, replace=replace)[0]
    positions = batch.input_ids[batch.blocks[0].src].numpy()
    assert len(positions) == 1000
    shares = np.histogram(positions, 4, (0, n))[0] / 1000
    assert (abs(shares - 0.25) < 0.06).all(), shares  # four standard deviations


class FarFile(ArrayFile):
    """Ids of which the first ``base`` are not there: reading them is an error."""

    def __init__(self, ids: npt.NDArray[Any], base: int) -> None:
        super().__init__(ids)
        self.base, self.n_rows = base, base + len(ids)

    def gather(self, rows: Int64s, out: npt.NDArray[np.uint8], *args: Any) -> None:
        super().gather(rows - self.base, out, *args)

    def stream(self, runs: Int64s, window_bytes: int, arena: Any = None) -> ArrayStream:
        shift = self.base * self.row_bytes // 4096
        return super().stream(runs - np.array([[shift, 0]]), window_bytes, arena)


class Tail:
    """Content of a :class:`FarFile`, by the number of the edge."""

    def __init__(self, ids: npt.NDArray[Any], base: int) -> None:
        self._ids, self._base = ids, base

    def __getitem__(self, edge: int) -> int:
        assert edge >= self._base
        return int(self._ids[edge - self._base])


def test_edges_beyond_32_bits(tmp_path: Path) -> None:
    """A list of 2³³ edges, from which nobody draws, lies before the others: cut to 32 bits, their offsets would lie in it."""
    n, base = 2000, 1 << 33
    rng = np.random.default_rng(4)
    degrees = np.concatenate([[base], rng.integers(0, 50, n - 1)])
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    ids = rng.integers(1, n, indptr[-1] - base).astype(np.int32)
    g = EpochGraph(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), path=str(tmp_path / "graph"))
    g.indptr, g.file = indptr, FarFile(ids, base)
    g.topology = CscTopology(n, int(indptr[-1]), indptr, g.file, 4)  # type: ignore[arg-type]
    found = drawn(g, [np.arange(1, 300), np.arange(n - 50, n)], [6, 4], tmp_path, Tail(ids, base))
    assert sum(len(block.src) for batch in found for block in batch.blocks) > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_frontiers_that_are_empty(tmp_path: Path, kind: type[EpochGraph]) -> None:
    """Of one batch, of all, from a hop on; batches without seeds; a fan-out of 0 before others."""
    degrees = np.where(np.arange(900) < 400, 6, 0)
    g = graph(kind, degrees, tmp_path)
    isolated, none = np.arange(450, 700), np.zeros(0, np.int64)
    drawn(g, [isolated, np.arange(50), none], [3, 2, 4], tmp_path)
    drawn(g, [isolated, isolated[::-1].copy()], [3, -1], tmp_path)
    drawn(g, [none, none], [2, 2], tmp_path)
    for fanouts in ([0, 3], [3, 0, 2], [0]):
        drawn(g, [np.arange(380, 420), isolated[:5]], fanouts, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_without_nodes_or_edges(tmp_path: Path, kind: type[EpochGraph]) -> None:
    empty = kind(np.zeros(1, np.int64), np.zeros(0, np.int32), path=str(tmp_path / "graph"))
    drawn(empty, [np.zeros(0, np.int64)], [3, -1], tmp_path)
    bare = kind(np.zeros(3001, np.int64), np.zeros(0, np.int32), path=str(tmp_path / "graph"))
    drawn(bare, [np.array([2999, 0]), np.array([1500])], [3, -1], tmp_path)
