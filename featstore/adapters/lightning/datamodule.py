"""A data module for Lightning's ``Trainer``: a loader for each of its stages, and where training stands, for its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from featstore.config import refuse_path
from featstore.load.loader import Loader
from featstore.load.minibatch import MiniBatch
from featstore.pack.packgraph import Graph

__all__ = ["DataModule", "StageLoader"]

STAGES = ("train", "val", "test", "predict")
OF_TRAINING = ("shuffle", "drop_last", "history", "device_cache", "strategy")  # what evaluation does not take over


class StageLoader:
    """The batches of one stage, for a loop of Lightning's.

    It is no ``DataLoader``, so Lightning puts no sampler of its own into it; and it has a length, so Lightning takes no batch
    ahead of its loop.

    Parameters
    ----------
    loader : Loader
    module : DataModule

    Attributes
    ----------
    loader : Loader
        The loader itself, with its statistics.
    """

    def __init__(self, loader: Loader, module: DataModule) -> None:
        self.loader, self._module = loader, module
        self._epoch: Any = None

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[MiniBatch]:
        """Return an iterator over an epoch of evaluation, which is the first one each time."""
        self._module.end_training()
        self.end_epoch()
        self.loader.set_epoch(0)
        self._epoch = iter(self.loader)
        return self._epoch  # type: ignore[no-any-return]

    def end_epoch(self) -> None:
        """End the epoch, if one is running: Lightning leaves it where its limit of batches is reached."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


