"""The ranks of torch's process group and of a machine, and choices that rank 0 makes for all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from featstore.config import check_at_least, local_ranks

if TYPE_CHECKING:
    import torch

__all__ = ["ChosenByFirst", "local_job", "process_group", "sharing_ranks"]

T = TypeVar("T")


def process_group() -> tuple[int, int] | None:
    """Get this process's rank and the number of ranks in torch's process group; None if there is no group."""
    distributed = _group()
    return None if distributed is None else (distributed.get_rank(), distributed.get_world_size())


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")  # not imported: there is no process group
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def local_job() -> str:
    """Identify the job whose processes :func:`local_ranks` counts: by where its process group meets, or by its parent process."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    if os.environ.get("MASTER_PORT"):
        return " ".join(os.environ.get(name, "") for name in names)
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # a number may be used again
    except OSError:
        started = ""  # a parent outside this container
    return f"{parent} {started}"


def sharing_ranks(shared: Any) -> int:
    """Count the processes that share a cache: 0 for False, :func:`local_ranks` for True, or the number itself.

    ValueError for True in a process group whose launcher does not say how many of its ranks are on this machine.
    """
    if type(shared).__name__ not in ("bool", "bool_"):
        return check_at_least("shared", shared, 1)
    if not shared:
        return 0
    n, group = local_ranks(), process_group()
    if n == 1 and "LOCAL_WORLD_SIZE" not in os.environ and group is not None and group[1] > 1:
        raise ValueError(
            f"shared=True: LOCAL_WORLD_SIZE does not say how many of the group's {group[1]} ranks are on this machine; "
            "give their number, as in shared=2"
        )
    return n


class ChosenByFirst(Generic[T]):
    """A choice of rank 0, which it hands on to the other ranks of the process group.

    All ranks enter the block. Rank 0 gives its choice in it, for which the others wait as they enter; they find it in ``choice``.
    None: rank 0 made none, or failed, or ``ranks`` are not those of the process group, so that each rank chooses for itself.
    """

    def __init__(self, ranks: tuple[int, int], device: torch.device | None = None) -> None:
        self._is_first, self._open = ranks[0] == 0, ranks[1] > 1 and process_group() == ranks
        self._device = device
        self.choice: T | None = None

    def give(self, choice: T | None) -> None:
        """Hand the choice of rank 0 on, once; on other ranks nothing happens."""
        if self._is_first and self._open:
            self._open = False
            self._broadcast(choice)

    def _broadcast(self, choice: T | None) -> T | None:
        found, group = list[Any]([choice]), _group()
        # Without a device NCCL would take the current one, which is the same in all processes that have set none.
        on_device = self._device is not None and self._device.type == "cuda" and group.get_backend() == "nccl"
        group.broadcast_object_list(found, src=0, device=self._device if on_device else None)
        chosen: T | None = found[0]
        return chosen

    def __enter__(self) -> ChosenByFirst[T]:
        if self._open and not self._is_first:
            self.choice = self._broadcast(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give(None)
