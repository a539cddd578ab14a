"""Ranks of which one is lost, or which share files: the others fail by torch's error and leave nothing, and torchrun goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import featstore
from featstore import EpochSampler, Ginex, LaborSampler, Loader, NeighborSampler, OnDemand, Packed, Streamed, Superbatch
from featstore.gather import sharedmemory
from tests.support.programs import run_ranks
from tests.support.ranks import end, group, held_port
from tests.support.refusing import refuses

pytestmark = [pytest.mark.usefixtures("_program_server"), pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")]

ROOT = Path(__file__).resolve().parents[2]
N, BATCH = 2000, 20
SEEDS = np.random.default_rng(2).permutation(N)[:640]
WAYS: dict[str, tuple[Any, Any]] = {
    "ondemand": (NeighborSampler, lambda runs: OnDemand(cache=0.1, policy="lru")),
    "superbatch": (NeighborSampler, lambda runs: Superbatch(length=3, cache=0.1, run_dir=runs)),
    "ginex": (LaborSampler, lambda runs: Ginex(length=4, cache=0.1, run_dir=runs)),
    "streamed": (EpochSampler, lambda runs: Streamed(length=4, cache=0.1, run_dir=runs)),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("lost") / "g"
    pairs = np.stack([(N * rng.random(8 * N) ** 2).astype(np.int64), rng.integers(0, N, 8 * N)])
    x = rng.standard_normal((N, 8)).astype(np.float32)
    featstore.OutOfCoreGraph.from_edge_index(path, pairs, N, {"x": x}, progress=False).close()
    return path


def train_until_one_is_lost(rank: int, path: Path, folder: Path, way: str, how: str) -> None:
    """Rank 1 is lost in the middle of an epoch: killed, or stopped, so that it neither answers nor ends."""
    sampler, strategy = WAYS[way]
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=2) as g:
        draws = sampler(g, [4, 3], window=5, seed=3) if sampler is EpochSampler else sampler(g, [4, 3], seed=3)
        loader = Loader(g, draws, SEEDS, BATCH, strategy=strategy(folder / "runs"))
        assert len(loader) == 16
        try:
            for step, _ in enumerate(loader):
                if rank and step == 5:
                    (folder / "pid").write_text(str(os.getpid()))
                    (folder / "files").write_text(str(sorted(os.listdir(folder))))
                    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                if step == 5 and how == "stopped":
                    while not (folder / "files").exists():  # until then a busy machine keeps rank 1
                        time.sleep(0.01)
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
                try:
                    dist.all_reduce(torch.ones(1))
                except RuntimeError:
                    end(int((folder / "pid").read_text()))
                    raise
        except RuntimeError as error:
            assert step == 5
            print(f"torch says: {error}")
        begin = time.monotonic()
        loader.close()
        assert time.monotonic() - begin < 30
        assert not [each.name for each in threading.enumerate() if each.name.startswith("featstore")]


@pytest.mark.parametrize(("way", "how"), [*((way, "killed") for way in WAYS), ("superbatch", "stopped"), ("streamed", "stopped")])
def test_the_others_fail_by_torch_and_leave_nothing(dataset: Path, tmp_path: Path, way: str, how: str) -> None:
    (ended, printed), (status, of_lost) = run_ranks(train_until_one_is_lost, 2, dataset, tmp_path, way, how)
    assert status == -signal.SIGKILL, of_lost
    assert ended == 0, printed
    assert "torch says: " in printed
    assert ("imed out" in printed) == (how == "stopped")
    assert ("runs" in (tmp_path / "files").read_text()) == (way != "ondemand")
    assert not (tmp_path / "runs").exists(), "the files of the lost rank go with those of the last one"


def lose_with_a_shared_cache(rank: int, path: Path, folder: Path, when: str) -> None:
    """Rank 1 is killed while it holds the shared caches, or while it fills one, before rank 0 has asked for it."""
    sharedmemory.DIRECTORY = os.fspath(folder / "shm")
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=1) as g:
        if when == "filling" and rank:
            with patch.object(sharedmemory, "pwrite_all", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                g.cache("x", 0.2, shared=2)
        if when == "filling":
            refuses(RuntimeError, "", dist.barrier)  # the other one is gone
        g.cache("x", 0.2, shared=2 if when == "held" else 1)
        if when == "held":
            g.cache_neighbors("64KiB", shared=2)
            dist.barrier()
            assert not os.listdir(folder / "shm"), "all hold it: the names are gone"
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
            refuses(RuntimeError, "", dist.barrier)
        assert not os.listdir(folder / "shm")
        with Loader(g, NeighborSampler(g, [4, 3], seed=3), SEEDS, BATCH, strategy="ondemand", rank=0, world_size=1) as loader:
            assert sum(1 for _ in loader) == 32
            assert g.features["x"].stats()["cache"]["hits"] > 0
    print("went on")


@pytest.mark.parametrize("when", ["held", "filling"])
def test_no_shared_cache_is_left_behind(dataset: Path, tmp_path: Path, when: str) -> None:
    (tmp_path / "shm").mkdir()
    (ended, printed), (status, of_lost) = run_ranks(lose_with_a_shared_cache, 2, dataset, tmp_path, when)
    assert status == -signal.SIGKILL, of_lost
    assert ended == 0, printed
    assert "went on" in printed
    assert not os.listdir(tmp_path / "shm")


def train_beside(rank: int, path: Path, folder: Path) -> None:
    """Run all that two ranks may do at once to the same files, and compare with a rank that has them for itself."""
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=2) as g:
        sampler, x = NeighborSampler(g, [4, 3], seed=3), g.features["x"][:]
        with Loader(g, sampler, SEEDS, BATCH, strategy="ondemand", rank=0, world_size=1) as whole:
            expected = {batch.index: batch.input_ids for batch in whole}
        pack = Packed(folder / "p", cache=0.2)
        ways: list[tuple[Any, dict[str, Any]]] = [
            ("auto", {}),  # no rate is kept yet: both measure the drive and keep what they found
            (Superbatch(length=3, cache=0.1, run_dir=folder / "runs"), {}),
            (pack, {"rank": 0, "world_size": 1}),  # both want the layout made
        ]
        for strategy, options in ways:
            dist.barrier()
            drawn = (None, None) if strategy is pack else (sampler, SEEDS)
            with Loader(g, *drawn, None if strategy is pack else BATCH, strategy=strategy, **options) as loader:
                for step, batch in enumerate(loader):
                    assert batch.index == (step if options else 2 * step + rank)
                    assert torch.equal(batch.x, x[batch.input_ids])
                    assert torch.equal(batch.input_ids, expected[batch.index])


def test_ranks_that_share_a_run_directory_a_pack_and_estimates(dataset: Path, tmp_path: Path) -> None:
    with featstore.open(dataset, memory="32MiB") as g:
        sampler = NeighborSampler(g, [4, 3], seed=3)
        featstore.sample_offline(g, sampler, SEEDS, BATCH, path=tmp_path / "p", progress=False).close()
    before = set(os.listdir(dataset.parent))
    for status, printed in run_ranks(train_beside, 2, dataset, tmp_path):
        assert status == 0, printed
    assert os.listdir(tmp_path) == ["p"]
    assert set(os.listdir(dataset.parent)) == before
    with (
        featstore.open(dataset, memory="32MiB") as g,
        Loader(g, strategy=Packed(tmp_path / "p", cache=0.2), rank=0, world_size=1) as one,
    ):
        assert one.stats()["layout"]["made"] is False
        assert g.verify()["pages"]


# -- torchrun ------------------------------------------------------------------------------------------------------------------

WORKER = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np, torch, torch.distributed as dist
import featstore

folder, lost = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # where ranks do not find each other, torchrun starts them again
rank, n = dist.get_rank(), dist.get_world_size()
while n < 2 and not os.path.exists(f"{folder}/lost"):
    time.sleep(0.05)  # torchrun starts it again when the other comes
with featstore.open(f"{folder}/g", memory="32MiB", threads=1) as g:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=3)
    strategy = featstore.Superbatch(length=3, cache=0.1, run_dir=f"{folder}/runs")
    loader = featstore.Loader(g, sampler, np.arange(300), 20, strategy=strategy)
    steps = []
    if os.path.exists(f"{folder}/checkpoint.pt"):
        loader_state, steps = torch.load(f"{folder}/checkpoint.pt")
        loader.load_state_dict(loader_state)
    while (epoch := loader.state_dict()["epoch"]) < 2:
        for batch in loader:
            dies = lost == "node" or (lost == "process" and rank == n - 1)
            if dies and epoch == 1 and batch.index // n == 2 and not os.path.exists(f"{folder}/lost"):
                open(f"{folder}/lost", "w").close()
                if lost == "node":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            found = [None] * n
            dist.all_gather_object(found, (epoch, batch.index, batch.seeds.tolist(), int(batch.input_ids.sum())))
            steps.append(found)
            if rank == 0:
                torch.save((loader.state_dict(), steps), f"{folder}/checkpoint.tmp")
                os.replace(f"{folder}/checkpoint.tmp", f"{folder}/checkpoint.pt")
    loader.close()
dist.destroy_process_group()
"""


