"""Loaders of several ranks: together the batches of one process, from every sampler and strategy; training in a process group."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import featstore
from featstore import (
    EpochSampler,
    Ginex,
    LaborSampler,
    LayerSampler,
    Loader,
    NeighborSampler,
    OnDemand,
    Packed,
    ShadowSampler,
    Streamed,
    Superbatch,
)
from featstore.estimate.copies import CopySpeed
from featstore.estimate.tablespeed import TableSpeed
from featstore.ranks import ChosenByFirst
from featstore.storage.drive import DriveSpeed
from tests.support.pinned import pin_machine
from tests.support.programs import run_ranks
from tests.support.ranks import group
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import CITES, academic, check_batch

pytestmark = [
    pytest.mark.shares_resources,
    pytest.mark.usefixtures("_program_server"),
    pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning"),
]

N, BATCH = 3000, 40
SEEDS = np.random.default_rng(2).permutation(N)[:1234]
WAYS: dict[str, tuple[Any, Any]] = {
    "ondemand": (NeighborSampler, OnDemand(cache=0.1, policy="lru")),
    "superbatch": (NeighborSampler, Superbatch(length=3, cache=0.1)),
    "ginex": (LaborSampler, Ginex(length=4, cache=0.1)),
    "streamed": (partial(EpochSampler, window=5), Streamed(length=4, cache=0.1)),
    "auto": (NeighborSampler, "auto"),
}
OPTIONS: dict[str, tuple[Any, Any]] = {
    "layer-wise": (LayerSampler, Superbatch(length=3, cache=0.1)),
    "subgraphs": (ShadowSampler, OnDemand(cache=0.1, policy="lru")),
    "disjoint": (partial(NeighborSampler, disjoint=True), Ginex(length=4, cache=0.1)),
    "weights": (partial(NeighborSampler, weight="w"), Superbatch(length=3, cache=0.1)),
    "edges": (partial(NeighborSampler, edges=True), Superbatch(length=3, cache=0.1)),
    "edges of layers": (partial(LayerSampler, edges=True), OnDemand()),
    "edges of subgraphs": (partial(ShadowSampler, edges=True), Superbatch(length=3, cache=0.1)),
    "edges by LABOR": (partial(LaborSampler, edges=True), Ginex(length=4, cache=0.1)),
}


@pytest.fixture(scope="module")
def g(tmp_path_factory: Any) -> Any:
    rng = np.random.default_rng(0)
    pairs = np.stack([(N * rng.random(10 * N) ** 2).astype(np.int64), rng.integers(0, N, 10 * N)])
    x, folder = rng.standard_normal((N, 8)).astype(np.float32), tmp_path_factory.mktemp("g")
    w = rng.random(10 * N, dtype=np.float32)
    options: dict[str, Any] = {"features": {"x": x}, "node_data": {"y": np.arange(N) % 7}, "edge_features": {"w": w}}
    options |= {"memory": "64MiB", "progress": False}
    with featstore.OutOfCoreGraph.from_edge_index(folder / "g", pairs, N, **options) as opened:
        yield opened


def epoch(g: Any, way: str, **options: Any) -> dict[int, Any]:
    make, strategy = (WAYS | OPTIONS)[way]
    sampler = make(g, [4, 3], seed=3)
    options |= {"labels": np.arange(len(SEEDS)), "edge_features": ["w"] if sampler.edges else []}
    with Loader(g, sampler, SEEDS, BATCH, strategy=strategy, **options) as loader:
        loader.set_epoch(1)
        found = list(loader)
        assert len(found) == len(loader)
    return {batch.index: batch for batch in found}


def same(one: Any, other: Any) -> bool:
    return len(one._tensors()) == len(other._tensors()) and all(map(torch.equal, one._tensors(), other._tensors()))


@pytest.mark.parametrize("way", WAYS | OPTIONS)
def test_ranks_together_have_the_batches_of_one(g: Any, way: str) -> None:
    """All but the last step's, whose seeds are divided evenly; a rank's rows and labels are those of its seeds."""
    whole, ranks = epoch(g, way), [epoch(g, way, rank=rank, world_size=3) for rank in range(3)]
    assert [sorted(each) for each in ranks] == [list(range(rank, 33, 3)) for rank in range(3)]
    for each in ranks:
        for index, batch in each.items():
            assert index >= 30 or same(batch, whole[index])
            assert torch.equal(batch.x, torch.as_tensor(g.features["x"][batch.input_ids]))
            assert torch.equal(batch.y, batch.seed_positions)
            assert np.array_equal(SEEDS[batch.seed_positions.numpy()], batch.seeds.numpy())
            assert len(batch.edge_features.get("w", ())) == (len(batch.blocks) if way.startswith("edges") else 0)
            for rows, block in zip(batch.edge_features.get("w", ()), batch.blocks, strict=way.startswith("edges")):
                assert torch.equal(rows, torch.as_tensor(g.edge_features["w"][block.edge_pos]))
    assert sorted(len(each[index].seeds) for each in ranks for index in each if index >= 30) == [11, 11, 12]
    seen = torch.cat([batch.seed_positions for each in ranks for batch in each.values()])
    assert sorted(seen.tolist()) == list(range(len(SEEDS)))


@pytest.fixture(scope="module")
def thirty(g: Any) -> str:
    """The name of parts that are kept with their lists."""
    featstore.partition(g, 30, method="ranges", keep_lists=True, name="thirty", progress=False)
    return "thirty"


@pytest.mark.parametrize("way", ["random", "parts"])
def test_where_others_go_on(g: Any, thirty: str, way: str) -> None:
    """A state of three ranks goes on with two, whose first step divides what is left of one; with one; and with four.

    Batches of steps that are not divided are those of one process, also where they are of parts.
    """
    sampler, batches = NeighborSampler(g, [3, 2], seed=1), featstore.RandomBatches(SEEDS, BATCH)
    if way == "parts":
        batches = featstore.PartitionBatches(g, SEEDS, BATCH, parts=thirty, macro=4)
    strategy = Superbatch(length=3, cache=0.1) if way == "parts" else "ondemand"

    def loaders(n: int) -> list[Loader]:
        return [Loader(g, sampler, batches, strategy=strategy, rank=rank, world_size=n) for rank in range(n)]

    with loaders(1)[0] as alone:
        whole = {batch.index: batch for batch in alone}
    three, seen = loaders(3), list[int]()
    for loader in three:
        running = iter(loader)
        seen += [int(i) for _ in range(5) for i in next(running).seed_positions]
    states = [loader.state_dict() for loader in three]
    assert states[0] == states[1] == states[2]
    assert states[0]["batch"] == 15
    for n in (1, 2, 4):
        rest = list(seen)
        for loader in loaders(n):
            loader.load_state_dict(states[0])
            assert loader.state_dict() == states[0]
            for number, batch in enumerate(loader):
                rest += batch.seed_positions.tolist()
                assert batch.index // n in (15 // n if 15 % n else -1, 30 // n) or same(batch, whole[batch.index])
                if not number and n == 2:
                    assert len(batch.seeds) == BATCH // 2
                if not number:
                    assert loader.state_dict()["batch"] == 16
            assert loader.state_dict()["epoch"] == 1
            assert loader.state_dict()["batch"] == 0
            assert sum(len(batch.seeds) for batch in loader) >= len(SEEDS) // n - 1
            loader.close()
        assert sorted(rest) == list(range(len(SEEDS)))
    for loader in three:
        loader.close()


@pytest.mark.parametrize(("way", "n_done"), covering(WAYS, [3, 1]))
def test_batches_that_were_drawn_before_are_drawn_anew(g: Any, way: str, n_done: int) -> None:
    """A loader has measured or profiled batches of epoch 0 whose step it then goes on within; the epoch after it is whole."""
    make, strategy = WAYS[way]
    draws = make(g, [4, 3], seed=3)
    options: dict[str, Any] = {"strategy": strategy, "labels": np.arange(len(SEEDS))}
    with Loader(g, draws, SEEDS, BATCH, **options, rank=0, world_size=1) as whole:
        state, order = whole.state_dict(), featstore.RandomBatches(SEEDS, BATCH).epoch(0)
    done = [int(i) for number in range(n_done) for i in order.positions(number)]
    seen, after = list(done), list[int]()
    for rank in range(2):
        with Loader(g, draws, SEEDS, BATCH, **options, rank=rank, world_size=2) as loader:
            loader.load_state_dict({**state, "batch": n_done})
            seen += [int(i) for batch in loader for i in batch.seed_positions]
            after += [int(i) for batch in loader for i in batch.seed_positions]
    assert sorted(seen) == sorted(after) == list(range(len(SEEDS)))


def test_parts_and_a_history(g: Any, thirty: str) -> None:
    """Macro-batches and their lists serve the ranks' batches; a history is that of its rank."""
    batches = featstore.PartitionBatches(g, SEEDS, BATCH, parts=thirty)
    sampler, found = NeighborSampler(g, [4, 3], seed=3), {}
    with Loader(g, sampler, batches, strategy="superbatch", rank=0, world_size=1) as loader:
        whole = {batch.index: batch for batch in loader}
    for rank in range(2):
        with Loader(g, sampler, batches, strategy="superbatch", rank=rank, world_size=2) as loader:
            found |= {batch.index: batch for batch in loader}
    assert sorted(found) == list(range(32))
    assert all(same(found[index], whole[index]) for index in range(30))
    history = featstore.History(dim=8, nodes=0.3)
    with Loader(g, sampler, SEEDS, BATCH, strategy="superbatch", history=history, rank=1, world_size=2) as loader:
        for step, batch in enumerate(loader):
            assert batch.index == 2 * step + 1
            assert torch.equal(batch.x, torch.as_tensor(g.features["x"][batch.input_ids]))
            batch.history.merge(torch.zeros(batch.blocks[-2].n_dst, 8))
        assert loader.stats()["history"]["pulled"]


