"""Caches of edge features: the rows are those of a look-up in memory, fewer of them are read, and the memory is counted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.belady import Belady
from featstore.cache.lru import LRU
from featstore.gather.counters import ReadCounts
from featstore.strategies import auto
from featstore.strategies.domain import Domain
from featstore.topology.noderows import NodeRows
from tests.load.test_edges import FORMS, SAMPLERS, E, N, check, make
from tests.support.kernel_counts import kernel_bytes
from tests.support.sampled import covering

pytestmark = pytest.mark.shares_resources  # one graph for many tests

ONLINE = ["lru", "clock", "sieve", "s3fifo"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[featstore.OutOfCoreGraph]:
    """A graph of one form: edge ids are looked up in the same caches whatever the adjacency."""
    with make(tmp_path_factory.mktemp("edges") / "g", getattr(request, "param", "csc")) as g:
        yield g


def load(g: featstore.OutOfCoreGraph, strategy: featstore.Strategy, sampler: str = "neighbor", **more: Any) -> dict[str, Any]:
    """Run two epochs, each batch checked, of a pack where the strategy has one; return the counts of edges."""
    options = {"edge_features": ["w", "kind"], "labels": None, "strategy": strategy, **more}
    drawn = () if isinstance(strategy, featstore.Packed) else (SAMPLERS[sampler](g), torch.arange(N), 70)
    with featstore.Loader(g, *drawn, **options) as loader:
        for _ in range(2):
            for batch in loader:
                check(batch)
        stats = loader.stats()
    assert stats["rows"] == sum(stats["hits"].values())
    found: dict[str, Any] = stats["edge_features"]
    return found


def check_caches(g: featstore.OutOfCoreGraph) -> None:
    """Check that both features have a cache of half of the edges, in use and counted."""
    for name in ("w", "kind"):
        cache = g.edge_features[name].cache
        assert cache.capacity == E // 2
        assert cache.stats()["hits"] > 0
        assert g.memory_report()[f"cache of edge feature '{name}'"] >= cache.nbytes


@pytest.mark.parametrize(("graph", "policy", "sampler"), covering(FORMS, ONLINE, SAMPLERS), indirect=["graph"])
def test_on_demand(graph: featstore.OutOfCoreGraph, policy: str, sampler: str, device: str) -> None:
    without = load(graph, featstore.OnDemand(), sampler, device=device)
    with_cache = load(graph, featstore.OnDemand(edge_cache=0.5, edge_policy=policy), sampler, device=device)
    assert with_cache["rows_loaded"] < without["rows_loaded"]
    check_caches(graph)
    assert load(graph, featstore.OnDemand(cache="auto", edge_cache=0), sampler)["rows_loaded"] == without["rows_loaded"]
    empty = graph.edge_features["w"].cache
    assert not empty.capacity
    assert not any("edge feature" in holder for holder in graph.memory_report())


PLANNED = {"superbatch": featstore.Superbatch, "ginex": featstore.Ginex, "streamed": featstore.Streamed}


@pytest.mark.parametrize(("strategy", "sampler"), covering(PLANNED, SAMPLERS))
def test_planned(graph: featstore.OutOfCoreGraph, strategy: str, sampler: str, device: str) -> None:
    without = load(graph, PLANNED[strategy](length=3), sampler, device=device)
    with_cache = load(graph, PLANNED[strategy](length=3, edge_cache=0.5), sampler, device=device)
    if sampler == "all":  # of one hop: an epoch comes to each edge once
        assert with_cache["rows_loaded"] == without["rows_loaded"] == 2 * 2 * E
        return
    assert with_cache["rows_loaded"] < without["rows_loaded"]
    check_caches(graph)
    assert not os.path.exists(f"{graph.path}.runs") or not os.listdir(f"{graph.path}.runs")


@pytest.mark.parametrize(
    ("sampler", "share", "length"), covering(["neighbor", "all", "by layers"], [0.05, 0.3, 1.0], ["auto", 3], together=2)
)
def test_plans_load_what_belady_loads(graph: featstore.OutOfCoreGraph, sampler: str, share: float, length: str | int) -> None:
    """An epoch loads each feature's rows as the simulation of the batches' distinct edges does.

    In one superbatch, and in two: the first is planned with what the second uses, so it loads the same, and the second starts
    with what the first left.
    """
    with featstore.Loader(graph, SAMPLERS[sampler](graph), torch.arange(N), 70, labels=None) as loader:
        trace = [np.unique(np.concatenate([block.edge_pos.numpy() for block in batch.blocks])) for batch in loader]
    expected = int(featstore.simulate(trace, round(share * E), policy="belady").sum())
    assert 3 < len(trace) <= 2 * 3
    strategy = featstore.Superbatch(edge_cache=share, length=length)
    options = {"edge_features": ["w", "kind"], "labels": None, "strategy": strategy}
    with featstore.Loader(graph, SAMPLERS[sampler](graph), torch.arange(N), 70, **options) as loader:
        for batch in loader:
            check(batch)
        assert loader.stats()["edge_features"]["rows_loaded"] == 2 * expected


@pytest.fixture(scope="module")
def packs(graph: featstore.OutOfCoreGraph, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A pack of each sampler's batches, two epochs."""
    made = {}
    for name, sampler in SAMPLERS.items():
        made[name] = str(tmp_path_factory.mktemp("packs") / "pack")
        featstore.sample_offline(graph, sampler(graph), torch.arange(N), 70, epochs=2, path=made[name], progress=False).close()
    return made


