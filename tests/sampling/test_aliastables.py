"""Alias tables in a run file: what draws read is right, the file goes with its samplers; what fails leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import NeighborSampler
from featstore._core import weighted as core
from featstore._core.sampler import Hops
from featstore.errors import BudgetError, CorruptionError, FeatstoreWarning
from featstore.sampling import aliastables, listweights
from featstore.sampling.aliastables import AliasTables
from tests.sampling.test_neighbor import same
from tests.sampling.test_orderedweights import ONE, N, create
from tests.support.programs import run_in_fork


def runs(path: Path) -> list[str]:
    gc.collect()
    return [str(each) for each in path.parent.glob("*.runs")]


def read(made: AliasTables, g: Any, positions: Any) -> Any:
    """Read columns of no list, so that none is checked."""
    return made.read(positions.copy(), g.pool, (Hops(0, True), 0, 0), np.zeros(0, np.int64), 0)


def tables(g: Any) -> AliasTables:
    return AliasTables(g, g.edge_features["w"], g.types.edges[ONE])


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("at_once", [(1, 1), (7, 100), (1 << 16, 1 << 15)])
def test_columns_are_those_of_the_lists(tmp_path: Path, monkeypatch: Any, is_ordered: bool, at_once: tuple[int, int]) -> None:
    _, expected = create(tmp_path / "g", 5000, 1)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        indptr = g.topology.offsets_between(0, N)
        if is_ordered:
            ends = np.stack([np.arange(5000) % N, np.repeat(np.arange(N), np.diff(indptr))])
            made = {"edge_features": {"w": expected}, "progress": False}
            featstore.OutOfCoreGraph.from_edge_index(tmp_path / "o", ends[:, np.lexsort((ends[0], ends[1]))], N, **made).close()
    path = tmp_path / ("o" if is_ordered else "g")
    columns = expected.astype(np.float64)
    core.make_columns(columns, indptr)
    for name, value in zip(("_LISTS", "_EDGES"), at_once, strict=True):
        monkeypatch.setattr(aliastables, name, value)
    with featstore.open(path, memory="32MiB") as g:
        assert (g.topology.edge_ids is None) == is_ordered
        used, made = g.budget.used, tables(g)
        assert g.budget.used <= used + 65536  # tables of checksums
        some = np.random.default_rng(0).permutation(5000)[:2000]
        assert np.array_equal(read(made, g, some).view(np.int64), columns[some].view(np.int64))
        assert str(path) + ".runs" in runs(path)
        made.close()
        made.close()
        assert not runs(path)


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


def test_tables_of_weights_beyond_half_of_the_memory_are_made_with_the_sampler(tmp_path: Path) -> None:
    create(tmp_path / "g", 300_000, 3)
    with featstore.open(tmp_path / "g", memory="64MiB", threads=1) as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(N))
    with featstore.open(tmp_path / "g", memory="4MiB", threads=1) as g:
        sampler = NeighborSampler(g, [3, 3], weight="w")
        assert sampler._weights is not None
        assert sampler._weights._tables
        assert same(sampler.sample(torch.arange(N)), expected)
        del sampler
    assert not runs(tmp_path / "g")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOLCK])
def test_without_room_weights_of_whole_lists_are_read(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    create(tmp_path / "g", 3000, 4)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        sampler = sampler_of(g)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number), "weights")

        monkeypatch.setattr(aliastables.RowFileWriter, "write", full)
        with pytest.warns(FeatstoreWarning, match="weight='w': .* whole lists, .*: .*" + os.strerror(number)):
            assert same(sampler.sample(torch.arange(9)), expected)
        assert not runs(tmp_path / "g")
        assert same(sampler.sample(torch.arange(9)), expected)  # and says it once


def test_a_drive_with_little_room_is_left_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 5)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        monkeypatch.setattr(aliastables, "free_share", lambda folder, fraction: 3000 * 16 - 1)
        with pytest.raises(OSError, match=r"take 46.88 KiB, and half of the free disk is 46.87 KiB: '.*g.runs'"):
            tables(g)
        assert not runs(tmp_path / "g")
        monkeypatch.setattr(aliastables, "free_share", lambda folder, fraction: 3000 * 16)
        tables(g).close()


def test_a_failing_drive_and_damaged_numbers_are_errors(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 6)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        sampler = sampler_of(g)

        def broken(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "weights")

        with monkeypatch.context() as patch:
            patch.setattr(aliastables.RowFileWriter, "write", broken)
            for _ in range(2):
                with pytest.raises(OSError, match="Input/output error"):
                    sampler.sample(torch.arange(9))
        assert not runs(tmp_path / "g")
        sampler.sample(torch.arange(9))
        assert sampler._weights._tables  # once the drive works again
        del sampler
        kind = g.types.edges[ONE]
        wrong = aliastables.EdgeType(kind.key, kind.src, kind.dst, kind.first_list, 5, kind.n_edges - 5)
        with pytest.raises(CorruptionError, match=r"edge \d+ cannot be number [0-4] of the input"):
            AliasTables(g, g.edge_features["w"], wrong)
        assert not runs(tmp_path / "g")
        with g.budget.reserve("another", g.budget.available - 1000), pytest.raises(BudgetError, match="alias tables being made"):
            tables(g)


@pytest.mark.parametrize("verify", ["off", "always"])
def test_a_damaged_table_is_an_error_whatever_is_verified(tmp_path: Path, verify: Any) -> None:
    create(tmp_path / "g", 30_000, 6)
    with featstore.open(tmp_path / "g", memory="32MiB", verify=verify) as g:
        for replace in (False, True):
            for fanout in (3, 70):
                sampler = NeighborSampler(g, [fanout], weight="w", replace=replace)
                sampler._weights._give_back(0)
                sampler.sample(torch.arange(N))
                (file,) = (each for each in tmp_path.glob("g.runs/*/columns"))
                whole = file.read_bytes()
                for other in (2**31 - 7, -(2**31), 600, ~600, 16_000):
                    damaged = np.frombuffer(whole, np.uint8).copy()
                    damaged.view("<i4")[1::2] = other
                    file.write_bytes(damaged)
                    with pytest.raises(CorruptionError, match=r"g\.runs/.*columns"):
                        sampler.sample(torch.arange(N))
                again = NeighborSampler(g, [fanout], weight="w", replace=replace)  # as the error says, beside the old one
                assert again._weights is not sampler._weights
                assert len(again.sample(torch.arange(N)).input_ids)
                file.write_bytes(whole)
                sampler.sample(torch.arange(N))
                del sampler, again
                gc.collect()


def test_weights_that_were_checked_and_are_none_are_damage(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 6)
    with featstore.open(tmp_path / "g", memory="32MiB", verify="off") as g:
        monkeypatch.setattr(listweights, "_check", lambda of: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listweights, "as_doubles", lambda rows: np.full(rows.numel(), np.nan))
            with pytest.raises(CorruptionError, match="'w': a weight is negative, infinite or NaN, and was not when"):
                NeighborSampler(g, [3], weight="w")
        sampler = sampler_of(g)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aliastables, "weights_in_order", lambda *_: (each for each in [np.full(3000, -1.0)]))
            with pytest.raises(CorruptionError, match="'w': a weight is"):
                sampler.sample(torch.arange(9))
        assert not runs(tmp_path / "g")
        sampler._weights._may_make = False
        rows = np.full((3000, 1), np.inf, np.float32)
        monkeypatch.setattr(
            type(sampler._weights._of_types[0].store), "gather", lambda _, ids: torch.from_numpy(rows[: len(ids)])
        )
        with pytest.raises(CorruptionError, match=r"'w': a weight is negative, infinite or NaN.*edge.w.1"):
            sampler.sample(torch.arange(9))


def test_threads_that_draw_meanwhile_do_not_wait(tmp_path: Path, monkeypatch: Any) -> None:
    create(tmp_path / "g", 3000, 7)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        expected = NeighborSampler(g, [3, 3], weight="w").sample(torch.arange(9))
        sampler, begun, go_on, found = sampler_of(g), threading.Event(), threading.Event(), []
        write = aliastables.RowFileWriter.write

        def slow(self: Any, rows: Any) -> None:
            begun.set()
            assert go_on.wait(60)
            write(self, rows)

        monkeypatch.setattr(aliastables.RowFileWriter, "write", slow)
        thread = threading.Thread(target=lambda: found.append(sampler.sample(torch.arange(9))))
        thread.start()
        assert begun.wait(60)
        assert same(sampler.sample(torch.arange(9)), expected)  # of whole lists
        assert not sampler._weights._tables
        go_on.set()
        thread.join()
        assert same(found[0], expected)
        assert sampler._weights._tables


def test_a_sampler_is_made_while_another_thread_makes_tables(tmp_path: Path) -> None:
    create(tmp_path / "g", 3000, 9)
    with featstore.open(tmp_path / "g", memory="32MiB") as g:
        weights = sampler_of(g)._weights

        class Made:
            @property
            def is_damaged(self) -> bool:
                weights._tables[1] = self  # as the other thread, at this moment
                return False

        weights._tables[0] = Made()
        assert NeighborSampler(g, [3], weight="w")._weights is weights
        weights._tables.clear()


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
                    with warnings.catch_warnings(record=True) as said:
                        warnings.simplefilter("always")
                        right = same(sampler.sample(torch.arange(9)), expected) and bool(sampler._weights._tables) == made_before
                        right &= ["forked before their alias tables" in str(each.message) for each in said] == [True] * (
                            not made_before
                        )
                        other = sampler_of(g)  # which shares tables that are there, and makes its own else
                        right &= (other._weights is sampler._weights) == made_before
                        right &= same(other.sample(torch.arange(9)), expected) and bool(other._weights._tables)
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
