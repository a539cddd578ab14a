"""Epoch-wide sampling against neighbour sampling batch by batch: logs that spill, lists in pieces, windows as they are taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore import NeighborSampler
from featstore._core.epochs import LEAST_POSITIONS
from featstore.config import Options
from featstore.errors import BudgetError
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.hops import HopSampler
from featstore.sampling.listaccess import ACCESSES
from featstore.sampling.window import LEAST_BLOCK_BYTES, EpochWindow, Seeds, is_wide, least_bytes
from featstore.storage.rundir import DiskQuota
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.array_graphs import ArrayGraph, graphs, random_graph
from tests.support.sampled import covering

Int64s = npt.NDArray[np.int64]
PLENTY = 64 << 20


@dataclass
class EpochGraph(ArrayGraph):
    """The part of a graph that an epoch-wide sampler needs."""

    path: str = ""
    options: Options = field(default_factory=lambda: Options(1 << 30, "pread", "off", 2))

    @classmethod
    def of(cls, g: ArrayGraph, path: Path) -> EpochGraph:
        """The same graph, and the same lists in memory."""
        made = cls(g.indptr, g.indices, path=str(path / "graph"))
        if g.neighbor_cache is not None:
            arrays = g.neighbor_cache.to_arrays()
            if g.neighbor_cache.whole and made.topology.resident_offsets is None:
                arrays["indptr"] = g.indptr
            made.neighbor_cache = NeighborCache.from_arrays(made.topology, arrays)
        return made


class ChunkedEpochGraph(EpochGraph):
    """The same in chunks of one page, of which most lists need several."""

    chunk_bytes = 4096


def batches_of(seeds: Int64s, size: int) -> list[Int64s]:
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


@contextmanager
def window_of(
    sampler: HopSampler,
    g: Any,
    batches: list[Int64s],
    path: Path,
    *,
    epoch: int = 0,
    n_bytes: int = PLENTY,
    n_workers: int = 2,
    access: str = "pass",
) -> Iterator[EpochWindow]:
    numbers = itertools.count()
    window = EpochWindow(
        sampler,
        g,
        Seeds(lambda k: torch.from_numpy(batches[k])),
        epoch,
        0,
        len(batches),
        n_bytes=n_bytes,
        n_workers=n_workers,
        path=lambda: str(path / f"run-{next(numbers)}"),
        disk=DiskQuota(None),
        access=access,
    )
    try:
        yield window
    finally:
        window.close()
    assert not list(path.glob("run-*")), "run files are left"


def check_window(sampler: HopSampler, g: Any, batches: list[Int64s], path: Path, **options: Any) -> int:
    """Compare every batch of a window with the one that is sampled alone; return the bytes that were spilled."""
    with window_of(sampler, g, batches, path, **options) as window:
        window.draw()
        for k, seeds in enumerate(batches):
            alone = sampler.sample(torch.from_numpy(seeds), options.get("epoch", 0), k)
            assert same(window.sample(k), alone), f"batch {k}"
        return window._drawn.spilled_bytes


@dataclass(frozen=True)
class SmallWindow:
    """Any small graph, whole or with a cache, in either topology, and batches of its nodes."""

    g: ArrayGraph
    graph: EpochGraph
    batches: list[Int64s]
    path: Path
    is_tight: bool

    def memory(self, sampler: HopSampler) -> int:
        """Return bytes for a window of all batches: the least there is, or plenty."""
        least = least_bytes(self.graph, sampler.fanouts, len(self.batches), is_wide(self.graph))
        return least if self.is_tight else PLENTY


def small_window(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, ascending: bool = False) -> SmallWindow:
    path = tmp_path_factory.mktemp("window")
    g = data.draw(graphs())
    for start, end in itertools.pairwise(g.indptr.tolist() if ascending else ()):
        g.indices[start:end].sort()
    cached = data.draw(st.sampled_from([None, g.cached, lambda: g.cached(len(g.indices) // 2 + 1)]))
    graph = data.draw(st.sampled_from([EpochGraph, ChunkedEpochGraph])).of(g if cached is None else cached(), path)
    seeds = np.array(data.draw(st.lists(st.integers(0, g.num_nodes - 1), unique=True, min_size=1)), np.int64)
    return SmallWindow(g, graph, batches_of(seeds, data.draw(st.integers(1, 9))), path, data.draw(st.booleans()))


def long_list_graph(kind: type[EpochGraph], path: Path) -> EpochGraph:
    """Short lists, and one that is longer than a reader's block."""
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 4, 500)
    degrees[[7, 300]] = LEAST_BLOCK_BYTES * 5 // 4, 3000
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = np.concatenate([np.sort(rng.integers(0, 500, degree)) for degree in degrees])
    return kind(indptr, indices.astype(np.int32), path=str(path / "graph"))


