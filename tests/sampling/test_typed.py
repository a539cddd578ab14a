"""Fan-outs of several types of edges: how they are given, and how many neighbours a node draws at most."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.load.heterobatch import TypedNodes
from featstore.plan.samples import SampleWriter
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.typed import fanouts_of_types, most_drawn
from featstore.topology.base import CscTopology
from featstore.topology.types import Types
from tests.support.array_graphs import ArrayGraph
from tests.support.typed import CITES, EMPLOYS, WRITES

TYPES = Types.of({"paper": 5, "author": 3, "institution": 0}, {WRITES: 4, CITES: 9, EMPLOYS: 0})


def test_fanouts_by_type_and_for_all() -> None:
    assert fanouts_of_types(TYPES, [3, 2]) == {WRITES: (3, 2), CITES: (3, 2), EMPLOYS: (3, 2)}
    assert fanouts_of_types(TYPES, {CITES: [3, -1]}) == {WRITES: (0, 0), CITES: (3, -1), EMPLOYS: (0, 0)}
    assert list(fanouts_of_types(TYPES, {EMPLOYS: [1], WRITES: [2]})) == [WRITES, CITES, EMPLOYS]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({("a", "b", "c"): [1]}, ValueError, "no edge type"),
        ({"writes": [1]}, ValueError, "no edge type 'writes'"),
        ({WRITES: [1, 2], CITES: [1]}, ValueError, "as many hops"),
        ({WRITES: 3}, TypeError, "a sequence of integers"),
        ({WRITES: [1.5]}, TypeError, "a sequence of integers"),
        ({WRITES: [-2]}, ValueError, "-1"),
        ({WRITES: [2**31]}, ValueError, "2\\*\\*31"),
        ({}, ValueError, "no hop"),
        ([], ValueError, "no hop"),
        (7, TypeError, "sequence"),
    ],
)
def test_fanouts_that_cannot_be_used(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fanouts_of_types(TYPES, given)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ([3, 2], (6, 4)),  # papers draw from authors and from papers
        ({WRITES: [3, -1], CITES: [4, 2]}, (7, -1)),
        ({EMPLOYS: [5, 0], CITES: [1, 2]}, (5, 2)),
        ({WRITES: [2**31 - 1], CITES: [2**31 - 1]}, (2**31 - 1,)),
    ],
)
def test_the_most_that_a_node_draws(given: Any, most: tuple[int, ...]) -> None:
    assert most_drawn(TYPES, fanouts_of_types(TYPES, given)) == most


def test_types_that_cross_32_bits_together_alone(tmp_path: Path) -> None:
    """Ids of all types exceed 2³¹ where those of none does: lists, sets of nodes, batches by type and files of samples."""
    n = {"a": 2**30 + 7, "b": 2**30 + 9, "s": 6}
    keys = [("a", "r", "s"), ("b", "r", "s")]
    rng = np.random.default_rng(0)
    pairs = {key: np.stack([n[key[0]] - 1 - rng.integers(0, 40, 30), np.sort(rng.integers(0, 6, 30))]) for key in keys}
    types = Types.of(n, dict.fromkeys(keys, 30))
    degrees = np.concatenate([np.bincount(pairs[key][1], minlength=6) for key in keys])
    ids = np.concatenate([pairs[key][0] + types.nodes[key[0]].first for key in keys])
    assert ids.max() > 2**31
    g = ArrayGraph(np.r_[0, np.cumsum(degrees)].astype(np.int64), ids)
    g.num_nodes, g.types = types.num_nodes, types
    g.topology = CscTopology(12, 60, g.indptr, g.file, 8, types.num_nodes)
    seeds = torch.arange(6) + types.nodes["s"].first
    for disjoint in (False, True):
        batch = NeighborSampler(g, [-1], edges=True, disjoint=disjoint).sample(seeds)
        found = TypedNodes(types, batch, g.pool)
        assert found.input_ids["s"].tolist() == list(range(6))
        for key, block in found.local_blocks()[0].items():
            ends = torch.stack([found.input_ids[key[0]][block.src], found.input_ids[key[2]][block.dst]]).numpy()
            assert block.edge_pos is not None
            assert np.array_equal(pairs[key][:, block.edge_pos.numpy()], ends)
            assert len(block.src) == 30
        writer = SampleWriter(tmp_path / f"samples-{disjoint}", types.num_nodes)
        writer.add(batch)
        file = writer.finish_samples()
        assert all(map(torch.equal, file.batch(0, g.pool).tensors, batch.tensors))
        file.remove()


@pytest.mark.parametrize("disjoint", [False, True])
def test_what_a_batch_takes_is_of_the_pool(tmp_path: Path, disjoint: bool) -> None:
    draws = np.random.default_rng(0)
    edges = {CITES: draws.integers(0, 60_000, (2, 600_000)), EMPLOYS: np.zeros((2, 0), np.int64)}
    counts = {"paper": 60_000, "author": 1, "institution": 1}
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, counts, memory="256MiB", progress=False) as g:
        sampler = featstore.NeighborSampler(g, [5, 5], edges=True, disjoint=disjoint)
        seeds = np.arange(0, 60_000, 6 if disjoint else 2)
        tracemalloc.start()
        batch = sampler.sample(seeds)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(batch.input_ids) > 50_000
        assert peak < 12 * len(batch.input_ids), "positions by type are 9 bytes a node; all else counts in the budget"
