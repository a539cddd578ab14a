"""Dynamic neighbour cache of partition_batches: seconds of sampling an epoch in partition batches, with lists and without.

Beside a static neighbour cache of a tenth of the adjacency. One thread samples; no feature is read. Both sides draw the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.tools.harness import Report, alternate, bytes_read_by_kernel, drop_from_page_cache
from featstore.sampling.macrolists import macro_lists
from featstore.sampling.sampledbatches import Drawn
from featstore.topology.base import huge_bytes

FANOUTS = [10, 10]
STATIC_DIVISOR = 10  # of the adjacency, one part of so many
MACROS = (2, 32)  # batches of seeds that a macro-batch holds

Int64s = npt.NDArray[np.int64]


def make_lists(path: Path, indptr: Int64s, ids: npt.NDArray[np.int32], seeds: Int64s, n_parts: int) -> float:
    """Create the dataset and its parts, with their lists; return the seconds that keeping lists took on top."""
    with featstore.OutOfCoreGraph.create(path, indptr, ids, progress=False, memory="2GiB") as g:
        seconds = []
        for keep_lists in (False, True):
            begin = time.perf_counter()
            featstore.partition(g, n_parts, train_idx=seeds, keep_lists=keep_lists, progress=False)
            seconds.append(time.perf_counter() - begin)
    return seconds[1] - seconds[0]


def lists_of_macros(args: argparse.Namespace, report: Report, name: str, path: Path, seeds: Int64s, batch_size: int) -> None:
    """Sample an epoch with lists at hand, and without: seconds, ids read from the file, bytes that the kernel read."""
    for of_macro in MACROS:
        found: dict[str, dict[str, Any]] = {}

        def side(with_lists: bool, of_macro: int = of_macro, found: dict[str, dict[str, Any]] = found) -> float:
            drop_from_page_cache(path)
            with featstore.open(path, memory="2GiB") as g:
                n = g.num_nodes
                g.cache_neighbors(huge_bytes(8 * n) + g.topology.nbytes // STATIC_DIVISOR // 4096 * 4096)
                n_parts = next(iter(g.parts().values())).n_parts
                macro = max(1, of_macro * batch_size * n_parts // len(seeds))
                batches = featstore.PartitionBatches(g, seeds, batch_size, macro=macro)
                sampler = featstore.NeighborSampler(g, FANOUTS)
                lists = macro_lists(g, sampler, batches) if with_lists else None
                drawn = Drawn(sampler, batches, lists)
                if lists is not None:
                    lists.use(lists.useful_bytes)
                before, begin = bytes_read_by_kernel(), time.perf_counter()
                epoch, checksum = drawn.epoch(0), 0
                for k in range(len(epoch)):
                    checksum ^= int(epoch.sample(k).input_ids.sum())
                seconds = time.perf_counter() - begin
                found["with" if with_lists else "without"] = {
                    "ids_read": sampler.stats()["edge_rows_read"],
                    "kernel_bytes": bytes_read_by_kernel() - before,
                    "held": 0 if lists is None else lists.useful_bytes,
                    "macro": macro,
                    "checksum": checksum,
                }
                drawn.close()
            return seconds

        sides = {"with": lambda: side(True), "without": lambda: side(False)}
        seconds = alternate(args.runs, sides)
        ours, theirs = found["with"], found["without"]
        assert ours.pop("checksum") == theirs.pop("checksum"), "lists at hand changed the samples"
        report.figure(
            f"{name}, sampling an epoch, {of_macro} batches a macro-batch, its lists at hand",
            seconds["with"],
            "s",
            reference="without",
            references=seconds["without"],
            reference_ids_read=theirs["ids_read"],
            reference_kernel_bytes=theirs["kernel_bytes"],
            **ours,
        )
