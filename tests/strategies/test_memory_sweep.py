"""Whatever the memory: loaders side by side train, or say once how much they need; and nothing tries for ever."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.budget import Budget
from featstore.cli.main import main
from featstore.strategies.registry import find_strategy
from tests.support.loaders import make_loader
from tests.support.sampled import covering, one_in

# In little memory superbatches are short, and streamed passes many: what they cost is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:strategy '(superbatch|ginex|streamed|auto)':featstore.PerformanceWarning")

N, DIM = 60_000, 100
BYTES = 4 * N * DIM
STRATEGIES: dict[str, dict[str, Any]] = {  # beside those of tests/memory, which have no device, no history, and one policy
    "frequency": {"policy": "frequency", "cache": "auto"},
    "sieve": {"policy": "sieve", "cache": "auto"},
    "superbatch of 5 %": {"strategy": "superbatch", "cache": 0.05},
    "serial": {"strategy": "ginex", "cache": "auto"},
    "streamed of 5 %": {"strategy": "streamed", "cache": 0.05},
    "auto": {"strategy": "auto"},
    "sieve, a device": {"policy": "sieve", "cache": 0.05, "device_cache": 0.02},
    "streamed, a device": {"strategy": "streamed", "cache": "auto", "device_cache": 0.02},
    "superbatch, a history": {"strategy": "superbatch", "cache": "auto", "history": 0.05},
    "packed": {"strategy": "packed", "cache": "auto"},
    "packed, frequency": {"strategy": "packed", "cache": "auto", "policy": "frequency"},
}
CHOOSING: dict[str, dict[str, Any]] = {  # a history's nodes, by the memory: batches differ
    "degree, a history": {"policy": "degree", "cache": "auto", "history": "auto"},
    "streamed, a history": {"strategy": "streamed", "cache": "auto", "history": "auto"},
    "auto, a history": {"strategy": "auto", "history": "auto"},
}
MOST_TRIES = 5_000  # refused reservations between two batches

Sums = list[tuple[int, float]]


class TriesForEverError(Exception):
    """Memory was asked for again and again, and no batch came."""


@pytest.fixture(autouse=True)
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count refused reservations; a batch sets the count back. Counts, not seconds: a slow machine passes."""
    count = [0]
    refuse = Budget._refusal

    def refusal(budget: Budget, holder: str, more: int) -> featstore.BudgetError:
        count[0] += 1
        if count[0] > MOST_TRIES:
            raise TriesForEverError(f"{holder} was refused {more} bytes")
        return refuse(budget, holder, more)

    monkeypatch.setattr(Budget, "_refusal", refusal)
    yield count
    assert count[0] <= MOST_TRIES


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "graph"
    rng = np.random.default_rng(7)
    degrees = np.minimum((rng.pareto(1.2, N) * 4).astype(np.int64), 500)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, N, indptr[-1])
    order = rng.permutation(N)
    featstore.OutOfCoreGraph.create(
        path,
        indptr,
        indices,
        features={"x": rng.standard_normal((N, DIM)).astype(np.float32)},
        node_data={
            "y": rng.integers(0, 5, N).astype(np.int64),
            "train_idx": order[:1_200],
            "val_idx": order[1_200:1_800],
            "test_idx": order[1_800:2_400],
        },
        progress=False,
    ).close()
    return path


@pytest.fixture(scope="module")
def pack(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "pack"
    with featstore.open(graph, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], 128, path=path, progress=False).close()
    return path


