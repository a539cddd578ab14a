"""Order of every commit: bytes are flushed before a file gets its name, names before a directory does, and all at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.pack.layout import LAYOUT_PREFIX, PARTIAL
from featstore.storage import builddir, extents
from featstore.storage.catalog import CATALOG_FILE
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.sections import SectionWriter
from featstore.topology.base import huge_bytes
from tests.storage.test_extents import make_reader, open_file, write_base


class Journal:
    """The files that are flushed so far, by inode, and which steps came too early; ``events`` are (what, path)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._flushed: set[int] = set()
        self._new_names: dict[int, set[str]] = {}  # of each directory, since it was flushed
        for name in ("fsync", "rename", "mkdir", "open"):
            patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, "_" + name)))
        patch.setattr(builddir, "_renameat2", self._wrapped(builddir._renameat2, self._exchange))

    @staticmethod
    def _wrapped(real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(*arguments)
            return real(*arguments, **options)

        return call

    def unflushed(self, folder: str | os.PathLike[str]) -> list[str]:
        """Names that are in a directory and may be lost."""
        return sorted(self._new_names.get(os.stat(folder).st_ino, set()) & set(os.listdir(folder)))

    def _names_change(self, path: Any) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        if ".runs" not in os.fspath(path):  # run files need not survive
            self._new_names.setdefault(os.stat(folder).st_ino, set()).add(name)

    def _open(self, path: Any, flags: int, *_: Any) -> None:
        if flags & os.O_CREAT and not os.path.lexists(path):
            self._names_change(path)

    def _mkdir(self, path: Any, *_: Any) -> None:
        if not os.path.lexists(path):
            self._names_change(path)

    def _fsync(self, fd: int) -> None:
        self.events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        inode = os.fstat(fd).st_ino
        self._flushed.add(inode)
        self._new_names.pop(inode, None)

    def _exchange(self, source: Any, target: Any, _: int) -> None:
        self._rename(source, target)

    def _rename(self, source: Any, target: Any) -> None:
        source, target = os.fspath(source), os.fspath(target)
        self.events.append(("rename", target))
        if ".runs" in source:
            return
        is_moved_aside = ".old-" in target  # it was whole before
        below = [] if is_moved_aside else [Path(source), *Path(source).rglob("*")]
        for path in below:
            if path.is_dir() and self.unflushed(path):
                self.wrong.append(f"{source} became {target} before the names in {path} were flushed")
            if path.is_file() and path.stat().st_size and path.stat().st_ino not in self._flushed:
                self.wrong.append(f"{source} became {target} before {path} was flushed")
        if target.endswith(CATALOG_FILE) and ".tmp-" not in target:  # the commit of a dataset that is there
            root = target.removesuffix(CATALOG_FILE).rstrip("/")
            if self.unflushed(root):
                self.wrong.append(f"the catalog was replaced before the names {self.unflushed(root)} were flushed")
        self._names_change(target)


@contextmanager
def journal(folder: Path) -> Iterator[Journal]:
    """Watch a commit below a directory; at its end nothing was too early, and nothing is left to flush."""
    with pytest.MonkeyPatch.context() as patch:
        watched = Journal(patch)
        yield watched
        assert watched.wrong == []
        assert [path for path in (folder, *folder.rglob("*")) if path.is_dir() and watched.unflushed(path)] == []
        assert {what for what, _ in watched.events} == {"fsync", "rename"}


def create(path: Path, small: SimpleNamespace, **options: Any) -> None:
    data = {"y": small.y, "train_idx": small.train_idx}
    featstore.OutOfCoreGraph.create(path, small.indptr, small.indices, {"x": small.x}, data, progress=False, **options).close()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_dataset(small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(builddir, "_renameat2", lambda *_: False)
    with journal(tmp_path):
        create(tmp_path / "g", small)
    with journal(tmp_path):
        create(tmp_path / "g", small, overwrite=True)


def test_a_saved_neighbour_cache(small: SimpleNamespace, tmp_path: Path) -> None:
    create(tmp_path / "g", small)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        for n_bytes in (8192, 16384):  # the second takes the place of the first
            with journal(tmp_path):
                g.cache_neighbors(huge_bytes(8 * small.num_nodes) + n_bytes, save=True)


def is_layout(path: str, pack: Path) -> bool:
    return Path(path).parent == pack and Path(path).name.startswith(LAYOUT_PREFIX)


@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_a_pack_and_its_layouts(small: SimpleNamespace, tmp_path: Path, policy: str) -> None:
    create(tmp_path / "g", small)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3])
        for overwrite in (False, True):
            with journal(tmp_path):
                path = tmp_path / "p"
                featstore.sample_offline(g, sampler, small.train_idx, 40, path=path, overwrite=overwrite, progress=False).close()
        with (
            journal(tmp_path) as watched,
            featstore.Loader(g, features="x", strategy=featstore.Packed(path, policy=policy, cache=0.1)),
        ):
            pass
    made = [(i, target) for i, (what, target) in enumerate(watched.events) if what == "rename" and is_layout(target, path)]
    assert len(made) == 1
    i, target = made[0]
    assert watched.events[i - 1] == ("fsync", f"{target}{PARTIAL}")
    # At once: the record that names the labels, which comes next, flushes this directory too, but may never be written.
    assert watched.events[i + 1] == ("fsync", str(path))
    assert watched.events[i + 2] == ("fsync", str(path / "pack.tmp"))


def test_sections(tmp_path: Path) -> None:
    with journal(tmp_path), SectionWriter(tmp_path / "s", "numbers") as writer:
        writer.append(np.arange(10))
        writer.finish(durable=True).close()


def test_extents_and_their_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint says what is on the device already, and has its name before the next one is made."""
    for name, value in (("CHECKPOINT_S", 0.0), ("CHECKPOINT_COST", 0.0), ("_STEP", 1)):
        monkeypatch.setattr(extents, name, value)
    rows = np.random.default_rng(0).integers(0, 256, (4000, 4096), dtype=np.uint8)
    record, reader = write_base(tmp_path, rows), make_reader()
    base = open_file(reader, tmp_path, record)
    batches = [np.arange(b, 4000, 5) for b in range(5)]
    made = ExtentMap(np.array([len(batch) for batch in batches]), 4096)
    with journal(tmp_path) as watched, ExtentWriter(tmp_path / "e.rows", made, resumable=True) as writer:
        writer.fill(base, lambda b: batches[b], 16 << 20)
        writer.finish(durable=True)
    base.close()
    reader.close()
    checkpoints = [i for i, event in enumerate(watched.events) if event == ("rename", str(tmp_path / "e.rows.progress"))]
    assert len(checkpoints) > 2
    for before, i in zip([0, *checkpoints], checkpoints, strict=False):
        assert ("fsync", str(tmp_path / "e.rows.tmp")) in watched.events[before:i]
        assert watched.events[i + 1] == ("fsync", str(tmp_path))
