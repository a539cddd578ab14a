"""Edge ids beside cached neighbour lists are those of the file, in every sampler, are not read, and are counted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.errors import CorruptionError
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.labor import LaborSampler
from featstore.sampling.layer import LayerSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.scratch import Scratch
from featstore.sampling.shadow import ShadowSampler
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update
from featstore.topology.base import huge_bytes
from featstore.topology.edgeids import EdgeIds
from tests.sampling.test_edgenumbers import FORMS, edges_of, from_pairs
from tests.support.array_graphs import ArrayFile, ArrayGraph, random_graph

pytestmark = pytest.mark.usefixtures("small_pieces")

Int64s = npt.NDArray[np.int64]

N = 2000
SAMPLERS: dict[str, Any] = {
    "neighbor": lambda g: NeighborSampler(g, [5, 3], edges=True),
    "replace": lambda g: NeighborSampler(g, [70, 2], replace=True, edges=True),
    "once": lambda g: NeighborSampler(g, [-1, 3], redraw=False, edges=True),
    "labor": lambda g: LaborSampler(g, [5, 3], edges=True),
    "importance": lambda g: LaborSampler(g, [5, 3], importance_sampling=1, edges=True),
    "layer": lambda g: LayerSampler(g, [50, 40], edges=True),
    "shadow": lambda g: ShadowSampler(g, [5, 3], edges=True),
}


def numbered(id_bytes: int, width: int) -> tuple[ArrayGraph, npt.NDArray[Any]]:
    """A graph, and a number for each of its edges."""
    g = random_graph(N, 8, seed=2, id_bytes=id_bytes)
    ids = np.random.default_rng(3).permutation(len(g.indices)).astype(f"<i{width}")
    return g, ids


def with_cache(g: ArrayGraph, ids: npt.NDArray[Any], share: float) -> ArrayGraph:
    """The same graph with numbers in a file, and those of a share of the lists in memory."""
    made = ArrayGraph(g.indptr, g.indices)
    made.topology.edge_ids = EdgeIds(ArrayFile(ids))  # type: ignore[arg-type]
    n_bytes = max(huge_bytes(8 * N), int(share * NeighborCache.whole_bytes(made.topology, True)))
    budget, scores = Budget(n_bytes), np.random.default_rng(4).random(N)
    made.neighbor_cache = NeighborCache.build(made.topology, budget, scores, scratch=Budget(1 << 20), edges=True)
    assert made.neighbor_cache.whole == (share == 1)
    assert made.neighbor_cache.nbytes <= budget.used <= n_bytes
    return made


WIDTHS = [(4, 4), (8, 4), (4, 8), (8, 8)]


@functools.cache
def cached(id_bytes: int, width: int) -> tuple[ArrayGraph, npt.NDArray[Any], dict[float, ArrayGraph]]:
    g, ids = numbered(id_bytes, width)
    return g, ids, {share: with_cache(g, ids, share) for share in (0.0, 0.4, 0.8, 1.0)}


@given(
    st.sampled_from(WIDTHS),
    st.sampled_from(list(SAMPLERS)),
    st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    st.lists(st.integers(0, N - 1), unique=True, max_size=40),
    st.integers(0, 5),
)
def test_numbers_in_memory_are_those_of_the_file(
    widths: tuple[int, int], name: str, share: float, seeds: list[int], index: int
) -> None:
    """Against a look-up in the permutation of where the same sampler found the edges; only absent lists' numbers are read."""
    g, ids, graphs = cached(*widths)
    graph = graphs[share]
    topology, cache = graph.topology, graph.neighbor_cache
    file: Any = topology.edge_ids._file
    before = file.n_gathered
    batch = SAMPLERS[name](graph).sample(torch.tensor(seeds, dtype=torch.int64), 0, index)
    stored = SAMPLERS[name](g).sample(torch.tensor(seeds, dtype=torch.int64), 0, index)
    expected_reads = 0
    for k, (mine, block) in enumerate(zip(batch.blocks, stored.blocks, strict=True)):
        assert torch.equal(mine.src, block.src)
        assert torch.equal(mine.dst, block.dst)
        np.testing.assert_array_equal(mine.edge_pos.numpy(), ids[block.edge_pos.numpy()])
        is_first = k == 0 if name in ("once", "shadow") else True  # the others are its parts
        if cache.offset_of_node is not None and is_first:
            absent = cache.offset_of_node[batch.input_ids.numpy()[block.dst.numpy()]] < 0
            expected_reads += int(np.count_nonzero(absent))
    assert file.n_gathered - before == expected_reads


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("edges", [True, False])
def test_all_work_is_noted(widths: tuple[int, int], edges: bool) -> None:
    """All edges, with their numbers; and the passes that choose lists, if not all of them fit."""
    topology, scores = cached(*widths)[2][1.0].topology, np.random.default_rng(4).random(N)
    all_bytes = topology.num_edges * (widths[0] + edges * widths[1])
    for n_bytes, work_bytes in ((1 << 20, all_bytes), (huge_bytes(8 * N) + 40_000, NeighborCache.work_bytes(topology, edges))):
        noted: list[int] = []
        cache = NeighborCache.build(topology, Budget(n_bytes), scores, scratch=Budget(1 << 20), note=noted.append, edges=edges)
        assert cache.whole == (work_bytes == all_bytes)
        assert sum(noted) == work_bytes


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_numbers_lie_where_the_ids_do(widths: tuple[int, int], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pieces they are read in; saved arrays make the same cache."""
    g, ids, _ = cached(*widths)
    monkeypatch.setattr("featstore.graph.neighbors.neighborcache.BLOCK_BYTES", 64)
    monkeypatch.setattr("featstore.graph.neighbors.neighborcache._READ_EDGES", 100)
    graph = with_cache(g, ids, share)
    cache = graph.neighbor_cache
    assert len(cache.edge_ids) == len(cache.records)
    if cache.offset_of_node is None:
        np.testing.assert_array_equal(cache.edge_ids, ids)
    else:
        for node in np.flatnonzero(cache.offset_of_node >= 0).tolist():
            at, degree = int(cache.offset_of_node[node]) + 1, int(g.indptr[node + 1] - g.indptr[node])
            np.testing.assert_array_equal(cache.edge_ids[at : at + degree], ids[g.indptr[node] : g.indptr[node + 1]])
    again = NeighborCache.from_arrays(graph.topology, cache.to_arrays())
    assert repr(again) == repr(cache)
    assert "edge ids" in repr(again)


def test_numbers_of_another_topology_are_refused() -> None:
    g, ids, _ = cached(4, 4)
    for share in (0.4, 1.0):
        graph = with_cache(g, ids, share)
        arrays = graph.neighbor_cache.to_arrays()
        numbers = arrays["edge_ids"]
        for bad in (numbers[:-1], numbers.astype(np.int64)):
            with pytest.raises(ValueError, match="edge_ids are kept of each record"):
                NeighborCache.from_arrays(graph.topology, {**arrays, "edge_ids": bad})
        for wrong in (-1, len(ids)):
            changed = numbers.copy()
            first = 0 if share == 1 else int(graph.neighbor_cache.offset_of_node.max()) + 1
            changed[first] = wrong
            with pytest.raises(ValueError, match="are not this topology's"):
                NeighborCache.from_arrays(graph.topology, {**arrays, "edge_ids": changed})
        with pytest.raises(ValueError, match="edge_ids are kept of each record"):
            NeighborCache.from_arrays(g.topology, arrays)  # has no file of numbers


@pytest.mark.parametrize("wrong", [-1, 1 << 20])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_number_that_is_no_edges_is_found(share: float, wrong: int) -> None:
    g, ids, _ = cached(4, 4)
    damaged = ids.copy()
    damaged[777] = wrong
    with pytest.raises(CorruptionError, match=f"edge 777 cannot be number {wrong}"):
        with_cache(g, damaged, share)


def test_a_hop_takes_numbers_of_its_records_alone() -> None:
    scratch = Scratch(10, Budget(1 << 24), 16, edges=True)
    scratch.hops.begin(np.array([4]))
    scratch.place[0], scratch.degree[0] = 1, 2
    src, dst, edge_pos, empty = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(0, np.int64)
    records = np.array([2, 7, 8], np.int32)
    options: Any = (1, -1, False, 0, records, 4, src, dst, empty, empty, empty, scratch.starts)
    for numbers, out in ((np.array([2, 5], np.int32), edge_pos), (np.array([2, 5, 6], np.int32), None)):
        with pytest.raises(ValueError, match="edge_ids has an entry for each of the 3 records"):
            scratch.hops.start(*options, out, numbers)
    scratch.hops.start(*options, edge_pos, np.array([2, 5, 6]))
    assert scratch.hops.number()
    assert edge_pos.tolist() == [5, 6]


EDGES = edges_of(300, 4000, 3)
EPOCHS: dict[str, Any] = {
    "pass": {"access": "pass"},
    "random": {"access": "random", "redraw": False},
    "labor": {"draws": "labor"},
}


def made(path: Path, **more: Any) -> featstore.OutOfCoreGraph:
    return from_pairs(path, EDGES, 300, features={"x": np.zeros((300, 2), np.float32)}, **more)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", EPOCHS)
def test_windows_take_them_from_a_cache_that_comes_and_goes(tmp_path: Path, form: dict[str, Any], kind: str) -> None:
    """Numbers of all windows are those of batches sampled alone without a cache, while caches are replaced and dropped."""
    caches = [("24KiB", True), (0, True), (None, True), ("24KiB", False), (None, False)]
    with made(tmp_path / "g", **form) as g, featstore.open(tmp_path / "g", memory="16MiB") as plain:
        sampler = featstore.EpochSampler(g, [5, -1], seed=1, window=4, edges=True, **EPOCHS[kind])
        alone = featstore.EpochSampler(plain, [5, -1], seed=1, edges=True, **EPOCHS[kind])
        with featstore.Loader(g, sampler, torch.arange(300), 30, labels=None) as loader:
            for n, batch in enumerate(loader):
                budget, edges = caches[n % len(caches)]
                g.cache_neighbors(budget, edges=edges)
                expected = alone.sample(batch.seeds, 0, batch.index)
                for mine, block in zip(batch.blocks, expected.blocks, strict=True):
                    assert torch.equal(mine.src, block.src)
                    assert torch.equal(mine.edge_pos, block.edge_pos)
                    np.testing.assert_array_equal(EDGES[0][mine.edge_pos.numpy()], batch.input_ids.numpy()[mine.src.numpy()])


class _Drops:
    """Its graph's cache is another one once the lists of the first hop are found."""

    instead: tuple[Any, bool] = (0, False)

    def _expand(self, *args: Any) -> Any:
        graph: Any = self.graph  # type: ignore[attr-defined]
        graph.cache_neighbors(self.instead[0], edges=self.instead[1])
        return super()._expand(*args)  # type: ignore[misc]


class _DropsNeighbor(_Drops, featstore.NeighborSampler):
    pass


class _DropsLabor(_Drops, featstore.LaborSampler):
    pass


@pytest.mark.parametrize("instead", [(0, False), (None, True), ("20KiB", True)])
@pytest.mark.parametrize("kind", [_DropsNeighbor, _DropsLabor])
def test_a_cache_that_goes_in_the_middle_of_a_batch(tmp_path: Path, kind: Any, instead: tuple[Any, bool]) -> None:
    with made(tmp_path / "g") as g:
        expected = kind.__mro__[2](g, [5, 3], edges=True).sample(torch.arange(40))
        sampler = kind(g, [5, 3], edges=True)
        sampler.instead = instead
        g.cache_neighbors("24KiB", edges=True)
        found = sampler.sample(torch.arange(40))
        for mine, block in zip(found.blocks, expected.blocks, strict=True):
            assert torch.equal(mine.edge_pos, block.edge_pos)
        g.cache_neighbors(0)
        assert "neighbor cache" not in g.memory_report()


def test_they_are_counted_within_the_size_and_asked_for(tmp_path: Path) -> None:
    with made(tmp_path / "g") as g:
        held = []
        for budget, edges in (("24KiB", False), ("24KiB", True), (None, False), (None, True)):
            g.cache_neighbors(budget, edges=edges)
            cache = g.neighbor_cache
            assert (cache.edge_ids is not None) == edges
            assert cache.whole == (budget is None or not edges)
            held.append(g.memory_report()["neighbor cache"])
            assert cache.nbytes <= held[-1]
        assert held[1] <= 24 << 10
        assert held[3] == held[2] + huge_bytes(4 * 4000)
        with pytest.raises(TypeError, match="edges"):
            g.cache_neighbors(edges="yes")  # type: ignore[arg-type]


def test_nothing_is_kept_where_lists_are_stored_as_they_were_given(tmp_path: Path) -> None:
    edges = EDGES[:, np.lexsort(EDGES)]
    with from_pairs(tmp_path / "g", edges, 300) as g:
        g.cache_neighbors(edges=True)
        assert g.neighbor_cache.edge_ids is None
        batch = featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(300))
        np.testing.assert_array_equal(batch.blocks[0].edge_pos.numpy(), np.arange(4000))


