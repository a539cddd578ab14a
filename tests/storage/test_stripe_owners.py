"""Owner of a stripe, which removes it: the dataset made with it, in its place; no copy, move, snapshot, hard link or mount."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from featstore.storage.update import Update
from tests.graph.test_convert import make
from tests.storage.test_stripes import IN_CHUNKS, drives, held, root, stripes, to, whole

__all__ = ["drives", "root"]  # fixtures


def replaced(path: Path) -> None:
    make(path).close()


def converted(path: Path) -> None:
    assert to(path, "csc")


TAKERS = [pytest.param(replaced, id="replace"), pytest.param(converted, id="convert")]


def leaves(taker: Any, path: Path, drives: list[Path]) -> None:
    """Convert or replace a dataset whose stripes are not its own: they stay as they are, and a warning names each."""
    before = {file: file.read_bytes() for drive in drives for file in drive.glob("*/*")}
    with pytest.warns(UserWarning, match="stays: it was not made with the link .* remove it yourself") as caught:
        taker(path)
    assert {str(each.message).split()[0] for each in caught} == {
        str(drive / name) for drive in drives for name in os.listdir(drive)
    }
    assert {file: file.read_bytes() for drive in drives for file in drive.glob("*/*")} == before
    assert stripes(path) == set()
    whole(path)


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("how", ["cp -a", "mv", "hard links", "mv, and cp -a back", "mv, and hard links back"])
def test_every_copy_leaves_the_stripes_to_the_original(root, tmp_path, drives, how, taker) -> None:
    other = tmp_path / "other"
    if how.startswith("mv"):
        root.rename(other)
    if how == "mv":
        leaves(taker, other, drives)
        return
    source, target = (other, root) if how.startswith("mv") else (root, other)
    if "hard links" in how:
        shutil.copytree(source, target, symlinks=True, copy_function=os.link)
        for link in target.glob("featstore-stripe-*"):  # copytree makes these anew
            link.unlink()
            os.link(source / link.name, link, follow_symlinks=False)
    else:
        shutil.copytree(source, target, symlinks=True)
    n_edges = whole(source)
    leaves(taker, target, drives)
    assert stripes(source) == held(drives)
    assert whole(source) == n_edges


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("same", ["inode", "inode and place", "inode and time"])
def test_a_copy_with_the_same_inode_number_leaves_the_stripes(tmp_path, drives, monkeypatch, same, taker) -> None:
    """As on a fresh file system of another drive; put where the original was; in a snapshot that is mounted elsewhere."""
    root, copy, lstat = tmp_path / "g", tmp_path / "copy", os.lstat
    original = root

    def same_link(path: Any, **options: Any) -> Any:
        found = lstat(path, **options)
        if "featstore-stripe-" not in os.path.basename(os.fspath(path)) or options:
            return found
        values = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**{**values, "st_ino": 16, **({"st_ctime_ns": 5} if same == "inode and time" else {})})

    monkeypatch.setattr(os, "lstat", same_link)
    make(root, **IN_CHUNKS, stripes=drives).close()
    n_edges = whole(root)
    if same == "inode and place":
        root.rename(tmp_path / "original")
        copy, original = root, tmp_path / "original"
    shutil.copytree(original, copy, symlinks=True)
    leaves(taker, copy, drives)
    assert whole(original) == n_edges
    if original == root:
        taker(root)
        assert held(drives) == set()


def test_a_symbolic_link_to_a_dataset_is_the_dataset(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    (tmp_path / "link").symlink_to(root)
    assert to(tmp_path / "link", "csc")
    assert held(drives) == set()


def test_copied_stripes_are_left(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    """The drive was copied, too, and the copied dataset's links led there."""
    (tmp_path / "copy").mkdir()
    copies = [shutil.copytree(drive, tmp_path / "copy" / drive.name) for drive in drives]
    copy = shutil.copytree(root, tmp_path / "copy" / "g", symlinks=True)
    for link in copy.glob("featstore-stripe-*"):
        target = tmp_path / "copy" / os.path.relpath(os.readlink(link), tmp_path)
        link.unlink()
        link.symlink_to(target)
    n_edges = whole(copy)
    leaves(converted, copy, [Path(each) for each in copies])
    assert whole(root) == n_edges
    assert held(drives) == stripes(root)


def test_a_stripe_that_is_mounted_in_the_dataset_is_left(root, tmp_path, drives, monkeypatch) -> None:
    """A mount point cannot be renamed: EBUSY."""
    mounted, rename = tmp_path / "mounted", os.rename
    shutil.copytree(root, mounted)
    before = {file: file.read_bytes() for file in mounted.glob("featstore-stripe-*/*")}
    assert len(before) == 6

    def busy(source: Any, target: Any) -> None:
        if os.path.basename(source).startswith("featstore-stripe-"):
            raise OSError(16, "busy", source)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", busy)
        assert to(mounted, "csc")
        assert {file: file.read_bytes() for file in mounted.glob("featstore-stripe-*/*")} == before
    with Update(mounted):
        pass
    assert not list(mounted.glob("featstore-stripe-*"))
    whole(mounted)


def test_a_copy_reads_stripes_and_has_its_own(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    copy, before = tmp_path / "copy", held(drives)
    shutil.copytree(root, copy, symlinks=True)
    n_edges = whole(copy)
    with pytest.warns(UserWarning, match="stays: it was not made with the link"):
        assert to(copy, "chunked", chunk_bytes=4096, stripes=drives[:1])  # the same generation and names as the other's next
    assert held(drives) == before | stripes(copy)
    assert to(root, "chunked", chunk_bytes=4096, stripes=drives[:1])
    assert held(drives) == stripes(root) | stripes(copy)
    assert whole(copy) == whole(root) == n_edges
    assert to(copy, "csc")
    assert held(drives) == stripes(root)
    whole(root)


def test_a_copy_that_follows_links_is_whole(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    n_edges = whole(root)
    make(root).close()
    assert held(drives) == set()
    assert whole(copy) == n_edges
    assert to(copy, "csc")
    assert stripes(copy) == set()
    whole(copy)


def test_only_its_own_stripes_are_removed(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    """A link that leads to another directory, or to a directory with no mark of it, costs that directory nothing."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    name = f"featstore-stripe-{7:032x}"
    (drives[0] / name).mkdir()
    (drives[0] / name / "thesis").touch()
    for target in (tmp_path / "precious", drives[0] / name):
        (root / name).symlink_to(target)
        with pytest.warns(UserWarning, match="stays"), Update(root):
            pass
        assert not os.path.lexists(root / name)
        assert os.listdir(target) == ["thesis"]
    whole(root)