@given(
    data=st.data(),
    fanouts=FANOUTS,
    replace=st.booleans(),
    redraw=st.booleans(),
    seed=WORDS,
    epoch=WORDS,
    access=st.sampled_from(ACCESSES),
)
def test_small_graphs_equal_batches_sampled_alone(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    fanouts: list[int],
    replace: bool,
    redraw: bool,
    seed: int,
    epoch: int,
    access: str,
) -> None:
    """Also empty lists, isolated nodes, fan-outs of 0 and -1, 32- and 64-bit ids, whole and partial caches."""
    small = small_window(data, tmp_path_factory)
    sampler = NeighborSampler(small.graph, fanouts, replace=replace, redraw=redraw, seed=seed)
    n_bytes = small.memory(sampler)
    check_window(sampler, small.graph, small.batches, small.path, epoch=epoch, n_bytes=n_bytes, access=access)


@pytest.mark.parametrize(
    ("fanouts", "kind", "id_bytes"),
    covering([[10, 5, 3], [70, 3], [2, -1], [1000], [5000]], [EpochGraph, ChunkedEpochGraph], [4, 8]),
)
def test_what_does_not_fit_the_memory_is_spilled(
    tmp_path: Path, kind: type[EpochGraph], fanouts: list[int], id_bytes: int
) -> None:
    """Fan-outs of more than 64 are drawn in another way, those beyond the room for positions, too; lists lie in many blocks."""
    assert LEAST_POSITIONS < 5000
    base = random_graph(3000, 20, id_bytes=id_bytes)
    batches = batches_of(np.random.default_rng(1).permutation(3000)[:700], 100)
    for access, lists in (("random", base.cached(30_000)), ("random", base), ("pass", base)):
        g = kind.of(lists, tmp_path)
        sampler = NeighborSampler(g, fanouts, seed=3)
        least = least_bytes(g, sampler.fanouts, len(batches), is_wide(g))
        tried = (least, 3 * least, PLENTY)
        spilled = [check_window(sampler, g, batches, tmp_path, n_bytes=n_bytes, access=access) for n_bytes in tried]
        assert spilled[0] > 0
        assert spilled[-1] == 0
    with (
        pytest.raises(BudgetError, match=f"at least {least} bytes"),
        window_of(sampler, g, batches, tmp_path, n_bytes=least - 1),
    ):
        pass


