"""Views of parts: the lists, degrees and rows of a part alone, over the whole graph's files, and the whole graph's batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import BudgetError, BusyError, ClosedError, StaleError
from featstore.storage.update import Update
from tests.support.graphs import make_graph
from tests.support.reference_partitions import lists_of
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.topology.test_part import hops_by_sets

N, K = 600, 3
TRAIN = np.arange(0, N, 7)
NAME = "ldg-3-hops-2"
FORMS: dict[str, dict[str, Any]] = {"csc": {}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}}


def make(path: Path, form: str = "csc", hops: int = 2, **options: Any) -> SimpleNamespace:
    """A dataset whose lists were not sorted when they were given, with kept parts; and what it was made of."""
    indptr, indices = make_graph(N, 4, 3)
    rng = np.random.default_rng(1)
    given = np.concatenate([rng.permutation(indices[a:b]) for a, b in pairwise(indptr)])
    x = rng.standard_normal((N, 9), dtype=np.float32)
    data = {"y": rng.integers(0, 5, N), "train_idx": TRAIN}
    options = {**FORMS[form], **options}
    with featstore.OutOfCoreGraph.create(path, indptr, given, {"x": x}, data, progress=False, **options) as g:
        parts = featstore.partition(g, K, "ldg", TRAIN, hops=hops, progress=False)
        groups = [parts.part(i).tolist() for i in range(K)]
    lists = lists_of(indptr, indices)
    hop_of = [np.array(hops_by_sets(lists, group, hops)) for group in groups]
    return SimpleNamespace(path=path, x=torch.from_numpy(x), y=data["y"], lists=lists, groups=groups, hop_of=hop_of, given=given)


@pytest.fixture(scope="module", params=sorted(FORMS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A test must not change it."""
    return make(tmp_path_factory.mktemp("parts") / "g", request.param)


@pytest.fixture
def g(made: SimpleNamespace) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(made.path, memory="64MiB", threads=2) as graph:
        yield graph
    assert set(graph.memory_report()) <= {"sampler scratch"}, "which samplers hold that still live"


def outside(made: SimpleNamespace, i: int, hop: int = 255) -> int:
    return int(np.flatnonzero(made.hop_of[i] == hop)[0])


@pytest.mark.usefixtures("small_pieces")
def test_a_view_has_the_nodes_and_lists_of_its_part(g: Any, made: SimpleNamespace) -> None:
    """By sets; ids, rows and edge ids are the whole graph's."""
    for i in range(K):
        view, hop_of = g.part(i), made.hop_of[i]
        part = view.own_part
        assert (part.number, part.name, part.hops) == (i, NAME, 2)
        assert part.hop_of.tolist() == hop_of.tolist()
        assert part.train_nodes.tolist() == made.groups[i]
        assert part.nodes.tolist() == np.flatnonzero(hop_of < 255).tolist()
        assert part.n_dropped == np.count_nonzero(hop_of == 255)
        assert part.n_nodes == g.parts()[NAME].self_reliant().n_nodes[i]
        assert view.num_nodes == N
        own = [v for v in range(N) if hop_of[v] < 2]
        edges = [(u, v) for v in own for u in made.lists[v]]
        lengths = [len(made.lists[v]) if hop_of[v] < 2 else 0 for v in range(N)]
        assert view.in_degree.tolist() == lengths
        assert view.indptr.tolist() == np.r_[0, np.cumsum(lengths)].tolist()
        counts = np.bincount([u for u, _ in edges], minlength=N)
        assert view.out_degree.tolist() == counts.tolist()
        assert view.short_degrees().tolist() == counts.tolist()
        assert torch.cat(list(view.edges()), 1).T.tolist() == [list(each) for each in edges]
        blocks = list(view.edges(edge_pos=True))
        assert torch.cat([each for each, _ in blocks], 1).T.tolist() == [list(each) for each in edges]
        assert made.given[torch.cat([each for _, each in blocks]).numpy()].tolist() == [u for u, _ in edges]
        for v in own[:20]:
            found, positions = view.neighbors(v, edge_pos=True)
            whole, places = g.neighbors(v, edge_pos=True)
            assert torch.equal(found, whole)
            assert torch.equal(positions, places)
        nodes = part.nodes
        assert torch.equal(view.features["x"][nodes], made.x[nodes])
        assert torch.equal(view.node_data["y"], torch.from_numpy(made.y))
        with view.policy_inputs(36) as inputs:
            assert inputs.context.in_degree.tolist() == lengths
            assert inputs.context.out_degree.tolist() == counts.tolist()


