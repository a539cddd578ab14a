"""Loaders that plan, in turn and at once on one graph: a feature has one cache, and plans are run in the one they are for.

What cannot have the cache reads on demand, beside the plans that have it; batches are those of a loader that is alone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.sampled import covering

pytestmark = pytest.mark.shares_resources  # one graph for all tests: its rings stay

N, BATCH = 1500, 40
X = torch.from_numpy(np.random.default_rng(3).standard_normal((N, 17)).astype(np.float32))
Make = Callable[["Graph"], featstore.Loader]


class Graph:
    """A graph, and two packs: of its training nodes and of its validation nodes."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        nodes = rng.permutation(N)
        data = {"train_idx": nodes[:400], "val_idx": nodes[400:700]}
        featstore.OutOfCoreGraph.create(path / "g", *make_graph(N, 8.0), {"x": X.numpy()}, data, progress=False).close()
        self.g = featstore.open(path / "g", memory="64MB")
        self.sampler = featstore.NeighborSampler(self.g, [4, 3], seed=1)
        self.packs = {name: path / name for name in ("train", "val")}
        for name, pack in self.packs.items():
            seeds = self.g.node_data[f"{name}_idx"]
            featstore.sample_offline(self.g, self.sampler, seeds, BATCH, 2, pack, disk="50MB", progress=False).close()

    def packed(self, name: str, **options: Any) -> featstore.Loader:
        options = {"cache": 0.1, "disk": "50MB", **options}
        return make_loader(self.g, labels=None, strategy="packed", pack=self.packs[name], **options)

    def fresh(self, name: str, **options: Any) -> featstore.Loader:
        seeds = self.g.node_data[f"{name}_idx"]
        options = {"cache": 0.1, **options}
        return make_loader(self.g, self.sampler, seeds, BATCH, labels=None, **options)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    made = Graph(tmp_path_factory.mktemp("own"))
    yield made
    made.g.close()


PLANNING: dict[str, Callable[[Graph, str], featstore.Loader]] = {
    "belady": lambda g, name: g.packed(name, length=3),
    "frequency": lambda g, name: g.packed(name, policy="frequency"),
    "nothing": lambda g, name: g.packed(name, cache=0),
    "superbatch": lambda g, name: g.fresh(name, strategy="superbatch", length=4, disk="20MB"),
    "serial": lambda g, name: g.fresh(name, strategy="ginex", length=4, disk="20MB"),
    "streamed": lambda g, name: g.fresh(name, strategy="streamed", length=4, disk="20MB"),
}
OTHERS: dict[str, Callable[[Graph, str], featstore.Loader]] = {
    **PLANNING,
    "wider": lambda g, name: g.packed(name, policy="frequency", cache=0.2),
    "lru": lambda g, name: g.fresh(name, policy="lru"),
    "degree": lambda g, name: g.fresh(name, policy="degree"),
    "plain": lambda g, name: g.fresh(name, cache=None),
}


def after(table: dict[str, Any], n: int) -> list[str]:
    """Return the names from the ``n``-th on, and then the first ones: beside them each has another for its neighbour."""
    return [*table][n:] + [*table][:n]


def check(batch: featstore.MiniBatch) -> None:
    assert torch.equal(batch.x, X[batch.input_ids])


@pytest.mark.parametrize(("first", "second"), covering(PLANNING, OTHERS))
def test_epochs_in_turn(graph: Graph, first: str, second: str) -> None:
    with PLANNING[first](graph, "train") as train, OTHERS[second](graph, "val") as val:
        for _ in range(3):
            for made in (train, val):
                list(map(check, made))
        for made in (train, val):
            stats = made.stats()
            assert sum(stats["hits"].values()) == stats["rows"]
            assert stats["batches"] == 3 * len(made)


@pytest.mark.parametrize(("first", "second"), covering(PLANNING, after(PLANNING, 1)))
def test_one_epoch_of_plans_at_a_time(graph: Graph, first: str, second: str) -> None:
    with PLANNING[first](graph, "train") as train, PLANNING[second](graph, "val") as val:
        running = iter(train)
        check(next(running))
        list(map(check, val))
        with pytest.raises(featstore.BusyError, match="follows the plans of a loader that is in the middle of an epoch"):
            graph.g.cache("x", budget="100KB", policy="lru")
        assert 1 + len(list(map(check, running))) == len(train)
        assert [made.stats()["epochs_beside"] for made in (train, val)] == [0, 1]
        list(map(check, val))
        assert [made.stats()["epochs_beside"] for made in (train, val)] == [0, 1]  # it had the cache this time


