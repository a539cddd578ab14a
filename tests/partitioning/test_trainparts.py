"""Self-reliant parts equal PaGraph's algorithm 1 by brute force, exact and by paths; they are kept, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import featstore
from featstore._core.trainparts import TrainPlacer, add_paths, bring_neighbors
from featstore.budget import Budget
from featstore.errors import BudgetError, FormatError, OptionError, StaleError
from featstore.estimate.redundancy import redundancy
from featstore.graph.selfreliant import SelfReliantParts
from featstore.partitioning import trainparts
from featstore.partitioning.fennel import Fennel
from featstore.partitioning.ldg import LDG
from featstore.partitioning.trainparts import TrainParts
from featstore.sampling.shares import ShareOfBatches
from featstore.topology.listblocks import ListBlock, NodeLists
from tests.support.graphs import make_graph
from tests.support.reference_partitions import lists_of, neighborhood, pagraph
from tests.support.refusing import refuses
from tests.support.sampled import covering


class Arrays:
    """A topology in memory, read in blocks of ``step`` ids that cut lists; counts the ids that are read as lists."""

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, step: int, dtype: Any) -> None:
        self.indptr, self.ids, self.step = indptr, indices.astype(dtype), step
        self.num_nodes, self.num_edges, self.nbytes = len(indptr) - 1, len(indices), indices.nbytes
        self.id_dtype, self.id_bytes, self.n_read, self.n_passes = np.dtype(dtype), np.dtype(dtype).itemsize, 0, 0

    def offsets(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.indptr[nodes], self.indptr[nodes + 1] - self.indptr[nodes]

    def blocks(self, block_bytes: int) -> Any:
        self.n_passes += 1
        for first in range(0, self.num_edges, self.step):
            ids = self.ids[first : first + self.step].copy()
            node = int(np.searchsorted(self.indptr, first, side="right")) - 1
            end = int(np.searchsorted(self.indptr, first + len(ids), side="left"))
            yield ListBlock(node, self.indptr[node : end + 1].copy(), first, ids)

    def lists(self, nodes: np.ndarray, block_bytes: int) -> Any:
        assert (np.diff(nodes) > 0).all()
        begins, degrees = self.offsets(nodes)
        self.n_read += int(degrees.sum())
        for first in range(0, self.num_edges, self.step):
            stop = min(first + self.step, self.num_edges)
            where = np.flatnonzero((degrees > 0) & (begins < stop) & (begins + degrees > first))
            if len(where):
                yield NodeLists(where, begins[where] - first, degrees[where], self.ids[first:stop].copy())


def divide(
    topology: Any, train: list[int], k: int, hops: int, visits: int = 50, memory: int = 1 << 26
) -> tuple[SelfReliantParts, Budget]:
    budget = Budget(memory)
    return TrainParts(hops, visits).assign(topology, np.array(train, np.int64), k, 5, budget, lambda n: None), budget


def order_of(train: list[int]) -> list[int]:
    """The order in which seed 5 has them."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(5))).permutation(train).tolist()


