"""Plug-ins that write to what they are given: of each kind, in a dataset of each form. Nothing of the graph changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon, PlannedBatch
from featstore.errors import PluginError
from featstore.strategies.ondemand import OnDemand
from tests.support.graphs import make_graph

N = 400
INDPTR, INDICES = make_graph(N, 5.0)
SEEDS = np.arange(0, N, 2)


@pytest.fixture(params=["csc", "chunked"])
def g(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    """A graph whose samples are those of a graph of its own that no plug-in has seen, also after the test."""
    options: dict[str, Any] = {"progress": False, "topology": request.param}
    features = {"x": np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", INDPTR, INDICES, features, {"y": np.arange(N)}, **options).close()
    with featstore.open(tmp_path / "g", memory="64MiB") as g, featstore.open(tmp_path / "g", memory="64MiB") as other:
        yield g
        for each in range(0, N, 40):
            mine, fresh = (featstore.NeighborSampler(one, [-1]).sample(torch.arange(each, each + 40)) for one in (g, other))
            for a, b in zip(mine.tensors, fresh.tensors, strict=True):
                assert torch.equal(a, b), f"nodes {each} …"
        with g.policy_inputs(1) as inputs:
            assert np.array_equal(inputs.context.in_degree, np.diff(INDPTR))
            assert np.array_equal(inputs.context.out_degree, np.bincount(INDICES, minlength=N))


def write(*arrays: Any) -> int:
    """Try to write to arrays; return how many were tried."""
    for array in arrays:
        assert len(array), "there is nothing to write to"
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    return len(arrays)


def test_a_static_policy(g: featstore.OutOfCoreGraph) -> None:
    tried = []

    class Writes(featstore.StaticPolicy):
        needs_parts = True

        def scores(self, context: featstore.PolicyContext) -> Any:
            names = ["in_degree", "out_degree", "counts", "parts", "cross_out_degree"]
            tried.append(write(*(getattr(context, name) for name in names)))
            return context.out_degree

    counts, parts = np.arange(N), torch.arange(N, dtype=torch.int32) % 4
    featstore.partition(g, 4, parts, name="four", progress=False)
    g.cache("x", "10%", Writes(), counts=counts, parts=parts)
    assert tried == [5]
    assert np.array_equal(counts, np.arange(N))
    assert torch.equal(parts, torch.arange(N, dtype=torch.int32) % 4)

    class Lets(featstore.StaticPolicy):
        def scores(self, context: featstore.PolicyContext) -> Any:
            context.out_degree[:] = 0
            return context.out_degree

    with pytest.raises(PluginError, match=r"policy '.*Lets': scores failed: ValueError: assignment destination is read-only"):
        g.cache("x", "10%", Lets())


def test_an_online_policy(g: featstore.OutOfCoreGraph) -> None:
    tried = {"hit": 0, "insert": 0}

    class Writes(type(featstore.get_policy("lru"))):  # type: ignore[misc]
        def hit(self, slots: Any) -> None:
            tried["hit"] += write(slots)
            super().hit(slots)

        def insert(self, rows: Any, slots: Any) -> None:
            tried["insert"] += write(rows, slots)
            super().insert(rows, slots)

    g.cache("x", "10%", Writes())
    x = g.features["x"][:].clone()
    for first in (0, 10, 0, 200, 10):
        ids = torch.arange(first, first + 30)
        assert torch.equal(g.features["x"][ids], x[ids])
    assert min(tried.values()) > 0


def test_a_planned_policy(g: featstore.OutOfCoreGraph) -> None:
    tried = {"window": 0, "residents": 0}

    class Writes(Belady):
        def start(self, capacity: int, context: Any, residents: Any = ()) -> None:
            if len(residents):
                tried["residents"] += write(residents)
                super().start(capacity, context, residents)
            else:
                super().start(capacity, context)

        def plan(self, window: Horizon) -> Iterator[PlannedBatch]:
            tried["window"] += write(window.offsets, *(window.ids(b) for b in range(window.n_batches)))
            yield from super().plan(window)

    sampler = featstore.NeighborSampler(g, [3])
    want = [batch.x.clone() for batch in featstore.Loader(g, sampler, SEEDS, 20)]
    for strategy in (featstore.Superbatch(cache=0.1, policy=Writes, length=4), featstore.Ginex(0.1, policy=Writes, length=4)):
        with featstore.Loader(g, sampler, SEEDS, 20, strategy=strategy) as loader:
            for batch, rows in zip(loader, want, strict=True):
                assert torch.equal(batch.x, rows)
        if isinstance(strategy, featstore.Ginex):
            assert tried["residents"] > 0
    assert tried["window"] > 0


def test_a_partitioner(g: featstore.OutOfCoreGraph) -> None:
    tried = []

    class Writes(featstore.Partitioner):
        n_passes = 2  # type: ignore[assignment]

        def assign(self, graph: featstore.GraphStream) -> Any:
            tried.append(write(graph.indptr, graph.is_train))
            tried.extend(write(ids) for _, ids in graph.blocks())
            tried.extend(write(block.offsets, block.ids) for block in graph.list_blocks())
            assert np.array_equal(graph.indptr, INDPTR)
            return np.diff(graph.indptr) % graph.n_parts

    train = torch.from_numpy(SEEDS.copy())
    parts = featstore.partition(g, 4, Writes(), train_idx=train, keep=False, progress=False)
    assert parts.tolist() == (np.diff(INDPTR) % 4).tolist()
    assert len(tried) >= 3
    assert torch.equal(train, torch.from_numpy(SEEDS))

    class Lets(featstore.Partitioner):
        def assign(self, graph: featstore.GraphStream) -> Any:
            graph.indptr[:] = 0

    with pytest.raises(PluginError, match=r"partitioner '.*Lets': assign raised ValueError: assignment destination is read-only"):
        featstore.partition(g, 4, Lets(), keep=False, progress=False)


class Kept:
    """Batches that hand out slices of their own seeds."""

    batch_size, nbytes = 20, 0

    def __init__(self) -> None:
        self.ids = torch.from_numpy(SEEDS.copy())

    def __len__(self) -> int:
        return len(self.ids) // 20

    def check(self, num_nodes: int) -> None: ...

    def digest(self) -> str:
        return ""

    def epoch(self, epoch: int) -> Any:
        return self

    def seeds(self, index: int) -> torch.Tensor:
        return self.ids[20 * index : 20 * index + 20]


@pytest.mark.parametrize("is_function", [False, True])
def test_a_sampler(g: featstore.OutOfCoreGraph, is_function: bool) -> None:
    """A tensor cannot be read-only: each call has one of its own, whoever the batches are."""
    own = featstore.NeighborSampler(g, [3])

    class Writes:
        def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
            batch = own.sample(seeds, epoch=epoch, index=index)
            seeds.fill_(0)
            return batch

    def writes(seeds: torch.Tensor) -> Any:
        return Writes().sample(seeds)

    batches = Kept()
    with featstore.Loader(g, writes if is_function else Writes(), batches) as loader:  # type: ignore[arg-type]
        for _ in range(2):
            assert torch.cat([batch.seeds for batch in loader]).tolist() == SEEDS.tolist()
    assert batches.ids.tolist() == SEEDS.tolist()


def test_a_strategy(g: featstore.OutOfCoreGraph) -> None:
    """It is given the graph."""
    tried = []

    @dataclass(frozen=True)
    class Writes(OnDemand):
        def run(self, context: Any) -> Any:
            topology = context.graph.topology
            if topology.resident_offsets is not None:
                tried.append(write(topology.resident_offsets, topology.offsets_between(3, 90)))
            with context.graph.policy_inputs(1) as inputs:
                tried.append(write(inputs.context.in_degree, inputs.context.out_degree))
            context.graph.short_degrees()[:] = 0  # a copy
            return super().run(context)

    with featstore.Loader(g, featstore.NeighborSampler(g, [3]), SEEDS, 20, strategy=Writes()) as loader:
        assert len(list(loader)) == 10
    assert tried
    assert g.short_degrees().tolist() == np.bincount(INDICES, minlength=N).tolist()
