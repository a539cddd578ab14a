"""A model of what a power cut may leave: files and directories in memory, changed by recorded calls, not all of them durable.

The model promises no more than POSIX does. Bytes of a file are durable once the file is flushed, and names in a directory once
the directory is. Until then each block of 4 KiB, each change of a size and each change of a name may be lost or not, and none
depends on another: a drive writes in any order. Two things are not torn: a rename, with both of its names, and changes of one
name, which happen in their order.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from featstore.testing.faults import Record
from tests.campaigns.operations import own_stripes

__all__ = ["CHOICES", "Journal"]

BLOCK = 4096

# Which changes that are not durable happened: of names, of bytes.
CHOICES: dict[str, tuple[float, float]] = {
    "nothing": (0, 0),
    "names": (1, 0),
    "bytes": (0, 1),
    "everything": (1, 1),
    "some": (0.5, 0.5),
    "most names": (0.9, 0.3),
}


@dataclass(eq=False)
class File:
    content: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, bytes), or (size, None)

    def after(self, happens: Callable[[], bool]) -> bytes:
        """Return the content after the pending changes of which ``happens`` says so, block by block."""
        content = bytearray(self.content)
        for offset, data in self.pending:
            if data is None:
                if happens():
                    content = content[:offset].ljust(offset, b"\0")
                continue
            first = 0
            while first < len(data):
                end = min(len(data), first + BLOCK - (offset + first) % BLOCK)
                if happens():
                    content = content.ljust(offset + end, b"\0")
                    content[offset + first : offset + end] = data[first:end]
                first = end
        return bytes(content)


@dataclass(eq=False)
class Link:
    target: str


@dataclass(eq=False)
class Directory:
    names: dict[str, Node] = field(default_factory=dict)  # durable
    now: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Directory


@dataclass(eq=False)
class Change:
    """One change of names; each is (directory, name, what is there then)."""

    entries: list[tuple[Directory, str, Node | None]]

    def places(self) -> set[tuple[int, str]]:
        return {(id(directory), name) for directory, name, _ in self.entries}


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class Journal:
    """A directory that is durable as it is on the drive now; :meth:`apply` changes it call by call."""

    def __init__(self, root: Path) -> None:
        self.root = os.fspath(root)
        self._inodes: dict[int, Node] = {}
        self._pending: list[Change] = []
        self._top = self._read(root)
        assert isinstance(self._top, Directory)

    def _read(self, path: Path) -> Node:
        node: Node
        if path.is_symlink():
            node = Link(os.readlink(path))
        elif path.is_dir():
            node = Directory({each.name: self._read(each) for each in path.iterdir()})
            node.now = dict(node.names)
        else:
            node = File(path.read_bytes())
        self._inodes[path.lstat().st_ino] = node
        return node

    def _place(self, path: str) -> tuple[Directory, str]:
        *folders, name = os.path.relpath(path, self.root).split("/")
        directory: Node = self._top
        for number, each in enumerate(folders):
            assert isinstance(directory, Directory)
            directory = directory.now[each]
            if isinstance(directory, Link):
                return self._place("/".join([directory.target, *folders[number + 1 :], name]))
        assert isinstance(directory, Directory)
        return directory, name

    def _change(self, *entries: tuple[Directory, str, Node | None]) -> None:
        for directory, name, node in entries:
            _set(directory.now, name, node)
        self._pending.append(Change(list(entries)))

    def apply(self, record: Record) -> None:
        """Let a call happen; what it changes is pending, until a flush."""
        kind = record.kind
        if kind in ("create", "mkdir", "symlink"):
            node: Node = File() if kind == "create" else Directory() if kind == "mkdir" else Link(record.other)
            self._inodes[record.inode] = node
            self._change((*self._place(record.path), node))
        elif kind == "unlink":
            self._change((*self._place(record.path), None))
        elif kind in ("rename", "exchange"):
            source, target = self._place(record.path), self._place(record.other)
            moved, other = source[0].now[source[1]], target[0].now.get(target[1])
            self._change((*target, moved), (*source, other if kind == "exchange" else None))
        elif kind == "flush":
            self._flush(self._inodes[record.inode])
        elif kind in ("write", "resize"):
            file = self._inodes[record.inode]
            assert isinstance(file, File)
            file.pending.append((record.offset, record.data) if kind == "write" else (record.size, None))
        else:
            raise AssertionError(f"the model has no {kind}: {record.path}")

    def _flush(self, node: Node) -> None:
        if isinstance(node, File):
            node.content, node.pending = node.after(lambda: True), []
        elif isinstance(node, Directory):
            done = self._closed({change for change in self._pending if any(each[0] is node for each in change.entries)})
            for change in self._pending:
                if change in done:
                    for directory, name, what in change.entries:
                        _set(directory.names, name, what)
            self._pending = [change for change in self._pending if change not in done]

    def _closed(self, chosen: set[Change]) -> set[Change]:
        """Add the earlier changes of the same names."""
        found, places = set(), set[tuple[int, str]]()
        for change in reversed(self._pending):
            if change in chosen or change.places() & places:
                found.add(change)
                places |= change.places()
        return found

    def left(self, choice: str, seed: int = 0) -> dict[str, bytes | str | None]:
        """Compute what a power cut now leaves, by path below the root: bytes of files, targets of links, None of directories."""
        of_names, of_bytes = CHOICES[choice]
        draws = random.Random(seed)
        chosen = self._closed({change for change in self._pending if draws.random() < of_names})
        changed: dict[int, dict[str, Node]] = {}
        for change in self._pending:
            if change in chosen:
                for directory, name, node in change.entries:
                    _set(changed.setdefault(id(directory), dict(directory.names)), name, node)
        found: dict[str, bytes | str | None] = {}

        def walk(directory: Directory, path: str) -> None:
            for name, node in sorted(changed.get(id(directory), directory.names).items()):
                where = f"{path}{name}"
                if isinstance(node, Directory):
                    found[where] = None
                    walk(node, where + "/")
                elif isinstance(node, Link):
                    found[where] = node.target
                else:
                    found[where] = node.after(lambda: draws.random() < of_bytes)

        walk(self._top, "")
        return found

    def states(
        self, records: list[Record], n_draws: int, step: int = 1
    ) -> Iterator[tuple[int, str, dict[str, bytes | str | None]]]:
        """Cut the power before every ``step``-th call, and after the last; yield how many calls were made, how, what is left.

        No state is yielded twice. ``n_draws``: of each choice that is random.
        """
        seen = set()
        for number in range(len(records) + 1):
            if number % step == 0 or number == len(records):
                for choice, shares in CHOICES.items():
                    for draw in range(1 if set(shares) <= {0, 1} else n_draws):
                        left = self.left(choice, 1000 * number + draw)
                        key = hashlib.blake2b(repr(sorted(left.items())).encode()).digest(), number == len(records)
                        if key not in seen:
                            seen.add(key)
                            yield number, choice, left
            if number < len(records):
                self.apply(records[number])

    def write(self, left: dict[str, bytes | str | None], root: Path) -> None:
        """Write what is left to a directory, in place of what is there."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for name, what in left.items():
            if what is None:
                (root / name).mkdir()
            elif isinstance(what, str):
                (root / name).symlink_to(what)
            else:
                (root / name).write_bytes(what)
        own_stripes(root)
