"""Graphs of several types from the command line: created, described, trained on, aggregated and inferred; what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.cli.model import load_model
from featstore.cli.sage import HeteroSAGE
from featstore.cli.training import scores_of
from tests.support.commands import run
from tests.support.typed import CITES, EMPLOYS, REV, WRITES, TypedArrays

pytestmark = pytest.mark.usefixtures("one_thread")

PAPERS, AUTHORS, CLASSES = 600, 200, 4
TRAIN = ["--target", "paper", "--fanouts", "8,8", "--batch-size", "60", "--hidden", "16", "--lr", "0.02", "--memory", "64MiB"]


def planted() -> TypedArrays:
    """Draw papers whose class only their authors' other papers tell: rows of papers are noise but for one paper in three."""
    rng = np.random.default_rng(3)
    y, field = rng.integers(0, CLASSES, PAPERS), rng.integers(0, CLASSES, AUTHORS)
    paper = np.repeat(np.arange(PAPERS), 3)
    by_field = [np.flatnonzero(field == each) for each in range(CLASSES)]
    writes = np.stack([np.array([rng.choice(by_field[each]) for each in y[paper]]), paper])
    x = rng.standard_normal((PAPERS, 8)).astype(np.float32)
    x[::3] += 4 * np.eye(CLASSES, 8, dtype=np.float32)[y[::3]]
    graph = TypedArrays(
        {"institution": 9, "paper": PAPERS, "author": AUTHORS, "venue": 0},
        {
            WRITES: writes,
            REV: writes[::-1].copy(),
            CITES: rng.integers(0, PAPERS, (2, 1500)),
            EMPLOYS: np.stack([rng.integers(0, 9, AUTHORS), np.arange(AUTHORS)]),
            ("venue", "hosts", "paper"): np.empty((2, 0), np.int64),
        },
    )
    order = rng.permutation(PAPERS)
    y = y.astype(np.float32)
    y[order[:5]] = np.nan
    graph.features["paper"] = {"x": x}
    graph.data["paper"] = {"y": y, "train_idx": order[:400], "val_idx": order[400:]}
    graph.data["author"] = {"y": field}
    graph.edge_features[CITES] = {"w": rng.random((1500, 1)).astype(np.float32)}
    return graph


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of ``create`` for the planted graph, and its files."""
    folder, graph = tmp_path_factory.mktemp("files"), planted()

    def file(name: str, array: np.ndarray) -> str:
        np.save(folder / name, array)
        return str(folder / name)

    found = ["--nodes", *(f"{kind}={n}" for kind, n in graph.n.items()), "--edges"]
    found += [f"{','.join(key)}={file(f'{key[1]}.npy', pairs)}" for key, pairs in graph.edges.items()]
    found += ["--features", f"paper/x={file('x.npy', graph.features['paper']['x'])}", "--node-data"]
    found += [f"{kind}/{name}={file(f'{kind}-{name}.npy', of)}" for kind, data in graph.data.items() for name, of in data.items()]
    return [*found, "--edge-features", f"{','.join(CITES)}/w={file('w.npy', graph.edge_features[CITES]['w'])}"]


@pytest.fixture(scope="module")
def made(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("typed") / "g"
    assert main(["create", str(path), *arguments, "--json"]) == 0
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    try:
        assert main([*map(str, arguments)]) == 2
    except SystemExit as exit:
        assert exit.code == 2
    said: str = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not re.search("are left out: 5 of|checkpoint: going on", line)]
    assert len(lines) == 1
    return lines[0]


# --- create ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [[], ["--topology", "chunked", "--chunk-bytes", "4KiB"]])
def test_what_is_created_is_what_python_creates(arguments: list[str], tmp_path: Path, capsys: Any, form: list[str]) -> None:
    graph = planted()
    found = run(capsys, "create", tmp_path / "g", *arguments, *form)
    assert found["node_types"] == graph.n
    assert found["edge_types"] == {",".join(key): pairs.shape[1] for key, pairs in graph.edges.items()}
    assert found["topology"] == ("chunked" if form else "csc")
    with featstore.open(tmp_path / "g") as g, graph.create(tmp_path / "python") as expected:
        assert sorted(g.features) == sorted(expected.features) == ["paper/x"]
        assert torch.equal(g.features["paper/x"][:], expected.features["paper/x"][:])
        assert sorted(g.node_data) == sorted(expected.node_data)
        for name, values in expected.node_data.items():
            assert torch.equal(g.node_data[name].nan_to_num(-1), values.nan_to_num(-1))
        assert torch.equal(g[CITES].features["w"][:], expected[CITES].features["w"][:])
        g.verify(progress=False)
        seeds = torch.arange(0, 50)
        mine, other = (featstore.NeighborSampler(each, [-1, -1]).sample(seeds) for each in (g, expected))
        assert torch.equal(mine.input_ids, other.input_ids)


def test_what_create_refuses(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    x = next(each for each in arguments if each.startswith("paper/x=")).removeprefix("paper/x=")
    for options, words in (
        (["--nodes", "paper"], "'paper' is not TYPE=NUMBER"),
        (["--nodes", "paper=-3"], "'paper=-3' is not TYPE=NUMBER"),
        (["--edges", f"writes={x}"], "'writes' is not SOURCE,RELATION,DESTINATION"),
        (["--edges", "a,b,c"], "'a,b,c' is not SOURCE,RELATION,DESTINATION=FILE"),
        (["--edges", f"a,b,c={x}"], "--edges goes with --nodes"),
        (["--nodes", "a=3", "--edges", f"a,b,c={x}"], "there is no node type 'c'; there is 'a'"),
        (["--nodes", "a=3", "a=4"], "--nodes: 'a' is given twice"),
        (["--nodes", "a=3", "--indices", x], "--indices is for a graph of one type"),
        (["--nodes", "a=3", "--num-nodes", "3"], "--num-nodes is for a graph of one type"),
        (["--nodes", "a=3", "--coalesce"], "--coalesce is for a graph of one type: clean"),
        (["--nodes", "a=3", "--features", f"x={x}"], "--features: 'x' is not TYPE/NAME, .* these are a"),
        (["--nodes", "a=3", "--node-data", f"b/x={x}"], "--node-data: 'b/x' is not TYPE/NAME"),
        (["--nodes", "a=3", "--edge-features", f"a/x={x}"], "--edge-features: 'a/x' is not TYPE/NAME, .* these are none"),
        (["--nodes", "a=3", "--features", f"a/x={x}"], "600 rows"),
        ([], "or, for several types, --nodes and --edges"),
    ):
        said = refused(capsys, "create", tmp_path / "g", *options)
        assert re.search(words, said), said
        assert not (tmp_path / "g").exists()


# --- train ----------------------------------------------------------------------------------------------------------------------


def test_papers_are_told_by_their_authors(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    """Trained, saved, and inferred over all neighbours: the scores have the accuracy, and are those of the model in memory."""
    made, model = tmp_path / "g", tmp_path / "model"
    run(capsys, "create", made, *arguments)
    trained = run(capsys, "train", made, *TRAIN, "--epochs", 8, "--dropout", 0.2, "--strategy", "ondemand", "--save", model)
    assert trained["epochs"][-1]["val_accuracy"] > 0.75
    assert trained["stats"]["row_bytes"] == 32
    text = "nodes without a label in 'y' (negative, NaN) are left out: 5 of 400 of train"
    assert main(["train", str(made), *TRAIN, "--epochs", "1"]) == 0
    assert text in capsys.readouterr().err
    found = run(capsys, "infer", made, "--model", model, "--out", "scores", "--resume", "m")
    assert (found["name"], found["shape"], found["layers"]) == ("paper/scores", [PAPERS, CLASSES], 2)
    loaded, _ = load_model(model)
    assert isinstance(loaded, HeteroSAGE)
    with featstore.open(made) as g, torch.no_grad():
        assert [kind for kind in g.node_types if "scores" in g[kind].features] == ["paper"]
        scores = g["paper"].features["scores"][:]
        sampler = featstore.NeighborSampler(g, [-1, -1])
        loader = featstore.Loader(g, sampler, ("paper", np.arange(PAPERS)), PAPERS, shuffle=False, strategy="ondemand")
        for batch in loader:
            torch.testing.assert_close(scores, scores_of(loaded, batch), rtol=1e-4, atol=1e-4)
        val = g["paper"].node_data["val_idx"]
        assert float((scores[val].argmax(1) == g["paper"].node_data["y"][val]).float().mean()) > 0.75
    assert "it is of the types 'institution', 'paper', 'author'" in refused(capsys, "infer", other(tmp_path), "--model", model)
    assert "takes rows of 8 numbers, and 'paper/y'" in refused(capsys, "infer", made, "--model", model, "--feature", "y")


def other(folder: Path) -> Path:
    featstore.OutOfCoreGraph.create(folder / "one", [0, 0], [], {"x": np.ones((1, 8), np.float32)}, progress=False).close()
    return folder / "one"


def test_losses_do_not_depend_on_strategies_and_resume(made: Path, tmp_path: Path, capsys: Any) -> None:
    options = [*TRAIN, "--seed", 3]
    whole = run(capsys, "train", made, *options, "--epochs", 2, "--strategy", "ondemand", "--cache", "20%")
    for more in (
        ["--strategy", "superbatch", "--cache", "20%", "--length", "3"],
        ["--strategy", "streamed", "--neighbor-cache", "10%"],
    ):
        assert run(capsys, "train", made, *options, "--epochs", 2, *more)["losses"] == whole["losses"]
    kept = tmp_path / "kept"
    run(capsys, "train", made, *options, "--epochs", 1, "--checkpoint", kept)
    resumed = run(capsys, "train", made, *options, "--epochs", 2, "--checkpoint", kept, "--resume")
    assert resumed["losses"] == whole["losses"]
    labor = run(capsys, "train", made, *options, "--epochs", 1, "--sampler", "labor")
    assert labor["losses"] != whole["losses"]
    assert "of a training with sizes" in refused(
        capsys, "train", made, *options[2:], "--target", "paper", "--hidden", 8, "--checkpoint", kept, "--resume"
    )


def test_what_train_and_others_refuse(made: Path, tmp_path: Path, small: Any, capsys: Any) -> None:
    for command, words in (
        (
            ["train", made],
            "featstore: --target: is needed; the dataset has the node types 'institution', 'paper', 'author', 'venue'",
        ),
        (["train", made, "--target", "papers"], "target: there is no 'papers'"),
        (["train", made, "--target", "author"], "no training seeds: node data 'train_idx'"),
        (
            ["train", made, "--target", "paper", "--labels", "z"],
            "labels: 'paper' has no 'z'; it has 'train_idx', 'val_idx', 'y'",
        ),
        (["train", made, "--target", "paper", "--feature", "z"], "feature: no node type has 'z'; there is 'paper/x'"),
        (["train", made, "--target", "paper", "--edge-features", "w"], "edge features are not built"),
        (["train", made, "--target", "paper", "--batches", "partition"], "--batches partition is for a graph of one type"),
        (["train", made, "--target", "paper", "--sampler", "layer", "--layer-sizes", "5,5"], "LayerSampler"),
        (["train", made, "--target", "paper", "--history", "0.2"], "history"),
        (["train", made, "--target", "paper", "--strategy", "packed", "--pack", "p"], "make one with: featstore pack"),
        (
            ["train", small.path, "--target", "paper"],
            "target: 'paper' names a type of nodes, and the graph has one",
        ),
        (["pack", made, tmp_path / "p"], "target: is needed; the dataset has the node types"),
        (["plan", made, "--simulate"], "target: is needed; the dataset has the node types"),
        (
            ["plan", made, "--simulate", "--target", "paper", "--feature", "z"],
            "cache is planned for, and paper/x have no 'z'",
        ),
        (["plan", made, "--explain"], "target: is needed; the dataset has the node types"),
        (["plan", made, "--explain", "--target", "paper", "--feature", "z"], "cache is planned for, and paper/x have no 'z'"),
        (["plan", made, "--redundancy"], "plan --redundancy is for a graph of one type"),
        (["plan", made, "--history"], "is for a graph of one type"),
        (["plan", small.path, "--simulate", "--target", "paper"], "target: 'paper' names a type"),
        (["aggregate", made], "--edge-type is needed: the dataset has the node types"),
        (["aggregate", made, "--edge-type", "writes"], "'writes' is not SOURCE,RELATION,DESTINATION"),
        (
            ["aggregate", made, "--edge-type", "author,writes,paper"],
            "--feature: the dataset has no 'author/x'; it has 'paper/x'",
        ),
        (["aggregate", small.path, "--edge-type", "a,b,c"], "the graph has one type of edges"),
    ):
        assert words in refused(capsys, *command), command


# --- aggregate ------------------------------------------------------------------------------------------------------------------


def test_papers_means_for_authors(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    run(capsys, "create", tmp_path / "g", *arguments)
    found = run(capsys, "aggregate", tmp_path / "g", "--edge-type", ",".join(REV), "--name", "x")
    assert (found["name"], found["shape"]) == ("author/x", [AUTHORS, 8])
    graph = planted()
    src, dst = graph.edges[REV]
    expected = np.zeros((AUTHORS, 8))
    np.add.at(expected, dst, graph.features["paper"]["x"][src])
    expected /= np.maximum(1, np.bincount(dst, minlength=AUTHORS))[:, None]
    with featstore.open(tmp_path / "g") as g:
        torch.testing.assert_close(g["author"].features["x"][:], torch.from_numpy(expected).float())
    trained = run(capsys, "train", tmp_path / "g", *TRAIN, "--epochs", 1, "--strategy", "ondemand", "--save", tmp_path / "m")
    assert trained["stats"]["row_bytes"] == 32
    assert load_model(tmp_path / "m")[1].widths == {"paper": 8, "author": 8, "institution": 0, "venue": 0}


# --- plan -----------------------------------------------------------------------------------------------------------------------


def test_a_simulation_counts_the_rows_that_a_loader_asks_for(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    """Of one type, of types that share a file, and of one of these; a type with a file of its own is not planned with others."""
    graph = planted()
    for kind in ("paper", "author"):
        graph.features.setdefault(kind, {})["z"] = np.ones((graph.n[kind], 3), np.float32)
    path, trace = tmp_path / "g", tmp_path / "trace"
    graph.create(path).close()
    given = ["plan", path, "--simulate", "--target", "paper", "--fanouts", "3,2", "--batch-size", "50", "--sizes", "100%,10%"]
    for feature, features in (("x", "x"), ("z", "z"), ("author/z", {"author": "z"})):
        found = run(capsys, *given, "--feature", feature, "--policies", "belady,degree")
        with featstore.open(path) as g:
            train = g["paper"].node_data["train_idx"]
            seeds = train[~g["paper"].node_data["y"][train].isnan()]
            sampler = featstore.NeighborSampler(g, [3, 2])
            loader = featstore.Loader(g, sampler, ("paper", seeds), 50, features=features, strategy="ondemand")
            asked = [[(kind, int(id)) for kind in batch.x for id in batch.input_ids[kind]] for batch in loader]
        assert found["rows_asked_for"] == sum(map(len, asked)), feature
        assert found["distinct_rows"] == len({row for batch in asked for row in batch})
        assert found["policies"]["belady"]["rows_loaded"][-1] == found["distinct_rows"]
        assert found["rows"] == (PAPERS if feature == "x" else PAPERS + AUTHORS)
    run(capsys, *given, "--feature", "z", "--save-trace", trace)
    again = ["plan", path, "--simulate", "--target", "paper", "--trace", trace, "--sizes", "10%", "--feature"]
    assert run(capsys, *again, "z")["rows_asked_for"] > 0
    assert "is a trace over 800 rows, and the dataset has 600" in refused(capsys, *again, "x")
    run(capsys, "aggregate", path, "--edge-type", ",".join(REV), "--name", "x")
    assert "author/x, paper/x lie in files of their own: name one" in refused(capsys, *given, "--feature", "x")
    assert run(capsys, *given, "--feature", "author/x", "--policies", "lru")["rows"] == AUTHORS


def test_strategies_are_explained_for_the_rows_of_a_feature(made: Path, tmp_path: Path, capsys: Any) -> None:
    """A trace of the one type that has the feature is estimated as that of a graph of that type alone."""
    trace, alone = tmp_path / "trace", tmp_path / "alone"
    given = ["plan", made, "--explain", "--target", "paper", "--sizes", "30%,5%", "--device-cache", "10%"]
    recorded = run(capsys, *given, "--fanouts", "4,3", "--batch-size", 50, "--save-trace", trace)
    graph = planted()
    with featstore.open(made) as g:
        degrees = g.short_degrees()[g.types.nodes["paper"].first : g.types.nodes["paper"].stop]
    indices = np.repeat(np.arange(PAPERS), degrees)  # as often a source, all of them of node 0
    indptr = np.array([0, *[len(indices)] * PAPERS])
    x = graph.features["paper"]["x"]
    with featstore.OutOfCoreGraph.create(alone, indptr, indices, {"x": x}, progress=False) as g:
        assert np.array_equal(g.short_degrees(), degrees)  # they choose the rows that stay
    said = run(capsys, *given, "--trace", trace)
    assert len(recorded["choices"]) == len(said["choices"]) == 2
    other = run(capsys, "plan", alone, "--explain", "--sizes", "30%,5%", "--device-cache", "10%", "--trace", trace)
    for mine, its in zip(said["choices"], other["choices"], strict=True):
        rows = [
            {(each["strategy"], each["policy"]): each["rows_loaded"] for each in choice["estimates"]} for choice in (mine, its)
        ]
        assert rows[0] == rows[1]
        assert len(rows[0]) > 4
