"""Oracles of the storage tests: row files read with NumPy alone, from the byte tables of docs/format.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from featstore.storage.catalog import EDGE, NODE, Catalog, read_catalog
from featstore.storage.writer import FileRecord

PAGE = 4096


def file_rows(root: str | os.PathLike[str], record: FileRecord) -> npt.NDArray[np.uint8]:
    """Return all rows of a file, uint8 [n, row_bytes]."""
    raw = np.fromfile(Path(root) / record.name, np.uint8)
    layout, n = record.layout, np.arange(record.n_rows)
    starts = PAGE + n // layout.group_rows * layout.group_bytes + n % layout.group_rows * layout.row_bytes
    if not record.n_rows:
        return np.empty((0, layout.row_bytes), np.uint8)
    return raw[starts[:, None] + np.arange(layout.row_bytes)]


def check_sums(root: str | os.PathLike[str], record: FileRecord) -> None:
    """Assert that the side file holds the sum of every page."""
    raw = (Path(root) / record.name).read_bytes()
    table = (Path(root) / record.sums_name).read_bytes()
    assert (len(raw), len(table)) == (record.n_bytes, record.n_sums_bytes)
    words = np.frombuffer(table, "<u8").reshape(-1, 512)
    seed = record.seed
    own = xxhash.xxh3_64_intdigest(b"sums", seed)
    n_pages = len(raw) // PAGE
    for i, page in enumerate(words):
        assert page[511] == xxhash.xxh3_64_intdigest(page[:511].tobytes(), (own + i) % 2**64)
    flat = words[:, :511].reshape(-1)
    assert flat[:n_pages].tolist() == [xxhash.xxh3_64_intdigest(raw[p * PAGE : (p + 1) * PAGE], seed) for p in range(n_pages)]
    assert not flat[n_pages:].any()


def field(root: str | os.PathLike[str], key: str, catalog: Catalog | None = None) -> npt.NDArray[Any]:
    """Return a whole field as an array of its shape; bfloat16 as uint16."""
    catalog = catalog or read_catalog(root)
    record = catalog.fields[key]
    parts = [(part.at or 0, part.rows, file_rows(root, catalog.files[part.file])) for part in record.parts]
    rows = np.concatenate([rows[at : at + n] for at, n, rows in parts])
    dtype = np.dtype("uint16" if record.dtype == "bfloat16" else record.dtype)
    return rows.view(dtype).reshape(record.shape)


def node(root: str | os.PathLike[str], name: str) -> npt.NDArray[Any]:
    """Return a feature or node data."""
    return field(root, f"{NODE}/{name}")


def edge(root: str | os.PathLike[str], name: str) -> npt.NDArray[Any]:
    """Return ``indptr``, ``indices`` or ``out_degree``."""
    return field(root, f"{EDGE}/{name}")


def snapshot(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the bytes of every file under a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}
