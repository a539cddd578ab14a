"""Damaged datasets: what is not whole is refused by name, and every damage is found, when it is opened, read or verified."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import CorruptionError, FeatstoreError, FormatError, VersionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import CATALOG_FILE, EDGE, Catalog, FieldPart, read_catalog, write_catalog
from featstore.storage.layout import choose_layout
from featstore.storage.writer import RowFileWriter
from tests.graph.test_dataset import copy, names, quick
from tests.support.rowfiles import snapshot

pytestmark = pytest.mark.usefixtures("small_pieces")

__all__ = ["copy", "quick"]  # fixtures


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file or directory; .*featstore import make one: .*absent") as caught:
        featstore.open(tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(FormatError, match="is not a dataset: it has no catalog"):
        featstore.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="is not a dataset: it is not a directory"):
        featstore.open(tmp_path / "file")
    (tmp_path / "catalog.lmdb").mkdir()  # a dataset that lost its catalog
    with pytest.raises(FileNotFoundError, match=r"data\.mdb"):
        featstore.open(tmp_path)


KINDS = ["node.x.", "node.h.", "node.y.", "edge.indptr.", "edge.indices.", "edge.out_degree."]


@pytest.mark.parametrize("suffix", ["", ".sums"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_things_in_a_files_place(copy: Path, kind: str, suffix: str) -> None:
    path = Path(f"{names(copy, kind)}{suffix}")
    good = path.read_bytes()

    def check(error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match) as caught:
            featstore.open(copy, memory="64MiB")
        assert path.name in str(caught.value)

    for data in (b"", good[:100], good[:4096], good[:-1], good[:-4096], good + b"\0", good + bytes(4096)):
        if data != good:
            path.write_bytes(data)
            check(CorruptionError, "than it was written")
    path.unlink()
    check(FileNotFoundError, "No such file")
    path.mkdir()
    check(FormatError, "directory")
    path.rmdir()
    os.mkfifo(path)
    check(FormatError, "FIFO")
    path.unlink()
    (copy / "elsewhere").write_bytes(good)
    path.symlink_to(copy / "elsewhere")
    check(FormatError, "symbolic link")
    path.unlink()
    path.write_bytes(good)
    featstore.open(copy, memory="64MiB").close()  # control


def test_files_swapped_and_older_copies_are_found(copy: Path, tmp_path: Path) -> None:
    """Two fields of one shape and type, all their bytes swapped; and a file of an earlier dataset put back."""
    a, b = np.zeros((50, 4)), np.ones((50, 4))
    OutOfCoreGraph.create(tmp_path / "s", np.zeros(51, np.int64), [], {"a": a, "b": b}).close()
    old = snapshot(tmp_path / "s")
    for suffix in ("", ".sums"):
        paths = [tmp_path / "s" / f"node.{name}.1.rows{suffix}" for name in "ab"]
        first, second = (path.read_bytes() for path in paths)
        paths[0].write_bytes(second)
        paths[1].write_bytes(first)
    with pytest.raises(CorruptionError, match="another file, or an older copy"):
        featstore.open(tmp_path / "s")
    OutOfCoreGraph.create(tmp_path / "s", np.zeros(51, np.int64), [], {"a": b, "b": a}, overwrite=True).close()
    for suffix in ("", ".sums"):
        (tmp_path / "s" / f"node.a.1.rows{suffix}").write_bytes(old[f"node.a.1.rows{suffix}"])
    with pytest.raises(CorruptionError, match="another file, or an older copy"):
        featstore.open(tmp_path / "s")


def forge(root: Path, change: Callable[[Catalog], Catalog]) -> None:
    write_catalog(root, change(read_catalog(root)))


def test_catalogs_that_do_not_fit_their_graph(copy: Path) -> None:
    good = read_catalog(copy)
    x = good.fields["node/_/x"]
    with RowFileWriter(copy, "empty.rows", choose_layout(100), kind="feature", dtype="float32") as out:
        empty = out.commit()
    without_indptr = {key: field for key, field in good.fields.items() if "indptr" not in key}
    striped = {**good.fields, x.key: replace(x, parts=(*x.parts, FieldPart("empty.rows", 1000, 0)))}
    cases: list[tuple[Catalog, type[FeatstoreError], str]] = [
        (replace(good, dataset={**good.dataset, "num_nodes": 999}), FormatError, "1000 rows for 999 nodes"),
        (replace(good, dataset={**good.dataset, "num_edges": 1}), FormatError, "no indices of 1 rows"),
        (replace(good, fields=without_indptr), FormatError, "no indptr of 1001 rows"),
        (replace(good, files={**good.files, "empty.rows": empty}, fields=striped), VersionError, "lies in 2 files"),
    ]
    for catalog, error, match in cases:
        write_catalog(copy, catalog)
        with pytest.raises(error, match=match), featstore.open(copy, memory="64MiB") as g:
            g.topology.offsets(np.zeros(1, np.int64))
    write_catalog(copy, good)
    with featstore.open(copy, memory="64MiB") as g:  # control
        g.topology.offsets(np.zeros(1, np.int64))


def test_paths_that_lead_outside(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((copy / "node.x.1.rows").read_bytes())
    for name in ("../secret", str(tmp_path / "secret")):

        def change(catalog: Catalog, name: str = name) -> Catalog:
            record = replace(catalog.files["node.x.1.rows"], name=name)
            return replace(catalog, files={**catalog.files, name: record})

        good = (copy / CATALOG_FILE).read_bytes()
        forge(copy, change)
        with pytest.raises(FormatError, match="outside the dataset"):
            featstore.open(copy)
        (copy / CATALOG_FILE).write_bytes(good)


@pytest.mark.parametrize("suffix", ["", ".sums"])
@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_damaged_page(copy: Path, kind: str, suffix: str) -> None:
    path = Path(f"{names(copy, kind)}{suffix}")
    with featstore.open(copy, memory="64MiB", verify="off") as g:
        report = g.verify()
        assert report["files"] == 7
        assert report["bytes"] == 4096 * report["pages"]
        data = path.read_bytes()
        rng = np.random.default_rng(0)
        for at in [0, 4095, len(data) - 1, *rng.integers(0, len(data), 3).tolist()]:
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            with pytest.raises(CorruptionError) as caught:
                g.verify()
            assert caught.value.filename == str(path)
            assert caught.value.offset == at // 4096 * 4096
        path.write_bytes(data)
        g.verify()


def replace_column(root: Path, name: str, values: np.ndarray, dtype: str) -> None:
    """Put another column, properly written and catalogued, in a topology field's place."""
    catalog = read_catalog(root)
    record = catalog.fields[f"{EDGE}/{name}"]
    with RowFileWriter(root, record.parts[0].file, choose_layout(values.itemsize), kind=name, dtype=dtype) as out:
        out.write(values.view(np.uint8).reshape(len(values), values.itemsize))
        file = out.commit()
    write_catalog(root, Catalog(catalog.dataset, {**catalog.files, file.name: file}, catalog.fields))


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("indptr", lambda v, i: None, None),
        ("indptr", lambda v, i: v.__setitem__(0, 1), r"indptr\[0\] is 1"),
        ("indptr", lambda v, i: v.__setitem__(-1, v[-1] + 1), "is .* after"),
        ("indptr", lambda v, i: v.__setitem__(-1, v[-2]), "indptr ends with"),
        ("indptr", lambda v, i: v.__setitem__(i, -5), r"is -5 after"),
        ("indptr", lambda v, i: v.__setitem__(i, v[-1]), "is .* after"),
        ("indices", lambda v, i: v.__setitem__(i, 1000), "is 1000, which is not a node"),
        ("indices", lambda v, i: v.__setitem__(i, -1), "is -1, which is not a node"),
        ("indices", lambda v, i: v.__setitem__(slice(None), v[::-1].copy()), "is not sorted"),
        ("out_degree", lambda v, i: v.__setitem__(i, v[i] + 1), r"out_degree\[500\] is"),
    ],
)
def test_verify_checks_the_adjacency_itself(copy: Path, name: str, change: Any, match: str | None) -> None:
    """Checksums are right and the structure is not."""
    with featstore.open(copy, memory="64MiB") as g:
        columns = {"indptr": g.topology.indptr.copy()}
        columns["indices"] = np.fromfile(names(copy, "edge.indices."), np.int32, g.num_edges, offset=4096)
        columns["out_degree"] = np.fromfile(names(copy, "edge.out_degree."), np.int64, 1000, offset=4096)
    values = columns[name]
    change(values, 500)
    replace_column(copy, name, values, str(values.dtype))
    with featstore.open(copy, memory="64MiB") as g:
        if match is None:
            g.verify()  # control: rewritten as it was
            return
        with pytest.raises(CorruptionError, match=match) as caught:
            g.verify()
        assert name in str(caught.value.filename)
        if name == "indptr":
            with pytest.raises(CorruptionError):
                g.topology.offsets(np.zeros(1, np.int64))


