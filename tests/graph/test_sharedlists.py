"""Neighbour caches that ranks share: the lists of one of their own, made once, a share charged to each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import BudgetError, CorruptionError
from featstore.gather import sharedmemory
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.graph.neighbors.sharedlists import SharedNeighborCache
from featstore.storage.catalog import read_catalog
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import academic

pytestmark = pytest.mark.usefixtures("small_pieces", "_program_server")

_FORKS = multiprocessing.get_context("forkserver")
N, E = 2000, 20_000
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in_out_ratio": ("in_out_ratio", {}),
    "random": ("random", {"seed": 5}),
    "saved_io": ("saved_io", {"counts": np.arange(N) % 9}),
    "cross_partition": ("cross_partition", {"parts": np.arange(N) % 5}),
    "with numbers": ("in_out_ratio", {"edges": True}),
}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One graph in both forms, whose edges have numbers in a file."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("graphs")
    pairs = np.stack([(N * rng.random(E) ** 2).astype(np.int64), rng.integers(0, N, E)])
    options: dict[str, Any] = {"memory": "64MiB", "progress": False}
    featstore.OutOfCoreGraph.from_edge_index(folder / "csc", pairs, N, **options).close()
    options |= {"topology": "chunked", "chunk_bytes": 4096}
    featstore.OutOfCoreGraph.from_edge_index(folder / "chunked", pairs, N, **options).close()
    return {"csc": folder / "csc", "chunked": folder / "chunked"}


@contextlib.contextmanager
def opened(path: Path, n: int) -> Iterator[list[Any]]:
    """Open the dataset once for each of ``n`` ranks, all in this process."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(featstore.open(path, memory="64MiB")) for _ in range(n)]


def sampled(g: Any, edges: bool = False) -> list[Any]:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=2, edges=edges)
    return [sampler.sample(torch.arange(first, first + 300)) for first in range(0, N - 300, 300)]


def check_same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine.input_ids, theirs.input_ids)
        for a, b in zip(mine.blocks, theirs.blocks, strict=True):
            assert torch.equal(a.src, b.src)
            assert torch.equal(a.dst, b.dst)
            assert (a.edge_pos is None and b.edge_pos is None) or torch.equal(a.edge_pos, b.edge_pos)


