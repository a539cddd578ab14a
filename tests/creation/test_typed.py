"""create of several types against NumPy: lists, edge ids and fields of every type; what is wrong is named by its type."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, FormatError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import read_catalog
from tests.support.making import create_typed
from tests.support.refusing import refuses
from tests.support.rowfiles import check_sums, edge, field
from tests.support.sampled import fewer_examples
from tests.support.typed import CITES, WRITES

Key = tuple[str, str, str]
Pairs = dict[Key, np.ndarray]

FORMS: dict[str, dict[str, Any]] = {"csc": {}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def check(root: Path, n: dict[str, int], edges: Pairs) -> None:
    """Compare the lists, edge ids and the out-degrees with sorts in memory, and check the whole dataset."""
    with featstore.open(root, memory="64MiB") as g:
        topology, types = g.topology, g.types
        assert (g.node_types, g.edge_types) == (list(n), list(edges))
        assert {name: each.n for name, each in types.nodes.items()} == n
        assert topology.num_lists == sum(n[key[2]] for key in edges)
        assert (g.num_nodes, g.num_edges) == (sum(n.values()), sum(pairs.shape[1] for pairs in edges.values()))
        firsts = dict(zip(n, np.cumsum([0, *n.values()]).tolist(), strict=False))
        out_degree = np.zeros(g.num_nodes, np.int64)
        first_list = first_edge = 0
        for key, (src, dst) in edges.items():
            kind, n_edges = types.edges[key], len(src)
            assert (kind.first_list, kind.first_edge, kind.n_edges) == (first_list, first_edge, n_edges)
            starts, degrees = topology.offsets(np.arange(first_list, first_list + n[key[2]]))
            np.testing.assert_array_equal(degrees, np.bincount(dst, minlength=n[key[2]]))
            np.testing.assert_array_equal(starts, first_edge + np.cumsum(degrees) - degrees)
            positions, ids = np.arange(first_edge, first_edge + n_edges), np.empty(n_edges, topology.id_dtype)
            topology.read_edges(positions, ids)
            order = np.lexsort((src, dst))  # equal edges stay in the order of the input
            np.testing.assert_array_equal(ids, src[order] + firsts[key[0]])
            numbers = positions.copy()
            if topology.edge_ids is not None and n_edges:
                topology.edge_ids.replace(numbers, np.empty)
            np.testing.assert_array_equal(numbers, first_edge + order)
            out_degree += np.bincount(src + firsts[key[0]], minlength=g.num_nodes)
            first_list, first_edge = first_list + n[key[2]], first_edge + n_edges
        np.testing.assert_array_equal(edge(root, "out_degree"), out_degree)
        g.verify(progress=False)
    for record in read_catalog(root).files.values():
        check_sums(root, record)


def pairs_of(n: dict[str, int], key: Key, n_edges: int, rng: np.random.Generator) -> np.ndarray:
    """Draw edges with repeats; none if a type of an end has no nodes."""
    ends = n[key[0]], n[key[2]]
    return np.stack([rng.integers(0, max(1, end), n_edges if all(ends) else 0) for end in ends])


def as_csc(pairs: np.ndarray, n: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Group edges by destination, in the order of the input; return the tuple, and the edges in that order."""
    pairs = pairs[:, np.argsort(pairs[1], kind="stable")]
    return (np.concatenate(([0], np.bincount(pairs[1], minlength=n).cumsum())), pairs[0]), pairs


def blocks_of(pairs: np.ndarray, step: int = 7) -> Iterator[np.ndarray]:
    for first in range(0, pairs.shape[1], step):
        yield pairs[:, first : first + step]


def npy(pairs: np.ndarray, folder: Path) -> Path:
    path = folder / f"{len(os.listdir(folder))}.npy"
    np.save(path, pairs)
    return path


GIVEN: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda pairs, _: pairs,
    "int32": lambda pairs, _: pairs.astype(np.int32),
    "tensor": lambda pairs, _: torch.from_numpy(pairs),
    "blocks": lambda pairs, _: blocks_of(pairs),
    "file": npy,
    "memmap": lambda pairs, folder: np.load(npy(pairs, folder), mmap_mode="r"),
}


