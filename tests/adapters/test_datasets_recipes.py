"""Imports of folders that were ended: the same call goes on where they stopped; one of other files or options begins anew."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import featstore
from featstore.adapters.datasets import graphbolt, igb, npz, ogb
from featstore.adapters.datasets import scipy as of_matrix
from featstore.adapters.datasets.recipes import describe, inputs_of_folder
from featstore.adapters.datasets.report import Report
from featstore.creation import extsort
from featstore.creation.source import open_source
from featstore.creation.steps import Steps
from featstore.errors import FormatError
from tests.adapters.test_datasets_graphbolt import one_type
from tests.support.imports import TINY, Folder, Interrupts, assert_same, contents, same_reports

CLEANED: dict[str, Any] = {"remove_self_loops": True, "coalesce": True, "topology": "chunked", "chunk_bytes": 4096}


@pytest.fixture
def _spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sort of edges goes through files."""
    init = extsort.PairSorter.__init__

    def little(self: Any, *args: Any) -> None:
        init(self, *args)
        self._cap = self.block_pairs = 100

    monkeypatch.setattr(extsort.PairSorter, "__init__", little)


def ogb_folder(root: Path) -> Folder:
    folder = Folder(root, n=3000, n_edges=2000).binary()
    folder.y[::7] = -1
    np.savez(root / "raw" / "node-label.npz", node_label=folder.y)
    return folder


@pytest.mark.usefixtures("_spills")
@pytest.mark.parametrize("options", [{}, CLEANED], ids=["as they are", "cleaned"])
def test_each_call_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Each is ended at its first record, so one that began anew would never be done."""
    root = tmp_path / "in"
    folder = ogb_folder(root)
    if options:  # no rows of edges then
        archive = dict(np.load(root / "raw" / "data.npz"))
        del archive["edge_feat"]
        np.savez(root / "raw" / "data.npz", **archive)
    (tmp_path / "whole").mkdir()
    whole = ogb(root, tmp_path / "whole" / "g", **options, **TINY)
    interrupts = Interrupts(monkeypatch)
    report, n_calls = interrupts.until_done(lambda: ogb(root, tmp_path / "g", **options, **TINY), tmp_path / "g")
    assert n_calls == interrupts.records + 1
    assert n_calls >= 8, "sorted edges, the adjacency, each field"
    assert same_reports(report, whole)
    assert report.unlabelled == {"y": len(folder.y[::7])}
    assert report.loops_dropped == (int((folder.edges[0] == folder.edges[1]).sum()) if options else 0)
    assert contents(tmp_path / "g") == contents(tmp_path / "whole" / "g")
    assert sorted(os.listdir(tmp_path)) == ["g", "in", "whole"]


@pytest.mark.usefixtures("_spills")
@pytest.mark.parametrize("n_each", [1, 2, 5])
def test_several_types_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_each: int) -> None:
    root = tmp_path / "full"
    rng = np.random.default_rng(0)
    for kind, n in (("paper", 60), ("author", 50)):
        (root / "processed" / kind).mkdir(parents=True)
        np.save(root / "processed" / kind / "node_feat.npy", rng.random((n, 3), np.float32))
    np.save(root / "processed" / "paper" / "node_label_19.npy", rng.integers(0, 19, 60).astype(np.float32))
    for name, bounds in (("paper__cites__paper", (60, 60)), ("author__writes__paper", (50, 60))):
        (root / "processed" / name).mkdir()
        edges = np.stack([rng.integers(0, n, 700) for n in bounds], axis=1)
        np.save(root / "processed" / name / "edge_index.npy", edges)

    def call(target: Path) -> Report:
        return igb(root, target, num_nodes={"paper": 60, "author": 50}, reverse=True, **TINY)

    (tmp_path / "whole").mkdir()
    whole = call(tmp_path / "whole" / "g")
    interrupts = Interrupts(monkeypatch)
    report, _ = interrupts.until_done(lambda: call(tmp_path / "g"), tmp_path / "g", n_each)
    assert same_reports(report, whole)
    assert contents(tmp_path / "g") == contents(tmp_path / "whole" / "g")


def test_rows_that_are_written_are_not_read_again(tmp_path: Path) -> None:
    """Of a file in which reading can begin anywhere."""
    np.save(tmp_path / "x.npy", np.arange(100_000, dtype=np.float32).reshape(-1, 4))
    source, seen = open_source("x", tmp_path / "x.npy"), []
    for first in (0, 1, 24_000, 25_000):
        blocks = list(source.blocks_from(first, 4096))
        seen.append(sum(map(len, blocks)))
        assert b"".join(each.tobytes() for each in blocks) == np.load(tmp_path / "x.npy")[first:].tobytes()
    assert seen == [25_000, 24_999, 1000, 0]


def test_other_inputs_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time of a file, another file beside it, other options; the memory is no such option."""
    root, target = tmp_path / "in", tmp_path / "g"
    ogb_folder(root)
    interrupts = Interrupts(monkeypatch)

    def ended(**options: Any) -> str:
        interrupts.left = 1
        with pytest.raises(KeyboardInterrupt):
            ogb(root, target, **{**TINY, **options})
        (left,) = tmp_path.glob("g.tmp-*")
        return left.name

    seen = [ended(), ended(add_inverse_edge=True), ended(topology="chunked"), ended(memory="20MiB", topology="chunked")]
    assert len(set(seen)) == 3
    assert seen[-1] == seen[-2]
    os.utime(root / "raw" / "data.npz", ns=(1, 1))
    seen.append(ended())
    (root / "raw" / "README").touch()
    seen.append(ended())
    assert len(set(seen)) == 5
    interrupts.left = 1 << 30
    ogb(root, target, **TINY)
    assert sorted(os.listdir(tmp_path)) == ["g", "in"]


