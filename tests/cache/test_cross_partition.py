"""Out-edges into other parts by brute force; the neighbour cache that goes by them, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core.partition import cross_edges
from featstore.budget import Budget
from featstore.cache.cross_partition import CrossPartition
from featstore.errors import StaleError
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.storage.update import Update
from featstore.topology.base import huge_bytes
from featstore.topology.crossedges import count_cross_edges, counts_dtype
from tests.partitioning.test_partitioning import Arrays, arrays, graphs, make


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
    found = np.zeros(n, counts)
    for block in Arrays(indptr, indices, step, ids).blocks(0):
        cross_edges(block.offsets, block.first_node, parts, block.ids, block.ids.itemsize, block.first_edge, found)
    assert found.tolist() == brute(indptr, indices, parts)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    indptr, parts, ids, counts = np.array([0, 1, 2]), np.zeros(2, np.int32), np.array([1, 0], np.int32), np.zeros(2, np.int32)
    for arguments in (
        (indptr, 0, parts[:1].copy(), ids, 4, 0, counts),
        (indptr, 0, parts, ids, 4, 1, counts),
        (indptr, 0, parts, ids, 4, -1, counts),
        (indptr, 1, parts, ids, 4, 0, counts),
        (indptr, -1, parts, ids, 4, 0, counts),
        (indptr, 0, parts, ids, 2, 0, counts),
        (indptr, 0, parts, ids, 4, 0, counts[:1].copy()),
        (indptr, 0, parts, ids, 4, 0, counts.astype(np.int16)),
    ):
        with pytest.raises(ValueError, match=r"not among|no block|ids have|counts must"):
            cross_edges(*arguments)
    with pytest.raises(TypeError, match="bytes-like"):
        cross_edges(indptr, 0, parts, ids, 4, 0, [0, 0])
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
        topology: Any = SimpleNamespace(num_nodes=n, num_edges=2**31, nbytes=0, blocks=g.topology.blocks)
        wide = count_cross_edges(topology, np.arange(n, dtype=np.int32), budget, "here")
        assert wide.dtype == np.int64
        assert wide.tolist() == brute(*arrays(g), range(n))


def scores_of(cross: list[int], in_degree: list[int], **options: Any) -> list[float]:
    context = featstore.PolicyContext(
        len(cross), 4, in_degree_of=lambda: np.array(in_degree), cross_out_degree_of=lambda: np.array(cross, np.int32)
    )
    found: list[float] = CrossPartition(**options).scores(context).tolist()
    return found


def test_scores() -> None:
    assert scores_of([6, 100, 2, 0, 3], [2, 0, 4, 5, 3]) == [3, -1, 0.5, 0, 1]
    assert scores_of([6, 100, 2, 0, 3], [2, 0, 4, 5, 3], per_byte=False) == [6, -1, 2, 0, 3]
    assert scores_of([], []) == []
    with pytest.raises(TypeError, match="per_byte must be True or False"):
        CrossPartition(per_byte=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divide the dataset with featstore\.partition, or pass parts="):
        CrossPartition().scores(featstore.PolicyContext(3, 4, in_degree_of=lambda: np.ones(3)))


def cached(g: Any) -> set[int]:
    assert not g.neighbor_cache.whole
    return set(np.flatnonzero(g.neighbor_cache.offset_of_node >= 0).tolist())


def best(g: Any, parts: Any, n_bytes: int, per_byte: bool = True) -> set[int]:
    """Sort all nodes by the score, and take the longest prefix whose lists fit."""
    indptr, indices = arrays(g)
    counts, degrees = brute(indptr, indices, parts), np.diff(indptr).tolist()
    scores = [-1.0 if not d else c / d if per_byte else c for c, d in zip(counts, degrees, strict=True)]
    left, chosen = (n_bytes - huge_bytes(8 * len(degrees))) // 4096 * 4096, set()
    for v in sorted(range(len(degrees)), key=lambda v: (-scores[v], v)):
        left -= 4 * (degrees[v] + 1)
        if left < 0:
            break
        chosen.add(v)
    return chosen


def test_lists_of_the_best_scores_are_cached(tmp_path: Path) -> None:
    n, size = 3_000, 60_000
    with make(tmp_path / "g", n, 12) as g:
        first = featstore.partition(g, 5, "random", seed=1, name="first")
        last = featstore.partition(g, 9, name="last")
        mine = torch.arange(n) % 3
        before = g.budget.used
        of_last, of_first, of_mine = ([best(g, parts, size, each) for each in (True, False)] for parts in (last, first, mine))
        kept = g.parts()["first"]
        for want, given in ((of_last, None), (of_first, "first"), (of_first, kept), (of_mine, mine), (of_mine, mine.numpy)):
            g.cache_neighbors(size, "cross_partition", parts=given)
            assert cached(g) == want[0]
            assert 10 < len(cached(g)) < n - 10
            g.cache_neighbors(size, CrossPartition(per_byte=False), parts=given)
            assert cached(g) == want[1] != want[0]
            g.cache_neighbors(0)
            assert g.budget.used == before  # nothing is held of what it took to choose
        g.cache_neighbors(size)
        assert cached(g) != of_last[0]


def test_parts_that_are_single_nodes_score_as_in_out_ratio(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    lists = [np.sort(np.setdiff1d(rng.integers(0, 800, rng.integers(0, 30)), [v])) for v in range(800)]
    indptr = np.cumsum([0, *map(len, lists)])
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, np.concatenate(lists), progress=False) as g:
        g.cache_neighbors(30_000)
        want = cached(g)
        g.cache_neighbors(30_000, "cross_partition", parts=np.arange(800))
        assert cached(g) == want


def test_it_serves_batches_of_parts_better(tmp_path: Path) -> None:
    """Of what batches of one part ask for beyond their own part's lists, it holds more than the policy that ignores parts."""
    rng = np.random.default_rng(0)
    n, k = 4_000, 10
    part = rng.permutation(np.arange(n) % k)
    members = [np.flatnonzero(part == p) for p in range(k)]
    # Some nodes are known in their own part alone, others everywhere.
    local = rng.random(n) < 0.5
    everywhere = np.flatnonzero(~local)
    lists = []
    for v in range(n):
        own = members[part[v]]
        lists.append(np.sort(np.concatenate([rng.choice(own[local[own]], 14), rng.choice(everywhere, 6)])))
    indptr = np.arange(0, 20 * n + 1, 20)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, np.concatenate(lists), progress=False) as g:
        featstore.partition(g, method=part, name="planted")
        sampler = featstore.NeighborSampler(g, [5, 5])
        held = {}
        for policy in ("in_out_ratio", "cross_partition"):
            g.cache_neighbors(huge_bytes(8 * n) + 80_000, policy)
            lists_in_memory, wanted = cached(g), 0
            for p in range(k):
                batch = sampler.sample(torch.from_numpy(members[p][:100]), index=p)
                asked = batch.input_ids[torch.unique(torch.cat([block.dst for block in batch.blocks]))].tolist()
                wanted += sum(v in lists_in_memory for v in asked if part[v] != p)
            held[policy] = wanted
    assert held["cross_partition"] > 1.5 * held["in_out_ratio"]


