"""``threads=`` of a loader: the number of threads of each stage."""

from __future__ import annotations

from collections.abc import Mapping

from featstore.config import check_at_least, listed
from featstore.errors import OptionError

__all__ = ["STAGES", "stage_threads"]

STAGES = {
    "sample": "batches sampled at once, or samples read at once",
    "gather": "threads that copy rows of one batch",
    "read": "threads that read at once, of the dataset",
}


def stage_threads(threads: int | Mapping[str, int] | None, default: int) -> tuple[int, int, int | None]:
    """Return the numbers of threads that sample, copy and read; None for reading: the loader sets no bound.

    Parameters
    ----------
    threads : int, mapping of str to int, or None
        An int is for sampling alone. Stages that are not named have ``default`` threads, and reading has no bound.
    default : int
        The threads of the graph.

    Raises
    ------
    OptionError
        There is no such stage.
    ValueError, TypeError
        Not a number of threads.
    """
    given = dict(threads) if isinstance(threads, Mapping) else {} if threads is None else {"sample": threads}
    for stage, number in given.items():
        if stage not in STAGES:
            raise OptionError("threads", f"there is no stage {stage!r}; the stages are {listed(STAGES)}")
        given[stage] = check_at_least("threads" if not isinstance(threads, Mapping) else f"threads[{stage!r}]", number, 1)
    return given.get("sample", default), given.get("gather", default), given.get("read")
