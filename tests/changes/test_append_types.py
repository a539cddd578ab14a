"""Nodes appended to a type: the dataset is the one that is made with all nodes at once, in the files as for the user."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import featstore
from featstore.adapters.datasets.tables import EdgeTable, NodeTable, import_tables
from featstore.changes.insertion import with_inserted
from featstore.errors import BusyError, StaleError
from featstore.storage.catalog import read_catalog
from tests.support.typed import CITES, WRITES, TypedArrays, academic, random_types

FORMS: list[dict[str, Any]] = [{}, {"topology": "chunked", "chunk_bytes": 4096}]
COLUMNS = ("indptr", "indices", "out_degree", "chunks", "chunk_directory", "edge_ids")


def opened(path: Path) -> featstore.OutOfCoreGraph:
    return featstore.open(path, memory="32MiB", backend="pread", threads=1)


def rows_of(graph: TypedArrays, kind: str, n: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Draw rows of new nodes, and put them behind those of the arrays."""
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, np.ndarray]] = {"features": {}, "data": {}}
    for fields, new in ((graph.features, found["features"]), (graph.data, found["data"])):
        for name, rows in fields.get(kind, {}).items():
            new[name] = rng.integers(0, 100, (n, *rows.shape[1:])).astype(rows.dtype)
            fields[kind][name] = np.concatenate([rows, new[name]])
    graph.n[kind] += n
    return found


def append(path: Path, graph: TypedArrays, kind: str, n: int, seed: int = 0) -> None:
    before = graph.n[kind]
    with opened(path) as g:
        assert g.append_nodes(n, **rows_of(graph, kind, n, seed), type=kind, progress=False) == range(before, before + n)
        assert g.memory_report().get("changes", 0) == 0


def stored(path: Path, key: str, first: int = 0) -> bytes | None:
    """The bytes of a field of the adjacency, header pages and padding apart."""
    catalog = read_catalog(path)
    if key not in catalog.fields:
        return None
    record, found = catalog.fields[key], b""
    for part in record.parts:
        found += (path / part.file).read_bytes()[4096 : 4096 + part.rows * record.row_bytes]
    return found


