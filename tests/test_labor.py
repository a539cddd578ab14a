"""Layer-neighbour sampling against a sampler in plain Python, and what its numbers are like."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore import LaborSampler, NeighborSampler
from featstore._core import labor as core
from featstore._core.sampler import Hops
from featstore.errors import BudgetError, CorruptionError
from featstore.graph.topology import huge_bytes
from tests.array_graphs import ArrayGraph, graph_of, graphs, random_graph
from tests.test_sampler import FANOUTS, M64, WORDS, same, splitmix

Int64s = npt.NDArray[np.int64]
Blocks = list[tuple[list[int], list[int], int, int]]


# ---------------------------------------------------------------- the oracle: one neighbour at a time, Python integers


def chain(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix(key, part)
    return key


def oracle_word(seed: int, epoch: int, index: int, hop: int, source: int, dependency: int = 1) -> int:
    """A source's number: it stays for as many batches as ``dependency``, from a batch of the source's own on."""
    phase = chain(seed, epoch, M64, hop, source) * dependency >> 64
    return chain(seed, epoch, (index + phase) // dependency, hop, source)


def oracle(
    g: ArrayGraph,
    seeds: list[int],
    fanouts: list[int],
    dependency: int,
    seed: int,
    epoch: int,
    index: int,
    layer_dependency: bool = False,
    redraw: bool = True,
) -> tuple[list[int], Blocks]:
    nodes = list(seeds)
    number = {node: i for i, node in enumerate(nodes)}
    blocks: Blocks = []
    src: list[int] = []
    dst: list[int] = []
    n_dst = 0
    for hop, fanout in enumerate(fanouts):
        first, n_dst, src, dst = (0, len(nodes), [], []) if redraw else (n_dst, len(nodes), list(src), list(dst))
        for i in range(first, n_dst):
            neighbours = g.indices[int(g.indptr[nodes[i]]) : int(g.indptr[nodes[i] + 1])].tolist()
            d = len(neighbours)
            for source in neighbours:
                word = oracle_word(seed, epoch, index, 0 if layer_dependency else hop, source, dependency)
                if fanout == -1 or (0 < fanout and (d <= fanout or word < (fanout << 64) // d)):
                    if source not in number:
                        number[source] = len(nodes)
                        nodes.append(source)
                    src.append(number[source])
                    dst.append(i)
        blocks.append((src, dst, len(nodes), n_dst))
    return nodes, blocks[::-1]


def check_against_oracle(g: ArrayGraph, seeds: list[int], fanouts: list[int], *options: Any, **more: Any) -> None:
    dependency, seed, epoch, index = options
    sampler = LaborSampler(g, fanouts, batch_dependency=dependency, seed=seed, **more)
    batch = sampler.sample(torch.tensor(seeds, dtype=torch.int64), epoch, index)
    nodes, blocks = oracle(g, seeds, fanouts, *options, **more)
    assert batch.input_ids.tolist() == nodes
    assert (batch.index, batch.epoch, batch.n_seeds) == (index, epoch, len(seeds))
    assert [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks] == blocks


DEPENDENCIES = st.sampled_from([1, 2, 3, 256, 2**32])


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    g=graphs(),
    fanouts=FANOUTS,
    dependency=DEPENDENCIES,
    seed=WORDS,
    epoch=WORDS,
    index=WORDS,
    layer_dependency=st.booleans(),
    redraw=st.booleans(),
)
def test_small_graphs_equal_the_oracle_whatever_is_cached(
    data: st.DataObject,
    g: ArrayGraph,
    fanouts: list[int],
    dependency: int,
    seed: int,
    epoch: int,
    index: int,
    layer_dependency: bool,
    redraw: bool,
) -> None:
    seeds = data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True))
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for variant in (g, g.cached(), g.cached(n_ids)):
        check_against_oracle(
            variant, seeds, fanouts, dependency, seed, epoch, index, layer_dependency=layer_dependency, redraw=redraw
        )


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("fanouts", [[5, 5], [-1, 3], [100, 2], [0, 4]])
def test_a_larger_graph_equals_the_oracle(id_bytes: int, fanouts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scratch grows in the middle of a hop; lists are longer than a turn, and end at every place in a vector."""
    g = random_graph(6_000, 8, id_bytes=id_bytes)
    seeds = np.random.default_rng(1).choice(g.num_nodes, 60, replace=False).tolist()
    for variant in (g.cached(), g, g.cached(len(g.indices) // 3)):
        check_against_oracle(variant, seeds, fanouts, 4, 7, 2, 5)
        monkeypatch.setattr("featstore.sampling.labor._LEAST_READ", 50)
    check_against_oracle(g, seeds, fanouts, 1, 7, 2, 5, redraw=False)
