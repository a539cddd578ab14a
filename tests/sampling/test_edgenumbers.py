"""Numbers of sampled edges are those of the edges as the user gave them, however they are stored, cached, drawn and kept."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import CorruptionError
from featstore.sampling.batch import SampledBatch
from featstore.storage.catalog import EDGE, read_catalog
from featstore.testing.faults import flipped
from featstore.topology import edgeids
from tests.sampling.test_neighbor import FANOUTS, oracle_positions, same, splitmix
from tests.support.array_graphs import ArrayGraph, graphs, random_graph
from tests.support.making import create
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("small_pieces")

Int64s = npt.NDArray[np.int64]


def drawn_edges(g: ArrayGraph, batch: SampledBatch, fanouts: list[int], replace: bool, seed: int) -> list[list[int]]:
    """The edges that each block must have, by the definition of a draw."""
    found = []
    for hop, (block, fanout) in enumerate(zip(reversed(batch.blocks), fanouts, strict=True)):
        key = splitmix(splitmix(splitmix(splitmix(0, seed), batch.epoch), batch.index), hop)
        edges = []
        for node in batch.input_ids[: block.n_dst].tolist():
            start, end = int(g.indptr[node]), int(g.indptr[node + 1])
            edges += [start + each for each in oracle_positions(splitmix(key, node), end - start, fanout, replace)]
        found.append(edges)
    return found[::-1]


@given(data=st.data(), g=graphs(), fanouts=FANOUTS, replace=st.booleans(), seed=st.integers(0, 9))
def test_edges_are_those_that_were_drawn_whatever_is_cached(
    data: st.DataObject, g: ArrayGraph, fanouts: list[int], replace: bool, seed: int
) -> None:
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True)), dtype=torch.int64)
    variants = [g, g.cached(), g.cached(data.draw(st.integers(0, len(g.indices) + g.num_nodes)))]
    for each in variants:
        batch = featstore.NeighborSampler(each, fanouts, replace, seed, edges=True).sample(seeds, 1, 2)
        assert same(batch, featstore.NeighborSampler(each, fanouts, replace, seed).sample(seeds, 1, 2))
        edges = [block.edge_pos.tolist() for block in batch.blocks]
        assert edges == drawn_edges(g, batch, fanouts, replace, seed)


@pytest.mark.parametrize("fanouts", [[70, 3], [-1, 65], [200]])
def test_large_fan_outs_and_batches_that_outgrow_their_scratch(fanouts: list[int]) -> None:
    g = random_graph(20_000, 12, seed=3)
    for each in (g, g.cached(), g.cached(60_000)):
        sampler = featstore.NeighborSampler(each, fanouts, seed=4, edges=True)
        batch = sampler.sample(torch.arange(0, 3000, 2), 0, 1)
        assert [block.edge_pos.tolist() for block in batch.blocks] == drawn_edges(g, batch, fanouts, False, 4)


LABOR = [
    {},
    {"batch_dependency": 5, "layer_dependency": True},
    {"importance_sampling": 1},
    {"importance_sampling": -1, "redraw": False},
]


def check_labor(g: ArrayGraph, seeds: torch.Tensor, fanouts: list[int], options: dict[str, Any]) -> None:
    """Each destination's edges are edges of its list, each once, in order, with the ids that it takes: no other numbers are."""
    expected = featstore.LaborSampler(g, fanouts, seed=3, **options).sample(seeds, 1, 2)
    batch = featstore.LaborSampler(g, fanouts, seed=3, edges=True, **options).sample(seeds, 1, 2)
    assert same(batch, expected)
    for block in batch.blocks:
        pos, dst, nodes = block.edge_pos.numpy(), block.dst.numpy(), batch.input_ids.numpy()
        np.testing.assert_array_equal(g.indices[pos], nodes[block.src.numpy()])
        assert bool((g.indptr[nodes[dst]] <= pos).all())
        assert bool((pos < g.indptr[nodes[dst] + 1]).all())
        assert bool(((np.diff(pos) > 0) | (np.diff(dst) > 0)).all())


@given(data=st.data(), g=graphs(), fanouts=FANOUTS, options=st.sampled_from(LABOR))
def test_edges_by_layers(data: st.DataObject, g: ArrayGraph, fanouts: list[int], options: dict[str, Any]) -> None:
    for start, end in itertools.pairwise(g.indptr.tolist()):
        g.indices[start:end].sort()
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True)), dtype=torch.int64)
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for each in (g, g.cached(), g.cached(n_ids)):
        check_labor(each, seeds, fanouts, options)