def check_same(path: Path, other: Path, graph: TypedArrays, **form: Any) -> None:
    """The dataset at ``path`` is that of ``graph`` made at once at ``other``."""
    graph.create(other, overwrite=True, **form).close()
    for name in COLUMNS:
        assert stored(path, f"edge/_,_,_/{name}") == stored(other, f"edge/_,_,_/{name}"), name
    with opened(path) as g, opened(other) as expected:
        g.verify(progress=False)
        assert g.types == expected.types
        for fields, wanted in ((g.features, expected.features), (g.edge_features, expected.edge_features)):
            assert set(fields) == set(wanted)
            for name in fields:
                assert np.array_equal(fields[name][:].numpy(), wanted[name][:].numpy()), name
                assert fields[name].numpy().shape == wanted[name].shape
        assert {name: rows.tolist() for name, rows in g.node_data.items()} == {
            name: rows.tolist() for name, rows in expected.node_data.items()
        }
        for kind in g.types.nodes.values():
            seeds = np.arange(max(kind.first, kind.stop - 30), kind.stop)
            one, two = (featstore.NeighborSampler(each, [3, 2]).sample(seeds) for each in (g, expected))
            assert one.input_ids.tolist() == two.input_ids.tolist()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    form=st.sampled_from(FORMS),
    more=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 30, 1500])), min_size=1, max_size=4),
)
def test_random_graphs(tmp_path_factory: Any, seed: int, form: dict[str, Any], more: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("graphs")
    graph = random_types(seed, most=40 if seed % 2 else 400)
    graph.create(folder / "g", **form).close()
    for number, (kind, n) in enumerate(more):
        append(folder / "g", graph, f"t{kind}", n, number)
    check_same(folder / "g", folder / "h", graph, **form)


def test_a_type_without_nodes_stays_behind_the_others(tmp_path: Path) -> None:
    graph = TypedArrays({"a": 5, "b": 0, "c": 0}, {("b", "to", "a"): np.empty((2, 0), np.int64)}).draw("x", 0, a=4, b=4, c=4)
    graph.create(tmp_path / "g").close()
    for kind, n in (("a", 3), ("b", 2), ("a", 1), ("c", 4), ("b", 1)):
        append(tmp_path / "g", graph, kind, n)
        check_same(tmp_path / "g", tmp_path / "h", graph)


@pytest.mark.parametrize("step", [1, 4, 100])
def test_numbers_are_inserted_piece_by_piece(step: int) -> None:
    numbers, places, n = np.arange(10, 20), [0, 3, 3, 7, 10], 9
    for value, ends in ((7, places), (None, places[:-1])):
        pieces = list(with_inserted([numbers[:3], numbers[3:7], numbers[7:]], places, n, step, value=value))
        new = np.repeat(ends, n)
        assert np.concatenate(pieces).tolist() == np.insert(numbers, new, numbers[new] if value is None else value).tolist()
        assert max(map(len, pieces)) <= max(step, 4)


@pytest.mark.parametrize("form", FORMS, ids=["csc", "chunks"])
def test_readers_keep_the_old_nodes_and_batches_have_the_new_ones(form: dict[str, Any], tmp_path: Path) -> None:
    graph = academic().draw("h", 1, author=8, institution=8)
    graph.create(tmp_path / "g", **form).close()
    old = opened(tmp_path / "g")
    before = {kind: store[:].clone() for kind, store in old.features.items()}
    for kind in ("paper", "institution", "author"):
        append(tmp_path / "g", graph, kind, 40)
    assert {kind: old[kind].num_nodes for kind in old.node_types} == {"paper": 3000, "author": 1500, "institution": 150}
    assert all(np.array_equal(old.features[name][:].numpy(), rows.numpy()) for name, rows in before.items())
    old.verify(progress=False)
    old.close()
    check_same(tmp_path / "g", tmp_path / "h", graph, **form)
    with opened(tmp_path / "g") as g:
        sampler = featstore.NeighborSampler(g, [4, 3])
        seeds = ("paper", np.arange(2980, 3040))
        with featstore.Loader(g, sampler, seeds, 20, features="h", labels="y", strategy="superbatch") as loader:
            for batch in loader:
                for kind in ("author", "institution"):
                    assert np.array_equal(
                        batch.features["h"][kind].numpy(), graph.features[kind]["h"][batch.input_ids[kind].numpy()]
                    )
                assert np.array_equal(batch.y.numpy(), graph.data["paper"]["y"][batch.seeds.numpy()])


def test_the_last_type_costs_what_is_appended_and_others_what_moves(tmp_path: Path) -> None:
    graph = academic(papers=40_000).draw("h", 1, paper=100, author=100)
    graph.create(tmp_path / "g").close()

    def written(kind: str) -> dict[str, int]:
        known = {path.name for path in (tmp_path / "g").iterdir()}
        append(tmp_path / "g", graph, kind, 10)
        new = [path for path in (tmp_path / "g").iterdir() if path.name not in known and path.suffix == ".rows"]
        return {path.name.rsplit(".", 2)[0]: path.stat().st_size for path in new}

    assert set(written("institution")) == {"edge.out_degree"}  # no edges end there, it has no features, and it is the last one
    found = written("author")  # the last one of its file, but not of ids
    assert {"edge.indices", "edge.indptr", "edge.out_degree"} <= set(found)
    assert found["patch-node@paper,author.h"] <= 4 * 4096
    found = written("paper")
    assert found["node@paper,author.h"] > 60_000 * 400
    assert found["edge.indices"] > 4 * graph.edges[CITES].shape[1]


def test_only_chunks_that_change_are_written(tmp_path: Path) -> None:
    graph = academic(papers=20_000)
    graph.edges = {CITES: graph.edges[CITES], WRITES: graph.edges[WRITES], **graph.edges}  # authors cite nothing
    (tmp_path / "drive").mkdir()
    form = {"topology": "chunked", "chunk_bytes": 4096, "stripes": [tmp_path / "drive"]}
    graph.create(tmp_path / "g", **form).close()
    append(tmp_path / "g", graph, "institution", 5)
    catalog = read_catalog(tmp_path / "g")
    assert {part.file.rpartition("/")[2] for part in catalog.fields["edge/_,_,_/chunks"].parts} == {"edge.chunks.1.rows"}
    append(tmp_path / "g", graph, "author", 5)  # papers' lists of papers stay where they are
    parts = read_catalog(tmp_path / "g").fields["edge/_,_,_/chunks"].parts
    assert parts[0].rows * 4 > graph.edges[CITES].shape[1]
    check_same(tmp_path / "g", tmp_path / "h", graph, topology="chunked", chunk_bytes=4096)


def test_what_was_made_of_the_old_types_is_stale(tmp_path: Path) -> None:
    graph = academic().draw("h", 1, author=8, institution=8)
    graph.create(tmp_path / "g").close()
    with opened(tmp_path / "g") as g:
        g.aggregate("h", "sum", edge_type=WRITES, name="s", progress=False)
        g.cache_neighbors("256KiB", save=True)
        sampler = featstore.NeighborSampler(g, [3])
        options: dict[str, Any] = {"seeds": ("paper", np.arange(90)), "batch_size": 30}
        pack = featstore.sample_offline(g, sampler, **options, seed=0, path=tmp_path / "p", progress=False)
        featstore.Loader(g, strategy=featstore.Packed(pack), features="h").close()
        before = read_catalog(tmp_path / "g").adjacency()
        g.append_nodes(2, **rows_of(graph, "author", 2, 1), type="author", progress=False)
    assert read_catalog(tmp_path / "g").adjacency() != before
    with opened(tmp_path / "g") as g:
        assert g.stale_features == {"paper/s": ["adjacency", "author/h"]}
        with pytest.raises(StaleError):
            featstore.Loader(g, strategy=featstore.Packed(pack), features="h")
        pack.close()
        g.cache_neighbors("256KiB")
        g.verify(progress=False)


def test_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    graph = academic()
    graph.create(tmp_path / "g").close()
    x, y = np.zeros((2, 16), np.float16), np.zeros(2, np.int64)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "type= names that of the new nodes: 'paper', 'author', 'institution'"),
        ({"type": "venue"}, KeyError, "no node type 'venue'; there is 'paper'"),
        ({"type": WRITES}, TypeError, "type must be the name of a node type"),
        ({"type": "paper"}, ValueError, "feature 'paper/x' has a row for each node"),
        ({"type": "paper", "features": {"x": x}}, ValueError, "node data 'paper/y' has a row for each node"),
        ({"type": "author", "features": {"x": x}}, ValueError, "there is no feature 'author/x'"),
        (
            {"type": "paper", "features": {"x": x[:1]}, "data": {"y": y}},
            ValueError,
            "feature 'paper/x' has 1 rows for 2 new nodes",
        ),
        ({"type": "paper", "features": {"x": x[:, :3]}, "data": {"y": y}}, ValueError, "(16,), not (3,)"),
        ({"type": "paper", "features": {"x": x.astype(float)}, "data": {"y": y}}, TypeError, "are float16, not float64"),
    ]
    with opened(tmp_path / "g") as g:
        for arguments, error, text in wrong:
            with pytest.raises(error, match=re.escape(text)):
                g.append_nodes(2, **arguments, progress=False)
        assert read_catalog(tmp_path / "g").generation == 1
        g.append_nodes(2, type="institution", progress=False)
        with pytest.raises(BusyError, match="open it again"):
            g.append_nodes(2, type="institution", progress=False)


