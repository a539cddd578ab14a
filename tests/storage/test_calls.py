"""Removing folders: with all in them, past what cannot go, never through a link. Other calls: test_format.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from featstore.storage import calls
from featstore.storage.calls import remove_tree


def tree(root: Path) -> Path:
    """Make a folder with files, folders in folders, and links."""
    deep = root / "tree" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (root / "outside").mkdir()
    (root / "outside" / "kept").write_text("kept")
    for folder in (root / "tree", deep.parent, deep):
        (folder / "file").write_text("x")
        (folder / "link").symlink_to(root / "outside")
        (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(deep / "fifo")
    return root / "tree"


def test_a_folder_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    remove_tree(os.fspath(tree(tmp_path)))
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (tmp_path / "outside" / "kept").read_text() == "kept"
    assert os.listdir("/proc/self/fd") == before


def test_what_cannot_go_stays_and_all_else_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tree(tmp_path), os.unlink

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        if name == "fifo":
            raise OSError(errno.EBUSY, "busy", name)
        real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(calls.os, "unlink", unlink)
        with pytest.raises(OSError, match="busy") as caught:
            remove_tree(os.fspath(path))
        assert caught.value.filename == os.fspath(path / "a" / "b" / "c" / "fifo")
        remove_tree(os.fspath(path), quiet=True)
        left = [os.fspath(each.relative_to(path)) for each in sorted(path.rglob("*"))]
        assert left == ["a", "a/b", "a/b/c", "a/b/c/fifo"]
    remove_tree(os.fspath(path))
    assert not path.exists()


def test_a_link_or_file_in_its_place_stays(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    for name, error in (("link", NotADirectoryError), ("outside/kept", NotADirectoryError), ("none", FileNotFoundError)):
        with pytest.raises(error):
            remove_tree(os.fspath(tmp_path / name))
        remove_tree(os.fspath(tmp_path / name), quiet=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "outside" / "kept").read_text() == "kept"