@pytest.mark.parametrize("options", LABOR)
@pytest.mark.parametrize("id_bytes", [4, 8])
def test_edges_of_long_lists_by_layers(options: dict[str, Any], id_bytes: int) -> None:
    """Lists that are compared in several pieces and read in several turns; more edges than were expected."""
    g = random_graph(3000, 60, seed=3, id_bytes=id_bytes)
    assert int(np.diff(g.indptr).max()) > 4096
    for each in (g, g.cached(), g.cached(60_000)):
        check_labor(each, torch.arange(0, 600, 2), [5, 3], options)


def edges_to(g: ArrayGraph, batch: SampledBatch, k: int) -> list[int]:
    """All edges between the destinations of a block and the nodes that it has taken, in the order of the lists."""
    block = batch.blocks[k]
    taken = set(batch.input_ids[block.src].tolist())
    found = []
    for node in batch.input_ids[: block.n_dst].tolist():
        places = range(int(g.indptr[node]), int(g.indptr[node + 1]))
        found += [place for place in places if int(g.indices[place]) in taken]
    return found


WHOLE_LISTS: list[Any] = [
    lambda g, **more: featstore.LayerSampler(g, [4, 3], seed=3, **more),
    lambda g, **more: featstore.LayerSampler(g, [5], seed=3, skip=True, op="mean", **more),
    lambda g, **more: featstore.LayerSampler(g, [3, 2, 1], seed=3, replace=True, **more),
    lambda g, **more: featstore.ShadowSampler(g, [3, 2], layers=3, seed=3, **more),
    lambda g, **more: featstore.ShadowSampler(g, [-1], layers=1, replace=True, **more),
]


def check_whole_lists(g: ArrayGraph, make: Any, seeds: torch.Tensor) -> None:
    expected, batch = make(g).sample(seeds, 1, 2), make(g, edges=True).sample(seeds, 1, 2)
    assert same(batch, expected)
    for k, block in enumerate(batch.blocks):
        assert block.edge_pos.dtype == torch.int64
        assert block.edge_pos.tolist() == edges_to(g, batch, k)
        assert block.weight is None or torch.equal(block.weight, expected.blocks[k].weight)


@given(data=st.data(), g=graphs(), make=st.sampled_from(WHOLE_LISTS))
def test_edges_of_layers_and_of_subgraphs(data: st.DataObject, g: ArrayGraph, make: Any) -> None:
    """Lists in any order, with repeats; in memory, in the file, and both."""
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True)), dtype=torch.int64)
    n_ids = data.draw(st.integers(0, len(g.indices) + g.num_nodes))
    for each in (g, g.cached(), g.cached(n_ids)):
        check_whole_lists(each, make, seeds)


