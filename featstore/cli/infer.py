"""``featstore infer``: the class scores of every node by a model that ``featstore train --save`` wrote."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from featstore.cli.arguments import add_making, add_path, check_feature, open_graph
from featstore.cli.model import HeteroSizes, ModelSizes, load_model
from featstore.cli.output import print_result
from featstore.cli.sage import HeteroSAGE
from featstore.config import format_size
from featstore.graph.dataset import OutOfCoreGraph
from featstore.inference.infer import infer
from featstore.topology.types import edge_name

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_making(parser, None, "feature (default: the one that the model was trained on)")
    add_path(parser, "--model", metavar="FILE", required=True, help="file that featstore train --save wrote")
    parser.add_argument("--out", default="h", metavar="NAME", help="name of the new feature (default: h)")
    parser.add_argument(
        "--resume",
        metavar="NAME",
        help="go on with what an interrupted infer --resume NAME left; NAME stands for this model (default: start over)",
    )


def run(options: argparse.Namespace) -> int:
    """Compute the scores, and print a description of them."""
    begin = time.perf_counter()
    model, sizes = load_model(options.model)
    feature = options.feature or sizes.feature
    with open_graph(options.path, options) as graph:
        arguments: dict[str, Any] = {
            "dtype": torch.float32,
            "overwrite": options.overwrite,
            "resume": options.resume,
            "progress": not options.json,
        }
        if isinstance(model, HeteroSAGE):
            assert isinstance(sizes, HeteroSizes)
            features = _features_of_types(graph, sizes, feature)
            store = infer(graph, model.inference_layers(), features, options.out, **arguments)[sizes.target]
        else:
            assert isinstance(sizes, ModelSizes)
            check_feature(graph, feature)
            shape = tuple(graph.features[feature].shape)
            if shape[1:] != (sizes.n_in,):
                raise ValueError(f"--model: it takes rows of {sizes.n_in} numbers, and {feature!r} has shape {shape}")
            store = infer(graph, model.inference_layers(), feature, options.out, **arguments)
        result: dict[str, Any] = {
            "path": graph.path,
            "name": store.name,
            "shape": list(store.shape),
            "bytes": store.nbytes,
            "layers": sizes.n_layers,
            "seconds": round(time.perf_counter() - begin, 3),
        }
    rows, classes = result["shape"]
    text = (
        f"{result['path']}: feature {store.name}, scores of {rows:,} nodes for {classes:,} classes, {format_size(store.nbytes)}"
    )
    print_result(options, result, f"{text}, made in {result['seconds']:.1f} s")
    return 0


def _features_of_types(graph: OutOfCoreGraph, sizes: HeteroSizes, feature: str) -> dict[str, str]:
    """Name the feature of each type that has one in the model; ValueError if the model is of other types, or other rows."""
    if graph.types.is_one or set(sizes.widths) != set(graph.node_types) or set(sizes.edge_types) != set(graph.edge_types):
        kinds = ", ".join([*map(repr, sizes.widths), *(repr(edge_name(key)) for key in sizes.edge_types)])
        there = ", ".join([*map(repr, graph.node_types), *(repr(edge_name(key)) for key in graph.edge_types)])
        raise ValueError(f"--model: it is of the types {kinds}, and the dataset has {there}")
    found = {kind: feature for kind, width in sizes.widths.items() if width}
    for kind, width in sizes.widths.items():
        there = graph[kind].features
        shape = tuple(there[feature].shape) if feature in there else (graph[kind].num_nodes, 0)
        if width and shape[1:] != (width,):
            raise ValueError(f"--model: it takes rows of {width} numbers, and {kind + '/' + feature!r} has shape {shape}")
    return found
