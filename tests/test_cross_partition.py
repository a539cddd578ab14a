"""Out-edges into other parts by brute force; the neighbour cache that goes by them, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core.partition import cross_edges
from featstore.budget import Budget
from featstore.graph.crossedges import count_cross_edges, counts_dtype
from tests.test_partitioning import Arrays, arrays, graphs, make


def brute(indptr: Any, indices: Any, parts: Any) -> list[int]:
    """Go through all lists: an id ``u`` in the list of ``v`` is the edge from ``u`` to ``v``."""
    counts = [0] * (len(indptr) - 1)
    for v in range(len(counts)):
        for u in indices[indptr[v] : indptr[v + 1]]:
            counts[int(u)] += int(parts[u]) != int(parts[v])
    return counts


@given(graphs(), st.data(), st.integers(1, 9), st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64]))
def test_the_kernel_is_brute_force(graph: Any, data: Any, step: int, ids: Any, counts: Any) -> None:
    """With isolated nodes, self-loops and repeated edges; one part, empty parts, a part a node; blocks that cut lists."""
    indptr, indices = graph
    n = len(indptr) - 1
    parts = np.array(data.draw(st.lists(st.sampled_from([0, 1, 5, 70_000]), min_size=n, max_size=n)), np.int32)
    found, node = np.zeros(n, counts), 0
    for first, block in Arrays(indptr, indices, step, ids).scan(0):
        node = cross_edges(indptr, node, parts, block, block.itemsize, first, found)
    assert found.tolist() == brute(indptr, indices, parts)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    indptr, parts, ids, counts = np.array([0, 1, 2]), np.zeros(2, np.int32), np.array([1, 0], np.int32), np.zeros(2, np.int32)
    for arguments in (
        (indptr, 0, parts[:1].copy(), ids, 4, 0, counts),
        (indptr, 0, parts, ids, 4, 1, counts),
        (indptr, 0, parts, ids, 4, -1, counts),
        (indptr, 2, parts, ids, 4, 0, counts),
        (indptr, -1, parts, ids, 4, 0, counts),
        (indptr, 0, parts, ids, 2, 0, counts),
        (indptr, 0, parts, ids, 4, 0, counts[:1].copy()),
        (indptr, 0, parts, ids, 4, 0, counts.astype(np.int16)),
    ):
        with pytest.raises(ValueError, match=r"disagree|no block|ids have|counts must"):
            cross_edges(*arguments)
    assert not counts.any()


@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (1, 4), (600, 1), (600, 7), (600, 2_000)])
def test_they_are_kept_with_the_parts(tmp_path: Path, n: int, k: int) -> None:
    """Graphs without nodes, one part, more parts than nodes."""
    with make(tmp_path / "g", n) as g:
        parts = featstore.partition(g, k, "random", seed=1)
        found = g.parts()[f"random-{k}"].cross_out_degree()
        assert str(found.dtype) == "torch.int32"
        assert found.tolist() == brute(*arrays(g), parts)
        assert g.memory_report().get("parts", 0) == 8 * n
        out_degree = np.bincount(arrays(g)[1], minlength=n)
        assert (found.numpy() <= out_degree).all()
        if k == 1:
            assert not found.any()
        del parts, found
        assert "parts" not in g.memory_report()
        assert featstore.partition(g, k, "random", name="unkept", keep=False).shape == (n,)
        assert list(g.parts()) == [f"random-{k}"]


def test_counts_are_wide_where_they_must_be() -> None:
    assert counts_dtype(2**31 - 1) == np.int32
    assert counts_dtype(2**31) == np.int64


def test_counting_is_counted(tmp_path: Path) -> None:
    n = 40_000
    with make(tmp_path / "g", n, 8) as g:
        budget, seen = Budget(1 << 22), list[int]()
        count_cross_edges(g.topology, np.zeros(n, np.int32), budget, "here", seen.append)
        assert budget.used == 0
        assert 0 < budget.peak <= 1 << 18
        assert sum(seen) == g.topology.nbytes
        topology: Any = SimpleNamespace(num_nodes=n, num_edges=2**31, indptr=g.topology.indptr, nbytes=0, scan=g.topology.scan)
        wide = count_cross_edges(topology, np.arange(n, dtype=np.int32), budget, "here")
        assert wide.dtype == np.int64
        assert wide.tolist() == brute(*arrays(g), range(n))
