"""Sample from lists on the drive, batch by batch and an epoch at a time: python examples/epoch_sampling.py

The batches are the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import featstore


def make_dataset(path: Path, n: int) -> None:
    """Create a random graph of ``n`` nodes with 20 neighbours each."""
    rng = np.random.default_rng(0)
    indptr = np.arange(0, 20 * n + 1, 20)
    indices = rng.integers(0, n, 20 * n)
    seeds = rng.choice(n, n // 10, replace=False)
    features = {"x": rng.standard_normal((n, 16), dtype=np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, {"train_idx": seeds}, progress=False).close()


def bytes_read() -> int:
    """Count the bytes that this process has fetched from drives so far."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))


def run(path: Path) -> None:
    """Time an epoch of each sampler, and compare their batches."""
    first: dict[int, torch.Tensor] = {}
    for kind in (featstore.NeighborSampler, featstore.EpochSampler):
        with featstore.open(path, memory="256MiB") as g:
            sampler = kind(g, fanouts=[10, 5], seed=0)
            with featstore.Loader(g, sampler, g.node_data["train_idx"], batch_size=500, features=[], labels=None) as loader:
                begin, before = time.perf_counter(), bytes_read()
                ids = [batch.input_ids.clone() for batch in loader]
                seconds = time.perf_counter() - begin
            if not first:
                first = dict(enumerate(ids))
            assert all(torch.equal(first[k], each) for k, each in enumerate(ids))
            print(f"{kind.__name__}: {len(ids)} batches in {seconds:.2f} s, {(bytes_read() - before) / 1e6:.1f} MB read")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder) / "graph", options.nodes)
        run(Path(folder) / "graph")
