"""Packs of graphs of several types from the command line: made, described, trained on with and without their dataset."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.cli.model import load_model
from featstore.pack.layout import find_layouts
from tests.support.commands import run
from tests.support.typed import TypedArrays, academic

pytestmark = pytest.mark.usefixtures("one_thread")

PAPERS, KINDS = 400, ["paper", "author", "institution"]
SAMPLING = ["--fanouts", "4,3", "--batch-size", "50"]
TRAINING = ["--hidden", "8", "--epochs", "3", "--memory", "64MiB"]


def planted() -> TypedArrays:
    """Draw a graph whose types share ``x`` in one file; authors' ``z`` has another width than papers'."""
    graph = academic(0, papers=PAPERS).draw("x", 3, **dict.fromkeys(KINDS, 16)).draw("z", 4, paper=8, author=4)
    rng = np.random.default_rng(5)
    order = rng.permutation(PAPERS)
    y = rng.integers(0, 4, PAPERS)
    y[order[:5]] = -1
    graph.data["paper"] = {"y": y, "train_idx": order[:205], "val_idx": order[205:]}
    graph.data["author"] = {"y": rng.integers(0, 3, graph.n["author"]), "train_idx": np.arange(50)}
    return graph


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("typed") / "g"
    planted().create(path).close()
    return path


@pytest.fixture(scope="module")
def packed(made: Path) -> Path:
    """Two epochs of papers, with one layout. A test must not change it."""
    path = made.parent / "papers.pack"
    assert main([*map(str, ("pack", made, path, "--target", "paper", *SAMPLING, "--epochs", 2, "--cache", 0.2)), "--json"]) == 0
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "are left out: 5 of" not in line]
    assert len(lines) == 1
    return lines[0]


def test_losses_are_those_of_the_dataset_and_of_a_copy(made: Path, tmp_path: Path, capsys: Any) -> None:
    """Epochs that the pack has are those of sampling, bit for bit; a copy without the dataset trains as one beside it does."""
    data, pack, there = tmp_path / "g", tmp_path / "pack", tmp_path / "there"
    shutil.copytree(made, data)
    text = said(capsys, "pack", data, pack, "--target", "paper", *SAMPLING, "--epochs", 2, "--cache", "0.2")
    assert f"featstore train {data} --target paper --strategy packed --pack {pack}" in text
    assert "featstore train COPY" in text
    sampled = run(capsys, "train", data, "--target", "paper", *SAMPLING, *TRAINING, "--strategy", "ondemand")
    beside = run(capsys, "train", data, "--target", "paper", *TRAINING, "--strategy", "packed", "--pack", pack)
    assert len(beside["losses"]) == 12
    assert beside["losses"][:8] == sampled["losses"][:8]
    assert beside["losses"][8:] != sampled["losses"][8:]  # epoch 2 is the pack's epoch 0
    assert [each["val_accuracy"] for each in beside["epochs"][:2]] == [each["val_accuracy"] for each in sampled["epochs"][:2]]
    assert beside["stats"]["hits"]["base"] == 0
    auto = run(capsys, "train", data, "--target", "paper", *TRAINING, "--strategy", "auto", "--pack", pack)
    assert auto["losses"] == beside["losses"]
    shutil.copytree(pack, there)
    shutil.rmtree(pack)
    data.rename(tmp_path / "elsewhere")
    for options in ([], ["--target", "paper", "--strategy", "packed", *SAMPLING, "--cache", "0.2"]):
        found = run(capsys, "train", there, *TRAINING, *options)
        assert found["losses"] == beside["losses"]
        assert found["stats"]["hits"] == beside["stats"]["hits"]
        assert {each["val_accuracy"] for each in found["epochs"]} == {None}


def test_more_layouts_and_a_device(made: Path, packed: Path, tmp_path: Path, capsys: Any) -> None:
    """The type need not be said again; shares are of the rows of the types that have the feature, 620 of them."""
    pack = Path(shutil.copytree(packed, tmp_path / "pack"))
    more = ["--add-layout", "--policy", "frequency", "--cache", "0.1", "--device-cache", "0.05"]
    found = run(capsys, "pack", made, pack, *more)
    kinds = ["paper/x", "author/x", "institution/x"]
    assert [each["features"] for each in found["layouts"]] == [kinds, kinds]
    assert {(each["policy"], each["capacity"], each["device_rows"], each["new"]) for each in found["layouts"]} == {
        ("belady", 124, 0, False),
        ("frequency", 62, 31, True),
    }
    assert [each["new"] for each in run(capsys, "pack", made, pack, "--target", "paper", *more)["layouts"]] == [False, False]
    train = ["train", made, "--target", "paper", *TRAINING, "--strategy", "packed", "--pack", pack]
    assert run(capsys, *train, "--policy", "frequency")["stats"]["hits"]["device"] > 0
    assert run(capsys, *train, "--policy", "frequency", "--device-cache", f"{31 * 64}B")["stats"]["hits"]["device"] > 0
    assert "no such layout" in refused(capsys, *train, "--policy", "frequency", "--device-cache", "0.2")
    assert run(capsys, *train, "--device-cache", "0.1", "--cache", "0.2")["stats"]["hits"]["device"] > 0
    assert "give more disk" in refused(capsys, "pack", made, pack, "--add-layout", "--cache", "0.3", "--disk", size(pack) + 5000)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_estimate_comes_first(made: Path, tmp_path: Path, capsys: Any) -> None:
    found = run(capsys, "pack", made, tmp_path / "p", "--target", "paper", *SAMPLING)
    estimate = found["estimate"]
    assert (estimate["n_batches"], found["batches"]) == (4, 4)
    assert estimate["features_bytes"] == 64 * 620
    assert 0.6 < estimate["total_bytes"] / found["disk_bytes"] < 1.7
    assert "give more disk" in refused(capsys, "pack", made, tmp_path / "q", "--target", "paper", *SAMPLING, "--disk", "1KB")
    assert not (tmp_path / "q").exists()


def test_what_info_and_verify_say(packed: Path, capsys: Any) -> None:
    graph, found, text = planted(), run(capsys, "info", packed), said(capsys, "info", packed)
    counted = {
        "node_types": graph.n,
        "edge_types": {",".join(key): pairs.shape[1] for key, pairs in graph.edges.items()},
        "seed_type": "paper",
    }
    assert {name: found[name] for name in counted} == counted
    assert (found["fanouts"], found["hops"], found["node_data"]) == ([4, 3], 2, ["paper/y"])
    assert "node type  author: 200 nodes" in text
    assert "edge type  paper,cites,paper: " in text
    assert "batches of 50 seeds of type 'paper', 2 hops, fan-outs 4,3, seed 0, of 620 nodes" in text
    assert "layout of paper/x, author/x, institution/x: belady" in text
    checked = run(capsys, "verify", packed)
    assert {name: checked[name] for name in counted} == counted
    assert "node data paper/y; node types paper, author, institution, seeds of paper)" in said(capsys, "verify", packed)


def test_fan_outs_by_type_of_edges(made: Path, tmp_path: Path, capsys: Any) -> None:
    """Made in Python: accuracies are measured by the pack's own fan-outs, and one list for all types contradicts them."""
    fanouts, path = {("author", "writes", "paper"): [3, 2], ("paper", "cites", "paper"): [2, 1]}, tmp_path / "p"
    with featstore.open(made) as g:
        train = g["paper"].node_data["train_idx"]
        seeds = train[g["paper"].node_data["y"][train] >= 0]
        sampler = featstore.NeighborSampler(g, fanouts)
        featstore.sample_offline(g, sampler, ("paper", seeds), 50, 1, path, progress=False).close()
    made_pack = run(capsys, "pack", made, path, "--add-layout")
    assert made_pack["fanouts"]["paper,cites,paper"] == [2, 1]
    assert made_pack["fanouts"]["paper,rev_writes,author"] == [0, 0]
    assert "author,writes,paper=3,2 paper,rev_writes,author=0,0" in said(capsys, "info", path)
    command = ["train", made, "--target", "paper", *TRAINING, "--strategy", "packed", "--pack", path]
    found = run(capsys, *command)
    assert len(found["losses"]) == 12
    assert found["epochs"][0]["val_accuracy"] > 0
    wrong = refused(capsys, *command, "--fanouts", "3,2")
    assert "--fanouts 3,2: the samples of" in wrong
    assert "were made with author,writes,paper=3,2 " in wrong
    assert run(capsys, "train", path, *TRAINING)["losses"] == found["losses"]