def test_files_that_are_linked_from_elsewhere_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given metadata.yaml leaves open which files there are, as no folder is given."""
    bolt, _ = one_type(tmp_path / "in")
    edges = np.load(bolt.root / "edges" / "e.npy")
    (bolt.root / "edges" / "e.npy").unlink()
    (bolt.root / "edges" / "e.npy").symlink_to(tmp_path / "edges.npy")
    np.save(tmp_path / "edges.npy", edges)
    interrupts = Interrupts(monkeypatch)
    meta = bolt.write() / "metadata.yaml"
    interrupts.left = 3
    with pytest.raises(KeyboardInterrupt):
        graphbolt(meta, tmp_path / "g", **TINY)
    np.save(tmp_path / "edges.npy", edges[::-1])
    os.utime(tmp_path / "edges.npy", ns=(1, 1))
    interrupts.left = 1 << 30
    graphbolt(meta, tmp_path / "g", **TINY)
    graphbolt(meta, tmp_path / "whole", **TINY)
    assert_same(tmp_path / "g", tmp_path / "whole")


def test_what_has_no_recipe_is_not_read_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.adapters.datasets.recipes.describe", lambda value: 1 / 0)
    x = np.arange(40, dtype=np.float32).reshape(10, 4)[:, :2]
    of_matrix(scipy.sparse.eye(10, format="csr"), tmp_path / "g", features={"x": x}, **TINY)
    with featstore.open(tmp_path / "g") as g:
        assert (g.features["x"][:].numpy() == x).all()


def test_links_to_inputs_are_followed(tmp_path: Path) -> None:
    """Snapshots of hubs are folders of links; what is no file is refused behind one, too."""
    folder = ogb_folder(tmp_path / "store")
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "store").rglob("*"):
        place = tmp_path / "in" / path.relative_to(tmp_path / "store")
        place.mkdir() if path.is_dir() else place.symlink_to(path)
    ogb(tmp_path / "in", tmp_path / "g", **TINY)
    ogb(folder.root, tmp_path / "whole", **TINY)
    assert_same(tmp_path / "g", tmp_path / "whole")
    (tmp_path / "x.npy").symlink_to("/dev/null")
    with pytest.raises(FormatError, match=r"x\.npy"):
        open_source("x", tmp_path / "x.npy")


def test_a_dataset_within_the_folder_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own files are none of the folder's, and a link that leads back ends nowhere."""
    root = tmp_path / "in"
    ogb_folder(root)
    (root / "back").symlink_to(root)
    whole = ogb(root, root / "g", **TINY)
    interrupts = Interrupts(monkeypatch)
    report, n_calls = interrupts.until_done(lambda: ogb(root, root / "g", overwrite=True, **TINY), root / "g")
    assert n_calls == interrupts.records + 1
    assert same_reports(report, whole)


def test_a_full_drive_leaves_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, target = tmp_path / "in", tmp_path / "g"
    ogb_folder(root)
    put, n_puts = Steps.put, [0]

    def full(self: Any, *args: Any) -> None:
        put(self, *args)
        n_puts[0] += 1
        if n_puts[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(target))

    monkeypatch.setattr(Steps, "put", full)
    with pytest.raises(OSError, match="No space left"):
        ogb(root, target, **TINY)
    (left,) = tmp_path.glob("g.tmp-*")
    assert list(left.glob("*.rows"))
    ogb(root, target, **TINY)
    n_fields = len([each for each in contents(target) if each.startswith("node.")])
    assert n_puts[0] == 1 + n_fields + 1, "the adjacency, each field of nodes, and of edges: once"
    monkeypatch.undo()
    (tmp_path / "whole").mkdir()
    ogb(root, tmp_path / "whole" / "g", **TINY)
    assert contents(target) == contents(tmp_path / "whole" / "g")


def test_what_is_in_memory_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    matrix = scipy.sparse.random(50, 50, 0.1, format="csr", random_state=0)
    interrupts.left = 0
    of_matrix(matrix, tmp_path / "g", progress=False)
    scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    assert interrupts.records == 0
    with pytest.raises(KeyboardInterrupt):
        npz(tmp_path / "m.npz", tmp_path / "g", overwrite=True, progress=False)


def test_descriptions_tell_rows_apart(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    one = describe(np.arange(3))
    assert one == describe(np.arange(6)[:3])
    assert one != describe(np.arange(3) + 1)
    assert one != describe(np.arange(3, dtype=np.int32))
    assert describe(open_source("a", tmp_path / "a.npy")) == ["NpySource", "a", "int64", [3]]
    assert describe([1, 2]) is None
    assert describe(open_source("a", ((2,), "int64", iter([])))) is None
    assert inputs_of_folder(tmp_path / "none", tmp_path / "g", {}).recipe is None
