"""GraphBolt's metadata.yaml: one type and several, seeds and labels of tasks; entries that do not describe a graph."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import featstore
from featstore.adapters.datasets import graphbolt
from featstore.errors import CorruptionError, FormatError
from tests.support.commands import run
from tests.support.imports import TINY, assert_same, follow_advice, refused
from tests.support.typed import CITES, WRITES, TypedArrays

N = {"author": 30, "paper": 50}


class Bolt:
    """A folder in GraphBolt's layout: ``meta`` is what its metadata.yaml says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meta: dict[str, Any] = {"dataset_name": "test", "graph": {"nodes": [], "edges": []}, "feature_data": [], "tasks": []}

    def array(self, file: str, array: Any, /, **entry: Any) -> dict[str, Any]:
        path = self.root / f"{file}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
        return {**entry, "format": "numpy", "in_memory": False, "path": f"{file}.npy"}

    def write(self) -> Path:
        self.root.mkdir(exist_ok=True)
        (self.root / "metadata.yaml").write_text(yaml.safe_dump(self.meta))
        return self.root


def sets(bolt: Bolt, y: Any, kind: str | None, seeds: str = "seeds") -> dict[str, Any]:
    """Make the sets of a task, in an order of their own, and write their files."""
    of = {} if kind is None else {"type": kind}
    found: dict[str, Any] = {"name": "node_classification", "num_classes": 5}
    for name, ids in SETS.items():
        data = [
            bolt.array(f"set/{name}-{part}", array, name=label)
            for part, label, array in (("s", seeds, ids), ("y", "labels", y[ids]))
        ]
        found[name] = [{**of, "data": data}]
    return found


SETS = {
    "train_set": np.random.default_rng(0).permutation(50)[:20],
    "validation_set": np.random.default_rng(0).permutation(50)[20:30],
    "test_set": np.random.default_rng(0).permutation(50)[30:40],
}
SPLIT = dict(zip(("train_idx", "valid_idx", "test_idx"), SETS.values(), strict=True))


def one_type(root: Path, *, csv: bool = False) -> tuple[Bolt, dict[str, Any]]:
    rng = np.random.default_rng(4)
    bolt, edges, x, w = Bolt(root), rng.integers(0, 50, (2, 300)), rng.random((50, 6)), rng.random((300, 1)).astype(np.float32)
    y = rng.integers(0, 5, 50)
    bolt.meta["graph"]["nodes"] = [{"num": 50}]
    entry = bolt.array("edges/e", edges)
    if csv:
        (root / "edges" / "e.csv").write_text("".join(f"{s},{d}\n" for s, d in edges.T))
        entry = {"format": "csv", "path": "edges/e.csv"}
    bolt.meta["graph"]["edges"] = [entry]
    bolt.meta["feature_data"] = [
        bolt.array("data/x", x, domain="node", name="feat"),
        bolt.array("data/w", w, domain="edge", name="w"),
    ]
    bolt.meta["tasks"] = [sets(bolt, y, None)]
    known = np.full(50, -1)
    for ids in SETS.values():
        known[ids] = y[ids]
    data = {**SPLIT, "y": known}
    given = {"edge_index": edges, "num_nodes": 50, "features": {"feat": x}, "edge_features": {"w": w}, "node_data": data}
    return bolt, given


@pytest.mark.parametrize("csv", [False, True], ids=["numpy", "csv"])
def test_one_type_is_the_same_dataset(tmp_path: Path, csv: bool) -> None:
    bolt, given = one_type(tmp_path / "in", csv=csv)
    report = graphbolt(bolt.write(), tmp_path / "g", **TINY)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "made", **given, progress=False).close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.splits == {"train_idx": 20, "valid_idx": 10, "test_idx": 10}
    assert report.unlabelled == {"y": 10}


