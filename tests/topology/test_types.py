"""Types as ranges: their layout, the catalog's entry of them, and entries that describe no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.errors import FormatError
from featstore.topology.types import EdgeType, NodeType, Types, edge_name, qualified
from tests.support.refusing import refuses
from tests.support.typed import CITES, WRITES


def of(types: Types) -> dict[str, Any]:
    """Return the catalog's entry of a dataset with these types."""
    return {"num_nodes": types.num_nodes, "num_edges": types.num_edges, **types.entry()}


def test_ranges_follow_one_another() -> None:
    types = Types.of({"paper": 5, "tag": 0, "author": 2}, {WRITES: 7, CITES: 0, ("paper", "rev", "author"): 3})
    paper, tag, author = NodeType("paper", 0, 5), NodeType("tag", 5, 0), NodeType("author", 5, 2)
    assert list(types.nodes.values()) == [paper, tag, author]
    assert list(types.edges.values()) == [
        EdgeType(WRITES, author, paper, 0, 0, 7),
        EdgeType(CITES, paper, paper, 5, 7, 0),
        EdgeType(("paper", "rev", "author"), paper, author, 10, 7, 3),
    ]
    assert (types.num_nodes, types.num_lists, types.num_edges) == (7, 12, 10)
    assert types.edges["paper", "rev", "author"].lists_of(np.array([6, 5])).tolist() == [11, 10]
    assert types.edges_into("paper") == [types.edges[WRITES], types.edges[CITES]]
    with pytest.raises(KeyError, match="book"):
        Types.of({"paper": 5}, {("book", "cites", "paper"): 1})


def test_one_type_without_a_name() -> None:
    types = Types.one(4, 9)
    assert types.is_one
    assert (types.num_nodes, types.num_lists, types.num_edges, types.entry()) == (4, 4, 9, {})
    assert Types.of_entry({"num_nodes": 4, "num_edges": 9}, "g") == types
    assert not Types.of({"_": 4}, {("_", "to", "_"): 9}).is_one
    assert not Types.of({"user": 4}, {}).is_one
    assert [qualified(name, "x") for name in ("_", "_,_,_", "paper", edge_name(WRITES))] == [
        *("x", "x", "paper/x", "author,writes,paper/x")
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 30), max_size=8), st.data())
def test_an_entry_describes_its_types(sizes: list[int], counts: list[int], data: st.DataObject) -> None:
    nodes = {f"t{i}": n for i, n in enumerate(sizes)}
    edges = {}
    for i, count in enumerate(counts):
        src, dst = (data.draw(st.sampled_from(list(nodes))) for _ in range(2))
        edges[src, f"r{i}", dst] = count if nodes[src] and nodes[dst] else 0
    types = Types.of(nodes, edges)
    assert Types.of_entry(of(types), "g") == types


GOOD = of(Types.of({"paper": 5, "author": 2}, {WRITES: 7, CITES: 4}))

DAMAGED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda entry: entry.pop("node_types"), "cannot be read: KeyError"),
    (lambda entry: entry.pop("edge_types"), "cannot be read: KeyError"),
    (lambda entry: entry.update(node_types=7), "cannot be read: TypeError"),
    (lambda entry: entry.update(node_types=["paper"]), "cannot be read: ValueError"),
    (lambda entry: entry.update(node_types=[["paper", -5], ["author", 12]]), "-5 is no number"),
    (lambda entry: entry.update(node_types=[["paper", "5"], ["author", 2]]), "'5' is no number"),
    (lambda entry: entry.update(node_types=[["paper", True], ["author", 6]]), "True is no number"),
    (lambda entry: entry.update(node_types=[["paper", 5], ["author", 3]]), "8 nodes and 11 edges of all types"),
    (lambda entry: entry.update(node_types=[["paper", 5], ["book", 2]]), "cannot be read: KeyError"),
    (lambda entry: entry.update(node_types=[["paper", 5], ["paper", 2]]), "cannot be read: KeyError|of all types"),
    (lambda entry: entry.update(edge_types=[[*WRITES, 7]]), "7 nodes and 7 edges of all types"),
    (lambda entry: entry.update(edge_types=[[*WRITES, 11, 0]]), "cannot be read: ValueError"),
    (lambda entry: entry.update(node_types=[["paper", 0], ["author", 7]]), "ends at a type without nodes"),
    (lambda entry: entry.update(node_types=[["paper", 5], ["author", 2], ["_", 0]]), "a type is named '_'"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED, ids=range(len(DAMAGED)))
def test_entries_that_describe_no_graph(change: Callable[[dict[str, Any]], object], words: str) -> None:
    entry = dict(GOOD)
    assert Types.of_entry(entry, "g").num_lists == 10
    change(entry)
    caught = refuses(FormatError, words, lambda: Types.of_entry(entry, "g"))
    assert caught.value.filename == "g"