@pytest.mark.parametrize(("sampler", "policy"), covering(SAMPLERS, ["lru", "sieve"]))
def test_packed(graph: featstore.OutOfCoreGraph, packs: dict[str, str], sampler: str, policy: str, device: str) -> None:
    """A pack's edges go through the same cache as those of batches that are sampled on demand: as many rows are loaded."""
    without = load(graph, featstore.Packed(packs[sampler], cache=0.1, edge_cache=0), device=device)
    cached = featstore.Packed(packs[sampler], cache=0.1, edge_cache=0.5, edge_policy=policy)
    with_cache = load(graph, cached, device=device)
    assert with_cache["rows_loaded"] < without["rows_loaded"]
    check_caches(graph)
    on_demand = load(graph, featstore.OnDemand(edge_cache=0.5, edge_policy=policy), sampler, prefetch=0, device=device)
    cached = featstore.Packed(packs[sampler], edge_cache=0.5, edge_policy=policy)
    with_cache = load(graph, cached, prefetch=0, device=device)
    if sampler in ("drawing once", "subgraphs"):  # a file has the edges of each block; here the blocks are one array
        assert with_cache["rows_loaded"] > on_demand["rows_loaded"]
    else:
        assert with_cache["rows_loaded"] == on_demand["rows_loaded"]