@pytest.mark.parametrize("most", [1, 41])
@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("make", WHOLE_LISTS)
def test_edges_of_lists_in_pieces(make: Any, id_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end within lists, where they begin, and where lists in memory lie between."""
    monkeypatch.setattr("featstore.sampling.wholelists._LEAST", most)
    monkeypatch.setattr("featstore.sampling.wholelists._MOST", most)
    g = random_graph(400 if most > 1 else 60, 6, seed=3, id_bytes=id_bytes)
    for each in (g, g.cached(), g.cached(1200)):
        check_whole_lists(each, make, torch.arange(0, g.num_nodes, 5))


def test_options() -> None:
    g = random_graph(50, 3)
    with pytest.raises(TypeError, match="edges must be True or False"):
        featstore.NeighborSampler(g, [2], edges=1)
    assert repr(featstore.NeighborSampler(g, [2], edges=True)).endswith("seed=0, edges=True)")
    for make in WHOLE_LISTS:
        sampler = make(g, edges=True)
        assert repr(sampler) == repr(make(g))[:-1] + ", edges=True)"
        kind, given = sampler.__reduce__()
        assert repr(kind(*given)) == repr(sampler)
        with pytest.raises(TypeError, match="edges must be True or False"):
            make(g, edges=1)
    assert all(block.edge_pos is None for block in featstore.NeighborSampler(g, [2]).sample(torch.arange(3)).blocks)


def edges_of(n: int, n_edges: int, seed: int) -> Int64s:
    """Edges in any order, many of them more than once, and self loops."""
    rng = np.random.default_rng(seed)
    edges = (rng.random((2, n_edges)) ** 2 * n).astype(np.int64)
    edges[:, ::7] = edges[:, rng.integers(0, n_edges, len(edges[0, ::7]))]
    edges[0, ::11] = edges[1, ::11]
    return edges


def as_lists(edges: Int64s, n: int) -> tuple[Int64s, Int64s, Int64s]:
    """The same as lists that are not sorted, and the edges in the order of those."""
    order = np.argsort(edges[1], kind="stable")
    return np.r_[0, np.cumsum(np.bincount(edges[1], minlength=n))], edges[0][order], edges[:, order]


def check(batch: SampledBatch, given: Int64s) -> None:
    """Every edge is one of the given ones; equal ones of a list come in the order in which they were given."""
    for block in batch.blocks:
        pos, dst = block.edge_pos.numpy(), block.dst.numpy()
        np.testing.assert_array_equal(given[0][pos], batch.input_ids.numpy()[block.src.numpy()])
        np.testing.assert_array_equal(given[1][pos], batch.input_ids.numpy()[dst])
        for i in range(block.n_dst):
            mine = pos[dst == i]
            assert len(set(mine.tolist())) == len(mine)
            src = given[0][mine]
            assert bool((np.lexsort((mine, src)) == np.arange(len(mine))).all())


def check_whole(batch: SampledBatch, given: Int64s) -> None:
    """With all neighbours, each destination has all its edges, each once."""
    for block in batch.blocks:
        nodes = batch.input_ids.numpy()[: block.n_dst]
        np.testing.assert_array_equal(np.sort(block.edge_pos.numpy()), np.flatnonzero(np.isin(given[1], nodes)))


FORMS: list[dict[str, Any]] = [{}, {"topology": "chunked", "chunk_bytes": 4096}]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 60), st.integers(1, 400), st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 1]))
def test_numbers_are_the_users_in_both_forms(
    tmp_path_factory: pytest.TempPathFactory, n: int, n_edges: int, seed: int, in_lists: bool, form: int
) -> None:
    given_edges, path = edges_of(n, n_edges, seed), tmp_path_factory.mktemp("g") / "g"
    options: dict[str, Any] = {"progress": False, "memory": "16MiB", **FORMS[form]}
    if in_lists:
        indptr, indices, given_edges = as_lists(given_edges, n)
        featstore.OutOfCoreGraph.create(path, indptr, indices, **options).close()
    else:
        blocks = (given_edges[:, first : first + 50] for first in range(0, n_edges, 50))
        featstore.OutOfCoreGraph.from_edge_index(path, blocks, n, **options).close()
    seeds = torch.arange(0, n, 2)
    found = []
    for other in (None, *(["chunked", "csc"] if form == 0 else ["csc", "chunked"])):
        if other is not None:
            assert featstore.convert(path, other, progress=False)
        with featstore.open(path, memory="16MiB", backend="pread", threads=1) as g:
            g.verify(progress=False)
            batch = featstore.NeighborSampler(g, [3, 2], seed=1, edges=True).sample(seeds)
            check(batch, given_edges)
            check_whole(featstore.NeighborSampler(g, [-1, -1], edges=True).sample(seeds), given_edges)
            once = featstore.NeighborSampler(g, [3, 2], seed=1, redraw=False, edges=True).sample(seeds)
            check(once, given_edges)
            assert torch.equal(once.blocks[0].edge_pos[: len(once.blocks[1].src)], once.blocks[1].edge_pos)
            found.append([block.edge_pos.clone() for block in batch.blocks])
    for later in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], later, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_long_list_and_lists_in_turns(tmp_path: Path, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One list is sorted outside of memory; others keep their order, so that numbers begin late in the file."""
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    n, rng = 500, np.random.default_rng(0)
    degrees = np.r_[np.full(200, 3), [6000], np.full(299, 4)]
    indptr = np.r_[0, np.cumsum(degrees)]
    indices = np.concatenate([np.sort(rng.integers(0, n, d)) for d in degrees])
    indices[600:6600] = rng.integers(0, 40, 6000)
    given_edges = np.stack([indices, np.repeat(np.arange(n), degrees)])
    create(tmp_path / "g", indptr, indices, memory=70_000, progress=False, **form)
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        check_whole(featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(n)), given_edges)


