"""Train GraphSAGE under Ray Train: each worker has its share of the batches; after a lost worker or machine training goes on.

    python examples/train_ray.py DATASET --storage /shared/runs --workers 2           # Ray starts here
    python examples/train_ray.py DATASET --storage /shared/runs --address auto        # in a cluster that runs already

The dataset, with a feature "x", labels "y" and seeds "train_idx", is in this directory on every machine of the cluster. A run
that was ended goes on if it is started again under its name. Needs Ray: in a clone, pip install '.[ray]'.
"""

import argparse
import os
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy
from train_sage import SAGE

import featstore
from featstore.adapters.ray import training


def setup(g: featstore.OutOfCoreGraph, config: dict) -> tuple[torch.nn.Module, torch.optim.Optimizer, featstore.Loader]:
    """Set up what each worker trains; Ray's process group is there, and the loader takes its rank from it."""
    torch.manual_seed(0)
    n_classes = int(g.node_data["y"].max()) + 1
    model = SAGE(g.features["x"].shape[1], *[config["hidden"]] * (len(config["fanouts"]) - 1), n_classes)
    sampler = featstore.NeighborSampler(g, config["fanouts"], seed=0)
    device = ray.train.torch.get_device()
    loader = featstore.Loader(g, sampler, g.node_data["train_idx"], config["batch_size"], device=device)
    return model, torch.optim.Adam(model.parameters(), lr=config["lr"]), loader


def loss(model: torch.nn.Module, batch: featstore.MiniBatch) -> torch.Tensor:
    return cross_entropy(model(batch.x, batch.blocks), batch.y)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GraphSAGE on a featstore dataset under Ray Train.")
    parser.add_argument("dataset")
    parser.add_argument("--storage", required=True, help="where checkpoints go: a directory or address that all machines reach")
    parser.add_argument("--name", default="featstore", help="of the run")
    parser.add_argument("--address", help="of a running cluster; by default Ray starts on this machine")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--memory", default="1GiB", help="all that featstore may hold in a worker")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000, help="seeds of a worker's batch")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()

    # Workers import train_sage from this folder, wherever they are.
    ray.init(options.address, runtime_env={"working_dir": os.fspath(Path(__file__).resolve().parent)}, log_to_driver=False)
    trainer = TorchTrainer(
        training(
            Path(options.dataset).resolve(),
            setup,
            loss,
            epochs=options.epochs,
            checkpoint_every=options.every,
            memory=options.memory,
        ),
        train_loop_config={name: getattr(options, name) for name in ("fanouts", "hidden", "batch_size", "lr")},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=3)),
    )
    found = trainer.fit()
    for _, metrics in found.best_checkpoints:
        print(f"epoch {metrics['epoch']}, batch {metrics['batch']}: loss {metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
