"""A graph of several types as it is opened: views of its types, names of its fields, and what it refuses by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.errors import ClosedError, FormatError, VersionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.partitioning.assign import judge
from featstore.storage.catalog import read_catalog, write_catalog
from tests.support.refusing import refuses
from tests.support.typed import CITES, WRITES


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A dataset of papers, authors and tags; a test must not change it."""
    rng = np.random.default_rng(3)
    x, h, y = rng.random((50, 3), np.float32), rng.integers(0, 99, (20, 2)), rng.integers(0, 5, 50)
    writes = np.stack([rng.integers(0, 20, 90), rng.integers(0, 50, 90)])
    w = rng.random(90)
    path = tmp_path_factory.mktemp("typed") / "g"
    nodes = {
        "paper": featstore.Nodes(50, {"x": x}, {"y": y}),
        "author": featstore.Nodes(20, {"x": h, "h": h}),
        "tag": featstore.Nodes(0),
    }
    edges = {WRITES: featstore.Edges(writes, {"w": w}), CITES: np.array([[0, 0], [4, 4]]), ("tag", "of", "paper"): X}
    OutOfCoreGraph.create(path, nodes=nodes, edges=edges, progress=False).close()
    return SimpleNamespace(path=path, x=x, h=h, y=y, w=w)


X = np.empty((2, 0), np.int64)


@pytest.fixture
def g(typed: SimpleNamespace) -> Iterator[OutOfCoreGraph]:
    with featstore.open(typed.path, memory="64MiB") as opened:
        yield opened


def test_views_have_the_fields_of_their_types(g: OutOfCoreGraph, typed: SimpleNamespace) -> None:
    assert g.node_types == ["paper", "author", "tag"]
    assert g.edge_types == [WRITES, CITES, ("tag", "of", "paper")]
    paper, author = g["paper"], g["author"]
    assert [g[name].num_nodes for name in g.node_types] == [50, 20, 0]
    assert [g[key].num_edges for key in g.edge_types] == [90, 2, 0]
    assert (list(paper.features), list(paper.node_data)) == (["x"], ["y"])
    assert (sorted(author.features), list(author.node_data)) == (["h", "x"], [])
    assert torch.equal(paper.features["x"][[49, 0]], torch.from_numpy(typed.x[[49, 0]]))
    assert torch.equal(author.features["x"][-1], torch.from_numpy(typed.h[-1]))
    assert torch.equal(paper.node_data["y"], torch.from_numpy(typed.y))
    assert torch.equal(g[WRITES].features["w"][:], torch.from_numpy(typed.w))
    assert (list(g[CITES].features), list(g["tag"].features)) == ([], [])
    assert paper.features["x"] is g.features["paper/x"]
    assert g[WRITES].features["w"] is g.edge_features["author,writes,paper/w"]
    assert paper.node_data["y"] is g.node_data["paper/y"]
    assert repr(paper).splitlines()[0] == "NodeView('paper', num_nodes=50)"
    assert [line.split()[0] for line in repr(paper).splitlines()[2:]] == ["features['x']", "node_data['y']"]
    assert repr(g[WRITES]).splitlines()[0] == f"EdgeView({WRITES}, num_edges=90)"
    assert repr(g[WRITES]).splitlines()[2].split() == ["features['w']", "float64", "[90]", "720", "B"]


def test_a_graph_shows_its_types(g: OutOfCoreGraph, typed: SimpleNamespace) -> None:
    lines = repr(g).splitlines()
    assert lines[0] == f"OutOfCoreGraph('{typed.path}', num_nodes=70, num_edges=92)"
    assert [line.split() for line in lines[1:5]] == [["nodes"], ["paper", "50"], ["author", "20"], ["tag", "0"]]
    edges = [line.strip().rsplit(maxsplit=1) for line in lines[5:9]]
    assert edges == [["edges"], [", ".join(WRITES), "90"], [", ".join(CITES), "2"], ["tag, of, paper", "0"]]
    assert {"node_types", "edge_types"} <= set(dir(g))


def test_missing_names_say_what_there_is(g: OutOfCoreGraph) -> None:
    refuses(KeyError, "no node type 'x'; there is 'paper', 'author', 'tag'", lambda: g["x"])
    refuses(KeyError, r"no node type 'writes'; .*g\['author', 'writes', 'paper'\]", lambda: g["writes"])
    refuses(AttributeError, r"\(g\.node_types, g\.edge_types\)", lambda: g.metadata())  # type: ignore[attr-defined]
    for name, call in (
        ("add_feature", r"; it is g\.add_feature\(name, rows, type='tag'\)"),
        ("append_nodes", r"; it is g\.append_nodes\(n, features, data, type='tag'\)"),
        ("update_data", r"; it is g\.update_data\(name, ids, rows, type='tag'\)"),
        ("num_edges", "$"),
    ):
        refuses(AttributeError, f"'NodeView' object has no attribute {name!r}{call}", partial(getattr, g["tag"], name))
    writes: Any = g[WRITES]
    refuses(AttributeError, r"it is g\.remove_feature\(name, type=\('author', 'w", lambda: writes.remove_feature("w"))
    refuses(AttributeError, "'EdgeView' object has no attribute 'add_data'$", lambda: writes.add_data)
    refuses(
        KeyError, r"no edge type \('paper', 'writes'\); there is \('author', 'writes', 'paper'\), ", lambda: g["paper", "writes"]
    )
    refuses(KeyError, "no feature 'y' of 'author'; there is 'h', 'x'", lambda: g["author"].features["y"])
    refuses(KeyError, "no node data 'y' of 'tag'; there is none", lambda: g["tag"].node_data["y"])
    refuses(KeyError, "no edge feature 'x' of 'author,writes,paper'; there is 'w'", lambda: g[WRITES].features["x"])
    refuses(KeyError, "no feature 'x'; there is 'paper/x', 'author/h', 'author/x'", lambda: g.features["x"])
    refuses(TypeError, "indexed by the name of a type, not by 3", lambda: g[3])  # type: ignore[call-overload]
    refuses(TypeError, "not iterable", lambda: iter(g))  # type: ignore[call-overload]