def rows_of(batch: featstore.MiniBatch) -> bytes:
    blocks = [part for block in batch.blocks for part in (block.src, block.dst)]
    return b"|".join(part.numpy().tobytes() for part in (batch.seeds, batch.input_ids, *blocks, batch.x))


@pytest.fixture(scope="module")
def alone(graph: Graph) -> dict[str, list[list[bytes]]]:
    """The batches of two epochs of each set of nodes, in the order of their index, read on demand by a loader that is alone."""
    with graph.fresh("train", cache=None) as train, graph.fresh("val", cache=None) as val:
        found = {"train": [list(map(rows_of, train)) for _ in range(2)], "val": [list(map(rows_of, val)) for _ in range(2)]}
    assert found["train"][0] != found["train"][1]
    return found


TOGETHER: dict[str, Callable[[Graph, str], featstore.Loader]] = {
    "ondemand": lambda g, name: g.fresh(name, policy="lru"),
    "superbatch": PLANNING["superbatch"],
    "ginex": PLANNING["serial"],
    "streamed": PLANNING["streamed"],
    "packed": PLANNING["belady"],
    "auto": lambda g, name: g.fresh(name, strategy="auto", cache="auto", disk="20MB"),
    "superbatch of what is left": lambda g, name: g.fresh(name, strategy="superbatch", cache="auto", disk="20MB"),
}


class Training:
    """A loop as Lightning's: some batches of validation, then training, with validation in the middle and at the end."""

    def __init__(self, graph: Graph, alone: dict[str, list[list[bytes]]]) -> None:
        self._graph, self._alone = graph, alone

    def check(self, name: str, epoch: int, batch: featstore.MiniBatch) -> None:
        assert rows_of(batch) == self._alone[name][epoch % 2][batch.index]

    def validate(self, val: featstore.Loader, epoch: int, most: int | None = None) -> None:
        n = 0
        val.set_epoch(epoch)
        for batch in val:
            self.check("val", epoch, batch)
            n += 1
            if n == most:
                return
        assert n == len(val)

    def train(self, train: featstore.Loader, epoch: int, in_the_middle: Callable[[], None]) -> None:
        seen = []
        for batch in train:
            self.check("train", epoch, batch)
            seen.append(batch.index)
            if len(seen) in (4, len(train)):  # the last one: the epoch is not over before it is asked for another batch
                in_the_middle()
            ids = torch.arange(len(seen), N, 7)
            assert torch.equal(self._graph.g.features["x"][ids], X[ids])
        assert sorted(seen) == list(range(len(train)))


@pytest.mark.parametrize(("first", "second"), covering(TOGETHER, after(TOGETHER, 1)))
def test_validation_in_the_middle_of_training(graph: Graph, alone: dict[str, list[list[bytes]]], first: str, second: str) -> None:
    training = Training(graph, alone)
    with TOGETHER[first](graph, "train") as train, TOGETHER[second](graph, "val") as val:
        training.validate(val, 0, most=2)
        for epoch in range(2):
            training.train(train, epoch, lambda epoch=epoch: training.validate(val, epoch))
        training.validate(val, 1)
        assert train.stats()["epochs_beside"] == 0


@pytest.mark.parametrize(("first", "second"), covering(TOGETHER, after(TOGETHER, 3)))
def test_a_loader_made_in_the_middle_of_training(graph, alone, first, second) -> None:
    """As Lightning makes them with ``reload_dataloaders_every_n_epochs``; what outlives the epoch has a cache from then on."""
    training, kept = Training(graph, alone), []

    def validate() -> None:
        for made in kept:
            made.close()
        kept[:] = [TOGETHER[second](graph, "val")]
        training.validate(kept[0], 1)

    with TOGETHER[first](graph, "train") as train:
        for epoch in range(2):
            training.train(train, epoch, validate)
    with kept[0] as val:
        before = val.stats()
        training.validate(val, 1)
        after = val.stats()
        assert after["epochs_beside"] == before["epochs_beside"]
        assert "cache of 'x'" in graph.g.memory_report() or "superbatch caches (features)" in graph.g.memory_report()


