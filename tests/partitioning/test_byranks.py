"""Parts that all ranks ask for: rank 0 makes and keeps them, the others read them, and an error of one rank is one of all."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import featstore
from featstore.graph.dataset import OutOfCoreGraph
from featstore.partitioning import assign
from featstore.partitioning.trainparts import TrainParts
from tests.support.programs import run_ranks
from tests.support.ranks import group
from tests.support.refusing import refuses
from tests.support.whole_graph import skewed_graph

pytestmark = pytest.mark.usefixtures("_program_server")

N = 400
TRAIN = np.random.default_rng(1).permutation(N)[:90]
WAYS: dict[str, dict[str, Any]] = {
    "self-reliant": {"method": "ldg", "hops": 2},
    "fennel": {"method": "fennel"},
    "random, in order": {"method": "random", "keep_lists": True, "name": "mine", "seed": 3},
    "given": {"method": np.arange(N) % 3},
}


def make(path: Path) -> Path:
    y = np.arange(N) % 3
    OutOfCoreGraph.create(path, *skewed_graph(N, 6, [1], N // 2), {}, {"y": y}, progress=False).close()
    return path


def contents(parts: Any) -> list[Any]:
    if isinstance(parts, torch.Tensor):
        return parts.tolist()
    return [parts.num_nodes, parts.hops, parts.train_nodes.tolist(), parts.offsets.tolist(), parts.n_nodes.tolist()]


def ran(results: list[tuple[int, str]]) -> None:
    for status, printed in results:
        assert status == 0, printed


def ask(g: OutOfCoreGraph, way: str, **options: Any) -> Any:
    return featstore.partition(g, progress=False, **{"n_parts": 3, "train_idx": TRAIN, **WAYS[way], **options})


def all_ask(rank: int, n_ranks: int, path: Path, folder: Path, way: str) -> None:
    made, real = [0], (assign._assigned, TrainParts.assign)

    def counted(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            made[0] += 1
            return function(*given, **options)

        return call

    assign._assigned, TrainParts.assign = counted(real[0]), counted(real[1])  # type: ignore[method-assign]
    with group(rank, n_ranks, folder), featstore.open(path, memory="32MiB") as g:
        alone = contents(ask(g, way, keep=False, keep_lists=False))
        assert made == [way != "given"], "each for itself"
        assert not g.parts()
        for generation in (1, 2):
            found = ask(g, way)
            assert contents(found) == alone
            (kept,) = g.parts().values()  # at once, on all ranks
            assert kept.generation == generation + 1
            assert contents(kept.load() if kept.hops is None else kept.self_reliant()) == alone
            assert kept.has_lists == ("keep_lists" in WAYS[way])
        assert made[0] == (way != "given") * (1 if rank else 3), "by rank 0 alone"
        if kept.hops is not None:
            view = g.part(rank, progress=False)
            batches = featstore.PartBatches(found, TRAIN, 10)
            sampler = featstore.NeighborSampler(view, [3, 2])
            with featstore.Loader(view, sampler, batches, features=[], strategy="ondemand") as loader:
                assert len(list(loader)) == 3
        del found
        assert "parts" not in g.memory_report()


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_have_what_rank_0_kept(tmp_path: Path, way: str) -> None:
    ran(run_ranks(all_ask, 3, 3, make(tmp_path / "g"), tmp_path, way))
    with featstore.open(tmp_path / "g") as g:
        g.verify(progress=False)


def fail(rank: int, path: Path, folder: Path, way: str) -> None:
    with group(rank, 2, folder), featstore.open(path, memory="32MiB") as g:
        others: dict[str, dict[str, Any]] = {
            "method": {"method": "ranges" if rank else "random", "hops": None},
            "seed": {"seed": rank},
            "train_idx": {"train_idx": TRAIN[rank:]},
            "name": {"name": f"r{rank}"},
        }
        for name, options in others.items():
            refuses(ValueError, f"differ in: .*{name}", partial(ask, g, way, **options))
        refuses(ValueError if rank else RuntimeError, "n_parts must be", partial(ask, g, way, n_parts=1 - rank))
        with patch.multiple(g.partitions, keep=cannot, keep_self_reliant=cannot):
            refuses(RuntimeError if rank else OSError, "too many", lambda: ask(g, way))
        with patch.object(g.partitions, "adopt", cannot):
            refuses(OSError if rank else RuntimeError, "too many", lambda: ask(g, way))
        assert contents(ask(g, way)) == contents(ask(g, way, keep=False)), "all of them work together again"
        torch.distributed.barrier()
        if not rank:
            ask(g, way, name="alone", rank=0, world_size=1)
            refuses(ValueError, "rank=0, world_size=1 works alone", lambda: ask(g, way, rank=0, world_size=3))


def cannot(*given: Any) -> None:
    raise OSError("too many open files")


@pytest.mark.parametrize("way", ["self-reliant", "fennel"])
def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path, way: str) -> None:
    ran(run_ranks(fail, 2, make(tmp_path / "g"), tmp_path, way))


def apart(rank: int, path: Path, folder: Path, how: str) -> None:
    own = Path(shutil.copytree(path, folder / "copy")) if rank else path
    with group(rank, 2, folder), featstore.open(own, memory="32MiB") as g:
        if how == "machines":  # whose file systems have the same inode by chance
            real = os.stat

            def stat(of: Any, *given: Any, **options: Any) -> Any:
                return real(path if of == g.path else of, *given, **options)

            os.stat = stat  # type: ignore[assignment]
        words = "another directory than that of rank 0" if rank or how == "machines" else "is that of rank 0, and another rank"
        refuses(ValueError if rank or how == "inodes" else RuntimeError, words, lambda: ask(g, "self-reliant"))
        torch.distributed.barrier()
        assert bool(g.parts()) == (how == "machines" and not rank)
        assert contents(ask(g, "self-reliant", rank=0, world_size=1)) == contents(ask(g, "self-reliant", keep=False))


@pytest.mark.parametrize("how", ["inodes", "machines"])
def test_ranks_of_two_copies_of_a_dataset_are_refused(tmp_path: Path, how: str) -> None:
    ran(run_ranks(apart, 2, make(tmp_path / "g"), tmp_path, how))


def test_ranks_need_a_process_group(tmp_path: Path) -> None:
    with featstore.open(make(tmp_path / "g")) as g:
        refuses(ValueError, "no process group", lambda: ask(g, "fennel", rank=0, world_size=2))
        refuses(ValueError, "go together", lambda: ask(g, "fennel", rank=0, keep=False))
        assert len(ask(g, "fennel", rank=0, world_size=1)) == N
