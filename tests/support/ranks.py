"""Ranks of a gloo group in forks, one of which may be lost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["end", "group"]


@contextlib.contextmanager
def group(rank: int, world_size: int, folder: Path, timeout_s: float = 60) -> Iterator[None]:
    """Be a rank of a gloo group, which meets by a file in ``folder``."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def end(pid: int) -> None:
    """Kill a process, which may be dead or dying, and wait until it holds no lock."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)
