"""A loader's options: every option under every strategy, in Python and on the command line; and values that none takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore.cli import main
from featstore.run.options import TAKEN_BY
from tests.conftest import skewed_dataset

N, BATCH = 600, 50
STRATEGIES = ("ondemand", "superbatch", "streamed", "packed", "auto")
# An option, a value of it, what the command line calls it, and whether a strategy takes it.
TABLE = """
    option        ondemand  superbatch  streamed  packed  auto
    policy        yes       yes         yes       yes     no
    superbatch    no        yes         yes       yes     yes
    overlap       no        yes         no        no      no
    disk          no        yes         yes       yes     yes
    run_dir       no        yes         yes       no      yes
    pack          no        no          no        yes     yes
    device_cache  no        no          no        yes     yes
    epochs        no        no          no        no      yes
"""
_ROWS = [line.split() for line in TABLE.strip().splitlines()]
TAKES = {(row[0], name): word == "yes" for row in _ROWS[1:] for name, word in zip(_ROWS[0][1:], row[1:], strict=True)}
VALUES: dict[str, Any] = {
    "superbatch": 3,
    "overlap": True,
    "disk": "50MB",
    "device_cache": 0.05,
    "epochs": 2,
}
COMMAND = {
    "policy": ["--policy", "belady"],
    "superbatch": ["--superbatch", "3"],
    "overlap": ["--no-overlap"],
    "disk": ["--disk", "50MB"],
    "run_dir": ["--run-dir", "runs"],
    "pack": ["--pack", "some.pack"],
    "device_cache": ["--device-cache", "0.05"],
}
EVERYBODYS: dict[str, Any] = {
    "batch_size": BATCH,
    "features": ["x"],
    "labels": "y",
    "memory": "32MB",
    "feature_cache": 0.1,
    "prefetch": 1,
    "threads": 1,
    "shuffle": False,
    "seed": 4,
    "device": "cpu",
    "drop_last": False,
}
POLICIES = {"ondemand": "lru", "packed": "belady"}


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


def made(g: featstore.OutOfCoreGraph, strategy: str, **options: Any) -> featstore.Loader:
    """A loader of a strategy with its samples: a pack's where it runs one, or where one is given to ``"auto"``."""
    options = {"strategy": strategy, "feature_cache": 0.1, **options}
    if strategy == "packed":
        options.setdefault("pack", f"{g.path}.pack")
    if "pack" not in options or strategy not in ("packed", "auto"):
        options = {
            "sampler": featstore.NeighborSampler(g, [4, 3], seed=1),
            "seeds": g.node_data["train_idx"],
            "batch_size": BATCH,
            **options,
        }
    return featstore.Loader(g, **options)


def value_of(option: str, strategy: str, g: featstore.OutOfCoreGraph, tmp_path: Path) -> Any:
    if option in VALUES:
        return VALUES[option]
    return {"policy": POLICIES.get(strategy, "belady"), "run_dir": tmp_path / "runs", "pack": f"{g.path}.pack"}[option]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", sorted(TAKEN_BY))
def test_an_option_is_taken_or_refused_by_name(g: featstore.OutOfCoreGraph, tmp_path: Path, option: str, strategy: str) -> None:
    given = {option: value_of(option, strategy, g, tmp_path)}
    if TAKES[option, strategy]:
        if (option, strategy) == ("device_cache", "auto"):
            with pytest.raises(ValueError, match="device_cache= goes with pack="):
                made(g, strategy, **given)
            given["pack"] = f"{g.path}.pack"
        with made(g, strategy, **given) as loader:
            for batch in loader:
                assert torch.equal(batch.x, g.features["x"][batch.input_ids])
    else:
        before = g.memory_report()
        with pytest.raises(ValueError, match=rf"^{option}= goes with strategy='.*, not '{strategy}'$"):
            made(g, strategy, **given)
        assert g.memory_report() == before


@pytest.mark.parametrize("option", sorted(TAKEN_BY))
def test_a_default_that_is_given_is_given(g: featstore.OutOfCoreGraph, option: str) -> None:
    """The default itself is refused where the strategy would ignore it, and None is the same as nothing."""
    defaults = {"superbatch": "auto", "overlap": True, "epochs": 1}
    if option in defaults:
        with pytest.raises(ValueError, match=f"^{option}= goes with"):
            made(g, "ondemand", **{option: defaults[option]})
    made(g, "ondemand", **{option: None}).close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", sorted(COMMAND))
