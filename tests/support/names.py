"""Datasets that keep names of nodes, made without tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import featstore
from featstore.idmaps.idmap import IDS_KEY
from featstore.idmaps.keys import IntKeys, Keys, TextKeys
from featstore.idmaps.writer import IdMapWriter
from featstore.storage.layout import choose_layout
from featstore.storage.update import Update
from featstore.storage.writer import RowFileWriter


def keys_from(names: Sequence[str] | Sequence[int]) -> Keys:
    if any(isinstance(name, str) for name in names):
        return TextKeys.of([str(name) for name in names])
    return IntKeys(np.array(names, np.int64))


def named_graph(path: Path, names: Sequence[str] | Sequence[int], n_more: int = 0) -> Path:
    """Make a dataset without edges whose node ``i`` has the name ``names[i]``, and ``n_more`` nodes without names."""
    n = len(names)
    featstore.OutOfCoreGraph.create(path, np.zeros(n + n_more + 1, np.int64), np.empty(0, np.int64), progress=False).close()
    add_names(path, names)
    return path


def add_names(path: Path, names: Sequence[str] | Sequence[int], of: str = "_") -> None:
    """Give the first nodes of a type the names ``names``, in a commit of its own."""
    n, keys = len(names), keys_from(names)
    label = "ids" if of == "_" else f"ids@{of}"
    with Update(path) as update:

        def open_writer(role: str, row_bytes: int, dtype: str) -> RowFileWriter:
            return update.writer(f"{label}.{role[3:]}", choose_layout(row_bytes), kind=role, dtype=dtype)

        with IdMapWriter(keys.kind, open_writer) as writer:
            half = n // 2
            writer.add(keys.take(np.arange(half)))
            writer.add(keys.take(np.arange(half, n)))
            hashes = keys.hashes()[:, 0]
            order = np.argsort(hashes, kind="stable")
            third = n // 3
            blocks = [(hashes[some], some) for some in (order[:third], order[third:])]
            entry, files = writer.finish(blocks)
        update.add(files, extra={f"{IDS_KEY}{of}": entry})
        update.commit()
