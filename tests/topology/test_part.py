"""The nodes of a part: found as by brute force, each list read once; whoever leaves the part is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.budget import Budget
from featstore.topology.part import OUTSIDE, Part, lists_between, reach
from tests.support.array_graphs import ArrayGraph, graphs, random_graph
from tests.support.reference_partitions import lists_of
from tests.support.refusing import refuses


def hops_by_sets(lists: list[list[int]], train: list[int], hops: int) -> list[int]:
    """Hops of each node, set by set."""
    found = dict.fromkeys(train, 0)
    for hop in range(hops):
        for v in [v for v, at in found.items() if at == hop]:
            for u in lists[v]:
                found.setdefault(u, hop + 1)
    return [found.get(v, OUTSIDE) for v in range(len(lists))]


@pytest.mark.usefixtures("small_pieces")
@given(graphs(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_nodes_and_degrees_are_those_of_brute_force(g: ArrayGraph, hops: int, random: Any) -> None:
    lists = lists_of(g.indptr, g.indices)
    train = sorted(random.sample(range(g.num_nodes), min(g.num_nodes, random.randint(1, 5))))
    seen: list[int] = []
    budget = Budget(64 << 20)
    hop_of, counts = reach(g.topology, np.array(train, np.int64), hops, budget, seen.append, counts=True)
    assert hop_of.tolist() == hops_by_sets(lists, train, hops)
    own = [v for v in range(g.num_nodes) if hop_of[v] < hops]
    assert counts is not None
    assert counts.tolist() == np.bincount([u for v in own for u in lists[v]], minlength=g.num_nodes).tolist()
    assert sum(seen) == sum(len(lists[v]) for v in own), "each list of the part is read once"
    found = [ids.tolist() for _, _, _, ids in lists_between(g.topology, hop_of, 0, hops)]
    assert [u for each in found for u in each] == [u for v in own for u in lists[v]]
    assert budget.report()["part"] == hop_of.nbytes + counts.nbytes
    del hop_of, counts
    assert "part" not in budget.report() or budget.report()["part"] == 0


def test_only_lists_of_the_part_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    g = random_graph(3000, 6)
    asked: list[int] = []
    real = g.topology.lists

    def lists(nodes: np.ndarray, block_bytes: int) -> Any:
        asked.extend(nodes.tolist())
        return real(nodes, block_bytes)

    monkeypatch.setattr(g.topology, "lists", lists)
    hop_of, counts = reach(g.topology, np.array([5, 70, 900]), 3, Budget(64 << 20))
    assert counts is None
    assert sorted(asked) == np.flatnonzero(hop_of < 3).tolist()


@pytest.mark.parametrize("chunk_bytes", [None, 8192])
def test_long_lists_come_in_pieces(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None) -> None:
    """Each piece says where in its list it begins."""
    monkeypatch.setattr("featstore.topology.part._READ_BYTES", 8192)
    monkeypatch.setattr(ArrayGraph, "chunk_bytes", chunk_bytes)
    degrees = np.random.default_rng(0).choice([0, 3, 700, 9000], 60)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    g = ArrayGraph(indptr, np.random.default_rng(1).integers(0, 60, indptr[-1]).astype(np.int32))
    hop_of = np.random.default_rng(2).choice([0, 1, OUTSIDE], 60).astype(np.uint8)
    found: dict[int, list[int]] = {}
    n_pieces = 0
    for nodes, begins, counts, ids in lists_between(g.topology, hop_of, 0, 2):
        ends = np.cumsum(counts)
        assert len(ids) == ends[-1]
        n_pieces += len(nodes)
        for v, begin, count, end in zip(nodes.tolist(), begins, counts, ends, strict=True):
            so_far = found.setdefault(v, [])
            assert begin == len(so_far)
            so_far += ids[end - count : end].tolist()
    lists = lists_of(g.indptr, g.indices)
    assert {v: each for v, each in found.items() if each} == {v: lists[v] for v in range(60) if hop_of[v] < 2 and lists[v]}
    assert n_pieces > len(found)


def test_a_part_tells_its_nodes() -> None:
    part = Part("mine", 2, 2, np.array([0, 1, OUTSIDE, 2, 0, OUTSIDE], np.uint8))
    assert (part.n_nodes, part.n_train, part.n_dropped) == (4, 2, 2)
    assert part.train_nodes.tolist() == [0, 4]
    assert part.nodes.tolist() == [0, 1, 3, 4]
    assert part.has_list(0, 6).tolist() == [True, True, False, False, True, False]
    assert str(part) == "part 2 of 'mine'"
    assert repr(part) == "Part(2 of 'mine', 2 hops, 4 nodes, 2 of them to train on, 2 dropped)"
    for nodes in (np.array([3, 0, 1]), range(3, 5), range(2, 2), np.empty(0, np.int64)):
        part.check(nodes)
    refuses(IndexError, "node 5 at position 1 is not in part 2 of 'mine'", lambda: part.check(np.array([0, 5, 2])))
    refuses(IndexError, "node 2 at position 1 is not in part 2", lambda: part.check(range(1, 4)))
    part.check_list(1)
    refuses(
        IndexError, "node 3 is 2 hops from part 2 of 'mine', which has its rows, but not its list", lambda: part.check_list(3)
    )
    refuses(IndexError, "node 2 at position 0 is not in part 2", lambda: part.check_list(2))
    part.check_seeds(np.array([4, 0]), 2)
    part.check_seeds(np.array([1, 0]), 1)
    part.check_seeds(np.array([3]), 0)
    refuses(IndexError, "seed 2 at position 1 is not in part 2", lambda: part.check_seeds(np.array([0, 2]), 2))
    refuses(IndexError, "seed 1 at position 0 is 1 hops from the training nodes", lambda: part.check_seeds(np.array([1]), 2))
    part.check_edge_ids("it")  # of the dataset that it lies in
    alone = Part("mine", 2, 2, part.hop_of, np.zeros(6, np.int64))
    refuses(
        NotImplementedError,
        "it: edge ids are in the dataset that part 2 of 'mine' was exported from",
        lambda: alone.check_edge_ids("it"),
    )
    part.check_hops(2, "it")
    refuses(ValueError, "it reads the lists of 3 hops, and part 2 of 'mine' has hops=2", lambda: part.check_hops(3, "it"))