def test_others_are_refused_by_name(g: Any, made: SimpleNamespace) -> None:
    view = g.part(1)
    alien, far, near = outside(made, 1), outside(made, 1, 2), outside(made, 1, 1)
    named = f"node {alien} at position 1 is not in part 1 of '{NAME}'"
    x = view.features["x"]
    for call in (x.__getitem__, x.take, x.take_async, lambda ids: torch.index_select(x, 0, torch.tensor(ids))):
        refuses(IndexError, named, lambda call=call: call([far, alien]))
    refuses(IndexError, f"node {alien} at position 0", lambda: x[alien])
    refuses(IndexError, "is not in part 1", lambda: x[:])
    refuses(IndexError, f"node {alien} at position 0 is not in part 1", lambda: view.neighbors(alien))
    refuses(IndexError, f"node {far} is 2 hops from part 1", lambda: view.neighbors(far))
    sampler = featstore.NeighborSampler(view, [3, 3])
    refuses(IndexError, f"seed {alien} at position 1 is not in part 1", lambda: sampler.sample([made.groups[1][0], alien]))
    refuses(IndexError, f"seed {near} at position 0 is 1 hops from the training nodes of part 1", lambda: sampler.sample([near]))
    assert featstore.NeighborSampler(view, [3]).sample([near]).input_ids[0] == near
    seeds = [made.groups[1][0], alien]
    refuses(IndexError, f"seed {alien} at position 1", lambda: featstore.Loader(view, sampler, seeds, 2, shuffle=False))


def test_a_wrong_seed_is_refused_before_an_epoch_begins(g: Any, made: SimpleNamespace) -> None:
    """The last of many, which a shuffled epoch would meet at any time; also one whose neighbourhood leads out of the part."""
    view, train = g.part(1), made.groups[1]
    sampler = featstore.NeighborSampler(view, [3, 3])
    for bad, words in ((outside(made, 1), "is not in part 1"), (outside(made, 1, 1), "is 1 hops from the training nodes")):
        for seeds in ([*train, bad], featstore.RandomBatches([*train, bad], 4)):
            options = {"batch_size": 4} if isinstance(seeds, list) else {}
            named = f"seed {bad} at position {len(train)} {words}"
            refuses(IndexError, named, lambda s=seeds, o=options: featstore.Loader(view, sampler, s, strategy="ondemand", **o))
    featstore.Loader(view, featstore.NeighborSampler(view, [3]), [*train, outside(made, 1, 1)], 4, strategy="ondemand").close()
    # Parts of the same number, made of the same nodes in another way.
    others = featstore.partition(g, K, "ldg", TRAIN, hops=2, seed=9, keep=False, progress=False)
    batches = featstore.PartBatches(others, TRAIN, 40)
    first = next(i for i, v in enumerate(TRAIN.tolist()) if v in others.part(1).tolist() and v not in train)
    named = f"seed {TRAIN[first]} at position {first} is"
    options = {"strategy": "ondemand", "rank": 1, "world_size": K}
    refuses(IndexError, named, lambda: featstore.Loader(view, sampler, batches, **options))
    # Each rank's seeds are its part's, batch by batch: what others have is not looked at.
    order = np.concatenate([group[4 * p : 4 * p + 4] for p in range(5) for group in made.groups])
    fixed, one, alone = featstore.RandomBatches(order, 4, shuffle=False), g.part(0), {"rank": 0, "world_size": K}
    own = featstore.NeighborSampler(one, [3, 3])
    with featstore.Loader(one, own, fixed, strategy="ondemand", **alone) as loader:
        assert torch.cat([batch.seeds for batch in loader]).tolist() == made.groups[0][:20]


