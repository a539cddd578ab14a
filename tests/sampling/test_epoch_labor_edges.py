"""Edge ids in epoch-wide layer-neighbour sampling: those of LaborSampler, and of lists gone through in Python."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore import EpochSampler, LaborSampler
from featstore._core.epochs import LEAST_BLOCK_WORDS, LEAST_BLOCKS, Draws, Logs, replay
from featstore.budget import Budget
from featstore.sampling.batch import SampledBatch
from featstore.sampling.scratch import Scratch
from featstore.sampling.window import LEAST_BLOCK_BYTES, drawn_bytes, is_wide, least_bytes
from tests.sampling.test_edgenumbers import FORMS, edges_of, from_pairs
from tests.sampling.test_epochwide import (
    PLENTY,
    ChunkedEpochGraph,
    EpochGraph,
    batches_of,
    check_window,
    long_list_graph,
    small_window,
    window_of,
)
from tests.sampling.test_labor import DEPENDENCIES
from tests.sampling.test_labor_numbers import numbers
from tests.sampling.test_neighbor import FANOUTS, same
from tests.sampling.test_windowed import windowed
from tests.support.array_graphs import ArrayGraph, random_graph
from tests.support.sampled import covering

KINDS = [EpochGraph, ChunkedEpochGraph]


def places_taken(g: ArrayGraph, batch: SampledBatch, k: int) -> list[int]:
    """Edges of a block by what each destination has taken: of an id that is in its list twice, both."""
    block, nodes = batch.blocks[k], batch.input_ids.numpy()
    src, dst = nodes[block.src.numpy()], block.dst.numpy()
    found: list[int] = []
    for i in range(block.n_dst):
        start, end = g.indptr[nodes[i] : nodes[i] + 2].tolist()
        found += (start + np.flatnonzero(np.isin(g.indices[start:end], src[dst == i]))).tolist()
    return found


def check_edges(sampler: LaborSampler, g: Any, batches: list[Any], path: Path, **options: Any) -> int:
    """Compare every batch of a window with that without edges and the one sampled alone; return the bytes that were spilled."""
    _, (_, fanouts, dependency, seed, layers, redraw, *_) = sampler.__reduce__()
    plain = LaborSampler(g, fanouts, dependency, seed, layers, redraw)
    with window_of(sampler, g, batches, path, **options) as window:
        window.draw()
        for k, seeds in enumerate(batches):
            batch, alone = (each.sample(*more) for each, *more in ((window, k), (sampler, torch.from_numpy(seeds), 0, k)))
            assert same(batch, plain.sample(torch.from_numpy(seeds), 0, k)), f"batch {k}"
            for mine, block in zip(batch.blocks, alone.blocks, strict=True):
                assert torch.equal(mine.edge_pos, block.edge_pos), f"batch {k}"
                assert (mine.weight, mine.edge_pos.dtype) == (None, torch.int64)
        if redraw:
            for hop in range(len(fanouts)):
                assert batch.blocks[hop].edge_pos.tolist() == places_taken(g, batch, hop)
        return window._drawn.spilled_bytes


CHECKS: list[tuple[bool, Any]] = [(False, check_window), (True, check_edges)]


@given(data=st.data(), fanouts=FANOUTS, dependency=DEPENDENCIES, layers=st.booleans(), redraw=st.booleans())
def test_small_graphs(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    fanouts: list[int],
    dependency: int,
    layers: bool,
    redraw: bool,
) -> None:
    """Also empty lists, ids that are in a list twice, 32- and 64-bit ids, whole and partial caches, the least memory."""
    small = small_window(data, tmp_path_factory, ascending=True)
    sampler = LaborSampler(small.graph, fanouts, dependency, 3, layers, redraw, edges=True)
    check_edges(sampler, small.graph, small.batches, small.path, n_bytes=small.memory(sampler))


@pytest.mark.parametrize(
    ("kind", "id_bytes", "fanouts"), covering(KINDS, [4, 8], [[10, 5, 3], [70, 3], [2, -1], [0, 4], [1000]], together=2)
)
def test_what_does_not_fit_the_memory_is_spilled(
    tmp_path: Path, kind: type[EpochGraph], fanouts: list[int], id_bytes: int
) -> None:
    """With and without edges: records of hundreds of ids lie in many blocks of a log; the arena is full within a list."""
    g = kind.of(random_graph(3000, 20, id_bytes=id_bytes), tmp_path)
    batches = batches_of(np.random.default_rng(1).permutation(3000)[:700], 100)
    for edges, check in CHECKS:
        sampler = LaborSampler(g, fanouts, batch_dependency=3, seed=3, edges=edges)
        least = least_bytes(g, sampler.fanouts, len(batches), is_wide(g))
        spilled = [check(sampler, g, batches, tmp_path, n_bytes=n_bytes) for n_bytes in (least, 3 * least, PLENTY)]
        assert spilled[0] > 0
        assert spilled[-1] == 0


@pytest.mark.parametrize("fanouts", [[5, 3], [-1, 2], [200], [20_000]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_longer_than_memory(tmp_path: Path, kind: type[EpochGraph], fanouts: list[int]) -> None:
    g = long_list_graph(kind, tmp_path)
    batches = [np.array([7, 1]), np.array([300, 7, 2]), np.array([4])]
    for edges, check in CHECKS:
        sampler = LaborSampler(g, fanouts, seed=8, edges=edges)
        check(sampler, g, batches, tmp_path, n_bytes=least_bytes(g, sampler.fanouts, len(batches), is_wide(g)))
    if kind is EpochGraph:
        assert max(len(stream) for stream in g.file.streams) > 4 * LEAST_BLOCK_BYTES // 4096


def test_threads(tmp_path: Path) -> None:
    g = EpochGraph.of(random_graph(5000, 12, seed=4), tmp_path)
    batches = batches_of(np.random.default_rng(5).permutation(5000)[:2000], 150)
    for n_workers in (1, 2, 5):
        for edges, check in CHECKS:
            check(LaborSampler(g, [6, 4, 2], seed=9, edges=edges), g, batches, tmp_path, n_workers=n_workers)


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
def test_every_vector_form_logs_places(rate: float, id_bytes: int) -> None:
    """Of the parts of lists that are here, whose places count from where the list begins; in the smallest arena there is."""
    rng = np.random.default_rng(7)
    degree = np.array([130, 150, 256, 257, 5000, 0, 90], np.int64)
    at = np.r_[0, np.cumsum(degree)[:-1]] - 50
    lists = [np.sort(rng.integers(0, 3000, d)) for d in degree]
    ids = np.concatenate(lists)[50:-20].astype(np.int32 if id_bytes == 4 else np.int64)
    keys = rng.integers(0, 2**63, (1, 4)).astype(np.uint64)
    keys[0, 3] >>= np.uint64(32)
    fanout, n = max(1, int(rate * 5000)), len(degree)
    expected = []
    for d, first, each in zip(degree.tolist(), at.tolist(), lists, strict=True):
        early, late, phase, turn = map(int, keys[0])
        drawn = np.where(numbers(phase, each) >= turn, numbers(late, each), numbers(early, each))
        is_here = (np.arange(d) + first >= 0) & (np.arange(d) + first < len(ids))
        places = np.flatnonzero(is_here & ((drawn < (fanout << 32) // max(d, 1)) | (d <= fanout)))
        expected.append((each[places].tolist(), places.tolist()))
    for level in (0, 1, 2):
        logs = Logs(1, np.zeros(LEAST_BLOCKS * LEAST_BLOCK_WORDS * 8, np.int8), LEAST_BLOCK_WORDS, True)
        targets = np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32)
        starts, fanouts = np.arange(n + 1), np.array([fanout], np.int64)
        draws = Draws(logs, keys, fanouts, (0, 1), False, 1, np.arange(n), starts, *targets, level, numbered=True)
        draws.begin(0, n, at, degree, ids, id_bytes, np.empty(Draws.scratch([fanout]), np.int64))
        taken: list[tuple[list[int], list[int]]] = [([], []) for _ in range(n)]
        done = False
        while not done:
            done = draws.go_on()
            words = np.zeros(logs.length(0), np.int64)
            logs.copy(0, words.view(np.int8))
            while len(words):
                place, count = words[:2].tolist()
                for k in range(2):
                    taken[place][k].extend(words[2 + k * count : 2 + (k + 1) * count].tolist())
                words = words[2 + 2 * count :]
            logs.clear()
        assert taken == expected


@pytest.mark.parametrize("first", [2**31, 2**40])
def test_more_edges_than_words_of_logs_count(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs hold places in lists: graphs of less than 2**31 nodes have 32-bit words however many edges there are."""
    locate = Scratch.locate_edges

    def far(self: Scratch, topology: Any, begin: int, end: int) -> None:
        locate(self, topology, begin, end)
        self.starts[begin:end] += first

    g = EpochGraph.of(random_graph(500, 12, seed=4), tmp_path)
    assert not is_wide(g)
    batches = batches_of(np.arange(200), 50)
    sampler = LaborSampler(g, [4, -1], seed=9, edges=True)
    expected = [sampler.sample(torch.from_numpy(seeds), 0, k) for k, seeds in enumerate(batches)]
    monkeypatch.setattr(Scratch, "locate_edges", far)
    with window_of(sampler, g, batches, tmp_path) as window:
        window.draw()
        for k, batch in enumerate(expected):
            for mine, block in zip(window.sample(k).blocks, batch.blocks, strict=True):
                assert torch.equal(mine.edge_pos, block.edge_pos + first)


