"""An epoch whose samples are ten times as large as the budget is drawn within it, in a memory control group, on both forms."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.testing.faults import run_in_child
from featstore.testing.limits import memory_group

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
        with featstore.Loader(g, sampler, np.arange(N), BATCH, features=[], labels=None, seed=2) as loader:
            for batch in loader:
                # As stored: ids, the source of each edge, and how many each destination has; 4 bytes each.
                n_numbers += len(batch.input_ids) + sum(len(block.src) + block.n_dst for block in batch.blocks)
        peak = status("VmHWM")
        assert 4 * n_numbers >= 10 * BUDGET, f"{4 * n_numbers} bytes of samples are few"
        assert g.budget.peak <= BUDGET
        assert peak - before <= BUDGET + BESIDE, f"{peak - before} bytes more than before"
        assert sampler.stats()["spilled_bytes"] > 3 * BUDGET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_an_epoch_of_ten_times_its_memory(tmp_path: Path, topology: str) -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, N, N * DEGREE).astype(np.int32)
    options = {"chunk_bytes": "64KiB"} if topology == "chunked" else {}
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.arange(0, N * DEGREE + 1, DEGREE), indices, topology=topology, progress=False, **options
    ).close()
    with memory_group(GROUP) as group:
        run_in_child(sample_within, str(tmp_path / "g"), prepare=group.enter)