def agree(found: SelfReliantParts, expected: tuple[list[set[int]], list[set[int]]]) -> None:
    trained, whole = expected
    assert [found.part(i).tolist() for i in range(found.n_parts)] == [sorted(each) for each in trained]
    assert found.n_nodes.tolist() == [len(each) for each in whole]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Small graphs with self-loops, repeated edges and isolated nodes, and training nodes of them."""
    n = draw(st.integers(1, 14))
    lists = draw(st.lists(st.lists(st.integers(0, n - 1), max_size=6), min_size=n, max_size=n))
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    train = sorted(draw(st.sets(st.integers(0, n - 1))))
    return indptr, np.array([u for each in lists for u in sorted(each)], np.int64), train


TIGHT = st.booleans()


def tighten(patch: pytest.MonkeyPatch, is_tight: bool) -> None:
    """Leave room for a single list at first, for paths to one part, and take pieces of three edges."""
    if is_tight:
        for name, value in {"_LEAST_IDS": 1, "_MEMORY_FRACTION": 0, "_PIECE_EDGES": 3, "_BLOCK_NODES": 4}.items():
            patch.setattr(trainparts, name, value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs(), st.integers(1, 20), st.integers(1, 3), st.integers(1, 9), st.sampled_from([np.int32, np.int64]), TIGHT)
def test_exact_is_brute_force(graph, k, hops, step, dtype, is_tight) -> None:
    indptr, indices, train = graph
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch, is_tight)
        found, budget = divide(Arrays(indptr, indices, step, dtype), train, k, hops, 10**6)
    agree(found, pagraph(indptr, indices, order_of(train), k, hops, 10**6))
    sizes = np.diff(found.offsets)
    assert sizes.max(initial=0) - sizes.min(initial=len(train)) <= 1
    assert budget.used == found.train_nodes.nbytes + found.offsets.nbytes + found.n_nodes.nbytes
    del found
    assert budget.used == 0


@given(graphs(), st.integers(1, 20), st.integers(1, 3), st.integers(0, 4), st.integers(1, 9), TIGHT)
def test_paths_are_brute_force(graph, k, hops, visits, step, is_tight) -> None:
    """Also where paths go on from what was exact."""
    indptr, indices, train = graph
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch, is_tight)
        found, _ = divide(Arrays(indptr, indices, step, np.int32), train, k, hops, visits)
    agree(found, pagraph(indptr, indices, order_of(train), k, hops, visits))


@given(graphs(), st.integers(1, 5), st.booleans(), st.sampled_from([0, 1, 50]), TIGHT)
def test_hops_beyond_the_depth_add_nothing(graph, k, is_acyclic, visits, is_tight) -> None:
    """Nor do they take long: those after the last new node are not made; counts of paths in cycles stay finite."""
    indptr, indices, train = graph
    if is_acyclic:
        of = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        indptr, indices = np.searchsorted(of[indices < of], np.arange(len(indptr))), indices[indices < of]
    topology, hops = Arrays(indptr, indices, 9, np.int32), len(indptr)
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="raise", invalid="raise"):
        tighten(patch, is_tight)
        found, _ = divide(topology, train, k, 254, visits)
    expected = pagraph(indptr, indices, order_of(train), k, hops, visits)
    if is_acyclic or visits == 50:
        agree(found, expected)
    else:
        lists, groups = lists_of(indptr, indices), [found.part(i).tolist() for i in range(k)]
        assert found.n_nodes.tolist() == [len(set().union(*(neighborhood(lists, v, hops)[0] for v in each))) for each in groups]
    if is_acyclic:
        assert topology.n_passes <= (len(train) + 1) * (hops + 1) * (k if is_tight else 1)


@pytest.mark.parametrize(("size", "visits"), covering([(390, 300, 1), (400, 7, 2), (130, 300, 2), (200, 9, 3)], [50, 1, 0]))
def test_a_larger_graph_is_brute_force(size: tuple[int, int, int], visits: int) -> None:
    n_train, k, hops = size
    """More parts than a byte numbers; chunks of several nodes between passes; parts left empty."""
    indptr, indices = make_graph(400, 4, 3)
    train = np.sort(np.random.default_rng(1).permutation(400)[:n_train]).tolist()
    topology = Arrays(indptr, indices, 257, np.int32)
    found, _ = divide(topology, train, k, hops, visits)
    agree(found, pagraph(indptr, indices, order_of(train), k, hops, visits))
    assert set(np.diff(found.offsets).tolist()) <= {n_train // k, -(-n_train // k)}
    assert topology.n_passes <= 64 * hops
    assert topology.n_read <= len(indices)  # each list once


def test_lists_of_earlier_blocks_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is held since an earlier block may have neighbours whose lists are not."""
    monkeypatch.setattr(trainparts, "_BLOCK_NODES", 1)
    indptr, indices = make_graph(300, 2, 3)
    train = list(range(0, 300, 7))
    found, _ = divide(Arrays(indptr, indices, 257, np.int32), train, 5, 3)
    agree(found, pagraph(indptr, indices, order_of(train), 5, 3))


def test_reads_follow_visits_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    indptr, indices = make_graph(400, 4, 3)
    train = list(range(0, 400, 3))
    whole, _ = divide(Arrays(indptr, indices, 257, np.int32), train, 5, 2)
    monkeypatch.setattr(trainparts, "_LEAST_IDS", 200)
    monkeypatch.setattr(trainparts, "_MEMORY_FRACTION", 0)
    topology = Arrays(indptr, indices, 257, np.int32)
    found, _ = divide(topology, train, 5, 2)
    assert torch.equal(found.train_nodes, whole.train_nodes)
    lists = lists_of(indptr, indices)
    assert len(indices) < topology.n_read <= 3 * sum(neighborhood(lists, v, 2)[1] for v in train)


def test_any_number_of_visits(g: Any) -> None:
    usual = {"method": "ldg", "train_idx": np.arange(9), "hops": 2, "keep": False}
    found = [featstore.partition(g, 4, visits=visits, **usual).train_nodes.tolist() for visits in (50, 1 << 70)]
    assert found[0] == found[1]