def test_types_whose_nodes_have_names_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\na\nb\n")
    (tmp_path / "edges.csv").write_text("from,to\nb,a\na,b\n")
    nodes = {"a": NodeTable(tmp_path / "a.csv", "id")}
    edges = {("a", "to", "a"): EdgeTable(tmp_path / "edges.csv", src="from", dst="to")}
    import_tables(tmp_path / "g", nodes, edges, progress=False)
    with opened(tmp_path / "g") as g, pytest.raises(NotImplementedError, match=r"the nodes of type 'a' of .* have names"):
        g.append_nodes(1, type="a", progress=False)


class TypedChanges(RuleBasedStateMachine):
    """Types whose features share a file or do not, in any order of changes, against arrays."""

    form: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.number = Path(tempfile.mkdtemp()), 0
        self.graph = random_types(4, most=300)
        self.graph.create(self.folder / "g", **self.form).close()

    @rule(kind=st.sampled_from(["t0", "t1", "t2"]), n=st.sampled_from([1, 5, 700]))
    def append(self, kind: str, n: int) -> None:
        self.number += 1
        append(self.folder / "g", self.graph, kind, n, self.number)

    @rule(kind=st.sampled_from(["t0", "t1", "t2"]), name=st.sampled_from(["x", "z"]), width=st.sampled_from([4, 9]))
    def add(self, kind: str, name: str, width: int) -> None:
        rows = np.random.default_rng(self.number).standard_normal((self.graph.n[kind], width)).astype(np.float32)
        with opened(self.folder / "g") as g:
            g.add_feature(name, rows, type=kind, overwrite=True, progress=False)
        self.graph.features[kind] = {**self.graph.features[kind], name: rows}

    @rule(kind=st.sampled_from(["t0", "t1", "t2"]))
    def update(self, kind: str) -> None:
        if not self.graph.n[kind]:
            return
        rows = self.graph.features[kind]["x"].copy()
        rows[[0, -1]] = self.number
        self.graph.features[kind]["x"] = rows
        with opened(self.folder / "g") as g:
            g[kind].features["x"].update([0, -1], rows[[0, -1]], progress=False)

    @invariant()
    def rows_are_those_of_the_arrays(self) -> None:
        with opened(self.folder / "g") as g:
            for kind, fields in self.graph.features.items():
                assert g[kind].num_nodes == self.graph.n[kind]
                for name, rows in fields.items():
                    assert np.array_equal(g[kind].features[name][:].numpy(), rows), (kind, name)

    def teardown(self) -> None:
        check_same(self.folder / "g", self.folder / "h", self.graph, **self.form)
        shutil.rmtree(self.folder)


class TypedChangesInChunks(TypedChanges):
    form = FORMS[1]


TestTypedChanges = TypedChanges.TestCase
TestTypedChanges.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
TestTypedChangesInChunks = TypedChangesInChunks.TestCase
TestTypedChangesInChunks.settings = settings(max_examples=4, stateful_step_count=12, deadline=None)
