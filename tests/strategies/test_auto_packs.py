"""``strategy="auto"`` with a pack: its batches whatever is taken, layouts within the disk, rows on the device."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.estimate.cost import TIE, Estimate
from featstore.estimate.sharing import count_static, merged_reads, shared_there
from featstore.pack.layout import LayoutOptions
from featstore.pack.makelayout import layout_sizes
from featstore.storage.drive import DriveSpeed
from featstore.strategies import estimates as estimates_module
from featstore.strategies.auto import _taken
from tests.estimate.test_cost import SKETCH
from tests.strategies.test_auto import data, loader, steer
from tests.support.loaders import CANDIDATES, make_loader
from tests.support.loaders import ESTIMATED as STRATEGIES
from tests.support.pinned import pin_machine

__all__ = ["data"]  # a fixture


@pytest.fixture
def frozen(data: Path, tmp_path: Path) -> Path:
    with featstore.open(data, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        seeds = g.node_data["train_idx"]
        featstore.sample_offline(g, sampler, seeds, 100, epochs=2, path=tmp_path / "pack", progress=False).close()
    return tmp_path / "pack"


@pytest.mark.parametrize(("strategy", "policy"), CANDIDATES)
def test_a_packs_batches_are_the_same_whatever_is_taken(
    data: Path, frozen: Path, strategy: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pack= samples are frozen whatever the strategy, and packing them is one of the choices."""
    steer(monkeypatch, strategy, policy)
    with featstore.open(data, memory="64MiB") as g, featstore.Pack(frozen) as pack:
        options: dict[str, Any] = {"features": ["x", "z"], "cache": 0.1, "shuffle": True, "seed": 3, "epochs": 3}
        with make_loader(g, pack=frozen, strategy="auto", **options) as ours:
            for epoch in range(3):
                seen = []
                for batch in ours:
                    expected = pack.batch(epoch % 2 * 10 + batch.index, g.pool)
                    assert torch.equal(batch.input_ids, expected.input_ids)
                    for mine, theirs in zip(batch.blocks, expected.blocks, strict=True):
                        assert torch.equal(mine.src, theirs.src)
                        assert torch.equal(mine.dst, theirs.dst)
                    for name in ("x", "z"):
                        assert torch.equal(batch.features[name], g.features[name].take(batch.input_ids))
                    assert torch.equal(batch.y, g.node_data["y"][batch.seeds])
                    seen.append(batch.index)
                assert sorted(seen) == list(range(10))
                assert seen != list(range(10)) or strategy == "packed"  # shuffled; a plan's superbatch keeps its order
            taken = ours.stats()["auto"]["taken"]
            assert (taken["strategy"], taken["policy"]) == (strategy, policy)


def test_packed_is_taken_only_with_a_pack_and_where_it_is_least(
    data: Path, frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_machine(monkeypatch, SKETCH)
    slow = DriveSpeed(100.0, 1e6, 1e9)  # reading the base costs seconds, and extents hold a part of it
    with featstore.open(data, memory="64MiB") as g:
        with loader(g, "auto", cache=0.1, epochs=10**6) as auto:
            estimates = {(e["strategy"], e["policy"]): e for e in auto.stats()["auto"]["estimates"]}
            assert auto.stats()["auto"]["taken"]["strategy"] != "packed"
            assert "needs pack=" in estimates["packed", "belady"]["impossible"]
        monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: slow)
        first: list[dict[str, Any]] = []
        for epochs in (1, 10**6):
            with featstore.Loader(g, strategy=featstore.Auto(pack=frozen, cache=0.1, epochs=epochs)) as auto:
                found = auto.stats()["auto"]
                first = first or found["estimates"]
                possible = [each for each in found["estimates"] if not each["impossible"]]
                assert {each["strategy"] for each in possible} == set(STRATEGIES)
                assert found["taken"]["total_s"] <= (1 + TIE) * min(each["total_s"] for each in possible)
        assert found["taken"]["strategy"] == "packed"  # many epochs: what packing costs is spread over them
        with featstore.Loader(g, strategy=featstore.Auto(pack=frozen, cache=0.1, epochs=1)) as auto:
            there = {(e["strategy"], e["policy"]): e for e in auto.stats()["auto"]["estimates"]}
        policy = found["taken"]["policy"]
        before = next(e for e in first if (e["strategy"], e["policy"]) == ("packed", policy))
        assert there["packed", policy]["once_s"] < before["once_s"]  # its extents are there now