def test_a_list_that_falls_where_one_piece_ends_is_found(tmp_path: Path) -> None:
    """Both pieces ascend, and nothing else is wrong."""
    n, node = 300, 7
    ids = np.concatenate([np.arange(200, 261), np.arange(139)]).astype(np.int32)
    indptr = np.where(np.arange(n + 1) > node, len(ids), 0)
    OutOfCoreGraph.create(tmp_path / "g", indptr, np.sort(ids), progress=False).close()
    replace_column(tmp_path / "g", "indices", ids, "int32")
    with featstore.open(tmp_path / "g") as g, pytest.raises(CorruptionError, match=r"list at indices\[61\] is not sorted"):
        g.verify(progress=False)


@pytest.mark.parametrize("verify", ["always", "open", "off"])
def test_what_each_degree_of_checking_finds(copy: Path, verify: str) -> None:
    path = names(copy, "node.x.")
    data = bytearray(path.read_bytes())
    data[4096 + 50] ^= 1  # in row 0
    path.write_bytes(data)
    if verify == "open":
        with pytest.raises(CorruptionError) as caught:
            featstore.open(copy, memory="64MiB", verify=verify)
        assert caught.value.offset == 4096
        return
    with featstore.open(copy, memory="64MiB", verify=verify) as g:
        if verify == "always":
            with pytest.raises(CorruptionError) as caught:
                g.features["x"][[0]]
            assert (caught.value.filename, caught.value.offset) == (str(path), 4096)
            g.features["x"][[900]]
        else:
            g.features["x"][[0]]


