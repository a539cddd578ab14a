"""Ranks of a gloo group in forks, one of which may be lost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["end", "group", "held_port"]


@contextlib.contextmanager
def group(rank: int, world_size: int, folder: Path, timeout_s: float = 300) -> Iterator[None]:
    """Be a rank of a gloo group, which meets by a file in ``folder``."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that the kernel gives to nobody else while the context lasts, and that a server may listen on.

    A port that was found and let go of may be another's before the server comes. Here a socket stays bound and does not listen:
    Linux lets one that names the port bind beside it, where both have ``SO_REUSEADDR``, as torch's stores do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def end(pid: int) -> None:
    """Kill a process, which may be dead or dying, and wait until it holds no lock."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)