# Of bytes for a part of the lists, and for all of them.
@pytest.mark.parametrize(("way", "form", "budget"), covering(WAYS, ["csc", "chunked"], ["50kB", "1MiB"]))
def test_as_a_cache_of_its_own(graphs: dict[str, Path], shared_memory: Path, form: str, way: str, budget: str) -> None:
    policy, options = WAYS[way]
    edges = options.get("edges", False)
    with opened(graphs[form], 4) as (own, *ranks):
        own.cache_neighbors(budget, policy, **options, progress=False)
        expected, batches = own.neighbor_cache.to_arrays(), sampled(own, edges)
        assert own.neighbor_cache.whole == (budget == "1MiB")
        for number, g in enumerate(ranks):
            assert len(os.listdir(shared_memory)) == (number > 0)
            g.cache_neighbors(budget, policy, **options, progress=False, shared=3)
            assert isinstance(g.neighbor_cache, SharedNeighborCache)
            found = g.neighbor_cache.to_arrays()
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert array.dtype == found[name].dtype
                assert np.array_equal(array, found[name])
                assert not found[name].flags.writeable
            check_same(sampled(g, edges), batches)
            n_bytes = sum(array.nbytes for array in expected.values())
            assert g.memory_report()["neighbor cache"] == -(-n_bytes // 3)
            assert g.neighbor_cache.n_cached == own.neighbor_cache.n_cached
        assert not os.listdir(shared_memory)
        for g in ranks:
            g.cache_neighbors(0)
            assert g.neighbor_cache is None
            assert "neighbor cache" not in g.memory_report()


def _rank(path: str, folder: str, link: Any) -> None:
    sharedmemory.DIRECTORY = folder
    os.environ.update(MASTER_PORT="1", LOCAL_WORLD_SIZE="3")
    builds = list[int]()
    build = NeighborCache.build.__func__  # type: ignore[attr-defined]
    NeighborCache.build = classmethod(lambda *args, **options: builds.append(1) or build(*args, **options))  # type: ignore
    with featstore.open(path, memory="64MiB") as g:
        g.cache_neighbors("50kB", progress=False, shared=True)
        link.send(len(builds))
        link.recv()
        link.send([batch.input_ids.numpy() for batch in sampled(g)])
        link.recv()


def test_processes(graphs: dict[str, Path], shared_memory: Path) -> None:
    """One of the ranks makes the cache; one that is killed takes nothing from the others."""
    ranks, links = [], []
    try:
        for _ in range(3):
            link, there = _FORKS.Pipe()
            links.append(link)
            ranks.append(_FORKS.Process(target=_rank, args=(str(graphs["csc"]), str(shared_memory), there)))
            ranks[-1].start()
            there.close()
        assert sorted(link.recv() for link in links) == [0, 0, 1]
        assert not os.listdir(shared_memory)
        ranks[0].kill()
        ranks[0].join()
        with featstore.open(graphs["csc"], memory="64MiB") as g:
            expected = [batch.input_ids.numpy() for batch in sampled(g)]
        for rank, link in zip(ranks[1:], links[1:], strict=True):
            link.send(None)
            assert all(map(np.array_equal, link.recv(), expected))
            link.send(None)
            rank.join(60)
            assert rank.exitcode == 0
    finally:
        for rank, link in zip(ranks, links, strict=True):
            rank.kill()
            rank.join()
            rank.close()
            link.close()


def test_a_saved_cache_is_loaded(graphs: dict[str, Path], tmp_path: Path, shared_memory: Path) -> None:
    """By the first rank, into shared memory; a damaged one is an error that leaves nothing."""
    shutil.copytree(graphs["csc"], tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        g.cache_neighbors("50kB", save=True, progress=False)
        expected = g.neighbor_cache.to_arrays()
        assert "cache/neighbors" in read_catalog(tmp_path / "g").extra
    with opened(tmp_path / "g", 2) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeighborCache, "build", None)
        for g in ranks:
            g.cache_neighbors("50kB", progress=False, shared=2)
            for name, array in g.neighbor_cache.to_arrays().items():
                assert np.array_equal(array, expected[name])
    (path,) = (tmp_path / "g").glob("cache.neighbors.records.*.rows")
    data = path.read_bytes()
    path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        refuses(CorruptionError, "", lambda: g.cache_neighbors("50kB", progress=False, shared=2))
        assert g.neighbor_cache is None
        assert "neighbor cache" not in g.memory_report()


def test_what_decides_differently_is_apart(graphs: dict[str, Path], shared_memory: Path) -> None:
    """Policies and their inputs, sizes, edge ids, forms of one adjacency: each has a copy."""
    ways: list[tuple[str, dict[str, Any]]] = [
        *(("csc", {"policy": policy, **options}) for policy, options in WAYS.values()),
        ("csc", {"policy": "random", "seed": 6}),
        ("csc", {"policy": "saved_io", "counts": np.arange(N) % 8}),
        ("csc", {"budget": "60kB"}),
        ("csc", {"budget": "1MiB"}),
        ("chunked", {}),
    ]
    found = set[str]()
    for form, options in ways:
        with featstore.open(graphs[form], memory="64MiB") as g:
            g.cache_neighbors(**{"budget": "50kB", "progress": False, "shared": 2, **options})
            found |= set(os.listdir(shared_memory))
        assert not os.listdir(shared_memory)
    assert len(found) == len(ways)


def test_refused(graphs: dict[str, Path], tmp_path: Path, shared_memory: Path) -> None:
    with featstore.open(graphs["csc"], memory="8MiB") as g:
        for options in ({}, {"budget": "10%"}, {"budget": "50kB", "save": True}):
            refuses(ValueError, "budget= in bytes", lambda options=options: g.cache_neighbors(**options, shared=2))  # type: ignore
        refuses(ValueError, "not a static one", lambda: g.cache_neighbors("50kB", "lru", shared=2))
        refuses(BudgetError, "does not fit 12000 bytes", lambda: g.cache_neighbors("12kB", shared=2))
        assert g.topology.num_edges == E
        with g.budget.reserve("other", g.budget.available - 20_000):
            refuses(BudgetError, "neighbor cache needs", lambda: g.cache_neighbors("50kB", shared=2))
        assert g.neighbor_cache is None
        assert "neighbor cache" not in g.memory_report()
    with academic(papers=3000).create(tmp_path / "g") as g:
        refuses(NotImplementedError, "several lists", lambda: g.cache_neighbors("100kB", "random", shared=2))
    assert not os.listdir(shared_memory)
