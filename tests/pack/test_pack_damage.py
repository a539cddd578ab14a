"""Damage to any file of a pack is found by ``verify`` and by training from a copy, or changes nothing that either delivers."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import CorruptionError, FormatError, StaleError
from featstore.pack.nodedata import Carrier, NodeData, carried, is_carried
from featstore.pack.offline import Pack
from featstore.pack.record import read_record, write_record
from featstore.testing.faults import flipped, sweep, truncated
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

N = 300
DAMAGE = (CorruptionError, FormatError, FileNotFoundError)
LAYOUTS: dict[str, dict[str, Any]] = {
    "y": {"features": ["x", "z"], "cache": 0.2, "length": 3},
    "t": {"features": ["x"], "policy": "frequency", "cache": 0.02, "device_cache": 0.02, "disk": "4.5x"},
}


def make_pack(folder: Path, seed: int) -> Path:
    """Make a dataset ``g`` whose labels depend on ``seed``, and a pack ``p`` of it with two layouts and two arrays of labels."""
    indptr, indices = make_graph(N, 4.0)
    x = np.random.default_rng(1).standard_normal((N, 24)).astype(np.float32)
    rng = np.random.default_rng(seed)
    labels = {"y": rng.integers(0, 9, N), "t": rng.integers(0, 9, N)}
    features = {"x": x, "z": x[:, :3].copy()}
    featstore.OutOfCoreGraph.create(folder / "g", indptr, indices, features, labels, progress=False).close()
    with featstore.open(folder / "g", memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.sample_offline(g, sampler, np.arange(N), 20, 2, folder / "p", seed=seed, progress=False) as pack:
            for name, options in LAYOUTS.items():
                make_loader(g, strategy="packed", pack=pack, labels=name, **options).close()
    return folder / "p"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two packs of one graph and its features, sampled in different orders, with different labels."""
    found = tuple(make_pack(tmp_path_factory.mktemp(f"of{seed}"), seed) for seed in (1, 2))
    for pack in found:
        names = {path.name.split("-")[0] for path in pack.rglob("*")}
        assert names >= {"pack", "samples", "data", "layout", "plan", "fill", "device", "shared", "begun", "done.0", "done.1"}
        assert len(list(pack.glob("data-*"))) == 2
    return found[0], found[1]


def files(pack: Path) -> list[Path]:
    return sorted(path for path in pack.rglob("*") if path.is_file() and path.suffix != ".lock")


def delivered(pack: Path) -> list[bytes]:
    """Return every byte of an epoch from each layout, opened without the dataset: ids, edges, labels, features."""
    found: list[bytes] = []
    with featstore.PackedGraph(pack, memory="64MB") as g:
        for name, options in LAYOUTS.items():
            given = {key: value for key, value in options.items() if key in ("features", "policy")}
            with make_loader(g, strategy="packed", labels=name, shuffle=False, prefetch=0, **given) as loader:
                for batch in loader:
                    found += [batch.input_ids.numpy().tobytes(), batch.y.numpy().tobytes()]
                    found += [each.numpy().tobytes() for block in batch.blocks for each in (block.src, block.dst)]
                    found += [rows.numpy().tobytes() for rows in batch.features.values()]
    return found


def verify(pack: Path) -> None:
    with featstore.Pack(pack) as opened:
        assert opened.verify(progress=False)["others"] == []


def outcome(pack: Path, whole: list[bytes]) -> str:
    """Judge a damage: ``found`` by verify, ``harmless``, or ``WRONG``."""
    try:
        verify(pack)
        is_found = False
    except DAMAGE:
        is_found = True
    try:
        is_same = delivered(pack) == whole
    except DAMAGE:
        return "found" if is_found else "only found in training"
    return ("found" if is_found else "harmless") if is_same else "WRONG"


@contextmanager
def replaced(path: Path, by: Path | None) -> Iterator[None]:
    """Have another file in the place of ``path``, or none."""
    aside = path.parent.parent / "aside"
    path.rename(aside)
    try:
        if by is not None:
            shutil.copyfile(by, path)
        yield
    finally:
        aside.replace(path)


def counterparts(pack: Path, other: Path, path: Path) -> list[Path]:
    """Return the files of another pack, and the others of this one, that have the role of ``path``."""
    role = path.name.split("-")[0]
    return [each for each in [*files(other), *files(pack)] if each.name.split("-")[0] == role and each != path]