def test_shared_neighbourhoods_come_together() -> None:
    """Of planted communities each part has few; random parts have them all, and so have parts by the ids."""
    rng, n, size = np.random.default_rng(0), 3000, 60
    members = rng.permutation(n).reshape(-1, size)
    community = np.empty(n, np.int64)
    community[members] = np.arange(len(members))[:, None]
    lists = [np.sort(rng.choice(members[c], 6)) for c in community]
    indptr, indices = np.arange(0, 6 * n + 1, 6), np.concatenate(lists)
    train = np.flatnonzero(rng.random(n) < 0.3)
    as_lists = lists_of(indptr, indices)
    at_random = np.mean([len(set().union(*(neighborhood(as_lists, v, 2)[0] for v in train[i::5]))) for i in range(5)])
    for visits, most in ((50, 0.5), (0, 0.6)):
        found, _ = divide(Arrays(indptr, indices, 10_000, np.int32), train.tolist(), 5, 2, visits)
        assert found.n_nodes.mean() <= most * at_random


@pytest.mark.parametrize("seed", range(3))
def test_parts_by_paths_are_little_larger_than_exact_ones(seed: int) -> None:
    """At most 1.2 times, where parts at random have 1.5 times the nodes: communities, degrees of a power law, and hubs of all."""
    rng, n, size, k = np.random.default_rng(seed), 8000, 100, 8
    members = rng.permutation(n).reshape(-1, size)
    community = np.empty(n, np.int64)
    community[members] = np.arange(len(members))[:, None]
    degrees = np.minimum(rng.zipf(1.8, n) + 2, 200)
    of, indptr = np.repeat(np.arange(n), degrees), np.concatenate([[0], np.cumsum(degrees)])
    within = members[community[of], (size * rng.random(len(of)) ** 1.5).astype(np.int64)]
    hubs = members.ravel()[(n * rng.random(len(of)) ** 3).astype(np.int64)]
    indices = np.where(rng.random(len(of)) < 0.98, within, hubs)
    train = np.flatnonzero(rng.random(n) < 0.1).tolist()
    exact, paths = (divide(Arrays(indptr, indices, 1 << 16, np.int32), train, k, 2, visits)[0] for visits in (1 << 30, 0))
    lists, mean = lists_of(indptr, indices), exact.n_nodes.mean()
    drawn = np.array_split(rng.permutation(train).tolist(), k)
    at_random = np.mean([len(set().union(*(neighborhood(lists, v, 2)[0] for v in each))) for each in drawn])
    assert 1.5 * mean <= at_random
    assert paths.n_nodes.mean() <= 1.2 * mean
    for parts in (exact, paths):
        assert np.diff(parts.offsets).max() <= 1.02 * len(train) / k


@pytest.fixture
def g(tmp_path: Path) -> Any:
    indptr, indices = make_graph(600, 6, 0)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, progress=False, memory="16MiB") as graph:
        yield graph


@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_of_a_dataset_and_kept_in_it(tmp_path: Path, topology: str) -> None:
    indptr, indices = make_graph(600, 6, 0)
    train = np.arange(0, 600, 4)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, topology=topology, progress=False, memory="16MiB") as g:
        ascending = np.concatenate([np.sort(each) for each in np.split(indices, indptr[1:-1])])
        parts = featstore.partition(g, 7, "ldg", train, hops=2, seed=5)
        agree(parts, pagraph(indptr, ascending, order_of(train.tolist()), 7, 2))
        mask = np.zeros(600, bool)
        mask[train] = True
        again = featstore.partition(g, 7, LDG, mask, hops=2, visits=0, seed=5, keep=False)
        agree(again, pagraph(indptr, ascending, order_of(train.tolist()), 7, 2, 0))
        other = featstore.partition(g, 7, "ldg", train, hops=2, seed=6, keep=False)
        assert not torch.equal(other.train_nodes, parts.train_nodes)
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        kept = g.parts()["ldg-7-hops-2"]
        assert (kept.n_parts, kept.n_train, kept.hops, kept.method) == (7, 150, 2, "ldg")
        assert kept.options == {"hops": 2, "visits": 50, "seed": 5}
        read = kept.self_reliant()
        assert (read.n_parts, read.hops, read.num_nodes) == (7, 2, 600)
        assert torch.equal(read.train_nodes, parts.train_nodes)
        assert np.array_equal(read.offsets, parts.offsets)
        assert np.array_equal(read.n_nodes, parts.n_nodes)
        assert torch.equal(kept.train_nodes(), parts.train_nodes)
        refuses(IndexError, r"part 7 is not in \[0, 7\)", lambda: read.part(7))
        refuses(IndexError, "part -1", lambda: read.part(-1))
        g.verify(progress=False)


