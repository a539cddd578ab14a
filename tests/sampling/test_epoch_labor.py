"""Epoch-wide layer-neighbour sampling against LaborSampler batch by batch, and against the sampler in plain Python."""

from __future__ import annotations

import os
import pickle
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import EpochSampler, LaborSampler
from featstore._core.epochs import LEAST_BLOCK_WORDS, LEAST_BLOCKS, Draws, Logs
from featstore.sampling.window import EpochWindow, is_wide, least_bytes
from tests.sampling.test_epochwide import (
    ChunkedEpochGraph,
    EpochGraph,
    batches_of,
    check_window,
    small_window,
    window_of,
)
from tests.sampling.test_labor import DEPENDENCIES, oracle
from tests.sampling.test_labor_numbers import numbers
from tests.sampling.test_neighbor import FANOUTS, WORDS, same
from tests.support.reference_sampling import check_batch

KINDS = [EpochGraph, ChunkedEpochGraph]


@given(
    data=st.data(),
    fanouts=FANOUTS,
    dependency=DEPENDENCIES,
    layer_dependency=st.booleans(),
    redraw=st.booleans(),
    seed=WORDS,
    epoch=WORDS,
)
def test_small_graphs_equal_batches_sampled_alone_and_the_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    fanouts: list[int],
    dependency: int,
    layer_dependency: bool,
    redraw: bool,
    seed: int,
    epoch: int,
) -> None:
    """Also empty lists, nodes that are in a list twice, fan-outs of 0 and -1, 32- and 64-bit ids, whole and partial caches."""
    small = small_window(data, tmp_path_factory)
    g, graph, batches = small.g, small.graph, small.batches
    sampler = LaborSampler(graph, fanouts, dependency, seed, layer_dependency, redraw)
    n_bytes = small.memory(sampler)
    check_window(sampler, graph, batches, small.path, epoch=epoch, n_bytes=n_bytes)
    with window_of(sampler, graph, batches, small.path, epoch=epoch, n_bytes=n_bytes) as window:
        window.draw()
        k = len(batches) - 1
        expected = oracle(g, batches[k].tolist(), fanouts, dependency, seed, epoch, k, layer_dependency, redraw)
        check_batch(window.sample(k), expected, len(batches[k]), epoch, k)


def test_more_is_taken_than_the_mean(tmp_path: Path) -> None:
    """All nodes have one list, so that all of them take the same sources: few or many. In the least memory, as in plenty."""
    n, degree = 400, 300
    indptr, indices = np.arange(n + 1) * degree, np.tile(np.arange(degree, dtype=np.int32), n)
    g = EpochGraph(indptr, indices, path=str(tmp_path / "graph"))
    batches = batches_of(np.arange(n), 50)
    sampler = EpochSampler(g, [1, 1], draws="labor", seed=2)
    edges = [len(sampler.sample(torch.from_numpy(seeds), 0, k).blocks[-1].src) for k, seeds in enumerate(batches)]
    assert max(edges) > 2 * 50
    assert min(edges) == 0
    least = least_bytes(g, sampler.fanouts, len(batches), is_wide(g))
    check_window(LaborSampler(g, [1, 1], seed=2), g, batches, tmp_path, n_bytes=least)


