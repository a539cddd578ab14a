"""Train GraphSAGE in several processes, which may be lost: each has its share of the batches, rank 0 writes a checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_ddp.py DATASET --checkpoint train.pt
    python examples/train_ddp.py DATASET  # one process

Started again, by torchrun or by you, with as many processes or not, it goes on with the batches that were to come. The dataset
has a feature "x", labels "y", and seeds "train_idx" and "test_idx".
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train_sage import SAGE

import featstore


def accuracy(g: featstore.OutOfCoreGraph, model: torch.nn.Module, sampler: featstore.NeighborSampler, batch_size: int) -> float:
    """Evaluate in this process alone: the loader is told so."""
    seeds = g.node_data["test_idx"]
    model.eval()
    with featstore.Loader(g, sampler, seeds, batch_size, strategy="ondemand", shuffle=False, rank=0, world_size=1) as test:
        with torch.no_grad():
            right = sum(int((model(batch.x, batch.blocks).argmax(1) == batch.y).sum()) for batch in test)
    model.train()
    return right / len(seeds)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with featstore.open(options.dataset, memory=options.memory) as g:  # the memory of each process
        sampler = featstore.NeighborSampler(g, options.fanouts, seed=0)
        loader = featstore.Loader(g, sampler, g.node_data["train_idx"], options.batch_size, strategy="superbatch")
        n_classes = int(g.node_data["y"].max()) + 1
        widths = [g.features["x"].shape[1], *[options.hidden] * (len(options.fanouts) - 1), n_classes]
        model = SAGE(*widths)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

        if options.checkpoint and os.path.exists(options.checkpoint):
            state = torch.load(options.checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            if is_first:
                print(f"going on with batch {state['loader']['batch']} of epoch {state['loader']['epoch']}", flush=True)

        def save() -> None:
            if is_first and options.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
                torch.save(state, f"{options.checkpoint}.tmp")
                os.replace(f"{options.checkpoint}.tmp", options.checkpoint)  # the old one is whole until the new one is

        trained = DistributedDataParallel(model) if dist.is_initialized() else model
        with loader:
            while (epoch := loader.state_dict()["epoch"]) < options.epochs:
                for step, batch in enumerate(loader, 1):
                    loss = cross_entropy(trained(batch.x, batch.blocks), batch.y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if step % options.every == 0:
                        save()
                save()
                if is_first:
                    right = accuracy(g, model, sampler, options.batch_size)
                    print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {right:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GraphSAGE on a featstore dataset, in one process or under torchrun.")
    parser.add_argument("dataset")
    parser.add_argument("--memory", default="1GiB", help="all that featstore may hold in a process")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000, help="seeds of a process's batch")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--checkpoint", help="where training stands, read at the start if it is there")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        train(options)
        return
    # Where one process is lost, torchrun ends the others by SIGTERM: as an exception it lets the loader remove its run files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    dist.init_process_group("gloo")  # a process that is lost is an error of the next step, within the group's time-out
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
