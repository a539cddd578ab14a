"""Stripes: directories on other drives that hold files of a dataset, each found by a symbolic link in the dataset's directory.

A stripe ``featstore-stripe-<uuid>`` is made for one commit and holds no other files. The link has the same name. The link is
durable before the stripe is made, and is removed after it. So a sweep after a killed writer finds every stripe by its link.

An entry ``owner-…`` in the stripe distinguishes the link that it was made with from all others. The entry's name is a hash of
the link's directory, inode number and change time in nanoseconds. A copy of the link has another change time, as programs
cannot set it. A snapshot that is mounted elsewhere has another directory. A dataset with another link may read a stripe, but not
remove it.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Final

import xxhash

from featstore._core.descriptor import open_fd
from featstore.errors import FeatstoreWarning, warn
from featstore.storage.calls import close_quietly, remove_tree
from featstore.storage.format import STRIPE, STRIPE_PREFIX
from featstore.storage.writer import fsync_directory

__all__ = ["make_stripe", "mark_of", "remove_stripe", "remove_stripes", "stripe_directory"]

_MARK: Final = "owner-"
_BUILT: Final = re.compile(r"\.(tmp|old)-[0-9a-f]{32}\Z")  # added by a builder to the name of a dataset, see builddir.py


def make_stripe(root: str, directory: str) -> str:
    """Make an empty stripe in ``directory`` for the dataset at ``root``; return the common name of the stripe and its link.

    After an OSError neither exists.
    """
    name = f"{STRIPE_PREFIX}{uuid.uuid4().hex}"
    link, target = os.path.join(root, name), os.path.join(directory, name)
    made: list[tuple[Callable[[str], None], str]] = []
    try:
        made.append((os.unlink, link))
        os.symlink(target, link)
        fsync_directory(root)
        if _BUILT.search(root):  # else a power cut may leave the stripe, which may be on another drive, without a link to it
            fsync_directory(os.path.dirname(root) or ".")
        made.append((os.rmdir, target))
        os.mkdir(target)
        mark = os.path.join(target, mark_of(link))
        made.append((os.unlink, mark))
        close_quietly(open_fd(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))  # nothing is written
        fsync_directory(target)
        fsync_directory(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            for remove, path in reversed(made):  # by name, as listing a directory needs a descriptor
                with contextlib.suppress(FileNotFoundError):
                    remove(path)
        raise
    return name


def mark_of(link: str) -> str:
    """Compute the name of the entry by which a stripe recognizes this link, unless the dataset was moved since."""
    found, home = os.lstat(link), _BUILT.sub("", os.path.realpath(os.path.dirname(link)))
    return _MARK + xxhash.xxh3_128_hexdigest(b"%d %d " % (found.st_ino, found.st_ctime_ns) + os.fsencode(home))


def remove_stripe(root: str, name: str) -> None:
    """Remove a stripe and then its link. If the link may be a copy of the stripe's own, remove only the link, and warn.

    After an OSError the link stays, for the next try.
    """
    link = os.path.join(root, name)
    if not os.path.islink(link):  # a copy that followed the link; or a mount point, which cannot be renamed and keeps its files
        gone = os.path.join(root, f"{STRIPE_PREFIX}{uuid.uuid4().hex}")
        os.rename(link, gone)
        remove_tree(gone)
        return
    target, is_left = os.readlink(link), False
    with contextlib.suppress(FileNotFoundError):  # the stripe was not made yet, or is gone
        entries = os.listdir(target)
        marks = [entry for entry in entries if entry.startswith(_MARK)]
        is_left = os.path.basename(target) != name or (len(entries) > 0 and mark_of(link) not in marks)
        if not is_left:
            for entry in (*(set(entries) - set(marks)), *marks):
                os.unlink(os.path.join(target, entry))
            os.rmdir(target)
            fsync_directory(os.path.dirname(target))
    os.unlink(link)
    if is_left:
        what = f"{target} stays: it was not made with the link {link}, or the dataset was moved or copied since"
        warn(f"{what}; if no other dataset has a link to it, remove it yourself", FeatstoreWarning)


def remove_stripes(root: str, keep: Iterable[str] = ()) -> list[str]:
    """Remove all stripes of a dataset except those of the files named in ``keep``; return the names of removed stripes.

    If a stripe cannot be removed, the OSError is raised once the others are removed.
    """
    kept = {name.partition("/")[0] for name in keep}
    gone = [name for name in sorted(os.listdir(root)) if STRIPE.fullmatch(name) and name not in kept]
    failure: OSError | None = None
    for name in gone:
        try:
            remove_stripe(root, name)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    return gone


def stripe_directory(root: str, name: str) -> str | None:
    """Find the directory of the stripe that holds a file of a dataset; None for a file in the dataset itself."""
    folder, slash, _ = name.partition("/")
    if not slash or not STRIPE.fullmatch(folder):
        return None
    link = os.path.join(root, folder)
    return os.readlink(link) if os.path.islink(link) else link
