"""Historical embeddings: batches and rows against a dictionary that replays batches one by one."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
import tests.support.pyg  # noqa: F401
from featstore.sampling.historical import PrunedBatches, PushTimes
from featstore.sampling.sampledbatches import Drawn
from featstore.strategies.registry import find_strategy
from tests.support.cases import each
from tests.support.reference_history import PlainBatch, Replay
from tests.support.whole_graph import skewed_graph

from featstore.adapters.pyg import to_data  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings

N, BATCH = 300, 20
SEEDS = np.sort(np.random.default_rng(2).choice(N, 117, replace=False))  # a last batch that is not full
NODES = np.sort(np.random.default_rng(3).choice(N, 150, replace=False))
STRATEGIES: dict[str, Any] = {
    "ondemand": featstore.OnDemand(),
    "cached": featstore.OnDemand(cache=0.2, policy="lru"),
    "counted": featstore.OnDemand(cache=0.2, policy="frequency"),
    "superbatch": featstore.Superbatch(cache=0.1, length=2),
    "ginex": featstore.Ginex(cache=0.1, length=3),
    "streamed": featstore.Streamed(cache=0.1, length=2),
    "streamed, auto": featstore.Streamed(),
    "auto": featstore.Auto(cache=0.1),
}
SAMPLERS: dict[str, Any] = {
    "two hops": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1),
    "three hops": lambda g: featstore.NeighborSampler(g, [3, -1, 2], seed=1, edges=True),
    "with replacement": lambda g: featstore.NeighborSampler(g, [3, 5], replace=True, seed=1),
    "labor": lambda g: featstore.LaborSampler(g, [4, 3, 2], batch_dependency=3, seed=1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "g"
    indptr, indices = skewed_graph(N, 6, hubs=[5, 9], hub_degree=90, seed=1)
    rng = np.random.default_rng(4)
    features, data = {"x": rng.standard_normal((N, 5)).astype(np.float32)}, {"y": rng.integers(0, 3, N)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, data, progress=False).close()
    return path


@pytest.fixture
def g(path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(path, memory="32MiB") as graph:
        yield graph


def make(g: featstore.OutOfCoreGraph, history: Any, sampler: str = "two hops", **options: Any) -> featstore.Loader:
    options = {"strategy": featstore.OnDemand(), "seed": 7, **options}
    return featstore.Loader(g, SAMPLERS[sampler](g), SEEDS, BATCH, history=history, **options)


def history_of(staleness: int = 3, **options: Any) -> featstore.History:
    return featstore.History(**{"dim": 2, "nodes": NODES, "staleness": staleness, "dtype": torch.float64, **options})


class Training:
    """A model whose embedding of a node is (node, step), beside the replay that says what every row must be."""

    def __init__(self, g: featstore.OutOfCoreGraph, staleness: int = 3, sampler: str = "two hops", nodes: Any = NODES) -> None:
        self.g, self.replay = g, Replay(SAMPLERS[sampler](g), nodes, staleness)
        self.order = featstore.RandomBatches(SEEDS, BATCH, seed=7)
        self.n_pulled = self.n_pushed = 0

    def check(self, batch: featstore.MiniBatch, epoch: int) -> None:
        """Compare a batch, merge it, and compare the rows."""
        step = self.replay.step
        plain = self.replay.batch(self.order.epoch(epoch).seeds(batch.index), epoch, batch.index)
        same_batch(batch, plain)
        assert torch.equal(batch.x.cpu(), self.g.features["x"][batch.input_ids.cpu()])
        n_kept = batch.blocks[-2].n_dst
        ids = batch.input_ids[:n_kept].double()
        h = torch.stack([ids, torch.full_like(ids, float(step))], 1)
        merged = batch.history.merge(h)
        expected = [[node, plain.pulled.get(node, step)] for node in plain.sources]
        assert merged.tolist() == expected
        self.n_pulled += len(plain.pulled)
        self.n_pushed += len(plain.pushed)

    def run(self, loader: featstore.Loader, epoch: int, n: int | None = None) -> None:
        for k, batch in enumerate(loader):
            self.check(batch, epoch)
            if k + 1 == n:
                break


def same_batch(batch: featstore.MiniBatch, plain: PlainBatch) -> None:
    assert batch.input_ids.tolist() == plain.ids
    assert [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks] == plain.blocks
    rows = batch.history.rows
    assert [plain.sources[k] for k in rows.pull.tolist()] == list(plain.pulled)
    assert [plain.sources[k] for k in rows.push.tolist()] == plain.pushed


@pytest.mark.parametrize(
    ("strategy", "sampler"), [*((name, "two hops") for name in STRATEGIES), *(("superbatch", name) for name in SAMPLERS)]
)
def test_every_row_is_the_latest_push(g: featstore.OutOfCoreGraph, strategy: str, sampler: str, device: str) -> None:
    """Bit for bit, over epochs and superbatches, through breaks; whatever was planned beyond a break changes nothing."""
    training = Training(g, 3, sampler)
    options = {"strategy": STRATEGIES[strategy], "prefetch": 3, "threads": 3, "device": device}
    with make(g, history_of(3), sampler, **options) as loader:
        training.run(loader, 0)
        training.run(loader, 1, n=3)
        training.run(loader, 2, n=1)
        loader.set_epoch(0)  # its batches again, at later steps
        training.run(loader, 0)
        stats = loader.stats()["history"]
    assert (stats["pulled"], stats["pushed"]) == (training.n_pulled, training.n_pushed)
    assert training.n_pulled > 0
    gc.collect()  # of a loader that lets go of its history alone


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if STRATEGIES[name].name not in ("ondemand", "auto")])
def test_an_epoch_beside_the_plans_of_another_loader(g: featstore.OutOfCoreGraph, strategy: str) -> None:
    """It is read on demand, and prunes what it would have pruned; the next one is planned again."""
    training = Training(g)
    with make(g, None, strategy=featstore.Superbatch(cache=0.1, length=2)) as other:
        with make(g, history_of(3), strategy=STRATEGIES[strategy], prefetch=3, threads=3) as loader:
            for epoch in range(3):
                running = iter(other)
                if epoch != 2:
                    next(running)
                training.run(loader, epoch)
                del running
            assert loader.stats()["epochs_beside"] == 2
        assert training.n_pulled > 0


def test_a_table_on_cuda_is_made_before_the_loop_has_it(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may run in another stream than the one in which the table is zeroed or read from a state: stand-ins say so."""
    log: list[str] = []
    zeros, empty_like = torch.zeros, torch.empty_like

    def noted(made: Any, name: str) -> Any:
        return lambda *args, device, **options: (log.append(f"{name} on {device}"), made(*args, **options))[1]

    monkeypatch.setattr(torch, "zeros", noted(zeros, "zeros"))
    monkeypatch.setattr(torch, "empty_like", noted(empty_like, "copy"))
    settled = SimpleNamespace(synchronize=lambda: log.append("settled"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (log.append(f"stream of {device}"), settled)[1])
    history = history_of()
    history.make(g, torch.device("cuda", 1))
    assert log == ["zeros on cuda:1", "zeros on cuda:1", "stream of cuda:1", "settled"]
    state = history.state_dict()
    log.clear()
    history._table = SimpleNamespace(device=torch.device("cuda", 1))
    history.load_state_dict(state)
    assert log == ["copy on cuda:1", "zeros on cuda:1", "stream of cuda:1", "settled"]


def test_a_table_stays_until_the_loops_stream_is_done(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every merge records it with the current stream: it may be dropped, and its memory used, before that has come so far."""
    recorded: list[torch.Tensor | None] = []
    monkeypatch.setattr("featstore.load.history.record_here", lambda *tensors: recorded.extend(tensors))
    with featstore.open(path, memory="32MiB") as g:
        history, training = history_of(), Training(g)
        with make(g, history) as loader:
            training.run(loader, 0, n=2)
            assert len(recorded) == 4
            assert all(a is b for a, b in zip(recorded, [history._table, history._sums] * 2, strict=True))


def test_rows_are_kept_for_as_long_as_they_may_be(tmp_path: Path, path: Path, device: str) -> None:
    """Any staleness, chunked lists, no thread beside the loop, partition batches with the lists of their macro-batches."""
    shutil.copytree(path, tmp_path / "chunks")
    featstore.convert(tmp_path / "chunks", "chunked", chunk_bytes=4096, progress=False)
    for staleness in (1, 5, 1000):
        with featstore.open(tmp_path / "chunks", memory="32MiB") as g:
            training = Training(g, staleness)
            with make(g, history_of(staleness), prefetch=0, device=device) as loader:
                training.run(loader, 0)
                training.run(loader, 1)
            assert training.n_pulled > 0
    with featstore.open(path, memory="32MiB") as g:
        featstore.partition(g, 6, train_idx=SEEDS, progress=False)
        training = Training(g, 4)
        training.order = order = featstore.PartitionBatches(g, SEEDS, BATCH, macro=2)
        options: dict[str, Any] = {"history": history_of(4), "strategy": "superbatch", "device": device}
        with featstore.Loader(g, SAMPLERS["two hops"](g), order, **options) as loader:
            training.run(loader, 0)
            training.run(loader, 1)
        assert training.n_pulled > 0


def test_staleness_0_is_the_plain_run(g: featstore.OutOfCoreGraph, device: str) -> None:
    plain, with_history = (make(g, history, "three hops", device=device) for history in (None, history_of(0)))
    for _ in range(2):
        for a, b in zip(plain, with_history, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)
            for one, other in zip(a.blocks, b.blocks, strict=True):
                assert (one.n_src, one.n_dst) == (other.n_src, other.n_dst)
                assert all(torch.equal(s, t) for s, t in zip(one.tensors, other.tensors, strict=True))
            h = torch.rand(b.blocks[-1].n_src, 2, device=device)
            assert b.history.merge(h) is h
    plain.close()
    with_history.close()


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch"])
def test_a_killed_training_goes_on_from_its_saved_state(path: Path, strategy: str, device: str) -> None:
    """A history and a loader of another process's making, as far as anything is shared: a new graph, new objects, bytes."""
    with featstore.open(path, memory="32MiB") as g:
        training = Training(g)
        history = history_of()
        with make(g, history, strategy=STRATEGIES[strategy], device=device) as loader:
            training.run(loader, 0)
            iterator = iter(loader)
            for _ in range(2):
                training.check(next(iterator), 1)
            file = io.BytesIO()
            torch.save({"loader": loader.state_dict(), "history": history.state_dict()}, file)
            before = copy.deepcopy(training.replay.pushed), training.replay.step
            for _ in range(2):
                training.check(next(iterator), 1)  # lost
            iterator.close()
    file.seek(0)
    saved = torch.load(file)
    for when in ("before", "after"):
        with featstore.open(path, memory="32MiB") as g:
            training = Training(g)
            training.replay.pushed, training.replay.step = copy.deepcopy(before[0]), before[1]
            history = history_of(nodes=0.1)  # the state's nodes count
            if when == "before":
                history.load_state_dict(saved["history"])
            with make(g, history, strategy=STRATEGIES[strategy], device=device) as loader:
                if when == "after":
                    history.load_state_dict(saved["history"])
                loader.load_state_dict(saved["loader"])
                training.run(loader, 1)
                training.run(loader, 2)
                assert len(history) == len(NODES)
                on_host = 2 * 16 if device == "cpu" else 0
                assert g.memory_report()["historical embeddings"] == len(NODES) * (on_host + 24)


def test_rows_of_another_dtype_are_converted(g: featstore.OutOfCoreGraph, device: str) -> None:
    with make(g, history_of(1000, dtype=torch.float16), device=device) as loader:
        for batch in loader:
            merged = batch.history.merge(torch.full((batch.blocks[-2].n_dst, 2), 1 / 3, device=device))
            assert merged.dtype == torch.float32
            pulled = merged[batch.history.rows.pull]
            assert torch.equal(pulled, torch.full_like(pulled, 1 / 3).half().float())


def test_what_a_loop_must_not_do(g: featstore.OutOfCoreGraph) -> None:
    with make(g, history_of()) as loader:
        batch = next(iter(loader))
        n = batch.blocks[-2].n_dst
        for wrong in (torch.zeros(n, 3), torch.zeros(n + 1, 2), torch.zeros(n)):
            with pytest.raises(ValueError, match=rf"of shape \({n}, 2\), not"):
                batch.history.merge(wrong)
        with pytest.raises(ValueError, match="is on cpu, where its loader"):
            batch.history.merge(torch.zeros(n, 2, device="meta"))
        batch.history.merge(torch.zeros(n, 2))
        with pytest.raises(ValueError, match="merged already"):
            batch.history.merge(torch.zeros(n, 2))
        iterator = iter(loader)
        old = next(iterator)
        with pytest.raises(ValueError, match="the batch before was not merged"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        running = iter(loader)
        next(running)
        with pytest.raises(ValueError, match="another one has begun"):
            old.history.merge(torch.zeros(old.blocks[-2].n_dst, 2))
        with pytest.raises(featstore.BusyError, match="an epoch with this history is running"):
            next(iter(loader))
        with pytest.raises(featstore.BusyError, match="is running"):
            loader._history.load_state_dict(loader._history.state_dict())
        with pytest.raises(featstore.BusyError, match="another loader has this history"):
            make(g, loader._history)
        running.close()
        numbers = []
        with pytest.raises(ValueError, match="the batch before was not merged"):  # at the end of an epoch, too
            for one in loader:
                numbers.append(one.index)
                if one.index < len(loader) - 1:
                    one.history.merge(torch.zeros(one.blocks[-2].n_dst, 2))
        assert numbers == list(range(len(loader)))


def refused(g: featstore.OutOfCoreGraph, match: str, history: Any = None, **options: Any) -> None:
    """Assert that a loader is refused, and that it leaves nothing behind."""
    history = history_of() if history is None else history
    options = {"sampler": SAMPLERS["two hops"](g), "seeds": SEEDS, "batch_size": BATCH, **options}
    before = g.memory_report()
    for _ in range(2):  # not BusyError
        with pytest.raises(featstore.OptionError, match=match) as caught:
            featstore.Loader(g, history=history, **options)
        assert caught.value.option == "history"
    assert g.memory_report() == before


class Reversed(featstore.OnDemand):
    """One that may run batches in another order, and says nothing of histories."""


class AsBefore(featstore.OnDemand):
    takes_history = True


def test_each_strategy_says_of_itself_that_it_takes_a_history(g: featstore.OutOfCoreGraph) -> None:
    takes = {name for name in featstore.available_strategies() if find_strategy(name).takes_history}
    assert takes >= {"auto", "ondemand", "superbatch", "ginex", "streamed"}
    assert "packed" not in takes
    assert not Reversed.takes_history
    assert AsBefore.takes_history
    assert not type("Derived", (AsBefore,), {}).takes_history


def test_what_does_not_go_with_a_history(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    refused(g, "two hops at least", sampler=featstore.NeighborSampler(g, [4]))
    refused(g, r"redraw=True", sampler=featstore.NeighborSampler(g, [4, 3], redraw=False))
    refused(g, "importance_sampling", sampler=featstore.LaborSampler(g, [4, 3], importance_sampling=1))
    refused(g, "not LayerSampler", sampler=featstore.LayerSampler(g, [20, 30]))
    refused(g, "not ShadowSampler", sampler=featstore.ShadowSampler(g, [4, 3]))
    refused(g, "not EpochSampler", sampler=featstore.EpochSampler(g, [4, 3]))
    refused(g, "whose nodes draw for themselves", sampler=lambda seeds: None)
    refused(g, "strategy 'Reversed' does not say", strategy=Reversed())
    refused(g, "its nodes: node 300 at position 0 is not a node", history=history_of(nodes=[N]))
    with featstore.sample_offline(g, SAMPLERS["two hops"](g), SEEDS, BATCH, path=tmp_path / "pack") as pack:
        refused(g, "a pack's batches", sampler=None, seeds=None, batch_size=None, strategy=featstore.Packed(pack))
    with pytest.raises(TypeError, match=r"must be a featstore.History, not 'yes'"):
        make(g, "yes")
    with make(g, history_of()) as loader, pytest.raises(featstore.OptionError, match="history"):
        to_data(next(iter(loader)))


WRONG: dict[str, list[Any]] = {
    "dim": [0, 1.5],
    "staleness": [-1, True],
    "dtype": [torch.int64, "float32"],
    "nodes": [0.0, 1.5, float("nan"), 5, "all", [1, 1], [-1], [0.5]],
}


@pytest.mark.parametrize(("option", "wrong"), each(WRONG))
def test_wrong_options(option: str, wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        history_of(**{option: wrong})


def test_wrong_states(g: featstore.OutOfCoreGraph) -> None:
    history = history_of()
    with pytest.raises(ValueError, match="no table yet"):
        history.state_dict()
    with make(g, history) as loader:
        Training(g).run(loader, 0)
    good = copy.deepcopy(history.state_dict())
    for wrong, match in [
        ({"version": 2}, "not a history's state"),
        ({"num_nodes": N + 1}, "of a graph of 301 nodes"),
        ({"table": good["table"][:, :1]}, r"rows of \(1,\)"),
        ({"table": good["table"].float()}, "float32"),
        ({"step": 1}, "do not fit each other"),
        ({"nodes": good["nodes"].flip(0)}, "do not fit each other"),
        ({"pushed": good["pushed"][1:]}, "do not fit each other"),
    ]:
        with pytest.raises(ValueError, match=match):
            history.load_state_dict({**good, **wrong})
    assert history.step == 6  # as before
    assert all(torch.equal(good[name], history.state_dict()[name]) for name in ("nodes", "pushed", "table"))


def test_states_of_another_graph(g: featstore.OutOfCoreGraph, path: Path, tmp_path: Path) -> None:
    """Refused wherever they meet it; a copy, a converted one and edge features are the same graph."""
    history = history_of()
    with make(g, history) as loader:
        Training(g).run(loader, 0)
        place = loader.state_dict()
    state = copy.deepcopy(history.state_dict())
    indptr, indices = skewed_graph(N, 6, hubs=[5, 9], hub_degree=90, seed=2)
    other = featstore.OutOfCoreGraph.create(
        tmp_path / "other", indptr, indices, {"x": np.zeros((N, 5), np.float32)}, {"y": np.zeros(N)}, progress=False
    )
    with other:
        late, early = history_of(), history_of()
        with make(other, late) as loader:
            with pytest.raises(ValueError, match="the state is of another graph than the loader's"):
                late.load_state_dict(state)
            with pytest.raises(ValueError, match="the state is of another graph than the loader's"):
                loader.load_state_dict(place)
            assert (late.step, loader.state_dict()["epoch"]) == (0, 0)
            late.load_state_dict({**state, "graph": None})  # for those who know better
            loader.load_state_dict({name: each for name, each in place.items() if name != "graph"})
            assert late.step == 6
        early.load_state_dict(state)
        with pytest.raises(ValueError, match="the state is of another graph than the loader's"):
            make(other, early)
        with pytest.raises(ValueError, match="the state is of another graph than the loader's"):
            make(other, history)  # which has had a loader
    shutil.copytree(path, tmp_path / "copy")
    featstore.convert(tmp_path / "copy", "chunked", progress=False)
    with featstore.open(tmp_path / "copy", memory="32MiB") as there, make(there, early) as loader:
        loader.load_state_dict(place)
        assert early.step == 6


def test_the_table_is_in_the_budget(path: Path) -> None:
    """From the first loader on, until the history is gone; an error names what suffices."""
    history = history_of(dim=5_000, nodes=1.0)
    with featstore.open(path, memory="3MiB") as g:
        with pytest.raises(featstore.BudgetError) as caught:
            make(g, history)
        assert "historical embeddings" not in g.memory_report()
        needed = caught.value.needed
    assert needed is not None
    with featstore.open(path, memory=needed) as g:
        training = Training(g, nodes=range(N))
        with make(g, history) as loader:
            for batch in loader:
                batch.history.merge(torch.zeros(batch.blocks[-2].n_dst, 5_000))
            assert g.memory_report()["historical embeddings"] == N * (2 * 5_000 * 8 + 24)
        assert training.replay.step == 0
        make(g, history).close()  # the next loader has it as it is
        assert history.step == 6
        del loader, history, batch, caught
        gc.collect()
        assert "historical embeddings" not in g.memory_report()


def test_the_nodes_of_a_share_are_those_of_highest_degree(g: featstore.OutOfCoreGraph) -> None:
    history = history_of(nodes=0.1)
    with make(g, history), g.policy_inputs(4) as inputs:
        degree = inputs.context.out_degree
        nodes = history.times.nodes
        assert len(history) == 30
        assert degree[nodes].min() >= np.delete(degree, nodes).max()
        assert bool((np.diff(nodes) > 0).all())


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch"])
def test_of_a_part_they_are_those_of_highest_degree_in_the_part(path: Path, tmp_path: Path, strategy: str) -> None:
    """Counted in the lists that the part has; hubs of the whole graph may have few places there."""
    shutil.copytree(path, tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        parts = featstore.partition(g, 2, "ldg", SEEDS[:60], hops=2, progress=False)
        seeds = parts.part(0).numpy()
        has_list = {int(u) for v in seeds for u in g.neighbors(v)} | set(seeds.tolist())
        places = np.bincount(np.concatenate([g.neighbors(v).numpy() for v in sorted(has_list)]), minlength=N)
        nodes = np.sort(np.argsort(-places, kind="stable")[:30])
        history, view = history_of(nodes=0.1), g.part(0)
        training = Training(view, nodes=nodes)
        training.order = featstore.RandomBatches(seeds, BATCH, seed=7)
        with featstore.Loader(
            view, SAMPLERS["two hops"](view), training.order, history=history, strategy=STRATEGIES[strategy]
        ) as loader:
            assert history.times.nodes.tolist() == nodes.tolist()
            for epoch in range(3):
                training.run(loader, epoch)
        assert training.n_pulled > 0
        whole = history_of(nodes=0.1)
        with featstore.Loader(g, SAMPLERS["two hops"](g), training.order, history=whole, strategy="ondemand"):
            assert whole.times.nodes.tolist() != nodes.tolist()


def test_batches_are_the_same_in_any_order_and_on_threads(g: featstore.OutOfCoreGraph) -> None:
    """Asked for again, out of order, by many threads, and after an error in the middle of a decision."""
    sampler, order = SAMPLERS["three hops"](g), featstore.RandomBatches(SEEDS, BATCH, seed=7)
    replay, times = Replay(sampler, NODES, 3), PushTimes(3)
    times.nodes, times.pushed = NODES, np.full(len(NODES), -1)
    expected = [replay.batch(order.epoch(0).seeds(k), 0, k) for k in range(len(order))]
    taken = PrunedBatches(Drawn(sampler, order).seeds_of(0), sampler, times, epoch=0, start=0)
    taken._decide(0)  # interrupted at its end, before it was noted
    sources, calls = sampler.sources, itertools.count()

    def failing(*args: Any, **more: Any) -> Any:
        if next(calls) % 2:
            raise featstore.BudgetError("not now")
        return sources(*args, **more)

    sampler.sources = failing
    positions = [4, 1, 0, 5, 5, 2, 3, 0]
    with ThreadPoolExecutor(4) as pool:

        def sample(position: int) -> featstore.SampledBatch:
            while True:
                with contextlib.suppress(featstore.BudgetError):
                    return taken.sample(position)

        found = list(pool.map(sample, positions))
    for position, sampled in zip(positions, found, strict=True):
        assert sampled.input_ids.tolist() == expected[position].ids
        assert sampled.history.step == position
    taken.close()
    assert "history decisions" not in g.memory_report()