def torchrun(folder: Path, *options: str, lost: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, os.fspath(folder / "worker.py"), os.fspath(folder), lost]
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("lost", ["node", pytest.param("process", marks=pytest.mark.stress)])
def test_torchrun_goes_on_with_the_batches_that_were_to_come(dataset: Path, tmp_path: Path, lost: str) -> None:
    """With as many processes after one was killed; with one node after the other was, its torchrun and its process."""
    (tmp_path / "g").symlink_to(dataset)
    (tmp_path / "worker.py").write_text(WORKER)
    with held_port() as port:
        if lost == "process":
            started = [torchrun(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=4", lost=lost)]
        else:
            times = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"  # a busy torchrun is not a dead one
            common = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=lost", "--nnodes=1:2"]
            started = [
                torchrun(tmp_path, *common, f"--rdzv-conf={times},is_host={is_host}", "--max-restarts=4", lost=way)
                for is_host, way in ((1, "none"), (0, "node"))
            ]
        try:
            errors = [each.communicate(timeout=500)[1] for each in started]
        finally:
            for each in started:
                each.terminate()
                each.communicate()
    assert [each.returncode for each in started] == [0] + [-signal.SIGKILL] * (lost == "node"), errors
    assert not (tmp_path / "runs").exists()
    steps = torch.load(tmp_path / "checkpoint.pt")[1]
    assert [len(each) for each in steps] == [2] * 8 + [2] * 2 + ([2] * 6 if lost == "process" else [1] * 11)
    with featstore.open(dataset, memory="32MiB") as g:
        options: dict[str, Any] = {"strategy": "ondemand", "rank": 0, "world_size": 1}
        with Loader(g, NeighborSampler(g, [4, 3], seed=3), np.arange(300), BATCH, **options) as whole:
            for epoch in range(2):
                trained = [each for step in steps for each in step if each[0] == epoch]
                assert sorted(seed for each in trained for seed in each[2]) == list(range(300))
                expected = {batch.index: (batch.seeds.tolist(), int(batch.input_ids.sum())) for batch in whole}
                same = [each for each in trained if expected.get(each[1]) == (each[2], each[3])]
                assert len(same) >= 14, "all but those of a last step that was divided"