def test_several_types_are_the_same_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(5)
    bolt, y = Bolt(tmp_path / "in"), rng.integers(0, 5, 50).astype(np.float32)
    edges = {WRITES: np.stack([rng.integers(0, 30, 90), rng.integers(0, 50, 90)]), CITES: rng.integers(0, 50, (2, 200))}
    x = rng.standard_normal((50, 4)).astype(np.float16)
    bolt.meta["graph"]["nodes"] = [{"type": kind, "num": n} for kind, n in N.items()]
    bolt.meta["graph"]["edges"] = [bolt.array(f"edges/{key[1]}", pairs, type=":".join(key)) for key, pairs in edges.items()]
    bolt.meta["feature_data"] = [
        bolt.array("data/x", x, domain="node", type="paper", name="x"),
        {"domain": "graph", "name": "whole", "format": "numpy", "path": "none.npy"},
    ]
    pairs = bolt.array("set/l", edges[WRITES].T, name="seeds"), bolt.array("set/m", np.arange(90) % 3, name="labels")
    links = {
        "name": "links",
        "train_set": [{"type": "author:writes:paper", "data": [*pairs]}],
    }
    bolt.meta["tasks"] = [links, sets(bolt, y, "paper", "seed_nodes")]
    known = np.full(50, np.nan, np.float32)
    for ids in SETS.values():
        known[ids] = y[ids]
    TypedArrays(N, edges, {"paper": {"x": x}}, {"paper": {**SPLIT, "y": known}}).create(tmp_path / "made").close()
    found = run(capsys, "import", "graphbolt", bolt.write(), tmp_path / "g", "--task", "node_classification", "--memory", "9MiB")
    assert_same(tmp_path / "g", tmp_path / "made")
    assert "the feature 'whole' of the graph is left out" in found["notes"]
    assert not [each for each in found["notes"] if "links" in each]
    report = graphbolt(bolt.root / "metadata.yaml", tmp_path / "all", reverse=True, **TINY)
    assert report.edges["paper,rev_writes,author"] == 90
    assert "names of data of the task 'node_classification' begin with 'node_classification.'" in report.notes
    assert report.splits == {f"paper/node_classification.{name}": len(ids) for name, ids in SPLIT.items()}
    assert report.unlabelled == {"paper/node_classification.y": 10}
    with featstore.open(tmp_path / "all") as g:
        data = g["paper"].node_data
        assert sorted(data) == sorted(f"node_classification.{name}" for name in (*SPLIT, "y"))
        assert np.array_equal(data["node_classification.y"].numpy(), known, equal_nan=True)
        assert sorted(g["author"].node_data) == ["train_edge_labels:writes:paper", "train_edges:writes:paper"]
        assert np.array_equal(g["author"].node_data["train_edges:writes:paper"].numpy(), edges[WRITES].T)
        assert g["author"].node_data["train_edge_labels:writes:paper"].tolist() == [0, 1, 2] * 30


def test_seeds_that_are_edges_of_a_type_are_checked(tmp_path: Path) -> None:
    bolt = Bolt(tmp_path / "in")
    bolt.meta["graph"]["nodes"] = [{"type": kind, "num": n} for kind, n in N.items()]
    bolt.meta["graph"]["edges"] = [bolt.array("edges/e", np.array([[0], [49]]), type="author:writes:paper")]

    def attempt(error: type[Exception], words: str, pairs: Any, kind: Any = "author:likes:paper", **more: Any) -> None:
        entry = {"type": kind, "data": [bolt.array("set/l", pairs, name="node_pairs")]}
        bolt.meta["tasks"] = [{"name": "links", "test_set": [entry], **more}]
        refused(error, words, tmp_path / "g", lambda: graphbolt(bolt.write(), tmp_path / "g", **TINY))

    good = np.array([[29, 49], [0, 0]])
    attempt(IndexError, r"set/l.npy: test_set: seeds\[2, 0\]: 30 is not a node: ids are 0 … 29", [*good, [30, 3]])
    attempt(IndexError, r"set/l.npy: test_set: seeds\[2, 1\]: 50 is not a node: ids are 0 … 49", [*good, [3, 50]])
    attempt(IndexError, r"seeds\[0, 1\]: -1 is not a node", [[0, -1]])
    attempt(FormatError, r"must hold ids of nodes, whole numbers \[k, 2\], not int64 \[4\]", good.ravel())
    attempt(FormatError, r"must hold ids of nodes, whole numbers \[k, 2\], not float64", good / 2)
    attempt(FormatError, r"must hold ids of nodes, whole numbers \[k\], not int64 \[2, 2\]", good, "paper")
    attempt(FormatError, "type 'author:likes:book': there is no type 'book'", good, "author:likes:book")
    attempt(FormatError, "type None is not SOURCE:RELATION:DESTINATION", good, None)
    seeds = bolt.array("set/l", good, name="seeds")
    twice = [{"type": "author:likes:paper", "data": [seeds]}] * 2
    of_set = "train_set of type 'author:likes:paper'"
    attempt(FormatError, f"{of_set}: 'train_edges:likes:paper' is there twice", good, train_set=twice)
    twice = [{"type": "author:likes:paper", "data": [seeds, seeds]}]
    attempt(FormatError, f"{of_set}: 'seeds' is there twice", good, train_set=twice)
    numbers = bolt.array("set/n", np.arange(2), name="idx")
    ids = [{"type": "author", "data": [bolt.array("set/i", np.arange(2), name="seeds"), numbers]}]
    attempt(FormatError, "train_set of type 'author': 'train_idx' is there twice", good, train_set=ids)
    bolt.meta["tasks"] = [{"name": "links", "test_set": [{"type": "author:likes:paper", "data": [seeds]}]}] * 2
    refused(FormatError, "tasks: 'links' is there twice", tmp_path / "g", lambda: graphbolt(bolt.write(), tmp_path / "g", **TINY))
    long = "author:" + "r" * 60 + ":paper"
    bolt.meta["tasks"].pop()
    bolt.meta["tasks"][0]["train_set"] = [{"type": long, "data": [seeds]}]
    notes = graphbolt(bolt.write(), tmp_path / "g", **TINY).notes
    assert [
        each for each in notes if each.startswith(f"train_set of type {long!r}: ") and "is left out: a field has a name" in each
    ]
    with featstore.open(tmp_path / "g") as g:
        assert g["author"].node_data["test_edges:likes:paper"].tolist() == good.tolist()


