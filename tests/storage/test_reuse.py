"""Spare run files: written over, counted in the disk budget, gone where it is short and when the loader is."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import featstore
from featstore.storage.reuse import FileReuse
from featstore.storage.rundir import DiskQuota
from tests.strategies.test_superbatch import dataset, ondemand
from tests.support.loaders import make_loader

__all__ = ["dataset", "ondemand"]


def files(folder: Path) -> dict[str, int]:
    """The inode of each file of extents."""
    found = {}
    for path in folder.rglob("*"):
        if path.name.startswith(("extents-", "spare-")) and ".sums" not in path.name:  # nor their temporary ones
            with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                found[path.name] = path.stat().st_ino
    return found


def make(path: Path, n_bytes: int) -> str:
    path.write_bytes(bytes(n_bytes))
    return str(path)


def test_a_spare_is_the_nearest_in_size_and_keeps_its_blocks(tmp_path: Path) -> None:
    reuse, disk = FileReuse(tmp_path / "runs"), DiskQuota(10_000)
    reuse.use(disk)
    inodes = {}
    for n_bytes in (1000, 5000, 3000):
        disk.take(n_bytes, "a")
        path = make(tmp_path / "old", n_bytes)
        inodes[n_bytes] = os.stat(path).st_ino
        reuse.keep(path, n_bytes)
        assert not os.path.exists(path)
    assert reuse.n_bytes == disk.used == 9000
    assert reuse.take(4500, str(tmp_path / "new"))
    assert os.stat(tmp_path / "new").st_ino == inodes[5000]
    assert disk.used == reuse.n_bytes == 4000
    reuse.close()
    assert disk.used == 0
    assert not os.path.exists(tmp_path / "runs")
    assert not reuse.take(1, str(tmp_path / "none"))
    disk.take(7, "a")
    reuse.keep(make(tmp_path / "late", 7), 7)  # of an epoch that outlives its loader
    assert disk.used == 0
    assert not os.path.exists(tmp_path / "late")
    assert not os.path.exists(tmp_path / "runs")


def test_a_short_disk_budget_takes_spares_before_it_fails(tmp_path: Path) -> None:
    reuse, disk = FileReuse(tmp_path / "runs"), DiskQuota(10_000)
    reuse.use(disk)
    disk.take(6000, "a")
    reuse.keep(make(tmp_path / "old", 6000), 6000)
    later = DiskQuota(10_000)
    reuse.use(later)  # the next run: what is kept counts there
    assert later.used == 6000
    later.take(4000, "b")
    assert reuse.n_bytes == 6000
    later.take(1, "b")
    assert reuse.n_bytes == 0
    assert later.used == 4001
    assert not list((tmp_path / "runs").rglob("spare-*"))
    with pytest.raises(OSError, match="disk budget") as caught:
        later.take(6000, "b")
    assert caught.value.errno == 28


def test_without_a_place_to_keep_it_a_file_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"not a directory")
    reuse, disk = FileReuse(tmp_path / "runs"), DiskQuota(None)
    reuse.use(disk)
    disk.take(5, "a")
    reuse.keep(make(tmp_path / "old", 5), 5)
    assert disk.used == 0
    assert not os.path.exists(tmp_path / "old")
    assert reuse.n_bytes == 0


def test_extents_are_written_over_from_superbatch_to_superbatch_and_epoch_to_epoch(dataset: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"strategy": "streamed", "length": 4, "cache": 0.05, "run_dir": runs}
        loader = make_loader(g, sampler, g.node_data["train_idx"], batch_size=40, prefetch=0, **options)
        seen = []
        for _ in range(2):
            inodes: set[int] = set()
            for _batch in loader:
                inodes |= set(files(runs).values())
            seen.append(inodes)
        # Seven superbatches an epoch: two files at once, one more while the third is made before the first is passed.
        assert len(seen[0] | seen[1]) <= 3
        assert set(files(runs))
        assert all(name.startswith("spare-") for name in files(runs))
        del loader, _batch
        gc.collect()
        assert not os.path.exists(runs)


def test_files_that_somebody_removed_are_not_missed(tmp_path: Path) -> None:
    reuse, disk = FileReuse(tmp_path / "runs"), DiskQuota(10_000)
    reuse.use(disk)
    disk.take(3000, "a")
    reuse.keep(make(tmp_path / "old", 3000), 3000)
    shutil.rmtree(tmp_path / "runs")
    assert not reuse.take(3000, str(tmp_path / "new"))
    assert disk.used == reuse.n_bytes == 0
    disk.take(5, "a")
    reuse.keep(str(tmp_path / "gone"), 5)
    assert disk.used == 0
    reuse.close()


def test_an_epoch_ends_although_its_run_files_were_removed(dataset: Path, ondemand: list[Any], tmp_path: Path) -> None:
    """All is packed by then, and what is open is read."""
    runs = tmp_path / "runs"
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"strategy": "streamed", "length": 1000, "cache": 0.05, "run_dir": runs, "seed": 3}
        with make_loader(g, sampler, g.node_data["train_idx"], batch_size=40, **options) as loader:
            indices = []
            for batch in loader:
                indices.append(batch.index)
                if len(indices) == 1:
                    shutil.rmtree(runs)
            assert indices == [index for index, *_ in ondemand[: len(indices)]]
            assert len(indices) == len(loader)
            assert loader.stats()["batches"] == len(loader)