def test_more_parts_than_a_byte_numbers_are_kept(tmp_path: Path) -> None:
    """Parts 0 and 256, say, stay two: in the file, as views, and as the seeds of ranks."""
    k, (indptr, indices) = 300, make_graph(900, 4, 3)
    lists, train = lists_of(indptr, indices), np.sort(np.random.default_rng(1).permutation(900)[:700])
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, progress=False, memory="64MiB") as g:
        made = featstore.partition(g, k, "ldg", train, hops=2, seed=5, progress=False)
        of_all = featstore.partition(g, k, "random", progress=False)
    trained = [set(made.part(part).tolist()) for part in range(k)]
    whole = [set().union(*(neighborhood(lists, v, 2)[0] for v in nodes)) for nodes in trained]
    assert sorted(v for nodes in trained for v in nodes) == train.tolist()
    assert {len(nodes) for nodes in trained} == {2, 3}
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        kept = g.parts()["ldg-300-hops-2"]
        assert kept.n_parts == k
        agree(kept.self_reliant(), (trained, whole))
        for part in (0, 43, 44, 255, 256, 299):
            with g.part(part, kept.name, progress=False) as view:
                assert view.own_part is not None
                assert view.own_part.train_nodes.tolist() == sorted(trained[part])
                assert view.own_part.nodes.tolist() == sorted(whole[part])
                has_list = set().union(*(neighborhood(lists, v, 1)[0] for v in trained[part]))
                assert np.flatnonzero(view.own_part.has_list(0, 900)).tolist() == sorted(has_list)
        batches = featstore.PartBatches(kept, train, 2)
        order, n_steps = batches.epoch(0), len(batches) // k
        for rank, nodes in enumerate(trained):
            share = ShareOfBatches(batches, rank, k)
            seeds = [order.seeds(share.number(step)).tolist() for step in range(n_steps)]
            assert sorted(v for each in seeds for v in each) == sorted(nodes)
        read = g.parts()["random-300"].load()
        assert read.unique().tolist() == list(range(k))
        assert torch.equal(read, of_all)


def test_parts_of_all_nodes_are_asked_for(g: Any) -> None:
    """Whatever takes parts of all nodes passes over self-reliant ones, and refuses one by its name."""
    train = np.arange(100)
    featstore.partition(g, 4, "ldg", train, hops=1)
    refuses(ValueError, "keeps no parts", lambda: featstore.PartitionBatches(g, train, 10))
    featstore.partition(g, 5, "random")
    featstore.partition(g, 4, "ldg", train, hops=1, name="late")
    assert featstore.PartitionBatches(g, train, 10).kept[0] == "random-5"
    for name in ("late", g.parts()["late"]):
        refuses(
            ValueError,
            "'late' are self-reliant, with training nodes only",
            lambda: featstore.PartitionBatches(g, train, 10, name),
        )
    refuses(ValueError, "self-reliant", lambda: g.parts()["late"].cross_out_degree())
    refuses(ValueError, "not self-reliant", lambda: g.parts()["random-5"].self_reliant())
    found = redundancy(g, train, 10, {"neighbor": featstore.NeighborSampler(g, [2])})
    assert {way.parts for way in found.ways} == {None, "random-5"}


