"""The four levels of packed layouts: the batches of on-demand loading, bit for bit, whatever a tier holds; within the disk."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import featstore
from benchmarks.papers.figures.segment_traffic import traffic
from featstore.pack import tiers
from featstore.pack.layout import Layout, find_layouts
from featstore.pack.nodedata import NodeData, is_carried
from featstore.plan.trace import Trace
from featstore.testing.faults import random_flips
from tests.strategies.test_packed import any_graph, copied, pack, run
from tests.strategies.test_superbatch import N, dataset, ondemand, same
from tests.support.directory_size import bytes_at_one_moment
from tests.support.loaders import make_loader
from tests.support.refusing import refuses
from tests.support.sampled import covering

__all__ = ["dataset", "ondemand", "pack"]  # fixtures

STATIC: dict[str, Any] = {"policy": "frequency"}


def layout_bytes(pack: Path) -> int:
    return sum(path.stat().st_size for pattern in ("layout-*/*", "data-*") for path in pack.rglob(pattern))


def open_layout(dataset: Path, pack: Path) -> tuple[featstore.Pack, Any, Layout]:
    g, opened = featstore.open(dataset, memory="64MB"), featstore.Pack(pack)
    return opened, g, Layout(opened, find_layouts(opened)[0], g.reader)


def least_in(error: OSError) -> int:
    """The bytes that a message says would do."""
    return int(str(error).split("(")[1].split(" bytes")[0])


def unlimited(dataset: Path, pack: Path, tmp_path: Path, **options: Any) -> int:
    """Bytes of a layout with an extent of all its rows for every batch."""
    mine = copied(pack, tmp_path / "unlimited")
    run(dataset, mine, epochs=0, **options)
    return layout_bytes(mine)


def test_a_small_disk_makes_batches_share(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any], device: str) -> None:
    options = {**STATIC, "cache": 0.02, "device": device}
    most = unlimited(dataset, pack, tmp_path, **options)
    lengths = []
    for share in (1.1, 0.95, 0.85, 0.76):
        mine = copied(pack, tmp_path / str(share))
        disk = int(share * most)
        found, stats = run(dataset, mine, disk=disk, **options)
        assert same(found[0] + found[2], ondemand)
        assert layout_bytes(mine) <= disk
        assert ("disk_cache" in stats["hits"]) == (share < 1)
        assert stats["hits"]["base"] == 0
        assert sum(stats["hits"].values()) == stats["rows"]
        opened, g, layout = open_layout(dataset, mine)
        shared = layout.tables.shared
        lengths.append(1 if shared is None else shared.length)
        for opened_ in (layout, opened, g):
            opened_.close()
        for backend in ("io_uring", "pread"):
            found, again = run(dataset, mine, backend=backend, memory="16MB", device=device, **STATIC)
            assert same(found[0] + found[2], ondemand)
            assert again["hits"] == stats["hits"]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1 < lengths[1] < lengths[-1]


def test_no_shorter_segments_would_fit(dataset: Path, pack: Path, tmp_path: Path) -> None:
    most = unlimited(dataset, pack, tmp_path, **STATIC, cache=0.02)
    spare = 40_000  # what records and the progress of packing may take
    for share in (0.9, 0.8):
        disk = int(share * most)
        mine = copied(pack, tmp_path / str(share))
        run(dataset, mine, epochs=0, disk=disk, cache=0.02, **STATIC)
        opened, g, layout = open_layout(dataset, mine)
        shared = layout.tables.shared
        assert shared is not None
        host = np.zeros(N, bool)
        host[layout.tables.fill_rows] = True
        batches = [ids[~host[ids]] for ids in (opened.ids(b) for b in range(len(opened)))]
        tables = sum(path.stat().st_size for name in ("plan", "fill", "data-*") for path in mine.rglob(name))
        shorter = sum(traffic(batches, N, shared.length - 1, width, order=None).disk_bytes for width in (132, 7))
        assert tables + shorter + spare > disk >= layout_bytes(mine)
        for each in (layout, opened, g):
            each.close()


def test_shared_rows_are_those_used_twice_in_a_segment(dataset: Path, pack: Path, tmp_path: Path) -> None:
    mine = copied(pack, tmp_path)
    most = unlimited(dataset, pack, tmp_path, **STATIC, cache=0.02)
    run(dataset, mine, epochs=0, disk=most * 4 // 5, cache=0.02, **STATIC)
    opened, g, layout = open_layout(dataset, mine)
    tables, shared = layout.tables, layout.tables.shared
    rows = shared.rows(0, len(shared))
    before = 0
    for first in range(0, len(opened), shared.length):
        segment = range(first, min(first + shared.length, len(opened)))
        seen = np.concatenate([opened.ids(b) for b in segment])
        seen = seen[~np.isin(seen, tables.fill_rows)]
        values, counts = np.unique(seen, return_counts=True)
        mine_here = rows[before : before + int((counts > 1).sum())]
        assert sorted(mine_here.tolist()) == values[counts > 1].tolist()
        for b in segment:
            ids = opened.ids(b)
            assert set(rows[shared.addresses(b)].tolist()) == set(ids.tolist()) & set(mine_here.tolist())
            packed = tables.packed(b, ids)
            assert (np.diff(packed) > 0).all()
            assert set(packed.tolist()) == set(ids.tolist()) - set(mine_here.tolist()) - set(tables.fill_rows.tolist())
        before += len(mine_here)
    assert before == len(shared)
    for each in (layout, opened, g):
        each.close()


def test_a_drive_that_is_full_is_not_taken_for_a_disk_that_is_given(
    dataset: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk that is allowed would do: the error is the drive's, and unwritten plans do not pass for written ones."""
    real, calls = tiers._plan_windows, list[int]()

    def full(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "plan")
        return real(*given)

    monkeypatch.setattr(tiers, "_plan_windows", full)
    mine = copied(pack, tmp_path / "full")
    caught = refuses(OSError, "No space left", lambda: run(dataset, mine, epochs=0, disk="1GiB", cache=0.02))
    assert (caught.value.errno, len(calls)) == (errno.ENOSPC, 2)
    assert layout_bytes(mine) == 0


