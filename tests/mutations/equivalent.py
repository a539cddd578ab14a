"""Mutations that change nothing that anyone was promised: the file, its lines before and after, and why."""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "featstore/idmaps/idmap.py",
        "more = 0 if n_bytes <= _BLOCK_BYTES else 4 * n_bytes  # of a name that is longer than a block",
        "more = 0 if (n_bytes < _BLOCK_BYTES) else 4 * n_bytes  # of a name that is longer than a block",
    ): "names of exactly one block are counted twice while they are read: more memory than is needed, for a moment",
    (
        "featstore/estimate/batchsize.py",
        "EDGES = 8  # per row of a pack's batch, if no batch can be read: a generous guess",
        "EDGES = (7)  # per row of a pack's batch, if no batch can be read: a generous guess",
    ): "a guess, and says so",
    (
        "featstore/estimate/batchsize.py",
        "EDGES = 8  # per row of a pack's batch, if no batch can be read: a generous guess",
        "EDGES = (9)  # per row of a pack's batch, if no batch can be read: a generous guess",
    ): "a guess, and says so",
}
