"""Options: every one under every strategy, in Python and on the command line; and values that none takes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.strategies.options import options_of
from tests.support.graphs import skewed_dataset
from tests.support.refusing import refuses
from tests.support.sampled import covering

N, BATCH = 600, 50
STRATEGIES: dict[str, type[featstore.Strategy]] = {
    "ondemand": featstore.OnDemand,
    "superbatch": featstore.Superbatch,
    "ginex": featstore.Ginex,
    "streamed": featstore.Streamed,
    "packed": featstore.Packed,
    "auto": featstore.Auto,
}
# An option, and whether a strategy takes it.
TABLE = """
    option    ondemand  superbatch  ginex  streamed  packed  auto
    cache     yes       yes         yes    yes       yes     yes
    policy    yes       yes         yes    yes       yes     no
    edge_cache  yes     yes         yes    yes       yes     yes
    edge_policy  yes    no          no     no        yes     no
    length    no        yes         yes    yes       yes     no
    disk      no        yes         yes    yes       yes     yes
    run_dir   no        yes         yes    yes       no      yes
    pack      no        no          no     no        yes     yes
    epochs    no        no          no     no        no      yes
"""
_ROWS = [line.split() for line in TABLE.strip().splitlines()]
TAKES = {(row[0], name): word == "yes" for row in _ROWS[1:] for name, word in zip(_ROWS[0][1:], row[1:], strict=True)}
OPTIONS = sorted({option for option, _ in TAKES})
VALUES: dict[str, Any] = {"cache": 0.1, "edge_cache": 0.1, "edge_policy": "lru", "length": 3, "disk": "50MB", "epochs": 2}
COMMAND = {
    "cache": ["--cache", "10%"],
    "policy": ["--policy", "belady"],
    "length": ["--length", "3"],
    "disk": ["--disk", "50MB"],
    "run_dir": ["--run-dir", "runs"],
    "pack": ["--pack", "some.pack"],
}
EVERYBODYS: dict[str, Any] = {
    "batch_size": BATCH,
    "features": ["x"],
    "edge_features": [],
    "labels": "y",
    "prefetch": 1,
    "threads": 1,
    "shuffle": False,
    "seed": 4,
    "device": "cpu",
    "drop_last": False,
    "history": None,
    "rank": 0,
    "world_size": 1,
}
POLICIES = {"ondemand": "lru"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = skewed_dataset(tmp_path_factory.mktemp("data") / "g", N, 9)
    with featstore.open(path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], BATCH, progress=False).close()
    return path


@pytest.fixture
def g(dataset: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(dataset, memory="64MB", threads=2) as g:
        assert len(g.node_data["train_idx"])  # read, and counted, whatever comes
        yield g


def made(g: featstore.OutOfCoreGraph, strategy: str, options: dict[str, Any], **loader: Any) -> featstore.Loader:
    """A loader of a strategy with its samples: a pack's where it runs one."""
    options = {"cache": 0.1, **options}
    if "edge_policy" in options:
        options.setdefault("edge_cache", 0.1)
    if strategy == "packed":
        options.setdefault("pack", f"{g.path}.pack")
    if "pack" not in options:
        loader = {
            "sampler": featstore.NeighborSampler(g, [4, 3], seed=1),
            "seeds": g.node_data["train_idx"],
            "batch_size": BATCH,
            **loader,
        }
    return featstore.Loader(g, strategy=STRATEGIES[strategy](**options), **loader)


def value_of(option: str, strategy: str, g: featstore.OutOfCoreGraph, tmp_path: Path) -> Any:
    if option in VALUES:
        return VALUES[option]
    return {"policy": POLICIES.get(strategy, "belady"), "run_dir": tmp_path / "runs", "pack": f"{g.path}.pack"}[option]


