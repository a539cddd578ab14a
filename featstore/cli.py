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
import torch
from tqdm import tqdm

from featstore.cache.base import available_policies
from featstore.config import format_size, parse_size
from featstore.errors import CorruptionError, FeatstoreError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.run.measure import measure, measure_table
from featstore.run.strategy import STRATEGIES
from featstore.run.train import Epoch, describe_epoch, stage_table, train
from featstore.sampling.neighbor import NeighborSampler

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


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share_or_size(text: str) -> int | float | str:
    if text == "auto":
        return text
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    return _size(text)


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE.npy")
    return name, path


def _fanouts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 10,10") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


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

    def opening(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--memory", type=_size, metavar="SIZE", help="budget, such as 4GiB (default: half of what is available)"
        )
        made.add_argument("--backend", choices=["auto", "io_uring", "pread"], default="auto", help="how files are read")
        made.add_argument("--verify", choices=["always", "open", "off"], help="when checksums are checked (default: always)")
        made.add_argument("--threads", type=_positive, help="threads (default: all processors)")

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
    create.add_argument("--memory", type=_size, metavar="SIZE", help="most memory to use")
    create.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")

    opening(command("info", _info, "print what a dataset holds"))
    command("verify", _verify, "check every byte of a dataset against its checksums, and its structure")

    trained = command("train", _train, "train a GraphSAGE on a dataset within a memory budget")
    opening(trained)
    trained.add_argument("--feature", default="x", help="feature (default: x)")
    trained.add_argument("--labels", default="y", help="node data with classes (default: y)")
    trained.add_argument("--fanouts", type=_fanouts, default=[10, 10], help="neighbours a hop, seeds' first (default: 10,10)")
    trained.add_argument("--hidden", type=_positive, default=256, help="width of the hidden layers (default: 256)")
    trained.add_argument("--epochs", type=_positive, default=2, help="(default: 2)")
    trained.add_argument("--batch-size", type=_positive, default=1000, help="seeds a batch (default: 1000)")
    trained.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam (default: 0.003)")
    trained.add_argument("--dropout", type=float, default=0.5, help="(default: 0.5)")
    trained.add_argument("--seed", type=int, default=0, help="of weights, order and sampling (default: 0)")
    trained.add_argument("--max-batches", type=_positive, help="stop each epoch after so many batches")
    trained.add_argument("--strategy", choices=list(STRATEGIES), default="ondemand", help="(default: ondemand)")
    trained.add_argument("--policy", help=f"policy of the feature cache, one of {', '.join(available_policies())}")
    trained.add_argument("--feature-cache", type=_share_or_size, metavar="SIZE", help="bytes, a share of the rows (0.1), or auto")
    trained.add_argument("--neighbor-cache", type=_size, metavar="SIZE", help="cache of neighbour lists")
    trained.add_argument("--prefetch", type=int, default=2, help="batches made ahead (default: 2)")

    bench = command("bench", _bench, "measure the device under a dataset, and gathers from it")
    opening(bench)
    bench.add_argument("--feature", help="feature to read (default: the largest)")
    bench.add_argument("--rows", type=_positive, default=50_000, help="rows a gather (default: 50000)")
    bench.add_argument("--runs", type=_positive, default=3, help="runs, of which the median counts (default: 3)")
    return parser


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"


def _open(options: argparse.Namespace) -> OutOfCoreGraph:
    return OutOfCoreGraph.open(
        options.path, memory=options.memory, backend=options.backend, verify=options.verify, threads=options.threads
    )


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
    with _open(options) as graph:
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
    with _open(options) as graph:
        if options.neighbor_cache is not None:
            graph.cache_neighbors(min(options.neighbor_cache, graph.budget.available))
        sampler = NeighborSampler(graph, options.fanouts, seed=options.seed)
        torch.use_deterministic_algorithms(True)
        result = train(
            graph,
            sampler,
            len(options.fanouts),
            feature=options.feature,
            labels=options.labels,
            hidden=options.hidden,
            dropout=options.dropout,
            lr=options.lr,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            max_batches=options.max_batches,
            progress=sys.stderr.isatty() and not options.json,
            on_epoch=None if options.json else _say,
            loader_options={name: getattr(options, name) for name in ("strategy", "policy", "feature_cache", "prefetch")},
        )
        report = graph.memory_report()
        peak = graph.budget.peak
    lines = ["", stage_table(result.stats), f"memory: at most {format_size(peak)} of {format_size(graph.budget.total)}"]
    _print(options, {**result.to_dict(), "memory": report, "peak_bytes": peak}, "\n".join(lines))
    return 0


def _say(epoch: Epoch) -> None:
    tqdm.write(describe_epoch(epoch), file=sys.stdout)
    sys.stdout.flush()


def _bench(options: argparse.Namespace) -> int:
    with _open(options) as graph:
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