def test_a_state_after_what_these_ranks_leave_out(g: Any) -> None:
    """Eight of ten batches are done; with drop_last four ranks have two steps, so the next epoch comes next."""
    options: dict[str, Any] = {"strategy": "ondemand", "features": [], "drop_last": True}
    with Loader(g, NeighborSampler(g, [2]), SEEDS[:400], 40, **options, rank=0, world_size=2) as loader:
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (0, 8)
    with Loader(g, NeighborSampler(g, [2]), SEEDS[:400], 40, **options, rank=0, world_size=4) as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)
        assert len(list(loader)) == 2
        assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch"])
def test_several_types(tmp_path: Path, strategy: str) -> None:
    """Nodes, edges, rows and labels of each type are those of one process, but for the last step."""
    arrays = academic(papers=600).draw("x", 5, author=4)
    arrays.edge_features[CITES] = {"w": np.random.default_rng(6).random((arrays.edges[CITES].shape[1], 2), np.float32)}
    found, whole, seeds = list[int](), dict[int, Any](), ("author", np.random.default_rng(7).permutation(300)[:290])
    with arrays.create(tmp_path / "g") as g:
        options: dict[str, Any] = {"strategy": strategy, "edge_features": ["w"]}
        sampler = NeighborSampler(g, [3, 2], seed=3, edges=True)
        for rank, world_size in ((0, 1), (0, 2), (1, 2)):
            with Loader(g, sampler, seeds, 30, **options, rank=rank, world_size=world_size) as loader:
                for batch in loader:
                    check_batch(arrays, batch, edges=True)
                    assert set(batch.features["x"]) == {"paper", "author"}
                    assert set(batch.edge_features["w"][0]) == {CITES}
                    if world_size == 1:
                        whole[batch.index] = batch
                    else:
                        found += [int(i) for i in batch.seeds]
                        assert batch.index >= 8 or same(batch, whole[batch.index])
        assert sorted(found) == sorted(seeds[1])
        assert sorted(whole) == list(range(10))


