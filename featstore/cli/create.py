"""``featstore create``: a dataset from .npy files."""

from __future__ import annotations

import argparse
import time
from typing import Any

from featstore.cli.arguments import add_path, memory_size
from featstore.cli.convert import add_form
from featstore.cli.info import describe, description
from featstore.cli.output import print_result
from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["add_arguments", "run"]


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE.npy")
    return name, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "--indptr", metavar="FILE", help="CSC offsets, integer [N+1]; with --indices")
    add_path(parser, "--indices", metavar="FILE", help="in-neighbours, integer [E]")
    add_path(parser, "--edge-index", metavar="FILE", help="instead of those: edges, integer [2, E], sources then destinations")
    parser.add_argument("--num-nodes", type=int, metavar="N", help="with --edge-index: number of nodes")
    for name, what in (
        ("--features", "[N, …]"),
        ("--node-data", "labels, masks, index sets"),
        ("--edge-features", "[E, …], in the order of --indices or --edge-index"),
    ):
        parser.add_argument(name, type=_named_path, nargs="+", action="extend", default=[], metavar="NAME=FILE", help=what)
    parser.add_argument("--coalesce", action="store_true", help="remove duplicate edges")
    parser.add_argument("--remove-self-loops", action="store_true", help="remove edges from a node to itself")
    parser.add_argument("--to-undirected", action="store_true", help="add the reverse of each edge; removes duplicates")
    add_form(parser, is_required=False)
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help="most memory to use: bytes, or a share (5%%)")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")


def run(options: argparse.Namespace) -> int:
    """Make the dataset, and describe it."""
    begin = time.perf_counter()
    common: dict[str, Any] = {
        "features": _mapping("--features", options.features),
        "node_data": _mapping("--node-data", options.node_data),
        "edge_features": _mapping("--edge-features", options.edge_features),
        "coalesce": options.coalesce,
        "remove_self_loops": options.remove_self_loops,
        "to_undirected": options.to_undirected,
        "topology": options.topology,
        "chunk_bytes": options.chunk_bytes,
        "stripes": options.stripe,
        "overwrite": options.overwrite,
        "progress": not options.json,
        "memory": options.memory,
    }
    if options.edge_index is not None:
        if options.indptr is not None or options.indices is not None or options.num_nodes is None:
            raise ValueError("--edge-index goes with --num-nodes, and without --indptr and --indices")
        graph = OutOfCoreGraph.from_edge_index(options.path, options.edge_index, options.num_nodes, **common)
    elif options.indptr is not None and options.indices is not None and options.num_nodes is None:
        graph = OutOfCoreGraph.create(options.path, options.indptr, options.indices, **common)
    else:
        raise ValueError("give either --indptr and --indices, or --edge-index and --num-nodes")
    with graph:
        result = {**describe(graph), "seconds": round(time.perf_counter() - begin, 3)}
    print_result(options, result, f"{description(result)}\nmade in {result['seconds']:.1f} s")
    return 0


def _mapping(option: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, path in pairs:
        if name in made:
            raise ValueError(f"{option}: {name!r} is given twice")
        made[name] = path
    return made
