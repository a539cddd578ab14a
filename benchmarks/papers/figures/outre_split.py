"""Split of memory (outre, figure 5): reads of an epoch at the alpha that a loader chooses, beside nine splits of as much.

Reads are counted, not timed: rows that a cache of the most used rows lacks, and beta for each edge that is drawn. The loader has
measured beta. Batches are pruned as a training would that pushes what every batch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import featstore
from benchmarks.papers.figures.outre_epochs import Work
from featstore.cache.select import top_rows
from featstore.cache.table import FeatureCache
from featstore.load.savedsplit import profile
from featstore.sampling.historical import PushTimes
from featstore.sampling.sampledbatches import Drawn

FANOUTS = [10, 10]
HIDDEN, STALENESS = 128, 100
SPLITS = 8  # one more are compared: from 0 to 1
MEMORY_DIVISOR = 10  # of the features' bytes, about a tenth of which is divided
BATCHES_BYTES = 48 << 20  # beside it


def split(work: Work, row: Callable[..., None]) -> None:
    """Let a loader choose, then count the reads at its alpha and at nine others; ``row`` is a setting's."""
    memory = work.features_bytes // MEMORY_DIVISOR + BATCHES_BYTES
    with featstore.open(work.dataset, memory=memory) as g:
        sampler, order, history = _sampler(g), _batches(g, work), featstore.History(HIDDEN, "auto", STALENESS)
        strategy = featstore.OnDemand(cache="auto", policy="frequency")
        with featstore.Loader(g, sampler, order, labels=None, strategy=strategy, history=history) as loader:
            chosen: dict[str, Any] = loader.stats()["history"]["split"]
    reads = {}
    with featstore.open(work.dataset, memory=2 * memory + (1 << 30)) as g:
        sampler, order = _sampler(g), _batches(g, work)
        counted, _, _ = profile(Drawn(sampler, order), g, STALENESS)
        scores = counted.embeddings(chosen["beta"])
        row_bytes = work.features_bytes // g.num_nodes
        for alpha in sorted({k / SPLITS for k in range(SPLITS + 1)} | {chosen["alpha"]}):
            of_embeddings = int(alpha * chosen["bytes"])
            n_kept = min(of_embeddings // history.node_bytes, np.count_nonzero(scores))
            n_rows = _rows(chosen["bytes"] - of_embeddings, row_bytes, g.num_nodes)
            is_cached = np.zeros(g.num_nodes, bool)
            is_cached[top_rows(counted.accesses, n_rows)] = True
            times = PushTimes(STALENESS)
            times.nodes = top_rows(scores, int(n_kept))
            times.pushed = np.full(len(times.nodes), -1)
            epoch = Drawn(sampler, order, None, times).epoch(0).windowed(0)
            n = 0.0
            for k in range(len(order)):
                sampled = epoch.sample(k)
                n_edges = sum(len(block.src) for block in sampled.blocks)
                n += np.count_nonzero(~is_cached[sampled.input_ids.numpy()]) + chosen["beta"] * n_edges
                del sampled
            epoch.close()
            reads[alpha] = float(n)
    best = min(reads, key=lambda alpha: reads[alpha])
    panel = f"{work.name}, rows of {row_bytes} bytes, embeddings of {4 * HIDDEN}"
    more = {"beta": round(chosen["beta"], 4), "bytes": chosen["bytes"], "nodes": chosen["nodes"]}
    for alpha, n in reads.items():
        side = "chosen by the loader" if alpha == chosen["alpha"] else "by hand"
        row(panel, side, round(alpha, 3), n, "reads", "at the alpha that a loader chose", ratio=n / reads[chosen["alpha"]])
    row(panel, "best of nine", "all", reads[best] / reads[chosen["alpha"]], "x chosen", target=">= 0.95", best_alpha=best, **more)


def _sampler(g: featstore.OutOfCoreGraph) -> featstore.NeighborSampler:
    return featstore.NeighborSampler(g, FANOUTS)


def _batches(g: featstore.OutOfCoreGraph, work: Work) -> featstore.PartitionBatches:
    return featstore.PartitionBatches(g, g.node_data["seeds"], work.batch_size)


def _rows(n_bytes: int, row_bytes: int, n: int) -> int:
    return 0 if n_bytes < FeatureCache.least_bytes(1, row_bytes, n, None) else (n_bytes - 4 * n) // row_bytes