def replayed(words: list[int], starts: list[int] | None, numbered: bool = True, wide: bool = False) -> list[list[int]]:
    scratch = Scratch(10, Budget(1 << 24), 16, edges=True)
    scratch.hops.begin(np.array([4, 5]))
    arrays: list[Any] = []

    def array(n: int) -> tuple[Any, ...]:
        arrays.extend(np.empty(n, np.int64) for _ in range(2 if starts is None else 3))
        return tuple(arrays)

    records = np.array(words, np.int64).astype(np.int64 if wide else np.uint32)
    first = None if starts is None else np.array(starts, np.int64)
    replay(scratch.hops, records, wide, 2, scratch.place, array, numbered, first)
    return [each.tolist() for each in arrays]


@pytest.mark.parametrize("wide", [False, True])
def test_places_of_32_bits_have_no_sign(wide: bool) -> None:
    words = [1, 2, 7, 8, 2**31, 2**32 - 1, 0, 1, 9, 3]
    src, dst, edge_pos = replayed(words, [10, 2**33], wide=wide)
    assert (src, dst, edge_pos) == ([9, 7, 8], [0, 1, 1], [13, 2**33 + 2**31, 2**33 + 2**32 - 1])
    assert replayed(words, None, wide=wide) == [src, dst]


def test_damaged_logs_and_numbers_without_places_are_refused() -> None:
    for words in ([0, 2, 7, 8, 1], [0, 1, 7], [2, 1, 7, 0]):
        with pytest.raises(ValueError, match="damaged"):
            replayed(words, [0, 0])
    for starts, numbered in (([0, 0], False), ([0], True)):
        with pytest.raises(ValueError, match="a log of their places"):
            replayed([], starts, numbered)


