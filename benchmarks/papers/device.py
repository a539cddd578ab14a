"""Rows on the device (PaGraph, TPDS 2021): computing beside loading, and what a GPU serves.

``--only overlap``: epochs whose loop computes, idle, for half, once and twice as long as loading takes. ``--only gpu``
(``tools.gpu``): hits, host rows and waiting on a GPU; skipped, and said, where there is none. The paper's own figures are
drawn by ``python -m benchmarks.papers pagraph``. ``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled. But for
``--only gpu``, the CPU stands in for a device.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.papers.figures.pagraph import epoch_of
from benchmarks.tools.gpu import have_cuda, placing, waiting
from benchmarks.tools.harness import Report, arguments, main, scratch
from benchmarks.tools.r22 import generate

Int64s = npt.NDArray[np.int64]


def made(args: argparse.Namespace, folder: Path) -> tuple[Path, Int64s, int]:
    """Make a dataset of R-MAT with features; return its path, seeds, and seeds a batch."""
    scale = 12 if args.tiny else args.scale
    work = generate(os.environ.get("FEATSTORE_R22", folder) if scale == 22 else folder, scale=scale)
    path = folder / f"R{scale}-features"
    if not path.exists():
        features = {"x": ((work.num_nodes, work.dim), np.float32, work.feature_blocks())}
        arrays = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
        featstore.OutOfCoreGraph.create(path, *arrays, features=features, progress=False).close()
    batch_size = 50 if args.tiny else 1000
    return path, np.array(work.seeds[: (8 if args.tiny else args.batches) * batch_size]), batch_size


def overlap(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Compute, idle, for half, once and twice as long as loading takes."""
    path, seeds, batch_size = made(args, folder)
    with featstore.open(path, memory="3GiB") as g:
        g.cache_neighbors()
        epoch_of(g, seeds, batch_size)  # first touch of buffers
        for factor in (0.5, 1.0, 2.0):
            hidden, epoch_s, longer_s = [], [], []
            for _ in range(args.runs):
                loading = epoch_of(g, seeds, batch_size, prefetch="auto")["epoch_s"]
                n_batches = -(-len(seeds) // batch_size)
                found = epoch_of(g, seeds, batch_size, factor * loading / n_batches, prefetch="auto")
                hidden.append(found["hidden"])
                epoch_s.append(found["epoch_s"])
                longer_s.append(max(1.0, factor) * loading)
            report.figure(
                f"epoch, computing for {factor:g} times as long as loading",
                epoch_s,
                "s",
                reference="the longer of the two alone",
                references=longer_s,
                target=None if args.tiny else "<= 1.15",
                hidden=[round(each, 3) for each in hidden],
            )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "pagraph") as folder:
        if args.only in "overlap":
            overlap(args, report, folder)
        if args.only in "gpu" and have_cuda():
            placing(args, report)
            waiting(args, report, *made(args, folder))


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", scale=22, batches=200))
