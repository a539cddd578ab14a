"""The adjacency read back from either form: what was given comes out, blocks are bounded, and what is wrong is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.graph import adjacency
from featstore.graph.dataset import OutOfCoreGraph
from tests.support.refusing import refuses
from tests.support.sampled import fewer_examples

FORMS: dict[str, dict[str, Any]] = {"csc": {}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of both forms of the adjacency."""
    return FORMS[request.param]


def check(g: OutOfCoreGraph, edges: np.ndarray) -> None:
    """Compare what is read back with a sort in memory, and the numbers with the columns that were given."""
    n = g.num_nodes
    order = np.lexsort(edges)
    src, dst = edges[:, order]
    indptr = np.concatenate(([0], np.bincount(dst, minlength=n).cumsum()))
    assert g.indptr.dtype == g.in_degree.dtype == g.out_degree.dtype == torch.int64
    np.testing.assert_array_equal(g.indptr, indptr)
    np.testing.assert_array_equal(g.in_degree, np.bincount(dst, minlength=n))
    np.testing.assert_array_equal(g.out_degree, np.bincount(src, minlength=n))
    for node in range(n):
        ids, numbers = g.neighbors(node, edge_pos=True)
        assert ids.dtype == numbers.dtype == torch.int64
        assert torch.equal(ids, g.neighbors(np.int32(node)))
        np.testing.assert_array_equal(ids, src[indptr[node] : indptr[node + 1]])
        np.testing.assert_array_equal(numbers, order[indptr[node] : indptr[node + 1]])
    blocks = list(g.edges(edge_pos=True))
    assert all(block.shape == (2, len(numbers)) and len(numbers) for block, numbers in blocks)
    empty = torch.empty((2, 0), dtype=torch.int64)
    np.testing.assert_array_equal(torch.cat([empty, *(block for block, _ in blocks)], 1), edges[:, order])
    np.testing.assert_array_equal(torch.cat([empty[0], *(numbers for _, numbers in blocks)]), order)
    np.testing.assert_array_equal(torch.cat([empty, *g.edges()], 1), edges[:, order])


@given(st.integers(1, 40), st.integers(0, 400), st.integers(0, 2**32), st.sampled_from(list(FORMS)), st.booleans())
@fewer_examples(0.4)
def test_any_edges_come_back(tmp_path_factory, n, n_edges, seed, form, is_sorted) -> None:
    """With pieces of three nodes or edges; repeated edges, loops, empty lists; numbered as stored, or not."""
    rng = np.random.default_rng(seed)
    edges = np.stack([rng.integers(0, n, n_edges), (rng.random(n_edges) ** 3 * n).astype(np.int64)])
    if is_sorted:
        edges = edges[:, np.lexsort(edges)]
    path = tmp_path_factory.mktemp("g") / "g"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjacency, "_PIECE", 3)
        with OutOfCoreGraph.from_edge_index(path, edges, n, progress=False, **FORMS[form]) as g:
            assert (g.topology.edge_ids is None) == bool((np.diff(np.lexsort(edges)) == 1).all())
            check(g, edges)


def test_many_blocks_and_a_long_list(tmp_path: Path, form: dict[str, Any]) -> None:
    """More edges than a block has, a list that spans blocks and chunks, and what is read is all that is held."""
    n, n_edges = 3000, 120_000
    rng = np.random.default_rng(0)
    edges = rng.integers(0, n, (2, n_edges))
    edges[1, : n_edges // 2] = 1234
    OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, n, progress=False, **form).close()
    with featstore.open(tmp_path / "g", memory="4MiB") as g:
        blocks = list(g.edges())
        assert len(blocks) > 2
        np.testing.assert_array_equal(torch.cat(blocks, 1), edges[:, np.lexsort(edges)])
        assert "edges" not in g.memory_report()
        np.testing.assert_array_equal(g.neighbors(1234), np.sort(edges[0, edges[1] == 1234]))
        n_bytes = sum(block.nbytes for block in blocks)
        assert g.memory_report().used >= n_bytes
        del blocks
        g.pool.trim()
        assert g.memory_report().used < n_bytes
        for block in g.edges():  # one after the other in less than all of them take
            assert g.memory_report()["edges"] + block.nbytes < n_bytes


def test_a_copy_by_blocks(small: SimpleNamespace, tmp_path: Path, form: dict[str, Any]) -> None:
    """The blocks of ``edges()`` are what ``from_edge_index`` takes."""
    with featstore.open(small.path, memory="64MiB") as g:
        with OutOfCoreGraph.from_edge_index(tmp_path / "g", g.edges(), g.num_nodes, progress=False, **form) as copy:
            np.testing.assert_array_equal(copy.indptr, small.indptr)
            np.testing.assert_array_equal(torch.cat(list(copy.edges()), 1)[0], small.indices)