@pytest.mark.parametrize(("first", "second"), covering(TOGETHER, TOGETHER))
def test_two_loaders_batch_by_batch(graph: Graph, alone: dict[str, list[list[bytes]]], first: str, second: str) -> None:
    training = Training(graph, alone)
    with TOGETHER[first](graph, "train") as train, TOGETHER[second](graph, "val") as val:
        for turn in range(2):
            loops = [("train", iter(train)), ("val", iter(val))]
            while loops:
                for name, loop in list(loops):
                    batch = next(loop, None)
                    if batch is None:
                        loops.remove((name, loop))
                    else:
                        training.check(name, turn, batch)


@pytest.mark.parametrize("name", [name for name in PLANNING if name != "nothing"])
def test_two_epochs_of_one_loader(graph: Graph, alone: dict[str, list[list[bytes]]], name: str) -> None:
    training = Training(graph, alone)
    with PLANNING[name](graph, "train") as train:
        for batches in zip(train, train, strict=True):
            for epoch, batch in enumerate(batches):
                training.check("train", epoch, batch)
        assert train.stats()["epochs_beside"] == 1


def test_a_pack_without_its_dataset_has_nothing_to_read_on_demand(graph: Graph) -> None:
    graph.packed("val", policy="frequency").close()
    with featstore.PackedGraph(graph.packs["val"], memory="64MB") as packed:
        options = {"labels": None, "strategy": "packed", "policy": "frequency", "cache": 0.1}
        with make_loader(packed, **options) as first, make_loader(packed, **options) as second:
            running = iter(first)
            check(next(running))
            for other in (first, second):
                with pytest.raises(featstore.BusyError, match=r"so end or drop it first|open the graph again for this loader"):
                    next(iter(other))
            rest = [batch.index for batch in running]
            assert len(rest) == len(first) - 1
            list(map(check, second))


@pytest.mark.parametrize("first", PLANNING)
def test_a_cache_of_the_graph_between_epochs(graph: Graph, first: str) -> None:
    with PLANNING[first](graph, "train") as train:
        for policy in ("lru", "degree"):
            list(map(check, train))
            graph.g.cache("x", budget="50KB", policy=policy)
            assert torch.equal(graph.g.features["x"][:200], X[:200])
        list(map(check, train))


@pytest.mark.parametrize("first", PLANNING)
def test_a_cache_of_the_graph_that_comes_too_late(graph: Graph, first: str) -> None:
    """An epoch that begins while ``g.cache`` chooses and reads its rows has its caches, and keeps them."""
    with PLANNING[first](graph, "train") as train:
        batches = []

        class Meanwhile(featstore.StaticPolicy):
            def scores(self, context: Any) -> Any:
                batches.append(iter(train))
                check(next(batches[0]))
                return np.ones(N)

        with pytest.raises(featstore.BusyError, match="middle of an epoch"):
            graph.g.cache("x", budget="50KB", policy=Meanwhile)
        assert 1 + len(list(map(check, batches.pop()))) == len(train)
        assert torch.equal(graph.g.features["x"][:200], X[:200])
    graph.g.cache("x", budget=0)
    assert "cache of 'x'" not in graph.g.memory_report()


