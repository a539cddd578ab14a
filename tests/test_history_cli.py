"""``featstore train --history``: the same losses under every strategy, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from tests.whole_graph import skewed_graph

N = 400
TRAINING = ["--batch-size", "20", "--fanouts", "4,3", "--seed", "5", "--epochs", "2", "--hidden", "8", "--memory", "64MiB"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("of") / "g"
    indptr, indices = skewed_graph(N, 6, seed=2)
    rng = np.random.default_rng(0)
    features = {"x": rng.standard_normal((N, 8)).astype(np.float32)}
    node_data = {"y": rng.integers(0, 3, N), "train_idx": np.arange(200), "val_idx": np.arange(200, 250)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, node_data, progress=False).close()
    return path


def run(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert main(["train", str(path), *TRAINING, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_losses_do_not_depend_on_the_strategy(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = ["--history", "50%", "--staleness", "4"]
    found = [run(capsys, data, *history, "--strategy", name) for name in ("ondemand", "superbatch", "ginex", "streamed", "auto")]
    assert len(found[0]["losses"]) == 20
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert all(each["stats"]["rows"] == found[0]["stats"]["rows"] for each in found)
    plain = run(capsys, data)
    assert found[0]["losses"] != plain["losses"]
    assert found[0]["stats"]["rows"] < plain["stats"]["rows"]
    assert found[0]["stats"]["history"]["pulled"] > 0
    assert run(capsys, data, "--history", "0.5", "--staleness", "0")["losses"] == plain["losses"]


def test_nodes_are_chosen_by_what_they_save(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, data, "--history", "auto", "--strategy", "superbatch")
    split = found["stats"]["history"]["split"]
    assert 0 < split["nodes"] == found["stats"]["history"]["nodes"]
    assert 0 < split["alpha"] <= 1
    assert found["stats"]["history"]["pulled"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--staleness", "3"], "--staleness goes with --history"),
        (["--history", "0.2", "--fanouts", "5"], "--history"),
        (["--history", "0.2", "--strategy", "packed", "--pack", "some.pack"], "pack"),
        (["--history", "0.2", "--sampler", "shadow"], "--history"),
        (["--history", "1.5"], "a share is above 0"),
        (["--history", "0.2", "--staleness", "-1"], "--staleness"),
    ],
)
def test_what_is_refused(data: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    try:
        code = main(["train", str(data), *TRAINING, *options])
    except SystemExit as error:
        code = int(str(error.code))
    assert code
    assert message in capsys.readouterr().err