def with_history(options: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's options: with a history of its own in place of the share of the nodes that it is to keep."""
    return options | {"history": featstore.History(8, options["history"], 5)} if "history" in options else options


def merge(batch: featstore.MiniBatch) -> None:
    """Do what a step does with a history."""
    if batch.history is not None:
        batch.history.merge(batch.x.new_zeros(batch.blocks[-2].n_dst, 8))


def train(path: Path, memory: int, options: dict[str, Any], order: str, held_out: int, tries: list[int]) -> Sums:
    """Run an epoch of each loader, all of them alive, and one of validation within one of training."""
    options = with_history(options)
    with featstore.open(path, memory=memory) as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        loaders: dict[str, featstore.Loader] = {}
        for split in order.split():
            common: dict[str, Any] = {"labels": "y", "shuffle": False}
            if split == "train" and "pack" in options:
                loaders[split] = make_loader(g, **common, **options)
            elif split == "train":
                loaders[split] = make_loader(g, sampler, g.node_data["train_idx"], 128, **common, **options)
            else:
                loaders[split] = make_loader(g, sampler, g.node_data[f"{split}_idx"], held_out, **common)
        sums: Sums = []

        def run(split: str, between: str | None = None) -> None:
            for k, batch in enumerate(loaders[split]):
                tries[0] = 0
                sums.append((batch.index, float(batch.x.double().sum())))
                merge(batch)
                if k == 2 and between is not None:
                    run(between)

        run("train", "val")
        run("val")
        run("test")
        run("train")
        for loader in loaders.values():
            loader.close()
        assert g.budget.peak <= memory
        return sums


def check(path: Path, memory: int, options: dict[str, Any], order: str, held_out: int, tries: list[int]) -> Sums:
    """Train, in the memory that is given or that errors name: a larger one each time, a few of them at most."""
    for _ in range(len(order.split()) + 1):
        try:
            return train(path, memory, options, order, held_out, tries)
        except featstore.BudgetError as error:
            assert error.needed is not None, error
            assert error.needed > memory, error
            memory = error.needed
    raise AssertionError(f"{memory} bytes, which an error named, do not do either")


IN_AMPLE_MEMORY: dict[tuple[Path, str, int, str], Sums] = {}  # what each case comes to, whatever the strategy
LITTLE_AND_MUCH = [0.05, 0.3]
CASES = [("train val test", 128), ("val test train", 128), ("train val test", 512)]


def compare(graph: Path, pack: Path, name: str, shares: Sequence[Sequence[float]], tries: list[int]) -> None:
    """Train each case in its shares of the features' bytes."""
    options = STRATEGIES[name] | ({"pack": pack} if "packed" in name else {})
    for (order, held_out), of_case in zip(CASES, shares, strict=True):
        if not of_case:
            continue
        others = "packed" in name or "history" in options  # than batches that are drawn whole
        group = next((word for word in ("packed", "history") if word in name), "")
        key = (graph, order, held_out, group)
        if key not in IN_AMPLE_MEMORY:
            IN_AMPLE_MEMORY[key] = sorted(check(graph, 4 * BYTES, options if others else {}, order, held_out, tries))
        for share in of_case:
            found = check(graph, int(share * BYTES), options, order, held_out, tries)
            assert sorted(found) == IN_AMPLE_MEMORY[key], (order, held_out, share)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_beside_validation_at_some_budgets(graph: Path, pack: Path, name: str, whole: bool, tries: list[int]) -> None:
    """Each strategy in one case and in one memory; the other cases are the neighbours' in the table, or all of them."""
    number = list(STRATEGIES).index(name)
    shares = [[LITTLE_AND_MUCH[number // len(CASES) % 2]] if k == number % len(CASES) else [] for k in range(len(CASES))]
    compare(graph, pack, name, [LITTLE_AND_MUCH] * len(CASES) if whole else shares, tries)


@pytest.mark.parametrize(("name", "share"), covering(CHOOSING, LITTLE_AND_MUCH))
def test_a_history_that_chooses_its_nodes_trains_at_some_budgets(graph: Path, name: str, share: float, tries: list[int]) -> None:
    check(graph, int(share * BYTES), CHOOSING[name], "train val test", 128, tries)


def command(graph: Path, pack: Path, name: str, memory: int, tries: list[int], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``featstore train`` with the options of a case; return its losses, or what its error names."""
    line = ["train", str(graph), "--epochs", "2", "--fanouts", "5,5", "--hidden", "8", "--memory", f"{memory}B", "--json"]
    for option, value in STRATEGIES[name].items():
        line += [f"--{option}".replace("_", "-"), str(value)]
    line += ["--pack", str(pack)] if "packed" in name else ["--batch-size", "128"]
    tries[0] = -MOST_TRIES  # no loader tells of its batches here
    code = main(line)
    out, err = capsys.readouterr()
    if code == 0:
        return json.loads(out)["losses"]
    found = re.search(r"at least (\d+) bytes", err)
    assert found is not None, err
    return int(found[1])


def compare_commands(
    graph: Path, pack: Path, name: str, shares: Any, tries: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for share in [2.0, *shares]:
        memory = int(share * BYTES)
        for _ in range(3):
            found = command(graph, pack, name, memory, tries, capsys)
            if not isinstance(found, int):
                break
            assert found > memory
            memory = found
        assert isinstance(found, list), f"{memory} bytes, which an error named, do not do either"
        losses.append(found)
    assert losses[0]
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize("name", one_in(4, [*STRATEGIES]))
def test_the_command_trains_at_some_budgets(graph, pack, name, tries, capsys) -> None:
    compare_commands(graph, pack, name, [0.3], tries, capsys)


@pytest.mark.parametrize(("name", "memory"), covering([*STRATEGIES, *CHOOSING], [700_000, 1_200_000, 2_000_000]))
def test_the_first_number_suffices_for_one_loader(graph: Path, pack: Path, name: str, memory: int) -> None:
    """It is said when the loader is made: in 700,000 bytes before a batch is sampled, in 2,000,000 after that."""
    options = (STRATEGIES | CHOOSING)[name] | ({"pack": pack} if "packed" in name else {"shuffle": False})

    def loader(g: featstore.OutOfCoreGraph) -> featstore.Loader:
        drawn = () if "packed" in name else (featstore.NeighborSampler(g, [5, 5]), g.node_data["train_idx"], 128)
        return make_loader(g, *drawn, labels="y", **with_history(options))

    with featstore.open(graph, memory=memory) as g, pytest.raises(featstore.BudgetError) as refused:
        loader(g)
    needed = refused.value.needed
    assert needed is not None

    def run(needed: int) -> None:
        with featstore.open(graph, memory=needed) as g, loader(g) as made:
            for _ in range(2):
                n_batches = 0
                for batch in made:
                    merge(batch)
                    n_batches += 1
                assert n_batches == len(made)

    run(needed)


@pytest.mark.parametrize("favourite", ["superbatch", "streamed"])
def test_auto_takes_no_strategy_that_lacks_memory(graph: Path, favourite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is estimated to be; and takes it in the memory that it is said to need."""
    cls = find_strategy(favourite)
    real = cls.estimate
    monkeypatch.setattr(cls, "estimate", lambda workload, machine: replace(real(workload, machine), epoch_s=0.0, impossible=""))

    def taken(memory: int) -> dict[str, Any]:
        with featstore.open(graph, memory=memory) as g:
            sampler = featstore.NeighborSampler(g, [5, 5])
            with featstore.Loader(
                g, sampler, g.node_data["train_idx"], 128, labels="y", shuffle=False, strategy="auto"
            ) as loader:
                assert sum(1 for _ in loader) == len(loader)
                found: dict[str, Any] = loader.stats()["auto"]
        return found

    for memory in range(2_000_000, 8_000_000, 200_000):  # the least in which rows are read on demand
        with contextlib.suppress(featstore.BudgetError):
            found = taken(memory)
            break
    assert found["taken"]["strategy"] == "ondemand"
    reasons = [each["impossible"] for each in found["estimates"] if each["strategy"] == favourite]
    assert reasons
    for why in reasons:  # one a policy
        needed = re.fullmatch(r"needs memory='(\d+)KiB'", why)
        assert needed is not None, why
        assert taken(int(needed[1]) << 10)["taken"]["strategy"] == favourite


@pytest.mark.parametrize(
    ("policy", "cache", "device"),
    [*covering(["belady", "frequency", "in_out_ratio"], ["auto", 0.05], [None, 0.3]), ("belady", 0.02, None)],
)
def test_packed_names_at_once_what_its_layout_and_its_batches_need(graph, pack, tmp_path, cache, policy, device) -> None:
    """Before a layout is made; of the smallest cache where it fits, but not two batches beside it."""
    path = tmp_path / "pack"
    shutil.copytree(pack, path, ignore=shutil.ignore_patterns("layout-*"))
    strategy = featstore.Packed(pack=path, cache=cache, policy=policy)
    for memory in (2_400_000, 2_800_000) if cache == 0.02 else (900_000, 1_200_000, 1_800_000):
        with featstore.open(graph, memory=memory) as g, pytest.raises(featstore.BudgetError) as refused:
            featstore.Loader(g, strategy=strategy, labels="y", device_cache=device)
        assert not list(path.glob("layout-*"))
        needed = refused.value.needed
        assert needed is not None
        with (
            featstore.open(graph, memory=needed) as g,
            featstore.Loader(g, strategy=strategy, labels="y", device_cache=device) as loader,
        ):
            assert sum(1 for _ in loader) == len(loader)
        shutil.rmtree(next(path.glob("layout-*")))


@pytest.mark.parametrize("policy", ["sieve", "lru", "degree"])
def test_a_gather_through_a_cache_ends_in_any_memory(graph: Path, policy: str, tries: list[int]) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, N, 20_000)
    with featstore.open(graph, memory=BYTES) as g:
        g.cache("x", budget=BYTES // 10, policy=policy)
        store = g.features["x"]
        expected = store[ids]
        g.pool.trim()
        out = expected.clone()
        for left in [0, 1, 4096, 65_536, 100_000, 300_000, 10**6, 8 * 10**6]:
            g.reader.trim()
            g.pool.trim()
            with g.budget.reserve("others", max(0, g.budget.available - left)):
                tries[0] = 0
                out.zero_()
                try:
                    store.take(ids, out=out)
                except featstore.BudgetError:
                    assert left < 8 * 10**6  # the reader sorts in memory, too
                    continue
                assert (out == expected).all()


def test_several_batches_that_are_held_are_said(graph: Path) -> None:
    with featstore.open(graph, memory="5MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        loader = featstore.Loader(g, sampler, g.node_data["train_idx"], 128, labels="y")
        with pytest.raises(featstore.BudgetError, match=r"does not fit while [2-9] earlier batches are held.*copies"):
            [batch for batch in loader]  # noqa: C416 - as users write it
        assert sum(1 for _ in loader) == len(loader)