def test_rows_that_types_share_lie_within_their_file(tmp_path: Path) -> None:
    root = tmp_path / "g"
    nodes = {kind: featstore.Nodes(n, {"x": np.full((n, 2), n, np.float32)}) for kind, n in (("paper", 5), ("author", 3))}
    OutOfCoreGraph.create(root, nodes=nodes, edges={}, progress=False).close()
    good = read_catalog(root)
    record = good.fields["node/author/x"]
    for at, is_right in ((5, True), (2, True), (6, False), (8, False)):
        moved = replace(record, parts=(replace(record.parts[0], at=at),))
        write_catalog(root, replace(good, fields={**good.fields, record.key: moved}))
        if not is_right:
            with pytest.raises(FormatError, match="does not hold rows 0"):
                featstore.open(root)
            continue
        with featstore.open(root, memory="64MiB") as g:
            assert g["author"].features["x"][0, :].tolist() == ([3, 3] if at == 5 else [5, 5])
    without = replace(record, parts=(replace(record.parts[0], at=None),))
    write_catalog(root, replace(good, fields={**good.fields, record.key: without}))
    with pytest.raises(FormatError, match="does not hold rows 0"):
        featstore.open(root)


@pytest.mark.parametrize("form", [{}, {"topology": "chunked", "chunk_bytes": 4096}], ids=["csc", "chunked"])
def test_verify_checks_the_types(tmp_path: Path, form: dict[str, Any]) -> None:
    """Checksums and the adjacency are right, and do not fit the types: ids, edge ids, or where a type begins."""
    root, rng = tmp_path / "g", np.random.default_rng(0)
    writes, cites = np.stack([rng.integers(0, 70, 500), rng.integers(0, 90, 500)]), rng.integers(0, 90, (2, 500))
    nodes = {"paper": featstore.Nodes(90), "author": featstore.Nodes(70)}
    edges = {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): cites}
    OutOfCoreGraph.create(root, nodes=nodes, edges=edges, progress=False, **form).close()
    good = read_catalog(root)

    def check(match: str | None) -> None:
        with featstore.open(root, memory="64MiB") as g:
            if match is None:
                g.verify(progress=False)
                return
            with pytest.raises(CorruptionError, match=match):
                g.verify(progress=False)

    def typed(node_types: list[Any], edge_types: list[Any]) -> None:
        write_catalog(root, replace(good, dataset={**good.dataset, "node_types": node_types, "edge_types": edge_types}))

    papers, kinds = [["paper", 90], ["author", 70]], [[*key, 500] for key in edges]
    check(None)
    typed([["author", 70], ["paper", 90]], kinds)
    check(r"indices\[\d+\] is \d+, which is not a node of type 'author'")
    typed(papers, kinds[::-1])
    check(r"indices\[\d+\] is \d+, which is not a node of type 'paper'")
    typed([["paper", 90], ["author", 70]], [[*kinds[0][:3], 499], [*kinds[1][:3], 501]])
    check(r"edges of type \('paper', 'cites', 'paper'\) begin with edge 500, not 499")
    typed(papers, kinds)
    if not form:
        numbers = np.fromfile(root / "edge.edge_ids.1.rows", np.int32, 1000, offset=4096)
        a, b = np.flatnonzero(numbers < 500)[3], np.flatnonzero(numbers >= 500)[5]
        numbers[[a, b]] = numbers[[b, a]]
        replace_column(root, "edge_ids", numbers, "int32")
        check(r"edge_ids\[3\] is \d+, and edges of type \('author', 'writes', 'paper'\) are 0 … 499")
