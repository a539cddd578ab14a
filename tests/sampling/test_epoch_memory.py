"""Epochs that do not fit: one ten times as large as its budget, in a memory control group; few run files; damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import CorruptionError
from featstore.sampling.window import least_bytes
from featstore.testing.faults import flipped, run_in_child
from featstore.testing.limits import memory_group
from tests.sampling.test_epochwide import EpochGraph, batches_of, window_of
from tests.sampling.test_neighbor import same
from tests.support.array_graphs import random_graph
from tests.support.sampled import one_in

N, DEGREE, BATCH = 60_000, 15, 150
FANOUTS = [10, 10, 5]
BUDGET = 24_000_000
GROUP = 300 << 20  # torch itself takes about 200 MB
BESIDE = 24 << 20  # what Python, its threads and LMDB take beside the budget


def status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def sample_within(path: str) -> None:
    with featstore.open(path, memory=BUDGET, threads=2) as g:
        sampler = featstore.EpochSampler(g, FANOUTS, seed=1)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        n_numbers = 0
        with pytest.warns(featstore.PerformanceWarning, match="window='auto': an epoch has"):
            loader = featstore.Loader(g, sampler, np.arange(N), BATCH, features=[], labels=None, seed=2)
        with loader:
            for batch in loader:
                # As stored: ids, the source of each edge, and how many each destination has; 4 bytes each.
                n_numbers += len(batch.input_ids) + sum(len(block.src) + block.n_dst for block in batch.blocks)
        peak = status("VmHWM")
        assert 4 * n_numbers >= 10 * BUDGET, f"{4 * n_numbers} bytes of samples are few"
        assert g.budget.peak <= BUDGET
        assert peak - before <= BUDGET + BESIDE, f"{peak - before} bytes more than before"
        assert sampler.stats()["spilled_bytes"] > 3 * BUDGET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
@pytest.mark.parametrize("topology", one_in(2, ["csc", "chunked"]))
def test_an_epoch_of_ten_times_its_memory(tmp_path: Path, topology: str) -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, N, N * DEGREE).astype(np.int32)
    options = {"chunk_bytes": "64KiB"} if topology == "chunked" else {}
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.arange(0, N * DEGREE + 1, DEGREE), indices, topology=topology, progress=False, **options
    ).close()
    with memory_group(GROUP) as group:
        run_in_child(sample_within, str(tmp_path / "g"), prepare=group.enter)


def test_a_worker_spills_into_one_file_however_often(tmp_path: Path) -> None:
    """A file for each time that memory was full would be more than a process may have open."""
    g = EpochGraph.of(random_graph(20_000, 15), tmp_path)
    batches = batches_of(np.random.default_rng(1).permutation(20_000), 1000)
    sampler = featstore.NeighborSampler(g, [8, 8], seed=3)
    for n_workers in (1, 2):
        n_bytes = n_workers**2 * least_bytes(g, sampler.fanouts, len(batches), False)
        with window_of(sampler, g, batches, tmp_path, n_bytes=n_bytes, n_workers=n_workers) as window:
            window.draw()
            files = list(tmp_path.glob("run-*"))
            assert 1 <= len(files) <= n_workers
            most = max(len(found) for each in window._drawn._sections for found in each.values())
            assert most > 4 or n_workers > 1
            assert sum(file.stat().st_size for file in files) == window.spilled_bytes
            for k in (0, 7, len(batches) - 1):
                assert same(window.sample(k), sampler.sample(torch.from_numpy(batches[k]), 0, k))


def test_damage_to_what_was_spilled_is_found(tmp_path: Path) -> None:
    g = EpochGraph.of(random_graph(3000, 20), tmp_path)
    batches = batches_of(np.arange(600), 100)
    sampler = featstore.NeighborSampler(g, [10, 5], seed=3)
    least = least_bytes(g, sampler.fanouts, len(batches), False)
    with window_of(sampler, g, batches, tmp_path, n_bytes=least, n_workers=1) as window:
        window.draw()
        (path,) = tmp_path.glob("run-*")
        with flipped(path, path.stat().st_size // 2, 3):
            found = 0
            for k in range(len(batches)):
                try:
                    window.sample(k)
                except CorruptionError as error:
                    assert error.path == str(path)
                    assert error.offset is not None
                    found += 1
            assert found == 1
        assert same(window.sample(2), sampler.sample(torch.from_numpy(batches[2]), 0, 2))