@pytest.mark.parametrize("id_bytes", [4, 8])
@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
def test_every_vector_form_takes_what_the_oracle_takes(rate: float, id_bytes: int) -> None:
    """Of the parts of lists that are here, in the smallest arena there is, whose logs are read whenever it is full."""
    rng = np.random.default_rng(7)
    degree = np.array([30, 150, 256, 257, 5000, 0, 90], np.int64)
    at = np.r_[0, np.cumsum(degree)[:-1]] - 50  # neither the first list is here, nor the last, nor all of their neighbours
    ids = rng.integers(0, 3000, int(degree.sum()) - 200).astype(np.int32 if id_bytes == 4 else np.int64)
    fanout = max(1, int(rate * 5000))
    keys = rng.integers(0, 2**63, (2, 4)).astype(np.uint64)
    keys[0, 1:] = keys[0, 0], 0, 0  # no source has changed
    keys[1, 3] >>= np.uint64(32)
    n = len(degree)
    place = np.arange(2 * n, dtype=np.uint32)
    expected = []
    for target in range(2 * n):
        d, first = int(degree[target // 2]), int(at[target // 2])
        here = ids[max(0, first) : max(0, first + d)].astype(np.int64)
        early, late, phase, turn = map(int, keys[target % 2])
        drawn = np.where(numbers(phase, here) >= turn, numbers(late, here), numbers(early, here))
        expected.append(here[(drawn < (fanout << 32) // d) | (d <= fanout)].tolist() if d else [])
    fanouts = np.array([fanout], np.int64)
    for level in (0, 1, 2):
        logs = Logs(2, np.zeros(LEAST_BLOCKS * LEAST_BLOCK_WORDS * 8, np.int8), LEAST_BLOCK_WORDS, True)
        draws = Draws(logs, keys, fanouts, (0, 1), False, 2, np.arange(n), np.arange(n + 1) * 2, place % 2, place, level)
        draws.begin(0, n, at, degree, ids, id_bytes, np.empty(Draws.scratch([fanout]), np.int64))
        taken: list[list[int]] = [[] for _ in place]
        done = False
        while not done:
            done = draws.go_on()
            for log in range(2):
                words = np.zeros(logs.length(log), np.int64)
                logs.copy(log, words.view(np.int8))
                while len(words):
                    assert words[0] % 2 == log
                    taken[words[0]] += words[2 : 2 + words[1]].tolist()
                    words = words[2 + words[1] :]
            logs.clear()
        assert taken == expected


def test_keys_of_other_lengths_are_refused() -> None:
    logs = Logs(1, np.zeros(LEAST_BLOCKS * LEAST_BLOCK_WORDS * 4, np.int8), LEAST_BLOCK_WORDS, False)
    one, uint = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="keys of 3 words"):
        Draws(logs, np.zeros((1, 3), np.uint64), one, (0, 1), False, 1, one, np.array([0, 1]), uint, uint)


def test_windows_that_take_more_than_the_disk_holds_become_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes have one list, and keep their numbers: all batches take several times the mean. Windows of a given size fail."""
    n, degree, batches = 400, 300, [np.arange(400)] * 4
    indptr, indices = np.arange(n + 1) * degree, np.tile(np.arange(degree, dtype=np.int32), n)
    g = EpochGraph(indptr, indices, path=str(tmp_path / "graph"))
    options: dict[str, Any] = {"draws": "labor", "batch_dependency": 2**32}

    def taken_by(seed: int) -> int:
        batch = EpochSampler(g, [1], seed=seed, **options).sample(torch.from_numpy(batches[0]))
        return len(batch.blocks[0].src) // n

    seed = next(seed for seed in range(2000) if taken_by(seed) == 5)  # the mean is 1
    alone = LaborSampler(g, [1], batch_dependency=2**32, seed=seed)
    windows, draw = list[tuple[int, int]](), EpochWindow.draw
    monkeypatch.setattr(EpochWindow, "draw", lambda self: (windows.append((self.first, self.stop)), draw(self))[1])
    least = least_bytes(g, (1,), len(batches), is_wide(g))
    for window in ("auto", 4):
        sampler = EpochSampler(g, [1], seed=seed, window=window, disk="40kB", **options)
        with (
            g.budget.reserve("epoch samples", least) as memory,
            closing(sampler.windowed(lambda k: torch.from_numpy(batches[k]), 0, 0, len(batches), memory)) as taken,
        ):
            if window == 4:
                with pytest.raises(OSError, match="disk budget"):
                    taken.sample(0)
                break
            for k, seeds in enumerate(batches):
                assert same(taken.sample(k), alone.sample(torch.from_numpy(seeds), 0, k))
            assert windows == [(0, 4), (0, 2), (2, 4)]
            assert sampler.stats()["spilled_bytes"] > 0


def test_options_are_checked_and_kept(small: SimpleNamespace) -> None:
    with featstore.open(small.path) as g:
        refused: list[tuple[str, dict[str, Any]]] = [
            ("draws is 'neighbor' or 'labor'", {"draws": "layer"}),
            ("replace goes with", {"draws": "labor", "replace": True}),
            ("batch_dependency goes with", {"batch_dependency": 2}),
            ("layer_dependency goes with", {"layer_dependency": True}),
            ("batch_dependency must be", {"draws": "labor", "batch_dependency": 0}),
            ("window", {"draws": "labor", "window": 0}),
        ]
        for message, options in refused:
            with pytest.raises(ValueError, match=message):
                EpochSampler(g, [2], **options)
        for given_options, said in (
            ({}, "batch_dependency=1, seed=0, draws='labor', window='auto'"),
            ({"edges": True}, "batch_dependency=1, seed=0, edges=True, draws='labor', window='auto'"),
            (
                {"batch_dependency": 5, "layer_dependency": True, "redraw": False, "seed": 4, "window": 7, "disk": "1MiB"},
                "batch_dependency=5, seed=4, layer_dependency=True, redraw=False, draws='labor', window=7",
            ),
        ):
            sampler = EpochSampler(g, [2, 3], draws="labor", run_dir="there", **given_options)
            copy = pickle.loads(pickle.dumps(sampler))
            try:
                assert repr(copy) == repr(sampler) == f"EpochSampler(fanouts=[2, 3], {said})"
                assert (copy.disk, copy.run_dir) == (sampler.disk, os.path.abspath("there"))
            finally:
                copy.graph.close()