def test_rows_of_some_types(made: Path, tmp_path: Path, capsys: Any) -> None:
    """A layout that Python made of papers' rows alone is none of the dataset's ``x``; on a copy, others are without rows."""
    path = tmp_path / "p"
    with featstore.open(made) as g:
        seeds = np.arange(0, 50)
        sampler = featstore.NeighborSampler(g, [3, 2])
        with featstore.sample_offline(g, sampler, ("author", seeds), 25, 1, path, progress=False) as pack:
            featstore.Loader(g, strategy=featstore.Packed(pack, cache=0.1), features={"paper": "x"}).close()
    command = ["train", made, "--target", "author", *TRAINING, "--strategy", "packed", "--pack", path]
    assert "no such layout" in refused(capsys, *command)
    assert "layout of paper/x: belady" in said(capsys, "info", path)
    model = tmp_path / "model"
    assert len(run(capsys, "train", path, *TRAINING, "--save", model)["losses"]) == 6
    assert load_model(model)[1].widths == {"paper": 16, "author": 0, "institution": 0}


def test_what_is_refused(made: Path, packed: Path, tmp_path: Path, small: Any, capsys: Any) -> None:
    new, train = ["pack", made, tmp_path / "q"], ["train", made, "--strategy", "packed", "--pack", packed]
    kinds = "has the node types 'paper', 'author', 'institution': name that of the nodes to classify"
    one = tmp_path / "one"
    run(capsys, "pack", small.path, one, *SAMPLING)
    before = sorted(packed.rglob("*"))
    for command, words in (
        (new, f"target: is needed; the dataset {kinds}"),
        ([*new, "--target", "venue"], f"target: there is no 'venue'; the dataset {kinds}"),
        ([*new, "--target", "institution"], "labels: 'institution' has no 'y'; it has none. Name others with --labels"),
        ([*new, "--target", "paper", "--labels", "z"], "--labels: 'paper' has no 'z'; it has 'train_idx', 'val_idx', 'y'"),
        ([*new, "--target", "paper", "--seeds", "z"], "--seeds: 'paper' has no node data 'z'; it has 'train_idx'"),
        ([*new, "--target", "paper", "--feature", "w"], "features: no type has 'w'; there is 'x', 'z'"),
        ([*new, "--target", "paper", "--batches", "partition"], "--batches partition is for a graph of one type"),
        ([*new, "--target", "paper", "--sampler", "layer", "--layer-sizes", "5,5"], "LayerSampler"),
        (["pack", made, packed, "--add-layout", "--target", "author"], "--target author: the seeds of"),
        (["pack", made, packed, "--add-layout", "--target", "venue"], "target: there is no 'venue'"),
        (["pack", made, packed, "--add-layout", "--fanouts", "4,4"], "were made with 4,3; leave it out"),
        (["pack", made, one, "--add-layout"], "was sampled from another graph"),
        (["pack", small.path, one, "--add-layout", "--target", "paper"], "target: 'paper' names a type of nodes"),
        (train, f"target: is needed; the dataset {kinds}"),
        ([*train, "--target", "venue"], f"target: there is no 'venue'; the dataset {kinds}"),
        ([*train, "--target", "author"], "--target author: the seeds of"),
        ([*train, "--target", "paper", "--feature", "z"], "no such layout"),
        ([*train, "--target", "paper", "--fanouts", "4,3,2"], "--fanouts 4,3,2: the samples of"),
        ([*train, "--target", "paper", "--batch-size", 51], "were made with 50; leave it out"),
        ([*train, "--target", "paper", "--policy", "degree"], "--add-layout --policy degree"),
        (["train", packed, "--target", "venue"], f"target: there is no 'venue'; the pack {kinds}"),
        (["train", packed, "--target", "author"], "are of type 'paper'"),
        (["train", packed, "--labels", "z"], "labels: 'paper' has no 'z'; it has 'y'. Where its dataset is: featstore pack"),
        (["train", packed, "--feature", "z"], "--add-layout --feature z"),
        (["train", packed, "--cache", "0.4"], "these rows are not in the pack"),
        (["train", one, "--target", "paper"], "target: 'paper' names a type of nodes"),
    ):
        assert words in refused(capsys, *command), command
    assert not (tmp_path / "q").exists()
    assert sorted(packed.rglob("*")) == before


