"""Command line: ``featstore create | info | verify | train | bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from featstore.config import format_size
from featstore.errors import CorruptionError, FeatstoreError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.run.arguments import add_opening, add_training, open_graph, positive, size, train_as_asked
from featstore.run.measure import measure, measure_table
from featstore.run.train import describe_training

__all__ = ["main"]

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status: 0, 1 (a dataset is damaged), 2 (what was asked for cannot be done)."""
    options = _parser().parse_args(argv)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("featstore: interrupted", file=sys.stderr)
        return 130
    except CorruptionError as error:
        print(f"featstore: {_one_line(error)}", file=sys.stderr)
        return 1
    except (FeatstoreError, OSError, ValueError, TypeError, LookupError) as error:
        if os.environ.get("FEATSTORE_TRACEBACK"):
            raise
        print(f"featstore: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR


def _one_line(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: no such file or directory"
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


# -- what is asked
# ------------------------------------------------------------------------------------------------------------------


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE.npy")
    return name, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="featstore", description="Features and adjacency of graphs larger than memory, on an SSD.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"featstore {_release()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        made.set_defaults(run=run)
        made.add_argument("path", metavar="DATASET", help="directory of the dataset")
        made.add_argument("--json", action="store_true", help="print the result as one JSON object")
        return made

    create = command("create", _create, "make a dataset from .npy files")
    create.add_argument("--indptr", metavar="FILE", help="CSC offsets, integer [N+1]; with --indices")
    create.add_argument("--indices", metavar="FILE", help="in-neighbours, integer [E]")
    create.add_argument("--edge-index", metavar="FILE", help="instead of those: edges, integer [2, E], sources then destinations")
    create.add_argument("--num-nodes", type=int, metavar="N", help="with --edge-index: number of nodes")
    create.add_argument(
        "--features", type=_named_path, nargs="+", action="extend", default=[], metavar="NAME=FILE", help="[N, …]"
    )
    create.add_argument(
        "--node-data",
        type=_named_path,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FILE",
        help="labels, masks, index sets",
    )
    create.add_argument("--memory", type=size, metavar="SIZE", help="most memory to use")
    create.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")

    add_opening(command("info", _info, "print what a dataset holds"))
    command("verify", _verify, "check every byte of a dataset against its checksums, and its structure")

    add_training(command("train", _train, "train a GraphSAGE on a dataset within a memory budget"))

    bench = command("bench", _bench, "measure the device under a dataset, and gathers from it")
    add_opening(bench)
    bench.add_argument("--feature", help="feature to read (default: the largest)")
    bench.add_argument("--rows", type=positive, default=50_000, help="rows a gather (default: 50000)")
    bench.add_argument("--runs", type=positive, default=3, help="runs, of which the median counts (default: 3)")
    return parser


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"


def _print(options: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    print(json.dumps(result) if options.json else text)


# -- commands
# -----------------------------------------------------------------------------------------------------------------------


def _create(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    common: dict[str, Any] = {
        "features": _mapping("--features", options.features),
        "node_data": _mapping("--node-data", options.node_data),
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
        result = {**_describe(graph), "seconds": round(time.perf_counter() - begin, 3)}
    _print(options, result, f"{_description(result)}\nmade in {result['seconds']:.1f} s")
    return 0


def _mapping(option: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, path in pairs:
        if name in made:
            raise ValueError(f"{option}: {name!r} is given twice")
        made[name] = path
    return made


def _describe(graph: OutOfCoreGraph) -> dict[str, Any]:
    features = {
        name: {"shape": list(store.shape), "dtype": str(store.dtype).removeprefix("torch."), "bytes": store.nbytes}
        for name, store in graph.features.items()
    }
    data = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in graph.node_data.items()
    }
    disk = sum(entry.stat().st_size for entry in os.scandir(graph.path) if entry.is_file(follow_symlinks=False))
    return {
        "path": graph.path,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "features": features,
        "node_data": data,
        "disk_bytes": disk,
    }


def _description(result: dict[str, Any]) -> str:
    lines = [
        result["path"],
        f"  {result['num_nodes']:,} nodes, {result['num_edges']:,} edges, {format_size(result['disk_bytes'])} on disk",
    ]
    for what in ("features", "node_data"):
        for name, field in result[what].items():
            size = f", {format_size(field['bytes'])}" if "bytes" in field else ""
            lines.append(f"  {what.replace('_', ' '):<10} {name}: {field['dtype']} {field['shape']}{size}")
    return "\n".join(lines)


def _info(options: argparse.Namespace) -> int:
    with open_graph(options.path, options) as graph:
        result = _describe(graph)
        result["budget"] = graph.budget.total
        readers = {name: store.stats() for name, store in graph.features.items()}
        result["reader"] = {name: {key: stats[key] for key in ("backend", "reason", "mode")} for name, stats in readers.items()}
    lines = [_description(result), f"  budget     {format_size(result['budget'])}"]
    lines += [f"  reader     {name}: {r['backend']}, {r['mode']} ({r['reason']})" for name, r in result["reader"].items()]
    _print(options, result, "\n".join(lines))
    return 0


def _verify(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    with OutOfCoreGraph.open(options.path) as graph:
        result: dict[str, Any] = {"path": graph.path, "ok": True, **graph.verify(progress=not options.json)}
    result["seconds"] = round(time.perf_counter() - begin, 3)
    text = f"{result['path']}: {result['files']} files, {format_size(result['bytes'])}, all as they were written"
    _print(options, result, text)
    return 0


def _train(options: argparse.Namespace) -> int:
    result = train_as_asked(options.path, options, quiet=options.json)
    _print(options, result.to_dict(), f"\n{describe_training(result)}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    with open_graph(options.path, options) as graph:
        names = list(graph.features)
        if not names:
            raise ValueError(f"{options.path}: the dataset has no features")
        name = options.feature or max(names, key=lambda each: graph.features[each].nbytes)
        store = graph.features[name]
        if not len(store):
            raise ValueError(f"{options.path}: feature {name!r} has no rows")
        result = measure(store, options.rows, options.runs, np.random.default_rng(0))
    _print(options, result, measure_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
