"""Chunks under appended nodes: the bytes are those of a graph made with these nodes, and earlier chunks stay where they are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.changes.chunktail import MOST_FILES
from featstore.errors import FormatError, VersionError
from featstore.storage import catalog as catalogs
from featstore.storage.catalog import FieldPart, read_catalog, write_catalog

KEY = "edge/_,_,_/chunks"
WORDS = 1024  # of a chunk
ROOM = WORDS - 16  # for lists and ids


def make(path: Path, edges: np.ndarray, n: int, **options: Any) -> None:
    form = {"topology": "chunked", "chunk_bytes": 4096, **options}
    featstore.OutOfCoreGraph.from_edge_index(path, edges, n, overwrite=True, progress=False, **form).close()


def append(path: Path, n: int) -> None:
    with featstore.open(path, memory="32MiB", backend="pread", threads=1) as g:
        g.append_nodes(n, progress=False)
        assert g.memory_report().get("changes", 0) == 0


def words(path: Path) -> bytes:
    """The chunks, as the catalog's parts say."""
    parts = read_catalog(path).fields[KEY].parts
    return b"".join((path / part.file).read_bytes()[4096 : 4096 + 4 * part.rows] for part in parts)


def directory(path: Path) -> bytes:
    (part,) = read_catalog(path).fields["edge/_,_,_/chunk_directory"].parts
    return (path / part.file).read_bytes()[4096 : 4096 + 24 * part.rows]


def check(path: Path, other: Path, edges: np.ndarray, n: int) -> None:
    """The same chunks as a graph made anew, and the same lists on every way of reading."""
    make(other, edges, n)
    assert words(path) == words(other)
    assert directory(path) == directory(other)
    with (
        featstore.open(path, memory="16MiB", backend="pread", threads=1, verify="always") as g,
        featstore.open(other, memory="16MiB", backend="pread", threads=1) as expected,
    ):
        g.verify(progress=False)
        ids = np.arange(n)
        for one, two in zip(g.topology.offsets(ids), expected.topology.offsets(ids), strict=True):
            assert np.array_equal(one, two)
        for block_bytes in (8192, 1 << 20):
            found = [np.concatenate([b.ids.copy() for b in each.topology.blocks(block_bytes)] or [[]]) for each in (g, expected)]
            assert np.array_equal(*found)
        at, (one, two) = np.arange(edges.shape[1])[::3], np.empty((2, len(edges[0][::3])), np.int32)
        g.topology.read_edges(at.copy(), one)
        expected.topology.read_edges(at.copy(), two)
        assert np.array_equal(one, two)
        assert np.array_equal(g.in_degree.numpy(), np.bincount(edges[1], minlength=n))