@pytest.mark.parametrize("fanouts", [[5, 3], [-1, 2], [200]])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", [EpochGraph, ChunkedEpochGraph])
def test_a_list_longer_than_memory_is_drawn_from_in_pieces(
    tmp_path: Path, kind: type[EpochGraph], fanouts: list[int], replace: bool
) -> None:
    g = long_list_graph(kind, tmp_path)
    batches = [np.array([7, 1]), np.array([300, 7, 2]), np.array([4])]
    sampler = NeighborSampler(g, fanouts, replace=replace, seed=8)
    least = least_bytes(g, sampler.fanouts, len(batches), is_wide(g))
    assert least * 3 // 4 < 5 * LEAST_BLOCK_BYTES or max(fanouts) > 64
    check_window(sampler, g, batches, tmp_path, n_bytes=least)
    if kind is EpochGraph:
        assert max(len(stream) for stream in g.file.streams) > 4 * LEAST_BLOCK_BYTES // 4096


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("kind", [EpochGraph, ChunkedEpochGraph])
def test_fanouts_beyond_every_list_take_no_memory(tmp_path: Path, kind: type[EpochGraph], edges: bool) -> None:
    """Users write "all neighbours" so: the same batches as of -1, in the same memory. A longer list is drawn from."""
    base = random_graph(3000, 20)
    largest = int(np.diff(base.indptr).max())
    hub = np.concatenate([[0], np.cumsum(np.where(np.arange(3000) == 7, 6000, np.diff(base.indptr)))])
    ids = np.random.default_rng(4).integers(0, 3000, hub[-1]).astype(np.int32)
    whole, drawn = (
        kind(indptr, indices, path=str(tmp_path / "g")) for indptr, indices in ((base.indptr, base.indices), (hub, ids))
    )
    batches = [np.array([7, 1, 2]), np.arange(100, 130)]
    for g, fanouts, equal in ((whole, [2**31 - 1, largest, 3], (-1, -1, 3)), (drawn, [10**9, 5000], (-1, 5000))):
        sampler, other = NeighborSampler(g, fanouts, seed=3, edges=edges), NeighborSampler(g, equal, seed=3, edges=edges)
        assert sampler.drawn_fanouts == equal
        for k, seeds in enumerate(batches):
            assert same(sampler.sample(torch.from_numpy(seeds), 0, k), other.sample(torch.from_numpy(seeds), 0, k))
        least = least_bytes(g, equal, len(batches), is_wide(g))
        check_window(sampler, g, batches, tmp_path, n_bytes=least)
        with (
            pytest.raises(BudgetError, match=f"at least {least} bytes"),
            window_of(sampler, g, batches, tmp_path, n_bytes=least - 1),
        ):
            pass
    again = NeighborSampler(whole, [5000], replace=True)
    assert again.drawn_fanouts == (5000,)


def test_a_hop_reads_each_needed_page_once_and_no_other(tmp_path: Path) -> None:
    """Of the file; lists in the neighbour cache are not read, nor pages without a list that is drawn from."""
    base = random_graph(40_000, 8)
    batches = batches_of(np.arange(0, 400, 2), 50)  # lists at the file's beginning
    for g in (EpochGraph.of(base, tmp_path), EpochGraph.of(base.cached(100_000), tmp_path)):
        sampler = NeighborSampler(g, [3], seed=1)
        with window_of(sampler, g, batches, tmp_path, n_workers=1) as window:
            window.draw()
        read = np.concatenate([stream.pages() for stream in g.file.streams])
        cache, needed = g.neighbor_cache, set[int]()
        for node in np.concatenate(batches).tolist():
            first, end = int(g.indptr[node]), int(g.indptr[node + 1])
            if first < end and (cache is None or cache.offset_of_node is None or cache.offset_of_node[node] < 0):
                needed.update(range(first * 4 // 4096, (end * 4 - 1) // 4096 + 1))
        assert needed <= set(read.tolist())
        assert len(set(read.tolist())) == len(read)
        assert len(read) <= len(needed) + 8 * len(needed)  # gaps that are read over


def test_batches_do_not_depend_on_threads(tmp_path: Path) -> None:
    g = EpochGraph.of(random_graph(5000, 12, seed=4), tmp_path)
    batches = batches_of(np.random.default_rng(5).permutation(5000)[:2000], 150)
    for n_workers in (1, 2, 5):
        check_window(NeighborSampler(g, [6, 4, 2], seed=9), g, batches, tmp_path, n_workers=n_workers)


def test_nodes_of_one_batch_draw_under_its_key_alone(tmp_path: Path) -> None:
    """The same seeds in every batch draw differently in each, as they do alone."""
    g = EpochGraph.of(random_graph(300, 30), tmp_path)
    batches = [np.arange(40)] * 6
    sampler = NeighborSampler(g, [4, 4], seed=2)
    check_window(sampler, g, batches, tmp_path)
    with window_of(sampler, g, batches, tmp_path) as window:
        window.draw()
        drawn = [tuple(window.sample(k).blocks[-1].src.tolist()) for k in range(6)]
    assert len(set(drawn)) == 6


def test_bad_seeds_are_named(tmp_path: Path) -> None:
    g = EpochGraph.of(random_graph(50, 3), tmp_path)
    sampler = NeighborSampler(g, [2])
    with (
        window_of(sampler, g, [np.array([1]), np.array([3, 50])], tmp_path) as window,
        pytest.raises(IndexError, match="seed 50"),
    ):
        window.draw()
    with window_of(sampler, g, [np.array([1, 1])], tmp_path) as window, pytest.raises(ValueError, match="must be distinct"):
        window.draw()