def test_more_hops_than_the_part_has_are_refused(g: Any, made: SimpleNamespace) -> None:
    view = g.part(0)
    for sampler in (featstore.NeighborSampler, featstore.LaborSampler, featstore.EpochSampler):
        refuses(ValueError, f"reads the lists of 3 hops, and part 0 of '{NAME}' has hops=2", lambda s=sampler: s(view, [2, 2, 2]))
    refuses(ValueError, "LayerSampler reads the lists of 3 hops", lambda: featstore.LayerSampler(view, [9, 9, 9]))
    refuses(ValueError, "ShadowSampler reads the lists of 3 hops", lambda: featstore.ShadowSampler(view, [2, 2]))
    featstore.ShadowSampler(view, [2])
    whole = featstore.NeighborSampler(g, [2, 2, 2])
    refuses(ValueError, "NeighborSampler reads the lists of 3 hops", lambda: featstore.Loader(view, whole, made.groups[0]))


def test_what_goes_anywhere_is_stopped_before_rows_are_read(g: Any, made: SimpleNamespace) -> None:
    """Samplers of others, which know nothing of parts."""
    view, alien = g.part(2), outside(made, 2)

    def sample(seeds: torch.Tensor) -> Any:
        return torch.cat([seeds, torch.tensor([alien])]), [([len(seeds)], [0], len(seeds) + 1, len(seeds))]

    with featstore.Loader(view, sample, made.groups[2], 4, strategy="ondemand") as loader:
        refuses(IndexError, f"node {alien} at position 4 is not in part 2", lambda: list(loader))


def test_there_is_no_such_part(g: Any, made: SimpleNamespace, tmp_path: Path) -> None:
    refuses(IndexError, rf"part 3 is not in \[0, 3\), the parts '{NAME}'", lambda: g.part(3))
    refuses(IndexError, "part -1 is not in", lambda: g.part(-1))
    refuses(TypeError, "i, the number of a part", lambda: g.part("a"))
    refuses(TypeError, r"name must be that of kept parts, not \['a'\]", lambda: g.part(0, ["a"]))
    refuses(ValueError, f"no self-reliant parts 'other'; there is '{NAME}'", lambda: g.part(0, "other"))
    refuses(NotImplementedError, r"part\(\) is for a whole graph, and .* has part 0", lambda: g.part(0).part(0))
    with make_none(tmp_path / "g") as other:
        refuses(ValueError, "keeps no self-reliant parts; there is none", lambda: other.part(0))
        featstore.partition(other, 2, "random", progress=False)
        refuses(ValueError, "parts 'random-2' are parts of all nodes", lambda: other.part(0, "random-2"))
        featstore.partition(other, 9, "ldg", [1, 2, 3], hops=1, progress=False, name="few")
        empty = int(np.flatnonzero(np.diff(other.parts()["few"].self_reliant().offsets) == 0)[0])
        refuses(ValueError, f"part {empty} of 'few' has no training nodes", lambda: other.part(empty))


def make_none(path: Path) -> featstore.OutOfCoreGraph:
    indptr, indices = make_graph(50, 3)
    return featstore.OutOfCoreGraph.create(path, indptr, indices, progress=False)


def test_stale_parts(tmp_path: Path) -> None:
    made = make(tmp_path / "g")
    with Update(made.path) as update:  # as another adjacency would leave them
        key = f"parts/{NAME}"
        update.add([], extra={key: {**update.catalog.extra[key], "made_of": {"out_degree": "0" * 32}}})
        update.commit()
    with featstore.open(made.path) as g:
        assert g.parts()[NAME].is_stale
        refuses(StaleError, "partition it again", lambda: g.part(0))


def test_whole_graphs_are_wanted(g: Any, tmp_path: Path) -> None:
    view = g.part(0)
    for call in (
        lambda: view.aggregate("x", progress=False),
        lambda: featstore.partition(view, 2, "random", progress=False),
        lambda: featstore.infer(view, [featstore.Aggregate(lambda h, mean: h)], "x", progress=False),
        lambda: featstore.export(view, tmp_path / "p", 0, progress=False),
        lambda: view.cache("x", "10%", shared=2),
        lambda: view.cache_neighbors("1MiB", shared=2),
        lambda: view.cache_neighbors("1MiB", save=True),
    ):
        refuses(NotImplementedError, "part 0 of", call)


