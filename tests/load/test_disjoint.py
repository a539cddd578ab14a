"""Loaders of batches with a subgraph for each seed: every strategy gathers distinct rows, and delivers one to each node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import BudgetError, Ginex, Loader, NeighborSampler, OnDemand, Streamed, Superbatch
from featstore.budget import Budget
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool
from featstore.load.disjoint import Places, room_for
from featstore.plan.samples import SampleWriter
from featstore.sampling.batch import NodeCopies
from tests.support.refusing import refuses
from tests.support.typed import TypedArrays, academic

pytestmark = [pytest.mark.shares_resources, pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")]

STRATEGIES: dict[str, Any] = {
    "online": OnDemand(cache=0.1, policy="lru"),
    "superbatch": Superbatch(length=3, cache=0.1),
    "fixed": Superbatch(length=4, cache=0.2, policy="degree"),
    "ginex": Ginex(length=4, cache=0.1),
    "streamed": Streamed(length=4, cache=0.1),
    "auto": "auto",
}
SEEDS = np.random.default_rng(1).integers(0, 2000, 500)  # some of them repeat


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    """Rows of papers and authors of different widths, and features of two types of edges."""
    graph, rng = academic(papers=2000), np.random.default_rng(3)
    graph.features["author"] = {"x": rng.standard_normal((1000, 5)).astype(np.float32)}
    for key in list(graph.edges)[:3:2]:
        graph.edge_features[key] = {"w": rng.standard_normal((graph.edges[key].shape[1], 2)).astype(np.float32)}
    return graph


@pytest.fixture(scope="module", params=["csc", "chunked"])
def g(request: pytest.FixtureRequest, tmp_path_factory: Any, graph: TypedArrays) -> Any:
    with graph.create(tmp_path_factory.mktemp(request.param) / "g", topology=request.param, memory="64MiB") as opened:
        yield opened


def epoch(g: Any, strategy: Any, **options: Any) -> list[Any]:
    sampler = NeighborSampler(g, [4, 3], redraw=False, edges=True, disjoint=True)
    options = {"features": "x", "edge_features": "w", "strategy": strategy, **options}
    with Loader(g, sampler, ("paper", SEEDS), 64, **options) as loader:
        return sorted(loader, key=lambda batch: batch.index)


def check(graph: TypedArrays, batch: Any) -> None:
    assert batch.batch is not None
    n = len(batch.seeds)
    assert torch.equal(batch.batch["paper"][:n], torch.arange(n))
    for kind, ids in batch.input_ids.items():
        assert len(ids) == len(batch.batch[kind]) == sum(batch.num_sampled_nodes[kind])
        pairs = batch.batch[kind] * graph.n[kind] + ids
        assert len(pairs.unique()) == len(pairs)  # a node is in a subgraph once
        if kind in graph.features:
            assert np.array_equal(batch.x[kind].numpy(), graph.features[kind]["x"][ids.numpy()])
    for number, hop in enumerate(batch.blocks):
        for key, block in hop.items():
            ends = batch.batch[key[0]][block.src], batch.batch[key[2]][block.dst]
            assert torch.equal(*ends)
            pairs = np.stack([batch.input_ids[key[0]][block.src].numpy(), batch.input_ids[key[2]][block.dst].numpy()])
            assert np.array_equal(graph.edges[key][:, block.edge_pos.numpy()], pairs)
            if key in graph.edge_features:
                rows = graph.edge_features[key]["w"][block.edge_pos.numpy()]
                assert np.array_equal(batch.edge_features["w"][number][key].numpy(), rows)
    assert np.array_equal(batch.y.numpy(), graph.data["paper"]["y"][SEEDS[batch.seed_positions.numpy()]])
    assert torch.equal(batch.seeds[batch.seed_index], torch.from_numpy(SEEDS[batch.seed_positions.numpy()]))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        len(a._tensors()) == len(b._tensors()) and all(map(torch.equal, a._tensors(), b._tensors()))
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def expected(g: Any, graph: TypedArrays) -> list[Any]:
    found = epoch(g, OnDemand(cache=None))
    for batch in found:
        check(graph, batch)
    assert any(len(batch.input_ids["paper"]) > 1.5 * len(batch.input_ids["paper"].unique()) for batch in found)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_delivers_the_same(g: Any, expected: list[Any], name: str) -> None:
    assert same(epoch(g, STRATEGIES[name]), expected)


@pytest.mark.parametrize("features", ["x", {"author": "x", "paper": "x"}])
def test_a_column_of_several_types(features: Any, tmp_path: Path) -> None:
    """Rows are gathered type after type, in another order than the nodes."""
    graph, rng = academic(papers=500), np.random.default_rng(3)
    for kind in ("author", "institution"):
        graph.features[kind] = {"x": rng.standard_normal((graph.n[kind], 16)).astype(np.float16)}
    with graph.create(tmp_path / "g") as g:
        sampler = NeighborSampler(g, [4, 3], disjoint=True)
        for strategy in (OnDemand(cache=0.1), Streamed(length=2, cache=0.1)):
            with Loader(g, sampler, ("paper", np.arange(99)), 20, features=features, strategy=strategy) as loader:
                for batch in loader:
                    for kind, rows in batch.x.items():
                        assert np.array_equal(rows.numpy(), graph.features[kind]["x"][batch.input_ids[kind].numpy()])


def test_rows_that_a_device_has(g: Any, graph: TypedArrays) -> None:
    """Rows are copied to the nodes once those of the host and of the device are together."""
    before = epoch(g, OnDemand(cache=None), features={"paper": "x"}, edge_features=())
    for strategy in (OnDemand(cache=0.1), Superbatch(length=3, cache=0.1)):
        assert same(epoch(g, strategy, features={"paper": "x"}, edge_features=(), device_cache=0.2), before)


def test_moving_a_batch(expected: list[Any]) -> None:
    batch = expected[0]
    assert same([batch.to("cpu")], [batch])
    there = batch.to("meta")
    assert there.batch["paper"].is_meta
    assert there.nbytes == batch.nbytes


@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_packs(topology: str, tmp_path: Path) -> None:
    """A pack holds the subgraphs; a layout has the distinct rows of each batch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((800, 6)).astype(np.float32)
    pairs = rng.integers(0, 800, (2, 8000))
    with featstore.OutOfCoreGraph.from_edge_index(
        tmp_path / "g", pairs, 800, features={"x": x}, node_data={"y": np.arange(800)}, topology=topology
    ) as g:
        sampler = NeighborSampler(g, [4, 3], seed=2, disjoint=True)
        featstore.sample_offline(g, sampler, np.arange(300), 50, path=tmp_path / "p", epochs=2, progress=False).close()
        with Loader(g, features="x", labels="y", strategy=featstore.Packed(tmp_path / "p")) as packed:
            for number in range(2):
                order = featstore.RandomBatches(np.arange(300), 50).epoch(number)
                for batch in packed:
                    sampled = sampler.sample(batch.seeds, number, batch.index)
                    assert sampled.copies is not None
                    assert torch.equal(batch.input_ids, sampled.nodes)
                    assert torch.equal(batch.batch, sampled.copies.batch)
                    assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()])
                    assert torch.equal(batch.y, batch.seeds)
                assert len(order) == 6
        with featstore.Pack(tmp_path / "p") as pack:
            assert pack.lengths[0] == len(pack.ids(0)) == len(np.unique(pack.ids(0)))


