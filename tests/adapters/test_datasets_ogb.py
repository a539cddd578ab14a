"""OGB's folders in all forms against datasets of the same arrays; hostile files, each a named error that leaves nothing."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.adapters.datasets import ogb
from featstore.cli.main import main
from featstore.errors import CorruptionError, FormatError
from tests.support.commands import run
from tests.support.imports import TINY, Folder, assert_same, follow_advice, refused, write_csv
from tests.support.typed import CITES, WRITES, TypedArrays

FORMS = ("binary", "csv")


@pytest.mark.parametrize("form", FORMS)
def test_one_type_is_the_same_dataset(tmp_path: Path, form: str) -> None:
    folder = Folder(tmp_path / "in")
    getattr(folder, form)()
    report = ogb(folder.root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", folder.make(tmp_path / "made"))
    assert (report.nodes, report.edges, report.edges_read) == ({"_": 60}, {"_,_,_": 500}, 500)
    assert report.splits == {"train_idx": 30, "valid_idx": 7, "test_idx": 23}
    assert report.unlabelled == {"y": 0}
    assert (report.features, report.edge_features) == ({"x": [60, 7]}, {"edge_feat": [500, 2]})
    assert "the split is 'time'" in report.notes


def test_stored_members_are_read_as_deflated_ones(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in").binary(compressed=False)
    ogb(folder.root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", folder.make(tmp_path / "made"))


def test_arrays_in_the_order_of_columns(tmp_path: Path) -> None:
    """As pandas gives them to OGB's writer."""
    folder = Folder(tmp_path / "in")
    folder.edges, folder.x = np.asfortranarray(folder.edges), np.asfortranarray(folder.x)
    folder.binary()
    ogb(folder.root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", folder.make(tmp_path / "made"))


def test_many_blocks(tmp_path: Path) -> None:
    """More edges and rows than one block of any reader has."""
    for form in FORMS:
        folder = Folder(tmp_path / form, n=20_000, n_edges=140_000)
        getattr(folder, form)()
        ogb(folder.root, tmp_path / f"{form}-g", **TINY)
        assert_same(tmp_path / f"{form}-g", folder.make(tmp_path / f"{form}-made"))


@pytest.mark.parametrize("form", FORMS)
def test_inverse_edges_are_those_of_the_loader(tmp_path: Path, form: str) -> None:
    """OGB repeats each edge, and exchanges the ends of the second ones; the folder's name decides, or the option."""
    folder = Folder(tmp_path / "ogbn_products")
    getattr(folder, form)()
    doubled = np.repeat(folder.edges, 2, axis=1)
    doubled[:, 1::2] = doubled[::-1, 0::2]
    made = folder.make(tmp_path / "made", edge_index=doubled, edge_features={"edge_feat": np.repeat(folder.weight, 2, axis=0)})
    report = ogb(folder.root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", made)
    assert (report.edges_read, report.reverses_added, report.edges) == (500, 500, {"_,_,_": 1000})
    ogb(folder.root, tmp_path / "plain", add_inverse_edge=False, **TINY)
    assert_same(tmp_path / "plain", folder.make(tmp_path / "made-plain"))


def test_cleaned_edges_are_counted(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in").csv()
    (folder.root / "raw" / "edge-feat.csv.gz").unlink()
    kept = folder.edges[:, folder.edges[0] != folder.edges[1]]
    for options in ({"coalesce": True}, {"remove_self_loops": True}, {"to_undirected": True, "remove_self_loops": True}):
        report = ogb(folder.root, tmp_path / "g", overwrite=True, **options, **TINY)
        assert_same(tmp_path / "g", folder.make(tmp_path / "made", edge_features=None, overwrite=True, **options))
        n_loops = 500 - kept.shape[1]
        assert report.loops_dropped == (n_loops if "remove_self_loops" in options else 0)
        assert report.reverses_added == (kept.shape[1] if "to_undirected" in options else 0)
        n_made = report.edges_read + report.reverses_added - report.loops_dropped - report.duplicates_dropped
        assert report.edges == {"_,_,_": n_made}
    assert report.duplicates_dropped == 2 * kept.shape[1] - len(np.unique(np.concatenate([kept, kept[::-1]], 1), axis=1).T)


def typed(root: Path) -> TypedArrays:
    rng = np.random.default_rng(3)
    n = {"author": 30, "paper": 50}
    edges = {CITES: rng.integers(0, 50, (2, 200)), WRITES: np.stack([rng.integers(0, 30, 90), rng.integers(0, 50, 90)])}
    x = rng.standard_normal((50, 4)).astype(np.float32)
    split = {"train_idx": np.arange(20), "valid_idx": np.arange(20, 30), "test_idx": np.arange(30, 50)}
    data = {"paper": {"node_year": rng.integers(1990, 2020, (50, 1)), "y": rng.integers(0, 3, (50, 1)), **split}}
    kinds = {WRITES: {"edge_reltype": rng.integers(0, 3, (90, 1))}}
    return TypedArrays(n, edges, {"paper": {"x": x}}, data, kinds)


def write_text(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def write_typed_csv(graph: TypedArrays, root: Path) -> None:
    """The layout of ogbn-mag."""
    raw, of_papers = root / "raw", graph.data["paper"]
    raw.mkdir(parents=True)
    write_text(raw / "num-node-dict.csv.gz", "author,paper\n30,50\n")
    write_csv(raw / "triplet-type-list.csv.gz", [list(key) for key in graph.edges])
    for key, pairs in graph.edges.items():
        folder = raw / "relations" / "___".join(key)
        write_csv(folder / "edge.csv.gz", pairs.T)
        write_csv(folder / "num-edge-list.csv.gz", [pairs.shape[1]])
    write_csv(raw / "relations" / "___".join(WRITES) / "edge_reltype.csv.gz", graph.edge_features[WRITES]["edge_reltype"])
    write_csv(raw / "node-feat" / "paper" / "node-feat.csv.gz", graph.features["paper"]["x"])
    write_csv(raw / "node-feat" / "paper" / "node_year.csv.gz", of_papers["node_year"])
    write_text(raw / "nodetype-has-label.csv.gz", "author,paper\nFalse,True\n")
    write_csv(raw / "node-label" / "paper" / "node-label.csv.gz", of_papers["y"])
    split = root / "split" / "time"
    for name in ("train", "valid", "test"):
        write_csv(split / "paper" / f"{name}.csv.gz", of_papers[f"{name}_idx"])
    write_text(split / "nodetype-has-split.csv.gz", "author,paper\nFalse,True\n")


def write_typed_binary(graph: TypedArrays, root: Path) -> None:
    raw, of_papers = root / "raw", graph.data["paper"]
    raw.mkdir(parents=True)
    names: dict[Any, Any] = {"___".join(key): pairs for key, pairs in graph.edges.items()}
    np.savez_compressed(raw / "num_nodes_dict.npz", **{kind: np.array([n]) for kind, n in graph.n.items()})
    np.savez_compressed(raw / "num_edges_dict.npz", **{name: np.array([pairs.shape[1]]) for name, pairs in names.items()})
    np.savez_compressed(raw / "edge_index_dict.npz", **names)
    np.savez_compressed(raw / "node_feat_dict.npz", paper=graph.features["paper"]["x"])
    np.savez_compressed(raw / "node_year.npz", paper=of_papers["node_year"])
    relation: Any = {"___".join(WRITES): graph.edge_features[WRITES]["edge_reltype"]}
    np.savez_compressed(raw / "edge_reltype.npz", **relation)
    np.savez_compressed(raw / "node-label.npz", paper=of_papers["y"])
    (root / "split" / "time").mkdir(parents=True)
    torch.save(
        {name: {"paper": torch.from_numpy(of_papers[f"{name}_idx"])} for name in ("train", "valid", "test")},
        root / "split" / "time" / "split_dict.pt",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_several_types_are_the_same_dataset(tmp_path: Path, form: str, reverse: bool) -> None:
    graph, root = typed(tmp_path), tmp_path / "in"
    {"binary": write_typed_binary, "csv": write_typed_csv}[form](graph, root)
    if form == "binary":
        follow_advice(refused(FormatError, "can run code", tmp_path / "g", lambda: ogb(root, tmp_path / "g", **TINY)).value)
    report = ogb(root, tmp_path / "g", reverse=reverse, **TINY)
    if reverse:
        back = ("paper", "rev_writes", "author")
        graph.edges[back] = graph.edges[WRITES][::-1]
        graph.edge_features[back] = graph.edge_features[WRITES]
    graph.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    assert report.splits == {"paper/train_idx": 20, "paper/valid_idx": 10, "paper/test_idx": 20}
    assert report.edges["author,writes,paper"] == 90
    assert (report.edges_read, report.reverses_added) == (290, 90 if reverse else 0)


def test_splits_of_torch_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in").binary()
    shutil.rmtree(folder.root / "split")
    place = folder.root / "split" / "it's $(mine)"
    place.mkdir(parents=True)
    torch.save(dict(folder.splits), place / "split_dict.pt")
    caught = refused(
        FormatError, "split_dict.pt: .* can run code", tmp_path / "g", lambda: ogb(folder.root, tmp_path / "g", **TINY)
    )
    follow_advice(caught.value)
    ogb(folder.root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", folder.make(tmp_path / "made"))


def torch_files(folder: Path, splits: dict[str, Any]) -> None:
    """Write each split as a file of its own, in place of its CSV."""
    for name, ids in splits.items():
        torch.save(torch.from_numpy(ids), folder / f"{name}.pt")
        (folder / f"{name}.csv.gz").unlink()


def test_a_file_of_torch_for_each_split(tmp_path: Path) -> None:
    """The advice makes one archive of all of them; a split that is CSV is read beside it."""
    for names in (("train", "valid", "test"), ("valid", "test")):
        folder = Folder(tmp_path / f"it's {len(names)}").binary()
        torch_files(folder.root / "split" / "time", {name: folder.splits[name] for name in names})
        caught = refused(FormatError, "can run code", tmp_path / "g", lambda of=folder: ogb(of.root, tmp_path / "g", **TINY))
        follow_advice(caught.value)
        ogb(folder.root, tmp_path / "g", overwrite=True, **TINY)
        assert_same(tmp_path / "g", folder.make(tmp_path / "made", overwrite=True))
        shutil.rmtree(tmp_path / "g")
    typed_root, graph = tmp_path / "typed", typed(tmp_path)
    write_typed_csv(graph, typed_root)
    splits = {name: graph.data["paper"][f"{name}_idx"] for name in ("train", "valid", "test")}
    torch_files(typed_root / "split" / "time" / "paper", splits)
    follow_advice(refused(FormatError, "can run code", tmp_path / "g", lambda: ogb(typed_root, tmp_path / "g", **TINY)).value)
    ogb(typed_root, tmp_path / "g", **TINY)
    graph.create(tmp_path / "made-typed").close()
    assert_same(tmp_path / "g", tmp_path / "made-typed")


def written_by_ogb(name: str, graph: dict[str, Any], labels: Any, splits: dict[str, Any], *, is_hetero: bool) -> Path:
    """Write a folder by OGB's own writer of datasets."""
    from ogb.io import DatasetSaver  # takes more than a second

    saver = DatasetSaver(name, is_hetero, 1)
    saver.save_graph_list([graph])
    saver.save_target_labels(labels)
    saver.save_split(splits, "time")
    return Path(saver.dataset_dir)


@pytest.fixture
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the writer's bars begin a thread that stays


@pytest.mark.usefixtures("_no_monitor")
def test_what_its_own_writer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alike = Folder(tmp_path / "alike")
    graph = {"edge_index": alike.edges, "num_nodes": alike.n, "node_feat": alike.x, "node_year": alike.year}
    graph["edge_feat"] = alike.weight
    root = written_by_ogb("ogbn-alike", graph, alike.y, alike.splits, is_hetero=False)
    follow_advice(refused(FormatError, "can run code", tmp_path / "g", lambda: ogb(root, tmp_path / "g", **TINY)).value)
    ogb(root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", alike.make(tmp_path / "made"))


@pytest.mark.usefixtures("_no_monitor")
def test_what_its_own_writer_writes_of_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    types = typed(tmp_path)
    types.edges = dict(sorted(types.edges.items()))  # as the writer does
    of_papers, reltype = types.data["paper"], types.edge_features[WRITES]["edge_reltype"]
    graph = {"edge_index_dict": types.edges, "num_nodes_dict": types.n, "node_feat_dict": {"paper": types.features["paper"]["x"]}}
    graph |= {"node_year": {"paper": of_papers["node_year"]}, "edge_reltype": {WRITES: reltype}}
    splits = {name: {"paper": of_papers[f"{name}_idx"]} for name in ("train", "valid", "test")}
    root = written_by_ogb("ogbn-types", graph, {"paper": of_papers["y"]}, splits, is_hetero=True)
    follow_advice(refused(FormatError, "can run code", tmp_path / "g", lambda: ogb(root, tmp_path / "g", **TINY)).value)
    ogb(root, tmp_path / "g", **TINY)
    types.create(tmp_path / "made").close()
    assert_same(tmp_path / "g", tmp_path / "made")
    refused(ValueError, "reverse=True adds", tmp_path / "h", lambda: ogb(root, tmp_path / "h", add_inverse_edge=True, **TINY))


def test_labels_without_a_value_are_counted(tmp_path: Path) -> None:
    """As in ogbn-papers100M, float32 with NaN; in CSV they are empty."""
    for form in FORMS:
        folder = Folder(tmp_path / form)
        folder.y = folder.y.astype(np.float32)
        folder.y[::3] = np.nan
        getattr(folder, form)()
        assert ogb(folder.root, tmp_path / f"{form}-g", **TINY).unlabelled == {"y": 20}
        assert_same(tmp_path / f"{form}-g", folder.make(tmp_path / f"{form}-made"))


def test_rows_of_csv_that_lack_a_value_are_counted(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in").csv()
    path = folder.root / "raw" / "node-feat.csv.gz"
    lines = gzip.decompress(path.read_bytes()).split(b"\n")
    for at in (3, 40):
        lines[at] = lines[at].rpartition(b",")[0] + b","
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    notes = ogb(folder.root, tmp_path / "g", **TINY).notes
    assert f"2 rows of x lack a value, which is NaN there: {path}" in notes
    assert len([each for each in notes if "lack a value" in each]) == 1
    with featstore.open(tmp_path / "g") as g:
        assert torch.isnan(g.features["x"][:]).any(1).nonzero().flatten().tolist() == [3, 40]


def test_a_split_is_chosen(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in").binary().write_splits("random")
    refused(ValueError, "several splits: random, time; split", tmp_path / "g", lambda: ogb(folder.root, tmp_path / "g", **TINY))
    refused(
        ValueError,
        "has no 'year'; it has random, time",
        tmp_path / "g",
        lambda: ogb(folder.root, tmp_path / "g", split="year", **TINY),
    )
    assert "the split is 'random'" in ogb(folder.root, tmp_path / "g", split="random", **TINY).notes
    shutil.rmtree(folder.root / "split")
    assert ogb(folder.root, tmp_path / "none", **TINY).splits == {}


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the text of a CSV file of a folder."""

    def apply(root: Path) -> None:
        path = root / name
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

    return apply


def line(number: int, text: bytes) -> Callable[[bytes], bytes]:
    """Replace a line of a text."""

    def change(old: bytes) -> bytes:
        lines = old.split(b"\n")
        lines[number - 1] = text
        return b"\n".join(lines)

    return change


def cut(name: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        path = root / name
        path.write_bytes(path.read_bytes()[:-9])

    return apply


EDGES, FEATURES, LABELS = "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz"
HOSTILE: dict[str, tuple[Callable[[Path], None], type[BaseException], str]] = {
    "fewer edges": (
        rewritten("raw/num-edge-list.csv.gz", lambda _: b"501\n"),
        FormatError,
        r"edge.csv.gz ends after line 500; expected 501",
    ),
    "more edges": (rewritten("raw/num-edge-list.csv.gz", lambda _: b"499\n"), FormatError, r"edge.csv.gz, line 500: more lines"),
    "fewer nodes": (
        rewritten("raw/num-node-list.csv.gz", lambda _: b"59\n"),
        (IndexError, FormatError),
        r"csv.gz, line \d+: 59 is not a node",
    ),
    "an id too large": (
        rewritten(EDGES, line(123, b"3,60")),
        IndexError,
        r"edge.csv.gz, line 123: 60 is not a node: ids are 0 … 59",
    ),
    "a negative id": (rewritten(EDGES, line(500, b"-1,2")), IndexError, r"edge.csv.gz, line 500: -1 is not a node"),
    "text": (rewritten(EDGES, line(77, b"3,abc")), FormatError, r"edge.csv.gz, line 77, column 2: .*'abc'"),
    "a fraction": (rewritten(EDGES, line(77, b"3.5,1")), FormatError, r"edge.csv.gz, line 77, column 1: .*'3.5'"),
    "a value missing": (rewritten(EDGES, line(78, b"3,")), FormatError, r"edge.csv.gz, line 78: there is no value in column 2"),
    "a column missing": (rewritten(EDGES, line(79, b"3")), FormatError, r"edge.csv.gz, line 79: Expected 2 columns, got 1"),
    "a column too many": (rewritten(EDGES, line(80, b"3,4,5")), FormatError, r"edge.csv.gz, line 80: Expected 2 columns, got 3"),
    "a header": (
        rewritten(EDGES, lambda text: b"src,dst\n" + text),
        FormatError,
        r"edge.csv.gz, line 1, column 1: .*'src'; .*header",
    ),
    "a header of features": (
        rewritten(FEATURES, lambda text: b"a,b,c,d,e,f,g\n" + text),
        FormatError,
        r"node-feat.csv.gz, line 1, column 1: .*'a'; .*no header",
    ),
    "a fraction that is whole": (rewritten(EDGES, line(1, b"51.0,1")), FormatError, r"line 1, column 1: .*'51.0'; .*write 51"),
    "an empty line": (rewritten(EDGES, line(81, b"")), FormatError, r"edge.csv.gz, line 81"),
    "three columns": (
        rewritten(EDGES, lambda _: b"1,2,3\n" * 500),
        FormatError,
        r"edge.csv.gz, line 1: Expected 2 columns, got 3.*; edges .* two columns, source and destination",
    ),
    "no edges": (rewritten(EDGES, lambda _: b""), FormatError, "edge.csv.gz: the file is empty"),
    "an empty file": (lambda root: (root / EDGES).write_bytes(b"") and None, FormatError, "edge.csv.gz: the file is empty"),
    "a truncated file": (cut(EDGES), CorruptionError, "not a whole gzip file"),
    "a truncated file of features": (cut(FEATURES), CorruptionError, "not a whole gzip file"),
    "not gzip": (lambda root: (root / EDGES).write_bytes(b"1,2\n" * 500) and None, CorruptionError, "not a whole gzip file"),
    "text among features": (
        rewritten(FEATURES, line(5, b"1,2,3,x,5,6,7")),
        FormatError,
        "node-feat.csv.gz, line 5, column 4: .*'x'",
    ),
    "a row too short": (
        rewritten(FEATURES, line(6, b"1,2,3")),
        FormatError,
        "node-feat.csv.gz, line 6: Expected 7 columns, got 3",
    ),
    "too few features": (
        rewritten(FEATURES, lambda text: b"\n".join(text.split(b"\n")[:40])),
        FormatError,
        "ends after line 40; expected 60",
    ),
    "too few labels": (
        rewritten(LABELS, lambda text: b"1\n2\n"),
        FormatError,
        "node-label.csv.gz ends after line 2; expected 60",
    ),
    "two graphs": (rewritten("raw/num-node-list.csv.gz", lambda _: b"30\n30\n"), FormatError, "numbers of 2 graphs"),
    "a split of no node": (
        rewritten("split/time/valid.csv.gz", lambda _: b"1\n60\n"),
        IndexError,
        r"valid.csv.gz, line 2: 60 is not a node",
    ),
    "a split of text": (
        rewritten("split/time/test.csv.gz", lambda _: b"1\nfour\n"),
        FormatError,
        r"test.csv.gz, line 2, column 1: .*'four'",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Folder(tmp_path_factory.mktemp("good") / "in").csv().root


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_named(good: Path, tmp_path: Path, case: str) -> None:
    change, error, words = HOSTILE[case]
    root = shutil.copytree(good, tmp_path / "in")
    change(root)
    refused(error, words, tmp_path / "g", lambda: ogb(root, tmp_path / "g", **TINY))


def test_types_that_are_no_names_of_folders_are_named(tmp_path: Path) -> None:
    root = tmp_path / "in"
    write_typed_csv(typed(root), root)
    for name, old, new, what in (
        ("num-node-dict", b"author", b"../../../elsewhere", "'../../../elsewhere' is no name of a type"),
        ("num-node-dict", b"author", b"..", "'..' is no name of a type"),
        ("triplet-type-list", b"writes", b"x/../../../elsewhere", "'x/../../../elsewhere' is no name of a type"),
    ):
        path = root / "raw" / f"{name}.csv.gz"
        before = path.read_bytes()
        path.write_bytes(gzip.compress(gzip.decompress(before).replace(old, new)))
        refused(FormatError, what, tmp_path / "g", lambda: ogb(root, tmp_path / "g", **TINY))
        path.write_bytes(before)


def test_an_old_dataset_stays(good: Path, tmp_path: Path, small_pieces: None) -> None:
    folder = Folder(tmp_path / "old").binary()
    ogb(folder.root, tmp_path / "g", **TINY)
    root = shutil.copytree(good, tmp_path / "in")
    HOSTILE["an id too large"][0](root)
    refused(IndexError, "line 123", tmp_path / "g", lambda: ogb(root, tmp_path / "g", overwrite=True, **TINY))
    assert_same(tmp_path / "g", folder.make(tmp_path / "made"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: b"\n".join(
            b",".join(b'"' + each + b'"' for each in row.split(b",")) if row else row for row in text.split(b"\n")
        ),
        lambda text: text.removesuffix(b"\n"),
    ],
    ids=["byte order mark", "carriage returns", "quoted", "no end of the last line"],
)
def test_harmless_forms_of_csv_are_read(good: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    root = shutil.copytree(good, tmp_path / "in")
    for path in root.rglob("*.csv.gz"):
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    ogb(root, tmp_path / "g", **TINY)
    assert_same(tmp_path / "g", Folder(tmp_path / "arrays").make(tmp_path / "made"))


def spoil(name: str, **arrays: Any) -> Callable[[Path], None]:
    """Replace arrays of an archive; None removes one."""

    def apply(root: Path) -> None:
        with np.load(root / name) as archive:
            kept = dict(archive)
        new = {key: value for key, value in {**kept, **arrays}.items() if value is not None}
        np.savez_compressed(root / name, **new)

    return apply


def flip(name: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[len(data) // 3] ^= 0xFF
        (root / name).write_bytes(data)

    return apply


DATA = "raw/data.npz"
HOSTILE_ARCHIVES: dict[str, tuple[Callable[[Path], None], Any, str]] = {
    "wrong number of edges": (spoil(DATA, num_edges_list=np.array([7])), FormatError, "edge_index has 500 edges; expected 7"),
    "wrong number of nodes": (spoil(DATA, num_nodes_list=np.array([61])), FormatError, "node_feat has 60 rows; expected 61"),
    "an id too large": (
        spoil(DATA, edge_index=np.full((2, 500), 60)),
        IndexError,
        r"data.npz: edge_index\[0, 0\]: 60 is not a node",
    ),
    "edges of floats": (spoil(DATA, edge_index=np.zeros((2, 500))), FormatError, "edge_index must hold integers, not float64"),
    "pairs": (spoil(DATA, edge_index=np.zeros((500, 2), np.int64)), FormatError, r"must have shape \[2, E\], not \[500, 2\]"),
    "no edges": (spoil(DATA, edge_index=None), FormatError, "no array 'edge_index'; it has"),
    "an array of neither": (spoil(DATA, graph_id=np.zeros(60)), FormatError, "'graph_id' is neither of nodes"),
    "a label too few": (
        spoil("raw/node-label.npz", node_label=np.zeros((59, 1))),
        FormatError,
        "node_label has 59 rows; expected 60",
    ),
    "objects": (spoil(DATA, node_name=np.array([None] * 60)), FormatError, "member node_name: .*numbers: it has Python objects"),
    "counts of floats": (spoil(DATA, num_nodes_list=np.array([60.0])), FormatError, "num_nodes_list must hold whole numbers"),
    "a flipped bit": (flip(DATA), (CorruptionError, FormatError), "data.npz"),
    "cut short": (cut(DATA), FormatError, "data.npz: not a .npz archive, or cut short"),
    "empty": (lambda root: (root / DATA).write_bytes(b"") and None, FormatError, "data.npz: not a .npz archive"),
    "gone": (lambda root: (root / DATA).unlink(), FormatError, "none of the files"),
}


@pytest.mark.parametrize("case", HOSTILE_ARCHIVES)
def test_hostile_archives_are_named(tmp_path: Path, case: str) -> None:
    change, error, words = HOSTILE_ARCHIVES[case]
    folder = Folder(tmp_path / "in").binary()
    change(folder.root)
    refused(error, words, tmp_path / "g", lambda: ogb(folder.root, tmp_path / "g", **TINY))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    refused(
        FormatError,
        "no folder 'raw'.*dataset/ogbn_products",
        tmp_path / "g",
        lambda: ogb(tmp_path / "in", tmp_path / "g", **TINY),
    )
    refused(FileNotFoundError, "", tmp_path / "g", lambda: ogb(tmp_path / "none", tmp_path / "g", **TINY))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path / "in").csv()
    (folder.root / "raw" / "edge-feat.csv.gz").unlink()
    found = run(
        capsys, "import", "ogb", folder.root, tmp_path / "g", "--memory", "9MiB", "--topology", "chunked", "--to-undirected"
    )
    assert found["nodes"] == {"_": 60}
    assert found["splits"] == {"train_idx": 30, "valid_idx": 7, "test_idx": 23}
    assert main(["import", "ogb", str(folder.root), str(tmp_path / "g"), "--overwrite", "--no-add-inverse-edge"]) == 0
    said = capsys.readouterr().out
    assert "60 nodes, 500 edges" in said
    assert "split  train_idx: 30 nodes" in said
    (folder.root / EDGES).write_bytes(gzip.compress(b"1,2\n1,99\n"))
    assert main(["import", "ogb", str(folder.root), str(tmp_path / "h")]) == 2
    assert "edge.csv.gz, line 2: 99 is not a node" in capsys.readouterr().err
    for word, advice in (
        ("nothing", " (choose from "),
        ("parquet", "; CSV, Parquet and Arrow files are imported by 'table'"),
        ("scipy", "; sparse matrices that SciPy has saved are imported by 'npz'"),
        ("pyg", "; PyG's graphs are imported in Python, by featstore.OutOfCoreGraph.from_pyg("),
    ):
        with pytest.raises(SystemExit):
            main(["import", word, str(folder.root), str(tmp_path / "h")])
        assert f"invalid choice: {word!r}{advice}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["import", "ogb", "--help"])
    assert "--add-inverse-edge" in capsys.readouterr().out


def test_training_finds_splits_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path / "in").binary()
    ogb(folder.root, tmp_path / "g", **TINY)
    found = run(capsys, "train", tmp_path / "g", "--epochs", "1", "--memory", "64MiB", "--fanouts", "2,2", "--hidden", "8")
    assert featstore.open(tmp_path / "g", memory="64MiB").close() is None
    assert found["epochs"]


def test_dtypes_and_counts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    raw = tmp_path / "tiny" / "raw"
    raw.mkdir(parents=True)

    def put(**texts: str) -> None:
        for name, text in texts.items():
            (raw / f"{name.replace('_', '-')}.csv.gz").write_bytes(gzip.compress(text.encode()))

    def attempt(error: type[Exception], words: str, **options: Any) -> None:
        with pytest.raises(error, match=words):
            ogb(tmp_path / "tiny", tmp_path / "g", progress=False, memory="64MiB", **options)
        assert not list(tmp_path.glob("g*"))

    put(edge="0,1\n1,2\n", num_node_list="3\n", num_edge_list="2\n", node_feat="1,2\n3,1e60\n5,6\n")
    for dtype in ("foo", "uint64", "bool", "bfloat16", "float16"):
        attempt(ValueError, f"feature_dtype: numbers of CSV files become one of float32.*not '{dtype}'", feature_dtype=dtype)
        attempt(ValueError, "label_dtype: numbers", label_dtype=dtype)
    attempt(FormatError, "line 2, column 2: 1e.60 is no float32", feature_dtype="float32")
    put(num_edge_list="0\n", node_feat="1,2\n3,4\n5,6\n")
    attempt(FormatError, r"edge\.csv\.gz has 2 lines; num-edge-list\.csv\.gz says that there are 0 edges")
