"""Batches from parts on the command line: training, packs, plans; what is refused."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.cli.arguments import add_sampling, make_sampler
from featstore.cli.main import main
from featstore.estimate.savedio import edges_drawn
from tests.support.commands import run
from tests.support.planted import communities

N, COMMUNITIES, CLASSES, DEGREE = 1_500, 15, 3, 6


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Communities with shuffled ids, their classes as labels and in the features; two assignments, the better one kept last."""
    path = tmp_path_factory.mktemp("of") / "g"
    rng = np.random.default_rng(0)
    community, indptr, indices = communities(rng, N, COMMUNITIES, DEGREE)
    y = community % CLASSES
    x = (np.eye(CLASSES, 8)[y] + rng.standard_normal((N, 8))).astype(np.float32)
    order = rng.permutation(N)
    node_data = {"y": y, "train_idx": order[:800], "val_idx": order[800:1000]}
    with featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, node_data, progress=False) as g:
        featstore.partition(g, 5, "random", name="drawn", progress=False)
        featstore.partition(g, method=community, name="planted", progress=False)
    return path


COMMON = ["--batch-size", "40", "--fanouts", "4,3", "--seed", "5"]
TRAINING = [*COMMON, "--epochs", "2", "--hidden", "8", "--lr", "0.02", "--memory", "64MiB"]


