"""The size of a directory that others are writing to."""

from __future__ import annotations

import os
from pathlib import Path


def bytes_at_one_moment(folder: Path) -> int:
    """Return the bytes that the files below ``folder`` had all at once: two looks in a row saw the same.

    One look alone may count a file under two names, or one that went beside one that came after it.
    """
    last: dict[tuple[int, int], int] | None = None
    while True:
        found = {}
        for where, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.stat(os.path.join(where, name))
                except FileNotFoundError:
                    continue
                # What is allocated beyond a file's end counts, where it is more than the last block.
                allocated = 512 * status.st_blocks if status.st_size > 1 << 16 else 0
                found[status.st_dev, status.st_ino] = max(status.st_size, allocated)
        if found == last:
            return sum(found.values())
        last = found