def test_caches_made_at_once_leave_one(graph: Graph) -> None:
    """Each of two threads has made its cache when it is put in place: the other's is closed, and paid for no longer."""
    both = threading.Barrier(2)

    class Together(featstore.StaticPolicy):
        def scores(self, context: Any) -> Any:
            both.wait()
            return np.ones(N)

    graph.g.cache("x", budget=0)
    held = graph.g.budget.used
    threads = [threading.Thread(target=graph.g.cache, args=("x", "50KB", Together)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(graph.g.features["x"][:200], X[:200])
    assert held < graph.g.budget.used <= held + 50_000
    graph.g.cache("x", budget=0)
    assert graph.g.budget.used == held


@pytest.mark.parametrize("lost", ["belady", "frequency", "superbatch", "streamed"])
def test_an_epoch_that_is_lost_gives_its_caches_free(graph: Graph, lost: str) -> None:
    """Ctrl-C may lose an epoch between its making and whoever would close it."""
    with PLANNING[lost](graph, "train") as loader, PLANNING["superbatch"](graph, "val") as other:
        run = loader._runner.prepare(0, 0)
        next(iter(other))
        assert other.stats()["epochs_beside"] == 1
        del run
        gc.collect()
        list(map(check, other))
        assert other.stats()["epochs_beside"] == 1


@pytest.mark.parametrize("name", ["belady", "frequency", "superbatch", "serial", "streamed"])
def test_an_epoch_that_comes_too_late_frees_no_caches(graph: Graph, name: str) -> None:
    """Two threads may begin an epoch of one loader at once: the one that comes too late leaves the other its caches."""
    with PLANNING[name](graph, "train") as loader:
        run = loader._runner.prepare(0, 0)
        loader._runner._memory._use = None  # as the second thread finds it
        for _ in range(2):
            late = loader._runner.prepare(0, 0)
            assert type(late).__name__ == "_OnDemandEpoch"
            late.close()
        assert type(late) is not type(run)
        assert graph.g.features["x"].cache.in_use
        run.close()


def test_state_says_in_which_order_a_packs_batches_run(graph: Graph) -> None:
    def begun(**options: Any) -> dict[str, Any]:
        with graph.packed("train", **options) as made:
            next(iter(made))
            return made.state_dict()

    state = begun(length=3)
    for options in ({"length": 2}, {"policy": "frequency"}):
        with graph.packed("train", **options) as other, pytest.raises(ValueError, match="another order"):
            other.load_state_dict(state)
    with graph.packed("train", length=3) as made:
        whole = [batch.index for batch in made]
    with graph.packed("train", length=3, cache=0.2) as other:
        other.load_state_dict(state)
        assert [batch.index for batch in other] == whole[1:]
    state = begun(length=3, shuffle=False)
    with graph.packed("train", policy="frequency", shuffle=False) as other:
        other.load_state_dict(state)
        assert len(list(other)) == len(other) - 1


def test_on_demand_while_planners_take_the_cache(graph: Graph) -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            while not over.is_set():
                list(map(check, val))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    planners = [made(graph, "train") for made in PLANNING.values()]
    val = OTHERS["lru"](graph, "val")
    thread.start()
    try:
        for _ in range(3):
            for made in planners:
                list(map(check, made))
    finally:
        over.set()
        thread.join()
        for made in (*planners, val):
            made.close()
    assert not errors


def test_threads_that_begin_at_once(graph: Graph, alone: dict[str, list[list[bytes]]]) -> None:
    planners = [made(graph, "train") for made in PLANNING.values()]
    results: list[object] = []

    def run(made: featstore.Loader) -> None:
        for epoch in range(20):
            try:
                made.set_epoch(epoch % 2)
                for batch in made:
                    assert rows_of(batch) == alone["train"][epoch % 2][batch.index]
                results.append(True)
            except BaseException as error:
                results.append(error)

    threads = [threading.Thread(target=run, args=(made,)) for made in planners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in planners:
        made.close()
    assert results == [True] * 20 * len(planners)


def test_a_loaders_cache_comes_in_the_place_of_the_last_ones(tmp_path: Path) -> None:
    wide = np.random.default_rng(1).standard_normal((N, 1024)).astype(np.float32)
    data = {"train_idx": np.arange(0, N, 4)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", *make_graph(N, 8.0), {"x": wide}, data, progress=False).close()
    with featstore.open(tmp_path / "g", memory=2 * wide.nbytes, threads=1) as g:  # for one cache of all rows, and the batches
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        for options in (
            {"policy": "degree"},
            {"policy": "lru"},
            {"strategy": "superbatch", "disk": "20MB"},
            {"policy": "degree"},
        ):
            with make_loader(g, sampler, g.node_data["train_idx"], BATCH, labels=None, prefetch=0, cache=1.0, **options) as made:
                for batch in made:
                    assert np.array_equal(batch.x.numpy(), wide[batch.input_ids.numpy()])
            del batch
            assert g.memory_report()["cache of 'x'"] >= wide.nbytes
            assert g.budget.available < wide.nbytes  # so the next one has its memory from this one