def test_stores_and_graphs_travel(g: OutOfCoreGraph, typed: SimpleNamespace) -> None:
    with pickle.loads(pickle.dumps(g)) as other:
        assert other.edge_types == g.edge_types
    store = pickle.loads(pickle.dumps(g["author"].features["h"]))
    assert torch.equal(store[:], torch.from_numpy(typed.h))
    store = pickle.loads(pickle.dumps(g[WRITES].features["w"]))
    assert torch.equal(store[:], torch.from_numpy(typed.w))


def test_views_of_a_closed_graph_say_so(typed: SimpleNamespace) -> None:
    with featstore.open(typed.path, memory="64MiB") as g:
        paper = g["paper"]
    refuses(ClosedError, "closed", lambda: paper.features["x"][0])
    refuses(ClosedError, "closed", lambda: paper.node_data["y"])


def test_a_graph_without_types_has_one_of_each(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        assert (g.node_types, g.edge_types) == (["_"], [("_", "_", "_")])
        assert g["x"] is g.features["x"]
        refuses(TypeError, "by the name of a feature", lambda: g["_", "_", "_"])
        assert "types" not in repr(g)


REFUSED: dict[str, Callable[[Any], object]] = {
    "PartitionBatches": lambda g: featstore.PartitionBatches(g, [0, 1], 2, parts=np.zeros(70, np.int32)),
    "edges": lambda g: g.edges(),
    "in_degree": lambda g: g.in_degree,
    "indptr": lambda g: g.indptr,
    "judge": lambda g: judge(g, np.zeros(70, np.int32), 1),
    "neighbors": lambda g: g.neighbors(0),
    "out_degree": lambda g: g.out_degree,
    "part": lambda g: g.part(0),
    "partition": lambda g: featstore.partition(g, 3, progress=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_one_type_is_refused_by_name(g: OutOfCoreGraph, typed: SimpleNamespace, name: str) -> None:
    before = sorted(path.name for path in typed.path.parent.iterdir())
    words = rf"^{name}(\(\))? is for a graph of one type; .* 'paper', 'author', 'tag' .*'writes'.*from_edge_index"
    refuses(NotImplementedError, words, lambda: REFUSED[name](g))
    assert sorted(path.name for path in typed.path.parent.iterdir()) == before


def test_no_part_of_several_types_is_exported(g: OutOfCoreGraph, tmp_path: Path) -> None:
    refuses(NotImplementedError, r"^part\(\) is for a graph of one type", lambda: featstore.export(g, tmp_path / "p", 0))
    assert not (tmp_path / "p").exists()


def test_releases_without_types_refuse_by_name(
    typed: SimpleNamespace, small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read datasets of one type as before."""
    monkeypatch.setattr("featstore.storage.catalog._TYPES", "others")
    refuses(VersionError, "features that this release lacks: types", lambda: featstore.open(typed.path))
    featstore.open(small.path).close()


def test_the_command_line(typed: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(typed.path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "node type paper: 50 nodes",
        "node type tag: 0 nodes",
        "edge type author,writes,paper: 90 edges",
        "features paper/x: float32 [50, 3], 600 B",
        "edge data author,writes,paper/w: float64 [90], 720 B",
        "node data paper/y: int64 [50]",
    ):
        assert line in lines
    assert main(["info", str(typed.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["node_types"] == {"paper": 50, "author": 20, "tag": 0}
    assert found["edge_types"] == {"author,writes,paper": 90, "paper,cites,paper": 2, "tag,of,paper": 0}
    assert main(["verify", str(typed.path)]) == 0
    assert main(["partition", str(typed.path), "3"]) == 2
    assert "partition() is for a graph of one type" in capsys.readouterr().err


def test_a_catalog_whose_types_do_not_fit(tmp_path: Path) -> None:
    root = tmp_path / "g"
    nodes = {"paper": featstore.Nodes(3, {"x": np.eye(3)}), "author": featstore.Nodes(2)}
    given = featstore.Edges(np.zeros((2, 2), np.int64), {"w": np.ones(2)})
    OutOfCoreGraph.create(root, nodes=nodes, edges={WRITES: given}, progress=False).close()
    good = read_catalog(root)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"node_types": 7}, "the types of the catalog cannot be read"),
        ({"node_types": [["paper", 4], ["author", 1]]}, "feature 'x' has 3 rows for 4 nodes"),
        ({"edge_types": [[*WRITES, 1], [*CITES, 1]]}, "'w' has 2 rows for 1 edges"),
    ]
    for changed, words in cases:
        write_catalog(root, type(good)({**good.dataset, **changed}, good.files, good.fields))
        refuses(FormatError, words, lambda: featstore.open(root))
    write_catalog(root, good)
    with featstore.open(root) as g:  # control
        g.verify(progress=False)