# Lists that end with a chunk, over several chunks, and one word before the end of a chunk; and nothing at all.
EDGES: dict[str, tuple[int, np.ndarray]] = {
    "random": (500, np.random.default_rng(0).integers(0, 500, (2, 6000))),
    "empty": (0, np.empty((2, 0), np.int64)),
    "no edges": (3 * ROOM, np.empty((2, 0), np.int64)),
    "full": (8, np.stack([np.zeros(2 * ROOM - 8, np.int64), np.repeat(7, 2 * ROOM - 8)])),
    "one word is left": (8, np.stack([np.zeros(2 * ROOM - 9, np.int64), np.repeat(7, 2 * ROOM - 9)])),
    "a long last list": (8, np.stack([np.zeros(4 * ROOM + 30, np.int64), np.repeat(7, 4 * ROOM + 30)])),
    "a long first list": (8, np.stack([np.zeros(4 * ROOM + 30, np.int64), np.repeat(0, 4 * ROOM + 30)])),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_form_is_that_of_a_new_graph(name: str, tmp_path: Path) -> None:
    n, edges = EDGES[name]
    make(tmp_path / "g", edges, n)
    for more in (1, ROOM, 2 * ROOM + 5, 3, 700):
        append(tmp_path / "g", more)
        n += more
        check(tmp_path / "g", tmp_path / "h", edges, n)


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 2500),
    n_edges=st.integers(0, 4000),
    more=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    n_stripes=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_random_graphs(tmp_path_factory: Any, n: int, n_edges: int, more: list[int], n_stripes: int, seed: int) -> None:
    folder, rng = tmp_path_factory.mktemp("graphs"), np.random.default_rng(seed)
    (folder / "drive").mkdir()
    edges = np.stack([rng.integers(0, n, n_edges), n - 1 - (rng.integers(0, n, n_edges) // rng.integers(1, n + 1, n_edges))])
    make(folder / "g", edges, n, stripes=[folder / "drive"] * n_stripes)
    for k in more:
        append(folder / "g", k)
        n += k
    check(folder / "g", folder / "h", edges, n)


def test_earlier_chunks_are_not_written_and_files_are_few(tmp_path: Path) -> None:
    n, edges = 20_000, np.random.default_rng(1).integers(0, 20_000, (2, 100_000))
    make(tmp_path / "g", edges, n)
    first = read_catalog(tmp_path / "g").fields[KEY].parts[0].file
    with featstore.open(tmp_path / "g", memory="32MiB") as old:
        append(tmp_path / "g", 5)
        (kept, new) = read_catalog(tmp_path / "g").fields[KEY].parts
        assert (kept.file, kept.at, kept.rows % WORDS) == (first, 0, 0)
        assert new.rows <= 2 * WORDS
        assert old.num_nodes == n
        old.verify(progress=False)
        assert sum(len(block.ids) for block in old.topology.blocks()) == edges.shape[1]
    written, counts, n = 0, [], n + 5
    for k in range(14):
        more = (20 - k) * ROOM // 4  # each less than the one before
        append(tmp_path / "g", more)
        parts = read_catalog(tmp_path / "g").fields[KEY].parts
        counts.append(len(parts))
        n, written = n + more, written + parts[-1].rows
        files = {name for name in os.listdir(tmp_path / "g") if name.startswith("edge.chunks.") and name.endswith(".rows")}
        assert files == {part.file for part in parts}
        assert parts[0].file == first
    assert 2 < max(counts) <= MOST_FILES + 1
    assert written < 14 * 20 * ROOM
    check(tmp_path / "g", tmp_path / "h", edges, n)
    featstore.convert(tmp_path / "g", "csc", progress=False)
    featstore.convert(tmp_path / "g", "chunked", chunk_bytes=4096, progress=False)
    assert len(read_catalog(tmp_path / "g").fields[KEY].parts) == 1
    assert words(tmp_path / "g") == words(tmp_path / "h")


def test_releases_without_cut_files_refuse_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "g", EDGES["random"][1], 500)
    monkeypatch.setattr(catalogs, "_CUT", "cut of later")
    read_catalog(tmp_path / "g")
    append(tmp_path / "g", 1)
    monkeypatch.undo()
    with pytest.raises(VersionError, match="cut of later"):
        featstore.open(tmp_path / "g")


def test_wrong_cuts_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "g", EDGES["random"][1], 500)
    append(tmp_path / "g", 1)
    catalog = read_catalog(tmp_path / "g")
    (kept, new), record = catalog.fields[KEY].parts, catalog.fields[KEY]
    wrong: list[tuple[tuple[FieldPart, ...], int]] = [
        ((replace(kept, rows=kept.rows - WORDS, at=WORDS), replace(new, first=kept.rows - WORDS)), record.n_rows - WORDS),
        ((kept, replace(new, at=0)), record.n_rows),
        ((replace(kept, at=None), new), record.n_rows),
    ]
    for parts, n_rows in wrong:
        bad = replace(record, parts=parts, shape=(n_rows,))
        write_catalog(tmp_path / "g", replace(catalog, fields={**catalog.fields, KEY: bad}))
        with pytest.raises(FormatError, match=r"cut|does not hold"):
            featstore.open(tmp_path / "g")
    column = catalog.fields["edge/_,_,_/out_degree"]
    bad = replace(column, parts=(replace(column.parts[0], at=0),))
    write_catalog(tmp_path / "g", replace(catalog, fields={**catalog.fields, column.key: bad}))
    with pytest.raises(FormatError, match="only chunks are cut"):
        featstore.open(tmp_path / "g")