def packs_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive on which extents are by far the best."""
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: DriveSpeed(100.0, 1e6, 1e9))


@pytest.mark.parametrize("policy", ["frequency", "belady"])
def test_what_fits_the_disk_is_what_can_be_made(
    data: Path, frozen: Path, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every disk: a layout that is called possible is made within it, and one that can be made is not called impossible,
    but for a few hundredths that are left in reserve."""
    packs_slow(monkeypatch)
    options: dict[str, Any] = {"pack": frozen, "features": ["x", "z"], "cache": 0.1}

    def remove() -> None:
        for folder in frozen.glob("layout-*"):
            shutil.rmtree(folder)
        for file in frozen.glob("data-*"):
            file.unlink()

    def made(disk: int | None, **more: Any) -> dict[str, Any]:
        with featstore.open(data, memory="64MiB") as g, make_loader(g, disk=disk, **options, **more) as loader:
            assert sum(1 for _ in loader) == 10
            return loader.stats()

    made(None, strategy="packed", policy=policy)
    most = sum(path.stat().st_size for pattern in ("layout-*/*", "data-*") for path in frozen.glob(pattern))
    seen = set()
    for share in (0.3, 0.7, 0.98, 1.01, 2.0):
        remove()
        disk = int(share * most)
        try:
            made(int(0.96 * disk), strategy="packed", policy=policy)
            can = True
        except OSError as error:
            assert error.errno == errno.ENOSPC
            can = False
        remove()
        with monkeypatch.context() as patched:
            possible = []

            def choice(estimates: list[Estimate], epochs: int, possible: list[Estimate] = possible) -> tuple[Estimate, str]:
                possible += [each for each in estimates if not each.impossible]
                wanted = [each for each in possible if (each.strategy, each.policy) == ("packed", policy)]
                return (wanted or possible)[0], "steered"

            patched.setattr(estimates_module, "cheapest", choice)
            stats = made(disk, strategy="auto", epochs=10**6)
        taken = stats["auto"]["taken"]
        found = (taken["strategy"], taken["policy"]) == ("packed", policy)
        assert found or not can
        if found:
            actual = sum(path.stat().st_size for path in frozen.glob("layout-*/*"))
            assert actual <= disk
            assert taken["disk_bytes"] == pytest.approx(actual, rel=0.2)
            seen.add("disk_cache" in stats["hits"])
        else:
            reason = next(
                e["impossible"] for e in stats["auto"]["estimates"] if (e["strategy"], e["policy"]) == ("packed", policy)
            )
            assert "disk" in reason
            seen.add(None)
    assert seen == ({None, True, False} if policy == "frequency" else {None, False})


