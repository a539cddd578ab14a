"""Windows over several types of edges against batches sampled alone: lists of all types in one pass."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore import EpochSampler, LaborSampler, Loader, NeighborSampler, OnDemand
from featstore._core.epochs import replay
from featstore._core.labor import Layer
from featstore._core.layerwise import Lists
from featstore._core.sampler import Hops
from featstore.sampling.batch import SampledBatch
from featstore.sampling.hops import FanoutSampler
from featstore.sampling.listaccess import ACCESSES
from featstore.sampling.typed import JoinedLists, fanouts_of_types
from featstore.sampling.window import is_wide, least_bytes
from featstore.topology.types import Types
from tests.load.test_heterobatch import STRATEGIES
from tests.load.test_heterobatch import same as same_epochs
from tests.sampling.test_epochwide import PLENTY, batches_of, window_of
from tests.support.sampled import covering, fewer_examples
from tests.support.typed import CITES, WRITES, TypedArrays, academic, check_batch, random_types

pytestmark = pytest.mark.shares_resources

Int64s = npt.NDArray[np.int64]


def same(a: SampledBatch, b: SampledBatch) -> bool:
    """Compare two batches with all arrays of their blocks."""
    of_blocks = zip(a.blocks, b.blocks, strict=True)
    return (
        len(a.tensors) == len(b.tensors)
        and all(map(torch.equal, a.tensors, b.tensors))
        and all((x.n_src, x.n_dst, list(x.edge_arrays)) == (y.n_src, y.n_dst, list(y.edge_arrays)) for x, y in of_blocks)
    )


def check_window(sampler: FanoutSampler, g: Any, batches: list[Int64s], path: Path, **options: Any) -> int:
    """Compare every batch of a window with the one that is sampled alone; return the bytes that were spilled."""
    with window_of(sampler, g, batches, path, **options) as window:
        window.draw()
        for k, seeds in enumerate(batches):
            assert same(window.sample(k), sampler.sample(torch.from_numpy(seeds), options.get("epoch", 0), k)), f"batch {k}"
        return window.spilled_bytes


def tight(g: Any, sampler: FanoutSampler, n_batches: int) -> int:
    return least_bytes(g, sampler.list_fanouts, n_batches, is_wide(g))


@fewer_examples(0.4)
@given(data=st.data(), seed=st.integers(0, 10**6), redraw=st.booleans(), edges=st.booleans(), labor=st.booleans())
def test_small_graphs_equal_batches_sampled_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int, redraw: bool, edges: bool, labor: bool
) -> None:
    """Types without nodes, edges or fan-outs; ranges of a few lists, in which several types lie; seeds of several types."""
    path = tmp_path_factory.mktemp("types")
    graph = random_types(seed, n_relations=data.draw(st.integers(1, 6)), most=data.draw(st.sampled_from([3, 40])))
    rng = np.random.default_rng(seed)
    fanouts = {key: rng.integers(-1, 4, data.draw(st.just(3))).tolist() for key in graph.edges if rng.random() < 0.8}
    form = {"topology": "chunked", "chunk_bytes": "4KiB"} if data.draw(st.booleans()) else {}
    with graph.create(path / "g", **form) as g:
        cache = data.draw(st.sampled_from([0, 40, 10**6]))
        if cache and g.num_edges:
            g.cache_neighbors(8 * g.topology.num_lists + 4096 + 2 * 8 * cache, edges=data.draw(st.booleans()), progress=False)
        sampler: FanoutSampler
        access = "pass"
        if labor:
            sampler = LaborSampler(g, fanouts or [2, 2], 2, seed, redraw=redraw, edges=edges)
        else:
            replace = data.draw(st.booleans())
            access = data.draw(st.sampled_from(ACCESSES))
            sampler = NeighborSampler(g, fanouts or [2, 2], replace=replace, seed=seed, redraw=redraw, edges=edges)
        batches = batches_of(rng.permutation(g.num_nodes)[:20], data.draw(st.integers(1, 9)))
        n_bytes = tight(g, sampler, len(batches)) if data.draw(st.booleans()) else PLENTY
        few, wide = data.draw(st.booleans()), data.draw(st.booleans())
        with (
            mock.patch("featstore.sampling.window.LEAST_BITS", 3 if few else 12),
            mock.patch("featstore.sampling.window.MOST_BITS", 3 if few else 20),
            mock.patch("featstore.sampling.window.is_wide", return_value=wide),
        ):
            n_bytes = max(n_bytes, least_bytes(g, sampler.list_fanouts, len(batches), wide))
            check_window(sampler, g, batches, path, epoch=seed % 5, n_bytes=n_bytes, access=access)


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    return academic()


@pytest.fixture(scope="module", params=["csc", "chunked"])
def g(request: pytest.FixtureRequest, tmp_path_factory: Any, graph: TypedArrays) -> Iterator[Any]:
    form = {"chunk_bytes": "4KiB"} if request.param == "chunked" else {}
    with graph.create(tmp_path_factory.mktemp("mag") / "mag", topology=request.param, memory="64MiB", **form) as opened:
        yield opened


def some_batches(g: Any, n: int = 700, size: int = 100) -> list[Int64s]:
    return batches_of(np.random.default_rng(1).permutation(g.types.nodes["paper"].n)[:n], size)


@pytest.mark.parametrize(
    ("fanouts", "access", "edges"),
    covering(
        [[5, 5, 3], {WRITES: [-1, 70], CITES: [2, 2]}, {WRITES: [0, 4], CITES: [90, 0]}, [100]], ["pass", "random"], [False, True]
    ),
)
def test_what_does_not_fit_the_memory_is_spilled(g: Any, tmp_path: Path, fanouts: Any, access: str, edges: bool) -> None:
    """A fan-out of a type is drawn in lanes, of another alone, and of a third not at all, in the same range of lists."""
    batches = some_batches(g)
    sampler = NeighborSampler(g, fanouts, seed=3, edges=edges)
    least = tight(g, sampler, len(batches))
    spilled = [
        check_window(sampler, g, batches, tmp_path, n_bytes=n, access=access, n_workers=2) for n in (least, 3 * least, PLENTY)
    ]
    assert spilled[0] > 0
    assert spilled[-1] == 0


def test_a_fanout_beyond_every_list_takes_no_memory(g: Any, tmp_path: Path) -> None:
    batches = some_batches(g, 200)
    for draws in ({WRITES: [10**9, 2], CITES: [3, 10**6]}, {WRITES: [-1, 2], CITES: [3, -1]}):
        sampler = NeighborSampler(g, draws, seed=4)
        assert sampler.drawn_of_types[WRITES] == (-1, 2)
        assert sampler.drawn_of_types[CITES] == (3, -1)
        assert sampler.drawn_fanouts == (-1, -1)
        assert sampler.list_fanouts == (3, 2)
        least = tight(g, sampler, len(batches))
        assert least == least_bytes(g, (3, 2), len(batches), False)
        check_window(sampler, g, batches, tmp_path, n_bytes=least)


def test_one_pass_serves_all_types(tmp_path: Path) -> None:
    """Lists of 60 types lie within a few pages, each of which a hop reads once."""
    rng = np.random.default_rng(2)
    edges = {("a", f"r{k}", "a"): rng.integers(0, 200, (2, 700)) for k in range(60)}
    with TypedArrays({"a": 200}, edges).create(tmp_path / "g") as g:
        sampler = NeighborSampler(g, [2, 2], seed=1)
        batches = batches_of(np.arange(200), 50)
        with window_of(sampler, g, batches, tmp_path, n_workers=1) as window:
            window.draw()
            assert 0 < window.list_bytes <= 2 * (60 * 700 * 4 + 4096)
            for k, seeds in enumerate(batches):
                assert same(window.sample(k), sampler.sample(torch.from_numpy(seeds), 0, k))


def test_hundreds_of_types(tmp_path: Path) -> None:
    """Of which most have few edges, some none; a node has a list of each."""
    rng = np.random.default_rng(2)
    edges = {("a", f"r{k}", "ab"[k % 2]): rng.integers(0, 30, (2, k % 7)) for k in range(300)}
    with TypedArrays({"a": 30, "b": 30}, edges).create(tmp_path / "g") as g:
        for make in (NeighborSampler, LaborSampler):
            sampler = make(g, [2, 1], seed=1, edges=True)
            assert sampler.most_lists == 150
            check_window(sampler, g, batches_of(np.arange(60), 20), tmp_path, n_bytes=tight(g, sampler, 3))


@pytest.mark.parametrize(
    ("labor", "edges", "redraw", "window"), covering([False, True], [False, True], [False, True], ["auto", 3], together=2)
)
def test_the_sampler_gives_the_batches_of_the_other(
    g: Any, tmp_path: Path, labor: bool, edges: bool, redraw: bool, window: Any
) -> None:
    fanouts = {WRITES: [3, 2], CITES: [4, 0], ("paper", "rev_writes", "author"): [0, 5]}
    more: dict[str, Any] = {"draws": "labor", "batch_dependency": 3} if labor else {"replace": True}
    sampler = EpochSampler(g, fanouts, seed=5, redraw=redraw, edges=edges, window=window, run_dir=tmp_path, **more)
    alone = (
        LaborSampler(g, fanouts, 3, 5, redraw=redraw, edges=edges)
        if labor
        else NeighborSampler(g, fanouts, True, 5, redraw, edges)
    )
    again = pickle.loads(pickle.dumps(sampler))
    assert again.fanouts_of_types == sampler.fanouts_of_types == alone.fanouts_of_types
    assert repr(again) == repr(sampler)
    assert "'writes'" in repr(sampler)
    batches = [torch.from_numpy(each) for each in some_batches(g, 600, 60)]
    taken = sampler.windowed(batches.__getitem__, 1, 0, len(batches))
    try:
        for k, seeds in enumerate(batches):
            expected = alone.sample(seeds, 1, k)
            assert same(taken.sample(k), expected)
            assert same(sampler.sample(seeds, 1, k), expected)
    finally:
        taken.close()
    assert sampler.stats()["windows"] == (1 if window == "auto" else 4)


@pytest.mark.parametrize(("name", "window", "redraw"), covering(list(STRATEGIES), ["auto", 4], [False, True]))
def test_strategies_give_the_batches_of_the_other_sampler(
    g: Any, graph: TypedArrays, name: str, window: Any, redraw: bool
) -> None:
    fanouts = {WRITES: [3, 2], CITES: [5, 4], ("paper", "rev_writes", "author"): [0, 3]}

    def epochs(sampler: Any, strategy: Any) -> list[Any]:
        with Loader(g, sampler, ("paper", np.arange(0, 3000, 5)), 100, strategy=strategy) as loader:
            return [batch for _ in range(2) for batch in sorted(loader, key=lambda each: each.index)]

    found = epochs(EpochSampler(g, fanouts, edges=True, redraw=redraw, window=window), STRATEGIES[name])
    assert same_epochs(found, epochs(NeighborSampler(g, fanouts, edges=True, redraw=redraw), OnDemand(cache=None)))
    for batch in found:
        check_batch(graph, batch, edges=True)


def test_lists_join_once_and_only_if_they_are_drawn_from() -> None:
    types = Types.of({"paper": 4, "author": 3}, {WRITES: 5, CITES: 5, ("paper", "by", "author"): 2})
    fanouts = fanouts_of_types(types, {WRITES: [0, 2], CITES: [1, 0], ("paper", "by", "author"): [0, 3]})
    nodes = np.array([1, 4, 3])  # two papers, an author
    joined = JoinedLists(types, fanouts, redraw=True)
    first, lists = joined.join(nodes[:2], 0)
    assert (first, lists.tolist()) == (0, [1, 5, 8])  # of paper 1 a list of each type; of author 0 one
    own = joined.drawing(0)
    assert (own.places.tolist(), own.owners.tolist(), own.ends) == ([1], [0], [0, 1, 1])
    first, lists = joined.join(nodes, 1)
    assert (first, lists.tolist()) == (3, [3])  # no later hop draws from what cites paper 3
    later = joined.drawing(1)
    assert (later.places.tolist(), later.owners.tolist(), later.ends) == ([0, 3, 2], [0, 2, 1], [2, 2, 3])
    once = JoinedLists(types, fanouts_of_types(types, {WRITES: [0, 2], CITES: [1, 2]}), redraw=False)
    assert once.join(nodes[:2], 0)[1].tolist() == [5]
    assert once.join(nodes, 1)[1].tolist() == [3, 7]  # what cites paper 1 was drawn from
    assert (once.drawing(1).places.tolist(), once.drawing(1).owners.tolist()) == ([1, 2], [2, 2])


def test_more_lists_than_a_log_can_name() -> None:
    keys = {("a", f"r{k}", "a"): 0 for k in range(3)}
    types = Types.of({"a": 2**30}, keys)
    joined = JoinedLists(types, fanouts_of_types(types, [1, 1]), redraw=True)
    joined.n = 2**31 - 4
    joined.join(np.arange(1), 0)
    with pytest.raises(OverflowError, match=r"2\*\*31 lists"):
        joined.join(np.arange(2), 1)


def test_logs_that_do_not_fit_the_lists_are_refused() -> None:
    hops = Hops(10, True)
    arrays = np.zeros((3, 11), np.int64)
    hops.attach(*arrays, np.zeros(32, np.uint64))
    hops.begin(np.array([3, 4]))
    records = np.array([1, 2, 7, 8, 0, 1, 9], np.int32)  # place 1 drew two, place 0 one

    def replayed(places: list[int], owners: list[int], n: int = 3) -> list[Int64s]:
        edges: list[Int64s] = []
        counts = np.empty(n, np.int64)

        def array(n_edges: int) -> tuple[Int64s, ...]:
            edges.extend(np.full(n_edges, -1) for _ in range(2))
            return tuple(edges)

        given = np.array(places, np.int64), np.array(owners, np.int64)
        replay(hops, records.view(np.int8), False, n, counts, array, False, None, *given)
        assert hops.number()
        return [*edges, counts]

    src, dst, counts = replayed([2, 1, 0], [1, 0, 1])
    assert dst.tolist() == [0, 0, 1]
    assert hops.n_nodes == 5
    assert src.tolist() == [2, 3, 4]
    assert counts.tolist() == [3, 2, 0]
    for places in ([1], [0], [1, 1, 0], [0, 1, 0], [1, 1], [0, 0], [0, 0, 0], []):
        with pytest.raises(ValueError, match="damaged"):
            replayed(places, [0] * len(places))
    for places, owners in (([3, 1], [0, 0]), ([-1, 1], [0, 0]), ([0, 1], [0, 5]), ([0, 1], [-1, 0])):
        with pytest.raises(ValueError, match="out of range"):
            replayed(places, owners)
    with pytest.raises(ValueError, match="belongs to a node"):
        replayed([0, 1], [0])


def test_words_are_wide_if_lists_are_many() -> None:
    """The number of a list is beyond 2³¹ before that of a node is, where nodes have several lists."""
    for n_nodes, n_lists, wide in ((2**30, 2**31, True), (2**31, 5, True), (2**30, 2**31 - 1, False)):
        topology = SimpleNamespace(num_lists=n_lists, id_bytes=4)
        assert is_wide(SimpleNamespace(num_nodes=n_nodes, topology=topology)) == wide


def test_the_memory_that_is_asked_for_counts_lists(g: Any) -> None:
    """A paper has lists of two types, an author of two; those of one type are drawn from, or of both. Authors have none here."""
    one, both = (EpochSampler(g, fanouts, window=3) for fanouts in ({CITES: [4, 4]}, {CITES: [2, 2], WRITES: [2, 2]}))
    assert (one.hops.most_lists, both.hops.most_lists) == (1, 2)
    assert one.fanouts == both.fanouts == (4, 4)
    assert one.expected(100) == (100 + 400, 400 + 2000)
    assert both.expected(100) == (2 * (100 + 200), 2 * (200 + 600))
    assert EpochSampler(g, {WRITES: [9, 9]}).expected(100) == (100, 2 * 900), "authors draw nothing"
    assert EpochSampler(g, {CITES: [-1]}).expected(100) == (100, 900), "9 to the mean list"
    assert EpochSampler(g, {CITES: [2000]}).expected(100) == (100, 24_000), "as many as there are"
    for sampler in (one, both):
        drawn = sampler.sample(torch.arange(100)).blocks
        assert 0 < sum(len(block.src) for block in drawn) <= sampler.expected(100)[1]


@pytest.mark.parametrize("make", [lambda hops: Layer(hops, 2, 1, 0, 0, 0, 0, None, 4), lambda hops: Lists(hops, 2, None, 4)])
def test_more_lists_than_a_hop_goes_from_are_refused(make: Any) -> None:
    hops = Hops(10, True)
    hops.attach(*np.zeros((3, 11), np.int64), np.zeros(32, np.uint64))
    hops.begin(np.array([3, 4, 5]))
    one = np.zeros(1, np.int64)
    hops.expand_lists(one, ~one, one)
    with pytest.raises(ValueError, match="more destinations"):
        make(hops)
    two = np.zeros(2, np.int64)
    hops.expand_lists(two, ~two, two)
    made = make(hops)
    hops.expand_lists(one, ~one, one)
    with pytest.raises(ValueError, match="are gone"):
        made.turn(np.zeros(4, np.int64))