def test_the_table_is_that_of_the_fields() -> None:
    taken = {(option, name) for name, cls in STRATEGIES.items() for option in options_of(cls)}
    assert taken == {key for key, takes in TAKES.items() if takes}
    assert all({each.name for each in dataclasses.fields(cls)} == set(options_of(cls)) for cls in STRATEGIES.values())
    assert sorted(STRATEGIES) == featstore.available_strategies()
    assert {name: cls(**({"pack": "p"} if name == "packed" else {})).name for name, cls in STRATEGIES.items()} == {
        name: name for name in STRATEGIES
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_taken_or_refused_by_name(g: featstore.OutOfCoreGraph, tmp_path: Path, option: str, strategy: str) -> None:
    given = {option: value_of(option, strategy, g, tmp_path)}
    if TAKES[option, strategy]:
        with made(g, strategy, given) as loader:
            for batch in loader:
                assert torch.equal(batch.x, g.features["x"][batch.input_ids])
    else:
        refuses(TypeError, option, lambda: STRATEGIES[strategy](**given))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", sorted(COMMAND))
def test_the_command_line_refuses_the_same(tmp_path, capsys, option, strategy) -> None:
    """Before the dataset is opened: there is none."""
    pack = ["--pack", "some.pack"] if strategy == "packed" else []
    value = ["--policy", "lru", "--cache", "10%"] if (option, strategy) == ("policy", "ondemand") else COMMAND[option]
    assert main(["train", str(tmp_path / "none"), "--strategy", strategy, *pack, *value]) == 2
    said = capsys.readouterr().err
    if TAKES[option, strategy]:
        assert "no such file" in said
    else:
        name = re.escape(COMMAND[option][0])
        assert re.search(rf"^featstore: {name}: goes with --strategy [\w, ]+, not {strategy}$", said, re.M)


def test_every_argument_is_tried_with_wrong_values() -> None:
    parameters = set(inspect.signature(featstore.Loader).parameters)
    assert parameters == {"g", "sampler", "seeds", "strategy", "device_cache", *EVERYBODYS}
    assert WRONG.keys() == EVERYBODYS.keys() | {"strategy", "device_cache"}
    assert WRONG_OPTIONS.keys() == set(OPTIONS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arguments_with_every_strategy(g: featstore.OutOfCoreGraph, strategy: str) -> None:
    with made(g, strategy, {}, **EVERYBODYS) as loader:
        assert sum(len(batch.seeds) for batch in loader) == len(g.node_data["train_idx"])


def test_options_of_a_strategy_are_frozen_and_kept_as_they_were_checked(tmp_path: Path) -> None:
    strategy = featstore.Superbatch(cache="10%", length=torch.tensor(3).item(), run_dir=tmp_path / "r")
    assert strategy == featstore.Superbatch(cache=0.1, length=3, run_dir=str(tmp_path / "r"))
    assert hash(strategy) == hash(featstore.Superbatch(cache=0.1, length=3, run_dir=str(tmp_path / "r")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.length = 4  # type: ignore[misc]
    refuses(featstore.OptionError, "no cache that it could manage", lambda: featstore.OnDemand(cache=None, policy="lru"))
    with pytest.raises(featstore.OptionError, match=r"^length: goes with a planned policy"):
        featstore.Packed("p", policy="frequency", length=3)


WRONG_OPTIONS: dict[str, list[Any]] = {
    "policy": [5, "nope", object, ""],
    "length": [0, -3, 1.5, True, "three"],
    "disk": ["garbage", -1, 1.5, True, "-1x", [1]],
    "run_dir": ["", 5, ["runs"]],
    "pack": [5, "/nope", ["p"]],
    "epochs": [0, -1, 1.5, True, "2"],
    "cache": ["garbage", -1, 1.5, -0.1, float("nan"), True, [1]],
    "edge_cache": ["auto", "garbage", -1, 1.5, -0.1, float("nan"), True, [1]],
    "edge_policy": ["degree", "belady", 5, "nope", object, ""],
}
WRONG: dict[str, list[Any]] = {
    "device_cache": ["fast", -1, 1.5, -0.1, float("nan"), True],
    "batch_size": [0, -1, 1.5, True, "7"],
    "features": ["nope", ["x", "x"], [5]],
    "edge_features": ["nope", ["x"], [5], 5],
    "labels": ["nope", 5, ["y", "nope"], ["y", "y"], ["y", 5], {"y"}],
    "prefetch": [-1, 1.5, "many", True, None],
    "threads": [0, -1, 1.5, True, "2", {"sample": 0}, {"gather": 1.5}, {"read ahead": 1}],
    "shuffle": ["no", 1, None],
    "seed": [-1, 0.5, True, "3"],
    "device": ["nowhere"],
    "drop_last": ["no", 1, None],
    "history": ["no", 1, True, featstore.History],
    "rank": [0, -1, 0.5, "0"],  # each of the two goes with the other
    "world_size": [1, 0, 2.5, "2"],
    "strategy": ["", "on demand", "Auto", 5, object],
}


@pytest.mark.parametrize(("option", "strategy"), covering(sorted(WRONG), STRATEGIES))
def test_wrong_arguments(g: featstore.OutOfCoreGraph, option: str, strategy: str) -> None:
    """Without features, for which nothing would be made of them, too."""
    before = g.memory_report()
    for value in WRONG[option]:
        for features in (["x"], []):
            errors = (ValueError, TypeError) + (RuntimeError,) * (option == "device")  # torch's own
            with pytest.raises(errors):
                if option == "strategy":
                    featstore.Loader(g, featstore.NeighborSampler(g, [4]), [1], strategy=value, features=features)
                else:
                    made(g, strategy, {}, **{"features": features, option: value})
    kept = {name: n for name, n in g.memory_report().items() if name not in ("indptr", "node data")}
    assert kept == {name: n for name, n in before.items() if name not in ("indptr", "node data")}


@pytest.mark.parametrize(("option", "strategy"), sorted(key for key, takes in TAKES.items() if takes))
def test_wrong_options(g: featstore.OutOfCoreGraph, option: str, strategy: str) -> None:
    before = g.memory_report()
    for value in WRONG_OPTIONS[option]:
        errors = (ValueError, TypeError, *([FileNotFoundError] if option == "pack" else []))
        caught = refuses(errors, "", lambda: made(g, strategy, {option: value}))
        if isinstance(caught.value, featstore.OptionError):
            assert caught.value.option == option
        elif option != "pack":
            assert option in str(caught.value) or "polic" in str(caught.value)
    assert g.memory_report() == before
