"""``featstore pack``, and ``featstore train`` on what it made."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.pack.layout import find_layouts
from featstore.pack.makelayout import make_layout
from tests.support.commands import run
from tests.support.graphs import skewed_dataset
from tests.support.loaders import make_loader
from tests.support.refusing import refuses

FANOUTS = ["--fanouts", "4,3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("made") / "g", 2000, 24)


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, which a test may move."""
    return Path(shutil.copytree(made, tmp_path / "g"))


def fails(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([*map(str, arguments)]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_pack_then_train(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "pack"
    made = run(capsys, "pack", data, pack, *FANOUTS, "--batch-size", 100, "--epochs", 2, "--cache", "0.2")
    assert (made["epochs"], made["batches"]) == (2, 7)
    layout = {"features": ["x"], "policy": "belady", "capacity": 400, "device_rows": 0, "new": True, "damage": None}
    assert [{key: each[key] for key in layout} for each in made["layouts"]] == [layout]
    assert made["disk_bytes"] == sum(path.stat().st_size for path in pack.rglob("*") if path.is_file())
    more = run(capsys, "pack", data, pack, "--add-layout", "--policy", "frequency", "--cache", "50KB")
    assert {(each["policy"], each["new"]) for each in more["layouts"]} == {("belady", False), ("frequency", True)}
    training = ["--batch-size", 100, "--epochs", 2, "--hidden", 8, *FANOUTS]
    fresh = run(capsys, "train", data, *training)
    for options in (["packed"], ["packed", "--policy", "frequency"], ["auto", "--cache", "0.2"]):
        found = run(capsys, "train", data, "--strategy", *options, "--pack", pack, *training)
        assert sorted(found["losses"]) != []
        assert len(found["losses"]) == len(fresh["losses"]) == 14
        if options[0] == "packed":
            assert found["stats"]["hits"]["base"] == 0
        assert found["stats"]["rows"] == fresh["stats"]["rows"]  # the loader's own batches, in another order
    few = run(capsys, "train", data, "--strategy", "packed", "--pack", pack, *training, "--max-batches", 3)
    assert len(few["losses"]) == 6, "three of each epoch, whatever their numbers in the pack"
    assert main(["pack", str(data), str(pack), "--overwrite", *FANOUTS, "--batch-size", "300"]) == 0
    assert "featstore train" in capsys.readouterr().out
    with featstore.Pack(pack) as again:
        assert (again.epochs, again.n_batches) == (1, 3)
        assert [each.policy for each in find_layouts(again)] == ["belady"]


def test_errors_say_what_to_do_next(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "pack"
    train = ["train", data, "--hidden", 8]
    assert "featstore pack DATASET PACK" in fails(capsys, *train, "--strategy", "packed")
    assert f"featstore pack {data} {pack}" in fails(capsys, *train, "--strategy", "packed", "--pack", pack)
    assert "featstore pack" in fails(capsys, "pack", data, pack, "--add-layout")
    assert not pack.exists()
    assert "it has 'x'" in fails(capsys, "pack", data, pack, "--feature", "z")
    run(capsys, "pack", data, pack, *FANOUTS, "--batch-size", 100)
    before = sorted(path.relative_to(pack) for path in pack.rglob("*"))
    assert "--overwrite" in fails(capsys, "pack", data, pack, *FANOUTS)
    assert "leave one out" in fails(capsys, "pack", data, pack, "--overwrite", "--add-layout")
    assert "--strategy auto or packed" in fails(capsys, *train, "--strategy", "streamed", "--pack", pack)
    packed = [*train, "--strategy", "packed", "--pack", pack]
    assert "--fanouts 4,3,2: the samples of" in fails(capsys, *packed, "--fanouts", "4,3,2")
    assert "were made with 100; leave it out" in fails(capsys, *packed, "--batch-size", 101)
    assert "--run-dir: goes with" in fails(capsys, *packed, "--run-dir", tmp_path / "runs")
    assert "--length: goes with a planned policy" in fails(capsys, *packed, "--policy", "degree", "--length", 3)
    adding = ["pack", data, pack, "--add-layout", "--cache", "0.4"]
    for wrong in (["--fanouts", "4,4"], ["--batch-size", 10], ["--epochs", 2], ["--seed", 1], ["--seeds", "train_idx"]):
        assert f"{wrong[0]} {wrong[1]}: " in fails(capsys, *adding, *wrong)
    assert "--sampler: --add-layout packs the samples that are there" in fails(capsys, *adding, "--sampler", "labor")
    assert "--labels: the dataset has no 'z'" in fails(capsys, *adding, "--labels", "z")
    assert "feature: the dataset has no 'nope'; it has 'x'" in fails(capsys, *packed, "--feature", "nope")
    assert "it takes a planned policy such as 'belady' or a static policy" in fails(capsys, *packed, "--policy", "lru")
    assert "no policy is named 'nope'" in fails(capsys, *packed, "--policy", "nope")
    missing = fails(capsys, *train, "--strategy", "packed", "--pack", pack, *FANOUTS, "--policy", "frequency")
    assert "--add-layout --policy frequency" in missing
    full = fails(capsys, "pack", data, pack, "--add-layout", "--policy", "frequency", "--disk", sum_of(pack) + 5000)
    assert "give more --disk" in full
    assert "give more" in fails(capsys, "pack", data, pack, "--add-layout", "--policy", "frequency", "--disk", 1000)
    assert sorted(path.relative_to(pack) for path in pack.rglob("*")) == before
    other = tmp_path / "other"
    n = 50
    featstore.OutOfCoreGraph.create(
        other, np.arange(n + 1), np.arange(n), features={"x": np.zeros((n, 24), np.float32)}, progress=False
    ).close()
    assert "another graph" in fails(capsys, "pack", other, pack, "--add-layout")
    run(capsys, "pack", data, pack, "--add-layout", "--cache", "0.3")
    assert "2 layouts" in fails(capsys, *train, "--strategy", "packed", "--pack", pack, *FANOUTS)
    again = run(capsys, "pack", data, pack, "--add-layout", "--cache", "0.3", "--disk", sum_of(pack) + 1)
    assert [each["new"] for each in again["layouts"]] == [False, False]
    small = ["--strategy", "packed", "--pack", pack, *FANOUTS, "--cache", "0.3", "--disk", 1000]
    assert "made with more disk" in fails(capsys, *train, *small)


def test_a_device_cache_in_training(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are those without one; rows of the device are counted apart, and take no memory of the host's tier."""
    pack = tmp_path / "pack"
    run(capsys, "pack", data, pack, *FANOUTS, "--batch-size", 100, "--cache", "0.1")
    train = ["train", data, "--hidden", 8, "--epochs", 1, *FANOUTS, "--strategy", "packed", "--pack", pack]
    plain = run(capsys, *train)
    found = run(capsys, *train, "--cache", "0.1", "--device-cache", "0.05", "--device", "cpu")
    assert found["losses"] == plain["losses"]
    assert "device" not in plain["stats"]["hits"]
    with featstore.Pack(pack) as opened:
        hottest = np.argsort(-opened.counts(), kind="stable")[:100]
        expected = sum(int(np.isin(opened.ids(b), hottest).sum()) for b in range(len(opened)))
    assert found["stats"]["hits"]["device"] == expected
    there = ["--device-cache", 100 * 24 * 4]  # the same rows as bytes: the layout that is there
    assert run(capsys, *train, *there)["stats"]["hits"] == found["stats"]["hits"]
    assert "no such layout" in fails(capsys, *train, "--device-cache", "0.2")
    assert "200 rows in memory and 100 on the device" in fails(capsys, *train)
    fresh = run(capsys, "train", data, "--device-cache", "0.1", "--batch-size", 100, "--hidden", 8, "--epochs", 1, *FANOUTS)
    assert fresh["stats"]["device_cache"]["rows"] == 200
    assert fresh["stats"]["hits"]["device"] > 0
    refuses(SystemExit, "", lambda: main(["train", str(data), "--device", "abacus"]))
    assert "device='abacus' is not a device" in capsys.readouterr().err


def test_packing_for_a_device(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layout is the one that training asks for; this machine needs neither the device nor memory for its rows."""
    pack = tmp_path / "pack"
    tier = ["--device-cache", "0.05", "--cache", "0.1"]
    made = run(capsys, "pack", data, pack, *FANOUTS, "--batch-size", 100, *tier)
    layout = {"features": ["x"], "policy": "belady", "capacity": 200, "device_rows": 100, "new": True, "damage": None}
    assert [{key: each[key] for key in layout} for each in made["layouts"]] == [layout]
    train = ["train", data, "--hidden", 8, "--epochs", 1, "--strategy", "packed", "--pack", pack]
    plain = run(capsys, *train)  # the one layout that is there
    assert plain["stats"]["hits"]["device"] > 0
    assert run(capsys, *train, *tier)["losses"] == plain["losses"]
    assert len(list(pack.glob("layout-*"))) == 1
    again = run(capsys, "pack", data, pack, "--add-layout", "--cache", "0.1", "--device-cache", 100 * 24 * 4)
    assert [each["new"] for each in again["layouts"]] == [False]  # the same rows as bytes
    assert main(["pack", str(data), str(pack), "--add-layout", "--cache", "0.1", "--device-cache", "1.0"]) == 0
    assert "200 rows in memory, 2,000 on the device, made now" in capsys.readouterr().out
    missing = fails(capsys, *train, "--device-cache", "0.2")
    assert "no such layout" in missing
    assert "--add-layout --policy belady --device-cache 0.2" in missing
    before = sum_of(pack)
    for wrong, text in (("1.5", "must lie in (0, 1]"), ("10B", "one row takes 96 bytes, not 10")):
        assert text in fails(capsys, "pack", data, pack, "--add-layout", "--device-cache", wrong)
    assert sum_of(pack) == before


def test_a_tier_beyond_this_machines_memory_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n = 20_000
    x = np.random.default_rng(0).standard_normal((n, 256)).astype(np.float32)
    node_data = {"y": np.arange(n) % 3, "train_idx": np.arange(n)}
    indices = np.random.default_rng(1).integers(0, n, 4 * n)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.arange(0, 4 * n + 1, 4), indices, features={"x": x}, node_data=node_data, progress=False
    ).close()
    sampling = [*FANOUTS, "--batch-size", 500, "--memory", "12MB", "--cache", 0]
    run(capsys, "pack", tmp_path / "g", tmp_path / "p", *sampling, "--device-cache", "1.0")
    train = ["train", tmp_path / "p", "--hidden", 8, "--epochs", 1]
    assert "caches" in fails(capsys, *train, "--memory", "12MB")
    assert (
        run(capsys, *train, "--memory", "64MB")["stats"]["hits"]["device"]
        == run(capsys, *train, "--memory", "64MB")["stats"]["rows"]
    )


def test_training_on_a_copy_without_its_dataset(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of training beside the dataset, bit for bit; what only the dataset has is asked for by name."""
    pack, there = tmp_path / "pack", tmp_path / "there"
    sampling = [*FANOUTS, "--batch-size", 100]
    assert main([str(each) for each in ("pack", data, pack, *sampling, "--epochs", 2, "--cache", "0.2")]) == 0
    assert "featstore train COPY" in capsys.readouterr().out
    run(capsys, "pack", data, pack, "--add-layout", "--policy", "frequency", "--cache", "0.1", "--device-cache", "0.05")
    training = ["--hidden", 8, "--epochs", 3]
    want = run(capsys, "train", data, "--strategy", "packed", "--pack", pack, *training)
    shutil.copytree(pack, there)
    shutil.rmtree(pack)
    data.rename(tmp_path / "elsewhere")
    train = ["train", there, *training]
    found = run(capsys, *train)
    assert found["losses"] == want["losses"]
    assert [each["loss"] for each in found["epochs"]] == [each["loss"] for each in want["epochs"]]
    assert {each["val_accuracy"] for each in found["epochs"]} == {None}
    assert want["epochs"][0]["val_accuracy"] is not None
    assert found["stats"]["hits"] == want["stats"]["hits"]
    given = run(capsys, *train, "--strategy", "packed", *sampling, "--cache", "0.2", "--memory", "32MB")
    assert given["losses"] == want["losses"]
    assert run(capsys, *train, "--policy", "frequency")["stats"]["hits"]["device"] > 0
    assert main([str(each) for each in train]) == 0
    assert "epoch 2: loss" in capsys.readouterr().out
    for wrong, text in (
        (["--strategy", "ondemand"], "--strategy ondemand needs a dataset"),
        (["--strategy", "auto"], "--strategy auto needs a dataset"),
        (["--pack", there], "is itself a pack"),
        (["--neighbor-cache", "0.1"], "from which nothing is sampled"),
        (["--fanouts", "4,4"], "were made with 4,3"),
        (["--batch-size", 10], "were made with 100"),
        (["--run-dir", tmp_path / "r"], "--run-dir: goes with"),
        (["--length", 3, "--policy", "degree"], "--length: goes with a planned policy"),
        (["--labels", "z"], "labels: the pack has no 'z'; it has 'y'. Where its dataset is: featstore pack DATASET"),
        (["--feature", "z"], "the pack has no 'z'; it has 'x'. Where its dataset is: featstore pack DATASET"),
        (["--policy", "lru"], "it takes a planned policy such as 'belady' or a static policy"),
        (["--policy", "degree"], "featstore pack DATASET"),
        (["--cache", "0.3"], f"{there}: these rows are not in the pack"),
        (["--policy", "frequency", "--cache", "0.3"], f"{there}: these rows are not in the pack"),
        (["--policy", "degree", "--cache", "0.3"], f"{there}: degrees are not in the pack"),
    ):
        assert text in fails(capsys, *train, *wrong), wrong
    before = sorted(path.relative_to(there) for path in there.rglob("*"))
    assert not [path for path in before if "partial" in str(path)]
    (labels,) = there.glob("data-*")
    labels.unlink()
    assert f"{labels}: no such file or directory" in fails(capsys, *train)
    (tmp_path / "elsewhere").rename(data)
    run(capsys, "pack", data, there, "--add-layout", "--labels", "y", "--cache", "0.2")
    assert run(capsys, *train)["losses"] == want["losses"]
    assert "no such file" in fails(capsys, "train", tmp_path / "nowhere", *training)


def test_a_copy_of_samples_without_fanouts_trains(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model needs as many layers as the samples have hops, which the pack knows whoever sampled."""
    with featstore.open(data, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2, 2], seed=1)
        batches = [sampler.sample(seeds) for seeds in g.node_data["train_idx"][:300].split(100)]
        with featstore.sample_offline(g, batches, path=tmp_path / "p") as pack:
            featstore.Loader(g, strategy=featstore.Packed(pack, cache=0.1)).close()
    train = ["train", tmp_path / "p", "--hidden", 8, "--epochs", 1]
    assert len(run(capsys, *train)["losses"]) == 3
    assert "has samples of 3 hops, --fanouts has 2" in fails(capsys, *train, "--fanouts", "3,2")


def sum_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_progress_is_shown_on_a_terminal(data, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["pack", str(data), str(tmp_path / "pack"), *FANOUTS, "--batch-size", "100"]) == 0
    shown = capsys.readouterr().err
    assert "sample" in shown
    assert "pack x" in shown
    assert "B/s" in shown  # bytes, and the time left


def test_training_and_packing_take_what_the_record_says(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fan-outs and batch size of the pack, also in evaluation; its labels in a copy; strategies without a cache's size."""
    pack = tmp_path / "pack"
    sampling = [*FANOUTS, "--batch-size", 100]
    run(capsys, "pack", data, pack, *sampling, "--cache", "0.2", "--disk", "60x")
    train = ["train", data, "--hidden", 8, "--pack", pack]
    plain = run(capsys, *train, "--strategy", "packed")
    given = run(capsys, *train, "--strategy", "packed", *sampling, "--length", 7)
    assert (plain["losses"], plain["epochs"][0]["val_accuracy"]) == (given["losses"], given["epochs"][0]["val_accuracy"])
    assert plain["epochs"][0]["val_accuracy"] is not None
    assert "0 layouts" in fails(capsys, *train, "--strategy", "packed", "--length", 3)
    there = tmp_path / "there"
    shutil.copytree(pack, there)
    with featstore.open(data) as g, featstore.PackedGraph(there, memory="64MB") as copy:
        assert list(copy.node_data) == ["y"]
        with featstore.Loader(copy, strategy="packed") as loader:
            assert all((batch.y == g.node_data["y"][batch.seeds]).all() for batch in loader)
    assert "taken" in run(capsys, *train, "--strategy", "auto")["stats"]["auto"]
    assert [len(each) for each in (list(pack.glob("layout-*")), list(pack.glob("data-*")))] == [1, 1]


def test_loaders_are_not_asked_for_other_batches(data: Path, tmp_path: Path) -> None:
    with featstore.open(data, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        seeds = g.node_data["train_idx"]
        options: dict[str, Any] = {"strategy": "packed", "cache": 0.1}
        with featstore.sample_offline(g, sampler, seeds, 100, path=tmp_path / "p") as pack:
            assert (pack.record["fanouts"], pack.record["batch_size"], pack.record["drop_last"]) == ([4, 3], 100, False)
            with pytest.raises(ValueError, match=r"batch_size=1000: .* of 100 seeds"):
                make_loader(g, pack=pack, batch_size=1000, **options)
            refuses(ValueError, "drop_last=True", lambda: make_loader(g, pack=pack, drop_last=True, **options))
            make_loader(g, pack=pack, batch_size=100, labels=None, **options).close()
        assert not list((tmp_path / "p").glob("data-*"))
        with featstore.PackedGraph(tmp_path / "p", memory="64MB") as there:
            refuses(ValueError, "labels: the graph has no 'y'", lambda: featstore.Loader(there, labels="y", strategy="packed"))
            with featstore.Loader(there, labels=None, strategy="packed") as loader:
                assert next(iter(loader)).y is None
            with featstore.Loader(there, strategy="packed") as loader:  # by default those that there are
                assert next(iter(loader)).labels == {}
        with featstore.sample_offline(g, sampler, seeds, 100, path=tmp_path / "q", drop_last=True) as pack:
            with make_loader(g, pack=pack, drop_last=True, **options) as loader:
                assert len(loader) == len(seeds) // 100
        batch = sampler.sample(seeds[:5])
        with featstore.sample_offline(g, [batch], path=tmp_path / "r") as pack:
            assert (pack.record["fanouts"], pack.record["batch_size"]) == (None, None)
            refuses(ValueError, "those of the sampler", lambda: make_loader(g, pack=pack, batch_size=5, **options))


@pytest.mark.parametrize("size", [None, "auto"])
def test_auto_with_a_pack_needs_no_size(data: Path, tmp_path: Path, size: str | None) -> None:
    """The largest host tier of its layouts that fits; without layouts half of what batches leave."""
    with featstore.open(data, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        x = g.features["x"][:]
        with featstore.sample_offline(g, sampler, g.node_data["train_idx"], 100, path=tmp_path / "p") as pack:
            options: dict[str, Any] = {"pack": pack, "cache": size}
            with make_loader(g, strategy="auto", epochs=50, **options) as loader:
                assert all((batch.x == x[batch.input_ids]).all() for batch in loader)
            with featstore.open(data, memory="4MB") as tight:
                with make_loader(tight, strategy="auto", **options) as loader:
                    assert all((batch.x == x[batch.input_ids]).all() for batch in loader)
            for path in (tmp_path / "p").glob("layout-*"):
                shutil.rmtree(path)
            for share in (0.05, 0.3):
                featstore.Loader(g, strategy=featstore.Packed(pack, cache=share)).close()
            with make_loader(g, strategy="auto", epochs=10**6, **options) as loader:
                assert loader.stats()["auto"]["taken"]["strategy"] == "packed"
                assert g.memory_report()["cache of 'x'"] >= 600 * 96
            assert {each.capacity for each in find_layouts(pack)} == {100, 600}


def test_options_are_checked_before_anything_is_sampled(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "pack"
    for wrong, match in (
        (("--policy", "lru"), "planned policy"),
        (("--cache", "2.0"), "must lie in"),
        (("--cache", "10B"), "a feature cache of one row"),
        (("--cache", "1.0", "--memory", "500KB"), "a feature cache of 2000 rows"),
    ):
        assert match in fails(capsys, "pack", data, pack, *FANOUTS, *wrong)
        assert not pack.exists()
    pack.mkdir()
    assert "is no pack" in fails(capsys, "pack", data, pack, *FANOUTS)


def test_ctrl_c_in_packing_says_how_to_go_on(data, tmp_path, capsys, monkeypatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    pack = tmp_path / "pack"
    with monkeypatch.context() as patched:
        patched.setattr("featstore.strategies.packlayouts.make_layout", interrupt)
        assert main(["pack", str(data), str(pack), *FANOUTS]) == 130
    assert "interrupted; the samples" in (said := capsys.readouterr().err)
    assert "--add-layout" in said
    assert run(capsys, "pack", data, pack, "--add-layout", *FANOUTS)["layouts"][0]["new"]
    with monkeypatch.context() as patched:
        patched.setattr("featstore.cli.pack.sample_offline", interrupt)
        assert main(["pack", str(data), str(tmp_path / "other"), *FANOUTS]) == 130
    assert capsys.readouterr().err == "featstore: interrupted\n"


def test_a_layout_that_others_made_meanwhile_was_there(data, tmp_path, capsys, monkeypatch) -> None:
    def after_another(*arguments: Any, **options: Any) -> bool:
        assert make_layout(*arguments, **options)
        return make_layout(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("featstore.strategies.packlayouts.make_layout", after_another)
        made = run(capsys, "pack", data, tmp_path / "pack", *FANOUTS)
    assert [each["new"] for each in made["layouts"]] == [False]
    more = run(capsys, "pack", data, tmp_path / "pack", "--add-layout", "--cache", "0.3")
    assert {each["capacity"]: each["new"] for each in more["layouts"]} == {200: False, 600: True}


def test_a_pack_where_a_dataset_belongs_and_seeds_that_are_none(data, tmp_path, capsys) -> None:
    pack, empty = tmp_path / "pack", tmp_path / "empty"
    run(capsys, "pack", data, pack, *FANOUTS)
    for command in (["aggregate", pack], ["bench", pack], ["plan", pack, "--simulate"], ["pack", pack, tmp_path / "other"]):
        assert f"{pack} is a pack, and a dataset is asked for here" in fails(capsys, *command)
    none = {"y": np.zeros(3, np.int64), "train_idx": np.zeros(0, np.int64)}
    features = {"x": np.zeros((3, 2), np.float32)}
    featstore.OutOfCoreGraph.create(empty, np.zeros(4, np.int64), np.zeros(0, np.int64), features, none, progress=False).close()
    for command in (["train", empty], ["pack", empty, tmp_path / "other"], ["plan", empty, "--simulate"]):
        assert "its 'train_idx' or 'train_mask' names no node with a label" in fails(capsys, *command)


def test_what_a_pack_holds(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "pack"
    made = run(capsys, "pack", data, pack, *FANOUTS, "--batch-size", 100, "--epochs", 2, "--policy", "frequency")
    shutil.move(data, tmp_path / "elsewhere")  # the dataset is not needed
    found = run(capsys, "info", pack)
    assert found.items() <= {**made, "layouts": found["layouts"]}.items()
    with featstore.Pack(pack) as opened:
        assert found["nodes"] == sum(len(opened.ids(number)) for number in range(len(opened)))
        assert (found["num_nodes"], found["epochs"], found["batches"]) == (2000, opened.epochs, opened.n_batches)
    (layout,) = found["layouts"]
    assert layout.items() <= made["layouts"][0].items()
    assert layout["bytes"] == sum(path.stat().st_size for path in (pack / layout["name"]).iterdir())
    assert main(["info", str(pack)]) == 0
    said = capsys.readouterr().out
    assert f"  samples    batches of 100 seeds, {found['hops']} hops, fan-outs " in said
    assert "  layout of x: frequency, 200 rows in memory, " in said
    assert "  node data  y\n" in said
    shutil.rmtree(pack / layout["name"])
    assert main(["info", str(pack)]) == 0
    assert f"  no layout: featstore pack DATASET {pack} --add-layout makes one" in capsys.readouterr().out
    (pack / "pack").unlink()
    assert "is not a pack: it has no record" in fails(capsys, "info", pack)


def test_layouts_that_were_there_are_looked_at(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cheaply: sizes and headers; the text says who checks the rest. A damaged one is no obstacle to another."""
    pack = tmp_path / "pack"
    run(capsys, "pack", data, pack, *FANOUTS)
    again = ["pack", str(data), str(pack), "--add-layout"]
    assert main(again) == 0
    assert f"every byte is by: featstore verify {pack}" in capsys.readouterr().out
    (extents,) = pack.glob("layout-*/extents.0.rows")
    with extents.open("r+b") as file:
        file.truncate(8192)
    assert main([*again, "--policy", "frequency"]) == 0
    said = capsys.readouterr().out
    assert f"DAMAGED: {extents}: the file is shorter than it was written" in said
    assert "frequency, 200 rows in memory, made now" in said
    assert main(again) == 1  # the one that is asked for
    assert f"; remove {extents.parent}, and featstore pack DATASET {pack} --add-layout makes it anew" in capsys.readouterr().err
    shutil.rmtree(extents.parent)
    found = run(capsys, *again)
    assert {each["policy"]: each["new"] for each in found["layouts"]} == {"belady": True, "frequency": False}
    assert {each["damage"] for each in found["layouts"]} == {None}


def test_a_drive_that_is_full(data, tmp_path, capsys, monkeypatch) -> None:
    """It is said to be full, by how much where that is known, or the quota is; a larger --disk would not help."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_quota(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    pack = tmp_path / "pack"
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", no_room)
        said = fails(capsys, "pack", data, pack, *FANOUTS)
    assert "the drive is full: the extents take " in said
    assert " are free; the samples are kept: make room and ask again with --add-layout" in said
    assert "--disk" not in said
    assert not list(pack.glob("layout-*"))
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", no_room)
        said = fails(capsys, "pack", data, tmp_path / "other", *FANOUTS)
    assert "samples: the drive is full (" in said
    assert "are free now)" in said
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", no_quota)
        said = fails(capsys, "pack", data, pack, "--add-layout", *FANOUTS)
    assert "Disk quota exceeded: the extents take " in said
    assert "; the samples are kept: make room and ask again with --add-layout" in said
    run(capsys, "pack", data, pack, "--add-layout", *FANOUTS)