def test_losses_looking_ahead_and_of_packs_are_the_same(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the same accuracy: validation runs in batches of its own."""
    plain = run(capsys, "train", data, *TRAINING, "--batches", "partition", "--macro", 2)
    assert len(plain["losses"]) == 40
    assert plain["epochs"][-1]["val_accuracy"] > 0.6
    for strategy in (["--strategy", "streamed", "--cache", "0.1", "--length", "7"], ["--strategy", "auto", "--cache", "0.1"]):
        found = run(capsys, "train", data, *TRAINING, "--batches", "partition", "--macro", 2, *strategy)
        assert found["losses"] == plain["losses"], strategy
        assert found["stats"]["rows"] == plain["stats"]["rows"]
        drop = lambda each: [{**epoch, "seconds": 0} for epoch in each["epochs"]]  # noqa: E731
        assert drop(found) == drop(plain)
    pack = tmp_path / "pack"
    made = run(capsys, "pack", data, pack, *COMMON, "--epochs", 2, "--batches", "partition", "--macro", 2)
    assert (made["batches"], made["nodes"]) == (20, plain["stats"]["rows"])
    packed = ["--epochs", "2", "--hidden", "8", "--lr", "0.02", "--seed", "5", "--memory", "64MiB"]
    assert run(capsys, "train", data, *packed, "--strategy", "packed", "--pack", pack)["losses"] == plain["losses"]
    assert run(capsys, "train", pack, *packed)["losses"] == plain["losses"]
    default = run(capsys, "train", data, *TRAINING)
    assert default["losses"] == run(capsys, "train", data, *TRAINING, "--batches", "random")["losses"] != plain["losses"]
    assert plain["stats"]["rows"] < 0.8 * default["stats"]["rows"]


def test_what_is_planned_is_what_training_requests(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For each choice of parts and macro-batches, by three commands, and by the batches themselves."""
    for parts, macro in ((None, None), ("drawn", None), (None, 3), ("drawn", 5)):
        options = ["--parts", parts] * (parts is not None) + ["--macro", macro] * (macro is not None)
        counted = run(capsys, "plan", data, "--redundancy", *COMMON, "--all", *options)
        name = parts or "planted"
        (way,) = [way for way in counted["ways"] if (way["parts"], way["sampler"]) == (name, "neighbor")]
        assert {way["parts"] for way in counted["ways"]} == {None, *([parts] if parts else ["drawn", "planted"])}
        chosen = ["--batches", "partition", *options]
        planned = run(capsys, "plan", data, "--simulate", *COMMON, *chosen, "--policies", "belady", "--sizes", "10%")
        trained = run(capsys, "train", data, *TRAINING, "--epochs", 1, *chosen)
        with featstore.open(data) as g:
            ids = g.node_data["train_idx"]
            batches = featstore.PartitionBatches(g, ids, 40, name, macro, seed=5)
            sampler, order = featstore.NeighborSampler(g, [4, 3], seed=5), batches.epoch(0)
            rows = sum(len({*sampler.sample(order.seeds(k), 0, k).input_ids.tolist()}) for k in range(20))
        assert rows == way["rows"] == planned["rows_asked_for"] == trained["stats"]["rows"], options
        assert way["macro"] == batches.macro


def test_training_says_which_macro_batches_were_chosen(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, on stderr, and only where nobody stated them."""
    for options, n_lines in (([], 1), (["--macro", "2"], 0)):
        assert main(["train", str(data), *TRAINING, "--epochs", "1", "--batches", "partition", *options, "--json"]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "--macro" in line]
        assert len(said) == n_lines, said
        assert all("because a batch of seeds is in" in line for line in said)


def test_lists_of_a_policy_and_importance_probabilities(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The neighbour cache changes no batch; every command has the same sampler."""
    options = [*COMMON, "--batches", "partition", "--parts", "drawn"]
    cache = ["--neighbor-cache", "16KiB", "--neighbor-policy"]
    plain = run(capsys, "plan", data, "--simulate", *options, "--policies", "belady", "--sizes", "10%")["rows_asked_for"]
    for policy in ("cross_partition", "degree", "saved_io"):
        found = run(capsys, "plan", data, "--simulate", *options, *cache, policy, "--policies", "belady", "--sizes", "10%")
        assert found["rows_asked_for"] == plain
    labor = ["--sampler", "labor", "--importance-sampling"]
    rows = {}
    for steps in ("0", "2", "-1"):
        trained = run(capsys, "train", data, *TRAINING, "--epochs", 1, *options[len(COMMON) :], *labor, steps, *cache, "degree")
        rows[steps] = trained["stats"]["rows"]
        counted = run(capsys, "plan", data, "--redundancy", *COMMON, "--all", "--parts", "drawn", "--importance-sampling", steps)
        ways = [way for way in counted["ways"] if (way["parts"], way["sampler"]) == ("drawn", "labor")]
        assert [way["rows"] for way in ways] == [rows[steps]]
        if steps == "2":
            packed = run(capsys, "pack", data, tmp_path / "pack", *options, *labor, steps, *cache, "cross_partition")
            assert packed["nodes"] == rows[steps]
    counted = run(capsys, "plan", data, "--redundancy", *COMMON, "--all", "--parts", "drawn", *cache, "saved_io")
    assert all(way["rows"] == rows["0"] for way in counted["ways"] if (way["parts"], way["sampler"]) == ("drawn", "labor"))
    with featstore.open(data) as g:  # the lists that the command line keeps are those of its first epoch's draws
        parser = argparse.ArgumentParser()
        add_sampling(parser)
        asked = parser.parse_args(["--batch-size", "40", "--fanouts", "4,3", "--seed", "5", *cache, "saved_io"])
        asked.labels = "y"
        sampler = make_sampler(g, asked)
        kept = g.neighbor_cache.offset_of_node.copy()
        batches = featstore.RandomBatches(g.node_data["train_idx"], 40, seed=5)
        g.cache_neighbors("16KiB", "saved_io", counts=edges_drawn(sampler, batches, g.num_nodes), progress=False)
        assert np.array_equal(kept, g.neighbor_cache.offset_of_node)
        g.cache_neighbors("16KiB", "degree", progress=False)
        assert not np.array_equal(kept, g.neighbor_cache.offset_of_node)
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    asked = parser.parse_args(["--sampler", "labor", "--importance-sampling", "-1", "--batch-dependency", "3"])
    with featstore.open(data) as g:
        assert "batch_dependency=3, seed=0, importance_sampling=-1" in repr(make_sampler(g, asked))


def test_explain_takes_them(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "plan", data, "--explain", *COMMON, "--batches", "partition", "--sizes", "10%")
    assert found["choices"][0]["taken"]


def test_where_nothing_is_kept(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, bare, pack = tmp_path / "with", tmp_path / "bare", tmp_path / "pack"
    shutil.copytree(data, path)
    rng = np.random.default_rng(0)
    node_data = {"y": np.zeros(9, np.int64), "train_idx": np.arange(9)}
    x = np.zeros((9, 2), np.float32)
    edges = rng.integers(0, 9, (2, 20))
    featstore.OutOfCoreGraph.from_edge_index(bare, edges, 9, {"x": x}, node_data, progress=False).close()
    run(capsys, "pack", path, pack, *COMMON)
    no_parts = f"{bare} keeps no parts: make some with featstore.partition or featstore partition"
    for arguments, message in [
        (["train", bare, "--batches", "partition"], no_parts),
        (["plan", bare, "--simulate", "--batches", "partition"], no_parts),
        (["pack", bare, tmp_path / "p", "--batches", "partition"], no_parts),
        (["train", path, "--batches", "partition", "--parts", "x"], f"{path} keeps no parts 'x'; there is 'drawn', 'planted'"),
        (["train", path, "--parts", "planted"], "--parts goes with --batches partition, not random"),
        (["train", path, "--macro", "2"], "--macro goes with --batches partition, not random"),
        (["plan", path, "--simulate", "--macro", "2"], "--macro goes with --batches partition, not random"),
        (["plan", path, "--redundancy", "--batches", "partition"], "--batches does not go with --redundancy: all batches are"),
        (["plan", path, "--redundancy", "--parts", "x"], "keeps no parts 'x'"),
        (["plan", path, "--simulate", "--trace", "t", "--batches", "partition"], "--batches is for recording"),
        (["pack", path, pack, "--add-layout", "--batches", "partition"], "--batches: --add-layout packs the samples that are"),
        (
            ["train", path, "--strategy", "packed", "--pack", pack, "--batches", "partition"],
            "--batches goes with batches that are",
        ),
        (["train", pack, "--macro", "2"], "--macro goes with batches that are drawn now"),
        (["train", pack, "--neighbor-policy", "degree"], "--neighbor-policy goes with a dataset"),
        (["train", pack, "--importance-sampling", "1"], "--importance-sampling goes with a dataset"),
        (["train", pack, "--weight", "w"], "--weight goes with a dataset"),
        (["train", path, "--neighbor-policy", "degree"], "--neighbor-policy goes with --neighbor-cache"),
        (["train", path, "--neighbor-cache", "1MiB", "--neighbor-policy", "lru"], "lru"),
        (["train", path, "--importance-sampling", "1"], "--importance-sampling goes with --sampler labor, not neighbor"),
        (["train", bare, "--neighbor-cache", "20B", "--neighbor-policy", "cross_partition"], "keeps no parts"),
    ]:
        if "t" in arguments:
            featstore.plan.trace.Trace([[0, 1]], N).save(tmp_path / "t")
            arguments[arguments.index("t")] = tmp_path / "t"
        assert main([str(each) for each in arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err, arguments
    for option, value in (("--batches", "parts"), ("--macro", "0"), ("--importance-sampling", "-2")):
        with pytest.raises(SystemExit) as caught:
            main(["train", str(path), option, value])
        assert caught.value.code == 2
        assert f": {option}: " in capsys.readouterr().err