@pytest.mark.parametrize(
    "taken", [("ondemand", "frequency"), ("ondemand", "sieve"), ("superbatch", "belady"), ("streamed", "belady")]
)
def test_auto(graph: featstore.OutOfCoreGraph, taken: tuple[str, str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy taken has the cache, whichever it is, and the estimate is made without the cache's bytes."""
    rows: list[int] = []
    decide = auto.decide

    def decided(context: Any, planning: Any, cache: Any, *, capacity: int, **more: Any) -> Any:
        rows.append(capacity)
        found = decide(context, planning, cache, capacity=capacity, **more)
        return dataclasses.replace(found, strategy=taken[0], policy=taken[1])

    monkeypatch.setattr(auto, "decide", decided)
    without = load(graph, featstore.OnDemand(edge_cache=0), device=device)
    with_cache = load(graph, featstore.Auto(cache=0.5, edge_cache=0.5), device=device)
    assert with_cache["rows_loaded"] < without["rows_loaded"]
    check_caches(graph)
    assert "caches of edge features" not in graph.memory_report()
    load(graph, featstore.Auto(cache=0.5, edge_cache=0), device=device)
    assert rows == [N // 2, N // 2]  # they fit beside it


def test_auto_takes_the_cache_off_the_memory(graph: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static policy that ``Superbatch`` is given goes without: it would plan the edges by scores of nodes."""
    rooms: list[int] = []
    decide = auto.decide

    def decided(context: Any, planning: Any, cache: Any, **more: Any) -> Any:
        rooms.append(context.budget.available)
        return dataclasses.replace(decide(context, planning, cache, **more), strategy="superbatch", policy="degree")

    monkeypatch.setattr(auto, "decide", decided)
    for size in (0, "60kB"):
        with featstore.open(graph.path, memory="64MiB", threads=1) as g:
            load(g, featstore.Auto(cache=0.5, edge_cache=size), prefetch=0)
            assert not any("edge feature" in holder for holder in g.memory_report())
    assert 50_000 < rooms[0] - rooms[1] <= 60_000


def test_all_edges_fit(graph: featstore.OutOfCoreGraph) -> None:
    """Each edge is read once, whatever the number of batches and blocks that have it."""
    with featstore.Loader(graph, SAMPLERS["all"](graph), torch.arange(N), 70, labels=None) as loader:
        batches = [{int(pos) for block in batch.blocks for pos in block.edge_pos} for batch in loader]
    assert load(graph, featstore.OnDemand(edge_cache="100%"), "all")["rows_loaded"] == 2 * len(set().union(*batches))


def test_bytes_are_those_that_the_kernel_read(tmp_path: Path) -> None:
    n = 60_000
    rng = np.random.default_rng(0)
    w = rng.random((n, 100), dtype=np.float32)
    options: dict[str, Any] = {"edge_features": {"w": w}, "progress": False}
    indptr = np.arange(0, n + 1, 20)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, rng.integers(0, n // 20, n), **options).close()
    with featstore.open(tmp_path / "g", memory="64MiB", verify="off") as g:
        if g.edge_features["w"].stats()["mode"] != "direct":
            pytest.skip("no direct reads here: the kernel's counts tell nothing")
        sampler = featstore.NeighborSampler(g, [5], edges=True)
        options = {"features": [], "labels": None, "edge_features": "w", "strategy": featstore.OnDemand(edge_cache=0.3)}
        sampler.sample(torch.arange(n // 20))  # offsets are read
        with featstore.Loader(g, sampler, torch.arange(n // 20), 100, prefetch=0, **options) as loader:
            sampled = [sampler.sample(batch.seeds, 0, batch.index) for batch in loader]  # what lists and numbers take
            before, first = kernel_bytes(), loader.stats()["edge_features"]["bytes_read"]
            n_batches = sum(1 for _ in loader)
            read = loader.stats()["edge_features"]["bytes_read"] - first
            whole = kernel_bytes() - before
            before = kernel_bytes()
            for k, each in enumerate(sampled):
                sampler.sample(each.seeds, 1, k)
            others = kernel_bytes() - before
    assert n_batches == len(sampled)
    assert read > 0
    assert abs(whole - others - read) <= whole // 20  # lists of the other order of the seeds cost much the same


@pytest.mark.parametrize("kind", ["on demand", "packed"])
def test_an_instance_of_a_policy_serves_one_cache(graph: featstore.OutOfCoreGraph, packs: dict[str, str], kind: str) -> None:
    cached: dict[str, Any] = {"edge_cache": 0.1, "edge_policy": LRU()}
    strategy = featstore.OnDemand(**cached) if kind == "on demand" else featstore.Packed(packs["neighbor"], cache=0.1, **cached)
    with pytest.raises(featstore.OptionError, match="an instance serves one cache"):
        load(graph, strategy)
    drawn = (SAMPLERS["neighbor"](graph), torch.arange(N), 70) if kind == "on demand" else ()
    with featstore.Loader(graph, *drawn, strategy=strategy, edge_features="w", labels=None) as loader:
        for batch in loader:
            check(batch, ("w",))


@pytest.mark.parametrize(("options", "match"), [({"edge_policy": "lru"}, "no cache"), ({"edge_cache": "auto"}, "has a size")])
@pytest.mark.parametrize("strategy", [featstore.OnDemand, featstore.Packed])
def test_refused(strategy: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(featstore.OptionError, match=match):
        strategy(**options)


@pytest.mark.parametrize("strategy", PLANNED.values())
def test_policies_that_plan_no_edges(strategy: type[featstore.Superbatch]) -> None:
    for policy, match in (("degree", "scores of a static policy are of nodes"), (Belady(), "a policy instance plans one cache")):
        with pytest.raises(featstore.OptionError, match=match):
            strategy(edge_cache=0.1, policy=policy)


def test_a_loop_that_ends_early_and_another_loader(graph: featstore.OutOfCoreGraph) -> None:
    strategy = featstore.Superbatch(edge_cache=0.4, length=2)
    options = {"edge_features": ["w", "kind"], "labels": None, "strategy": strategy}
    sampler = SAMPLERS["neighbor"](graph)
    with featstore.Loader(graph, sampler, torch.arange(N), 70, **options) as loader:
        running = iter(loader)
        check(next(running))
        with featstore.Loader(graph, sampler, torch.arange(N), 70, labels=None, features=[], edge_features="w") as other:
            for batch in other:  # through the cache that the first loader plans
                check(batch, ("w",))
        for beside in (strategy, featstore.OnDemand(edge_cache=0.2)):
            with featstore.Loader(
                graph, sampler, torch.arange(N), 70, **{**options, "features": [], "strategy": beside}
            ) as other:
                for batch in other:
                    check(batch)
                assert other.stats()["epochs_beside"] == (beside is strategy)
        check(next(running))
        running.close()
        for batch in loader:
            check(batch)
        load(graph, featstore.OnDemand(edge_cache=0.2))  # takes the caches' place
        for batch in loader:
            check(batch)


def test_a_cache_beyond_the_memory(graph: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    with featstore.open(graph.path, memory="2MiB", threads=1) as g:
        before = g.memory_report()
        options = {"labels": None, "strategy": featstore.OnDemand(edge_cache="3MiB"), "edge_features": "w"}
        # As many rows as there are edges fit in less; rows of 2 KB do not.
        with featstore.Loader(g, SAMPLERS["neighbor"](g), torch.arange(N), 70, **options) as loader:
            assert sum(1 for _ in loader) == 5
        assert before.keys() <= g.memory_report().keys()
    rows = np.random.default_rng(0).random((E, 500), dtype=np.float32)
    make(tmp_path / "g", edge_features={"w": rows}).close()
    with featstore.open(tmp_path / "g", memory="4MiB", threads=1) as g:
        options = {"labels": None, "strategy": featstore.OnDemand(edge_cache="50%"), "edge_features": "w"}
        with pytest.raises(featstore.BudgetError) as caught:
            featstore.Loader(g, SAMPLERS["neighbor"](g), torch.arange(N), 70, **options)
        assert caught.value.needed is not None
        needed = caught.value.needed
        assert not any("edge feature" in holder for holder in g.memory_report())
    with featstore.open(tmp_path / "g", memory=needed, threads=1) as g:
        with featstore.Loader(g, SAMPLERS["neighbor"](g), torch.arange(N), 70, **options) as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch.edge_features["w"][0], rows[batch.blocks[0].edge_pos])
        assert g.budget.peak <= needed


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "g"
    make(path, edge_features={"w": np.random.default_rng(0).random((E, 300), dtype=np.float32)}).close()
    return path


@pytest.mark.filterwarnings("ignore:strategy '(superbatch|ginex|streamed)':featstore.PerformanceWarning")
@pytest.mark.parametrize(("strategy", "kib"), covering(["ondemand", *PLANNED, "auto", "packed"], [1500, 4000, 9000, 20_000]))
def test_whatever_the_memory(wide: Path, strategy: str, kib: int, tmp_path: Path) -> None:
    """Batches come, the same, in the memory that is given or else in that which an error names; and never more is held."""
    kinds: dict[str, Any] = {"ondemand": featstore.OnDemand, **PLANNED, "auto": featstore.Auto}
    kinds["packed"] = partial(featstore.Packed, tmp_path / "pack")
    chosen = kinds[strategy](cache="auto", edge_cache=0.2)
    if strategy == "packed":
        with featstore.open(wide, memory="64MiB") as g:
            sampler = featstore.NeighborSampler(g, [4, 3], seed=2, edges=True)
            featstore.sample_offline(g, sampler, torch.arange(N), 70, path=tmp_path / "pack", progress=False).close()
    rows = np.random.default_rng(0).random((E, 300), dtype=np.float32)
    memory = kib << 10
    for _ in range(3):
        try:
            with featstore.open(wide, memory=memory, backend="pread", threads=1) as g:
                sampler = featstore.NeighborSampler(g, [4, 3], seed=2, edges=True)
                options = {"labels": None, "edge_features": "w", "strategy": chosen, "prefetch": 1}
                drawn = () if strategy == "packed" else (sampler, torch.arange(N), 70)
                with featstore.Loader(g, *drawn, **options) as loader:
                    for _ in range(2):
                        for batch in loader:
                            for block, found in zip(batch.blocks, batch.edge_features["w"], strict=True):
                                np.testing.assert_array_equal(found, rows[block.edge_pos])
                            del block, found, batch
                assert g.budget.peak <= memory
                return
        except featstore.BudgetError as error:
            assert error.needed is not None, error
            assert error.needed > memory, error
            memory = error.needed
    raise AssertionError(f"{memory} bytes, which an error named, do not do either")


def test_room_is_made_but_for_caches_in_use(graph: featstore.OutOfCoreGraph) -> None:
    """A cache of edges that is in use stays, those of nodes leave; and where nothing is named nothing is asked of the graph."""
    Domain(object(), 0, {}, ReadCounts(), NodeRows(0)).drop_caches()
    edges = Domain.of_edges(graph, ["w"])
    nodes = Domain.of_nodes(graph, ["x"])
    strategy = featstore.Superbatch(length=3, edge_cache=0.5)
    options = {"edge_features": ["w"], "features": (), "labels": None, "strategy": strategy}
    with featstore.Loader(graph, SAMPLERS["neighbor"](graph), torch.arange(N), 70, **options) as loader:
        graph.cache("x", budget="10%", policy="lru")
        used = graph.edge_features["w"].cache
        epoch = iter(loader)
        next(epoch)
        nodes.drop_caches()
        edges.drop_caches()
        assert graph.features["x"].cache is None or not graph.features["x"].cache.capacity
        assert graph.edge_features["w"].cache is used
        assert used.capacity
    nodes.drop_caches()
    edges.drop_caches()
    assert graph.features["x"].cache is None or not graph.features["x"].cache.capacity
    assert graph.edge_features["w"].cache is None or not graph.edge_features["w"].cache.capacity
