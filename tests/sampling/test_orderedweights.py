"""Weights put in the order of lists, against NumPy: in any number of parts, of any type; what fails leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import NeighborSampler
from featstore.errors import BudgetError, CorruptionError, FeatstoreWarning
from featstore.sampling import orderedweights
from featstore.sampling.orderedweights import OrderedWeights
from tests.sampling.test_neighbor import same
from tests.support.programs import run_in_fork

N = 60
ONE = ("_", "_", "_")


def create(path: Path, n_edges: int, seed: int, dtype: Any = np.float32) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make a graph of edges in no order; return its weights, and those in the order of the lists."""
    rng = np.random.default_rng(seed)
    edges, weights = rng.integers(0, N, (2, n_edges)), rng.pareto(1.0, n_edges).astype(dtype)
    order = np.lexsort((edges[0], edges[1]))
    features = {"w": weights, "column": weights[:, None]}
    featstore.OutOfCoreGraph.from_edge_index(path, edges, N, edge_features=features, progress=False, overwrite=True).close()
    return weights, weights[order]


def ordered(g: Any, name: str = "w") -> OrderedWeights:
    return OrderedWeights(g, g.edge_features[name], g.types.edges[ONE], g.topology.edge_ids)


def everything(g: Any, made: OrderedWeights) -> Any:
    n = g.num_edges
    some = np.random.default_rng(0).permutation(n)
    found = np.empty(n)
    found[some] = made.read(some.copy(), g.pool)
    return found


def runs(path: Path) -> list[str]:
    gc.collect()
    return [str(each) for each in path.parent.glob("*.runs")]


@given(
    n_edges=st.integers(1, 900),
    seed=st.integers(0, 99),
    at_once=st.sampled_from([0, 1, 4, 256]),
    most=st.sampled_from([1, 7, 900]),
)
def test_equal_numpy_in_any_number_of_parts(tmp_path_factory: Any, n_edges: int, seed: int, at_once: int, most: int) -> None:
    path = tmp_path_factory.mktemp("ordered") / "g"
    _, expected = create(path, n_edges, seed)
    with pytest.MonkeyPatch.context() as patch, featstore.open(path, memory="32MiB", threads=1) as g:
        for name, value in (("_IDS_A_PART", at_once), ("_MOST_IDS", most), ("_MEMORY_FRACTION", 0)):
            patch.setattr(orderedweights, name, value)
        if g.topology.edge_ids is not None:
            left = g.budget.used
            made = ordered(g, ("w", "column")[seed % 2])
            assert g.budget.used <= left + 65536  # tables of checksums
            assert np.array_equal(everything(g, made), expected)
            made.close()
    assert not runs(path)


@pytest.mark.parametrize("n_edges", [1, 1000, 10**6, 10**9, 10**11])
@pytest.mark.parametrize("available", [0, 1 << 20, 16 << 20, 1 << 30, 1 << 40])
def test_files_are_opened_for_many_numbers_at_once(n_edges: int, available: int) -> None:
    found = []

    class Left:
        def reserve(self, holder: str, n_bytes: int) -> Any:
            found.append(n_bytes)

    Left.available = available  # type: ignore[attr-defined]
    memory = orderedweights._Memory(Left(), n_edges)  # type: ignore[arg-type]
    assert memory.n_rows * memory.n_parts >= n_edges
    assert memory.n_parts == 1 or memory.n_ids >= 256 * memory.n_parts
    assert found[0] <= max(available / 2, 2 * (64 * 32 * 256 * n_edges) ** 0.5 * 1.5) + (1 << 20) + 200_000


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.uint8])
def test_every_type_is_exact(tmp_path: Path, dtype: Any) -> None:
    _, expected = create(tmp_path / "g", 5000, 1, dtype)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        made = ordered(g)
        assert np.array_equal(everything(g, made), expected.astype(np.float64))
        assert g.path + ".runs" in runs(tmp_path / "g")
        made.close()
        made.close()
        assert not runs(tmp_path / "g")


def sampler_of(g: Any) -> Any:
    sampler = NeighborSampler(g, [3, 3], weight="w")
    sampler._weights._give_back(0)
    assert not sampler._weights.in_memory
    return sampler


def test_the_file_goes_with_its_samplers(tmp_path: Path) -> None:
    create(tmp_path / "g", 3000, 2)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        sampler, other = sampler_of(g), NeighborSampler(g, [3], weight="w")
        assert not runs(tmp_path / "g")
        assert same(sampler.sample(torch.arange(9)), expected)
        (folder,) = runs(tmp_path / "g")
        other.sample(torch.arange(9))
        assert runs(tmp_path / "g") == [folder]
        del sampler
        assert runs(tmp_path / "g") == [folder]
        del other
        assert not runs(tmp_path / "g")


