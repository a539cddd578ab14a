"""The ranks of torch's process group, and choices that rank 0 makes for all of them."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Generic, TypeVar

__all__ = ["ChosenByFirst", "process_group"]

T = TypeVar("T")


def process_group() -> tuple[int, int] | None:
    """Get this process's rank and the number of ranks in torch's process group; None if there is no group."""
    distributed = _group()
    return None if distributed is None else (distributed.get_rank(), distributed.get_world_size())


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")  # not imported: there is no process group
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


class ChosenByFirst(Generic[T]):
    """A choice of rank 0, which it hands on to the other ranks of the process group.

    All ranks enter the block. Rank 0 gives its choice in it, for which the others wait as they enter; they find it in ``choice``.
    None: rank 0 made none, or failed, or ``ranks`` are not those of the process group, so that each rank chooses for itself.
    """

    def __init__(self, ranks: tuple[int, int]) -> None:
        self._is_first, self._open = ranks[0] == 0, ranks[1] > 1 and process_group() == ranks
        self.choice: T | None = None

    def give(self, choice: T | None) -> None:
        """Hand the choice of rank 0 on, once; on other ranks nothing happens."""
        if self._is_first and self._open:
            self._open = False
            self._broadcast(choice)

    def _broadcast(self, choice: T | None) -> T | None:
        found: list[Any] = [choice]
        _group().broadcast_object_list(found, src=0)
        chosen: T | None = found[0]
        return chosen

    def __enter__(self) -> ChosenByFirst[T]:
        if self._open and not self._is_first:
            self.choice = self._broadcast(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give(None)
