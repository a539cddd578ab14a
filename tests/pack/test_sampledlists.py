"""Neighbour lists in memory while a pack is sampled: which, until when, and never in the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.pack import offline
from featstore.pack.sampledlists import lists_kept, table_bytes, worth_keeping
from featstore.sampling.sampledbatches import Drawn

N = 20_000
SEEDS = np.arange(2_000)


def sampled(g: featstore.OutOfCoreGraph, path: Path, seeds: Any = SEEDS, **options: Any) -> tuple[list[int], str]:
    """Sample a pack; return the bytes of lists in memory as each batch was written, and the samples."""
    seen: list[int] = []
    real = offline.SampleWriter.add

    def add(writer: Any, batch: Any) -> None:
        cache = g.neighbor_cache
        seen.append(0 if cache is None or cache.reservation is None else cache.reservation.n_bytes)
        real(writer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline.SampleWriter, "add", add)
        sampler = options.pop("sampler", None) or featstore.NeighborSampler(g, [8, 8])
        with featstore.sample_offline(g, sampler, seeds, 100, path=path, progress=False, **options) as pack:
            batches = [pack.batch(number, g.pool) for number in range(len(pack))]
            text = repr([[batch.input_ids.tolist(), *(each.src.tolist() for each in batch.blocks)] for batch in batches])
    return seen, text


def test_lists_lie_in_memory_while_a_pack_is_sampled(wide: SimpleNamespace, tmp_path: Path) -> None:
    """All that fit, none afterwards; the batches are those that are drawn from the drive."""
    with featstore.open(wide.path, memory="64MiB", threads=1) as g:
        whole, before = NeighborCache.whole_bytes(g.topology), g.budget.used
        seen, batches = sampled(g, tmp_path / "roomy")
        assert seen == [whole] * 20
        assert g.neighbor_cache is None
        assert g.budget.used < before + whole // 2
        few, _ = sampled(g, tmp_path / "few", SEEDS[:100])
        assert few == [0], "one batch reads less than all lists"
        in_passes, _ = sampled(g, tmp_path / "passes", sampler=featstore.EpochSampler(g, [8, 8]))
        assert not any(in_passes)
        g.cache_neighbors("1MiB", progress=False)
        mine = g.neighbor_cache
        seen, again = sampled(g, tmp_path / "mine")
        assert again == batches
        assert g.neighbor_cache is mine
        assert mine is not None
        assert mine.reservation is not None
        assert seen == [mine.reservation.n_bytes] * 20


@pytest.mark.parametrize("threads", [1, 2])
def test_little_memory_holds_what_it_can(wide: SimpleNamespace, tmp_path: Path, threads: int) -> None:
    found = []
    for memory in ("64MiB", "5MiB", "2500KiB"):
        with featstore.open(wide.path, memory=memory, threads=threads) as g:
            found.append(sampled(g, tmp_path / memory, epochs=2))
            assert g.budget.peak <= g.budget.total
    assert found[0][1] == found[1][1] == found[2][1]
    assert found[0][0][0] > found[2][0][0]


def test_memory_that_others_need_is_given_back(wide: SimpleNamespace) -> None:
    with featstore.open(wide.path, memory="16MiB", threads=1) as g:
        drawn = Drawn(featstore.NeighborSampler(g, [8, 8]), featstore.RandomBatches(SEEDS, 100))
        with lists_kept(g, drawn, 1, 1):
            assert g.neighbor_cache is not None
            with g.budget.reserve("another", g.budget.available + (1 << 20)):
                assert g.neighbor_cache is None
        with lists_kept(g, drawn, 1, 1):
            g.cache_neighbors("1MiB", progress=False)  # another took the place of these
            mine = g.neighbor_cache
        assert g.neighbor_cache is mine


def test_auto_keeps_the_lists_that_it_counts_on(wide: SimpleNamespace) -> None:
    """Lists of a pack that is being sampled would be gone in the middle of the loader's epoch."""
    with featstore.open(wide.path, memory="64MiB", threads=1) as g:
        sampler = featstore.NeighborSampler(g, [8, 8])
        drawn = Drawn(sampler, featstore.RandomBatches(SEEDS, 100))
        with lists_kept(g, drawn, 1, 1):
            cache = g.neighbor_cache
            assert cache is not None
            loader = featstore.Loader(g, sampler, SEEDS, 100, strategy="auto")
            next(iter(loader))
        assert g.neighbor_cache is cache
        loader.close()
        with g.budget.reserve("another", g.budget.available + (1 << 20)):
            assert g.neighbor_cache is None, "they are on loan, as the loader's own would be"


def test_how_many_are_worth_it(wide: SimpleNamespace) -> None:
    with featstore.open(wide.path, memory="64MiB") as g:
        whole, table, often = NeighborCache.whole_bytes(g.topology), table_bytes(g.topology), 1 << 20
        assert worth_keeping(whole, table, 2 * whole, often) == (whole, "")
        assert worth_keeping(whole, table, 2 * whole, whole // 4096 - 1)[0] == 0
        n_bytes, why = worth_keeping(whole, table, whole // 2, often)
        assert n_bytes == int(7 / 8 * (whole // 2))
        assert not why
        n_bytes, why = worth_keeping(whole, table, whole // 2, often, in_sequence=True)
        assert n_bytes == 0
        assert "read in sequence" in why
        n_bytes, why = worth_keeping(whole, table, table + whole // 8, often)
        assert n_bytes == 0
        assert "are left" in why
        assert worth_keeping(whole, table, -5, often)[0] == 0


def test_two_packs_sampled_at_once_hold_no_lists_in_the_end(wide: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(wide.path, memory="64MiB", threads=2) as g:
        sampler = featstore.NeighborSampler(g, [5, 5])

        def sample(number: int) -> None:
            featstore.sample_offline(g, sampler, SEEDS, 200, path=tmp_path / str(number), progress=False).close()

        for first in (0, 3, 6):
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(sample, range(first, first + 3)))
            assert g.neighbor_cache is None
            assert "neighbor cache" not in dict(g.memory_report())
