"""Bytes that the kernel says were read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from featstore.storage.rowfile import RowFile


def kernel_bytes() -> int:
    """Bytes that this process had the kernel fetch from storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def agree_with_the_kernel(file: RowFile, read: Callable[[], object]) -> int:
    """Call ``read``, and return the bytes that were read: as many as the kernel says.

    It also counts pages of the program that it had to fetch anew, where memory is short: one call of several must agree.
    """
    for _ in range(5):
        before, counted = kernel_bytes(), file.stats.bytes_read
        read()
        own = file.stats.bytes_read - counted
        others = kernel_bytes() - before - own
        assert others >= 0
        if not others:
            return own
    raise AssertionError(f"the kernel read {others} bytes more than the {own} that were counted")