def test_stale_parts_and_damaged_ones(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    featstore.partition(g, 4, "ldg", np.arange(100), hops=1)
    kept = g.parts()["ldg-4-hops-1"]
    monkeypatch.setattr(
        SelfReliantParts, "__init__", lambda *_: pytest.fail("made of offsets that do not ascend from 0 to the last")
    )
    for offsets in ([0, 30, 20, 60, 100], [1, 30, 50, 60, 100], [0, 30, 50, 60, 99]):
        damaged = {"train_offsets": torch.tensor(offsets), "part_sizes": torch.zeros(4, dtype=torch.int64)}
        object.__setattr__(kept, "_read", lambda _, role, found=damaged: found[role])
        refuses(FormatError, "offsets do not ascend from 0 to 100", kept.self_reliant)
    before = g.parts()["ldg-4-hops-1"]
    featstore.partition(g, 4, "random", name="ldg-4-hops-1")
    refuses(StaleError, "replaced since", before.self_reliant)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"method": "fennel"}, OptionError, "hops: method 'fennel' has passes, gamma"),
        ({"method": "ranges"}, OptionError, "hops: method 'ranges' has no options"),
        ({"method": LDG()}, OptionError, "hops: 'ldg' was made with its options"),
        ({"method": Fennel}, OptionError, "hops: method 'Fennel' has passes"),
        ({"method": np.zeros(600, int)}, TypeError, "hops is an option of a method"),
        ({"hops": None, "visits": 3}, OptionError, "visits: method 'ldg' has passes"),
        ({"hops": 0}, ValueError, "hops must be at least 1"),
        ({"hops": 1 << 40}, ValueError, "hops must be at most 254"),
        ({"hops": 1.5}, TypeError, "hops"),
        ({"visits": -1}, ValueError, "visits must be at least 0"),
        ({"passes": 2}, OptionError, "passes: method 'ldg' with hops has hops, visits"),
        ({"depth": 2}, OptionError, "depth: method 'ldg' with hops"),
        ({"train_idx": None}, TypeError, "n_parts and train_idx are needed with hops"),
        ({"n_parts": None}, TypeError, "n_parts and train_idx are needed with hops"),
        ({"n_parts": 0}, ValueError, "n_parts must be at least 1"),
        ({"keep_lists": True}, ValueError, "keep_lists goes without hops"),
        ({"train_idx": [600]}, IndexError, "600 at position 0 is not a node"),
    ],
)
def test_bad_input_is_named(g: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    usual = {"n_parts": 4, "method": "ldg", "train_idx": np.arange(9), "hops": 2}
    refuses(error, text, lambda: featstore.partition(g, **(usual | arguments)))
    assert g.parts() == {}


def test_memory_that_is_short_is_named() -> None:
    indptr, indices = make_graph(20_000, 3, 0)
    topology = Arrays(indptr, indices, 10_000, np.int32)
    caught = refuses(BudgetError, "partitioning", lambda: divide(topology, list(range(0, 20_000, 9)), 8, 2, memory=1 << 19))
    found, budget = divide(topology, list(range(0, 20_000, 9)), 8, 2, memory=caught.value.needed + (8 << 20))
    assert budget.peak <= budget.total
    assert len(found.train_nodes) == 2223


def test_the_core_checks_its_arguments() -> None:
    part, member = np.full(5, -1, np.int32), np.zeros((5, 1), np.uint8)
    placer = TrainPlacer(part, member, 2, 2, 1)
    slot, starts, ids = np.array([0, -1, -1, -1, -1], np.int32), np.array([0, 2]), np.array([1, 2], np.int32)
    for made in ((part, member, 6, 2, 1), (part, member, 2, 0, 1), (part, member, 2, 2, 0), (part, member, 2, 9, 1)):
        refuses(ValueError, "", lambda: TrainPlacer(*made))
    for nodes in ([5], [-1]):
        refuses(ValueError, "is no node", lambda: placer.put_exact(np.array(nodes), slot, starts, ids, 4, 9))
    refuses(ValueError, "list of node 3 is not there", lambda: placer.put_exact(np.array([3]), slot, starts, ids, 4, 9))
    refuses(ValueError, "disagree in length", lambda: placer.put_exact(np.array([0]), slot[:4], starts, ids, 4, 9))
    refuses(ValueError, "disagree in length", lambda: placer.put_exact(np.array([0]), slot, starts + 1, ids, 4, 9))
    assert placer.put_exact(np.array([0]), slot, starts, ids, 4, 9) == 1
    assert (part.tolist(), member.ravel().tolist(), placer.n_visits) == ([0, -1, -1, -1, -1], [1, 1, 1, 0, 0], 2)
    refuses(ValueError, "or in a part", lambda: placer.put_exact(np.array([0]), slot, starts, ids, 4, 9))
    two = np.array([1, 2]), np.zeros((2, 2), np.float32)
    refuses(ValueError, "2 training nodes, where 1 were to come", lambda: placer.put_by(*two))
    refuses(ValueError, "counts have", lambda: placer.put_by(np.array([3]), np.zeros((1, 3), np.float32)))
    refuses(ValueError, "shape of member", lambda: placer.join(np.zeros((5, 2), np.uint8)))
    refuses(ValueError, "there are 2 parts", lambda: placer.sizes(np.zeros(3, np.int64), np.zeros(2, np.int64)))
    floats = np.zeros((5, 2), np.float32)
    refuses(ValueError, "are not among", lambda: add_paths(starts, 5, ids, 4, 0, part, 0, None, floats))
    refuses(ValueError, "no block of 2 ids", lambda: add_paths(starts, 0, ids, 4, 1, part, 0, None, floats))
    refuses(ValueError, "a row a node", lambda: add_paths(starts, 0, ids, 4, 0, part, 0, floats[:4], floats))
    refuses(ValueError, "two shapes", lambda: bring_neighbors(starts, 0, ids, 4, 0, member, member[:4]))
