"""Batches of self-reliant parts: each rank has its part's seeds, as many batches as others, and meets no node beyond its part."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import FeatstoreWarning
from featstore.graph.selfreliant import SelfReliantParts
from featstore.sampling.partbatches import PartBatches
from featstore.sampling.shares import ShareOfBatches
from tests.support.graphs import make_graph
from tests.support.reference_partitions import lists_of, neighborhood
from tests.support.refusing import refuses

N, K = 400, 4
TRAIN = np.arange(0, N, 3)


def parts_of(groups: list[list[int]], hops: int = 2, num_nodes: int = 1000) -> SelfReliantParts:
    """Parts with the given training nodes."""
    nodes = torch.tensor([v for each in groups for v in sorted(each)], dtype=torch.int64)
    offsets = np.cumsum([0, *map(len, groups)])
    return SelfReliantParts(num_nodes, hops, nodes, offsets, np.zeros(len(groups), np.int64))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_each_rank_has_its_part(sizes, batch_size, shuffle, drop_last, epoch, random) -> None:
    """Of seeds in any order; all ranks have as many batches, none of which is empty or has seeds of another part."""
    ids = random.sample(range(1000), sum(sizes))
    ends = np.cumsum([0, *sizes])
    groups = [ids[a:b] for a, b in pairwise(ends)]
    parts = parts_of(groups)
    given_ids = random.sample(ids, len(ids))
    n_steps = min(sizes) // batch_size if drop_last else -(-max(sizes) // batch_size)
    make = lambda: PartBatches(parts, given_ids, batch_size, shuffle, 7, drop_last)  # noqa: E731
    if not drop_last and min(sizes) < n_steps:
        refused = refuses(ValueError, f"fewer than the {n_steps} batches of each rank", make)
        named = re.search(r"or batch_size=(\d+) or more", str(refused))
        assert (named is None) == (min(sizes) == 0)
        if named is not None:  # the least that would do
            PartBatches(parts, given_ids, int(named[1]), shuffle, 7)
            refuses(ValueError, "fewer than", lambda: PartBatches(parts, given_ids, int(named[1]) - 1, shuffle, 7))
        return
    if drop_last and 0 < min(sizes) < batch_size:
        with pytest.warns(FeatstoreWarning, match="leaves no batch"):
            batches = make()
    else:
        batches = make()
    assert len(batches) == n_steps * len(sizes)
    for rank, group in enumerate(groups):
        share = ShareOfBatches(batches, rank, len(groups))
        order = share.epoch(epoch)
        assert len(share) == n_steps
        found = [order.seeds(share.number(p)).tolist() for p in range(n_steps)]
        flat = [v for each in found for v in each]
        own = [v for v in given_ids if v in group]
        if drop_last:
            assert [len(each) for each in found] == [batch_size] * n_steps
            assert len(set(flat)) == len(flat)
            assert set(flat) <= set(group)
        else:
            assert sorted(flat) == sorted(group)
            lengths = [len(each) for each in found]
            assert not found or (min(lengths) >= 1 and max(lengths) <= min(batch_size, min(lengths) + 1))
        assert shuffle or flat == own[: len(flat)]
        for p, each in enumerate(found):
            assert [given_ids[at] for at in order.positions(share.number(p)).tolist()] == each
            assert order.given(share.number(p)).tolist() == each


def test_orders_are_of_the_seed_and_the_epoch() -> None:
    parts = parts_of([list(range(40)), list(range(50, 90))])
    ids = parts.train_nodes
    batches = PartBatches(parts, ids, 10, seed=1)
    first = [batches.epoch(0).seeds(k).tolist() for k in range(8)]
    assert first == [PartBatches(parts, ids, 10, seed=1).epoch(0).seeds(k).tolist() for k in range(8)]
    for other in (batches.epoch(1), PartBatches(parts, ids, 10, seed=2).epoch(0)):
        assert first != [other.seeds(k).tolist() for k in range(8)]
    digests = {
        PartBatches(*each).digest()
        for each in (
            (parts, ids, 10),
            (parts, ids, 9),
            (parts, ids, 10, False),
            (parts, ids, 10, True, 1),
            (parts, ids, 10, True, 0, True),
            (parts, ids[1:], 10),
            (parts_of([list(range(39)), [39, *range(50, 90)]]), ids, 10),
        )
    }
    assert len(digests) == 7
    assert repr(batches) == "PartBatches(<80 ids in 2 parts>, batch_size=10, shuffle=True, seed=1, drop_last=False)"
    assert batches.nbytes >= 8 * 80 * 5


def test_what_does_not_fit_is_named() -> None:
    parts = parts_of([[1, 2], [3, 4]])
    refuses(ValueError, "seed 7 at position 1 is no training node", lambda: PartBatches(parts, [1, 7], 2))
    refuses(ValueError, "seed 5 at position 0 is no training node", lambda: PartBatches(parts_of([[], []]), [5], 2))
    refuses(IndexError, "seed 1000", lambda: PartBatches(parts, [1, 1000], 2))
    refuses(ValueError, "distinct", lambda: PartBatches(parts, [1, 2, 2], 2))
    refuses(TypeError, "parts must be self-reliant", lambda: PartBatches(np.zeros(5, int), [1], 2))  # type: ignore[arg-type]
    refuses(ValueError, "part 1 has 0 of the seeds, fewer than the 1 batches", lambda: PartBatches(parts, [1, 2], 2))
    refuses(ValueError, "graph of 1000 nodes, not of 5", lambda: PartBatches(parts, [1, 3], 2).check(5))
    mask = np.zeros(1000, bool)
    mask[[1, 3]] = True
    assert len(PartBatches(parts, mask, 2)) == 2
    assert len(PartBatches(parts, [], 2)) == 0


@pytest.fixture
def g(tmp_path: Path) -> Any:
    indptr, indices = make_graph(N, 5, 0)
    rows = np.arange(N, dtype=np.float32).reshape(-1, 1)
    data = {"y": np.arange(N)}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": rows}, data, progress=False) as graph:
        yield graph


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_a_loader_meets_its_part_alone(g: Any, strategy: str) -> None:
    """Whatever the sampler draws; rows, labels and numbers are those of the seeds."""
    featstore.partition(g, K, "ldg", TRAIN, hops=2, progress=False)
    kept = g.parts()[f"ldg-{K}-hops-2"]
    parts = kept.self_reliant()
    lists = lists_of(g.indptr.numpy(), np.concatenate([ids.copy() for _, ids in g.topology.scan()]))
    seen: list[int] = []
    for rank in range(K):
        own = set(parts.part(rank).tolist())
        whole = set().union(*(neighborhood(lists, v, 2)[0] for v in own))
        assert len(whole) == parts.n_nodes[rank]
        sampler = featstore.NeighborSampler(g, [-1, -1])
        batches = featstore.PartBatches(kept, TRAIN, 10)
        loader = featstore.Loader(g, sampler, batches, strategy=strategy, rank=rank, world_size=K)
        assert len(loader) == len(batches) // K == 4
        met: set[int] = set()
        for step, batch in enumerate(loader):
            assert batch.index == step * K + rank
            assert batch.y.tolist() == batch.seeds.tolist()
            assert torch.equal(batch.x.ravel().long(), batch.input_ids)
            seen += batch.seeds.tolist()
            met |= set(batch.input_ids.tolist())
        assert met == whole
        loader.close()
    assert sorted(seen) == TRAIN.tolist()


def test_resuming(g: Any) -> None:
    parts = featstore.partition(g, K, "ldg", TRAIN, hops=1, keep=False, progress=False)
    batches, sampler = featstore.PartBatches(parts, TRAIN, 10), featstore.NeighborSampler(g, [3])
    loaders = [featstore.Loader(g, sampler, batches, strategy="ondemand", rank=rank, world_size=K) for rank in range(K)]
    whole = [batch.input_ids.tolist() for batch in loaders[1]]
    again = featstore.Loader(g, sampler, batches, strategy="ondemand", rank=2, world_size=K)
    half = iter(again)
    next(half), next(half)
    state = again.state_dict()
    half.close()
    other = featstore.Loader(g, sampler, batches, strategy="ondemand", rank=1, world_size=K)
    other.load_state_dict(state)
    assert [batch.input_ids.tolist() for batch in other] == whole[2:]
    for each in (*loaders, again, other):
        each.close()


def test_other_numbers_of_ranks_and_hops_are_refused(g: Any, tmp_path: Path) -> None:
    parts = featstore.partition(g, K, "ldg", TRAIN, hops=1, keep=False, progress=False)
    batches = featstore.PartBatches(parts, TRAIN, 10)

    def load(fanouts: list[int], **ranks: int) -> Any:
        return featstore.Loader(g, featstore.NeighborSampler(g, fanouts), batches, strategy="ondemand", **ranks)

    refuses(ValueError, "of 4 parts are for 4 ranks, not for world_size=1", lambda: load([2]))
    refuses(ValueError, "of 4 parts are for 4 ranks, not for world_size=3", lambda: load([2], rank=0, world_size=3))
    refuses(ValueError, "hops=1, and the sampler draws 2 hops", lambda: load([2, 2], rank=0, world_size=4))
    load([2], rank=3, world_size=4).close()
    sampler = featstore.NeighborSampler(g, [2])
    refuses(
        ValueError,
        "not for world_size=1",
        lambda: featstore.sample_offline(g, sampler, batches, path=tmp_path / "p", progress=False),
    )