def test_a_disk_of_so_many_times_the_features(dataset: Path, pack: Path, tmp_path: Path) -> None:
    features = N * (33 * 4 + 7)
    for number, disk in enumerate(("2.5x", int(2.5 * features))):
        mine = copied(pack, tmp_path / str(number))
        run(dataset, mine, epochs=0, disk=disk, cache=0.02, **STATIC)
        assert layout_bytes(mine) <= 2.5 * features
    folders = [sorted((path.name, path.stat().st_size) for path in tmp_path.glob(f"{k}/copy/layout-*/*")) for k in (0, 1)]
    assert folders[0] == folders[1]
    mine = copied(pack, tmp_path / "small")
    caught = refuses(OSError, "shared by all", lambda: run(dataset, mine, epochs=0, disk="0.5x", cache=0.02, **STATIC))
    assert caught.value.errno == errno.ENOSPC
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with pytest.raises(OSError, match="disk budget"):
            featstore.sample_offline(g, sampler, g.node_data["train_idx"], 40, path=tmp_path / "p", disk="0.01x")
        with pytest.raises(OSError, match="disk budget"):
            with featstore.Loader(g, sampler, g.node_data["train_idx"], strategy=featstore.Superbatch(disk="0.001x")) as loader:
                next(iter(loader))
        with pytest.raises(ValueError, match="or a multiple of the features"):
            featstore.Loader(g, sampler, g.node_data["train_idx"], strategy=featstore.Superbatch(disk="half"))