@fewer_examples(0.4)
@given(data=st.data(), form=st.sampled_from(list(FORMS)), seed=st.integers(0, 99))
def test_any_types_in_canonical_form(data: st.DataObject, form: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, rng = tmp_path_factory.mktemp("g"), np.random.default_rng(seed)
    (root / "npy").mkdir()
    n = {
        f"t{i}": size for i, size in enumerate(data.draw(st.lists(st.sampled_from([0, 1, 3, 40, 1100]), min_size=1, max_size=4)))
    }
    ends = st.tuples(st.sampled_from(list(n)), st.sampled_from(["r", "s", "_"]), st.sampled_from(list(n)))
    nodes = {}
    for kind, size in n.items():
        x = rng.integers(0, 99, (size, 3)).astype(data.draw(st.sampled_from(["float32", "int16"])))
        nodes[kind] = featstore.Nodes(size, {"x": x} if data.draw(st.booleans()) else None, {"y": np.arange(size // 2)})
    edges: Pairs = {}
    given: dict[Key, Any] = {}
    rows: dict[Key, np.ndarray] = {}
    for key in data.draw(st.lists(ends, max_size=6, unique=True)):
        pairs = pairs_of(n, key, data.draw(st.sampled_from([0, 1, 30, 3000])), rng)
        how = data.draw(st.sampled_from(["csc", *GIVEN]))
        if how == "csc":
            given[key], pairs = as_csc(pairs, n[key[2]])
        else:
            given[key] = GIVEN[how](pairs, root / "npy")
        edges[key] = pairs
        if data.draw(st.booleans()):
            rows[key] = rng.random((pairs.shape[1], 2))
            given[key] = featstore.Edges(given[key], {"w": rows[key]})
    create_typed(root / "g", nodes, given, memory="9MiB", progress=False, **FORMS[form])
    check(root / "g", n, edges)
    for kind, of_kind in nodes.items():
        for name, values in (of_kind.features or {}).items():
            np.testing.assert_array_equal(field(root / "g", f"node/{kind}/{name}"), values)
        np.testing.assert_array_equal(field(root / "g", f"node/{kind}/y"), np.arange(n[kind] // 2))
    for key, values in rows.items():
        np.testing.assert_array_equal(field(root / "g", f"edge/{','.join(key)}/w"), values)


@pytest.mark.parametrize("form", FORMS)
def test_more_edges_than_memory(tmp_path: Path, form: str) -> None:
    """Sorted through files, with a list longer than memory, and with edge ids that count through all types."""
    rng = np.random.default_rng(0)
    n = {"author": 1000, "paper": 3000}
    edges = {WRITES: pairs_of(n, WRITES, 150_000, rng), CITES: pairs_of(n, CITES, 150_000, rng)}
    edges[CITES][1, rng.random(150_000) < 0.5] = 7
    given = {key: featstore.Edges(blocks_of(pairs, 5000), {"w": np.arange(150_000)}) for key, pairs in edges.items()}
    create_typed(
        tmp_path / "g", {name: featstore.Nodes(size) for name, size in n.items()}, given, memory=(8 << 20) + 4096, **FORMS[form]
    )
    check(tmp_path / "g", n, edges)


def test_streams_in_bounded_memory(tmp_path: Path) -> None:
    """Features of 160 MB and 3 million edges of two types from generators, within a bound of 16 MB."""
    script = textwrap.dedent(f"""
        import resource, numpy as np
        from featstore.creation.typed import Edges, Nodes
        from tests.support.making import create_typed
        n, d, e = 100_000, 400, 1_500_000
        rng = np.random.default_rng(0)
        def x():
            for first in range(0, n, 1000):
                yield np.full((1000, d), first, np.float32)
        def pairs():
            for first in range(0, e, 10_000):
                yield rng.integers(0, n, (2, 10_000))
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        def make(path, a, b):
            nodes = {{"a": Nodes(n, {{"x": ((n, d), "float32", x())}}), "b": Nodes(n)}}
            create_typed(path, nodes, {{("a", "to", "b"): a, ("b", "to", "b"): b}}, memory="16MiB")
        np.zeros(2 << 20, np.uint8)
        create_typed({str(tmp_path / "warm")!r}, {{"a": Nodes(1, {{"x": np.zeros((1, 4))}})}}, {{}}, memory="16MiB")
        before = peak()
        make({str(tmp_path / "g")!r}, pairs(), pairs())
        print(peak() - before)
    """)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 20 << 20
    assert read_catalog(tmp_path / "g").num_edges == 3_000_000


@pytest.mark.parametrize("form", FORMS)
def test_three_hundred_relations_that_differ_in_their_name_alone(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(1)
    n = {"a": 12, "b": 5}
    edges = {(("a", "b")[i % 2], f"relation {i}", "a"): np.empty(0) for i in range(300)}
    edges = {key: pairs_of(n, key, int(rng.integers(0, 9)), rng) for key in edges}
    given = {key: featstore.Edges(pairs, {"w": np.full(pairs.shape[1], i)}) for i, (key, pairs) in enumerate(edges.items())}
    nodes = {name: featstore.Nodes(size) for name, size in n.items()}
    with OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=given, progress=False, **FORMS[form]) as g:
        assert g["b", "relation 299", "a"].features["w"][:].tolist() == [299] * edges["b", "relation 299", "a"].shape[1]
    check(tmp_path / "g", n, edges)


def test_mappings_of_edge_index_make_the_same_dataset(tmp_path: Path) -> None:
    """In every form of pairs; of types without fields, too."""
    rng, n = np.random.default_rng(3), {"a": 30, "b": 20, "c": 0}
    edges = {("a", "r", "b"): 90, ("b", "s", "a"): 40, ("a", "t", "a"): 0}
    pairs = {key: pairs_of(n, key, n_edges, rng) for key, n_edges in edges.items()}
    x, y, w = rng.random((30, 4)), rng.integers(0, 9, 20), rng.random((90, 2))
    forms: list[Callable[[Any], Any]] = [
        lambda each: each,
        lambda each: (each[0].tolist(), each[1].tolist()),
        lambda each: iter([each[:, :25], each[:, 25:]]),
    ]
    nodes = {"a": featstore.Nodes(30, {"x": x}), "b": featstore.Nodes(20, data={"y": y}), "c": featstore.Nodes(0)}
    given = {key: featstore.Edges(each, {"w": w} if key[1] == "r" else None) for key, each in pairs.items()}
    OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=given, progress=False).close()
    for number, form in enumerate(forms):
        path = tmp_path / str(number)
        OutOfCoreGraph.from_edge_index(
            path,
            {key: form(each) for key, each in pairs.items()},
            n,
            {"a": {"x": x}},
            {"b": {"y": y}},
            edge_features={("a", "r", "b"): {"w": w}},
            progress=False,
        ).close()
        for file in sorted((tmp_path / "g").glob("*.rows")):
            assert (path / file.name).read_bytes()[4096:] == file.read_bytes()[4096:], file.name
        check(path, n, pairs)


def test_mappings_of_edge_index_that_do_not_fit(tmp_path: Path) -> None:
    pairs, n = {("a", "r", "a"): np.array([[0, 1], [1, 2]])}, {"a": 3}
    make = partial(OutOfCoreGraph.from_edge_index, tmp_path / "g", progress=False)
    refuses(TypeError, "num_nodes must be a mapping of types, as edge_index is one, not int", lambda: make(pairs, 3))
    refuses(TypeError, "features must be a mapping of types, as edge_index is one, not list", lambda: make(pairs, n, [1]))
    refuses(ValueError, "features: 'x' is none of the types 'a'", lambda: make(pairs, n, {"x": np.eye(3)}))
    refuses(ValueError, "edge_features: 'w' is none of the types", lambda: make(pairs, n, edge_features={"w": np.ones(2)}))
    refuses(ValueError, "coalesce=True cannot be given", lambda: make(pairs, n, coalesce=True))
    refuses(IndexError, "edge type .*'r'", lambda: make(pairs, {"a": 2}))
    refuses(TypeError, "num_nodes|nodes must be a mapping", lambda: make(pairs, None))
    assert not (tmp_path / "g").exists()


def test_one_named_type_is_a_graph_with_types(tmp_path: Path) -> None:
    pairs = np.array([[0, 1, 2], [1, 1, 0]])
    with OutOfCoreGraph.create(tmp_path / "g", nodes={"user": featstore.Nodes(3)}, edges={}, progress=False) as g:
        assert (g.node_types, g.edge_types, g.topology.num_lists) == (["user"], [], 0)
        g.verify(progress=False)
    OutOfCoreGraph.create(tmp_path / "empty", nodes={"user": featstore.Nodes(0)}, progress=False).close()
    check(tmp_path / "empty", {"user": 0}, {})
    key = "user", "_", "user"
    nodes = {"user": featstore.Nodes(3)}
    OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges={key: pairs}, overwrite=True, progress=False).close()
    check(tmp_path / "g", {"user": 3}, {key: pairs})
    # Types without names are a graph without types, in every byte that says what it is.
    unnamed = {"nodes": {"_": featstore.Nodes(3, {"x": np.eye(3)})}, "edges": {("_", "_", "_"): pairs}}
    with OutOfCoreGraph.create(tmp_path / "g", **unnamed, overwrite=True, progress=False) as g:
        assert g["x"][1].tolist() == [0, 1, 0]
        assert g.neighbors(1).tolist() == [0, 1]
    catalog = read_catalog(tmp_path / "g")
    assert "node_types" not in catalog.dataset
    OutOfCoreGraph.from_edge_index(tmp_path / "h", pairs, 3, {"x": np.eye(3)}, progress=False).close()
    assert read_catalog(tmp_path / "h").fields.keys() == catalog.fields.keys()
    assert read_catalog(tmp_path / "h").files.keys() == catalog.files.keys()


def test_odd_names_have_files_of_their_own(tmp_path: Path) -> None:
    """Names whose parts could be those of another type and field, and the longest ones."""
    long = "文" * 60
    nodes, names = {}, [("a", "b.c"), ("a.b", "c"), ("a@b", "c"), ("A b", "c"), (long, long), (long[:-1] + "字", long)]
    for i, (kind, name) in enumerate(names):
        nodes[kind] = featstore.Nodes(2, {name: np.full((2, 1), i)})
    edges = {
        ("a", "b.c", "a"): featstore.Edges(np.zeros((2, 1), np.int64), {"d": [100]}),
        ("a", "b", "a"): featstore.Edges(np.zeros((2, 1), np.int64), {"c,a.d": [101], long: [102]}),
    }
    with OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False) as g:
        for i, (kind, name) in enumerate(names):
            assert g[kind].features[name][:].tolist() == [[i], [i]]
        assert g["a", "b.c", "a"].features["d"][:].tolist() == [100]
        assert g["a", "b", "a"].features["c,a.d"][:].tolist() == [101]
        assert g["a", "b", "a"].features[long][:].tolist() == [102]
        g.verify(progress=False)


X = np.zeros((3, 2), np.float32)


def make(path: Path, **changed: Any) -> OutOfCoreGraph:
    """A graph of 3 papers and 2 authors."""
    nodes = {"paper": featstore.Nodes(3, {"x": X}), "author": featstore.Nodes(2)}
    edges = {WRITES: np.array([[1, 0], [2, 2]]), CITES: ([0, 1, 1, 2], [2, 0])}
    return OutOfCoreGraph.create(path, **{"nodes": nodes, "edges": edges, "progress": False, **changed})


def with_edges(given: Any, key: Any = WRITES) -> dict[str, Any]:
    return {"edges": {CITES: np.empty((2, 0), np.int64), key: given}}


def with_papers(*given: Any) -> dict[str, Any]:
    return {"nodes": {"author": featstore.Nodes(2), "paper": featstore.Nodes(*given)}}


WRITES_NAME = r"edge type \('author', 'writes', 'paper'\): "
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (with_edges(np.array([[0, 2], [0, 0]])), IndexError, WRITES_NAME + r"edge_index\[0, 1\] is 2, .* ids are 0 … 1"),
    (with_edges(np.array([[0, 1], [0, 3]])), IndexError, WRITES_NAME + r"edge_index\[1, 1\] is 3, .* ids are 0 … 2"),
    (with_edges(np.array([[0, 1], [-1, 3]])), IndexError, WRITES_NAME + r"edge_index\[1, 0\] is -1"),
    (with_edges(iter([np.zeros((2, 4), int), np.full((2, 1), 2)])), IndexError, WRITES_NAME + r"edge_index\[0, 4\] is 2"),
    (with_edges(([0, 0, 1, 2], [1, 2])), IndexError, WRITES_NAME + r"indices\[1\] is 2, .* ids are 0 … 1"),
    (with_edges(([0, 1], [1])), ValueError, WRITES_NAME + r"indptr has 2 entries for 3 nodes of type 'paper'; .* np.stack"),
    (with_edges(([0, 2, 1, 2], [1, 1])), ValueError, WRITES_NAME + r"indptr\[2\] is 1, after 2"),
    (with_edges(np.zeros((3, 2))), ValueError, WRITES_NAME + r"edge_index must have shape \[2, E\]"),
    (with_edges(np.zeros((2, 2))), TypeError, WRITES_NAME + "edge_index must hold integers"),
    (with_edges(7), TypeError, WRITES_NAME + "edge_index must be an array"),
    (with_edges(iter([np.zeros((2, 1))])), TypeError, WRITES_NAME + "block 0 of edge_index must hold integers"),
    (with_edges(featstore.Edges(np.zeros((2, 2), int), {"w": X})), ValueError, WRITES_NAME + "edge feature 'w' has 3 rows"),
    (with_edges(featstore.Edges(iter([np.zeros((2, 2), int)]), {"w": X})), ValueError, WRITES_NAME + "edge feature 'w' has 3"),
    (with_edges(featstore.Edges(np.zeros((2, 2), int), X)), TypeError, WRITES_NAME + "edge_features must be a mapping"),
    (with_edges(X, ("author", "writes")), TypeError, r"\('author', 'writes'\): the name .* is a tuple"),
    (with_edges(X, "writes"), TypeError, "edge type 'writes': the name"),
    (with_edges(X, ("author", "writes", "book")), ValueError, "there is no node type 'book'; there is 'paper', 'author'"),
    (with_edges(X, ("author", "a,b", "paper")), ValueError, "a type's name has no comma: 'a,b'"),
    (with_edges(X, ("author", "a/b", "paper")), ValueError, "a type has a name of 1 to 60"),
    (with_edges(X, ("author", 3, "paper")), ValueError, "a type has a name of 1 to 60"),
    (with_papers(3, {"x": X[:2]}), ValueError, "node type 'paper': feature 'x' has 2 rows, but the graph has 3 nodes"),
    (with_papers(3, {"x": X}, {"x": X}), ValueError, "node type 'paper': named both as a feature"),
    (with_papers(3, X), TypeError, "node type 'paper': features must be a mapping"),
    (with_papers(3, {"x": ((3, 2), "float32", [X[:2]])}), ValueError, "node type 'paper': .*2 rows instead of the 3"),
    (with_papers(-1), ValueError, "node type 'paper': n must be at least 0"),
    (with_papers(3.5), TypeError, "node type 'paper': n must be an integer"),
    ({"nodes": {"paper": 3}}, TypeError, "node type 'paper': it must be a featstore.Nodes, not int"),
    ({"nodes": {"_": featstore.Nodes(3)}, "edges": {}}, ValueError, "'_' is the name of nodes without types"),
    ({"nodes": {".": featstore.Nodes(3)}, "edges": {}}, ValueError, "a type has a name of 1 to 60"),
    ({"nodes": None}, TypeError, "nodes must be a mapping of types"),
    ({"nodes": [featstore.Nodes(3)]}, TypeError, "nodes must be a mapping of types"),
    ({"edges": [WRITES]}, TypeError, r"edges must be a mapping of \(source, relation, destination\)"),
    ({"indptr": [0], "node_data": {"y": X}}, TypeError, "indptr, node_data cannot be given with nodes and edges"),
    ({"edge_features": {}}, TypeError, "edge_features cannot be given with nodes and edges"),
    ({"coalesce": True}, ValueError, "coalesce=True cannot be given with nodes and edges"),
    ({"remove_self_loops": True}, ValueError, "remove_self_loops=True"),
    ({"to_undirected": True}, ValueError, "to_undirected=True"),
    ({"nodes": None, "edges": None}, TypeError, "made of indptr and indices, or of nodes and edges"),
    ({"memory": "1MiB"}, BudgetError, "more memory"),
    ({"topology": "coo"}, ValueError, "topology must be one of"),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named_and_the_old_dataset_stays(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    (tmp_path / "old").mkdir()
    make(tmp_path / "old" / "g").close()
    before = read_catalog(tmp_path / "old" / "g").dataset["id"]
    refuses(error, words, lambda: make(tmp_path / "old" / "g", overwrite=True, **changed))
    assert os.listdir(tmp_path / "old") == ["g"]
    assert read_catalog(tmp_path / "old" / "g").dataset["id"] == before


def test_the_longest_names_of_relations(tmp_path: Path) -> None:
    long = "é" * 60
    nodes = {long: featstore.Nodes(1)}
    refuses(ValueError, "at most 250 bytes", lambda: make(tmp_path / "g", nodes=nodes, edges={(long, long, long): X}))
    key = long, "é" * 4, long  # 250 bytes with its commas
    name = "文" * 60
    given = {key: featstore.Edges(np.zeros((2, 1), np.int64), {name: [7]})}
    with make(tmp_path / "g", nodes=nodes, edges=given) as g:
        assert g[key].features[name][:].tolist() == [7]


def test_a_file_that_is_none_keeps_its_error(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"no array")
    caught = refuses(FormatError, "x.npy", lambda: make(tmp_path / "g", **with_edges(tmp_path / "x.npy")))
    assert caught.value.filename is not None
