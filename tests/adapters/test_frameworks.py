"""Lightning, Fabric and accelerate leave a loader alone: in one process and in two its batches are those without a framework."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import featstore
from tests.support.programs import run_in_fork
from tests.support.ranks import held_port
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("_program_server")

N, BATCH, EPOCHS = 400, 30, 2
SEEDS = np.random.default_rng(1).permutation(N)[:200]
Batch = tuple[int, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the dataset ``g``, in which ranks write what they had."""
    rng, found = np.random.default_rng(0), tmp_path_factory.mktemp("frameworks")
    options: dict[str, Any] = {"features": {"x": rng.standard_normal((N, 8)).astype(np.float32)}, "memory": "16MiB"}
    edges = rng.integers(0, N, (2, 4 * N))
    featstore.OutOfCoreGraph.from_edge_index(found / "g", edges, N, **options, progress=False).close()
    return found


def seen(batch: featstore.MiniBatch) -> Batch:
    """Return a batch's number, and a digest of its nodes and rows."""
    assert isinstance(batch, featstore.MiniBatch)
    return batch.index, hashlib.sha256(batch.input_ids.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest()[:16]


def loader_of(g: featstore.OutOfCoreGraph, **options: Any) -> featstore.Loader:
    return featstore.Loader(g, featstore.NeighborSampler(g, [3, 2], seed=1), SEEDS, BATCH, strategy="ondemand", **options)


def expected(folder: Path, rank: int, world_size: int) -> list[list[Batch]]:
    """List the batches of each epoch of a loader without a framework."""
    with featstore.open(folder / "g", memory="16MiB") as g, loader_of(g, rank=rank, world_size=world_size) as loader:
        return [[seen(batch) for batch in loader] for _ in range(EPOCHS)]


# -- what a rank does ----------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """One layer: what is trained does not matter here, that every rank steps as often does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, batch: featstore.MiniBatch) -> torch.Tensor:
        return self.layer(batch.x[: len(batch.seeds)]).square().mean()


def with_accelerate(loaders: Callable[[], Iterator[Any]], folder: Path) -> Iterator[list[list[Batch]]]:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    def accelerator_of() -> Any:
        """Return one of a new program: what it checkpoints is its own; it dispatches the batches of a DataLoader."""
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))

    accelerator, net, state = accelerator_of(), Net(), folder / "accelerate"  # first of all: it makes the process group
    for each in loaders():
        loader = each.dataset  # of a DataLoader, too, which accelerate would divide
        model, optimizer, prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        assert prepared is loader
        accelerator.register_for_checkpointing(loader)
        if loader is each:
            yield [[step(model, optimizer, batch, accelerator.backward) for batch in prepared] for _ in range(EPOCHS)]
            loader.set_epoch(0)
            before = [step(model, optimizer, batch, accelerator.backward) for batch in itertools.islice(prepared, 2)]
            accelerator.save_state(str(state))
            accelerator.wait_for_everyone()
            refuses(AttributeError, "drop_last", lambda loader=loader: skip_first_batches(loader, 2))
            accelerator = accelerator_of()
        else:  # a fresh loader goes on where the other one was saved
            accelerator.load_state(str(state))
            after = [step(model, optimizer, batch, accelerator.backward) for batch in prepared]
            yield [before + after, *([seen(batch) for batch in prepared] for _ in range(EPOCHS - 1))]
    accelerator.end_training()


def with_fabric(loaders: Callable[[], Iterator[Any]], folder: Path) -> Iterator[list[list[Batch]]]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for loader in loaders():
        prepared = loader
        if isinstance(loader, DataLoader):
            prepared = fabric.setup_dataloaders(loader)
        yield [[step(model, optimizer, batch, fabric.backward) for batch in prepared] for _ in range(EPOCHS)]


def step(model: Any, optimizer: Any, batch: Any, backward: Callable[[torch.Tensor], object]) -> Batch:
    optimizer.zero_grad()
    backward(model(batch))
    optimizer.step()
    return seen(batch)