def test_pairs_as_seeds_are_node_data(tmp_path: Path) -> None:
    bolt, _ = one_type(tmp_path / "in")
    pairs, labels = np.arange(18).reshape(9, 2), np.arange(9) % 2
    data = [bolt.array("set/l", pairs, name="seeds"), bolt.array("set/m", labels, name="labels")]
    data.append(bolt.array("set/n", np.arange(9), name="indexes"))
    links = {"name": "links", "train_set": [{"data": data[:1]}], "validation_set": [{"data": data}]}
    bolt.meta["tasks"] = [links | {"test_set": [{"data": []}]}]
    report = graphbolt(bolt.write(), tmp_path / "g", **TINY)
    left_out = "test_set of the nodes is left out, with its labels: it has no seeds and no seed_nodes and no node_pairs"
    assert left_out in report.notes
    assert not report.splits
    with featstore.open(tmp_path / "g") as g:
        assert sorted(g.node_data) == ["train_edges", "valid_edge_indexes", "valid_edge_labels", "valid_edges"]
        assert np.array_equal(g.node_data["train_edges"].numpy(), pairs)
        assert g.node_data["valid_edge_labels"].tolist() == labels.tolist()
    bolt.array("set/l", pairs + 41, name="seeds")
    with pytest.raises(IndexError, match=r"seeds\[4, 1\]: 50 is not a node"):
        graphbolt(bolt.write(), tmp_path / "other", **TINY)


