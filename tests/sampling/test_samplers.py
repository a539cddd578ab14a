"""The contract of every sampler: batches do not depend on threads, order, caches or files; what is refused; memory is counted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import LaborSampler, LayerSampler, NeighborSampler, ShadowSampler
from featstore.errors import BudgetError, CorruptionError
from featstore.topology.base import huge_bytes
from tests.sampling.test_layer import same_weighted
from tests.sampling.test_neighbor import same
from tests.support.array_graphs import ArrayGraph, graph_of, random_graph
from tests.support.refusing import refuses
from tests.support.sampled import covering

SAMPLERS: dict[str, Callable[..., Any]] = {
    "neighbor": lambda g, sizes=(6, 4), **options: NeighborSampler(g, sizes, **options),
    "labor": lambda g, sizes=(6, 4), **options: LaborSampler(g, sizes, 3, **options),
    "layer": lambda g, sizes=(300, 400), **options: LayerSampler(g, sizes, **options),
    "shadow": lambda g, sizes=(3, 2), **options: ShadowSampler(g, sizes, 3, **options),
}
SHOWN = {
    "neighbor": "NeighborSampler(fanouts=[6, 4], replace=False, seed=2)",
    "labor": "LaborSampler(fanouts=[6, 4], batch_dependency=3, seed=2)",
    "layer": "LayerSampler(sizes=[300, 400], seed=2, skip=False, replace=False, op='sum')",
    "shadow": "ShadowSampler(fanouts=[3, 2], layers=3, replace=False, seed=2)",
}
every = pytest.mark.parametrize("name", SAMPLERS)


def alike(name: str) -> Callable[[Any, Any], bool]:
    return same_weighted if name == "layer" else same


@every
def test_batches_do_not_depend_on_threads_order_or_caches(name: str) -> None:
    make, g = SAMPLERS[name], random_graph(8_000, 10, seed=2)
    parts = torch.randperm(g.num_nodes, generator=torch.Generator().manual_seed(0))[:800].split(50)
    reference = [make(g, seed=3).sample(part, 1, i) for i, part in enumerate(parts)]
    for variant in (g, g.cached(), g.cached(len(g.indices) // 4)):
        sampler = make(variant, seed=3)
        for n_threads in (1, 3, 7):
            with ThreadPoolExecutor(n_threads) as pool:
                found = list(pool.map(lambda i: sampler.sample(parts[i], 1, i), reversed(range(len(parts)))))
            assert all(map(alike(name), reversed(found), reference))
        assert sampler.stats()["batches"] == 3 * len(parts)
        assert len(sampler._all) <= 7


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArrayGraph, Path]:
    """One graph in memory and on disk: `create` sorts each list, and random_graph's are sorted, so positions are the same."""
    g, path = random_graph(8_000, 10, seed=11), tmp_path_factory.mktemp("both") / "g"
    featstore.OutOfCoreGraph.create(path, g.indptr, g.indices, progress=False).close()
    return g.cached(), path


@pytest.mark.parametrize(("name", "backend", "share"), covering(SAMPLERS, ["io_uring", "pread"], [None, 0.0, 0.2], together=2))
def test_batches_from_disk_are_those_from_memory(both, name, backend, share) -> None:
    make, (g, path) = SAMPLERS[name], both
    parts = torch.randperm(8_000, generator=torch.Generator().manual_seed(1))[:400].split(50)
    reference = [make(g, seed=2).sample(part, 0, i) for i, part in enumerate(parts)]
    with featstore.open(path, memory="64MiB", backend=backend) as stored:
        if share is not None:
            stored.cache_neighbors(huge_bytes(8 * 8_000) + int(share * g.topology.nbytes))
        sampler = make(stored, seed=2)
        assert repr(sampler) == SHOWN[name]
        with ThreadPoolExecutor(3) as pool:
            batches = list(pool.map(lambda i: sampler.sample(parts[i], 0, i), range(len(parts))))
        assert all(map(alike(name), batches, reference))
        assert sampler.stats()["edge_rows_read"] > 0
        again = pickle.loads(pickle.dumps(sampler))
        assert alike(name)(again.sample(parts[3], 0, 3), reference[3])
        again.graph.close()
    refuses(featstore.ClosedError, "", lambda: sampler.sample(parts[0]))


