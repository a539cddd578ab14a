"""``threads=`` of a loader: how many threads each of its stages has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from featstore.config import check_at_least
from featstore.errors import OptionError

__all__ = ["STAGES", "StageThreads", "stage_threads"]

STAGES = {
    "sample": "batches sampled at once, or samples read at once",
    "gather": "threads that copy rows of one batch",
    "read": "threads that read at once, of the dataset",
}


@dataclass(frozen=True)
class StageThreads:
    """Threads of each stage.

    Parameters
    ----------
    sample : int
        Batches sampled at once.
    gather : int
        Threads that copy the rows of a batch.
    read : int, optional
        See :meth:`featstore.storage.reader.Reader.bound`; None: as many as the dataset has by itself.
    """

    sample: int
    gather: int
    read: int | None = None


def stage_threads(threads: int | Mapping[str, int] | None, default: int) -> StageThreads:
    """Return the threads of each stage.

    Parameters
    ----------
    threads : int, mapping of str to int, or None
        An int is for sampling alone; stages that are not named have ``default`` threads, and reading is not bounded.
    default : int
        The graph's.

    Raises
    ------
    OptionError
        No such stage.
    ValueError, TypeError
        Not a number of threads.
    """
    given = dict(threads) if isinstance(threads, Mapping) else {} if threads is None else {"sample": threads}
    for stage, number in given.items():
        if stage not in STAGES:
            raise OptionError("threads", f"there is no stage {stage!r}; the stages are {', '.join(map(repr, STAGES))}")
        given[stage] = check_at_least("threads" if not isinstance(threads, Mapping) else f"threads[{stage!r}]", number, 1)
    return StageThreads(given.get("sample", default), given.get("gather", default), given.get("read"))