def test_they_are_saved_with_the_lists(tmp_path: Path) -> None:
    with made(tmp_path / "g") as g:
        g.cache_neighbors("15KiB", edges=True, save=True)
        saved = g.neighbor_cache.to_arrays()
    with featstore.open(tmp_path / "g", memory="16MiB") as g, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeighborCache, "build", None)  # would fail if it were used
        g.cache_neighbors("15KiB", edges=True)
        loaded = g.neighbor_cache.to_arrays()
        assert saved.keys() == loaded.keys()
        for name, array in saved.items():
            np.testing.assert_array_equal(loaded[name], array)
        with pytest.raises(TypeError):
            g.cache_neighbors("14KiB", edges=True)  # another size
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        g.cache_neighbors("15KiB", save=True)  # without numbers it holds more lists
        assert g.neighbor_cache.edge_ids is None
        assert len(g.neighbor_cache.records) > len(saved["records"])
        g.verify(progress=False)
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        g.cache_neighbors("15KiB", edges=True)
        assert g.neighbor_cache.edge_ids is not None  # the saved one has none, and was not used
    with Update(tmp_path / "g"):
        pass  # what was superseded is swept
    assert not [name for name in read_catalog(str(tmp_path / "g")).files if name.startswith("cache.neighbors.edge_ids")]
    assert not list((tmp_path / "g").glob("cache.neighbors.edge_ids*"))