def test_weights_beyond_half_of_the_memory_are_in_order_when_the_sampler_is_made(tmp_path: Path) -> None:
    create(tmp_path / "g", 300_000, 3)
    with featstore.open(tmp_path / "g", memory="64MiB", threads=1) as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(N))
    with featstore.open(tmp_path / "g", memory="4MiB", threads=1) as g:
        sampler = NeighborSampler(g, [3, 3], weight="w")
        assert sampler._weights is not None
        assert sampler._weights._ordered
        assert same(sampler.sample(torch.arange(N)), expected)
        del sampler
    assert not runs(tmp_path / "g")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOLCK])
def test_without_room_weights_are_read_as_they_were_given(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    create(tmp_path / "g", 3000, 4)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        sampler = sampler_of(g)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number), "weights")

        monkeypatch.setattr(orderedweights.RowFileWriter, "write", full)
        with pytest.warns(FeatstoreWarning, match="weight='w': .* at random, .*: .*" + os.strerror(number)):
            assert same(sampler.sample(torch.arange(9)), expected)
        assert not runs(tmp_path / "g")
        assert same(sampler.sample(torch.arange(9)), expected)  # and says it once


def test_a_drive_with_little_room_is_left_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 5)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        monkeypatch.setattr(orderedweights, "free_share", lambda folder, fraction: 3000 * 12 - 1)
        with pytest.raises(OSError, match=r"takes 35.16 KiB, and half of the free disk is 35.16 KiB: '.*g.runs'"):
            ordered(g)
        assert not runs(tmp_path / "g")
        monkeypatch.setattr(orderedweights, "free_share", lambda folder, fraction: 3000 * 12)
        ordered(g).close()


def test_a_failing_drive_and_damaged_numbers_are_errors(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 6)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        sampler = sampler_of(g)

        def broken(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "weights")

        with monkeypatch.context() as patch:
            patch.setattr(orderedweights.RowFileWriter, "write", broken)
            for _ in range(2):
                with pytest.raises(OSError, match="Input/output error"):
                    sampler.sample(torch.arange(9))
        assert not runs(tmp_path / "g")
        sampler.sample(torch.arange(9))
        assert sampler._weights._ordered  # once the drive works again
        del sampler
        kind = g.types.edges[ONE]
        wrong = orderedweights.EdgeType(kind.key, kind.src, kind.dst, kind.first_list, 5, kind.n_edges - 5)
        with pytest.raises(CorruptionError, match=r"edge \d+ cannot be number [0-4] of the input"):
            OrderedWeights(g, g.edge_features["w"], wrong, g.topology.edge_ids)
        assert not runs(tmp_path / "g")
        with g.budget.reserve("another", g.budget.available - 1000), pytest.raises(BudgetError, match="weights put in order"):
            ordered(g)


def test_threads_that_draw_meanwhile_do_not_wait(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 7)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        sampler, begun, go_on, found = sampler_of(g), threading.Event(), threading.Event(), []
        write = orderedweights.RowFileWriter.write

        def slow(self: Any, rows: Any) -> None:
            begun.set()
            assert go_on.wait(60)
            write(self, rows)

        monkeypatch.setattr(orderedweights.RowFileWriter, "write", slow)
        thread = threading.Thread(target=lambda: found.append(sampler.sample(torch.arange(9))))
        thread.start()
        assert begun.wait(60)
        assert same(sampler.sample(torch.arange(9)), expected)  # by the numbers of edges
        assert not sampler._weights._ordered
        go_on.set()
        thread.join()
        assert same(found[0], expected)
        assert sampler._weights._ordered


def in_a_fork(path: str) -> None:
    with featstore.open(path, memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        for made_before in (False, True):
            sampler = sampler_of(g)
            if made_before:
                assert same(sampler.sample(torch.arange(9)), expected)
            child = os.fork()
            if not child:
                right = False
                try:
                    right = same(sampler.sample(torch.arange(9)), expected) and bool(sampler._weights._ordered) == made_before
                finally:
                    os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert same(sampler.sample(torch.arange(9)), expected)  # the child removed nothing
            del sampler


@pytest.mark.usefixtures("_program_server")
def test_a_forked_process_reads_the_file_and_makes_none(tmp_path: Path) -> None:
    create(tmp_path / "g", 3000, 8)
    run_in_fork(in_a_fork, str(tmp_path / "g"))
    assert not runs(tmp_path / "g")