def test_lists_too_long_for_the_words_are_refused() -> None:
    one, uint = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    for wide in (False, True):
        logs = Logs(1, np.zeros(LEAST_BLOCKS * LEAST_BLOCK_WORDS * 8, np.int8), LEAST_BLOCK_WORDS, wide)
        arrays = one + 2, (0, 1), False, 1, one, np.array([0, 1]), uint, uint
        with pytest.raises(ValueError, match="drawn again"):
            Draws(logs, np.zeros((1, 1), np.uint64), *arrays, numbered=True)
        draws = Draws(logs, np.zeros((1, 4), np.uint64), *arrays, numbered=True)
        for degree in (2**32, 2**32 + 1):
            given_lists = 0, 1, one, np.array([degree]), np.zeros(3, np.int32), 4, one[:0]
            if not wide and degree > 2**32:
                with pytest.raises(OverflowError, match=r"4294967297 neighbours .* LaborSampler\(edges=True\)"):
                    draws.begin(*given_lists)
            else:
                draws.begin(*given_lists)


def test_memory_that_is_asked_for_counts_places(tmp_path: Path) -> None:
    g = EpochGraph.of(random_graph(3000, 20), tmp_path)
    asked = {
        edges: EpochSampler(g, [5, 3], draws="labor", edges=edges, run_dir=tmp_path).memory_bytes(40, 100)
        for edges in (False, True)
    }
    assert drawn_bytes(7, 3, 4, places=True) == 4 * (2 * 7 + 2 * 3)
    assert drawn_bytes(7, 3, 8) == 8 * (7 + 2 * 3)
    n_edges = EpochSampler(g, [5, 3], draws="labor").expected(100)[1]
    assert asked[True][0] == asked[False][0]
    assert asked[True][1] - asked[False][1] == 2 * 40 * 4 * n_edges
    neighbor = [EpochSampler(g, [5, 3], edges=edges).memory_bytes(40, 100) for edges in (False, True)]
    assert neighbor[0] == neighbor[1], "draws by key are drawn again"


@pytest.mark.parametrize(("window", "form", "cache"), covering([1, 3, "auto"], FORMS, [None, "6KiB", "1MiB"], together=2))
def test_batches_in_turn(tmp_path: Path, form: dict[str, Any], window: int | str, cache: str | None) -> None:
    """Edges as they were given, in any order; windows that come one after the other, batches out of turn, other epochs."""
    given_edges = edges_of(300, 4000, 3)
    with from_pairs(tmp_path / "g", given_edges, 300, features={"x": np.zeros((300, 2), np.float32)}, **form) as g:
        if cache is not None:
            g.cache_neighbors(cache)
        for options in ({}, {"batch_dependency": 4}, {"layer_dependency": True, "redraw": False}):
            sampler = EpochSampler(g, [4, 3], seed=6, draws="labor", window=window, edges=True, **options)
            plain = LaborSampler(g, [4, 3], seed=6, **options)
            batches = batches_of(np.arange(300), 40)
            for epoch, start in ((0, 0), (1, 5)):
                with closing(windowed(sampler, batches, epoch, start)) as taken:
                    for k in [*range(start, len(batches)), 2]:  # the last one out of turn
                        batch = taken.sample(k)
                        alone = sampler.sample(torch.from_numpy(batches[k]), epoch, k)
                        assert same(batch, plain.sample(torch.from_numpy(batches[k]), epoch, k))
                        for mine, block in zip(batch.blocks, alone.blocks, strict=True):
                            assert torch.equal(mine.edge_pos, block.edge_pos)
                            pos, ids = mine.edge_pos.numpy(), batch.input_ids.numpy()
                            np.testing.assert_array_equal(given_edges[0][pos], ids[mine.src.numpy()])
                            np.testing.assert_array_equal(given_edges[1][pos], ids[mine.dst.numpy()])
            assert sampler.stats()["windows"] > 0