@every
def test_a_batch_differs_by_seed_epoch_and_index(name: str) -> None:
    """The draws themselves, not only the numbers that a batch carries."""
    g, ids = random_graph(3000, 30, seed=4).cached(), torch.arange(50)
    batches = [SAMPLERS[name](g, seed=s).sample(ids, e, i) for s in (0, 1) for e in (0, 1) for i in (0, 1)]
    assert all(not same(replace(a, epoch=0, index=0), replace(b, epoch=0, index=0)) for a, b in combinations(batches, 2))


@every
@pytest.mark.parametrize("options", [{}, {"replace": True}])
def test_no_nodes_no_seeds_no_neighbours(name: str, options: dict[str, Any]) -> None:
    make = SAMPLERS[name]
    options = {} if name == "labor" else options
    for g in (graph_of([]), graph_of([[]]), graph_of([[0, 0, 0]]), random_graph(50, 3)):
        for variant in (g, g.cached()):
            batch = make(variant, **options).sample(torch.zeros(0, dtype=torch.int64))
            assert batch.input_ids.shape == (0,)
            assert {(len(b.src), b.n_src, b.n_dst) for b in batch.blocks} == {(0, 0, 0)}
    batch = make(graph_of([[], [], [0]]), **options).sample([1, 0])
    assert batch.input_ids.tolist() == [1, 0]
    assert {len(block.src) for block in batch.blocks} == {0}


@every
def test_what_is_refused(name: str) -> None:
    make, g = SAMPLERS[name], random_graph(20, 3)
    for sizes, error in (([], ValueError), ([-2], ValueError), ([2**31], ValueError), ([2.5], TypeError), (["3"], TypeError)):
        refuses(error, "fan|size|layer has", lambda sizes=sizes: make(g, sizes))
    for seed in (-1, 2**64):
        refuses(ValueError, "seed", lambda seed=seed: make(g, seed=seed))
    if name == "layer":
        refuses(ValueError, "op is one of", lambda: make(g, op="max"))
    sampler = make(g)
    before = sampler.sample(torch.arange(10))
    refuses(
        IndexError, "seed 20 at position 2 is out of range for 20 nodes", lambda: sampler.sample(torch.tensor([1, 19, 20, -1]))
    )
    refuses(IndexError, "seed -1 at position 0", lambda: sampler.sample(torch.tensor([-1])))
    refuses(IndexError, f"seed {-(2**63)} at position 1", lambda: sampler.sample(torch.tensor([0, -(2**63)])))
    refuses(IndexError, f"seed {2**63} at position 1", lambda: sampler.sample(np.array([0, 2**63], np.uint64)))
    refuses(ValueError, "7 is at positions 1 and 3", lambda: sampler.sample(torch.tensor([1, 7, 2, 7, 1])))
    refuses(TypeError, "float32", lambda: sampler.sample(torch.ones(3)))
    refuses(TypeError, "bool", lambda: sampler.sample(torch.ones(3, dtype=torch.bool)))
    refuses(ValueError, "1-D", lambda: sampler.sample(torch.zeros((1, 1), dtype=torch.int64)))
    refuses(ValueError, "epoch", lambda: sampler.sample(torch.arange(3), epoch=-1))
    assert alike(name)(before, sampler.sample(torch.arange(10)))


@every
def test_a_damaged_list_is_found_and_the_sampler_goes_on(name: str) -> None:
    g, seeds = random_graph(200, 5), torch.arange(50)
    sampler = SAMPLERS[name](g, [-1] if name != "layer" else [1000])
    expected = sampler.sample(seeds)
    at = int(g.indptr[7])
    right, g.indices[at] = int(g.indices[at]), 200
    refuses(CorruptionError, f"edge {at} leads to node 200 of 200", lambda: sampler.sample(seeds))
    g.indices[at] = right
    assert alike(name)(sampler.sample(seeds), expected)


@every
def test_memory_is_asked_for(name: str) -> None:
    g, seeds = random_graph(60_000, 10), torch.arange(30_000)
    sampler = SAMPLERS[name](g)
    expected = sampler.sample(seeds)
    with g.budget.reserve("another", g.budget.available - 100_000):
        refuses(BudgetError, "", lambda: SAMPLERS[name](g).sample(seeds))
    assert alike(name)(sampler.sample(seeds), expected)