class TrainingLoader(StageLoader):
    """The batches of training, whose epochs count up, and which resume; Lightning saves their state in its checkpoints."""

    def __iter__(self) -> Iterator[MiniBatch]:
        """Return an iterator over the next epoch, or over the rest of the epoch that was restored."""
        return TrainingEpoch(self, iter(self.loader))

    def next_of(self, epoch: Iterator[MiniBatch]) -> MiniBatch:
        """Return the next batch of an epoch, which is the running one from now on."""
        self._module.end_evaluation()
        self._epoch = epoch
        return next(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained on; see :meth:`featstore.Loader.state_dict`."""
        taken, trained, most = self._module.progress()
        state = self.loader.state_dict(ahead=max(0, taken - trained))
        is_cut = state["batch"] > 0 and trained >= most  # by Lightning's limit
        return {**state, "epoch": state["epoch"] + 1, "batch": 0} if is_cut else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on within the epoch of the state; Lightning calls this if it does so, too."""
        self.loader.load_state_dict(state)


class TrainingEpoch(Iterator[MiniBatch]):
    """An epoch of training, which begins with its first batch."""

    def __init__(self, loader: TrainingLoader, epoch: Iterator[MiniBatch]) -> None:
        self._loader, self._epoch = loader, epoch

    def __next__(self) -> MiniBatch:
        return self._loader.next_of(self._epoch)


class DataModule(LightningDataModule):
    """Loaders of one graph for Lightning's ``Trainer``, in the one budget that the graph has.

    A loader is made when the trainer asks for it, with the rank and the device of the trainer, and is kept until the trainer
    tears down or fails. A checkpoint has the position of training, also within an epoch: ``fit(ckpt_path=…)`` goes on with the
    batch after the last one trained on. Batches are those of a :class:`~featstore.Loader` without Lightning, bit for bit.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
        It stays open when the trainer is done.
    sampler : Sampler, optional
        None only for a pack's own samples; see :class:`~featstore.Loader`.
    train, val, test, predict : seeds, optional
        Seeds of each stage, in any form that :class:`~featstore.Loader` takes. A stage without seeds is not there for Lightning:
        ``fit`` does not validate, and ``test`` and ``predict`` raise its ``MisconfigurationException``.
    batch_size : int, optional
        Seeds a batch, of each rank; 1000 by default.
    strategy : str, Strategy or class
        Of training; ``"auto"`` by default.
    evaluation : mapping of str to object, optional
        Options of :class:`~featstore.Loader` for ``val``, ``test`` and ``predict``, where they are not those of training, such as
        ``{"sampler": whole, "batch_size": 4000}``. By default ``strategy`` is ``"ondemand"``, which reads through the caches
        that training has, and there is no shuffling, no ``drop_last``, no ``history`` and no ``device_cache``.
    **options
        Other options of :class:`~featstore.Loader`. ``device`` is the trainer's by default.

    Attributes
    ----------
    loaders : dict of str to Loader
        The loaders there are now, by stage.

    Raises
    ------
    TypeError
        ``evaluation`` is no mapping.
    ValueError
        From the trainer: an array of labels, which belongs to the seeds of training, for evaluation. Others, as all errors of
        making a loader, are those of :class:`~featstore.Loader`.

    Notes
    -----
    Each epoch of evaluation draws the same neighbours. A subclass may override :meth:`loader_options`. With a ``history`` the
    module's ``training_step`` calls ``batch.history.merge``; a checkpoint does not hold the history.
    """

    def __init__(
        self,
        g: Graph,
        sampler: Any = None,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        batch_size: int | None = None,
        strategy: Any = "auto",
        evaluation: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_path(g)
        if evaluation is not None and not isinstance(evaluation, Mapping):
            raise TypeError(f"evaluation must be a mapping of options of Loader, not a {type(evaluation).__name__}")
        self.graph = g
        self._seeds = dict(zip(STAGES, (train, val, test, predict), strict=True))
        self._hide_stages()
        self._training = {"sampler": sampler, "batch_size": batch_size, "strategy": strategy, **options}
        self._evaluation = dict(evaluation or {})
        self._stages: dict[str, StageLoader] = {}
        self._restored: dict[str, Any] | None = None  # the position of a checkpoint, before there is a loader
        self._last: dict[str, Any] | None = None  # the position of a loader that was closed

    def _hide_stages(self) -> None:
        """Let stages without seeds have the base class's method, by which Lightning sees that they have no batches."""
        for name in STAGES[1:]:
            if self._seeds[name] is None:
                setattr(self, f"{name}_dataloader", getattr(super(), f"{name}_dataloader"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what :meth:`__setstate__` makes anew. A module with loaders does not travel: they cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if not name.endswith("_dataloader")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        self.__dict__.update(state)
        self._hide_stages()

    @property
    def loaders(self) -> dict[str, Loader]:
        """The loaders there are now, by stage."""
        return {name: stage.loader for name, stage in self._stages.items()}

    def loader_options(self, stage: str) -> dict[str, Any]:
        """Return the options of the loader for ``"train"``, ``"val"``, ``"test"`` or ``"predict"``, seeds included.

        ValueError: the stage would have the labels of training's seeds.
        """
        seeds, trainer = self._seeds[stage], self.trainer
        of_trainer: dict[str, Any] = {}
        if trainer is not None:
            share = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            of_trainer = {"device": trainer.strategy.root_device, "rank": share["rank"], "world_size": share["num_replicas"]}
        if stage == "train":
            return {**of_trainer, "seeds": seeds, **self._training}
        taken = {name: value for name, value in self._training.items() if name not in OF_TRAINING}
        found = {**of_trainer, "seeds": seeds, **taken, "strategy": "ondemand", "shuffle": False, **self._evaluation}
        labels = self._training.get("labels")
        if "labels" not in self._evaluation and (hasattr(labels, "__array__") or isinstance(labels, Mapping)):
            raise ValueError(f"labels= has the rows of training's seeds: say evaluation={{'labels': …}} for {stage!r}")
        return found

    def _stage(self, name: str) -> StageLoader:
        """Make the loader of a stage, if there is none, and return its batches."""
        if name not in self._stages:
            loader = Loader(self.graph, **self.loader_options(name))
            self._stages[name] = (TrainingLoader if name == "train" else StageLoader)(loader, self)
            if name == "train":
                self._begin(loader)
        return self._stages[name]

    def _begin(self, loader: Loader) -> None:
        """Let training begin at the epoch of the trainer, or after what was restored.

        Lightning begins a new epoch, unless it goes on within one: then it restores the loader's state itself.
        """
        if self._restored is not None:
            loader.load_state_dict(self._restored)
            if self._restored["batch"]:
                loader.set_epoch(self._restored["epoch"] + 1)
        elif self.trainer is not None:
            loader.set_epoch(self.trainer.current_epoch)

    def train_dataloader(self) -> StageLoader:
        """Return the batches of training; called by the trainer."""
        return self._stage("train")

    def val_dataloader(self) -> StageLoader:
        """Return the batches of validation; called by the trainer."""
        return self._stage("val")

    def test_dataloader(self) -> StageLoader:
        """Return the batches of a test; called by the trainer."""
        return self._stage("test")

    def predict_dataloader(self) -> StageLoader:
        """Return the batches of a prediction; called by the trainer."""
        return self._stage("predict")

    def progress(self) -> tuple[int, int, float]:
        """Return the batches of the epoch that Lightning has taken, those that it has trained on, and how many it will take."""
        if self.trainer is None:
            return 0, 0, math.inf
        current: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return current.ready, current.processed, self.trainer.num_training_batches

    def end_evaluation(self) -> None:
        """End the epochs of evaluation that are running, so that they hold no batches and no caches while training goes on."""
        for name, stage in self._stages.items():
            if name != "train":
                stage.end_epoch()

    def end_training(self) -> None:
        """End the epoch of training if Lightning takes no more of its batches, so that its caches are free for evaluation."""
        taken, _, most = self.progress()
        if "train" in self._stages and taken >= most:
            self._stages["train"].end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, also after the loaders were closed; empty before there was one."""
        stage = self._stages.get("train")
        last = stage.state_dict() if isinstance(stage, TrainingLoader) else self._last
        return {} if last is None else {"train": last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position, before the trainer asks for batches."""
        self._restored = state_dict["train"]

    def close(self) -> None:
        """Close all loaders; may be called again. The trainer's next call makes them anew."""
        self._last = self.state_dict().get("train")
        self._restored = None
        stages, self._stages = self._stages, {}
        for stage in stages.values():
            stage.end_epoch()
            stage.loader.close()

    def teardown(self, stage: str) -> None:
        """Close all loaders; called by the trainer at the end."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close all loaders; called by the trainer when it fails, or is interrupted."""
        self.close()
