"""Rows on the device in what is estimated, and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.cli.main import main
from featstore.estimate.choice import Choice
from featstore.strategies import auto as strategies_auto
from featstore.strategies import devicefill
from featstore.strategies.devicefill import SIZED_LATER, rows_left
from featstore.strategies.estimates import choose
from tests.strategies.test_devicecache import BATCH, WIDTH, N, arrays, check, dataset

__all__ = ["arrays", "dataset"]  # fixtures
SIZED = featstore.DeviceCache(0.2)


def auto(g: featstore.OutOfCoreGraph, cache: Any, device: str, size: float | str | None = 0.1) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    strategy = featstore.Auto(cache=size)
    options: dict[str, Any] = {"labels": None, "strategy": strategy, "device": device, "device_cache": cache}
    return featstore.Loader(g, sampler, np.arange(0, N, 2), BATCH, list(g.features), **options)


def test_auto_estimates_with_what_is_free_before_a_step(
    dataset: Path, arrays: dict[str, torch.Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same workload as with a tier of so many rows, which is there already; and it says that the size is not known yet."""
    found, left = {}, 4 * N + (N // 5) * (WIDTH + 8) + N // 10 * WIDTH
    choices = list[Choice]()

    def noted(*given: Any, **options: Any) -> Choice:
        choices.append(choose(*given, **options))
        return choices[-1]

    monkeypatch.setattr(strategies_auto, "choose", noted)
    for name, cache in (("sized", SIZED), ("auto", "auto"), ("none", None)):
        with featstore.open(dataset, memory="16MiB") as g:
            monkeypatch.setattr(devicefill, "free_bytes", lambda device, budget, reserve: left)
            with auto(g, cache, device) as made:
                record = made.stats()["auto"]
                choice = choices[-1]
                found[name] = record["device_rows"], record["note"], choice.workload.n_device, choice.workload.loads
                check(list(made), arrays, device)
            assert record["note"] in replace(choice, note=record["note"]).table()
    assert found["sized"][:2] == (N // 5, "")
    assert found["none"][:2] == (0, "")
    assert found["none"][2] == 0
    assert found["sized"][2] > 0
    rows, note, n_device, loads = found["auto"]
    assert note == SIZED_LATER
    # free_bytes was told of the reserve, and is the test's own here.
    on_host = N // 5 + (N // 10 * WIDTH) // (WIDTH + 8)  # where map and numbers of rows lie in the same memory
    assert rows == (on_host if device == "cpu" else left // WIDTH)
    assert n_device > found["sized"][2]
    assert loads < found["none"][3]


def test_the_host_takes_its_part_first_where_it_is_the_device(
    dataset: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserves: list[int] = []

    def free(device: torch.device, budget: Budget, reserve: int) -> int:
        reserves.append(reserve)
        return -1

    monkeypatch.setattr(devicefill, "free_bytes", free)
    cache = featstore.DeviceCache("auto", reserve=1000)
    with featstore.open(dataset, memory="16MiB") as g, auto(g, cache, device, 0.1) as made:
        assert reserves == [1000 + (N // 10 * WIDTH if device == "cpu" else 0)]
        assert made.stats()["auto"]["device_rows"] == 0


def test_rows_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(10_000)
    cpu = torch.device("cpu")
    assert rows_left(cpu, budget, 0, [(100, 92)]) == (((10_000 - 400) // 100,), 9_600)
    assert rows_left(cpu, budget, 9_600, [(100, 92)]) == ((0,), 0)
    assert rows_left(cpu, budget, 20_000, [(100, 92)])[0] == (0,)
    assert rows_left(cpu, Budget(1 << 20), 0, [(100, 92)])[0] == (100,)
    monkeypatch.setattr(devicefill, "free_bytes", lambda device, budget, reserve: 1_000)
    assert rows_left(torch.device("cuda"), budget, 0, [(100, 100)]) == ((10,), 1_000)


def explain(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    line = ["plan", str(path), "--explain", "--feature", "x", "--fanouts", "4,3", "--batch-size", "40", "--seeds", "train_idx"]
    assert main([*line, "--memory", "64MiB", "--sizes", "10%", "--json", *more]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    return dict(choice)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, torch.Tensor]) -> Path:
    path = tmp_path_factory.mktemp("labelled") / "graph"
    rng = np.random.default_rng(4)
    data = {"y": np.arange(N) % 3, "train_idx": np.arange(0, N, 2)}
    indices = np.minimum((N * rng.random(6 * N) ** 3).astype(np.int64), N - 1)
    featstore.OutOfCoreGraph.create(path, np.arange(0, 6 * N + 1, 6), indices, {"x": arrays["x"]}, data, progress=False).close()
    return path


def test_the_plan_is_explained_with_rows_on_the_device(labelled: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, on_device = [], ("--device", device)
    for size, rows in ((None, 0), ("20%", N // 5), (f"{28 * 60}B", 60), ("auto", 0 if device == "cpu" else N)):
        choice = explain(labelled, capsys, *(() if size is None else ("--device-cache", size, *on_device)))
        assert choice["device_rows"] == rows  # 64 MiB of the host less a reserve of 1 GiB leave none
        assert choice["note"] == (SIZED_LATER if size == "auto" else "")
        seconds.append({each["strategy"]: each["parts"] for each in choice["estimates"]})
    assert seconds[0]["ondemand"].keys() == seconds[1]["ondemand"].keys()
    explained = explain(labelled, capsys, "--device-cache", "auto", "--memory", "4GiB", *on_device)
    assert explained["device_rows"] == N
    for line in (["--simulate", "--device-cache", "10%"], ["--redundancy", "--device-cache", "10%"]):
        assert main(["plan", str(labelled), *line, "--fanouts", "4,3"]) != 0
        assert "--device-cache" in capsys.readouterr().err
    for mode in ("--simulate", "--explain"):
        assert main(["plan", str(labelled), mode, "--device", device, "--fanouts", "4,3"]) == 2
        assert "--device goes with --device-cache" in capsys.readouterr().err


def train(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    line = ["train", str(path), "--epochs", "1", "--fanouts", "4,3", "--batch-size", "40", "--hidden", "4", "--json"]
    assert main([*line, *more]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_training_with_the_loaders_new_options(labelled: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = train(labelled, capsys, "--device", device)["losses"]
    for more in (
        ["--prefetch", "auto"],
        ["--prefetch", "auto", "--stage-threads", "sample=2,gather=1,read=1"],
        ["--device-cache", "20%", "--device-policy", "in_out_ratio"],
        ["--device-cache", "auto", "--device-reserve", "1MiB", "--memory", "64MiB", "--strategy", "superbatch", "--cache", "5%"],
    ):
        assert train(labelled, capsys, "--device", device, *more)["losses"] == expected, more


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prefetch", "some"], "--prefetch"),
        (["--stage-threads", "sample=0"], "write each of sample, gather, read once"),
        (["--stage-threads", "sample=1,sample=2"], "write each of sample, gather, read once"),
        (["--stage-threads", "transfer=1"], "write each of sample, gather, read once"),
        (["--device-policy", "degree"], "go with --device-cache"),
        (["--device-cache", "1MiB", "--device-reserve", "1MiB"], "goes with --device-cache auto"),
        (["--device-cache", "1MiB", "--device-policy", "lru"], "not static"),
    ],
)
def test_what_a_training_refuses(labelled: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    try:
        code = main(["train", str(labelled), "--fanouts", "4,3", *more])
    except SystemExit as error:  # argparse
        code = int(str(error.code))
    assert code != 0
    assert message in capsys.readouterr().err