def test_without_parts_it_is_refused_by_name(tmp_path: Path) -> None:
    with make(tmp_path / "g") as g:
        g.cache_neighbors("8KiB")
        for call in (
            lambda: g.cache_neighbors("8KiB", "cross_partition"),
            lambda: g.cache_neighbors("8KiB", CrossPartition()),
            lambda: g.cache_neighbors("8KiB", "cross_partition", save=True),
        ):
            with pytest.raises(ValueError, match=r"keeps no parts: make some with featstore\.partition"):
                call()
        assert g.neighbor_cache is not None  # refused before the other was dropped
        featstore.partition(g, 3)
        with pytest.raises(ValueError, match="keeps no parts 'other'; there is 'fennel-3'"):
            g.cache_neighbors("8KiB", "cross_partition", parts="other")
        for parts, text in ((np.zeros(5, int), "one entry a node"), (np.full(600, -1), "node 0 is in part -1")):
            with pytest.raises(ValueError, match=text):
                g.cache_neighbors("8KiB", "cross_partition", parts=parts)
        assert "policy inputs" not in g.memory_report()
    with Update(tmp_path / "g") as update:
        update.add([], extra={"parts/fennel-3": {**update.catalog.extra["parts/fennel-3"], "made_of": {}}})
        update.commit()
    with featstore.open(tmp_path / "g") as g, pytest.raises(StaleError, match="partition it again"):
        g.cache_neighbors("8KiB", "cross_partition")


def test_a_saved_cache_is_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path / "g", 1_000, 9) as g:
        one = featstore.partition(g, 4, "random", seed=1, name="one")
        featstore.partition(g, 4, "random", seed=2, name="two")
        g.cache_neighbors("20KiB", "cross_partition", parts="one", save=True)
        saved = cached(g)
        assert saved == best(g, one, 20 << 10)
        with pytest.raises(ValueError, match="saved for a policy's name"):
            g.cache_neighbors("20KiB", "cross_partition", parts=one, save=True)
    n_built = 0
    build = NeighborCache.build

    def counting(*arguments: Any, **options: Any) -> NeighborCache:
        nonlocal n_built
        n_built += 1
        return build(*arguments, **options)

    monkeypatch.setattr(NeighborCache, "build", counting)
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        g.cache_neighbors("20KiB", "cross_partition", parts="one")
        assert (n_built, cached(g)) == (0, saved)
        g.cache_neighbors("20KiB", "cross_partition")  # by those that were kept last
        assert (n_built, cached(g)) == (1, best(g, g.parts()["two"].load(), 20 << 10))
        again = featstore.partition(g, 4, "random", seed=3, name="one")
        g.cache_neighbors("20KiB", "cross_partition", parts="one")
        assert (n_built, cached(g)) == (2, best(g, again, 20 << 10))
