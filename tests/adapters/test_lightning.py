"""Lightning's Trainer over a DataModule: batches of loaders, in one budget, a rank's share each; training resumes in place."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import MissingExtraError
from tests.support.programs import run_in_fork
from tests.support.ranks import held_port
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("_program_server")

N, BATCH, EPOCHS = 600, 30, 3
TRAIN, VAL, TEST = np.split(np.random.default_rng(1).permutation(N), [200, 310])
STEPS = 7  # in an epoch
Batch = tuple[int, int, str]
OF_LIGHTNING = [
    "The `srun` command",
    "The '.*_dataloader' does not have many workers",
    "`isinstance\\(treespec, LeafSpec\\)`",
    "Checkpoint directory .* exists",
    "`?.fit\\(ckpt_path=",  # with OnExceptionCheckpoint it looks for the last one
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the dataset ``g`` and of checkpoints."""
    rng, found = np.random.default_rng(0), tmp_path_factory.mktemp("lightning")
    options: dict[str, Any] = {"features": {"x": rng.standard_normal((N, 8)).astype(np.float32)}, "memory": "16MiB"}
    options |= {"node_data": {"y": rng.integers(0, 3, N)}, "progress": False}
    featstore.OutOfCoreGraph.from_edge_index(found / "g", rng.integers(0, N, (2, 4 * N)), N, **options).close()
    return found


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the graph, and a sampler of it."""
    with featstore.open(folder / "g", memory="32MiB", threads=1) as g:
        yield g, featstore.NeighborSampler(g, [3, 2], seed=1)


def digest(batch: featstore.MiniBatch) -> str:
    return hashlib.sha256(batch.input_ids.numpy().tobytes() + batch.x.numpy().tobytes() + batch.y.numpy().tobytes()).hexdigest()[
        :16
    ]


def expected(folder: Path, epochs: int = EPOCHS, **options: Any) -> list[list[tuple[int, str]]]:
    """List the batches of each epoch of a loader without Lightning."""
    with opened(folder) as (g, sampler):
        with featstore.Loader(g, sampler, **{"batch_size": BATCH, "strategy": "ondemand", **options}) as loader:
            return [[(batch.index, digest(batch)) for batch in loader] for _ in range(epochs)]


def flat(epochs: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(epochs))


# -- in a fork: Lightning is imported there --------------------------------------------------------------------------------------


class Stopped(Exception):
    """The error that ends a training."""


def model_of(**hooks: Callable[[Any, int], None]) -> Any:
    """Return a module that notes its batches by stage and epoch; ``hooks`` are called with it and the step, by name."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(8, 3)
            self.found: dict[str, list[Any]] = {name: [] for name in ("train", "val", "test", "predict")}

        def loss(self, name: str, batch: Any) -> torch.Tensor:
            assert isinstance(batch, featstore.MiniBatch)
            loss = torch.nn.functional.cross_entropy(self.layer(batch.x[: len(batch.seeds)]), batch.y)
            self.log(name, loss.detach(), batch_size=len(batch.seeds))
            self.call("step", batch.index)
            self.found[name].append((batch.index, digest(batch)))
            return loss

        def call(self, name: str, step: int) -> None:
            if name in hooks:
                hooks[name](self, step)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.loss("train", batch)

        def validation_step(self, batch: Any) -> torch.Tensor:
            return self.loss("val", batch)

        def test_step(self, batch: Any) -> torch.Tensor:
            return self.loss("test", batch)

        def predict_step(self, batch: Any) -> torch.Tensor:
            self.found["predict"].append((batch.index, digest(batch)))
            return batch.seeds.clone()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.call("batch_end", self.trainer.global_step)

        def on_train_epoch_end(self) -> None:
            self.call("epoch_end", self.trainer.global_step)

        def on_validation_end(self) -> None:
            self.call("validation_end", self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    return Model()


def trainer_of(**options: Any) -> Any:
    import lightning.pytorch as pl

    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    return pl.Trainer(accelerator="cpu", **{"devices": 1, "max_epochs": EPOCHS, **off, **options})


def module_of(g: Any, sampler: Any, **options: Any) -> Any:
    from featstore.adapters.lightning import DataModule

    return DataModule(g, sampler, TRAIN, VAL, **{"batch_size": BATCH, "strategy": "ondemand", **options})


def quiet() -> None:
    """Let warnings be errors, but for what Lightning says of the machine."""
    warnings.simplefilter("ignore")
    importlib.import_module("lightning.pytorch")
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in OF_LIGHTNING:
        warnings.filterwarnings("ignore", message=message)


def run_stages(folder: Path) -> None:
    quiet()
    with opened(folder) as (g, sampler):
        data = module_of(g, sampler, test=TEST, predict=VAL, shuffle=True, drop_last=True, evaluation={"batch_size": 50})
        model, held = model_of(), g.memory_report().used
        trainer = trainer_of()
        trainer.fit(model, datamodule=data)
        assert not data.loaders
        trainer.test(model, datamodule=data, verbose=False)
        predicted = trainer.predict(model, datamodule=data)
        assert torch.equal(torch.cat(predicted), torch.from_numpy(VAL))
        assert not data.loaders
        g.pool.trim()
        assert "loader order" not in g.memory_report()
        assert g.memory_report().used <= held + g.reader.held_bytes
    whole = {"batch_size": 50, "shuffle": False}
    assert model.found["train"] == flat(expected(folder, seeds=TRAIN, drop_last=True))
    (val,) = expected(folder, 1, seeds=VAL, **whole)
    assert model.found["val"] == val[:2] + EPOCHS * val  # the first two are Lightning's check before training
    assert model.found["test"] == expected(folder, 1, seeds=TEST, **whole)[0]
    assert model.found["predict"] == val


def test_stages_have_the_batches_of_loaders(folder: Path) -> None:
    """Each epoch of validation the same; nothing is left in the graph's memory, and the graph is open still."""
    run_in_fork(run_stages, folder)


def run_left(folder: Path) -> None:
    quiet()
    with opened(folder) as (g, sampler):
        found: list[dict[str, Any]] = []

        def note(model: Any, step: int) -> None:
            found.append({name: loader.stats()["epochs_beside"] for name, loader in data.loaders.items()})

        strategy = featstore.Superbatch(cache=0.2, length=2)
        data = module_of(g, sampler, strategy=strategy, evaluation={"strategy": strategy})
        trainer_of(limit_val_batches=3).fit(model_of(epoch_end=note), datamodule=data)
        assert found[-1] == {"train": 0, "val": 0}


@pytest.mark.filterwarnings("ignore::featstore.errors.PerformanceWarning")
def test_an_epoch_that_lightning_leaves_does_not_keep_the_caches(folder: Path) -> None:
    """Validation that ends at a limit, as the check before training does, would else have training read on demand."""
    run_in_fork(run_left, folder)


def stop_after(steps: int, path: Path) -> dict[str, Any]:
    """Save after ``steps``, and stop by a callback of the model's."""

    def batch_end(model: Any, step: int) -> None:
        if step == steps:
            model.trainer.save_checkpoint(path)
            model.trainer.should_stop = True

    return {"batch_end": batch_end}


def fail_in(steps: int) -> dict[str, Any]:
    """Fail within the step after ``steps``."""

    def step(model: Any, index: int) -> None:
        if model.trainer.training and model.trainer.global_step == steps:
            raise Stopped

    return {"step": step}


def save_at(hook: str, path: Path, steps: int) -> dict[str, Any]:
    def save(model: Any, step: int) -> None:
        if step == steps:
            model.trainer.save_checkpoint(path)
            raise Stopped

    return {hook: save}


def ways(path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """List how a training ends with a checkpoint: the model's hooks, the trainer's options, and those of the one that goes on."""
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1, "dirpath": path.parent, "filename": "way"}
    every |= {"enable_version_counter": False}

    def with_callback(callback: Any) -> dict[str, Any]:
        return {"callbacks": [callback], "enable_checkpointing": True}

    keeps, then_keeps = (with_callback(ModelCheckpoint(**every)) for _ in range(2))
    fails = [with_callback(OnExceptionCheckpoint(path.parent, "way")) for _ in range(4)]
    steps = {"max_epochs": -1, "max_steps": EPOCHS * STEPS}
    return {
        "a callback stops it": (stop_after(10, path), {}, {}),
        "max_steps": ({}, {"max_steps": 10, **keeps}, then_keeps),
        "max_steps, resumed by steps": (stop_after(10, path), {"max_steps": 11}, steps),
        "within validation in an epoch": (
            save_at("validation_end", path, 9),
            {"val_check_interval": 2},
            {"val_check_interval": 2},
        ),
        "after the validation of an epoch": (save_at("validation_end", path, STEPS), {}, {}),
        "at the end of an epoch": (save_at("epoch_end", path, STEPS), {}, {}),
        "an exception within a step": (fail_in(10), fails[0], fails[1]),
        "an exception in the first step": (fail_in(0), fails[2], fails[3]),
        "after the validation of an epoch that was cut": (
            save_at("validation_end", path, 5),
            {"limit_train_batches": 5},
            {"limit_train_batches": 5},
        ),
        "after the end of an epoch that was cut": (
            save_at("epoch_end", path, 5),
            {"limit_train_batches": 5},
            {"limit_train_batches": 5},
        ),
    }


def run_resumed(folder: Path) -> None:
    quiet()
    whole = flat(expected(folder, seeds=TRAIN))
    path = folder / "way.ckpt"
    with opened(folder) as (g, sampler):
        uninterrupted = model_of()
        trainer_of().fit(uninterrupted, datamodule=module_of(g, sampler))
        assert uninterrupted.found["train"] == whole
    for name, (hooks, before, after) in ways(path).items():
        path.unlink(missing_ok=True)
        with opened(folder) as (g, sampler):
            first, data = model_of(**hooks), module_of(g, sampler)
            with contextlib.suppress(Stopped):
                trainer_of(**before).fit(first, datamodule=data)
            assert not data.loaders, name
        with opened(folder) as (g, sampler):
            second = model_of()
            trainer_of(**after).fit(second, datamodule=module_of(g, sampler), ckpt_path=path, weights_only=True)
        found = first.found["train"] + second.found["train"]
        if "cut" in name:
            assert found == flat(epoch[:5] for epoch in expected(folder, seeds=TRAIN)), name
        else:
            assert found == whole, name
            assert torch.equal(second.layer.weight, uninterrupted.layer.weight), name


def test_training_goes_on_where_its_checkpoint_was_made(folder: Path) -> None:
    """Wherever it was made: the batches and the weights are those of a training that nothing interrupted."""
    run_in_fork(run_resumed, folder)


def run_again(folder: Path) -> None:
    quiet()
    path = folder / "again.ckpt"
    with opened(folder) as (g, sampler):
        data = module_of(g, sampler)
        assert data.state_dict() == {}
        trainer, model = trainer_of(max_epochs=1), model_of()
        trainer.fit(model, datamodule=data)
        trainer.save_checkpoint(path)  # where there is no loader any more
        assert torch.load(path, weights_only=True)["DataModule"]["train"]["epoch"] == 1
        trainer.fit_loop.max_epochs = EPOCHS
        trainer.fit(model, datamodule=data)  # the same trainer: its epochs count on
        assert model.found["train"] == flat(expected(folder, seeds=TRAIN))
        other = model_of()
        trainer_of(max_epochs=1).fit(other, datamodule=data)  # another one begins anew
        assert other.found["train"] == expected(folder, 1, seeds=TRAIN)[0]
    with opened(folder) as (g, sampler):
        later, data = model_of(), module_of(g, sampler)
        trainer_of(max_epochs=2).fit(later, datamodule=data, ckpt_path=path, weights_only=True)
        assert later.found["train"] == expected(folder, seeds=TRAIN)[1]
        wrong = module_of(g, sampler, seed=1)
        fit = trainer_of().fit
        refuses(ValueError, "other seeds", lambda: fit(model_of(), datamodule=wrong, ckpt_path=path, weights_only=True))
        assert not wrong.loaders


def test_a_second_fit(folder: Path) -> None:
    """By the same trainer it counts on; by another it begins anew; with a checkpoint of another order it is refused."""
    run_in_fork(run_again, folder)


def run_refused(folder: Path) -> None:
    quiet()
    from featstore.adapters.lightning import DataModule

    refuses(TypeError, "evaluation must be a mapping", lambda: DataModule(None, evaluation=["sampler"]))
    with opened(folder) as (g, sampler):
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        data = module_of(g, sampler)
        for name in ("test", "predict"):
            call = getattr(trainer_of(), name)
            refuses(
                MisconfigurationException,
                f"`{name}_dataloader` must be implemented",
                lambda call=call: call(model_of(), datamodule=data),
            )
        beside = module_of(g, sampler, labels=np.arange(len(TRAIN)))
        refuses(ValueError, "rows of training's seeds", lambda: trainer_of().fit(model_of(), datamodule=beside))
        named = module_of(g, sampler, labels=np.arange(len(TRAIN)) % 3, evaluation={"labels": "y"})
        trainer_of(max_epochs=1).fit(model_of(), datamodule=named)
        none = pickle.loads(pickle.dumps(DataModule(g, sampler, TRAIN, batch_size=BATCH, strategy="ondemand")))
        model = model_of()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You defined a `validation_step`")
            trainer_of(max_epochs=1).fit(model, datamodule=none)
        assert model.found["train"] == expected(folder, 1, seeds=TRAIN)[0]
        assert not model.found["val"]


def test_what_is_refused(folder: Path) -> None:
    run_in_fork(run_refused, folder)


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "featstore.adapters.lightning", raising=False)
    refuses(MissingExtraError, "extra 'lightning'", lambda: importlib.import_module("featstore.adapters.lightning"))


