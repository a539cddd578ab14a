"""The contract of strategies: the six that are built in keep it, and one that breaks a promise fails."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import PluginError
from featstore.gather.plan import BatchPlan, EdgePlan, Tier, TierRows
from featstore.sampling.edgenumbers import edge_numbers
from featstore.storage.rowfile import ReadStats
from featstore.testing import StrategyContract
from featstore.testing.loading import AMPLE, BATCH, SAMPLERS, SEED, contract_graph, failures


def contract(name: str, cls: type[featstore.Strategy], **given: Any) -> type[StrategyContract]:
    """The suite of a strategy with some options."""
    make = lambda self, **options: cls(**{**given, **options})  # noqa: E731
    return type("Contract", (StrategyContract,), {"registered_name": name, "strategy": make})


TestOnDemand = contract("ondemand", featstore.OnDemand)
TestSuperbatch = contract("superbatch", featstore.Superbatch, length=5)
TestGinex = contract("ginex", featstore.Ginex, length=5)
TestStreamed = contract("streamed", featstore.Streamed, length=5)
TestAuto = contract("auto", featstore.Auto)


def test_on_demand_with_an_online_policy() -> None:
    suite = contract("ondemand", featstore.OnDemand, cache=0.1, policy="lru")()
    assert not failures(suite, ["test_batches_with_any_threads", "test_little_memory", "test_training_resumes_in_the_middle"])


@cache
def pack_of(sampler: str) -> str:
    """Make a pack of the suite's batches, once; return its directory, which goes with the suite's folder."""
    graph = contract_graph()
    path = f"{graph.path}.{sampler.replace(' ', '-')}.pack"
    with featstore.open(graph.path, memory=AMPLE) as g:
        featstore.sample_offline(
            g, SAMPLERS[sampler](g), graph.seeds, BATCH, epochs=2, path=path, seed=SEED, progress=False
        ).close()
    return path


class TestPacked(StrategyContract):
    registered_name = "packed"
    caches = (0.1, "30kB", "auto", 1.0)

    def strategy(self, **options: Any) -> featstore.Strategy:
        return featstore.Packed(**{"cache": "auto", "length": 5, **options})

    def loader(self, g: Any, sampler: str, strategy: featstore.Strategy, **options: Any) -> featstore.Loader:
        assert isinstance(strategy, featstore.Packed)
        return featstore.Loader(g, strategy=replace(strategy, pack=pack_of(sampler)), seed=SEED, **options)

    def command(self) -> list[str]:
        return ["--pack", pack_of("neighbor"), "--cache", "auto"]


class Zeros:
    """A source whose rows are zeros."""

    def gather(self, addresses: Any, out: Any, positions: Any = None, gap_bytes: int | None = None) -> ReadStats:
        out[slice(len(addresses)) if positions is None else positions] = 0
        return ReadStats()


class FaultyRunner(featstore.Runner):
    """The runner of another strategy, and one fault."""

    def __init__(self, right: featstore.Runner, fault: str) -> None:
        super().__init__(right.context)
        self.right, self.fault = right, fault
        if fault == "memory":
            self.kept = right.context.graph.budget.reserve("for ever", 1000)
        if fault == "thread":
            threading.Thread(target=LET_GO.wait, daemon=True, name="for ever").start()

    def prepare(self, epoch: int, start: int) -> featstore.EpochRun:
        return FaultyEpoch(self.right.prepare(epoch, start), self.fault, len(self.context.batches))

    def close(self, failed: bool = False) -> None:
        self.right.close(failed)


class FaultyEpoch(featstore.EpochRun):
    def __init__(self, right: featstore.EpochRun, fault: str, n: int) -> None:
        self.right, self.fault, self.n = right, fault, n

    @property
    def threads(self) -> int:
        return self.right.threads

    def batch(self, position: int) -> featstore.Batch:
        if self.fault == "lost batch" and position == self.n - 1:
            position -= 1  # twice the one before
        prepared = self.right.batch(position)
        if self.fault == "wrong rows of edges" and position == 3 and prepared.sampled.blocks[0].edge_pos is not None:
            ids = edge_numbers(prepared.sampled.blocks, 1 << 62, whole=True).copy()
            ids[-1] = ids[0]
            wrong = EdgePlan(ids, np.empty(0, np.int32), BatchPlan(len(ids), (TierRows(Tier.BASE, ids),)))
            return replace(prepared, edge_plans={"w": wrong})
        if self.fault == "other edges" and position == 3:
            first, *others = prepared.sampled.blocks
            blocks = (replace(first, src=first.src.roll(1)), *others)
            return replace(prepared, sampled=replace(prepared.sampled, blocks=blocks))
        if self.fault == "wrong index":
            return replace(prepared, sampled=replace(prepared.sampled, index=(position + 1) % self.n))
        return prepared

    def plan(self, name: str, batch: featstore.Batch) -> Any:
        if self.fault == "no rows of the device":
            return BatchPlan(len(batch.sampled.input_ids), (TierRows(Tier.BASE, batch.sampled.input_ids.numpy()),)), {}
        plan, tiers = self.right.plan(name, batch)
        if self.fault == "wrong bytes" and batch.position == 3:
            rows = np.arange(len(batch.sampled.input_ids))
            return BatchPlan(len(rows), (TierRows(Tier.PACKED, rows),)), {Tier.PACKED: Zeros()}
        if self.fault == "wrong rows" and batch.position == 3:
            rows = batch.sampled.input_ids.numpy().copy()
            rows[-1] = rows[0]
            return BatchPlan(len(rows), (TierRows(Tier.BASE, rows),)), {}
        return plan, tiers

    def close(self) -> None:
        self.right.close()


LET_GO = threading.Event()


@dataclass(frozen=True)
class Faulty(featstore.OnDemand):
    fault: str = featstore.options.option("", featstore.options.Kind(str, str, "FAULT"), "what is wrong")

    def run(self, context: featstore.Context) -> featstore.Runner:
        return FaultyRunner(super().run(context), self.fault)


class FaultySuite(StrategyContract):
    def __init__(self, fault: str, make: Callable[..., featstore.Strategy] = Faulty) -> None:
        self.fault, self.make = fault, make

    def strategy(self, **options: Any) -> featstore.Strategy:
        return self.make(**{"fault": self.fault, **options})


FAULTS = {
    "wrong rows": ("test_batches_of_every_sampler", "the plan of 'x' .* do not lie at its addresses"),
    "wrong bytes": ("test_batches_of_every_sampler", "has wrong rows of 'x'"),
    "other edges": ("test_batches_of_every_sampler", "has other edges"),
    "no rows of the device": ("test_batches_with_rows_on_the_device", "the device serves 0 of"),
    "wrong rows of edges": ("test_batches_with_features_of_edges", "wrong rows of the edge feature 'w'"),
    "lost batch": ("test_batches_of_every_sampler", "to run as number 7 has position 6"),
    "wrong index": ("test_batches_of_every_sampler", "has other ids"),
    "memory": ("test_nothing_is_held_after_close", "for ever"),
    "thread": ("test_nothing_is_held_after_close", "threads that go on.*for ever"),
}


def test_control_without_a_fault_nothing_fails() -> None:
    names = {name for name, _ in FAULTS.values()}
    assert not failures(FaultySuite(""), names)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_strategy_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.testing.loading.PATIENCE_S", 0.2)
    test, message = FAULTS[fault]
    LET_GO.clear()
    try:
        found = failures(FaultySuite(fault), [test])
    finally:
        LET_GO.set()
    assert isinstance(found[test], PluginError if fault in ("lost batch", "wrong rows") else AssertionError)
    assert re.search(message, str(found[test])), found


WRONG: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "position": (lambda run, position: run.batch(max(0, position - 1)), "to run as number 1 has position 0"),
    "sample": (
        lambda run, position: replace(run.batch(position), sampled=run.batch(0).sampled),
        "to run as number 1 is batch 0, which has run as number 0",
    ),
    "epoch": (
        lambda run, position: replace(run.batch(position), sampled=replace(run.batch(position).sampled, epoch=1)),
        "to run as number 0 is of epoch 1, and epoch 0 runs",
    ),
    "index": (
        lambda run, position: replace(run.batch(position), sampled=replace(run.batch(position).sampled, index=10)),
        "to run as number 0 has index 10, and an epoch has 10 batches",
    ),
    "kind": (
        lambda run, position: run.batch(position).sampled,
        "to run as number 0 is a SampledBatch, not a Batch of a SampledBatch",
    ),
    "sampled": (
        lambda run, position: replace(run.batch(position), sampled=None),
        "to run as number 0 is a Batch of a NoneType, not",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_batch_is_not_delivered(wrong: str) -> None:
    """Whatever a strategy prepares in place of what it was asked for; the loop gets no batch twice."""
    prepare, message = WRONG[wrong]

    @dataclass(frozen=True)
    class Wrong(featstore.OnDemand):
        def run(self, context: featstore.Context) -> featstore.Runner:
            return WrongRunner(super().run(context), "")

    class WrongRunner(FaultyRunner):
        def prepare(self, epoch: int, start: int) -> featstore.EpochRun:
            return WrongEpoch(self.right.prepare(epoch, start), "", 0)

    class WrongEpoch(FaultyEpoch):
        def batch(self, position: int) -> featstore.Batch:
            return prepare(self.right, position)

    with featstore.open(contract_graph().path, memory=AMPLE) as g:
        sampler, seen = featstore.NeighborSampler(g, [2]), []
        with featstore.Loader(g, sampler, np.arange(100), 10, shuffle=False, strategy=Wrong(), prefetch=0) as loader:
            with pytest.raises(PluginError, match=f"Wrong': what it prepared .*{re.escape(message)}"):
                seen.extend(batch.seeds[0].item() for batch in loader)
    assert seen == [0][: len(seen)]


def test_the_base_class_does_not_answer_for_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that says nothing is refused, and the suite fails where it is not."""
    assert featstore.OnDemand.takes_history
    assert not Faulty.takes_history
    test = "test_batches_with_a_history"
    assert not failures(FaultySuite(""), [test])
    monkeypatch.setattr("featstore.load.loader.check_history", lambda *given: None)
    found = failures(FaultySuite(""), [test])
    assert re.search("does not say that it runs in order", str(found[test]))


@dataclass(frozen=True)
class Undeclared(featstore.OnDemand):
    fault: str = ""
    length: int = 3


@dataclass(frozen=True)
class TakesAnything(featstore.OnDemand):
    fault: Any = featstore.options.option("", featstore.options.Kind(lambda value: value, str, "ANY"), "anything")


@pytest.mark.parametrize(
    ("make", "test", "message"),
    [
        (Undeclared, "test_options_are_declared", "'fault' is not declared"),
        (TakesAnything, "test_bad_values_name_their_option", "'fault' takes anything"),
    ],
)
def test_faulty_options_fail(make: type[featstore.Strategy], test: str, message: str) -> None:
    assert message in str(failures(FaultySuite("", make), [test])[test])
