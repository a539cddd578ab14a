"""Checkpoints of ``featstore train``: the state of a training after its last whole epoch, in a file that is replaced at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from featstore.config import user_path
from featstore.errors import FormatError
from featstore.load.statefile import read_state, write_state
from featstore.storage.lock import FileLock

__all__ = ["Checkpoints"]

KIND = "training"
NAME, LOCK = "checkpoint", "lock"
VERSION = 1


class Checkpoints:
    """The checkpoint of one training, in a directory; a context manager, which keeps other trainings out of the directory.

    The directory is made if it is not there; its parent must be. ``resume``: go on from the checkpoint; where there is none,
    begin. ``epochs`` are those that are trained, each as :class:`~featstore.cli.training.Epoch`; ``losses`` those of the first
    batches.

    The file is written under another name, flushed, and renamed: a kill leaves the checkpoint before it, or after it. Every
    byte is checked when it is read. No pickle. FileExistsError: a checkpoint is there, and ``resume`` is False. BusyError:
    another training uses the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], resume: bool = False) -> None:
        folder = os.path.abspath(user_path(directory))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        self.path = os.path.join(folder, NAME)
        self.epochs: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self._lock = FileLock(os.path.join(folder, LOCK), exclusive=True)
        self._recipe: Mapping[str, Any] = {}
        self._state: dict[str, Any] | None = None
        try:
            if os.path.lexists(self.path):
                if not resume:
                    said = "a checkpoint is there: --resume goes on from it; or remove it, or name another directory"
                    raise FileExistsError(errno.EEXIST, said, self.path)
                self._state = self._read()
                self.epochs, self.losses = list(self._state["epochs"]), list(self._state["losses"])
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        state = read_state(self.path, KIND)
        if state.get("version") != VERSION:
            raise FormatError(f"{self.path} has version {state.get('version')}; this release reads {VERSION}", self.path)
        return state

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Record the inputs that training depends on; ValueError if the checkpoint's training depended on others."""
        self._recipe = recipe = json.loads(json.dumps(recipe))  # as it is read back
        before = recipe if self._state is None else self._state["recipe"]
        for name, value in recipe.items():
            if before.get(name) != value:
                said = f"{self.path} is of a training with {name} {before.get(name)!r}, and now it is {value!r}"
                raise ValueError(f"{said}: give the same, or name another directory")

    def restore(self, parts: Mapping[str, Any], device: torch.device) -> None:
        """Restore the parts of a training (each has ``load_state_dict``) and the random state from the checkpoint.

        Without a checkpoint a first one is written, which also shows that the directory can be written.
        """
        if self._state is None:
            self.save(parts, device, [], [])
            return
        for name, part in parts.items():
            part.load_state_dict(self._state[name])
        torch.set_rng_state(self._state["rng"])
        if device.type == "cuda" and self._state["device_rng"] is not None:
            torch.cuda.set_rng_state(self._state["device_rng"], device)
        self._state = None

    def save(self, parts: Mapping[str, Any], device: torch.device, epochs: list[dict[str, Any]], losses: list[float]) -> None:
        """Replace the checkpoint by the training's present state; after an OSError the previous checkpoint stays.

        CommittedError: the new checkpoint is in place, but a power cut may undo that.
        """
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"version": VERSION, "recipe": self._recipe, "epochs": epochs, "losses": losses, "rng": torch.get_rng_state()}
        state["device_rng"] = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        write_state(self.path, KIND, state)

    def close(self) -> None:
        """Release the directory for other trainings."""
        self._lock.release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
