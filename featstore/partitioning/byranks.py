"""Parts that the ranks of a process group have together: rank 0 makes and keeps them, and the others read what it kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.savedparts import KeptParts
from featstore.ranks import Meeting

__all__ = ["made_by_first"]

T = TypeVar("T")


def made_by_first(
    meeting: Meeting,
    g: OutOfCoreGraph,
    name: str,
    same: Mapping[str, Any],
    make: Callable[[], T],
    read: Callable[[KeptParts], T],
) -> T:
    """Let rank 0 ``make`` parts, which keeps them under ``name``; return them on all ranks.

    The caller has entered ``meeting``, so that an error of one rank is one of all. The other ranks wait for rank 0, as long as
    the process group's time-out.

    Parameters
    ----------
    meeting : Meeting
        Of one rank: it makes the parts alone.
    g : OutOfCoreGraph
        Of one directory on all ranks; ValueError otherwise.
    name : str
    same : mapping of str to values that pickle
        The arguments, which must be the same on all ranks; ValueError, which names those that differ, otherwise.
    make : callable
        Makes and keeps the parts, on rank 0.
    read : callable
        Reads kept parts, on the other ranks.
    """
    if meeting.world_size == 1:
        return make()
    found = meeting.meet(({**same, "name": name}, os.stat(g.path).st_ino))
    theirs, inode = found[0]
    differ = sorted({key for each, _ in found for key in {*each, *theirs} if each.get(key) != theirs.get(key)})
    if differ:
        raise ValueError(f"ranks make parts together by the same arguments; they differ in: {', '.join(differ)}")
    is_here = os.stat(g.path).st_ino == inode
    if not all(meeting.meet(is_here)):
        raise _elsewhere(g, is_here)
    made = make() if meeting.is_first else None
    files = meeting.meet(g.partitions.files_of(name) if meeting.is_first else None)[0]
    if not meeting.is_first:
        kept = g.partitions.adopt(name, files)
        if kept is None:  # inodes of two machines may be the same by chance
            raise _elsewhere(g, is_here=False)
        made = read(kept)
    meeting.end()
    assert made is not None
    return made


def _elsewhere(g: OutOfCoreGraph, is_here: bool) -> ValueError:
    which = "that of rank 0, and another rank has another one" if is_here else "another directory than that of rank 0"
    return ValueError(
        f"{g.path} is {which}: ranks keep parts in one dataset. Keep them before it is copied; or call with rank=0, world_size=1 "
        "in one process for each copy"
    )