def test_files_of_samples(tmp_path: Path) -> None:
    """Samples are read as written; positions and subgraphs that a batch has not are corruption, and so is a batch without."""
    pairs = np.random.default_rng(0).integers(0, 90, (2, 900))
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, 90) as g:
        batch = NeighborSampler(g, [3, 2], disjoint=True).sample(torch.arange(20))
        plain = NeighborSampler(g, [3, 2]).sample(torch.arange(20))
        assert batch.copies is not None
        rows, numbers = batch.copies.tensors
        writer = SampleWriter(tmp_path / "a", 90)
        writer.add(batch)
        refuses(featstore.PluginError, "after one of 2 blocks .* and a subgraph for each seed", lambda: writer.add(plain))
        file = writer.finish_samples()
        again = file.batch(0, g.pool)
        assert again.copies is not None
        assert len(again.tensors) == len(batch.tensors)
        assert all(map(torch.equal, again.tensors, batch.tensors))
        file.remove()
        for bad in (
            NodeCopies(rows + 1, numbers),
            NodeCopies(rows, numbers - 1),
            NodeCopies(rows, numbers + 1),
            NodeCopies(rows[:-1], numbers[:-1]),
            NodeCopies(rows, numbers[:-1]),
        ):
            writer = SampleWriter(tmp_path / "b", 90)
            writer.add(replace(batch, copies=bad))
            file = writer.finish_samples()
            with pytest.raises(CorruptionError, match="copies of nodes in batch 0"):
                file.batch(0, g.pool)
            file.remove()