def test_the_command_line_refuses_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, strategy: str
) -> None:
    """Before the dataset is opened: there is none."""
    pack = ["--pack", "some.pack"] if strategy == "packed" or option == "device_cache" else []
    arguments = ["train", str(tmp_path / "none"), "--strategy", strategy, *pack, *COMMAND[option]]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    if TAKES[option, strategy]:
        assert "no such file" in said
    elif option == "device_cache":
        assert re.search(rf"^featstore: --(pack|device-cache) goes with --strategy packed or auto, not {strategy}$", said, re.M)
    else:
        name = re.escape(COMMAND[option][0])
        assert re.search(rf"^featstore: {name} goes with --strategy [\w, ]+, not {strategy}$", said, re.M)


def test_every_option_is_in_one_table() -> None:
    parameters = set(inspect.signature(featstore.Loader).parameters)
    assert parameters == {"g", "sampler", "seeds", "strategy", *EVERYBODYS, *TAKEN_BY}
    assert not EVERYBODYS.keys() & TAKEN_BY.keys()
    assert {key for key, takes in TAKES.items() if takes} == {(option, each) for option in TAKEN_BY for each in TAKEN_BY[option]}


def test_the_guide_has_the_table() -> None:
    text = (Path(__file__).parent.parent / "docs" / "guide" / "look-ahead.md").read_text()
    lines = re.findall(r"^\| `(\w+)` \|((?: (?:yes|no)[^|]*\|){5})$", text, re.M)
    found = {
        (name, each): word.strip().startswith("yes")
        for name, cells in lines
        for each, word in zip(STRATEGIES, cells.split("|"), strict=False)
    }
    assert found == TAKES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_of_every_strategy(g: featstore.OutOfCoreGraph, strategy: str) -> None:
    options = EVERYBODYS.copy()
    with made(g, strategy, **options) as loader:
        assert sum(len(batch.seeds) for batch in loader) == len(g.node_data["train_idx"])


WRONG: dict[str, list[Any]] = {
    "policy": [5, "nope", object, ""],
    "superbatch": [0, -3, 1.5, True, "three"],
    "overlap": [1, 0, "no", 1.0],
    "disk": ["garbage", -1, 1.5, True, "-1x", [1]],
    "run_dir": ["", 5, ["runs"]],
    "pack": [5, "/nope", ["p"]],
    "device_cache": ["fast", -1, 1.5, -0.1, float("nan"), True],
    "epochs": [0, -1, 1.5, True, "2"],
    "batch_size": [0, -1, 1.5, True, "7"],
    "features": ["nope", ["x", "x"], [5]],
    "labels": ["nope", 5],
    "memory": ["garbage", -1, 1.5, True],
    "feature_cache": ["garbage", -1, 1.5, -0.1, float("nan"), True, [1]],
    "prefetch": [-1, 1.5, "many", True, None],
    "threads": [0, -1, 1.5, True, "2"],
    "shuffle": ["no", 1, None],
    "seed": [-1, 0.5, True, "3"],
    "device": ["nowhere"],
    "drop_last": ["no", 1, None],
    "strategy": ["", "on demand", "Auto"],
}


def test_wrong_values_are_listed_for_every_option() -> None:
    assert WRONG.keys() == EVERYBODYS.keys() | TAKEN_BY.keys() | {"strategy"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", sorted(WRONG))
def test_wrong_values(g: featstore.OutOfCoreGraph, option: str, strategy: str) -> None:
    """Of whatever options a strategy takes; without features, for which nothing would be made of them, too."""
    before = g.memory_report()
    for value in WRONG[option]:
        for features in (["x"], []):
            given = {"features": features, **({"pack": f"{g.path}.pack"} if option == "device_cache" else {}), option: value}
            errors = (ValueError, TypeError, *([FileNotFoundError] if option == "pack" else []))
            errors += (RuntimeError,) * (option == "device")  # torch's own
            with pytest.raises(errors):
                made(g, strategy, **given)
    assert {name: n for name, n in g.memory_report().items() if name not in ("indptr", "node data")} == {
        name: n for name, n in before.items() if name not in ("indptr", "node data")
    }
