"""The directory in which a dataset is built: whole or not there, whatever fails; the one that it replaces stays until then."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import BusyError
from featstore.storage import builddir
from featstore.storage.builddir import BUILD_STATE, BuildDirectory, restore_moved, sweep_builds
from featstore.storage.catalog import read_catalog
from tests.support.making import create
from tests.support.rowfiles import snapshot

EMPTY = np.zeros(1, np.int64), np.zeros(0, np.int64)


class FailingBlocks:
    """Blocks that fail after the first."""

    def __init__(self, kind: type[BaseException] = RuntimeError) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[np.ndarray]:
        yield np.zeros((1, 2))
        raise self.kind("no more")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_failed_create_leaves_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="no more"):
        create(tmp_path / "g", np.zeros(3, np.int64), [], {"x": ((2, 2), "float64", FailingBlocks(kind))})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("letter", "n_bytes"), [("n", 1), ("é", 2)])
def test_names_and_paths_that_are_too_long_are_refused(tmp_path: Path, letter: str, n_bytes: int) -> None:
    """The longest name that can be built is built; a longer one is refused with the bytes that it may have."""
    most = os.pathconf(tmp_path, "PC_NAME_MAX") - 37
    name = letter * (most // n_bytes)
    create(tmp_path / name, *EMPTY)
    create(tmp_path / name, *EMPTY, overwrite=True)
    assert os.listdir(tmp_path) == [name]
    for longer in (name + letter, 300 * letter):
        path, size = tmp_path / longer, len(longer) * n_bytes
        words = f"too long for a dataset: its name has {size} bytes, and may have {most}: give a shorter one"
        with pytest.raises(OSError, match=words) as caught:
            create(path, *EMPTY)
        assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(path))
    with pytest.raises(OSError, match="one of the names has 300 bytes, and may have 255"):
        create(tmp_path / ("d" * 300) / "g", *EMPTY)
    for below in (3804, 5000):
        path = Path(str(tmp_path) + "/d" * ((below - len(str(tmp_path))) // 2))
        with pytest.raises(OSError, match=f"the path has {len(str(path))} bytes, and may have 3802: give") as caught:
            create(path, *EMPTY)
        assert caught.value.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == [name]


def test_overwrite_keeps_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    create(tmp_path / "g", np.zeros(3, np.int64), [], {"x": np.ones((2, 2))})
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        create(tmp_path / "g", *EMPTY)
    assert caught.value.filename == str(tmp_path / "g")
    with pytest.raises(RuntimeError, match="no more"):
        create(tmp_path / "g", np.zeros(3, np.int64), [], {"x": ((2, 2), "float64", FailingBlocks())}, overwrite=True)
    assert snapshot(tmp_path) == before
    create(tmp_path / "g", np.zeros(4, np.int64), [], overwrite=True)
    assert read_catalog(tmp_path / "g").num_nodes == 3
    assert os.listdir(tmp_path) == ["g"]


@pytest.mark.parametrize("exchange", [True, False])
def test_every_failing_call_of_an_overwrite_keeps_the_old_one(tmp_path: Path, exchange: bool) -> None:
    """Fail the k-th fsync, rename or directory exchange until the run succeeds; also where the kernel cannot exchange."""
    create(tmp_path / "g", np.zeros(3, np.int64), [], {"x": np.ones((2, 2))})
    before = snapshot(tmp_path)
    real = {name: getattr(os, name) for name in ("fsync", "rename", "pwrite")}
    real_exchange = builddir._renameat2
    k, failed = 0, True
    while failed:
        k += 1
        count = 0

        def step(k: int = k) -> None:
            nonlocal count
            count += 1
            if count == k:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def wrap(name: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                step()
                return real[name](*arguments)

            return call

        def exchange_or_not(*arguments: Any) -> bool:
            step()
            return exchange and real_exchange(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            for name in real:
                patch.setattr(os, name, wrap(name))
            patch.setattr(builddir, "_renameat2", exchange_or_not)
            try:
                create(tmp_path / "g", np.zeros(6, np.int64), [], {"x": np.zeros((5, 2))}, overwrite=True)
                failed = False
            except OSError as error:
                caught = error
        if failed:
            assert caught.errno == errno.EIO
            assert snapshot(tmp_path) == before, k
    assert k > 30
    assert read_catalog(tmp_path / "g").num_nodes == 5
    assert os.listdir(tmp_path) == ["g"]


def test_only_datasets_and_empty_directories_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty", *EMPTY)
    assert read_catalog(tmp_path / "empty").num_nodes == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name, what in {"mine": "not a dataset", "file": "not a dataset", "link": "is a symbolic link, so"}.items():
        with pytest.raises(FileExistsError, match=what):
            create(tmp_path / name, *EMPTY, overwrite=True)
    with pytest.raises(FileNotFoundError):
        create(tmp_path / "absent" / "g", *EMPTY)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link", "mine"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_two_builders_of_one_place(tmp_path: Path) -> None:
    with BuildDirectory(tmp_path / "g"), pytest.raises(BusyError):
        create(tmp_path / "g", *EMPTY)
    create(tmp_path / "g", *EMPTY)
    with BuildDirectory(tmp_path / "g", overwrite=True), pytest.raises(BusyError):
        create(tmp_path / "g", *EMPTY, overwrite=True)
    assert os.listdir(tmp_path) == ["g"]


def test_the_slower_of_two_builders_finds_the_place_taken(tmp_path: Path) -> None:
    with BuildDirectory(tmp_path / "g") as build:
        (tmp_path / "g").mkdir()
        (tmp_path / "g" / "x").touch()
        with pytest.raises(FileExistsError, match="meanwhile"):
            build.commit()
    assert os.listdir(tmp_path) == ["g"]


def test_what_dead_builders_left_is_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    dead = tmp_path / f"g.tmp-{'0' * 32}"
    dead.mkdir()
    (dead / "x.rows").touch()
    similar = [f"g.tmp-{'0' * 31}", f"h.tmp-{'0' * 32}", f"gg.tmp-{'0' * 32}", "g.tmp"]
    for name in similar:
        (tmp_path / name).mkdir()
    create(tmp_path / "g", *EMPTY)
    assert sorted(os.listdir(tmp_path)) == sorted(["g", *similar])


def test_a_dataset_that_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    """A builder died between the two renames that stand in for an exchange."""
    create(tmp_path / "g", np.zeros(3, np.int64), [])
    before = snapshot(tmp_path / "g")
    (tmp_path / "g").rename(tmp_path / f"g.old-{'1' * 32}")
    assert restore_moved(str(tmp_path / "g"))
    assert snapshot(tmp_path / "g") == before
    assert not restore_moved(str(tmp_path / "g"))
    shutil.copytree(tmp_path / "g", tmp_path / f"g.old-{'2' * 32}")
    sweep_builds(str(tmp_path / "g"))  # the new one is there, so the old one is garbage
    assert os.listdir(tmp_path) == ["g"]


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (RuntimeError(), False),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (KeyboardInterrupt(), True),
        (MemoryError(), True),
    ],
)
def test_a_build_with_a_state_is_resumed(tmp_path: Path, error: BaseException, stays: bool) -> None:
    """By the same digest, unless an error ended it; another builder removes it."""
    digest = "0" * 32

    def begin(resume: str) -> None:
        with pytest.raises(type(error)), BuildDirectory(tmp_path / "g", resume=resume) as build:
            assert build.path == f"{tmp_path / 'g'}.tmp-{resume}"
            assert Path(build.path, "x").exists() == (resume == digest and is_there)
            Path(build.path, "x").touch()
            Path(build.path, BUILD_STATE).touch()
            raise error

    is_there = False
    begin(digest)
    assert os.listdir(tmp_path) == [f"g.tmp-{digest}"] * stays
    is_there = stays
    begin(digest)
    begin("1" * 32)
    assert os.listdir(tmp_path) == [f"g.tmp-{'1' * 32}"] * stays
    create(tmp_path / "g", *EMPTY)
    assert os.listdir(tmp_path) == ["g"]


def test_what_has_no_state_is_not_resumed(tmp_path: Path) -> None:
    """It may be the dataset that the last builder of the same inputs replaced, which died before it was removed."""
    create(tmp_path / "g", *EMPTY)
    (tmp_path / "g").rename(tmp_path / f"g.tmp-{'0' * 32}")
    with BuildDirectory(tmp_path / "g", resume="0" * 32) as build:
        assert not Path(build.path, "catalog.lmdb").exists()
    create(tmp_path / "g", *EMPTY)
    Path(tmp_path / "g", BUILD_STATE).touch()  # of a builder that died between its commit and the removal
    with BuildDirectory(tmp_path / "g", overwrite=True, resume="0" * 32) as build:
        assert not (tmp_path / "g" / BUILD_STATE).exists()
        create(Path(build.path) / "new", *EMPTY)
    assert os.listdir(tmp_path) == ["g"]


def test_a_build_under_way_is_not_resumed(tmp_path: Path) -> None:
    with BuildDirectory(tmp_path / "g", resume="0" * 32) as build:
        Path(build.path, BUILD_STATE).touch()
        with pytest.raises(BusyError, match="building it"):
            BuildDirectory(tmp_path / "g", resume="0" * 32)