class Watched(threading.Thread):
    """Looks at a directory's size, over and over."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self.most, self.looks, self._over = folder, 0, 0, threading.Event()

    def run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.is_set()  # one look more, at what is left in the end
            self.most, self.looks = max(self.most, bytes_at_one_moment(self._folder)), self.looks + 1

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def __enter__(self) -> Watched:
        self.start()
        return self


def test_the_disk_budget_is_never_exceeded_while_it_runs(dataset: Path, pack: Path, tmp_path: Path, device: str) -> None:
    options = {**STATIC, "cache": 0.02, "device": device}
    most = unlimited(dataset, pack, tmp_path, **options)
    for share in (0.9, 0.78):
        mine = copied(pack, tmp_path / str(share))
        before = sum(path.stat().st_size for path in mine.iterdir())
        with Watched(mine) as watched:
            run(dataset, mine, memory="3MB", disk=int(share * most), epochs=1, **options)  # several episodes
        assert watched.looks > 5
        assert watched.most - before <= int(share * most)
    control = copied(pack, tmp_path / "control")
    with Watched(control) as watched:
        run(dataset, control, memory="3MB", epochs=1, **options)
    assert watched.most > 0.8 * most


def test_too_small_a_disk(dataset: Path, pack: Path, tmp_path: Path) -> None:
    mine = copied(pack, tmp_path)
    caught = refuses(OSError, "shared by all, take", lambda: run(dataset, mine, cache=0.02, disk="300KB", **STATIC))
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(mine)) == ["pack", "samples", "writer.lock"]
    least = least_in(caught.value)
    refuses(OSError, "shared by all, take", lambda: run(dataset, mine, cache=0.02, disk=least - 1, epochs=0, **STATIC))
    run(dataset, mine, cache=0.02, disk=least, epochs=0, **STATIC)
    assert least - 20_000 < layout_bytes(mine) <= least


@pytest.mark.parametrize(
    ("policy", "given"), [("belady", "the cache too"), ("belady", "nothing else"), ("frequency", "nothing else")]
)
def test_a_layout_that_is_there_keeps_within_the_disk(dataset, pack, tmp_path, policy, given, device) -> None:
    """One that was made with more is refused to the byte, by what it takes, and is as it was; so is one without its labels."""
    mine = copied(pack, tmp_path)
    run(dataset, mine, policy=policy, cache=0.02, epochs=0)
    folder = next(mine.glob("layout-*"))
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    before = sorted((path.name, path.stat().st_mtime_ns) for path in mine.rglob("*"))
    options: dict[str, Any] = {"policy": policy, "device": device}
    options |= {"cache": 0.02} if given == "the cache too" else {}
    for _ in range(2):
        with pytest.raises(OSError, match=rf"made with more disk: it takes .* \({n_bytes} bytes\)") as caught:
            run(dataset, mine, disk=n_bytes - 1, **options)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(folder))
    assert sorted((path.name, path.stat().st_mtime_ns) for path in mine.rglob("*")) == before
    assert run(dataset, mine, disk=n_bytes, **options)[1]["hits"]["packed"] > 0
    labels = next(mine.glob("data-*"))
    size = labels.stat().st_size
    labels.unlink()
    refuses(OSError, "disk budget", lambda: run(dataset, mine, policy=policy, cache=0.02, disk=n_bytes + size - 1))
    run(dataset, mine, policy=policy, cache=0.02, disk=n_bytes + size, device=device)
    assert next(mine.glob("data-*")).stat().st_size == size


def test_with_less_disk_a_smaller_layout_is_made_beside(dataset, pack, tmp_path, ondemand, device) -> None:
    """The one that takes most of what there is of the disk runs, and none is made twice."""
    mine, options = copied(pack, tmp_path), {"cache": 0.02, **STATIC}

    def taken(disk: int | None, **more: Any) -> tuple[str, bool]:
        found, stats = run(dataset, mine, disk=disk, device=device, **{**options, **more})
        assert same(found[0] + found[2], ondemand)
        (mine / stats["layout"]["name"]).stat()
        return stats["layout"]["name"], stats["layout"]["made"]

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (mine / name).iterdir())

    largest, _ = taken(None)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (mine / largest).iterdir())
    disk = size(largest) * 9 // 10
    smaller, made = taken(disk)
    assert made
    assert smaller != largest
    assert size(smaller) <= disk
    least, made = taken(size(smaller) - 1)
    assert made
    assert size(least) < size(smaller)
    for limit, expected in (
        (None, largest),
        (size(largest), largest),
        (size(largest) - 1, smaller),
        (size(smaller), smaller),
        (size(smaller) - 1, least),
    ):
        assert taken(limit) == (expected, False)
        assert taken(limit, cache=None) == (expected, False)
        assert taken(limit, cache="auto")[1] is False
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (mine / largest).iterdir()) == before
    caught = refuses(OSError, "shared by all, take", lambda: taken(1000))
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in mine.glob("layout-*")) == sorted([largest, smaller, least])
    with featstore.Pack(mine) as opened:
        opened.verify(progress=False)


def test_shared_rows_that_are_missing_are_named(dataset: Path, pack: Path, tmp_path: Path, device: str) -> None:
    """Of other damage to them see test_pack_damage."""
    mine = copied(pack, tmp_path)
    run(dataset, mine, cache=0.01, disk="1MB", epochs=0, **STATIC)
    folder = next(mine.glob("layout-*"))
    os.unlink(folder / "shared")
    caught = refuses(FileNotFoundError, "", lambda: run(dataset, mine, device=device, **STATIC))
    assert caught.value.filename == str(folder / "shared")


def tight_disk(dataset: Path, pack: Path, tmp_path: Path, **options: Any) -> int:
    """A disk in which little more than one segment of all batches fits."""
    try:
        run(dataset, copied(pack, tmp_path / "tight"), epochs=0, disk=25_000, **options)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return least_in(error) * 21 // 20
    raise AssertionError("that was enough")


@pytest.mark.parametrize(("disk", "on_host", "on_device"), covering([None, "tight"], [0, 0.1, 1.0], [0, 0.05, 1.0], together=2))
def test_tiers_empty_partly_and_entirely_full(dataset, pack, tmp_path, ondemand, device, on_device, on_host, disk) -> None:
    options: dict[str, Any] = {"cache": on_host, "device_cache": on_device, "device": device, **STATIC}
    mine = copied(pack, tmp_path)
    n_bytes = None if disk is None else tight_disk(dataset, pack, tmp_path, **options)
    found, stats = run(dataset, mine, disk=n_bytes, **options)
    assert same(found[0] + found[2], ondemand)
    assert n_bytes is None or layout_bytes(mine) <= n_bytes
    hits = {"device": 0, "host": 0, "disk_cache": 0, "packed": 0, "base": 0} | stats["hits"]
    with featstore.Pack(mine) as opened:
        by_count = np.argsort(-opened.counts(), kind="stable")
        batches = [opened.ids(b) for b in range(len(opened))]
    n_device, n_host = round(on_device * N), round(on_host * N)
    top, both = by_count[:n_device], by_count[: n_device + n_host]
    assert hits["device"] == 2 * sum(np.isin(ids, top).sum() for ids in batches)  # two features
    assert hits["device"] + hits["host"] == 2 * sum(np.isin(ids, both).sum() for ids in batches)
    assert sum(hits.values()) == stats["rows"]
    assert hits["base"] == 0
    assert (hits["disk_cache"] > 0) == (disk is not None and n_device + n_host < N)
    assert (hits["packed"] > 0) == (n_device + n_host < N)
    again, _ = run(dataset, mine, prefetch=0, policy="frequency", device=device)  # the layout that is there
    assert same(again[0] + again[2], ondemand)


def test_belady_beside_a_device(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any], device: str) -> None:
    """The host's cache loads what it would load of the accesses that the device leaves."""
    for number, (on_device, on_host) in enumerate(((0.05, 0.1), (1.0, 0.1), (0.05, 0), (0.05, 1.0))):
        mine = copied(pack, tmp_path / str(number))
        options: dict[str, Any] = {"cache": on_host, "device_cache": on_device, "device": device, "length": 7}
        found, stats = run(dataset, mine, **options)
        assert same(found[0] + found[2], ondemand)
        with featstore.Pack(mine) as opened:
            top = np.argsort(-opened.counts(), kind="stable")[: round(on_device * N)]
            rest = [ids[~np.isin(ids, top)] for ids in (opened.ids(b) for b in range(len(opened)))]
        windows = [rest[e * 25 + a : e * 25 + min(a + 7, 25)] for e in range(2) for a in range(0, 25, 7)]
        capacity = round(on_host * N)
        loads = sum(int(featstore.simulate(Trace(each, N), capacity, "belady").sum()) for each in windows)
        assert stats["hits"].get("packed", 0) == 2 * loads
        assert stats["hits"]["device"] + sum(len(ids) for ids in rest) * 2 == stats["rows"]