def test_what_cannot_be_divided(g: Any, tmp_path: Path) -> None:
    sampler = NeighborSampler(g, [2])
    refuses(ValueError, "batch_size=", lambda: Loader(g, sampler, np.arange(81), 40, rank=0, world_size=2))
    refuses(ValueError, "fewer than the 9 ranks", lambda: Loader(g, sampler, np.arange(8), 40, rank=0, world_size=9))
    refuses(ValueError, "rank must be", lambda: Loader(g, sampler, np.arange(80), 40, rank=2, world_size=2))
    featstore.sample_offline(g, sampler, np.arange(100), 10, path=tmp_path / "p", progress=False).close()
    options: dict[str, Any] = {"strategy": featstore.Packed(tmp_path / "p", cache=0.1)}
    refuses(
        ValueError, "10 batches, of which 3 ranks cannot have as many each", lambda: Loader(g, **options, rank=0, world_size=3)
    )


@pytest.mark.parametrize(("way", "shuffle"), covering(["belady", "short", "frequency", "auto"], [True, False]))
def test_ranks_share_a_pack(g: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, shuffle: bool) -> None:
    """Each of two ranks has half of each epoch's batches, as they are; ranks and one process may run one layout."""
    pin_machine(monkeypatch)  # each rank chooses for itself
    sampler, x = NeighborSampler(g, [4, 3], seed=3), g.features["x"][:]
    with featstore.sample_offline(g, sampler, SEEDS[:480], 40, epochs=2, path=tmp_path / "p", progress=False) as pack:
        packed: dict[str, Any] = {"pack": pack, "cache": 0.1}
        ways: dict[str, Any] = {
            "belady": Packed(**packed, length=3),
            "short": Packed(**packed, length=4),  # plans begin anew where a rank's six batches end
            "frequency": Packed(**packed, policy="frequency"),
            "auto": featstore.Auto(**packed),
        }
        for epoch in (0, 1):
            found, orders, states = {}, [], []
            for rank in range(2):
                with Loader(g, strategy=ways[way], shuffle=shuffle, rank=rank, world_size=2) as loader:
                    loader.set_epoch(epoch)
                    batches = iter(loader)
                    own = [next(batches) for _ in range(4)]
                    states.append(loader.state_dict())
                    own += list(batches)
                    orders.append([batch.index for batch in own])
                    found |= {batch.index: batch for batch in own}
                    loader.load_state_dict(states[0])
                    assert [batch.index for batch in loader] == orders[rank][4:]
            assert states[0] == states[1]
            assert states[0]["batch"] == 8
            assert [sorted(order) for order in orders] == [list(range(6)), list(range(6, 12))]
            assert [index + 6 for index in orders[0]] == orders[1]
            assert way != "frequency" or (orders[0] != sorted(orders[0])) == shuffle
            with Loader(g, strategy=ways[way], rank=0, world_size=1) as loader:
                loader.set_epoch(epoch)
                for batch in loader:
                    assert same(batch, found[batch.index])
                    assert torch.equal(batch.x, x[batch.input_ids])
                refuses(ValueError, "world_size", lambda loader=loader: loader.load_state_dict(states[0]))
        pack.verify(progress=False)
    n_layouts = len(list((tmp_path / "p").glob("layout-*")))
    assert n_layouts == (2 if way == "short" else 1) or way == "auto"


