"""A training function for Ray Train's ``TorchTrainer``; its checkpoints say which batch comes next."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
import ray.util
import torch

from featstore.config import check_at_least, listed
from featstore.graph.dataset import OutOfCoreGraph
from featstore.load.loader import Loader
from featstore.load.statefile import read_state, write_state

__all__ = ["Machine", "training"]

KIND, NAME = "ray-train", "featstore"

Path = str | os.PathLike[str]
Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Loader]


@dataclass(frozen=True)
class Machine:
    """The machine of a worker: a node of Ray's cluster.

    Attributes
    ----------
    node_id : str
        Of Ray.
    hostname, address : str
    labels : mapping of str to str
        The node's labels, as ``ray start --labels`` gave them.
    """

    node_id: str
    hostname: str
    address: str
    labels: Mapping[str, str]

    @classmethod
    def here(cls) -> Machine:
        """Describe the machine of this process, which is connected to Ray."""
        context = ray.get_runtime_context()
        labels: Any = context.get_node_labels()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return cls(context.get_node_id(), socket.gethostname(), address, labels)


def _check_path(path: Any) -> None:
    if not (isinstance(path, (str, os.PathLike, Mapping)) or callable(path)):
        raise TypeError(f"path must be a path, a mapping of machines to paths or a callable, not a {type(path).__name__}")


def _directory(path: Path | Mapping[str, Path] | Callable[[Machine], Path], machine: Machine) -> Path:
    """Choose the dataset's directory on a machine; ValueError: the mapping has none for it."""
    if callable(path):
        return path(machine)
    if not isinstance(path, Mapping):
        return path
    for name in (machine.node_id, machine.hostname, machine.address):
        if name in path:
            return path[name]
    raise ValueError(f"path: no directory for {machine}; there are those of {listed(path)}")


def training(
    path: Path | Mapping[str, Path] | Callable[[Machine], Path],
    setup: Callable[[OutOfCoreGraph, dict[str, Any]], Parts],
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    epochs: int,
    checkpoint_every: int | None = None,
    **options: Any,
) -> Callable[[dict[str, Any]], None]:
    """Make a training function for ``ray.train.torch.TorchTrainer``.

    Each worker opens the dataset on its machine, trains on its rank's share of the batches, and reports the loss. After a
    failure Ray starts the workers again, if ``FailureConfig(max_failures=)`` allows it. They go on with the batch after the last
    checkpoint, also if they are more or fewer then, unless the loader's state needs as many: that of a pack, of
    :class:`~featstore.PartBatches`, and of a strategy that runs batches in an order of its own.

    Parameters
    ----------
    path : path-like, mapping of str to path-like, or callable
        The dataset's directory. If it differs by machine: directories by node id, host name or address; or a callable of the
        :class:`Machine`. All must be of one dataset, such as copies.
    setup : callable
        ``setup(g, config)`` returns ``(model, optimizer, loader)`` in each worker. ``config`` is the trainer's
        ``train_loop_config``. Ray's process group is there, so the loader takes its rank from it. The model is then prepared by
        ``ray.train.torch.prepare_model``; ``device=ray.train.torch.get_device()`` delivers batches on its device.
    loss : callable
        ``loss(model, batch)`` is the mean loss of a batch, a scalar tensor. Gradients are averaged over ranks.
    epochs : int
        Epochs to train in all, those before a failure included.
    checkpoint_every : int, optional
        Steps between checkpoints within an epoch. There is always one after an epoch.
    **options
        Options of :func:`featstore.open`, such as ``memory=``, which is that of a worker.

    Returns
    -------
    callable
        ``TorchTrainer(training(…), scaling_config=…, run_config=…)``. It reports with each checkpoint ``epoch`` and ``batch``,
        which come next (batches of all ranks together); ``step``, the steps so far; ``loss``, its mean over the seeds of all
        ranks since the last checkpoint.

    Raises
    ------
    TypeError, ValueError
        An argument is of a wrong type or out of range. In a worker: ``path`` has no directory for its machine; the loader has no
        batch; the checkpoint is of another graph or of other batches.

    Notes
    -----
    A checkpoint has the states of the model, the optimizer and the loader, without pickle. The states may hold tensors, numbers,
    texts, mappings and sequences. It has no random state: a model that draws, as dropout does, goes on with other draws.
    Nor has it a :class:`~featstore.History`, which begins empty.
    """
    _check_path(path)
    for name, each in {"setup": setup, "loss": loss}.items():
        if not callable(each):
            raise TypeError(f"{name} must be a callable, not a {type(each).__name__}")
    epochs = check_at_least("epochs", epochs, 1)
    every = None if checkpoint_every is None else check_at_least("checkpoint_every", checkpoint_every, 1)

    def train(config: dict[str, Any]) -> None:
        with OutOfCoreGraph.open(_directory(path, Machine.here()), **options) as g:
            model, optimizer, loader = setup(g, config)
            with loader:
                run = _Run(model, optimizer, loader)
                run.restore()
                if not len(loader):
                    raise ValueError("the loader has no batch")
                while (epoch := run.position["epoch"]) < epochs:
                    for batch in loader:
                        run.step(loss, batch)
                        if run.position["epoch"] > epoch or (every is not None and run.n_steps % every == 0):
                            run.report()

    return train


class _Run:
    """The training of one worker, from its start or from a checkpoint."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
        self._parts = {"model": model, "optimizer": optimizer, "loader": loader}
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self.n_steps = 0
        self._sums = torch.zeros(2, dtype=torch.float64, device="cpu")  # of losses and of seeds, since the last report

    @property
    def position(self) -> dict[str, Any]:
        """The epoch and the batch that come next."""
        return self._loader.state_dict()

    def restore(self) -> None:
        """Prepare the model, and go on from the run's last checkpoint, if there is one."""
        self._model = ray.train.torch.prepare_model(self._model)  # first: an optimizer loads to where its parameters are
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state = read_state(os.path.join(folder, NAME), KIND)
            for name, part in self._parts.items():
                part.load_state_dict(state[name])  # type: ignore[attr-defined]
            self.n_steps = state["step"]

    def step(self, loss: Callable[[torch.nn.Module, Any], torch.Tensor], batch: Any) -> None:
        """Train on a batch."""
        self._optimizer.zero_grad()
        value = loss(self._model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        n = len(batch.seeds)
        self._sums += torch.tensor([value.item() * n, n], dtype=torch.float64, device="cpu")
        self.n_steps += 1

    def report(self) -> None:
        """Report the loss of all ranks since the last report, and a checkpoint of rank 0, whose states are those of all."""
        sums = self._sums.to(ray.train.torch.get_device(), copy=True)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        position = self.position
        metrics = {"epoch": position["epoch"], "batch": position["batch"], "step": self.n_steps}
        metrics["loss"] = (sums[0] / sums[1]).item()
        self._sums.zero_()
        with tempfile.TemporaryDirectory(prefix="featstore-ray-") as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                states = {name: part.state_dict() for name, part in self._parts.items()}  # type: ignore[attr-defined]
                write_state(os.path.join(folder, NAME), KIND, {**states, "step": self.n_steps})
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)  # returns once the checkpoint is where Ray keeps it