def test_a_device_tier_is_counted(dataset: Path, pack: Path, tmp_path: Path, device: str) -> None:
    """By the budget, where it lies in the host's memory."""
    mine = copied(pack, tmp_path)
    with featstore.open(dataset, memory="64MB") as g:
        with pytest.raises(featstore.OptionError, match="device_cache: the layout of a pack has chosen its rows"):
            featstore.Loader(g, device_cache=featstore.DeviceCache(0.1, "degree"), strategy=featstore.Packed(mine, cache=0.1))
        for size, error in ((1.5, ValueError), ("fast", ValueError), ("10B", featstore.BudgetError)):
            with pytest.raises(error):
                featstore.Loader(g, device_cache=size, features=["x", "z"], strategy=featstore.Packed(mine, cache=0.1))
        options: dict[str, Any] = {"strategy": "packed", "pack": mine, "cache": 0, "features": ["x", "z"], **STATIC}
        options["device"] = device
        with make_loader(g, device_cache=139 * 100 + 138, **options) as loader:
            assert g.memory_report().get("device cache", 0) == (139 * 100 if device == "cpu" else 0)
            assert loader.stats()["device_cache"]["bytes"] == 139 * 100
        assert "device cache" not in g.memory_report()
        refuses(ValueError, "0 layouts", lambda: make_loader(g, device_cache=0.5, **{**options, "cache": None}))