class SAGE(torch.nn.Module):
    """Two layers, each of a node and the mean of its in-neighbours in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2 * 8, 12), torch.nn.Linear(2 * 12, 7)]).double()

    def forward(self, h: torch.Tensor, blocks: tuple[featstore.Block, ...]) -> torch.Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):
            total = h.new_zeros(block.n_dst, h.shape[1]).index_add(0, block.dst, h[block.src])
            degree = torch.bincount(block.dst, minlength=block.n_dst).clamp(min=1)
            h = layer(torch.cat([h[: block.n_dst], total / degree[:, None]], 1)).tanh()
        return h


STEP = 80  # seeds of all ranks
FANOUTS = {"whole lists": [-1, -1], "drawn": [4, 3]}
Steps = list[list[torch.Tensor]]


def trained(g: Any, fanouts: list[int], n_batches: int, world_size: int = 1) -> Steps:
    """Train on steps of ``n_batches`` batches, each rank on its own; return each step's gradients, and the parameters at last.

    In a function of its own: torch may hang where a model outlives its process group.
    """
    torch.manual_seed(0)
    model: torch.nn.Module = SAGE()
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    sampler = NeighborSampler(g, fanouts, seed=1)
    with Loader(g, sampler, np.arange(3 * STEP), STEP // n_batches, shuffle=True, strategy="ondemand") as loader:
        for _ in range(2):
            for number, batch in enumerate(loader, 1):
                loss = torch.nn.functional.cross_entropy(model(batch.x.double(), batch.blocks), batch.y, reduction="sum")
                (loss * world_size / STEP).backward()  # the group averages over ranks
                if number * world_size % n_batches:
                    continue  # gradients add up
                found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
                optimizer.step()
                optimizer.zero_grad()
    assert len(found) == 6
    return [*found, [each.detach().clone() for each in model.parameters()]]


def train(rank: int, world_size: int, folder: Path) -> None:
    with group(rank, world_size, folder), featstore.open(folder / "g", memory="16MiB", threads=1) as g:
        found = {name: trained(g, fanouts, world_size, world_size) for name, fanouts in FANOUTS.items()}
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_in_a_process_group(g: Any, tmp_path: Path, world_size: int) -> None:
    """Each step's gradients, averaged by gloo, are those of one process; so are the parameters at the end.

    Of whole lists the process has the step's seeds as one batch. Draws are keyed by a batch's number: to draw what the ranks
    draw it has their batches, one after another.
    """
    (tmp_path / "g").symlink_to(g.path)
    for status, printed in run_ranks(train, world_size, world_size, tmp_path):
        assert status == 0, printed
    expected = {"whole lists": trained(g, FANOUTS["whole lists"], 1), "drawn": trained(g, FANOUTS["drawn"], world_size)}
    assert all(float(gradient.norm()) > 1e-3 for steps in expected.values() for gradients in steps for gradient in gradients)
    for rank in range(world_size):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, steps in expected.items():
            for one, other in zip(steps, found[name], strict=True):
                torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_ranks_of_a_reordered_strategy(g: Any) -> None:
    """A strategy of another package runs its rank's batches in an order of its own; a state holds for as many ranks."""
    orders: dict[tuple[int, int], list[int]] = {}
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        options: dict[str, Any] = {"strategy": Backwards(), "rank": rank, "world_size": world_size}
        with Loader(g, NeighborSampler(g, [2]), SEEDS[:800], 40, **options) as loader:
            orders[rank, world_size] = [batch.index for batch in loader]
            loader.set_epoch(0)
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            state = loader.state_dict()
            assert state["batch"] == 3 * world_size
            loader.load_state_dict(state)
            assert [batch.index for batch in loader] == orders[rank, world_size][3:]
        with Loader(g, NeighborSampler(g, [2]), SEEDS[:800], 40, **{**options, "rank": 0, "world_size": 4}) as other:
            refuses(ValueError, "world_size", lambda other=other, state=state: other.load_state_dict(state))
    assert orders == {(0, 1): list(range(19, -1, -1)), (0, 2): list(range(18, -1, -2)), (1, 2): list(range(19, -1, -2))}
    few: dict[str, Any] = {"strategy": Backwards(), "rank": 0}
    with Loader(g, NeighborSampler(g, [2]), SEEDS[:200], 40, **few, world_size=3) as three:
        with Loader(g, NeighborSampler(g, [2]), SEEDS[:200], 40, **few, world_size=4) as four:
            assert len(three) == len(four) == 2
            refuses(ValueError, "world_size", lambda: four.load_state_dict(three.state_dict()))


