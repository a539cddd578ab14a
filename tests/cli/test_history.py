"""``featstore train --history``: the same losses looking ahead; ``plan --history``: the scan; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.cli.plots import draw_split
from featstore.estimate.savedio import best_split
from featstore.load import savedsplit
from tests.support.whole_graph import skewed_graph

N = 400
TRAINING = ["--batch-size", "20", "--fanouts", "4,3", "--seed", "5", "--epochs", "2", "--hidden", "8", "--memory", "64MiB"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens its fonts once, and keeps them open: before any test counts descriptors."""
    for name in ("a.png", "a.svg"):
        draw_split(best_split(10, np.ones(3), 2, float), tmp_path_factory.mktemp("fonts") / name, "fonts")


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


def test_losses_looking_ahead_are_those_on_demand(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = ["--history", "50%", "--staleness", "4"]
    found = [run(capsys, data, *history, "--strategy", name) for name in ("ondemand", "streamed")]
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


PLANNING = ["--batch-size", "20", "--fanouts", "4,3", "--hidden", "8", "--staleness", "50", "--memory", "1MiB"]


@pytest.mark.parametrize("strategy", ["superbatch", "ginex"])
def test_the_scan_is_printed_and_drawn(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    """The whole curve, which its choice is the best of, in JSON; a table of it with the choice marked; a picture."""
    plot = tmp_path / "split.svg"
    options = ["plan", str(data), "--history", *PLANNING, "--strategy", strategy]
    assert main([*options, "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    split, curve = found["split"], found["split"]["curve"]
    assert curve["alpha"] == [k / 100 for k in range(101)]
    assert split["alpha"] == curve["alpha"][int(np.argmax(curve["saved"]))]
    assert any(curve["embeddings"])
    assert any(curve["features"])
    assert any(curve["lists"]) == (strategy == "ginex")
    assert found["node_bytes"] == 2 * 4 * 8 + 24
    assert split["nodes"] * found["node_bytes"] <= split["alpha"] * split["bytes"] < found["memory"] == 1 << 20
    drawn = plot.read_text()
    assert "<svg" in drawn
    assert drawn.count('id="line2d_') > 10
    assert main([*options, "--plot", str(tmp_path / "b.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (marked,) = [line for line in lines if line.startswith("*")]
    assert len([line for line in lines if line.lstrip(" *")[:2] in ("0.", "1.")]) in (11, 12)
    taken = float(marked[1:].split()[0])
    assert f"taken: {taken:.0%} for {marked[1:].split()[1]} embeddings" in lines
    assert lines[-1] == f"drawn: {tmp_path / 'b.png'}"
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_scan_is_that_of_training(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With measured seconds fixed, both choose alike from the same curve."""
    monkeypatch.setattr(savedsplit, "measured_beta", lambda *measured: 0.25)
    common = [*PLANNING, "--strategy", "superbatch", "--seed", "5", "--json"]
    assert main(["plan", str(data), "--history", *common]) == 0
    planned = json.loads(capsys.readouterr().out)["split"]
    assert main(["train", str(data), "--history", "auto", "--epochs", "1", *common]) == 0
    trained = json.loads(capsys.readouterr().out)["stats"]["history"]["split"]
    for split in (planned, trained):
        assert split["beta"] == 0.25
        assert split["nodes"] > 0
    assert planned["curve"]["embeddings"][100] == pytest.approx(trained["curve"]["embeddings"][100])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--history", "--trace", "a"], "--trace does not go with --history"),
        (["--history", "--sizes", "5%"], "--sizes does not go with --history"),
        (["--history", "--max-batches", "3"], "--max-batches does not go with --history"),
        (["--history", "--fanouts", "5"], "two hops at least"),
        (["--history", "--sampler", "shadow"], "history"),
        (["--history", "--feature", "none"], "no 'none'"),
        (["--history", "--plot", "nowhere/a.png"], "nowhere/a.png' is not there"),
        (["--history", "--target", "paper"], "--target: 'paper' names a type of nodes, and the graph has one type"),
        (["--history", "--device", "cpu"], "--device goes with --device-cache"),
        (["--history", "--device", "cpu", "--device-cache", "5%"], "--device-cache does not go with --history"),
        (["--history", "--strategy", "packed"], "invalid choice: 'packed'"),
        (["--history", "--staleness", "-1"], "--staleness"),
        (["--simulate", "--hidden", "8"], "--hidden goes with --history"),
        (["--explain", "--staleness", "8"], "--staleness goes with --history"),
    ],
)
def test_what_a_plan_refuses(data: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    try:
        code = main(["plan", str(data), *options])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_memory_too_short_to_judge_is_an_error(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: object, **more: object) -> None:
        raise featstore.BudgetError("saved I/O needs more")

    monkeypatch.setattr(savedsplit.HistorySplit, "_choose", short)
    assert main(["plan", str(data), "--history", *PLANNING]) == 2
    assert "no memory to judge: saved I/O needs more; --memory is 1.00 MiB: give more" in capsys.readouterr().err


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