def test_a_copied_pack_trains(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any], device: str) -> None:
    """With the labels that it carries, from every tier; damage to them is found, and no stale ones are kept."""
    mine = copied(pack, tmp_path)
    run(dataset, mine, epochs=0, cache=0.1, device_cache=0.05, disk="2.6x", **STATIC)
    there = tmp_path / "there"
    shutil.move(mine, there)
    with featstore.PackedGraph(there, memory="64MB") as g:
        with featstore.Loader(g, features=["x", "z"], device=device, strategy=featstore.Packed(policy="frequency")) as loader:
            found = {(epoch, batch.index): batch for epoch in range(2) for batch in loader}
            assert loader.stats()["hits"]["device"] > 0
        assert g.memory_report()["node data"] == 8 * N
        for number, (index, tensors, _) in enumerate(ondemand):
            assert torch.equal(found[number // 25, index].y.cpu(), tensors[2])
            assert torch.equal(found[number // 25, index].x.cpu(), tensors[3])
        with pytest.raises(KeyError, match="no node data 'train_idx'; there is 'y'"):
            _ = g.node_data["train_idx"]
        options: dict[str, Any] = {"policy": "frequency", "features": ["x", "z"], "labels": None, "device": device}
        with make_loader(g, strategy="packed", **options) as loader:
            assert next(iter(loader)).y is None
    file = next(there.glob("data-*"))
    found_damage = 0
    for _ in random_flips(file, 20, seed=1):
        try:
            with featstore.PackedGraph(there, memory="64MB") as g:
                assert torch.equal(g.node_data["y"][ondemand[0][1][1]], ondemand[0][1][2])
        except (featstore.CorruptionError, featstore.FormatError):
            found_damage += 1
    assert found_damage == 20
    before = file.read_bytes()
    other = featstore.open(dataset, memory="64MB")
    assert not is_carried(featstore.Pack(there), NodeData("y", other.node_data["y"], "another"))
    other.close()
    assert file.read_bytes() == before


@settings(max_examples=15)
@given(st.data())
def test_any_width_dtype_and_budget(tmp_path_factory: pytest.TempPathFactory, device: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    raw, seeds, size = any_graph(data, folder / "g", 60)
    host = data.draw(st.sampled_from([0, 0.01, 0.1, 0.5, 1.0]))
    on_device = data.draw(st.sampled_from([None, 0, 0.01, 0.2, 1.0]))
    share = data.draw(st.floats(0, 1.2))
    with (
        featstore.open(folder / "g") as g,
        featstore.open(folder / "g", memory=data.draw(st.sampled_from(["40MB", "8MB"]))) as tight,
    ):
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, seeds, size, labels=None) as loader:
            expected = {batch.index: raw[batch.input_ids] for batch in loader}
        with featstore.sample_offline(g, sampler, seeds, size, path=folder / "p", epochs=2) as pack:
            shutil.copytree(folder / "p", folder / "q")
            options = {"strategy": "packed", "labels": None, "cache": host, "device_cache": on_device, **STATIC}
            options["device"] = device
            with make_loader(g, pack=folder / "q", **options):
                most = layout_bytes(folder / "q")
            options["pack"] = pack
            disk = most
            try:
                make_loader(tight, disk=0, **options)
            except OSError as error:
                least = least_in(error)
                disk = max(least, int(least + share * (most - least)))
            with make_loader(tight, disk=disk, **options) as loader:
                rows = {batch.index: batch.x.to("cpu", copy=True) for batch in loader}
                seen = {index: x.view(torch.uint8).reshape(len(x), -1) for index, x in rows.items()}
                hits = loader.stats()["hits"]
            assert layout_bytes(folder / "p") <= disk
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[i], expected[i]) for i in seen)
    assert hits["base"] == 0
    event("disk cache used" if hits.get("disk_cache") else "no disk cache")