def test_views_are_kept_closed_and_pickled(made: SimpleNamespace) -> None:
    with featstore.open(made.path, memory="64MiB") as g:
        view, other = g.part(0), g.part(1)
        assert g.part(0) is view
        assert g.part(0, NAME) is view
        view.cache("x", "20%")
        view.cache_neighbors("64KiB")
        assert g.features["x"].cache is None, "caches are the view's own"
        x = view.features["x"]
        view.close()
        assert view.closed
        refuses(ClosedError, "closed", lambda: x[made.groups[0][:1]])
        refuses(ClosedError, "closed", lambda: view.in_degree)
        assert torch.equal(g.features["x"][[1]], made.x[[1]]), "the graph goes on"
        again = g.part(0)
        assert again is not view
        copy = pickle.loads(pickle.dumps(again))
        assert copy.own_part.hop_of.tolist() == again.own_part.hop_of.tolist()
        store = pickle.loads(pickle.dumps(again.features["x"]))
        assert torch.equal(store[made.groups[0]], made.x[made.groups[0]])
        refuses(IndexError, "is not in part 0", lambda: store[outside(made, 0)])
        copy._whole.close()
    assert other.closed
    assert again.closed
    refuses(ClosedError, "closed", lambda: g.part(0))


@pytest.mark.usefixtures("small_pieces")
def test_a_closed_view_reads_nothing(g: Any, made: SimpleNamespace) -> None:
    view = g.part(0)
    out = outside(made, 0)
    sampler, edges = featstore.NeighborSampler(view, [5, 5]), view.edges()
    next(edges)
    view.close()
    for read in (
        lambda: view.neighbors(out),
        lambda: view.topology,
        lambda: sampler.sample([out]),
        lambda: sampler.sample(made.groups[0][:2]),
        lambda: featstore.NeighborSampler(view, [5] * 5).sample([out]),
        lambda: list(edges),
    ):
        refuses(ClosedError, "closed", read)
    assert g.neighbors(out).tolist() == sorted(made.lists[out])


def test_features_that_are_made_later(tmp_path: Path) -> None:
    """Open views have them as the graph does, also in the place of others; not while a view's loader is in an epoch."""
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB", threads=1) as g:
        view = g.part(0)
        nodes = view.own_part.nodes
        for op, overwrite in (("sum", False), ("mean", True)):
            g.aggregate("x", op, name="h", overwrite=overwrite, progress=False)
            assert g.part(0) is view
            assert torch.equal(view.features["h"][nodes], g.features["h"][nodes])
        sampler, strategy = featstore.NeighborSampler(view, [3]), featstore.Superbatch(cache=0.1)
        with featstore.Loader(view, sampler, view.own_part.train_nodes, 2, features="h", strategy=strategy) as loader:
            running = iter(loader)
            next(running)
            refuses(BusyError, "'h' follows the plans", lambda: g.aggregate("x", name="h", overwrite=True, progress=False))
            running.close()
        g.aggregate("x", "sum", name="h", overwrite=True, progress=False)
        assert torch.equal(view.features["h"][nodes], g.features["h"][nodes])
        g.add_data("t", [2, 1], progress=False)
        assert [each.node_data["t"].tolist() for each in (g, view)] == [[2, 1], [2, 1]]
        g.remove_data("t")
        assert [each for each in (g, view) if "t" in each.node_data] == []


