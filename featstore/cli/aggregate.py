"""``featstore aggregate``: a feature made of another one over each node's in-neighbours."""

from __future__ import annotations

import argparse
import time
from typing import Any

from featstore.cli.arguments import add_making, edge_type, open_graph, positive
from featstore.cli.output import print_result
from featstore.config import format_size, listed
from featstore.graph.derive.aggregate import edges_to_aggregate
from featstore.graph.passes import OPS
from featstore.topology.types import edge_name, qualified

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_making(parser, "x", "feature that is aggregated (default: x)")
    parser.add_argument("--op", choices=OPS, default="mean", help="over the in-neighbours (default: mean)")
    parser.add_argument(
        "--edge-type",
        type=edge_type,
        metavar="SOURCE,RELATION,DESTINATION",
        help="edges to aggregate over, of a dataset of several types: the new feature is one of the destination's type",
    )
    parser.add_argument("--hops", type=positive, default=1, help="how often (default: 1)")
    parser.add_argument("--name", help="of the new feature (default: FEATURE_OP, and the hops if there are several)")
    parser.add_argument("--dtype", help="of the new feature (default: the feature's own; float64 for integers)")


def run(options: argparse.Namespace) -> int:
    """Make the feature, and print its description."""
    begin = time.perf_counter()
    with open_graph(options.path, options) as graph:
        if options.edge_type is None and not graph.types.is_one:
            nodes, edges = (listed(names) for names in (graph.node_types, map(edge_name, graph.edge_types)))
            raise ValueError(f"--edge-type is needed: the dataset has the node types {nodes} and the edge types {edges}")
        kind = edges_to_aggregate(graph, options.edge_type, options.op, options.hops)
        full = qualified(kind.src.name, options.feature)
        if full not in graph.features:
            raise ValueError(f"--feature: the dataset has no {full!r}; it has {listed(sorted(graph.features))}")
        store = graph.aggregate(
            options.feature,
            options.op,
            edge_type=options.edge_type,
            hops=options.hops,
            name=options.name,
            dtype=options.dtype,
            overwrite=options.overwrite,
            progress=not options.json,
        )
        result: dict[str, Any] = {
            "path": graph.path,
            "name": store.name,
            "shape": list(store.shape),
            "dtype": str(store.dtype).removeprefix("torch."),
            "bytes": store.nbytes,
            "seconds": round(time.perf_counter() - begin, 3),
        }
    shape = " x ".join(f"{n:,}" for n in result["shape"])
    text = f"{result['path']}: feature {store.name}, {shape} {result['dtype']}, {format_size(store.nbytes)}"
    print_result(options, result, f"{text}, made in {result['seconds']:.1f} s")
    return 0
