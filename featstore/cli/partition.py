"""``featstore partition``: nodes divided into parts, and the parts kept in the dataset."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np
import torch

from featstore.cli.arguments import add_opening, add_path, open_graph, positive
from featstore.cli.output import print_result
from featstore.config import listed
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.selfreliant import SelfReliantParts
from featstore.partitioning.assign import judge, partition

__all__ = ["add_arguments", "run"]

TRAIN = ("train_idx", "train_mask")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="PARTS", type=positive, nargs="?", help="how many parts; not needed with --array")
    add_opening(parser)
    parser.add_argument("--method", help="fennel (default), ldg (with --hops), ranges, random, metis, or a registered name")
    add_path(parser, "--array", metavar="FILE", help="keep the parts of this .npy file: an integer a node")
    parser.add_argument("--train", metavar="NAME", help="node data with the training nodes (default: train_idx or train_mask)")
    parser.add_argument("--name", help="what to keep the parts under (default: METHOD-PARTS)")
    parser.add_argument("--keep-lists", action="store_true", help="keep the adjacency in part order, too, for batches of parts")
    parser.add_argument("--passes", type=positive, help="fennel, ldg: passes over the adjacency (default: 3)")
    parser.add_argument("--gamma", type=float, help="fennel: exponent of a part's size, above 1 (default: 1.5)")
    parser.add_argument("--start", choices=["ranges"], help="fennel: begin with contiguous ranges of ids")
    parser.add_argument(
        "--hops", type=positive, help="ldg: self-reliant parts of training nodes, with in-neighbours of so many hops"
    )
    parser.add_argument("--visits", type=int, help="ldg with --hops: edges followed, over those of the graph (default: 50)")
    parser.add_argument("--levels", type=_levels, metavar="N,M", help="fennel: N parts, and each divided into M")
    parser.add_argument("--seed", type=int, default=0, help="of randomised methods (default: 0)")


def _levels(text: str) -> tuple[int, int]:
    numbers = text.split(",")
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of numbers such as 100,100")
    return positive(numbers[0]), positive(numbers[1])


def run(options: argparse.Namespace) -> int:
    """Divide the nodes, keep the parts, and print their quality."""
    if options.array is not None and options.method is not None:
        raise ValueError("--array and --method: the parts of a file need no method")
    if options.array is None and options.parts is None:
        raise ValueError("PARTS is needed: how many parts to make; for train --batches partition, 40 for each batch of seeds")
    with open_graph(options.path, options) as graph:
        train = _train_nodes(graph, options.train)
        if options.hops is not None and options.method in (None, "ldg") and train is None:
            there = sorted(graph.node_data)
            raise ValueError(f"--hops divides training nodes: --train says which of the node data {there} has them")
        method = options.method or ("fennel" if options.hops is None else "ldg")
        given: Any = method if options.array is None else np.load(options.array, mmap_mode="r", allow_pickle=False)
        names = ("passes", "gamma", "start", "levels", "hops", "visits", "name", "keep_lists", "seed")
        asked: dict[str, Any] = {name: getattr(options, name) for name in names}
        begin = time.perf_counter()
        parts: Any = partition(graph, options.parts, given, train, **asked, progress=not options.json)
        seconds = time.perf_counter() - begin
        kept = list(graph.parts().values())[-1]
        found = _self_reliant(parts) if kept.hops is not None else _quality(graph, parts, kept.n_parts, train, not options.json)
    result: dict[str, Any] = {
        "path": graph.path,
        "name": kept.name,
        "method": kept.method,
        "parts": kept.n_parts,
        "train_nodes": kept.n_train,
        "lists": kept.has_lists,
        "options": kept.options,
        "seconds": round(seconds, 3),
        **found,
    }
    print_result(options, result, _describe(result))
    return 0


def _quality(graph: OutOfCoreGraph, parts: torch.Tensor, n_parts: int, train: torch.Tensor | None, show: bool) -> dict[str, Any]:
    quality = judge(graph, parts, n_parts, train, progress=show)
    return {
        "cut": quality.cut,
        "balance": _number(quality.balance),
        "train_balance": _number(quality.train_balance),
        "empty_parts": quality.n_empty,
    }


def _self_reliant(parts: SelfReliantParts) -> dict[str, Any]:
    trained = np.diff(parts.offsets)
    return {
        "hops": parts.hops,
        "part_nodes": parts.n_nodes.tolist(),
        "train_balance": float(trained.max() / trained.mean()) if len(parts.train_nodes) else None,
        "empty_parts": int((trained == 0).sum()),
    }


def _train_nodes(graph: OutOfCoreGraph, name: str | None) -> torch.Tensor | None:
    if name is None:
        name = next((each for each in TRAIN if each in graph.node_data), None)
        if name is None:
            return None
    elif name not in graph.node_data:
        raise ValueError(f"--train: the dataset has no node data {name!r}; it has {listed(sorted(graph.node_data))}")
    return graph.node_data[name].bool() if name.endswith("mask") else graph.node_data[name]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _describe(result: dict[str, Any]) -> str:
    lines = [f"{result['path']}: {result['parts']:,} parts by {result['method']}, kept as {result['name']}"]
    lines.append(f"  time           {result['seconds']:.1f} s")
    if "part_nodes" in result:
        nodes = result["part_nodes"]
        lines.append(f"  nodes a part   {sum(nodes) // len(nodes):,} on average, {max(nodes):,} at most")
    else:
        lines.append(f"  edges cut      {result['cut']:.1%}")
    for name, what in (("balance", "largest part"), ("train_balance", "training nodes")):
        if result.get(name) is not None:
            lines.append(f"  {what:<14} {result[name]:.2f} x the mean")
    if result["empty_parts"]:
        lines.append(f"  empty parts    {result['empty_parts']:,}")
    return "\n".join(lines)
