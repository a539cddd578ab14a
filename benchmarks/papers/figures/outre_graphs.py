"""Parts of OUTRE's figures and partition_batches: planted communities, random batches and parts', FENNEL as plain loops."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.communities import draw

PLANTED = "planted communities"
SEEDS_A_PART = 500
METHODS: dict[str, dict[str, Any]] = {
    "fennel": {},
    "fennel, 10 passes": {"passes": 10},
    "fennel from ranges": {"start": "ranges"},
    "ldg": {"method": "ldg"},
    "ranges": {"method": "ranges"},
    "metis": {"method": "metis"},  # where it is installed
    "random": {"method": "random"},
}
GAMMA = 1.5

Int64s = npt.NDArray[np.int64]


class Loops:
    """fennel_loops.c, compiled here."""

    def __init__(self, folder: Path) -> None:
        library = folder / "fennel_loops.so"
        source = Path(__file__).with_name("fennel_loops.c")
        command = [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-o", library, source, "-lm"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        self._run = ctypes.CDLL(str(library)).fennel_loops

    def partition(self, indptr: Int64s, ids: npt.NDArray[np.int32], k: int, passes: int) -> npt.NDArray[np.int32]:
        """Return the parts that ``featstore.partition`` returns, too."""
        n = len(indptr) - 1
        part = np.full(n, -1, np.int32)
        scale = GAMMA * (len(ids) / 2) / n * (k / n) ** (GAMMA - 1)
        cap = max(-(-n // k), int(n * 1.1 / k))
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (indptr, ids, part)]
        for _ in range(passes):
            self._run(
                pointers[0],
                pointers[1],
                ctypes.c_int64(n),
                ctypes.c_int32(k),
                ctypes.c_double(scale),
                ctypes.c_int64(cap),
                pointers[2],
            )
        return part


def communities(n: int, seed: int = 0) -> tuple[Int64s, npt.NDArray[np.int32], Int64s]:
    """Communities of about 300 nodes with shuffled ids: four of five edges stay inside; half of the nodes are seeds."""
    rng = np.random.default_rng(seed)
    _, indptr, ids = draw(rng, n)
    return indptr, ids.astype(np.int32), np.sort(rng.choice(n, n // 2, replace=False))


@contextmanager
def random_and_partitioned(
    path: Path, arrays: tuple[Int64s, npt.NDArray[np.int32]], seeds: Int64s, batch_size: int
) -> Iterator[tuple[featstore.OutOfCoreGraph, dict[str, Any]]]:
    """Open a graph, created once, with its lists in memory, and make its random batches and its partition batches."""
    if not path.exists():
        featstore.OutOfCoreGraph.create(path, *arrays, progress=False).close()
    with featstore.open(path, memory="3GiB") as g:
        g.cache_neighbors()
        parts = featstore.partition(g, max(2, len(seeds) // SEEDS_A_PART), train_idx=seeds, keep=False, progress=False)
        yield (
            g,
            {
                "random batches": featstore.RandomBatches(seeds, batch_size),
                "partition batches": featstore.PartitionBatches(g, torch.from_numpy(seeds), batch_size, parts),
            },
        )