def test_no_numbers_are_stored_where_no_edge_has_moved(tmp_path: Path) -> None:
    edges = edges_of(40, 300, 1)
    edges = edges[:, np.lexsort(edges)]
    for k, make in enumerate((lambda path: from_lists(path, edges, 40), lambda path: from_pairs(path, edges, 40))):
        with make(tmp_path / str(k)) as g:
            assert f"{EDGE}/edge_ids" not in read_catalog(g.path).fields
            check_whole(featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(40)), edges)


def from_lists(path: Path, edges: Int64s, n: int) -> featstore.OutOfCoreGraph:
    indptr, indices, _ = as_lists(edges, n)
    return featstore.OutOfCoreGraph.create(path, indptr, indices, progress=False, memory="64MiB")


def from_pairs(path: Path, edges: Int64s, n: int, **more: Any) -> featstore.OutOfCoreGraph:
    return featstore.OutOfCoreGraph.from_edge_index(path, edges, n, progress=False, memory="64MiB", **more)


@pytest.mark.parametrize(
    ("form", "access", "options"), covering(FORMS, ["pass", "random"], [{}, {"replace": True}, {"redraw": False}], together=2)
)
def test_an_epoch_at_a_time(tmp_path: Path, form: dict[str, Any], access: str, options: dict[str, Any]) -> None:
    edges = edges_of(300, 4000, 3)
    with from_pairs(tmp_path / "g", edges, 300, features={"x": np.zeros((300, 2), np.float32)}, **form) as g:
        sampler = featstore.EpochSampler(g, [5, 3, 70], seed=1, access=access, window=4, edges=True, **options)
        assert pickle.loads(pickle.dumps(sampler)).edges
        alone = featstore.NeighborSampler(g, [5, 3, 70], seed=1, edges=True, **options)
        with featstore.Loader(g, sampler, torch.arange(300), 30, labels=None) as loader:
            for epoch in range(2):
                for batch in loader:
                    expected = alone.sample(batch.seeds, epoch, batch.index)
                    for mine, block in zip(batch.blocks, expected.blocks, strict=True):
                        assert torch.equal(mine.src, block.src)
                        assert torch.equal(mine.edge_pos, block.edge_pos)


@pytest.mark.parametrize("keep_lists", [False, True])
def test_lists_of_macro_batches(tmp_path: Path, keep_lists: bool) -> None:
    edges, x = edges_of(300, 4000, 3), np.zeros((300, 2), np.float32)
    with from_pairs(tmp_path / "g", edges, 300, features={"x": x}) as g:
        featstore.partition(g, 6, keep_lists=keep_lists, progress=False)
        batches = featstore.PartitionBatches(g, np.arange(300), 30, macro=2, seed=1)
        sampler = featstore.NeighborSampler(g, [5, 3], seed=1, edges=True)
        with featstore.Loader(g, sampler, batches, labels=None) as loader:
            for batch in loader:
                check(batch, edges)


def test_damage_is_found(tmp_path: Path) -> None:
    with from_pairs(tmp_path / "g", edges_of(200, 3000, 2), 200) as g:
        record = read_catalog(g.path).fields[f"{EDGE}/edge_ids"]
        file = os.path.join(g.path, record.parts[0].file)
    with flipped(Path(file), 4096 + 100, 2), featstore.open(tmp_path / "g", memory="16MiB") as g:
        with pytest.raises(CorruptionError, match="edge_ids"):
            g.verify(progress=False)
        with pytest.raises(CorruptionError, match="edge_ids"):
            featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(200))
        featstore.NeighborSampler(g, [-1]).sample(torch.arange(200))


@pytest.mark.parametrize("wrong", [-1, 3000, 17])
def test_numbers_that_are_no_edges_or_of_two_edges(tmp_path: Path, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written so, with checksums that fit: verify says it, and a sampler never hands out what is no edge."""
    put = edgeids.EdgeIdsWriter._put

    def put_wrong(self: Any, ids: Int64s) -> None:
        put(self, np.r_[wrong, ids[1:]])

    monkeypatch.setattr(edgeids.EdgeIdsWriter, "_put", put_wrong)
    with from_pairs(tmp_path / "g", edges_of(200, 3000, 2), 200) as g:
        with pytest.raises(CorruptionError, match="edge_ids"):
            g.verify(progress=False)
        if wrong != 17:
            with pytest.raises(CorruptionError, match="edge 0 cannot be number"):
                featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(200))