def choose_by_drive(rank: int, folder: Path) -> None:
    """Be a rank whose machine has a copy, on a drive of its own: rank 0's reads scattered rows quickly, rank 1's does not."""
    speed = [DriveSpeed(1e6, 1e8, 1e6), DriveSpeed(10.0, 4e9, 4e9)][rank]
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    with (
        patch("featstore.strategies.auto.drive_speed", lambda *_, **__: speed),
        patch("featstore.strategies.auto.copy_speed", lambda *_: CopySpeed(5e9, 5e9, 2e9)),  # of a machine that is not busy
        patch("featstore.strategies.auto.table_speed", lambda *_: TableSpeed(1e-8, 1e-8, 1e-8)),
        group(rank, 2, folder),
        featstore.open(folder / f"copy-{rank}", memory="9MiB", threads=1) as g,
    ):
        given: dict[str, Any] = {"features": ["wide"], "labels": None}
        found = []
        for ranks in ((0, 1), (None, None)):
            with Loader(
                g, NeighborSampler(g, [3, 2], seed=1), np.arange(800), 40, rank=ranks[0], world_size=ranks[1], **given
            ) as loader:
                assert sum(1 for _ in loader) == 20 // (1 if ranks == (0, 1) else 2)
                found.append(loader.stats()["auto"]["taken"]["strategy"])
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_ranks_of_different_drives(tmp_path: Path) -> None:
    """Each alone would take another strategy; together they take rank 0's."""
    rng = np.random.default_rng(0)
    pairs, wide = rng.integers(0, N, (2, 8 * N)), rng.standard_normal((N, 1024)).astype(np.float32)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "copy-0", pairs, N, features={"wide": wide}, progress=False).close()
    shutil.copytree(tmp_path / "copy-0", tmp_path / "copy-1")
    for status, printed in run_ranks(choose_by_drive, 2, tmp_path):
        assert status == 0, printed
    (alone, together), (alone_of_1, together_of_1) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert together == together_of_1 == alone != alone_of_1