def campaign(pack: Path, other: Path, n_flips: int, every_swap: bool) -> Counter[str]:
    whole, rng, found = delivered(pack), random.Random(1), Counter[str]()

    def count(what: str, path: Path) -> None:
        came_to = outcome(pack, whole)
        found[came_to] += 1
        assert came_to in ("found", "harmless"), f"{what} {path}: {came_to}"
        same = what == "swap" and any(path.read_bytes() == each.read_bytes() for each in counterparts(pack, other, path))
        assert came_to == "found" or same, f"{what} {path} is not found"

    for path in files(pack):
        size = path.stat().st_size
        for _ in range(n_flips):
            with flipped(path, rng.randrange(size), rng.randrange(8)):
                count("flip", path)
        for n_bytes in sorted({0, size // 2, size - 1} if every_swap else {rng.choice((0, size // 2, size - 1))}):
            with truncated(path, n_bytes):
                count("cut", path)
        with path.open("ab") as file:
            file.write(b"\0")
        count("one byte more", path)
        os.truncate(path, size)
        with replaced(path, None):
            count("removal", path)
        for by in counterparts(pack, other, path) if every_swap else counterparts(pack, other, path)[:2]:
            with replaced(path, by):
                count("swap", path)
    verify(pack)
    assert delivered(pack) == whole
    return found


@pytest.mark.parametrize(("n", "least"), [(1, 70), pytest.param(100, 2000, marks=pytest.mark.stress)])
def test_a_sample_of_all_damages_is_found(packs: tuple[Path, Path], tmp_path: Path, n: int, least: int) -> None:
    shutil.copytree(packs[0], tmp_path / "p")
    assert campaign(tmp_path / "p", packs[1], n, every_swap=n > 1)["found"] > least


def data_files(pack: Path) -> dict[str, Path]:
    with featstore.Pack(pack) as opened:
        return {name: pack / record["file"] for name, record in carried(opened).items()}


def test_several_labels_of_one_loader(packs: tuple[Path, Path], tmp_path: Path) -> None:
    """A pack carries all of a loader's labels, and delivers them by name without the dataset."""
    with featstore.open(packs[0].parent / "g", memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        want = {name: g.node_data[name] for name in ("t", "y")}
        with featstore.sample_offline(g, sampler, np.arange(N), 20, path=tmp_path / "p", progress=False) as pack:
            featstore.Loader(g, labels=["t", "y"], features="x", strategy=featstore.Packed(pack, cache=0.2)).close()
    with featstore.PackedGraph(tmp_path / "p", memory="64MB") as there:
        assert sorted(there.node_data) == ["t", "y"]
        with featstore.Loader(there, strategy="packed", labels=["t", "y"]) as loader:
            for batch in loader:
                assert {name: rows.tolist() for name, rows in batch.labels.items()} == {
                    name: rows[batch.seeds].tolist() for name, rows in want.items()
                }
        with featstore.Loader(there, strategy="packed") as loader:
            assert list(next(iter(loader)).labels) == ["y"]


def test_labels_are_bound_to_the_packs_record(packs: tuple[Path, Path], tmp_path: Path) -> None:
    """Another pack's labels, those of another name, and none are errors that name the file."""
    pack, other = tmp_path / "p", data_files(packs[1])
    shutil.copytree(packs[0], pack)
    mine = data_files(pack)
    for by in (other["y"], other["t"], mine["t"]):
        with replaced(mine["y"], by):
            for check in (verify, featstore.PackedGraph):
                with pytest.raises(CorruptionError, match="not the file of node data 'y' that the pack's record names") as caught:
                    check(pack)
                assert caught.value.path == str(mine["y"])
    with replaced(mine["y"], None):
        for check in (verify, featstore.PackedGraph):
            with pytest.raises(FileNotFoundError) as missing:
                check(pack)
            assert missing.value.filename == str(mine["y"])
    # A file of another pack that keeps its name is none of this pack's, and is not read.
    shutil.copyfile(other["y"], pack / other["y"].name)
    with featstore.Pack(pack) as opened:
        assert opened.verify(progress=False)["others"] == [other["y"].name]
    assert delivered(pack) == delivered(packs[0])


def test_labels_that_are_lost_are_written_anew(packs: tuple[Path, Path], tmp_path: Path) -> None:
    """The next loader beside the dataset brings them, whatever is in their place."""
    pack, whole = tmp_path / "p", delivered(packs[0])
    shutil.copytree(packs[0], pack)
    for by in (None, data_files(packs[1])["y"], pack / "samples"):
        mine = data_files(pack)["y"]
        mine.unlink()
        if by is not None:
            shutil.copyfile(by, mine)
        with featstore.open(packs[0].parent / "g", memory="64MB") as g:
            make_loader(g, strategy="packed", pack=pack, labels="y", **LAYOUTS["y"]).close()
        verify(pack)
        assert delivered(pack) == whole


def test_an_earlier_version_of_labels_is_replaced(packs: tuple[Path, Path], tmp_path: Path) -> None:
    """By a file of another name; a copy that was opened before says so."""
    pack = tmp_path / "p"
    shutil.copytree(packs[0], pack)
    shutil.copytree(packs[0].parent / "g", tmp_path / "g")
    before, kept = data_files(pack), delivered(pack)
    with featstore.PackedGraph(pack, memory="64MB") as opened, featstore.open(tmp_path / "g", memory="64MB") as g:
        changed = g.node_data["y"] + 1
        data = NodeData("y", changed, "0" * 32)
        with Pack(pack) as mine:
            carry(mine, data)
            assert is_carried(mine, data)
        assert data_files(pack)["t"] == before["t"]
        assert data_files(pack)["y"] != before["y"]
        assert not before["y"].exists()
        with pytest.raises(StaleError, match="replaced since the pack was opened"):
            opened.node_data["y"]
        with featstore.PackedGraph(pack, memory="64MB") as again:
            assert (again.node_data["y"] == changed).all()
    verify(pack)
    assert delivered(pack) != kept


def test_an_old_record_carries_no_labels(packs: tuple[Path, Path], tmp_path: Path) -> None:
    """The record of the time before labels were carried names none: a copy refuses to train with them."""
    shutil.copytree(packs[0], tmp_path / "p")
    record = {**read_record(str(packs[0] / "pack"), "pack"), "node_data": {}}
    (tmp_path / "p" / "pack").unlink()
    write_record(str(tmp_path / "p" / "pack"), "pack", record)
    with featstore.PackedGraph(tmp_path / "p", memory="64MB") as copy:
        with pytest.raises(ValueError, match="labels: the graph has no 'y'"):
            featstore.Loader(copy, labels="y", features=["x", "z"], strategy="packed")


def carry(pack: Pack, data: NodeData) -> None:
    with Carrier(pack) as carrier:
        carrier.write(data)
        carrier.commit()


def _failing(folder: str, step: int) -> None:
    pack = os.path.join(folder, "p")
    with featstore.Pack(pack) as opened:
        with featstore.PackedGraph(pack, memory="64MB") as g:
            new = NodeData("y", g.node_data["y"] + 1, "0" * 32)
        for operation, error in (("open", "EMFILE"), ("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EIO"), ("unlink", "EIO")):
            for number, fault in enumerate(sweep(folder, operation, error, step=step)):
                data = NodeData("y", new.tensor + number + 1, f"{number + 1:032x}")
                with fault:
                    try:
                        carry(opened, data)
                    except OSError:
                        assert fault.fired
                with featstore.PackedGraph(pack, memory="64MB") as copy:
                    found = copy.node_data["y"]
                    committed = bool((found == data.tensor).all())
                    assert committed or fault.fired
                    assert is_carried(opened, data) is committed
                carry(opened, new)
                with featstore.PackedGraph(pack, memory="64MB") as copy:
                    assert (copy.node_data["y"] == new.tensor).all()
                names = [name for name in os.listdir(pack) if name.startswith("data-")]
                assert len(names) == 2, (operation, number, names)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.stress)])
def test_no_fault_leaves_a_record_without_its_labels(packs: tuple[Path, Path], tmp_path: Path, step: int) -> None:
    """Whatever system call fails in carrying labels, the pack opens, with those before or the new ones."""
    shutil.copytree(packs[0], tmp_path / "p")
    run_in_fork(_failing, str(tmp_path), step)
