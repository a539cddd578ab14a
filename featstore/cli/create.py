"""``featstore create``: a dataset from .npy files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from featstore.cli.arguments import add_path, edge_type, memory_size
from featstore.cli.convert import add_form
from featstore.cli.info import describe, description
from featstore.cli.output import print_result
from featstore.creation.typed import Edges, Nodes, nodes_of_type
from featstore.graph.dataset import OutOfCoreGraph
from featstore.topology.types import EdgeKey, edge_name

__all__ = ["CREATE_OPTIONS", "add_arguments", "add_create_options", "create_options", "run"]

# Options of all commands that make a dataset.
CREATE_OPTIONS = (
    *("coalesce", "remove_self_loops", "to_undirected", "topology", "chunk_bytes", "stripes", "memory", "overwrite"),
)

Key = TypeVar("Key")
Value = TypeVar("Value")


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE.npy")
    return name, path


def _edges_of_type(text: str) -> tuple[EdgeKey, str]:
    name, equals, path = text.partition("=")
    if not (equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not SOURCE,RELATION,DESTINATION=FILE.npy")
    return edge_type(name), path


def add_create_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands that make a dataset; :func:`create_options` has their values."""
    parser.add_argument("--coalesce", action="store_true", help="remove duplicate edges")
    parser.add_argument("--remove-self-loops", action="store_true", help="remove edges from a node to itself")
    parser.add_argument("--to-undirected", action="store_true", help="add the reverse of each edge; removes duplicates")
    add_form(parser, is_required=False)
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help="most memory to use: bytes, or a share (5%%)")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")


def create_options(options: argparse.Namespace) -> dict[str, Any]:
    """Select what all commands that make a dataset pass on, by the names that the library has for it."""
    return {"progress": not options.json} | {name: getattr(options, name) for name in CREATE_OPTIONS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "--indptr", metavar="FILE", help="CSC offsets, integer [N+1]; with --indices")
    add_path(parser, "--indices", metavar="FILE", help="in-neighbours, integer [E]")
    add_path(parser, "--edge-index", metavar="FILE", help="instead of those: edges, integer [2, E], sources then destinations")
    parser.add_argument("--num-nodes", type=int, metavar="N", help="with --edge-index: number of nodes")
    parser.add_argument(
        "--nodes",
        type=nodes_of_type,
        nargs="+",
        action="extend",
        metavar="TYPE=N",
        help="several types of nodes, and their numbers; the names of fields then begin with a type: paper/x=x.npy",
    )
    parser.add_argument(
        "--edges",
        type=_edges_of_type,
        nargs="+",
        action="extend",
        metavar="SOURCE,RELATION,DESTINATION=FILE",
        help="with --nodes: edges of each type, integer [2, E], ids within the types of sources, then of destinations",
    )
    for name, what in (
        ("--features", "[N, …]"),
        ("--node-data", "labels, masks, index sets"),
        ("--edge-features", "[E, …], in the order of --indices, --edge-index or --edges"),
    ):
        parser.add_argument(name, type=_named_path, nargs="+", action="extend", default=[], metavar="NAME=FILE", help=what)
    add_create_options(parser)


def run(options: argparse.Namespace) -> int:
    """Make the dataset, and describe it."""
    begin = time.perf_counter()
    fields: dict[str, Any] = {
        "features": _mapping("--features", options.features),
        "node_data": _mapping("--node-data", options.node_data),
        "edge_features": _mapping("--edge-features", options.edge_features),
    }
    common = create_options(options)
    if options.nodes is not None or options.edges is not None:
        graph = OutOfCoreGraph.create(options.path, **_typed(options, fields), **common)
    elif options.edge_index is not None:
        if options.indptr is not None or options.indices is not None or options.num_nodes is None:
            raise ValueError("--edge-index goes with --num-nodes, and without --indptr and --indices")
        graph = OutOfCoreGraph.from_edge_index(options.path, options.edge_index, options.num_nodes, **fields, **common)
    elif options.indptr is not None and options.indices is not None and options.num_nodes is None:
        graph = OutOfCoreGraph.create(options.path, options.indptr, options.indices, **fields, **common)
    else:
        raise ValueError(
            "give either --indptr and --indices, or --edge-index and --num-nodes, or, for several types, --nodes and --edges"
        )
    with graph:
        result = {**describe(graph), "seconds": round(time.perf_counter() - begin, 3)}
    print_result(options, result, f"{description(result)}\nmade in {result['seconds']:.1f} s")
    return 0


def _typed(options: argparse.Namespace, fields: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Make the arguments ``nodes`` and ``edges`` of a graph of several types; ValueError if options do not go together."""
    for name in ("indptr", "indices", "edge_index", "num_nodes"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a graph of one type: leave it out, or --nodes and --edges")
    for name in ("coalesce", "remove_self_loops", "to_undirected"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is for a graph of one type: clean the edges of each type before")
    if options.nodes is None:
        raise ValueError("--edges goes with --nodes, which has the number of nodes of each type: --nodes paper=3000 author=1000")
    numbers, paths = _mapping("--nodes", options.nodes), _mapping("--edges", options.edges or [])
    features, data = (_of_types(f"--{name.replace('_', '-')}", fields[name], numbers) for name in ("features", "node_data"))
    of_edges = _of_types("--edge-features", fields["edge_features"], {edge_name(key): key for key in paths})
    return {
        "nodes": {kind: Nodes(n, features[kind], data[kind]) for kind, n in numbers.items()},
        "edges": {key: Edges(path, of_edges[edge_name(key)]) for key, path in paths.items()},
    }


def _of_types(option: str, named: Mapping[str, str], kinds: Iterable[str]) -> dict[str, dict[str, str]]:
    """Divide fields ``TYPE/NAME`` by type."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for full, path in named.items():
        kind, _, name = full.rpartition("/")
        if kind not in found or not name:
            there = ", ".join(found) or "none"
            raise ValueError(f"{option}: {full!r} is not TYPE/NAME, the name of a field of one of the types; these are {there}")
        found[kind][name] = path
    return found


def _mapping(option: str, pairs: list[tuple[Key, Value]]) -> dict[Key, Value]:
    made: dict[Key, Value] = {}
    for name, path in pairs:
        if name in made:
            raise ValueError(f"{option}: {name!r} is given twice")
        made[name] = path
    return made
