"""The least memory in which files can be opened and read: counted from what the catalog says, before one is opened."""

from __future__ import annotations

from collections.abc import Sequence

from featstore.config import Options, format_size
from featstore.errors import BudgetError
from featstore.storage.pagedsums import kept_from, share_of, table_bytes
from featstore.storage.reader import SCRATCH_STEP, least_queue_bytes
from featstore.storage.writer import FileRecord

__all__ = ["check_memory", "least_memory"]


def check_memory(path: str, files: Sequence[FileRecord], options: Options) -> None:
    """Raise BudgetError, which has the least memory that suffices, where a dataset cannot be opened within ``options.memory``."""
    total = options.memory
    queue, tables = least_queue_bytes(total), _tables_bytes(files, options.verify, total)
    if queue + tables > total:
        raise BudgetError(
            f"a budget of {format_size(total)} is too small for opening {path}: a queue of reads takes {format_size(queue)}, "
            f"checksums {format_size(tables)}",
            least_memory(files, options.verify, total),
        )


def least_memory(files: Sequence[FileRecord], verify: str, total: int) -> int:
    """Return the least memory, of ``total`` bytes or more, in which one queue and the tables of checksums fit.

    Both grow with the memory, tables by steps: one that is kept from some memory on may then take less than its pages took. So
    the memory between two such steps is searched from below, where what is needed only grows.
    """
    share = share_of(file.n_sums_bytes for file in files)
    steps = {kept_from(file.n_sums_bytes, share) for file in files} if verify != "off" else set[int]()
    for end in (*sorted(step for step in steps if step > total), None):
        while True:
            needed = least_queue_bytes(total) + _tables_bytes(files, verify, total)
            if needed <= total:
                return total
            if end is not None and needed >= end:
                break
            total = needed
        total = end
    raise AssertionError("with all tables kept, what is needed is bounded")


def _tables_bytes(files: Sequence[FileRecord], verify: str, total: int) -> int:
    """Return the bytes of all tables of checksums; where pages are checked now, of one table and of rows that are checked."""
    share = share_of(file.n_sums_bytes for file in files)
    tables = [table_bytes(file.n_sums_bytes, file.layout.row_bytes, total, share) for file in files]
    if verify == "open":
        rows = [max(file.layout.row_bytes, 16 * SCRATCH_STEP) for file in files]  # half of what is left, or one row
        return max(map(sum, zip(tables, rows, strict=True)), default=0)
    return sum(tables) if verify == "always" else 0
