"""Build a dataset from a folder of real graphs and train on it: python examples/real_graph.py [FOLDER] --graph linux414-calls

FOLDER holds .npz files and a ``graphs.py`` with ``load(name)`` and ``feature_blocks(z)``, which yields dense rows a block at a
time: the features (1.36 GB for linux414-calls) are never in memory as a whole, neither here nor while training.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import featstore
from featstore.cli.train import add_arguments, train_as_asked
from featstore.cli.training import TrainResult, describe_training

CHECKOUT = Path(__file__).resolve().parent.parent


def import_graphs(folder: Path) -> ModuleType:
    """Import the folder's own loader."""
    spec = importlib.util.spec_from_file_location("graphs", folder / "graphs.py")
    if spec is None or spec.loader is None or not (folder / "graphs.py").is_file():
        raise SystemExit(f"{folder}: no graphs.py there; give the folder of the real graphs")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, name: str, path: Path) -> None:
    """Create the dataset ``path`` with feature ``x``, labels ``y`` and the splits' seeds, streaming the features."""
    graphs = import_graphs(folder)
    indptr, indices, z = graphs.load(name)
    if "x_shape" not in z or "y" not in z:
        raise SystemExit(f"{name} has no features or no labels")
    n, d = (int(v) for v in z["x_shape"])
    node_data: dict[str, Any] = {"y": z["y"].astype(np.int64)}
    for split in ("train", "val", "test"):
        node_data[f"{split}_idx"] = np.flatnonzero(z[f"{split}_mask"])
    blocks = graphs.feature_blocks({key: z[key] for key in ("x_shape", "x_indptr", "x_indices", "x_data")}, rows=16384)
    features = {"x": ((n, d), np.float32, blocks)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features=features, node_data=node_data).close()


def run(path: Path, options: argparse.Namespace) -> TrainResult:
    """Train within the budget, and print a line an epoch and where time and rows went."""
    result = train_as_asked(path, options)
    print("", describe_training(result), sep="\n")
    return result


def main(argv: list[str] | None = None) -> TrainResult:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train on a real graph, in 400 MB and behind a degree cache by default.")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=CHECKOUT.parent / "shared" / "data", help="real graphs and graphs.py"
    )
    parser.add_argument("--graph", default="linux414-calls", help="linux414-calls, cora, musae_github")
    parser.add_argument("--dataset", type=Path, help="keep the dataset here, and use it if it is there")
    add_arguments(parser)  # what `featstore train` takes
    parser.set_defaults(memory=400_000_000, neighbor_cache=0.125, cache="auto", policy="degree")
    options = parser.parse_args(argv)
    if options.dataset is not None:
        if not options.dataset.exists():
            build(options.folder, options.graph, options.dataset)
        return run(options.dataset, options)
    with tempfile.TemporaryDirectory(prefix="featstore-", dir=".") as scratch:
        build(options.folder, options.graph, Path(scratch) / options.graph)
        return run(Path(scratch) / options.graph, options)


if __name__ == "__main__":
    main()