def test_other_seeds_and_features(made: Path, tmp_path: Path, capsys: Any) -> None:
    """Seeds of another type, numbered edges, and features of several files, which a pack has several layouts of."""
    pack = tmp_path / "p"
    found = run(capsys, "pack", made, pack, "--target", "author", *SAMPLING, "--edges")
    assert (found["seed_type"], found["batches"], found["node_data"]) == ("author", 1, ["author/y"])
    with featstore.Pack(pack) as opened, featstore.open(made) as g:
        assert opened.batch(0, g.pool).blocks[0].edge_pos is not None
        kind = g.types.nodes["author"]
        assert sorted(opened.batch(0, g.pool).seeds.tolist()) == list(range(kind.first, kind.first + 50))
        assert len(find_layouts(opened)) == 1
    train = ["train", made, "--target", "author", *TRAINING, "--feature", "z"]
    sampled = run(capsys, *train, *SAMPLING, "--strategy", "ondemand")
    assert run(capsys, *train, "--strategy", "auto", "--pack", pack)["losses"][:1] == sampled["losses"][:1]
    more = ["--add-layout", "--feature", "z", "--cache", "0.2", "--device-cache", "0.1", "--policy", "frequency"]
    found = run(capsys, "pack", made, pack, *more)
    assert sorted((each["features"], each["capacity"], each["device_rows"]) for each in found["layouts"] if each["new"]) == [
        (["author/z"], 40, 20),
        (["paper/z"], 80, 40),
    ]
    assert not any(each["new"] for each in run(capsys, "pack", made, pack, *more)["layouts"])
    packed = run(capsys, *train, "--strategy", "packed", "--pack", pack, "--policy", "frequency", "--device-cache", "0.1")
    assert packed["losses"][:1] == sampled["losses"][:1]
    assert packed["stats"]["hits"]["device"] > 0
    assert packed["stats"]["hits"]["base"] == 0
    assert sum(packed["stats"]["hits"].values()) == packed["stats"]["rows"]
    assert "no such layout" in refused(capsys, *train, "--strategy", "packed", "--pack", pack, "--policy", "degree")