def with_lightning(loaders: Callable[[], Iterator[Any]], folder: Path) -> Iterator[list[list[Batch]]]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, loader: Any = None) -> None:
            super().__init__()
            self.net, self.found, self.loader, self.saves = Net(), list[list[Batch]](), loader, False

        def train_dataloader(self) -> Any:
            self.loader = next(all_loaders) if self.loader is None else self.loader  # the process group is there now
            return self.loader

        def on_train_epoch_start(self) -> None:
            self.found.append([])

        def training_step(self, batch: Any) -> torch.Tensor:
            self.found[-1].append(seen(batch))
            return self.net(batch)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.saves:
                self.trainer.save_checkpoint(path)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(**options: Any) -> Any:
        off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        devices = int(os.environ["WORLD_SIZE"])
        return lightning.Trainer(accelerator="cpu", devices=devices, strategy="ddp", **off, **options)

    all_loaders, path = loaders(), folder / "lightning.ckpt"
    for _ in range(2):
        module = Module()
        trainer(max_epochs=EPOCHS).fit(module)
        yield module.found
    # A checkpoint within an epoch has the loader's state; a fit from it runs the batches that were to come.
    loader = module.loader.dataset
    loader.set_epoch(0)
    before, after = Module(loader), Module(loader)
    before.saves = True
    trainer(max_steps=2).fit(before)
    after.found.append([])  # the epoch has begun before
    trainer(max_epochs=EPOCHS).fit(after, ckpt_path=path)
    yield [before.found[0] + after.found[0], *after.found[1:]]


WAYS = {"accelerate": with_accelerate, "fabric": with_fabric, "lightning": with_lightning}


def run_rank(folder: Path, way: str, rank: int, world_size: int, port: int) -> None:
    """Run the framework on the loader itself and on a DataLoader of it; write the batches that it had."""
    given = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="tests")  # as torchrun says it
    warnings.simplefilter("ignore")  # what frameworks advise is not of us
    warnings.simplefilter("error", featstore.FeatstoreWarning)
    torch.set_num_threads(1)
    with featstore.open(folder / "g", memory="16MiB", threads=1) as g:

        def loaders() -> Iterator[Any]:
            with loader_of(g) as loader:
                yield loader
            with loader_of(g) as loader:
                yield DataLoader(loader, batch_size=None)

        (folder / f"{way}-{world_size}-{rank}.json").write_text(json.dumps(list(WAYS[way](loaders, folder))))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_ranks(folder: Path, framework: str, ways: list[str]) -> None:
    """Fork ranks of one process and of two, after the framework is imported, which takes most of the time."""
    importlib.import_module(framework)
    for way, world_size in itertools.product(ways, (1, 2)):
        with held_port() as port:
            arguments = [(folder, way, rank, world_size, port) for rank in range(world_size)]
            ranks = [get_context("fork").Process(target=run_rank, args=each) for each in arguments]
            join(ranks)


def join(processes: Iterable[Any]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)


@pytest.mark.parametrize(("framework", "ways"), {"accelerate": ["accelerate"], "lightning": ["fabric", "lightning"]}.items())
def test_batches_are_those_without_the_framework(folder: Path, framework: str, ways: list[str]) -> None:
    run_in_fork(run_ranks, folder, framework, ways, timeout_s=500)
    for way, world_size in itertools.product(ways, (1, 2)):
        for rank in range(world_size):
            had = json.loads((folder / f"{way}-{world_size}-{rank}.json").read_text())
            assert len(had) == {"accelerate": 2, "fabric": 2, "lightning": 3}[way]
            for each in had:
                assert [[tuple(batch) for batch in epoch] for epoch in each] == expected(folder, rank, world_size)


# -- torch's DataLoader, and what frameworks look for ----------------------------------------------------------------------------


def test_a_loader_is_an_iterable_dataset(folder: Path) -> None:
    with featstore.open(folder / "g", memory="16MiB") as g, loader_of(g) as loader:
        assert isinstance(loader, IterableDataset)
        assert loader.dataset is loader
        assert isinstance(loader.sampler, featstore.NeighborSampler)
        wrapped = DataLoader(loader, batch_size=None)
        assert len(wrapped) == len(loader)
        loader.set_epoch(1)
        assert [[seen(batch) for batch in wrapped]] == expected(folder, 0, 1)[1:]
        assert loader.state_dict()["epoch"] == 2


def test_workers_of_a_dataloader_are_refused_and_the_loader_goes_on(folder: Path) -> None:
    with featstore.open(folder / "g", memory="16MiB") as g, loader_of(g) as loader:
        forked = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
        refuses(featstore.ClosedError, r"belongs to the parent process: .* takes num_workers=0", lambda: list(forked))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, before the error
            spawned = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
            refuses(TypeError, "cannot be pickled .* takes num_workers=0", lambda: list(spawned))
        assert [[seen(batch) for batch in loader]] == expected(folder, 0, 1)[:1]
