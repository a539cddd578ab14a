"""Planned plug-ins that misbehave end in a PluginError that names the policy, or in the right rows."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.gather.plan import BatchPlan, Changeset, Tier, TierRows
from featstore.pack.layout import find_layouts
from featstore.storage.reader import MAX_ENGINES
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.misbehaving_planners import EITHER, REFUSED, RIGHT, TABLE, Base, Misbehaviour
from tests.support.sampled import one_in

N, BATCH, N_BATCHES = 300, 8, 9
ROWS = np.random.default_rng(0).standard_normal((N, 9)).astype(np.float32)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    indptr, indices = make_graph(N, 6.0)
    path = tmp_path_factory.mktemp("data") / "g"
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": ROWS}, progress=False).close()
    with featstore.open(path, memory="16MB", threads=1) as g:
        with ExitStack() as queues:  # all there from now on, however many threads happen to read at once
            for _ in range(MAX_ENGINES):
                queues.enter_context(g.reader.engine(1))
        yield g


@pytest.fixture(scope="module")
def pack(graph: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("data") / "pack"
    seeds = torch.arange(BATCH * N_BATCHES)
    made = featstore.sample_offline(graph, sampler(graph), seeds, BATCH, path=path, progress=False)
    for way in WAYS.values():  # buffers, tables and files that stay are there from now on
        way(graph, made, "belady")
    return made


def sampler(g: Any) -> Any:
    return featstore.NeighborSampler(g, [3, 2], seed=1)


def run(g: Any, policy: Any, epochs: int = 2, size: int = 3, **options: Any) -> None:
    """Run epochs; every batch that comes has the right rows."""
    batches = {} if "pack" in options else {"sampler": sampler(g), "seeds": torch.arange(BATCH * N_BATCHES), "batch_size": BATCH}
    loader = make_loader(
        g, **batches, features="x", labels=None, policy=policy, cache=0.08, length=size, prefetch=0, seed=2, **options
    )
    with loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            n = 0
            for batch in loader:
                assert np.array_equal(batch.x.numpy(), ROWS[batch.input_ids.numpy()]), f"wrong rows in batch {batch.index}"
                n += 1
                del batch
            assert n == N_BATCHES


def superbatch(g: Any, pack: Any, policy: Any) -> None:
    run(g, policy, strategy="superbatch")


def serial(g: Any, pack: Any, policy: Any) -> None:
    run(g, policy, strategy="ginex", size=6)


def streamed(g: Any, pack: Any, policy: Any) -> None:
    run(g, policy, strategy="streamed")


def packed(g: Any, pack: Any, policy: Any) -> None:
    try:
        run(g, policy, strategy="packed", pack=pack)
    except featstore.PluginError:
        assert not find_layouts(pack), "a layout that was refused is there"
        raise
    for layout in find_layouts(pack):
        shutil.rmtree(pack.file(layout.name))


def simulated(g: Any, pack: Any, policy: Any) -> None:
    batches = [pack.ids(number) for number in range(len(pack))]
    made = featstore.get_policy(policy)
    for _ in range(2):
        loads = featstore.simulate(batches, 24, made, n=N)
        assert (loads <= [len(ids) for ids in batches]).all()
        assert loads.sum() >= featstore.simulate(batches, 24, n=N).sum()


WAYS = {"superbatch": superbatch, "serial": serial, "streamed": streamed, "packed": packed, "simulate": simulated}
LOADERS = [way for way in WAYS if way != "simulate"]


def state(g: Any) -> tuple[Any, ...]:
    """Note what must be as before: memory held, threads, run files."""
    g.cache("x", 0)
    g.pool.trim()
    if "sampler scratch" in g.memory_report():
        gc.collect()  # a sampler, of which a loop or the traceback of an error are not collected yet
    threads = sorted(thread.name for thread in threading.enumerate())
    return {**g.memory_report()}, threads, os.path.exists(f"{g.path}.runs"), len(os.listdir("/proc/self/fd"))


def misbehave(g: Any, pack: Any, way: Callable[..., None], wrong: Misbehaviour) -> str:
    """Run a misbehaviour; return what came of it."""
    policy = wrong.make()
    before = state(g)
    try:
        way(g, pack, policy)
    except featstore.PluginError as error:
        assert "Wrong" in str(error), f"does not name the policy: {error}"
        outcome = REFUSED
        del error
    else:
        outcome = RIGHT
    assert state(g) == before
    assert policy.n_spoiled, "it had nothing to do wrong"
    return outcome


def check(graph: Any, pack: Any, wrong: Misbehaviour, way: str) -> None:
    outcome = misbehave(graph, pack, WAYS[way], wrong)
    assert wrong.outcome in (EITHER, outcome)


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_in_a_simulation(graph: Any, pack: Any, wrong: Misbehaviour) -> None:
    check(graph, pack, wrong, "simulate")


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("wrong", one_in(20, TABLE), ids=lambda wrong: wrong.name)
def test_in_a_loader(graph: Any, pack: Any, wrong: Misbehaviour, way: str) -> None:
    check(graph, pack, wrong, way)


@pytest.mark.parametrize("way", WAYS)
def test_the_next_policy_works(graph: Any, pack: Any, way: str) -> None:
    for wrong in TABLE[:2]:
        misbehave(graph, pack, WAYS[way], wrong)
        WAYS[way](graph, pack, "belady")
        WAYS[way](graph, pack, Base)


def test_a_batch_of_no_rows_may_evict(graph: Any) -> None:
    """A device may hold all rows of a batch, whose plan then changes a cache that it does not read."""
    graph.cache_for_planner(graph.features["x"], 4)
    store = graph.features["x"]
    rows, none = np.array([7, 9]), np.empty(0, np.int64)
    here = np.arange(2)
    plan = BatchPlan(2, (TierRows(Tier.BASE, rows, here),), Changeset(rows, here, here.astype(np.int32), none))
    store.gather(torch.from_numpy(rows), plan)
    assert store.cache.n_cached == 2
    store.gather(torch.from_numpy(none), BatchPlan(0, (), Changeset(none, none, none.astype(np.int32), rows[:1])))
    assert store.cache.n_cached == 1
    store.cache._check()
    graph.cache("x", 0)


def test_there_are_more_than_a_hundred() -> None:
    names = [wrong.name for wrong in TABLE]
    assert len(names) == len(set(names)) > 150