def test_a_pickle_of_parts_that_were_replaced(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB", threads=1) as g:
        view = g.part(0)
        pickles = [pickle.dumps(view), pickle.dumps(view.features["x"])]
        featstore.partition(g, K, "ldg", TRAIN, hops=2, seed=9, progress=False)
        for each in pickles:
            refuses(StaleError, "were replaced since part 0 of them was pickled", lambda each=each: pickle.loads(each))


def test_memory(made: SimpleNamespace) -> None:
    with featstore.open(made.path, memory="64MiB") as g:
        before = g.memory_report().get("part", 0)
        view = g.part(0)
        assert g.memory_report()["part"] - before == 5 * N
        view.close()
        del view
        assert g.memory_report().get("part", 0) == before
        with g.budget.reserve("others", g.budget.available - 1000):
            refuses(BudgetError, "part", lambda: g.part(0))


@pytest.mark.parametrize("policy", ["degree", "in_out_ratio"])
def test_caches_are_of_the_part(g: Any, made: SimpleNamespace, policy: str) -> None:
    """Rows with the highest degree within the part; lists of the part alone, however much memory there is."""
    view, hop_of = g.part(1), made.hop_of[1]
    view.cache("x", "10%", policy)
    kept = np.flatnonzero(view.features["x"].cache.map.slot_of_row >= 0)
    out, into = view.out_degree.numpy(), view.in_degree.numpy()
    scores = out if policy == "degree" else np.divide(out, into, out=np.zeros(N), where=into > 0)
    assert sorted(scores[kept]) == sorted(np.sort(scores)[-len(kept) :])
    view.cache_neighbors(policy=policy)
    cache = view.neighbor_cache
    assert not cache.whole
    has = np.flatnonzero(cache.offset_of_node >= 0)
    assert set(np.flatnonzero(hop_of < 2)) <= set(has)
    before = view.topology.resident_offsets
    sampler = featstore.NeighborSampler(view, [-1, -1])
    found = sampler.sample(torch.tensor(made.groups[1]))
    assert set(found.input_ids.tolist()) == set(np.flatnonzero(hop_of < 255))
    assert sampler.stats()["edge_rows_read"] == 0
    assert view.topology.resident_offsets is before


SAMPLERS = {
    "neighbor": lambda g: featstore.NeighborSampler(g, [3, 2], seed=5),
    "disjoint": lambda g: featstore.NeighborSampler(g, [3, 2], seed=5, redraw=False, disjoint=True),
    "edges": lambda g: featstore.NeighborSampler(g, [3, 2], seed=5, edges=True),
    "labor": lambda g: featstore.LaborSampler(g, [3, 2], seed=5, importance_sampling=1),
    "layer": lambda g: featstore.LayerSampler(g, [30, 20], seed=5),
    "shadow": lambda g: featstore.ShadowSampler(g, [3], seed=5),
    "epoch": lambda g: featstore.EpochSampler(g, [3, 2], seed=5, window=100),
    "epoch labor": lambda g: featstore.EpochSampler(g, [3, 2], seed=5, draws="labor", window=2),
}


def digests(loader: featstore.Loader) -> list[Any]:
    """All of an epoch's batches, to be compared."""
    found = []
    for batch in loader:
        arrays = [each for block in batch.blocks for each in (block.src, block.dst, *block.edge_arrays.values())]
        tensors = [batch.seeds, batch.input_ids, batch.x, batch.y, *arrays]
        found.append((batch.index, [each.numpy().tobytes() for each in tensors]))
    return found


def rank_loader(g: Any, kept: Any, rank: int, sampler: str, strategy: Any, **options: Any) -> featstore.Loader:
    batches = featstore.PartBatches(kept, TRAIN, 6)
    return featstore.Loader(g, SAMPLERS[sampler](g), batches, strategy=strategy, rank=rank, world_size=K, **options)


CASES = [(sampler, "ondemand") for sampler in SAMPLERS]
CASES += [("neighbor", "superbatch"), ("epoch", "ginex"), ("neighbor", "streamed"), ("neighbor", "auto")]


@pytest.mark.parametrize("made", ["csc"], indirect=True)
@pytest.mark.parametrize(("sampler", "strategy"), CASES)
def test_batches_are_the_whole_graphs(g: Any, sampler: str, strategy: str) -> None:
    same_batches(g, sampler, strategy)


@pytest.mark.parametrize("made", ["chunked"], indirect=True)
@pytest.mark.parametrize(("sampler", "strategy"), [("edges", "ondemand"), ("shadow", "superbatch"), ("epoch", "streamed")])
def test_batches_from_chunks_are_the_whole_graphs(g: Any, sampler: str, strategy: str) -> None:
    same_batches(g, sampler, strategy)


def same_batches(g: Any, sampler: str, strategy: str) -> None:
    for rank in range(K):
        with rank_loader(g, g.parts()[NAME], rank, sampler, strategy) as loader:
            whole = [digests(loader), digests(loader)]
        view = g.part(rank)
        with rank_loader(view, view.parts()[NAME], rank, sampler, strategy) as loader:
            assert [digests(loader), digests(loader)] == whole
        view.close()


def test_packs_and_caches_on_views(g: Any, made: SimpleNamespace, tmp_path: Path) -> None:
    """A pack of the view, caches on the device, policies that learn, a history."""
    seeds = made.groups[0]
    view = g.part(0)

    def load(graph: Any, **options: Any) -> list[Any]:
        sampler = options.pop("sampler", None) or SAMPLERS["neighbor"](graph)
        with featstore.Loader(graph, sampler, seeds, 6, **options) as loader:
            return digests(loader)

    whole = load(g, strategy="ondemand")
    pack = featstore.sample_offline(view, SAMPLERS["neighbor"](view), seeds, 6, 1, tmp_path / "pack", progress=False)
    for policy in ("belady", "frequency"):
        with featstore.Loader(view, strategy=featstore.Packed(pack, 0.2, policy)) as loader:
            assert sorted(digests(loader)) == whole
    pack.close()
    assert load(view, strategy="ondemand", device_cache="10%") == whole
    for policy in ("sieve", "degree", "frequency"):
        assert load(view, strategy=featstore.OnDemand(cache="30%", policy=policy)) == whole


@pytest.mark.parametrize(("kept", "strategy"), covering([False, True], ["ondemand", "superbatch"]))
def test_lists_read_outside_the_part(
    g: Any, made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kept: bool, strategy: str
) -> None:
    """None, whatever is drawn, and where loaders keep lists in memory: the list of each edge that is read is the part's."""
    if not kept:
        request.getfixturevalue("no_kept_lists")
    monkeypatch.setattr("featstore.pack.sampledlists.PAGE_BYTES", 1 << 20)  # as for a longer epoch
    read: list[np.ndarray] = []
    topology = g.topology
    real, real_lists = topology.read_edges, topology.lists

    def read_edges(positions: np.ndarray, out: np.ndarray) -> None:
        read.append(np.searchsorted(ends, positions, side="right"))
        real(positions, out)

    def lists(nodes: np.ndarray, *args: Any) -> Any:
        read.append(nodes.copy())
        return real_lists(nodes, *args)

    def never(*args: Any) -> Any:
        raise AssertionError("all lists are read")

    ends = np.cumsum([len(each) for each in made.lists])
    monkeypatch.setattr(topology, "read_edges", read_edges)
    monkeypatch.setattr(topology, "lists", lists)
    for name in ("blocks", "scan"):
        monkeypatch.setattr(topology, name, never)
    has_kept = False
    for rank in range(K):
        view = g.part(rank)
        for name in SAMPLERS:
            read.clear()
            with rank_loader(view, g.parts()[NAME], rank, name, strategy) as loader:
                digests(loader)
                has_kept = has_kept or view.neighbor_cache is not None
            view.neighbor_lists.drop()
            there = np.unique(np.concatenate(read))
            assert len(there)
            assert (made.hop_of[rank][there] < 2).all(), f"{name} of part {rank}"
    assert has_kept == kept


def test_auto_counts_the_rows_of_the_part(g: Any, made: SimpleNamespace) -> None:
    """A cache with room for them has all that batches ask for, and more than a share of the graph's rows is never needed."""
    view = g.part(0)
    n, of_part = g.num_nodes, view.own_part.n_nodes
    for rows, fits in ((of_part + 1, True), (of_part // 2, False)):
        strategy = featstore.Auto(cache=rows / n)
        with rank_loader(view, g.parts()[NAME], 0, "neighbor", strategy) as loader:
            digests(loader)
            stats = loader.stats()
        assert (stats["auto"]["reason"] == "all rows fit in memory") == fits
        if fits:
            assert stats["hits"]["host"] == stats["rows"] > 0


def test_ranks_have_their_own_parts(g: Any) -> None:
    refuses(
        ValueError,
        f"rank 1 trains on the seeds of part 1, and the graph is part 0 of '{NAME}'",
        lambda: rank_loader(g.part(0), g.parts()[NAME], 1, "neighbor", "ondemand"),
    )