@pytest.mark.parametrize("strategy", [OnDemand(), Superbatch(), Streamed()])
def test_any_memory(strategy: Any, tmp_path: Path) -> None:
    """An epoch ends with the same batches within the memory, or an error names more memory, which suffices."""
    rng = np.random.default_rng(0)
    n, hubs = 20_000, 300
    x = rng.standard_normal((n, 64)).astype(np.float32)
    pairs = np.stack([rng.integers(0, hubs, 10 * n), rng.integers(0, n, 10 * n)])  # nodes that many subgraphs share
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, n, features={"x": x}).close()
    n_ran = 0
    for memory in (400_000, 2_000_000, 5_000_000, 20_000_000):
        for _ in range(3):
            try:
                with featstore.open(tmp_path / "g", memory=memory, threads=2) as g:
                    sampler = NeighborSampler(g, [4, 3], disjoint=True)
                    with Loader(g, sampler, np.arange(0, n, 40), 100, features="x", labels=None, strategy=strategy) as loader:
                        for batch in loader:
                            assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()])
                    assert g.memory_report().peak <= g.budget.total
                n_ran += 1
                break
            except BudgetError as error:
                assert error.needed is not None
                assert error.needed > memory
                memory = error.needed
        else:
            pytest.fail(f"what the errors name does not suffice: {memory}")
    assert n_ran == 4


@pytest.mark.parametrize("strategy", [OnDemand(cache=None), Superbatch(length=4, cache=0.05)])
def test_batches_of_very_different_sizes(strategy: Any, tmp_path: Path) -> None:
    """A few seeds reach many nodes: their batches take idle memory, those of plans and of rows for a device among it."""
    rng, n = np.random.default_rng(0), 8000
    heavy = rng.choice(n, 240, replace=False)
    light = np.setdiff1d(np.arange(n), heavy)
    dst = np.concatenate([np.repeat(heavy, 1500), np.repeat(light, 4)])
    pairs = np.stack([rng.integers(0, 2000, len(dst)), dst])
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, n, features={"x": np.ones((n, 128), np.float32)}).close()
    for more in ({}, {"device_cache": 0.01}):
        memory, n_refused = 6_500_000, 0
        while True:
            try:
                with featstore.open(tmp_path / "g", memory=memory, threads=2) as g:
                    options: dict[str, Any] = {"labels": None, "strategy": strategy, "prefetch": 4, **more}
                    with Loader(g, NeighborSampler(g, [-1], disjoint=True), np.arange(0, n, 2), 40, **options) as loader:
                        assert sum(len(batch.seeds) for batch in loader) == n // 2
                    assert g.memory_report().peak <= g.budget.total
                break
            except BudgetError as error:
                assert "does not fit" in str(error) or "too small" in str(error)
                assert error.needed is not None
                memory, n_refused = max(memory + 1, error.needed), n_refused + 1
                assert n_refused < 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2)])
def test_rows_of_any_form(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = BufferPool(Budget(10**8))
    rows = torch.arange(5 * int(np.prod(shape, dtype=int))).reshape(5, *shape).to(dtype)
    for places in ([4, 0, 0, 2, 4, 1], [3], []):
        at = torch.tensor(places, dtype=torch.int64)
        found = Places(at, room_for(rows, at, pool)).of(rows)
        assert found.dtype == dtype
        assert found.shape == (len(at), *shape)
        assert found.tolist() == [rows[place].tolist() for place in places]
        assert Places(at, None).of(rows.to("meta")).shape == found.shape


def test_a_history_has_one_row_a_node(g: Any, tmp_path: Path) -> None:
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", np.array([[0, 1], [1, 2]]), 3) as one:
        sampler = NeighborSampler(one, [2, 2], disjoint=True)
        options: dict[str, Any] = {"features": [], "labels": None, "history": featstore.History(4)}
        refuses(featstore.OptionError, "disjoint", lambda: Loader(one, sampler, [0], 1, **options))
