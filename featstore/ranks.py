"""The ranks of torch's process group and of a machine: choices that rank 0 makes, and meetings after steps that all take."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from featstore.config import check_at_least, check_integer, local_ranks

if TYPE_CHECKING:
    import torch

__all__ = ["ChosenByFirst", "Meeting", "check_ranks", "gloo_group", "local_job", "process_group", "sharing_ranks"]

T = TypeVar("T")


def process_group() -> tuple[int, int] | None:
    """Get this process's rank and the number of ranks in torch's process group; None if there is no group."""
    distributed = _group()
    return None if distributed is None else (distributed.get_rank(), distributed.get_world_size())


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")  # not imported: there is no process group
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def gloo_group(timeout_s: float) -> Any:
    """Make a group of gloo's of all ranks; all of them call this, and wait ``timeout_s`` at most for each other."""
    return _group().new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def check_ranks(rank: int | None, world_size: int | None, group: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the rank and the number of ranks: as given, else those of the process ``group``, else of one process.

    ValueError, TypeError: one of the two is given alone, or is no number of a process.
    """
    if rank is None and world_size is None:
        return group or (0, 1)
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size go together, not rank={rank!r} and world_size={world_size!r}")
    rank, world_size = check_integer("rank", rank), check_integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
    return rank, world_size


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


class Meeting:
    """The ranks that make something together, which meet after each step; a context manager. One owner thread.

    All ranks meet as often. If the block raises an Exception on one, the others raise RuntimeError, which names it, where they
    meet next. If a rank is lost, that is torch's error. One rank alone meets nobody.

    Parameters
    ----------
    rank, world_size : int, optional
        By default those of torch's process group, or of one process. ValueError: several, and the process group has others.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        group = process_group()
        self.rank, self.world_size = check_ranks(rank, world_size, group)
        if self.world_size > 1 and group != (self.rank, self.world_size):
            there = "there is no process group" if group is None else f"the process group's are rank={group[0]}, of {group[1]}"
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size}: ranks work together in torch's process group, and {there}; "
                "rank=0, world_size=1 works alone"
            )
        self._is_over = self.world_size == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def meet(self, said: Any = None) -> list[Any]:
        """Say something that pickles to all ranks; return what each of them says, by rank."""
        return [said] if self.world_size == 1 else self._round(None, said)

    def end(self) -> None:
        """Meet once more; what fails after that is each rank's own."""
        self.meet()
        self._is_over = True

    def _round(self, failure: str | None, said: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        self._is_over = True  # unless all goes well: after torch's error no rank can be asked
        _group().all_gather_object(found, (failure, said))
        for rank, (failed, _) in enumerate(found):
            if failed is not None and failure is None:
                raise RuntimeError(f"rank {rank} of {self.world_size} failed: {failed}")
        self._is_over = failure is not None
        return [each for _, each in found]

    def __enter__(self) -> Meeting:
        return self

    def tell(self, error: BaseException | None) -> None:
        """Let the other ranks raise where they meet next if ``error`` is an Exception; leaving the block does so, too."""
        if isinstance(error, Exception) and not self._is_over:
            with contextlib.suppress(RuntimeError):  # torch's: the others know already; this rank's own error is raised
                self._round(f"{type(error).__name__}: {error}", None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tell(error)