# -- two ranks -----------------------------------------------------------------------------------------------------------------


def run_rank(folder: Path, rank: int, port: int) -> None:
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="tests")  # as torchrun says it
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "max_epochs": 2}
    path, seen = folder / "ddp.ckpt", dict[str, list[Any]](train=[], val=[])
    with opened(folder) as (g, sampler):
        data, model = module_of(g, sampler, test=TEST), model_of()
        trainer_of(num_sanity_val_steps=0, **options).fit(model, datamodule=data)
        trainer_of(**options).test(model, datamodule=data, verbose=False)
        stopped = model_of(**stop_after(2, path))
        trainer_of(**options).fit(stopped, datamodule=data)
    with opened(folder) as (g, sampler):
        resumed = model_of()
        trainer_of(**options).fit(resumed, datamodule=module_of(g, sampler), ckpt_path=path, weights_only=True)
        assert stopped.found["train"] + resumed.found["train"] == model.found["train"]
        assert torch.equal(resumed.layer.weight, model.layer.weight)
    seen = {**model.found, "weight": model.layer.weight.tolist()}
    (folder / f"ddp-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


def run_ranks(folder: Path) -> None:
    """Fork two ranks, after Lightning is imported."""
    warnings.simplefilter("ignore")
    importlib.import_module("lightning.pytorch")
    torch.set_num_threads(1)
    with held_port() as port:
        ranks = [get_context("fork").Process(target=run_rank, args=(folder, rank, port)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    assert not any(each.exitcode for each in ranks)


def test_two_ranks_divide_the_batches_of_one(folder: Path) -> None:
    """Each seed once in every epoch of every stage, on one rank; also where training was interrupted."""
    run_in_fork(run_ranks, folder)
    ranks = [json.loads((folder / f"ddp-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    for name, seeds, shuffle, epochs in (("train", TRAIN, True, 2), ("val", VAL, False, 1), ("test", TEST, False, 1)):
        for rank, found in enumerate(ranks):
            alone = expected(folder, epochs, seeds=seeds, shuffle=shuffle, rank=rank, world_size=2)
            mine = [tuple(batch) for batch in found[name]]
            assert mine == (flat(alone) if name == "train" else (2 if name == "val" else 1) * alone[0]), name
    with opened(folder) as (g, sampler):
        for seeds in (TRAIN, VAL, TEST):
            shares = [
                featstore.Loader(g, sampler, seeds, BATCH, strategy="ondemand", rank=rank, world_size=2) for rank in range(2)
            ]
            held = np.concatenate([batch.seeds.numpy() for share in shares for batch in share])
            assert np.array_equal(np.sort(held), np.sort(seeds))
            for share in shares:
                share.close()