@pytest.mark.parametrize("policy", ["frequency", "belady"])
def test_a_layout_that_is_there_is_judged_by_what_it_takes(
    data: Path, frozen: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """If that is too much, a smaller one is judged, which a static policy has."""
    packs_slow(monkeypatch)
    options: dict[str, Any] = {"pack": frozen, "features": ["x"], "cache": 0.1}
    with featstore.open(data, memory="64MiB") as g:
        make_loader(g, strategy="packed", policy=policy, **options).close()
        n_bytes = sum(path.stat().st_size for path in frozen.glob("layout-*/*"))
        for disk, fits in ((n_bytes, True), (n_bytes - 1, False)):
            with make_loader(g, strategy="auto", epochs=5, disk=disk, **options) as auto:
                estimates = {(e["strategy"], e["policy"]): e for e in auto.stats()["auto"]["estimates"]}
            found = estimates["packed", policy]
            if fits or policy == "belady":
                assert found["disk_bytes"] == n_bytes
                assert found["impossible"] == "" or not fits
                assert ("layout that is there takes" in found["impossible"]) == (not fits)
            else:
                assert found["impossible"] == ""
                assert found["disk_bytes"] < n_bytes


def test_what_is_counted_before_is_what_is_read(data: Path, frozen: Path) -> None:
    """Rows, reads and bytes of shared rows, counted from samples, from the layout's tables, and by the reader."""
    widths = [160, 12]
    with featstore.open(data, memory="64MiB") as g, featstore.Pack(frozen) as pack:
        options = LayoutOptions(("x", "z"), "frequency", 300, 0)
        disk, gap = 1_900_000, 8192
        counted = count_static(pack, layout_sizes(options, widths, g.budget), pack.counts(), widths, gap, g.budget, disk)
        assert counted.length > 1
        given: dict[str, Any] = {"pack": pack, "features": ["x", "z"], "cache": 0.1, "labels": None, "shuffle": False}
        with make_loader(g, strategy="packed", policy="frequency", disk=disk, **given) as loader:
            folder = next(frozen.glob("layout-*"))
            actual = sum(path.stat().st_size for path in folder.iterdir())
            there = shared_there(str(folder), pack, widths, gap, actual)
            for name in ("length", "packed", "reads", "n_bytes", "rows"):
                assert getattr(there, name) == getattr(counted, name), name
            assert actual <= counted.disk_bytes <= actual + 20_000
            assert sum(1 for _ in loader) == 10
            hits = loader.stats()["hits"]
        assert hits["packed"] // 2 == pytest.approx(counted.packed + 300, rel=0.2)


def test_no_cache_is_none_for_a_pack_too(frozen: Path) -> None:
    """Whose own default would be as many rows as its layout has, or as fit."""
    auto = featstore.Auto(pack=frozen, cache=None)
    with featstore.Pack(frozen) as pack:
        for strategy in ("packed", "ondemand"):
            assert auto._chosen(_taken(strategy, "frequency", "said so"), None, pack).cache == 0


def test_without_memory_to_estimate_a_layout_that_is_there_is_run(
    data: Path, frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise featstore.BudgetError("none is left")

    monkeypatch.setattr("featstore.strategies.auto.observe", no_memory)
    options: dict[str, Any] = {"pack": frozen, "features": ["x"], "cache": 0.1, "disk": "20x"}
    with featstore.open(data, memory="64MiB") as g:

        def taken(**more: Any) -> tuple[str, str]:
            with pytest.warns(featstore.PerformanceWarning, match="'auto': no memory to estimate: none is left"):
                auto = make_loader(g, strategy="auto", **{**options, **more})
            with auto:
                assert sum(1 for _ in auto) == 10
                found = auto.stats()["auto"]
            assert "none is left" in found["reason"]
            return found["taken"]["strategy"], found["taken"]["policy"]

        assert taken() == ("ondemand", "frequency")
        assert taken(cache=0) == ("ondemand", "none")
        assert taken(device_cache=0.1) == ("packed", "frequency")
        make_loader(g, strategy="packed", **options).close()
        assert taken() == ("packed", "belady")
        assert taken(disk=1000) == ("ondemand", "frequency")


@given(st.sets(st.integers(0, 3000), max_size=60), st.sampled_from([1, 7, 100, 512, 4096, 5000, 9000]), st.integers(0, 5))
def test_merged_reads(places: set[int], row_bytes: int, gap: int) -> None:
    rows = np.array(sorted(places), np.int64)
    pages = sorted({byte // 4096 for row in places for byte in (row * row_bytes, (row + 1) * row_bytes - 1)})
    wanted = sorted({page for row in places for page in range(row * row_bytes // 4096, ((row + 1) * row_bytes - 1) // 4096 + 1)})
    assert set(pages) <= set(wanted)
    reads: list[list[int]] = []
    for page in wanted:
        if reads and page - reads[-1][-1] - 1 <= gap:
            reads[-1].append(page)
        else:
            reads.append([page])
    found = merged_reads(rows, row_bytes, gap * 4096)
    assert found == (len(reads), sum(4096 * (run[-1] - run[0] + 1) for run in reads))


@pytest.mark.parametrize("policy", ["frequency", "belady"])
def test_a_device_cache_is_kept_whatever_is_taken(data: Path, frozen: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"pack": frozen, "features": ["x", "z"], "cache": 0.1, "device_cache": 0.05, "epochs": 2}
    with featstore.open(data, memory="64MiB") as g, featstore.Pack(frozen) as pack:
        with make_loader(g, strategy="auto", **options) as free:
            found = free.stats()["auto"]
            assert found["taken"]["strategy"] == "packed"
            for each in found["estimates"]:
                assert each["impossible"] == ("" if each["strategy"] == "packed" else "has no rows on the device")
        steer(monkeypatch, "packed", policy)
        with make_loader(g, strategy="auto", **options) as ours:
            for epoch in range(2):
                for batch in ours:
                    assert torch.equal(batch.input_ids, pack.batch(epoch * 10 + batch.index, g.pool).input_ids)
                    for name in ("x", "z"):
                        assert torch.equal(batch.features[name], g.features[name].take(batch.input_ids))
            hits = ours.stats()["hits"]
        hottest = np.argsort(-pack.counts(), kind="stable")[:150]
        assert hits["device"] == 2 * sum(int(np.isin(pack.ids(b), hottest).sum()) for b in range(len(pack)))