WRONG: dict[str, tuple[Any, type[BaseException], str]] = {
    "no graph": (lambda meta: meta.pop("graph"), FormatError, "graph must be a mapping"),
    "preprocessed": (
        lambda meta: meta.update(graph_topology=meta.pop("graph")),
        FormatError,
        "GraphBolt's preprocessed folder, .*give the folder above it",
    ),
    "no nodes": (lambda meta: meta["graph"].pop("nodes"), FormatError, "nodes must name the nodes"),
    "no number": (
        lambda meta: meta["graph"].update(nodes=[{"num": "many"}]),
        FormatError,
        "num must be a number of nodes, not 'many'",
    ),
    "no edges": (lambda meta: meta["graph"].update(edges=[]), FormatError, "edges must name the edges"),
    "too few nodes": (
        lambda meta: meta["graph"].update(nodes=[{"num": 49}]),
        (IndexError, FormatError),
        "49 is not a node|expected 49",
    ),
    "an unknown type": (lambda meta: meta["graph"]["edges"][0].update(type="a:b:c"), FormatError, "no type 'a' of nodes"),
    "no type": (lambda meta: meta["graph"]["edges"][0].update(type="ab"), FormatError, "'ab' is not SOURCE:RELATION:DESTINATION"),
    "two nodes without types": (lambda meta: meta["graph"].update(nodes=[{"num": 5}, {"num": 5}]), FormatError, "is there twice"),
    "a file that is not there": (lambda meta: meta["feature_data"][0].update(path="gone.npy"), FileNotFoundError, ""),
    "no path": (lambda meta: meta["feature_data"][0].pop("path"), FormatError, "path must be a file, not None"),
    "of torch": (lambda meta: meta["feature_data"][0].update(format="torch"), FormatError, "format torch: .*can run code.*load"),
    "another format": (lambda meta: meta["feature_data"][0].update(format="zarr"), FormatError, "format 'zarr' .* none of numpy"),
    "another domain": (lambda meta: meta["feature_data"][0].update(domain="tree"), FormatError, "domain 'tree' is none"),
    "features no list": (lambda meta: meta.update(feature_data={"a": 1}), FormatError, "feature_data must be a list, not dict"),
    "an entry no mapping": (lambda meta: meta.update(tasks=["x"]), FormatError, r"tasks\[0\] must be a mapping"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_entries_are_named(tmp_path: Path, case: str) -> None:
    change, error, words = WRONG[case]
    bolt, _ = one_type(tmp_path / "in")
    change(bolt.meta)
    bolt.write()
    refused(error, words, tmp_path / "g", lambda: graphbolt(bolt.root, tmp_path / "g", **TINY))


def test_arrays_of_torch_are_read_after_the_advised_conversion(tmp_path: Path) -> None:
    bolt, given = one_type(tmp_path / "in")
    entry = bolt.meta["feature_data"][0]
    torch.save(torch.from_numpy(np.load(bolt.root / "data" / "x.npy")), bolt.root / "data" / "x.pt")
    entry.update(format="torch", path="data/x.pt")
    caught = refused(FormatError, "format torch", tmp_path / "g", lambda: graphbolt(bolt.write(), tmp_path / "g", **TINY))
    follow_advice(caught.value)
    entry.update(format="numpy", path="data/x.pt.npy")
    graphbolt(bolt.write(), tmp_path / "g", **TINY)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "made", **given, progress=False).close()
    assert_same(tmp_path / "g", tmp_path / "made")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    bolt, _ = one_type(tmp_path / "in")
    root = bolt.write()

    def attempt(error: type[BaseException], words: str, **options: Any) -> None:
        refused(error, words, tmp_path / "g", lambda: graphbolt(root, tmp_path / "g", **options, **TINY))

    attempt(ValueError, "task: .* has no 'other'; it has node_classification", task="other")
    good = np.load(root / "set" / "train_set-s.npy")
    np.save(root / "set" / "train_set-s.npy", np.where(good == good[3], 50, good))
    attempt(IndexError, r"train_set-s.npy: train_set: seeds\[3\]: 50 is not a node: ids are 0 … 49")
    np.save(root / "set" / "train_set-s.npy", good[:-1])
    attempt(FormatError, "train_set: labels has 20 rows; expected 19")
    np.save(root / "set" / "train_set-s.npy", good)
    np.save(root / "set" / "test_set-y.npy", np.zeros(10, np.float32))
    attempt(FormatError, "test_set: labels: float32 .*; the sets before have int64")
    (root / "metadata.yaml").write_text("graph: [1, 2\n")
    attempt(FormatError, "metadata.yaml: not YAML")
    (root / "metadata.yaml").write_text("!!python/object/apply:os.getcwd []\n")
    attempt(FormatError, "metadata.yaml: not YAML: could not determine a constructor")
    (root / "metadata.yaml").write_text("")
    attempt(FormatError, "metadata.yaml: the file must be a mapping")
    (root / "metadata.yaml").unlink()
    attempt(FormatError, f"{root}: there is no metadata.yaml in it; give the folder of one dataset, such as ")
    root = root / "gone"
    attempt(FileNotFoundError, "gone/metadata.yaml")


HOSTILE_CSV: dict[str, tuple[bytes, type[Exception], str]] = {
    "e.csv": (b"0,1\n1,3\n", IndexError, "e.csv, line 2: 3 is not a node: ids are 0 … 2"),
    "text.csv": (b"0,1\n1,x\n", FormatError, "text.csv, line 2, column 2: .*'x'"),
    "header.csv": (b"src,dst\n1,2\n", FormatError, "header.csv, line 1, column 1: .*'src'; .*GraphBolt's CSV has no header"),
    "weights.csv": (b"0,1,9\n1,2,9\n", FormatError, "weights.csv, line 1: Expected 2 columns, got 3.*; edges .* two columns"),
    "column.csv": (b"0,1\n1\n", FormatError, "column.csv, line 2: Expected 2 columns, got 1"),
    "empty.csv": (b"", FormatError, "empty.csv: the file is empty"),
    "cut.csv.gz": (gzip.compress(b"0,1\n" * 1000)[:-9], CorruptionError, "not a whole gzip file"),
    "empty.npy": (b"", FormatError, "empty.npy: the file is empty"),
}


def test_hostile_edges_are_named_and_harmless_forms_are_read(tmp_path: Path) -> None:
    def read(name: str, data: bytes) -> Any:
        form = "numpy" if name.endswith(".npy") else "csv"
        (tmp_path / name).write_bytes(data)
        graph = {"nodes": [{"num": 3}], "edges": [{"format": form, "path": name}]}
        (tmp_path / "metadata.yaml").write_text(yaml.safe_dump({"graph": graph}))
        return graphbolt(tmp_path, tmp_path / "g", overwrite=True, **TINY)

    for name, (data, error, words) in HOSTILE_CSV.items():
        with pytest.raises(error, match=words):
            read(name, data)
        assert not list(tmp_path.glob("g*"))
    for data in (b"\xef\xbb\xbf0,1\r\n1,2\r\n", b'"0","1"\n"1","2"\n', b"0,1\n1,2"):
        read("fine.csv", data)
        with featstore.open(tmp_path / "g", memory="64MiB") as g:
            assert np.concatenate([block.numpy() for block in g.edges()], axis=1).tolist() == [[0, 1], [1, 2]]


def test_entries_that_are_there_twice_and_hostile_ones_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "bolt"
    folder.mkdir()
    np.save(folder / "e.npy", np.array([[0, 1], [1, 2]]))
    np.save(folder / "x.npy", np.ones((3, 2), np.float32))
    os.mkfifo(folder / "fifo")
    edge, feature = {"format": "numpy", "path": "e.npy"}, {"domain": "node", "name": "x", "format": "numpy", "path": "x.npy"}

    def attempt(words: str, text: str | None = None, *, num: int = 3, edges: Any = (edge,), features: Any = ()) -> None:
        graph = {"nodes": [{"num": num}], "edges": list(edges)}
        text = text or yaml.safe_dump({"graph": graph, "feature_data": list(features)})
        (folder / "metadata.yaml").write_text(text)
        with pytest.raises(FormatError, match=words):
            graphbolt(folder, tmp_path / "g", progress=False, memory="64MiB")
        assert not list(tmp_path.glob("g*"))

    attempt("type '_:_:_' is there twice", edges=[edge, edge])
    attempt("feature_data: x is there twice for one type", features=[feature, feature])
    for num in (10**12, 2**63, 10**27):
        attempt(f"metadata.yaml: {num} nodes are said to be there, whose offsets alone take {8 * num} bytes", num=num)
    attempt("a number has more than 256 bits", num=10**100)
    attempt("fifo: a FIFO in place of a file", edges=[{"format": "csv", "path": "fifo"}])
    attempt("path must be a file", edges=[{"format": "csv", "path": "a\0b"}])
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]]))
    (folder / "link").symlink_to(folder)
    for path in ("../e.npy", str(tmp_path / "e.npy"), "link/../e.npy", "..", "", "/"):
        attempt("metadata.yaml: graph: edges: path .* leads out of the folder", edges=[{"format": "numpy", "path": path}])
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    attempt("with those that aliases", "\n".join([*lines, "graph: {nodes: [{num: *a8}], edges: []}"]))


def test_files_in_the_folder_may_be_links_and_have_absolute_paths(tmp_path: Path) -> None:
    bolt, given = one_type(tmp_path / "in")
    x = bolt.root / "data" / "x.npy"
    x.rename(tmp_path / "x.npy")
    x.symlink_to(tmp_path / "x.npy")
    entry = bolt.meta["graph"]["edges"][0]
    entry["path"] = str(bolt.root / entry["path"])
    graphbolt(bolt.write(), tmp_path / "g", **TINY)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "made", **given, progress=False).close()
    assert_same(tmp_path / "g", tmp_path / "made")


def test_labels_without_room_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bolt, _ = one_type(tmp_path / "in")

    def full(fd: int, first: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        graphbolt(bolt.write(), tmp_path / "g", progress=False)
    assert not list(tmp_path.glob("g*"))
