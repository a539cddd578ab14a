"""``featstore infer``: the class scores of every node by a model that ``featstore train --save`` wrote."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from featstore.cli.arguments import add_making, add_path, check_feature, open_graph
from featstore.cli.model import load_model
from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.inference.infer import infer

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
        check_feature(graph, feature)
        shape = tuple(graph.features[feature].shape)
        if shape[1:] != (sizes.n_in,):
            raise ValueError(f"--model: it takes rows of {sizes.n_in} numbers, and {feature!r} has shape {shape}")
        layers = model.inference_layers()
        store = infer(
            graph,
            layers,
            feature,
            options.out,
            dtype=torch.float32,
            overwrite=options.overwrite,
            resume=options.resume,
            progress=not options.json,
        )
        result: dict[str, Any] = {
            "path": graph.path,
            "name": store.name,
            "shape": list(store.shape),
            "bytes": store.nbytes,
            "layers": len(layers),
            "seconds": round(time.perf_counter() - begin, 3),
        }
    rows, classes = result["shape"]
    text = (
        f"{result['path']}: feature {store.name}, scores of {rows:,} nodes for {classes:,} classes, {format_size(store.nbytes)}"
    )
    print_result(options, result, f"{text}, made in {result['seconds']:.1f} s")
    return 0