def test_edge_features_by_their_numbers(tmp_path: Path, form: dict[str, Any]) -> None:
    edges = np.random.default_rng(1).integers(0, 20, (2, 100))
    with OutOfCoreGraph.from_edge_index(
        tmp_path / "g", edges, 20, edge_features={"w": edges[0] * 100 + edges[1]}, progress=False, **form
    ) as g:
        for (src, dst), numbers in g.edges(edge_pos=True):
            assert torch.equal(g.edge_features["w"][numbers], src * 100 + dst)
        ids, numbers = g.neighbors(3, edge_pos=True)
        assert torch.equal(g.edge_features["w"][numbers], ids * 100 + 3)


def test_no_nodes_and_no_edges(tmp_path: Path, form: dict[str, Any]) -> None:
    for n in (0, 5):
        with OutOfCoreGraph.create(tmp_path / f"g{n}", np.zeros(n + 1, np.int64), [], progress=False, **form) as g:
            assert g.indptr.tolist() == [0] * (n + 1)
            assert g.in_degree.tolist() == g.out_degree.tolist() == [0] * n
            assert list(g.edges()) == list(g.edges(edge_pos=True)) == []
            if n:
                assert g.neighbors(n - 1).shape == (0,)


def test_tensors_are_the_users(small: SimpleNamespace) -> None:
    """Writing to them changes nothing."""
    with featstore.open(small.path, memory="64MiB") as g:
        for name in ("indptr", "in_degree", "out_degree"):
            getattr(g, name).zero_()
        g.neighbors(int(np.diff(small.indptr).argmax())).zero_()
        for block in g.edges():
            block.zero_()
        np.testing.assert_array_equal(g.indptr, small.indptr)
        np.testing.assert_array_equal(g.topology.degrees(), np.diff(small.indptr))
        np.testing.assert_array_equal(torch.cat(list(g.edges()), 1)[0], small.indices)


@pytest.mark.parametrize(
    ("node", "kind", "message"),
    [
        (1000, IndexError, "node 1000 is not a node: the graph has nodes 0 … 999"),
        (-1, IndexError, "node -1 is not a node: the graph has nodes 0 … 999"),
        (2**70, IndexError, f"node {2**70} is not a node"),
        (np.int64(4000), IndexError, "node 4000 is not a node"),
        (1.0, TypeError, "node must be one integer, not 1.0"),
        (True, TypeError, "node must be one integer, not True"),
        ("x", TypeError, "node must be one integer, not 'x'"),
        ([1, 2], TypeError, r"node must be one integer, not a list; the lists of many nodes come of NeighborSampler"),
        (np.arange(3), TypeError, "not a ndarray"),
        (torch.arange(3), TypeError, "not a Tensor"),
    ],
)
def test_what_is_no_node(small: SimpleNamespace, node: Any, kind: type[Exception], message: str) -> None:
    with featstore.open(small.path, memory="64MiB") as g, pytest.raises(kind, match=message):
        g.neighbors(node)


def test_flags_are_checked(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        for call in (lambda: g.neighbors(0, edge_pos="yes"), lambda: g.edges(edge_pos=1)):  # type: ignore[call-overload]
            refuses(TypeError, "edge_pos", call)


def test_closed(small: SimpleNamespace) -> None:
    g = featstore.open(small.path, memory="64MiB")
    begun = g.edges()
    g.close()
    for call in (
        lambda: g.indptr,
        lambda: g.in_degree,
        lambda: g.out_degree,
        lambda: g.neighbors(0),
        g.edges,
        lambda: next(begun),
    ):
        refuses(ClosedError, "", call)


def test_too_little_memory_is_named(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        blocks: Iterator[torch.Tensor] = g.edges()
        held = g.budget.reserve("mine", g.budget.available)
        refuses(BudgetError, "edges needs", lambda: next(blocks))
        held.release()
        assert "edges" not in g.memory_report()


def test_an_id_that_is_no_node_is_found(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids under sums that match are checked all the same."""
    with featstore.open(small.path, memory="64MiB") as g:
        monkeypatch.setattr(g.topology, "read_edges", lambda positions, out: out.fill(1000))
        refuses(CorruptionError, "leads to node 1000 of 1000", lambda: g.neighbors(int(np.diff(small.indptr).argmax())))
