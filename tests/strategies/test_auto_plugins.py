"""``Auto`` considers registered strategies that estimate themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.estimate.length import Length
from featstore.strategies.registry import STRATEGIES
from tests.base.test_registry import distribute
from tests.support.graphs import skewed_dataset

Estimator = Callable[[featstore.Workload, featstore.Machine], Any]


def expected(workload: featstore.Workload, machine: featstore.Machine, **changes: Any) -> featstore.Estimate:
    given: dict[str, Any] = {
        "strategy": "mine",
        "policy": "lru",
        "epoch_s": 1e-9,
        "once_s": 0.0,
        "rows_loaded": workload.n_accesses,
    }
    return featstore.Estimate(**{**given, **changes})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("plugins") / "g", 2000, 20)


@pytest.fixture
def register() -> Iterator[Callable[[Estimator], None]]:
    """Register a strategy ``mine`` with an estimate, for one test."""

    def made(estimator: Estimator) -> None:
        @featstore.register_strategy("mine")
        @dataclass(frozen=True)
        class Mine(featstore.OnDemand):
            @classmethod
            def estimate(cls, workload: featstore.Workload, machine: featstore.Machine) -> featstore.Estimate | None:
                found: featstore.Estimate | None = estimator(workload, machine)
                return found

    yield made
    STRATEGIES.known.pop("mine", None)


def train(path: Path) -> dict[str, Any]:
    """Run an epoch under auto, compare its rows, and return what was chosen."""
    with featstore.open(path, memory="64MB") as g:
        sampler, seeds = featstore.NeighborSampler(g, [4, 3]), g.node_data["train_idx"]
        rows = g.features["x"][:]
        with featstore.Loader(g, sampler, seeds, 50, strategy=featstore.Auto(cache=0.1)) as loader:
            for batch in loader:
                assert torch.equal(batch.x, rows[batch.input_ids])
            cached = g.features["x"].cache
            found: dict[str, Any] = loader.stats()["auto"]
            found["policy"] = None if cached is None or cached.policy is None else cached.policy.name
            return found


def test_a_strategy_whose_estimate_is_least_is_taken(path: Path, register: Callable[[Estimator], None]) -> None:
    seen = []

    def estimator(workload: featstore.Workload, machine: featstore.Machine) -> featstore.Estimate:
        seen.append(workload)
        return expected(workload, machine)

    register(estimator)
    found = train(path)
    assert (found["taken"]["strategy"], found["taken"]["policy"], found["policy"]) == ("mine", "lru", "lru")
    assert seen[0].capacity == 200
    assert seen[0].n_batches == 14


def test_a_strategy_that_takes_longer_is_listed(
    path: Path, register: Callable[[Estimator], None], capsys: pytest.CaptureFixture[str]
) -> None:
    register(lambda w, m: expected(w, m, epoch_s=1e6))
    found = train(path)
    assert found["taken"]["strategy"] != "mine"
    assert [each["epoch_s"] for each in found["estimates"] if each["strategy"] == "mine"] == [1e6]
    capsys.readouterr()
    assert main(["plan", str(path), "--explain", "--memory", "64MB", "--batch-size", "50", "--sizes", "10%"]) == 0
    assert "mine (lru)" in capsys.readouterr().out


def test_a_strategy_that_estimates_nothing_is_no_candidate(path: Path, register: Callable[[Estimator], None]) -> None:
    register(lambda w, m: None)
    assert "mine" not in {each["strategy"] for each in train(path)["estimates"]}


def test_each_policy_of_a_strategy_is_a_candidate(path: Path, register: Callable[[Estimator], None]) -> None:
    register(lambda w, m: [expected(w, m, epoch_s=1e6), expected(w, m, policy="sieve")])
    found = train(path)
    assert (found["taken"]["strategy"], found["policy"]) == ("mine", "sieve")
    assert [each["policy"] for each in found["estimates"] if each["strategy"] == "mine"] == ["lru", "sieve"]


def test_what_a_base_class_estimates_is_not_inherited(path: Path) -> None:
    @featstore.register_strategy("mine")
    @dataclass(frozen=True)
    class Mine(featstore.OnDemand):
        pass

    try:
        assert "mine" not in {each["strategy"] for each in train(path)["estimates"]}
    finally:
        STRATEGIES.known.pop("mine")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda w, m: 1 / 0, r"'mine' .*cannot be estimated: ZeroDivisionError"),
        (lambda w, m: 3.0, r"'mine' .*estimates 3\.0, not an Estimate"),
        (lambda w, m: expected(w, m, strategy="other"), r"not an Estimate of 'mine'"),
        (lambda w, m: expected(w, m, epoch_s=float("nan")), r"seconds that are none"),
        (lambda w, m: expected(w, m, once_s=-1.0), r"seconds that are none"),
    ],
)
def test_wrong_estimates_are_left_out(
    path: Path, register: Callable[[Estimator], None], estimator: Estimator, message: str
) -> None:
    """With a warning that names whose they are; the others are compared. The contract suite raises."""
    register(estimator)
    with pytest.warns(featstore.PerformanceWarning, match=message + r".*it is left out"):
        found = train(path)
    assert found["taken"]["strategy"] != "mine"
    assert re.search(message, next(each["impossible"] for each in found["estimates"] if each["strategy"] == "mine"))


def test_a_length_that_cannot_be_estimated_is_left_out(
    path: Path, register: Callable[[Estimator], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate_length(self: featstore.Strategy, context: featstore.Context) -> Length:
        raise KeyError("batches")

    register(expected)
    monkeypatch.setattr(STRATEGIES.known["mine"], "estimate_length", estimate_length)
    with pytest.warns(featstore.PerformanceWarning, match=r"'mine' .*estimates no length: KeyError: 'batches'; it is left out"):
        found = train(path)
    assert found["taken"]["strategy"] != "mine"
    assert "KeyError" in next(each["impossible"] for each in found["estimates"] if each["strategy"] == "mine")


def test_a_package_that_cannot_be_loaded_disturbs_nobody(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribute(tmp_path, "plug_s", "", "1 / 0\n")
    (tmp_path / "plug_s-1.0.dist-info" / "entry_points.txt").write_text("[featstore.strategies]\nbroken = plug_s:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {each["strategy"]: each["impossible"] for each in train(path)["estimates"]}
    assert "ZeroDivisionError" in found["broken"]


@pytest.mark.parametrize("has_memory", [True, False])
def test_an_estimate_is_of_superbatches_as_long_as_estimated(
    path: Path, has_memory: bool, register: Callable[[Estimator], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the strategy's own; of one batch each where there is no memory for a run. The record has those of what is taken."""
    seen = []

    def estimator(workload: featstore.Workload, machine: featstore.Machine) -> featstore.Estimate:
        seen.append(workload.superbatch)
        return expected(workload, machine)

    def estimate_length(self: featstore.Strategy, context: featstore.Context) -> Length:
        if not has_memory:
            raise featstore.BudgetError("none", 1)
        return Length(4, 3, "more of it")

    register(estimator)
    monkeypatch.setattr(STRATEGIES.known["mine"], "estimate_length", estimate_length)
    if not has_memory:  # for any that plans ahead: what is taken has no length, whatever the drive was measured to do
        monkeypatch.setattr(featstore.Superbatch, "estimate_length", estimate_length)
    found = train(path)["superbatch"]
    assert seen[0] == found["batches"] == (4 if has_memory else 1)
    assert (found["passes"], found["advice"]) == ((3, "more of it") if has_memory else (14, None))