@dataclass(frozen=True)
class Backwards(OnDemand):
    def run(self, context: Any) -> Any:
        n = len(context.batches)
        order = context.batches.reordered(lambda epoch: lambda position: n - 1 - position, "backwards")
        return super().run(replace(context, batches=order))


def choose(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    with group(rank, 2, folder):
        with featstore.open(folder / "g", memory=["9MiB", "64MiB"][rank], threads=1) as g:
            sampler = NeighborSampler(g, [3, 2], seed=1)
            with Loader(g, sampler, np.arange(800), 40, features=["wide"], labels=None) as loader:
                n = sum(1 for _ in loader)
                chosen = loader.stats()["auto"]
                (folder / f"{rank}.json").write_text(json.dumps([n, chosen["taken"], chosen["estimates"]]))
                assert chosen["reason"].startswith("rank 0: ") == bool(rank), chosen["reason"]
        try:
            with ChosenByFirst((rank, 2)) as first:  # rank 0 fails: the others choose for themselves
                assert first.choice is None
                if not rank:
                    raise KeyError
                first.give("not of rank 0")
        except KeyError:
            assert not rank
        for ranks, choice in (((rank, 2), "one"), ((rank, 3), None), ((0, 1), None)):  # only the group's ranks hand it on
            with ChosenByFirst(ranks) as first:
                first.give("one" if not rank else "two")
                assert first.choice == (choice if rank else None)


def keep_caches(rank: int, folder: Path) -> None:
    """Be a rank whose features have a cache, which those of the other rank lack."""
    found = []
    with group(rank, 2, folder), featstore.open(folder / "g", memory="64MiB", threads=1) as g:
        for owner in range(2):
            g.cache("wide", 0.1 if rank == owner else 0)
            with Loader(g, NeighborSampler(g, [3, 2], seed=1), np.arange(800), 40, features=["wide"], labels=None) as loader:
                chosen = loader.stats()["auto"]
                found.append([chosen["taken"], chosen["reason"].removeprefix("rank 0: ")])
                assert chosen["reason"].startswith("rank 0: ") == bool(rank), chosen["reason"]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_rank_0_chooses_by_its_own_caches(tmp_path: Path) -> None:
    """If rank 0's features have caches all ranks keep theirs; if only another's have, all take what rank 0 takes without one."""
    pairs, wide = np.random.default_rng(0).integers(0, N, (2, 8 * N)), np.zeros((N, 64), np.float32)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, N, features={"wide": wide}).close()
    for status, printed in run_ranks(keep_caches, 2, tmp_path):
        assert status == 0, printed
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert [reason for _, reason in found[0]] == ["the features have caches", "all rows fit in memory"]


def test_rank_0_chooses_the_strategy(tmp_path: Path) -> None:
    """A rank with memory for all rows takes what rank 0 has estimated."""
    rng = np.random.default_rng(0)
    pairs, wide = rng.integers(0, N, (2, 8 * N)), rng.standard_normal((N, 1024)).astype(np.float32)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, N, features={"wide": wide}).close()
    for status, printed in run_ranks(choose, 2, tmp_path):
        assert status == 0, printed
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0][2]
