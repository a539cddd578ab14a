"""Random parts, the baseline of other methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.partitioning.base import GraphStream, Partitioner, register_partitioner

__all__ = ["Random"]


@register_partitioner("random")
class Random(Partitioner):
    """Draw parts of one size, or of two that differ by one node, from all such divisions alike; a function of the seed."""

    @property
    def n_passes(self) -> int:
        return 0

    def assign(self, graph: GraphStream) -> npt.NDArray[Any]:
        n, n_parts = graph.num_nodes, graph.n_parts
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(graph.seed)))
        if n <= n_parts:
            return generator.choice(n_parts, n, replace=False).astype(np.int32)
        with graph.reserve(4 * n):
            part = np.resize(np.arange(n_parts, dtype=np.int32), n)
            generator.shuffle(part)
            return part
